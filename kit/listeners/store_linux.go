// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package listeners

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/rpc"
	"github.com/sluice-net/sluice/kit/seqpacket"
)

// StoreOptions are the options of a Store. Listen and Users are required.
type StoreOptions struct {
	// Listen opens the socket for clients, of type SOCK_SEQPACKET, with a Listener of package rpc.
	Listen func() (net.Listener, error)
	// Users may connect. All others are refused.
	Users []uint32
	// Most is the maximum number of sockets; 0: 1,024. A client with more keeps only the first ones.
	Most int
	// Keep is how long sockets are kept without a client; 0: 10 s. Then the kernel refuses connections to them
	// again, and another program, such as an earlier version of the client, can listen on their ports.
	Keep time.Duration
	Log  *slog.Logger // nil: none
}

// Store keeps listening sockets of one client, which is the one that has connected last. Its methods may be called
// concurrently.
type Store struct {
	o     StoreOptions
	conns sync.WaitGroup

	mu      sync.Mutex
	kept    map[netip.AddrPort]int // guarded by mu; descriptors by address
	current peer                   // guarded by mu; nil: no client
	gone    time.Time              // guarded by mu; when the last client ended, while there is none
	ended   bool                   // guarded by mu; Run has ended
}

// peer is a connection of a client.
type peer interface {
	packets
	Cred() rpc.Cred
}

// NewStore returns an empty Store.
func NewStore(o StoreOptions) *Store {
	if o.Most == 0 {
		o.Most = 1024
	}
	if o.Keep == 0 {
		o.Keep = 10 * time.Second
	}
	if o.Log == nil {
		o.Log = log.Discard()
	}
	return &Store{o: o, kept: make(map[netip.AddrPort]int)}
}

// Len returns the number of sockets.
func (s *Store) Len() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.kept)
}

// Run serves clients until ctx ends. Then it closes all sockets: a client that still runs has its own descriptors.
func (s *Store) Run(ctx context.Context) error {
	l, err := s.o.Listen()
	if err != nil {
		return fmt.Errorf("listen for clients of the store of listening sockets: %w", err)
	}
	defer s.end()
	defer context.AfterFunc(ctx, func() { l.Close() })()
	s.conns.Go(func() { s.forget(ctx) })
	return seqpacket.Accept(ctx, l, func(err error) {
		s.o.Log.Error("cannot accept a connection to the store of listening sockets; retrying", log.Err(err))
	}, func(c net.Conn) { s.accept(c.(peer)) })
}

// end closes the connection and all sockets.
func (s *Store) end() {
	s.mu.Lock()
	s.ended = true
	if s.current != nil {
		s.current.Close()
	}
	s.mu.Unlock()
	s.conns.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.clear()
}

// clear closes all sockets. The lock is held.
func (s *Store) clear() {
	for _, fd := range s.kept {
		closeFD(fd)
	}
	clear(s.kept)
}

// forget closes the sockets of a client that has not connected again in time.
func (s *Store) forget(ctx context.Context) {
	tick := time.NewTicker(s.o.Keep / 4)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		s.mu.Lock()
		if s.current == nil && len(s.kept) > 0 && time.Since(s.gone) >= s.o.Keep {
			s.o.Log.Warn("closed the sockets of a process that has not connected again in time", "sockets", len(s.kept))
			s.clear()
		}
		s.mu.Unlock()
	}
}

// accept makes the peer of a connection the client, and ends the previous connection.
func (s *Store) accept(c peer) {
	if cred := c.Cred(); !slices.Contains(s.o.Users, cred.UID) {
		c.Close()
		s.o.Log.Debug("closed the connection of a user who may not store listening sockets", "uid", cred.UID, "pid", cred.PID)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		c.Close()
		return
	}
	if s.current != nil {
		s.current.Close()
	}
	s.current = c
	s.conns.Go(func() { s.serve(c) })
}

// serve sends a client its sockets, and answers its requests until the connection ends.
func (s *Store) serve(c peer) {
	err := s.greet(c)
	for err == nil {
		var m message
		if m, err = receive(c); err == nil {
			if answer := s.handle(c, m); answer != 0 {
				err = send(c, message{kind: answer, addr: m.addr, fd: -1})
			}
		}
	}
	c.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.current == c {
		s.current, s.gone = nil, time.Now()
	}
}

// greet sends a client all sockets.
func (s *Store) greet(c peer) error {
	s.mu.Lock() // hold the lock, so that no descriptor is closed meanwhile
	defer s.mu.Unlock()
	for addr, fd := range s.kept {
		if err := send(c, message{kind: has, addr: addr, fd: fd}); err != nil {
			return err
		}
	}
	return send(c, message{kind: ends, fd: -1})
}

// handle does what a client requests, and returns the kind of the answer; 0: none, because it is no longer the client.
func (s *Store) handle(c peer, m message) byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.current != c || s.ended {
		closeFD(m.fd)
		return 0
	}
	switch m.kind {
	case keep:
		addr, err := addressOf(m.fd)
		had, again := s.kept[addr]
		switch {
		case err != nil || addr != m.addr:
			closeFD(m.fd)
			return not
		case !again && len(s.kept) >= s.o.Most:
			closeFD(m.fd)
			return full
		case again:
			closeFD(had)
		}
		s.kept[addr] = m.fd
		return done
	case drop:
		if fd, ok := s.kept[m.addr]; ok {
			closeFD(fd)
			delete(s.kept, m.addr)
		}
	}
	if m.kind != keep {
		closeFD(m.fd)
	}
	return done // also the answer to requests of a later version
}
