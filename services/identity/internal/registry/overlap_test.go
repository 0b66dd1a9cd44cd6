// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package registry

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/sluice-net/sluice/model/identity"
)

// claimed returns the claims of a node, in the slots from 0, each with the revision at which it was made.
func claimed(node string, at ...any) (out []ClaimKey) {
	next := map[bool]int{}
	for i := 0; i < len(at); i += 2 {
		p := netip.MustParsePrefix(at[i].(string))
		ipv6 := p.Addr().Is6()
		out = append(out, ClaimKey{
			Node: node, Slot: Slot{ipv6, next[ipv6]}, Claim: Claim{Range: p}, Revision: int64(at[i+1].(int)),
		})
		next[ipv6]++
	}
	return out
}

// holders returns the node of each range that counts.
func (r *Registry) holders() map[string]string {
	out := map[string]string{}
	for p, node := range r.view.ranges {
		out[p.String()] = node
	}
	return out
}

// refusedOf returns the ranges that a node claims but does not have.
func (r *Registry) refusedOf(node string) (out []string) {
	for _, f := range r.view.nodes[node].refused {
		out = append(out, f.Range.String())
	}
	slices.Sort(out)
	return out
}

// TestNodeThatRegisteredFirstTakesNoRangeOfAnother: an attacker's node may write any record and claims. A range stays
// with the node that has it, whichever node registered first, and whatever range the later claim has.
func TestNodeThatRegisteredFirstTakesNoRangeOfAnother(t *testing.T) {
	for what, ranges := range map[string][]string{
		"the same range":     {"10.0.1.0/24", "10.0.2.0/24"},
		"all of the pool":    {"10.0.1.0/24", "10.0.0.0/16"},
		"one address of it":  {"10.0.1.0/24", "10.0.2.5/32"},
		"both halves":        {"10.0.1.0/24", "10.0.2.0/25", "10.0.2.128/25"},
		"nothing of its own": {"10.0.2.0/24"},
	} {
		for _, slots := range []bool{false, true} { // false: a node of an earlier version, without slots
			t.Run(fmt.Sprint(what, " with slots ", slots), func(t *testing.T) {
				r, got := newRegistry(t, time.Hour)
				liar, good := node("liar", 1, "10.0.1.0/24"), node("good", 2, "10.0.2.0/24")
				liar.Revision, good.Revision = 1, 2
				before := Update{
					Complete: true, Revision: 10, Nodes: []NodeKey{liar, good}, Addresses: []AddressesKey{at("good", 1, "10.0.2.5")},
				}
				if slots {
					before.Claims = append(claimed("liar", "10.0.1.0/24", 1), claimed("good", "10.0.2.0/24", 2)...)
				}
				r.Observe(before)
				key := mappingKey(netip.MustParseAddr("10.0.2.5"))
				is := func(when string) {
					t.Helper()
					if x := got.items[key]; x.On != "good" || x.Identity != 300 {
						t.Errorf("%s 10.0.2.5 is on node %q with identity %d", when, x.On, x.Identity)
					}
				}
				is("at first")
				again, lie := node("liar", 1, ranges...), at("liar", 1, "10.0.2.5")
				again.Revision, lie.Revision, lie.Value.Identity = 11, 12, 666
				after := Update{Revision: 12, Nodes: []NodeKey{again}, Addresses: []AddressesKey{lie}}
				if slots {
					after.Claims = claimed("liar", "10.0.1.0/24", 1)
					for i, p := range ranges[max(0, len(ranges)-1):] {
						k := claimed("liar", p, 11)[0]
						k.Slot.Number = i + 1
						after.Claims = append(after.Claims, k)
					}
				}
				r.Observe(after)
				is("after the claim")
				if r.holders()["10.0.2.0/24"] != "good" || len(r.refusedOf("liar")) == 0 || len(r.refusedOf("good")) != 0 {
					t.Errorf("the ranges are %v, of liar %v and of good %v are refused", r.holders(), r.refusedOf("liar"),
						r.refusedOf("good"))
				}
				// A process that lists what is there now decides in the same way.
				fresh, items := newRegistry(t, time.Hour)
				listing := Update{
					Complete: true, Revision: 12, Nodes: []NodeKey{again, good},
					Addresses: []AddressesKey{at("good", 1, "10.0.2.5"), lie}, Claims: after.Claims,
				}
				if slots {
					listing.Claims = append(listing.Claims, before.Claims[1])
				}
				fresh.Observe(listing)
				if x := items.items[key]; x.On != "good" || x.Identity != 300 {
					t.Errorf("for a process that begins now 10.0.2.5 is on node %q with identity %d", x.On, x.Identity)
				}
			})
		}
	}
}

