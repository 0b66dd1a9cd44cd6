// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package policy holds policy objects of every kind in the form the engine
// takes: a key, and what the object says as rules or as an address group.
//
// Decode is the one way to an Object, from the document of a manifest or from the
// text of an object that an API server holds. It refuses what the kinds' own packages refuse.
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

	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/services/policy/internal/adminpolicy"
	"github.com/sluice-net/sluice/services/policy/internal/cilium"

	"github.com/sluice-net/sluice/services/policy/internal/manifest"
	"github.com/sluice-net/sluice/services/policy/internal/networkpolicy"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
)

// Key names an object.
type Key struct {
	Kind      string
	Namespace string // empty for cluster-wide kinds
	Name      string
}

// String is KIND NAMESPACE/NAME.
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

// NodeStorage is the key by which the report of a node names its disk beside policies.
var NodeStorage = Key{Kind: "Node", Name: "storage"}

// Group is a named set of prefixes that rules select by its labels.
type Group struct {
	Name     string
	Labels   label.Set
	Prefixes []netip.Prefix
	// Closed says that it is not known which addresses are in the group: a deny rule
	// applies as if all were, and other rules as if none were.
	Closed bool
}

// Object is one policy or one group.
type Object struct {
	Key   Key
	Specs []rule.Spec // of a policy
	Group *Group      // of a group
	// Unknown are the paths of fields that were dropped: the kind has none of
	// that name. Of many, the first are listed.
	Unknown []string
	// Notes are what the author should know of how the manifest was taken.
	Notes manifest.Notes
	// Isolates is why the policy could not be converted. The rules are those that
	// isolate what it selects.
	Isolates string
}

// maxWeight is how many peers and ports the rules of one object may list, each
// list counted for every rule that has it: an object of a few megabytes can
// join a long list of peers with each of a long list of ports.
const maxWeight = 400_000

// versions are those of each kind that are understood, the best first: an API
// server may have the objects of a kind in several.
var versions = map[string][]string{
	"NetworkPolicy":                  {"networking.k8s.io/v1"},
	"CiliumNetworkPolicy":            {"cilium.io/v2"},
	"CiliumClusterwideNetworkPolicy": {"cilium.io/v2"},
	"CiliumCIDRGroup":                {"cilium.io/v2", "cilium.io/v2alpha1"},
	"ClusterNetworkPolicy":           {"policy.networking.k8s.io/v1beta1", "policy.networking.k8s.io/v1alpha2"},
	"AdminNetworkPolicy":             {"policy.networking.k8s.io/v1alpha1"},
	"BaselineAdminNetworkPolicy":     {"policy.networking.k8s.io/v1alpha1"},
}

// Kinds are all kinds, sorted.
func Kinds() []string { return slices.Sorted(maps.Keys(versions)) }

// Versions are the versions of a kind that are understood, the best first; none
// of a kind that is not.
func Versions(kind string) []string { return slices.Clone(versions[kind]) }

// IsKind reports whether objects of this version and kind can be decoded.
func IsKind(apiVersion, kind string) bool { return slices.Contains(versions[kind], apiVersion) }

// Struct is what Decode reads objects of a kind into; nil of a kind that is not
// known.
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

// Form is an object as its source has it: a manifest.Document, or a Written.
type Form interface {
	// Type is its version and kind.
	Type() (apiVersion, kind string)
	// Decode fills a pointer to the struct of its kind and returns the paths of
	// fields that the struct does not have. The error is manifest.Problems.
	Decode(into any) (unknown []string, err error)
}

