// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
)

// TestAPINodeClaimsOnlyThePodCIDRsOfItsNode: the process that writes status, with the rights of the manifests,
// publishes the podCIDRs of all Nodes. A node that claims more ranges gets only the podCIDRs of its Node, and a node
// that joins later gets its own. The cluster also works without the process that writes status.
func TestAPINodeClaimsOnlyThePodCIDRsOfItsNode(t *testing.T) {
	api := newAPI(t)
	s := newIdentities(t, api)
	a := statusAPIOf(t, api)
	node := func(name string, podCIDRs ...string) {
		a.do(http.MethodPost, "/api/v1/nodes", object{
			"metadata": object{"name": name}, "spec": object{"podCIDRs": podCIDRs},
		})
	}
	node("n1", "10.0.1.0/24", "fd00:0:0:1::/64")
	node("liar", "10.0.2.0/24", "fd00:0:0:2::/64")
	processes := map[string]*policyNode{"n1": s.policyNode}
	ipam := func(name string) {
		p, _ := processes[name].run("ipam", "--mode=kubernetes", "--kubernetes-kubeconfig="+a.ready.Kubeconfig,
			"--kubernetes-node="+name, "--identity="+filepath.Join(processes[name].dir, "identity.sock"))
		t.Cleanup(func() { stop(t, p) })
	}
	joins := func(name string) identityv1.ClusterServiceClient {
		p := &policyNode{t: t, dir: shortDir(t)}
		process, _ := p.run("identity", "--node="+name, "--etcd-endpoints="+s.etcd)
		t.Cleanup(func() { stop(t, process) })
		processes[name] = p
		return identityv1.NewClusterServiceClient(p.dial("identity"))
	}
	ipam("n1")
	liar := joins("liar")
	// ranges waits until the first node, and one more process, have these holders of ranges, and reject this number
	// of other claims.
	var observers []identityv1.ClusterServiceClient
	ranges := func(what string, want map[string]string, refused map[string]int) {
		t.Helper()
		for i, c := range observers {
			eventually(t, fmt.Sprintf("%s, as process %d has it", what, i), func() error {
				have, no, err := holders(t, c)
				if err == nil && (!maps.Equal(have, want) || !maps.Equal(no, refused)) {
					err = fmt.Errorf("the ranges are %v, refused are %v", have, no)
				}
				return err
			})
		}
	}
	assigned := func(what string, want bool) {
		t.Helper()
		eventually(t, what, func() error {
			resp, err := s.GetStatus(t.Context(), &identityv1.GetStatusRequest{})
			if got := resp.GetCluster().GetAssignmentError(); err == nil && (got == "") != want {
				err = fmt.Errorf("the status says %q", got)
			}
			return err
		})
	}
	observers = append(observers, s.cluster, joins("watcher"))
	lie := []string{
		"10.0.2.0/24", "fd00:0:0:2::/64", "10.0.3.0/24", "fd00:0:0:3::/64", "172.16.0.0/12", "fd01::/16", "192.0.2.0/24",
	}
	claim := func() {
		t.Helper()
		if _, err := liar.RegisterNode(t.Context(), &identityv1.RegisterNodeRequest{
			PodRanges: &identityv1.PodRanges{Prefixes: lie},
			Ipam:      &identityv1.IPAMSettings{Mode: identityv1.IPAMMode_IPAM_MODE_KUBERNETES},
		}); err != nil {
			t.Fatal(err)
		}
	}
	claim()
	// No ranges are published yet, so only the size of a range is limited.
	own := map[string]string{
		"10.0.1.0/24": "n1", "fd00:0:0:1::/64": "n1", "10.0.2.0/24": "liar", "fd00:0:0:2::/64": "liar",
	}
	open := maps.Clone(own)
	for _, p := range []string{"10.0.3.0/24", "fd00:0:0:3::/64", "192.0.2.0/24"} {
		open[p] = "liar"
	}
	ranges("before a writer ran", open, map[string]int{"liar": 2})
	assigned("the status before a writer ran", false)

	w := a.writer("--identity=" + filepath.Join(s.dir, "identity.sock"))
	ranges("once the podCIDRs are published", own, map[string]int{"liar": 5})
	assigned("the status once the podCIDRs are published", true)
	node("late", "10.0.3.0/24", "fd00:0:0:3::/64")
	joins("late")
	ipam("late")
	all := maps.Clone(own)
	all["10.0.3.0/24"], all["fd00:0:0:3::/64"] = "late", "late"
	ranges("a node joins", all, map[string]int{"liar": 5})

	// A kubelet may set the podCIDRs of a Node that it creates.
	a.do(http.MethodDelete, "/api/v1/nodes/liar", nil)
	node("liar", "10.0.0.0/14", "fd00:0:0:3::/65")
	node("later", "10.0.4.0/24")
	joins("later")
	ipam("later")
	all["10.0.4.0/24"] = "later"
	ranges("a Node overlaps others", all, map[string]int{"liar": 5})

	w.end(syscall.SIGTERM)
	observers = append(observers, joins("fresh"))
	ranges("without a writer", all, map[string]int{"liar": 5})
}