// TestClaimIsAsOldAsItsSlot: a node cannot write a claim that counts as older than its slot.
func TestClaimIsAsOldAsItsSlot(t *testing.T) {
	pool := &IPAMKey{Revision: 1, Settings: IPAM{
		Mode: IPAMPool, Pool: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/16")}, IPv4Block: 24, MaxBlocks: 2,
	}}
	r, _ := newRegistry(t, time.Hour)
	liar, good := node("liar", 2), node("good", 3)
	all := claimed("liar", "10.0.1.0/24", 2, "10.0.2.0/24", 2, "10.0.3.0/24", 2, "10.0.4.0/24", 2)
	r.Observe(Update{
		Complete: true, Revision: 10, IPAM: pool, Nodes: []NodeKey{liar, good},
		Claims: append(all, claimed("good", "10.0.3.0/24", 5)...),
	})
	is := func(when, holder string) {
		t.Helper()
		if got := r.holders()["10.0.3.0/24"]; got != holder {
			t.Errorf("%s 10.0.3.0/24 is the range of %q, want %q", when, got, holder)
		}
	}
	is("claimed in a slot beyond the limit,", "good")
	r.Observe(Update{Revision: 11, Removed: []Removal{{Node: "liar", Slot: "ipv4-0"}, {Node: "liar", Slot: "ipv4-1"}}})
	is("when the slots before are empty,", "good")
	r.Observe(Update{Revision: 12, Removed: []Removal{{Node: "good"}}})
	is("of a node that is not registered any more,", "")
	// The record is deleted and written again: the claims are now as old as the record.
	r.Observe(Update{Revision: 13, Removed: []Removal{{Node: "liar"}}, Claims: claimed("liar", "10.0.3.0/24", 2)})
	again := node("good", 14)
	r.Observe(Update{Revision: 14, Nodes: []NodeKey{again}, Claims: claimed("good", "10.0.3.0/24", 14)})
	back := node("liar", 15)
	r.Observe(Update{Revision: 15, Nodes: []NodeKey{back}})
	is("of a node that registered again,", "good")
}

// TestRangesOfAnEarlierVersionCountBesideSlots: after a downgrade to a version without slots, a node claims and returns
// ranges only in its record. Its new claims are valid; ranges in slots stay with the node until it is upgraded again or
// forgotten. The limit also applies to ranges of the record, even if earlier ranges are removed from slots.
func TestRangesOfAnEarlierVersionCountBesideSlots(t *testing.T) {
	settings := IPAM{
		Mode: IPAMPool, Pool: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/16")}, IPv4Block: 24, MaxBlocks: 2,
	}
	r, _ := newRegistry(t, time.Hour)
	back := node("back", 5, "10.0.2.0/24", "10.0.3.0/24", "10.0.4.0/24")
	back.Revision = 9
	good := node("good", 10)
	r.Observe(Update{
		Complete: true, Revision: 10, IPAM: &IPAMKey{Settings: settings, Revision: 5}, Nodes: []NodeKey{back, good},
		Claims: append(claimed("back", "10.0.1.0/24", 5), claimed("good", "10.0.4.0/24", 10)...),
	})
	for _, when := range []string{"at first", "without its slot"} {
		for p, want := range map[string]string{
			"10.0.1.0/24": "back", "10.0.2.0/24": "back", "10.0.3.0/24": "back", "10.0.4.0/24": "good",
		} {
			if when != "at first" && p == "10.0.1.0/24" {
				want = ""
			}
			if got := r.holders()[p]; got != want {
				t.Errorf("%s %s is the range of %q, want %q", when, p, got, want)
			}
		}
		r.Observe(Update{Revision: 11, Removed: []Removal{{Node: "back", Slot: "ipv4-0"}}})
	}
}

