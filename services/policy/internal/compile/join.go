// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package compile

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/layer7"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
	"github.com/sluice-net/sluice/services/policy/internal/selector"
	"github.com/sluice-net/sluice/services/policy/internal/table"
)

// If several rules at the same position in the order of evaluation redirect a connection, the proxy must allow what
// any of them allows. But a table has only one deciding rule. So a program gets a joint rule for each list of
// redirect and allow rules that match the same peers and ports. A joint rule redirects like its first member, and its
// rule set is the union of the members' rule sets. If an allow rule is a member, the rule set allows everything.
//
// Which lists occur depends on the peers, so a joint rule is added when the first peer needs it: see With. Until
// then, a joint rule of some of the members decides, or the first member. Neither allows more than the union.
//
// A peer has one class by identity and one by address, and the lower rule number decides. A joint rule precedes the
// joint rules that have only a part of its members. So if one of the two classes has all members, the complete joint
// rule decides. Rules for all peers belong to both classes. Rules whose selectors match every peer of a scope are
// added to the classes of addresses. In some cases, each of the two classes still lacks a member. One of the two
// incomplete rule sets then decides, which allows less than the union:
//   - a selector matches some peers outside of the cluster and not others, for example only API servers, and another
//     rule matches the peer by address;
//   - a rule matches a pod or node by labels, and another rule matches it by its address;
//   - a rule for all peers on egress has a named port, and another rule matches the peer by address.

// findMembers finds the rules that can be members of joint rules: redirect rules, and allow rules at the same
// position as a redirect rule.
func (p *Program) findMembers() {
	p.member = make([]bool, len(p.rules))
	for from := 0; p.joinable && from < len(p.rules); {
		to, redirects := from, false
		for ; to < len(p.rules) && samePosition(p.rules[from].Rule, p.rules[to].Rule); to++ {
			redirects = redirects || p.rules[to].Action == policytable.Redirect
		}
		for ; from < to; from++ {
			r := &p.rules[from]
			p.member[from] = redirects && r.Tier != policytable.Admin && len(r.members) == 0 &&
				(r.Action == policytable.Redirect || r.Action == policytable.Allow)
		}
	}
}

// joins reports whether a rule can be a member of a joint rule.
func (p *Program) joins(number uint16) bool { return p.member[number-1] }

// samePosition reports whether two rules have the same position in the order of evaluation, so that only their actions
// order them.
func samePosition(a, b *rule.Rule) bool {
	return a.Tier == b.Tier && a.Priority == b.Priority && a.Index == b.Index
}

// joinable reports whether some rules can be members of a joint rule: a redirect rule, and a redirect or allow rule
// with another effect.
func joinable(rules []numbered) bool {
	for i := 1; i < len(rules); i++ {
		a, b := &rules[i-1], &rules[i]
		if a.Action == policytable.Redirect && a.Tier != policytable.Admin && samePosition(a.Rule, b.Rule) &&
			(b.Action == policytable.Allow || b.Action == policytable.Redirect) && !sameEffect(a, b) {
			return true
		}
	}
	return false
}

// monotone reports whether a selector that matches a label set also matches every larger set.
func monotone(s selector.Selector) bool {
	return !slices.ContainsFunc(s.Requirements(), func(r selector.Requirement) bool {
		return r.Op != selector.In && r.Op != selector.Exists
	})
}

// everyPeer lists label sets for each scope. Each peer of the scope has at least one of these label sets. There is no
// such list for peers in the cluster.
var everyPeer = [identity.PeerScopes][]label.Set{
	identity.PeerScopeNode: {
		label.NewSet(label.Reserved(identity.NameHost)), label.NewSet(label.Reserved(identity.NameRemoteNode)),
	},
	identity.PeerScopeOutside: {
		label.NewSet(label.Reserved(identity.NameWorld)), label.NewSet(label.Reserved(identity.NameWorldIPv4)),
		label.NewSet(label.Reserved(identity.NameWorldIPv6)),
	},
}

