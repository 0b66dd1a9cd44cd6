// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"fmt"
	"net"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"

	"github.com/cilium/ebpf"
	"google.golang.org/grpc"

	rpcclient "github.com/sluice-net/sluice/kit/rpc/client"
	"github.com/sluice-net/sluice/kit/servicetest"
	loadbalancerv1 "github.com/sluice-net/sluice/proto/gen/sluice/loadbalancer/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/client"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/record"
	"github.com/sluice-net/sluice/services/datapath/internal/service/servicemap"
)

// balancer is a sluice-loadbalancer that sends one snapshot to each subscriber and forwards the messages that it
// receives.
type balancer struct {
	loadbalancerv1.UnimplementedLoadBalancerServiceServer
	snapshot *loadbalancerv1.WatchFrontendsResponse
	heard    chan *loadbalancerv1.WatchFrontendsRequest
}

func (b *balancer) WatchFrontends(
	stream grpc.BidiStreamingServer[loadbalancerv1.WatchFrontendsRequest, loadbalancerv1.WatchFrontendsResponse],
) error {
	if err := stream.Send(b.snapshot); err != nil {
		return err
	}
	for {
		m, err := stream.Recv()
		if err != nil {
			return err
		}
		select {
		case b.heard <- m:
		case <-stream.Context().Done():
			return stream.Context().Err()
		}
	}
}

// serve serves the snapshot at a socket until stop is called.
func (b *balancer) serve(t *testing.T, path string) (stop func()) {
	t.Helper()
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	srv := grpc.NewServer(grpc.WaitForHandlers(true)) // no handler sends to heard after stop
	loadbalancerv1.RegisterLoadBalancerServiceServer(srv, b)
	served := make(chan struct{})
	go func() { defer close(served); _ = srv.Serve(l) }()
	stop = sync.OnceFunc(func() { srv.Stop(); <-served })
	t.Cleanup(stop)
	return stop
}

// until waits until the datapath has acknowledged that a barrier is enforced and that removed backends are no longer
// used.
func (b *balancer) until(seq uint64) {
	for m := range b.heard {
		if m.GetAck().GetEnforced() == seq && m.GetAck().GetEnded() == seq {
			return
		}
	}
}

// frontendsOf returns a snapshot with one frontend per address, each with one backend.
func frontendsOf(run string, seq uint64, addrs ...string) *loadbalancerv1.WatchFrontendsResponse {
	m := &loadbalancerv1.WatchFrontendsResponse{}
	for _, a := range addrs {
		backend := "10.99.0.9"
		if strings.Contains(a, ":") {
			backend = "fd00:99::9"
		}
		m.Steps = append(m.Steps, &loadbalancerv1.FrontendStep{Step: &loadbalancerv1.FrontendStep_Upsert{
			Upsert: &loadbalancerv1.Frontend{
				Key:  &loadbalancerv1.FrontendKey{Address: a, Port: 80, Protocol: netv1.Protocol_PROTOCOL_TCP},
				Kind: loadbalancerv1.FrontendKind_FRONTEND_KIND_CLUSTER_IP, Namespace: "shop", Name: "web",
				Inside: &loadbalancerv1.BackendList{
					Backends:  []*loadbalancerv1.Backend{{Address: backend, Port: 8080}},
					WhenEmpty: loadbalancerv1.EmptyAction_EMPTY_ACTION_REJECT,
				},
			},
		}})
	}
	m.Steps = append(m.Steps, &loadbalancerv1.FrontendStep{Step: &loadbalancerv1.FrontendStep_Barrier{
		Barrier: &loadbalancerv1.Barrier{
			Incarnation: []byte(
				run,
			), Seq: seq, Revision: seq, SnapshotComplete: true, State: []byte("state"), SourcesComplete: true,
		},
	}})
	return m
}

