// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/sluice-net/sluice/kit/desired/loop"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/services/policy/internal/decode"
	"github.com/sluice-net/sluice/services/policy/internal/manifest"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
)

// Objects is the feed of a source that reports changes of single objects, and reports when it is complete. It
// implements watch.Sink. An object whose content is faulty isolates the pods that it selects, because an API server
// holds it already: see policy.DecodeHeld. The same applies to an object that exceeds a limit, or whose policy comes
// from another source.
type Objects struct {
	owner *Owner
	name  string
	// refused contains the objects that were refused, and the objects that isolate pods because another source has a
	// policy with the same key. A call of Apply without upserts tries to apply them again.
	refused map[policy.Key]*file
}

// Objects returns the feed of a source that was passed to New. It must be used by one goroutine.
func (o *Owner) Objects(name string) *Objects {
	return &Objects{owner: o, name: name, refused: make(map[policy.Key]*file)}
}

// Apply implements watch.Sink. Deletions take effect immediately, even before the source is complete.
func (f *Objects) Apply(ctx context.Context, c watch.Changes[policy.Key, policy.Written]) error {
	l := &listing{source: f.name, files: make(map[string]*file), deltas: true, removed: make(map[string]policy.Key, len(c.Deletes))}
	keys := make(map[string]policy.Key)
	same, err := f.same(ctx, c.Upserts)
	if err != nil {
		return err
	}
	if len(c.Upserts) == 0 {
		for k, d := range f.refused {
			keys[k.String()], l.files[k.String()] = k, d
		}
	}
	for k, object := range c.Upserts {
		d, ok := same[k]
		if !ok {
			d = f.decode(k, object)
		}
		keys[k.String()], l.files[k.String()] = k, d
	}
	for k := range c.Deletes {
		delete(l.files, k.String())
		l.removed[k.String()] = k
	}
	if len(l.files)+len(l.removed) == 0 {
		return nil
	}
	l.order = slices.Sorted(maps.Keys(l.files))
	if err := f.owner.takeOver(ctx, l); err != nil {
		return err
	}
	for k := range c.Deletes {
		delete(f.refused, k)
	}
	for origin, d := range l.files {
		delete(f.refused, keys[origin])
		if _, ok := l.bad[origin]; (ok || l.shadowed[origin]) && d.err == nil {
			f.refused[keys[origin]] = d
		}
	}
	return nil
}

// same returns the objects whose text equals the text of the current policy. They need not be decoded again when all
// objects are listed after a restart.
func (f *Objects) same(ctx context.Context, objects map[policy.Key]policy.Written) (map[policy.Key]*file, error) {
	return loop.Ask(ctx, f.owner.loop, opOther, func() (map[policy.Key]*file, error) {
		out := make(map[policy.Key]*file)
		for k, object := range objects {
			p := f.owner.policies.all[k]
			if f.owner.places.foldedAs(k, object) {
				out[k] = &file{}
			} else if p != nil && p.Source == f.name && p.Broken == "" && p.Exceeds == "" &&
				bytes.Equal(p.Manifest, object.Text) {
				held := decode.Decoded{Object: p.read, Text: p.Manifest, Created: object.Created, UID: object.UID}
				out[k] = &file{docs: []decode.Decoded{held}}
			}
		}
		return out, nil
	})
}

// decode converts an object to the form of a file.
func (f *Objects) decode(k policy.Key, object policy.Written) *file {
	decoded, err := policy.DecodeHeld(object, f.owner.config.Rules)
	if err == nil && decoded.Key != k {
		err = fmt.Errorf("is %s, but the source lists it as %s", decoded.Key, k)
	}
	if err != nil {
		return &file{err: err}
	}
	return &file{docs: []decode.Decoded{{Object: &decoded, Text: object.Text, Created: object.Created, UID: object.UID}}}
}

// Judged is the result of evaluating an object.
type Judged struct {
	InForce bool   // this or an earlier version of the object is enforced
	Exceeds string // why the object exceeds a limit, so that it isolates
	Broken  string // why the object is not enforced as written and isolates instead
	Refused string // why the newest version was not accepted
	Dropped []string
	Notes   manifest.Notes
	// UsesNames is set if the DNS rules of other objects affect the notes of this object. HasDNSRule is set if this
	// object affects the notes of other objects.
	UsesNames, HasDNSRule bool
}

// Judged returns the results for objects that were applied. ListPolicies returns the same results, and in addition
// facts that depend on the endpoints of a node.
func (f *Objects) Judged(ctx context.Context, keys []policy.Key) (map[policy.Key]Judged, error) {
	return loop.Ask(ctx, f.owner.loop, opOther, func() (map[policy.Key]Judged, error) {
		out := make(map[policy.Key]Judged, len(keys))
		var dns *policy.DNSRules // once it is needed
		for _, k := range keys {
			var j Judged
			p := f.owner.policies.all[k]
			if p == nil || p.Source != f.name {
				p = f.owner.policies.all[decode.ShadowKey(k)]
			}
			if p != nil && p.Source == f.name {
				j = Judged{InForce: p.inForce(), Broken: p.Broken, Exceeds: p.Exceeds, Dropped: p.Dropped, Notes: p.Notes}
				if j.UsesNames, j.HasDNSRule = p.usesNames(), p.inForce() && p.object.HasDNSRule(); j.UsesNames {
					if dns == nil {
						dns = new(f.owner.policies.dnsRules(nil))
					}
					j.Notes = dns.WithNotes(p.object, p.Notes)
				}
			}
			if _, ok := f.owner.places.folded[k]; ok {
				j = Judged{InForce: true, Exceeds: f.owner.places.foldedWhy(k)}
			}
			if r, ok := f.owner.sources.refusal(f.name, k.String()); ok {
				j.Refused = r.err
			}
			out[k] = j
		}
		return out, nil
	})
}

// Held returns the keys of the policies that the owner has of the source, including policies from earlier runs.
func (f *Objects) Held(ctx context.Context) ([]policy.Key, error) {
	return loop.Ask(ctx, f.owner.loop, opOther, func() ([]policy.Key, error) {
		var out []policy.Key
		for k, p := range f.owner.policies.all {
			if p.Source == f.name && k.Kind != policy.KindNamespaceIsolation {
				out = append(out, p.written())
			}
		}
		return slices.AppendSeq(out, maps.Keys(f.owner.places.folded)), nil
	})
}

// Complete implements watch.Sink.
func (f *Objects) Complete(ctx context.Context, listed map[policy.Key]struct{}) error {
	origins := make(map[string]struct{}, len(listed))
	for k := range listed {
		origins[k.String()] = struct{}{}
	}
	if err := f.owner.takeOver(ctx, &listing{source: f.name, deltas: true, listed: origins}); err != nil {
		return err
	}
	maps.DeleteFunc(f.refused, func(k policy.Key, _ *file) bool { _, ok := listed[k]; return !ok })
	return nil
}

// Failed implements watch.Sink.
func (f *Objects) Failed(ctx context.Context, why error) error {
	return f.owner.loop.Do(ctx, opOther, func() { f.owner.sources.failed(f.name, why) })
}
