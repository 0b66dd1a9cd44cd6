// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"errors"
	"fmt"
	"time"

	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
)

// newIsolations returns the ledger of policies that exceed a share and isolate what they
// select. All fields of the configuration are set.
func newIsolations(c *Config) *shares.Ledger[policy.Key] {
	return shares.NewLedger[policy.Key](c.Tenants.Settings(),
		shares.Limit{Name: LimitIsolations, Size: c.MaxPolicies},
		shares.Limit{Name: LimitIsolationBytes, Size: max(maxReduced, c.MaxManifestBytes/isolationPart)})
}

// isolates reports whether a policy that exceeds the share of its tenant isolates what it
// selects by rules of its own. If not, it is folded: the owner keeps its place in the ledgers
// and nothing else, and isolates its whole namespace.
func (o *Owner) isolates(p *Policy) bool {
	if !p.folds() {
		return true
	}
	asks := o.asksIsolation(p)
	had, admitted, _ := o.isolations.Object(p.Key)
	if admitted && had.Units[1] >= asks.Units[1] || !admitted && !o.levels && o.isolations.Free(asks.Units) {
		// Before the first levels most policies of a large tenant exceed its part.
		o.isolations.Restore(p.Key, asks, true)
		return true
	}
	return o.isolations.Put(p.Key, asks)
}

// folds reports whether the isolation of its namespace can stand for a policy. Policies of
// files and of the whole cluster are kept one by one: only administrators write them.
func (p *Policy) folds() bool {
	return p.source().Folds && p.Key.Namespace != "" && p.Key.Kind != policy.KindNamespaceIsolation
}

// asksIsolation is what a policy needs that isolates what it selects.
func (o *Owner) asksIsolation(p *Policy) shares.Object {
	asks := o.asks(p)
	asks.Units = []int{1, len(p.Manifest)}
	return asks
}

// namespaceIsolation is the key of the isolation of a namespace.
func namespaceIsolation(namespace string) policy.Key {
	return policy.Key{Kind: policy.KindNamespaceIsolation, Namespace: namespace, Name: "exceeds-share"}
}

// isolation returns the policy that isolates a namespace.
func (o *Owner) isolation(k policy.Key) *Policy {
	why := "policies of the namespace exceed the share of their tenant, and are too many to isolate one by one"
	p := &Policy{
		Key: k, Source: managed.SourceKubernetes, Origin: k.String(), Updated: o.config.Now(), Created: time.Unix(0, 0),
		Exceeds: why, read: policy.IsolateNamespace(k, "", errors.New(why)),
	}
	p.filter(o.filter.Load())
	return p
}

// isolateNamespaces adds the isolations of namespaces that begin with a plan, and removes
// those that end: when nothing is folded into them, and the source has listed everything.
// Those in listed may end although the source completes only with the change.
func (o *Owner) isolateNamespaces(p *plan, listed []policy.Key) {
	change := make(map[string]int)
	for k := range p.fold {
		if _, ok := o.folded[k]; !ok {
			change[k.Namespace]++
		}
	}
	for k := range p.unfold {
		if _, ok := o.folded[k]; ok {
			change[k.Namespace]--
		}
	}
	ends := make(map[policy.Key]bool)
	for _, k := range listed {
		ends[k] = true
		change[k.Namespace] += 0
	}
	all := o.sources.foldingListed()
	for namespace, n := range change {
		k := namespaceIsolation(namespace)
		p.places = append(p.places, o.placed(k))
		switch left := o.foldedIn[namespace] + n; {
		case left > 0 && o.policies[k] == nil:
			x := o.isolation(k)
			o.ledger.Restore(k, o.asks(x), true)
			p.puts = append(p.puts, x)
		case left == 0 && o.policies[k] != nil && (ends[k] || all):
			o.ledger.Delete(k)
			p.gone = append(p.gone, k)
		}
	}
}

// refold notes which policies are folded after a plan was carried out.
func (o *Owner) refold(p *plan) {
	for k := range p.unfold {
		if _, ok := o.folded[k]; ok {
			delete(o.folded, k)
			delete(o.again, k)
			if o.foldedIn[k.Namespace]--; o.foldedIn[k.Namespace] == 0 {
				delete(o.foldedIn, k.Namespace)
			}
		}
	}
	for k := range p.fold {
		delete(o.again, k)
		if _, ok := o.folded[k]; !ok {
			o.folded[k] = struct{}{}
			o.foldedIn[k.Namespace]++
		}
	}
}

// foldedAs reports whether a policy is folded, and an object says nothing else: it needs not
// be decoded.
func (o *Owner) foldedAs(k policy.Key, w policy.Written) bool {
	if _, ok := o.folded[k]; !ok {
		return false
	}
	if _, ok := o.again[k]; ok {
		return false
	}
	asks, _, _ := o.ledger.Object(k)
	return asks.Order.Created.Equal(w.Created) && (w.UID == "" || asks.Order.UID == w.UID) && asks.Units[1] == len(w.Text)
}

// foldedWhy says what became of a folded policy.
func (o *Owner) foldedWhy(k policy.Key) string {
	if o.ledger.Admitted(k) {
		return "there is room again, and the policy is requested from the API server; until then its namespace is isolated"
	}
	return fmt.Sprintf("%s; its tenant has too many such policies to isolate their pods one by one, "+
		"so the whole namespace %s is isolated", o.exceeds(k), k.Namespace)
}

// nextLevel returns when levels are due; the zero time: they are not.
func (o *Owner) nextLevel() time.Time {
	next, isolations := o.ledger.Next(), o.isolations.Next()
	if next.IsZero() || !isolations.IsZero() && isolations.Before(next) {
		return isolations
	}
	return next
}
