// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package registry

import (
	"net/netip"
	"testing"
	"time"
)

// TestNodeKeepsFewRangesInQuarantine: a node may have as many ranges of a family in quarantine as it may claim, and
// cannot end a quarantine of another node.
func TestNodeKeepsFewRangesInQuarantine(t *testing.T) {
	for most, settings := range map[int]IPAM{
		8: {
			Mode: IPAMPool, Pool: ranges("10.0.0.0/16", "fd00::/48"), IPv4Block: 24, IPv6Block: 64, MaxBlocks: 8,
		},
		MostRanges: {Mode: IPAMStatic},
	} {
		t.Run(string(settings.Mode), func(t *testing.T) {
			r, _ := newRegistry(t, time.Hour)
			shared := netip.MustParsePrefix("10.0.7.0/24")
			u := Update{
				Complete: true, Revision: 9, IPAM: &IPAMKey{Settings: settings, Revision: 5},
				Resting: []RestKey{{Node: "honest", Range: shared}, {Node: "liar", Range: shared}},
			}
			for i := range byte(200) {
				u.Resting = append(u.Resting,
					RestKey{Node: "liar", Range: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, i, 0}), 24)},
					RestKey{Node: "liar", Range: netip.PrefixFrom(netip.AddrFrom16([16]byte{0xfd, 7: i}), 64)})
			}
			r.Observe(u)
			known := knownRanges{r}
			counts := map[bool]int{}
			for _, k := range u.Resting[2:] {
				if known.Resting(k.Range, "liar") {
					counts[k.Range.Addr().Is6()]++
				}
			}
			if counts[false] != most || counts[true] != most {
				t.Errorf("%v ranges are in quarantine, want %d of each family", counts, most)
			}
			r.Observe(Update{Revision: 10, Removed: []Removal{{Node: "liar", Rest: shared}}})
			if known.Resting(shared, "liar") || !known.Resting(shared, "honest") {
				t.Error("a node ends the quarantine of another one")
			}
			more := RestKey{Node: "liar", Range: netip.MustParsePrefix("10.0.250.0/24")}
			r.Observe(Update{Revision: 11, Resting: []RestKey{more}})
			if !known.Resting(more.Range, "liar") {
				t.Error("a place that is free again is not used")
			}
		})
	}
}
