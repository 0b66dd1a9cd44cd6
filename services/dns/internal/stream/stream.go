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
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/dns/internal/exchange"
	"github.com/sluice-net/sluice/services/dns/internal/fair"
	"github.com/sluice-net/sluice/services/dns/internal/pods"
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
	// formerTime is how long the process still accepts connections from former listeners after they were replaced.
	formerTime = time.Second
	// acceptPause is the pause after an error of accept.
	acceptPause = 10 * time.Millisecond
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
	o      Options
	Counts Counts
	ctx    context.Context
	stop   context.CancelFunc

	mu        sync.Mutex
	listeners []*os.File  // guarded by mu
	limit     *fair.Limit // guarded by mu
	closed    bool        // guarded by mu
	running   sync.WaitGroup
}

// New returns a Server without listeners.
func New(o Options) *Server {
	ctx, cancel := context.WithCancel(context.Background())
	return &Server{o: o, ctx: ctx, stop: cancel, limit: fair.New(MaxConnections, MaxConnectionsPerPod)}
}

// Len returns the number of connections.
func (s *Server) Len() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.limit.Used()
}

// Listen accepts connections from new listeners in place of the former ones. It still accepts the waiting connections
// of the former listeners. It takes over the descriptors, which must be non-blocking.
func (s *Server) Listen(fds []int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	former := s.listeners
	s.listeners = nil
	for _, fd := range fds {
		f := os.NewFile(uintptr(fd), "listener")
		if s.closed {
			f.Close()
			continue
		}
		s.listeners = append(s.listeners, f)
		s.running.Go(func() { s.accept(f) })
	}
	for _, f := range former {
		_ = f.SetReadDeadline(time.Now().Add(formerTime))
	}
}

// Run serves until ctx ends.
func (s *Server) Run(ctx context.Context) error {
	<-ctx.Done()
	s.mu.Lock()
	s.closed = true
	for _, f := range s.listeners {
		_ = f.SetReadDeadline(time.Unix(1, 0))
	}
	s.listeners = nil
	s.mu.Unlock()
	s.stop()
	s.running.Wait()
	return nil
}

// accept accepts connections until the deadline of the listener. sluice-datapath keeps the listener open, so that
// connections wait for the next process.
func (s *Server) accept(f *os.File) {
	defer f.Close()
	raw, err := f.SyscallConn()
	if err != nil {
		return
	}
	for {
		var fd int
		var peer unix.Sockaddr
		var aerr error
		err := raw.Read(func(listener uintptr) bool {
			fd, peer, aerr = unix.Accept4(int(listener), unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
			return !errors.Is(aerr, unix.EAGAIN)
		})
		switch {
		case err != nil: // replaced
			return
		case errors.Is(aerr, unix.ECONNABORTED):
		case errors.Is(aerr, unix.EINVAL), errors.Is(aerr, unix.EBADF):
			s.o.Log.Error("the listener for TCP connections cannot be used", log.Err(aerr))
			return
		case aerr != nil:
			time.Sleep(acceptPause) // out of descriptors or memory
		default:
			s.begin(fd, peer)
		}
	}
}

// begin serves an accepted connection.
func (s *Server) begin(fd int, peer unix.Sockaddr) {
	c, err := s.newConn(fd, peer)
	if err != nil {
		s.o.Log.Debug("a TCP connection was not served", log.Err(err))
		reset(fd)
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

// reset makes the next close of a socket send a reset.
func reset(fd int) {
	_ = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
}

// address returns the address and port of a socket.
func address(sa unix.Sockaddr) (netip.AddrPort, bool) {
	switch a := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(a.Addr), uint16(a.Port)), true //nolint:gosec // a port
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(a.Addr), uint16(a.Port)), true //nolint:gosec // a port
	}
	return netip.AddrPort{}, false
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Addr: a.Addr().As4(), Port: int(a.Port())}
	}
	return &unix.SockaddrInet6{Addr: a.Addr().As16(), Port: int(a.Port())}
}

// control calls fn with the descriptor of a file.
func control(f *os.File, fn func(fd int)) {
	if raw, err := f.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) { fn(int(fd)) })
	}
}
