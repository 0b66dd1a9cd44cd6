// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/kube/tenants"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/policy/internal/decode"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
)

// places tracks the limits that tenants share, and the state of each policy under them. A policy is enforced as
// written; or it exceeds a share and isolates the pods that it selects; or it is folded, which means that it is not
// kept and its whole namespace is isolated instead. It belongs to the loop.
type places struct {
	tenants  *tenants.Set
	now      func() time.Time
	forms    *forms
	policies *policySet

	ledger     *shares.Ledger[policy.Key]
	isolations *shares.Ledger[policy.Key] // of the policies that ledger refuses, which isolate individually
	folded     map[policy.Key]struct{}    // policies that are replaced by the isolation of their namespace
	foldedIn   map[string]int             // number of folded policies by namespace
	again      map[policy.Key]struct{}    // admitted policies whose text the source must deliver again
	levels     bool                       // the levels were computed at least once in this run
}

// newPlaces returns places without policies. All fields of the configuration must be set.
func newPlaces(c *Config, f *forms, s *policySet) *places {
	return &places{
		tenants: c.Tenants, now: c.Now, forms: f, policies: s, ledger: newLedger(c), isolations: newIsolations(c),
		folded: make(map[policy.Key]struct{}), foldedIn: make(map[string]int), again: make(map[policy.Key]struct{}),
	}
}

// restore adds a stored policy, and admits or refuses it as stored.
func (s *places) restore(p *Policy) {
	s.ledger.Restore(p.Key, s.asks(p), p.Exceeds == "" || p.Key.Kind == policy.KindNamespaceIsolation)
	if p.Exceeds != "" && p.folds() {
		s.isolations.Restore(p.Key, s.asksIsolation(p), true)
	}
}

// Names of the limits that tenants share.
const (
	LimitPolicies  = "policies"
	LimitManifests = "manifests"
	// LimitIsolations limits the number of policies that exceed a share and isolate individually, and
	// LimitIsolationBytes limits the total size of what is kept of them.
	LimitIsolations     = "isolations"
	LimitIsolationBytes = "isolationBytes"
)

// isolationPart is the fraction of MaxManifestBytes, 1/isolationPart, that policies which exceed a share may use.
const isolationPart = 8

// maxReduced is the maximum size in bytes of the manifest that is kept if a policy of an API server exceeds its
// tenant's share. A longer manifest is reduced to its selectors, and the source must deliver it again once there is
// capacity.
const maxReduced = 4 << 10

// newLedger returns the ledger of policies. All fields of the configuration must be set.
func newLedger(c *Config) *shares.Ledger[policy.Key] {
	return shares.NewLedger[policy.Key](c.Tenants.Settings(),
		shares.Limit{Name: LimitPolicies, Size: c.MaxPolicies},
		shares.Limit{Name: LimitManifests, Size: c.MaxManifestBytes})
}

// asks returns how much of each limit a policy needs.
func (s *places) asks(p *Policy) shares.Object {
	units := []int{1, cmp.Or(p.size, len(p.Manifest))}
	// It isolates in place of policies that are not admitted, and uses no share itself.
	if p.Key.Kind == policy.KindNamespaceIsolation {
		units = []int{0, 0}
	}
	return shares.Object{
		Tenant: s.tenants.Of(p.Key.Namespace),
		Order: shares.Order{
			Created: p.Created, Namespace: p.Key.Namespace, Name: p.Key.Name, UID: cmp.Or(p.UID, p.Key.Kind),
		},
		Local: !p.source().Shared,
		Units: units,
	}
}

