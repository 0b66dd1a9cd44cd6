// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package cluster

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/devnode"
)

// pulses alternately stops and continues the members of etcd until stop is called. Every response is as late as from
// members with slow disks, and so are the heartbeats between members.
func (c *testCluster) pulses(t *testing.T, stopped, running time.Duration) (stop func()) {
	t.Helper()
	var pids []int
	for _, member := range c.Hub().Services() {
		pid, err := c.Hub().PID(member)
		if err != nil {
			t.Fatal(err)
		}
		pids = append(pids, pid)
	}
	signal := func(s unix.Signal) {
		for _, pid := range pids {
			if err := unix.Kill(pid, s); err != nil {
				t.Errorf("signal %v to etcd: %v", s, err)
			}
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	signal(unix.SIGSTOP) // stopped before the caller continues
	wg.Go(func() {
		for {
			pause(ctx, stopped)
			signal(unix.SIGCONT)
			if pause(ctx, running); ctx.Err() != nil {
				return
			}
			signal(unix.SIGSTOP)
		}
	})
	stop = sync.OnceFunc(func() { cancel(); wg.Wait() })
	t.Cleanup(stop)
	return stop
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

// TestFaultSlowEtcdDelaysPodsAndLosesNothing slows etcd down. An ADD ends within the timeout of its configuration.
// With a label set that the node holds or knows, it also succeeds when etcd is stopped for longer than the services'
// timeouts. Afterwards all nodes know all pods, and each label set has one identity.
func TestFaultSlowEtcdDelaysPodsAndLosesNothing(t *testing.T) {
	t.Parallel()
	c := newCluster(t, devnode.ClusterOptions{Nodes: 2, EtcdMembers: 3})
	var mu sync.Mutex
	var all []labelled // guarded by mu
	add := func(n *node, app string, timeout time.Duration) error {
		p, err := makePod(t)
		if err == nil {
			p, err = n.tryAddFor(t.Context(), timeout, p, app)
		}
		if err != nil {
			return fmt.Errorf("label set %q: %w", app, err)
		}
		mu.Lock()
		defer mu.Unlock()
		all = append(all, labelled{p, app, n})
		return nil
	}
	for _, n := range c.nodes {
		if err := add(n, "held", patience); err != nil {
			t.Fatal(err)
		}
	}
	rounds := 2
	if allFaults() {
		rounds = 10
	}
	for _, phase := range []struct {
		name             string
		stopped, running time.Duration
		fresh            bool // also add label sets that no node holds
	}{
		{"syncs of 300 ms", 300 * time.Millisecond, 100 * time.Millisecond, true},
		{"syncs of 20 s", 20 * time.Second, 200 * time.Millisecond, false},
	} {
		stop := c.pulses(t, phase.stopped, phase.running)
		var group errgroup.Group
		for i, n := range c.nodes {
			group.Go(func() error {
				for k := range rounds {
					if err := add(n, "held", 10*time.Second); err != nil {
						return err
					}
					if !phase.fresh {
						// The other node holds this label set, and this node knows it.
						if err := add(n, fmt.Sprintf("own-%d-%d", 1-i, k), 10*time.Second); err != nil {
							return err
						}
						continue
					}
					// Both nodes request the first label set; each node requests another one alone.
					for _, app := range []string{fmt.Sprint("both-", k), fmt.Sprintf("own-%d-%d", i, k)} {
						if err := add(n, app, 30*time.Second); err != nil {
							return err
						}
					}
				}
				return nil
			})
		}
		if err := group.Wait(); err != nil {
			t.Fatalf("%s: %v", phase.name, err)
		}
		stop()
	}
	numbers, sets := map[string]uint32{}, map[uint32]string{}
	for _, p := range all {
		for _, n := range c.nodes {
			got := n.identityOf(t, p.Pod, p.on)
			if number, ok := numbers[p.app]; ok && number != got {
				t.Errorf("label set %q has identities %d and %d", p.app, number, got)
			}
			if app, ok := sets[got]; ok && app != p.app {
				t.Errorf("identity %d belongs to %q and to %q", got, app, p.app)
			}
			numbers[p.app], sets[got] = got, p.app
			n.kernelHas(t, entries(p.Pod, got, p.on)...)
		}
	}
}
