// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package routing

import (
	"context"
	"errors"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/node/cluster"
	"github.com/sluice-net/sluice/services/datapath/internal/node/nodemap"
	"github.com/sluice-net/sluice/services/datapath/internal/node/xfrm"
)

func fields(text string) []string { return strings.Fields(text) }

// member returns a node with the ranges 10.NUMBER.0.0/24 and fd00:NUMBER::/64.
func member(name string, number uint16, addresses string) cluster.Member {
	return cluster.Member{Name: name, Number: number, Node: cluster.Node{
		Addresses: addrs(addresses), Mode: cluster.Overlay, TunnelPort: 4789,
	}}
}

var (
	range4 = netip.MustParsePrefix("10.2.0.0/24")
	range6 = netip.MustParsePrefix("fd00:2::/64")
)

// join does what a follower does with a node that has both ranges.
func (r *rig) join(m cluster.Member) {
	r.Join([]cluster.Member{m})
	r.Hold(map[netip.Prefix]uint16{range4: m.Number, range6: m.Number})
	r.reconcile(true)
}

// ways fails unless the entry of a node ID has these next hops.
func (r *rig) ways(number uint16, want4, want6 nodemap.NextHop) {
	r.t.Helper()
	if got := r.maps.nodes[number].NextHops; got != [2]nodemap.NextHop{want4, want6} {
		r.t.Errorf("next hops of node ID %d: %+v, want %+v and %+v", number, got, want4, want6)
	}
}

func (r *rig) why(name string) string {
	for _, p := range r.State().Peers {
		if p.Name == name {
			return p.Why
		}
	}
	return "no such node"
}

func TestEntryIsThereWhenJoinReturns(t *testing.T) {
	r := newRig(t, cluster.Overlay)
	r.Join([]cluster.Member{member("two", 2, "192.0.2.2")})
	want := nodemap.NextHop{Ifindex: 11, MTU: 1450, Flags: overlay}
	r.ways(2, want, want)
	if got := r.maps.nodes[2].Node; got.IPv4 != addrs("192.0.2.2")[0] || got.IPv6.IsValid() || len(got.Addrs) != 1 {
		t.Errorf("entry %+v", got)
	}
	if r.maps.local != (nodemap.Local{Overlay: true, TunnelIfindex: 11}) {
		t.Errorf("local %+v", r.maps.local)
	}
}

func TestWaysOfAnOverlay(t *testing.T) {
	six := Path{Hops: []Nexthop{{Ifindex: 3, Device: "six"}}, MTU: 9000, Source: own6}
	for name, c := range map[string]struct {
		change func(*cluster.Member)
		paths  map[string]Path
		want   nodemap.NextHop
		why    string
	}{
		"IPv4 is preferred": {want: way(11, 1450, overlay)},
		"IPv6 alone":        {change: only("2001:db8::2"), want: way(11, 1430, overlay|underlay6)},
		"IPv6 has its own path": {
			change: only("2001:db8::2"), paths: map[string]Path{"2001:db8::2": six},
			want: way(11, 8930, overlay|underlay6),
		},
		"no path of IPv4": {
			paths: map[string]Path{"192.0.2.2": {Err: errors.New("unreachable")}}, want: way(11, 1430, overlay|underlay6),
		},
		"the MTU of the other":       {change: func(m *cluster.Member) { m.MTU = 1400 }, want: way(11, 1400, overlay)},
		"a larger one has no effect": {change: func(m *cluster.Member) { m.MTU = 8950 }, want: way(11, 1450, overlay)},
		"another mode": {
			change: func(m *cluster.Member) { m.Mode = cluster.Native }, why: "mode native, this node has overlay",
		},
		"another port": {
			change: func(m *cluster.Member) { m.TunnelPort = 8472 }, why: "tunnel port 8472, this node has 4789",
		},
		"no address":            {change: only(""), why: "no usable address among []"},
		"our own address":       {change: only("192.0.2.1"), why: "no usable address among [192.0.2.1]"},
		"no address to send to": {change: only("127.0.0.1 fe80::1"), why: "no usable address among [127.0.0.1 fe80::1]"},
		"no path at all": {
			change: only("192.0.2.2"), paths: map[string]Path{"192.0.2.2": {Err: errors.New("unreachable")}},
			why: "unreachable",
		},
		"errors say less": {
			paths: map[string]Path{"192.0.2.2": {MTU: 1500, Learned: 1330, Hops: six.Hops}}, want: way(11, 1280, overlay),
		},
		"errors say less than IPv6 needs": {
			paths: map[string]Path{"192.0.2.2": {MTU: 1500, Learned: 1329, Hops: six.Hops}},
			want:  way(11, 1280, overlay|nodemap.Fragments),
		},
		"errors say less of a path that is too narrow for IPv6": {
			paths: map[string]Path{"192.0.2.2": {MTU: 1000, Learned: 100, Hops: six.Hops}},
			want:  way(11, 950, overlay|nodemap.Fragments),
		},
		"a path that is too narrow": {
			change: only("192.0.2.2"), paths: map[string]Path{"192.0.2.2": {MTU: 100, Hops: six.Hops}},
			why: "the path to 192.0.2.2 only carries packets of up to 100 bytes",
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, cluster.Overlay)
			for a, p := range c.paths {
				r.links.paths[netip.MustParseAddr(a)] = p
			}
			m := member("two", 2, "192.0.2.2 2001:db8::2")
			if c.change != nil {
				c.change(&m)
			}
			r.join(m)
			r.ways(2, c.want, c.want)
			if got := r.why("two"); got != c.why {
				t.Errorf("why %q, want %q", got, c.why)
			}
			routes := 2
			if c.why != "" {
				routes = 0
			}
			if len(r.links.routes) != routes {
				t.Errorf("routes %v, want %d", r.links.routes, routes)
			}
			for p, route := range r.links.routes {
				source := addrs("10.1.0.1")[0]
				if p == range6 {
					source = addrs("fd00:1::1")[0]
				}
				if route.Hops[0].Ifindex != 11 || route.MTU != c.want.MTU || route.Source != source {
					t.Errorf("route %v", route)
				}
			}
		})
	}
}

