// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/identity"
	"github.com/sluice-net/sluice/services/policy/internal/label"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/port"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
)

// Filter says which policies are listed; its zero value takes all.
type Filter struct {
	Kind, Namespace, Name string
	Subject               identity.Numeric
}

// Listed is a policy with its state, or a file that was refused.
type Listed struct {
	Policy
	Error    string // of a newer form; of a file that has no policy in force
	Accepted bool
	Subjects []identity.Numeric
}

// List returns policies sorted by key, and the revision they are of.
func (n *Node) List(ctx context.Context, f Filter) ([]Listed, uint64, error) {
	var revision uint64
	list, err := ask(ctx, n, func() ([]Listed, error) {
		revision = n.barrier.Policy
		var out []Listed
		takes := func(k policy.Key) bool {
			return (f.Kind == "" || k.Kind == f.Kind) && (f.Namespace == "" || k.Namespace == f.Namespace) && (f.Name == "" || k.Name == f.Name)
		}
		for k, p := range n.policies {
			if !takes(k) || f.Subject != 0 && !n.engine.Selects(k, f.Subject) {
				continue
			}
			l := Listed{Policy: *p, Accepted: p.Broken == "", Error: p.Broken, Subjects: n.engine.Selected(k)}
			if r, ok := n.sources[p.Source].refusal(p.Origin); ok {
				l.Error = r.err
			}
			out = append(out, l)
		}
		for name, s := range n.sources {
			for origin, r := range s.refused {
				has := slices.ContainsFunc(out, func(l Listed) bool { return l.Source == name && l.Origin == origin })
				if !has && takes(r.key) && f.Subject == 0 {
					out = append(out, Listed{Policy: Policy{Key: r.key, Source: name, Origin: origin}, Error: r.err})
				}
			}
		}
		slices.SortFunc(out, func(a, b Listed) int { return compareKeys(a.Key, b.Key) })
		return out, nil
	})
	return list, revision, err
}

func (s *source) refusal(origin string) (refused, bool) {
	if s == nil {
		return refused{}, false // a source of an earlier configuration
	}
	r, ok := s.refused[origin]
	return r, ok
}

// Judged are the tables of a subject.
type Judged struct {
	Bound    [2]bool // by rule.Direction; false: nothing is enforced
	Tables   [2]engine.TableDefined
	Sources  [2][][]rule.Source
	Revision uint64
}

// Table returns the tables by which an identity is judged.
func (n *Node) Table(ctx context.Context, x identity.Numeric) (Judged, error) {
	return ask(ctx, n, func() (Judged, error) {
		if _, ok := n.engine.Identity(x); !ok {
			return Judged{}, fmt.Errorf("identity %d is %w", x, ErrNotFound)
		}
		e := n.engine
		if !e.IsSubject(x) {
			var err error
			if e, err = e.Fork(nil, x); err != nil {
				return Judged{}, fmt.Errorf("%w: %w", ErrLimit, err)
			}
		}
		out := Judged{Revision: n.barrier.Policy}
		for _, d := range []rule.Direction{rule.Ingress, rule.Egress} {
			out.Tables[d], out.Bound[d] = e.BoundTable(x, d)
			b, _ := e.Bound(x, d)
			out.Sources[d] = b.Sources
		}
		return out, nil
	})
}

// Peer is one end of a connection in a question.
type Peer struct {
	Identity identity.Numeric // 0: by labels or address
	Labels   []label.Label
	Addr     netip.Addr
}

// Side is what one side says to a connection.
type Side struct {
	Judged  bool              // the one whose side it is is a workload
	Subject identity.Identity // Number is 0 if labels were given that nobody has
	Peer    identity.Identity
	engine.Explanation
}

// Explained is the answer of Explain.
type Explained struct {
	Action   rule.Action
	Egress   Side
	Ingress  Side
	Revision uint64
}

