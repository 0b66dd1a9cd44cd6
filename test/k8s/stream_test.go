// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// contextOf returns a context that outlives the test's own, for cleanups.
func contextOf(t testing.TB) context.Context { return context.WithoutCancel(t.Context()) }

// inNetns runs fn on a thread in a network namespace. Sockets that fn opens stay
// in it.
func inNetns(path string, fn func() error) error {
	target, err := os.Open(path)
	if err != nil {
		return err
	}
	defer target.Close()
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		if err := unix.Setns(int(target.Fd()), unix.CLONE_NEWNET); err != nil {
			done <- fmt.Errorf("enter %s: %w", path, err)
			return
		}
		done <- fn()
	}()
	return <-done
}

// netns returns the path of a pod's network namespace, as seen from the test.
func (n sluiceNode) netns(p kubePod) string {
	n.Helper()
	at := n.of(p)
	pid, err := n.c.NodePID(at.index)
	n.must(err)
	e := at.endpointOf(p)
	// Use the full path: /var/run is a link, which would lead to the test's own root.
	return fmt.Sprintf("/proc/%d/root/run/netns/%s", pid, e.NetworkNamespace[len("/var/run/netns/"):])
}

// stream is a TCP connection between two pods with continuous exchanges.
type stream struct {
	n    sluiceNode
	name string
	stop func()
	wait sync.WaitGroup

	mu        sync.Mutex
	exchanges int           // guarded by mu
	gap       time.Duration // the duration of the longest exchange, guarded by mu
	err       error         // guarded by mu
}

// stream opens a connection from one pod to another, and exchanges messages until the test ends or closed is called.
func (n sluiceNode) stream(from, to kubePod) *stream {
	n.Helper()
	var l net.Listener
	n.must(inNetns(n.netns(to), func() (err error) {
		l, err = net.Listen("tcp", net.JoinHostPort(to.address(), "0"))
		return err
	}))
	var conn net.Conn
	n.must(inNetns(n.netns(from), func() (err error) {
		conn, err = net.DialTimeout("tcp", l.Addr().String(), 10*time.Second)
		return err
	}))
	peer, err := l.Accept()
	n.must(err)
	s := &stream{n: n, name: fmt.Sprintf("%s → %s", from, to)}
	s.stop = sync.OnceFunc(func() {
		_ = l.Close()
		_ = conn.Close()
		_ = peer.Close()
		s.wait.Wait()
	})
	s.wait.Go(func() { _, _ = io.Copy(peer, peer) })
	s.wait.Go(func() { s.note(s.exchange(conn)) })
	n.Cleanup(s.stop)
	return s
}

// exchange sends numbers, and reads them back, until the connection ends.
func (s *stream) exchange(conn net.Conn) error {
	message, answer := make([]byte, 1024), make([]byte, 1024)
	for number := uint64(0); ; number++ {
		binary.BigEndian.PutUint64(message, number)
		begin := time.Now()
		// Data that are lost for that long are not recovered.
		if err := conn.SetDeadline(begin.Add(time.Minute)); err != nil {
			return err
		}
		if _, err := conn.Write(message); err != nil {
			return err
		}
		if _, err := io.ReadFull(conn, answer); err != nil {
			return err
		}
		if !bytes.Equal(message, answer) {
			return errors.New("another answer than was sent")
		}
		s.mu.Lock()
		s.exchanges++
		s.gap = max(s.gap, time.Since(begin))
		s.mu.Unlock()
		time.Sleep(time.Millisecond) // leave processor time to others
	}
}

func (s *stream) note(err error) {
	if errors.Is(err, net.ErrClosed) {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.err = err
}

// alive waits for further exchanges.
func (s *stream) alive() {
	s.n.Helper()
	s.mu.Lock()
	before := s.exchanges
	s.mu.Unlock()
	s.n.eventually("the stream goes on", func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.err != nil {
			s.n.Fatalf("the connection %s broke after %d exchanges: %v", s.name, s.exchanges, s.err)
		}
		if s.exchanges < before+10 {
			return fmt.Errorf("%d exchanges of %d", s.exchanges-before, 10)
		}
		return nil
	})
}

// unbroken ends the stream, which must have been alive until now.
func (s *stream) unbroken(during string) {
	s.n.Helper()
	s.alive()
	s.stop()
	s.n.Logf("%s: 0 resets in %d exchanges, the longest took %s", during, s.exchanges, s.gap.Round(time.Millisecond/10))
}
