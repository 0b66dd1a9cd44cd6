// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package synthetic generates clusters of a realistic shape for benchmarks and load tests: namespaces of teams with
// apps, default denies, DNS and monitoring, allow lists between apps, denies, prefixes.
//
// The same arguments always give the same cluster.
package synthetic

import (
	"fmt"
	"math/rand/v2"
	"strings"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
)

// Shape is the size of a cluster.
type Shape struct {
	Namespaces int // each with Apps identities
	Apps       int
	Policies   int // spread evenly over the namespaces
	Subjects   int // identities with endpoints on the node
	// SubjectNamespaces is the number of namespaces to which the subjects belong; 0 means all namespaces.
	SubjectNamespaces int
}

// Name is the name of the identities' cluster.
const Name = "here"

// Cluster is the result of Make.
type Cluster struct {
	Identities []peer.Identity
	Manifests  []string // YAML
	Subjects   []identity.Numeric
}

// Namespace returns the name of a namespace.
func Namespace(i int) string { return fmt.Sprintf("ns-%03d", i) }

// Identity returns the identity of an app. An app number above the Shape's number of apps means a new app in an
// existing namespace.
func Identity(s Shape, namespace, app int) (peer.Identity, error) {
	ls := []label.Label{
		label.Kubernetes(label.KeyNamespace, Namespace(namespace)),
		label.Kubernetes(label.KeyCluster, Name),
		label.Kubernetes(label.KeyNamespaceLabels+"kubernetes.io/metadata.name", Namespace(namespace)),
		label.Kubernetes(label.KeyNamespaceLabels+"team", fmt.Sprintf("team-%02d", namespace%20)),
		label.Kubernetes(label.KeyNamespaceLabels+"env", []string{"prod", "stage", "dev"}[namespace%3]),
		label.Kubernetes("app", fmt.Sprintf("app-%02d", app)),
		label.Kubernetes("tier", []string{"front", "back", "data"}[app%3]),
	}
	return peer.New(identity.MinCluster+identity.Numeric(namespace*s.Apps+app), label.NewSet(ls...))
}

// Reserved returns the reserved identities that every node knows.
func Reserved() ([]peer.Identity, error) {
	var out []peer.Identity
	for n, name := range map[identity.Numeric]string{
		identity.Host: identity.NameHost, identity.RemoteNode: identity.NameRemoteNode, identity.Health: identity.NameHealth,
		identity.Ingress: identity.NameIngress, identity.WorldIPv4: identity.NameWorldIPv4, identity.WorldIPv6: identity.NameWorldIPv6,
	} {
		id, err := peer.New(n, label.NewSet(label.Reserved(name)))
		if err != nil {
			return nil, err
		}
		out = append(out, id)
	}
	return out, nil
}

// Make generates a cluster.
func Make(s Shape) (*Cluster, error) {
	c := &Cluster{}
	var err error
	if c.Identities, err = Reserved(); err != nil {
		return nil, err
	}
	for ns := range s.Namespaces {
		for app := range s.Apps {
			id, err := Identity(s, ns, app)
			if err != nil {
				return nil, err
			}
			c.Identities = append(c.Identities, id)
		}
	}
	r := rand.New(rand.NewPCG(uint64(s.Policies), uint64(s.Subjects)))
	per := s.Policies / s.Namespaces
	for ns := range s.Namespaces {
		for i := range per {
			c.Manifests = append(c.Manifests, manifest(r, s, ns, i))
		}
	}
	for i := range s.Subjects {
		ns, app := r.IntN(s.Namespaces), r.IntN(s.Apps)
		if s.SubjectNamespaces > 0 {
			ns, app = i%s.SubjectNamespaces, i/s.SubjectNamespaces%s.Apps
		}
		c.Subjects = append(c.Subjects, identity.MinCluster+identity.Numeric(ns*s.Apps+app))
	}
	return c, nil
}

func head(ns, i int, subject string) string {
	return fmt.Sprintf("apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: p%03d, namespace: %s}\nspec:\n  endpointSelector: %s\n",
		i, Namespace(ns), subject)
}

