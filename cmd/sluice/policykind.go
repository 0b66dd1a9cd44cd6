// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"slices"
	"strings"

	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
)

// policyKind is a kind of policy as a person may write it.
type policyKind struct {
	name       string
	plural     string
	short      string
	namespaced bool
	group      string
}

var policyKinds = []policyKind{
	{"NetworkPolicy", "networkpolicies", "netpol", true, "networking.k8s.io"},
	{"CiliumNetworkPolicy", "ciliumnetworkpolicies", "cnp", true, "cilium.io"},
	{"CiliumClusterwideNetworkPolicy", "ciliumclusterwidenetworkpolicies", "ccnp", false, "cilium.io"},
	{"CiliumCIDRGroup", "ciliumcidrgroups", "ccg", false, "cilium.io"},
	{"ClusterNetworkPolicy", "clusternetworkpolicies", "kcnp", false, "policy.networking.k8s.io"},
	{"AdminNetworkPolicy", "adminnetworkpolicies", "anp", false, "policy.networking.k8s.io"},
	{"BaselineAdminNetworkPolicy", "baselineadminnetworkpolicies", "banp", false, "policy.networking.k8s.io"},
}

// isPolicyKind reports whether objects of a group and kind are policies. Whether
// they are of a version that is known is for the policy service to judge.
func isPolicyKind(group, kind string) bool {
	return slices.ContainsFunc(policyKinds, func(k policyKind) bool { return k.group == group && k.name == kind })
}

// defaultNamespace is where objects are that name no namespace.
const defaultNamespace = "default"

// kindNamed finds a kind by its name, plural or short name, in any case.
func kindNamed(text string) (policyKind, error) {
	for _, k := range policyKinds {
		if strings.EqualFold(text, k.name) || strings.EqualFold(text, k.plural) || strings.EqualFold(text, k.short) {
			return k, nil
		}
	}
	names := make([]string, 0, len(policyKinds))
	for _, k := range policyKinds {
		names = append(names, k.name+" ("+k.short+")")
	}
	return policyKind{}, usagef("%q is not a kind of policy; there are %s", text, strings.Join(names, ", "))
}

// keyNamed is the key of the arguments KIND and [NAMESPACE/]NAME.
func keyNamed(kind, name, namespace string) (*policyv1.PolicyKey, error) {
	k, err := kindNamed(kind)
	if err != nil {
		return nil, err
	}
	given, rest, found := strings.Cut(name, "/")
	switch {
	case found && !k.namespaced:
		return nil, usagef("%q: a %s has no namespace", name, k.name)
	case found:
		namespace, name = given, rest
	case !k.namespaced:
		namespace = ""
	case namespace == "":
		namespace = defaultNamespace
	}
	if name == "" || found && namespace == "" || strings.Contains(name, "/") {
		return nil, usagef("%q is not NAME or NAMESPACE/NAME", given+"/"+rest)
	}
	return &policyv1.PolicyKey{Kind: k.name, Namespace: namespace, Name: name}, nil
}

// complete is a document's key with the namespace that the service would give
// it. The kind is taken as it is: the service refuses one that it does not
// know.
func complete(key *policyv1.PolicyKey, namespace string) *policyv1.PolicyKey {
	full := &policyv1.PolicyKey{Kind: key.GetKind(), Namespace: key.GetNamespace(), Name: key.GetName()}
	if full.Namespace != "" {
		return full
	}
	for _, k := range policyKinds {
		if k.name == full.Kind && k.namespaced {
			full.Namespace = namespace
			if namespace == "" {
				full.Namespace = defaultNamespace
			}
		}
	}
	return full
}

// keyText is "NetworkPolicy shop/web".
func keyText(k *policyv1.PolicyKey) string {
	name := k.GetName()
	if k.GetNamespace() != "" {
		name = k.GetNamespace() + "/" + name
	}
	return strings.TrimSpace(k.GetKind() + " " + name)
}
