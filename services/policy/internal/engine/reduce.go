// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package engine

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/policy/internal/compile"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
	"github.com/sluice-net/sluice/services/policy/internal/table"
)

// Reduction reports that a table of a subject lacks some of the subject's rules.
type Reduction struct {
	Subject   identity.Numeric
	Direction policytable.Direction
	// Closed means that not even the deny rules fit, so the table denies all traffic of its direction.
	Closed bool
	// Largest is the policy with the most rules in the table. Policies are the policies with missing rules, sorted.
	Largest  string
	Policies []policy.Key
	Err      error // the limit that the whole rule set exceeds
}

// String describes the missing rules and the reason.
func (r *Reduction) String() string {
	what := fmt.Sprintf("rules of %d policies are left out", len(r.Policies))
	if r.Closed {
		what = "everything is denied"
	}
	return fmt.Sprintf("%s of identity %d: %s, because %v; the largest share is from %s",
		r.Direction, r.Subject, what, r.Err, r.Largest)
}

// Reduced returns the tables that lack some of their subjects' rules, by subject and direction.
func (e *Engine) Reduced() []*Reduction {
	var out []*Reduction
	order := func(a, b *subject) int { return cmp.Compare(a.number, b.number) }
	for _, s := range slices.SortedFunc(maps.Keys(e.reduced), order) {
		for _, r := range e.reduced[s] {
			if r != nil {
				out = append(out, r)
			}
		}
	}
	return out
}

// noteReduction records whether the table of a direction of a subject has all rules.
func (e *Engine) noteReduction(b *binding) {
	r := e.reduced[b.s]
	if r[b.d] = b.reduction; b.reduction != nil {
		copied := *b.reduction // other subjects with the same rules share it
		copied.Subject, copied.Direction = b.s.number, b.d
		r[b.d] = &copied
	}
	if r[0] == nil && r[1] == nil {
		delete(e.reduced, b.s)
	} else {
		e.reduced[b.s] = r
	}
}

// buildAll compiles the tables that the bindings need and the engine does not have. A program that is too large is
// replaced by a program with the rules that fit. If refuse is set, buildAll fails instead, unless the subject's former
// table already lacked rules.
func (e *Engine) buildAll(binds []binding, refuse bool) (map[compile.Hash]*live, error) {
	fresh := make(map[compile.Hash]struct{})
	var programs []*compile.Program
	payers := make(map[compile.Hash]shares.Tenant)
	for _, b := range binds {
		if b.Program == nil || e.tables[b.Hash] != nil {
			continue
		}
		if _, ok := fresh[b.Hash]; !ok {
			fresh[b.Hash] = struct{}{}
			programs = append(programs, b.Program)
			payers[b.Hash] = e.payer(b.s)
		}
	}
	built, failed := e.build(programs, payers)
	if refuse {
		for hash, l := range built {
			if len(l.unclassified) > 0 {
				failed[hash] = l.noCapacity
			}
		}
	}
	// retain removes the tables that no binding needs.
	retain := func(used map[compile.Hash]struct{}) {
		for hash, l := range built {
			if _, ok := used[hash]; !ok {
				delete(built, hash)
				e.retire(e.remove(l))
			}
		}
	}
	for i := range binds {
		b := &binds[i]
		var err error
		switch {
		case b.reduction != nil: // there are too many rules for one program
			err = b.reduction.Err
		case b.Program != nil:
			err = failed[b.Hash]
		}
		if err == nil {
			continue
		}
		if refuse && e.reduced[b.s][b.d] == nil {
			retain(nil)
			return nil, tooLarge(b.s, b.d, b.in.Rules, err)
		}
		if b.Program == nil || built[b.Hash] == nil { // a built table fits, or lacks only the classes of some peers
			e.reduce(b, err, built)
		}
	}
	used := make(map[compile.Hash]struct{}, len(binds))
	for _, b := range binds {
		if b.Program != nil {
			used[b.Hash] = struct{}{}
		}
	}
	retain(used)
	return built, nil
}

