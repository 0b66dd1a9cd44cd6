// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/journal"
	"github.com/sluice-net/sluice/services/policy/internal/manifest"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
)

// Policy is a policy in force, or one of an earlier run that is not understood
// any more.
type Policy struct {
	Key      policy.Key
	Source   string
	Origin   string
	Manager  string // that brought it, of SourceGRPC
	Manifest []byte
	Revision uint64
	Updated  time.Time
	Rules    int
	Dropped  []string
	Notes    manifest.Notes
	// Broken is why the policy is not in force as it was written. What it selects
	// is isolated, unless that is not known.
	Broken string

	object policy.Object
	named  bool // by its manager in this run
}

// inForce reports whether the engine has the policy, as written or isolating.
func (p *Policy) inForce() bool { return p.object.Key.Kind != "" }

// Decoded is a document that was understood.
type Decoded struct {
	Object   policy.Object
	Text     []byte
	Document int // that it is, or is an item of; from 0
}

// Violation is one thing that is wrong with a document.
type Violation struct {
	Document int // from 0, empty documents not counted
	Name     string
	Path     string
	Text     string
}

// ManifestError says what is wrong with manifests.
type ManifestError struct {
	Violations []Violation
	Whole      error // the text as such cannot be read
}

// errEmpty: as a file is whose policies were all removed.
var errEmpty = errors.New("there is no document in the manifests")

// Unwrap gives the error of the whole.
func (e *ManifestError) Unwrap() error { return e.Whole }

// Error names the first problems.
func (e *ManifestError) Error() string {
	if e.Whole != nil {
		return e.Whole.Error()
	}
	var b strings.Builder
	for i, v := range e.Violations {
		if i == 5 {
			fmt.Fprintf(&b, "; and %d more", len(e.Violations)-i)
			break
		}
		if i > 0 {
			b.WriteString("; ")
		}
		fmt.Fprintf(&b, "document %d", v.Document)
		if v.Name != "" {
			fmt.Fprintf(&b, " (%s)", v.Name)
		}
		b.WriteString(": ")
		if v.Path != "" {
			b.WriteString(v.Path + ": ")
		}
		b.WriteString(v.Text)
	}
	return b.String()
}

// Reading is how manifests are understood.
type Reading struct {
	Rules     rule.Options
	Namespace string // of documents that name none; empty: default
	// AllowUnknown drops fields that a kind does not have. Without it they are
	// errors: a peer or a port that is misspelt would be one that was left out,
	// which is all of them.
	AllowUnknown bool
	// Held says that the documents are objects of an API server, which cannot be
	// refused: see policy.DecodeHeld.
	Held bool
	// Stored takes a policy that alone is too large for any table: it may be from
	// a version that did not look, and no pod that it selects starts without it.
	Stored bool
	// Large says that the bounds of manifests are those of each document. Else they
	// are those of all together, which is what one caller may take of the memory.
	Large bool
}

// Decode understands documents, all of them or none.
func (r Reading) Decode(data []byte) ([]Decoded, error) {
	if !r.Large {
		if err := manifest.Check(data); err != nil {
			return nil, &ManifestError{Whole: err}
		}
	}
	namespace := r.Namespace
	if namespace == "" {
		namespace = "default"
	}
	var out []Decoded
	var bad ManifestError
	seen := make(map[policy.Key]int)
	one := func(i int, at string, doc manifest.Document, text []byte) {
		if policy.Namespaced(doc.Kind) {
			doc = doc.WithNamespace(namespace)
		}
		decode := policy.Decode
		if r.Held {
			decode = policy.DecodeHeld
		}
		object, err := decode(doc, r.Rules)
		name := ""
		if object.Key.Name != "" {
			name = object.Key.String()
		}
		var problems manifest.Problems
		if !r.AllowUnknown && !r.Held {
			for _, path := range object.Unknown {
				bad.Violations = append(bad.Violations, Violation{i, name, at + path, "no such field"})
			}
		}
		switch {
		case errors.As(err, &problems):
			for _, p := range problems {
				bad.Violations = append(bad.Violations, Violation{i, name, strings.TrimSuffix(at+p.Path, "."), p.Text})
			}
		case err != nil:
			bad.Violations = append(bad.Violations, Violation{i, name, at + "kind", err.Error()})
		default:
			if !r.Stored && !r.Held { // as a pod that a held one selects cannot start
				if err := engine.Check(object); err != nil {
					bad.Violations = append(bad.Violations, Violation{i, name, "spec", err.Error()})
				}
			}
			if first, ok := seen[object.Key]; ok {
				bad.Violations = append(bad.Violations, Violation{i, name, at + "metadata.name", fmt.Sprintf("document %d is the same policy", first)})
			}
			seen[object.Key] = i
			out = append(out, Decoded{object, trim(text), i})
		}
	}
	i := 0
	if err := manifest.Each(data, func(doc manifest.Document, text []byte) error {
		items, err := doc.Items()
		var problems manifest.Problems
		errors.As(err, &problems) //nolint:errcheck // Items returns nothing else
		for _, p := range problems {
			bad.Violations = append(bad.Violations, Violation{i, "", p.Path, p.Text})
		}
		if items == nil && err == nil {
			one(i, "", doc, text)
		}
		for k, item := range items {
			one(i, fmt.Sprintf("items[%d].", k), item.Document, item.Text)
		}
		i++
		return nil
	}); err != nil {
		return nil, &ManifestError{Whole: err}
	}
	if len(bad.Violations) > 0 {
		return nil, &bad
	}
	if len(out) == 0 {
		return nil, &ManifestError{Whole: errEmpty}
	}
	return out, nil
}

