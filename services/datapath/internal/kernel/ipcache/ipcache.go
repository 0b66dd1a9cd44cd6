// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package ipcache decides what the ipcache says of each prefix. It is the only
// writer of the maps of package ipmap.
//
// What is known comes in layers: the addresses of this node's endpoints and of
// the host, and the pod ranges of this node. A prefix has what the first of
// them says of it. Who may be an endpoint, and which ranges are the node's, is
// the business of the callers.
package ipcache

import (
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
}

// New returns the owner of the maps. It writes nothing before Settle.
func New(m *ipmap.Maps, log *slog.Logger) *Cache {
	return &Cache{maps: m, log: log, local: map[netip.Addr]identity.Numeric{}, ranges: map[netip.Prefix]struct{}{}}
}

// Settle takes over what an earlier process left in the maps. The ranges are the
// node's, and every address that local names stays with its identity. Prefixes
// that neither accounts for are removed: those of an earlier configuration, and
// those of a process that was killed. What another node holds stays.
func (c *Cache) Settle(ranges []netip.Prefix, local func(netip.Addr) bool) error {
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
		if _, ok := c.ranges[e.Prefix]; ok || e.Node != 0 {
			continue
		}
		if a := e.Prefix.Addr(); e.Prefix.IsSingleIP() && local(a) {
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
// endpoint is unknown-in-cluster.
func (c *Cache) AddRange(p netip.Prefix) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ranges[p] = struct{}{}
	return c.write(p)
}

// DropRange ends a pod range of the node. One that is not there is not an error.
func (c *Cache) DropRange(p netip.Prefix) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.ranges, p)
	return c.write(p)
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
	return ipmap.Info{}, false
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
		return fmt.Errorf("%v: %w", p, err)
	}
	return nil
}