// TestOnlyBlocksOfThePoolCount: only blocks of the pool are valid ranges of a node, up to the number in the settings.
// Claims that are older than the settings stay valid.
func TestOnlyBlocksOfThePoolCount(t *testing.T) {
	settings := IPAM{
		Mode: IPAMPool, Pool: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/16"), netip.MustParsePrefix("fd00::/48")},
		IPv4Block: 24, IPv6Block: 64, MaxBlocks: 2,
	}
	r, _ := newRegistry(t, time.Hour)
	claims := claimed("a", "10.0.1.0/24", 5, "10.0.2.0/25", 5, "10.0.4.0/24", 5, "fd00::/64", 5, "192.168.0.0/24", 5)
	r.Observe(Update{
		Complete: true, Revision: 5, IPAM: &IPAMKey{Settings: settings, Revision: 5}, Nodes: []NodeKey{node("a", 5)},
		Claims: claims,
	})
	for p, want := range map[string]string{
		"10.0.1.0/24": "a", "fd00::/64": "a", "10.0.2.0/25": "", "10.0.4.0/24": "", "192.168.0.0/24": "",
	} {
		if got := r.holders()[p]; got != want {
			t.Errorf("%s is the range of %q, want %q", p, got, want)
		}
	}
	if got := r.refusedOf("a"); len(got) != 3 {
		t.Errorf("refused are %v", got)
	}
	// The settings change: what counts keeps counting, for this process and for one that begins now.
	settings.Pool, settings.IPv6Block, settings.MaxBlocks = []netip.Prefix{netip.MustParsePrefix("10.9.0.0/16")}, 0, 1
	r.Observe(Update{Revision: 6, IPAM: &IPAMKey{Settings: settings, Revision: 6}})
	if got := r.holders(); got["10.0.1.0/24"] != "a" || got["fd00::/64"] != "a" {
		t.Errorf("after another setting the ranges are %v", got)
	}
	r.Observe(Update{
		Revision: 7, Nodes: []NodeKey{node("b", 7)}, Claims: claimed("b", "10.9.1.0/24", 7, "10.9.2.0/24", 7),
	})
	if got := r.holders(); got["10.9.1.0/24"] != "b" || got["10.9.2.0/24"] != "" {
		t.Errorf("by the new settings the ranges are %v", got)
	}
}

// TestRebuiltStoreChangesNoHolder: in an emptied store every claim is new. The node that had a range keeps it,
// whichever node claims it first, until it registers without the range or is forgotten.
func TestRebuiltStoreChangesNoHolder(t *testing.T) {
	r, got := newRegistry(t, time.Hour)
	r.Observe(Update{
		Complete: true, Cluster: 1, Revision: 100, Nodes: []NodeKey{node("good", 5), node("gone", 6), node("own", 7)},
		Claims: slices.Concat(claimed("good", "10.0.2.0/24", 5), claimed("gone", "10.0.3.0/24", 6),
			claimed("own", "10.0.4.0/24", 7)),
	})
	is := func(when, p, want string) {
		t.Helper()
		if got := r.holders()[p]; got != want {
			t.Errorf("%s %s is the range of %q, want %q", when, p, got, want)
		}
	}
	liar := node("liar", 2)
	r.Observe(Update{
		Complete: true, Cluster: 2, Revision: 3, Nodes: []NodeKey{liar},
		Claims:    claimed("liar", "10.0.0.0/16", 2, "10.0.2.0/24", 2, "10.0.3.0/24", 2, "10.0.4.0/24", 2),
		Addresses: []AddressesKey{at("liar", 1, "10.0.2.5")},
	})
	for _, p := range []string{"10.0.0.0/16", "10.0.2.0/24", "10.0.3.0/24", "10.0.4.0/24"} {
		is("when another node claims it first,", p, "")
	}
	if got.has("10.0.2.5") {
		t.Error("an address of a node that has not claimed its range again is another node's")
	}
	if s := r.Status(); len(s.Overlaps) != 4+2 || !s.Overlaps[0].Differs || s.Overlaps[5].Claimed {
		t.Errorf("what differs is reported as %+v", s.Overlaps)
	}
	if had, former := (knownRanges{r}).Mine(netip.MustParsePrefix("10.0.4.0/24")); !had || former == nil ||
		*former != (Former{Cluster: 1, Revision: 7}) {
		t.Errorf("this node had its range: %v, %+v", had, former)
	}
	r.Observe(Update{Revision: 4, Nodes: []NodeKey{node("good", 4)}, Claims: claimed("good", "10.0.2.0/24", 4)})
	is("when its node claims it again,", "10.0.2.0/24", "good")
	r.Observe(Update{Revision: 5, Removed: []Removal{{Node: "good", Slot: "ipv4-0"}}})
	is("when its node has given it up,", "10.0.2.0/24", "liar")
	is("of a node that is not back,", "10.0.3.0/24", "")
	r.Observe(Update{Revision: 7, Removed: []Removal{{Node: "gone"}}})
	is("when its node is forgotten,", "10.0.3.0/24", "liar")
}

