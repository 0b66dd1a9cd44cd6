// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package faulttest controls fault points from a test: it starts a command with armed fault points
// and decides the action at each.
package faulttest

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/fault"
)

// Controller controls one process. Start creates it; New is for callers that start the process
// themselves.
type Controller struct {
	conn  *net.UnixConn
	child *os.File // the process's end of the socket, until the process is started
	done  chan struct{}

	mu      sync.Mutex
	names   []string            // guarded by mu; nil until the process has sent its names
	plans   map[string]*plan    // guarded by mu
	hits    map[string]int      // guarded by mu
	blocked map[string][]uint64 // guarded by mu; unanswered hits, by point
	gone    bool                // guarded by mu; the process has closed its end
	changed chan struct{}       // guarded by mu; closed and replaced at each change
}

type plan struct {
	action fault.Action
	text   string
	skip   int // number of hits that pass before the plan applies
	block  bool
}

// New returns a controller and passes the process's end of the socket to cmd as descriptor 3. Call
// Started once cmd runs. The cleanup of t closes the controller.
func New(t testing.TB, cmd *exec.Cmd) *Controller {
	t.Helper()
	if len(cmd.ExtraFiles) != 0 {
		t.Fatalf("the command has extra files already, and fault points need descriptor %d", fault.FD)
	}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	ours := os.NewFile(uintptr(fds[0]), "fault-controller")
	child := os.NewFile(uintptr(fds[1]), "fault-process")
	conn, err := net.FileConn(ours)
	ours.Close()
	if err != nil {
		child.Close()
		t.Fatal(err)
	}
	c := &Controller{
		conn: conn.(*net.UnixConn), child: child, done: make(chan struct{}),
		plans: map[string]*plan{}, hits: map[string]int{}, blocked: map[string][]uint64{},
		changed: make(chan struct{}),
	}
	cmd.ExtraFiles = []*os.File{child}
	if _, err := c.conn.Write([]byte(fault.Greeting)); err != nil {
		c.conn.Close()
		child.Close()
		t.Fatal(err)
	}
	go c.serve()
	t.Cleanup(c.Close)
	return c
}

// Started closes the test's copy of the process's end, so that the controller notices the end of
// the process.
func (c *Controller) Started() { c.child.Close() }

// Close releases all blocked hits and lets later ones pass. It may be called more than once.
func (c *Controller) Close() {
	c.child.Close()
	c.conn.Close()
	<-c.done
}

// KillAt kills the process with SIGKILL at hit skip+1 of the point.
func (c *Controller) KillAt(point string, skip int) {
	c.plan(point, &plan{action: fault.Kill, skip: skip})
}

// FailAt makes every hit after the first skip hits return an error with the text.
func (c *Controller) FailAt(point string, skip int, text string) {
	c.plan(point, &plan{action: fault.Error, text: text, skip: skip})
}

// BlockAt blocks every hit after the first skip hits until release is called. Hits after the
// release pass.
func (c *Controller) BlockAt(point string, skip int) (release func()) {
	c.plan(point, &plan{block: true, skip: skip})
	return func() { c.Pass(point) }
}

// Pass removes the plan of a point and releases its blocked hits.
func (c *Controller) Pass(point string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.plans, point)
	for _, seq := range c.blocked[point] {
		c.reply(fault.Reply{Seq: seq, Action: fault.Continue})
	}
	delete(c.blocked, point)
}

func (c *Controller) plan(point string, p *plan) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.plans[point] = p
}

// Hits returns the number of times that the process has reached the point.
func (c *Controller) Hits(point string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.hits[point]
}

// Names waits until the process has sent the names of its points, and returns them.
func (c *Controller) Names(ctx context.Context) ([]string, error) {
	err := c.wait(ctx, func() bool { return c.names != nil })
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.names), err
}

// WaitHits waits until the process has reached the point n times. It fails if the process ends
// before that.
func (c *Controller) WaitHits(ctx context.Context, point string, n int) error {
	if err := c.wait(ctx, func() bool { return c.hits[point] >= n }); err != nil {
		return fmt.Errorf("wait for hit %d of fault point %s: %w", n, point, err)
	}
	return nil
}

// wait calls ok, with mu held, after each change until it returns true.
func (c *Controller) wait(ctx context.Context, ok func() bool) error {
	for {
		c.mu.Lock()
		yes, gone, changed := ok(), c.gone, c.changed
		c.mu.Unlock()
		switch {
		case yes:
			return nil
		case gone:
			return fmt.Errorf("the process ended")
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (c *Controller) serve() {
	defer close(c.done)
	buf := make([]byte, fault.MaxMessage)
	for {
		n, err := c.conn.Read(buf)
		var r fault.Request
		if err != nil || n == 0 || json.Unmarshal(buf[:n], &r) != nil {
			c.mu.Lock()
			c.gone = true
			c.notify()
			c.mu.Unlock()
			return
		}
		c.mu.Lock()
		if r.Seq == 0 {
			if c.names = r.Names; c.names == nil {
				c.names = []string{}
			}
		} else {
			c.decide(r)
		}
		c.notify()
		c.mu.Unlock()
	}
}

// notify must be called with mu held.
func (c *Controller) notify() {
	close(c.changed)
	c.changed = make(chan struct{})
}

// decide must be called with mu held.
func (c *Controller) decide(r fault.Request) {
	c.hits[r.Point]++
	p := c.plans[r.Point]
	switch {
	case p == nil:
		c.reply(fault.Reply{Seq: r.Seq, Action: fault.Continue})
	case p.skip > 0:
		p.skip--
		c.reply(fault.Reply{Seq: r.Seq, Action: fault.Continue})
	case p.block:
		c.blocked[r.Point] = append(c.blocked[r.Point], r.Seq)
	default:
		c.reply(fault.Reply{Seq: r.Seq, Action: p.action, Error: p.text})
	}
}

// reply must be called with mu held. Errors are ignored, because a process that has ended needs no
// reply.
func (c *Controller) reply(r fault.Reply) {
	if b, err := json.Marshal(r); err == nil {
		c.conn.Write(b) //nolint:errcheck // see above
	}
}
