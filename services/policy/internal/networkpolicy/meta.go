// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package networkpolicy defines Kubernetes' NetworkPolicy, and the parts that all kinds of policy share: object
// metadata and label selectors. It validates them as an API server does.
package networkpolicy

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/services/policy/internal/manifest"
	"github.com/sluice-net/sluice/services/policy/internal/selector"
)

// Meta contains the fields that every object has.
type Meta struct {
	APIVersion string     `json:"apiVersion"`
	Kind       string     `json:"kind"`
	Metadata   ObjectMeta `json:"metadata"`
	Status     any        `json:"status"`
}

// ObjectMeta contains the metadata that identifies a policy. Fields that only the API server writes are accepted and
// dropped.
type ObjectMeta struct {
	Name        string            `json:"name"`
	Namespace   string            `json:"namespace"`
	Labels      map[string]string `json:"labels"`
	Annotations map[string]string `json:"annotations"`
	UID         string            `json:"uid"`
	Generation  int64             `json:"generation"`

	ResourceVersion            any `json:"resourceVersion"`
	CreationTimestamp          any `json:"creationTimestamp"`
	DeletionTimestamp          any `json:"deletionTimestamp"`
	DeletionGracePeriodSeconds any `json:"deletionGracePeriodSeconds"`
	ManagedFields              any `json:"managedFields"`
	OwnerReferences            any `json:"ownerReferences"`
	Finalizers                 any `json:"finalizers"`
	SelfLink                   any `json:"selfLink"`
	GenerateName               any `json:"generateName"`
}

// Validate checks the name and the namespace. A namespaced object without a namespace gets "default". A cluster-wide
// object must have no namespace.
func (m *ObjectMeta) Validate(namespaced bool, ps *manifest.Problems) {
	switch {
	case m.Name == "":
		ps.Add("metadata.name", "is required")
	case !isSubdomain(m.Name):
		ps.Add("metadata.name", "%q is not a DNS name of lower-case letters, digits, '-' and '.'", m.Name)
	}
	if namespaced {
		m.Namespace = cmp.Or(m.Namespace, "default")
		if !isDNSLabel(m.Namespace) {
			ps.Add("metadata.namespace", "%q is not a DNS label", m.Namespace)
		}
	} else if m.Namespace != "" {
		ps.Add("metadata.namespace", "must be empty: the kind is cluster-wide")
	}
}

// LabelSelector is a label selector as written.
type LabelSelector struct {
	MatchLabels      map[string]string `json:"matchLabels"`
	MatchExpressions []Expression      `json:"matchExpressions"`
}

// Expression is one requirement of a label selector.
type Expression struct {
	Key      string   `json:"key"`
	Operator string   `json:"operator"`
	Values   []string `json:"values"`
}

// Validate checks keys, operators and values. If sources is set, keys may start with a source and a colon.
func (s *LabelSelector) Validate(path string, sources bool, ps *manifest.Problems) {
	if s == nil {
		return
	}
	check := func(path, key string) {
		k := key
		if sources {
			_, k = SplitSource(key)
		}
		if why := badKey(k); why != "" {
			ps.Add(path, "label key %q %s", key, why)
		}
	}
	for _, key := range slices.Sorted(maps.Keys(s.MatchLabels)) {
		check(path+".matchLabels", key)
		if v := s.MatchLabels[key]; !isLabelValue(v) {
			ps.AddHeld(path+".matchLabels["+key+"]", "%q is not a label value", v)
		}
	}
	for i, e := range s.MatchExpressions {
		p := path + ".matchExpressions[" + strconv.Itoa(i) + "]"
		check(p+".key", e.Key)
		op, ok := selector.ParseOp(e.Operator)
		if !ok {
			ps.Add(p+".operator", "%q is not one of In, NotIn, Exists, DoesNotExist", e.Operator)
			continue
		}
		switch op {
		case selector.In, selector.NotIn:
			if len(e.Values) == 0 {
				ps.Add(p+".values", "is required with operator %s", op)
			}
			for j, v := range e.Values {
				if !isLabelValue(v) {
					ps.AddHeld(p+".values["+strconv.Itoa(j)+"]", "%q is not a label value", v)
				}
			}
		case selector.Exists, selector.DoesNotExist:
			if len(e.Values) > 0 {
				ps.Add(p+".values", "must be empty with operator %s", op)
			}
		}
	}
}

// Names reports whether the selector has a requirement for this key.
func (s *LabelSelector) Names(key string) bool {
	if s == nil {
		return false
	}
	if _, ok := s.MatchLabels[key]; ok {
		return true
	}
	return slices.ContainsFunc(s.MatchExpressions, func(e Expression) bool { return e.Key == key })
}

// Usable reports whether the selector is valid, and has no problem according to bad.
func (s *LabelSelector) Usable(path string, sources bool, bad func(path string) bool) bool {
	var ps manifest.Problems
	s.Validate(path, sources, &ps)
	return !bad(path) && ps.Meaningful()
}

// Without returns the selector without a key of matchLabels.
func (s *LabelSelector) Without(key string) *LabelSelector {
	if s == nil {
		return nil
	}
	if _, ok := s.MatchLabels[key]; !ok {
		return s
	}
	out := &LabelSelector{MatchLabels: maps.Clone(s.MatchLabels), MatchExpressions: s.MatchExpressions}
	delete(out.MatchLabels, key)
	return out
}

