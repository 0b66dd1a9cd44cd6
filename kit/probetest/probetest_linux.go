// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package probetest begins new connections at intervals and reports the failed ones. Tests of restarts need it, because
// a failure of new connections does not affect established ones.
package probetest

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// again is the time until a datagram is sent a second and last time, by the clock of the process.
const again = time.Second

// Patience is the timeout of attempts that must not fail. A lost packet is detected by the loss of the second
// datagram or by a second SYN, and not by a timeout: a server in a busy process has answered after 15 s.
const Patience = time.Minute

// errLost means that the handshake needed a retransmitted SYN.
var errLost = errors.New("the first SYN was lost")

// maxOpen limits the unfinished attempts of one target. On a busy machine, the prober then begins fewer attempts.
// With thousands of attempts in one process, each would take seconds.
const maxOpen = 16

// Target is a destination and a client.
type Target struct {
	Name  string // in results
	Netns string // path of the client's network namespace
	UDP   bool   // exchange a datagram instead of a handshake
	// To are the addresses, used in turn. A stream server must not close first; a datagram server must return what it
	// receives.
	To []netip.AddrPort
	// Late, which may be nil, is called if a datagram and its repetition are not answered within lateAfter. Its text
	// becomes part of the failure, if the answer does not come.
	Late func(from uint16) string
}

// lateAfter is shorter than the timeout of an unanswered UDP connection, so that Late finds its entries.
const lateAfter = 10 * time.Second

// Result contains the results of the attempts at one target.
type Result struct {
	Name   string
	Tried  int
	Failed []Failure
}

// Failure is a failed attempt.
type Failure struct {
	At   time.Time // its begin
	From uint16    // local port; 0 if it has none
	To   netip.AddrPort
	Took time.Duration
	Err  error
}

func (f Failure) String() string {
	return fmt.Sprintf("%s from port %d to %s after %s: %v",
		f.At.Format("15:04:05.000"), f.From, f.To, f.Took.Round(time.Millisecond), f.Err)
}

// Prober makes attempts until it is stopped.
type Prober struct {
	cancel  context.CancelFunc
	wg      sync.WaitGroup
	targets []*running
	spaces  map[string]*space
	clock   *clock
}

type running struct {
	Target
	tried atomic.Int64

	mu     sync.Mutex
	failed []Failure // guarded by mu
}

// Start begins an attempt at each target at every interval, until Stop. Attempts wait for an answer until patience
// has passed, which must exceed a second.
func Start(interval, patience time.Duration, targets ...Target) (*Prober, error) {
	ctx, cancel := context.WithCancel(context.Background())
	p := &Prober{cancel: cancel, spaces: map[string]*space{}, clock: startClock()}
	for _, t := range targets {
		s := p.spaces[t.Netns]
		if s == nil {
			var err error
			if s, err = openSpace(t.Netns); err != nil {
				p.Stop()
				return nil, err
			}
			p.spaces[t.Netns] = s
		}
		r := &running{Target: t}
		p.targets = append(p.targets, r)
		p.wg.Go(func() { r.run(ctx, interval, patience, s, p.clock) })
	}
	return p, nil
}

// Reach makes three attempts at each target, and returns an error for each target at which one failed.
func Reach(ctx context.Context, targets ...Target) error {
	p, err := Start(20*time.Millisecond, 2*time.Second, targets...)
	if err != nil {
		return err
	}
	p.Wait(ctx, 3)
	var errs []error
	for _, result := range p.Stop() {
		if len(result.Failed) > 0 {
			errs = append(errs, fmt.Errorf("%s: %v", result.Name, result.Failed[0]))
		}
	}
	return errors.Join(errs...)
}

// Wait waits until a number of further attempts at each target have begun, or ctx ends.
func (p *Prober) Wait(ctx context.Context, more int) {
	for until := p.Tried() + more; p.Tried() < until; {
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			return
		}
	}
}

// Stop waits for the running attempts and returns the results in the order of the targets.
func (p *Prober) Stop() []Result {
	p.cancel()
	p.wg.Wait()
	p.clock.stop()
	for _, s := range p.spaces {
		close(s.wanted)
	}
	p.spaces = nil
	var all []Result
	for _, r := range p.targets {
		all = append(all, Result{Name: r.Name, Tried: int(r.tried.Load()), Failed: r.failed})
	}
	return all
}

// Tried returns the lowest number of attempts begun at a target.
func (p *Prober) Tried() int {
	least := slices.MinFunc(p.targets, func(a, b *running) int { return int(a.tried.Load() - b.tried.Load()) })
	return int(least.tried.Load())
}

func (r *running) run(ctx context.Context, interval, patience time.Duration, s *space, c *clock) {
	var open sync.WaitGroup
	defer open.Wait()
	places := make(chan struct{}, maxOpen)
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		select {
		case places <- struct{}{}:
		case <-ctx.Done():
			return
		}
		n := r.tried.Add(1)
		to := r.To[int(n)%len(r.To)]
		open.Go(func() {
			defer func() { <-places }()
			begun := time.Now()
			from, err := attempt(s, c, patience, r.Target, to)
			took := time.Since(begun)
			if err != nil {
				r.mu.Lock()
				defer r.mu.Unlock()
				r.failed = append(r.failed, Failure{At: begun, From: from, To: to, Took: took, Err: err})
			}
		})
	}
}

