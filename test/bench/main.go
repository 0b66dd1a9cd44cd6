// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Command bench measures Sluice and reference networks on the same machine in the same run: the CNI plugins ptp and
// bridge with host-local, and a bare veth pair. The networks alternate within every round, so that changes of the
// machine's speed affect all of them. Compare the ratios, not the times.
//
// It needs root and leaves nothing behind.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/rpc/client"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	"github.com/sluice-net/sluice/test/internal/cni"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// sizes are the numbers of repetitions and objects.
type sizes struct {
	rounds       int // of everything
	pods         int // ADD and DEL one at a time, per network and round
	parallelPods int // ADD and DEL 8 at a time, per network and round
	exchanges    int // request/response, per path and round
	connects     int // connections, per path and round
	datagrams    int // one way, per path and round
	streamed     int // bytes one way, per path and round
	changes      int // changes of policies, per kind
	fileChanges  int // changes by file, per kind
	endpoints    int // at most, for the changes of policies
	many         int // endpoints of a full node
	restarts     int // per number of endpoints, and of services
	services     int // of a node with many services
	cluster      clusterSize
}

// part is a selectable measurement.
type part struct {
	name, title string
	run         func(*bench, context.Context) error
}

// parts in the order in which they run. The changes are last, because they fill the processes with identities.
var parts = []part{
	{"attach", "ADD and DEL", (*bench).attachments},
	{"traffic", "Traffic between two pods of one node", (*bench).traffic},
	{"nodes", "Traffic between pods of two nodes", (*bench).nodes},
	{"lifecycle", "Start, restart, memory, and a full node", (*bench).lifecycle},
	{"file", "A change of policy by file and by call", (*bench).byFile},
	{"cluster", "Nodes that agree through etcd", (*bench).cluster},
	{"services", "Services", (*bench).services},
	{"dns", "DNS through sluice-dns", (*bench).dns},
	{"policies-30000", "A node of a cluster with 30,000 policies", (*bench).manyPolicies},
	{"changes", "From a change of policy to its enforcement", (*bench).changes},
}

// choose returns the named parts, separated by commas, or all parts without a name.
func choose(names string) ([]part, error) {
	if names == "" {
		return parts, nil
	}
	var chosen []part
	for name := range strings.SplitSeq(names, ",") {
		i := slices.IndexFunc(parts, func(p part) bool { return p.name == name })
		if i < 0 {
			return nil, fmt.Errorf("no part %q", name)
		}
		chosen = append(chosen, parts[i])
	}
	return chosen, nil
}

