// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package cluster tests several nodes that share one etcd. Every service of every node runs as a separate process,
// each node in its own network namespace, and the tests execute the real CNI shim as a runtime does.
package cluster

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/rpc/client"
	"github.com/sluice-net/sluice/kit/servicetest"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	"github.com/sluice-net/sluice/test/internal/cni"
	"github.com/sluice-net/sluice/test/internal/machine"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// patience limits waits for events that take milliseconds on an idle machine.
const patience = 60 * time.Second

// binDir returns the directory to which `make build` writes the programs.
func binDir() string {
	if dir := os.Getenv("SLUICE_BIN"); dir != "" {
		return dir
	}
	return filepath.Join("..", "..", "bin")
}

// node is a node of the cluster with clients of its identity service.
type node struct {
	*devnode.Node
	cluster  identityv1.ClusterServiceClient
	identity identityv1.IdentityServiceClient
}

// testCluster is a cluster with all nodes registered.
type testCluster struct {
	*devnode.Cluster
	nodes []*node
}

// random returns a name that no other test and no other copy of it uses.
func random(prefix string) string { return machine.Name(prefix) }

// newCluster starts a cluster and removes it at the end of the test. The test fails if the cluster leaves anything on
// the machine.
func newCluster(t *testing.T, o devnode.ClusterOptions) *testCluster {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("tests of clusters need root")
	}
	o.Instance, o.BinDir, o.StartTimeout = random("t"), cmp.Or(o.BinDir, binDir()), patience
	c := &testCluster{}
	t.Cleanup(func() {
		if t.Failed() && c.Cluster != nil {
			c.dump(t)
		}
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := devnode.Down(ctx, o.Instance); err != nil {
			t.Errorf("take the cluster down: %v", err)
		}
		for _, pattern := range []string{"/run/sluice-%s*", "/var/lib/sluice-%s*", "/run/netns/sluice-%s*"} {
			if left, err := filepath.Glob(fmt.Sprintf(pattern, o.Instance)); err != nil || len(left) > 0 {
				t.Errorf("the cluster left on the machine: %v, %v", left, err)
			}
		}
	})
	var err error
	if c.Cluster, err = devnode.UpCluster(t.Context(), o); err != nil {
		t.Fatalf("bring the cluster up: %v", err)
	}
	nodes, err := c.Nodes()
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range nodes {
		c.nodes = append(c.nodes, connect(t, n))
	}
	for _, n := range c.nodes {
		n.knows(t, len(c.nodes))
	}
	return c
}

