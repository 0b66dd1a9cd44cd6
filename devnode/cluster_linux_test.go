// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package devnode

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
)

func clusterOptions(t *testing.T, binDir string, nodes, members int) ClusterOptions {
	t.Helper()
	return ClusterOptions{Options: options(t, binDir), Nodes: nodes, EtcdMembers: members}
}

func upCluster(t *testing.T, o ClusterOptions) (*Cluster, []*Node) {
	t.Helper()
	c, err := UpCluster(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	return c, nodesOf(t, c)
}

func nodesOf(t *testing.T, c *Cluster) []*Node {
	t.Helper()
	nodes, err := c.Nodes()
	if err != nil {
		t.Fatal(err)
	}
	return nodes
}

// wantNoCluster fails the test if anything of a cluster or of its nodes is left on the machine, or a route over a
// removed device.
func wantNoCluster(t *testing.T, o ClusterOptions) {
	t.Helper()
	wantNothing(t, o.Instance)
	for k := 1; k <= MaxNodes; k++ {
		wantNothing(t, fmt.Sprintf("%s-%d", o.Instance, k))
	}
}

// exchange sends a byte from one namespace to an address in another one. An empty name is the caller's namespace.
func exchange(from, to string, address netip.Addr) error {
	in := func(netns string, fn func() error) error {
		if netns == "" {
			return fn()
		}
		return inNetns(netns, fn)
	}
	var l net.Listener
	err := in(to, func() (err error) {
		l, err = net.Listen("tcp", netip.AddrPortFrom(address, 0).String())
		return err
	})
	if err != nil {
		return err
	}
	defer l.Close()
	return in(from, func() error {
		conn, err := net.DialTimeout("tcp", l.Addr().String(), 30*time.Second)
		if err != nil {
			return err
		}
		return conn.Close()
	})
}

func TestKernelNodesOfAClusterReachEachOther(t *testing.T) {
	o := clusterOptions(t, programs(t), 3, 3)
	before := surroundings(t)
	c, nodes := upCluster(t, o)
	if during := surroundings(t); during != before {
		t.Errorf("rules or sysctls of the caller's namespace have changed:\n%s\nbefore:\n%s", during, before)
	}
	if len(nodes) != 3 {
		t.Fatalf("%d nodes are up, want 3", len(nodes))
	}
	var ranges []netip.Prefix
	for i, n := range nodes {
		if want := fmt.Sprintf("%s-%d", o.Instance, i+1); n.Instance() != want {
			t.Errorf("node %d is instance %s, want %s", i+1, n.Instance(), want)
		}
		for _, service := range []string{Identity, IPAM, Policy, Datapath} {
			if err := n.Serving(t.Context(), service); err != nil {
				t.Errorf("%s of node %d: %v", service, i+1, err)
			}
		}
		if _, err := n.PID(Etcd); !errors.Is(err, ErrNotRunning) {
			t.Errorf("node %d has an etcd of its own: %v", i+1, err)
		}
		if got := n.arguments(Identity); !slices.Contains(got, "--etcd-endpoints="+strings.Join([]string{
			"unix://" + c.Hub().Socket("etcd-1"), "unix://" + c.Hub().Socket("etcd-2"), "unix://" + c.Hub().Socket("etcd-3"),
		}, ",")) {
			t.Errorf("node %d: identity runs with %q", i+1, got)
		}
		for _, p := range n.PodCIDRs() {
			if slices.ContainsFunc(ranges, p.Overlaps) {
				t.Errorf("%s of node %d is also used by another node", p, i+1)
			}
			ranges = append(ranges, p)
		}
		for _, p := range n.Addresses() {
			if p.IsLinkLocalUnicast() {
				t.Errorf("node %d has %s, which no other node can reach", i+1, p)
			}
			if err := exchange("", n.Netns(), p); err != nil {
				t.Errorf("from the caller to node %d: %v", i+1, err)
			}
			for j, from := range nodes {
				if err := exchange(from.Netns(), n.Netns(), p); err != nil {
					t.Errorf("from node %d to node %d: %v", j+1, i+1, err)
				}
			}
		}
	}
	for i, service := range c.Hub().Services() {
		if err := c.Hub().Serving(t.Context(), service); err != nil {
			t.Error(err)
		}
		want := fmt.Sprintf("--name=%s --peer=http://127.0.0.%d:2380 "+
			"--members=etcd-1=http://127.0.0.1:2380,etcd-2=http://127.0.0.2:2380,etcd-3=http://127.0.0.3:2380", service, i+1)
		if got := strings.Join(c.Hub().arguments(service), " "); !strings.Contains(got, want) {
			t.Errorf("%s runs with %q, want %s", service, got, want)
		}
	}
	down(t, o.Options)
	wantNoCluster(t, o)
	if after := surroundings(t); after != before {
		t.Errorf("rules or sysctls after:\n%s\nbefore:\n%s", after, before)
	}
	down(t, o.Options) // once more
}

// TestKernelNodesComeAndGo: a node is added, another is removed as if its machine had been switched off, and the
// remaining nodes keep working.
func TestKernelNodesComeAndGo(t *testing.T) {
	o := clusterOptions(t, programs(t), 2, 1)
	upCluster(t, o)
	c, err := OpenCluster(o.Instance) // as another command opens it
	if err != nil {
		t.Fatal(err)
	}
	added, err := c.AddNode(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if added.Instance() != o.Instance+"-3" {
		t.Errorf("the third node is %s", added.Instance())
	}
	gone, err := c.Node(2)
	if err != nil {
		t.Fatal(err)
	}
	if err := gone.Down(t.Context()); err != nil {
		t.Fatal(err)
	}
	wantNothing(t, gone.Instance())
	for _, p := range gone.PodCIDRs() {
		routes, err := netlink.RouteListFiltered(netlink.FAMILY_ALL, &netlink.Route{Dst: ipNet(p)}, netlink.RT_FILTER_DST)
		if err != nil || len(routes) > 0 {
			t.Errorf("routes to %s of the node that is gone: %v, %v", p, routes, err)
		}
	}
	if _, err := c.Node(2); !errors.Is(err, ErrNotRunning) {
		t.Errorf("node 2: %v, want ErrNotRunning", err)
	}
	nodes := nodesOf(t, c)
	if len(nodes) != 2 || nodes[0].Instance() != o.Instance+"-1" || nodes[1].Instance() != added.Instance() {
		t.Fatalf("nodes that are up: %v", nodes)
	}
	for _, n := range nodes {
		if err := n.Serving(t.Context(), Datapath); err != nil {
			t.Error(err)
		}
	}
	for _, a := range added.Addresses() {
		if err := exchange(nodes[0].Netns(), added.Netns(), a); err != nil {
			t.Errorf("from node 1 to the added one: %v", err)
		}
	}
	if err := nodes[0].Restart(t.Context(), Identity); err != nil {
		t.Error(err)
	}
	down(t, o.Options)
	wantNoCluster(t, o)
}

func TestKernelClustersRunSideBySide(t *testing.T) {
	bin := programs(t)
	a, b := clusterOptions(t, bin, 2, 1), clusterOptions(t, bin, 2, 1)
	_, na := upCluster(t, a)
	_, nb := upCluster(t, b)
	single := options(t, bin)
	up(t, single)
	for _, n := range na {
		for _, m := range nb {
			for i, p := range n.PodCIDRs() {
				if p.Overlaps(m.PodCIDRs()[i]) || n.Addresses()[i] == m.Addresses()[i] {
					t.Errorf("%s and %s share %s or %s", n.Instance(), m.Instance(), p, n.Addresses()[i])
				}
			}
		}
	}
	down(t, a.Options)
	wantNoCluster(t, a)
	for _, n := range nb {
		if err := exchange("", n.Netns(), n.Addresses()[0]); err != nil {
			t.Errorf("the other cluster: %v", err)
		}
	}
	down(t, single)
	down(t, b.Options)
	wantNoCluster(t, b)
}

// TestKernelClusterLeavesOtherInstancesAlone: a single node may already use the name that a node of the cluster would
// get.
func TestKernelClusterLeavesOtherInstancesAlone(t *testing.T) {
	o := clusterOptions(t, programs(t), 3, 1)
	other := o.Options
	other.Instance += "-2"
	n := up(t, other)
	if _, err := UpCluster(t.Context(), o); !errors.Is(err, ErrRunning) {
		t.Errorf("a cluster whose second node runs already: %v, want ErrRunning", err)
	}
	if err := n.Serving(t.Context(), Datapath); err != nil {
		t.Errorf("the node that ran before: %v", err)
	}
	down(t, o.Options) // the outer directory does not have the name of the node
	if err := n.Serving(t.Context(), Datapath); err != nil {
		t.Errorf("the node that ran before, after Down of the cluster: %v", err)
	}
	down(t, other)
	upCluster(t, o)
	for _, name := range []string{o.Instance, o.Instance + "-2"} {
		other.Instance = name
		if _, err := Up(t.Context(), other); err == nil {
			t.Errorf("instance %s was started although it belongs to a cluster", name)
		}
	}
	if _, err := UpCluster(t.Context(), o); !errors.Is(err, ErrRunning) {
		t.Errorf("the same cluster once more: %v, want ErrRunning", err)
	}
	if _, err := Open(o.Instance); err == nil || !strings.Contains(err.Error(), o.Instance+"-1 to "+o.Instance+"-3") {
		t.Errorf("open the cluster as a node: %v, want one that names the nodes", err)
	}
}

func TestKernelFailedClusterLeavesNothing(t *testing.T) {
	bin := programs(t)
	for _, service := range []string{Etcd, IPAM} {
		o := clusterOptions(t, bin, 2, 1)
		o.Args = map[string][]string{service: {"--fail"}}
		_, err := UpCluster(t.Context(), o)
		if err == nil || !strings.Contains(err.Error(), "this is why it failed") {
			t.Errorf("%s fails: %v", service, err)
		}
		wantNoCluster(t, o)
	}
	for _, bad := range []ClusterOptions{
		{Nodes: 0},
		{Nodes: MaxNodes + 1},
		{Nodes: 1, EtcdMembers: 2},
		{Nodes: 1, Options: Options{PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/24")}}},
		{Nodes: 2, Options: Options{Instance: strings.Repeat("a", 31)}},
	} {
		bad.BinDir = bin
		if _, err := UpCluster(t.Context(), bad); err == nil {
			t.Errorf("%+v was taken", bad)
		}
	}
}

func TestKernelDownAfterTheStartOfAClusterWasKilled(t *testing.T) {
	o := clusterOptions(t, programs(t), 3, 1)
	o.Args = map[string][]string{Datapath: {"--hang"}}
	o.StartTimeout = 10 * time.Minute
	encoded, err := json.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), "DEVNODE_TEST_UP_CLUSTER="+string(encoded))
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	hub, err := newNode(o.Instance)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for {
		running, err := hub.runningServices()
		if err != nil {
			t.Fatal(err)
		}
		if len(running) == 1+3*6 {
			break
		}
		select {
		case <-ctx.Done():
			t.Fatalf("only %v started", running)
		case <-time.After(5 * time.Millisecond):
		}
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	cmd.Wait() //nolint:errcheck // it was killed
	down(t, o.Options)
	wantNoCluster(t, o)
}
