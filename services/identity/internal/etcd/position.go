// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package etcd

import "github.com/sluice-net/sluice/services/identity/internal/cluster"

// position is up to where the readers of Follow have the keys of the cluster, and from
// where its first call goes on. Only a position of a copy has a witness: without one, an
// etcd that was emptied and has come as far again could be taken for the one before.
// Follow alone uses it once it runs.
type position struct {
	at       cluster.Point // the readers have everything up to it
	from     cluster.Point // where the next call goes on; zero: it lists
	witness  cluster.Key   // the key of the copy that was written last
	settings bool          // the copy has the settings of ranges; an earlier version did not save them
}

// positionOf returns the position of a copy of the keys. ipam is the key of the settings.
func positionOf(k cluster.Keys, ipam string) position {
	p := position{at: k.At, from: k.At}
	for _, key := range k.All {
		if key.Modified > p.witness.Modified {
			p.witness = key
		}
		p.settings = p.settings || key.Name == ipam
	}
	return p
}

// lacksSettings reports whether the call that goes on has to read the settings.
func (p *position) lacksSettings() bool { return p.from.Revision != 0 && !p.settings }

// start returns from where a call goes on. The next one lists.
func (p *position) start() cluster.Point {
	from := p.from
	p.from = cluster.Point{}
	return from
}
