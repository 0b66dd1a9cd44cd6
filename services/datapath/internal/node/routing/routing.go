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
	"time"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/node/cluster"
	"github.com/sluice-net/sluice/services/datapath/internal/node/nodemap"
	"github.com/sluice-net/sluice/services/datapath/internal/node/xfrm"
)

// Options of a Router. All except Port and Holders are required unless nil is documented.
type Options struct {
	Mode cluster.Mode // None: the router only maintains the programs of uplinks
	Port uint16       // UDP port of the tunnel
	MTU  uint16       // of the node's pods and of the tunnel device
	// Addresses returns the addresses by which other nodes reach this node.
	Addresses func() ([]netip.Addr, error)
	// Overlay returns the node's own addresses inside its ranges, at most one per family. While they are unknown, the
	// values of a previous process stay in the maps.
	Overlay func() (addrs []netip.Addr, known bool)
	// Services makes uplink programs translate services for external packets.
	Services bool
	// AddressID returns the ID by which programs refer to an address of this node; 0: not assigned yet.
	AddressID func(netip.Addr) (uint16, error)
	// Limited: only configured devices are uplinks.
	Limited bool
	// Holders are the node IDs of ranges, as a previous process left them.
	Holders map[netip.Prefix]uint16
	// Name returns the name of the node with a node ID; "": unknown.
	Name func(number uint16) string
	// Repair makes the router repair changes by others as soon as the kernel reports them.
	Repair bool
	Maps   Maps
	Links  Links
	// Policies are used with native routing, and with Shortcut; nil: none.
	Policies Policies
	// Shortcut, in the mode Overlay: tunnel packets bypass the tunnel device where the kernel would only pass them on.
	Shortcut bool
	// Monotonic returns CLOCK_MONOTONIC; required with Shortcut.
	Monotonic func() (time.Duration, error)
	Log       *slog.Logger
}

// Router forwards packets to other nodes. Its decisions depend on the nodes that it was given and on the kernel's
// state. It reconciles immediately when either changes, and it polls paths, because the kernel sends no event when it
// learns or forgets a smaller path MTU.
//
// Entries of a previous process are not removed before Complete. Entries of nodes that are not listed yet keep working,
// and follow changes of devices and routes like all others.
type Router struct {
	o    Options
	wake chan struct{}

	mu       sync.Mutex
	peers    map[string]*peer         // guarded by mu; by name
	adopted  map[uint16]*peer         // guarded by mu; by node ID; nodes that are not listed yet
	holders  map[netip.Prefix]uint16  // guarded by mu; node IDs of ranges
	leaving  map[uint16]bool          // guarded by mu; node IDs that were replaced, until Leave
	complete bool                     // guarded by mu
	written  map[uint16]nodemap.Entry // guarded by mu; content of the maps
	local    *nodemap.Local           // guarded by mu; last written value; nil: none
	world                             // guarded by mu
}

// world is the state that the last reconciliation found.
type world struct {
	situation
	known   bool                // the addresses of this node are known
	device  endpoint.HostDevice // of the tunnel
	settled bool                // the tunnel device, or that there is none, is known or was adopted
	overlay []netip.Addr
	byStack bool   // packets between pods of two nodes pass the host stack
	why     string // reason for byStack
	closed  string // why no direct path is used although Shortcut is set; "": they are used
	open    bool   // the last reconciliation has allowed direct paths
	ports   [2]uint16
	sources [nodemap.Sources]uint16
	uplinks []endpoint.HostDevice
	routes  map[netip.Prefix]Route // routes of Sluice
	foreign map[netip.Prefix]string
	failed  map[string]error // last error, by the work that failed
}

// New adopts the entries of a previous process. It changes nothing.
func New(o Options) (*Router, error) {
	f := &Router{
		o: o, wake: make(chan struct{}, 1),
		peers: map[string]*peer{}, adopted: map[uint16]*peer{}, holders: map[netip.Prefix]uint16{},
		leaving: map[uint16]bool{},
	}
	f.mode, f.port, f.mtu, f.failed = o.Mode, o.Port, o.MTU, map[string]error{}
	f.shortcut = o.Shortcut && o.Mode == cluster.Overlay
	f.closed = "IPsec policies have not been read yet"
	maps.Copy(f.holders, o.Holders)
	var err error
	if f.written, err = o.Maps.Nodes(); err != nil {
		return nil, fmt.Errorf("read the entries of other nodes: %w", err)
	}
	for number, e := range f.written {
		f.adopted[number] = adopt(o, number, e)
	}
	return f, nil
}

