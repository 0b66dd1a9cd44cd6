// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package policykind lists the kinds of policies and parses their names.
package policykind

import (
	"strings"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/kit/nearest"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
)

// Kind is a kind of policy with its names.
type Kind struct {
	Name       string
	plural     string
	short      string
	namespaced bool
	group      string
}

var kinds = []Kind{
	{"NetworkPolicy", "networkpolicies", "netpol", true, "networking.k8s.io"},
	{"CiliumNetworkPolicy", "ciliumnetworkpolicies", "cnp", true, "cilium.io"},
	{"CiliumClusterwideNetworkPolicy", "ciliumclusterwidenetworkpolicies", "ccnp", false, "cilium.io"},
	{"CiliumCIDRGroup", "ciliumcidrgroups", "ccg", false, "cilium.io"},
	{"ClusterNetworkPolicy", "clusternetworkpolicies", "kcnp", false, "policy.networking.k8s.io"},
	{"AdminNetworkPolicy", "adminnetworkpolicies", "anp", false, "policy.networking.k8s.io"},
	{"BaselineAdminNetworkPolicy", "baselineadminnetworkpolicies", "banp", false, "policy.networking.k8s.io"},
}

// Names returns the names of all kinds.
func Names() []string {
	names := make([]string, 0, len(kinds))
	for _, k := range kinds {
		names = append(names, k.Name)
	}
	return names
}

// IsPolicy reports whether an object with this API version and kind is a policy, or is probably meant as one: a
// misspelled policy must be refused, because skipping it would leave pods open. It includes the obsolete group
// "extensions", which the policy service refuses with an explanation.
func IsPolicy(apiVersion, kind string) bool {
	known := []nearest.Kind{{Group: "extensions", Name: "NetworkPolicy", Plural: "networkpolicies"}}
	for _, k := range kinds {
		known = append(known, nearest.Kind{Group: k.group, Name: k.Name, Plural: k.plural})
	}
	_, ok := nearest.KindOf(apiVersion, kind, known)
	return ok
}

// defaultNamespace is the namespace of objects without one.
const defaultNamespace = "default"

// Named finds a kind by its name, plural or short name, in any case.
func Named(text string) (Kind, error) {
	for _, k := range kinds {
		if strings.EqualFold(text, k.Name) || strings.EqualFold(text, k.plural) || strings.EqualFold(text, k.short) {
			return k, nil
		}
	}
	names, words := make([]string, 0, len(kinds)), make([]string, 0, 3*len(kinds))
	for _, k := range kinds {
		names = append(names, k.Name+" ("+k.short+")")
		words = append(words, k.Name, k.plural, k.short)
	}
	return Kind{}, invocation.Usagef("%q is not a kind of policy; the kinds are %s%s", text,
		strings.Join(names, ", "), nearest.Hint(text, words))
}

// KeyNamed returns the key for the arguments KIND and [NAMESPACE/]NAME.
func KeyNamed(kind, name, namespace string) (*policyv1.PolicyKey, error) {
	k, err := Named(kind)
	if err != nil {
		return nil, err
	}
	given, rest, found := strings.Cut(name, "/")
	switch {
	case found && !k.namespaced:
		return nil, invocation.Usagef("%q: a %s has no namespace", name, k.Name)
	case found:
		namespace, name = given, rest
	case !k.namespaced:
		namespace = ""
	case namespace == "":
		namespace = defaultNamespace
	}
	if name == "" || found && namespace == "" || strings.Contains(name, "/") {
		return nil, invocation.Usagef("%q is not NAME or NAMESPACE/NAME", given+"/"+rest)
	}
	return &policyv1.PolicyKey{Kind: k.Name, Namespace: namespace, Name: name}, nil
}

// KeysNamed returns the keys for the arguments KIND [NAMESPACE/]NAME... or KIND/[NAMESPACE/]NAME....
func KeysNamed(args []string, namespace string) ([]*policyv1.PolicyKey, error) {
	if len(args) == 0 {
		return nil, nil
	}
	kind, names := args[0], args[1:]
	together := strings.Contains(kind, "/")
	if together {
		names = args
	} else if len(names) == 0 {
		return nil, invocation.Usagef("%q: want a kind and a name, such as NetworkPolicy shop/web", kind)
	}
	keys := make([]*policyv1.PolicyKey, 0, len(names))
	for _, name := range names {
		if together {
			var found bool
			if kind, name, found = strings.Cut(name, "/"); !found {
				return nil, invocation.Usagef("%q is not KIND/NAME or KIND/NAMESPACE/NAME", kind)
			}
		}
		key, err := KeyNamed(kind, name, namespace)
		if err != nil {
			return nil, err
		}
		keys = append(keys, key)
	}
	return keys, nil
}

// KindsAmong returns the arguments after KIND that are also names of kinds, because the user probably did not mean
// policies of that name.
func KindsAmong(args []string) (kinds []string) {
	for i, name := range args {
		if _, err := Named(name); i > 0 && err == nil && !strings.Contains(args[0], "/") {
			kinds = append(kinds, name)
		}
	}
	return kinds
}

// Complete returns the key of a document with the namespace that the service would choose. An unknown kind stays
// unchanged; the service refuses it.
func Complete(key *policyv1.PolicyKey, namespace string) *policyv1.PolicyKey {
	full := &policyv1.PolicyKey{Kind: key.GetKind(), Namespace: key.GetNamespace(), Name: key.GetName()}
	if full.Namespace != "" {
		return full
	}
	for _, k := range kinds {
		if k.Name == full.Kind && k.namespaced {
			full.Namespace = namespace
			if namespace == "" {
				full.Namespace = defaultNamespace
			}
		}
	}
	return full
}

// KeyText returns "NetworkPolicy shop/web".
func KeyText(k *policyv1.PolicyKey) string {
	return strings.TrimSpace(k.GetKind() + " " + NameText(k))
}

// NameText returns "shop/web".
func NameText(k *policyv1.PolicyKey) string {
	if k.GetNamespace() != "" {
		return k.GetNamespace() + "/" + k.GetName()
	}
	return k.GetName()
}
