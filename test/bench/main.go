// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Command bench measures Sluice beside reference networks on the same machine
// in the same run: the CNI plugins ptp and bridge with host-local, and a bare
// veth pair. The networks take turns within every round, so that a machine
// whose speed drifts slows all of them; compare the ratios, not the times.
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
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/cmd/sluice/devnode"
	"github.com/sluice-net/sluice/test/internal/cni"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// sizes say how much is measured.
type sizes struct {
	rounds       int // of everything
	pods         int // ADD and DEL one at a time, per network and round
	parallelPods int // ADD and DEL 8 at a time, per network and round
	exchanges    int // request/response, per path and round
	connects     int // connections, per path and round
	endpoints    int // of the memory and restart measurements
}

func main() {
	binDir := flag.String("bin-dir", "bin", "directory of the programs that `make build` made")
	quick := flag.Bool("quick", false, "measure little: to see that everything works")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	defer stop()
	// A reader that leaves must not keep the benchmark from cleaning up.
	signal.Ignore(unix.SIGPIPE)
	s := sizes{rounds: 10, pods: 20, parallelPods: 24, exchanges: 20000, connects: 2000, endpoints: 100}
	if *quick {
		s = sizes{rounds: 2, pods: 3, parallelPods: 8, exchanges: 500, connects: 100, endpoints: 8}
	}
	if err := run(ctx, os.Stdout, *binDir, s); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// bench is one run.
type bench struct {
	out    io.Writer
	sizes  sizes
	node   *devnode.Node
	sluice network
	peers  []network // the reference networks, IPv4 alone
	// dualStack is the one that does the same work as Sluice.
	dualStack network
	prefix    string
	results   []result
	addP99    time.Duration // of Sluice, one at a time
	cleanup   []func() error
}

func run(ctx context.Context, out io.Writer, binDir string, s sizes) (err error) {
	if os.Geteuid() != 0 {
		return errors.New("must run as root: it makes network namespaces")
	}
	b := &bench{out: out, sizes: s, prefix: fmt.Sprintf("slb%d", os.Getpid())}
	defer func() {
		for i := len(b.cleanup) - 1; i >= 0; i-- {
			err = errors.Join(err, b.cleanup[i]())
		}
	}()
	if err := b.start(ctx, binDir); err != nil {
		return err
	}
	for _, part := range []struct {
		title string
		run   func(context.Context) error
	}{
		{"ADD and DEL", b.attachments},
		{"Traffic between two pods of one node", b.traffic},
		{"Start, restart and memory", b.lifecycle},
	} {
		fmt.Fprintf(out, "\n## %s\n\n", part.title)
		if err := part.run(ctx); err != nil {
			return fmt.Errorf("%s: %w", part.title, err)
		}
	}
	fmt.Fprint(out, "\n## Against what is wanted\n\n")
	printResults(out, b.results)
	return nil
}

// start brings up a Sluice node and a namespace for each reference network.
func (b *bench) start(ctx context.Context, binDir string) error {
	if err := os.MkdirAll(filepath.Dir(pod.NetnsPath("x")), 0o755); err != nil {
		return err
	}
	node, err := devnode.Up(ctx, devnode.Options{
		Instance: b.prefix, BinDir: binDir,
		// More pods come and go than there are addresses.
		Args: map[string][]string{devnode.IPAM: {"--rest=1s"}},
	})
	if err != nil {
		return err
	}
	b.node = node
	b.cleanup = append(b.cleanup, func() error { return devnode.Down(context.Background(), node.Instance()) })
	config, err := cni.PluginConfig(node.CNIConflist(), "1.0.0", map[string]any{
		"runtimeConfig": map[string]any{"labels": []map[string]string{{"key": "app", "value": "bench"}}},
	})
	if err != nil {
		return err
	}
	b.sluice = network{name: "sluice, both families", plugin: node.Plugin(), config: config, share: 1}

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

// forward switches IP forwarding on in a namespace.
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

func timed(fn func() error) (time.Duration, error) {
	start := time.Now()
	err := fn()
	return time.Since(start), err
}
