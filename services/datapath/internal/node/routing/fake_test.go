// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package routing

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"testing"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/node/cluster"
	"github.com/sluice-net/sluice/services/datapath/internal/node/nodemap"
)

// fakeMaps are the maps of nodes, with their rules.
type fakeMaps struct {
	nodes  map[uint16]nodemap.Entry
	local  nodemap.Local
	writes int
	err    error
	unread error // of Local

	shortcut nodemap.Shortcut
}

var errTaken = errors.New("another number has the address")

func (m *fakeMaps) SetNode(number uint16, n nodemap.Node) error {
	m.writes++
	if m.err != nil {
		return m.err
	}
	e, ok := m.nodes[number]
	if ok && (e.IPv4 != n.IPv4 || e.IPv6 != n.IPv6) {
		return fmt.Errorf("number %d has %v %v", number, e.IPv4, e.IPv6)
	}
	var err error
	e.Node = nodemap.Node{IPv4: n.IPv4, IPv6: n.IPv6}
	for _, a := range n.Addrs {
		taken := false
		for other, o := range m.nodes {
			taken = taken || other != number && slices.Contains(o.Addrs, a)
		}
		if taken {
			err = fmt.Errorf("%v: %w", a, errTaken)
			continue
		}
		e.Addrs = append(e.Addrs, a)
	}
	if m.nodes[number] = e; empty(e) { // the maps do not list empty entries
		delete(m.nodes, number)
	}
	return err
}

func (m *fakeMaps) SetNextHops(number uint16, ipv4, ipv6 nodemap.NextHop) error {
	m.writes++
	e := m.nodes[number]
	e.NextHops = [2]nodemap.NextHop{ipv4, ipv6}
	m.nodes[number] = e
	return m.err
}

func (m *fakeMaps) SetDirect(number uint16, d nodemap.Direct) error {
	m.writes++
	e := m.nodes[number]
	e.Direct = d
	m.nodes[number] = e
	return m.err
}

func (m *fakeMaps) SetShortcut(s nodemap.Shortcut) error {
	m.shortcut = s
	return m.err
}

func (m *fakeMaps) RemoveNode(number uint16) error {
	m.writes++
	delete(m.nodes, number)
	return m.err
}

func (m *fakeMaps) SetLocal(l nodemap.Local) error {
	m.writes++
	m.local = l
	return m.err
}

func (m *fakeMaps) Local() (nodemap.Local, error) { return m.local, m.unread }

func (m *fakeMaps) Nodes() (map[uint16]nodemap.Entry, error) { return maps.Clone(m.nodes), nil }

// fakeLinks are the devices and routes of a node with the uplink 2.
type fakeLinks struct {
	mu      sync.Mutex
	paths   map[netip.Addr]Path // all other addresses are on the uplink's link
	mtu     uint16              // of the uplink
	tunnel  uint32              // index; 0: none
	made    int                 // number of tunnel devices created
	broken  error               // error of EnsureTunnel
	routes  map[netip.Prefix]Route
	theirs  map[netip.Prefix]string
	rules   []string
	kept    []Nexthop
	changes int
	asked   int

	prepared  int  // number of calls of EnsureUplinks
	disturbed bool // guarded by mu; a program was detached
}

func (l *fakeLinks) EnsureTunnel(Tunnel) (endpoint.HostDevice, error) {
	if l.broken != nil {
		return endpoint.HostDevice{}, l.broken
	}
	if l.tunnel == 0 {
		l.made++
		l.changes++
		l.tunnel = uint32(10 + l.made)
	}
	return endpoint.HostDevice{Name: "tunnel", Index: l.tunnel}, nil
}

func (l *fakeLinks) CheckTunnel(Tunnel) (endpoint.HostDevice, []endpoint.Difference, error) {
	if l.tunnel == 0 {
		return endpoint.HostDevice{}, []endpoint.Difference{{Subject: "tunnel device", Key: "tunnel", Want: "vxlan"}}, nil
	}
	return endpoint.HostDevice{Name: "tunnel", Index: l.tunnel}, nil, nil
}

func (l *fakeLinks) RemoveTunnel() error { l.tunnel = 0; return nil }

func (l *fakeLinks) Uplinks([]netip.Addr, []uint32) ([]endpoint.HostDevice, error) {
	return []endpoint.HostDevice{{Name: "uplink", Index: 2}}, nil
}