func main() {
	binDir := flag.String("bin-dir", "bin", "directory of the programs that `make build` writes")
	quick := flag.Bool("quick", false, "few repetitions, to check that everything works")
	names := flag.String("parts", "", "measure only these `parts`, separated by commas: "+
		"attach, traffic, nodes, lifecycle, file, cluster, services, dns, policies-30000, changes")
	rounds := flag.Int("rounds", 0, "number of rounds, instead of 10")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	defer stop()
	// A reader that closes the pipe must not prevent the cleanup.
	signal.Ignore(unix.SIGPIPE)
	s := sizes{
		rounds: 10, pods: 20, parallelPods: 24, exchanges: 20000, connects: 2000, datagrams: 50000,
		streamed: 2 << 30, changes: 100, fileChanges: 30, endpoints: 100, many: 1000, restarts: 5,
		services: 10000, cluster: clusterSize{nodes: 1000, identities: 6000, pods: 30_000, policies: 30_000},
	}
	if *quick {
		s = sizes{
			rounds: 2, pods: 3, parallelPods: 8, exchanges: 500, connects: 100, datagrams: 1000,
			streamed: 64 << 20, changes: 5, fileChanges: 5, endpoints: 8, many: 40, restarts: 2,
			services: 100, cluster: clusterSize{nodes: 20, identities: 600, pods: 600, policies: 600},
		}
	}
	if *rounds > 0 {
		s.rounds = *rounds
	}
	chosen, err := choose(*names)
	if err == nil {
		err = run(ctx, os.Stdout, *binDir, s, chosen)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// bench is one run.
type bench struct {
	out    io.Writer
	binDir string
	sizes  sizes
	node   *devnode.Node
	sluice network
	// clients to the services of the node
	policies policies
	identity identityv1.IdentityServiceClient
	datapath datapathv1.DatapathServiceClient
	peers    []network // the reference networks, IPv4 only
	// dualStack is the reference network with IPv4 and IPv6, as in Sluice; peers have IPv4 only.
	dualStack network
	prefix    string
	results   []result
	cleanup   []func() error
}

func run(ctx context.Context, out io.Writer, binDir string, s sizes, chosen []part) (err error) {
	if os.Geteuid() != 0 {
		return errors.New("must run as root: it makes network namespaces")
	}
	b := &bench{out: out, binDir: binDir, sizes: s, prefix: fmt.Sprintf("slb%d", os.Getpid())}
	defer func() {
		for i := len(b.cleanup) - 1; i >= 0; i-- {
			err = errors.Join(err, b.cleanup[i]())
		}
	}()
	if err := b.start(ctx); err != nil {
		return err
	}
	for _, p := range chosen {
		fmt.Fprintf(out, "\n## %s\n\n", p.title)
		if err := p.run(b, ctx); err != nil {
			return fmt.Errorf("%s: %w", p.title, err)
		}
	}
	fmt.Fprint(out, "\n## Results and targets\n\n")
	printResults(out, b.results)
	return nil
}

// start starts a Sluice node and makes a namespace for each reference network.
func (b *bench) start(ctx context.Context) error {
	if err := os.MkdirAll(filepath.Dir(pod.NetnsPath("x")), 0o755); err != nil {
		return err
	}
	node, err := devnode.Up(ctx, devnode.Options{
		Instance: b.prefix, BinDir: b.binDir,
		// The benchmark uses more pods than there are addresses, so quarantine is short, and more identities than a
		// node may hold by default.
		Args: map[string][]string{devnode.IPAM: {"--quarantine=1s"}, devnode.Identity: {"--quota=16384"}},
	})
	if err != nil {
		return err
	}
	b.node = node
	b.cleanup = append(b.cleanup, func() error { return devnode.Down(context.Background(), node.Instance()) })
	if err := b.dial(); err != nil {
		return err
	}
	if b.sluice, err = b.labelled("sluice, both families", "role", "plain"); err != nil {
		return err
	}

	for i, kind := range []string{"ptp", "bridge"} {
		if _, err := os.Stat(filepath.Join(referencePlugins, kind)); err != nil {
			return fmt.Errorf("reference plugin: %w; install Debian's containernetworking-plugins", err)
		}
		data, err := os.MkdirTemp("", b.prefix)
		if err != nil {
			return err
		}
		netns := pod.NetnsPath(b.prefix + kind)
		b.cleanup = append(b.cleanup, func() error { return errors.Join(pod.DeleteNetns(netns), os.RemoveAll(data)) })
		if err := pod.NewNetns(netns); err != nil {
			return err
		}
		if err := forward(netns); err != nil {
			return err
		}
		b.peers = append(b.peers, reference(kind, netns, data, fmt.Sprintf("10.99.%d.0/24", i)))
		if kind == "ptp" {
			b.dualStack = reference(kind, netns, data, "10.99.9.0/24", "fd99::/112")
		}
	}
	return nil
}

// forward enables IP forwarding in a namespace.
func forward(netns string) error {
	return pod.In(netns, func() error {
		for _, key := range []string{"ipv4/ip_forward", "ipv6/conf/all/forwarding"} {
			if err := os.WriteFile(filepath.Join("/proc/sys/net", key), []byte("1"), 0o644); err != nil {
				return err
			}
		}
		return nil
	})
}

// labelled returns Sluice's network for pods with these labels, given as alternating keys and values.
func (b *bench) labelled(name string, pairs ...string) (network, error) {
	return labelledOn(b.node, name, pairs...)
}

func labelledOn(node *devnode.Node, name string, pairs ...string) (network, error) {
	var labels []map[string]string
	for i := 0; i+1 < len(pairs); i += 2 {
		labels = append(labels, map[string]string{"key": pairs[i], "value": pairs[i+1]})
	}
	config, err := cni.PluginConfig(node.CNIConflist(), "1.0.0", map[string]any{
		"runtimeConfig": map[string]any{"labels": labels},
	})
	if err != nil {
		return network{}, err
	}
	return network{
		name: name, node: node, plugin: node.Plugin(), config: config, divisor: 1,
		args: "IgnoreUnknown=1;K8S_POD_NAMESPACE=" + podNamespace,
	}, nil
}

// dial connects to the services of the node.
func (b *bench) dial() error {
	conns := make(map[string]*grpc.ClientConn)
	for _, service := range []string{devnode.Identity, devnode.Datapath, devnode.Policy} {
		conn, err := b.dialTo(b.node, service)
		if err != nil {
			return err
		}
		conns[service] = conn
	}
	b.identity = identityv1.NewIdentityServiceClient(conns[devnode.Identity])
	b.datapath = datapathv1.NewDatapathServiceClient(conns[devnode.Datapath])
	b.policies = policies{policyv1.NewPolicyServiceClient(conns[devnode.Policy])}
	return nil
}

// dialTo connects to a service of a node until the end of the benchmark.
func (b *bench) dialTo(node *devnode.Node, service string) (*grpc.ClientConn, error) {
	conn, err := client.Dial(node.Socket(service), client.Options{WaitForReady: true, Timeout: time.Minute})
	if err == nil {
		b.cleanup = append(b.cleanup, conn.Close)
	}
	return conn, err
}

// undo are the cleanup steps, executed in reverse order.
type undo []func() error

func (u *undo) add(fn func() error) { *u = append(*u, fn) }

func (u *undo) all() (err error) {
	for _, fn := range slices.Backward(*u) {
		err = errors.Join(err, fn())
	}
	return err
}

func timed(fn func() error) (time.Duration, error) {
	start := time.Now()
	err := fn()
	return time.Since(start), err
}
