// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"path/filepath"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sync/errgroup"

	"github.com/sluice-net/sluice/devnode"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// remoteNode is the identity of other nodes' addresses.
const remoteNode = 6

// perSecond is the rate of endpoint changes while their propagation to other nodes is measured.
const perSecond = 50

// nodeGroup is a cluster of three nodes, with the information that each node has about the others.
type nodeGroup struct {
	bench   *bench
	cluster *devnode.Cluster
	nodes   []*groupNode

	mu       sync.Mutex
	arrivals map[arrival]*expected // guarded by mu
}

type groupNode struct {
	*devnode.Node
	registry identityv1.ClusterServiceClient
	identity identityv1.IdentityServiceClient
	ipcache  *ebpf.Map // IPv4 ipcache in the node's kernel
}

// arrival is information that reaches a node: another node, or the identity of an address.
type arrival struct {
	kernel   bool // arrived in the ipcache; otherwise WatchCluster sent it
	node     string
	address  netip.Addr
	identity uint32
}

// expected is an arrival that every node is expected to get.
type expected struct {
	left map[*groupNode]bool // nodes without it
	last time.Time           // time at which the last node got it
	done chan struct{}
}

// cluster measures the time until nodes learn of each other, and the cost of the cluster for an ADD.
func (b *bench) cluster(ctx context.Context) error {
	c, err := devnode.UpCluster(ctx, devnode.ClusterOptions{Nodes: 3, Options: devnode.Options{
		Instance: b.prefix + "c", BinDir: b.binDir, Args: map[string][]string{devnode.IPAM: {"--quarantine=1s"}},
	}})
	if err != nil {
		return err
	}
	b.cleanup = append(b.cleanup, func() error { return c.Down(context.Background()) })
	g := &nodeGroup{bench: b, cluster: c, arrivals: map[arrival]*expected{}}
	nodes, err := c.Nodes()
	if err != nil {
		return err
	}
	watching, stop := context.WithCancel(ctx)
	defer stop()
	var watches errgroup.Group
	for _, n := range nodes {
		member, err := g.join(n)
		if err != nil {
			return err
		}
		g.nodes = append(g.nodes, member)
		if member.ipcache, err = ipcacheOf(n); err != nil {
			return err
		}
		b.cleanup = append(b.cleanup, member.ipcache.Close)
		stream, err := member.registry.WatchCluster(watching, &identityv1.WatchClusterRequest{})
		if err != nil {
			return err
		}
		watches.Go(func() error { return g.follow(watching, member, stream) })
		watches.Go(func() error { return g.poll(watching, member) })
	}
	if err := g.joins(ctx); err != nil {
		return err
	}
	if err := g.changes(ctx); err != nil {
		return err
	}
	stop()
	if err := watches.Wait(); err != nil {
		return err
	}
	return g.adds(ctx)
}

// ipcacheOf opens the IPv4 ipcache of a node.
func ipcacheOf(n *devnode.Node) (*ebpf.Map, error) {
	pins, err := filepath.Glob(filepath.Join(n.Paths().BPFDir, "sl_ipc4_*"))
	if err != nil || len(pins) != 1 {
		return nil, fmt.Errorf("pins of sl_ipc4 at %s: %v, %w", n.Name(), pins, err)
	}
	return ebpf.LoadPinnedMap(pins[0], &ebpf.LoadPinOptions{ReadOnly: true})
}

// identityInKernel returns the identity of the longest prefix that contains an address. The layout is struct
// sl_prefix4 and struct sl_ipcache of bpf/include/sluice/abi.h.
func (n *groupNode) identityInKernel(a netip.Addr) (uint32, error) {
	key := struct {
		Bits    uint32
		Address [4]byte
	}{32, a.As4()}
	var value struct {
		Identity    uint32
		Node, Flags uint16
	}
	err := n.ipcache.Lookup(key, &value)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return 0, nil
	}
	return value.Identity, err
}

// join connects to a node.
func (g *nodeGroup) join(n *devnode.Node) (*groupNode, error) {
	conn, err := g.bench.dialTo(n, devnode.Identity)
	if err != nil {
		return nil, err
	}
	return &groupNode{
		Node: n, registry: identityv1.NewClusterServiceClient(conn),
		identity: identityv1.NewIdentityServiceClient(conn),
	}, nil
}