// adopt creates a peer from an entry of the maps.
func adopt(o Options, number uint16, e nodemap.Entry) *peer {
	p := &peer{adopted: true, Member: cluster.Member{Name: o.Name(number), Number: number}}
	if p.Name == "" {
		p.Name = fmt.Sprintf("number %d", number)
	}
	for _, a := range slices.Concat([]netip.Addr{e.IPv4, e.IPv6}, e.Addrs) {
		if a.IsValid() && !slices.Contains(p.Addresses, a) {
			p.Addresses = append(p.Addresses, a)
		}
	}
	for _, w := range e.NextHops {
		switch {
		case w.Flags&nodemap.Overlay != 0:
			// The other node may limit the MTU of the entry; its own MTU is not known yet.
			p.Mode, p.TunnelPort, p.MTU = cluster.Overlay, o.Port, w.MTU
		case w.Flags&(nodemap.Hop|nodemap.Lookup) != 0:
			p.Mode = cluster.Native
		}
	}
	p.nextHops, p.direct = e.NextHops, e.Direct // until the next decision
	return p
}

// Intervals of Run.
const (
	// pollInterval is the maximum delay before a lowered path MTU or a detached program is noticed.
	pollInterval = 500 * time.Millisecond
	// wholePolls is the number of polls per full reconciliation.
	wholePolls = 60
	// lookPause is the minimum time between two full reconciliations.
	lookPause = 50 * time.Millisecond
	// watchPause is the pause before a failed watch is restarted.
	watchPause = time.Second
)