// TestOnlyAsManyRangesCountAsANodeHasSlots, in every mode: an attacker's node claims more ranges in its record, with
// slots and without. Another node that claims such a range later gets it.
func TestOnlyAsManyRangesCountAsANodeHasSlots(t *testing.T) {
	for _, mode := range []IPAMMode{IPAMUnset, IPAMStatic, IPAMKubernetes} {
		for _, slots := range []int{0, MostRanges} {
			t.Run(fmt.Sprint(mode, slots), func(t *testing.T) {
				var ranges []string
				var claims []any
				for i := range 2 * MostRanges {
					ranges = append(ranges, fmt.Sprintf("10.0.%d.0/24", i), fmt.Sprintf("fd00:%x::/64", i+1))
				}
				for _, p := range ranges[:2*slots] {
					claims = append(claims, p, 5)
				}
				r, _ := newRegistry(t, time.Hour)
				u := Update{
					Complete: true, Revision: 5, Nodes: []NodeKey{node("liar", 5, ranges...)}, Claims: claimed("liar", claims...),
				}
				if mode != IPAMUnset {
					u.IPAM = &IPAMKey{Settings: IPAM{Mode: mode}, Revision: 9} // later than the claims
				}
				r.Observe(u)
				if got, refused := len(r.holders()), len(r.refusedOf("liar")); got != 2*MostRanges || refused != 2*MostRanges {
					t.Errorf("%d ranges count and %d are refused", got, refused)
				}
				last := ranges[len(ranges)-2:]
				r.Observe(Update{
					Revision: 10, Nodes: []NodeKey{node("good", 10)}, Claims: claimed("good", last[0], 10, last[1], 10),
				})
				if got := r.holders(); got[last[0]] != "good" || got[last[1]] != "good" {
					t.Errorf("%v are ranges of %q and %q", last, got[last[0]], got[last[1]])
				}
			})
		}
	}
}

// pinFile is the disk of a node, for pins.
type pinFile struct {
	memory
	pins []Pin
	err  error
}

func (f *pinFile) SavePins(pins []Pin) error {
	if f.err == nil {
		f.pins = pins
	}
	return f.err
}

