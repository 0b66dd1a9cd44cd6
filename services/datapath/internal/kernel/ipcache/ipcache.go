// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package ipcache decides the ipcache entry of each prefix. It is the only writer of the maps of package ipmap.
//
// The information comes in layers: the addresses of local endpoints and the host, the pod CIDRs of the local
// node, and the cluster's information about prefixes and addresses of other nodes. A prefix has the entry of
// the first layer that contains it, and inside the local pod CIDRs the cluster's information is ignored. The
// callers decide which endpoints exist and what the cluster's information is.
//
// While the policy tables do not include the identity of a cluster prefix, the prefix is published as
// unknown-in-cluster; if it is outside all nodes, it is not published. So no packet is evaluated with an
// identity that a table may have no entry for.
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
	ranges map[netip.Prefix]struct{}       // guarded by mu; pod CIDRs of the local node

	remote map[netip.Prefix]Remote // guarded by mu; information of the cluster, possibly from an earlier process
	users  map[uint16]int          // guarded by mu; number of prefixes in remote by node ID
	// known are the identities that the tables include; nil: there are no tables.
	known   map[identity.Numeric]struct{}                  // guarded by mu
	waiting map[identity.Numeric]map[netip.Prefix]struct{} // guarded by mu; prefixes of remote by unknown identity

	// doubted are the IDs of nodes whose mappings are not trusted: their addresses may belong to other endpoints now.
	doubted map[uint16]struct{} // guarded by mu

	unwritten map[netip.Prefix]struct{} // guarded by mu; prefixes whose last write has failed
}

// New returns the owner of the maps. It writes nothing before Initialise.
func New(m *ipmap.Maps, log *slog.Logger) *Cache {
	return &Cache{
		maps: m, log: log, local: map[netip.Addr]identity.Numeric{}, ranges: map[netip.Prefix]struct{}{},
		remote: map[netip.Prefix]Remote{}, users: map[uint16]int{},
		waiting: map[identity.Numeric]map[netip.Prefix]struct{}{}, unwritten: map[netip.Prefix]struct{}{},
	}
}

// Initialise takes over the entries of an earlier process. ranges are the pod CIDRs of the node. An address for
// which local returns true keeps its identity. Cluster prefixes stay until Keep removes them, except inside the
// local pod CIDRs. All other prefixes are removed: they belong to an earlier configuration, or to a killed
// process.
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
		c.log.Info("removed an ipcache entry of an earlier process", "prefix", e.Prefix, "identity", e.Identity)
		if err := c.write(e.Prefix); err != nil {
			return err
		}
	}
	return nil
}

// SetLocal sets the identity of an address of a local endpoint or of the host. If it changes, connections with
// the address are evaluated again.
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

// RemoveLocal removes an address of an endpoint or of the host. It is not an error if it is not there.
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

// AddRange adds a pod CIDR of the node: an address in it without an endpoint is unknown-in-cluster, whatever
// the cluster's information.
func (c *Cache) AddRange(p netip.Prefix) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ranges[p] = struct{}{}
	return errors.Join(c.write(p), c.writeInside(p))
}

// DropRange removes a pod CIDR of the node. It is not an error if it is not there.
func (c *Cache) DropRange(p netip.Prefix) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.ranges, p)
	return errors.Join(c.write(p), c.writeInside(p))
}

// writeInside writes the cluster prefixes inside a pod CIDR that was added or removed.
func (c *Cache) writeInside(p netip.Prefix) error {
	var errs []error
	for q := range c.remote {
		if q != p && within(q, p) {
			errs = append(errs, c.write(q))
		}
	}
	return errors.Join(errs...)
}

// within reports whether p contains all of q.
func within(q, p netip.Prefix) bool { return q.Bits() >= p.Bits() && p.Contains(q.Addr()) }

// covered reports whether a prefix is inside one of the local pod CIDRs.
func (c *Cache) covered(q netip.Prefix) bool {
	for p := range c.ranges {
		if within(q, p) {
			return true
		}
	}
	return false
}

// Match returns the entry of the longest prefix that contains an address.
func (c *Cache) Match(a netip.Addr) (ipmap.Info, bool, error) { return c.maps.Match(a) }

// Bump causes every connection with an address to be evaluated again.
func (c *Cache) Bump(a netip.Addr) error { return c.maps.Bump(a) }

// want returns the expected entry of a prefix; false: there should be none.
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

// write writes the expected entry of a prefix.
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
