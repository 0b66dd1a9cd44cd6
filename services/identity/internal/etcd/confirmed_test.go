// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package etcd

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/cluster"
	"github.com/sluice-net/sluice/services/identity/internal/confirmed"
	"github.com/sluice-net/sluice/services/identity/internal/registry"
	"github.com/sluice-net/sluice/services/identity/internal/test/etcdtest"
)

// mappings reports to an exchange which mappings a node of a test has applied.
type mappings struct{ n *node }

func (m mappings) Applied() cluster.Point {
	at, saved := m.n.reg.Applied(), m.n.files.Saved()
	if saved.Cluster != at.Cluster {
		saved.Revision = 0
	}
	at.Revision = min(at.Revision, saved.Revision)
	return at
}

func (m mappings) Wants() int64 { return m.n.reg.WantsConfirmed() }

func (m mappings) Nodes() int { return m.n.reg.Status().Nodes }

func (m mappings) SetConfirmed(s confirmed.Summary) {
	m.n.reg.SetConfirmed(registry.Confirmed{Cluster: s.Cluster, Revision: s.Revision})
}

// applied makes the datapath of a node apply everything that the node has received.
func (n *node) applied() {
	at := n.cluster.Origin()
	n.reg.NoteApplied(cluster.Point{Cluster: at.Store, Revision: at.Revision})
}

// TestAddressIsReusedOnceEveryNodeHasConfirmed: an address of a node with native routing stays in quarantine for an
// hour, unless addresses are scarce and the datapath of every node has applied the removal of its mapping.
func TestAddressIsReusedOnceEveryNodeHasConfirmed(t *testing.T) {
	t.Parallel() // it mostly waits
	s := etcdtest.Start(t)
	cfg := quick()
	cfg.stale = time.Hour
	cfg.Quarantine = 400 * time.Millisecond // a quarter of it is how often etcd is asked for its revision
	var all []*node
	for i, name := range []string{"a", "b", "c"} {
		n := startNode(t, s.Endpoint, name, t.TempDir(), cfg)
		n.connected()
		n.register(i, prefix(i))
		native := registry.Registration{Underlay: &registry.Underlay{
			Addresses: []netip.Addr{nodeAddress(i)}, Mode: registry.ModeNative,
		}}
		if _, _, err := n.reg.Register(t.Context(), native, false); err != nil {
			t.Fatal(err)
		}
		all = append(all, n)
	}
	a, c := all[0], all[2]
	used := address(0, 5)
	id := a.endpoint("pod", "app-a", used)
	c.seesMapping(used, fmt.Sprint("a ", id.Number))
	if _, err := a.Release(t.Context(), allocator.EndpointHolder("pod", "eth0")); err != nil {
		t.Fatal(err)
	}
	c.seesMapping(used, "")
	a.published()
	check := func(scarce bool) registry.Reuse {
		t.Helper()
		_, _, reuse := a.reg.CheckReuse([]netip.Addr{used}, scarce)
		return reuse[0]
	}
	servicetest.Eventually(t, "a itself to see that the mapping is gone", func() bool {
		return !strings.Contains(check(false).Reason, "etcd still has the mapping")
	})
	if r := check(false); r.OK || a.reg.WantsConfirmed() != 0 {
		t.Errorf("%+v, and revision %d is wanted, while addresses are not scarce", r, a.reg.WantsConfirmed())
	}
	if r := check(true); r.OK || a.reg.WantsConfirmed() == 0 {
		t.Errorf("%+v, and revision %d is wanted, while addresses are scarce", r, a.reg.WantsConfirmed())
	}
	summary := func() (out confirmed.Summary) {
		got, err := s.Client().Get(t.Context(), testPrefix+"/cluster/confirmed")
		if err != nil {
			t.Fatal(err)
		}
		for _, kv := range got.Kvs {
			if err := json.Unmarshal(kv.Value, &out); err != nil {
				t.Fatal(err)
			}
		}
		return out
	}
	wanted := a.reg.WantsConfirmed()
	servicetest.Eventually(t, "the reports of two nodes", func() bool {
		a.applied()
		all[1].applied()
		got, err := s.Client().Get(t.Context(), testPrefix+"/report/", clientv3.WithPrefix(), clientv3.WithCountOnly())
		if err != nil {
			t.Fatal(err)
		}
		return got.Count == 2 && summary().Wanted == wanted
	})
	if got := summary(); got.Revision >= wanted {
		t.Errorf("%+v before the datapath of c has applied the removal", got)
	}
	servicetest.Eventually(t, "the confirmation of all", func() bool {
		c.applied()
		return a.reg.WantsConfirmed() == 0
	})
	if r := check(true); !r.OK && !strings.Contains(r.Reason, "etcd has answered without interruption for less than") {
		t.Errorf("after all have confirmed: %+v", r)
	}
	servicetest.Eventually(t, "the end of the request", func() bool { return summary().Wanted == 0 })
}