func only(addresses string) func(*cluster.Member) {
	return func(m *cluster.Member) { m.Addresses = addrs(addresses) }
}

func native(name string, number uint16, addresses string) cluster.Member {
	m := member(name, number, addresses)
	m.Mode, m.TunnelPort = cluster.Native, 0
	return m
}

func TestWaysOfNativeRouting(t *testing.T) {
	gateway := addrs("192.0.2.254")[0]
	// packets to the node itself; packets to its pods have other destinations
	routed := Path{Hops: []Nexthop{{Ifindex: 2, Device: "uplink", Via: gateway}}, MTU: 1500, Learned: 1300}
	two := Path{MTU: 1400, Hops: []Nexthop{
		{Ifindex: 2, Via: gateway, Weight: 2}, {Ifindex: 3, Via: addrs("198.51.100.1")[0]},
	}}
	for name, c := range map[string]struct {
		addresses string
		path4     *Path
		want      [2]nodemap.NextHop
		why       string
		route4    []Nexthop
	}{
		"on the link": {
			addresses: "192.0.2.2 2001:db8::2", want: [2]nodemap.NextHop{way(2, 1500, hop), way(2, 1500, hop)},
			route4: []Nexthop{{Ifindex: 2, Via: addrs("192.0.2.2")[0]}},
		},
		"by a router": {
			addresses: "192.0.2.2 2001:db8::2", path4: &routed,
			want: [2]nodemap.NextHop{way(2, 1500, lookup), way(2, 1500, hop)}, route4: routed.Hops,
		},
		"by two routers": {
			addresses: "192.0.2.2 2001:db8::2", path4: &two,
			want: [2]nodemap.NextHop{way(2, 1400, lookup), way(2, 1500, hop)}, route4: two.Hops,
		},
		"without IPv6": {
			addresses: "192.0.2.2", want: [2]nodemap.NextHop{way(2, 1500, hop), {}},
			why:    "it has an IPv6 range, but no IPv6 address",
			route4: []Nexthop{{Ifindex: 2, Via: addrs("192.0.2.2")[0]}},
		},
		"without a path of IPv4": {
			addresses: "192.0.2.2 2001:db8::2", path4: &Path{Err: errors.New("unreachable")},
			want: [2]nodemap.NextHop{{}, way(2, 1500, hop)}, why: "unreachable",
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, cluster.Native)
			if c.path4 != nil {
				r.links.paths[addrs("192.0.2.2")[0]] = *c.path4
			}
			r.join(native("two", 2, c.addresses))
			r.ways(2, c.want[0], c.want[1])
			if got := r.why("two"); got != c.why {
				t.Errorf("why %q, want %q", got, c.why)
			}
			got, ok := r.links.routes[range4]
			if ok != (c.route4 != nil) || ok && !got.equal(Route{Range: range4, Hops: c.route4, MTU: c.want[0].MTU}) {
				t.Errorf("route %v, want by %v", got, c.route4)
			}
			if r.maps.local != (nodemap.Local{Native: true}) || r.links.tunnel != 0 {
				t.Errorf("local %+v, tunnel %d", r.maps.local, r.links.tunnel)
			}
			for _, h := range r.links.kept {
				if !h.Via.IsValid() {
					t.Errorf("next hop %+v has no address", h)
				}
			}
		})
	}
}

// scenes returns states of a cluster, each a list of nodes.
func scenes() map[string][]cluster.Member {
	moved := member("two", 12, "192.0.2.22")
	foreign := member("two", 2, "192.0.2.2")
	foreign.Mode = cluster.Native
	narrow := member("two", 2, "192.0.2.2")
	narrow.MTU = 1300
	return map[string][]cluster.Member{
		"none":           {},
		"one node":       {member("two", 2, "192.0.2.2")},
		"two nodes":      {member("two", 2, "192.0.2.2"), member("three", 3, "192.0.2.3 2001:db8::3")},
		"another mode":   {foreign},
		"a smaller MTU":  {narrow},
		"moved":          {moved},
		"replaced":       {member("two", 13, "192.0.2.2")}, // another installation at the same address
		"more addresses": {member("two", 2, "192.0.2.2 198.51.100.2")},
		"other more":     {member("two", 2, "192.0.2.2 198.51.100.22")}, // the same number of addresses, but not the same
		"IPv6 too":       {member("two", 2, "192.0.2.2 2001:db8::2")},
		"other IPv6":     {member("two", 2, "192.0.2.2 2001:db8::22")},
		"other node":     {member("three", 3, "192.0.2.2")},
		"no address":     {member("two", 14, "")},
	}
}

