// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"slices"
	"testing"

	"google.golang.org/protobuf/proto"

	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

func TestWorkloadsWithoutKubernetesAreSelected(t *testing.T) {
	const (
		host, web, db, other, pod, podInDefault = 1, 300, 301, 302, 303, 304
	)
	ids := map[uint32]string{
		host: "reserved:host=", 9: "reserved:world-ipv4=", 10: "reserved:world-ipv6=",
		web: "cni:app=web", db: "cni:app=db", other: "generated:no-labels=",
		pod: "k8s:app=web " + namespaceLabel + "shop", podInDefault: "k8s:app=web " + namespaceLabel + "default",
	}
	for _, c := range []struct {
		name, manifest string
		pass           []uint32 // identities that may connect to db
	}{
		{
			"the selectors of a cluster-wide policy", `apiVersion: cilium.io/v2
kind: CiliumClusterwideNetworkPolicy
metadata: {name: db}
spec:
  endpointSelector: {matchLabels: {app: db}}
  ingress: [{fromEndpoints: [{matchLabels: {app: web}}]}]
`, []uint32{web, pod, podInDefault},
		},
		{
			"the label with its source", `apiVersion: cilium.io/v2
kind: CiliumClusterwideNetworkPolicy
metadata: {name: db}
spec:
  endpointSelector: {matchLabels: {"cni:app": db}}
  ingress: [{fromEndpoints: [{matchLabels: {"cni:app": web}}]}]
`, []uint32{web},
		},
		{
			"a policy of the namespace default", `apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: db}
spec:
  endpointSelector: {matchLabels: {app: db}}
  ingress: [{fromEndpoints: [{matchLabels: {app: web}}]}]
`, []uint32{web, podInDefault},
		},
		{
			"all of the namespace", `apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: db}
spec:
  podSelector: {}
  ingress: [{from: [{podSelector: {}}]}]
`, []uint32{web, other, podInDefault},
		},
		{
			"deny all, and labels", `apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: deny}
spec: {podSelector: {}}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: db}
spec:
  podSelector: {matchLabels: {app: db}}
  ingress: [{from: [{podSelector: {matchLabels: {app: web}}}]}]
`, []uint32{web, podInDefault},
		},
		{
			"the name of the namespace", `apiVersion: policy.networking.k8s.io/v1alpha2
kind: ClusterNetworkPolicy
metadata: {name: p}
spec:
  tier: Admin
  priority: 10
  subject: {pods: {namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: default}}, podSelector: {matchLabels: {app: db}}}}
  ingress:
  - {action: Accept, from: [{namespaces: {matchLabels: {kubernetes.io/metadata.name: default}}}]}
  - {action: Deny, from: [{namespaces: {}}]}
`, []uint32{web, other},
		},
		{
			"another namespace", `apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: db, namespace: shop}
spec:
  endpointSelector: {}
  ingress: [{fromEndpoints: [{}]}]
`, []uint32{web, other, pod, podInDefault},
		},
		{
			"the cluster, whose name no label says", `apiVersion: cilium.io/v2
kind: CiliumClusterwideNetworkPolicy
metadata: {name: db}
spec:
  endpointSelector: {matchLabels: {app: db}}
  ingress: [{fromEntities: [cluster]}]
  ingressDeny: [{fromEndpoints: [{matchLabels: {io.cilium.k8s.policy.cluster: elsewhere}}]}]
`, []uint32{web, other, pod, podInDefault},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := serve(t)
			s.know(ids)
			s.apply(c.manifest)
			for round := range 2 {
				for _, from := range []uint32{web, other, pod, podInDefault} {
					want := denied
					if slices.Contains(c.pass, from) {
						want = allowed
					}
					s.wantVerdict(from, db, 80, want)
				}
				if round == 0 {
					s.stop()
					s.start()
				}
			}
			// Labels that sluice-policy adds are not labels of the workload.
			is := func(labels []*workloadv1.Label, app string) bool {
				return len(labels) == 1 && proto.Equal(labels[0], &workloadv1.Label{Source: "cni", Key: "app", Value: app})
			}
			x, err := s.Explain(s.ctx(), &policyv1.ExplainRequest{From: &policyv1.Peer{Identity: web}, To: &policyv1.Peer{Identity: db}, Protocol: 6, Port: 80})
			if err != nil || !is(x.GetIngress().GetSubjectLabels(), "db") || !is(x.GetIngress().GetPeerLabels(), "web") {
				t.Errorf("explained: %v, %v", x, err)
			}
		})
	}
}
