// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"os"
	"testing"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/bound"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
)

// revokedConnection opens a connection from a to b, changes b's policy to deny it, and lets one packet be
// denied.
func revokedConnection(t *testing.T, th *theatre) {
	t.Helper()
	th.play(t, handshake(4000, 80))
	setPolicy(t, th.k, th.pods["b"].Slot, endpointmap.Policy{Egress: nodetable.Allow, Ingress: nodetable.Deny})
	th.expect(t, say("a", "b", segment(4000, 80, flagACK), event.PolicyDenied))
}

// expect runs one packet on the existing state.
func (th *theatre) expect(t *testing.T, a act) {
	t.Helper()
	prog, ctx, in := th.frame(a)
	if o := th.run(t, prog, in, ctx, 0); o.reason != a.want {
		t.Errorf("%s to %s: %v, want %v", a.from, a.to, o.reason, a.want)
	}
}

// TestKernelARevokedConnectionSurvivesTheEvictionOfItsEntry: the kernel evicts the entry of a revoked connection when
// other connections fill the map; the connection stays revoked.
func TestKernelARevokedConnectionSurvivesTheEvictionOfItsEntry(t *testing.T) {
	th := newTheatre(t, false)
	revokedConnection(t, th)
	of := tuple(6, a.IPv4.String()+":4000", b.IPv4.String()+":80")
	m, key := th.k.Connections.Map(of)
	var v bpf.MapsSlCt
	for n := 0; ; n++ {
		if n > 4*int(m.MaxEntries()) {
			t.Fatalf("the entry is still there after %d others", n)
		}
		other := tuple(17, world4.String()+":1", "10.1.0.0:1")
		other.Initiator = addrPort(other.Initiator, n)
		_, k := th.k.Connections.Map(other)
		must(t, "insert", pin.InsertOnce(m, k, bpf.MapsSlCt{}))
		// in place, like a second packet, so that the LRU map considers the entry used
		must(t, "use", m.Put(k, bpf.MapsSlCt{}))
		if n%1024 == 0 && m.Lookup(key, &v) != nil {
			break
		}
	}
	th.expect(t, say("b", "a", segment(80, 4000, flagACK|flagPSH), event.PolicyDenied))
	th.expect(t, say("a", "b", segment(4000, 80, flagACK|flagPSH), event.PolicyDenied))
}

// TestKernelCollectorRemovesIdleRecordsOfRevokedConnections: the collector removes a record that no packet has used for
// connections.tcpEstablished; denied packets count as use.
func TestKernelCollectorRemovesIdleRecordsOfRevokedConnections(t *testing.T) {
	for family, v6 := range []bool{false, true} {
		t.Run([]string{"IPv4", "IPv6"}[family], func(t *testing.T) {
			th := newTheatre(t, v6)
			col, cl := newCollector(t, th.k, conntrack.CollectorOptions{})
			revokedConnection(t, th)
			begin := conntrack.MonotonicSeconds()
			for _, c := range []struct {
				after   uint32
				records int
			}{{0, 1}, {7990, 1}, {8000, 0}} {
				cl.now.Store(begin + c.after)
				if p := collect(t, col); p.Revoked[family] != c.records {
					t.Errorf("after %d s: %d and %d records, want %d", c.after, p.Revoked[0], p.Revoked[1], c.records)
				}
			}
		})
	}
}

// TestKernelPickUpResumesWhenUnrecordedConnectionsHaveExpired: if a revoked connection cannot be recorded, the endpoint
// whose policy denies it picks up no connections for connections.tcpEstablished. A collector that starts waits as long.
func TestKernelPickUpResumesWhenUnrecordedConnectionsHaveExpired(t *testing.T) {
	th := newTheatre(t, false)
	col, cl := newCollector(t, th.k, conntrack.CollectorOptions{})
	begin := cl.now.Load()
	check := func(after uint32, want int) {
		t.Helper()
		cl.now.Store(begin + after)
		collect(t, col)
		stopped(want)(t, th)
	}
	th.k.Endpoints.StopPickUp()
	check(0, 2)
	check(7999, 2)
	check(8000, 0)
	for n := range th.k.Pins.Map(bpf.MapsMapSlRevoked4).MaxEntries() {
		other := tuple(6, world4.String()+":1", "10.1.0.0:1")
		other.Initiator = addrPort(other.Initiator, int(n))
		must(t, "fill", pin.InsertOnce(th.k.Pins.Map(bpf.MapsMapSlRevoked4), other.Key4(), bpf.MapsSlRevoked{LastS: begin + 20000}))
	}
	for _, a := range handshake(4000, 80) {
		th.expect(t, a)
	}
	setPolicy(t, th.k, th.pods["b"].Slot, endpointmap.Policy{Egress: nodetable.Allow, Ingress: nodetable.Deny})
	th.expect(t, say("a", "b", segment(4000, 80, flagACK), event.PolicyDenied))
	if c, err := th.k.Connections.Counters(); err != nil || c.Unremembered != 1 {
		t.Errorf("%d revoked connections could not be recorded, %v, want 1", c.Unremembered, err)
	}
	check(8100, 1)
	check(16099, 1)
	check(16100, 0)
}

