// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policysync_test

import (
	"encoding/binary"
	"net/netip"
	"testing"
	"time"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/auditmode"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policysync"
)

// small returns a table with one class.
func small(n uint64) policytable.Table {
	c := policytable.Table{Rules: make([]policytable.Rule, 2), Classes: []policytable.Ranges{nil}}
	binary.LittleEndian.PutUint64(c.Hash[:], n+1)
	return c
}

// fillers make tables that fill one limit of the maps.
var fillers = map[nodetable.MapLimit]struct {
	tables int
	table  func(n uint64) (policytable.Table, []policytable.Row)
}{
	nodetable.LimitTables: {4080, func(n uint64) (policytable.Table, []policytable.Row) { return small(n), nil }},
	nodetable.LimitRules: {5, func(n uint64) (policytable.Table, []policytable.Row) {
		c := small(n)
		c.Rules = make([]policytable.Rule, 60_000)
		return c, nil
	}},
	nodetable.LimitPortNodes: {6, func(n uint64) (policytable.Table, []policytable.Row) {
		c := small(n)
		c.Rules = make([]policytable.Rule, 2000)
		for class := range uint32(10) { // with different rules, so that no two nodes are equal
			var ports policytable.Ranges
			for i := range uint32(2000) {
				ports = append(ports, policytable.PortRange{
					First: 6<<16 | 32*i, Last: 6<<16 | 32*i, Rest: uint16((i+class)%2000 + 1), //nolint:gosec // small
				})
			}
			c.Classes = append(c.Classes, ports)
		}
		return c, nil
	}},
	nodetable.LimitPeerClasses: {13, func(n uint64) (policytable.Table, []policytable.Row) {
		c := small(n)
		c.Classes = make([]policytable.Ranges, 5000)
		return c, nil
	}},
	nodetable.LimitPeerRows: {8, func(n uint64) (policytable.Table, []policytable.Row) {
		var rows []policytable.Row
		for ic := range uint32(32_000) {
			rows = append(rows, policytable.Row{IdentityClass: policytable.IdentityClass(ic + 1)})
		}
		return small(n), rows
	}},
	nodetable.LimitPrefixes4: {5, func(n uint64) (policytable.Table, []policytable.Row) {
		c := small(n)
		c.HasAddresses = true
		c.Prefixes = map[netip.Prefix]policytable.PrefixClasses{}
		for i := range uint32(16_000) {
			a := netip.AddrFrom4([4]byte{10, byte(n), byte(i >> 8), byte(i)})
			c.Prefixes[netip.PrefixFrom(a, 32)] = policytable.PrefixClasses{}
		}
		return c, nil
	}},
	nodetable.LimitPrefixes6: {5, func(n uint64) (policytable.Table, []policytable.Row) {
		c := small(n)
		c.HasAddresses = true
		c.Prefixes = map[netip.Prefix]policytable.PrefixClasses{}
		for i := range uint32(16_000) {
			a := netip.AddrFrom16([16]byte{0: 0xfd, 1: byte(n), 14: byte(i >> 8), 15: byte(i)})
			c.Prefixes[netip.PrefixFrom(a, 128)] = policytable.PrefixClasses{}
		}
		return c, nil
	}},
}

// TestKernelTenantThatFillsTheMapsLeavesRoomForAnother fills each limit of the maps by one tenant.
// The pod of another tenant gets its tables, with its rows and prefixes.
func TestKernelTenantThatFillsTheMapsLeavesRoomForAnother(t *testing.T) {
	for limit := range nodetable.MapLimits {
		t.Run(limit.String(), func(t *testing.T) {
			s := newStage(t)
			now := time.Unix(1000, 0)
			s.policies = policysync.New(policysync.Config{
				Name: "test", Kernel: s.maps, Addresses: s.kernel.IPCache, Wait: true, Now: func() time.Time { return now },
			})
			if err := s.policies.Adopt(func(uint16) bool { return true }, auditmode.Audited{}); err != nil {
				t.Fatal(err)
			}
			var steps []policytable.Step
			classes := uint32(40)
			if limit == nodetable.LimitPeerRows {
				classes = 32_000
			}
			for ic := range classes {
				st := policytable.DefineIdentityClass{IdentityClass: policytable.IdentityClass(ic + 1)}
				binary.LittleEndian.PutUint32(st.Key[:], ic+1)
				steps = append(steps, st)
			}
			filler := fillers[limit]
			bind := func(subject identity.Numeric, table policytable.ID, tenant string) {
				for _, d := range []policytable.Direction{policytable.Egress, policytable.Ingress} {
					steps = append(steps, policytable.BindSubject{
						Subject: subject, Direction: d, Table: table, Tenant: shares.Namespace(tenant),
					})
				}
			}
			for n := range uint64(filler.tables) { //nolint:gosec // small
				st := policytable.DefineTable{Table: policytable.ID(n + 1)}
				st.Content, st.Peers = filler.table(n)
				steps = append(steps, st)
				bind(identity.Numeric(1000+n), policytable.ID(n+1), "flood") //nolint:gosec // small
			}
			steps = append(steps, policytable.SnapshotComplete{}, policytable.Barrier{PolicyRevision: 1})
			if err := s.policies.Load(policytable.Message{Incarnation: "a", Seq: 1, Steps: steps}); err != nil {
				t.Fatal(err)
			}
			for _, u := range s.policies.Shares() {
				if u.Limit.Name == limit.String() && u.Asked <= u.Used {
					t.Fatalf("the tenant asks for %d of %+v and has all of it", u.Asked, u.Limit)
				}
			}

			now = now.Add(shares.LevelInterval)
			shop := policytable.DefineTable{Table: 9000, Content: small(9000)}
			shop.Content.HasAddresses, shop.Content.Prefixes = true, map[netip.Prefix]policytable.PrefixClasses{}
			for i := range byte(40) {
				shop.Peers = append(shop.Peers, policytable.Row{IdentityClass: policytable.IdentityClass(i) + 1})
				a4, a6 := netip.AddrFrom4([4]byte{192, 0, 2, i}), netip.AddrFrom16([16]byte{0: 0xfd, 15: i})
				shop.Content.Prefixes[netip.PrefixFrom(a4, 32)] = policytable.PrefixClasses{}
				shop.Content.Prefixes[netip.PrefixFrom(a6, 128)] = policytable.PrefixClasses{}
			}
			steps = []policytable.Step{shop}
			bind(301, 9000, "shop")
			steps = append(steps, policytable.Barrier{PolicyRevision: 2})
			if err := s.policies.Apply(t.Context(), policytable.Message{Incarnation: "a", Seq: 2, Steps: steps}); err != nil {
				t.Fatal(err)
			}
			bindings, err := s.maps.Bindings()
			if err != nil {
				t.Fatal(err)
			}
			for _, b := range bindings {
				if b.Identity != 301 {
					continue
				}
				c, err := s.maps.TableContent(b.Egress)
				if err != nil || b.Ingress != b.Egress || len(c.Peers) != 40 || len(c.Prefixes) != 80 {
					t.Errorf("shop has %v with %d rows and %d prefixes, %v; refusals %q",
						b, len(c.Peers), len(c.Prefixes), err, s.policies.Status().Refusals[:3])
				}
			}
			if diffs, err := s.kernel.Tables.Audit(false); err != nil || len(diffs) > 0 {
				t.Errorf("the maps differ from what was written: %d, %v", len(diffs), err)
			}
		})
	}
}

