// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package tap serves the queue of the TAP device: it reads the packets of redirected connections, and releases,
// answers or drops them as package exchange decides.
//
// One goroutine reads the queue, and a second one helps when there are many packets. They wait only for packets. Held
// answers, queries whose rule set is not known yet, and large answers are left to other goroutines. The number and
// the memory of these goroutines are limited, and pods share the limits.
package tap

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/proxy/fair"
	"github.com/sluice-net/sluice/proxy/pods"
	"github.com/sluice-net/sluice/services/dns/internal/exchange"
	"github.com/sluice-net/sluice/services/dns/internal/fragment"
	"github.com/sluice-net/sluice/services/dns/internal/frame"
	"github.com/sluice-net/sluice/services/dns/internal/rules"
)

const (
	// WaitFor is how long a query waits for its rule set.
	WaitFor = 5 * time.Second
	// MaxWaits and MaxWaitsPerPod limit the number of queries that wait for their rule set.
	MaxWaits       = 1024
	MaxWaitsPerPod = 64
	// largeMessage is the size in bytes above which a reader leaves an answer to other goroutines, because evaluating
	// it takes long.
	largeMessage = 4096
	// stopGrace is how long held answers may still wait when the process stops.
	stopGrace = time.Second
	// podTime is how long an answer waits for sluice-datapath to report the pod that asked.
	podTime = time.Second
	// readPause is the pause after a read that failed because the kernel had no memory.
	readPause = 10 * time.Millisecond
)

// Options describe a Loop. All fields are required.
type Options struct {
	Exchange *exchange.Exchange
	Rules    *rules.Rules
	Pods     *pods.Pods
	// Held receives how long each held packet has waited.
	Held func(time.Duration)
	Log  *slog.Logger
}

// Counts are the numbers of packets.
type Counts struct {
	Queries, Answers, Fragments             atomic.Uint64 // read
	Invalid, BadChecksum, FragmentedQueries atomic.Uint64 // dropped
	FragmentConflicts, FragmentLimit        atomic.Uint64 // dropped
	NoRuleSet, Share, PodGone, WriteErrors  atomic.Uint64 // dropped
}

// Loop serves the queue. It is safe for concurrent use.
type Loop struct {
	o         Options
	Counts    Counts
	fragments *fragment.Packets
	work      *work
	stop      context.CancelFunc // stops the work

	waits struct {
		sync.Mutex
		limit   *fair.Limit // guarded by Mutex
		closed  bool        // guarded by Mutex
		running sync.WaitGroup
	}

	mu     sync.Mutex            // held while the queue is replaced
	closed bool                  // guarded by mu
	queue  atomic.Pointer[Queue] // the current queue; nil before the first
}

// New returns a Loop without a queue.
func New(o Options) *Loop {
	ctx, cancel := context.WithCancel(context.Background())
	l := &Loop{o: o, fragments: fragment.New(), work: newWork(ctx), stop: cancel}
	l.waits.limit = fair.New(MaxWaits, MaxWaitsPerPod)
	return l
}

// errStopped is returned for a queue that arrives after the loop has stopped.
var errStopped = errors.New("sluice-dns is stopping")

// Use serves a queue in place of the former one. It first handles the frames in the former queue. It takes over the
// descriptor.
func (l *Loop) Use(fd int) (*Queue, error) {
	q, err := newQueue(fd)
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, errors.Join(errStopped, q.close())
	}
	old := l.queue.Swap(q)
	q.readers.Go(l.newReader(q).first)
	q.readers.Go(l.newReader(q).second)
	go func() {
		q.readers.Wait()
		close(q.ended)
	}()
	if old != nil {
		old.drain()
		if err := old.close(); err != nil {
			l.o.Log.Warn("the former queue of the TAP device was not closed", log.Err(err))
		}
	}
	return q, nil
}

// Run waits until ctx ends, handles the remaining frames of the queue, and stops the loop. Held answers then wait at
// most one more second.
func (l *Loop) Run(ctx context.Context) error {
	tick := time.NewTicker(fragment.Time)
	defer tick.Stop()
	for ctx.Err() == nil {
		select {
		case <-tick.C:
			l.fragments.Expire(time.Now())
		case <-ctx.Done():
		}
	}
	l.close()
	return nil
}

func (l *Loop) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	end := time.AfterFunc(stopGrace, l.stop)
	defer end.Stop()
	defer l.stop()
	q := l.queue.Load()
	if q != nil {
		q.drain()
	}
	l.work.close()
	l.stop()
	l.waits.Lock()
	l.waits.closed = true
	l.waits.Unlock()
	l.waits.running.Wait()
	if q != nil {
		if err := q.close(); err != nil {
			l.o.Log.Warn("the queue of the TAP device was not closed", log.Err(err))
		}
	}
}

// Later runs other work of a pod when it is the pod's turn, within the limits of held answers, or abandons it.
func (l *Loop) Later(endpoint uint16, size int, run func(context.Context), abandon func()) {
	l.work.add(endpoint, size, &job{run: run, abandon: abandon})
}