// Run keeps the desired state until ctx ends, and then leaves it in place.
func (f *Router) Run(ctx context.Context) error {
	var watch sync.WaitGroup
	defer watch.Wait()
	watch.Go(func() { f.watch(ctx, "changes of devices and routes", f.o.Links.Watch) })
	if (f.o.Mode == cluster.Native || f.shortcut) && f.o.Policies != nil {
		watch.Go(func() { f.watch(ctx, "changes of IPsec policies", f.o.Policies.Watch) })
	}
	poll := time.NewTicker(pollInterval)
	defer poll.Stop()
	for polls := 1; ; polls++ {
		whole := polls%wholePolls == 0
		select {
		case <-f.wake:
			whole = true
		case <-poll.C:
			whole = whole || f.disturbed()
		case <-ctx.Done():
			return ctx.Err()
		}
		f.reconcile(whole)
		if whole {
			select {
			case <-time.After(lookPause):
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	}
}

// watch wakes Run when the kernel reports changes.
func (f *Router) watch(ctx context.Context, what string, watch func(context.Context, func()) error) {
	for ctx.Err() == nil {
		err := watch(ctx, f.trigger)
		if ctx.Err() != nil {
			return
		}
		if !errors.Is(err, xfrm.ErrAbsent) {
			f.o.Log.Error("cannot watch netlink events; retrying", "changes", what, log.Err(err))
		}
		select {
		case <-time.After(watchPause):
		case <-ctx.Done():
		}
	}
}

// trigger makes Run reconcile everything.
func (f *Router) trigger() {
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

// reconcile applies the desired state, or only refreshes what depends on the MTU of paths.
func (f *Router) reconcile(whole bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if whole || len(f.failed) > 0 {
		f.ensure(f.o.Repair || f.local == nil)
	}
	f.open = f.applyPaths(whole || len(f.failed) > 0) && f.openShortcut()
}

// disturbed reports whether programs have changed without an event.
func (f *Router) disturbed() bool {
	disturbed, err := f.o.Links.Disturbed()
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.try("look at the programs of the routing devices", err) && disturbed
}

// try records the result of an attempt, and logs it if it changed. It returns true on success.
func (f *Router) try(what string, err error) bool {
	was := f.failed[what]
	switch {
	case err == nil:
		delete(f.failed, what)
		if was != nil {
			f.o.Log.Info("retry succeeded", "work", what)
		}
		return true
	case was == nil || was.Error() != err.Error():
		f.o.Log.Error("work failed; retrying", "work", what, log.Err(err))
	}
	f.failed[what] = err
	return false
}

// ensure reconciles what is independent of other nodes: the tunnel device, and the state of this node in the maps. The
// lock is held.
func (f *Router) ensure(repair bool) {
	if f.o.Mode == cluster.Overlay && (repair || f.failed[makeTunnel] != nil) && !f.ensureTunnel() {
		return
	}
	if f.o.Mode != cluster.Overlay && f.local == nil {
		f.try("remove the tunnel device", f.o.Links.RemoveTunnel())
	}
	if !f.find() {
		return
	}
	l := f.self()
	if f.local == nil || *f.local != l {
		if f.try("write the entry of this node to the maps", f.o.Maps.SetLocal(l)) {
			f.local = &l
		}
	}
}

// makeTunnel is the work of ensureTunnel.
const makeTunnel = "make the tunnel device"

// ensureTunnel makes or repairs the tunnel device. While it is not known whether the node has one, packets continue to
// use the last device, at first the device of a previous process. It returns false if that is not known either. The
// lock is held.
func (f *Router) ensureTunnel() bool {
	d, err := f.o.Links.EnsureTunnel(Tunnel{Port: f.o.Port, MTU: f.o.MTU})
	f.try(makeTunnel, err)
	var none NoTunnelError
	switch {
	case err == nil || d.Index != 0 || errors.As(err, &none):
		f.device, f.tunnel, f.settled = d, d.Index, true
	case !f.settled:
		have, lerr := f.o.Maps.Local()
		if !f.try("read the tunnel device of a previous process", lerr) {
			return false
		}
		f.tunnel, f.settled = have.TunnelIfindex, true
	}
	f.noTunnel = ""
	if f.tunnel == 0 {
		f.noTunnel = err.Error()
	}
	return true
}

// find finds the addresses of this node, and the source addresses of packets to backends on other nodes. It returns
// true if the state of this node may be written to the maps. The lock is held.
func (f *Router) find() bool {
	addrs, err := f.o.Addresses()
	if f.try("find the addresses of this node", err) {
		f.addrs, f.known = addrs, true
	}
	f.findPolicies()
	f.findShortcut()
	overlay, overlayKnown := f.o.Overlay()
	f.overlay = overlay
	if !f.o.Services {
		f.sources = [nodemap.Sources]uint16{}
		return true
	}
	have, err := f.o.Maps.Local()
	if !f.try("read the entry of this node", err) {
		return false
	}
	f.sources = have.Sources
	f.findSource(nodemap.SourceOverlay, f.overlay, overlayKnown)
	f.findSource(nodemap.SourceUplink, f.addrs, f.known)
	return true
}

// self returns the desired state of this node in the maps. The lock is held.
func (f *Router) self() nodemap.Local {
	return nodemap.Local{
		Overlay: f.mode == cluster.Overlay, Native: f.mode == cluster.Native, ByStack: f.byStack,
		TunnelIfindex: f.tunnel, Sources: f.sources,
	}
}

// findPolicies decides whether packets between pods of two nodes pass the host stack, which is needed for IPsec
// policies. While the policies cannot be read, the last decision stays; without one, packets pass the stack. The lock
// is held.
func (f *Router) findPolicies() {
	if f.o.Mode != cluster.Native || f.o.Policies == nil {
		return
	}
	p, err := f.o.Policies.Policies()
	if !f.try("read IPsec policies", err) {
		if f.why == "" {
			f.byStack, f.why = f.left(), "IPsec policies have not been read yet"
		}
		return
	}
	if was := f.byStack; p.Any() != was || f.why == "" {
		f.o.Log.Info("path of packets between pods of two nodes", "by_stack", p.Any(), "why", p.String())
	}
	f.byStack, f.why = p.Any(), p.String()
}

// left returns the decision of the previous process; true if it is unknown or was made in another mode. The lock is
// held.
func (f *Router) left() bool {
	l, err := f.o.Maps.Local()
	return err != nil || !l.Native || l.ByStack
}

// findSource finds the source address of packets to backends on other nodes, by family: the first address. If it is
// unknown, or has no ID yet, the address of the previous process or reconciliation stays, because without one the
// programs drop new connections. The lock is held.
func (f *Router) findSource(kind int, addrs []netip.Addr, known bool) {
	for family := range families {
		first := slices.IndexFunc(addrs, func(a netip.Addr) bool { return at(a) == family })
		if first < 0 {
			if known {
				f.sources[kind+family] = 0
			}
			continue
		}
		place, err := f.o.AddressID(addrs[first])
		if err == nil && place == 0 {
			err = errors.New("the address is not yet in the host address map")
		}
		if f.try(fmt.Sprintf("set %v as the source of packets to backends on other nodes", addrs[first]), err) {
			f.sources[kind+family] = place
		}
	}
}

// all returns the peers, including adopted ones. The lock is held.
func (f *Router) all() []*peer {
	all := slices.SortedFunc(maps.Values(f.peers), func(a, b *peer) int { return int(a.Number) - int(b.Number) })
	for _, number := range slices.Sorted(maps.Keys(f.adopted)) {
		all = append(all, f.adopted[number])
	}
	return all
}

// applyPaths decides the next hops of all nodes and applies them. It returns false if paths are unknown. The lock is
// held.
func (f *Router) applyPaths(whole bool) bool {
	all := f.all()
	if !f.decide(all) {
		return false // paths are unknown: everything stays
	}
	changed := false
	for _, p := range all {
		changed = f.write(p, whole) || changed
	}
	if whole {
		f.ensureUplinks(all)
	}
	if whole || changed {
		f.ensureRoutes(all, whole)
	}
	f.try("resolve next hops", f.o.Links.Resolve(f.hops(all)))
	return true
}

// decide decides for the given nodes. It returns false if paths are unknown. The lock is held.
func (f *Router) decide(some []*peer) bool {
	if !f.known || f.mode == cluster.Overlay && !f.settled {
		return false
	}
	var addrs []netip.Addr
	for _, p := range some {
		for _, a := range f.asks(p) {
			if a.IsValid() {
				addrs = append(addrs, a)
			}
		}
	}
	found, err := f.o.Links.Paths(addrs)
	if !f.try("look up paths", err) {
		return false
	}
	with := map[uint16][2]bool{}
	for r, number := range f.holders {
		has := with[number]
		has[at(r.Addr())] = true
		with[number] = has
	}
	for _, p := range some {
		p.ranges = with[p.Number]
		var paths [2]Path
		for i, a := range f.asks(p) {
			if a.IsValid() {
				paths[i], found = found[0], found[1:]
			}
		}
		d := f.decideWith(p, paths)
		if d.why != p.why && !(p.why == "" && d.why == "") {
			f.report(p, d)
		}
		p.decision = d
	}
	return true
}

// decideWith decides for a node with the paths to the addresses of asks. While the path to an address cannot be looked
// up, the last known path is used. Packets then pass the tunnel device, because direct paths require a comparison with
// the kernel's routes. The lock is held.
func (f *Router) decideWith(p *peer, paths [2]Path) decision {
	asks, last := f.asks(p), p.paths
	// A decision of a previous process is known only by its next hops.
	adopted := p.nextHops != [2]nodemap.NextHop{} && len(last[0].Hops)+len(last[1].Hops) == 0 &&
		(f.mode != cluster.Overlay || p.nextHops[0].Ifindex == f.tunnel) && sameNode(f.written[p.Number].Node, f.node(p))
	unknown := ""
	for i, path := range paths {
		switch known := p.asked[i] == asks[i] && len(last[i].Hops) > 0; {
		case !path.Unknown:
			continue
		case known:
			paths[i] = last[i]
		case !adopted:
			continue
		}
		unknown = first(unknown, path.Err.Error())
	}
	d := f.situation.decide(p, paths)
	if unknown != "" {
		if adopted {
			d = decision{nextHops: p.nextHops}
		}
		d.direct, d.device = nodemap.Direct{}, ""
		if f.shortcut {
			d.device = "the path is not known"
		}
		d.notes = append(d.notes, "the last known path is used: "+unknown)
	}
	d.asked = asks
	return d
}

func (f *Router) report(p *peer, d decision) {
	if d.why == "" {
		f.o.Log.Info("node reachable", "node", p.Name)
		return
	}
	f.o.Log.Warn("node not reachable", "node", p.Name, "why", d.why)
}

// write writes the decision for a node to the maps, and returns true if something changed. Failed writes are repeated
// if again is set. The lock is held.
func (f *Router) write(p *peer, again bool) (changed bool) {
	if p.Number == cluster.NoNumber {
		return false
	}
	have, ok := f.written[p.Number]
	if want := f.node(p); (!ok || !sameNode(have.Node, want)) && (again || p.err == nil) {
		p.err = f.setNode(p.Number, want, ok && (have.IPv4 != want.IPv4 || have.IPv6 != want.IPv6))
		have, ok = f.written[p.Number]
		changed = true
	}
	if !ok || have.NextHops == p.nextHops && have.Direct == p.direct {
		return changed
	}
	if err := f.writePaths(p, &have); err != nil {
		p.err = err
		return changed
	}
	f.written[p.Number] = have
	return true
}

// writePaths writes the next hops and the direct path to a node. The programs use the direct path for packets of the
// next hops. So writePaths removes the direct path before it changes the next hops, and writes the new one afterwards.
// The lock is held.
func (f *Router) writePaths(p *peer, have *nodemap.Entry) error {
	if p.direct == (nodemap.Direct{}) && have.Direct != p.direct {
		if err := f.o.Maps.SetDirect(p.Number, p.direct); err != nil {
			return err
		}
	}
	if have.NextHops != p.nextHops {
		if err := f.o.Maps.SetNextHops(p.Number, p.nextHops[0], p.nextHops[1]); err != nil {
			return err
		}
	}
	if p.direct != (nodemap.Direct{}) && have.Direct != p.direct {
		if err := f.o.Maps.SetDirect(p.Number, p.direct); err != nil {
			return err
		}
	}
	have.NextHops, have.Direct = p.nextHops, p.direct
	return nil
}

// setNode writes an entry. If other is set, the entry with this node ID belongs to a node of a previous process and is
// removed first. The lock is held.
func (f *Router) setNode(number uint16, n nodemap.Node, other bool) error {
	if other {
		if err := f.o.Maps.RemoveNode(number); err != nil {
			return err
		}
		delete(f.written, number)
	}
	err := f.o.Maps.SetNode(number, n)
	if err == nil {
		was := f.written[number]
		f.written[number] = nodemap.Entry{Node: n, NextHops: was.NextHops, Direct: was.Direct}
		return nil
	}
	// An address may still belong to a node ID that is being removed; the maps have the rest.
	have, lerr := f.o.Maps.Nodes()
	if e, ok := have[number]; ok {
		f.written[number] = e
	}
	return errors.Join(err, lerr)
}

func sameNode(a, b nodemap.Node) bool {
	sorted := func(n nodemap.Node) []netip.Addr {
		return slices.SortedFunc(slices.Values(n.Addrs), netip.Addr.Compare)
	}
	return a.IPv4 == b.IPv4 && a.IPv6 == b.IPv6 && slices.Equal(sorted(a), sorted(b))
}

// hops returns the neighbours that packets to all nodes are sent to. The lock is held.
func (f *Router) hops(all []*peer) []Nexthop {
	seen := map[netip.Addr]bool{}
	var hops []Nexthop
	for _, p := range all {
		for _, h := range p.hops(f.asks(p)) {
			if !seen[h.Via] {
				seen[h.Via] = true
				hops = append(hops, h)
			}
		}
	}
	return hops
}

// ensureUplinks finds and configures the uplinks. The lock is held.
func (f *Router) ensureUplinks(all []*peer) {
	if f.findUplinks(all) {
		f.try("prepare the uplinks", f.o.Links.EnsureUplinks(f.uplinks, f.programmed()))
	}
}

// findUplinks finds the uplinks. It returns false if that failed. The lock is held.
func (f *Router) findUplinks(all []*peer) bool {
	var used []uint32
	for _, p := range all {
		for _, path := range p.paths {
			for _, h := range path.Hops {
				used = append(used, h.Ifindex)
			}
		}
	}
	uplinks, err := f.o.Links.Uplinks(f.addrs, used)
	if !f.try("find the uplinks", err) {
		return false
	}
	f.uplinks, f.limited = uplinks, nil
	if f.o.Limited {
		f.limited = []uint32{}
		for _, d := range uplinks {
			f.limited = append(f.limited, d.Index)
		}
	}
	return true
}

// programmed reports whether uplinks need programs.
func (f *Router) programmed() bool {
	return f.o.Mode == cluster.Native || f.o.Services || f.shortcut
}

// wanted returns the desired routes. The lock is held.
func (f *Router) wanted(all []*peer) map[netip.Prefix]Route {
	numbered := map[uint16]*peer{}
	for _, p := range all {
		numbered[p.Number] = p
	}
	routes := map[netip.Prefix]Route{}
	for r, number := range f.holders {
		p := numbered[number]
		if p == nil || number == cluster.NoNumber {
			continue
		}
		route, ok := f.route(p.decision, r, f.asks(p), f.overlay)
		if ok && len(route.Hops) == 0 { // the path is not known, so the route of a previous process stays
			route, ok = f.routes[r]
		}
		if ok {
			routes[r] = route
		}
	}
	return routes
}

// ensureRoutes creates missing routes and, once the listing is complete, removes others. The lock is held.
func (f *Router) ensureRoutes(all []*peer, whole bool) {
	if whole || f.routes == nil {
		routes, err := f.o.Links.Routes()
		if !f.try("list routes to other nodes", err) {
			return
		}
		f.routes = routes
	}
	want := f.wanted(all)
	var errs []error
	for p, r := range want {
		if have, ok := f.routes[p]; ok && have.equal(r) {
			continue
		}
		err := f.o.Links.SetRoute(r)
		if err == nil {
			f.routes[p] = r
		}
		errs = append(errs, err)
	}
	for p := range f.routes {
		if _, ok := want[p]; ok || !f.complete {
			continue
		}
		err := f.o.Links.RemoveRoute(p)
		if err == nil {
			delete(f.routes, p)
		}
		errs = append(errs, err)
	}
	if f.try("make routes to other nodes", errors.Join(errs...)) && whole {
		foreign, err := f.o.Links.Foreign(slices.Collect(maps.Keys(want)))
		if f.try("compare routes to other nodes", err) {
			f.foreign = foreign
		}
	}
}

// Join implements cluster.Router.
func (f *Router) Join(members []cluster.Member) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(members) == 0 {
		return
	}
	joined := make([]*peer, 0, len(members))
	for _, m := range members {
		p := &peer{Member: m}
		if a, ok := f.adopted[m.Number]; ok {
			p.decision = a.decision // only changes are reported
			delete(f.adopted, m.Number)
		} else if was, ok := f.peers[m.Name]; ok {
			p.decision = was.decision
			if was.Number != m.Number {
				f.leaving[was.Number] = true
			}
		}
		f.peers[m.Name] = p
		joined = append(joined, p)
	}
	if f.local == nil {
		f.ensure(true)
	}
	// Even without paths, entries are written before other maps refer to them.
	f.decide(joined)
	for _, p := range joined {
		f.write(p, true)
	}
	f.trigger()
}

// Hold implements cluster.Router.
func (f *Router) Hold(holders map[netip.Prefix]uint16) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for p, number := range holders {
		if number == 0 {
			delete(f.holders, p)
		} else {
			f.holders[p] = number
		}
	}
	f.trigger()
}

// Leave implements cluster.Router.
func (f *Router) Leave(numbers []uint16) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.leave(numbers)
}

