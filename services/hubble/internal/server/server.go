// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package server implements the API of Hubble: observer.Observer and peer.Peer.
package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/sluice-net/sluice/kit/rpc"
	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
	"github.com/sluice-net/sluice/model/shares"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	hubblev1 "github.com/sluice-net/sluice/proto/gen/sluice/hubble/v1"
	statusv1 "github.com/sluice-net/sluice/proto/gen/sluice/status/v1"
	"github.com/sluice-net/sluice/proto/wire"
	"github.com/sluice-net/sluice/services/hubble/internal/api/flow"
	"github.com/sluice-net/sluice/services/hubble/internal/api/observer"
	"github.com/sluice-net/sluice/services/hubble/internal/api/peer"
	"github.com/sluice-net/sluice/services/hubble/internal/api/relay"
	"github.com/sluice-net/sluice/services/hubble/internal/client/peers"
	"github.com/sluice-net/sluice/services/hubble/internal/history"
	"github.com/sluice-net/sluice/services/hubble/internal/hubbleflow"
	"github.com/sluice-net/sluice/services/hubble/internal/server/reader"
)

// HealthName is the service name in the health checks of the hubble CLI.
const HealthName = "hubble.server.Observer"

// scans is the number of calls that may read the history at the same time. Each has a few segments in memory, and a
// turn of limited duration.
const scans = 2

// Options describe a Server. All fields but ServerName and Page are required.
type Options struct {
	Version string
	Started time.Time
	Now     func() time.Time
	History *history.History
	// Flow returns the flow of a record that is not about losses; nil if the record contains another event.
	Flow func(record []byte) (*flow.Flow, error)
	// Node returns the name of this node.
	Node func() string
	// Rate returns the flows per second in the last minute.
	Rate func() float64
	// Source returns the reason why no events arrive; nil while the stream of the datapath is open.
	Source func() error
	// Address is the address at which peers reach this server: "unix://…", or host:port. In the second case, the
	// server has a certificate for the name of the node.
	Address string
	// ServerName is the name in the certificates of all nodes; empty: the name of each node.
	ServerName string
	// Parts define the tenants.
	Parts hubbleflow.Parts
	// Others returns the other nodes of the cluster, sorted by name, and a channel that is closed when they change.
	Others func() ([]peers.Node, <-chan struct{})
	// Page returns the URL of the web page; empty without a page. nil: there is no page.
	Page func() string
	// Process describes the settings of this process.
	Process wire.Process
}

// Server implements the API.
type Server struct {
	observer.UnimplementedObserverServer
	peer.UnimplementedPeerServer
	o     Options
	scans chan struct{}
}

// New returns a Server.
func New(o Options) *Server { return &Server{o: o, scans: make(chan struct{}, scans)} }

// Register adds the services.
func (s *Server) Register(r grpc.ServiceRegistrar) {
	observer.RegisterObserverServer(r, s)
	peer.RegisterPeerServer(r, s)
	statusv1.RegisterProcessServiceServer(r, s.o.Process)
	datapathv1.RegisterObserverServiceServer(r, stored{Server: s})
	hubblev1.RegisterHistoryServiceServer(r, deletions{history: s.o.History})
	hubblev1.RegisterPageServiceServer(r, pages{url: s.o.Page})
}

// RegisterRemote adds the services for clients of other machines.
func (s *Server) RegisterRemote(r grpc.ServiceRegistrar) {
	observer.RegisterObserverServer(r, s)
	peer.RegisterPeerServer(r, s)
}

// Methods returns who may call which method: the group may read all flows.
func Methods() rpc.Methods {
	streams := rpc.Method{Access: rpc.Group(), Limit: rpc.Limit{InFlight: 32}}
	calls := rpc.Method{Access: rpc.Group(), Limit: rpc.Limit{InFlight: 8, Waiting: 64}}
	return rpc.Methods{
		statusv1.ProcessService_GetConfig_FullMethodName:   {Access: rpc.Group()},
		statusv1.ProcessService_SetLogLevel_FullMethodName: {Access: rpc.Root()},
		observer.Observer_GetFlows_FullMethodName:          streams,
		observer.Observer_GetAgentEvents_FullMethodName:    calls,
		observer.Observer_GetDebugEvents_FullMethodName:    calls,
		observer.Observer_GetNodes_FullMethodName:          calls,
		observer.Observer_GetNamespaces_FullMethodName:     calls,
		observer.Observer_ServerStatus_FullMethodName:      calls,
		peer.Peer_Notify_FullMethodName:                    streams,
		datapathv1.ObserverService_Observe_FullMethodName:  streams,
		datapathv1.ObserverService_Explain_FullMethodName:  calls,
		hubblev1.PageService_GetPage_FullMethodName:        {Access: rpc.Group()},
		hubblev1.HistoryService_DeleteFlows_FullMethodName: {Access: rpc.Root(), Limit: rpc.Limit{InFlight: 1, Waiting: 4}},
	}
}

// GetAgentEvents implements the API: Sluice has no such events.
func (*Server) GetAgentEvents(
	*observer.GetAgentEventsRequest, grpc.ServerStreamingServer[observer.GetAgentEventsResponse],
) error {
	return status.Error(codes.Unimplemented, "Sluice has no events of an agent; use GetFlows")
}

