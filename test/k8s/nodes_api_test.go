// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"testing"

	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
)

// TestAPILabelsOfNodesAreSelectedByPolicies follows the labels of a Node object through ipam and the identity service
// of its node, and etcd, to identity and policy on another node.
func TestAPILabelsOfNodesAreSelectedByPolicies(t *testing.T) {
	a := newAPI(t)
	a.crds()
	nodes := map[string]object{"n1": {"zone": "west"}, "n2": {"zone": "east"}}
	for name, labels := range nodes {
		a.do(http.MethodPost, "/api/v1/nodes", object{
			"metadata": object{"name": name, "labels": labels},
			"spec":     object{"podCIDRs": []string{"10.0." + name[1:] + ".0/24"}},
		})
	}
	s := newIdentities(t, a)
	dir, err := os.MkdirTemp("", "sluice-node")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	other := &policyNode{t: t, dir: dir}
	second, _ := other.run("identity", "--node=n2", "--etcd-endpoints=unix://"+filepath.Join(a.dir, "etcd.sock"))
	t.Cleanup(func() { stop(t, second) })
	n2 := identityv1.NewClusterServiceClient(other.dial("identity"))
	for i, c := range []identityv1.ClusterServiceClient{s.cluster, n2} {
		if _, err := c.RegisterNode(t.Context(), &identityv1.RegisterNodeRequest{
			Underlay: &identityv1.Underlay{Addresses: []string{[]string{thisNode, servedAt}[i]}},
		}); err != nil {
			t.Fatal(err)
		}
	}
	for name, n := range map[string]*policyNode{"n1": s.policyNode, "n2": other} {
		ipam, _ := n.run("ipam", "--mode=kubernetes", "--kubernetes-kubeconfig="+a.ready.Kubeconfig,
			"--kubernetes-node="+name, "--identity="+filepath.Join(n.dir, "identity.sock"))
		t.Cleanup(func() { stop(t, ipam) })
	}
	answer, err := s.AllocateIdentity(t.Context(),
		&identityv1.AllocateIdentityRequest{Labels: shopLabels("web"), Reference: "web"})
	if err != nil {
		t.Fatal(err)
	}
	policy, _ := s.run("policy", "--sources-identity="+filepath.Join(s.dir, "identity.sock"),
		"--kubernetes-kubeconfig="+a.ready.Kubeconfig, "--cluster-node-labels")
	t.Cleanup(func() { stop(t, policy) })
	k := asker{policyv1.NewPolicyServiceClient(s.dial("policy")), t, answer.GetIdentity().GetNumber()}
	v := s.view()
	is := func(what, want string) (number uint32) {
		t.Helper()
		eventually(t, what, func() error {
			text, n := v.of(servedAt)
			number = n
			if text != want {
				return fmt.Errorf("%s is %q, want %q", servedAt, text, want)
			}
			return nil
		})
		return number
	}
	at := func(n uint32) *policyv1.Peer { return &policyv1.Peer{Identity: n, Address: servedAt} }

	east := is("the labels of the Node", "n2: node:zoneeast remote-node")
	eventually(t, "the labels of this node", func() error {
		if now, _ := v.host(); now != "node:zonewest host" {
			return fmt.Errorf("the host is %q", now)
		}
		return nil
	})
	a.do(http.MethodPost, cilium, manifest("cilium.io/v2", "CiliumNetworkPolicy", "shop", "east", `{
		"endpointSelector":{},
		"egress":[{"toNodes":[{"matchLabels":{"zone":"east"}}]}],
		"ingress":[{"fromNodes":[{"matchLabels":{"zone":"east"}}]}]}`))
	k.may("a node of the zone", at(east), true)
	k.may("a node of unknown labels", at(6), false)

	a.do(http.MethodPatch, "/api/v1/nodes/n2", object{"metadata": object{"labels": object{"zone": "west"}}})
	west := is("the Node is relabelled", "n2: node:zonewest remote-node")
	k.may("a node of another zone", at(west), false)
	k.may("the number of the zone", at(east), true)

	// More labels than an identity can have: the node then gets an identity with unknown labels.
	many := object{"zone": "east"}
	for i := range 300 {
		many[fmt.Sprint("more-", i)] = ""
	}
	a.do(http.MethodPatch, "/api/v1/nodes/n2", object{"metadata": object{"labels": many}})
	if n := is("too many labels", "n2: remote-node"); n != 6 {
		t.Errorf("the number of a node of unknown labels is %d, want 6", n)
	}
	for key := range many {
		many[key] = nil
	}
	many["zone"] = "east"
	a.do(http.MethodPatch, "/api/v1/nodes/n2", object{"metadata": object{"labels": many}})
	if n := is("fewer labels", "n2: node:zoneeast remote-node"); n != east {
		t.Errorf("the number of the zone is %d, before %d", n, east)
	}
}
