// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/services/policy/internal/decode"
	"github.com/sluice-net/sluice/services/policy/internal/excludedlabels"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/record"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
	"github.com/sluice-net/sluice/services/policy/internal/source"
)

// forms converts documents of sources, calls and the journal to policies in the form that the engine needs. Its
// methods may be called concurrently.
type forms struct {
	rules  rule.Options
	now    func() time.Time
	filter atomic.Pointer[excludedlabels.Filter] // determines which labels identities have
}

func newForms(rules rule.Options, now func() time.Time, filter excludedlabels.Filter) *forms {
	f := &forms{rules: rules, now: now}
	f.filter.Store(&filter)
	return f
}

// policy returns the policy of a document.
func (f *forms) policy(d decode.Decoded, source, origin string) *Policy {
	p := &Policy{
		Key: d.Object.Key, Source: source, Origin: origin, Manifest: d.Text, Updated: f.now(),
		Dropped: d.Object.Unknown, Broken: d.Object.Isolates, read: d.Object, Created: d.Created, UID: d.UID,
		known: len(d.Object.Unknown) == 0, allowed: d.Object.Unknown,
	}
	p.filter(f.filter.Load())
	return p
}

// filtered returns an object in the form for the engine, with the filter applied.
func (f *forms) filtered(ob policy.Object) policy.Object {
	ob, _ = f.filter.Load().Apply(ob)
	return ob
}

// isolation returns the policy that isolates a namespace.
func (f *forms) isolation(k policy.Key) *Policy {
	why := "too many policies of the namespace exceed the share of their tenant to isolate their pods one by one"
	p := &Policy{
		Key: k, Source: managed.SourceKubernetes, Origin: k.String(), Updated: f.now(), Created: time.Unix(0, 0),
		Exceeds: why, read: new(policy.IsolateNamespace(k, "", errors.New(why))),
	}
	p.filter(f.filter.Load())
	return p
}

// restoreHeld does again after a restart what hold has done before; text is the text in the journal.
func (f *forms) restoreHeld(p *Policy, text []byte) {
	if len(text) == 0 {
		return
	}
	if p.object.Group != nil {
		form := policy.Written{Key: p.Key, APIVersion: policy.Versions(p.Key.Kind)[0], Text: text}
		if ob, err := policy.DecodeHeld(form, f.rules); err == nil {
			p.heldLabels, p.heldText = ob.Group.Labels, text
		}
	}
	p.held, p.heldText = decode.Options{Rules: f.rules}.Isolated(p.Key, text, errors.New("held")).Specs, text
	p.addHeld()
}

// isolate replaces the rules of a policy by rules that isolate the pods that it selects.
func (f *forms) isolate(p *Policy, why string) {
	p.Exceeds = why
	if p.source().Redelivers && len(p.Manifest) > maxReduced && p.Key.Kind != policy.KindDocument {
		sum := sha256.Sum256(p.Manifest)
		p.size, p.sum = len(p.Manifest), sum[:]
		p.Manifest = policy.Reduced(p.Key, p.Manifest, maxReduced)
	}
	if p.read.Group != nil {
		p.read = new(p.read.CloseGroup(errors.New(why)))
	} else {
		p.read = new(decode.Options{Rules: f.rules}.Isolated(p.Key, p.Manifest, errors.New(why)))
	}
	p.Dropped, p.Broken = nil, ""
	p.filter(f.filter.Load())
}

// decodeAll decodes stored policies on all CPUs. This takes most of the time of a start.
func (f *forms) decodeAll(stored map[policy.Key]record.Policy) []*Policy {
	out := make([]*Policy, 0, len(stored))
	var in []record.Policy
	for _, p := range stored {
		in = append(in, p)
		out = append(out, nil)
	}
	var wg sync.WaitGroup
	workers := runtime.GOMAXPROCS(0)
	for w := range workers {
		wg.Go(func() {
			for i := w; i < len(in); i += workers {
				out[i] = f.decode(in[i])
			}
		})
	}
	wg.Wait()
	return out
}

func (f *forms) decode(r record.Policy) *Policy {
	if r.Key.Kind == policy.KindNamespaceIsolation {
		p := f.isolation(policy.Key(r.Key))
		p.Revision, p.Updated = r.Revision, time.Unix(r.Updated, 0)
		return p
	}
	// An earlier version may have accepted the policy with unknown fields, if the call had set AllowUnknown. Such a
	// policy stays accepted. All other unknown fields come from a later version, and may narrow a rule.
	from := source.Of(r.Source)
	as := decode.Options{
		Rules: f.rules, Namespace: r.Key.Namespace, AllowUnknown: !from.Files && !r.Place.Known, Stored: true,
		Held: from.Accepted,
	}
	docs, err := as.Decode(r.Manifest)
	if why, ok := decode.Isolating(r.Manifest); ok && (from.Files || r.Key.Kind == policy.KindDocument) {
		err = errors.New(why)
	}
	if err == nil && len(docs) == 1 && len(r.Place.Dropped) > 0 {
		allowed := make(map[string]bool, len(r.Place.Dropped))
		for _, path := range r.Place.Dropped {
			allowed[path] = true
		}
		later := func(path string) bool { return !allowed[path] }
		if i := slices.IndexFunc(docs[0].Object.Unknown, later); i >= 0 {
			err = fmt.Errorf("%s: no such field in this version", docs[0].Object.Unknown[i])
		}
	}
	if err == nil && (len(docs) != 1 || docs[0].Object.Key != policy.Key(r.Key)) {
		err = fmt.Errorf("the stored text has another key than %s", policy.Key(r.Key))
	}
	if err != nil {
		docs = []decode.Decoded{{Object: new(as.Isolated(policy.Key(r.Key), r.Manifest, err))}}
	}
	p := f.policy(docs[0], r.Source, r.Origin)
	p.Key, p.Manager, p.Manifest = policy.Key(r.Key), r.Manager, r.Manifest
	p.Revision, p.Updated = r.Revision, time.Unix(r.Updated, 0)
	if err != nil {
		p.Broken = err.Error()
		p.known, p.allowed = r.Place.Known, r.Place.Dropped
	}
	if !from.Stamped {
		p.Created = p.Updated
		if r.Place.Created != 0 {
			p.Created = time.Unix(r.Place.Created, 0)
		}
	}
	if r.Place.Exceeds != "" {
		f.isolate(p, r.Place.Exceeds)
		if r.Place.Size > 0 {
			p.size, p.sum = r.Place.Size, r.Place.Sum
		}
	}
	if p.Exceeds != "" || p.Broken != "" {
		f.restoreHeld(p, r.Place.Held)
	}
	return p
}
