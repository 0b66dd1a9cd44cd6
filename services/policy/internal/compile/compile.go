// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package compile turns the rules of a subject into a table.
//
// A Program is the compiled form of the rules of one direction. It does not depend on the existing peers. It contains
// the numbered rules, the numbers of the rules that have each selector, and the prefixes of address rules. Subjects
// with equal programs share one table. Given the selectors that a peer matches, a Program computes the class of the
// peer. The engine determines which combinations of selectors occur.
package compile

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/sluice-net/sluice/model/dnsname"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/layer7"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/port"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
	"github.com/sluice-net/sluice/services/policy/internal/selector"
	"github.com/sluice-net/sluice/services/policy/internal/table"
)

// Input contains everything that determines a table, except the peers.
type Input struct {
	Direction policytable.Direction
	Rules     []*rule.Rule         // in any order
	Flags     table.Flags          // DefaultAllow and HostAllow
	Ports     []workload.NamedPort // of the subject; used to resolve named ports on ingress
	Groups    *Groups              // all groups
	// Namespace is the namespace of the subject. It decides which learned addresses of names apply.
	Namespace string
}

// maxOverlaps limits the work for the address side of a table. The work is the number of rules that apply to a
// prefix, summed over all prefixes. Without the limit, a few thousand rules for all addresses, together with the
// maximum number of prefixes, would occupy a CPU for a minute.
const maxOverlaps = 5_000_000

// Hash identifies a program by its content.
type Hash [32]byte

// numbered is a rule with its number in the program.
type numbered struct {
	*rule.Rule
	number uint16
	ranges []port.Range // resolved; none for AllPorts
	named  []rule.Port  // egress only: resolved for each peer
	// base is the number in the program without joint rules; 0 for a joint rule.
	base uint16
	// members are the numbers of the rules that a joint rule combines.
	members []uint16
	set     *layer7.Set // for Redirect
}

// Program is a compiled rule set. It is immutable.
type Program struct {
	Hash      Hash
	Direction policytable.Direction
	flags     table.Flags
	rules     []numbered // starting with number 1
	// Sources are the source locations of each rule, starting with number 1. They depend on the subject and are not
	// part of the hash.
	Sources [][]policytable.Source

	// Selectors are the selectors of the rules' peers, in canonical order. bySel has the numbers of the rules that
	// have each selector.
	Selectors []selector.Selector
	bySel     map[string][]uint16

	alike         []uint16 // by number - 1: the first of consecutive rules with the same effect
	everyone      []uint16 // rules on the identity side for every peer
	everyoneElse  []uint16 // like everyone, without rules that exempt the local node
	unknown       []uint16 // for peers with an unknown identity
	addrEveryone  []uint16 // rules on the address side for every address
	hasPrefixes   bool
	names         []rule.NamePeer
	namespace     string          // of the subjects, if the program has names
	grouped       bool            // a rule has peers by groups
	groups        []*policy.Group // groups that a rule depends on
	groupsDigest  rule.Digest     // of the relevant parts of groups
	closedLabels  label.Set       // labels of groups whose members are unknown
	namedPrefixes bool

	// joinable is set if several rules may redirect the same connection: see join.go.
	joinable bool
	member   []bool            // by number - 1: the rule can be a member of a joint rule
	joints   map[string]uint16 // joint rules by the key of their members
	jointed  []uint16          // numbers of the joint rules
	plain    *Program          // without joint rules; nil: this program
	now      []uint16          // by number in plain: number in this program
	// shared contains, for each scope, the joinable rules whose selectors match every peer of the scope.
	shared [identity.PeerScopes][]uint16
}

