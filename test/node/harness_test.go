// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package node tests a whole node: every service as a separate process, a real etcd, the real shim executed as a
// runtime does, and packets between pods.
package node

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/rpc/client"
	"github.com/sluice-net/sluice/kit/servicetest"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	ipamv1 "github.com/sluice-net/sluice/proto/gen/sluice/ipam/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	"github.com/sluice-net/sluice/test/internal/cni"
	"github.com/sluice-net/sluice/test/internal/machine"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// patience limits waits for events that take milliseconds on an idle machine.
const patience = 30 * time.Second

// binDir returns the directory to which `make build` writes the programs.
func binDir() string {
	if dir := os.Getenv("SLUICE_BIN"); dir != "" {
		return dir
	}
	return filepath.Join("..", "..", "bin")
}

// testNode is a node with clients to its services.
type testNode struct {
	*devnode.Node
	ipam     ipamv1.IPAMServiceClient
	identity identityv1.IdentityServiceClient
	policy   policyv1.PolicyServiceClient
	datapath datapathv1.DatapathServiceClient
	observer datapathv1.ObserverServiceClient
}

// name returns a name that no other test and no other copy of it uses.
func name(t testing.TB, prefix string) string {
	t.Helper()
	return machine.Name(prefix)
}

// newNode starts a node and removes it at the end of the test. The test fails if the node leaves anything on the
// machine.
func newNode(t *testing.T, options ...func(*devnode.Options)) *testNode {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("node tests need root")
	}
	o := devnode.Options{Instance: name(t, "t"), BinDir: binDir()}
	for _, option := range options {
		option(&o)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	defer cancel()
	n, err := devnode.Up(ctx, o)
	if err != nil {
		t.Fatalf("bring the node up: %v", err)
	}
	node := &testNode{Node: n}
	t.Cleanup(func() {
		if t.Failed() {
			node.dump(t)
		}
		ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
		defer cancel()
		if err := n.Down(ctx); err != nil {
			t.Errorf("take the node down: %v", err)
		}
		if left := leftovers(t, n); len(left) > 0 {
			t.Errorf("the node left on the machine: %v", left)
		}
	})
	node.ipam = ipamv1.NewIPAMServiceClient(dial(t, n, devnode.IPAM))
	node.identity = identityv1.NewIdentityServiceClient(dial(t, n, devnode.Identity))
	node.policy = policyv1.NewPolicyServiceClient(dial(t, n, devnode.Policy))
	conn := dial(t, n, devnode.Datapath)
	node.datapath = datapathv1.NewDatapathServiceClient(conn)
	node.observer = datapathv1.NewObserverServiceClient(conn)
	return node
}

// dial connects to a service. Calls wait while the service is down.
func dial(t *testing.T, n *devnode.Node, service string) *grpc.ClientConn {
	t.Helper()
	conn, err := client.Dial(n.Socket(service), client.Options{WaitForReady: true, Timeout: patience})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// dump logs the ends of the services' and the shim's logs.
func (n *testNode) dump(t *testing.T) {
	for _, service := range devnode.Services() {
		content, err := os.ReadFile(n.Log(service))
		if err != nil {
			t.Logf("log of %s: %v", service, err)
			continue
		}
		if len(content) > 6000 {
			content = content[len(content)-6000:]
		}
		t.Logf("log of %s ends with:\n%s", service, content)
	}
	content, _ := os.ReadFile(filepath.Join(n.Paths().RunDir, "log", "cni.log"))
	if len(content) > 6000 {
		content = content[len(content)-6000:]
	}
	t.Logf("log of the shim ends with:\n%s", content)
}

// config returns the shim's configuration as a runtime passes it.
func (n *testNode) config(t *testing.T, version string, extra map[string]any) []byte {
	t.Helper()
	config, err := cni.PluginConfig(n.CNIConflist(), version, extra)
	if err != nil {
		t.Fatal(err)
	}
	return config
}

// labels returns a configuration with runtimeConfig.labels.
func labels(pairs ...string) map[string]any {
	var list []map[string]string
	for i := 0; i+1 < len(pairs); i += 2 {
		list = append(list, map[string]string{"key": pairs[i], "value": pairs[i+1]})
	}
	return map[string]any{"runtimeConfig": map[string]any{"labels": list}}
}

// call executes the shim for a pod.
func (n *testNode) call(ctx context.Context, command string, p pod.Pod, config []byte, files ...*os.File) ([]byte,
	error,
) {
	return cni.Run(ctx, cni.Call{
		Plugin: n.Plugin(), Command: command, ContainerID: p.Name, Netns: p.Netns, IfName: "eth0",
		Args: "IgnoreUnknown=1;K8S_POD_NAMESPACE=test;K8S_POD_NAME=" + p.Name, Path: filepath.Dir(n.Plugin()),
		Config: config, ExtraFiles: files,
	})
}

// newPod makes a network namespace that is removed with the test.
func newPod(t testing.TB, prefix string) pod.Pod {
	t.Helper()
	id := name(t, prefix+"-")
	p := pod.Pod{Name: id, Netns: pod.NetnsPath(id)}
	if err := os.MkdirAll(filepath.Dir(p.Netns), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := pod.NewNetns(p.Netns); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := pod.DeleteNetns(p.Netns); err != nil {
			t.Error(err)
		}
	})
	return p
}

// add connects a pod through the shim and returns it with its addresses.
func (n *testNode) add(t testing.TB, p pod.Pod, config []byte) pod.Pod {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	result, err := n.call(ctx, "ADD", p, config)
	if err != nil {
		t.Fatalf("ADD %s: %v", p.Name, err)
	}
	return withAddresses(t, p, result)
}

