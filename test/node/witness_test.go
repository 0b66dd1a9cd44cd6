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
	"time"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// witness is continuous traffic between two pods during actions on others: consecutive questions on a TCP connection
// and on a UDP socket of each family. No question may be lost.
type witness struct {
	questions []*witnessed
	cancel    context.CancelFunc
	done      sync.WaitGroup
	once      sync.Once
}

// witnessed is one connection or socket of a witness.
type witnessed struct {
	name     string
	answered atomic.Uint64
	err      error // set before done
}

// newWitness starts the questions. They end with stop, or with the test.
func newWitness(t *testing.T, from, to pod.Pod) *witness {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	w := &witness{cancel: cancel}
	t.Cleanup(func() { w.stop(t) })
	for _, address := range to.Addresses() {
		w.add(ctx, fmt.Sprintf("TCP to %s", address), tcpPair(t, from, to, address))
		w.add(ctx, fmt.Sprintf("UDP to %s", address), udpPair(t, from, to, address))
	}
	w.progress(t, "at the beginning")
	return w
}

// tcpPair returns the client end of a connection whose server returns what it receives.
func tcpPair(t *testing.T, from, to pod.Pod, address netip.Addr) net.Conn {
	t.Helper()
	l, err := to.Listen(netip.AddrPortFrom(address, 0))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	client, err := from.Dial(ctx, netip.AddrPortFrom(address, uint16(l.Addr().(*net.TCPAddr).Port)))
	if err != nil {
		t.Fatal(err)
	}
	server, err := l.AcceptTCP()
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		defer server.Close()
		_, _ = io.Copy(server, server) // the client sees the error
	}()
	return client
}

// udpPair is tcpPair for datagrams.
func udpPair(t *testing.T, from, to pod.Pod, address netip.Addr) net.Conn {
	t.Helper()
	server, err := to.ListenPacket(netip.AddrPortFrom(address, 0))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { server.Close() })
	client, err := from.DialUDP(netip.AddrPortFrom(address, uint16(server.LocalAddr().(*net.UDPAddr).Port)))
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		for buffer := make([]byte, 64); ; {
			n, peer, err := server.ReadFromUDPAddrPort(buffer)
			if err == nil {
				_, err = server.WriteToUDPAddrPort(buffer[:n], peer)
			}
			if errors.Is(err, net.ErrClosed) {
				return
			}
		}
	}()
	return client
}

func (w *witness) add(ctx context.Context, name string, conn net.Conn) {
	q := &witnessed{name: name}
	w.questions = append(w.questions, q)
	w.done.Go(func() {
		defer conn.Close()
		pause := time.NewTicker(5 * time.Millisecond) // leave the machine to others
		defer pause.Stop()
		message, answer := make([]byte, 32), make([]byte, 32)
		for ctx.Err() == nil {
			err := conn.SetDeadline(time.Now().Add(patience))
			if err == nil {
				_, err = conn.Write(message)
			}
			if err == nil {
				_, err = io.ReadFull(conn, answer)
			}
			if err != nil {
				q.err = fmt.Errorf("after %d answers: %w", q.answered.Load(), err)
				return
			}
			q.answered.Add(1)
			<-pause.C
		}
	})
}

// progress waits until each connection has had at least two more answers, and so one whole exchange.
func (w *witness) progress(t *testing.T, when string) {
	t.Helper()
	start := make([]uint64, len(w.questions))
	for i, q := range w.questions {
		start[i] = q.answered.Load()
	}
	servicetest.EventuallyNil(t, "bystanders talk "+when, func() error {
		for i, q := range w.questions {
			if now := q.answered.Load(); now < start[i]+2 {
				return fmt.Errorf("%s: %d answers, %d before", q.name, now, start[i])
			}
		}
		return nil
	})
}

// stop ends the questions, and fails the test if a question had no answer.
func (w *witness) stop(t *testing.T) {
	t.Helper()
	w.once.Do(func() {
		w.cancel()
		w.done.Wait()
		for _, q := range w.questions {
			if q.err != nil {
				t.Errorf("bystanders, %s: %v", q.name, q.err)
			}
		}
	})
}
