// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policy

import (
	"errors"
	"slices"
	"strings"

	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/adminpolicy"
	"github.com/sluice-net/sluice/services/policy/internal/cilium"
	"github.com/sluice-net/sluice/services/policy/internal/manifest"
	"github.com/sluice-net/sluice/services/policy/internal/networkpolicy"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
	"github.com/sluice-net/sluice/services/policy/internal/selector"
)

// DecodeHeld converts an object that an API server has stored, so that it can no longer be rejected. A value whose
// meaning is clear is accepted with a note. An object that cannot be converted isolates the pods that it selects,
// because without it more would be allowed than its author wrote. So does an object with unknown fields in its spec,
// because they may narrow a rule. DecodeHeld returns an error if the object is not a policy, has no name, or is a
// group, which selects no pods.
func DecodeHeld(form Form, o rule.Options) (Object, error) {
	ob, err := Decode(form, o)
	var problems manifest.Problems
	if err != nil && !errors.As(err, &problems) {
		return ob, err
	}
	unknown := slices.ContainsFunc(ob.Unknown, func(path string) bool {
		return manifest.Within(path, "spec") || manifest.Within(path, "specs")
	})
	if _, kind := form.Type(); kind == groupKind && (unknown || !problems.Meaningful()) {
		return closedGroup(form, ob.Unknown, problems)
	}
	switch {
	case unknown:
		var fields manifest.Problems
		for _, path := range ob.Unknown {
			fields.Add(path, "no such field")
		}
		return Isolate(form, fields)
	case !problems.Meaningful():
		return Isolate(form, err)
	}
	for _, p := range problems {
		ob.Notes.Add(manifest.NoteCanonical, p.Path, "%s", p.Text)
	}
	return ob, nil
}

// Isolate returns an object that isolates the pods which an undecodable object selects; why is the reason. If these
// pods cannot be determined, Isolate returns why.
func Isolate(form Form, why error) (Object, error) {
	version, kind := form.Type()
	if !IsKind(version, kind) || kind == groupKind {
		return Object{}, why
	}
	ob := Object{Key: Key{Kind: kind}, Isolates: why.Error()}
	var problems manifest.Problems
	read := func(into any) (bad func(path string) bool) {
		unknown, err := form.Decode(into)
		errors.As(err, &problems) //nolint:errcheck // Decode returns no other errors
		return func(path string) bool {
			return problems.At(path) || slices.ContainsFunc(unknown, func(p string) bool { return manifest.Within(p, path) })
		}
	}
	var meta *networkpolicy.Meta
	var specs func() []rule.Spec
	switch kind {
	case "NetworkPolicy":
		var p networkpolicy.NetworkPolicy
		bad := read(&p)
		meta, specs = &p.Meta, func() []rule.Spec { return p.Isolate(bad) }
	case "CiliumNetworkPolicy", "CiliumClusterwideNetworkPolicy":
		var p cilium.NetworkPolicy
		bad := read(&p)
		meta, specs = &p.Meta, func() []rule.Spec { return p.Isolate(kind == "CiliumNetworkPolicy", bad) }
	case "ClusterNetworkPolicy":
		var p adminpolicy.Policy
		bad := read(&p)
		meta, specs = &p.Meta, func() []rule.Spec { return p.Isolate(bad) }
	default:
		var p adminpolicy.OldPolicy
		bad := read(&p)
		meta, specs = &p.Meta, func() []rule.Spec { return p.Isolate(strings.HasPrefix(kind, "Baseline"), bad) }
	}
	var named manifest.Problems
	meta.Metadata.Validate(Namespaced(kind), &named)
	misread := slices.ContainsFunc(problems, func(p manifest.Problem) bool { return p.Path != "" && manifest.Within(p.Path, "metadata") })
	if len(named) > 0 || misread {
		return Object{}, why
	}
	ob.Key.Namespace, ob.Key.Name = meta.Metadata.Namespace, meta.Metadata.Name
	ob.Specs = specs()
	ob.Notes.Add(manifest.NoteIsolates, "", "cannot be converted; what it selects is isolated: %v", why)
	return ob, nil
}

// KindDocument is the kind in the key of an isolating policy that cannot use the key in its own text, because the
// text has no valid key or another policy has the same key. For a document of a file, the name in the key is its
// position. For an object of an API server whose policy comes from another source, the name in the key is the
// object's kind and name.
const KindDocument = "Document"

// KindNamespaceIsolation is the kind in the key of a policy without a source, which isolates the pods of its namespace.
// It replaces policies that Sluice does not keep individually.
const KindNamespaceIsolation = "NamespaceIsolation"

