// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package engine keeps the compiled tables of a node up to date with policies, identities, subjects and learned
// names.
//
// An Engine has one owner: it starts no goroutines and takes no locks. Apply takes a change and does only the work
// that the change requires. After any sequence of changes, its tables are equal to the tables of a new engine with
// the same inputs, except for the numbers of tables and classes. Counters count the work.
package engine

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-net/sluice/model/dnsname"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/policy/internal/compile"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
	"github.com/sluice-net/sluice/services/policy/internal/ruleset"
	"github.com/sluice-net/sluice/services/policy/internal/table"
)

// Enforcement selects the subjects for which policy is enforced.
type Enforcement uint8

// The enforcement modes.
const (
	EnforceDefault Enforcement = iota // subjects that a policy selects
	EnforceAlways                     // all subjects
	EnforceNever                      // no subjects
)

// Config is fixed for the lifetime of an engine.
type Config struct {
	// Cluster is the name of this cluster.
	Cluster     string
	Enforcement Enforcement
	// AllowHost lets the local node reach its pods unless a rule denies it.
	AllowHost bool
	// Events, if set, is called with each step as it happens. It must not call the engine.
	Events func(policytable.Step)
	// Tenant, if set, returns the tenant of the pods in a namespace, and its guarantee in percent. It must be safe
	// for concurrent use.
	Tenant func(namespace string) (shares.Tenant, int)
	// IdentityClasses is the number of identity classes that tenants divide. 0 means the constant IdentityClasses.
	IdentityClasses int
	// WithoutDNSProxy leaves the rule sets of DNS redirects out of tables. If a DNS proxy runs nevertheless, it gets
	// no packets: the kernel drops the packets that such rules redirect.
	WithoutDNSProxy bool
	// PassWithoutDNSProxy lets DNS queries that a rule redirects pass while the DNS proxy does not run. Without this
	// setting, only queries that match a rule for every name pass while the DNS proxy does not run.
	PassWithoutDNSProxy bool
	// WithoutHTTPProxy leaves the rule sets of HTTP and TLS redirects out of tables.
	WithoutHTTPProxy bool
	// RuleSets numbers the sets of layer 7 rules; nil: a Registry that is not stored.
	RuleSets *ruleset.Registry
	// SplitRows limits the table rows that one tenant's selectors cause in tables of other tenants: a selector splits
	// an identity class in two, and each needs a row. Tenants divide this number. 0 means the constant SplitRows.
	SplitRows int
}

// Name is a DNS name with addresses, for all pods or for the pods of one namespace.
type Name struct {
	Name  dnsname.Learned
	Addrs []netip.Addr
}

// Location maps an address to its identity. Only tables with rules that limit a prefix to a named port use locations.
type Location struct {
	Addr     netip.Addr
	Identity identity.Numeric
}

// Change is a set of changes that take effect together. Each field may be empty. Removals are applied before additions,
// so an element that is in both is replaced.
type Change struct {
	// Refuse makes Apply fail if the change would make a table too large. Without Refuse, the subjects of such a
	// table get only the rules that fit.
	Refuse bool

	DeletePolicies   []policy.Key
	UpsertPolicies   []policy.Object
	RemoveIdentities []identity.Numeric
	AddIdentities    []peer.Identity // an identity that exists gets new labels
	RemoveSubjects   []identity.Numeric
	AddSubjects      []identity.Numeric // their identities must be known
	Forget           []Name
	Learn            []Name
	Vacate           []netip.Addr
	Locate           []Location
}

// Counters count the engine's work since it was created.
type Counters struct {
	Tables        int // tables compiled
	Programs      int // programs compiled
	IdentityRows  int // entries of the identity array written
	PeerRows      int // rows written: identity class to peer class
	PeerDeletes   int // rows deleted
	Prefixes      int // prefixes written or deleted in live tables
	GroupPrefixes int // prefixes of address groups read
	Binds         int // subjects bound to another table
	Evaluations   int // selectors compared with labels
}