// enter changes the cluster with the calls that a follower would make.
func (r *rig) enter(from, to []cluster.Member, listing bool) {
	var left []uint16
	numbers := map[uint16]bool{}
	holders := map[netip.Prefix]uint16{}
	for _, m := range to {
		numbers[m.Number] = true
		holders[netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(m.Number)}), 24)] = m.Number
	}
	for _, m := range from {
		if p := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(m.Number)}), 24); holders[p] == 0 {
			holders[p] = 0
		}
		if !numbers[m.Number] {
			left = append(left, m.Number)
		}
	}
	r.Join(to)
	r.Hold(holders)
	if !listing {
		r.Leave(left)
	} else {
		r.Complete()
	}
	r.reconcile(true)
}

// what returns the entries and routes of the router.
func (r *rig) what() (map[uint16]nodemap.Entry, map[netip.Prefix]Route) {
	return maps.Clone(r.maps.nodes), maps.Clone(r.links.routes)
}

// TestOnlyTheFinalStateCounts goes from every scene to every other, by changes and by a listing after a restart.
func TestOnlyTheFinalStateCounts(t *testing.T) {
	for fromName, from := range scenes() {
		for toName, to := range scenes() {
			for _, restart := range []bool{false, true} {
				fresh := newRig(t, cluster.Overlay)
				fresh.Complete()
				fresh.enter(nil, to, false)
				nodes, routes := fresh.what()

				r := newRig(t, cluster.Overlay)
				r.Complete()
				r.enter(nil, from, false)
				if restart {
					r.restart(cluster.Overlay)
					r.reconcile(true)
				}
				r.enter(from, to, restart)
				if restart {
					r.Complete()
				}
				r.reconcile(true)
				gotNodes, gotRoutes := r.what()
				if !reflect.DeepEqual(gotNodes, nodes) {
					t.Errorf("from %s to %s, restart %t: entries %+v, want %+v", fromName, toName, restart, gotNodes, nodes)
				}
				if !maps.EqualFunc(gotRoutes, routes, Route.equal) {
					t.Errorf("from %s to %s, restart %t: routes %v, want %v", fromName, toName, restart, gotRoutes, routes)
				}
				if diffs, err := r.Check(); err != nil || len(diffs) > 0 {
					t.Errorf("from %s to %s, restart %t: differences %v, %v", fromName, toName, restart, diffs, err)
				}
				writes, changes := r.maps.writes, r.links.changes
				r.Join(to)
				r.reconcile(true)
				r.reconcile(false)
				if r.maps.writes != writes || r.links.changes != changes {
					t.Errorf("from %s to %s, restart %t: repeating the same calls writes", fromName, toName, restart)
				}
			}
		}
	}
}

// TestNothingOfAnEarlierProcessIsRemovedBeforeTheListingIsComplete also tests that adopted entries follow a tunnel
// device that is created again.
func TestNothingOfAnEarlierProcessIsRemovedBeforeTheListingIsComplete(t *testing.T) {
	for _, holders := range []bool{true, false} {
		adopted(t, holders)
	}
}

// adopted runs the test above; holders: the ranges of nodes are known.
func adopted(t *testing.T, holders bool) {
	r := newRig(t, cluster.Overlay)
	r.join(member("two", 2, "192.0.2.2"))
	r.join(member("three", 3, "192.0.2.3"))
	nodes, routes := r.what()
	if !holders {
		r.holders = nil
	}
	r.restart(cluster.Overlay)
	r.reconcile(true)
	r.Join([]cluster.Member{member("three", 3, "192.0.2.3")})
	r.reconcile(true)
	gotNodes, gotRoutes := r.what()
	if !reflect.DeepEqual(gotNodes, nodes) || !maps.EqualFunc(gotRoutes, routes, Route.equal) {
		t.Errorf("entries %+v, routes %v; want them unchanged: %+v, %v", gotNodes, gotRoutes, nodes, routes)
	}
	r.links.tunnel = 0
	r.reconcile(true)
	want := way(12, 1450, overlay)
	r.ways(2, want, want)
	r.ways(3, want, want)
	if got := r.links.routes[range4]; holders && got.Hops[0].Ifindex != 12 {
		t.Errorf("route %v, want by the device made again", got)
	}
	r.Complete()
	r.reconcile(true)
	if len(r.maps.nodes) != 1 || !holders && len(r.links.routes) != 0 {
		t.Errorf("entries %+v, routes %v; want only the listed node's", r.maps.nodes, r.links.routes)
	}
}

// TestAddressOfANumberThatLeavesIsTakenOver tests a node ID that is replaced by another one with the same address.
func TestAddressOfANumberThatLeavesIsTakenOver(t *testing.T) {
	r := newRig(t, cluster.Overlay)
	r.join(member("two", 2, "192.0.2.2"))
	r.Complete()
	r.Join([]cluster.Member{member("two", 5, "192.0.2.2")})
	if e := r.maps.nodes[5]; !e.IPv4.IsValid() || e.NextHops[0] == (nodemap.NextHop{}) || len(r.maps.nodes) != 2 {
		t.Errorf("entries %+v, want both, each with its next hops", r.maps.nodes)
	}
	if diffs, err := r.Check(); err != nil || slices.ContainsFunc(diffs, func(d endpoint.Difference) bool {
		return strings.Contains(d.String(), "number 2:")
	}) {
		t.Errorf("differences %v, %v; the node ID that is being removed is not a difference", diffs, err)
	}
	// mappings refer to it until Leave
	if err := r.Repair(); err != nil || len(r.maps.nodes) != 2 {
		t.Errorf("a repair leaves %+v, %v, want both", r.maps.nodes, err)
	}
	r.Leave([]uint16{2})
	r.reconcile(true)
	if e := r.maps.nodes[5]; len(e.Addrs) != 1 || len(r.maps.nodes) != 1 {
		t.Errorf("entries %+v, want one with its address", r.maps.nodes)
	}
	if notes := r.State().Peers[0].Notes; len(notes) > 0 {
		t.Errorf("notes %v, want none", notes)
	}
}

