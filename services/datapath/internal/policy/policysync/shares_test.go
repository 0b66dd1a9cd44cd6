// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policysync

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/desired/subscription"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/auditmode"
)

// crowd is a kernel with small maps, the endpoints of two tenants, and a clock.
type crowd struct {
	*testing.T
	k    *fakeKernel
	a    *Applier
	s    *service
	now  time.Time
	runs uint64
}

// firstOfFlood is the first subject of the tenant that asks for too much.
const firstOfFlood = 400

func newCrowd(t *testing.T, sizes nodetable.Size) *crowd {
	c := &crowd{T: t, k: newFakeKernel(), now: time.Unix(1000, 0)}
	c.k.sizes = sizes
	c.k.maxTables, c.k.maxRows = sizes[nodetable.LimitTables], sizes[nodetable.LimitPeerRows]
	c.k.endpoint(1, 300, "10.0.0.1")
	c.k.endpoint(2, 301, "10.0.0.2")
	for i := range uint16(12) {
		c.k.endpoint(10+i, firstOfFlood+uint32(i), fmt.Sprintf("10.0.1.%d", i))
	}
	c.begin()
	return c
}

// begin starts another process, with a restarted service.
func (c *crowd) begin() {
	c.Helper()
	c.a = New(Config{Name: "test", Kernel: c.k, Wait: true, Now: func() time.Time { return c.now }})
	if err := c.a.Adopt(func(uint16) bool { return true }, auditmode.Audited{}); err != nil {
		c.Fatal(err)
	}
	c.s = nil
}

// reach applies a state.
func (c *crowd) reach(st state) {
	c.Helper()
	var err error
	if c.s == nil {
		c.runs++
		c.s = newService(c.runs)
		c.s.tenant = func(subject uint32) shares.Tenant {
			if subject >= firstOfFlood {
				return shares.Namespace("flood")
			}
			return shares.Namespace("shop")
		}
		_, err = c.a.load(c.s.snapshot(st))
	} else {
		_, err = c.a.apply(c.Context(), c.s.change(st))
	}
	if err != nil {
		c.Fatal(err)
	}
}

// settle advances the clock so that shares are computed and refused changes are retried.
func (c *crowd) settle(st state) {
	c.Helper()
	for range 3 {
		c.now = c.now.Add(shares.LevelInterval + time.Second)
		if err := c.a.again(c.Context()); errors.Is(err, subscription.ErrAnew) {
			c.a.forgetStream()
			c.s = nil
			c.reach(st)
		} else if err != nil {
			c.Fatal(err)
		}
	}
}

// flood returns a policy for each subject of the flooding tenant: many rows, and more tables than
// fit.
func flood(r *rand.Rand) map[uint32]testPolicies {
	out := map[uint32]testPolicies{}
	for i := range uint32(12) {
		port := web + 10*i
		rules := func() (list []testRule) {
			for bit := range uint8(3) {
				action := policytable.Allow
				if r.IntN(3) == 0 {
					action = policytable.Deny
				}
				list = append(list, testRule{bit, r.IntN(4) == 0, action, 0, port + uint32(bit)})
			}
			return list
		}
		out[firstOfFlood+i] = testPolicies{testPolicy{enforce: true, rules: rules()}, testPolicy{enforce: true, rules: rules()}}
	}
	return out
}