func (f *Router) leave(numbers []uint16) {
	for _, number := range numbers {
		maps.DeleteFunc(f.peers, func(_ string, p *peer) bool { return p.Number == number && number != cluster.NoNumber })
		delete(f.adopted, number)
		delete(f.leaving, number)
		if _, ok := f.written[number]; !ok {
			continue
		}
		if err := f.o.Maps.RemoveNode(number); err != nil {
			f.o.Log.Error("cannot remove the map entry of a node", "number", number, log.Err(err))
			continue
		}
		delete(f.written, number)
	}
	if len(numbers) > 0 {
		f.trigger() // another node ID may have waited for an address
	}
}

// Complete implements cluster.Router.
func (f *Router) Complete() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.complete = true
	kept := map[uint16]bool{}
	for _, p := range f.peers {
		kept[p.Number] = true
	}
	var gone []uint16
	for number := range f.written {
		if !kept[number] {
			gone = append(gone, number)
		}
	}
	f.leave(gone)
	clear(f.adopted)
	maps.DeleteFunc(f.holders, func(_ netip.Prefix, number uint16) bool { return !kept[number] })
	f.trigger()
}

// Remove removes what a Router created, for a node that sends no packets to other nodes. Missing objects are not an
// error.
func Remove(links interface{ RemoveAll() error }, m Maps) error {
	errs := []error{m.SetShortcut(nodemap.Shortcut{}), m.SetLocal(nodemap.Local{}), links.RemoveAll()}
	nodes, err := m.Nodes()
	errs = append(errs, err)
	for number := range nodes {
		errs = append(errs, m.RemoveNode(number))
	}
	return errors.Join(errs...)
}