// GetDebugEvents implements the API: Sluice has no such events.
func (*Server) GetDebugEvents(
	*observer.GetDebugEventsRequest, grpc.ServerStreamingServer[observer.GetDebugEventsResponse],
) error {
	return status.Error(codes.Unimplemented, "Sluice has no debug events; use GetFlows")
}

// ServerStatus implements the API. A client with the certificate of a tenant gets only the numbers of this tenant's
// flows.
func (s *Server) ServerStatus(
	ctx context.Context, _ *observer.ServerStatusRequest,
) (*observer.ServerStatusResponse, error) {
	view, err := s.view(ctx)
	if err != nil {
		return nil, err
	}
	st, rate := s.status(view), 0.0
	if view.All() {
		rate = s.o.Rate()
	}
	return &observer.ServerStatusResponse{
		NumFlows: st.Records, MaxFlows: capacity(st), SeenFlows: st.Seen, UptimeNs: s.uptime(),
		Version: s.o.Version, FlowsRate: rate,
	}, nil
}

// view returns the view of the client of a call.
func (s *Server) view(ctx context.Context) (hubbleflow.View, error) {
	r, err := reader.Of(ctx)
	switch {
	case err != nil:
		return hubbleflow.View{}, err
	case r.All:
		return s.o.Parts.All(), nil
	case r.Tenant.Kind() == shares.KindNamespace && s.o.Parts.Settings.Together:
		return hubbleflow.View{}, status.Errorf(codes.PermissionDenied, "the certificate is for %s, but "+
			"shares.unlabelled is together: all namespaces without the label %s are one tenant, which has no certificates",
			r.Tenant, s.o.Parts.Settings.Label())
	}
	return s.o.Parts.Only(r.Tenant), nil
}

// status returns the status of the history in a view. For one tenant, it contains only the records in the tenant's
// own parts, and nothing that depends on flows of other tenants.
func (s *Server) status(view hubbleflow.View) history.Status {
	st := s.o.History.Status()
	if view.All() {
		return st
	}
	own := history.Status{}
	for _, p := range st.Parts {
		if slices.Contains(view.Parts(), p.Name) {
			own.Records += p.Records
		}
	}
	return own
}

func (s *Server) uptime() uint64 { return uint64(max(0, s.o.Now().Sub(s.o.Started))) }

// capacity estimates how many flows the history can keep, from the mean size of the stored flows.
func capacity(st history.Status) uint64 {
	switch {
	case st.MaxBytes == 0: // the status is for one tenant
		return st.Records
	case st.Bytes == 0 || st.Records == 0:
		return max(history.Recent, st.Records)
	}
	return max(st.Records, uint64(float64(st.Records)/float64(st.Bytes)*float64(st.MaxBytes)))
}

// GetNodes implements the API. Only the state of this node is known; hubble-relay queries every node. A client with
// the certificate of a tenant gets only this node.
func (s *Server) GetNodes(ctx context.Context, _ *observer.GetNodesRequest) (*observer.GetNodesResponse, error) {
	view, err := s.view(ctx)
	if err != nil {
		return nil, err
	}
	st := s.status(view)
	state := relay.NodeState_NODE_CONNECTED
	if s.o.Source() != nil {
		state = relay.NodeState_NODE_UNAVAILABLE
	}
	out := &observer.GetNodesResponse{Nodes: []*observer.Node{{
		Name: s.o.Node(), Version: s.o.Version, Address: s.o.Address, State: state, Tls: s.tls(s.o.Node()),
		UptimeNs: s.uptime(), NumFlows: st.Records, MaxFlows: capacity(st), SeenFlows: st.Seen,
	}}}
	if !view.All() {
		return out, nil
	}
	others, _ := s.others()
	for _, n := range others {
		out.Nodes = append(out.Nodes, &observer.Node{
			Name: n.Name, Version: n.Version, Address: s.addressOf(n), State: relay.NodeState_UNKNOWN_NODE_STATE,
			Tls: s.tls(n.Name),
		})
	}
	return out, nil
}

// remote reports whether peers reach this server over TCP.
func (s *Server) remote() bool { return !strings.HasPrefix(s.o.Address, "unix:") }

// others returns the other nodes. It omits a node with the same name as this node, because names of peers must be
// unique.
func (s *Server) others() ([]peers.Node, <-chan struct{}) {
	all, changed := s.o.Others()
	return slices.DeleteFunc(all, func(n peers.Node) bool { return n.Name == s.o.Node() }), changed
}

// serverName returns the name in the certificate of a node.
func (s *Server) serverName(node string) string { return cmp.Or(s.o.ServerName, node) }

// tls returns the TLS settings for connections to a node. It assumes that every node has the same settings as this
// node.
func (s *Server) tls(node string) *observer.TLS {
	if !s.remote() {
		return &observer.TLS{}
	}
	return &observer.TLS{Enabled: true, ServerName: s.serverName(node)}
}