// TestNodesWithoutANumberLeaveAlone removes one of several nodes without a node ID. The others must stay.
func TestNodesWithoutANumberLeaveAlone(t *testing.T) {
	r := newRig(t, cluster.Overlay)
	none := member("two", cluster.NoNumber, "192.0.2.2")
	r.Join([]cluster.Member{none, member("three", 3, "192.0.2.3")})
	r.Leave([]uint16{cluster.NoNumber})
	if got := len(r.State().Peers); got != 2 {
		t.Errorf("%d nodes, want both", got)
	}
	r.Leave([]uint16{3})
	if got := r.State().Peers; len(got) != 1 || got[0].Name != "two" {
		t.Errorf("nodes %+v, want the one without a node ID", got)
	}
}

// TestRangesOfNodesThatLeftMeanwhileAreForgotten: a node that gets the node ID of a node which was removed while the
// process was down does not get that node's ranges.
func TestRangesOfNodesThatLeftMeanwhileAreForgotten(t *testing.T) {
	r := newRig(t, cluster.Overlay)
	r.join(member("two", 2, "192.0.2.2"))
	r.restart(cluster.Overlay)
	r.Complete()
	r.reconcile(true)
	r.Join([]cluster.Member{member("other", 2, "192.0.2.9")})
	r.reconcile(true)
	if len(r.links.routes) != 0 {
		t.Errorf("routes %v of a node without ranges", r.links.routes)
	}
}

// TestStartMakesTheTunnelWithoutRepair: even with the setting that leaves external changes alone, a start creates the
// device.
func TestStartMakesTheTunnelWithoutRepair(t *testing.T) {
	r := newRig(t, cluster.Overlay)
	r.o.Repair = false
	r.reconcile(true)
	if r.links.made != 1 || r.maps.local != (nodemap.Local{Overlay: true, TunnelIfindex: 11}) {
		t.Errorf("%d devices made, local %+v", r.links.made, r.maps.local)
	}
	r.links.tunnel = 0
	r.reconcile(true)
	if r.links.made != 1 {
		t.Error("a device that others removed was created again")
	}
}

// TestChangedRoutingRemovesTheTunnel starts a process with native routing after one with an overlay.
func TestChangedRoutingRemovesTheTunnel(t *testing.T) {
	r := newRig(t, cluster.Overlay)
	r.reconcile(true)
	r.restart(cluster.Native)
	r.reconcile(true)
	if r.links.tunnel != 0 || r.maps.local != (nodemap.Local{Native: true}) {
		t.Errorf("tunnel device %d, local %+v", r.links.tunnel, r.maps.local)
	}
}

// TestRunNoticesWhatTheKernelDoesNotTell: a detached program is noticed at the next poll, and any other change some
// polls later.
func TestRunNoticesWhatTheKernelDoesNotTell(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, cluster.Overlay)
		r.Join([]cluster.Member{member("two", 2, "192.0.2.2")})
		r.Hold(map[netip.Prefix]uint16{range4: 2})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- r.Run(ctx) }()
		wait := func(d time.Duration) {
			time.Sleep(d)
			synctest.Wait()
		}
		disturb := func(by bool) {
			r.links.mu.Lock()
			defer r.links.mu.Unlock()
			r.links.disturbed = by
		}
		prepared := func() int {
			r.mu.Lock()
			defer r.mu.Unlock()
			return r.links.prepared
		}
		wait(time.Second)
		before := prepared()
		disturb(true)
		wait(pollInterval + lookPause)
		if prepared() == before {
			t.Error("the programs of the uplinks were not attached again")
		}
		disturb(false)
		wait(pollInterval + lookPause)
		r.mu.Lock()
		delete(r.links.routes, range4)
		r.mu.Unlock()
		wait(wholePolls*pollInterval + time.Second)
		r.mu.Lock()
		if _, ok := r.links.routes[range4]; !ok {
			t.Error("the route was not created again")
		}
		r.mu.Unlock()
		cancel()
		<-ended
	})
}

func TestMTUIsFollowedDownAndUp(t *testing.T) {
	for _, mode := range []cluster.Mode{cluster.Overlay, cluster.Native} {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t, mode)
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error)
			go func() { done <- r.Run(ctx) }()
			m, less := member("two", 2, "192.0.2.2"), uint16(50)
			if mode == cluster.Native {
				m, less = native("two", 2, "192.0.2.2"), 0
			}
			r.Join([]cluster.Member{m})
			r.Hold(map[netip.Prefix]uint16{range4: 2})
			for _, mtu := range []uint16{1500, 1300, 1400, 1500} {
				r.links.mu.Lock()
				r.links.mtu = mtu
				r.links.mu.Unlock()
				time.Sleep(time.Second)
				synctest.Wait()
				r.mu.Lock()
				way, route := r.maps.nodes[2].NextHops[0], r.links.routes[range4]
				r.mu.Unlock()
				if way.MTU != mtu-less || route.MTU != mtu-less {
					t.Errorf("%s, path of %d: next hop %+v, route %v", mode, mtu, way, route)
				}
			}
			cancel()
			<-done
		})
	}
}

