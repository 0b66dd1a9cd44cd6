// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package attach

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/seqpacket"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
)

const (
	// batch is the number of sockets that one request asks for. If fewer than lowMark sockets are free, the next
	// request is sent, so that free sockets are left while sluice-datapath restarts.
	batch   = 64
	lowMark = 64
	// retryPause is the pause before a request is repeated after a failure.
	retryPause = 10 * time.Second
)

// pool contains the free sockets of the proxy's network namespace.
type pool struct {
	mu        sync.Mutex
	conn      *net.UnixConn // nil: not attached; guarded by mu
	namespace int           // -1: none yet; guarded by mu
	listeners []int         // copies of the listeners; guarded by mu
	ready     bool          // the namespace was received on conn; guarded by mu
	free      [2][]int      // IPv4, IPv6; guarded by mu
	asked     [2]bool       // more were requested on conn; guarded by mu
	changed   chan struct{} // guarded by mu; closed and replaced when sockets have arrived
	closed    bool          // guarded by mu
}

func family(ipv6 bool) int {
	if ipv6 {
		return 1
	}
	return 0
}

// Take returns an unbound socket of the proxy's network namespace. The caller must close it. If no socket is free,
// Take waits until ctx ends.
func (a *Attachment) Take(ctx context.Context, ipv6 bool) (fd int, err error) {
	p := &a.pool
	for {
		p.mu.Lock()
		f := family(ipv6)
		if n := len(p.free[f]); n > 0 {
			fd, p.free[f] = p.free[f][n-1], p.free[f][:n-1]
			p.refill(ipv6)
			p.mu.Unlock()
			return fd, nil
		}
		p.refill(ipv6)
		if p.changed == nil {
			p.changed = make(chan struct{})
		}
		changed := p.changed
		p.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return -1, fmt.Errorf("wait for a socket of the proxy namespace: %w", ctx.Err())
		}
	}
}

// refill requests sockets if few are free. Called with the lock held.
func (p *pool) refill(ipv6 bool) {
	f := family(ipv6)
	if len(p.free[f]) >= lowMark || p.asked[f] || !p.ready {
		return
	}
	p.asked[f] = p.send(&datapathv1.ProxyRequest{Request: &datapathv1.ProxyRequest_Sockets{
		Sockets: &datapathv1.ProxySocketsRequest{Count: batch, Ipv6: ipv6},
	}}) == nil
}

// send sends a request. Called with the lock held. It does not block: the few unanswered requests fit into the buffer
// of the connection.
func (p *pool) send(m *datapathv1.ProxyRequest, files ...int) error {
	if p.conn == nil {
		return errNever
	}
	b, err := proto.Marshal(m)
	if err != nil {
		return err
	}
	var oob []byte
	if len(files) > 0 {
		oob = unix.UnixRights(files...)
	}
	_, _, err = p.conn.WriteMsgUnix(b, oob, nil)
	return err
}

// ask requests the namespace.
func (p *pool) ask() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	m := &datapathv1.ProxyRequest{Request: &datapathv1.ProxyRequest_Namespace{
		Namespace: &datapathv1.ProxyNamespaceRequest{},
	}}
	if p.namespace < 0 {
		return p.send(m)
	}
	return p.send(m, append([]int{p.namespace}, p.listeners...)...)
}

// use replaces the connection. nil means that the process is not attached.
func (p *pool) use(conn *net.UnixConn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.conn, p.ready, p.asked = conn, false, [2]bool{}
}

func (p *pool) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	p.drop()
	p.leave()
}

// leave closes the descriptors of the namespace. Called with the lock held.
func (p *pool) leave() {
	if p.namespace >= 0 {
		unix.Close(p.namespace) //nolint:errcheck // nothing was written to it
	}
	seqpacket.CloseAll(p.listeners)
	p.namespace, p.listeners = -1, nil
}

// drop closes the free sockets. Called with the lock held.
func (p *pool) drop() {
	for f := range p.free {
		seqpacket.CloseAll(p.free[f])
		p.free[f] = nil
	}
}

// enter replaces the namespace. Free sockets of the former namespace are closed, because they can no longer be used.
// It keeps copies of the listeners.
func (p *pool) enter(fd int, listeners []int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !same(p.namespace, fd) {
		p.drop()
	}
	p.leave()
	p.namespace, p.ready = fd, true
	for _, l := range listeners {
		if copied, err := unix.FcntlInt(uintptr(l), unix.F_DUPFD_CLOEXEC, 0); err == nil {
			p.listeners = append(p.listeners, copied)
		}
	}
	p.wake()
}

// same reports whether two descriptors refer to the same namespace.
func same(a, b int) bool {
	var x, y unix.Stat_t
	return unix.Fstat(a, &x) == nil && unix.Fstat(b, &y) == nil && x.Dev == y.Dev && x.Ino == y.Ino
}

func (p *pool) add(fds []int, ipv6 bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		seqpacket.CloseAll(fds)
		return
	}
	p.free[family(ipv6)] = append(p.free[family(ipv6)], fds...)
	p.asked[family(ipv6)] = false
	p.wake()
}

// wake wakes the callers of Take. Called with the lock held.
func (p *pool) wake() {
	if p.changed != nil {
		close(p.changed)
		p.changed = nil
	}
}

// serve requests the namespace, and handles replies until the connection ends.
func (a *Attachment) serve(conn *net.UnixConn) error {
	if a.o.Listen != nil {
		a.pool.use(conn)
		defer a.pool.use(nil)
		if err := a.pool.ask(); err != nil {
			return fmt.Errorf("ask sluice-datapath for the proxy namespace: %w", err)
		}
	}
	b, oob := make([]byte, maxMessage), make([]byte, unix.CmsgSpace(maxDescriptors*4))
	for {
		n, control, flags, _, err := conn.ReadMsgUnix(b, oob)
		fds := seqpacket.Descriptors(oob[:control])
		if err != nil {
			seqpacket.CloseAll(fds)
			return fmt.Errorf("sluice-datapath has ended the connection: %w", err)
		}
		m := &datapathv1.ProxyReply{}
		if flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 || proto.Unmarshal(b[:n], m) != nil || a.o.Listen == nil {
			seqpacket.CloseAll(fds) // a reply of a later version
			continue
		}
		a.take(m, fds)
	}
}

// take handles a reply.
func (a *Attachment) take(m *datapathv1.ProxyReply, fds []int) {
	switch {
	case m.GetNamespace() != nil && (len(fds) == 2 || len(fds) == 3):
		a.pool.enter(fds[0], fds[1:])
		a.o.Listen(fds[1:])
		a.tcp.set(nil)
		a.o.Log.Info("TCP connections are accepted", "device", m.GetNamespace().GetDevice())
	case m.GetSockets() != nil && len(fds) > 0:
		a.pool.add(fds, m.GetSockets().GetIpv6())
	case m.GetProblem() != "":
		seqpacket.CloseAll(fds)
		err := errors.New(m.GetProblem())
		if a.tcp.get() != nil {
			a.tcp.set(err)
		}
		a.o.Log.Warn("sluice-datapath has refused a request; retrying", "after", retryPause, log.Err(err))
		time.AfterFunc(retryPause, a.again)
	default:
		seqpacket.CloseAll(fds)
	}
}

// again repeats a request that has failed.
func (a *Attachment) again() {
	a.pool.mu.Lock()
	ready := a.pool.ready
	a.pool.asked = [2]bool{}
	a.pool.wake()
	a.pool.mu.Unlock()
	if !ready {
		_ = a.pool.ask()
	}
}
