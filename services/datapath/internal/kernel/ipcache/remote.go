// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package ipcache

import (
	"errors"
	"net/netip"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipmap"
)

// Remote is the information of the cluster about a prefix.
type Remote struct {
	Identity identity.Numeric
	// Node is the ID of the node that has the prefix; 0: outside all nodes.
	Node uint16
	// ByStack: an address of the node itself; packets to it go through the host's stack.
	ByStack bool
	// OfDevice: a device address of the node; packets from it may arrive outside the tunnel.
	OfDevice bool
}

func (r Remote) flags() (f ipmap.Flags) {
	if r.ByStack {
		f |= ipmap.ByStack
	}
	if r.OfDevice {
		f |= ipmap.OfDevice
	}
	return f
}

// SetRemote sets the cluster's information about a prefix. While the policy tables do not include the identity,
// the prefix is published as unknown-in-cluster; see Known.
func (c *Cache) SetRemote(p netip.Prefix, r Remote) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if was, ok := c.remote[p]; ok && was == r {
		return c.pending(p)
	}
	c.forget(p)
	c.remote[p] = r
	c.users[r.Node]++
	c.hold(p, r.Identity)
	return c.write(p)
}

// RemoveRemote removes the cluster's information about a prefix, if any.
func (c *Cache) RemoveRemote(p netip.Prefix) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, ok := c.remote[p]; !ok {
		return c.pending(p)
	}
	c.forget(p)
	delete(c.remote, p)
	return c.write(p)
}

// pending repeats the last write of a prefix, if that write has failed.
func (c *Cache) pending(p netip.Prefix) error {
	if _, ok := c.unwritten[p]; !ok {
		return nil
	}
	return c.write(p)
}

// forget removes a cluster prefix from the counters.
func (c *Cache) forget(p netip.Prefix) {
	r, ok := c.remote[p]
	if !ok {
		return
	}
	if c.users[r.Node]--; c.users[r.Node] == 0 {
		delete(c.users, r.Node)
	}
	if waiting := c.waiting[r.Identity]; waiting != nil {
		if delete(waiting, p); len(waiting) == 0 {
			delete(c.waiting, r.Identity)
		}
	}
}

// hold records that a prefix waits until the tables include its identity.
func (c *Cache) hold(p netip.Prefix, id identity.Numeric) {
	if !c.unknown(id) {
		return
	}
	if c.waiting[id] == nil {
		c.waiting[id] = map[netip.Prefix]struct{}{}
	}
	c.waiting[id][p] = struct{}{}
}

// unknown reports whether the tables do not include an identity yet. Reserved identities are the same to every
// table, so they are always known.
func (c *Cache) unknown(id identity.Numeric) bool {
	if c.known == nil || id <= identity.MaxReserved {
		return false
	}
	_, ok := c.known[id]
	return !ok
}

// Keep removes the cluster's information about each prefix for which keep returns false. keep must not call the
// Cache.
func (c *Cache) Keep(keep func(netip.Prefix) bool) error {
	var gone []netip.Prefix
	c.mu.Lock()
	for p := range c.remote {
		if !keep(p) {
			gone = append(gone, p)
		}
	}
	c.mu.Unlock()
	var errs []error
	for _, p := range gone {
		errs = append(errs, c.RemoveRemote(p))
	}
	return errors.Join(errs...)
}

// Renumber moves all prefixes of one node ID to another.
func (c *Cache) Renumber(from, to uint16) error {
	var errs []error
	moved := map[netip.Prefix]Remote{}
	c.mu.Lock()
	for p, r := range c.remote {
		if r.Node == from {
			r.Node = to
			moved[p] = r
		}
	}
	c.mu.Unlock()
	for p, r := range moved {
		errs = append(errs, c.SetRemote(p, r))
	}
	return errors.Join(errs...)
}

// doubts reports whether the mapping of a prefix is not trusted: the prefix is the address of an endpoint on a doubted
// node.
func (c *Cache) doubts(p netip.Prefix, r Remote) bool {
	_, ok := c.doubted[r.Node]
	return ok && p.IsSingleIP() && r.Identity.Scope() == identity.ScopeCluster
}

// Doubt publishes the endpoint addresses of the given nodes as unknown-in-cluster, and re-evaluates connections with
// these addresses. A node that a later call does not list is trusted again.
func (c *Cache) Doubt(nodes map[uint16]struct{}) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	before := c.doubted
	c.doubted = nodes
	var errs []error
	for p, r := range c.remote {
		_, was := before[r.Node]
		_, failed := c.unwritten[p]
		if _, is := nodes[r.Node]; is != was || failed {
			errs = append(errs, c.write(p))
		}
	}
	return errors.Join(errs...)
}

// Gate publishes cluster prefixes as unknown-in-cluster until the policy tables include their identity. It replaces the
// identities that the tables include by ids; Known and Unknown then change them.
func (c *Cache) Gate(ids []identity.Numeric) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	held := func(p netip.Prefix) bool { _, ok := c.waiting[c.remote[p].Identity][p]; return ok }
	before := map[netip.Prefix]bool{}
	for p := range c.remote {
		before[p] = held(p)
	}
	c.known = make(map[identity.Numeric]struct{}, len(ids))
	for _, id := range ids {
		c.known[id] = struct{}{}
	}
	clear(c.waiting)
	var errs []error
	for p, r := range c.remote {
		c.hold(p, r.Identity)
		if held(p) != before[p] {
			errs = append(errs, c.write(p))
		}
	}
	return errors.Join(errs...)
}

// Known records that every policy table in use includes the identities, and publishes the prefixes that have them.
func (c *Cache) Known(ids ...identity.Numeric) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	var errs []error
	for _, id := range ids {
		c.known[id] = struct{}{}
		for p := range c.waiting[id] {
			errs = append(errs, c.write(p))
		}
		delete(c.waiting, id)
	}
	return errors.Join(errs...)
}

// Unknown removes identities from those that the policy tables include. Call it before the tables lose them. When it
// returns without an error, the ipcache publishes no cluster prefix with one of the identities.
func (c *Cache) Unknown(ids ...identity.Numeric) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	going := make(map[identity.Numeric]struct{}, len(ids))
	for _, id := range ids {
		going[id] = struct{}{}
		delete(c.known, id)
	}
	var errs []error
	for p, r := range c.remote {
		if _, ok := going[r.Identity]; ok {
			c.hold(p, r.Identity)
			errs = append(errs, c.write(p))
		}
	}
	return errors.Join(errs...)
}

// Counts are the numbers of cluster prefixes.
type Counts struct {
	// Prefixes is the number of prefixes, Waiting the number of prefixes whose identity is not in the policy tables.
	Prefixes, Waiting int
}

// Counts counts the prefixes of the cluster.
func (c *Cache) Counts() (n Counts) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n.Prefixes = len(c.remote)
	for _, waiting := range c.waiting {
		n.Waiting += len(waiting)
	}
	return n
}

// InUse reports whether a prefix refers to a node ID.
func (c *Cache) InUse(node uint16) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.users[node] > 0
}
