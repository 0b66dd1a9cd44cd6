// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	"github.com/sluice-net/sluice/test/k8s/apitest"
)

// Addresses of the node, of an API server, and of another machine.
const (
	thisNode = "192.0.2.1"
	servedAt = "192.0.2.7"
	nowhere  = "192.0.2.99"
)

// apiOnly is a policy for API servers alone.
const apiOnly = `{"endpointSelector":{},
	"egress":[{"toEntities":["kube-apiserver"]}],"ingress":[{"fromEntities":["kube-apiserver"]}]}`

// clusterView collects the messages of a node's WatchCluster and WatchIdentities.
type clusterView struct {
	mu         sync.Mutex
	mappings   map[string]*identityv1.IPMapping // guarded by mu; by prefix
	identities map[uint32]string                // guarded by mu; labels
	hosts      []string                         // guarded by mu; all label sets that identity 1 had
}

func (s *identities) view() *clusterView {
	s.t.Helper()
	v := &clusterView{mappings: map[string]*identityv1.IPMapping{}, identities: map[uint32]string{}}
	ctx, cancel := context.WithCancel(context.Background())
	var watching sync.WaitGroup
	watching.Go(func() {
		for ctx.Err() == nil {
			v.cluster(ctx, s.cluster)
		}
	})
	watching.Go(func() {
		for ctx.Err() == nil {
			v.numbers(ctx, s)
		}
	})
	s.t.Cleanup(func() { cancel(); watching.Wait() })
	return v
}

func (v *clusterView) cluster(ctx context.Context, c identityv1.ClusterServiceClient) {
	stream, err := c.WatchCluster(ctx, &identityv1.WatchClusterRequest{})
	if err != nil {
		return
	}
	fresh := map[string]*identityv1.IPMapping{} // until the listing is complete
	all := fresh
	for {
		m, err := stream.Recv()
		if err != nil {
			return
		}
		v.mu.Lock()
		for _, mapping := range m.GetMappings() {
			all[mapping.GetPrefix()] = mapping
		}
		for _, prefix := range m.GetRemovedPrefixes() {
			delete(all, prefix)
		}
		if m.GetBookmark().GetSnapshotComplete() {
			v.mappings = all
		}
		v.mu.Unlock()
	}
}

func (v *clusterView) numbers(ctx context.Context, s *identities) {
	stream, err := s.WatchIdentities(ctx, &identityv1.WatchIdentitiesRequest{})
	if err != nil {
		return
	}
	for {
		m, err := stream.Recv()
		if err != nil {
			return
		}
		v.mu.Lock()
		if id := m.GetUpsert(); id != nil {
			text := strings.ReplaceAll(strings.ReplaceAll(labels(id), "reserved:", ""), "=", "")
			v.identities[id.GetNumber()] = text
			if id.GetNumber() == 1 {
				v.hosts = append(v.hosts, text)
			}
		}
		v.mu.Unlock()
	}
}

// of returns the mapping of the API server's address, as NODE: LABELS.
func (v *clusterView) of(address string) (text string, number uint32) {
	v.mu.Lock()
	defer v.mu.Unlock()
	m := v.mappings[address+"/32"]
	if m == nil {
		return "", 0
	}
	return m.GetNode() + ": " + v.identities[m.GetIdentity()], m.GetIdentity()
}

// host returns the labels of identity 1, and all label sets that it had so far.
func (v *clusterView) host() (now string, all []string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.identities[1], append([]string(nil), v.hosts...)
}

// servedAt writes a slice of the Service "kubernetes" with one address. API servers write the slice "kubernetes", but
// not the server of this test, because its address is on loopback.
func (a *apiServer) servedAt(name, address string) {
	a.t.Helper()
	a.do(http.MethodPost, "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices", object{
		"metadata":    object{"name": name, "labels": object{"kubernetes.io/service-name": "kubernetes"}},
		"addressType": "IPv4", "ports": []object{{"name": "https", "port": 6443}},
		"endpoints": []object{{"addresses": []string{address}}},
	})
}

// register sets the addresses of a node.
func register(t testing.TB, c identityv1.ClusterServiceClient, ranges string, addresses ...string) {
	t.Helper()
	if _, err := c.RegisterNode(t.Context(), &identityv1.RegisterNodeRequest{
		Underlay: &identityv1.Underlay{Addresses: addresses}, PodRanges: &identityv1.PodRanges{Prefixes: []string{ranges}},
	}); err != nil {
		t.Fatal(err)
	}
}

// asker is a pod whose policy allows only traffic with API servers.
type asker struct {
	policyv1.PolicyServiceClient
	t   testing.TB
	pod uint32
}

// may waits until traffic between the pod and a peer is allowed in both directions, or denied in both. The pod's own
// node may always send to it.
func (k asker) may(what string, peer *policyv1.Peer, want bool) {
	k.t.Helper()
	pod := &policyv1.Peer{Identity: k.pod}
	ways := map[string][2]*policyv1.Peer{"to": {pod, peer}, "from": {peer, pod}}
	if peer.GetIdentity() == 1 {
		delete(ways, "from")
	}
	eventually(k.t, what, func() error {
		for way, ends := range ways {
			x, err := k.Explain(k.t.Context(), &policyv1.ExplainRequest{From: ends[0], To: ends[1], Protocol: 6, Port: 6443})
			if err != nil {
				return err
			}
			if got := x.GetVerdict() == policyv1.Action_ACTION_ALLOW; got != want {
				return fmt.Errorf("%s %v: %t, want %t", way, peer, got, want)
			}
		}
		return nil
	})
}