// TestFullMapsOfOneTenantChangeNothingForAnother fills the maps in random orders: the other tenant
// has exactly its expected verdicts, and the tenant that asks for too much is allowed nothing
// beyond its policies.
func TestFullMapsOfOneTenantChangeNothingForAnother(t *testing.T) {
	lacking := 0
	for seed := range uint64(150) {
		r := rand.New(rand.NewPCG(seed, 5))
		sizes := nodetable.Size{1000, 1000, 1000, 1000, 1000, 1000, 1000}
		sizes[nodetable.LimitTables] = 12 + r.IntN(20)
		sizes[nodetable.LimitPeerRows] = 50 + r.IntN(40)
		if r.IntN(2) == 0 {
			sizes[nodetable.LimitPeerClasses] = 60 + r.IntN(60)
		}
		c := newCrowd(t, sizes)
		all := state{map[uint32]props{300: 1, 301: 2, 302: 3, 303: 4, 304: 7, 305: 6}, flood(r)}
		some := testStates()[2+r.IntN(5)].policies // of tenant shop
		maps.Copy(all.policies, some)
		// Both tenants are added in a random order, some subjects at a time.
		now := state{map[uint32]props{300: 1}, map[uint32]testPolicies{}}
		var order []uint32
		for subject := range all.policies {
			order = append(order, subject)
		}
		r.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
		for i, subject := range order {
			now = state{maps.Clone(now.identities), maps.Clone(now.policies)}
			now.policies[subject] = all.policies[subject]
			for id, p := range all.identities {
				if r.IntN(4) == 0 || i == len(order)-1 {
					now.identities[id] = p
				}
			}
			if r.IntN(6) == 0 {
				c.begin()
			}
			c.reach(now)
			c.now = c.now.Add(time.Duration(r.IntN(4)) * time.Second)
		}
		for change := range 4 {
			if change > 0 { // of the policies of the flooding tenant
				now = state{now.identities, flood(r)}
				maps.Copy(now.policies, some)
				c.reach(now)
			}
			c.settle(now)
			qs := questions(c.k)
			what := fmt.Sprintf("seed %d, change %d", seed, change)
			want := now.answers(c.k, qs)
			lacking += limited(t, what, c.k, c.a, qs, want)
			for i, got := range c.k.answers(qs) {
				if q := qs[i]; c.k.endpoints[q.slot].Identity < firstOfFlood && got != want[i] {
					t.Fatalf("%s: shop: %+v is %v, want %v; refusals %q", what, q, got, want[i], c.a.Status().Refusals)
				}
			}
			for _, u := range c.a.Shares() {
				for _, tenant := range u.Tenants {
					if tenant.Tenant == shares.Namespace("shop") && tenant.Admitted != tenant.Asked {
						t.Fatalf("%s: shop has %+v of %s", what, tenant, u.Limit.Name)
					}
				}
			}
		}
	}
	if lacking == 0 {
		t.Error("the maps have capacity for everything")
	}
}

// TestTableThatExceedsAShareNamesTenantAndLimit: the status contains the tenant and the limit.
func TestTableThatExceedsAShareNamesTenantAndLimit(t *testing.T) {
	sizes := nodetable.Size{10, 1000, 1000, 1000, 1000, 1000, 1000}
	c := newCrowd(t, sizes)
	st := state{map[uint32]props{300: 1, 302: 3}, flood(rand.New(rand.NewPCG(1, 1)))}
	c.reach(st)
	c.settle(st)
	refusals := strings.Join(c.a.Status().Refusals, "\n")
	const want = "exceeds the share of namespace flood of tables on this node (the tenant has 8 of 8 and asks for 24)"
	if !strings.Contains(refusals, want) {
		t.Errorf("refusals\n%s", refusals)
	}
}

// TestNewTableOfATenantWithinItsShareHasRoomAtOnce: the table arrives after a new division is due.
func TestNewTableOfATenantWithinItsShareHasRoomAtOnce(t *testing.T) {
	sizes := nodetable.Size{10, 1000, 1000, 1000, 1000, 1000, 1000}
	c := newCrowd(t, sizes)
	st := state{map[uint32]props{300: 1, 302: 3}, flood(rand.New(rand.NewPCG(1, 1)))}
	c.reach(st)
	c.now = c.now.Add(shares.LevelInterval)
	next := state{st.identities, maps.Clone(st.policies)}
	maps.Copy(next.policies, testStates()[2].policies)
	c.reach(next)
	qs := questions(c.k)
	want := next.answers(c.k, qs)
	for i, got := range c.k.answers(qs) {
		if q := qs[i]; c.k.endpoints[q.slot].Identity < firstOfFlood && got != want[i] {
			t.Fatalf("%+v is %v, want %v; refusals %q", q, got, want[i], c.a.Status().Refusals)
		}
	}
}

// TestTableOfSeveralTenantsCountsOnce: a table that several tenants use is charged once, and stays while it fits the
// share of one of them.
func TestTableOfSeveralTenantsCountsOnce(t *testing.T) {
	sizes := nodetable.Size{10, 1000, 1000, 1000, 1000, 1000, 1000}
	c := newCrowd(t, sizes)
	st := state{map[uint32]props{300: 1, 302: 3}, flood(rand.New(rand.NewPCG(1, 1)))}
	st.policies[300] = st.policies[firstOfFlood] // the same tables as the flooding tenant
	c.reach(st)
	c.settle(st)
	for _, u := range c.a.Shares() {
		if u.Limit.Name == "tables" && (u.Asked != 24 || u.Used != 8) {
			t.Errorf("tables: %+v", u)
		}
	}
	if b := c.k.endpoints[1]; b.Egress < nodetable.First || b.Ingress < nodetable.First {
		t.Errorf("shop has %v", b)
	}
}
