// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package frontendstream

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/datapath/internal/service/frontendtx"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// patience limits every wait for an event that must happen.
const patience = 10 * time.Second

// service passes each subscription to the test.
type service struct{ subscribed chan *stream }

func (s *service) Subscribe(ctx context.Context, sub Subscription) (Stream, error) {
	st := &stream{ctx: ctx, sub: sub, down: make(chan []frontend.Step), up: make(chan any, 100)}
	select {
	case s.subscribed <- st:
		return st, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// stream is one subscription, played by the test.
type stream struct {
	ctx  context.Context
	sub  Subscription
	down chan []frontend.Step
	up   chan any // ack, refusal
}

type ack struct{ enforced, ended uint64 }

type refusal struct {
	key    frontend.Key
	reason string
}

var errCut = errors.New("cut")

func (s *stream) Recv() ([]frontend.Step, error) {
	select {
	case steps, ok := <-s.down:
		if !ok {
			return nil, errCut
		}
		return steps, nil
	case <-s.ctx.Done():
		return nil, s.ctx.Err()
	}
}

func (s *stream) Ack(enforced, ended uint64) error {
	s.up <- ack{enforced, ended}
	return nil
}

func (s *stream) Refuse(k frontend.Key, reason string) error {
	s.up <- refusal{k, reason}
	return nil
}

// kernel keeps the applied frontends, at most room of them.
type kernel struct {
	mu     sync.Mutex
	have   map[frontend.Key]*frontend.Frontend // guarded by mu
	calls  [][]string                          // guarded by mu; the keys of each transaction
	room   int                                 // guarded by mu
	fail   error                               // guarded by mu; error of the next Apply
	graces int                                 // guarded by mu
}

func (k *kernel) Apply(_ context.Context, tx *frontendtx.Transaction) (res frontendtx.Result, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if err, k.fail = k.fail, nil; err != nil {
		return res, err
	}
	var keys []string
	for _, c := range tx.Changes() {
		keys = append(keys, fmt.Sprint(c.Key, c.Frontend != nil))
		old := k.have[c.Key]
		switch {
		case c.Frontend == nil && old != nil:
			delete(k.have, c.Key)
			res.Changed++
		case c.Frontend != nil && old == nil && len(k.have) >= k.room:
			res.Refused = append(res.Refused, frontend.Refusal{Key: c.Key, Err: &frontendtx.NoRoomError{Map: "sl_fe4", Need: 1}})
		case c.Frontend != nil && (old == nil || fmt.Sprint(*old.Inside) != fmt.Sprint(*c.Frontend.Inside)):
			k.have[c.Key] = c.Frontend
			res.Changed++
		}
	}
	slices.Sort(keys)
	k.calls = append(k.calls, keys)
	return res, nil
}

func (k *kernel) Barrier(context.Context) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.graces++
	return nil
}

func (k *kernel) Keys() ([]frontend.Key, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Collect(maps.Keys(k.have)), nil
}

// services returns the ports of the frontends in the kernel, sorted.
func (k *kernel) services() []uint16 {
	k.mu.Lock()
	defer k.mu.Unlock()
	var ports []uint16
	for key := range k.have {
		ports = append(ports, key.Port)
	}
	slices.Sort(ports)
	return ports
}

// ender blocks until the test continues it.
type ender struct {
	began chan struct{}
	let   chan error
}

func (e *ender) End(ctx context.Context) error {
	select {
	case e.began <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	select {
	case err := <-e.let:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// memory keeps a name.
type memory struct {
	mu    sync.Mutex
	state string // guarded by mu
	err   error
}

func (m *memory) Load() (string, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.state, m.err
}

func (m *memory) Save(state string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.state = state
	return nil
}

// world is a Follower with its dependencies.
type world struct {
	t      *testing.T
	svc    *service
	kernel *kernel
	memory *memory
	freed  chan struct{}
	room   chan struct{}
	f      *Follower
	stop   func()
}

func newWorld(t *testing.T) *world {
	return &world{
		t: t, svc: &service{subscribed: make(chan *stream)}, memory: &memory{}, freed: make(chan struct{}), room: make(chan struct{}),
		kernel: &kernel{have: map[frontend.Key]*frontend.Frontend{}, room: 100},
	}
}

// start starts a process.
func (w *world) start(e Ender) *world {
	w.t.Helper()
	ctx, cancel := context.WithCancel(w.t.Context())
	w.f = New(Options{
		Name: "datapath", Service: w.svc, Kernel: w.kernel, Ender: e, Memory: w.memory, Freed: w.freed, Room: w.room,
		Log: log.Discard(),
	})
	var work sync.WaitGroup
	work.Go(func() { _ = w.f.Run(ctx) })
	w.stop = sync.OnceFunc(func() { cancel(); work.Wait() })
	w.t.Cleanup(w.stop)
	return w
}

// next returns the next subscription.
func (w *world) next() *stream {
	w.t.Helper()
	select {
	case s := <-w.svc.subscribed:
		return s
	case <-time.After(patience):
		w.t.Fatal("no subscription")
		return nil
	}
}

// signal sends to one of the channels that the follower reads.
func (w *world) signal(c chan<- struct{}) {
	w.t.Helper()
	select {
	case c <- struct{}{}:
	case <-time.After(patience):
		w.t.Fatal("the signal was not received")
	}
}

// transactions waits until the kernel has applied n transactions: the follower receives a signal before it acts.
func (w *world) transactions(n int) {
	w.t.Helper()
	servicetest.Eventually(w.t, fmt.Sprint(n, " transactions"), func() bool {
		w.kernel.mu.Lock()
		defer w.kernel.mu.Unlock()
		return len(w.kernel.calls) == n
	})
}

func (w *world) send(s *stream, steps ...frontend.Step) {
	w.t.Helper()
	select {
	case s.down <- steps:
	case <-time.After(patience):
		w.t.Fatal("the steps were not received")
	}
}

// heard returns the next message that the service receives.
func (w *world) heard(s *stream) any {
	w.t.Helper()
	select {
	case m := <-s.up:
		return m
	case <-time.After(patience):
		w.t.Fatal("the service received nothing")
		return nil
	}
}

func (w *world) hears(s *stream, want ...any) {
	w.t.Helper()
	for _, x := range want {
		if got := w.heard(s); got != x {
			w.t.Fatalf("the service received %+v, want %+v", got, x)
		}
	}
}

// has compares the ports of the frontends in the kernel.
func (w *world) has(want ...uint16) {
	w.t.Helper()
	if got := w.kernel.services(); !slices.Equal(got, want) {
		w.t.Errorf("the kernel has %v, want %v", got, want)
	}
}

func key(port uint16) frontend.Key {
	return frontend.Key{Addr: netip.MustParseAddr("10.96.0.1"), Port: port, Protocol: frontend.TCP}
}

// up returns a frontend with a backend of that number.
func up(port uint16, backend byte) frontend.Step {
	l := &frontend.List{Backends: []frontend.Backend{{
		AddrPort: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 244, 0, backend}), 8080),
	}}}
	return frontend.Step{Upsert: &frontend.Frontend{Key: key(port), Kind: frontend.ClusterIP, Service: "shop/web", Inside: l}}
}

func down(port uint16) frontend.Step {
	k := key(port)
	return frontend.Step{Remove: &k}
}

// end returns a barrier of run "a" and state "s", modified by change.
func end(seq uint64, change ...func(*frontend.Barrier)) frontend.Step {
	b := &frontend.Barrier{Incarnation: "a", Seq: seq, Revision: 100 + seq, State: "s", SourcesComplete: true}
	for _, c := range change {
		c(b)
	}
	return frontend.Step{Barrier: b}
}

func snapshot(b *frontend.Barrier)           { b.SnapshotComplete = true }
func incomplete(b *frontend.Barrier)         { b.SourcesComplete = false }
func state(s string) func(*frontend.Barrier) { return func(b *frontend.Barrier) { b.State = s } }
func run(s string) func(*frontend.Barrier)   { return func(b *frontend.Barrier) { b.Incarnation = s } }