// addressOf returns the address of the service on another node, which is assumed to have the same settings as this
// node. It is empty if this node does not listen for other machines. The family of this node's address is preferred.
func (s *Server) addressOf(n peers.Node) string {
	if !s.remote() || len(n.Addresses) == 0 {
		return ""
	}
	host, port, err := net.SplitHostPort(s.o.Address)
	if err != nil {
		return ""
	}
	address := n.Addresses[0]
	if own, err := netip.ParseAddr(host); err == nil {
		for _, a := range n.Addresses {
			if a.Is4() == own.Is4() {
				address = a
				break
			}
		}
	}
	return net.JoinHostPort(address.String(), port)
}

// GetNamespaces implements the API.
func (s *Server) GetNamespaces(
	ctx context.Context, _ *observer.GetNamespacesRequest,
) (*observer.GetNamespacesResponse, error) {
	view, err := s.view(ctx)
	if err != nil {
		return nil, err
	}
	after := s.o.Now().Add(-time.Hour)
	var found []string
	if view.All() {
		found = s.o.History.Namespaces(after)
	} else if found, err = s.namespaces(ctx, view, after); err != nil {
		return nil, err
	}
	out := &observer.GetNamespacesResponse{}
	for _, name := range found {
		out.Namespaces = append(out.Namespaces, &observer.Namespace{Namespace: name})
	}
	return out, nil
}

// namespaces returns the namespaces of a tenant in flows after a time. It reads the flows, because the indices of the
// history do not contain the tenants of namespaces.
func (s *Server) namespaces(ctx context.Context, view hubbleflow.View, after time.Time) ([]string, error) {
	a := &reading{Server: s, since: after}
	found := make(map[string]bool)
	for next, last := uint64(1), s.o.History.Last(); next <= last; {
		over, done, err := a.turn(ctx)
		if err != nil {
			return nil, err
		}
		from := next
		next = last + 1
		for r := range s.o.History.Forward(ctx, a.query(from, last)) {
			if f, err := s.decode(r); err == nil && f != nil && !r.Loss && !r.Time.Before(after) {
				for _, name := range view.Namespaces(f) {
					found[name] = true
				}
			}
			if over() {
				next = r.Number + 1
				break
			}
		}
		done()
		if err := contextError(ctx); err != nil {
			return nil, err
		}
	}
	return slices.Sorted(maps.Keys(found)), nil
}

// Notify implements the API. It sends every node of the cluster, beginning with this node, and then each change.
// Changes that happen while the client does not read are merged.
func (s *Server) Notify(_ *peer.NotifyRequest, stream grpc.ServerStreamingServer[peer.ChangeNotification]) error {
	view, err := s.view(stream.Context())
	if err != nil {
		return err
	}
	if !view.All() {
		return status.Error(codes.PermissionDenied, "peers are for relays; a relay needs a certificate for all tenants")
	}
	sent := make(map[string]*peer.ChangeNotification)
	for {
		others, changed := s.others()
		now := []*peer.ChangeNotification{s.notification(s.o.Node(), s.o.Address)}
		for _, n := range others {
			now = append(now, s.notification(n.Name, s.addressOf(n)))
		}
		if err := notify(stream, sent, now); err != nil {
			return err
		}
		select {
		case <-changed:
		case <-stream.Context().Done():
			return status.FromContextError(stream.Context().Err()).Err()
		}
	}
}

func (s *Server) notification(name, address string) *peer.ChangeNotification {
	n := &peer.ChangeNotification{Name: name, Address: address, Type: peer.ChangeNotificationType_PEER_ADDED}
	if s.remote() {
		n.Tls = &peer.TLS{ServerName: s.serverName(name)}
	}
	return n
}

// notify sends the differences between the nodes that were sent before and the current nodes.
func notify(
	stream grpc.ServerStreamingServer[peer.ChangeNotification], sent map[string]*peer.ChangeNotification,
	now []*peer.ChangeNotification,
) error {
	present := make(map[string]bool)
	for _, n := range now {
		present[n.GetName()] = true
	}
	for _, name := range slices.Sorted(maps.Keys(sent)) {
		if present[name] {
			continue
		}
		gone := sent[name]
		delete(sent, name)
		gone.Type = peer.ChangeNotificationType_PEER_DELETED
		if err := stream.Send(gone); err != nil {
			return err
		}
	}
	for _, n := range now {
		before := sent[n.GetName()]
		if before != nil && before.GetAddress() == n.GetAddress() {
			continue
		}
		sent[n.GetName()] = n
		message := proto.CloneOf(n)
		if before != nil {
			message.Type = peer.ChangeNotificationType_PEER_UPDATED
		}
		if err := stream.Send(message); err != nil {
			return err
		}
	}
	return nil
}

// invalid returns the status for a request with a mistake in a field.
func invalid(field string, err error) error {
	return rpcerr.New(codes.InvalidArgument, rpcerr.InvalidMessage, fmt.Errorf("%s: %w", field, err),
		rpcerr.Field(field, err.Error()))
}

// errFirstAndFollow is the reason for refusing a request that sets both first and follow.
var errFirstAndFollow = errors.New("cannot be combined with follow")
