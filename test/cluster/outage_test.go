// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package cluster

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// allFaults reports whether tests of faults run their long form, instead of the short one of `make test`.
func allFaults() bool { return os.Getenv("SLUICE_TEST_FAULTS") == "all" }

// labelled is a pod on a node, with its label.
type labelled struct {
	pod.Pod
	app string
	on  *node
}

// TestFaultEtcdAwayAcrossRestartsOfEveryProcess stops every member of etcd and then restarts every process of every
// node; with all faults, for a minute. Meanwhile, pods with label sets that a node holds are added and removed, and a
// pod with a new label set is refused with the reason. Afterwards all nodes agree.
func TestFaultEtcdAwayAcrossRestartsOfEveryProcess(t *testing.T) {
	t.Parallel()
	c := newCluster(t, devnode.ClusterOptions{Nodes: 3, EtcdMembers: 3, Options: devnode.Options{
		Args: map[string][]string{devnode.IPAM: {"--quarantine=1s"}},
	}})
	ctx := t.Context()
	held := make([][]labelled, len(c.nodes)) // by node, the oldest first
	numbers := map[string]uint32{}           // by label
	apps := func(i int) []string { return []string{"all", fmt.Sprint("own-", i)} }
	for i, n := range c.nodes {
		for _, app := range apps(i) {
			p := labelled{n.add(t, app), app, n}
			held[i] = append(held[i], p)
			numbers[app] = c.nodes[(i+1)%3].identityOf(t, p.Pod, n)
		}
	}
	for _, n := range c.nodes {
		for _, all := range held {
			for _, p := range all {
				n.kernelHas(t, entries(p.Pod, numbers[p.app], p.on)...)
			}
		}
	}

	for _, member := range c.Hub().Services() {
		if err := c.Hub().Stop(ctx, member); err != nil {
			t.Fatal(err)
		}
	}
	began := time.Now()
	gone := make([][]labelled, len(c.nodes))
	for first := true; first || allFaults() && time.Since(began) < time.Minute; first = false {
		var group errgroup.Group
		for i, n := range c.nodes {
			group.Go(func() error {
				for k, service := range n.Services() {
					if err := n.Restart(ctx, service); err != nil {
						return fmt.Errorf("restart %s of %s without etcd: %w", service, n.Name(), err)
					}
					app := apps(i)[k%2]
					p, err := makePod(t)
					if err == nil {
						p, err = n.tryAdd(ctx, p, app)
					}
					if err != nil {
						return fmt.Errorf("after a restart of %s: %w", service, err)
					}
					held[i] = append(held[i], labelled{p, app, n})
				}
				for len(held[i]) > 4 {
					p := held[i][2] // the first two pods hold the label sets
					if _, err := n.call(ctx, "DEL", p.Pod, ""); err != nil {
						return fmt.Errorf("DEL %s at %s: %w", p.Name, n.Name(), err)
					}
					held[i] = append(held[i][:2], held[i][3:]...)
					gone[i] = append(gone[i], p)
				}
				return nil
			})
		}
		if err := group.Wait(); err != nil {
			t.Fatal(err)
		}
	}
	// The nodes' knowledge of each other survives the restarts.
	for i, n := range c.nodes {
		next := (i + 1) % 3
		for _, p := range held[next][:2] {
			n.kernelHas(t, entries(p.Pod, numbers[p.app], p.on)...)
			if number, on, err := n.mapping(ctx, p.IPv4); err != nil || number != numbers[p.app] || on != p.on.Name() {
				t.Errorf("without etcd %s has %s with identity %d on %q, %v", n.Name(), p.IPv4, number, on, err)
			}
		}
	}
	fresh := newPod(t)
	refused, cancel := context.WithTimeout(ctx, patience)
	_, err := c.nodes[0].callFor(refused, 6*time.Second, "ADD", fresh, "fresh")
	cancel()
	if err == nil || !strings.Contains(err.Error(), "etcd") {
		t.Errorf("ADD of a label set that no node holds, without etcd: %v, want an error that names etcd", err)
	}

	for _, member := range c.Hub().Services() {
		if err := c.Hub().Start(ctx, member); err != nil {
			t.Fatal(err)
		}
	}
	if fresh, err = c.nodes[0].tryAdd(ctx, fresh, "fresh"); err != nil {
		t.Fatal(err)
	}
	numbers["fresh"] = c.nodes[1].identityOf(t, fresh, c.nodes[0])
	held[0] = append(held[0], labelled{fresh, "fresh", c.nodes[0]})
	owners := map[netip.Addr]string{}
	for _, n := range c.nodes {
		n.knows(t, len(c.nodes))
		for i := range held {
			for _, p := range held[i] {
				if got := n.identityOf(t, p.Pod, p.on); got != numbers[p.app] {
					t.Errorf("%s gives pod %s identity %d, before %d", n.Name(), p.Name, got, numbers[p.app])
				}
				n.kernelHas(t, entries(p.Pod, numbers[p.app], p.on)...)
				for _, a := range p.Addresses() {
					if other, ok := owners[a]; ok && other != p.Name {
						t.Errorf("%s is the address of both %s and %s", a, p.Name, other)
					}
					owners[a] = p.Name
				}
			}
		}
		for i := range gone {
			for _, p := range gone[i] {
				if _, again := owners[p.IPv4]; !again {
					n.forgets(t, p.Pod)
				}
			}
		}
	}
}
