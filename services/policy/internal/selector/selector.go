// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package selector implements conjunctions of requirements on labels.
//
// A Selector is immutable and interned by its canonical text. Selectors whose requirements differ only in order have
// the same text. As in Kubernetes, negative operators match missing labels. A requirement without a source applies to
// the labels of every source. Labels of label.SourceGenerated are invisible to all requirements.
package selector

import (
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"weak"

	"github.com/sluice-net/sluice/model/label"
)

// Op is the operator of a requirement.
type Op uint8

// The operators of Kubernetes label selectors.
const (
	In Op = iota + 1
	NotIn
	Exists
	DoesNotExist
)

// String returns the name of the operator in a manifest.
func (o Op) String() string {
	switch o {
	case In:
		return "In"
	case NotIn:
		return "NotIn"
	case Exists:
		return "Exists"
	case DoesNotExist:
		return "DoesNotExist"
	}
	return "Op(" + strconv.Itoa(int(o)) + ")"
}

// ParseOp returns the operator with a name; the case matters.
func ParseOp(s string) (Op, bool) {
	for _, o := range []Op{In, NotIn, Exists, DoesNotExist} {
		if o.String() == s {
			return o, true
		}
	}
	return 0, false
}

// Requirement is a condition on the labels with one key.
type Requirement struct {
	Source string // empty: every source
	Key    string
	Op     Op
	Values []string // for In and NotIn; sorted by New
}

func (r Requirement) text() string {
	var b strings.Builder
	if r.Source != "" {
		b.WriteString(r.Source)
		b.WriteByte(':')
	} else {
		b.WriteString("any:")
	}
	b.WriteString(r.Key)
	b.WriteByte(' ')
	b.WriteString(r.Op.String())
	for _, v := range r.Values {
		b.WriteByte(' ')
		b.WriteString(strconv.Quote(v))
	}
	return b.String()
}

// Matches reports whether labels satisfy the requirement. If a key has several values (from several sources or merged
// sets), In requires that one of them is listed, and NotIn that all of them are unlisted.
func (r Requirement) Matches(labels label.Set) bool {
	present, listed := false, false
	for l := range labels.Key(r.Key) {
		if l.Source == label.SourceGenerated || r.Source != "" && l.Source != r.Source {
			continue
		}
		present = true
		if slices.Contains(r.Values, l.Value) {
			listed = true
		}
	}
	switch r.Op {
	case In:
		return listed
	case NotIn:
		return !listed
	case Exists:
		return present
	case DoesNotExist:
		return !present
	}
	return false
}

// Selector is a conjunction of requirements. The zero Selector matches every label set. Equal selectors share memory
// and compare equal with ==.
type Selector struct{ *content }

type content struct {
	reqs []Requirement
	text string
}

// interned maps texts to the contents of selectors that are in use. Many policies use the same selectors, so the
// shared contents need far less memory.
var interned sync.Map // string → weak.Pointer[content]

// intern returns the unique selector with a text.
func intern(text string, reqs []Requirement) Selector {
	if text == "" {
		return Selector{}
	}
	fresh := &content{reqs: reqs, text: text}
	ref := weak.Make(fresh)
	for {
		found, loaded := interned.LoadOrStore(text, ref)
		if !loaded {
			runtime.AddCleanup(fresh, func(text string) { interned.CompareAndDelete(text, ref) }, text)
			return Selector{fresh}
		}
		if c := found.(weak.Pointer[content]).Value(); c != nil {
			return Selector{c}
		}
		interned.CompareAndDelete(text, found) // collected, but its cleanup has not run yet
	}
}

// New returns the selector that requires all of reqs.
func New(reqs ...Requirement) Selector {
	type entry struct {
		r Requirement
		t string
	}
	es := make([]entry, 0, len(reqs))
	for _, r := range reqs {
		if r.Values != nil {
			r.Values = slices.Clone(r.Values)
			slices.Sort(r.Values)
			r.Values = slices.Compact(r.Values)
		}
		es = append(es, entry{r, r.text()})
	}
	slices.SortFunc(es, func(a, b entry) int { return strings.Compare(a.t, b.t) })
	es = slices.CompactFunc(es, func(a, b entry) bool { return a.t == b.t })
	sorted := make([]Requirement, len(es))
	texts := make([]string, len(es))
	for i, e := range es {
		sorted[i], texts[i] = e.r, e.t
	}
	return intern(strings.Join(texts, ", "), sorted)
}

// Requirements returns the conditions in canonical order. The caller must not change them.
func (s Selector) Requirements() []Requirement {
	if s.content == nil {
		return nil
	}
	return s.reqs
}

// Matches reports whether labels satisfy all requirements.
func (s Selector) Matches(labels label.Set) bool {
	for _, r := range s.Requirements() {
		if !r.Matches(labels) {
			return false
		}
	}
	return true
}

// Implies reports whether the other selector also matches every label set that s matches. It compares single
// requirements, so it may return false although several requirements of s together imply a requirement of the other
// selector.
func (s Selector) Implies(other Selector) bool {
	if s == other {
		return true
	}
	return !slices.ContainsFunc(other.Requirements(), func(want Requirement) bool {
		return !slices.ContainsFunc(s.Requirements(), func(r Requirement) bool { return r.implies(want) })
	})
}

// implies reports whether every label set that satisfies r also satisfies the other requirement.
func (r Requirement) implies(other Requirement) bool {
	if r.Key != other.Key {
		return false
	}
	within := func(some, all []string) bool {
		return !slices.ContainsFunc(some, func(v string) bool { return !slices.Contains(all, v) })
	}
	switch other.Op {
	case In, Exists: // a label that one source has is a label of any source
		if other.Source != "" && other.Source != r.Source {
			return false
		}
		return r.Op == In && (other.Op == Exists || within(r.Values, other.Values)) || r.Op == Exists && other.Op == Exists
	case NotIn, DoesNotExist: // if no source has the label, one particular source does not have it either
		if r.Source != "" && r.Source != other.Source {
			return false
		}
		return r.Op == DoesNotExist || r.Op == NotIn && other.Op == NotIn && within(other.Values, r.Values)
	}
	return false
}

// Contradiction returns the reason why the selector cannot match any label set with one value per key; empty if it
// can. It compares only requirements with the same source.
func (s Selector) Contradiction() string {
	type key struct{ source, key string }
	type known struct {
		allowed       []string // values that In allows; nil: any
		in, out       bool     // the key is required or forbidden
		refused       []string
		first, second Requirement
	}
	all := make(map[key]*known)
	for _, r := range s.Requirements() {
		if r.Source == "" {
			continue
		}
		k := all[key{r.Source, r.Key}]
		if k == nil {
			k = &known{first: r}
			all[key{r.Source, r.Key}] = k
		}
		k.second = r
		switch r.Op {
		case In:
			if k.allowed == nil {
				k.allowed = slices.Clone(r.Values)
			} else {
				k.allowed = slices.DeleteFunc(k.allowed, func(v string) bool { return !slices.Contains(r.Values, v) })
			}
			k.in = true
		case NotIn:
			k.refused = append(k.refused, r.Values...)
		case Exists:
			k.in = true
		case DoesNotExist:
			k.out = true
		}
		left := slices.ContainsFunc(k.allowed, func(v string) bool { return !slices.Contains(k.refused, v) })
		if k.in && k.out || k.allowed != nil && !left {
			return k.first.text() + " and " + k.second.text()
		}
	}
	return ""
}

// String returns the canonical text: equal selectors have equal texts.
func (s Selector) String() string {
	if s.content == nil {
		return ""
	}
	return s.text
}
