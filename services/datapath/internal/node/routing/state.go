// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package routing

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/node/cluster"
	"github.com/sluice-net/sluice/services/datapath/internal/node/nodemap"
)

// State is the state of a router.
type State struct {
	Mode    cluster.Mode
	Tunnel  string   // name of the device; "": none
	Port    uint16   // of the tunnel
	MTU     uint16   // of this node's pods, bytes
	Uplinks []string // names
	// ByStack: packets between pods of two nodes pass the host stack. Why is the reason for the choice; "" in modes
	// without a choice.
	ByStack bool
	Why     string
	// Shortcut: tunnel packets may bypass the tunnel device. Closed is why none does at the moment; "": they do.
	Shortcut bool
	Closed   string
	Peers    []PeerState
	Failed   []string // failed work with its errors
	// Foreign are ranges of other nodes that the host stack reaches through a foreign route, with that route.
	Foreign map[netip.Prefix]string
}

// PeerState is the state of another node.
type PeerState struct {
	Name      string
	Number    uint16
	Addresses []netip.Addr
	Mode      cluster.Mode
	// Paths of IPv4 and IPv6 packets.
	Paths [2]PeerPath
	// Why is the reason why packets of a family do not travel although the node has ranges of it; "": they do.
	Why string
	// Notes are problems that may block packets.
	Notes []string
	// Direct: tunnel packets bypass the tunnel device, if the state's Closed is "". Device is why they do not.
	Direct bool
	Device string
	// Adopted: the cluster has not listed the node since the start.
	Adopted bool
}

// PeerPath describes how packets of one family travel to a node; zero: they do not.
type PeerPath struct {
	Device   string // device that the node sends through, or the tunnel
	Nexthops []Nexthop
	MTU      uint16 // of packets of pods, bytes
	Flags    nodemap.Flags
}

// State returns the current state.
func (f *Router) State() State {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := State{
		Mode: f.mode, Tunnel: f.device.Name, Port: f.port, MTU: f.o.MTU, Foreign: maps.Clone(f.foreign),
		ByStack: f.byStack, Why: f.why, Shortcut: f.shortcut,
	}
	if f.shortcut && !f.open {
		s.Closed = cmp.Or(f.closed, "the paths have not been compared with the kernel's routes")
	}
	for _, d := range f.uplinks {
		s.Uplinks = append(s.Uplinks, d.Name)
	}
	for what, err := range f.failed {
		s.Failed = append(s.Failed, what+": "+err.Error())
	}
	slices.Sort(s.Failed)
	for _, p := range f.all() {
		s.Peers = append(s.Peers, f.peerState(p))
	}
	return s
}

func (f *Router) peerState(p *peer) PeerState {
	ps := PeerState{
		Name: p.Name, Number: p.Number, Addresses: slices.Clone(p.Addresses), Mode: p.Mode,
		Why: p.why, Notes: slices.Clone(p.notes), Adopted: p.adopted,
		Direct: p.direct != nodemap.Direct{}, Device: p.device,
	}
	if p.err != nil {
		ps.Notes = append(ps.Notes, p.err.Error())
	}
	for i, w := range p.nextHops {
		if w == (nodemap.NextHop{}) {
			continue
		}
		path := p.path(i)
		ps.Paths[i] = PeerPath{Nexthops: slices.Clone(path.Hops), MTU: w.MTU, Flags: w.Flags, Device: f.device.Name}
		// Until the first reconciliation, a decision of a previous process is known only by its next hop.
		if w.Flags&nodemap.Overlay == 0 && len(path.Hops) > 0 {
			ps.Paths[i].Device = path.Hops[0].Device
		}
	}
	return ps
}

// Warnings lists what does not work, or may not, for an operator.
func (f *Router) Warnings() []string {
	s := f.State()
	warnings := s.Failed
	for _, p := range s.Peers {
		if p.Why != "" {
			warnings = append(warnings, fmt.Sprintf("node %s is not reachable: %s", p.Name, p.Why))
		}
		for _, n := range p.Notes {
			warnings = append(warnings, fmt.Sprintf("node %s: %s", p.Name, n))
		}
	}
	for _, r := range slices.SortedFunc(maps.Keys(s.Foreign), netip.Prefix.Compare) {
		warnings = append(warnings, fmt.Sprintf(
			"this node's own packets to %v do not use the route of Sluice but %s; remove that route", r, s.Foreign[r]))
	}
	return warnings
}

