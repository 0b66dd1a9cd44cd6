// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package etcd

import "github.com/sluice-net/sluice/services/identity/internal/cluster"

// position is the etcd revision up to which the readers of Follow have all keys. The first call of Follow continues
// from it. If the keys come from the copy on the disk, witness and gone detect an etcd that was emptied or restored and
// has since reached the same revision again. Once Follow runs, only Follow uses the position.
type position struct {
	at       cluster.Point   // the readers have all changes up to this point
	from     cluster.Point   // point from which the next call continues; zero: it lists all keys
	witness  cluster.Key     // the key in the copy that was written last
	gone     cluster.Removed // the newest deletion that the former process received
	settings bool            // the copy has the settings of ranges; an earlier version did not save them
}

// positionOf returns the position of a copy of the keys. ipam is the key of the settings.
func positionOf(k cluster.Keys, ipam string) position {
	p := position{at: k.At, from: k.At, gone: k.Gone}
	for _, key := range k.All {
		if key.Modified > p.witness.Modified {
			p.witness = key
		}
		p.settings = p.settings || key.Name == ipam
	}
	return p
}

// lacksSettings reports whether the next call must read the settings.
func (p *position) lacksSettings() bool { return p.from.Revision != 0 && !p.settings }

// start returns the point from which a call continues. The call after that lists everything.
func (p *position) start() cluster.Point {
	from := p.from
	p.from = cluster.Point{}
	return from
}