// New sorts, numbers and indexes the rules.
func New(in Input) (*Program, error) {
	rules := slices.Clone(in.Rules)
	slices.SortFunc(rules, rule.Compare)
	p := &Program{Direction: in.Direction, flags: in.Flags, bySel: make(map[string][]uint16)}

	admin := 0
	for i, r := range rules {
		if i > 0 && same(rules[i-1], r) {
			last := len(p.Sources) - 1
			p.Sources[last] = append(p.Sources[last], r.Source)
			continue
		}
		if len(p.rules) >= table.MaxRules {
			return nil, &table.ErrTooLarge{What: "rules", Got: len(rules), Limit: table.MaxRules}
		}
		n := numbered{Rule: r, number: uint16(len(p.rules) + 1), base: uint16(len(p.rules) + 1), set: r.Set()}
		if r.Tier == policytable.Admin {
			if admin++; admin > table.MaxAdminRules {
				return nil, &table.ErrTooLarge{What: "rules in the Admin tier", Got: admin, Limit: table.MaxAdminRules}
			}
		}
		n.resolve(in.Direction, in.Ports)
		p.rules = append(p.rules, n)
		// Reject a rule that is too large by itself now, and not only when the first matching peer appears.
		if 2*len(n.ranges)+1 > table.MaxIntervals {
			if got := len(p.Function([]uint16{n.number}, nil, false)); got > table.MaxIntervals {
				return nil, &table.ErrTooLarge{What: "intervals in one rule", Got: got, Limit: table.MaxIntervals}
			}
		}
		p.Sources = append(p.Sources, []policytable.Source{r.Source})
	}
	p.joinable = joinable(p.rules)
	p.index()
	if len(p.names) > 0 {
		p.namespace = in.Namespace
	}
	if p.grouped {
		p.groups, p.groupsDigest = p.matter(in.Groups)
		var closed []label.Label
		for _, g := range p.groups {
			if g.Closed {
				closed = append(closed, g.Labels.All()...)
			}
		}
		p.closedLabels = label.NewSet(closed...)
	}
	p.hash()
	return p, nil
}

// index computes everything that follows from the numbers of the rules.
func (p *Program) index() {
	p.findMembers()
	p.place()
	for i := range p.rules {
		first := uint16(i + 1)
		if i > 0 && sameEffect(&p.rules[i-1], &p.rules[i]) {
			first = p.alike[i-1]
		}
		p.alike = append(p.alike, first)
	}
}

// sameEffect reports whether it makes no difference for a connection which of two rules decides.
func sameEffect(a, b *numbered) bool {
	if a.Tier != b.Tier || a.Action != b.Action || a.Proxy != b.Proxy {
		return false
	}
	return a.set == nil || b.set == nil || a.set.Digest() == b.set.Digest()
}

// same reports whether two rules are equal in the order of evaluation and have the same effect.
func same(a, b *rule.Rule) bool {
	return a.Tier == b.Tier && a.Priority == b.Priority && a.Index == b.Index &&
		a.Action == b.Action && a.Proxy == b.Proxy && a.Digest() == b.Digest()
}

// resolve sets ranges to the port numbers of a rule, and named to the named ports whose numbers depend on the peer.
func (n *numbered) resolve(d policytable.Direction, own []workload.NamedPort) {
	for _, p := range n.Ports {
		switch {
		case p.Name == "":
			n.ranges = append(n.ranges, p.Range)
		case d == policytable.Ingress:
			n.ranges = append(n.ranges, resolved(p, own)...)
		default:
			n.named = append(n.named, p)
		}
	}
}

func resolved(p rule.Port, ports []workload.NamedPort) []port.Range {
	var out []port.Range
	for _, np := range ports {
		if proto := port.Protocol(np.Protocol); p.Names(np.Name, proto) {
			out = append(out, port.Ports(proto, np.Port, np.Port))
		}
	}
	return out
}

