// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package etcd

import (
	"testing"

	"github.com/sluice-net/sluice/services/identity/internal/cluster"
)

func TestOnlyTheFirstCallGoesOnFromACopy(t *testing.T) {
	at := cluster.Point{Cluster: 7, Revision: 30}
	keys := cluster.Keys{At: at, All: []cluster.Key{
		{Name: "ip/a/node", Modified: 10}, {Name: "ip/b/node", Modified: 20}, {Name: "ip/c/node", Modified: 15},
	}}
	p := positionOf(keys, "ipam")
	if p.at != at || p.witness.Name != "ip/b/node" || !p.lacksSettings() {
		t.Errorf("position %+v, want the key of revision 20 as its witness, and no settings", p)
	}
	if from := p.start(); from != at {
		t.Errorf("the first call goes on from %+v, want %+v", from, at)
	}
	if from := p.start(); from != (cluster.Point{}) || p.lacksSettings() || p.at != at {
		t.Errorf("the second call goes on from %+v: %+v", from, p)
	}
	keys.All = append(keys.All, cluster.Key{Name: "ipam", Modified: 5})
	if p := positionOf(keys, "ipam"); p.lacksSettings() {
		t.Errorf("position %+v of a copy with settings", p)
	}
	if p := (position{}); p.lacksSettings() || p.start() != (cluster.Point{}) {
		t.Errorf("without a copy: %+v", p)
	}
}