// follow records what a node's WatchCluster sends.
func (g *nodeGroup) follow(ctx context.Context, n *groupNode,
	stream identityv1.ClusterService_WatchClusterClient,
) error {
	for {
		m, err := stream.Recv()
		at := time.Now()
		if ctx.Err() != nil || errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("watch the cluster: %w", err)
		}
		for _, other := range m.GetNodes() {
			g.arrived(n, arrival{node: other.GetName()}, at)
		}
		for _, e := range m.GetMappings() {
			if p, err := netip.ParsePrefix(e.GetPrefix()); err == nil {
				g.arrived(n, arrival{address: p.Addr(), identity: e.GetIdentity()}, at)
			}
		}
	}
}

// poll records the state of a node's kernel, with millisecond resolution.
func (g *nodeGroup) poll(ctx context.Context, n *groupNode) error {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		for _, what := range g.awaitedInKernel(n) {
			number, err := n.identityInKernel(what.address)
			if err != nil {
				return err
			}
			if number == what.identity {
				g.arrived(n, what, time.Now())
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}

func (g *nodeGroup) awaitedInKernel(n *groupNode) (all []arrival) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for what, e := range g.arrivals {
		if what.kernel && e.left[n] {
			all = append(all, what)
		}
	}
	return all
}

func (g *nodeGroup) arrived(n *groupNode, what arrival, at time.Time) {
	g.mu.Lock()
	defer g.mu.Unlock()
	e := g.arrivals[what]
	if e == nil || !e.left[n] {
		return
	}
	if delete(e.left, n); len(e.left) == 0 {
		e.last = at
		delete(g.arrivals, what)
		close(e.done)
	}
}

// expect starts to wait until every node except one has an arrival.
func (g *nodeGroup) expect(what arrival, but *groupNode) *expected {
	g.mu.Lock()
	defer g.mu.Unlock()
	e := &expected{left: map[*groupNode]bool{}, done: make(chan struct{})}
	for _, n := range g.nodes {
		if n != but {
			e.left[n] = true
		}
	}
	g.arrivals[what] = e
	return e
}

// after waits for the last node, and returns the time from begin until that node had the arrival.
func (e *expected) after(ctx context.Context, begin time.Time) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	select {
	case <-e.done:
		return e.last.Sub(begin), nil
	case <-ctx.Done():
		return 0, fmt.Errorf("a change does not reach every node: %w", ctx.Err())
	}
}

// joins adds a fourth node and removes it, repeatedly.
func (g *nodeGroup) joins(ctx context.Context) error {
	b := g.bench
	var start, kernel samples
	var joined []*devnode.Node
	for range min(b.sizes.rounds, devnode.MaxNodes-len(g.nodes)) {
		name := fmt.Sprintf("sluice-%s-%d", g.cluster.Instance(), len(g.nodes)+len(joined)+1)
		record := g.expect(arrival{node: name}, nil)
		begin := time.Now()
		n, err := g.cluster.AddNode(ctx)
		if err != nil {
			return err
		}
		joined = append(joined, n)
		took, err := record.after(ctx, begin)
		if err != nil {
			return err
		}
		address := g.expect(arrival{kernel: true, address: n.Addresses()[0], identity: remoteNode}, nil)
		inKernel, err := address.after(ctx, begin)
		if err != nil {
			return err
		}
		start, kernel = append(start, took), append(kernel, inKernel)
		// The next node becomes the fourth one. It gets new ranges, because the ranges of the removed node are in
		// quarantine until the node is forgotten.
		for _, service := range n.Services() {
			if err := n.Stop(ctx, service); err != nil {
				return err
			}
		}
	}
	for _, n := range joined {
		if err := n.Down(ctx); err != nil {
			return err
		}
	}
	fmt.Fprintf(b.out, "A node that joins three:\n\n")
	printTimes(b.out, []timesRow{
		{"from the start of its processes to WatchCluster of all three", start},
		{"from the same to its address in the kernels of all three", kernel},
	})
	b.wantTime("a fourth node in every other node's kernel, from the start of its processes, p99", time.Second,
		kernel.quantile(0.99))
	return nil
}

