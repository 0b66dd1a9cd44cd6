// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package identity

import (
	"cmp"
	"crypto/sha256"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Sources of labels that have a meaning here.
const (
	SourceKubernetes = "k8s"
	SourceCNI        = "cni"
	SourceReserved   = "reserved"  // ours: the reserved identities
	SourceGenerated  = "generated" // ours: hidden from every selector
)

// Bounds of a label set.
const (
	MaxLabels = 256       // labels in a set, after filtering
	MaxSource = 63        // bytes
	MaxKey    = 317       // bytes: a DNS prefix of 253, '/', a name of 63
	MaxValue  = 4096      // bytes
	MaxText   = 256 << 10 // bytes of the canonical text, well below etcd's limit of a request
)

// ErrLabels is in every error about labels; the caller gave what cannot be taken.
var ErrLabels = errors.New("invalid labels")

// LabelError names the label and the part of it that is not acceptable.
type LabelError struct {
	Index  int    // in the caller's list; -1 for the set as a whole
	Part   string // "source", "key", "value"; empty for the label as a whole
	Reason string
}

// Field is the path of the bad value in a request.
func (e *LabelError) Field() string {
	f := "labels"
	if e.Index >= 0 {
		f += "[" + strconv.Itoa(e.Index) + "]"
	}
	if e.Part != "" {
		f += "." + e.Part
	}
	return f
}

func (e *LabelError) Error() string { return e.Field() + ": " + e.Reason }

// Is makes every LabelError an ErrLabels.
func (e *LabelError) Is(target error) bool { return target == ErrLabels }

// Label is one property of a workload.
type Label struct {
	Source string
	Key    string
	Value  string // may be empty
}

// Name is "source:key".
func (l Label) Name() string { return l.Source + ":" + l.Key }

// Compare orders by source, key, value.
func (l Label) Compare(o Label) int {
	return cmp.Or(strings.Compare(l.Source, o.Source), strings.Compare(l.Key, o.Key), strings.Compare(l.Value, o.Value))
}

var sourceRE = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]*[a-z0-9])?$`)

func (l Label) check(index int) error {
	bad := func(part, format string, args ...any) error {
		return &LabelError{Index: index, Part: part, Reason: fmt.Sprintf(format, args...)}
	}
	switch {
	case len(l.Source) > MaxSource || !sourceRE.MatchString(l.Source):
		return bad("source", "%q: want 1 to %d of a-z, 0-9 and \"-\"", l.Source, MaxSource)
	case l.Key == "":
		return bad("key", "is empty")
	case len(l.Key) > MaxKey:
		return bad("key", "is %d bytes long, at most %d are allowed", len(l.Key), MaxKey)
	case len(l.Value) > MaxValue:
		return bad("value", "is %d bytes long, at most %d are allowed", len(l.Value), MaxValue)
	case !printable(l.Key):
		return bad("key", "%q: control characters and broken UTF-8 are not allowed", l.Key)
	case !printable(l.Value):
		return bad("value", "%q: control characters and broken UTF-8 are not allowed", l.Value)
	}
	return nil
}

func printable(s string) bool {
	return utf8.ValidString(s) && strings.IndexFunc(s, unicode.IsControl) < 0
}

// systemSources are the sources that no caller may use: Sluice's own, those
// under which policies select addresses, names and nodes instead of workloads,
// and those that selectors understand as "every source".
var systemSources = []string{SourceReserved, SourceGenerated, "cidr", "cidrgroup", "fqdn", "node", "any", "all", "unspec"}

// Keys of what Kubernetes knows about a pod. Policies trust them, so they count
// only under the source of Kubernetes, where they fit together.
const (
	keyNamespace     = "io.kubernetes.pod.namespace"
	keyNamespaceName = "io.cilium.k8s.namespace.labels.kubernetes.io/metadata.name"
	prefixPod        = "io.kubernetes.pod."
	prefixDerived    = "io.cilium.k8s."
)

// CheckCaller checks labels that come from outside: each by itself, that none
// claims a source that no workload has, and that keys which Kubernetes derives
// are of Kubernetes and of a pod in the namespace that they name.
func CheckCaller(labels []Label) error {
	namespace := ""
	for _, l := range labels {
		if l.Source == SourceKubernetes && l.Key == keyNamespace {
			namespace = l.Value
		}
	}
	var errs []error
	for i, l := range labels {
		if err := l.check(i); err != nil {
			errs = append(errs, err)
			continue
		}
		bad := func(part, format string, args ...any) {
			errs = append(errs, &LabelError{Index: i, Part: part, Reason: fmt.Sprintf(format, args...)})
		}
		derived := strings.HasPrefix(l.Key, prefixDerived)
		switch {
		case slices.Contains(systemSources, l.Source):
			bad("source", "%q is given by Sluice itself and refused in requests", l.Source)
		case (derived || strings.HasPrefix(l.Key, prefixPod)) && l.Source != SourceKubernetes:
			bad("key", "%q is derived from Kubernetes, and the source is %q", l.Key, l.Source)
		case derived && namespace == "":
			bad("key", "%q is derived from Kubernetes, and no label %s says the namespace of the pod", l.Key, keyNamespace)
		case l.Key == keyNamespaceName && l.Value != namespace:
			bad("value", "%q is not the namespace of the pod, %q", l.Value, namespace)
		}
	}
	return errors.Join(errs...)
}

// Labels is a label set: sorted by source, key and value, without duplicates,
// each label valid. Two sets are equal exactly when their texts are. The zero
// value is no set; a set is never empty.
type Labels struct {
	list []Label // never changed
	text string
}

// NewLabels sorts, checks and deduplicates. The same source and key with two
// values is refused.
func NewLabels(labels ...Label) (Labels, error) {
	if len(labels) == 0 {
		return Labels{}, &LabelError{Index: -1, Reason: "a label set has at least one label"}
	}
	for i, l := range labels {
		if err := l.check(i); err != nil {
			return Labels{}, err
		}
	}
	list := slices.Clone(labels)
	slices.SortFunc(list, Label.Compare)
	list = slices.Compact(list)
	for i := 1; i < len(list); i++ {
		if list[i].Name() == list[i-1].Name() {
			return Labels{}, &LabelError{
				Index: slices.Index(labels, list[i]), Part: "key",
				Reason: fmt.Sprintf("%s is given twice, with the values %q and %q", list[i].Name(), list[i-1].Value, list[i].Value),
			}
		}
	}
	if len(list) > MaxLabels {
		return Labels{}, &LabelError{Index: -1, Reason: fmt.Sprintf("%d labels are left after filtering, at most %d are allowed", len(list), MaxLabels)}
	}
	var b strings.Builder
	for _, l := range list {
		l.appendTo(&b)
	}
	if b.Len() > MaxText {
		return Labels{}, &LabelError{Index: -1, Reason: fmt.Sprintf("the set is %d bytes long, at most %d are allowed", b.Len(), MaxText)}
	}
	return Labels{list: slices.Clip(list), text: b.String()}, nil
}

var (
	keyEscaper   = strings.NewReplacer(`\`, `\\`, `;`, `\;`, `=`, `\=`)
	valueEscaper = strings.NewReplacer(`\`, `\\`, `;`, `\;`)
)

func (l Label) appendTo(b *strings.Builder) {
	b.WriteString(l.Source)
	b.WriteByte(':')
	keyEscaper.WriteString(b, l.Key) //nolint:errcheck // a Builder does not fail
	b.WriteByte('=')
	valueEscaper.WriteString(b, l.Value) //nolint:errcheck // a Builder does not fail
	b.WriteByte(';')
}

// Text is the canonical form, "source:key=value;" for each label: what is
// hashed, stored and compared. In keys '\', ';' and '=' are escaped by '\', in
// values '\' and ';'.
func (l Labels) Text() string { return l.text }

// String is Text.
func (l Labels) String() string { return l.text }

// IsZero says that there is no set.
func (l Labels) IsZero() bool { return l.text == "" }

// List returns the labels in their order. The caller may not change it.
func (l Labels) List() []Label { return l.list[:len(l.list):len(l.list)] }

// Hash is SHA-256 over the canonical text.
func (l Labels) Hash() [sha256.Size]byte { return sha256.Sum256([]byte(l.text)) }

// ParseLabels reads a canonical text, and nothing but a canonical text: what
// Text would not have written is refused, so equal sets have equal texts
// wherever they come from.
func ParseLabels(text string) (Labels, error) {
	if len(text) > MaxText {
		return Labels{}, fmt.Errorf("%w: text of %d bytes, at most %d are allowed", ErrLabels, len(text), MaxText)
	}
	var list []Label
	rest := text
	for rest != "" {
		if len(list) == MaxLabels {
			return Labels{}, fmt.Errorf("%w: text has more than %d labels", ErrLabels, MaxLabels)
		}
		source, after, ok := strings.Cut(rest, ":")
		if !ok {
			return Labels{}, fmt.Errorf("%w: %q has no source", ErrLabels, rest)
		}
		key, after, ok := cutUnescaped(after, '=')
		if !ok {
			return Labels{}, fmt.Errorf("%w: %q has no value", ErrLabels, rest)
		}
		value, after, ok := cutUnescaped(after, ';')
		if !ok {
			return Labels{}, fmt.Errorf("%w: %q does not end in \";\"", ErrLabels, rest)
		}
		list = append(list, Label{Source: source, Key: key, Value: value})
		rest = after
	}
	set, err := NewLabels(list...)
	if err != nil {
		return Labels{}, err
	}
	if set.text != text {
		return Labels{}, fmt.Errorf("%w: %q is not in canonical form", ErrLabels, text)
	}
	return set, nil
}

// cutUnescaped unescapes s up to the first stop that no '\' precedes.
func cutUnescaped(s string, stop byte) (before, after string, ok bool) {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		switch c := s[i]; {
		case c == stop:
			return b.String(), s[i+1:], true
		case c == '\\' && i+1 < len(s):
			i++
			b.WriteByte(s[i])
		default:
			b.WriteByte(c)
		}
	}
	return "", "", false
}

// Has says whether any label has the source.
func (l Labels) Has(source string) bool {
	return slices.ContainsFunc(l.list, func(x Label) bool { return x.Source == source })
}
