// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package policy defines policy objects of every kind in the form that the engine needs: a key, and rules or an
// address group.
//
// Decode is the only way to create an Object, from the document of a manifest or from the text of an object that an API
// server holds. It rejects an object if the package of its kind rejects it.
package policy

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"

	"github.com/sluice-net/sluice/kit/nearest"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/services/policy/internal/adminpolicy"
	"github.com/sluice-net/sluice/services/policy/internal/cilium"

	"github.com/sluice-net/sluice/services/policy/internal/manifest"
	"github.com/sluice-net/sluice/services/policy/internal/networkpolicy"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
)

// Key identifies an object.
type Key struct {
	Kind      string
	Namespace string // empty for cluster-wide kinds
	Name      string
}

// String returns KIND NAMESPACE/NAME.
func (k Key) String() string {
	if k.Namespace == "" {
		return k.Kind + " " + k.Name
	}
	return k.Kind + " " + k.Namespace + "/" + k.Name
}

// Compare orders keys by kind, namespace and name.
func (k Key) Compare(o Key) int {
	return cmp.Or(strings.Compare(k.Kind, o.Kind), strings.Compare(k.Namespace, o.Namespace), strings.Compare(k.Name, o.Name))
}

// NodeStorage is the key under which a node reports its disk among the policies.
var NodeStorage = Key{Kind: "Node", Name: "storage"}

// Group is a named set of prefixes. Rules select groups by label.
type Group struct {
	Name     string
	Labels   label.Set
	Prefixes []netip.Prefix
	// Closed means that the addresses of the group are unknown: a deny rule applies as if the group contained every
	// address, and other rules as if it contained none.
	Closed bool
}

// Object is a policy or a group.
type Object struct {
	Key   Key
	Specs []rule.Spec // for a policy
	Group *Group      // for a group
	// Unknown lists the paths of fields that were dropped because the kind does not have them. A long list is
	// truncated.
	Unknown []string
	// Notes are remarks about the conversion of the manifest for its author.
	Notes manifest.Notes
	// Isolates is the reason for which the policy could not be converted; empty if it could. If set, the rules
	// isolate the pods that the policy selects.
	Isolates string
}

// maxWeight limits the number of peers and ports in all rules of one object. A list that several rules contain counts
// once per rule: otherwise an object of a few megabytes could combine a long list of peers with each entry of a long
// list of ports.
const maxWeight = 400_000

// versions lists the supported versions of each kind, preferred version first. An API server may serve several
// versions of a kind.
var versions = map[string][]string{
	"NetworkPolicy":                  {"networking.k8s.io/v1"},
	"CiliumNetworkPolicy":            {"cilium.io/v2"},
	"CiliumClusterwideNetworkPolicy": {"cilium.io/v2"},
	"CiliumCIDRGroup":                {"cilium.io/v2", "cilium.io/v2alpha1"},
	"ClusterNetworkPolicy":           {"policy.networking.k8s.io/v1beta1", "policy.networking.k8s.io/v1alpha2"},
	"AdminNetworkPolicy":             {"policy.networking.k8s.io/v1alpha1"},
	"BaselineAdminNetworkPolicy":     {"policy.networking.k8s.io/v1alpha1"},
}

// Kinds returns all kinds, sorted.
func Kinds() []string { return slices.Sorted(maps.Keys(versions)) }

// Versions returns the supported versions of a kind, preferred version first; none for an unknown kind.
func Versions(kind string) []string { return slices.Clone(versions[kind]) }

// IsKind reports whether objects of this version and kind can be decoded.
func IsKind(apiVersion, kind string) bool { return slices.Contains(versions[kind], apiVersion) }