// TestKernelTablesBeyondAShareHaveSomeOfTheirRules fills the port nodes by tables of one tenant.
// Each of them is in the maps: its deny rule is enforced, and its first allow rules are effective.
func TestKernelTablesBeyondAShareHaveSomeOfTheirRules(t *testing.T) {
	const (
		count = 6
		ports = 2000
	)
	s := newStage(t)
	steps := []policytable.Step{
		policytable.DefineIdentityClass{IdentityClass: 1, Key: policytable.ClassKey{1}},
		policytable.SetIdentity{Identity: 305, IdentityClass: 1},
	}
	point := func(i int) uint32 { return 6<<16 | 32*uint32(i) } //nolint:gosec // small
	for n := range uint64(count) {
		c := small(n)
		c.Rules = []policytable.Rule{{Action: policytable.Deny, Tier: 1}}
		for class := range 10 { // with different rules, so that no two nodes are equal
			list := policytable.Ranges{{First: point(0), Last: point(0), Rest: 1}}
			for i := 1; i < ports; i++ {
				list = append(list, policytable.PortRange{
					First: point(i), Last: point(i), Rest: uint16((i+class)%(ports-1) + 2), //nolint:gosec // small
				})
			}
			c.Classes = append(c.Classes, list)
			for range ports / 10 {
				c.Rules = append(c.Rules, policytable.Rule{Action: policytable.Allow, Tier: 1})
			}
		}
		steps = append(steps, policytable.DefineTable{
			Table: policytable.ID(n + 1), Content: c, Peers: []policytable.Row{{IdentityClass: 1, Class: 1}},
		})
		for _, d := range []policytable.Direction{policytable.Egress, policytable.Ingress} {
			steps = append(steps, policytable.BindSubject{
				Subject: identity.Numeric(1000 + n), Direction: d, Table: policytable.ID(n + 1), Tenant: shares.Namespace("flood"), //nolint:gosec // small
			})
		}
	}
	steps = append(steps, policytable.SnapshotComplete{}, policytable.Barrier{PolicyRevision: 1})
	if err := s.policies.Load(policytable.Message{Incarnation: "a", Seq: 1, Steps: steps}); err != nil {
		t.Fatal(err)
	}
	tables, err := s.maps.Tables()
	if err != nil || len(tables) != count {
		t.Fatalf("%d tables are in the maps, want %d; %v; refusals %q", len(tables), count, err, s.policies.Status().Refusals)
	}
	whole, parts := 0, 0
	for _, info := range tables {
		content, err := s.maps.TableContent(info.ID)
		if err != nil {
			t.Fatal(err)
		}
		if most, size := s.maps.SizeOf(content), s.maps.TableSize(info.ID); size != most {
			t.Errorf("table %d takes %v, but SizeOf returns %v", info.ID, size, most)
		}
		allowed := 0
		for i := range ports {
			q := kerneltest.Question(info.ID, 305, netip.MustParseAddr("192.0.2.1"), 0, 0)
			q.Point = point(i)
			_, side := s.evaluator.Ask(t, q)
			if side.Action != event.ActionAllow {
				continue
			}
			if i == 0 {
				t.Fatalf("table %d allows a connection that its deny rule denies", info.ID)
			}
			allowed++
		}
		switch {
		case allowed == ports-1:
			whole++
		case allowed > 0:
			parts++
		}
	}
	if whole+parts != count || parts == 0 {
		t.Errorf("%d tables allow everything and %d some of it, of %d; refusals %q",
			whole, parts, count, s.policies.Status().Refusals)
	}
	if diffs, err := s.kernel.Tables.Audit(false); err != nil || len(diffs) > 0 {
		t.Errorf("the maps differ from what was written: %d, %v", len(diffs), err)
	}
}
