// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package etcd

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/services/identity/internal/registry"
	"github.com/sluice-net/sluice/services/identity/internal/test/etcdtest"
)

// put writes a key directly to etcd, as a compromised node could.
func put(t *testing.T, c *clientv3.Client, key string, value any) {
	t.Helper()
	if _, err := c.Put(t.Context(), testPrefix+key, toJSON(value)); err != nil {
		t.Fatal(err)
	}
}

// reports waits until the status of the node lists that many ignored ranges of another node.
func (n *node) reports(other string, ranges int) {
	n.t.Helper()
	servicetest.Eventually(n.t, fmt.Sprintf("%d ignored ranges of %s", ranges, other), func() bool {
		count := 0
		for _, o := range n.reg.Status().Overlaps {
			if o.Node == other && o.Claimed {
				count++
			}
		}
		return count == ranges
	})
}

// TestAddedRangeTakesNoRangeOfAnotherNode: a node that registered first adds, by mistake or by an attack, a range that
// overlaps the range of a live node with endpoints.
func TestAddedRangeTakesNoRangeOfAnotherNode(t *testing.T) {
	t.Parallel()
	s := etcdtest.StartThree(t)
	a := startNode(t, s.Endpoint, "a", t.TempDir(), quick())
	b := startNode(t, s.Endpoint, "b", t.TempDir(), quick())
	c := startNode(t, s.Endpoint, "c", t.TempDir(), quick())
	a.register(1, prefix(1))
	a.published()
	b.register(2, prefix(2))
	c.register(3, prefix(3))
	db := b.endpoint("c2", "db", address(2, 5))
	b.published()
	want := fmt.Sprint("b ", db.Number)
	c.seesMapping(address(2, 5), want)
	a.seesMapping(address(2, 5), want)
	for _, p := range []string{"10.0.0.0/16", "10.0.2.0/25", "10.0.2.5/32"} {
		added := netip.MustParsePrefix(p)
		a.register(1, prefix(1), added)
		if r := a.refusedRanges(); len(r) != 1 || r[0].Range != added || r[0].Holder != "b" && r[0].Holder != "c" ||
			!strings.Contains(r[0].Reason, "overlaps it, and is alive") {
			t.Errorf("%s: refused of a are %+v", p, r)
		}
		if record := keysBelow(t, s.Client(), "/ip/a/")["node"]; strings.Contains(record, p) {
			t.Errorf("%s is in the record of a: %s", p, record)
		}
	}
	// An attacker with the credentials of a may write more than its process does.
	record, _, err := a.own(t)
	if err != nil {
		t.Fatal(err)
	}
	record.Ranges = append(record.Ranges, prefix(2))
	put(t, s.Client(), "/ip/a/range/ipv4-1", registry.Claim{Range: prefix(2)})
	put(t, s.Client(), "/ip/a/node", record)
	put(t, s.Client(), "/ip/a/ep/lie", registry.Addresses{
		Addresses: []netip.Addr{address(2, 5)}, Identity: db.Number + 1, Incarnation: record.Incarnation,
	})
	for _, n := range []*node{c, b} {
		n.reports("a", 1)
	}
	if got := c.mapping(address(2, 5)); got != want {
		t.Errorf("the endpoint of b is %q for c, want %q", got, want)
	}
	d := startNode(t, s.Endpoint, "d", t.TempDir(), quick())
	d.seesMapping(address(2, 5), want)
	if r := b.reg.Status().Ranges; len(r) > 0 {
		t.Errorf("refused of b are %v", r)
	}
}

