// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package proxy

import (
	"errors"
	"fmt"
	"time"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/seqpacket"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/proxymap"
	"github.com/sluice-net/sluice/services/datapath/internal/proxy/proxyns"
)

// Namespace is the proxy namespace, see package proxyns.
type Namespace interface {
	Name() string
	// Adopt attaches the programs to the device of a previous process, and returns its index; 0: no device.
	Adopt() (index uint32, err error)
	// Ensure makes or repairs the namespace. former are the descriptors of the namespace that a proxy uses, and of
	// its listeners.
	Ensure(former ...int) (proxyns.Use, error)
	// Sockets makes sockets, which the caller closes.
	Sockets(n int, ipv6 bool) ([]int, error)
	// Check compares the namespace with what Ensure makes, if it was called.
	Check() ([]endpoint.Difference, error)
}

// Request is a request of a proxy: for the namespace, or for sockets.
type Request struct {
	Namespace bool
	Sockets   int
	IPv6      bool // of the sockets
}

// Reply is the reply to a request: the device of the namespace, a number of sockets, or a problem.
type Reply struct {
	Device  string
	Sockets int
	IPv6    bool // the namespace has IPv6, or the sockets are for it
	Problem string
}

// tcp is the state of the proxy namespace. The lock of the Proxy guards it.
type tcp struct {
	index   uint32      // of the device; 0 before the first proxy asked for the namespace
	open    bool        // connections may begin: a proxy accepts them, or will soon
	expires *time.Timer // marks the namespace as absent; nil while a proxy has it
	made    bool        // Ensure has succeeded
	failure error       // why the last request for the namespace failed
	sockets uint64      // counts sockets that proxies got
}

// TCPStatus describes the proxy namespace.
type TCPStatus struct {
	// Device is the name of the node's device; "" without a namespace.
	Device string
	// Attached: the attached proxy accepts TCP connections.
	Attached bool
	// Waiting: no proxy accepts connections, and new ones wait for the next proxy.
	Waiting bool
	Problem string
	// Sockets counts the sockets that proxies got.
	Sockets uint64
}

// tcpStatus returns the state of the namespace. The lock is held.
func (p *Proxy) tcpStatus() (s TCPStatus) {
	if p.o.Namespace == nil {
		return s
	}
	if p.tcp.index != 0 {
		s.Device = p.o.Namespace.Name()
	}
	s.Attached = p.current != nil && p.current.tcp
	s.Waiting = !s.Attached && p.tcp.open
	s.Sockets = p.tcp.sockets
	if p.tcp.failure != nil {
		s.Problem = p.tcp.failure.Error()
	}
	return s
}

// adoptNamespace prepares the state of a previous process. Connections wait for its proxy, which connects again. The
// lock is held.
func (p *Proxy) adoptNamespace() error {
	if p.o.Namespace == nil {
		return nil
	}
	index, err := p.o.Namespace.Adopt()
	if err != nil {
		p.o.Log.Error("proxy namespace of a running proxy not adopted", "proxy", p.o.Kind.String(), log.Err(err))
	}
	had, merr := p.o.Maps.Get(proxymap.NamespaceOf(p.o.Kind))
	if merr != nil {
		return fmt.Errorf("read the state of the proxy namespace: %w", merr)
	}
	p.tcp.index = had.Device
	if err == nil {
		p.tcp.index = index // the namespace of a proxy that has ended no longer exists
	}
	p.tcp.open = err == nil && had.Attached && index != 0 && index == had.Device
	p.awaitNamespace()
	return nil
}

// awaitNamespace marks the namespace as absent unless a proxy gets it soon. The lock is held.
func (p *Proxy) awaitNamespace() {
	if !p.tcp.open || p.tcp.expires != nil || p.current != nil && p.current.tcp {
		return
	}
	var expires *time.Timer
	expires = time.AfterFunc(p.o.Wait, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.tcp.expires != expires || p.ending {
			return
		}
		p.tcp.expires, p.tcp.open = nil, false
		if err := p.tellNamespace(); err != nil {
			p.o.Log.Error("absent proxy not reported to the programs", "proxy", p.o.Kind.String(), log.Err(err))
		}
	})
	p.tcp.expires = expires
}

// stopWaiting stops the timer, and changes no state. The lock is held.
func (p *Proxy) stopWaiting() {
	if p.tcp.expires != nil {
		p.tcp.expires.Stop()
	}
	p.tcp.expires = nil
}

func (p *Proxy) wantNamespace() proxymap.Proxy {
	return proxymap.Proxy{Device: p.tcp.index, Attached: p.tcp.index != 0 && p.tcp.open}
}