// timesRow is a row of printTimes.
type timesRow struct {
	what string
	of   samples
}

func printTimes(out io.Writer, rows []timesRow) {
	fmt.Fprintln(out, "| what | times | p50 | p99 | worst |")
	fmt.Fprintln(out, "|---|---|---|---|---|")
	for _, row := range rows {
		fmt.Fprintf(out, "| %s | %d | %s | %s | %s |\n", row.what, len(row.of), milliseconds(row.of.quantile(0.5)),
			milliseconds(row.of.quantile(0.99)), milliseconds(row.of.worst()))
	}
	fmt.Fprintln(out)
}

// addressOf returns an address of the node's range that no container has.
func (n *groupNode) addressOf(endpoint int) netip.Addr {
	b := n.PodCIDRs()[0].Addr().As4()
	b[3] = byte(200 + endpoint)
	return netip.AddrFrom4(b)
}

// resolve assigns one of two identities to an endpoint of a node, as the datapath does when labels change.
func (n *groupNode) resolve(ctx context.Context, endpoint, turn int) (number uint32, err error) {
	resp, err := n.identity.ResolveEndpoint(ctx, &identityv1.ResolveEndpointRequest{
		Owner:   &workloadv1.Owner{ContainerId: fmt.Sprint("bench-", endpoint), InterfaceName: "eth0"},
		Manager: "bench", Addresses: []string{n.addressOf(endpoint).String()},
		Labels: []*workloadv1.Label{{Source: "cni", Key: "turn", Value: fmt.Sprint(turn % 2)}},
	})
	return resp.GetIdentity().GetNumber(), err
}

