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

// Difference is a prefix whose actual entry differs from the expected one.
type Difference struct {
	Prefix     netip.Prefix
	Want, Have string // empty: no entry
}

// Audit compares the actual entries with the expected ones, for pod CIDRs, cluster prefixes and unexpected
// prefixes. Addresses of endpoints and of the host are audited elsewhere. With repair it writes the expected
// entries.
func (c *Cache) Audit(repair bool) ([]Difference, error) {
	// A change during the listing appears in one comparison, but not in both.
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
			have[p] = struct{}{} // only once, if it is both a pod CIDR and a cluster prefix
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
