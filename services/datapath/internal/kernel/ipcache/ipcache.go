// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package ipcache decides what the ipcache says of each prefix. It is the only
// writer of the maps of package ipmap.
//
// What is known comes in layers: the addresses of this node's endpoints and of
// the host, the pod ranges of this node, and what the cluster says of the ranges
// and addresses of other nodes. A prefix has what the first of them says of it,
// and inside the node's own ranges the cluster counts for nothing. Who may be an
// endpoint, and what the cluster says, is the business of the callers.
//
// A prefix of the cluster whose identity the policy tables do not know is
// published as unknown-in-cluster until they do, and one on no node is not
// published: no packet is evaluated as of an identity for which a table may
// lack its row.
package ipcache

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipmap"
)

// Cache is the ipcache of the node. Its methods may be called concurrently.
type Cache struct {
	maps *ipmap.Maps
	log  *slog.Logger

	mu     sync.Mutex
	local  map[netip.Addr]identity.Numeric // guarded by mu; addresses of endpoints and of the host
	ranges map[netip.Prefix]struct{}       // guarded by mu; pod ranges of this node

	remote map[netip.Prefix]Remote // guarded by mu; what the cluster says, or said to an earlier process
	users  map[uint16]int          // guarded by mu; prefixes of remote by the number of their node
	// known are the identities that the tables know; nil: there are no tables.
	known   map[identity.Numeric]struct{}                  // guarded by mu
	waiting map[identity.Numeric]map[netip.Prefix]struct{} // guarded by mu; of remote, by an identity that is not known

	// doubted are the numbers of nodes whose endpoints may have other addresses by now.
	doubted map[uint16]struct{} // guarded by mu

	unwritten map[netip.Prefix]struct{} // guarded by mu; prefixes of which the last write has failed
}

// New returns the owner of the maps. It writes nothing before Settle.
func New(m *ipmap.Maps, log *slog.Logger) *Cache {
	return &Cache{
		maps: m, log: log, local: map[netip.Addr]identity.Numeric{}, ranges: map[netip.Prefix]struct{}{},
		remote: map[netip.Prefix]Remote{}, users: map[uint16]int{},
		waiting: map[identity.Numeric]map[netip.Prefix]struct{}{}, unwritten: map[netip.Prefix]struct{}{},
	}
}

// Initialise takes over what an earlier process left in the maps. The ranges are the
// node's, and every address that local names stays with its identity. What the
// cluster said stays until Keep removes it, but for what lies in the node's own
// ranges. Prefixes that nothing accounts for are removed: those of an earlier
// configuration, and those of a process that was killed.
func (c *Cache) Initialise(ranges []netip.Prefix, local func(netip.Addr) bool) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	have, err := c.maps.List()
	if err != nil {
		return err
	}
	for _, p := range ranges {
		c.ranges[p] = struct{}{}
		if err := c.write(p); err != nil {
			return err
		}
	}
	for _, e := range have {
		a := e.Prefix.Addr()
		_, own := c.ranges[e.Prefix]
		switch {
		case own:
			continue
		case e.Node != 0 || e.Flags&ipmap.Outside != 0:
			r := Remote{e.Identity, e.Node, e.Flags&ipmap.ByStack != 0, e.Flags&ipmap.OfDevice != 0}
			c.remote[e.Prefix] = r
			c.users[r.Node]++
			if !c.covered(e.Prefix) {
				continue
			}
		case e.Prefix.IsSingleIP() && local(a):
			c.local[a] = e.Identity
			continue
		}
		c.log.Info("left by an earlier process, removed", "prefix", e.Prefix, "identity", e.Identity)
		if err := c.write(e.Prefix); err != nil {
			return err
		}
	}
	return nil
}

// SetLocal sets the identity of an address of an endpoint of this node, or of
// the host. Connections with the address are evaluated again if it changes.
func (c *Cache) SetLocal(a netip.Addr, id identity.Numeric) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	was, ok := c.local[a]
	c.local[a] = id
	err := c.write(ipmap.HostPrefix(a))
	if err != nil && !ok {
		delete(c.local, a)
	} else if err != nil {
		c.local[a] = was
	}
	return err
}

// RemoveLocal removes an address of an endpoint, or of the host. One that is not
// there is not an error.
func (c *Cache) RemoveLocal(a netip.Addr) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	was, ok := c.local[a]
	delete(c.local, a)
	err := c.write(ipmap.HostPrefix(a))
	if err != nil && ok {
		c.local[a] = was
	}
	return err
}

// AddRange makes a prefix a pod range of the node: an address of it without an
// endpoint is unknown-in-cluster, whatever the cluster says of it.
func (c *Cache) AddRange(p netip.Prefix) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ranges[p] = struct{}{}
	return errors.Join(c.write(p), c.writeInside(p))
}

// DropRange ends a pod range of the node. One that is not there is not an error.
func (c *Cache) DropRange(p netip.Prefix) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.ranges, p)
	return errors.Join(c.write(p), c.writeInside(p))
}

// writeInside writes what the cluster says of prefixes inside a range that came
// or went.
func (c *Cache) writeInside(p netip.Prefix) error {
	var errs []error
	for q := range c.remote {
		if q != p && within(q, p) {
			errs = append(errs, c.write(q))
		}
	}
	return errors.Join(errs...)
}

// within says whether p contains all of q.
func within(q, p netip.Prefix) bool { return q.Bits() >= p.Bits() && p.Contains(q.Addr()) }

// covered says whether a prefix lies in one of the node's own ranges.
func (c *Cache) covered(q netip.Prefix) bool {
	for p := range c.ranges {
		if within(q, p) {
			return true
		}
	}
	return false
}

// Match is what the longest prefix that holds an address says.
func (c *Cache) Match(a netip.Addr) (ipmap.Info, bool, error) { return c.maps.Match(a) }

// Bump makes every connection with an address be evaluated again.
func (c *Cache) Bump(a netip.Addr) error { return c.maps.Bump(a) }

// want is what the ipcache is to say of a prefix; false: nothing.
func (c *Cache) want(p netip.Prefix) (ipmap.Info, bool) {
	if p.IsSingleIP() {
		if id, ok := c.local[p.Addr()]; ok {
			return ipmap.Info{Identity: id}, true
		}
	}
	if _, ok := c.ranges[p]; ok {
		return ipmap.Info{Identity: identity.UnknownInCluster, Flags: ipmap.PodRange}, true
	}
	r, ok := c.remote[p]
	if !ok || c.covered(p) {
		return ipmap.Info{}, false
	}
	switch unknown := c.unknown(r.Identity); {
	case r.Node == 0 && unknown:
		return ipmap.Info{}, false
	case r.Node == 0:
		return ipmap.Info{Identity: r.Identity, Flags: ipmap.Outside}, true
	case unknown || c.doubts(p, r):
		return ipmap.Info{Identity: identity.UnknownInCluster, Node: r.Node, Flags: r.flags()}, true
	}
	return ipmap.Info{Identity: r.Identity, Node: r.Node, Flags: r.flags()}, true
}

// write makes the maps say of a prefix what they are to say.
func (c *Cache) write(p netip.Prefix) error {
	info, ok := c.want(p)
	var err error
	if ok {
		err = c.maps.Set(p, info)
	} else {
		err = c.maps.Remove(p)
	}
	if err != nil {
		c.unwritten[p] = struct{}{}
		return fmt.Errorf("%v: %w", p, err)
	}
	delete(c.unwritten, p)
	return nil
}