// TestTunnelThatCannotBeMadeIsNamedAndTriedAgain also tests that no packets are sent until then.
func TestTunnelThatCannotBeMadeIsNamedAndTriedAgain(t *testing.T) {
	r := newRig(t, cluster.Overlay)
	r.links.broken = NoTunnelError{errors.New("port taken by vxlan0")}
	r.join(member("two", 2, "192.0.2.2"))
	r.ways(2, nodemap.NextHop{}, nodemap.NextHop{})
	if why := r.why("two"); !strings.Contains(why, "vxlan0") || r.maps.local.TunnelIfindex != 0 {
		t.Errorf("why %q, local %+v", why, r.maps.local)
	}
	if w := r.Warnings(); len(w) != 2 {
		t.Errorf("warnings %q, want one of the device and one of the node", w)
	}
	r.links.broken = nil
	r.reconcile(false)
	want := way(11, 1450, overlay)
	r.ways(2, want, want)
	if w := r.Warnings(); len(w) != 0 {
		t.Errorf("warnings %q, want none", w)
	}
}

// TestTunnelStaysWhileItIsNotKnown: an error says nothing about the device, so packets continue to use it. Only if the
// node is known to have no tunnel device, other nodes have no next hop.
func TestTunnelStaysWhileItIsNotKnown(t *testing.T) {
	broken := errors.New("netlink: no buffer space available")
	r := newRig(t, cluster.Overlay)
	r.join(member("two", 2, "192.0.2.2"))
	r.Complete()
	want, local, routes := way(11, 1450, overlay), r.maps.local, maps.Clone(r.links.routes)
	if len(routes) != 2 {
		t.Fatalf("routes %v, want two", routes)
	}
	stays := func(when string, warnings int) {
		t.Helper()
		r.ways(2, want, want)
		if r.maps.local != local || !reflect.DeepEqual(r.links.routes, routes) {
			t.Errorf("%s: local %+v, routes %v; want %+v, %v", when, r.maps.local, r.links.routes, local, routes)
		}
		if w := r.Warnings(); len(w) != warnings || warnings > 0 && !strings.Contains(w[0], "no buffer space") {
			t.Errorf("%s: warnings %q, want %d", when, w, warnings)
		}
	}
	r.links.broken = broken
	r.reconcile(true)
	stays("unknown", 1)
	r.restart(cluster.Overlay)
	r.join(member("two", 2, "192.0.2.2"))
	r.Complete()
	r.reconcile(true)
	stays("unknown after a restart", 1)
	r.links.broken = nil
	r.reconcile(false)
	stays("known again", 0)
	r.links.broken = NoTunnelError{errors.New("port taken by vxlan0")}
	r.reconcile(true)
	r.ways(2, nodemap.NextHop{}, nodemap.NextHop{})
	if r.maps.local.TunnelIfindex != 0 || len(r.links.routes) != 0 {
		t.Errorf("no device: local %+v, routes %v", r.maps.local, r.links.routes)
	}
	// The node had no device either when a process starts that cannot find out.
	r.links.broken = broken
	r.restart(cluster.Overlay)
	r.join(member("two", 2, "192.0.2.2"))
	r.ways(2, nodemap.NextHop{}, nodemap.NextHop{})
	if why := r.why("two"); !strings.Contains(why, "no buffer space") {
		t.Errorf("why %q, want the error", why)
	}
}

// TestNothingIsWrittenWhileTheTunnelIsNotKnown: neither the kernel nor the maps say which device a previous process
// used.
func TestNothingIsWrittenWhileTheTunnelIsNotKnown(t *testing.T) {
	r := newRig(t, cluster.Overlay)
	r.join(member("two", 2, "192.0.2.2"))
	want, local := way(11, 1450, overlay), r.maps.local
	r.links.broken, r.maps.unread = errors.New("netlink: no buffer space available"), errors.New("map not readable")
	r.restart(cluster.Overlay)
	r.join(member("two", 2, "192.0.2.2"))
	r.ways(2, want, want)
	if r.maps.local != local {
		t.Errorf("local %+v, want %+v", r.maps.local, local)
	}
	r.maps.unread = nil
	r.reconcile(false)
	r.ways(2, want, want)
	if r.maps.local != local {
		t.Errorf("local %+v once it can be read, want %+v", r.maps.local, local)
	}
}

