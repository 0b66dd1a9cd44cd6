// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package stream serves DNS over TCP. It accepts the redirected connections of pods, and reads their queries. It
// forwards allowed queries on a second connection, which uses the address and port of the client. Package exchange
// decides when answers are released.
//
// The number of connections is limited. A pod with too many loses its oldest connections. A client that does not read
// its answers, or sends half a query, blocks only its own connection, and only for a limited time.
package stream

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/proxy/fair"
	"github.com/sluice-net/sluice/proxy/pods"
	"github.com/sluice-net/sluice/proxy/sockets"
	"github.com/sluice-net/sluice/services/dns/internal/exchange"
	"github.com/sluice-net/sluice/services/dns/internal/rules"
)

// Limits of connections.
const (
	MaxConnections       = 1024
	MaxConnectionsPerPod = 128
	// MaxQuery is the size of the largest query.
	MaxQuery = 4096

	idleTime    = 20 * time.Second // maximum time without a query
	messageTime = 5 * time.Second  // maximum time to send or read the rest of a message
	connectTime = 5 * time.Second
	waitTime    = 5 * time.Second // maximum wait for a rule set, and for the pod
)

// Options describe a Server. All fields are required.
type Options struct {
	Exchange *exchange.Exchange
	Rules    *rules.Rules
	Pods     *pods.Pods
	// Take returns an unbound socket of the proxy's network namespace. The caller must close it.
	Take func(ctx context.Context, ipv6 bool) (fd int, err error)
	// Later calls run when it is the turn of the pod, or abandon if the limits do not allow it.
	Later func(endpoint uint16, size int, run func(context.Context), abandon func())
	// Held receives how long each answer has waited.
	Held func(time.Duration)
	Log  *slog.Logger
}

// Counts contains the numbers of ended connections, by reason.
type Counts struct {
	Client, Server              atomic.Uint64 // the client or the server has closed or reset its connection
	Idle, Slow, Share, PodGone  atomic.Uint64
	Connect, NoRuleSet, Invalid atomic.Uint64
	Stopped                     atomic.Uint64
}

// Server serves connections. It is safe for concurrent use.
type Server struct {
	o         Options
	Counts    Counts
	ctx       context.Context
	stop      context.CancelFunc
	listeners *sockets.Listeners

	mu      sync.Mutex
	limit   *fair.Limit // guarded by mu
	closed  bool        // guarded by mu
	running sync.WaitGroup
}

// New returns a Server without listeners.
func New(o Options) *Server {
	ctx, cancel := context.WithCancel(context.Background())
	s := &Server{o: o, ctx: ctx, stop: cancel, limit: fair.New(MaxConnections, MaxConnectionsPerPod)}
	s.listeners = sockets.NewListeners(s.begin, o.Log)
	return s
}

// Len returns the number of connections.
func (s *Server) Len() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.limit.Used()
}

// Listen accepts connections from new listeners in place of the former ones. It still accepts the waiting connections
// of the former listeners. It takes over the descriptors, which must be non-blocking.
func (s *Server) Listen(fds []int) { s.listeners.Use(fds) }

// Run serves until ctx ends.
func (s *Server) Run(ctx context.Context) error {
	<-ctx.Done()
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.listeners.Close()
	s.stop()
	s.running.Wait()
	return nil
}

// begin serves an accepted connection.
func (s *Server) begin(fd int, peer unix.Sockaddr) {
	c, err := s.newConn(fd, peer)
	if err != nil {
		s.o.Log.Debug("a TCP connection was not served", log.Err(err))
		sockets.Reset(fd)
		unix.Close(fd) //nolint:errcheck // nothing was written to it
		s.Counts.Invalid.Add(1)
		return
	}
	s.mu.Lock()
	if !s.closed {
		c.item = s.limit.Add(c.Endpoint, 1, func() { c.end(&s.Counts.Share, true) })
	}
	if c.item != nil {
		s.running.Go(func() {
			c.serve()
			s.mu.Lock()
			s.limit.Remove(c.item)
			s.mu.Unlock()
		})
	}
	s.mu.Unlock()
	if c.item == nil {
		c.end(&s.Counts.Share, true)
		c.close()
	}
}