// Explain judges a connection on both sides.
func (n *Node) Explain(ctx context.Context, from, to Peer, q port.Point) (Explained, error) {
	return ask(ctx, n, func() (Explained, error) {
		x := explanation{node: n}
		src, err := x.resolve("from", from)
		if err != nil {
			return Explained{}, err
		}
		dst, err := x.resolve("to", to)
		if err != nil {
			return Explained{}, err
		}
		e := n.engine
		var subjects []identity.Numeric
		aside := len(x.extra) > 0
		for _, id := range []identity.Identity{src, dst} {
			if workload(id) {
				subjects = append(subjects, id.Number)
				aside = aside || !e.IsSubject(id.Number)
			}
		}
		if aside {
			if e, err = e.Fork(x.extra, subjects...); err != nil {
				return Explained{}, fmt.Errorf("%w: %w", ErrLimit, err)
			}
		}
		out := Explained{Action: rule.Allow, Revision: n.barrier.Policy}
		side := func(d rule.Direction, subject, peer identity.Identity, addr netip.Addr) (Side, error) {
			s := Side{Subject: x.shown(subject), Peer: x.shown(peer)}
			if !workload(subject) {
				return s, nil
			}
			s.Judged = true
			var err error
			s.Explanation, err = e.Explain(subject.Number, d, peer.Number, addr, q)
			// A denial on one side is one, and so is a redirect.
			out.Action = min(out.Action, s.Verdict.Action)
			return s, err
		}
		if out.Egress, err = side(rule.Egress, src, dst, to.Addr); err != nil {
			return Explained{}, err
		}
		out.Ingress, err = side(rule.Ingress, dst, src, from.Addr)
		return out, err
	})
}

// workload reports whether policies can select the identity on this node.
func workload(id identity.Identity) bool {
	switch id.Kind {
	case identity.KindInCluster, identity.KindHost, identity.KindOther:
		return true
	}
	return false
}

// explanation collects what a question needs beside the engine.
type explanation struct {
	node  *Node
	extra []identity.Identity
}

func (x *explanation) resolve(field string, p Peer) (identity.Identity, error) {
	e := x.node.engine
	switch {
	case p.Identity != 0:
		id, ok := e.Identity(p.Identity)
		if !ok {
			return id, fmt.Errorf("%s.identity: identity %d is %w", field, p.Identity, ErrNotFound)
		}
		return id, nil
	case len(p.Labels) > 0:
		set := label.NewSet(p.Labels...)
		for _, id := range x.node.identities {
			if id.Labels.String() == set.String() {
				return id, nil
			}
		}
		// A number that nobody has, for this answer alone.
		for free := identity.MaxNodeLocal; ; free-- {
			if _, ok := e.Identity(free); ok || slices.ContainsFunc(x.extra, func(id identity.Identity) bool { return id.Number == free }) {
				continue
			}
			id, err := identity.New(free, set)
			if err != nil {
				return id, fmt.Errorf("%w: %s.labels: %w", ErrInvalid, field, err)
			}
			x.extra = append(x.extra, id)
			return id, nil
		}
	case p.Addr.IsValid():
		number := identity.WorldIPv4
		if p.Addr.Is6() {
			number = identity.WorldIPv6
		}
		for _, try := range []identity.Numeric{number, identity.World} {
			if id, ok := e.Identity(try); ok {
				return id, nil
			}
		}
		return identity.Identity{}, fmt.Errorf("%s.address: the identity of the world, %d, is %w", field, number, ErrNotFound)
	}
	return identity.Identity{}, fmt.Errorf("%w: %s: neither identity, labels nor address is given", ErrInvalid, field)
}

// shown is an identity without the number that it has for this answer alone.
func (x *explanation) shown(id identity.Identity) identity.Identity {
	if slices.ContainsFunc(x.extra, func(e identity.Identity) bool { return e.Number == id.Number }) {
		id.Number = 0
	}
	return id
}

// Difference is what changes for a subject and some of its peers.
type Difference struct {
	engine.Difference
	Subject identity.Identity
	Peers   []DifferentPeer
}

// DifferentPeer is a peer at a place.
type DifferentPeer struct {
	Identity identity.Identity
	Block    netip.Prefix // zero: everywhere else
}