// Engine contains the state: policies, peers, subjects and their tables.
type Engine struct {
	config Config

	objects     map[policy.Key]*policy.Object
	byNamespace map[string]map[*rule.Spec]*policy.Object // specs with their objects
	clusterwide map[*rule.Spec]*policy.Object
	groups      *compile.Groups

	peers     map[identity.Numeric]*member
	byLabel   map[string]map[*member]struct{} // by "key=value" and by "key"
	selectors selectorIndex
	classes   map[string]*identityClass
	byNumber  map[policytable.IdentityClass]*identityClass
	lastClass policytable.IdentityClass
	wide      [identity.Kinds]map[*live]struct{} // tables that may need a row for every identity class of the kind

	subjects map[identity.Numeric]*subject
	local    map[string]map[*subject]struct{} // subjects by namespace
	tables   map[compile.Hash]*live
	learned  learned
	located  map[netip.Addr]identity.Numeric
	placesOf map[identity.Numeric]map[netip.Addr]struct{} // addresses of each identity in located
	// waiting contains peers whose identity is treated as unknown, because a table has no capacity for their row.
	waiting map[*member]struct{}
	reduced map[*subject][2]*Reduction // subjects whose tables lack rules
	// incomplete contains tables that have no capacity for the peer classes of some peers.
	incomplete map[*live]struct{}
	splits     *splits                // nil if identity classes are not divided among tenants
	large      map[compile.Hash]error // programs that are too large for a table with any peers
	// defined tables with redirect rules
	redirecting map[*live]struct{}
	sets        *ruleset.Registry
	// unpaid contains redirecting tables for which other tenants may have to pay: a subject was removed, or its
	// tenant may have changed. See recharge.
	unpaid map[*live]struct{}
	// wanted counts the defined tables that depend on the addresses of DNS names, by pattern
	wanted        map[dnsname.Pattern]int
	wantedChanged bool
	freed         int  // number of events that freed capacity in tables
	coarse        bool // tests only: makes every table coarse

	counters  Counters
	lastTable policytable.ID
}

// New returns an empty engine.
func New(config Config) *Engine {
	e := &Engine{
		config:      config,
		objects:     make(map[policy.Key]*policy.Object),
		byNamespace: make(map[string]map[*rule.Spec]*policy.Object),
		clusterwide: make(map[*rule.Spec]*policy.Object),
		groups:      compile.NewGroups(),
		peers:       make(map[identity.Numeric]*member),
		byLabel:     make(map[string]map[*member]struct{}),
		selectors:   newSelectorIndex(config.Cluster),
		classes:     make(map[string]*identityClass),
		byNumber:    make(map[policytable.IdentityClass]*identityClass),
		subjects:    make(map[identity.Numeric]*subject),
		local:       make(map[string]map[*subject]struct{}),
		tables:      make(map[compile.Hash]*live),
		learned:     newLearned(),
		located:     make(map[netip.Addr]identity.Numeric),
		placesOf:    make(map[identity.Numeric]map[netip.Addr]struct{}),
		waiting:     make(map[*member]struct{}),
		reduced:     make(map[*subject][2]*Reduction),
		incomplete:  make(map[*live]struct{}),
		large:       make(map[compile.Hash]error),
		redirecting: make(map[*live]struct{}),
		unpaid:      make(map[*live]struct{}),
		wanted:      make(map[dnsname.Pattern]int),
		sets:        config.RuleSets,
	}
	if e.sets == nil {
		e.sets = ruleset.New(ruleset.Config{})
	}
	if config.Tenant != nil {
		e.splits = newSplits(config.IdentityClasses, config.SplitRows)
	}
	for k := range e.wide {
		e.wide[k] = make(map[*live]struct{})
	}
	return e
}

// subject is an endpoint identity of this node.
type subject struct {
	number    identity.Numeric
	namespace string
	bound     [2]*live // nil: nothing is enforced
	sources   [2][][]policytable.Source
	told      [2]bool // the binding has been reported
	tenant    shares.Tenant
	guarantee int // in percent
}

func sameSources(a, b [][]policytable.Source) bool {
	return slices.EqualFunc(a, b, func(x, y []policytable.Source) bool { return slices.Equal(x, y) })
}

// Counters returns the work done so far.
func (e *Engine) Counters() Counters { return e.counters }

