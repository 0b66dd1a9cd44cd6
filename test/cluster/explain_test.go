// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package cluster

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// onlyTo lets app=near connect to, and be reached by, one entity only.
const onlyTo = `apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: only, namespace: test}
spec:
  endpointSelector: {matchLabels: {app: near}}
  egress: [{toEntities: [%[1]s]}]
  ingress: [{fromEntities: [%[1]s]}]
`

// explained contains the parts of a result that both commands print.
type explained struct {
	Source, Destination *struct{ Identity uint32 } // of `explain`
	Egress, Ingress     *struct {
		Peer    uint32 // only in the output of `policy explain`
		Action  string // likewise
		Verdict struct{ Verdict string }
	}
	NotAsked []struct{ Node, Has string }
}

// TestBothExplainsAgreeAboutEveryAddress compares the kernel's tables with the policy service for connections between
// one pod and every kind of address, in both directions. The policies of the two directions allow opposite sets of
// peers. Both commands must evaluate the same identity with the same result. For a pod on another node, both must
// report the node whose side they did not evaluate.
func TestBothExplainsAgreeAboutEveryAddress(t *testing.T) {
	t.Parallel()
	c := newCluster(t, devnode.ClusterOptions{Nodes: 2, Routing: "overlay"})
	here, there := c.nodes[0], c.nodes[1]
	near, beside, far := here.add(t, "near"), here.add(t, "beside"), there.add(t, "far")
	here.kernelHas(t, entries(far, here.identityOf(t, far, there), there)...)
	there.kernelHas(t, entries(near, there.identityOf(t, near, here), here)...)
	service := `apiVersion: v1
kind: Service
metadata: {name: web, namespace: default}
spec: {clusterIP: 10.96.0.40, ports: [{name: http, port: 80, targetPort: 8080}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: default, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: http, port: 8080}]
endpoints: [{addresses: [` + far.Addresses()[0].String() + `]}]
`
	write := func(dir, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, "explain.yaml"), []byte(text),
			0o644); err != nil { //nolint:gosec // the services' users read the file
			t.Fatal(err)
		}
	}
	write(c.Hub().ServiceDir(), service)

	inRange := func(p pod.Pod, last byte) string { // an address in the prefix of a pod's address
		a := p.Addresses()[0].As4()
		a[3] = last
		return netip.AddrFrom4(a).String()
	}
	bridge := netip.MustParsePrefix("172.31.255.1/24") // address of an interface that other nodes cannot reach
	if err := pod.In(here.Netns(), func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		return netlink.AddrAdd(lo, &netlink.Addr{IPNet: &net.IPNet{
			IP:   bridge.Addr().AsSlice(),
			Mask: net.CIDRMask(bridge.Bits(), 32),
		}})
	}); err != nil {
		t.Fatal(err)
	}
	servicetest.EventuallyNil(t, "the kernel has the address of the bridge", func() error {
		have, err := here.kernel(t.Context())
		if err == nil && have[bridge.Addr().String()+"/32"] == "" {
			err = fmt.Errorf("it has %v", have)
		}
		return err
	})

	addresses := map[string]string{
		"bridge of this node": bridge.Addr().String(), "pod of this node": beside.Addresses()[0].String(),
		"pod of another node":             far.Addresses()[0].String(),
		"pod of another node, IPv6":       far.Addresses()[1].String(),
		"overlay address of this node":    inRange(near, 1),
		"overlay address of another node": inRange(far, 1), "unassigned in a range of another node": inRange(far, 200),
		"outside of the ranges of all nodes": "10.244.99.9", "outside": "192.0.2.1", "outside, IPv6": "2001:db8::1",
	}
	for i, a := range here.Addresses() {
		addresses[fmt.Sprintf("this node, address %d", i)] = a.String()
	}
	for i, a := range there.Addresses() {
		addresses[fmt.Sprintf("another node, address %d", i)] = a.String()
	}

	// agree compares both results of the pod's side, and returns the output of `explain`.
	agree := func(n *node, what, from, to string, egress bool) string {
		t.Helper()
		var kernel, policy explained
		n.sluice(t, &kernel, "explain", "--from", from, "--to", to, "--port", "80")
		n.sluice(t, &policy, "policy", "explain", "--from", from, "--to", to, "--port", "80")
		side, other, peer := kernel.Egress, policy.Egress, kernel.Destination
		if !egress {
			side, other, peer = kernel.Ingress, policy.Ingress, kernel.Source
		}
		if side == nil || other == nil {
			t.Errorf("%s: a side was not evaluated: %+v, %+v", what, kernel, policy)
			return ""
		}
		verdict := map[string]string{"allow": "forwarded", "deny": "dropped"}[other.Action]
		if peer.Identity != other.Peer || side.Verdict.Verdict != verdict {
			t.Errorf("%s, %s -> %s: explain has peer %d %s, policy explain has %d %s", what, from, to, peer.Identity,
				side.Verdict.Verdict, other.Peer, verdict)
		}
		if verdict == "forwarded" && fmt.Sprint(kernel.NotAsked) != fmt.Sprint(policy.NotAsked) {
			t.Errorf("%s: not evaluated: explain %v, policy explain %v", what, kernel.NotAsked, policy.NotAsked)
		}
		return verdict
	}
	allowed := map[string]map[string]bool{} // kinds of addresses by entity
	for _, entity := range []string{"world", "cluster"} {
		allowed[entity] = map[string]bool{}
		write(c.Hub().PolicyDir(), fmt.Sprintf(onlyTo, entity))
		servicetest.EventuallyNil(t, "the kernel enforces the policy for "+entity, func() error {
			for to, its := range map[string]string{"192.0.2.1": "world", here.Addresses()[0].String(): "cluster"} {
				var x explained
				if err := here.trySluice(t.Context(), &x, "explain", "--from", near.Name, "--to", to, "--port",
					"80"); err != nil {
					return err
				}
				if passes := x.Egress.Verdict.Verdict == "forwarded"; passes != (entity == its) {
					return fmt.Errorf("to %s of %s: %s", to, its, x.Egress.Verdict.Verdict)
				}
			}
			return nil
		})
		for what, a := range addresses {
			allowed[entity][what] = agree(here, what, near.Name, a, true) == "forwarded"
			agree(here, "from "+what, a, near.Name, false)
		}
		agree(there, "asked where the sender is", far.Name, near.Addresses()[0].String(), true)
	}
	for what := range addresses {
		world, cluster := allowed["world"][what], allowed["cluster"][what]
		if what == "unassigned in a range of another node" {
			if world || cluster { // the identity is unknown, and matches no entity
				t.Errorf("%s: world %t, cluster %t", what, world, cluster)
			}
		} else if world == cluster {
			t.Errorf("%s is both of the world and of the cluster, or neither: %t", what, world)
		}
	}

	if _, err := here.run(t.Context(), "policy", "explain", "--from", near.Name, "--to", "10.96.0.40", "--port",
		"80"); err == nil ||
		!strings.Contains(err.Error(), netip.AddrPortFrom(far.Addresses()[0], 8080).String()) ||
		!strings.Contains(err.Error(), "is an address of Service default/web") {
		t.Errorf("the address of a Service: %v", err)
	}
	if err := here.Stop(t.Context(), devnode.Identity); err != nil {
		t.Fatal(err)
	}
	if _, err := here.run(t.Context(), "policy", "explain", "--from", near.Name, "--to", "192.0.2.1", "--port",
		"80"); err == nil ||
		!strings.Contains(err.Error(), "cannot find the identity of 192.0.2.1") {
		t.Errorf("an address while sluice-identity is unavailable: %v", err)
	}
}