// TestRangeAroundThatOfASilentNodeIsTakenOver: a silent node loses every range that overlaps the new range of another
// node.
func TestRangeAroundThatOfASilentNodeIsTakenOver(t *testing.T) {
	t.Parallel()
	s := etcdtest.Start(t)
	a := startNode(t, s.Endpoint, "a", t.TempDir(), quick())
	b := startNode(t, s.Endpoint, "b", t.TempDir(), quick())
	a.register(1, prefix(1), prefix(9))
	a.endpoint("c1", "web", address(1, 5))
	a.published()
	a.stop()
	b.seesNode("a", true)
	if _, err := s.Client().Delete(t.Context(), testPrefix+"/alive/a"); err != nil {
		t.Fatal(err)
	}
	around := netip.MustParsePrefix("10.0.0.0/21")
	b.register(2, around)
	if r := b.refusedRanges(); len(r) != 0 {
		t.Fatalf("b is refused %v", r)
	}
	db := b.endpoint("c2", "db", address(1, 5))
	watcher := startNode(t, s.Endpoint, "w", t.TempDir(), quick())
	watcher.seesMapping(address(1, 5), fmt.Sprint("b ", db.Number))
	if _, node, err := rangeAround(watcher, address(9, 5)); err != nil || node != "a" {
		t.Errorf("a's range without an overlap belongs to %q, %v", node, err)
	}
	oneHand(t, s.Client())
}

// rangeAround returns the range around an address and its node, for a node of the cluster.
func rangeAround(n *node, a netip.Addr) (netip.Prefix, string, error) {
	f, err := n.reg.Find(a)
	return f.Range, f.RangeNode, err
}

// own reads the record that a node has in etcd. The node's own Nodes may be in use by its
// registry meanwhile.
func (n *node) own(t *testing.T) (registry.Record, int64, error) {
	t.Helper()
	return NewNodes(n.session).Own(t.Context())
}

// TestNodeThatPutsEveryBlockIntoQuarantineKeepsNoOtherFromJoining: an attacker's node marks every block as its own in
// quarantine. It also overwrites the mark and the key of a block that another node has returned; that block stays in
// the other node's quarantine.
func TestNodeThatPutsEveryBlockIntoQuarantineKeepsNoOtherFromJoining(t *testing.T) {
	t.Parallel()
	s := etcdtest.Start(t)
	settings := blocks(64)
	settings.MaxBlocks = 8
	watcher := startNode(t, s.Endpoint, "w", t.TempDir(), quick())
	old := startNode(t, s.Endpoint, "old", t.TempDir(), quick())
	kept, returned := old.claim(settings), netip.Prefix{}
	servicetest.EventuallyNil(t, "a second block", func() (err error) {
		returned, err = old.reg.ClaimRange(t.Context(), settings, false, []netip.Prefix{kept})
		return err
	})
	if _, err := old.reg.ReturnRange(t.Context(), returned, false); err != nil {
		t.Fatal(err)
	}
	liar := startNode(t, s.Endpoint, "liar", t.TempDir(), quick())
	liar.claim(settings)
	liar.published()
	liar.stop()
	for i := range settings.Blocks(false) {
		p := settings.Block(false, i)
		put(t, s.Client(), "/ip/liar/rest/"+strings.ReplaceAll(p.String(), "/", "_"), struct{}{})
		if p != returned {
			put(t, s.Client(), "/range/default/"+p.String(), rangeHolder{Node: "liar", Quarantine: true})
		}
	}
	if _, err := s.Client().Delete(t.Context(), testPrefix+"/ip/liar/rest/"+
		strings.ReplaceAll(returned.String(), "/", "_")); err != nil {
		t.Fatal(err)
	}
	given := map[netip.Prefix]string{kept: "old"}
	for i := range 20 {
		name := fmt.Sprint("new", i)
		n := startNode(t, s.Endpoint, name, t.TempDir(), quick())
		n.connected()
		var p netip.Prefix
		servicetest.EventuallyNil(t, "a block for "+name, func() (err error) {
			p, err = n.reg.ClaimRange(t.Context(), settings, false, nil)
			return err
		})
		if given[p] != "" || p == returned {
			t.Fatalf("%s has %s, which %s has, or which is in quarantine", name, p, given[p])
		}
		given[p] = name
	}
	watcher.seesOwnerOf(given)
}