func withAddresses(t testing.TB, p pod.Pod, result []byte) pod.Pod {
	t.Helper()
	addresses, err := cni.Addresses(result)
	if err != nil {
		t.Fatalf("ADD %s: %v: %s", p.Name, err, result)
	}
	return p.WithAddresses(addresses)
}

// addPods connects pods with the labels app=<prefix>.
func (n *testNode) addPods(t *testing.T, prefixes ...string) []pod.Pod {
	t.Helper()
	var pods []pod.Pod
	for _, prefix := range prefixes {
		pods = append(pods, n.add(t, newPod(t, prefix), n.config(t, "1.0.0", labels("app", prefix))))
	}
	return pods
}

// del disconnects a pod through the shim.
func (n *testNode) del(t testing.TB, p pod.Pod) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, err := n.call(ctx, "DEL", p, n.config(t.(*testing.T), "1.0.0", nil)); err != nil {
		t.Fatalf("DEL %s: %v", p.Name, err)
	}
}

// exchange sends TCP, UDP and ping in every family and in both directions.
func exchange(t *testing.T, a, b pod.Pod) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	message := make([]byte, 100<<10)
	if _, err := rand.Read(message); err != nil {
		t.Fatal(err)
	}
	for _, way := range []struct{ from, to pod.Pod }{{a, b}, {b, a}} {
		if len(way.to.Addresses()) != 2 {
			t.Fatalf("pod %s has addresses %v, want one of each family", way.to.Name, way.to.Addresses())
		}
		for _, address := range way.to.Addresses() {
			if err := pod.ExchangeTCP(ctx, way.from, way.to, address, message); err != nil {
				t.Error(err)
			}
			if err := pod.ExchangeUDP(ctx, way.from, way.to, address, message[:1200]); err != nil {
				t.Error(err)
			}
			if _, _, err := way.from.Ping(ctx, address); err != nil {
				t.Error(err)
			}
		}
	}
}

// receiveAll reads a stream to its end.
func receiveAll[T any](stream grpc.ServerStreamingClient[T]) ([]*T, error) {
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

// counters returns the packet counters by reason, summed over both directions.
func (n *testNode) counters(t testing.TB) map[datapathv1.Reason]uint64 {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	status, err := n.datapath.GetStatus(ctx, &datapathv1.GetStatusRequest{})
	if err != nil {
		t.Fatalf("status of the datapath: %v", err)
	}
	sums := make(map[datapathv1.Reason]uint64)
	for _, c := range status.GetPacketCounters() {
		sums[c.GetReason()] += c.GetPackets()
	}
	return sums
}

// holdings returns everything that the services hold for pods.
func (n *testNode) holdings(ctx context.Context) ([]string, error) {
	var held []string
	endpoints, err := n.datapath.ListEndpoints(ctx, &datapathv1.ListEndpointsRequest{})
	if err != nil {
		return nil, err
	}
	endpointList, err := receiveAll(endpoints)
	if err != nil {
		return nil, err
	}
	for _, e := range endpointList {
		held = append(held, "endpoint "+e.GetEndpoint().GetOwner().GetContainerId())
	}
	allocations, err := n.ipam.ListAllocations(ctx, &ipamv1.ListAllocationsRequest{})
	if err != nil {
		return nil, err
	}
	allocationList, err := receiveAll(allocations)
	if err != nil {
		return nil, err
	}
	for _, a := range allocationList {
		for _, address := range a.GetAllocation().GetAddresses() {
			ip := netip.MustParseAddr(address.GetAddress())
			held = append(held, fmt.Sprintf("address %s of %s", ip, a.GetAllocation().GetOwner().GetContainerId()))
		}
	}
	identities, err := n.identity.ListIdentities(ctx, &identityv1.ListIdentitiesRequest{})
	if err != nil {
		return nil, err
	}
	identityList, err := receiveAll(identities)
	if err != nil {
		return nil, err
	}
	for _, i := range identityList {
		if i.GetReferenceCount() > 0 {
			held = append(held, fmt.Sprintf("identity %d with %d references", i.GetIdentity().GetNumber(),
				i.GetReferenceCount()))
		}
	}
	audit, err := n.datapath.AuditMaps(ctx, &datapathv1.AuditMapsRequest{})
	if err != nil {
		return nil, err
	}
	differences, err := receiveAll(audit)
	if err != nil {
		return nil, err
	}
	for _, d := range differences {
		held = append(held, fmt.Sprintf("audit: %s", d.GetDifference()))
	}
	for _, dir := range []string{
		filepath.Join(n.Paths().ServiceStateDir(devnode.Datapath), "endpoints"),
		filepath.Join(n.Paths().ServiceStateDir("cni"), "deletes"),
	} {
		records, err := filepath.Glob(filepath.Join(dir, "[^.]*"))
		if err != nil {
			return nil, err
		}
		for _, r := range records {
			held = append(held, "record "+r)
		}
	}
	return held, nil
}

// wantNothingHeld waits until no service holds any state of pods, and no device or route is left.
func (n *testNode) wantNothingHeld(t *testing.T) {
	t.Helper()
	servicetest.EventuallyNil(t, "nothing is held", func() error {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		held, err := n.holdings(ctx)
		if err != nil {
			return err
		}
		devices, err := nodeDevices(n.Netns())
		if err != nil {
			return err
		}
		for _, d := range devices {
			held = append(held, "device "+d)
		}
		routes, err := nodeRoutes(n.Netns())
		if err != nil {
			return err
		}
		for _, r := range routes {
			held = append(held, "route "+r)
		}
		if len(held) > 0 {
			return fmt.Errorf("%d things: %v", len(held), held[:min(len(held), 10)])
		}
		return nil
	})
}