// divide admits or refuses the policies of a change, and computes the levels if the change requests it. A refused
// policy isolates the pods that it selects, or the call that sent it fails. listed is set if all sources and the list
// of Namespaces have been complete once; folding is set if this is true of the sources whose policies can be folded.
func (s *places) divide(e *edit, p *plan, listed, folding bool) error {
	if len(s.policies.all)+len(s.folded) == 0 && listed && s.ledger.Next().IsZero() {
		s.ledger.Level(s.now()) // compute the levels without policies, so that the first call can use a whole share
		s.isolations.Level(s.now())
		s.levels = true
	}
	named := make(map[policy.Key]bool, len(e.puts))
	for _, k := range slices.Concat(e.gone, e.unfolded) {
		p.places = append(p.places, s.placed(k))
		s.ledger.Delete(k)
		s.isolations.Delete(k)
	}
	for _, k := range e.unfolded {
		p.unfold[k] = struct{}{}
	}
	for _, x := range e.puts {
		named[x.Key] = true
		p.places = append(p.places, s.placed(x.Key))
		x.Created = s.created(x, s.policies.all[x.Key])
		if asks := s.asks(x); s.stays(x.Key, asks) {
			s.ledger.Restore(x.Key, asks, true)
		} else {
			s.ledger.Put(x.Key, asks)
		}
	}
	if next := s.nextLevel(); e.levels && !next.IsZero() && !next.After(s.now()) {
		s.relevel(p, named)
	}
	puts := p.puts[:0]
	for _, x := range p.puts {
		old := s.policies.all[x.Key]
		switch {
		case s.ledger.Admitted(x.Key):
			s.isolations.Delete(x.Key)
			if x.Broken != "" {
				x.hold(old)
			}
		case e.answers:
			return fmt.Errorf("%w: %s %s", failure.ErrLimit, x.Key, s.exceeds(x.Key))
		default:
			if s.exceed(x, old); !s.isolates(x) {
				p.fold[x.Key] = struct{}{}
				if old != nil {
					p.gone = append(p.gone, x.Key)
				}
				continue
			}
		}
		if _, ok := s.folded[x.Key]; ok {
			p.unfold[x.Key] = struct{}{}
		}
		puts = append(puts, x)
	}
	p.puts = puts
	s.isolateNamespaces(p, e.spaces, folding)
	return nil
}

// relevel computes the levels, and adds the policies that are thereby admitted or refused to a plan. named contains
// the policies that the plan already has.
func (s *places) relevel(p *plan, named map[policy.Key]bool) {
	withdrawn, admitted := s.ledger.Level(s.now())
	folds, unfolds := s.isolations.Level(s.now())
	s.levels = true
	for i, k := range slices.Concat(withdrawn, admitted) {
		if named[k] {
			continue
		}
		before, old := s.placed(k), s.policies.all[k]
		before.admitted = i < len(withdrawn)
		p.places = append(p.places, before)
		switch {
		case old != nil && before.admitted:
			p.puts = append(p.puts, old.copy())
		case old != nil && old.sum == nil:
			p.puts = append(p.puts, s.forms.decode(old.record()))
		default: // the text was not kept, so the source must deliver it again
			s.again[k] = struct{}{}
		}
	}
	for _, k := range folds {
		if s.policies.all[k] == nil || named[k] || s.ledger.Admitted(k) {
			continue
		}
		before := s.placed(k)
		before.isolation.admitted = true
		p.places, p.gone = append(p.places, before), append(p.gone, k)
		p.fold[k] = struct{}{}
	}
	for _, k := range unfolds {
		if _, ok := s.folded[k]; ok {
			s.again[k] = struct{}{}
		}
	}
	p.levels = true
}

// created returns the creation time of a policy. For a policy of a file or call, it is the time at which its first
// version was accepted.
func (s *places) created(p, old *Policy) time.Time {
	switch {
	case p.source().Stamped:
		return p.Created
	case old != nil && !old.source().Stamped:
		return old.Created
	}
	return p.Updated.Truncate(time.Second)
}

// stays reports whether a policy stays admitted without a new decision. This applies if it needs no more of any limit
// than before, or if the levels have not been computed in this run yet.
func (s *places) stays(k policy.Key, asks shares.Object) bool {
	before, admitted, _ := s.ledger.Object(k)
	if !admitted || !s.levels {
		return admitted
	}
	for i, n := range asks.Units {
		if n > before.Units[i] {
			return false
		}
	}
	return true
}

// exceeds returns a message about the limit that refuses a policy.
func (s *places) exceeds(k policy.Key) string {
	limit, tenant, _, _ := s.ledger.Refused(k)
	return fmt.Sprintf("exceeds the share of %s of limits.%s (%d)", tenant, limit.Name, limit.Size)
}

