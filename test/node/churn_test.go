// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/test/internal/pod"
)

var errNoAnswer = errors.New("no ping was sent")

// TestKernelChurnLeaksNothing proves INV-10 and INV-20 to INV-22 with 500 ADDs and DELs, 8 at a time: no address is
// allocated twice at any time, and no allocation remains at the end.
func TestKernelChurnLeaksNothing(t *testing.T) {
	const pods, atOnce = 300, 8
	// The test needs more addresses than there are, so released ones must be reused.
	n := newNode(t, func(o *devnode.Options) {
		o.Args = map[string][]string{devnode.IPAM: {"--quarantine=1s"}}
	})
	config := n.config(t, "1.0.0", labels("app", "churn"))

	var mu sync.Mutex
	holders := make(map[netip.Addr]string) // guarded by mu
	hold := func(p pod.Pod) {
		mu.Lock()
		defer mu.Unlock()
		for _, a := range p.Addresses() {
			if holder := holders[a]; holder != "" {
				t.Errorf("address %s was given to %s while %s held it", a, p.Name, holder)
			}
			holders[a] = p.Name
		}
	}
	var repeated atomic.Int32 // pings
	release := func(p pod.Pod) {
		mu.Lock()
		defer mu.Unlock()
		for _, a := range p.Addresses() {
			delete(holders, a)
		}
	}
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
			hold(p)
			// Keep the pod until a packet to the node and back has succeeded. One packet may be lost; losing all of
			// them is an error.
			for err = errNoAnswer; err != nil && ctx.Err() == nil; {
				attempt, done := context.WithTimeout(ctx, time.Second)
				_, _, err = p.Ping(attempt, hostAddress(p))
				done()
				if err != nil {
					repeated.Add(1)
				}
			}
			release(p)
			if err != nil {
				return fmt.Errorf("ping from %s: %w", id, err)
			}
			if _, err := n.call(ctx, "DEL", p, config); err != nil {
				return fmt.Errorf("DEL %s: %w", id, err)
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	t.Logf("%d pings of %d pods had no answer within a second and were repeated", repeated.Load(), pods)
	n.wantNothingHeld(t)
}