// similarKinds are the kinds with their API groups, and NetworkPolicy in its obsolete group.
var similarKinds = func() []nearest.Kind {
	all := []nearest.Kind{{Group: "extensions", Name: "NetworkPolicy", Plural: "networkpolicies"}}
	for _, kind := range Kinds() {
		plural := strings.ToLower(kind) + "s"
		if stem, ok := strings.CutSuffix(plural, "ys"); ok {
			plural = stem + "ies"
		}
		for _, version := range versions[kind] {
			group, _, _ := strings.Cut(version, "/")
			all = append(all, nearest.Kind{Group: group, Name: kind, Plural: plural})
		}
	}
	return all
}()

// IsGroup reports whether the group of an API version is a group of policies, also if it is misspelled or missing.
func IsGroup(apiVersion string) bool { return nearest.IsGroup(apiVersion, similarKinds) }

// Similar returns the kind of policy that an object probably means whose API version or kind is wrong.
func Similar(apiVersion, kind string) (string, bool) {
	k, ok := nearest.KindOf(apiVersion, kind, similarKinds)
	return k.Name, ok
}

// Struct returns the struct into which Decode decodes objects of a kind; nil for an unknown kind.
func Struct(kind string) reflect.Type {
	switch kind {
	case "NetworkPolicy":
		return reflect.TypeFor[networkpolicy.NetworkPolicy]()
	case "CiliumNetworkPolicy", "CiliumClusterwideNetworkPolicy":
		return reflect.TypeFor[cilium.NetworkPolicy]()
	case "CiliumCIDRGroup":
		return reflect.TypeFor[cilium.CIDRGroup]()
	case "ClusterNetworkPolicy":
		return reflect.TypeFor[adminpolicy.Policy]()
	case "AdminNetworkPolicy", "BaselineAdminNetworkPolicy":
		return reflect.TypeFor[adminpolicy.OldPolicy]()
	}
	return nil
}

// Form is an object in the form of its source: a manifest.Document or a Written.
type Form interface {
	// Type returns the API version and kind.
	Type() (apiVersion, kind string)
	// Decode decodes into a pointer to the struct of its kind, and returns the paths of fields that the struct does
	// not have. The error is manifest.Problems.
	Decode(into any) (unknown []string, err error)
}

// Decode decodes, validates and converts an object. If its kind is known, the error is manifest.Problems. If the
// meaning is clear in spite of the problems, Decode returns both the object and the error, for callers that need not
// enforce the schema.
func Decode(form Form, o rule.Options) (Object, error) {
	version, kind := form.Type()
	if !IsKind(version, kind) {
		return Object{}, notAPolicy(form)
	}
	switch kind {
	case "NetworkPolicy":
		var p networkpolicy.NetworkPolicy
		return decode(form, &p, &p.Meta, o,
			func() manifest.Problems { return p.Validate() },
			func(ob *Object) { ob.Specs, ob.Notes = []rule.Spec{p.Rules(o)}, p.Notes() })
	case "CiliumNetworkPolicy", "CiliumClusterwideNetworkPolicy":
		var p cilium.NetworkPolicy
		namespaced := kind == "CiliumNetworkPolicy"
		return decode(form, &p, &p.Meta, o,
			func() manifest.Problems { return p.Validate(namespaced, o) },
			func(ob *Object) {
				ob.Specs = p.Rules(namespaced, o)
				ob.Notes = p.Notes(o)
			})
	case "CiliumCIDRGroup":
		var g cilium.CIDRGroup
		return decode(form, &g, &g.Meta, o,
			func() manifest.Problems { return g.Validate() },
			func(ob *Object) {
				ob.Group = &Group{}
				ob.Group.Name, ob.Group.Labels, ob.Group.Prefixes = g.Group()
			})
	case "ClusterNetworkPolicy":
		var p adminpolicy.Policy
		return decode(form, &p, &p.Meta, o,
			func() manifest.Problems { return p.Validate(o) },
			func(ob *Object) { ob.Specs, ob.Notes = []rule.Spec{p.Rules(o)}, p.Notes(o) })
	default:
		var p adminpolicy.OldPolicy
		baseline := strings.HasPrefix(kind, "Baseline")
		return decode(form, &p, &p.Meta, o,
			func() manifest.Problems { return p.Validate(baseline, o) },
			func(ob *Object) { ob.Specs, ob.Notes = []rule.Spec{p.Rules(baseline, o)}, p.Notes(o) })
	}
}

