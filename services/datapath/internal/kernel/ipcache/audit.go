// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package ipcache

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipmap"
)

// Difference is a prefix of which the maps say another thing than they are to.
type Difference struct {
	Prefix     netip.Prefix
	Want, Have string // empty: nothing
}

// Audit compares the maps with what they are to say of pod ranges, of the cluster,
// and of prefixes that nothing accounts for; the addresses of endpoints and of
// the host are compared with those. With repair it writes what differs.
func (c *Cache) Audit(repair bool) ([]Difference, error) {
	// What changes while the maps are listed differs in one look, not in two.
	once, err := c.compare()
	if err != nil || len(once) == 0 {
		return nil, err
	}
	twice, err := c.compare()
	if err != nil {
		return nil, err
	}
	var errs []error
	twice = slices.DeleteFunc(twice, func(d Difference) bool { return !slices.Contains(once, d) })
	for _, d := range twice {
		if repair {
			c.mu.Lock()
			errs = append(errs, c.write(d.Prefix))
			c.mu.Unlock()
		}
	}
	return twice, errors.Join(errs...)
}

func (c *Cache) compare() (differences []Difference, err error) {
	entries, err := c.maps.List()
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	have := make(map[netip.Prefix]struct{}, len(entries))
	for _, e := range entries {
		have[e.Prefix] = struct{}{}
		if _, local := c.local[e.Prefix.Addr()]; local && e.Prefix.IsSingleIP() {
			continue
		}
		want, ok := c.want(e.Prefix)
		if ok && want == e.Info {
			continue
		}
		d := Difference{Prefix: e.Prefix, Have: words(e.Info)}
		if ok {
			d.Want = words(want)
		}
		differences = append(differences, d)
	}
	missing := func(p netip.Prefix) {
		if _, there := have[p]; there {
			return
		}
		if _, local := c.local[p.Addr()]; local && p.IsSingleIP() {
			return
		}
		if want, ok := c.want(p); ok {
			differences = append(differences, Difference{Prefix: p, Want: words(want)})
			have[p] = struct{}{} // of a range and of the cluster: once
		}
	}
	for p := range c.ranges {
		missing(p)
	}
	for p := range c.remote {
		missing(p)
	}
	return differences, nil
}

func words(i ipmap.Info) string {
	return fmt.Sprintf("identity %d node %d flags %d", i.Identity, i.Node, i.Flags)
}