// trim takes off the marker before a document and the blanks around it, so
// that its place among others does not change it.
func trim(text []byte) []byte {
	if first, rest, ok := bytes.Cut(text, []byte("\n")); ok {
		if f := strings.TrimSpace(string(first)); f == "---" || f == "..." {
			text = rest
		}
	}
	return bytes.Clone(append(bytes.TrimSpace(text), '\n'))
}

// ChangeType is what was done to a policy.
type ChangeType int

// The types.
const (
	Created ChangeType = iota + 1
	Replaced
	Unchanged
	Deleted
	Absent
)

// Changed is what became of one policy.
type Changed struct {
	Key     policy.Key
	Type    ChangeType
	Dropped []string
	Notes   manifest.Notes
}

// Outcome is the answer of a change.
type Outcome struct {
	Revision uint64
	Changes  []Changed
}

func (o *Owner) policy(d Decoded, source, origin string) *Policy {
	p := &Policy{
		Key: d.Object.Key, Source: source, Origin: origin, Manifest: d.Text, Updated: o.config.Now(),
		Dropped: d.Object.Unknown, Notes: d.Object.Notes, Broken: d.Object.Isolates, object: d.Object,
	}
	for i := range d.Object.Specs {
		p.Rules += len(d.Object.Specs[i].Rules)
	}
	return p
}

// plan looks whether there is room for a change.
func (o *Owner) plan(puts []*Policy, gone []policy.Key) (plan, error) {
	out := plan{puts: puts, gone: gone, change: engine.Change{DeletePolicies: gone}, bytes: o.bytes, content: len(gone) > 0}
	count := len(o.policies)
	for _, p := range puts {
		old := o.policies[p.Key]
		out.bytes += len(p.Manifest)
		if old != nil {
			out.bytes -= len(old.Manifest)
		} else {
			count++
		}
		p.Revision = o.barrier.Policy + 1
		if old != nil && old.inForce() && old.Broken == p.Broken && bytes.Equal(old.Manifest, p.Manifest) {
			p.Revision, p.Updated = old.Revision, old.Updated // only its origin is another
			continue
		}
		out.content = true
		out.change.UpsertPolicies = append(out.change.UpsertPolicies, p.object)
		if old == nil || !old.inForce() {
			out.back.DeletePolicies = append(out.back.DeletePolicies, p.Key)
		} else {
			out.back.UpsertPolicies = append(out.back.UpsertPolicies, old.object)
		}
	}
	for _, k := range gone {
		old := o.policies[k]
		out.bytes -= len(old.Manifest)
		count--
		if old.inForce() {
			out.back.UpsertPolicies = append(out.back.UpsertPolicies, old.object)
		}
	}
	switch {
	case len(puts) > 0 && count > o.config.MaxPolicies:
		return plan{}, fmt.Errorf("%w: there would be %d policies, the limit is %d", ErrLimit, count, o.config.MaxPolicies)
	case len(puts) > 0 && out.bytes > o.config.MaxManifestBytes:
		return plan{}, fmt.Errorf("%w: there would be %d bytes of manifests, the limit is %d", ErrLimit, out.bytes, o.config.MaxManifestBytes)
	}
	return out, nil
}