// TestPathStaysWhileItIsNotKnown: an error about the path to one node does not describe the path, so its packets
// continue to use the last path, also after a restart. They do not bypass the tunnel device.
func TestPathStaysWhileItIsNotKnown(t *testing.T) {
	unknown := Path{Err: errors.New("find device 2: no such device"), Unknown: true}
	none := Path{Err: errors.New("network is unreachable")}
	for mode, want := range map[cluster.Mode]nodemap.NextHop{
		cluster.Overlay: way(11, 1400, overlay), cluster.Native: way(2, 1450, hop),
	} {
		t.Run(string(mode), func(t *testing.T) {
			m := member("two", 2, "192.0.2.2")
			m.Mode = mode
			if mode == cluster.Native {
				m.TunnelPort = 0
			}
			r := newRig(t, mode)
			r.o.Shortcut, r.shortcut = mode == cluster.Overlay, mode == cluster.Overlay
			r.o.Monotonic = func() (time.Duration, error) { return time.Hour, nil }
			r.links.mtu = 1450
			r.join(m)
			r.Complete()
			want6 := nodemap.NextHop{}
			if mode == cluster.Overlay {
				want6 = want
				if r.maps.nodes[2].Direct == (nodemap.Direct{}) {
					t.Error("no direct path while it is known")
				}
			}
			routes := maps.Clone(r.links.routes)
			stays := func(when string, warning bool) {
				t.Helper()
				r.ways(2, want, want6)
				if !reflect.DeepEqual(r.links.routes, routes) {
					t.Errorf("%s: routes %v, want %v", when, r.links.routes, routes)
				}
				if d := r.maps.nodes[2].Direct; warning && d != (nodemap.Direct{}) {
					t.Errorf("%s: direct path %v", when, d)
				}
				w := strings.Join(r.Warnings(), "; ")
				if strings.Contains(w, "two: the last known path is used: find device 2") != warning {
					t.Errorf("%s: warnings %q", when, w)
				}
			}
			stays("known", false)
			r.links.paths[addrs("192.0.2.2")[0]] = unknown
			r.reconcile(false)
			stays("unknown", true)
			r.reconcile(true)
			stays("unknown, tried again", true)
			r.restart(mode)
			r.join(m)
			r.Complete()
			r.ways(2, want, want6)
			delete(r.links.paths, addrs("192.0.2.2")[0])
			r.reconcile(true)
			stays("known again", false)
			r.links.paths[addrs("192.0.2.2")[0]] = none
			r.reconcile(true)
			r.ways(2, nodemap.NextHop{}, nodemap.NextHop{})
		})
	}
}

// TestUnknownPathToAnotherAddressIsNotTheLastOne: the last path of a node is not used for another address.
func TestUnknownPathToAnotherAddressIsNotTheLastOne(t *testing.T) {
	r := newRig(t, cluster.Native)
	m := member("two", 2, "192.0.2.2")
	m.Mode, m.TunnelPort = cluster.Native, 0
	r.join(m)
	r.ways(2, way(2, 1500, hop), nodemap.NextHop{})
	m.Addresses = addrs("192.0.2.3")
	r.links.paths[addrs("192.0.2.3")[0]] = Path{Err: errors.New("no such device"), Unknown: true}
	r.join(m)
	r.ways(2, nodemap.NextHop{}, nodemap.NextHop{})
}

func TestForeignRouteIsAWarning(t *testing.T) {
	r := newRig(t, cluster.Overlay)
	r.links.theirs = map[netip.Prefix]string{range4: "via 192.0.2.9 proto 12"}
	r.join(member("two", 2, "192.0.2.2"))
	if w := r.Warnings(); len(w) != 1 || !strings.Contains(w[0], "192.0.2.9") {
		t.Errorf("warnings %q, want the route", w)
	}
}

func TestAddressThatIsNotRegisteredIsAWarning(t *testing.T) {
	r := newRig(t, cluster.Overlay)
	r.links.paths[addrs("192.0.2.2")[0]] = Path{
		Hops: []Nexthop{{Ifindex: 2, Device: "uplink"}}, MTU: 1500, Source: addrs("203.0.113.7")[0],
	}
	r.join(member("two", 2, "192.0.2.2"))
	if w := r.Warnings(); len(w) != 1 || !strings.Contains(w[0], "203.0.113.7") {
		t.Errorf("warnings %q, want the address", w)
	}
}

// TestNodeThatHasNoAddressYetIsNoDifference: a node is registered with its ranges before its datapath has registered
// its addresses. A check in between must find nothing to repair.
func TestNodeThatHasNoAddressYetIsNoDifference(t *testing.T) {
	r := newRig(t, cluster.Overlay)
	r.join(member("two", 2, ""))
	if diffs, err := r.Check(); err != nil || len(diffs) > 0 {
		t.Errorf("differences %v, %v, want none", diffs, err)
	}
	r.join(member("two", 2, "192.0.2.2"))
	delete(r.maps.nodes, 2)
	if diffs, err := r.Check(); err != nil || len(diffs) == 0 {
		t.Errorf("differences %v, %v, want its entry", diffs, err)
	}
}