func TestAPIServersAreNamedByPoliciesWhereverTheyRun(t *testing.T) {
	a := newAPI(t)
	a.crds()
	s := newIdentities(t, a)
	register(t, s.cluster, "10.0.1.0/24", thisNode)
	answer, err := s.AllocateIdentity(t.Context(),
		&identityv1.AllocateIdentityRequest{Labels: shopLabels("web"), Reference: "web"})
	if err != nil {
		t.Fatal(err)
	}
	policy, _ := s.run("policy", "--sources-identity="+filepath.Join(s.dir, "identity.sock"),
		"--kubernetes-kubeconfig="+a.ready.Kubeconfig)
	t.Cleanup(func() { stop(t, policy) })
	k := asker{policyv1.NewPolicyServiceClient(s.dial("policy")), t, answer.GetIdentity().GetNumber()}
	v := s.view()
	mapped := func(what, want string) (number uint32) {
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
	hostIs := func(what, want string) {
		t.Helper()
		eventually(t, what, func() error {
			if now, _ := v.host(); now != want {
				return fmt.Errorf("the host is %q, want %q", now, want)
			}
			return nil
		})
	}

	a.do(http.MethodPost, cilium, manifest("cilium.io/v2", "CiliumNetworkPolicy", "shop", "api-only",
		apiOnly))
	k.may("the policy is enforced", &policyv1.Peer{Address: nowhere}, false)
	k.may("no node before it serves", &policyv1.Peer{Identity: 1}, false)

	// A slice with another name gives no address the identity of an API server.
	a.servedAt("more", nowhere)
	a.servedAt("kubernetes", servedAt)
	outside := mapped("outside of all nodes", ": kube-apiserver world-ipv4")
	if text, _ := v.of(nowhere); text != "" {
		t.Errorf("the address of another slice is %q", text)
	}
	if outside < 0xFF0000 {
		t.Errorf("the identity outside of all nodes is %d, which is not node-local", outside)
	}
	k.may("outside of all nodes", &policyv1.Peer{Identity: outside, Address: servedAt}, true)
	// A policy can still select it by address, with its former identity.
	byAddress := "/apis/cilium.io/v2/namespaces/shop/ciliumnetworkpolicies/api-only"
	spec := func(text string) {
		t.Helper()
		a.do(http.MethodDelete, byAddress, nil)
		a.do(http.MethodPost, cilium, manifest("cilium.io/v2", "CiliumNetworkPolicy", "shop", "api-only", text))
	}
	spec(`{"endpointSelector":{},
		"egress":[{"toCIDR":["` + servedAt + `/32"]}],"ingress":[{"fromEntities":["world"]}]}`)
	k.may("by prefix and as the world", &policyv1.Peer{Identity: outside, Address: servedAt}, true)
	spec(apiOnly)

	// Another node has that address.
	dir, err := os.MkdirTemp("", "sluice-node")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	other := &policyNode{t: t, dir: dir}
	second, _ := other.run("identity", "--node=n2", "--etcd-endpoints=unix://"+filepath.Join(a.dir, "etcd.sock"))
	t.Cleanup(func() { stop(t, second) })
	n2 := identityv1.NewClusterServiceClient(other.dial("identity"))
	register(t, n2, "10.0.2.0/24", servedAt)
	if n := mapped("on another node", "n2: kube-apiserver remote-node"); n != 7 {
		t.Errorf("on another node the identity is %d, want 7", n)
	}
	k.may("on another node", &policyv1.Peer{Identity: 7, Address: servedAt}, true)
	k.may("another node without one", &policyv1.Peer{Identity: 6, Address: nowhere}, false)

	// Now the address belongs to this node.
	register(t, n2, "10.0.2.0/24", nowhere)
	mapped("on no node", ": kube-apiserver world-ipv4")
	register(t, s.cluster, "10.0.1.0/24", thisNode, servedAt)
	mapped("on this node", "")
	hostIs("on this node", "host kube-apiserver")
	k.may("on this node", &policyv1.Peer{Identity: 1, Address: servedAt}, true)

	// While the API is down, nothing changes, and a reader sees no other state at its start.
	a.ask(apitest.Kill)
	s.problem("pods: ")
	_, before := v.host()
	s.end(syscall.SIGKILL)
	s.start()
	s.problem("pods: ")
	eventually(t, "the watch goes on", func() error {
		if _, all := v.host(); len(all) == len(before) {
			return fmt.Errorf("the labels of the host changed %d times", len(all))
		}
		return nil
	})
	if _, all := v.host(); strings.Join(all[len(before):], "; ") != "host kube-apiserver" {
		t.Errorf("after the start the host was %q", all[len(before):])
	}
	k.may("on this node, without the API", &policyv1.Peer{Identity: 1, Address: servedAt}, true)
	a.ask(apitest.Start)
	s.problem("")
	// A list without any address must be ignored.
	a.do(http.MethodPatch, "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/kubernetes", object{
		"endpoints": []object{{"addresses": []string{"192.0.2.8"}}},
	})
	hostIs("the server has moved", "host")
	k.may("the server has moved", &policyv1.Peer{Identity: 1, Address: servedAt}, false)
}