// IsolateAs returns an object that isolates the pods which another object selects. The other object is valid, but
// cannot be enforced, for example because it exceeds a limit.
func IsolateAs(key Key, of Object, why error) Object {
	ob := isolated(key, why)
	for _, spec := range of.Specs {
		if !spec.Host { // a spec for the host selects no pods
			ob.Specs = append(ob.Specs, IsolateSpec(key, spec))
		}
	}
	return ob
}

// IsolateSpec returns a spec that isolates the subject of another spec in the directions of that spec. No other policy
// can allow the traffic that it denies.
func IsolateSpec(key Key, spec rule.Spec) rule.Spec {
	tier, priority := policytable.Isolation, int32(0)
	selects := spec.Selects
	for _, r := range spec.Rules {
		selects[r.Direction] = true
		switch {
		case r.Action != policytable.Deny || r.Tier > tier:
		case r.Tier < tier:
			tier, priority = r.Tier, r.Priority
		default:
			priority = min(priority, r.Priority)
		}
	}
	out := rule.Spec{Namespace: spec.Namespace, Subject: spec.Subject, Host: spec.Host}
	return isolate(out, key, selects, tier, priority)
}

// IsolateNamespace returns an object that isolates every pod in the key's namespace, or every pod if the key has no
// namespace. It replaces an object of the kind whose selected pods are unknown, and which may select any of
// these pods.
func IsolateNamespace(key Key, kind string, why error) Object {
	ob := isolated(key, why)
	spec := rule.Spec{Namespace: key.Namespace, Subject: selector.New()}
	if key.Namespace != "" {
		spec.Subject = selector.New(networkpolicy.InNamespace(key.Namespace))
	}
	tier := policytable.Normal // in this tier, no other policy can allow the denied traffic
	switch kind {
	case "NetworkPolicy":
		tier = policytable.Isolation
	case "ClusterNetworkPolicy", "AdminNetworkPolicy":
		tier = policytable.Admin
	case "BaselineAdminNetworkPolicy":
		tier = policytable.Baseline
	}
	ob.Specs = []rule.Spec{isolate(spec, key, [2]bool{true, true}, tier, 0)}
	return ob
}

// isolated returns an object with a key and without rules.
func isolated(key Key, why error) Object {
	ob := Object{Key: key, Isolates: why.Error()}
	ob.Notes.Add(manifest.NoteIsolates, "", "cannot be applied; what it selects is isolated: %v", why)
	return ob
}

// isolate adds the rules that deny all traffic of a subject in the selected directions.
func isolate(spec rule.Spec, key Key, selects [2]bool, tier policytable.Tier, priority int32) rule.Spec {
	source := policytable.Source{Kind: key.Kind, Namespace: key.Namespace, Name: key.Name}
	for i, has := range selects {
		if d := policytable.Direction(i); has {
			spec.Selects[d], spec.DefaultDeny[d] = true, tier == policytable.Isolation || tier == policytable.Normal
			spec.Rules = append(spec.Rules, rule.Isolate(source, d, tier, priority))
		}
	}
	return spec
}

// Namespaced reports whether objects of a kind belong to a namespace.
func Namespaced(kind string) bool { return kind == "NetworkPolicy" || kind == "CiliumNetworkPolicy" }

const groupKind = "CiliumCIDRGroup"

// CloseGroup returns a group whose addresses are unknown; why is the reason. Deny rules that refer to it apply to every
// address, and allow rules to none.
func (ob Object) CloseGroup(why error) Object {
	out := Object{
		Key: ob.Key, Unknown: ob.Unknown, Isolates: why.Error(),
		Group: &Group{Name: ob.Group.Name, Labels: ob.Group.Labels, Closed: true},
	}
	out.Notes.Add(manifest.NoteIsolates, "", closedGroupNote, why)
	return out
}

const closedGroupNote = "cannot be applied; deny rules apply to it as if it had every address, " +
	"allow rules as if it had none: %v"

// closedGroup returns a group of an API server that cannot be converted, so that its addresses are unknown.
func closedGroup(form Form, unknown []string, problems manifest.Problems) (Object, error) {
	for _, path := range unknown {
		problems.Add(path, "no such field")
	}
	var g cilium.CIDRGroup
	_, _ = form.Decode(&g) // its problems were already reported
	var named manifest.Problems
	if g.Metadata.Validate(false, &named); len(named) > 0 {
		return Object{}, problems
	}
	g.Spec.ExternalCIDRs = nil
	name, labels, _ := g.Group()
	ob := Object{Key: Key{Kind: groupKind, Name: name}, Group: &Group{Name: name, Labels: labels}}
	return ob.CloseGroup(problems), nil
}