// Fragments returns how many incomplete packets were dropped because of their waiting time, and because of the
// limits.
func (l *Loop) Fragments() (expired, evicted uint64) { return l.fragments.Expire(time.Now()) }

// reader reads frames of a queue, and handles them.
type reader struct {
	*Loop
	queue *Queue
	in    *input
	frame frame.Frame
	reply []byte
}

func (l *Loop) newReader(q *Queue) *reader {
	return &reader{Loop: l, queue: q, in: newInput(q), reply: make([]byte, 0, 2048)}
}

// busyFrames is the number of consecutive frames without a pause after which the second reader helps. The second
// reader does not wait for frames, because each frame would then wake two threads.
const busyFrames = 4

// first handles frames until the queue is replaced or can no longer be read.
func (r *reader) first() {
	defer close(r.queue.more)
	frames := 0
	for {
		b, waited, err := r.in.read()
		if frames++; waited {
			frames = 0
		}
		if frames >= busyFrames {
			select {
			case r.queue.more <- struct{}{}:
			default:
			}
		}
		switch {
		case err == nil:
			r.handle(b)
		case errors.Is(err, os.ErrDeadlineExceeded):
			r.queue.err = errReplaced
			r.drain()
			return
		case passing(err):
			time.Sleep(readPause) // the kernel has no memory for the frame, which stays in the queue
		default:
			r.queue.err = err
			return
		}
	}
}

// errReplaced is the reason for which the readers of a queue end: the queue was replaced, or the process stops.
var errReplaced = errors.New("the queue was replaced")

// second handles frames while the first reader cannot keep up.
func (r *reader) second() {
	for range r.queue.more {
		r.drain()
	}
}

// drain handles the frames that are already in the queue.
func (r *reader) drain() {
	for range maxDrained {
		b, err := r.in.poll()
		if err != nil {
			return // the first reader gets and handles the same error
		}
		r.handle(b)
	}
}

// handle handles a frame. The caller may reuse b afterwards.
func (r *reader) handle(b []byte) {
	f := &r.frame
	if err := f.Read(b); err != nil {
		r.Counts.Invalid.Add(1)
		return
	}
	switch {
	case f.Fragmented && f.Role == frame.Initiator:
		// Resolvers do not fragment queries, and a fragment of a query cannot be evaluated.
		r.Counts.Fragments.Add(1)
		if r.o.Rules.AllowEvery(rules.Tag{Egress: f.Set}) {
			r.send(r.queue, b)
			return
		}
		r.Counts.FragmentedQueries.Add(1)
	case f.Fragmented:
		r.Counts.Fragments.Add(1)
		r.fragment(b)
	case f.Role == frame.Initiator:
		r.Counts.Queries.Add(1)
		r.query(b)
	default:
		r.Counts.Answers.Add(1)
		r.answer(b)
	}
}

// connection returns the connection of a packet.
func (l *Loop) connection(f *frame.Frame, pod *pods.Pod) exchange.Connection {
	c := exchange.Connection{
		Client: f.Source, Server: f.Destination, Endpoint: f.Endpoint, Asker: pod.Client, Unknown: !l.o.Pods.Knows(pod),
		Tag: rules.Tag{Egress: f.Set},
	}
	if f.Role == frame.Responder {
		c.Client, c.Server = c.Server, c.Client
	}
	return c
}

// send sends a frame. A write fails while the device is down or full, or the kernel has no memory. The frame is then
// lost, and clients repeat their queries.
func (l *Loop) send(q *Queue, b []byte) {
	if err := q.write(b); err != nil {
		l.Counts.WriteErrors.Add(1)
		l.o.Log.Debug("a packet was not sent to the TAP device", log.Err(err))
	}
}

// release sends frames to the current queue. Goroutines other than the readers use it.
func (l *Loop) release(frames ...[]byte) {
	q := l.queue.Load()
	for _, b := range frames {
		l.send(q, b)
	}
}

func (r *reader) query(b []byte) {
	f := &r.frame
	pod := r.o.Pods.Get(f.Endpoint)
	action, reply := r.o.Exchange.Query(r.connection(f, pod), f.Payload, r.reply[:f.ReplySize()])
	switch action {
	case exchange.Release:
		r.send(r.queue, b)
	case exchange.Reply:
		r.reply = reply[:0]
		if !f.Intact() { // its server would drop it, too
			r.Counts.BadChecksum.Add(1)
			return
		}
		f.CompleteReply(reply)
		r.send(r.queue, reply)
	case exchange.Wait:
		r.wait(slices.Clone(b), pod)
	}
}