// tellNamespace reports the state of the namespace to the programs. The lock is held.
func (p *Proxy) tellNamespace() error {
	if p.o.Namespace == nil {
		return nil
	}
	if err := p.o.Maps.Set(proxymap.NamespaceOf(p.o.Kind), p.wantNamespace()); err != nil {
		return fmt.Errorf("write the state of the proxy namespace: %w", err)
	}
	return nil
}

// maxRequest is the largest message of a proxy.
const maxRequest = 1024

// serve answers the requests of a proxy until its connection ends.
func (p *Proxy) serve(l *lease) {
	b, oob := make([]byte, maxRequest), make([]byte, controlSize)
	for {
		n, control, _, _, err := l.conn.ReadMsgUnix(b, oob)
		files := seqpacket.Descriptors(oob[:control])
		if err == nil && n == 0 {
			seqpacket.CloseAll(files)
			return
		}
		if err == nil && p.o.Namespace != nil {
			err = p.answer(l, b[:n], files)
		}
		seqpacket.CloseAll(files)
		if err != nil {
			return
		}
	}
}

// answer answers one request.
func (p *Proxy) answer(l *lease, b []byte, files []int) error {
	r, err := p.o.Decode(b)
	if err != nil {
		return err
	}
	switch {
	case r.Namespace:
		return p.giveNamespace(l, files)
	case r.Sockets > 0:
		return p.giveSockets(l, r)
	}
	return nil // a later version of the proxy may send other requests
}

// giveNamespace passes the namespace to the attached proxy. From then on, connections may begin.
func (p *Proxy) giveNamespace(l *lease, former []int) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.current != l || p.ending {
		return errors.New("another process is attached")
	}
	use, err := p.o.Namespace.Ensure(former...)
	p.tcp.failure = err
	if err != nil {
		p.o.Log.Error("the proxy gets no TCP connections", "proxy", p.o.Kind.String(), log.Err(err))
		return p.reply(l, Reply{Problem: err.Error()})
	}
	p.tcp.made = true
	files := []int{use.Namespace, use.Listen4}
	if use.Listen6 >= 0 {
		files = append(files, use.Listen6)
	}
	if err := p.reply(l, Reply{Device: p.o.Namespace.Name(), IPv6: use.Listen6 >= 0}, files...); err != nil {
		return err
	}
	p.stopWaiting()
	l.tcp, p.tcp.index, p.tcp.open = true, use.Device, true
	return p.tellNamespace()
}

// giveSockets passes sockets to the attached proxy.
func (p *Proxy) giveSockets(l *lease, r Request) error {
	p.mu.Lock()
	attached := p.current == l && l.tcp
	p.mu.Unlock()
	if !attached {
		return errors.New("the proxy asks for sockets without the proxy namespace")
	}
	files, err := p.o.Namespace.Sockets(r.Sockets, r.IPv6)
	defer seqpacket.CloseAll(files)
	if err != nil {
		return p.reply(l, Reply{Problem: err.Error()})
	}
	p.mu.Lock()
	p.tcp.sockets += uint64(len(files))
	p.mu.Unlock()
	return p.reply(l, Reply{Sockets: len(files), IPv6: r.IPv6}, files...)
}

func (p *Proxy) reply(l *lease, r Reply, files ...int) error {
	b, err := p.o.EncodeReply(r)
	if err != nil {
		return err
	}
	if err := l.conn.SetWriteDeadline(time.Now().Add(sendTimeout)); err != nil {
		return err
	}
	var oob []byte
	if len(files) > 0 {
		oob = rights(files...)
	}
	_, _, err = l.conn.WriteMsgUnix(b, oob, nil)
	return err
}

// checkNamespace compares the namespace and what the programs know with what they should be. The lock is held.
func (p *Proxy) checkNamespace() ([]endpoint.Difference, error) {
	if p.o.Namespace == nil || !p.tcp.made {
		return nil, nil
	}
	diffs, err := p.o.Namespace.Check()
	if err != nil {
		return nil, err
	}
	have, err := p.o.Maps.Get(proxymap.NamespaceOf(p.o.Kind))
	if err != nil {
		return nil, fmt.Errorf("read the state of the proxy namespace: %w", err)
	}
	if want := p.wantNamespace(); have != want {
		diffs = append(diffs, endpoint.Difference{
			Subject: "sl_proxy", Key: p.o.Kind.String() + " tcp", Want: describe(want), Have: describe(have),
		})
	}
	return diffs, nil
}

// repairNamespace repairs what checkNamespace finds. If the device was deleted, the attached proxy has to connect
// again, and gets the new namespace. The lock is held.
func (p *Proxy) repairNamespace() error {
	if p.o.Namespace == nil || !p.tcp.made {
		return nil
	}
	had := p.tcp.index
	use, err := p.o.Namespace.Ensure()
	if err != nil {
		return err
	}
	p.tcp.index = use.Device
	if had != use.Device && p.current != nil && p.current.tcp {
		p.current.conn.Close()
	}
	return nil
}