// TestNodeThatClaimsEveryBlockKeepsNoOtherFromJoining: an attacker's node writes all keys that its role allows, so that
// every block of the pool seems to be in use or in quarantine. It gets no more blocks than the settings allow, and
// other nodes still get their blocks.
func TestNodeThatClaimsEveryBlockKeepsNoOtherFromJoining(t *testing.T) {
	t.Parallel()
	s := etcdtest.Start(t)
	settings := blocks(64)
	settings.MaxBlocks = 16
	old := startNode(t, s.Endpoint, "old", t.TempDir(), quick())
	oldBlock := old.claim(settings)
	old.published()
	liar := startNode(t, s.Endpoint, "liar", t.TempDir(), quick())
	liar.claim(settings)
	liar.published()
	record, _, err := liar.own(t)
	if err != nil {
		t.Fatal(err)
	}
	liar.stop() // from here on somebody else writes what its role allows
	c := s.Client()
	record.Ranges = nil
	for i := range settings.Blocks(false) {
		p := settings.Block(false, i)
		record.Ranges = append(record.Ranges, p)
		put(t, c, "/ip/liar/range/"+registry.Slot{Number: int(i)}.String(), registry.Claim{Range: p})
		put(t, c, "/ip/liar/rest/"+strings.ReplaceAll(p.String(), "/", "_"), rangeHolder{Node: "liar", Quarantine: true})
		holder := rangeHolder{Node: "liar", Incarnation: record.Incarnation}
		switch i % 4 {
		case 1:
			holder = rangeHolder{Node: "ghost", Quarantine: true}
		case 2:
			holder = rangeHolder{Node: "old", Incarnation: "x"}
		}
		if p != oldBlock || i%2 == 0 {
			put(t, c, "/range/default/"+p.String(), holder)
		}
	}
	put(t, c, "/ip/liar/node", record)

	watcher := startNode(t, s.Endpoint, "w", t.TempDir(), quick())
	watcher.seesNode("liar", true)
	if r, _ := watcher.cluster.Get(registry.Key{Node: "liar"}); len(r.Node.Record.Ranges) > settings.MaxBlocks {
		t.Errorf("the liar has %d blocks", len(r.Node.Record.Ranges))
	}
	given := map[netip.Prefix]string{oldBlock: "old"}
	for i := range 8 {
		name := fmt.Sprint("new", i)
		n := startNode(t, s.Endpoint, name, t.TempDir(), quick())
		n.connected()
		var p netip.Prefix
		servicetest.Eventually(t, "a block for "+name, func() bool {
			var err error
			p, err = n.reg.ClaimRange(t.Context(), settings, false, nil)
			return err == nil
		})
		if given[p] != "" {
			t.Fatalf("%s has %s, which %s has", name, p, given[p])
		}
		given[p] = name
		pod := n.endpoint("c", name, p.Addr().Next().Next().Next())
		watcher.seesMapping(p.Addr().Next().Next().Next(), fmt.Sprint(name, " ", pod.Number))
		n.published()
		if r := n.reg.Status().Ranges; len(r) > 0 {
			t.Errorf("%s is refused %v", name, r)
		}
	}
	// The liar writes all of it once more, and gives up ranges that count: no other node loses a range.
	for i := range settings.Blocks(false) {
		p := settings.Block(false, i)
		put(t, c, "/range/default/"+p.String(), rangeHolder{Node: "liar", Incarnation: record.Incarnation})
		if int(i) < settings.MaxBlocks {
			put(t, c, "/ip/liar/range/"+registry.Slot{Number: int(i)}.String(),
				registry.Claim{Range: settings.Block(false, 63-i)})
		}
	}
	watcher.seesOwnerOf(given)
	fresh := startNode(t, s.Endpoint, "fresh", t.TempDir(), quick())
	fresh.seesOwnerOf(given)
	// If another node has overwritten the key of a node's block, the node registers again and keeps the block.
	servicetest.Eventually(t, "another block for old", func() bool { // once it has heard of all keys
		_, err := old.reg.ClaimRange(t.Context(), settings, false, []netip.Prefix{oldBlock})
		return err == nil
	})
	if r := old.refusedRanges(); len(r) != 0 {
		t.Errorf("after its registration old is refused %v", r)
	}
}

