// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package proxy is the part of the datapath about proxies, processes that evaluate what packets contain. A proxy
// connects to a socket and receives the queue of a TAP device, to which the programs send the packets that rules
// redirect. The connection is its lease: when it ends, the programs treat the proxy as absent.
//
// On the same connection, a proxy asks for the proxy namespace and for sockets of it, by which it serves TCP
// connections. See package proxyns.
package proxy

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/rpc"
	"github.com/sluice-net/sluice/kit/seqpacket"
	"github.com/sluice-net/sluice/kit/work"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/proxymap"
)

// Device is the TAP device of the proxy.
type Device interface {
	Name() string
	// MTU is the maximum size of an IP packet.
	MTU() uint32
	// Usable returns why no device can be made, for the life of the process; nil if one can.
	Usable() error
	// Adopt attaches the programs to the device of a previous process, and returns its index; 0: no device.
	Adopt() (index uint32, err error)
	// Ensure makes or repairs the device, and returns its index and its queue, which the caller does not close.
	Ensure() (index uint32, queue int, err error)
	// Check compares the device with what Ensure makes, if it was called.
	Check() ([]endpoint.Difference, error)
}

// Maps tell the programs about the proxy.
type Maps interface {
	Get(policytable.Proxy) (proxymap.Proxy, error)
	Set(policytable.Proxy, proxymap.Proxy) error
	// LastHeartbeat returns the time of CLOCK_MONOTONIC that the proxy wrote last; 0: none yet.
	LastHeartbeat(policytable.Proxy) (time.Duration, error)
}

// Attachment describes the queue and the memory for the heartbeat to a proxy.
type Attachment struct {
	Kind            policytable.Proxy
	Device          string
	MTU             uint32
	HeartbeatOffset uint32 // of the heartbeat in the memory, in bytes
}

// Options are the options of a Proxy. All are required, except where noted.
type Options struct {
	Kind policytable.Proxy
	// Device is nil for a proxy that receives TCP connections only.
	Device Device
	Maps   Maps
	// Heartbeats is a descriptor whose memory the proxy maps to write its heartbeat. The caller keeps it open.
	Heartbeats int
	// Listen opens the socket for proxies, of type SOCK_SEQPACKET.
	Listen func() (net.Listener, error)
	// Encode returns the message for a proxy.
	Encode func(Attachment) ([]byte, error)
	// Namespace is the proxy namespace; nil: none, and requests of proxies are ignored. Required without Device.
	Namespace Namespace
	// Decode returns the request of a message of a proxy, EncodeReply the message of a reply. Required with
	// Namespace.
	Decode      func([]byte) (Request, error)
	EncodeReply func(Reply) ([]byte, error)
	// Users may attach as the proxy.
	Users []uint32
	// Return is the time in which the proxy of a previous process has to connect again; 0: 1 s. Then it counts as
	// absent, unless its heartbeats show that it runs.
	Return time.Duration
	// Wait is how long new TCP connections wait for the next proxy after a proxy has ended; then they are dropped; 0: 5
	// s.
	Wait time.Duration
	Log  *slog.Logger
}

// Proxy attaches the processes of one kind of proxy, one at a time. Its methods may be called concurrently.
type Proxy struct {
	o      Options
	leases sync.WaitGroup

	mu       sync.Mutex // guards the following fields
	current  *lease     // nil: no proxy is attached
	returns  bool       // the proxy of a previous process counts as attached, until it connects or its time has passed
	unknown  error      // why this process could not find out whether that proxy's device exists; nil: it has found out
	index    uint32     // of the device; 0 before the first attachment
	failure  error      // why the last proxy that connected was not attached; nil if it was
	attached uint64     // counts attachments
	replaced uint64     // counts leases that ended because another process attached
	refused  uint64     // counts connections of users who may not attach
	failed   uint64     // counts proxies that could not be attached
	ending   bool       // Run has ended: the state in the kernel stays
	tcp      tcp        // the state of the proxy namespace
}

// lease is the connection of an attached proxy.
type lease struct {
	conn  conn
	pid   int32
	since time.Time
	began time.Duration // begin of the lease, as CLOCK_MONOTONIC: an older heartbeat was written by another process
	tcp   bool          // it has the proxy namespace
}

