// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package sockets is about the TCP sockets of a proxy namespace: it accepts the connections of clients, reads what
// their sockets say, and connects to servers with the address and port of the client.
package sockets

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/log"
)

const (
	// formerTime is how long former listeners are still served after they were replaced.
	formerTime = time.Second
	// acceptPause is the pause after an error of accept.
	acceptPause = 10 * time.Millisecond
	minSegment  = 88 // the smallest TCP_MAXSEG
)

// Listeners accept the connections of clients. Its methods may be called concurrently.
type Listeners struct {
	accept func(fd int, peer unix.Sockaddr)
	log    *slog.Logger

	mu      sync.Mutex
	files   []*os.File // guarded by mu
	closed  bool       // guarded by mu
	running sync.WaitGroup
}

// NewListeners returns Listeners without a listener. accept takes over the non-blocking socket of each connection. It
// is called by one goroutine for each listener, and must not block.
func NewListeners(accept func(fd int, peer unix.Sockaddr), l *slog.Logger) *Listeners {
	return &Listeners{accept: accept, log: l}
}

// Use accepts connections from new listeners in place of the former ones. It still accepts the waiting connections of
// the former listeners. It takes over the descriptors, which must be non-blocking.
func (l *Listeners) Use(fds []int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	former := l.files
	l.files = nil
	for _, fd := range fds {
		f := os.NewFile(uintptr(fd), "listener")
		if l.closed {
			f.Close()
			continue
		}
		l.files = append(l.files, f)
		l.running.Go(func() { l.serve(f) })
	}
	for _, f := range former {
		_ = f.SetReadDeadline(time.Now().Add(formerTime))
	}
}

// Close stops accepting, and returns when no call of accept runs. sluice-datapath keeps the listeners open, so that
// connections wait for the next process.
func (l *Listeners) Close() {
	l.mu.Lock()
	l.closed = true
	for _, f := range l.files {
		_ = f.SetReadDeadline(time.Unix(1, 0))
	}
	l.files = nil
	l.mu.Unlock()
	l.running.Wait()
}

// serve accepts connections until the deadline of the listener.
func (l *Listeners) serve(f *os.File) {
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
			l.log.Error("the listener for TCP connections cannot be used", log.Err(aerr))
			return
		case aerr != nil:
			time.Sleep(acceptPause) // out of descriptors or memory
		default:
			l.accept(fd, peer)
		}
	}
}

// Ends describes the connection of a client.
type Ends struct {
	Client, Server netip.AddrPort
	// Set is the number of the rule set of the client's policies, and Endpoint the ID of the client's endpoint.
	Set, Endpoint uint16
}

// Describe returns what an accepted socket says about its connection.
func Describe(fd int, peer unix.Sockaddr) (e Ends, err error) {
	var ok bool
	if e.Client, ok = address(peer); !ok {
		return e, errors.New("the client has no IP address")
	}
	own, err := unix.Getsockname(fd)
	if err != nil {
		return e, fmt.Errorf("read the address of the server: %w", err)
	}
	if e.Server, ok = address(own); !ok {
		return e, errors.New("the server has no IP address")
	}
	mark, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK)
	if err != nil {
		return e, fmt.Errorf("read the mark: %w", err)
	}
	e.Set, e.Endpoint = uint16(mark), uint16(mark>>16) //nolint:gosec // the two halves of the mark
	if e.Set == 0 {
		return e, fmt.Errorf("the connection of %s has no rule set", e.Client)
	}
	return e, nil
}

// Connect connects an unbound socket of the namespace to the server, with the address and port of the client. It takes
// over the descriptor. client is the accepted connection: segments from the server are limited to the client's MSS,
// because the MTU of the namespace is larger.
func Connect(ctx context.Context, fd int, client *os.File, e Ends) (*os.File, error) {
	f := os.NewFile(uintptr(fd), "server")
	stop := context.AfterFunc(ctx, func() { Wake(f) })
	err := connect(f, fd, client, e)
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, f.SetDeadline(time.Time{})
}

func connect(f *os.File, fd int, client *os.File, e Ends) error {
	Control(client, func(client int) {
		if size, err := unix.GetsockoptInt(client, unix.IPPROTO_TCP, unix.TCP_MAXSEG); err == nil {
			_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_MAXSEG, max(size, minSegment))
		}
	})
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
	if err := unix.Bind(fd, sockaddr(e.Client)); err != nil {
		return fmt.Errorf("bind to %s: %w", e.Client, err)
	}
	if err := unix.Connect(fd, sockaddr(e.Server)); err == nil || !errors.Is(err, unix.EINPROGRESS) {
		return err
	}
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Write(func(fd uintptr) bool {
		var code int
		if code, failed = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR); failed != nil {
			return true
		}
		if code != 0 {
			failed = unix.Errno(code)
			return true
		}
		_, perr := unix.Getpeername(int(fd))
		return perr == nil
	})
	return errors.Join(err, failed)
}

// Wake makes all pending and later reads and writes of a file fail.
func Wake(f *os.File) { _ = f.SetDeadline(time.Unix(1, 0)) }

// Reset makes the next close of a socket send a reset.
func Reset(fd int) {
	_ = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
}

// Control calls fn with the descriptor of a file.
func Control(f *os.File, fn func(fd int)) {
	if raw, err := f.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) { fn(int(fd)) })
	}
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