// maxFits limits how many tables are compiled in the search for the allow rules that fit.
const maxFits = 4

// reduce replaces the program of a binding by a program with the rules that fit, and adds its table to built. It
// keeps all deny and pass rules, and then as many allow rules as fit, in the order of evaluation and with the same
// number for each namespace. If not even the deny and pass rules fit, the table denies all traffic of its direction.
func (e *Engine) reduce(b *binding, why error, built map[compile.Hash]*live) {
	rules := slices.SortedFunc(slices.Values(b.in.Rules), rule.Compare)
	var must, may []*rule.Rule
	for _, r := range rules {
		if r.Action == policytable.Deny || r.Action == policytable.Pass {
			must = append(must, r)
		} else {
			may = append(may, r)
		}
	}
	may = fairly(may)
	b.reduction = &Reduction{Err: why, Largest: largest(rules)}
	n := guess(len(may), why)
	for range maxFits {
		if n == 0 {
			break
		}
		in := b.in
		in.Rules = slices.Concat(must, may[:n])
		if p, ok := e.tryRules(b.s, in, built); ok {
			b.Program, b.reduction.Policies = p, policiesOf(may[n:])
			return
		}
		n /= 2
	}
	in := b.in
	in.Rules = must
	if p, ok := e.tryRules(b.s, in, built); ok {
		b.Program, b.reduction.Policies = p, policiesOf(may)
		return
	}
	in.Rules, in.Flags = nil, 0
	p, ok := e.tryRules(b.s, in, built)
	if !ok {
		panic("engine: a table without rules does not fit") // it has one class
	}
	b.Program, b.reduction.Policies, b.reduction.Closed = p, policiesOf(rules), true
}

// guess estimates how many of n rules fit, from the error about the exceeded limit.
func guess(n int, why error) int {
	var large *table.ErrTooLarge
	if errors.As(why, &large) && large.Got > large.Limit {
		return min(n-1, int(int64(n)*int64(large.Limit)/int64(large.Got)))
	}
	return n / 2
}

// maxLarge limits the number of programs that are remembered as too large.
const maxLarge = 10_000

// tryRules compiles rules of a subject, unless a table for them exists, and reports whether they fit.
func (e *Engine) tryRules(s *subject, in compile.Input, built map[compile.Hash]*live) (*compile.Program, bool) {
	p, err := e.compiled(in)
	switch {
	case err != nil:
		return nil, false
	case p == nil || e.tables[p.Hash] != nil || built[p.Hash] != nil:
		return p, true
	}
	next, failed := e.build([]*compile.Program{p}, map[compile.Hash]shares.Tenant{p.Hash: e.payer(s)})
	if len(failed) > 0 {
		return nil, false
	}
	built[p.Hash] = next[p.Hash]
	return p, true
}

// fairly orders rules so that among the first n rules, for every n, each namespace has the same share. The rules of one
// namespace keep their order.
func fairly(rules []*rule.Rule) []*rule.Rule {
	used := make(map[string]int)
	at := make(map[*rule.Rule]int, len(rules))
	for _, r := range rules {
		used[r.Source.Namespace] += r.Weight()
		at[r] = used[r.Source.Namespace]
	}
	out := slices.Clone(rules)
	slices.SortStableFunc(out, func(a, b *rule.Rule) int {
		return cmp.Or(cmp.Compare(at[a], at[b]), cmp.Compare(a.Source.Namespace, b.Source.Namespace))
	})
	return out
}

// policiesOf returns the policies of the rules.
func policiesOf(rules []*rule.Rule) []policy.Key {
	set := make(map[policy.Key]struct{})
	for _, r := range rules {
		set[policy.Key{Kind: r.Source.Kind, Namespace: r.Source.Namespace, Name: r.Source.Name}] = struct{}{}
	}
	return slices.SortedFunc(maps.Keys(set), policy.Key.Compare)
}