func (l *fakeLinks) EnsureUplinks([]endpoint.HostDevice, bool) error {
	l.prepared++
	return nil
}

func (l *fakeLinks) CheckUplinks([]endpoint.HostDevice, bool) ([]endpoint.Difference, error) {
	return nil, nil
}

func (l *fakeLinks) Disturbed() (bool, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.disturbed, nil
}

func (l *fakeLinks) Paths(addrs []netip.Addr) ([]Path, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.asked++
	var paths []Path
	for _, a := range addrs {
		p, ok := l.paths[a]
		if !ok {
			p = Path{Hops: []Nexthop{{Ifindex: 2, Device: "uplink", Weight: 1}}, MTU: l.mtu, Source: own4}
			if a.Is6() {
				p.Source = own6
			}
		}
		paths = append(paths, p)
	}
	return paths, nil
}

func (l *fakeLinks) SourcePorts() (lowest, highest uint16, err error) { return 32768, 60999, nil }

func (l *fakeLinks) Rules() ([]string, error) { return l.rules, nil }

func (l *fakeLinks) Routes() (map[netip.Prefix]Route, error) { return maps.Clone(l.routes), nil }

func (l *fakeLinks) SetRoute(r Route) error {
	l.changes++
	l.routes[r.Range] = r
	return nil
}

func (l *fakeLinks) RemoveRoute(p netip.Prefix) error {
	l.changes++
	delete(l.routes, p)
	return nil
}

func (l *fakeLinks) Foreign(ranges []netip.Prefix) (map[netip.Prefix]string, error) {
	foreign := map[netip.Prefix]string{}
	for _, p := range ranges {
		if text, ok := l.theirs[p]; ok {
			foreign[p] = text
		}
	}
	return foreign, nil
}

func (l *fakeLinks) Resolve(hops []Nexthop) error { l.kept = hops; return nil }

func (l *fakeLinks) Watch(ctx context.Context, news func()) error {
	news()
	<-ctx.Done()
	return ctx.Err()
}

var (
	own4 = netip.MustParseAddr("192.0.2.1")
	own6 = netip.MustParseAddr("2001:db8::1")
)

// Flags of next hops.
const (
	overlay   = nodemap.Overlay
	underlay6 = nodemap.Underlay6
	hop       = nodemap.Hop
	lookup    = nodemap.Lookup
)

func way(ifindex uint32, mtu uint16, flags nodemap.Flags) nodemap.NextHop {
	return nodemap.NextHop{Ifindex: ifindex, MTU: mtu, Flags: flags}
}

// rig is a router with fakes.
type rig struct {
	*Router
	maps  *fakeMaps
	links *fakeLinks
	t     *testing.T

	services bool
	away     error                 // error of reading the node's addresses
	overlay  []netip.Addr          // overlay addresses of the node
	silent   bool                  // the overlay addresses are unknown
	places   map[netip.Addr]uint16 // IDs of the node's addresses
}

func newRig(t *testing.T, mode cluster.Mode) *rig {
	r := &rig{
		t: t, maps: &fakeMaps{nodes: map[uint16]nodemap.Entry{}},
		links:   &fakeLinks{paths: map[netip.Addr]Path{}, mtu: 1500, routes: map[netip.Prefix]Route{}},
		overlay: addrs("10.1.0.1 fd00:1::1"),
	}
	r.restart(mode)
	return r
}

// restart starts a new router with the same kernel state.
func (r *rig) restart(mode cluster.Mode) {
	r.t.Helper()
	o := Options{
		Mode: mode, MTU: 1450, Repair: true, Maps: r.maps, Links: r.links, Log: slog.New(slog.DiscardHandler),
		Addresses: func() ([]netip.Addr, error) {
			if r.away != nil {
				return nil, r.away
			}
			return []netip.Addr{own4, own6}, nil
		},
		Overlay:  func() ([]netip.Addr, bool) { return r.overlay, !r.silent },
		Services: r.services, AddressID: func(a netip.Addr) (uint16, error) { return r.places[a], nil },
		Name: func(uint16) string { return "" },
	}
	if mode == cluster.Overlay {
		o.Port = 4789
	}
	if r.Router != nil {
		o.Holders = r.Router.holders
	}
	f, err := New(o)
	if err != nil {
		r.t.Fatal(err)
	}
	r.Router = f
}

func addrs(text string) (as []netip.Addr) {
	for _, a := range fields(text) {
		as = append(as, netip.MustParseAddr(a))
	}
	return as
}
