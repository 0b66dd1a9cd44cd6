// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package registry

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"
)

// This file contains when an address of a deleted endpoint may be reused by another endpoint.
//
// With native routing, other nodes find the identity of a packet only by its source address. A node without etcd
// continues to use its mappings, so an address is not reused while a node may still use its last mapping. It may be
// reused once StaleMappings and a minute have passed since the mapping was removed from the store, or once every node
// has confirmed the removal. In overlay mode each packet carries its identity.

// ErrResting: other nodes may still have an earlier mapping of the address.
var ErrResting = errors.New("other nodes may still map the address to an earlier endpoint")

// margin returns the time that an address stays in quarantine beyond StaleMappings: a minute, or StaleMappings if that
// is shorter.
func (r *Registry) margin() time.Duration { return min(time.Minute, r.cfg.StaleMappings) }

// unbroken returns the time for which this node must have been connected to the store without interruption before it
// frees an address. For that long, a disconnected node may rely on a probe answer in which this node reported that it
// was disconnected, too. It is a minute, or in a large cluster two rounds of probes, at 40 addresses a second. Called
// with mu held.
func (r *Registry) unbroken() time.Duration {
	return max(r.margin(), time.Duration(len(r.view.nodes))*time.Second/10)
}

// rest returns the time for which an address is in quarantine after its last mapping left the store.
func (r *Registry) rest() time.Duration { return r.cfg.StaleMappings + r.margin() }

// Rest returns how long an address is in quarantine if not all nodes confirm the removal of its last mapping.
func (r *Registry) Rest() time.Duration { return r.rest() }

// Reuse reports whether an address of this node may be given to another endpoint.
type Reuse struct {
	Address netip.Addr
	OK      bool
	// Wait is the time until the address may be reused, if nothing changes; 0: unknown.
	Wait   time.Duration
	Reason string // why it may not; "" if it may
}

// mappings are the mappings of this node's addresses that the store may have. All fields are guarded by the registry's
// mu.
type mappings struct {
	// written are the addresses of each endpoint that the store may have: a transaction with the address was tried, and
	// no later transaction has removed it.
	written map[string]map[netip.Addr]struct{}
	count   map[netip.Addr]int     // number of endpoints in written that have the address
	removed map[netip.Addr]removal // point from which on the store had no mapping of the address
	// since is the time at which this process was first connected to the store with a complete listing: earlier
	// removals are unknown. Zero: it was not yet.
	since removal
	heard time.Time // since when the store has answered without interruption; zero: it does not answer

	confirmed Confirmed               // last confirmation by all nodes
	scarce    bool                    // few addresses are free, so this node asks the others to confirm
	asked     map[netip.Addr]struct{} // the addresses of the last CheckReuse that were refused
}

// removal is the point from which on the store had no mapping of an address.
type removal struct {
	at       time.Time
	revision int64 // of the store; 0: of a store that was rebuilt since
}

// Confirmed is a revision of the store up to which each node that may have mappings has
// every removal.
type Confirmed struct {
	Cluster  uint64
	Revision int64
}

func newMappings() mappings {
	return mappings{
		written: map[string]map[netip.Addr]struct{}{}, count: map[netip.Addr]int{}, removed: map[netip.Addr]removal{},
		asked: map[netip.Addr]struct{}{},
	}
}

// try records that a transaction may write addresses of an endpoint.
func (m *mappings) try(endpoint string, addresses []netip.Addr) {
	for _, a := range addresses {
		have := m.written[endpoint]
		if _, ok := have[a]; ok {
			continue
		}
		if have == nil {
			have = map[netip.Addr]struct{}{}
			m.written[endpoint] = have
		}
		have[a] = struct{}{}
		m.count[a]++
	}
}

// wrote records that the store has exactly these addresses of an endpoint since a write.
func (m *mappings) wrote(endpoint string, addresses []netip.Addr, since removal) {
	for a := range m.written[endpoint] {
		if slices.Contains(addresses, a) {
			continue
		}
		delete(m.written[endpoint], a)
		if m.count[a]--; m.count[a] == 0 {
			delete(m.count, a)
			m.removed[a] = since
		}
	}
	if len(m.written[endpoint]) == 0 {
		delete(m.written, endpoint)
	}
}

// prune deletes removals that are too old to delay a reuse, once the store has reported them. Called with mu held.
func (r *Registry) prune(before time.Time) {
	for a, gone := range r.mappings.removed {
		if gone.at.Before(before) && !r.mapped(a, "") {
			delete(r.mappings.removed, a)
		}
	}
}

// rebuilt clears the revisions of a store that was rebuilt.
func (m *mappings) rebuilt() {
	for a, r := range m.removed {
		m.removed[a] = removal{at: r.at}
	}
	m.since.revision, m.confirmed = 0, Confirmed{}
}

// noteFreed records this node's addresses whose mappings another process removed from the store: another node has
// forgotten this one. Called with mu held.
func (r *Registry) noteFreed(revision int64) {
	now := time.Now()
	for _, a := range r.view.freed {
		if _, noted := r.mappings.removed[a]; !noted && !r.mapped(a, "") {
			r.mappings.removed[a] = removal{now, revision}
		}
	}
	r.view.freed = nil
}

