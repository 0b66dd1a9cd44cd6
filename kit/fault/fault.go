// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package fault lets a test stop, fail or kill a process at a named place.
//
// Points are compiled into every binary, so that tests run the binaries that are shipped. Only the
// process that starts the binary can arm them, through descriptor 3: a SOCK_SEQPACKET unix socket
// whose peer runs as root or as the process's own user, and that already holds a greeting. No
// variable, file or request arms them. A disarmed point costs one atomic load.
//
//	var afterCommit = fault.Register("allocate.committed")
//	…
//	if err := afterCommit.Hit(ctx); err != nil { return err }
package fault

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
)

// FD is the number of the controller's descriptor.
const FD = 3

// Greeting is the first message on the socket, sent by the controller.
const Greeting = "sluice-fault-points 1"

// MaxMessage is the maximum size of a message in bytes.
const MaxMessage = 64 << 10

// ErrInjected is wrapped by every injected error.
var ErrInjected = errors.New("injected fault")

// Request is a message to the controller: first the list of names, then one message per hit.
type Request struct {
	Names []string `json:"names,omitempty"`
	Seq   uint64   `json:"seq,omitempty"` // number of the hit, from 1
	Point string   `json:"point,omitempty"`
}

// Reply answers one hit. Hit blocks until the reply arrives.
type Reply struct {
	Seq    uint64 `json:"seq"`
	Action Action `json:"action"`
	Error  string `json:"error,omitempty"` // text for ActionError
}

// Action is the effect of a point.
type Action string

// The actions. A controller blocks a point by not replying.
const (
	Continue Action = "continue"
	Kill     Action = "kill" // SIGKILL to this process
	Error    Action = "error"
)

var (
	registry struct {
		sync.Mutex
		names map[string]bool
	}
	armed atomic.Pointer[controller]
)

// Point is a place in the code where a test can inject a fault.
type Point struct{ name string }

// Register declares a point. It is called from package variables, and panics if the name is empty
// or already registered.
func Register(name string) *Point {
	registry.Lock()
	defer registry.Unlock()
	if registry.names == nil {
		registry.names = map[string]bool{}
	}
	if name == "" || registry.names[name] {
		panic(fmt.Sprintf("fault point %q is empty or registered twice", name))
	}
	registry.names[name] = true
	return &Point{name: name}
}

// Names returns the names of all points of this binary, sorted.
func Names() []string {
	registry.Lock()
	defer registry.Unlock()
	return slices.Sorted(maps.Keys(registry.names))
}

// Hit returns nil unless the process is armed. If it is armed, Hit asks the controller, which lets
// it return nil, makes it return an error that wraps ErrInjected, or kills the process. Hit waits
// for the reply until ctx ends.
func (p *Point) Hit(ctx context.Context) error {
	c := armed.Load()
	if c == nil {
		return nil
	}
	return c.hit(ctx, p.name)
}

// Armed reports whether a controller is connected.
func Armed() bool { return armed.Load() != nil }

type controller struct {
	conn *os.File // not a net.Conn, because the CNI plugin does not link package net

	mu      sync.Mutex
	seq     uint64                // guarded by mu
	waiting map[uint64]chan Reply // guarded by mu; nil after the controller has disconnected
}

func start(conn *os.File) error {
	c := &controller{conn: conn, waiting: map[uint64]chan Reply{}}
	if err := c.send(Request{Names: Names()}); err != nil {
		conn.Close()
		return err
	}
	armed.Store(c)
	go c.read()
	return nil
}

func (c *controller) send(r Request) error {
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	_, err = c.conn.Write(b)
	return err
}

// read delivers replies until the controller disconnects, which disarms all points: a test that
// died must not leave blocked processes behind.
func (c *controller) read() {
	defer func() {
		armed.CompareAndSwap(c, nil)
		c.mu.Lock()
		defer c.mu.Unlock()
		for _, w := range c.waiting {
			close(w)
		}
		c.waiting = nil
		c.conn.Close()
	}()
	buf := make([]byte, MaxMessage)
	for {
		n, err := c.conn.Read(buf)
		if err != nil || n == 0 {
			return
		}
		var r Reply
		if json.Unmarshal(buf[:n], &r) != nil {
			return
		}
		c.mu.Lock()
		w := c.waiting[r.Seq]
		delete(c.waiting, r.Seq)
		c.mu.Unlock()
		if w != nil {
			w <- r
		}
	}
}

func (c *controller) hit(ctx context.Context, point string) error {
	w := make(chan Reply, 1)
	c.mu.Lock()
	if c.waiting == nil {
		c.mu.Unlock()
		return nil
	}
	c.seq++
	seq := c.seq
	c.waiting[seq] = w
	c.mu.Unlock()
	if err := c.send(Request{Seq: seq, Point: point}); err != nil {
		return nil // the controller has disconnected
	}
	select {
	case r, ok := <-w:
		if !ok {
			return nil
		}
		switch r.Action {
		case Kill:
			syscall.Kill(os.Getpid(), syscall.SIGKILL) //nolint:errcheck // signalling this process cannot fail
			select {}                                  // wait until the signal is delivered
		case Error:
			return fmt.Errorf("%w at %s: %s", ErrInjected, point, r.Error)
		}
		return nil
	case <-ctx.Done():
		c.mu.Lock()
		delete(c.waiting, seq)
		c.mu.Unlock()
		return ctx.Err()
	}
}