// conn is a connection of package rpc's Listener.
type conn interface {
	net.Conn
	Cred() rpc.Cred
	WriteMsgUnix(b, oob []byte, addr *net.UnixAddr) (n, oobn int, err error)
	ReadMsgUnix(b, oob []byte) (n, oobn, flags int, addr *net.UnixAddr, err error)
}

// Open returns a Proxy. It changes nothing before Run.
func Open(o Options) *Proxy {
	if o.Return == 0 {
		o.Return = time.Second
	}
	if o.Wait == 0 {
		o.Wait = 5 * time.Second
	}
	return &Proxy{o: o}
}

// Tasks returns the background work.
func (p *Proxy) Tasks() []work.Task {
	return []work.Task{{Name: "proxy " + p.o.Kind.String(), Run: p.Run}}
}

// Awaits returns nil: without a proxy, redirected packets are dropped and everything else works.
func (*Proxy) Awaits() []work.Await { return nil }

// silence is the age from which a missing heartbeat is reported. A proxy writes one every 20 ms.
const silence = 5 * time.Second

// Warnings reports a proxy that runs and cannot be attached, and an attached one without a heartbeat.
func (p *Proxy) Warnings() []string {
	s, err := p.Status()
	switch {
	case err != nil:
		return []string{err.Error()}
	case s.Attached && time.Since(s.Since) > silence && (s.HeartbeatAge < 0 || s.HeartbeatAge > silence):
		return []string{fmt.Sprintf("the %s proxy (pid %d) is attached, but has written no heartbeat for %s: packets wait "+
			"for it or are dropped; restart it", s.Kind, s.PID, silence)}
	case s.Attached && s.TCP.Problem != "":
		return []string{fmt.Sprintf("the %s proxy (pid %d) gets no TCP connections, so that they are dropped: %s", s.Kind, s.PID,
			s.TCP.Problem)}
	case s.Attached:
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.failure == nil {
		return nil
	}
	return []string{fmt.Sprintf("the %s proxy is running, but cannot be attached, so packets for it are dropped: %v",
		p.o.Kind, p.failure)}
}

// Run attaches proxies until ctx ends. An attached proxy keeps its queue beyond that, and the programs continue to use
// it: the proxy connects to the next process.
func (p *Proxy) Run(ctx context.Context) error {
	if err := p.adopt(); err != nil {
		return err
	}
	l, err := p.o.Listen()
	if err != nil {
		return fmt.Errorf("listen for proxies: %w", err)
	}
	defer context.AfterFunc(ctx, func() { l.Close() })()
	giveUp := make(chan struct{})
	returning, stop := context.WithCancel(ctx)
	go func() {
		defer close(giveUp)
		p.awaitReturn(returning)
	}()
	defer func() { stop(); <-giveUp; p.end() }()
	return seqpacket.Accept(ctx, l, func(err error) {
		p.o.Log.Error("cannot accept the connection of a proxy; retrying", log.Err(err))
	}, func(c net.Conn) { p.accept(c.(conn)) })
}

// end closes the connection, and leaves the state in the kernel.
func (p *Proxy) end() {
	p.mu.Lock()
	p.ending = true
	p.stopWaiting()
	if p.current != nil {
		p.current.conn.Close()
	}
	p.mu.Unlock()
	p.leases.Wait()
}

// adopt prepares the kernel's state of a previous process. If its proxy still has the device, or if that is not known,
// packets go to it until it has had time to connect; otherwise the proxy is absent.
func (p *Proxy) adopt() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.o.Device != nil {
		had, err := p.o.Maps.Get(p.o.Kind)
		if err != nil {
			return fmt.Errorf("read the state of the %s proxy: %w", p.o.Kind, err)
		}
		p.index, p.returns = had.Device, had.Attached
		p.adoptDevice()
	}
	if err := p.adoptNamespace(); err != nil {
		return err
	}
	return p.tell()
}

// adoptDevice adopts the device of a previous process. A device that does not exist has no proxy. The lock is held.
func (p *Proxy) adoptDevice() {
	had := p.unknown
	index, err := p.o.Device.Adopt()
	if p.unknown = err; err == nil {
		p.returns = p.returns && index != 0 && index == p.index
	} else if had == nil {
		p.o.Log.Error("cannot adopt the TAP device of a proxy, trying again", "proxy", p.o.Kind.String(), log.Err(err))
	}
}

