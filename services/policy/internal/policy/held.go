// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policy

import (
	"errors"
	"slices"
	"strings"

	"github.com/sluice-net/sluice/services/policy/internal/adminpolicy"
	"github.com/sluice-net/sluice/services/policy/internal/cilium"
	"github.com/sluice-net/sluice/services/policy/internal/manifest"
	"github.com/sluice-net/sluice/services/policy/internal/networkpolicy"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
)

// DecodeHeld converts an object that an API server holds, which cannot be
// refused any more. What has a clear meaning is taken by it, with a note. What
// cannot be converted isolates what it selects: without it, more would be
// allowed than its author wrote. So does a field of the spec that is not known
// here: it may narrow a rule. The error is that of an object that is no policy
// or has no name, or of a group, which selects nothing.
func DecodeHeld(form Form, o rule.Options) (Object, error) {
	ob, err := Decode(form, o)
	var problems manifest.Problems
	if err != nil && !errors.As(err, &problems) {
		return ob, err
	}
	unknown := slices.ContainsFunc(ob.Unknown, func(path string) bool {
		return manifest.Within(path, "spec") || manifest.Within(path, "specs")
	})
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

// Isolate converts an object that cannot be converted, for the given reason,
// into rules that isolate what it selects. The error is the reason if that is
// not possible.
func Isolate(form Form, why error) (Object, error) {
	version, kind := form.Type()
	if !IsKind(version, kind) || kind == "CiliumCIDRGroup" {
		return Object{}, why
	}
	ob := Object{Key: Key{Kind: kind}, Isolates: why.Error()}
	var problems manifest.Problems
	read := func(into any) (bad func(path string) bool) {
		unknown, err := form.Decode(into)
		errors.As(err, &problems) //nolint:errcheck // Decode returns nothing else
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

// Namespaced reports whether objects of a kind belong to a namespace.
func Namespaced(kind string) bool { return kind == "NetworkPolicy" || kind == "CiliumNetworkPolicy" }
