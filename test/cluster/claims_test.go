// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package cluster

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/servicetest"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// inEtcd is the etcd prefix of the identity services' shared state.
const inEtcd = "/sluice/v1/identity"

// etcd connects to the single etcd member of the cluster until the end of the test.
func (c *testCluster) etcd(t *testing.T) *clientv3.Client {
	t.Helper()
	client, err := clientv3.New(clientv3.Config{
		Endpoints: []string{"unix://" + c.Hub().Socket(devnode.Etcd)}, DialTimeout: patience,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() })
	return client
}

// claimEverything writes everything that the role of a node permits, so that every block of the pool appears to be
// the node's, in quarantine, or in use by another node.
func claimEverything(t *testing.T, etcd *clientv3.Client, liar string, others []string) {
	t.Helper()
	put := func(key string, value any) {
		t.Helper()
		text, err := json.Marshal(value)
		if err == nil {
			_, err = etcd.Put(t.Context(), inEtcd+key, string(text))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	got, err := etcd.Get(t.Context(), inEtcd+"/ip/"+liar+"/node")
	if err != nil || len(got.Kvs) != 1 {
		t.Fatalf("the record of %s: %v, %v", liar, got, err)
	}
	var record map[string]any
	if err := json.Unmarshal(got.Kvs[0].Value, &record); err != nil {
		t.Fatal(err)
	}
	var blocks []string
	for i := range 1 << (blockLength - 24) {
		first := netip.AddrFrom4([4]byte{10, 197, 0, byte(i << (32 - blockLength))})
		block := netip.PrefixFrom(first, blockLength).String()
		blocks = append(blocks, block)
		put(fmt.Sprintf("/ip/%s/range/ipv4-%d", liar, i), map[string]any{"range": block})
		put("/ip/"+liar+"/rest/"+strings.ReplaceAll(block, "/", "_"), map[string]any{"node": liar, "quarantine": true})
		holder := map[string]any{"node": liar, "incarnation": record["incarnation"]}
		switch i % 4 {
		case 1:
			holder = map[string]any{"node": "gone", "quarantine": true}
		case 2:
			holder = map[string]any{"node": others[i/4%len(others)], "incarnation": "another"}
		}
		put("/range/default/"+block, holder)
	}
	record["ranges"] = blocks
	put("/ip/"+liar+"/node", record)
}

// TestNodeThatClaimsEveryBlockKeepsNoOtherFromJoining: a compromised node claims the whole pool in etcd, twice.
// Existing nodes keep their blocks, even after restarts of their services. Joining nodes get blocks, and their pods
// get unique addresses and reach the pods of all other nodes.
func TestNodeThatClaimsEveryBlockKeepsNoOtherFromJoining(t *testing.T) {
	t.Parallel()
	c := newPoolCluster(t, 1, "--max-blocks-per-node=8") // half of the pool
	first, second, liar := c.nodes[0], c.nodes[1], c.nodes[2]
	others := []string{first.Name(), second.Name()}
	etcd := c.etcd(t)
	owners := map[netip.Addr]string{}
	add := func(n *node, app string) labelled {
		t.Helper()
		p, err := n.tryAdd(t.Context(), newPod(t), app)
		if err != nil {
			t.Fatal(err)
		}
		if owner := owners[p.IPv4]; owner != "" || !p.IPv4.IsValid() {
			t.Fatalf("%s of %s has the address %s, which %q has", p.Name, n.Name(), p.IPv4, owner)
		}
		owners[p.IPv4] = p.Name
		return labelled{p, app, n}
	}
	pods := []labelled{add(first, "first"), add(second, "second")}
	reach := func(when string) {
		t.Helper()
		for _, from := range pods {
			for _, to := range pods {
				if from.Name == to.Name {
					continue
				}
				servicetest.EventuallyNil(t, fmt.Sprintf("%s: a pod of %s reaches one of %s", when, from.on.Name(), to.on.Name()),
					func() error { return pod.ExchangeTCP(t.Context(), from.Pod, to.Pod, to.IPv4, []byte("message")) })
			}
		}
	}
	reach("before")

	// The node's services are replaced by the attacker, but the key that reports the node as alive remains.
	alive, err := etcd.Get(t.Context(), inEtcd+"/alive/"+liar.Name())
	if err != nil || len(alive.Kvs) != 1 {
		t.Fatalf("the key that says that %s is alive: %v, %v", liar.Name(), alive, err)
	}
	liar.kill(t, devnode.Identity)
	if _, err := etcd.Put(t.Context(), string(alive.Kvs[0].Key), string(alive.Kvs[0].Value)); err != nil {
		t.Fatal(err)
	}
	claimEverything(t, etcd, liar.Name(), others)
	reach("every block is claimed")
	servicetest.EventuallyNil(t, "the other nodes report claims that do not count", func() error {
		for _, n := range []*node{first, second} {
			all, err := receiveAll(n.cluster.ListNodes(t.Context(), &identityv1.ListNodesRequest{}))
			if err != nil {
				return err
			}
			for _, m := range all {
				if m.GetNode().GetName() == liar.Name() && len(m.GetNode().GetRefusedRanges()) == 0 {
					return fmt.Errorf("%s refuses no claim of %s, whose ranges are %v", n.Name(), liar.Name(),
						m.GetNode().GetPodRanges())
				}
			}
		}
		return nil
	})

	for i := range 2 {
		added, err := c.AddNode(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		n := connect(t, added)
		n.knows(t, len(c.nodes)+1)
		c.nodes = append(c.nodes, n)
		pods = append(pods, add(n, fmt.Sprint("joined-", i)))
		reach(fmt.Sprint("joined ", i))
		claimEverything(t, etcd, liar.Name(), append(others, n.Name()))
	}
	// More addresses than a block has: existing nodes also get further blocks.
	for i := range moreThanABlock {
		add(first, fmt.Sprint("more-", i%2))
	}
	for _, n := range []*node{first, c.nodes[3]} {
		for _, service := range []string{devnode.Identity, devnode.IPAM} {
			if err := n.Restart(t.Context(), service); err != nil {
				t.Fatal(err)
			}
		}
		pods = append(pods, add(n, "after-restart"))
	}
	reach("after restarts")
}
