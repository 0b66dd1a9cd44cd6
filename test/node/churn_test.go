// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"testing"

	"golang.org/x/sync/errgroup"

	"github.com/sluice-net/sluice/cmd/sluice/devnode"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// TestKernelChurnLeaksNothing proves INV-10 and INV-20 to INV-22 over 500 ADDs
// and DELs, 8 at a time: no address is held twice at any time, and at the end
// nothing is.
func TestKernelChurnLeaksNothing(t *testing.T) {
	const pods, atOnce = 500, 8
	// Addresses come back while the test runs: it needs more than there are.
	n := newNode(t, func(o *devnode.Options) {
		o.Args = map[string][]string{devnode.IPAM: {"--rest=1s"}}
	})
	config := n.config(t, "1.0.0", labels("app", "churn"))

	var mu sync.Mutex
	holders := make(map[netip.Addr]string) // guarded by mu
	group, ctx := errgroup.WithContext(t.Context())
	group.SetLimit(atOnce)
	prefix := name(t, "churn-")
	for i := range pods {
		group.Go(func() error {
			id := fmt.Sprintf("%s-%d", prefix, i)
			p := pod.Pod{Name: id, Netns: pod.NetnsPath(id)}
			if err := pod.NewNetns(p.Netns); err != nil {
				return err
			}
			defer func() {
				if err := pod.DeleteNetns(p.Netns); err != nil {
					t.Error(err)
				}
			}()
			ctx, cancel := context.WithTimeout(ctx, patience)
			defer cancel()
			result, err := n.call(ctx, "ADD", p, config)
			if err != nil {
				return fmt.Errorf("ADD %s: %w", id, err)
			}
			p = withAddresses(t, p, result)
			mu.Lock()
			for _, a := range p.Addresses() {
				if holder := holders[a]; holder != "" {
					t.Errorf("address %s was given to %s while %s held it", a, id, holder)
				}
				holders[a] = id
			}
			mu.Unlock()
			mu.Lock()
			for _, a := range p.Addresses() {
				delete(holders, a)
			}
			mu.Unlock()
			if _, err := n.call(ctx, "DEL", p, config); err != nil {
				return fmt.Errorf("DEL %s: %w", id, err)
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	n.wantNothingHeld(t)
}