// seesOwnerOf waits until each range belongs to its node.
func (n *node) seesOwnerOf(want map[netip.Prefix]string) {
	n.t.Helper()
	for p, node := range want {
		servicetest.Eventually(n.t, fmt.Sprintf("%s to be a range of %s", p, node), func() bool {
			got, holder, err := rangeAround(n, p.Addr().Next())
			return err == nil && holder == node && got == p
		})
	}
}

// TestSettingsThatChangeTakeNoRangeInUse: the ipam settings in etcd are changed by hand or by an attacker's node. A
// node that restarts keeps its ranges and endpoints, and gets no other range.
func TestSettingsThatChangeTakeNoRangeInUse(t *testing.T) {
	t.Parallel()
	s := etcdtest.StartThree(t)
	settings := registry.IPAM{Mode: registry.IPAMStatic}
	dir := t.TempDir()
	a := startNode(t, s.Endpoint, "a", t.TempDir(), quick())
	a.register(1, prefix(1))
	b := startNode(t, s.Endpoint, "b", dir, quick())
	said := registry.Registration{Ranges: &[]netip.Prefix{prefix(2)}, IPAM: &settings}
	if _, _, err := b.reg.Register(t.Context(), said, false); err != nil {
		t.Fatal(err)
	}
	id := b.endpoint("c2", "db", address(2, 5))
	b.published()
	want := fmt.Sprint("b ", id.Number)
	a.seesMapping(address(2, 5), want)
	for _, text := range []string{
		`{"mode":"kubernetes"}`, `{"mode":"pool","pool":["10.9.0.0/16"],"ipv4Block":24,"maxBlocks":1}`, "x",
	} {
		if _, err := s.Client().Put(t.Context(), testPrefix+"/ipam", text); err != nil {
			t.Fatal(err)
		}
		b.stop()
		b = startNode(t, s.Endpoint, "b", dir, quick())
		b.connected()
		b.published()
		if r := b.refusedRanges(); len(r) != 1 || !r[0].Kept || r[0].Range != prefix(2) || r[0].Holder != "" {
			t.Errorf("%s: refused of b are %+v", text, r)
		}
		fresh := startNode(t, s.Endpoint, "fresh", t.TempDir(), quick())
		fresh.seesMapping(address(2, 5), want)
		fresh.stop()
		if got := a.mapping(address(2, 5)); got != want {
			t.Errorf("%s: the endpoint of b is %q for a, want %q", text, got, want)
		}
		// A range that it did not have is another matter.
		more := registry.Registration{Ranges: &[]netip.Prefix{prefix(2), prefix(7)}, IPAM: &settings}
		if _, _, err := b.reg.Register(t.Context(), more, false); err != nil {
			t.Fatal(err)
		}
		if r := b.refusedRanges(); len(r) != 2 || !r[0].Kept || r[1].Kept || r[1].Range != prefix(7) {
			t.Errorf("%s: with another range refused of b are %+v", text, r)
		}
		if held := heldRanges(t, s.Client()); held[prefix(7).String()] != "" || held[prefix(2).String()] != "b" {
			t.Errorf("%s: held are %v", text, held)
		}
		if _, _, err := b.reg.Register(t.Context(), said, false); err != nil {
			t.Fatal(err)
		}
	}
}