// TestKernelServicesStayWhileEitherSideIsAway stops sluice-loadbalancer or the datapath. The kernel keeps translating
// with the same service IDs.
func TestKernelServicesStayWhileEitherSideIsAway(t *testing.T) {
	w := newWorld(t)
	socket := filepath.Join(t.TempDir(), "lb.sock")
	b := &balancer{heard: make(chan *loadbalancerv1.WatchFrontendsRequest)}
	b.snapshot = frontendsOf("first run", 7, "10.96.0.1", "10.96.0.2", "fd96::1")
	stop := b.serve(t, socket)
	dial := func() {
		cc, err := rpcclient.Dial(socket, rpcclient.Options{})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = cc.Close() })
		w.frontends = client.NewLoadBalancer(cc)
	}
	dial()
	w.state = record.OpenFrontends(filepath.Join(w.dir, "frontends.json"))
	w.start(false)
	b.until(7)
	list := func() []servicemap.Frontend {
		t.Helper()
		fs, err := w.node.Kernel.Services.List()
		if err != nil {
			t.Fatal(err)
		}
		return fs
	}
	before := list()
	if len(before) != 3 || before[0].Service != "shop/web" || before[0].Inside.Backends[0].String() != "10.99.0.9:8080" ||
		before[2].Inside.Backends[0].String() != "[fd00:99::9]:8080" {
		t.Fatalf("the kernel has %+v", before)
	}
	var dumped []string
	err := w.node.Kernel.Dump("sl_fe4", func(key, value string) error { dumped = append(dumped, key); return nil })
	if err != nil || len(dumped) != 4 { // each frontend and its address
		t.Errorf("sl_fe4 has %q, %v", dumped, err)
	}
	servicetest.Eventually(t, "programs of earlier revisions have ended", func() bool {
		return w.node.Services.Frontends.Status().Ended == 7
	})
	if st := w.node.Services.Frontends.Status(); st.Revision != 7 || !st.Complete {
		t.Errorf("status %+v", st)
	}

	stop()
	w.stop()
	dial()
	w.start(false)
	adopted := list()
	for i := range adopted {
		// unknown until the service sends them again
		adopted[i].Service, adopted[i].Kind = before[i].Service, before[i].Kind
	}
	if !reflect.DeepEqual(adopted, before) {
		t.Errorf("after a restart without the service the kernel has %+v, want %+v", adopted, before)
	}

	b.snapshot = frontendsOf("second run", 3, "10.96.0.2", "fd96::1")
	b.serve(t, socket)
	b.until(3)
	after := list()
	if !reflect.DeepEqual(after, before[1:]) {
		t.Errorf("the kernel has %+v, want %+v", after, before[1:])
	}
	if findings, err := w.node.Kernel.Services.Audit(false); len(findings) > 0 || err != nil {
		t.Errorf("audit: %q, %v", findings, err)
	}
	// The ID of the removed frontend is free soon, because no socket uses it.
	servicetest.EventuallyNil(t, "the ID of the removed frontend is free", func() error {
		if err := w.node.Services.FreeNumbers(t.Context()); err != nil {
			return err
		}
		n, err := w.node.Kernel.Services.Counts()
		if err == nil && (n.Resting != 0 || n.Frontends != 2) {
			err = fmt.Errorf("IDs in use: %+v, want two frontends and no ID in quarantine", n)
		}
		return err
	})

	// the node's audit restores entries that another program removed: the entry of the frontend and the entry of its
	// address
	m := w.node.Kernel.Pins.Map("sl_fe4")
	removed := map[bpf.MapsSlFeKey4]bpf.MapsSlFe{}
	var k bpf.MapsSlFeKey4
	var v bpf.MapsSlFe
	for it := m.Iterate(); it.Next(&k, &v); {
		removed[k] = v
	}
	for k := range removed {
		if err := m.Delete(&k); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.node.Endpoints.Auditor.Audit(t.Context(), true); err != nil {
		t.Errorf("audit: %v", err)
	}
	for k, was := range removed {
		if err := m.Lookup(&k, &v); err != nil || v != was || v.Inside != 0 && v.Inside != after[0].Inside.Number {
			t.Errorf("the removed key %+v has the value %+v, %v", k, v, err)
		}
	}
	if len(removed) != 2 {
		t.Errorf("removed were %+v", removed)
	}

	// in mode off, no entries of services remain
	w.stop()
	w.frontends = nil
	w.start(false)
	if fs := list(); len(fs) != 0 {
		t.Errorf("without services the kernel has %+v", fs)
	}
}

// TestKernelConnectionsNameNumbersOfServices tests which IDs entries refer to: a connection refers to its front, a
// translation to its front and its backend, in both families.
func TestKernelConnectionsNameNumbersOfServices(t *testing.T) {
	w := newWorld(t)
	w.frontends = silentBalancer{}
	w.start(false)
	k := w.node.Kernel
	put := func(name string, key, value any) {
		t.Helper()
		// The maps belong to this test: no program runs.
		if err := k.Pins.Map(name).Update(key, value, ebpf.UpdateNoExist); err != nil {
			t.Fatal(err)
		}
	}
	put(bpf.MapsMapSlCt4, &bpf.MapsSlCtKey4{Lo: 1, Hi: 2, Proto: 6}, &bpf.MapsSlCt{Front: 11})
	put(bpf.MapsMapSlCt4, &bpf.MapsSlCtKey4{Lo: 1, Hi: 3, Proto: 6}, &bpf.MapsSlCt{})
	put(bpf.MapsMapSlCt6, &bpf.MapsSlCtKey6{Lo: [16]uint8{0xfd}, Hi: [16]uint8{0xfe}, Proto: 6}, &bpf.MapsSlCt{Front: 12})
	put(bpf.MapsMapSlXl4, &bpf.MapsSlXlKey4{Src: 1, Dst: 4, Proto: 6}, &bpf.MapsSlXl{Front: 13, Backend: 21})
	put(bpf.MapsMapSlXl6, &bpf.MapsSlXlKey6{Src: [16]uint8{0xfd}, Dst: [16]uint8{0xfe}, Proto: 6},
		&bpf.MapsSlXl{Front: 14, Backend: 22})
	want := servicemap.NoNumbers()
	want.Name(13, false, 21)
	want.Name(14, true, 22)
	for _, front := range []uint32{0, 11, 12} { // 0: none
		want.Fronts[front] = struct{}{}
	}
	if got, err := w.node.Services.Named(t.Context()); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("IDs in use: %+v, %v, want %+v", got, err, want)
	}
}