// noteHeard records whether the store answers. Called with mu held.
func (r *Registry) noteHeard(up bool) {
	now := time.Now()
	switch {
	case !up:
		r.mappings.heard = time.Time{}
	case r.mappings.heard.IsZero():
		r.mappings.heard = now
	}
	if up && r.view.listed && r.mappings.since.at.IsZero() {
		r.mappings.since = removal{now, r.view.at.Revision}
	}
}

// SetConfirmed sets the revision that all nodes have confirmed.
func (r *Registry) SetConfirmed(c Confirmed) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mappings.confirmed = c
}

// WantsConfirmed returns the revision of the store that all nodes should confirm, so that addresses of this node may
// be reused early; 0: none.
func (r *Registry) WantsConfirmed() (revision int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	m := &r.mappings
	if u := r.registration.Underlay; !m.scarce || u == nil || u.Mode != ModeNative {
		return 0
	}
	now := time.Now()
	for a := range m.asked {
		if gone := m.gone(a); !r.mapped(a, "") && gone.revision > revision && !r.rested(gone, now) {
			revision = gone.revision
		}
	}
	return revision
}

// gone returns when the last mapping of an address was removed from the store.
func (m *mappings) gone(a netip.Addr) removal {
	if gone, ok := m.removed[a]; ok {
		return gone
	}
	return m.since
}

// rested reports whether no node can still have a mapping that was removed from the store. Called with mu held.
func (r *Registry) rested(gone removal, now time.Time) bool {
	c := r.mappings.confirmed
	return now.Sub(gone.at) >= r.rest() ||
		gone.revision > 0 && c.Cluster == r.view.at.Cluster && gone.revision <= c.Revision
}

// CheckReuse returns the routing mode of this node's pods, if the datapath has registered it, and, with native routing,
// which addresses may be reused. If addresses are scarce, it requests from the other nodes the confirmation that they
// have no mappings of the other addresses.
func (r *Registry) CheckReuse(addresses []netip.Addr, scarce bool) (mode RoutingMode, known bool, all []Reuse) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mappings.scarce, r.mappings.asked = scarce, map[netip.Addr]struct{}{}
	u := r.registration.Underlay
	if u == nil || u.Mode != ModeNative {
		if u != nil {
			mode = u.Mode
		}
		return mode, u != nil, nil
	}
	now := time.Now()
	r.prune(now.Add(-r.rest()))
	held := map[netip.Addr]struct{}{}
	for _, d := range r.desired {
		for _, a := range d.Addresses {
			held[a] = struct{}{}
		}
	}
	for _, a := range addresses {
		if _, ok := held[a]; ok {
			// ipam has lost its record of this endpoint's address, and the datapath will claim the address again.
			// MayUse refuses it to any other endpoint.
			all = append(all, Reuse{Address: a, OK: true})
			continue
		}
		decided := r.reuse(a, now)
		if !decided.OK {
			r.mappings.asked[a] = struct{}{}
		}
		all = append(all, decided)
	}
	return ModeNative, true, all
}

// reuse decides about an address that no endpoint has. Called with mu held.
func (r *Registry) reuse(a netip.Addr, now time.Time) Reuse {
	m := &r.mappings
	out := Reuse{Address: a}
	wait := func(d time.Duration, format string, args ...any) Reuse {
		out.Wait, out.Reason = d, fmt.Sprintf(format, args...)
		return out
	}
	switch {
	case r.mapped(a, ""):
		return wait(0, "etcd still has the mapping of its last endpoint")
	case m.heard.IsZero() || m.since.at.IsZero():
		return wait(0, "etcd does not answer, so it is unknown whether other nodes still map it")
	}
	if gone := m.gone(a); !r.rested(gone, now) {
		return wait(r.rest()-now.Sub(gone.at),
			"its last mapping was removed from etcd less than %s ago, and a node without etcd may still use it", r.rest())
	}
	if least := r.unbroken(); now.Sub(m.heard) < least {
		return wait(least-now.Sub(m.heard), "etcd has answered without interruption for less than %s", least)
	}
	out.OK = true
	return out
}

// mapped reports whether the store may have a mapping of an address of this node by an
// endpoint other than the given one. Called with mu held.
func (r *Registry) mapped(a netip.Addr, except string) bool {
	count := r.mappings.count[a]
	if _, ok := r.mappings.written[except][a]; ok {
		count--
	}
	if count > 0 {
		return true
	}
	own := r.view.nodes[r.cfg.Node]
	if own == nil {
		return false
	}
	for e := range own.endpoints.having(a) {
		if own.endpoints.byName[except] != e {
			return true
		}
	}
	return false
}

// MayUse returns ErrResting if, as far as this process knows, other nodes may map one of the addresses to another
// endpoint of this node. An endpoint therefore does not get another one's permissions even if ipam allocates an address
// too early.
func (r *Registry) MayUse(endpoint string, addresses []netip.Addr) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if u := r.registration.Underlay; u == nil || u.Mode != ModeNative {
		return nil
	}
	if d, ok := r.desired[endpoint]; ok && slices.Equal(d.Addresses, addresses) {
		return nil // the endpoint already has the addresses
	}
	now := time.Now()
	for _, a := range addresses {
		removed, gone := r.mappings.removed[a]
		switch {
		case r.mapped(a, endpoint):
			return fmt.Errorf("%w: %s: etcd still has its mapping", ErrResting, a)
		case gone && !r.rested(removed, now):
			return fmt.Errorf("%w: %s: its mapping was removed from etcd less than %s ago", ErrResting, a, r.rest())
		}
	}
	return nil
}