// dial connects to a service of a node until the end of the test.
func dial(t *testing.T, n *devnode.Node, service string) *grpc.ClientConn {
	t.Helper()
	conn, err := client.Dial(n.Socket(service), client.Options{WaitForReady: true, Timeout: patience})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// connect makes clients of a node's services. Their calls wait while a service is down.
func connect(t *testing.T, n *devnode.Node) *node {
	t.Helper()
	conn := dial(t, n, devnode.Identity)
	return &node{
		Node: n, cluster: identityv1.NewClusterServiceClient(conn), identity: identityv1.NewIdentityServiceClient(conn),
	}
}

// knows waits until the node knows this number of registered nodes, including itself.
func (n *node) knows(t *testing.T, nodes int) {
	t.Helper()
	servicetest.EventuallyNil(t, fmt.Sprintf("%s knows %d nodes", n.Name(), nodes), func() error {
		s, err := n.identity.GetStatus(t.Context(), &identityv1.GetStatusRequest{})
		if err == nil && (!s.GetCluster().GetRegistered() || s.GetCluster().GetNodes() != uint32(nodes)) {
			err = fmt.Errorf("%v", s.GetCluster())
		}
		return err
	})
}

// dump prints the ends of the logs.
func (c *testCluster) dump(t *testing.T) {
	nodes, err := c.Nodes()
	if err != nil {
		t.Log(err)
	}
	for _, n := range append(nodes, c.Hub()) {
		for _, service := range append(n.Services(), "cni") {
			content, err := os.ReadFile(n.Log(service))
			if err != nil || len(content) == 0 {
				continue
			}
			t.Logf("log of %s of %s ends with:\n%s", service, n.Instance(), content[max(0, len(content)-3000):])
		}
	}
}

// makePod makes a network namespace that is removed with the test.
func makePod(t *testing.T) (pod.Pod, error) {
	id := random("slc-")
	p := pod.Pod{Name: id, Netns: pod.NetnsPath(id)}
	if err := os.MkdirAll(filepath.Dir(p.Netns), 0o755); err != nil {
		return p, err
	}
	t.Cleanup(func() {
		if err := pod.DeleteNetns(p.Netns); err != nil {
			t.Error(err)
		}
	})
	return p, pod.NewNetns(p.Netns)
}

func newPod(t *testing.T) pod.Pod {
	t.Helper()
	p, err := makePod(t)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// call executes the shim for a pod with the label app.
func (n *node) call(ctx context.Context, command string, p pod.Pod, app string) ([]byte, error) {
	return n.callFor(ctx, 30*time.Second, command, p, app)
}

// callFor is call with a timeout in the network configuration.
func (n *node) callFor(ctx context.Context, timeout time.Duration, command string, p pod.Pod, app string) ([]byte,
	error,
) {
	runtime := map[string]any{"labels": []map[string]string{{"key": "app", "value": app}}}
	if wanted := p.Addresses(); command == "ADD" && len(wanted) > 0 {
		runtime["ips"] = wanted
	}
	config, err := cni.PluginConfig(n.CNIConflist(), "1.0.0", map[string]any{
		"timeout": timeout.String(), "runtimeConfig": runtime,
	})
	if err != nil {
		return nil, err
	}
	return cni.Run(ctx, cni.Call{
		Plugin: n.Plugin(), Command: command, ContainerID: p.Name, Netns: p.Netns, IfName: "eth0",
		Args: "IgnoreUnknown=1;K8S_POD_NAMESPACE=test;K8S_POD_NAME=" + p.Name, Path: filepath.Dir(n.Plugin()), Config: config,
	})
}

// tryAdd connects a pod and returns it with its addresses. A pod that already has addresses requests the same ones.
func (n *node) tryAdd(ctx context.Context, p pod.Pod, app string) (pod.Pod, error) {
	return n.tryAddFor(ctx, 30*time.Second, p, app)
}

// tryAddFor is tryAdd with a timeout in the network configuration.
func (n *node) tryAddFor(ctx context.Context, timeout time.Duration, p pod.Pod, app string) (pod.Pod, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	result, err := n.callFor(ctx, timeout, "ADD", p, app)
	if err != nil {
		return p, fmt.Errorf("ADD %s at %s: %w", p.Name, n.Name(), err)
	}
	addresses, err := cni.Addresses(result)
	if err != nil {
		return p, fmt.Errorf("ADD %s at %s: %w: %s", p.Name, n.Name(), err, result)
	}
	return p.WithAddresses(addresses), nil
}

func (n *node) add(t *testing.T, app string) pod.Pod {
	t.Helper()
	return n.addAt(t, app, nil)
}

// addAt is add with requested addresses.
func (n *node) addAt(t *testing.T, app string, addresses []netip.Addr) pod.Pod {
	t.Helper()
	p, err := n.tryAdd(t.Context(), newPod(t).WithAddresses(addresses), app)
	if err != nil {
		t.Fatal(err)
	}
	if len(p.Addresses()) != 2 {
		t.Fatalf("pod %s has addresses %v, want one of each family", p.Name, p.Addresses())
	}
	return p
}

func (n *node) del(t *testing.T, p pod.Pod) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, err := n.call(ctx, "DEL", p, ""); err != nil {
		t.Fatalf("DEL %s at %s: %v", p.Name, n.Name(), err)
	}
}

// mapping returns the node's mapping of an address: identity (0 for none) and node.
func (n *node) mapping(ctx context.Context, a netip.Addr) (number uint32, on string, err error) {
	m, err := n.cluster.GetIPMapping(ctx, &identityv1.GetIPMappingRequest{Address: a.String()})
	return m.GetMapping().GetIdentity(), m.GetMapping().GetNode(), err
}

// identityOf waits until a node knows the addresses of a pod on another node, and returns their identity.
func (n *node) identityOf(t *testing.T, p pod.Pod, on *node) (number uint32) {
	t.Helper()
	servicetest.EventuallyNil(t, fmt.Sprintf("%s knows pod %s of %s", n.Name(), p.Name, on.Name()), func() error {
		number = 0
		for _, a := range p.Addresses() {
			got, name, err := n.mapping(t.Context(), a)
			if err != nil {
				return err
			}
			if got == 0 || name != on.Name() || number != 0 && got != number {
				return fmt.Errorf("%s has identity %d on %q", a, got, name)
			}
			number = got
		}
		return nil
	})
	return number
}

// kernel returns the contents of the ipcache in the node's kernel: descriptions by prefix.
func (n *node) kernel(ctx context.Context) (map[string]string, error) {
	entries := map[string]string{}
	for _, name := range []string{"sl_ipc4", "sl_ipc6"} {
		out, err := n.run(ctx, "map", "dump", name)
		if err != nil {
			return nil, err
		}
		for line := range bytes.Lines(out) {
			var e struct{ Key, Value string }
			if err := json.Unmarshal(line, &e); err != nil {
				return nil, err
			}
			entries[e.Key] = e.Value
		}
	}
	return entries, nil
}

// entry is an expected ipcache entry of an address on another node.
type entry struct {
	address  netip.Addr
	identity uint32
	on       *node
}

// entries returns the expected entries of a pod.
func entries(p pod.Pod, identity uint32, on *node) (all []entry) {
	for _, a := range p.Addresses() {
		all = append(all, entry{a, identity, on})
	}
	return all
}

// isOf reports whether a dumped entry, "identity 6 node 3 NAME by-stack of-device", is of an address on a node.
func isOf(value string, on *node) bool { return slices.Contains(strings.Fields(value), on.Name()) }

// kernelHas waits until the node's kernel has the entries. It ignores entries of pods on the node itself.
func (n *node) kernelHas(t *testing.T, want ...entry) {
	t.Helper()
	servicetest.EventuallyNil(t, "the kernel of "+n.Name(), func() error {
		have, err := n.kernel(t.Context())
		if err != nil {
			return err
		}
		for _, e := range want {
			value := have[netip.PrefixFrom(e.address, e.address.BitLen()).String()]
			if e.on.Name() != n.Name() && (!strings.HasPrefix(value, fmt.Sprintf("identity %d node ", e.identity)) ||
				!isOf(value, e.on)) {
				return fmt.Errorf("%s has %q, want identity %d of %s", e.address, value, e.identity, e.on.Name())
			}
		}
		return nil
	})
}

// kernelHasHosts waits until the node's kernel has the addresses of all other nodes.
func (n *node) kernelHasHosts(t *testing.T, all []*node) {
	t.Helper()
	servicetest.EventuallyNil(t, "the kernel of "+n.Name(), func() error {
		have, err := n.kernel(t.Context())
		if err != nil {
			return err
		}
		for _, other := range all {
			for _, a := range append(other.Addresses(), other.overlay()...) {
				value := have[netip.PrefixFrom(a, a.BitLen()).String()]
				if other != n && !isOf(value, other) {
					return fmt.Errorf("%s of %s has %q", a, other.Name(), value)
				}
			}
		}
		return nil
	})
}

// forgets waits until neither the node nor its kernel has an identity of the pod's addresses.
func (n *node) forgets(t *testing.T, p pod.Pod) {
	t.Helper()
	servicetest.EventuallyNil(t, fmt.Sprintf("%s forgets pod %s", n.Name(), p.Name), func() error {
		for _, a := range p.Addresses() {
			// Outside of all ranges, an address has no mapping at all.
			if got, name, _ := n.mapping(t.Context(), a); got != 0 {
				return fmt.Errorf("%s has identity %d on %q", a, got, name)
			}
		}
		have, err := n.kernel(t.Context())
		for _, a := range p.Addresses() {
			if value, ok := have[netip.PrefixFrom(a, a.BitLen()).String()]; ok {
				return fmt.Errorf("the kernel has %s: %s", a, value)
			}
		}
		return err
	})
}

// sluice runs the program against the node and decodes its JSON output.
func (n *node) sluice(t *testing.T, to any, args ...string) {
	t.Helper()
	if err := n.trySluice(t.Context(), to, args...); err != nil {
		t.Fatal(err)
	}
}

func (n *node) trySluice(ctx context.Context, to any, args ...string) error {
	out, err := n.run(ctx, args...)
	if err != nil {
		return err
	}
	return unmarshal(out, to)
}

// unmarshal decodes the program's output. If the target is a slice, it decodes the items of a list.
func unmarshal(out []byte, to any) error {
	if reflect.TypeOf(to).Elem().Kind() != reflect.Slice {
		return json.Unmarshal(out, to)
	}
	list := struct {
		Items any `json:"items"`
	}{to}
	return json.Unmarshal(out, &list)
}

// run executes the program against the node, with JSON output.
func (n *node) run(ctx context.Context, args ...string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(binDir(), "sluice"), //nolint:gosec // the program under test
		append([]string{"--instance", n.Instance(), "-o", "json"}, args...)...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%v: %w: %s%s", args, err, out, stderr.Bytes())
	}
	return out, nil
}

// receiveAll reads a stream to its end.
func receiveAll[T any](stream grpc.ServerStreamingClient[T], err error) ([]*T, error) {
	if err != nil {
		return nil, err
	}
	var all []*T
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return nil, err
		}
		all = append(all, m)
	}
}