// Diff says which verdicts would change.
func (n *Node) Diff(ctx context.Context, manifests []byte, namespace string, remove []policy.Key) ([]Difference, error) {
	var docs []Decoded
	if len(manifests) > 0 {
		var err error
		if docs, err = Decode(manifests, namespace, n.config.Rules); err != nil {
			return nil, err
		}
	}
	return ask(ctx, n, func() ([]Difference, error) {
		var objects []policy.Object
		for _, d := range docs {
			if old := n.policies[d.Object.Key]; old != nil && n.foreign(old) {
				return nil, fmt.Errorf("%w: %s is of %s %s", ErrOwned, old.Key, old.Source, old.Origin)
			}
			objects = append(objects, d.Object)
		}
		for _, k := range remove {
			if old := n.policies[k]; old != nil && n.foreign(old) {
				return nil, fmt.Errorf("%w: %s is of %s %s", ErrForeign, old.Key, old.Source, old.Origin)
			}
		}
		found, err := n.engine.Diff(objects, remove)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrLimit, err)
		}
		out := make([]Difference, 0, len(found))
		for _, f := range found {
			d := Difference{Difference: f}
			d.Subject, _ = n.engine.Identity(f.Subject)
			for _, p := range f.Places {
				id, _ := n.engine.Identity(p.Peer)
				d.Peers = append(d.Peers, DifferentPeer{id, p.Block})
			}
			out = append(out, d)
		}
		return out, nil
	})
}

// Status is a summary.
type Status struct {
	Revision    uint64
	Policies    int
	Refused     int
	Identities  int
	Waiting     int
	Size        engine.Size
	Counters    engine.Counters
	Names       int
	Addresses   int
	Journal     int64
	Sources     []SourceStatus
	Subscribers []SubscriberStatus
	Problems    []string
}

// SourceStatus is the state of a source.
type SourceStatus struct {
	Name   string
	Synced bool
	Error  string
}

// SubscriberStatus is the state of a subscriber.
type SubscriberStatus struct {
	Name      string
	Connected bool
	Revision  uint64
	Behind    uint64
	Refusals  []string
	Forgotten time.Time // when, unless it comes back
}

// Status looks at everything.
func (n *Node) Status(ctx context.Context) (Status, error) {
	return ask(ctx, n, func() (Status, error) {
		s := Status{
			Revision: n.barrier.Policy, Policies: len(n.policies), Identities: len(n.identities), Waiting: n.engine.Waiting(),
			Size: n.engine.Size(), Counters: n.engine.Counters(), Names: len(n.names), Addresses: n.addresses, Journal: n.journal.Size(),
		}
		for _, p := range n.policies {
			if p.Broken != "" {
				s.Policies--
				s.Refused++
				s.Problems = append(s.Problems, fmt.Sprintf("%s is stored and not in force: %s", p.Key, p.Broken))
			}
		}
		for name, src := range n.sources {
			s.Sources = append(s.Sources, SourceStatus{name, src.synced, src.err})
			s.Refused += len(src.refused)
			for origin, r := range src.refused {
				s.Problems = append(s.Problems, fmt.Sprintf("%s %s is refused: %s", name, origin, r.err))
			}
		}
		slices.SortFunc(s.Sources, func(a, b SourceStatus) int { return compareText(a.Name, b.Name) })
		states, _ := n.stream.States()
		for name, sub := range n.subscribers {
			st := SubscriberStatus{Name: name, Forgotten: sub.until}
			for _, state := range states {
				if state.Name != name {
					continue
				}
				st.Connected, st.Revision, st.Behind = state.Connected, state.Enforced.Policy, state.Behind
				for at, r := range state.Refusals {
					st.Refusals = append(st.Refusals, fmt.Sprintf("%s, table %d: %s; the largest share is from %s", at, r.Table, r.Reason, r.Policy))
				}
				slices.Sort(st.Refusals)
			}
			s.Subscribers = append(s.Subscribers, st)
		}
		slices.SortFunc(s.Subscribers, func(a, b SubscriberStatus) int { return compareText(a.Name, b.Name) })
		for what, text := range n.problems {
			s.Problems = append(s.Problems, what+": "+text)
		}
		slices.Sort(s.Problems)
		return s, nil
	})
}

func compareText(a, b string) int {
	if a < b {
		return -1
	}
	return 1
}

// Figures are the weight of the stream's log and how many subscribers were cut.
func (n *Node) Figures() (weight int, cut uint64) {
	f := n.stream.Figures()
	return f.Weight, f.Cut
}

// Incarnation names this run.
func (n *Node) Incarnation() [16]byte { return n.stream.Incarnation() }
