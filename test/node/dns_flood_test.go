// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"
)

// TestFloodOfQueriesLosesNoLookupOfAnotherPod: a pod sends 20,000 queries per second, each for another name, and reads
// no answer. Another pod resolves names meanwhile and gets an answer to each query, and the addresses are open.
func TestFloodOfQueriesLosesNoLookupOfAnotherPod(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	pods := n.addPods(t, "client", "client")
	client, flooder := pods[0], pods[1]
	s := n.nameServer(t)
	enforce(t, n.policies(t), namesPolicy)
	server := netip.AddrPortFrom(s.world.IPv4, 53)
	r := newResolver(t, client, server)
	if _, _, err := r.ask("before.service.example.", dnsmessage.TypeA, 3); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var flood sync.WaitGroup
	var sent atomic.Int64
	began := time.Now()
	out, err := flooder.DialUDP(server)
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	flood.Go(func() {
		tick := time.NewTicker(time.Millisecond) // the rate of the flood
		defer tick.Stop()
		for i := 0; ctx.Err() == nil; {
			<-tick.C
			// A tick that was late is made up for.
			for want := int(time.Since(began).Milliseconds()) * 20; i < want && ctx.Err() == nil; i++ {
				name := fmt.Sprintf("flood%d.service.example.", i)
				if _, err := out.Write(queryFor(uint16(i), name, dnsmessage.TypeA)); err == nil {
					sent.Add(1)
				}
			}
		}
	})
	var times []time.Duration
	for i := range 60 {
		start := time.Now()
		name := fmt.Sprintf("calm%d.service.example.", i%20)
		code, addresses, err := r.ask(name, dnsmessage.TypeA, 3)
		if err != nil || code != dnsmessage.RCodeSuccess || len(addresses) != 1 {
			t.Errorf("lookup %d of %s during the flood: %v, %v, %v", i, name, code, addresses, err)
			break
		}
		times = append(times, time.Since(start))
		if i%20 == 0 {
			if err := talk(ctx, client, netip.AddrPortFrom(addresses[0], servedPort)); err != nil {
				t.Errorf("lookup %d: connect to %s: %v", i, addresses[0], err)
			}
		}
	}
	rate := float64(sent.Load()) / time.Since(began).Seconds()
	cancel()
	flood.Wait()
	if sent.Load() < 1000 {
		t.Errorf("the flood had only %d queries", sent.Load())
	}
	if len(times) > 0 {
		slices.Sort(times)
		t.Logf("lookups during a flood of %.0f queries/s: median %s, 99 %% %s", rate, times[len(times)/2],
			times[len(times)*99/100])
	}
}