// attempt connects to an address, or exchanges a datagram with it, and returns the local port. It waits with the
// runtime's poller: a thread for each attempt would be too much for the machine.
func attempt(s *space, c *clock, patience time.Duration, t Target, to netip.AddrPort) (from uint16, err error) {
	kind := unix.SOCK_STREAM
	if t.UDP {
		kind = unix.SOCK_DGRAM
	}
	fd, err := s.socket(kind, to.Addr())
	if err != nil {
		return 0, err
	}
	f := os.NewFile(uintptr(fd), "attempt")
	defer f.Close()
	if err := unix.Connect(fd, sockaddr(to)); err != nil && !errors.Is(err, unix.EINPROGRESS) {
		return 0, err
	}
	from = portOf(fd)
	if t.UDP {
		return from, echo(f, c, patience, func() string {
			if t.Late == nil {
				return ""
			}
			return t.Late(from)
		})
	}
	return from, c.within(patience, f.SetWriteDeadline, func() error { return handshake(f) })
}

// portOf returns the local port of a socket, or 0 if it cannot be read.
func portOf(fd int) uint16 {
	switch at, _ := unix.Getsockname(fd); at := at.(type) {
	case *unix.SockaddrInet4:
		return uint16(at.Port)
	case *unix.SockaddrInet6:
		return uint16(at.Port)
	}
	return 0
}

// handshake waits until a connection is established, and closes it.
func handshake(f *os.File) error {
	c, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var result error
	err = c.Write(func(fd uintptr) bool {
		info, err := unix.GetsockoptTCPInfo(int(fd), unix.SOL_TCP, unix.TCP_INFO)
		if err != nil || info.State == unix.BPF_TCP_SYN_SENT {
			result = err
			return err != nil
		}
		code, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR)
		switch {
		case err != nil:
			result = err
		case code != 0:
			result = unix.Errno(code)
		case info.Total_retrans > 0: // retransmissions, because on a busy machine the duration proves nothing
			result = errLost
		default:
			// Free the port at once: a client that probes for long would run out of ports.
			result = unix.SetsockoptLinger(int(fd), unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
		}
		return true
	})
	return errors.Join(err, result)
}

// echo sends a datagram, at most twice, and waits for its return. late returns text for the error if none arrives.
func echo(f *os.File, c *clock, patience time.Duration, late func() string) error {
	found := ""
	for i, timeout := range []time.Duration{again, lateAfter, patience} {
		if timeout = min(timeout, patience); timeout <= 0 {
			break
		}
		patience -= timeout
		if i < 2 {
			if _, err := f.Write([]byte("x")); err != nil {
				return err
			}
		} else {
			found = late()
		}
		err := c.within(timeout, f.SetReadDeadline, func() error { _, err := f.Read(make([]byte, 1)); return err })
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return err
		}
	}
	if found != "" {
		return fmt.Errorf("no answer; found after %s: %s", again+lateAfter, found)
	}
	return errors.New("no answer")
}

// clock measures the time in which the process was scheduled. On a busy machine the process may not be scheduled for
// seconds. An answer that has arrived in that time is late, but not lost.
type clock struct {
	ticks     atomic.Int64
	end, done chan struct{}
}

// tick is the resolution of a clock. Ticks that the process misses are not counted.
const tick = 10 * time.Millisecond

func startClock() *clock {
	c := &clock{end: make(chan struct{}), done: make(chan struct{})}
	go func() {
		defer close(c.done)
		t := time.NewTicker(tick)
		defer t.Stop()
		for {
			select {
			case <-t.C:
				c.ticks.Add(1)
			case <-c.end:
				return
			}
		}
	}()
	return c
}

func (c *clock) stop() { close(c.end); <-c.done }

// within repeats do, which returns at a deadline, until a duration has passed by the clock.
func (c *clock) within(d time.Duration, setDeadline func(time.Time) error, do func() error) error {
	until := c.ticks.Load() + int64(d/tick)
	for {
		left := time.Duration(until-c.ticks.Load()) * tick
		if err := setDeadline(time.Now().Add(max(left, 0))); err != nil {
			return err
		}
		if err := do(); left <= 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
			return err
		}
	}
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Addr: a.Addr().As4(), Port: int(a.Port())}
	}
	return &unix.SockaddrInet6{Addr: a.Addr().As16(), Port: int(a.Port())}
}

// space opens sockets in a network namespace on a thread that stays there. Entering the namespace for each socket
// would take longer than the connection.
type space struct {
	wanted chan request
}

type request struct {
	family, kind int
	answer       chan<- answer
}

type answer struct {
	fd  int
	err error
}

func openSpace(path string) (*space, error) {
	ns, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open network namespace %s: %w", path, err)
	}
	s := &space{wanted: make(chan request)}
	entered := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		err := unix.Setns(ns, unix.CLONE_NEWNET)
		_ = unix.Close(ns)
		entered <- err
		if err != nil {
			return
		}
		for r := range s.wanted {
			fd, err := unix.Socket(r.family, r.kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
			r.answer <- answer{fd, err}
		}
	}()
	if err := <-entered; err != nil {
		return nil, fmt.Errorf("enter network namespace %s: %w", path, err)
	}
	return s, nil
}

func (s *space) socket(kind int, to netip.Addr) (int, error) {
	family := unix.AF_INET
	if to.Is6() {
		family = unix.AF_INET6
	}
	c := make(chan answer)
	s.wanted <- request{family, kind, c}
	a := <-c
	return a.fd, a.err
}
