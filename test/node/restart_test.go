// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/servicetest"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// Names of counters in docs/datapath.md.
const (
	deliveredLocal = datapathv1.Reason_REASON_FORWARDED_TO_POD
	fromStack      = datapathv1.Reason_REASON_FORWARDED_FROM_STACK
)

// conversation is one TCP connection on which both ends alternate.
type conversation struct {
	conn      *net.TCPConn
	exchanged atomic.Uint64
}

// converse opens connections between two pods, to a port or, if it is 0, to any port, and exchanges data until the
// context ends. The returned function waits and returns the first error.
func converse(ctx context.Context, t *testing.T, from, to pod.Pod, port uint16, connections int) ([]*conversation,
	func() error,
) {
	t.Helper()
	var all []*conversation
	var wg sync.WaitGroup
	errs := make(chan error, 2*connections)
	for i := range connections {
		address := to.Addresses()[i%len(to.Addresses())]
		l, err := to.Listen(netip.AddrPortFrom(address, port))
		if err != nil {
			t.Fatal(err)
		}
		dialCtx, cancel := context.WithTimeout(ctx, patience)
		client, err := from.Dial(dialCtx, netip.AddrPortFrom(address, uint16(l.Addr().(*net.TCPAddr).Port)))
		cancel()
		if err != nil {
			t.Fatal(err)
		}
		server, err := l.AcceptTCP()
		if err != nil {
			t.Fatal(err)
		}
		_ = l.Close()
		c := &conversation{conn: client}
		all = append(all, c)
		wg.Add(2)
		go func() {
			defer wg.Done()
			defer server.Close()
			if _, err := io.Copy(server, server); err != nil {
				errs <- fmt.Errorf("server of connection %d: %w", i, err)
			}
		}()
		go func() {
			defer wg.Done()
			defer client.Close()
			message, answer := make([]byte, 512), make([]byte, 512)
			for ctx.Err() == nil {
				if _, err := client.Write(message); err != nil {
					errs <- fmt.Errorf("connection %d after %d exchanges: %w", i, c.exchanged.Load(), err)
					return
				}
				if _, err := io.ReadFull(client, answer); err != nil {
					errs <- fmt.Errorf("connection %d after %d exchanges: %w", i, c.exchanged.Load(), err)
					return
				}
				c.exchanged.Add(1)
			}
		}()
	}
	return all, func() error {
		wg.Wait()
		close(errs)
		var first []error
		for err := range errs {
			first = append(first, err)
		}
		return errors.Join(first...)
	}
}

// TestKernelConnectionsSurviveDatapathRestarts proves INV-23: 20 connections exchange data while the datapath is killed
// and started 20 times. Each of them makes progress while the datapath is down. The counters prove that the eBPF path
// carried the packets, and not the host's stack.
func TestKernelConnectionsSurviveDatapathRestarts(t *testing.T) {
	t.Parallel()
	const connections, restarts = 20, 10
	n := newNode(t)
	pods := n.addPods(t, "server", "client")
	before := n.counters(t)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	conversations, wait := converse(ctx, t, pods[1], pods[0], 0, connections)

	progress := func(when string) {
		t.Helper()
		start := make([]uint64, connections)
		for i, c := range conversations {
			start[i] = c.exchanged.Load()
		}
		servicetest.EventuallyNil(t, "every connection exchanges data "+when, func() error {
			for i, c := range conversations {
				if c.exchanged.Load() < start[i]+3 {
					return fmt.Errorf("connection %d stands at %d exchanges", i, start[i])
				}
			}
			return nil
		})
	}
	for i := range restarts {
		if err := n.Kill(t.Context(), devnode.Datapath); err != nil {
			t.Fatal(err)
		}
		progress(fmt.Sprintf("while the datapath is unavailable for the %d. time", i+1))
		if err := n.Start(t.Context(), devnode.Datapath); err != nil {
			t.Fatal(err)
		}
		progress(fmt.Sprintf("after restart %d", i+1))
		if t.Failed() {
			break
		}
	}
	stop()
	if err := wait(); err != nil {
		t.Error(err)
	}
	after := n.counters(t)
	var exchanged uint64
	for _, c := range conversations {
		exchanged += c.exchanged.Load()
	}
	// An exchange is at least one packet in each direction, plus acknowledgements.
	if delivered := after[deliveredLocal] - before[deliveredLocal]; delivered < 2*exchanged {
		t.Errorf("%s grew by %d packets over %d exchanges, want >= %d: packets took another path", deliveredLocal,
			delivered, exchanged, 2*exchanged)
	}
	if bypassed := after[fromStack] - before[fromStack]; bypassed > 0 {
		t.Errorf("%s grew by %d packets: the host's stack forwarded traffic between the pods", fromStack, bypassed)
	}
	t.Logf("%d exchanges on %d connections over %d restarts", exchanged, connections, restarts)
	for _, p := range pods {
		n.del(t, p)
	}
	n.wantNothingHeld(t)
}