// TestRestartAfterTheStoreWasRebuiltChangesNoHolder: each node keeps its range, even in a process that starts after the
// store was rebuilt, wherever the previous process was killed.
func TestRestartAfterTheStoreWasRebuiltChangesNoHolder(t *testing.T) {
	before := Update{
		Complete: true, Cluster: 1, Revision: 100, Nodes: []NodeKey{node("good", 5), node("gone", 6), node("own", 7)},
		Claims: slices.Concat(claimed("good", "10.0.2.0/24", 5), claimed("gone", "10.0.3.0/24", 6),
			claimed("own", "10.0.4.0/24", 7)),
	}
	after := Update{
		Complete: true, Cluster: 2, Revision: 3, Nodes: []NodeKey{node("liar", 2)},
		Claims: claimed("liar", "10.0.2.0/24", 2, "10.0.3.0/24", 2, "10.0.4.0/24", 2),
	}
	disk := &pinFile{}
	start := func() *Registry {
		r, _ := newRegistry(t, time.Hour)
		r.records = disk
		r.Restore(disk.pins)
		return r
	}
	is := func(r *Registry, when, p, want string) {
		t.Helper()
		if got := r.holders()[p]; got != want {
			t.Errorf("%s %s is the range of %q, want %q", when, p, got, want)
		}
	}
	r := start()
	r.Observe(before)
	if disk.pins != nil {
		t.Errorf("pins without a rebuilt store: %v", disk.pins)
	}
	r.Prepare(after) // the process is killed when the copy of the store is written
	for _, when := range []string{"after a kill,", "after a restart,"} {
		r = start()
		r.Observe(after)
		for _, p := range []string{"10.0.2.0/24", "10.0.3.0/24", "10.0.4.0/24"} {
			is(r, when, p, "")
		}
		if had, former := (knownRanges{r}).Mine(netip.MustParsePrefix("10.0.4.0/24")); !had || former == nil ||
			*former != (Former{Cluster: 1, Revision: 7}) {
			t.Errorf("%s this node had its range: %v, %+v", when, had, former)
		}
	}
	r = start()
	r.Observe(before) // the copy was not written
	r.Prepare(after)
	r.Observe(after)
	is(r, "after a restart with the copy of before,", "10.0.2.0/24", "")
	if _, former := (knownRanges{r}).Mine(netip.MustParsePrefix("10.0.4.0/24")); former == nil || former.Revision != 7 {
		t.Errorf("this node had its range at %+v", former)
	}

	// A pin ends on the disk no later than in the copy of the store.
	forgotten := Update{Cluster: 2, Revision: 4, Removed: []Removal{{Node: "gone"}}}
	r.Prepare(forgotten)
	r = start()
	r.Observe(after)
	is(r, "when its node was forgotten,", "10.0.3.0/24", "liar")
	disk.err = errors.New("the disk is full")
	back := Update{Cluster: 2, Revision: 5, Nodes: []NodeKey{node("good", 5)}} // without its range
	r.Prepare(back)
	r.Observe(back)
	is(r, "when its node has given it up,", "10.0.2.0/24", "liar")
	disk.err = nil
	r.Observe(Update{Cluster: 2, Revision: 6})
	if len(disk.pins) != 1 || disk.pins[0].Node != "own" {
		t.Errorf("after a write that failed the disk has %+v", disk.pins)
	}
}

// TestFormerRevisionDecidesForWhoKnewNeither: a process that starts after the store was rebuilt knows neither holder.
// It accepts the claim that was older in the former store.
func TestFormerRevisionDecidesForWhoKnewNeither(t *testing.T) {
	with := func(k []ClaimKey, cluster uint64, revision int64) []ClaimKey {
		k[0].Claim.Former = &Former{cluster, revision}
		return k
	}
	for what, c := range map[string]struct {
		first, second []ClaimKey
		third         []ClaimKey // of a node that neither concerns
		want          string
	}{
		"both knew": {
			with(claimed("a", "10.0.0.0/16", 2), 1, 90), with(claimed("b", "10.0.2.0/24", 3), 1, 50), nil, "b",
		},
		"the first was older": {
			with(claimed("a", "10.0.0.0/16", 2), 1, 40), with(claimed("b", "10.0.2.0/24", 3), 1, 50), nil, "a",
		},
		"of different stores": {
			with(claimed("a", "10.0.0.0/16", 2), 1, 90), with(claimed("b", "10.0.2.0/24", 3), 7, 50), nil, "a",
		},
		"the first had nothing": {
			claimed("a", "10.0.0.0/16", 2), with(claimed("b", "10.0.2.0/24", 3), 1, 50),
			with(claimed("c", "10.9.0.0/24", 4), 1, 60), "b",
		},
		"only the second names a store before": {
			claimed("a", "10.0.0.0/16", 2), with(claimed("b", "10.0.2.0/24", 3), 1, 50), claimed("c", "10.9.0.0/24", 4), "a",
		},
	} {
		r, _ := newRegistry(t, time.Hour)
		r.Observe(Update{
			Complete: true, Cluster: 2, Revision: 9, Nodes: []NodeKey{node("a", 2), node("b", 3), node("c", 4)},
			Claims: slices.Concat(c.first, c.second, c.third),
		})
		if _, got := r.view.rangeOf(netip.MustParseAddr("10.0.2.5")); got != c.want {
			t.Errorf("%s: 10.0.2.5 is in a range of %q, want %q", what, got, c.want)
		}
	}
}