// Apply makes a change. If a subject's table would exceed a limit, the subject gets only the rules that fit, and
// Reduced reports it. These rules never allow more than all rules together would. With Refuse, Apply instead returns
// an error if the subject's table had all of its rules before the change. Then no policies and no new subjects of the
// change take effect, but all other parts of the change do. The error names the subject and the policy with the most
// rules in the table.
//
// If a learned address does not fit into a table, Apply leaves the address out of that table and returns an error.
func (e *Engine) Apply(c Change) error {
	dirty := make(map[*subject]struct{})
	room := e.freed + e.counters.Tables
	undo := e.applyObjects(c, dirty)
	e.applyIdentities(c, dirty)
	added := e.applySubjects(c, dirty)
	addresses := e.applyNames(c)
	err := e.commit(dirty, c.Refuse)
	if err != nil {
		undo()
		for _, s := range added {
			delete(e.subjects, s.number)
			e.enlist(s, false)
		}
		err = fmt.Errorf("apply policies: %w", err)
		// All other parts of the change must still be applied, but with the old policies.
		if again := e.commit(dirty, false); again != nil {
			err = errors.Join(err, again)
		}
	}
	for _, l := range inOrder(addresses) {
		if l.refs == 0 {
			continue
		}
		if aerr := e.updateAddresses(l, addresses[l]); aerr != nil && err == nil {
			err = fmt.Errorf("apply learned addresses: %w", aerr)
		}
	}
	e.addJoints()
	e.renumber()
	if e.freed+e.counters.Tables != room {
		e.retryIncomplete()
		e.retryWaiting()
		e.retryMarked()
	}
	// After the peers of a marked class were split again, their tenant may need fewer classes than it asked for. The
	// rest is available to other tenants.
	e.divideRows()
	for round := 0; round < 2 && e.divideClasses(); round++ {
		e.retryMarked()
	}
	e.addJoints()
	return err
}

// applyObjects stores policies and groups, and marks the affected subjects dirty. The returned function restores the
// old policies and groups.
func (e *Engine) applyObjects(c Change, dirty map[*subject]struct{}) (undo func()) {
	old := make(map[policy.Key]*policy.Object)
	var groups []*policy.Group // old and new versions of changed groups
	set := func(key policy.Key, o *policy.Object) {
		before := e.objects[key]
		if _, ok := old[key]; !ok {
			old[key] = before
		}
		e.replace(key, before, o, dirty)
		for _, x := range []*policy.Object{before, o} {
			if x != nil && x.Group != nil {
				groups = append(groups, x.Group)
			}
		}
	}
	for _, key := range c.DeletePolicies {
		if e.objects[key] != nil {
			set(key, nil)
		}
	}
	for i := range c.UpsertPolicies {
		o := c.UpsertPolicies[i]
		set(o.Key, &o)
	}
	e.markGrouped(groups, dirty)
	return func() {
		for key, o := range old {
			e.replace(key, e.objects[key], o, nil)
		}
	}
}

// markGrouped marks the subjects whose tables depend on the changes of groups.
func (e *Engine) markGrouped(changed []*policy.Group, dirty map[*subject]struct{}) {
	if len(changed) == 0 {
		return
	}
	stale := make(map[*live]bool)
	for _, s := range e.subjects {
		for _, l := range s.bound {
			if l == nil || !l.program.UsesGroups() {
				continue
			}
			is, ok := stale[l]
			if !ok {
				is = l.program.Stale(e.groups, changed)
				stale[l] = is
			}
			if is {
				dirty[s] = struct{}{}
			}
		}
	}
}

func (e *Engine) replace(key policy.Key, before, after *policy.Object, dirty map[*subject]struct{}) {
	if before != nil {
		delete(e.objects, key)
		for i := range before.Specs {
			spec := &before.Specs[i]
			e.markSelected(spec, dirty)
			if spec.Namespace == "" {
				delete(e.clusterwide, spec)
			} else {
				exclude(e.byNamespace, spec.Namespace, spec)
			}
		}
		if before.Group != nil {
			e.groups.Delete(before.Group.Name)
		}
	}
	if after != nil {
		e.objects[key] = after
		for i := range after.Specs {
			spec := &after.Specs[i]
			e.markSelected(spec, dirty)
			if spec.Namespace == "" {
				e.clusterwide[spec] = after
			} else {
				put(e.byNamespace, spec.Namespace, spec, after)
			}
		}
		if after.Group != nil {
			e.groups.Set(after.Group)
			e.counters.GroupPrefixes += len(after.Group.Prefixes)
		}
	}
}

func (e *Engine) markSelected(spec *rule.Spec, dirty map[*subject]struct{}) {
	if dirty == nil {
		return
	}
	if spec.Namespace != "" {
		for s := range e.local[spec.Namespace] {
			if e.selects(spec, s) {
				dirty[s] = struct{}{}
			}
		}
		return
	}
	for _, s := range e.subjects {
		if e.selects(spec, s) {
			dirty[s] = struct{}{}
		}
	}
}