// Check returns what Repair would change.
func (f *Router) Check() ([]endpoint.Difference, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var diffs []endpoint.Difference
	first := f.local == nil // before the first reconciliation
	if f.mode == cluster.Overlay {
		d, ds, err := f.o.Links.CheckTunnel(Tunnel{Port: f.o.Port, MTU: f.o.MTU})
		if err != nil {
			return nil, err
		}
		if first {
			f.device, f.tunnel, f.settled = d, d.Index, true
		}
		diffs = append(diffs, ds...)
	}
	if first {
		all := f.all()
		if !f.find() || !f.decide(all) || !f.findUplinks(all) {
			return diffs, nil // the desired state is unknown, so nothing differs
		}
	}
	ds, err := f.o.Links.CheckUplinks(f.uplinks, f.programmed())
	if err != nil {
		return nil, err
	}
	diffs = append(diffs, ds...)
	if ds, err = f.checkMaps(); err != nil {
		return nil, err
	}
	diffs = append(diffs, ds...)
	ds, err = f.checkRoutes()
	return append(diffs, ds...), err
}

// checkMaps compares the maps with the decisions. The lock is held.
func (f *Router) checkMaps() (diffs []endpoint.Difference, err error) {
	have, err := f.o.Maps.Nodes()
	if err != nil {
		return nil, err
	}
	add := func(key, want, have string) {
		diffs = append(diffs, endpoint.Difference{Subject: "sl_node", Key: key, Want: want, Have: have})
	}
	wanted := map[uint16]bool{}
	for _, p := range f.all() {
		if p.Number == cluster.NoNumber {
			continue
		}
		wanted[p.Number] = true
		e, ok := have[p.Number]
		key := fmt.Sprintf("node %s, number %d", p.Name, p.Number)
		switch want := (nodemap.Entry{Node: f.node(p), NextHops: p.nextHops, Direct: p.direct}); {
		case !ok && empty(want): // the node has not registered its addresses yet
		case !ok:
			add(key, describe(want), "")
		case !sameNode(e.Node, want.Node) || e.NextHops != want.NextHops || e.Direct != want.Direct:
			add(key, describe(want), describe(e))
		}
	}
	local, err := f.o.Maps.Local()
	if err != nil {
		return nil, err
	}
	if want := f.self(); local != want {
		diffs = append(diffs, endpoint.Difference{
			Subject: "sl_node", Key: "this node", Want: fmt.Sprintf("%+v", want), Have: fmt.Sprintf("%+v", local),
		})
	}
	for _, number := range slices.Sorted(maps.Keys(have)) {
		if !wanted[number] && !f.leaving[number] && f.complete {
			add(fmt.Sprintf("number %d", number), "", describe(have[number]))
		}
	}
	return diffs, nil
}

// empty reports whether an entry has no data; the maps do not list such entries.
func empty(e nodemap.Entry) bool {
	return sameNode(e.Node, nodemap.Node{}) && e.NextHops == [2]nodemap.NextHop{} && e.Direct == nodemap.Direct{}
}

func describe(e nodemap.Entry) string {
	var texts []string
	for _, a := range e.Addrs {
		texts = append(texts, a.String())
	}
	text := "at " + strings.Join(texts, " ")
	for i, family := range families {
		if w := e.NextHops[i]; w != (nodemap.NextHop{}) {
			text += fmt.Sprintf(", %s by %v", family, w)
		}
	}
	if e.Direct != (nodemap.Direct{}) {
		text += fmt.Sprintf(", directly by %v", e.Direct)
	}
	return text
}

// checkRoutes compares the routes of the host stack. The lock is held.
func (f *Router) checkRoutes() (diffs []endpoint.Difference, err error) {
	have, err := f.o.Links.Routes()
	if err != nil {
		return nil, err
	}
	add := func(r netip.Prefix, want, have string) {
		diffs = append(diffs, endpoint.Difference{Subject: "route", Key: r.String(), Want: want, Have: have})
	}
	want := f.wanted(f.all())
	for _, r := range slices.SortedFunc(maps.Keys(want), netip.Prefix.Compare) {
		switch h, ok := have[r]; {
		case !ok:
			add(r, want[r].String(), "")
		case !h.equal(want[r]):
			add(r, want[r].String(), h.String())
		}
	}
	for _, r := range slices.SortedFunc(maps.Keys(have), netip.Prefix.Compare) {
		if _, ok := want[r]; !ok && f.complete {
			add(r, "", have[r].String())
		}
	}
	return diffs, nil
}

// Repair repairs what Check reports.
func (f *Router) Repair() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	written, err := f.o.Maps.Nodes()
	if err != nil {
		return err
	}
	f.written = written
	f.local = nil
	f.ensure(true)
	f.applyPaths(true)
	if f.complete {
		wanted := map[uint16]bool{}
		for _, p := range f.all() {
			wanted[p.Number] = true
		}
		for number := range f.written {
			if wanted[number] || f.leaving[number] {
				continue
			}
			if f.try(fmt.Sprintf("remove the entry of number %d", number), f.o.Maps.RemoveNode(number)) {
				delete(f.written, number)
			}
		}
	}
	return f.errs()
}

// errs returns the errors of failed work. The lock is held.
func (f *Router) errs() error {
	var errs []error
	for _, what := range slices.Sorted(maps.Keys(f.failed)) {
		errs = append(errs, fmt.Errorf("%s: %w", what, f.failed[what]))
	}
	return errors.Join(errs...)
}