// TestRegistrationNamesWhoseRangesItOverlaps: a registration that overlaps ranges of another node fails with the name
// of that node, without a request to the store.
func TestRegistrationNamesWhoseRangesItOverlaps(t *testing.T) {
	told := &recorder{t: t, items: map[Key]Item{}}
	r := New(Config{Node: "own", Incarnation: "i"}, nil, memory{}, told, Registration{})
	r.Observe(Update{Complete: true, Revision: 5, Nodes: []NodeKey{node("b", 1)}, Claims: claimed("b", "10.0.2.0/24", 1)})
	ranges := []netip.Prefix{netip.MustParsePrefix("10.0.1.0/24"), netip.MustParsePrefix("10.0.0.0/16")}
	for _, validate := range []bool{true, false} {
		n, _, err := r.Register(t.Context(), Registration{Ranges: &ranges}, validate)
		if err != nil || len(n.Refused) != 1 || n.Refused[0].Holder != "b" || n.Refused[0].Range != ranges[1] {
			t.Errorf("refused are %+v, %v", n.Refused, err)
		}
	}
}

// TestOwnEndpointsOfNoClusterIdentityStayHere: an identity that other nodes do not know is not published to them.
func TestOwnEndpointsOfNoClusterIdentityStayHere(t *testing.T) {
	r, _ := newRegistry(t, time.Hour)
	r.registration.Ranges = &[]netip.Prefix{}
	r.Observe(Update{Complete: true, Revision: 1})
	addresses := []netip.Addr{netip.MustParseAddr("10.0.1.5")}
	for _, id := range []identity.Numeric{identity.Host, identity.MinNodeLocal} {
		r.Set("e", addresses, id)
		if s := r.Status(); s.Pending != 0 {
			t.Errorf("an endpoint of identity %d waits to be published", id)
		}
	}
	r.Set("e", addresses, identity.MinCluster)
	if s := r.Status(); s.Pending != 1 {
		t.Errorf("%d endpoints of a cluster identity wait to be published", s.Pending)
	}
}

// TestRepeatedRegistrationIsWrittenIfTheStoreLacksIt: a registration is first written to the disk and then to the
// store; the second write may have failed.
func TestRepeatedRegistrationIsWrittenIfTheStoreLacksIt(t *testing.T) {
	r, _ := newRegistry(t, time.Hour)
	said := Registration{Ranges: &[]netip.Prefix{}}
	r.records, r.registration = memory{}, r.registration.with(said)
	registered := func(said Registration, validate, want bool) {
		t.Helper()
		if _, got, err := r.Register(t.Context(), said, validate); err != nil || got != want {
			t.Errorf("registered %v, %v, want %v", got, err, want)
		}
	}
	registered(said, true, false)
	if len(r.wake) != 0 {
		t.Error("a validation has the record written")
	}
	registered(said, false, false)
	if len(r.wake) != 1 {
		t.Error("a registration that the store lacks is not written")
	}
	r.revision = 5
	registered(said, true, true)
	other := []netip.Prefix{netip.MustParsePrefix("10.0.1.0/24")}
	registered(Registration{Ranges: &other}, true, false)
	registered(said, false, true)
}