// awaitReturn marks the proxy of a previous process as absent unless it connects in time.
func (p *Proxy) awaitReturn(ctx context.Context) {
	tick := time.NewTicker(p.o.Return)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		if p.giveUp() {
			return
		}
	}
}

// giveUp marks the proxy of a previous process as absent unless it has connected or runs. It returns false if the proxy
// may still connect.
func (p *Proxy) giveUp() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.returns || p.ending {
		return true
	}
	if p.unknown != nil {
		p.adoptDevice()
	}
	if p.returns && p.runs() {
		return false
	}
	p.returns = false
	if err := p.tell(); err != nil {
		p.returns = true
		p.o.Log.Error("cannot mark the proxy as absent in the BPF maps", "proxy", p.o.Kind.String(), log.Err(err))
	}
	return !p.returns
}

// runs reports whether the proxy of a previous process has written a heartbeat recently, or that is not known.
func (p *Proxy) runs() bool {
	last, err := p.o.Maps.LastHeartbeat(p.o.Kind)
	now, cerr := monotonic()
	return err != nil || cerr != nil || last != 0 && last <= now && now-last < silence
}

// want returns the state that the programs should have. The lock is held.
func (p *Proxy) want() proxymap.Proxy {
	return proxymap.Proxy{Device: p.index, Attached: p.index != 0 && (p.current != nil || p.returns)}
}

// tell reports the state to the programs. The lock is held.
func (p *Proxy) tell() error {
	if p.o.Device != nil {
		if err := p.o.Maps.Set(p.o.Kind, p.want()); err != nil {
			return fmt.Errorf("write the state of the %s proxy: %w", p.o.Kind, err)
		}
	}
	return p.tellNamespace()
}