// changes changes the identities of endpoints on all nodes in turn. It measures until both other nodes have each
// change in WatchCluster and in their kernels.
func (g *nodeGroup) changes(ctx context.Context) error {
	const endpoints = 40 // of each node
	b := g.bench
	var numbers [2]uint32
	for _, n := range g.nodes {
		for e := range endpoints {
			for turn := range numbers {
				var err error
				if numbers[turn], err = n.resolve(ctx, e, turn); err != nil {
					return err
				}
			}
		}
	}
	var mu sync.Mutex
	var watched, inKernel samples
	group, groupCtx := errgroup.WithContext(ctx)
	tick := time.NewTicker(time.Second / perSecond)
	defer tick.Stop()
	for i := range 10 * b.sizes.changes {
		<-tick.C
		n, e, turn := g.nodes[i%len(g.nodes)], i/len(g.nodes)%endpoints, i/len(g.nodes)/endpoints
		group.Go(func() error {
			what := arrival{address: n.addressOf(e), identity: numbers[turn%2]}
			watch := g.expect(what, n)
			what.kernel = true
			kernel := g.expect(what, n)
			begin := time.Now()
			if _, err := n.resolve(groupCtx, e, turn); err != nil {
				return err
			}
			w, err := watch.after(groupCtx, begin)
			if err != nil {
				return err
			}
			k, err := kernel.after(groupCtx, begin)
			mu.Lock()
			defer mu.Unlock()
			watched, inKernel = append(watched, w), append(inKernel, k)
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	fmt.Fprintf(b.out, "Endpoints of three nodes that get another identity, %d a second, from ResolveEndpoint on:\n\n",
		perSecond)
	printTimes(b.out, []timesRow{
		{"to WatchCluster of both other nodes", watched}, {"to the kernels of both other nodes", inKernel},
	})
	b.wantTime(fmt.Sprintf("a change of an endpoint in the kernels of both other nodes, %d a second, p99", perSecond),
		100*time.Millisecond, inKernel.quantile(0.99))
	return nil
}

// adds compares ADD on a node of a three-node cluster with ADD on a single node, while etcd is available and while it
// is not.
func (g *nodeGroup) adds(ctx context.Context) error {
	b := g.bench
	// Without ranges, a node does not register and publishes no endpoints.
	without, err := devnode.Up(ctx, devnode.Options{
		Instance: b.prefix + "w", BinDir: b.binDir,
		Args: map[string][]string{devnode.IPAM: {"--quarantine=1s", "--identity="}},
	})
	if err != nil {
		return err
	}
	b.cleanup = append(b.cleanup, func() error { return without.Down(context.Background()) })
	var networks []network
	for _, n := range []struct {
		name string
		node *devnode.Node
	}{{"a node in no cluster", without}, {"a cluster of one node", b.node}, {"a node of three", g.nodes[0].Node}} {
		network, err := labelledOn(n.node, n.name, "role", "plain")
		if err != nil {
			return err
		}
		networks = append(networks, network)
	}
	release, err := b.hold(ctx, networks)
	defer func() { _ = release() }() // the nodes are removed anyway
	if err != nil {
		return err
	}
	for _, state := range []string{"etcd answers", "etcd is unavailable"} {
		if state == "etcd is unavailable" {
			for _, n := range []*devnode.Node{g.cluster.Hub(), without, b.node} {
				if err := n.Stop(ctx, devnode.Etcd); err != nil {
					return err
				}
			}
		}
		times, err := b.addsInTurn(ctx, networks)
		if err != nil {
			return err
		}
		fmt.Fprintf(b.out, "ADD with a label set that the node holds, one at a time, interleaved in %d rounds, while %s:\n\n",
			b.sizes.rounds, state)
		printTimes(b.out, rowsOf(networks, times))
		for i, n := range networks[1:] {
			b.wantTime(fmt.Sprintf("ADD p50 of %s minus the p50 of a single node, while %s", n.name, state),
				300*time.Microsecond, times[1+i].quantile(0.5)-times[0].quantile(0.5))
		}
	}
	return b.node.Start(ctx, devnode.Etcd) // for the parts that follow
}

// hold connects a pod to each network, so that its node has a reference to the label set of later pods. The returned
// function removes the pods, also after an error.
func (b *bench) hold(ctx context.Context, networks []network) (release func() error, err error) {
	var made undo
	for i, n := range networks {
		p, err := n.connect(ctx, fmt.Sprintf("%s-hold-%d", b.prefix, i))
		if err != nil {
			return made.all, err
		}
		made.add(func() error { return n.disconnect(context.WithoutCancel(ctx), p) })
	}
	return made.all, nil
}

// addsInTurn measures ADDs of networks, alternating between them in each round.
func (b *bench) addsInTurn(ctx context.Context, networks []network) ([]samples, error) {
	times := make([]samples, len(networks))
	for round := range b.sizes.rounds {
		for k := range networks {
			i := (k + round) % len(networks) // a different one begins each round
			took, err := b.timeAdds(ctx, networks[i], fmt.Sprintf("%s-a-%d-%d", b.prefix, round, i))
			if err != nil {
				return nil, err
			}
			times[i] = append(times[i], took...)
		}
	}
	return times, nil
}

// rowsOf returns a table row for each network.
func rowsOf(networks []network, times []samples) (rows []timesRow) {
	for i, n := range networks {
		rows = append(rows, timesRow{n.name, times[i]})
	}
	return rows
}

// quiet is the pause before each measured ADD. In it, etcd and all nodes finish the previous DEL, which would
// otherwise slow down the next ADD on any node.
const quiet = 100 * time.Millisecond

// timeAdds measures ADDs. The times include only the ADD itself.
func (b *bench) timeAdds(ctx context.Context, n network, prefix string) (took samples, err error) {
	for i := range b.sizes.pods {
		p := pod.Pod{Name: fmt.Sprintf("%s-%d", prefix, i)}
		p.Netns = pod.NetnsPath(p.Name)
		if err := pod.NewNetns(p.Netns); err != nil {
			return nil, err
		}
		time.Sleep(quiet) // etcd and the nodes finish earlier work
		d, err := timed(func() error {
			_, _, err := n.call(ctx, "ADD", p.Name, p.Netns)
			return err
		})
		if err := errors.Join(err, n.disconnect(context.WithoutCancel(ctx), p)); err != nil {
			return nil, err
		}
		took = append(took, d)
	}
	return took, nil
}