// enlist adds a subject to its namespace, or removes it.
func (e *Engine) enlist(s *subject, add bool) {
	if !add {
		exclude(e.local, s.namespace, s)
		return
	}
	s.namespace, _ = e.peers[s.number].id.Labels.Value(label.SourceKubernetes, label.KeyNamespace)
	include(e.local, s.namespace, s)
}

func (e *Engine) selects(spec *rule.Spec, s *subject) bool {
	p := e.peers[s.number]
	return p != nil && selects(spec, p.id)
}

func selects(spec *rule.Spec, id peer.Identity) bool {
	if spec.Host != (id.Kind == identity.KindHost) {
		return false
	}
	if spec.Namespace != "" {
		if ns, _ := id.Labels.Value(label.SourceKubernetes, label.KeyNamespace); ns != spec.Namespace {
			return false
		}
	}
	return spec.Subject.Matches(id.Labels)
}

func (e *Engine) applySubjects(c Change, dirty map[*subject]struct{}) (added []*subject) {
	for _, n := range c.RemoveSubjects {
		s := e.subjects[n]
		if s == nil {
			continue
		}
		delete(e.subjects, n)
		e.enlist(s, false)
		delete(dirty, s)
		delete(e.reduced, s)
		e.emit(policytable.RemoveSubject{Subject: n})
		var dropped []*live
		for d := range s.bound {
			if l := s.bound[d]; l != nil {
				s.bound[d] = nil
				dropped = append(dropped, l)
			}
		}
		e.release(dropped)
	}
	for _, n := range c.AddSubjects {
		if e.subjects[n] == nil && e.peers[n] != nil {
			s := &subject{number: n}
			e.subjects[n] = s
			e.enlist(s, true)
			dirty[s] = struct{}{}
			added = append(added, s)
		}
	}
	return added
}

// stale contains the addresses whose entries must be updated, for each table.
type stale map[*live]map[netip.Addr]struct{}

// applyNames stores learned names and locations, and returns the affected addresses.
func (e *Engine) applyNames(c Change) stale {
	out := make(stale)
	changed := func(name dnsname.Learned, a netip.Addr) {
		for _, l := range e.tables {
			if name.For(l.program.SubjectNamespace()) && l.program.Wants(name.Name()) {
				include(out, l, a)
			}
		}
	}
	for _, n := range c.Forget {
		name := n.Name.Canonical()
		for _, a := range n.Addrs {
			if a = a.Unmap(); e.learned.remove(name, a) {
				changed(name, a)
			}
		}
	}
	for _, n := range c.Learn {
		name := n.Name.Canonical()
		for _, a := range n.Addrs {
			if a = a.Unmap(); e.learned.add(name, a) {
				changed(name, a)
			}
		}
	}
	moved := make(map[netip.Addr]struct{})
	vacate := func(a netip.Addr) {
		if n, ok := e.located[a]; ok {
			exclude(e.placesOf, n, a)
			delete(e.located, a)
			moved[a] = struct{}{}
		}
	}
	for _, a := range c.Vacate {
		vacate(a)
	}
	for _, l := range c.Locate {
		vacate(l.Addr)
		e.located[l.Addr] = l.Identity
		include(e.placesOf, l.Identity, l.Addr)
		moved[l.Addr] = struct{}{}
	}
	// An added or removed identity changes the named ports at its addresses.
	for _, n := range c.RemoveIdentities {
		maps.Copy(moved, e.placesOf[n])
	}
	for _, id := range c.AddIdentities {
		maps.Copy(moved, e.placesOf[id.Number])
	}
	if len(moved) == 0 {
		return out
	}
	for _, l := range e.tables {
		if l.program.NeedsPodAddresses() {
			for a := range moved {
				include(out, l, a)
			}
		}
	}
	return out
}

// include adds v to the set of key k.
func include[M ~map[K]map[V]struct{}, K, V comparable](m M, k K, v V) {
	put(m, k, v, struct{}{})
}

// put sets element e in the map of key k.
func put[M ~map[K]map[E]V, K, E comparable, V any](m M, k K, e E, v V) {
	if m[k] == nil {
		m[k] = make(map[E]V)
	}
	m[k][e] = v
}

// exclude removes element e from the set or map of key k. If no element is left, it also removes the key.
func exclude[M ~map[K]map[E]V, K, E comparable, V any](m M, k K, e E) {
	delete(m[k], e)
	if len(m[k]) == 0 {
		delete(m, k)
	}
}

// program is the compiled program of a subject in one direction.
type program struct {
	*compile.Program // nil: nothing is enforced
	in               compile.Input
	reduction        *Reduction // nil: the program has all rules
}