func TestRepairPutsRightWhatCheckFinds(t *testing.T) {
	for name, damage := range map[string]func(*rig){
		"entry removed":   func(r *rig) { delete(r.maps.nodes, 2) },
		"way changed":     func(r *rig) { _ = r.maps.SetNextHops(2, nodemap.NextHop{}, way(7, 7, hop)) },
		"entry of nobody": func(r *rig) { _ = r.maps.SetNode(9, nodemap.Node{IPv4: addrs("192.0.2.9")[0]}) },
		"device removed":  func(r *rig) { r.links.tunnel = 0 },
		"route removed":   func(r *rig) { delete(r.links.routes, range4) },
		"route changed":   func(r *rig) { r.links.routes[range6] = Route{Range: range6, Hops: []Nexthop{{Ifindex: 9}}} },
		"route of nobody": func(r *rig) { r.links.routes[netip.MustParsePrefix("10.9.0.0/24")] = Route{} },
	} {
		r := newRig(t, cluster.Overlay)
		r.join(member("two", 2, "192.0.2.2"))
		r.Complete()
		r.reconcile(true)
		damage(r)
		if diffs, err := r.Check(); err != nil || len(diffs) == 0 {
			t.Errorf("%s: differences %v, %v; want some", name, diffs, err)
		}
		if err := r.Repair(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if diffs, err := r.Check(); err != nil || len(diffs) > 0 {
			t.Errorf("%s: differences %v, %v after the repair", name, diffs, err)
		}
	}
}

// TestKernelIsAskedOnceAPoll tests that the number of requests per poll does not depend on the number of nodes.
func TestKernelIsAskedOnceAPoll(t *testing.T) {
	r := newRig(t, cluster.Native)
	var members []cluster.Member
	for i := range 500 {
		a := netip.AddrFrom4([4]byte{192, 0, byte(3 + i/250), byte(i % 250)}).String()
		members = append(members, native(a, uint16(i+1), a))
	}
	r.Join(members)
	r.reconcile(true)
	asked, writes := r.links.asked, r.maps.writes
	r.reconcile(false)
	if r.links.asked != asked+1 || r.maps.writes != writes {
		t.Errorf("asked %d times, wrote %d times", r.links.asked-asked, r.maps.writes-writes)
	}
}

// TestSourcesStayWhileTheyAreNotKnown: without a source address, new connections to backends on other nodes are
// dropped. If the addresses are unknown or cannot be read at the start, the source addresses of the previous process
// must stay.
func TestSourcesStayWhileTheyAreNotKnown(t *testing.T) {
	r := newRig(t, cluster.Overlay)
	r.services = true
	r.places = map[netip.Addr]uint16{
		own4: 3, own6: 4, netip.MustParseAddr("10.1.0.1"): 5, netip.MustParseAddr("fd00:1::1"): 6,
	}
	r.restart(cluster.Overlay)
	r.join(member("two", 2, "192.0.2.2"))
	r.Complete()
	r.reconcile(true)
	before := r.maps.local
	if before.Sources != [nodemap.Sources]uint16{5, 6, 3, 4} {
		t.Fatalf("this node is %+v", before)
	}

	places := r.places
	for name, forget := range map[string]func(){
		"the ranges are not known":          func() { r.overlay, r.silent = nil, true },
		"the addresses cannot be read":      func() { r.away = errors.New("no buffer space available") },
		"the address IDs are assigned late": func() { r.places = map[netip.Addr]uint16{} },
	} {
		r.overlay, r.silent, r.away, r.places = addrs("10.1.0.1 fd00:1::1"), false, nil, places
		forget()
		r.restart(cluster.Overlay)
		writes := r.maps.writes
		ofNodes := func(d endpoint.Difference) bool { return d.Subject == "sl_node" }
		if diffs, err := r.Check(); err != nil || slices.ContainsFunc(diffs, ofNodes) {
			t.Errorf("%s: the first check: %v, %v", name, diffs, err)
		}
		if r.maps.writes != writes {
			t.Errorf("%s: a check writes", name)
		}
		_ = r.Repair()
		r.reconcile(true)
		if r.maps.local != before {
			t.Errorf("%s: this node is %+v, and was %+v", name, r.maps.local, before)
		}
	}

	r.overlay, r.silent, r.away, r.places = addrs("fd00:1::1"), false, nil, places
	r.reconcile(true)
	if want := [nodemap.Sources]uint16{0, 6, 3, 4}; r.maps.local.Sources != want {
		t.Errorf("without an IPv4 range the sources are %v, want %v", r.maps.local.Sources, want)
	}
	r.services = false
	r.restart(cluster.Overlay)
	r.reconcile(true)
	if r.maps.local.Sources != [nodemap.Sources]uint16{} {
		t.Errorf("without services the sources are %v", r.maps.local.Sources)
	}
}

// TestFirstCheckOfAStartFindsNothing: the first check must compare with the current state of the kernel, not with a
// router that has not reconciled yet.
func TestFirstCheckOfAStartFindsNothing(t *testing.T) {
	for _, mode := range []cluster.Mode{cluster.Overlay, cluster.Native} {
		r := newRig(t, mode)
		m := member("two", 2, "192.0.2.2")
		m.Mode = mode
		r.join(m)
		r.Complete()
		r.reconcile(true)
		r.restart(mode)
		if diffs, err := r.Check(); err != nil || len(diffs) > 0 {
			t.Errorf("%v: the first check of a start finds %v, %v", mode, diffs, err)
		}
	}
}

// fakePolicies are IPsec policies, or an error of reading them.
type fakePolicies struct {
	xfrm.Policies
	err     error
	changed func()
}

func (p *fakePolicies) Watch(ctx context.Context, changed func()) error {
	p.changed = changed
	<-ctx.Done()
	return ctx.Err()
}

// readPolicies implements Policies, because fakePolicies has a field of the same name as the method.
type readPolicies struct{ *fakePolicies }

func (p readPolicies) Policies() (xfrm.Policies, error) { return p.fakePolicies.Policies, p.err }

// TestPacketsGoByTheStackWhileItHasIPsecPolicies shows that with native routing, packets pass the host stack while
// there are policies. While the policies cannot be read, the decision of the previous process stays.
func TestPacketsGoByTheStackWhileItHasIPsecPolicies(t *testing.T) {
	p := &fakePolicies{err: errors.New("not now")}
	r := newRig(t, cluster.Native)
	r.o.Policies = readPolicies{p}
	wants := func(when string, by bool) {
		t.Helper()
		r.reconcile(true)
		if l := r.maps.local; l.ByStack != by || !l.Native {
			t.Errorf("%s: %+v, want through the stack %t", when, l, by)
		}
		if s := r.State(); s.ByStack != by || s.Why == "" {
			t.Errorf("%s: state %t because %q, want %t", when, s.ByStack, s.Why, by)
		}
	}
	wants("never read", true)
	p.err = nil
	wants("there are none", false)
	p.Out = 1
	wants("there is one", true)
	p.err = errors.New("not now")
	wants("not read again", true)
	p.err, p.Out = nil, 0
	wants("gone", false)
	p.err, p.Forward = errors.New("not now"), 1
	wants("not read again", false)

	r.restart(cluster.Native)
	r.o.Policies = readPolicies{p}
	wants("a process that cannot read what the last one has read", false)
	p.err = nil
	wants("a policy for forwarded packets", true)

	r = newRig(t, cluster.Overlay)
	r.o.Policies = readPolicies{p}
	r.reconcile(true)
	if r.maps.local.ByStack || r.State().Why != "" {
		t.Errorf("overlay: %+v, %q", r.maps.local, r.State().Why)
	}
}

// TestChangedIPsecPoliciesCountAtOnce shows that Run reconciles when policies change.
func TestChangedIPsecPoliciesCountAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &fakePolicies{}
		r := newRig(t, cluster.Native)
		r.o.Policies = readPolicies{p}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- r.Run(ctx) }()
		synctest.Wait()
		p.Out = 1
		p.changed()
		time.Sleep(lookPause + time.Millisecond)
		synctest.Wait()
		if !r.State().ByStack {
			t.Error("packets bypass the stack")
		}
		cancel()
		<-ended
	})
}

