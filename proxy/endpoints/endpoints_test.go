// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package endpoints

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/rpc/client"
	"github.com/sluice-net/sluice/model/shares"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/proxy/pods"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// datapath simulates sluice-datapath.
type datapath struct {
	datapathv1.UnimplementedDatapathServiceServer
	lists chan []*datapathv1.WatchEndpointsResponse // messages to send; nil: the stream ends, its token is lost
}

func (n *datapath) WatchEndpoints(
	r *datapathv1.WatchEndpointsRequest, stream grpc.ServerStreamingServer[datapathv1.WatchEndpointsResponse],
) error {
	if len(r.GetResumeToken()) > 0 {
		return status.Error(codes.OutOfRange, "the token is of another run")
	}
	for {
		select {
		case list := <-n.lists:
			if list == nil {
				return status.Error(codes.Unavailable, "stopping")
			}
			for _, m := range list {
				if err := stream.Send(m); err != nil {
					return err
				}
			}
		case <-stream.Context().Done():
			return stream.Context().Err()
		}
	}
}

func start(t *testing.T) (*datapath, *grpc.ClientConn) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	n, s := &datapath{}, grpc.NewServer()
	datapathv1.RegisterDatapathServiceServer(s, n)
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	conn, err := client.Dial(path, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.Stop()
		if err := errors.Join(conn.Close(), <-served); err != nil {
			t.Error(err)
		}
	})
	return n, conn
}

func TestEndpointsAreFollowed(t *testing.T) {
	n, conn := start(t)
	n.lists = make(chan []*datapathv1.WatchEndpointsResponse)
	left := make(chan uint16, 10)
	p := pods.New(shares.Settings{}, func(endpoint uint16) { left <- endpoint })
	e := New(conn, p, "example.com/tenant", slog.New(slog.DiscardHandler))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- e.Run(ctx) }()
	upsert := func(container string, id uint32, namespace string) *datapathv1.WatchEndpointsResponse {
		e := &datapathv1.Endpoint{
			Owner: &workloadv1.Owner{ContainerId: container, InterfaceName: "eth0"}, EndpointIndex: id,
			Identity: 300, Labels: []*workloadv1.Label{
				{Source: "k8s", Key: "io.kubernetes.pod.namespace", Value: namespace}, {Source: "cni", Key: "a", Value: "b"},
			},
		}
		if namespace == "acme-1" {
			e.Labels = append(e.Labels, &workloadv1.Label{
				Source: "k8s", Key: "io.cilium.k8s.namespace.labels.example.com/tenant", Value: "acme",
			})
		}
		return &datapathv1.WatchEndpointsResponse{Event: &datapathv1.WatchEndpointsResponse_Upsert{Upsert: e}}
	}
	complete := &datapathv1.WatchEndpointsResponse{
		ResumeToken: []byte("1"),
		Event:       &datapathv1.WatchEndpointsResponse_Bookmark{Bookmark: &datapathv1.Bookmark{SnapshotComplete: true}},
	}
	tenant := func(id uint16, want string) {
		t.Helper()
		for began := time.Now(); p.Get(id).Tenant != want; time.Sleep(time.Millisecond) {
			if time.Since(began) > time.Minute {
				t.Fatalf("endpoint %d: tenant %q, want %q", id, p.Get(id).Tenant, want)
			}
		}
	}
	n.lists <- []*datapathv1.WatchEndpointsResponse{upsert("a", 5, "shop"), upsert("b", 6, "bank"), complete}
	tenant(5, "namespace shop")
	tenant(6, "namespace bank")
	if got := p.Get(5).Namespace; got != "shop" {
		t.Errorf("namespace %q", got)
	}
	n.lists <- []*datapathv1.WatchEndpointsResponse{upsert("d", 7, "acme-1")}
	tenant(7, "tenant acme")
	without := upsert("d", 7, "acme-1")
	without.GetUpsert().Identity = 0 // the labels of the endpoint are not known yet
	n.lists <- []*datapathv1.WatchEndpointsResponse{without}
	tenant(7, pods.Unknown.Tenant)
	if id := <-left; id != 7 {
		t.Errorf("endpoint %d left", id)
	}
	a := &workloadv1.Owner{ContainerId: "a", InterfaceName: "eth0"}
	n.lists <- []*datapathv1.WatchEndpointsResponse{
		{Event: &datapathv1.WatchEndpointsResponse_Delete{Delete: a}},
		upsert("c", 5, "mail"),
	}
	tenant(5, "namespace mail")
	n.lists <- nil // the watch lists again, without b
	n.lists <- []*datapathv1.WatchEndpointsResponse{upsert("c", 5, "mail"), complete}
	tenant(6, pods.Unknown.Tenant)
	if a, b := <-left, <-left; a != 5 || b != 6 || len(left) != 0 {
		t.Errorf("left %d, %d and %d more", a, b, len(left))
	}
	if e.Err() != nil {
		t.Error(e.Err())
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}
