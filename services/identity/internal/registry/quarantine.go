// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package registry

// quarantine contains the ranges in quarantine, each with the only node that may claim it. A node can write any number
// of ranges into its quarantine, so only a limited number of each node and family is kept.
type quarantine struct {
	ranges map[RestKey]struct{}
	counts map[family]int
}

// family is a node and a family of addresses.
type family struct {
	node string
	ipv6 bool
}

func newQuarantine() quarantine {
	return quarantine{ranges: map[RestKey]struct{}{}, counts: map[family]int{}}
}

// add adds a range, unless its node already has the maximum number of ranges of that family in quarantine.
func (q *quarantine) add(k RestKey, most int) {
	f := family{k.Node, k.Range.Addr().Is6()}
	if _, ok := q.ranges[k]; ok || q.counts[f] >= most {
		return
	}
	q.ranges[k] = struct{}{}
	q.counts[f]++
}

func (q *quarantine) remove(k RestKey) {
	if _, ok := q.ranges[k]; !ok {
		return
	}
	delete(q.ranges, k)
	f := family{k.Node, k.Range.Addr().Is6()}
	if q.counts[f]--; q.counts[f] == 0 {
		delete(q.counts, f)
	}
}

func (q *quarantine) has(k RestKey) bool {
	_, ok := q.ranges[k]
	return ok
}

// mostResting returns how many ranges of a node and family may be in quarantine: the maximum number of the node's
// ranges.
func (v *view) mostResting() int {
	if s := v.ipam.Settings; v.ipam.Revision != 0 && s.MaxBlocks > 0 {
		return min(s.MaxBlocks, MostRanges)
	}
	return MostRanges
}