// change replaces and deletes policies, all of it or nothing. The records are
// staged.
func (o *Owner) change(p plan, staged *journal.Staged) error {
	puts, gone := p.puts, p.gone
	if len(puts) == 0 && len(gone) == 0 {
		return nil
	}
	err := beforeCompile.Hit(o.ctx)
	if err == nil {
		err = o.apply(p.change)
	}
	if err != nil {
		return err
	}
	replaced := make([]*Policy, len(puts))
	for i, p := range puts {
		replaced[i] = o.policies[p.Key]
		o.policies[p.Key] = p
	}
	removed := make([]*Policy, len(gone))
	for i, k := range gone {
		removed[i] = o.policies[k]
		delete(o.policies, k)
	}
	before := o.bytes
	o.bytes = p.bytes
	if p.content {
		o.barrier.Policy++
	}
	if err = beforeJournal.Hit(o.ctx); err == nil {
		err = o.commit(staged)
	}
	if err != nil {
		// Nobody has seen the steps yet, and both ways together change nothing.
		for i, p := range puts {
			if replaced[i] == nil {
				delete(o.policies, p.Key)
			} else {
				o.policies[p.Key] = replaced[i]
			}
		}
		for i, k := range gone {
			o.policies[k] = removed[i]
		}
		o.bytes = before
		if p.content {
			o.barrier.Policy--
		}
		if berr := o.apply(p.back); berr != nil {
			o.fatal = fmt.Errorf("put back what storage did not take: %w", berr)
		}
		return err
	}
	o.retryCrowded()
	return beforeAnswer.Hit(o.ctx)
}

// retryCrowded tries again to give tables to subjects that had no room.
func (o *Owner) retryCrowded() {
	if len(o.crowded) == 0 {
		return
	}
	var again []identity.Numeric
	for s := range o.crowded {
		again = append(again, s)
	}
	slices.Sort(again)
	o.addSubjects(again)
}

// Feed is a source that lists everything it has, again and again.
type Feed struct {
	owner   *Owner
	name    string
	decoded map[string]*file // by origin
}

type file struct {
	sum  [sha256.Size]byte
	docs []Decoded
	err  error
	keep bool // it was not read, and its policies stay
}

// Feed returns the feed of a source that New was told of. It belongs to one
// goroutine.
func (o *Owner) Feed(name string) *Feed {
	return &Feed{owner: o, name: name, decoded: make(map[string]*file)}
}

// File is one file or object of a source.
type File struct {
	Origin string
	Data   []byte
	Err    error // it cannot be read
	// Keep says that it was not read, because it is being changed: its policies
	// stay. Err, if set, is told besides.
	Keep bool
	// Same says that it was not read, because it is what the listing before had,
	// with Data: it is neither hashed nor decoded again.
	Same bool
}

// Held is how many policies of the source there are.
func (f *Feed) Held(ctx context.Context) (int, error) {
	return ask(ctx, f.owner, func() (int, error) {
		held := 0
		for _, p := range f.owner.policies {
			if p.Source == f.name {
				held++
			}
		}
		return held, nil
	})
}

// Set says that these are all files of the source. A file is taken over whole
// or not at all; the policies of one that is refused stay as they were.
func (f *Feed) Set(ctx context.Context, files []File) error {
	var known map[string][]Decoded
	if len(f.decoded) == 0 {
		var err error
		if known, err = f.inForce(ctx); err != nil {
			return err
		}
	}
	current := make(map[string]*file, len(files))
	var order []string
	for _, in := range files {
		if in.Same {
			old := f.decoded[in.Origin]
			if old == nil || old.keep {
				return fmt.Errorf("%s %s: it is listed as the same, and the listing before did not have what it says", f.name, in.Origin)
			}
			current[in.Origin] = old
			order = append(order, in.Origin)
			continue
		}
		d := &file{sum: sha256.Sum256(in.Data), err: in.Err, keep: in.Keep}
		if old := f.decoded[in.Origin]; in.Keep {
			if old != nil && d.err == nil {
				d.err = old.err
			}
		} else if old != nil && in.Err == nil && old.sum == d.sum && !old.keep {
			d = old
		} else if docs := same(in.Data, known[in.Origin]); in.Err == nil && docs != nil {
			d.docs = docs
		} else if in.Err == nil {
			if d.docs, d.err = (Reading{Rules: f.owner.config.Rules, Held: f.name == SourceKubernetes, Large: true}).Decode(in.Data); errors.Is(d.err, errEmpty) {
				d.err = nil
			}
		}
		current[in.Origin] = d
		order = append(order, in.Origin)
	}
	slices.Sort(order)
	f.decoded = current
	return f.owner.takeOver(ctx, &listing{source: f.name, order: order, files: current})
}