// exceed makes a policy isolate the pods that it selects and the pods that its last admitted version selected.
func (s *places) exceed(p, old *Policy) {
	why := s.exceeds(p.Key)
	s.forms.isolate(p, why)
	p.hold(old)
}

// entry is an entry of a ledger. there is false if the ledger has no entry for the policy.
type entry struct {
	object          shares.Object
	there, admitted bool
}

func entryOf(l *shares.Ledger[policy.Key], k policy.Key) entry {
	object, admitted, ok := l.Object(k)
	return entry{object, ok, admitted}
}

// put restores a policy's entry.
func (e *entry) put(l *shares.Ledger[policy.Key], k policy.Key) {
	if e.there {
		l.Restore(k, e.object, e.admitted)
	} else {
		l.Delete(k)
	}
}

// place is the state of a policy in the ledgers before a change.
type place struct {
	key policy.Key
	entry
	isolation entry
}

// placed returns the state of a policy in the ledgers.
func (s *places) placed(k policy.Key) place {
	return place{k, entryOf(s.ledger, k), entryOf(s.isolations, k)}
}

// takeBack restores the ledger entries of policies after a change has failed.
func (s *places) takeBack(places []place) {
	for _, x := range slices.Backward(places) {
		x.put(s.ledger, x.key)
		x.isolation.put(s.isolations, x.key)
	}
}

// says reports whether a policy already has the content of a source's document, so that the document need not be
// applied. It updates the creation time and the UID, which affect no rule.
func (s *places) says(p *Policy, d decode.Decoded) bool {
	switch {
	case !p.is(d.Text) || s.policies.closed[p.Key] != nil:
		return false
	case p.sum != nil && s.ledger.Admitted(p.Key): // the source will deliver the whole manifest again
		return false
	case p.Exceeds == "" && p.Broken != d.Object.Isolates:
		return false
	}
	if p.source().Stamped && (!p.Created.Equal(d.Created) || p.UID != d.UID) {
		p.Created, p.UID = d.Created, d.UID
		s.ledger.Restore(p.Key, s.asks(p), s.ledger.Admitted(p.Key))
	}
	return true
}

// newIsolations returns the ledger of policies that exceed a share and isolate individually. All fields of the
// configuration must be set.
func newIsolations(c *Config) *shares.Ledger[policy.Key] {
	return shares.NewLedger[policy.Key](c.Tenants.Settings(),
		shares.Limit{Name: LimitIsolations, Size: c.MaxPolicies},
		shares.Limit{Name: LimitIsolationBytes, Size: max(maxReduced, c.MaxManifestBytes/isolationPart)})
}

// isolates reports whether a policy that exceeds its tenant's share isolates individually. If it does not, the policy
// is folded: the owner keeps only its ledger entries, and isolates the whole namespace of the policy.
func (s *places) isolates(p *Policy) bool {
	if !p.folds() {
		return true
	}
	asks := s.asksIsolation(p)
	had, admitted, _ := s.isolations.Object(p.Key)
	if admitted && had.Units[1] >= asks.Units[1] || !admitted && !s.levels && s.isolations.Free(asks.Units) {
		// Before the levels were computed for the first time, most policies of a large tenant exceed its part, so
		// admit the policy.
		s.isolations.Restore(p.Key, asks, true)
		return true
	}
	return s.isolations.Put(p.Key, asks)
}

// folds reports whether a policy may be folded. Policies of files and cluster-wide policies are kept individually,
// because only administrators write them. Objects of an API server that isolate because another source has their
// policy are also kept: their number is limited by the number of policies of that source.
func (p *Policy) folds() bool {
	return p.source().Folds && p.Key.Namespace != "" && p.Key.Kind != policy.KindNamespaceIsolation &&
		p.Key.Kind != policy.KindDocument
}

// asksIsolation returns the demand of a policy that isolates the pods that it selects.
func (s *places) asksIsolation(p *Policy) shares.Object {
	asks := s.asks(p)
	asks.Units = []int{1, len(p.Manifest)}
	return asks
}