// Decode reads, validates and converts an object. The error is manifest.Problems
// when the object is of a known kind. With problems that leave its meaning clear
// the object is returned beside the error, for a caller that is not bound to the
// schema.
func Decode(form Form, o rule.Options) (Object, error) {
	version, kind := form.Type()
	if !IsKind(version, kind) {
		return Object{}, notAPolicy(form)
	}
	switch kind {
	case "NetworkPolicy":
		var p networkpolicy.NetworkPolicy
		return decode(form, &p, &p.Meta,
			func() manifest.Problems { return p.Validate() },
			func(ob *Object) { ob.Specs = []rule.Spec{p.Rules(o)} })
	case "CiliumNetworkPolicy", "CiliumClusterwideNetworkPolicy":
		var p cilium.NetworkPolicy
		namespaced := kind == "CiliumNetworkPolicy"
		return decode(form, &p, &p.Meta,
			func() manifest.Problems { return p.Validate(namespaced, o) },
			func(ob *Object) {
				ob.Specs = p.Rules(namespaced, o)
				ob.Notes = p.Notes(o)
			})
	case "CiliumCIDRGroup":
		var g cilium.CIDRGroup
		return decode(form, &g, &g.Meta,
			func() manifest.Problems { return g.Validate() },
			func(ob *Object) {
				ob.Group = &Group{}
				ob.Group.Name, ob.Group.Labels, ob.Group.Prefixes = g.Group()
			})
	case "ClusterNetworkPolicy":
		var p adminpolicy.Policy
		return decode(form, &p, &p.Meta,
			func() manifest.Problems { return p.Validate(o) },
			func(ob *Object) { ob.Specs, ob.Notes = []rule.Spec{p.Rules(o)}, p.Notes() })
	default:
		var p adminpolicy.OldPolicy
		baseline := strings.HasPrefix(kind, "Baseline")
		return decode(form, &p, &p.Meta,
			func() manifest.Problems { return p.Validate(baseline, o) },
			func(ob *Object) { ob.Specs, ob.Notes = []rule.Spec{p.Rules(baseline, o)}, p.Notes() })
	}
}

// notAPolicy is why an object of another version or kind is none.
func notAPolicy(form Form) error {
	version, kind := form.Type()
	if version == "" || kind == "" { // missing, or of another type
		var head struct {
			APIVersion string `json:"apiVersion"`
			Kind       string `json:"kind"`
		}
		_, err := form.Decode(&head)
		var problems manifest.Problems
		errors.As(err, &problems) //nolint:errcheck // Decode returns nothing else
		problems = slices.DeleteFunc(problems, func(p manifest.Problem) bool {
			return !p.Stops && p.Path != "apiVersion" && p.Path != "kind"
		})
		if len(problems) > 0 {
			return problems
		}
	}
	group, _, _ := strings.Cut(version, "/")
	switch {
	case version == "" && kind == "":
		return manifest.Problems{{Text: "apiVersion and kind are missing"}}
	case kind == "":
		return manifest.Problems{{Path: "kind", Text: "is missing; apiVersion is " + version}}
	case version == "" && versions[kind] != nil:
		return manifest.Problems{{Path: "apiVersion", Text: "is missing; that of " + kind + " is " + versions[kind][0]}}
	case version == "":
		return manifest.Problems{{Path: "apiVersion", Text: "is missing; kind is " + kind}}
	case versions[kind] != nil:
		return fmt.Errorf("%s is not known in the version %s, but in %s", kind, version, strings.Join(versions[kind], ", "))
	case group == "cilium.io":
		return fmt.Errorf("%s %s is a kind of Cilium that Sluice does not implement; what it asks for does not happen",
			version, kind)
	}
	return fmt.Errorf("%s %s is not a kind of policy", version, kind)
}

func decode(form Form, into any, meta *networkpolicy.Meta, validate func() manifest.Problems, convert func(*Object)) (Object, error) {
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

// check refuses what only the rules of a subject together show.
func check(rules []*rule.Rule, problems *manifest.Problems) {
	weight := 0
	for _, r := range rules {
		if weight += r.Weight(); weight > maxWeight {
			problems.Add(r.Source.Path, "is too large: together with the rules before it, it lists more than %d peers and ports, each counted for every rule", maxWeight)
			return
		}
	}
	if a, b, found := rule.Conflict(rules); found {
		problems.Add(b.Source.Path, "sends to the proxy for %s what %s sends to the one for %s: the same ports of the same peers cannot go to both",
			b.Proxy, a.Source.Path, a.Proxy)
	}
}