// manifest returns the i-th policy of a namespace. The first three are the same in every namespace; each of the others
// belongs to one app.
func manifest(r *rand.Rand, s Shape, ns, i int) string {
	switch i {
	case 0:
		return fmt.Sprintf("apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: default-deny, namespace: %s}\n"+
			"spec: {podSelector: {}, policyTypes: [Ingress, Egress]}\n", Namespace(ns))
	case 1:
		return head(ns, i, "{}") + "  egress:\n  - toEndpoints: [{matchLabels: {\"k8s:io.kubernetes.pod.namespace\": ns-000, app: app-00}}]\n" +
			"    toPorts: [{ports: [{port: \"53\", protocol: ANY}]}]\n"
	case 2:
		return head(ns, i, "{}") + "  ingress:\n  - fromEndpoints: [{matchLabels: {\"k8s:io.kubernetes.pod.namespace\": ns-000, app: app-01}}]\n" +
			"    toPorts: [{ports: [{port: \"9090\", protocol: TCP}]}]\n"
	}
	app := func() string { return fmt.Sprintf("app-%02d", r.IntN(s.Apps)) }
	ports := func() string {
		list := make([]string, 1+r.IntN(3))
		for j := range list {
			list[j] = fmt.Sprintf("{port: \"%d\", protocol: TCP}", []int{80, 443, 8080, 5432, 6379, 9000}[r.IntN(6)])
		}
		return "    toPorts: [{ports: [" + strings.Join(list, ", ") + "]}]\n"
	}
	b := head(ns, i, "{matchLabels: {app: "+app()+"}}") + "  ingress:\n"
	switch k := r.IntN(100); {
	case k < 60: // apps of this or another namespace
		var peers []string
		for range 1 + r.IntN(8) {
			other := ns
			if r.IntN(4) == 0 {
				other = r.IntN(s.Namespaces)
			}
			peers = append(peers, fmt.Sprintf("{matchLabels: {\"k8s:io.kubernetes.pod.namespace\": %s, app: %s}}", Namespace(other), app()))
		}
		b += "  - fromEndpoints: [" + strings.Join(peers, ", ") + "]\n" + ports()
	case k < 72: // a team
		b += fmt.Sprintf("  - fromEndpoints: [{matchLabels: {\"k8s:io.cilium.k8s.namespace.labels.team\": team-%02d}}]\n", r.IntN(20)) + ports()
	case k < 80: // a namespace
		b += fmt.Sprintf("  - fromEndpoints: [{matchLabels: {\"k8s:io.kubernetes.pod.namespace\": %s}}]\n", Namespace(r.IntN(s.Namespaces))) + ports()
	case k < 84: // all except one tier
		b += fmt.Sprintf("  - fromEndpoints: [{matchExpressions: [{key: tier, operator: NotIn, values: [%s]}]}]\n", []string{"front", "back", "data"}[r.IntN(3)]) + ports()
	case k < 88: // the whole cluster
		b += "  - fromEntities: [cluster]\n" + ports()
	default: // outside
		var blocks []string
		for range 50 {
			blocks = append(blocks, fmt.Sprintf("203.%d.%d.0/%d", r.IntN(256), r.IntN(256), 20+r.IntN(9)))
		}
		b += "  - fromCIDR: [" + strings.Join(blocks, ", ") + "]\n" + ports()
	}
	if r.IntN(10) == 0 {
		b += fmt.Sprintf("  ingressDeny:\n  - fromEndpoints: [{matchLabels: {\"k8s:io.kubernetes.pod.namespace\": %s, app: %s}}]\n", Namespace(r.IntN(s.Namespaces)), app())
	}
	if r.IntN(2) == 0 {
		b += fmt.Sprintf("  egress:\n  - toEndpoints: [{matchLabels: {\"k8s:io.kubernetes.pod.namespace\": %s, app: %s}}]\n", Namespace(r.IntN(s.Namespaces)), app()) + ports()
	}
	return b
}
