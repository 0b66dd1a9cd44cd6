// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package engine

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"

	"github.com/sluice-net/sluice/model/dnsname"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/layer7"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/policy/internal/table"
)

// union is the set of a joint rule that a table needs.
type union struct {
	payer shares.Tenant
	key   layer7.Digest
	built bool // the rule set fits into the share of the tenant that pays for it
}

// namedSet is a rule set of a defined table, with its number.
type namedSet struct {
	*layer7.Set
	number policytable.RuleSet
}

// join adds the joint rules that the existing peers need to the program of a new table. It leaves out joint rules
// whose rule sets do not fit into the share of the payer. Connections then use the rule set of a part of the members,
// which allows less.
func (e *Engine) join(l *live, payer shares.Tenant) error {
	if !l.program.Joinable() {
		return nil
	}
	needed := make(map[string][]uint16)
	note := func(members []uint16) { needed[fmt.Sprint(members)] = slices.Clone(members) }
	seen := make(map[string]struct{})
	visit := func(numbers []uint16, ports []workload.NamedPort, text string, unknown bool) {
		key := l.memoKey(numbers, text, unknown)
		if _, ok := seen[key]; !ok {
			seen[key] = struct{}{}
			l.program.Joined(numbers, ports, unknown, note)
		}
	}
	for k := range identity.Kinds {
		var brought [][]uint16
		for s, b := range l.brings {
			if s.defaults[k] {
				brought = append(brought, b)
			}
		}
		visit(l.program.Matched(brought, k), nil, "", k == identity.KindUnknown)
	}
	for _, c := range e.classes {
		visit(l.matched(c), c.ports, c.portsText, c.kind == identity.KindUnknown)
	}
	class := func(numbers []uint16, ports []workload.NamedPort) (policytable.Class, error) {
		visit(numbers, ports, workload.NamedPortsText(ports), false)
		return 0, nil
	}
	_, _, err := l.program.Prefixes(e.places(l), class)
	if err != nil {
		return err
	}
	lists := e.reserve(l, payer, slices.SortedFunc(maps.Values(needed), slices.Compare))
	joined, err := l.program.With(lists)
	if err != nil {
		return err
	}
	lacking := make(map[string]struct{}, len(l.lacking))
	for text := range l.lacking {
		lacking[fmt.Sprint(joined.Numbers(needed[text]))] = struct{}{}
	}
	l.lacking = lacking
	l.program, l.table = joined, joined.NewTable()
	for s, b := range l.brings {
		l.brings[s] = joined.Numbers(b)
	}
	return nil
}

// reserve returns the lists of rules whose unions may be built, smallest first, so that as many as possible fit into
// the share of the payer.
func (e *Engine) reserve(l *live, payer shares.Tenant, lists [][]uint16) (built [][]uint16) {
	type candidate struct {
		members []uint16
		key     layer7.Digest
		size    int
	}
	all := make([]candidate, 0, len(lists))
	for _, members := range lists {
		key, size := l.program.JointSet(members)
		all = append(all, candidate{members, key, size})
	}
	slices.SortStableFunc(all, func(a, b candidate) int { return cmp.Compare(a.size, b.size) })
	l.lacking = make(map[string]struct{})
	for _, c := range all {
		ok := e.sets.Reserve(payer, c.key, c.size)
		l.unions = append(l.unions, union{payer, c.key, ok})
		if ok {
			built = append(built, c.members)
		} else {
			l.lacking[fmt.Sprint(c.members)] = struct{}{}
		}
	}
	return built
}

// addJoints replaces the tables that lack joint rules.
func (e *Engine) addJoints() {
	lack := make(map[*live]struct{})
	for l := range e.redirecting {
		if l.missing && l.refs > 0 {
			lack[l] = struct{}{}
		}
	}
	for _, l := range inOrder(lack) {
		// If the table becomes too large with further joint rules, keep the existing ones, which allow less.
		l.missing = false
		e.replaceTable(l)
	}
}

// without reports whether no proxy of the kind runs.
func (e *Engine) without(kind policytable.Proxy) bool {
	if kind == policytable.ProxyDNS {
		return e.config.WithoutDNSProxy
	}
	return e.config.WithoutHTTPProxy
}

// nameSets numbers the rule sets of a table that is about to be defined. A set without a number keeps 0.
func (e *Engine) nameSets(l *live) {
	for i := range l.table.Rules {
		set := l.program.Set(uint16(i + 1)) //nolint:gosec // at most table.MaxRules
		if set == nil || e.without(l.table.Rules[i].Proxy) {
			continue
		}
		e.redirecting[l] = struct{}{}
		if l.sets == nil {
			l.sets = make(map[layer7.Digest]namedSet)
		}
		named, ok := l.sets[set.Digest()]
		if !ok {
			l.named = append(l.named, set.Digest())
			for _, t := range l.payers {
				e.sets.Use(t, set)
			}
			named = namedSet{set, e.sets.Number(set.Digest())}
			l.sets[set.Digest()] = named
		}
		r := &l.table.Rules[i]
		r.RuleSet = named.number
		r.PassesWithoutProxy = r.RuleSet != 0 && r.Proxy == policytable.ProxyDNS &&
			(e.config.PassWithoutDNSProxy || set.EveryName())
	}
}