// accept attaches the peer of a connection, or closes the connection.
func (p *Proxy) accept(c conn) {
	cred := c.Cred()
	if !slices.Contains(p.o.Users, cred.UID) {
		p.mu.Lock()
		p.refused++
		p.mu.Unlock()
		c.Close()
		p.o.Log.Debug("connection of a user who may not attach as a proxy closed", "uid", cred.UID, "pid", cred.PID)
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.attach(c); err != nil {
		c.Close()
		p.failed++
		if p.failure == nil || p.failure.Error() != err.Error() { // a refused proxy keeps trying: log only new reasons
			p.o.Log.Error("proxy not attached", "proxy", p.o.Kind.String(), "pid", cred.PID, log.Err(err))
		}
		p.failure = err
		return
	}
	p.failure = nil
}

// sendTimeout limits sending the message, which the buffer of a new connection always takes.
const sendTimeout = time.Second

// attach makes a connection the lease of the proxy, and closes the previous one. The lock is held.
func (p *Proxy) attach(c conn) error {
	a := Attachment{Kind: p.o.Kind, HeartbeatOffset: proxymap.HeartbeatOffset(p.o.Kind)}
	var index uint32
	var files []int
	if p.o.Device != nil {
		var queue int
		var err error
		if index, queue, err = p.o.Device.Ensure(); err != nil {
			return err
		}
		a.Device, a.MTU, files = p.o.Device.Name(), p.o.Device.MTU(), append(files, queue)
	}
	files = append(files, p.o.Heartbeats)
	message, err := p.o.Encode(a)
	if err != nil {
		return err
	}
	began, err := monotonic()
	if err != nil {
		return err
	}
	// Tell the programs about the proxy before the proxy gets its queue: frames wait in the queue meanwhile.
	had := p.current
	l := &lease{conn: c, pid: c.Cred().PID, since: time.Now(), began: began}
	p.index, p.current = index, l
	if err = p.tell(); err == nil {
		err = p.send(c, message, files)
	}
	if err != nil {
		p.current = had
		return errors.Join(err, p.tell())
	}
	p.returns = false
	p.attached++
	level := slog.LevelInfo
	if had != nil {
		p.replaced++
		level = slog.LevelDebug // a proxy that connects in a loop must not fill the log
		had.conn.Close()
		p.awaitNamespace()
	}
	p.o.Log.Log(context.Background(), level, "proxy attached", "proxy", p.o.Kind.String(), "device", a.Device,
		"pid", l.pid)
	p.leases.Go(func() { p.wait(l) })
	return nil
}

// send sends the message with the queue, if there is one, and the memory for the heartbeat.
func (p *Proxy) send(c conn, message []byte, files []int) error {
	err := c.SetWriteDeadline(time.Now().Add(sendTimeout))
	if err == nil {
		_, _, err = c.WriteMsgUnix(message, rights(files...), nil)
	}
	if err != nil {
		return fmt.Errorf("send what the %s proxy needs: %w", p.o.Kind, err)
	}
	return nil
}

// wait serves the requests of a proxy, and marks it as absent as soon as its connection has ended.
func (p *Proxy) wait(l *lease) {
	p.serve(l)
	l.conn.Close()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.current != l || p.ending {
		return
	}
	p.current = nil
	p.awaitNamespace()
	if err := p.tell(); err != nil {
		p.o.Log.Error("cannot mark the proxy as absent in the BPF maps", "proxy", p.o.Kind.String(), log.Err(err))
	}
	p.o.Log.Warn("proxy absent: its connection ended", "proxy", p.o.Kind.String(), "pid", l.pid)
}

// Check compares the device and what the programs know with what they should be.
func (p *Proxy) Check() ([]endpoint.Difference, error) {
	var diffs []endpoint.Difference
	var err error
	if p.o.Device != nil {
		if diffs, err = p.o.Device.Check(); err != nil {
			return nil, err
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.o.Device != nil {
		have, err := p.o.Maps.Get(p.o.Kind)
		if err != nil {
			return nil, fmt.Errorf("read the state of the %s proxy: %w", p.o.Kind, err)
		}
		if want := p.want(); have != want && p.attached > 0 {
			diffs = append(diffs, endpoint.Difference{
				Subject: "sl_proxy", Key: p.o.Kind.String(), Want: describe(want), Have: describe(have),
			})
		}
	}
	more, err := p.checkNamespace()
	return append(diffs, more...), err
}

func describe(s proxymap.Proxy) string {
	if s.Attached {
		return fmt.Sprintf("attached, device %d", s.Device)
	}
	return fmt.Sprintf("absent, device %d", s.Device)
}

// Repair repairs what Check finds.
func (p *Proxy) Repair() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.attached == 0 {
		return nil
	}
	var err error
	if p.o.Device != nil {
		var index uint32
		if index, _, err = p.o.Device.Ensure(); err == nil {
			p.index = index // a deleted device has another index now
		}
	}
	return errors.Join(err, p.repairNamespace(), p.tell())
}

// Status describes the proxy.
type Status struct {
	Kind     policytable.Proxy
	Device   string // the TAP device; "" for a proxy that receives TCP connections only
	Attached bool
	Since    time.Time // of the attachment
	PID      int32     // of the attached process; 0: in a PID namespace that is not visible here
	// HeartbeatAge is the time since the last heartbeat of the attached proxy; negative: none yet.
	HeartbeatAge time.Duration
	// Problem is why no proxy can be attached; "" if one can.
	Problem string
	// TCP describes the proxy namespace.
	TCP TCPStatus

	Attachments, Replaced, Refused, Failed uint64
}

// Status returns the current state.
func (p *Proxy) Status() (Status, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := Status{
		Kind: p.o.Kind, HeartbeatAge: -1,
		Attachments: p.attached, Replaced: p.replaced, Refused: p.refused, Failed: p.failed, TCP: p.tcpStatus(),
	}
	if p.o.Device != nil {
		s.Device = p.o.Device.Name()
	}
	if p.failure != nil {
		s.Problem = p.failure.Error()
	} else if p.o.Device != nil {
		if err := p.o.Device.Usable(); err != nil {
			s.Problem = err.Error()
		}
	}
	if p.current == nil {
		return s, nil
	}
	s.Attached, s.Since, s.PID = true, p.current.since, p.current.pid
	last, err := p.o.Maps.LastHeartbeat(p.o.Kind)
	if err != nil {
		return s, fmt.Errorf("read the heartbeat of the %s proxy: %w", p.o.Kind, err)
	}
	now, err := monotonic()
	if last != 0 && last >= p.current.began && err == nil {
		s.HeartbeatAge = max(now-last, 0)
	}
	return s, err
}