// share computes shared.
func (p *Program) share() {
	p.shared = [identity.PeerScopes][]uint16{}
	if !p.joinable || !p.hasPrefixes {
		return
	}
	for i := range p.rules {
		r := &p.rules[i]
		if len(r.Peers.Selectors) == 0 || len(r.named) > 0 || !p.joins(r.number) {
			continue
		}
		for scope, sets := range everyPeer {
			if len(sets) > 0 && !slices.ContainsFunc(sets, func(ls label.Set) bool {
				return !slices.ContainsFunc(r.Peers.Selectors, func(s selector.Selector) bool {
					return monotone(s) && s.Matches(ls)
				})
			}) {
				p.shared[scope] = append(p.shared[scope], r.number)
			}
		}
	}
}

// withShared sorts the rules of an address for peers of a scope. If one of them can be a member of a joint rule, it
// adds the rules that match every peer of the scope.
func (p *Program) withShared(scope identity.PeerScope, numbers []uint16) []uint16 {
	if len(p.shared[scope]) > 0 && slices.ContainsFunc(numbers, func(n uint16) bool { return p.joins(n) }) {
		numbers = append(numbers, p.shared[scope]...)
	}
	slices.Sort(numbers)
	return slices.Compact(numbers)
}

// join replaces redirect rules by joint rules in the values of intervals. claims must be in the order of the rules.
func (p *Program) join(claims []claim, cuts []uint64, values []table.Value, missing func([]uint16)) {
	lists := make(map[int][]uint16)
	for _, c := range claims {
		r := &p.rules[c.number-1]
		if !p.joins(r.number) {
			continue
		}
		i, _ := slices.BinarySearch(cuts, uint64(c.Lo))
		for ; i < len(cuts) && cuts[i] <= uint64(c.Hi); i++ {
			first := values[i].Rest()
			if first == table.NoRest {
				continue
			}
			decides := &p.rules[first-1]
			if decides.Action != policytable.Redirect || !samePosition(decides.Rule, r.Rule) {
				continue
			}
			if l := lists[i]; len(l) == 0 || l[len(l)-1] != c.number {
				lists[i] = append(l, c.number)
			}
		}
	}
	for i, members := range lists {
		first := &p.rules[members[0]-1]
		if slices.ContainsFunc(members, func(n uint16) bool { return !sameEffect(first, &p.rules[n-1]) }) {
			number, ok := p.joints[membersKey(members)]
			if !ok {
				missing(members)
				number = p.part(members)
			}
			values[i] = table.MakeValue(values[i].Admin(), number)
		}
	}
}

// part returns the first joint rule that has some of the members and redirects to the same proxy. Without such a
// rule, it returns the first member.
func (p *Program) part(members []uint16) uint16 {
	first := &p.rules[members[0]-1]
	for _, number := range p.jointed {
		r := &p.rules[number-1]
		if len(r.members) <= len(members) && r.Proxy == first.Proxy && samePosition(r.Rule, first.Rule) &&
			!slices.ContainsFunc(r.members, func(n uint16) bool {
				_, ok := slices.BinarySearch(members, n)
				return !ok
			}) {
			return number
		}
	}
	return first.number
}

func membersKey(members []uint16) string {
	var b []byte
	for _, n := range members {
		b = binary.LittleEndian.AppendUint16(b, n)
	}
	return string(b)
}

// Joinable reports whether the program can need joint rules.
func (p *Program) Joinable() bool { return p.joinable }

// Plain returns the program without joint rules.
func (p *Program) Plain() *Program {
	if p.plain != nil {
		return p.plain
	}
	return p
}