// place decides for each rule whether it is looked up on the identity side or on the address side. A rule for all
// peers and all ports costs nothing on the identity side. A rule for all peers with specific ports would be copied
// into every identity class there. It is placed on the address side if there can be several identity classes.
func (p *Program) place() {
	for i := range p.rules {
		for _, s := range p.rules[i].Peers.Selectors {
			p.bySel[s.String()] = append(p.bySel[s.String()], p.rules[i].number)
			if len(p.bySel[s.String()]) == 1 {
				p.Selectors = append(p.Selectors, s)
			}
		}
	}
	slices.SortFunc(p.Selectors, func(a, b selector.Selector) int { return cmp.Compare(a.String(), b.String()) })
	for s, ns := range p.bySel {
		p.bySel[s] = slices.Compact(ns)
	}
	for i := range p.rules {
		r := &p.rules[i]
		if len(r.Peers.Networks)+len(r.Peers.Groups)+len(r.Peers.Names) > 0 {
			p.hasPrefixes = true
			p.names = append(p.names, r.Peers.Names...)
			p.namedPrefixes = p.namedPrefixes || len(r.named) > 0
			p.grouped = p.grouped || len(r.Peers.Groups) > 0
		}
	}
	for i := range p.rules {
		r := &p.rules[i]
		if r.Action == policytable.Deny && len(r.Peers.Selectors) > 0 {
			p.unknown = append(p.unknown, r.number)
		}
		if !r.Peers.Any {
			continue
		}
		if p.joins(r.number) && len(r.named) == 0 {
			// Put the rule on both sides, so that the lists of matching rules of both sides contain it.
			if p.hasPrefixes {
				p.addrEveryone = append(p.addrEveryone, r.number)
			}
		} else if len(p.Selectors) > 0 && !r.AllPorts && !r.Peers.ExceptOwn && len(r.named) == 0 {
			p.addrEveryone = append(p.addrEveryone, r.number)
			continue
		}
		p.everyone = append(p.everyone, r.number)
		p.unknown = append(p.unknown, r.number)
		if !r.Peers.ExceptOwn {
			p.everyoneElse = append(p.everyoneElse, r.number)
		}
	}
	slices.Sort(p.unknown)
	p.unknown = slices.Compact(p.unknown)
	p.share()
}

func (p *Program) hash() {
	h := sha256.New()
	var buf [8]byte
	num := func(n int) {
		binary.LittleEndian.PutUint64(buf[:], uint64(n))
		h.Write(buf[:])
	}
	num(int(p.Direction))
	num(int(p.flags))
	num(len(p.rules))
	for _, r := range p.rules {
		num(int(r.Tier))
		digest := r.Digest()
		h.Write(digest[:])
		num(len(r.ranges))
		for _, x := range r.ranges {
			num(int(x.Lo))
			num(int(x.Hi))
		}
	}
	h.Write(p.groupsDigest[:]) // zero without groups
	h.Write([]byte(p.namespace))
	copy(p.Hash[:], h.Sum(nil))
}

// Names returns the DNS names whose addresses the program depends on.
func (p *Program) Names() []rule.NamePeer { return p.names }

// SubjectNamespace returns the namespace of the subjects; empty if the program does not depend on names.
func (p *Program) SubjectNamespace() string { return p.namespace }

// NeedsPodAddresses reports whether a rule limits a prefix to a named port. For such a rule, the addresses of the
// pods in the prefix must be known.
func (p *Program) NeedsPodAddresses() bool { return p.namedPrefixes }

// NewTable returns a table without peers and prefixes.
func (p *Program) NewTable() *table.Table {
	t := &table.Table{Header: table.Header{Flags: p.flags}, Peers: make(map[policytable.IdentityClass]policytable.Class)}
	for _, r := range p.rules {
		t.Rules = append(t.Rules, policytable.Rule{Action: r.Action, Tier: r.Tier, Proxy: r.Proxy})
	}
	if p.hasPrefixes || len(p.addrEveryone) > 0 {
		t.Flags |= table.HasAddresses
	}
	return t
}

// Brings returns the numbers of the rules that apply to peers because they match the selector.
func (p *Program) Brings(selector string) []uint16 { return p.bySel[selector] }

// Namespace returns the namespace of the policy of the first rule that has a selector. It is empty for a cluster-wide
// policy. It is also empty if a rule with the selector passes or redirects: leaving out such a rule could allow more,
// so there is no stricter rule set for all peers.
func (p *Program) Namespace(selector string) string {
	for _, n := range p.bySel[selector] {
		if a := p.rules[n-1].Action; a != policytable.Allow && a != policytable.Deny {
			return ""
		}
	}
	return p.Sources[p.bySel[selector][0]-1][0].Namespace
}

// Denies returns the deny rules among rules.
func (p *Program) Denies(numbers []uint16) (denies []uint16) {
	for _, n := range numbers {
		if p.rules[n-1].Action == policytable.Deny {
			denies = append(denies, n)
		}
	}
	return denies
}