// inForce are the policies of the source by origin: after a restart most files
// are what they were, and need not be understood once more.
func (f *Feed) inForce(ctx context.Context) (map[string][]Decoded, error) {
	return ask(ctx, f.owner, func() (map[string][]Decoded, error) {
		out := make(map[string][]Decoded)
		for _, p := range f.owner.policies {
			if p.Source == f.name && p.Broken == "" && len(p.Dropped) == 0 {
				out[p.Origin] = append(out[p.Origin], Decoded{Object: p.object, Text: p.Manifest})
			}
		}
		return out, nil
	})
}

// same are the documents of a file, if its text is that of the given ones and
// nothing else; nil if it has to be understood.
func same(data []byte, known []Decoded) []Decoded {
	if len(known) == 0 {
		return nil
	}
	left := make(map[string]Decoded, len(known))
	for _, d := range known {
		left[string(d.Text)] = d
	}
	var out []Decoded
	for _, chunk := range manifest.Chunks(data) {
		text := string(trim(chunk))
		if text == "\n" {
			continue // a marker alone
		}
		d, ok := left[text]
		if !ok {
			return nil
		}
		delete(left, text)
		out = append(out, d)
	}
	if len(left) > 0 {
		return nil
	}
	return out
}

// listing is what a source has, and what has to be done for the policies to be
// those of its files.
type listing struct {
	source string
	order  []string // origins
	files  map[string]*file

	fresh []puts // of the files that are taken over
	gone  []policy.Key
	stuck error // why those that are gone stay
	bad   map[string]refused
}

// puts are the policies of a file that are new, or another than before.
type puts struct {
	origin   string
	policies []*Policy
}

// takeOver makes the policies of a source those of its files.
func (o *Owner) takeOver(ctx context.Context, l *listing) error {
	release, err := o.hold(ctx)
	if err != nil {
		return err
	}
	defer release()
	done := func(*edit) { o.took(l) }
	_, err = o.reviseHeld(ctx, opFiles, func() (edit, error) { o.compare(l); return l.edit(), nil }, done)
	if errors.Is(err, ErrLimit) {
		if err = o.fit(ctx, l); err == nil {
			_, err = o.reviseHeld(ctx, opFiles, func() (edit, error) { return l.edit(), nil }, done)
		}
	}
	if err != nil && ctx.Err() == nil {
		return errors.Join(err, o.SourceFailed(ctx, l.source, err))
	}
	return err
}

// edit is the change that the listing comes to.
func (l *listing) edit() edit {
	e := edit{gone: l.gone}
	for _, f := range l.fresh {
		e.puts = append(e.puts, f.policies...)
	}
	return e
}

// maxTries is how many parts of a listing may have no room before the rest is
// not tried: each compiles.
const maxTries = 1000

// fit leaves of a listing that has no room as a whole the files that have. It
// finds them beside the owner, on a copy of the engine: all of them are tried at
// once, and halves if that is too much, so that few files without room cost few
// tries.
func (o *Owner) fit(ctx context.Context, l *listing) error {
	return o.aside(ctx, func() error {
		draft, err := ask(ctx, o, func() (engine.Draft, error) {
			o.operation = opDraft
			return o.engine.Draft(), nil
		})
		if err != nil {
			return err
		}
		copied, err := draft.Copy()
		if err != nil {
			return fmt.Errorf("%w: %w", ErrLimit, err)
		}
		if err := copied.Apply(engine.Change{DeletePolicies: l.gone}); err != nil {
			l.gone, l.stuck = nil, err
		}
		f := &fitting{owner: o, engine: copied, gone: l.gone, tries: maxTries, refuse: func(origin string, why error) { l.bad[origin] = refused{err: why.Error()} }}
		err = f.try(ctx, l.fresh)
		l.fresh = f.taken
		return err
	})
}

// fitting looks for the files that have room.
type fitting struct {
	owner  *Owner
	engine *engine.Engine // a copy, which has the files that are taken
	gone   []policy.Key
	taken  []puts
	tries  int
	refuse func(origin string, why error)
}

func (f *fitting) try(ctx context.Context, files []puts) error {
	if len(files) == 0 {
		return nil
	}
	if f.tries == 0 {
		for _, x := range files {
			f.refuse(x.origin, fmt.Errorf("%w: not tried, after %d changes that had none", ErrLimit, maxTries))
		}
		return nil
	}
	why, err := f.room(ctx, files)
	switch {
	case err != nil:
		return err
	case why == nil:
		f.taken = append(f.taken, files...)
		return nil
	}
	f.tries--
	if len(files) == 1 {
		f.refuse(files[0].origin, why)
		return nil
	}
	if err := f.try(ctx, files[:len(files)/2]); err != nil {
		return err
	}
	return f.try(ctx, files[len(files)/2:])
}