// input returns the rules of a subject in one direction. enforced is false if the direction allows everything.
func (e *Engine) input(s *subject, d policytable.Direction) (in compile.Input, enforced bool) {
	return e.inputOf(e.peers[s.number].id, d, e.groups, e.specsOf(e.peers[s.number].id))
}

// specsOf returns an iterator over the specs that may select an identity.
func (e *Engine) specsOf(id peer.Identity) func(visit func(*rule.Spec)) {
	ns, _ := id.Labels.Value(label.SourceKubernetes, label.KeyNamespace)
	return func(visit func(*rule.Spec)) {
		for _, specs := range []map[*rule.Spec]*policy.Object{e.byNamespace[ns], e.clusterwide} {
			for spec := range specs {
				visit(spec)
			}
		}
	}
}

// inputOf is input for an identity that need not be a subject, with the given address groups and specs.
func (e *Engine) inputOf(
	id peer.Identity, d policytable.Direction, groups *compile.Groups, specs func(visit func(*rule.Spec)),
) (in compile.Input, enforced bool) {
	in = compile.Input{Direction: d, Ports: id.Ports, Groups: groups}
	if e.config.Enforcement == EnforceNever {
		return in, false
	}
	always := e.config.Enforcement == EnforceAlways || id.Labels.Has(label.Reserved(identity.NameInit))
	enforced, deny, selected := always, always, false
	specs(func(spec *rule.Spec) {
		if !spec.Selects[d] || !selects(spec, id) {
			return
		}
		enforced, selected = true, true
		deny = deny || spec.DefaultDeny[d]
		for _, r := range spec.Rules {
			if r.Direction == d {
				in.Rules = append(in.Rules, r)
			}
		}
	})
	if d == policytable.Egress {
		in.Rules = rule.Implied(in.Rules)
	}
	in.Namespace, _ = id.Labels.Value(label.SourceKubernetes, label.KeyNamespace)
	if !deny {
		in.Flags |= table.DefaultAllow
	}
	// AllowHost applies only to subjects that a policy selects. A subject without policies that EnforceAlways
	// isolates does not get this exception.
	if d == policytable.Ingress && e.config.AllowHost && selected && id.Kind != identity.KindHost {
		in.Flags |= table.HostAllow
	}
	return in, enforced
}

// compiled compiles the rules; it returns nil if they allow everything.
func (e *Engine) compiled(in compile.Input) (*compile.Program, error) {
	e.counters.Programs++
	prog, err := compile.New(in)
	if err != nil || prog.AllowsAll() {
		return nil, err
	}
	return prog, nil
}

// tooLarge returns an error that names the policy with the most rules in a table.
func tooLarge(s *subject, d policytable.Direction, rules []*rule.Rule, err error) error {
	return fmt.Errorf("%s of identity %d: %w; the largest share is from %s", d, s.number, err, largest(rules))
}

// largest returns a policy of the namespace that has the most rules: the policy with the most rules there.
func largest(rules []*rule.Rule) string {
	namespaces, policies := make(map[string]int), make(map[string]map[string]int)
	for _, r := range rules {
		src := r.Source
		src.Path = ""
		namespaces[src.Namespace] += r.Weight()
		if policies[src.Namespace] == nil {
			policies[src.Namespace] = make(map[string]int)
		}
		policies[src.Namespace][strings.TrimSpace(src.String())] += r.Weight()
	}
	return most(policies[most(namespaces)])
}

// most returns the name with the highest count, the first in alphabetical order if several have it, and "" if count is
// empty.
func most(count map[string]int) (name string) {
	for n, c := range count {
		if c > count[name] || c == count[name] && n < name {
			name = n
		}
	}
	return name
}

// binding is the table that a direction of a subject will get.
type binding struct {
	s *subject
	d policytable.Direction
	program
}