// SplitSource cuts "source:key". Without a colon the source is empty; "any" means no source.
func SplitSource(key string) (source, rest string) {
	source, rest, ok := strings.Cut(key, ":")
	if !ok {
		return "", key
	}
	if source == "any" {
		source = ""
	}
	return source, rest
}

// Requirements converts a valid selector. source and prefix are added to each key.
func (s *LabelSelector) Requirements(source, prefix string) []selector.Requirement {
	return s.Convert(func(key string) (string, string) { return source, prefix + key })
}

// Convert converts a valid selector; place returns the source and the key for a key as written.
func (s *LabelSelector) Convert(place func(key string) (source, key2 string)) []selector.Requirement {
	if s == nil {
		return nil
	}
	var reqs []selector.Requirement
	for _, key := range slices.Sorted(maps.Keys(s.MatchLabels)) {
		src, k := place(key)
		reqs = append(reqs, selector.Requirement{Source: src, Key: k, Op: selector.In, Values: []string{s.MatchLabels[key]}})
	}
	for _, e := range s.MatchExpressions {
		op, _ := selector.ParseOp(e.Operator)
		src, k := place(e.Key)
		reqs = append(reqs, selector.Requirement{Source: src, Key: k, Op: op, Values: slices.Clone(e.Values)})
	}
	return reqs
}

// Namespaces returns the requirements of a namespace selector. The peer must be in a namespace whose labels match, so
// nodes and the world never match.
func (s *LabelSelector) Namespaces() []selector.Requirement {
	return append(s.Requirements(label.SourceKubernetes, label.KeyNamespaceLabels), InSomeNamespace())
}

// Pods returns the requirements of a pod selector, without a namespace.
func (s *LabelSelector) Pods() []selector.Requirement {
	return s.Requirements(label.SourceKubernetes, "")
}

// InSomeNamespace returns the requirement that a peer is in some namespace.
func InSomeNamespace() selector.Requirement {
	return selector.Requirement{Source: label.SourceKubernetes, Key: label.KeyNamespace, Op: selector.Exists}
}

// InNamespace returns the requirement that a peer is in the namespace.
func InNamespace(namespace string) selector.Requirement {
	return selector.Requirement{Source: label.SourceKubernetes, Key: label.KeyNamespace, Op: selector.In, Values: []string{namespace}}
}

// InCluster returns the requirement that a peer is in the cluster.
func InCluster(cluster string) selector.Requirement {
	return selector.Requirement{Source: label.SourceKubernetes, Key: label.KeyCluster, Op: selector.In, Values: []string{cluster}}
}

func isLower(c byte) bool { return 'a' <= c && c <= 'z' || '0' <= c && c <= '9' }
func isAlnum(c byte) bool { return isLower(c) || 'A' <= c && c <= 'Z' }

func isDNSLabel(s string) bool {
	if s == "" || len(s) > 63 || !isLower(s[0]) || !isLower(s[len(s)-1]) {
		return false
	}
	for i := range len(s) {
		if !isLower(s[i]) && s[i] != '-' {
			return false
		}
	}
	return true
}

func isSubdomain(s string) bool {
	if len(s) > 253 {
		return false
	}
	for part := range strings.SplitSeq(s, ".") {
		if part == "" || !isLower(part[0]) || !isLower(part[len(part)-1]) {
			return false
		}
		for i := range len(part) {
			if !isLower(part[i]) && part[i] != '-' {
				return false
			}
		}
	}
	return true
}

// IsSubdomain reports whether s is a valid name of an object.
func IsSubdomain(s string) bool { return isSubdomain(s) }

func isName(s string) bool {
	if s == "" || len(s) > 63 || !isAlnum(s[0]) || !isAlnum(s[len(s)-1]) {
		return false
	}
	for i := range len(s) {
		if c := s[i]; !isAlnum(c) && c != '-' && c != '_' && c != '.' {
			return false
		}
	}
	return true
}

func isLabelValue(s string) bool { return s == "" || isName(s) }

func badKey(key string) string {
	name := key
	if prefix, rest, ok := strings.Cut(key, "/"); ok {
		if !isSubdomain(prefix) {
			return "has a prefix that is not a DNS name"
		}
		name = rest
	}
	if !isName(name) {
		return "must be at most 63 letters, digits, '-', '_' and '.', beginning and ending with a letter or digit"
	}
	return ""
}

// IsPortName reports whether s has the form of an IANA service name: at most 15 letters, digits and single inner
// hyphens, with at least one letter.
func IsPortName(s string) bool {
	if s == "" || len(s) > 15 || strings.Contains(s, "--") || s[0] == '-' || s[len(s)-1] == '-' {
		return false
	}
	letter := false
	for i := range len(s) {
		c := s[i]
		switch {
		case 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z':
			letter = true
		case '0' <= c && c <= '9' || c == '-':
		default:
			return false
		}
	}
	return letter
}

// Unmap converts a prefix of IPv4-mapped addresses to the IPv4 prefix.
func Unmap(p netip.Prefix) netip.Prefix {
	if p.Addr().Is4In6() && p.Bits() >= 96 {
		return netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96)
	}
	return p
}