// holders returns the node of each accepted range, and the number of rejected claims of each node.
func holders(t *testing.T, c identityv1.ClusterServiceClient) (
	have map[string]string, refused map[string]int, err error,
) {
	t.Helper()
	have, refused = map[string]string{}, map[string]int{}
	stream, err := c.ListNodes(t.Context(), &identityv1.ListNodesRequest{})
	if err != nil {
		return nil, nil, err
	}
	for {
		resp, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return have, refused, nil
		}
		if err != nil {
			return nil, nil, err
		}
		n := resp.GetNode()
		for _, p := range n.GetPodRanges() {
			have[p] = n.GetName()
		}
		if all := len(n.GetRefusedRanges()); all > 0 {
			refused[n.GetName()] = all
		}
	}
}

// TestAPIDevelopmentNodeHasThePodCIDRsOfItsNode runs a node of `sluice dev up` in mode kubernetes, and the process that
// writes status. Another node knows the node's pods once the podCIDRs are published.
func TestAPIDevelopmentNodeHasThePodCIDRsOfItsNode(t *testing.T) {
	a := statusAPIOf(t, newAPI(t))
	name := fmt.Sprintf("sluice-tenants-%d", os.Getpid())
	a.do(http.MethodPost, "/api/v1/nodes", object{
		"metadata": object{"name": name}, "spec": object{"podCIDRs": []string{"10.77.3.0/24", "fd00:77:3::/64"}},
	})
	n := newTenantNode(t, a.apiServer, map[string]string{
		"SLUICE_IPAM_MODE": "kubernetes", "SLUICE_IPAM_KUBERNETES_NODE": name,
	})
	a.writer("--identity=" + filepath.Join(n.run, "identity", "identity.sock"))
	n.namespace("shop", nil)
	pod, err := n.add("shop", "web", object{"app": "web"})
	if err != nil {
		t.Fatal(err)
	}
	if address := netip.MustParseAddr(pod.address); !netip.MustParsePrefix("10.77.3.0/24").Contains(address) {
		t.Errorf("the pod has %s", address)
	}
	other := &policyNode{t: t, dir: shortDir(t)}
	process, _ := other.run("identity", "--node=other",
		"--etcd-endpoints=unix://"+filepath.Join(n.run, "etcd", "etcd.sock"))
	t.Cleanup(func() { stop(t, process) })
	c := other.dial("identity")
	eventually(t, "another node compares the ranges with podCIDRs", func() error {
		resp, err := identityv1.NewIdentityServiceClient(c).GetStatus(t.Context(), &identityv1.GetStatusRequest{})
		if why := resp.GetCluster().GetAssignmentError(); err == nil && why != "" {
			err = errors.New(why)
		}
		return err
	})
	eventually(t, "another node knows the pod", func() error {
		resp, err := identityv1.NewClusterServiceClient(c).GetIPMapping(t.Context(),
			&identityv1.GetIPMappingRequest{Address: pod.address})
		if on := resp.GetMapping().GetNode(); err == nil && on != name {
			err = fmt.Errorf("%s is an address of %q", pod.address, on)
		}
		return err
	})
}