// With returns a copy of the program with a joint rule for each list of members. lists contains rule numbers of this
// program, which must be Plain. The copy has the same Hash.
func (p *Program) With(lists [][]uint16) (*Program, error) {
	if len(lists) == 0 {
		return p, nil
	}
	if got := len(p.rules) + len(lists); got > table.MaxRules {
		return nil, &table.ErrTooLarge{What: "rules", Got: got, Limit: table.MaxRules}
	}
	lists = slices.SortedFunc(slices.Values(lists), func(a, b []uint16) int {
		return cmp.Or(cmp.Compare(len(b), len(a)), slices.Compare(a, b))
	})
	out := *p
	out.plain, out.joints, out.jointed = p, make(map[string]uint16, len(lists)), nil
	out.rules, out.Sources, out.alike = nil, nil, nil
	out.Selectors, out.bySel, out.names = nil, make(map[string][]uint16), nil
	out.everyone, out.everyoneElse, out.unknown, out.addrEveryone = nil, nil, nil, nil
	now := make([]uint16, len(p.rules)+1)
	out.now = now
	type place struct {
		tier            policytable.Tier
		priority, index int32
		proxy           policytable.Proxy
	}
	at := func(r *numbered) place { return place{r.Tier, r.Priority, r.Index, r.Proxy} }
	waiting := make(map[place][][]uint16) // the lists whose joint rules are not placed yet
	for _, members := range lists {
		k := at(&p.rules[members[0]-1])
		waiting[k] = append(waiting[k], members)
	}
	for i := range p.rules {
		r := &p.rules[i]
		if r.Action == policytable.Redirect {
			for _, members := range waiting[at(r)] {
				out.rules = append(out.rules, p.joint(members))
				out.Sources = append(out.Sources, p.sourcesOf(members, p.Sources))
			}
			delete(waiting, at(r))
		}
		n := *r
		now[r.number] = uint16(len(out.rules) + 1)
		out.rules = append(out.rules, n)
		out.Sources = append(out.Sources, p.Sources[i])
	}
	for i := range out.rules {
		r := &out.rules[i]
		r.number = uint16(i + 1)
		for k := range r.members {
			r.members[k] = now[r.members[k]]
		}
		if len(r.members) > 0 {
			out.joints[membersKey(r.members)] = r.number
			out.jointed = append(out.jointed, r.number)
		}
	}
	out.index()
	return &out, nil
}

// JointSet returns the digest of the rule set that a joint rule of the members would have, without building the rule
// set. size is the estimated maximum of its memory in bytes.
func (p *Program) JointSet(members []uint16) (key layer7.Digest, size int) {
	h := sha256.New()
	all := false
	for _, n := range members {
		if r := &p.rules[n-1]; r.set != nil {
			d := r.set.Digest()
			h.Write(d[:])
			size += r.set.Size()
		} else {
			all = true
		}
	}
	if all {
		size = layer7.Union(policytable.NoProxy, true).Size()
	}
	h.Write(fmt.Appendf(nil, "joint %d %t", p.rules[members[0]-1].Proxy, all))
	return layer7.Digest(h.Sum(nil)), size
}

// joint returns the joint rule of members. It keeps the slice members.
func (p *Program) joint(members []uint16) numbered {
	first := p.rules[members[0]-1]
	all := false
	var content []*layer7.Rules
	for _, n := range members {
		if r := &p.rules[n-1]; r.Action == policytable.Redirect {
			content = append(content, r.Layer7)
		} else {
			all = true
		}
	}
	return numbered{
		Rule: &rule.Rule{
			Direction: first.Direction, Tier: first.Tier, Priority: first.Priority, Index: first.Index,
			Action: policytable.Redirect, Proxy: first.Proxy,
		},
		members: slices.Clone(members), set: layer7.Union(first.Proxy, all, content...),
	}
}

func (p *Program) sourcesOf(members []uint16, of [][]policytable.Source) []policytable.Source {
	var out []policytable.Source
	for _, n := range members {
		out = append(out, of[n-1]...)
	}
	return out
}

// Spread returns the source locations of each rule of the program; of contains the locations for the rules of Plain.
// A joint rule gets the locations of its members.
func (p *Program) Spread(of [][]policytable.Source) [][]policytable.Source {
	if p.plain == nil {
		return of
	}
	out := make([][]policytable.Source, len(p.rules))
	for i := range p.rules {
		if r := &p.rules[i]; len(r.members) == 0 {
			out[i] = of[r.base-1]
		}
	}
	for i := range p.rules {
		if r := &p.rules[i]; len(r.members) > 0 {
			out[i] = p.sourcesOf(r.members, out)
		}
	}
	return out
}

// Numbers converts rule numbers of Plain to the rule numbers of this program.
func (p *Program) Numbers(plain []uint16) []uint16 {
	if p.plain == nil {
		return plain
	}
	out := make([]uint16, len(plain))
	for i, n := range plain {
		out[i] = p.now[n]
	}
	return out
}

// Members returns the members of a joint rule; for another rule, it returns the rule itself.
func (p *Program) Members(number uint16) []uint16 {
	if m := p.rules[number-1].members; len(m) > 0 {
		return m
	}
	return []uint16{number}
}

// Set returns the layer 7 rule set of a redirect rule; nil for other rules.
func (p *Program) Set(number uint16) *layer7.Set { return p.rules[number-1].set }