// notAPolicy returns an error that states why an object with an unknown version or kind is not a policy.
func notAPolicy(form Form) error {
	version, kind := form.Type()
	if version == "" || kind == "" { // missing, or of a wrong type
		var head struct {
			APIVersion string `json:"apiVersion"`
			Kind       string `json:"kind"`
		}
		_, err := form.Decode(&head)
		var problems manifest.Problems
		errors.As(err, &problems) //nolint:errcheck // Decode returns no other errors
		problems = slices.DeleteFunc(problems, func(p manifest.Problem) bool {
			return !p.Stops && p.Path != "apiVersion" && p.Path != "kind"
		})
		if len(problems) > 0 {
			return problems
		}
	}
	group, _, _ := strings.Cut(version, "/")
	similar, misspelled := Similar(version, strings.TrimSuffix(kind, "List"))
	switch {
	case version == "" && kind == "":
		return manifest.Problems{{Text: "apiVersion and kind are missing"}}
	case kind == "":
		return manifest.Problems{{Path: "kind", Text: "is missing; apiVersion is " + version}}
	case version == "" && versions[kind] != nil:
		return manifest.Problems{{Path: "apiVersion", Text: "is missing; it is " + versions[kind][0] + " for " + kind}}
	case version == "":
		return manifest.Problems{{Path: "apiVersion", Text: "is missing; kind is " + kind}}
	case versions[kind] != nil:
		return fmt.Errorf("%s is not supported in version %s, only in %s", kind, version, strings.Join(versions[kind], ", "))
	case misspelled:
		return fmt.Errorf("%s %s is not a kind of policy; did you mean %s?", version, kind, similar)
	case group == "cilium.io":
		return fmt.Errorf("%s %s is a kind of Cilium that Sluice does not implement; it has no effect",
			version, kind)
	}
	return fmt.Errorf("%s %s is not a kind of policy", version, kind)
}

func decode(
	form Form, into any, meta *networkpolicy.Meta, o rule.Options, validate func() manifest.Problems,
	convert func(*Object),
) (Object, error) {
	unknown, err := form.Decode(into)
	if err != nil {
		return Object{}, err
	}
	problems := validate()
	_, kind := form.Type()
	ob := Object{
		Key:     Key{Kind: kind, Namespace: meta.Metadata.Namespace, Name: meta.Metadata.Name},
		Unknown: unknown,
	}
	if !problems.Meaningful() {
		return ob, problems
	}
	convert(&ob)
	for i := range ob.Specs {
		s := &ob.Specs[i]
		s.HasDNSRule = rule.WithQueries(s.Rules, o) || s.HasDNSRule
	}
	for _, spec := range ob.Specs {
		if check(spec.Rules, &problems); !problems.Meaningful() {
			return Object{Key: ob.Key, Unknown: unknown}, problems
		}
	}
	for _, spec := range ob.Specs {
		if why := spec.Subject.Contradiction(); why != "" {
			ob.Notes.Add(manifest.NoteSelectsNothing, "spec", "selects nothing: no labels match %s", why)
		}
	}
	return ob, problems.Err()
}

// check rejects combinations of rules that are invalid although each rule is valid.
func check(rules []*rule.Rule, problems *manifest.Problems) {
	weight := 0
	for _, r := range rules {
		if weight += r.Weight(); weight > maxWeight {
			problems.Add(r.Source.Path, "is too large: together with the rules before it, it lists more than %d peers and ports, each counted for every rule", maxWeight)
			return
		}
	}
	if a, b, found := rule.Conflict(rules); found {
		problems.Add(b.Source.Path,
			"redirects to the proxy for %s, but %s redirects the same ports of the same peers to the proxy for %s",
			b.Proxy, a.Source.Path, a.Proxy)
	}
}