// Renumber replaces the tables whose rule sets have got or lost a number. Apply does this, too. The owner of the
// numbers calls Renumber after it has freed numbers.
func (e *Engine) Renumber() { e.renumber() }

// renumber replaces tables for two reasons: a rule set of the table got or lost its number since the table was
// defined, or the memory for the union of a joint rule was granted or withdrawn.
func (e *Engine) renumber() {
	e.recharge()
	if !e.sets.Divide() {
		return
	}
	for _, l := range inOrder(e.redirecting) {
		renumbered := func(d layer7.Digest) bool { return l.sets[d].number != e.sets.Number(d) }
		if l.defined && l.refs > 0 && (slices.ContainsFunc(l.named, renumbered) || e.divided(l)) {
			e.replaceTable(l)
		}
	}
}

// divided reports whether the shares now allow other unions for a table than when it was compiled.
func (e *Engine) divided(l *live) bool {
	return slices.ContainsFunc(l.unions, func(u union) bool { return u.built != e.sets.Reserved(u.payer, u.key) })
}

// recharge charges the rule sets of a table to the tenants whose subjects use the table now. Otherwise a tenant would
// pay for a table that it no longer uses, or a table would get no numbers because the only tenant that pays is over
// its share.
func (e *Engine) recharge() {
	if len(e.unpaid) == 0 {
		return
	}
	tenants := make(map[*live][]shares.Tenant)
	for _, n := range slices.Sorted(maps.Keys(e.subjects)) {
		s := e.subjects[n]
		for _, l := range s.bound {
			if _, ok := e.unpaid[l]; !ok {
				continue
			}
			if t := e.payer(s); !slices.Contains(tenants[l], t) {
				tenants[l] = append(tenants[l], t)
			}
		}
	}
	for _, l := range inOrder(e.unpaid) {
		now := tenants[l]
		if len(now) == 0 {
			continue // only a Preparation refers to it; its subjects are not known yet
		}
		delete(e.unpaid, l)
		for _, t := range now {
			if slices.Contains(l.payers, t) {
				continue
			}
			for _, d := range l.named {
				e.sets.Use(t, l.sets[d].Set)
			}
		}
		for _, t := range l.payers {
			if !slices.Contains(now, t) {
				e.sets.Release(t, l.named)
			}
		}
		l.payers = now
	}
}

// payer returns the tenant that pays for the rule sets in the tables of a subject. Without tenants it is the same for
// all subjects.
func (e *Engine) payer(s *subject) (t shares.Tenant) {
	if e.config.Tenant != nil {
		t, _ = e.config.Tenant(s.namespace)
	}
	return t
}

// structure returns a hash of the program, its joint rules, the numbers of its rule sets, and the rules whose packets
// pass without the proxy. A subscriber recognises the table in another run by this hash.
func (l *live) structure() [32]byte {
	if len(l.named) == 0 && len(l.unions) == 0 {
		return l.program.Hash
	}
	h := sha256.New()
	h.Write(l.program.Hash[:])
	for i, r := range l.table.Rules {
		n := uint16(i + 1) //nolint:gosec // as above
		if set := l.program.Set(n); set != nil {
			d := set.Digest()
			h.Write(d[:])
		}
		var b []byte
		b = binary.LittleEndian.AppendUint16(b, uint16(r.RuleSet))
		if b = append(b, 0); r.PassesWithoutProxy {
			b[len(b)-1] = 1
		}
		for _, m := range l.program.Members(n) {
			b = binary.LittleEndian.AppendUint16(b, m)
		}
		h.Write(binary.LittleEndian.AppendUint16(b, table.NoRest))
	}
	return [32]byte(h.Sum(nil))
}

// want adds by to the counts of tables that depend on the DNS names of a table's program.
func (e *Engine) want(l *live, by int) {
	for _, n := range l.program.Names() {
		before := e.wanted[n.Pattern]
		e.wanted[n.Pattern] = before + by
		if before+by == 0 {
			delete(e.wanted, n.Pattern)
		}
		e.wantedChanged = e.wantedChanged || before == 0 || before+by == 0
	}
}

// WantedNames returns the patterns of the names whose addresses tables depend on, in no particular order. If there
// are more patterns than most, it returns none, and fits is false. changed is false if the patterns are the same as
// in the last call; it then returns none either.
func (e *Engine) WantedNames(most int) (patterns []dnsname.Pattern, fits, changed bool) {
	if !e.wantedChanged {
		return nil, false, false
	}
	e.wantedChanged = false
	if len(e.wanted) > most {
		return nil, false, true
	}
	return slices.Collect(maps.Keys(e.wanted)), true, true
}
