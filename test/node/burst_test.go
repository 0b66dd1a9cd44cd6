// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// TestKernelBurstOfAFullNodeIsServed simulates the boot of a node: 110 pods, the limit of kubelet, are connected at
// once and disconnected at once, while the services are killed and started. Every ADD and DEL succeeds, every address
// is unique, and no state is left.
func TestKernelBurstOfAFullNodeIsServed(t *testing.T) {
	const pods = 110
	n := newNode(t)
	all := make([]pod.Pod, pods)
	for i := range all {
		all[i] = newPod(t, "burst")
	}
	config := n.config(t, "1.0.0", labels("app", "burst"))
	burst := func(command string, done func(i int, result []byte)) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
		defer cancel()
		began := time.Now()
		var wg sync.WaitGroup
		for i, p := range all {
			wg.Go(func() {
				result, err := n.call(ctx, command, p, config)
				if err != nil {
					t.Errorf("%s %s: %v", command, p.Name, err)
					return
				}
				done(i, result)
			})
		}
		wg.Wait()
		t.Logf("%d %ss at once took %s", pods, command, time.Since(began))
	}
	restart := func() {
		t.Helper()
		for _, service := range []string{devnode.IPAM, devnode.Identity, devnode.Datapath} {
			if err := n.Kill(t.Context(), service); err != nil {
				t.Fatal(err)
			}
		}
		for _, service := range []string{devnode.IPAM, devnode.Identity, devnode.Datapath} {
			if err := n.Start(t.Context(), service); err != nil {
				t.Fatal(err)
			}
		}
	}

	// The services are killed after some pods are connected and while others wait.
	for _, disturbed := range []bool{false, true} {
		var (
			mu      sync.Mutex
			holders = map[netip.Addr]string{}
			some    = make(chan struct{})
			count   int
		)
		disturb := make(chan struct{})
		go func() {
			defer close(disturb)
			<-some
			if disturbed {
				restart()
			}
		}()
		burst("ADD", func(i int, result []byte) {
			all[i] = withAddresses(t, all[i], result)
			mu.Lock()
			defer mu.Unlock()
			if count++; count == pods/4 {
				close(some)
			}
			for _, a := range all[i].Addresses() {
				if other := holders[a]; other != "" {
					t.Errorf("address %s was given to %s while %s holds it", a, all[i].Name, other)
				}
				holders[a] = all[i].Name
			}
		})
		if t.Failed() {
			return
		}
		<-disturb
		if want := 2 * pods; len(holders) != want {
			t.Errorf("%d addresses are held, want %d", len(holders), want)
		}
		exchange(t, all[0], all[pods-1])
		burst("DEL", func(int, []byte) {})
		n.wantNothingHeld(t)
	}
}

// TestKernelAddWorksAtOnceAfterARestart: an ADD succeeds at once after a service has restarted, even if calls failed
// while it was down.
func TestKernelAddWorksAtOnceAfterARestart(t *testing.T) {
	n := newNode(t)
	config := n.config(t, "1.0.0", mergeConfig(labels("app", "again"), map[string]any{"timeout": "1s"}))
	for _, service := range []string{devnode.IPAM, devnode.Identity, devnode.Policy} {
		for round := range 2 {
			if err := n.Kill(t.Context(), service); err != nil {
				t.Fatal(err)
			}
			p := newPod(t, "again")
			if _, err := n.call(t.Context(), "ADD", p, n.config(t, "1.0.0",
				mergeConfig(labels("app", fmt.Sprint(service, round)), map[string]any{"timeout": "1s"}))); err == nil {
				t.Errorf("ADD without %s succeeded", service)
			}
			if err := n.Start(t.Context(), service); err != nil {
				t.Fatal(err)
			}
			if _, err := n.call(t.Context(), "ADD", p, config); err != nil {
				t.Errorf("the first ADD after %s is back: %v", service, err)
			}
			n.del(t, p)
		}
	}
	n.wantNothingHeld(t)
}

// TestKernelBurstBesideALostStateOfIPAM: ipam starts without its state and allocates addresses of existing endpoints
// again. The datapath refuses them, and each ADD gets other addresses.
func TestKernelBurstBesideALostStateOfIPAM(t *testing.T) {
	const before, burst = 20, 30
	n := newNode(t)
	config := n.config(t, "1.0.0", labels("app", "lost"))
	holders := map[netip.Addr]string{}
	var all []pod.Pod
	for range before {
		p := n.add(t, newPod(t, "before"), config)
		all = append(all, p)
		for _, a := range p.Addresses() {
			holders[a] = p.Name
		}
	}
	if err := n.Kill(t.Context(), devnode.IPAM); err != nil {
		t.Fatal(err)
	}
	// Set the file aside, as the message about a corrupt file tells the operator to.
	dir := n.Paths().ServiceStateDir(devnode.IPAM)
	for _, file := range []string{"state.db", "created"} {
		if err := os.Remove(filepath.Join(dir, file)); err != nil {
			t.Fatal(err)
		}
	}
	if err := n.Start(t.Context(), devnode.IPAM); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	for range burst {
		p := newPod(t, "after")
		wg.Go(func() {
			result, err := n.call(t.Context(), "ADD", p, config)
			if err != nil {
				t.Errorf("ADD %s: %v", p.Name, err)
				return
			}
			p := withAddresses(t, p, result)
			mu.Lock()
			defer mu.Unlock()
			all = append(all, p)
			for _, a := range p.Addresses() {
				if other := holders[a]; other != "" {
					t.Errorf("address %s was given to %s while %s has it", a, p.Name, other)
				}
				holders[a] = p.Name
			}
		})
	}
	wg.Wait()
	if len(all) == before+burst {
		exchange(t, all[0], all[len(all)-1])
	}
	for _, p := range all {
		n.del(t, p)
	}
	n.wantNothingHeld(t)
}
