// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package invocation

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health/grpc_health_v1"

	controllerv1 "github.com/sluice-net/sluice/proto/gen/sluice/controller/v1"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	dnsv1 "github.com/sluice-net/sluice/proto/gen/sluice/dns/v1"
	hubblev1 "github.com/sluice-net/sluice/proto/gen/sluice/hubble/v1"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	ipamv1 "github.com/sluice-net/sluice/proto/gen/sluice/ipam/v1"
	lbv1 "github.com/sluice-net/sluice/proto/gen/sluice/loadbalancer/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	sharesv1 "github.com/sluice-net/sluice/proto/gen/sluice/shares/v1"
	statusv1 "github.com/sluice-net/sluice/proto/gen/sluice/status/v1"
	storev1 "github.com/sluice-net/sluice/proto/gen/sluice/store/v1"
)

// Service is a gRPC service of the node: the name of its socket and the constructor of its client.
type Service[C any] struct {
	name   string
	client func(grpc.ClientConnInterface) C
}

// The services of a node.
var (
	Identity     = Service[identityv1.IdentityServiceClient]{"identity", identityv1.NewIdentityServiceClient}
	Cluster      = Service[identityv1.ClusterServiceClient]{"identity", identityv1.NewClusterServiceClient}
	IPAM         = Service[ipamv1.IPAMServiceClient]{"ipam", ipamv1.NewIPAMServiceClient}
	Policy       = Service[policyv1.PolicyServiceClient]{"policy", policyv1.NewPolicyServiceClient}
	LoadBalancer = Service[lbv1.LoadBalancerServiceClient]{"loadbalancer", lbv1.NewLoadBalancerServiceClient}
	Controller   = Service[controllerv1.ControllerServiceClient]{"controller", controllerv1.NewControllerServiceClient}
	// ControllerHealth says whether sluice-controller is ready.
	ControllerHealth = Service[grpc_health_v1.HealthClient]{"controller", grpc_health_v1.NewHealthClient}
	Datapath         = Service[datapathv1.DatapathServiceClient]{"datapath", datapathv1.NewDatapathServiceClient}
	Connections      = Service[datapathv1.ConnectionServiceClient]{"datapath", datapathv1.NewConnectionServiceClient}
	Shares           = []Service[sharesv1.SharesServiceClient]{
		{"policy", sharesv1.NewSharesServiceClient},
		{"loadbalancer", sharesv1.NewSharesServiceClient},
		{"identity", sharesv1.NewSharesServiceClient},
		{"datapath", sharesv1.NewSharesServiceClient},
	}
	Store    = Service[storev1.StoreServiceClient]{"store", storev1.NewStoreServiceClient}
	Observer = Service[datapathv1.ObserverServiceClient]{"datapath", datapathv1.NewObserverServiceClient}
	// DNS is sluice-dns, which a node may lack: call Runs before.
	DNS = Service[dnsv1.DNSServiceClient]{"dns", dnsv1.NewDNSServiceClient}
	// HTTP is sluice-http, which a node may lack, too.
	HTTP    = Service[statusv1.ProcessServiceClient]{"http", statusv1.NewProcessServiceClient}
	History = Service[hubblev1.HistoryServiceClient]{"hubble", hubblev1.NewHistoryServiceClient}
	Page    = Service[hubblev1.PageServiceClient]{"hubble", hubblev1.NewPageServiceClient}
	// Stored has the events of days, if sluice-hubble runs.
	Stored = Service[datapathv1.ObserverServiceClient]{"hubble", datapathv1.NewObserverServiceClient}
)

// Runs reports whether the socket of a service exists.
func Runs[C any](inv *Invocation, s Service[C]) bool {
	path, err := inv.Socket(s.name)
	if err != nil {
		return false
	}
	_, err = os.Stat(path)
	return !errors.Is(err, fs.ErrNotExist)
}

// Name returns the name of the service's process without "sluice-".
func (s Service[C]) Name() string { return s.name }

// Connect returns a client for several calls. The caller closes the connection.
func Connect[C any](inv *Invocation, s Service[C]) (*grpc.ClientConn, C, error) {
	conn, err := inv.Dial(s.name)
	if err != nil {
		var none C
		return nil, none, err
	}
	return conn, s.client(conn), nil
}

// Services are the names of a node's processes that have a socket.
var Services = []string{"identity", "ipam", "policy", "loadbalancer", "datapath", "dns"}

// Components are Services, and processes that not every node has.
var Components = append(slices.Clone(Services), "http", "controller", "hubble", "store")

// ProcessOf returns the ProcessService of a component. The name may begin with "sluice-".
func ProcessOf(name string) (s Service[statusv1.ProcessServiceClient], ok bool) {
	name = strings.TrimPrefix(name, "sluice-")
	s = Service[statusv1.ProcessServiceClient]{name, statusv1.NewProcessServiceClient}
	return s, slices.Contains(Components, name)
}

// Ask makes one call and returns its answer. It takes no longer than --timeout, unless ctx has another deadline.
func Ask[C, Q, R any](ctx context.Context, inv *Invocation, s Service[C],
	call func(C, context.Context, *Q, ...grpc.CallOption) (R, error), request *Q,
) (answer R, err error) {
	conn, err := inv.Dial(s.name)
	if err != nil {
		return answer, err
	}
	defer conn.Close()
	return call(s.client(conn), ctx, request)
}

// Each calls f for every message of a streamed answer. The whole answer must arrive within --timeout.
func Each[C, Q, R any](ctx context.Context, inv *Invocation, s Service[C],
	call func(C, context.Context, *Q, ...grpc.CallOption) (grpc.ServerStreamingClient[R], error), request *Q, f func(*R),
) error {
	ctx, cancel := context.WithTimeout(ctx, inv.Timeout)
	defer cancel()
	return Stream(ctx, inv, s, call, request, func(m *R) error {
		f(m)
		return nil
	})
}

// Stream calls f for every message of a streamed answer. It returns the first error of f, and has no timeout other
// than ctx.
func Stream[C, Q, R any](ctx context.Context, inv *Invocation, s Service[C],
	call func(C, context.Context, *Q, ...grpc.CallOption) (grpc.ServerStreamingClient[R], error), request *Q,
	f func(*R) error,
) error {
	conn, err := inv.Dial(s.name)
	if err != nil {
		return err
	}
	defer conn.Close()
	stream, err := call(s.client(conn), ctx, request)
	if err != nil {
		return err
	}
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := f(m); err != nil {
			return err
		}
	}
}