// wait makes a query wait for its rule set.
func (l *Loop) wait(b []byte, pod *pods.Pod) {
	var f frame.Frame
	if f.Read(b) != nil {
		return // cannot fail: it was read before
	}
	ctx, cancel := context.WithTimeout(l.work.ctx, WaitFor)
	l.waits.Lock()
	defer l.waits.Unlock()
	var item *fair.Item
	if !l.waits.closed {
		item = l.waits.limit.Add(f.Endpoint, 1, func() {
			l.Counts.Share.Add(1)
			cancel()
		})
	}
	if item == nil {
		l.Counts.Share.Add(1)
		cancel()
		return
	}
	began := time.Now()
	l.waits.running.Go(func() {
		defer cancel()
		known := l.o.Rules.Wait(ctx, rules.Tag{Egress: f.Set})
		l.waits.Lock()
		last := l.waits.limit.Remove(item)
		l.waits.Unlock()
		if !last {
			return // counted already
		}
		l.waited(b, &f, pod, known)
		l.o.Held(time.Since(began))
	})
}

// waited decides about a query after it has waited for its rule set.
func (l *Loop) waited(b []byte, f *frame.Frame, pod *pods.Pod, known bool) {
	if pod.Gone() { // the ID may belong to another pod now
		l.Counts.PodGone.Add(1)
		return
	}
	if !known {
		l.Counts.NoRuleSet.Add(1)
		return
	}
	action, reply := l.o.Exchange.Query(l.connection(f, pod), f.Payload, make([]byte, f.ReplySize(), 1024))
	switch action {
	case exchange.Release:
		l.release(b)
	case exchange.Reply:
		if !f.Intact() {
			l.Counts.BadChecksum.Add(1)
			return
		}
		f.CompleteReply(reply)
		l.release(reply)
	case exchange.Wait: // the set was removed again
		l.Counts.NoRuleSet.Add(1)
	}
}

func (r *reader) answer(b []byte) {
	f := &r.frame
	if len(f.Payload) > largeMessage {
		whole := slices.Clone(b)
		var f frame.Frame
		if f.Read(whole) == nil { // it was read before
			r.evaluate(f, whole)
		}
		return
	}
	if !f.Intact() { // a corrupt answer may contain an address that no server has sent
		r.Counts.BadChecksum.Add(1)
		return
	}
	pod := r.o.Pods.Get(f.Endpoint)
	switch action, held := r.o.Exchange.Answer(r.connection(f, pod), f.Payload); action {
	case exchange.Release:
		r.send(r.queue, b)
	case exchange.Hold:
		r.hold(f.Endpoint, pod, slices.Clone(b), held)
	}
}

// hold holds an answer until its addresses are enforced.
func (l *Loop) hold(endpoint uint16, pod *pods.Pod, b []byte, held *exchange.Held) {
	began := time.Now()
	l.work.add(endpoint, len(b), &job{
		run: func(ctx context.Context) {
			l.settle(ctx, endpoint, held)
			l.settled(pod, began, b)
		},
		abandon: func() {
			l.o.Exchange.Abandon(held)
			l.settled(pod, began, b)
		},
	})
}

// settle returns when a held answer may be released. If the pod that asked is not known yet, settle first waits for
// it.
func (l *Loop) settle(ctx context.Context, endpoint uint16, held *exchange.Held) {
	if held.NeedsAsker() {
		limited, cancel := context.WithTimeout(ctx, podTime)
		pod, known := l.o.Pods.Wait(limited, endpoint)
		cancel()
		if known {
			held.SetAsker(pod.Client)
		}
	}
	l.o.Exchange.Settle(ctx, held)
}

// settled releases a held answer after settle.
func (l *Loop) settled(pod *pods.Pod, began time.Time, frames ...[]byte) {
	l.o.Held(time.Since(began))
	if pod.Gone() {
		l.Counts.PodGone.Add(uint64(len(frames)))
		return
	}
	l.release(frames...)
}

// fragment handles a fragment of an answer.
func (r *reader) fragment(b []byte) {
	frames, data, result := r.fragments.Add(&r.frame, b, time.Now())
	switch result {
	case fragment.Completed:
		var f frame.Frame
		if f.Read(frames[0]) != nil || f.Join(data) != nil {
			r.Counts.Invalid.Add(1)
			return
		}
		r.evaluate(f, frames...)
	case fragment.Conflict:
		r.Counts.FragmentConflicts.Add(1)
	case fragment.NoSpace:
		r.Counts.FragmentLimit.Add(1)
	}
}

// evaluate evaluates a large answer and releases its frames.
func (l *Loop) evaluate(f frame.Frame, frames ...[]byte) {
	size := 0
	for _, b := range frames {
		size += len(b)
	}
	pod := l.o.Pods.Get(f.Endpoint)
	l.work.add(f.Endpoint, size, &job{
		run: func(ctx context.Context) {
			if !f.Intact() {
				l.Counts.BadChecksum.Add(1)
				return
			}
			began := time.Now()
			switch action, held := l.o.Exchange.Answer(l.connection(&f, pod), f.Payload); action {
			case exchange.Release:
				l.release(frames...)
			case exchange.Hold:
				l.settle(ctx, f.Endpoint, held)
				l.settled(pod, began, frames...)
			}
		},
		abandon: func() { l.Counts.Share.Add(uint64(len(frames))) }, // the answer was not evaluated, so it is dropped
	})
}