// TestTunnelPacketsBypassTheDeviceOnlyWhereTheKernelPassesThemOn shows for which nodes a direct path is in the maps, and
// when the maps allow it.
func TestTunnelPacketsBypassTheDeviceOnlyWhereTheKernelPassesThemOn(t *testing.T) {
	p := &fakePolicies{err: errors.New("not now")}
	r := newRig(t, cluster.Overlay)
	now := time.Hour
	arrange := func() {
		r.o.Policies, r.o.Shortcut, r.shortcut = readPolicies{p}, true, true
		r.o.Monotonic = func() (time.Duration, error) { return now, nil }
	}
	arrange()
	two, gateway := netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("192.0.2.9")
	r.join(member("two", 2, "192.0.2.2"))
	r.Complete()
	allowed := func(when, closed string) {
		t.Helper()
		r.reconcile(true)
		want := nodemap.Shortcut{}
		if closed == "" {
			want = nodemap.Shortcut{Until: uint64(now + shortcutValid), Lowest: 32768, Highest: 60999}
		}
		if r.maps.shortcut.Until != want.Until || want.Until != 0 && r.maps.shortcut != want {
			t.Errorf("%s: %+v, want %+v", when, r.maps.shortcut, want)
		}
		if s := r.State(); !s.Shortcut || s.Closed != closed {
			t.Errorf("%s: closed because %q, want %q", when, s.Closed, closed)
		}
	}
	r.maps.shortcut.Until = 1
	allowed("policies never read", "the IPsec policies cannot be read: not now")
	p.err = nil
	allowed("no policies", "")
	now += time.Second
	allowed("a second later", "")
	p.In = 1
	allowed("a policy for packets of the node", "xfrm policies: 1 in")
	p.In, p.Forward = 0, 1
	allowed("a policy for forwarded packets", "")
	p.Out = 1
	allowed("a policy", "xfrm policies: 1 out")
	p.Out, p.BlockedIn = 0, true
	allowed("packets without a policy are blocked", "xfrm policies: default block")
	p.BlockedIn = false
	r.links.rules = []string{"rule 100 selects by the destination port"}
	allowed("a rule", "routing rules: rule 100 selects by the destination port")
	r.links.rules = nil
	allowed("nothing any more", "")
	until := r.maps.shortcut
	now += time.Second

	direct := func(when string, path Path, want nodemap.Direct, device string) {
		t.Helper()
		r.links.paths[two] = path
		r.reconcile(false)
		if got := r.maps.nodes[2].Direct; got != want {
			t.Errorf("%s: direct path %v, want %v", when, got, want)
		}
		if s := r.State().Peers[0]; s.Direct != (want != nodemap.Direct{}) || s.Device != device {
			t.Errorf("%s: state %t, %q, want %q", when, s.Direct, s.Device, device)
		}
	}
	onLink := Path{Hops: []Nexthop{{Ifindex: 2, Weight: 1}}, MTU: 1500, Source: own4}
	direct("on the link", onLink, nodemap.Direct{Ifindex: 2, Via: two, Local: own4}, "")
	routed := onLink
	routed.Hops = []Nexthop{{Ifindex: 3, Via: gateway, Weight: 1}}
	direct("by a router", routed, nodemap.Direct{Ifindex: 3, Via: gateway, Local: own4}, "")
	special := routed
	special.Special = "wg0 has no Ethernet header"
	direct("without Ethernet", special, nodemap.Direct{}, special.Special)
	narrow := routed
	narrow.Learned = 1000
	direct("in fragments", narrow, nodemap.Direct{}, "tunnel packets are fragmented")
	foreign := routed
	foreign.Source = gateway
	direct("from another address", foreign, nodemap.Direct{},
		"packets leave with source 192.0.2.9, which is not registered for this node")
	direct("by a router again", routed, nodemap.Direct{Ifindex: 3, Via: gateway, Local: own4}, "")
	if r.maps.shortcut.Until <= until.Until {
		t.Error("a poll has not extended the permission")
	}

	r.restart(cluster.Overlay) // with the shortcut off
	r.reconcile(true)
	if r.maps.shortcut.Until != 0 || r.maps.nodes[2].Direct != (nodemap.Direct{}) {
		t.Errorf("off: %+v, %v", r.maps.shortcut, r.maps.nodes[2].Direct)
	}
}