// TestKernelTerminatedConnectionsOfOnePodLeaveThoseOfOthers: the policy of a pod terminates more connections than its
// share of the records. Terminated connections of another pod are still recorded, and only the first pod picks up no
// connections. The records of a removed endpoint are removed.
func TestKernelTerminatedConnectionsOfOnePodLeaveThoseOfOthers(t *testing.T) {
	for family, v6 := range []bool{false, true} {
		t.Run([]string{"IPv4", "IPv6"}[family], func(t *testing.T) {
			th := newTheatre(t, v6)
			of := []bound.Bound{bound.Revoked4, bound.Revoked6}[family]
			greedy, other := th.pods["b"].Slot, th.pods["a"].Slot
			update(t, th.k, bpf.MapsMapSlBound, uint32(of), bpf.MapsSlBound{Guarantee: 3, Common: 3})
			port := uint16(4000)
			terminate := func(who string, p endpointmap.Policy) {
				t.Helper()
				port++
				for _, a := range handshake(port, 80) {
					th.expect(t, a)
				}
				setPolicy(t, th.k, th.pods[who].Slot, p)
				th.expect(t, say("a", "b", segment(port, 80, flagACK), event.PolicyDenied))
				setPolicy(t, th.k, th.pods[who].Slot, bothWays)
			}
			for range 6 {
				terminate("b", endpointmap.Policy{Egress: nodetable.Allow, Ingress: nodetable.Deny})
			}
			stopped(0)(t, th)
			terminate("b", endpointmap.Policy{Egress: nodetable.Allow, Ingress: nodetable.Deny})
			stopped(1)(t, th)
			for range 3 {
				terminate("a", endpointmap.Policy{Egress: nodetable.Deny, Ingress: nodetable.Allow})
			}
			stopped(1)(t, th)
			if c, err := th.k.Connections.Counters(); err != nil || c.Unremembered != 1 {
				t.Errorf("%d connections could not be recorded, %v, want 1", c.Unremembered, err)
			}
			if a, b := th.k.Bounds.Refusals(of, greedy), th.k.Bounds.Refusals(of, other); a != 1 || b != 0 {
				t.Errorf("%d and %d refusals, want one of the first pod", a, b)
			}
			held := func(first, second int) {
				t.Helper()
				if a, b := th.k.Bounds.Held(of, greedy), th.k.Bounds.Held(of, other); a != first || b != second {
					t.Errorf("%d and %d records are charged, want %d and %d", a, b, first, second)
				}
			}
			held(6, 3)
			col, cl := newCollector(t, th.k, conntrack.CollectorOptions{})
			cl.now.Store(conntrack.MonotonicSeconds())
			collect(t, col)
			held(6, 3)
			// the last connection may go on, and is no longer recorded
			th.expect(t, say("a", "b", segment(port, 80, flagACK), event.ForwardedToPod))
			for _, c := range th.connections(t) {
				m, key := th.k.Connections.Map(c.Tuple)
				must(t, "evict", m.Delete(key))
			}
			th.expect(t, say("a", "b", segment(port, 80, flagACK), event.ForwardedOutside))
			held(6, 2)
			must(t, "remove the first pod", th.k.Endpoints.Unpublish(greedy))
			if p := collect(t, col); p.Revoked[family] != 2 {
				t.Errorf("%d records are left, want 2", p.Revoked[family])
			}
		})
	}
}

// TestKernelALostConnectionMapStopsPickUp: a connection map that is missing at a start may have held revoked
// connections. So no TCP connection of the existing endpoints is picked up in mid-stream.
func TestKernelALostConnectionMapStopsPickUp(t *testing.T) {
	for _, name := range []string{bpf.MapsMapSlCt4, bpf.MapsMapSlCt6, bpf.MapsMapSlRevoked4, bpf.MapsMapSlRevoked6, ""} {
		t.Run(name, func(t *testing.T) {
			o := testOptions(kerneltest.NewBPFFS(t))
			k, err := Open(t.Context(), o)
			must(t, "Open", err)
			publish(t, k, a)
			publish(t, k, b)
			pin := k.Pins.Pin(name)
			must(t, "Close", k.Close())
			want := 0
			if name != "" {
				must(t, "remove the pin", os.Remove(pin))
				want = 2
			}
			k = openKernel(t, o)
			if n, err := k.Endpoints.PickUpStopped(); err != nil || n != want {
				t.Errorf("pick-up is stopped for %d endpoints, %v, want %d", n, err, want)
			}
			// a new endpoint is not affected
			late := publish(t, k, testEndpoint(1007, 70))
			if n, err := k.Endpoints.PickUpStopped(); err != nil || n != want {
				t.Errorf("with slot %d: %d endpoints, %v, want %d", late.Slot, n, err, want)
			}
		})
	}
}
