// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package server accepts the redirected connections of pods, and relays each by package relay.
//
// The number of connections is limited. A pod with too many loses its oldest ones.
package server

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/proxy/fair"
	"github.com/sluice-net/sluice/proxy/pods"
	"github.com/sluice-net/sluice/proxy/sockets"
	"github.com/sluice-net/sluice/services/http/internal/relay"
	"github.com/sluice-net/sluice/services/http/internal/rules"
)

const (
	// MaxConnections is the maximum number of connections. The limit of descriptors may allow fewer.
	MaxConnections = 16_384
	// descriptors is how many descriptors a connection takes, and reserved how many the process needs for other
	// things.
	descriptors, reserved = 2, 128
	// waitTime limits the wait for a rule set.
	waitTime = 5 * time.Second
)

// Options describe a Server. All fields are required.
type Options struct {
	Rules *rules.Rules
	Pods  *pods.Pods
	// Take returns an unbound socket of the proxy's network namespace. The caller must close it.
	Take func(ctx context.Context, ipv6 bool) (fd int, err error)
	// Report receives each request with the namespace of its client.
	Report func(namespace string, e relay.Event)
	// Connections is the maximum number of connections of all pods together; one pod may have a quarter.
	Connections int
	Log         *slog.Logger
}

// Connections returns how many connections a limit of descriptors allows.
func Connections(files uint64) int {
	return int(min(MaxConnections, (max(files, reserved+4*descriptors)-reserved)/descriptors)) //nolint:gosec // small
}

// Server serves connections. It is safe for concurrent use.
type Server struct {
	o         Options
	ctx       context.Context
	stop      context.CancelFunc
	listeners *sockets.Listeners
	// Invalid counts connections that could not be served, and Share those that ended because of the limits.
	Invalid, Share atomic.Uint64

	mu      sync.Mutex
	limit   *fair.Limit // guarded by mu
	closed  bool        // guarded by mu
	running sync.WaitGroup
}

// New returns a Server without listeners.
func New(o Options) *Server {
	ctx, cancel := context.WithCancel(context.Background())
	s := &Server{o: o, ctx: ctx, stop: cancel, limit: fair.New(o.Connections, max(1, o.Connections/4))}
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
	ends, err := sockets.Describe(fd, peer)
	if err != nil {
		s.o.Log.Debug("a connection was not served", "error", err.Error())
		s.drop(fd, &s.Invalid)
		return
	}
	if !s.start(fd, ends) {
		s.drop(fd, &s.Share)
	}
}

// start serves a connection, if the limits allow it.
func (s *Server) start(fd int, ends sockets.Ends) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	ctx, cancel := context.WithCancel(s.ctx)
	item := s.limit.Add(ends.Endpoint, 1, func() { s.Share.Add(1); cancel() })
	if item == nil {
		cancel()
		return false
	}
	s.running.Go(func() {
		defer cancel()
		s.serve(ctx, fd, ends)
		s.mu.Lock()
		s.limit.Remove(item)
		s.mu.Unlock()
	})
	return true
}

// drop resets a connection.
func (*Server) drop(fd int, reason *atomic.Uint64) {
	sockets.Reset(fd)
	unix.Close(fd) //nolint:errcheck // nothing was written to it
	reason.Add(1)
}

// errGone ends the connections of a deleted pod. Its endpoint ID may belong to another pod now.
var errGone = errors.New("the pod was deleted")

func (s *Server) serve(ctx context.Context, fd int, ends sockets.Ends) {
	pod := s.o.Pods.Get(ends.Endpoint)
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
	client := conn(sockets.File(fd, "client"), ends.Server, ends.Client)
	relay.Serve(ctx, relay.Options{
		Client: client,
		Connect: func(ctx context.Context) (*sockets.Conn, error) {
			fd, err := s.o.Take(ctx, ends.Client.Addr().Is6())
			if err != nil {
				return nil, err
			}
			f, err := sockets.Connect(ctx, fd, client.File, ends)
			if err != nil {
				return nil, err
			}
			return conn(f, ends.Client, ends.Server), nil
		},
		Rules: func(ctx context.Context) (relay.Evaluator, error) {
			if pod.Gone() {
				return nil, errGone
			}
			ctx, cancel := context.WithTimeout(ctx, waitTime)
			defer cancel()
			return s.o.Rules.Wait(ctx, ends.Set)
		},
		ServerNames: func(e relay.Evaluator) bool { return e.(*rules.Set).ServerNames }, //nolint:forcetypeassert // of Rules
		Report:      func(e relay.Event) { s.o.Report(pod.Namespace, e) },
	})
}

func conn(f *os.File, local, remote netip.AddrPort) *sockets.Conn {
	return &sockets.Conn{File: f, Local: net.TCPAddrFromAddrPort(local), Remote: net.TCPAddrFromAddrPort(remote)}
}
