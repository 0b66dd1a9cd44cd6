// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package etcd

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/services/identity/internal/registry"
	"github.com/sluice-net/sluice/services/identity/internal/test/etcdtest"
)

// TestNodeThatClaimsAllRangesKeepsNoOtherFromJoining: in the modes kubernetes and static, a compromised node
// claims 0.0.0.0/0, the range of another node, and ranges that are assigned to nodes that have not joined yet. Existing
// nodes keep their ranges and endpoints, and nodes that join get theirs.
func TestNodeThatClaimsAllRangesKeepsNoOtherFromJoining(t *testing.T) {
	within := registry.IPAM{
		Mode: registry.IPAMStatic, Pool: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/16")}, IPv4Block: 24, MaxBlocks: 4,
	}
	for name, settings := range map[string]registry.IPAM{
		"kubernetes": {Mode: registry.IPAMKubernetes}, "static": {Mode: registry.IPAMStatic}, "static with prefixes": within,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := etcdtest.Start(t)
			join := func(name string, i int) *node {
				n := startNode(t, s.Endpoint, name, t.TempDir(), quick())
				said := registry.Registration{Ranges: &[]netip.Prefix{prefix(i)}, IPAM: &settings}
				if _, _, err := n.reg.Register(t.Context(), said, false); err != nil {
					t.Fatal(err)
				}
				return n
			}
			nodes := map[string][]netip.Prefix{}
			for i, name := range []string{"old", "liar", "new-0", "new-1", "new-2"} {
				nodes[name] = []netip.Prefix{prefix(i)}
			}
			old := join("old", 0)
			old.published()
			if settings.Mode == registry.IPAMKubernetes { // the writer of status
				servicetest.EventuallyNil(t, "assignments", func() error { return old.reg.Assign(t.Context(), nodes) })
			} else { // an administrator
				for name, all := range nodes {
					put(t, s.Client(), "/ip/.assigned/of/"+name, registry.Assignment{Ranges: all})
				}
			}
			liar := join("liar", 1)
			liar.published()
			record, _, err := liar.own(t)
			if err != nil {
				t.Fatal(err)
			}
			liar.stop()
			record.Ranges = nil
			for i := range registry.MostRanges {
				p := prefix(i)
				switch i {
				case 0:
					p = netip.MustParsePrefix("0.0.0.0/0")
				case 1:
					p = netip.MustParsePrefix("10.0.0.0/16")
				case 5:
					p = prefix(0) // of old
				}
				record.Ranges = append(record.Ranges, p)
				put(t, s.Client(), "/ip/liar/range/"+registry.Slot{Number: i}.String(), registry.Claim{Range: p})
				put(t, s.Client(), "/ip/liar/rest/"+strings.ReplaceAll(p.String(), "/", "_"), struct{}{})
				put(t, s.Client(), "/range/default/"+p.String(), rangeHolder{
					Node: "liar", Incarnation: record.Incarnation, Quarantine: i%2 == 0,
				})
			}
			put(t, s.Client(), "/ip/liar/node", record)
			put(t, s.Client(), "/ip/liar/ep/lie", registry.Addresses{
				Addresses: []netip.Addr{address(2, 5)}, Identity: 4711, Incarnation: record.Incarnation,
			})
			want := map[netip.Prefix]string{prefix(0): "old"}
			watcher := startNode(t, s.Endpoint, "w", t.TempDir(), quick())
			for i := 2; i < 5; i++ {
				name := fmt.Sprint("new-", i-2)
				n := join(name, i)
				n.published()
				if r := n.refusedRanges(); len(r) > 0 {
					t.Errorf("%s is refused %v", name, r)
				}
				pod := n.endpoint("c", name, address(i, 5))
				watcher.seesMapping(address(i, 5), fmt.Sprint(name, " ", pod.Number))
				want[prefix(i)] = name
			}
			watcher.seesOwnerOf(want)
			watcher.reports("liar", registry.MostRanges)
			fresh := startNode(t, s.Endpoint, "fresh", t.TempDir(), quick())
			fresh.seesOwnerOf(want)
			if r := old.refusedRanges(); len(r) > 0 {
				t.Errorf("old is refused %v", r)
			}
		})
	}
}

// TestAssignmentsSurviveARestartWithoutEtcd: the copy on the disk contains the assignments, so false claims are still
// refused.
func TestAssignmentsSurviveARestartWithoutEtcd(t *testing.T) {
	t.Parallel()
	s := etcdtest.Start(t)
	settings := registry.IPAM{Mode: registry.IPAMKubernetes}
	a := startNode(t, s.Endpoint, "a", t.TempDir(), quick())
	said := registry.Registration{Ranges: &[]netip.Prefix{prefix(1)}, IPAM: &settings}
	if _, _, err := a.reg.Register(t.Context(), said, false); err != nil {
		t.Fatal(err)
	}
	a.published()
	all := map[string][]netip.Prefix{"a": {prefix(1)}, "b": {prefix(2)}}
	servicetest.EventuallyNil(t, "assignments", func() error { return a.reg.Assign(t.Context(), all) })
	dir := t.TempDir()
	w := startNode(t, s.Endpoint, "w", dir, quick())
	w.seesOwnerOf(map[netip.Prefix]string{prefix(1): "a"})
	put(t, s.Client(), "/ip/a/range/ipv4-1", registry.Claim{Range: prefix(2)})
	w.reports("a", 1)
	w.stop()
	s.Down()
	again := startNode(t, s.Endpoint, "w", dir, quick())
	again.seesOwnerOf(map[netip.Prefix]string{prefix(1): "a"})
	again.reports("a", 1)
	if all := again.reg.Status().Overlaps; !strings.Contains(all[0].Reason, "assigned to node b") {
		t.Errorf("without etcd the claim is reported as %v", all)
	}
}

// TestOnlyChangedAssignmentsAreWritten: publishing the same Nodes again writes no key.
func TestOnlyChangedAssignmentsAreWritten(t *testing.T) {
	t.Parallel()
	s := etcdtest.Start(t)
	a := startNode(t, s.Endpoint, "a", t.TempDir(), quick())
	said := registry.Registration{
		Ranges: &[]netip.Prefix{prefix(1)}, IPAM: &registry.IPAM{Mode: registry.IPAMKubernetes},
	}
	if _, _, err := a.reg.Register(t.Context(), said, false); err != nil {
		t.Fatal(err)
	}
	a.published()
	all := map[string][]netip.Prefix{"a": {prefix(1)}}
	for i := range 300 {
		first := netip.AddrFrom4([4]byte{10, 1 + byte(i/256), byte(i), 0})
		all[fmt.Sprint("n", i)] = []netip.Prefix{netip.PrefixFrom(first, 24)}
	}
	publish := func() (revision int64) {
		t.Helper()
		servicetest.EventuallyNil(t, "assignments", func() error { return a.reg.Assign(t.Context(), all) })
		resp, err := s.Client().Get(t.Context(), testPrefix+"/ip/.assigned/all")
		if err != nil {
			t.Fatal(err)
		}
		return resp.Header.Revision
	}
	publish()
	servicetest.EventuallyNil(t, "what was written to come back", func() error {
		if before, after := publish(), publish(); before != after {
			return fmt.Errorf("the revision went from %d to %d", before, after)
		}
		return nil
	})
	if n := len(keysBelow(t, s.Client(), "/ip/.assigned/of/")); n != len(all) {
		t.Errorf("%d of %d assignments are in etcd", n, len(all))
	}
}