// commit compiles the tables of the dirty subjects. When all are compiled, it binds the subjects to them. It returns
// an error only if refuse is set, see Apply.
func (e *Engine) commit(dirty map[*subject]struct{}, refuse bool) error {
	order := make([]*subject, 0, len(dirty))
	for s := range dirty {
		if e.subjects[s.number] == s && e.peers[s.number] != nil {
			order = append(order, s)
		}
	}
	slices.SortFunc(order, func(a, b *subject) int { return cmp.Compare(a.number, b.number) })

	binds := make([]binding, 0, 2*len(order))
	for _, s := range order {
		for _, d := range []policytable.Direction{policytable.Ingress, policytable.Egress} {
			b := binding{s: s, d: d}
			if in, enforced := e.input(s, d); enforced {
				b.in = in
				var err error
				if b.Program, err = e.compiled(in); err != nil {
					b.reduction = &Reduction{Err: err}
				}
			}
			binds = append(binds, b)
		}
	}
	built, err := e.buildAll(binds, refuse)
	if err != nil {
		return err
	}
	var dropped []*live
	for i := range binds {
		b := &binds[i]
		var l *live
		sources := b.s.sources[b.d]
		if b.Program != nil {
			if l = e.tables[b.Hash]; l == nil {
				l = built[b.Hash]
				e.tables[b.Hash] = l
			}
			if e.splits != nil {
				e.useTable(l, b.s)
			}
			if t := e.payer(b.s); !l.defined { // a Preparation may have compiled it
				l.payers = []shares.Tenant{t}
			} else if len(l.named) > 0 && !slices.Contains(l.payers, t) {
				e.unpaid[l] = struct{}{}
			}
			l.refs++
			if len(l.unclassified) > 0 {
				e.incomplete[l] = struct{}{}
			}
			b.s.sources[b.d] = b.Sources
		} else {
			b.s.sources[b.d] = nil
		}
		e.noteReduction(b)
		before := b.s.bound[b.d]
		b.s.bound[b.d] = l
		if before != l || !b.s.told[b.d] || !sameSources(sources, b.s.sources[b.d]) {
			e.counters.Binds++
			b.s.told[b.d] = true
			if l != nil {
				e.define(l)
			}
			e.emit(e.bindEvent(b.s, b.d, l))
		}
		if before != nil {
			dropped = append(dropped, before)
		}
	}
	e.release(dropped)
	return nil
}

// Bound is the table that evaluates a direction of a subject.
type Bound struct {
	// Table is nil if the direction is not enforced and everything is allowed.
	Table *table.Table
	// Sources are the source locations of each rule, starting with number 1.
	Sources [][]policytable.Source
	Hash    compile.Hash
}

// Bound returns the table of a subject; false if the engine has no such subject.
func (e *Engine) Bound(n identity.Numeric, d policytable.Direction) (Bound, bool) {
	s := e.subjects[n]
	if s == nil {
		return Bound{}, false
	}
	l := s.bound[d]
	if l == nil {
		return Bound{}, true
	}
	return Bound{Table: l.table, Sources: l.sources(s.sources[d]), Hash: l.program.Hash}, true
}

// Entry returns the entry of the identity array for a number.
func (e *Engine) Entry(n identity.Numeric) table.Entry {
	p := e.peers[n]
	if p == nil || p.class == nil {
		return table.Entry{}
	}
	return table.Entry{IdentityClass: p.class.number, Kind: p.id.Kind, Scope: p.id.Scope, Known: true}
}

// Lookup evaluates a connection in the table of one of its two endpoints, in the same way as the kernel.
func (e *Engine) Lookup(subject identity.Numeric, d policytable.Direction, peer identity.Numeric, addr netip.Addr, q uint32) (table.Verdict, error) {
	b, ok := e.Bound(subject, d)
	if !ok {
		return table.Verdict{}, fmt.Errorf("identity %d is not a subject of this node", subject)
	}
	if b.Table == nil {
		return table.Verdict{Action: policytable.Allow, Reason: table.ByDefault}, nil
	}
	return b.Table.Lookup(e.Entry(peer), addr, q), nil
}

// Size contains the sizes of the tables in use and of the index of peers.
type Size struct {
	Tables, Subjects, Identities, IdentityClasses, Selectors int
	PeerRows, Classes, Nodes, Intervals, Prefixes, Rules     int
	// Merged is the number of tables that merge address classes with equal verdicts.
	Merged int
}

// Size computes the sizes.
func (e *Engine) Size() Size {
	s := Size{
		Tables: len(e.tables), Subjects: len(e.subjects), Identities: len(e.peers),
		IdentityClasses: len(e.classes), Selectors: len(e.selectors.byText),
	}
	for _, l := range e.tables {
		s.PeerRows += len(l.table.Peers)
		s.Classes += len(l.table.Classes)
		s.Nodes += len(l.table.Nodes)
		s.Rules += len(l.table.Rules)
		if l.coarse {
			s.Merged++
		}
		s.Prefixes += l.table.Prefixes.Len()
		for c := range l.table.Classes {
			s.Intervals += len(l.table.Intervals(policytable.Class(c)))
		}
	}
	return s
}