// Matched returns the numbers of the rules that apply to a peer on the identity side: the rules that its selectors
// contribute, and the rules for all peers. The caller must not change the result, which may be shared.
func (p *Program) Matched(brought [][]uint16, kind identity.Kind) []uint16 {
	base := p.everyone
	switch kind {
	case identity.KindHost:
		base = p.everyoneElse
	case identity.KindUnknown:
		return p.unknown
	}
	switch {
	case len(brought) == 0:
		return base
	case len(brought) == 1 && len(base) == 0:
		return brought[0]
	}
	out := slices.Clone(base)
	for _, b := range brought {
		out = append(out, b...)
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// NamesForEveryone reports whether a rule for all peers has a named port. In this case, the class of each peer
// depends on the named ports of the peer, even if no selector matches it.
func (p *Program) NamesForEveryone() bool { return p.UsesNames(p.everyone) }

// AllowsAll reports whether the program allows everything.
func (p *Program) AllowsAll() bool { return len(p.rules) == 0 && p.flags&table.DefaultAllow != 0 }

// UsesNames reports whether one of the rules has a named port that depends on the peer.
func (p *Program) UsesNames(numbers []uint16) bool {
	return slices.ContainsFunc(numbers, func(n uint16) bool { return len(p.rules[n-1].named) > 0 })
}

// claim is a range of points that a rule covers.
type claim struct {
	port.Range
	number uint16
	admin  bool
}

// Function returns the intervals of a set of rules. Named ports are resolved with the peer's ports. If unknown is set,
// a named port that cannot be resolved means all ports of its protocols in deny rules, and no port in other rules.
func (p *Program) Function(numbers []uint16, ports []workload.NamedPort, unknown bool) []table.Interval {
	return p.Joined(numbers, ports, unknown, func([]uint16) {})
}

// Joined is like Function. It also calls missing with the members of each joint rule that the intervals need and that
// the program lacks. In place of such a joint rule, the intervals have a rule that allows less.
func (p *Program) Joined(
	numbers []uint16, ports []workload.NamedPort, unknown bool, missing func(members []uint16),
) []table.Interval {
	var claims []claim
	cuts := []uint64{0}
	for _, n := range numbers {
		r := &p.rules[n-1]
		add := func(x port.Range) {
			claims = append(claims, claim{x, n, r.Tier == policytable.Admin})
			cuts = append(cuts, uint64(x.Lo), uint64(x.Hi)+1)
		}
		if r.AllPorts {
			add(port.Everything)
			continue
		}
		for _, x := range r.ranges {
			add(x)
		}
		for _, name := range r.named {
			if unknown {
				if r.Action != policytable.Deny {
					continue
				}
				for _, proto := range port.WithPorts {
					if name.Protocol == 0 || name.Protocol == proto {
						add(port.Whole(proto))
					}
				}
				continue
			}
			for _, x := range resolved(name, ports) {
				add(x)
			}
		}
	}
	slices.Sort(cuts)
	cuts = slices.Compact(cuts)
	if cuts[len(cuts)-1] > uint64(port.Last) {
		cuts = cuts[:len(cuts)-1]
	}
	values := make([]table.Value, len(cuts))
	for i := range values {
		values[i] = table.Nothing
	}
	// The rules are in the order of evaluation. The first rule that covers a slot takes it; later rules skip the
	// slot.
	admin, rest := newFree(len(cuts)), newFree(len(cuts))
	for _, c := range claims {
		slots := rest
		if c.admin {
			slots = admin
		}
		i, _ := slices.BinarySearch(cuts, uint64(c.Lo))
		for i = slots.from(i); i < len(cuts) && cuts[i] <= uint64(c.Hi); i = slots.take(i) {
			if c.admin {
				values[i] = table.MakeValue(c.number, values[i].Rest())
			} else {
				values[i] = table.MakeValue(values[i].Admin(), c.number)
			}
		}
	}
	if p.joinable {
		p.join(claims, cuts, values, missing)
	}
	out := make([]table.Interval, 0, len(cuts))
	for i, v := range values {
		hi := port.Last
		if i+1 < len(cuts) {
			hi = port.Point(cuts[i+1] - 1)
		}
		if n := len(out); n > 0 && out[n-1].Value == v {
			out[n-1].Hi = hi
			continue
		}
		out = append(out, table.Interval{Hi: hi, Value: v})
	}
	return out
}

// Alike returns the first rule of the run of consecutive rules that have the same effect as the given rule. The
// verdict is the same whichever rule of the run decides, so callers that compare verdicts compare Alike and not the
// rule numbers.
func (p *Program) Alike(number uint16) uint16 { return p.alike[number-1] }

// Run returns the last rule of a run of consecutive rules with the same effect. first must be the first rule of the
// run.
func (p *Program) Run(first uint16) (last uint16) {
	last = first
	for int(last) < len(p.alike) && p.alike[last] == first {
		last++
	}
	return last
}

// Coarse replaces each rule number by the first number of its run of rules with the same effect. The verdicts stay
// the same, but name the deciding rule less precisely.
func (p *Program) Coarse(list []table.Interval) []table.Interval {
	out := make([]table.Interval, 0, len(list))
	for _, i := range list {
		admin, rest := i.Value.Admin(), i.Value.Rest()
		if admin != table.NoAdmin {
			admin = p.Alike(admin)
		}
		if rest != table.NoRest {
			rest = p.Alike(rest)
		}
		i.Value = table.MakeValue(admin, rest)
		if n := len(out); n > 0 && out[n-1].Value == i.Value {
			out[n-1].Hi = i.Hi
			continue
		}
		out = append(out, i)
	}
	return out
}

// free tracks which of n slots are free: an occupied slot points towards the next free slot.
type free []int32

func newFree(n int) free {
	f := make(free, n+1)
	for i := range f {
		f[i] = int32(i)
	}
	return f
}

// from returns the first free slot at or after i, or n if all are taken.
func (f free) from(i int) int {
	for int(f[i]) != i {
		f[i] = f[f[i]]
		i = int(f[i])
	}
	return i
}

// take occupies a free slot and returns the next free slot.
func (f free) take(i int) int {
	f[i] = int32(i + 1)
	return f.from(i + 1)
}

// Place is a single address that needs an entry: an address learned for a DNS name, or the address of a pod with
// relevant named ports.
type Place struct {
	Addr  netip.Addr
	Names []string             // DNS names that it was learned for
	Ports []workload.NamedPort // of the pod with this address
}

// entry is a peer of a rule that matches addresses.
type entry struct {
	number uint16
	reach  rule.Reach
	group  *rule.GroupPeer // nil for a plain prefix
}

type mark struct {
	add    []int // entries that start to apply at this prefix
	except []int // entries that stop to apply at this prefix
	groups []*policy.Group
	place  *Place
}

// Prefixes computes the address side of the table: it returns each prefix whose classes differ from the classes of its
// enclosing prefix. class returns the class of a set of rules.
func (p *Program) Prefixes(places []Place, class func(numbers []uint16, ports []workload.NamedPort) (policytable.Class, error)) (def [identity.PeerScopes]policytable.Class, out []Prefix, err error) {
	base, err := class(p.addrEveryone, nil)
	if err != nil {
		return def, nil, err
	}
	for i := range def {
		def[i] = base
	}
	if !p.hasPrefixes {
		return def, nil, nil
	}
	marks := make(map[netip.Prefix]*mark)
	at := func(x netip.Prefix) *mark {
		m := marks[x]
		if m == nil {
			m = &mark{}
			marks[x] = m
		}
		return m
	}
	var entries []entry
	add := func(e entry, where []netip.Prefix, except []netip.Prefix) {
		id := len(entries)
		entries = append(entries, e)
		for _, x := range where {
			m := at(x)
			m.add = append(m.add, id)
		}
		for _, x := range except {
			m := at(x)
			m.except = append(m.except, id)
		}
	}
	roots := []netip.Prefix{netip.PrefixFrom(netip.IPv4Unspecified(), 0), netip.PrefixFrom(netip.IPv6Unspecified(), 0)}
	grouped := false
	for i := range p.rules {
		r := &p.rules[i]
		for j := range r.Peers.Networks {
			n := &r.Peers.Networks[j]
			add(entry{number: r.number, reach: n.Reach}, []netip.Prefix{n.Prefix}, n.Except)
		}
		for j := range r.Peers.Groups {
			grouped = true
			g := &r.Peers.Groups[j]
			add(entry{number: r.number, group: g}, roots, g.Except)
		}
		for _, n := range r.Peers.Names {
			var where []netip.Prefix
			for _, pl := range places {
				if slices.ContainsFunc(pl.Names, n.Pattern.Matches) {
					where = append(where, netip.PrefixFrom(pl.Addr, pl.Addr.BitLen()))
				}
			}
			add(entry{number: r.number, reach: n.Reach}, where, nil)
		}
	}
	if grouped {
		for _, g := range p.groups {
			for _, x := range g.Prefixes {
				m := at(x)
				m.groups = append(m.groups, g)
			}
		}
	}
	if p.namedPrefixes {
		for i := range places {
			if len(places[i].Ports) > 0 {
				at(netip.PrefixFrom(places[i].Addr, places[i].Addr.BitLen())).place = &places[i]
			}
		}
	}
	return p.walk(def, marks, entries, class)
}

// Prefix is a prefix and the classes of its addresses.
type Prefix struct {
	Prefix  netip.Prefix
	Classes [identity.PeerScopes]policytable.Class
}

// walk visits the prefixes in the order of their addresses, each prefix before the prefixes inside of it. A stack
// holds the prefixes that contain the visited one.
func (p *Program) walk(def [identity.PeerScopes]policytable.Class, marks map[netip.Prefix]*mark, entries []entry,
	class func([]uint16, []workload.NamedPort) (policytable.Class, error),
) (_ [identity.PeerScopes]policytable.Class, out []Prefix, err error) {
	prefixes := slices.SortedFunc(maps.Keys(marks), netip.Prefix.Compare)
	type frame struct {
		prefix  netip.Prefix
		active  []int
		groups  []*policy.Group
		classes [identity.PeerScopes]policytable.Class
	}
	var stack []frame
	work := 0
	for _, x := range prefixes {
		m := marks[x]
		for len(stack) > 0 && !contains(stack[len(stack)-1].prefix, x) {
			stack = stack[:len(stack)-1]
		}
		f := frame{prefix: x}
		outer := def
		if len(stack) > 0 {
			top := &stack[len(stack)-1]
			f.active, f.groups, outer = top.active, top.groups, top.classes
		}
		if len(m.add) > 0 {
			f.active = append(slices.Clone(f.active), m.add...)
		}
		if len(m.except) > 0 {
			f.active = slices.DeleteFunc(slices.Clone(f.active), func(e int) bool { return slices.Contains(m.except, e) })
		}
		if len(m.groups) > 0 {
			f.groups = append(slices.Clone(f.groups), m.groups...)
		}
		if work += 1 + len(f.active); work > maxOverlaps {
			return def, nil, &table.ErrTooLarge{What: "pairs of prefix and matching rule", Got: work, Limit: maxOverlaps}
		}
		numbers := p.reached(f.active, f.groups, entries)
		var ports []workload.NamedPort
		if m.place != nil {
			ports = m.place.Ports
		}
		for s := range identity.PeerScopes {
			if f.classes[s], err = class(numbers[s], ports); err != nil {
				return def, nil, err
			}
		}
		if f.classes != outer {
			out = append(out, Prefix{Prefix: x, Classes: f.classes})
		}
		stack = append(stack, f)
	}
	return def, out, nil
}

func contains(outer, inner netip.Prefix) bool {
	return outer.Bits() <= inner.Bits() && outer.Contains(inner.Addr())
}

// reached returns, for each scope, the rules that apply because of the active entries.
func (p *Program) reached(active []int, groups []*policy.Group, entries []entry) (out [identity.PeerScopes][]uint16) {
	for s := range out {
		out[s] = slices.Clone(p.addrEveryone)
	}
	var union label.Set
	narrow := false
	if len(groups) > 0 {
		var ls []label.Label
		for _, g := range groups {
			ls = append(ls, g.Labels.All()...)
		}
		union = label.NewSet(ls...)
		narrow = true
	}
	for _, id := range active {
		e := entries[id]
		reach := e.reach
		if e.group != nil {
			if !p.groupMatches(e.number, e.group, union) {
				continue
			}
			reach = rule.ReachOutside
			if e.group.NodesToo && (narrow || p.closedLabels.Len() > 0 && p.rules[e.number-1].Action == policytable.Deny) {
				reach |= rule.ReachNode
			}
		}
		for s, bit := range [identity.PeerScopes]rule.Reach{rule.ReachCluster, rule.ReachNode, rule.ReachOutside} {
			if reach&bit != 0 {
				out[s] = append(out[s], e.number)
			}
		}
	}
	for s := range out {
		out[s] = p.withShared(identity.PeerScope(s), out[s]) //nolint:gosec // an index of an array
	}
	return out
}

// groupMatches reports whether a rule's group peer matches an address that is in groups with these labels.
func (p *Program) groupMatches(number uint16, g *rule.GroupPeer, labels label.Set) bool {
	matches := g.Selector.Matches(labels)
	if p.closedLabels.Len() == 0 {
		return matches
	}
	with := g.Selector.Matches(label.NewSet(append(slices.Clone(labels.All()), p.closedLabels.All()...)...))
	if p.rules[number-1].Action == policytable.Deny {
		return matches || with
	}
	return matches && with
}

// Where returns the rules whose address peers cover an address. It evaluates the rules themselves, independently of
// the prefixes that Prefixes computed. places must be the places that were passed to Prefixes.
func (p *Program) Where(addr netip.Addr, scope identity.PeerScope, places []Place) (numbers []uint16, ports []workload.NamedPort) {
	in := func(list []netip.Prefix) bool {
		return slices.ContainsFunc(list, func(x netip.Prefix) bool { return x.Contains(addr) })
	}
	var names []string
	for _, pl := range places {
		if pl.Addr == addr {
			names, ports = pl.Names, pl.Ports
		}
	}
	var union []label.Label
	covered := false
	for _, g := range p.groups {
		if in(g.Prefixes) {
			covered = true
			union = append(union, g.Labels.All()...)
		}
	}
	labels := label.NewSet(union...)
	bit := rule.Reach(1) << scope
	for i := range p.rules {
		r := &p.rules[i]
		match := slices.ContainsFunc(r.Peers.Networks, func(n rule.Network) bool {
			return n.Reach&bit != 0 && n.Prefix.Contains(addr) && !in(n.Except)
		}) || slices.ContainsFunc(r.Peers.Groups, func(g rule.GroupPeer) bool {
			reach := rule.ReachOutside
			if g.NodesToo && (covered || p.closedLabels.Len() > 0 && r.Action == policytable.Deny) {
				reach |= rule.ReachNode
			}
			return reach&bit != 0 && p.groupMatches(r.number, &g, labels) && !in(g.Except)
		}) || slices.ContainsFunc(r.Peers.Names, func(n rule.NamePeer) bool {
			return n.Reach&bit != 0 && slices.ContainsFunc(names, n.Pattern.Matches)
		})
		if match {
			numbers = append(numbers, r.number)
		}
	}
	return numbers, ports
}

// WithEverywhere adds the rules for all addresses to the rules of one address, for peers of a scope.
func (p *Program) WithEverywhere(scope identity.PeerScope, numbers []uint16) []uint16 {
	return p.withShared(scope, append(slices.Clone(p.addrEveryone), numbers...))
}

// Everywhere returns the rules of the address side that apply to all addresses.
func (p *Program) Everywhere() []uint16 { return p.addrEveryone }

// Wants reports whether the program depends on the addresses of the DNS name.
func (p *Program) Wants(name string) bool {
	name = dnsname.Canonical(name)
	return slices.ContainsFunc(p.names, func(n rule.NamePeer) bool { return n.Pattern.Matches(name) })
}

// Rule returns a rule and its source locations by number.
func (p *Program) Rule(number uint16) (*rule.Rule, []policytable.Source, error) {
	if number == 0 || int(number) > len(p.rules) {
		return nil, nil, fmt.Errorf("table has no rule %d", number)
	}
	return p.rules[number-1].Rule, p.Sources[number-1], nil
}

// Rules returns the rules, starting with number 1. Equal rules appear once.
func (p *Program) Rules() []*rule.Rule {
	out := make([]*rule.Rule, len(p.rules))
	for i := range p.rules {
		out[i] = p.rules[i].Rule
	}
	return out
}