// TestEqualSettingsInAnotherTextAgree: different versions of Sluice may encode the same settings differently, for
// example with an additional field.
func TestEqualSettingsInAnotherTextAgree(t *testing.T) {
	t.Parallel()
	s := etcdtest.Start(t)
	for i, text := range []string{`{"mode":"static"}`, `{"mode": "static"}`, `{"mode":"static","ofANewerVersion":0}`} {
		if _, err := s.Client().Put(t.Context(), testPrefix+"/ipam", text); err != nil {
			t.Fatal(err)
		}
		n := startNode(t, s.Endpoint, fmt.Sprint("n", i), t.TempDir(), quick())
		said := registry.Registration{Ranges: &[]netip.Prefix{prefix(i)}, IPAM: &registry.IPAM{Mode: registry.IPAMStatic}}
		if _, _, err := n.reg.Register(t.Context(), said, false); err != nil {
			t.Fatal(err)
		}
		if r := n.refusedRanges(); len(r) > 0 {
			t.Errorf("%s: refused are %v", text, r)
		}
	}
	pool := blocks(4)
	text := `{"maxBlocks":32, "ipv4Block":24, "pool":["10.128.0.0/22"], "mode":"pool", "next":{"a":[1]}}`
	if _, err := s.Client().Put(t.Context(), testPrefix+"/ipam", text); err != nil {
		t.Fatal(err)
	}
	n := startNode(t, s.Endpoint, "p", t.TempDir(), quick())
	if p := n.claim(pool); !pool.Has(false, p) {
		t.Errorf("the claim got %s", p)
	}
	if err := n.reg.ValidateClaim(t.Context(), pool); err != nil {
		t.Error(err)
	}
	if got := keysBelow(t, s.Client(), "/ipam")[""]; got != text {
		t.Errorf("the settings are %s now", got)
	}
}

// TestRebuiltStoreKeepsRangesWithTheirNodes: etcd loses all data, and an attacker's node claims the range of another
// node first.
func TestRebuiltStoreKeepsRangesWithTheirNodes(t *testing.T) {
	t.Parallel()
	s := etcdtest.Start(t)
	cfg := quick()
	watcher := startNode(t, s.Endpoint, "w", t.TempDir(), cfg)
	dir := t.TempDir()
	b := startNode(t, s.Endpoint, "b", dir, cfg)
	b.register(2, prefix(2))
	db := b.endpoint("c2", "db", address(2, 5))
	b.published()
	watcher.seesMapping(address(2, 5), fmt.Sprint("b ", db.Number))
	b.seesOwn(1)
	b.stop()
	s.Down()
	s.Wipe()
	s.Up()
	c := s.Client()
	put(t, c, "/ip/liar/node", registry.Record{Incarnation: "x", Ranges: []netip.Prefix{prefix(2)}})
	put(t, c, "/ip/liar/range/ipv4-0", registry.Claim{Range: prefix(2)})
	put(t, c, "/range/default/"+prefix(2).String(), rangeHolder{Node: "liar", Incarnation: "x"})
	put(t, c, "/alive/liar", "x x")
	put(t, c, "/ip/liar/ep/lie", registry.Addresses{
		Addresses: []netip.Addr{address(2, 5)}, Identity: db.Number, Incarnation: "x",
	})
	watcher.reports("liar", 1)
	waits := func(o registry.Overlap) bool { return o.Node == "b" && !o.Claimed }
	if !slices.ContainsFunc(watcher.reg.Status().Overlaps, waits) {
		t.Errorf("the watcher does not report that b has not claimed its range: %+v", watcher.reg.Status().Overlaps)
	}
	b = startNode(t, s.Endpoint, "b", dir, cfg)
	b.connected()
	b.published()
	if r := b.refusedRanges(); len(r) > 0 {
		t.Errorf("b is refused %v", r)
	}
	id := b.endpoint("c2", "db", address(2, 5))
	watcher.seesMapping(address(2, 5), fmt.Sprint("b ", id.Number))
	if text := keysBelow(t, c, "/ip/b/range/")["ipv4-0"]; !strings.Contains(text, `"former":{"cluster":"`) {
		t.Errorf("the claim of b does not say when it was made first: %s", text)
	}
}