// namespaceIsolation returns the key of the isolation of a namespace.
func namespaceIsolation(namespace string) policy.Key {
	return policy.Key{Kind: policy.KindNamespaceIsolation, Namespace: namespace, Name: "exceeds-share"}
}

// isolateNamespaces adds to a plan the isolations of namespaces that the plan makes necessary. If all is set, because
// all sources are complete, it also removes the isolations that no policy needs any more. The isolations in listed
// may be removed even before: the change itself completes their source.
func (s *places) isolateNamespaces(p *plan, listed []policy.Key, all bool) {
	change := make(map[string]int)
	for k := range p.fold {
		if _, ok := s.folded[k]; !ok {
			change[k.Namespace]++
		}
	}
	for k := range p.unfold {
		if _, ok := s.folded[k]; ok {
			change[k.Namespace]--
		}
	}
	ends := make(map[policy.Key]bool)
	for _, k := range listed {
		ends[k] = true
		change[k.Namespace] += 0
	}
	for namespace, n := range change {
		k := namespaceIsolation(namespace)
		p.places = append(p.places, s.placed(k))
		switch left := s.foldedIn[namespace] + n; {
		case left > 0 && s.policies.all[k] == nil:
			x := s.forms.isolation(k)
			s.ledger.Restore(k, s.asks(x), true)
			p.puts = append(p.puts, x)
		case left == 0 && s.policies.all[k] != nil && (ends[k] || all):
			s.ledger.Delete(k)
			p.gone = append(p.gone, k)
		}
	}
}

// delivered records that the source has delivered the policies of a change, so that they need not be delivered again.
func (s *places) delivered(puts []*Policy, gone []policy.Key) {
	for _, p := range puts {
		delete(s.again, p.Key)
	}
	for _, k := range gone {
		delete(s.again, k)
	}
}

// kindsAgain returns the kinds of admitted policies that the source must deliver again, because their text was not
// kept.
func (s *places) kindsAgain() map[string]struct{} {
	kinds := make(map[string]struct{})
	for k := range s.again {
		kinds[k.Kind] = struct{}{}
	}
	return kinds
}

// reassign updates the tenant of each policy from its namespace.
func (s *places) reassign() {
	of := func(k policy.Key) shares.Tenant { return s.tenants.Of(k.Namespace) }
	s.ledger.Reassign(of)
	s.isolations.Reassign(of)
}

// refold updates the set of folded policies after a plan was applied.
func (s *places) refold(p *plan) {
	for k := range p.unfold {
		if _, ok := s.folded[k]; ok {
			delete(s.folded, k)
			delete(s.again, k)
			if s.foldedIn[k.Namespace]--; s.foldedIn[k.Namespace] == 0 {
				delete(s.foldedIn, k.Namespace)
			}
		}
	}
	for k := range p.fold {
		delete(s.again, k)
		if _, ok := s.folded[k]; !ok {
			s.folded[k] = struct{}{}
			s.foldedIn[k.Namespace]++
		}
	}
}

// foldedAs reports whether a policy is folded and its object has not changed, so that the object need not be decoded.
func (s *places) foldedAs(k policy.Key, w policy.Written) bool {
	if _, ok := s.folded[k]; !ok {
		return false
	}
	if _, ok := s.again[k]; ok {
		return false
	}
	asks, _, _ := s.ledger.Object(k)
	return asks.Order.Created.Equal(w.Created) && (w.UID == "" || asks.Order.UID == w.UID) &&
		asks.Units[1] == len(w.Text)
}

// foldedWhy describes the state of a folded policy.
func (s *places) foldedWhy(k policy.Key) string {
	if s.ledger.Admitted(k) {
		return "there is capacity again; the namespace stays isolated until the API server delivers the policy again"
	}
	return fmt.Sprintf("%s; its tenant has too many such policies to isolate their pods one by one, "+
		"so the whole namespace %s is isolated", s.exceeds(k), k.Namespace)
}

// nextLevel returns the time at which levels must be computed, or the zero time if they need not be.
func (s *places) nextLevel() time.Time {
	next, isolations := s.ledger.Next(), s.isolations.Next()
	if next.IsZero() || !isolations.IsZero() && isolations.Before(next) {
		return isolations
	}
	return next
}