// room says why there is none for files beside those that are taken.
func (f *fitting) room(ctx context.Context, files []puts) (why, err error) {
	all := (&listing{fresh: slices.Concat(f.taken, files)}).edit().puts
	if _, err := ask(ctx, f.owner, func() (plan, error) {
		f.owner.operation = opPrepare
		return f.owner.plan(all, f.gone)
	}); errors.Is(err, ErrLimit) {
		return err, nil
	} else if err != nil {
		return nil, err
	}
	var c engine.Change
	for _, x := range files {
		for _, p := range x.policies {
			c.UpsertPolicies = append(c.UpsertPolicies, p.object)
		}
	}
	if err := f.engine.Apply(c); err != nil {
		return fmt.Errorf("%w: %w", ErrLimit, err), nil
	}
	return nil, nil
}

// compare finds out what the listing changes.
func (o *Owner) compare(l *listing) {
	l.bad = make(map[string]refused)
	l.fresh, l.gone = nil, nil
	keys := make(map[string]map[policy.Key]bool) // of files that were asked about
	has := func(origin string, k policy.Key) bool {
		f := l.files[origin]
		if f == nil {
			return false
		}
		if keys[origin] == nil {
			keys[origin] = make(map[policy.Key]bool, len(f.docs))
			for _, d := range f.docs {
				keys[origin][d.Object.Key] = true
			}
		}
		return keys[origin][k]
	}
	for _, origin := range l.order {
		if err := l.files[origin].err; err != nil {
			l.bad[origin] = refused{err: err.Error()}
		}
	}
	// Who has a policy keeps it; a second file with it is refused.
	taken := make(map[policy.Key]string)
	stays := func(origin string) bool { f := l.files[origin]; return f != nil && (f.err != nil || f.keep) }
	for _, origin := range l.order {
		if stays(origin) {
			continue
		}
		for _, d := range l.files[origin].docs {
			k := d.Object.Key
			why := ""
			if other, ok := taken[k]; ok {
				why = fmt.Sprintf("%s is in %s already", k, other)
			} else if p := o.policies[k]; p != nil && p.Source != l.source && o.sources[p.Source] != nil {
				why = fmt.Sprintf("%s belongs to the source %s", k, p.Source)
			} else if p != nil && p.Origin != origin && (has(p.Origin, k) || stays(p.Origin)) {
				why = fmt.Sprintf("%s is in %s already", k, p.Origin)
			}
			if why != "" {
				l.bad[origin] = refused{key: k, err: why}
				break
			}
		}
		if _, ok := l.bad[origin]; ok {
			continue
		}
		for _, d := range l.files[origin].docs {
			taken[d.Object.Key] = origin
		}
	}
	for _, origin := range l.order {
		if _, ok := l.bad[origin]; ok {
			continue
		}
		f := puts{origin: origin}
		for i, d := range l.files[origin].docs {
			p := o.policies[d.Object.Key]
			if p == nil || p.Source != l.source || p.Origin != origin || p.Broken != d.Object.Isolates || !bytes.Equal(p.Manifest, d.Text) {
				f.policies = append(f.policies, o.policy(d, l.source, origin))
			} else {
				l.files[origin].docs[i] = Decoded{Object: p.object, Text: p.Manifest} // kept once
			}
		}
		if len(f.policies) > 0 {
			l.fresh = append(l.fresh, f)
		}
	}
	for k, p := range o.policies {
		if p.Source != l.source || taken[k] != "" {
			continue
		}
		if _, ok := l.bad[p.Origin]; !ok && !stays(p.Origin) {
			l.gone = append(l.gone, k)
		}
	}
	slices.SortFunc(l.gone, compareKeys)
}

// took notes what became of a listing that is taken over.
func (o *Owner) took(l *listing) {
	src := o.sources[l.source]
	o.problem("policies that are gone from "+l.source, l.stuck)
	for origin, r := range l.bad {
		if before, ok := src.refused[origin]; !ok || before.err != r.err {
			o.config.Log.Warn("policies refused; what was in force of them stays", "source", l.source, "origin", origin, "reason", r.err)
		}
	}
	src.refused, src.synced, src.err = l.bad, true, ""
	o.stateChanged = true
}

func compareKeys(a, b policy.Key) int {
	return cmp.Or(strings.Compare(a.Kind, b.Kind), strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
}
