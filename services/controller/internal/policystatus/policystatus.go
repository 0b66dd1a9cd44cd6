// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package policystatus tells the authors of policies what Sluice makes of them, in
// the objects of the Kubernetes API.
//
// A Writer stands between the watch of the API server and the evaluation of the objects, whose outcome for
// each it keeps, beside what the object says already. While the process is elected it writes
// what differs, and nothing else. What it writes comes back as a change of the
// object: so a write that was lost, or that another has replaced, is repeated.
//
// It writes only over the resource version that it has seen. A process that has
// lost the lease and does not know it yet can at worst write what the next leader
// would.
package policystatus

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/services/controller/internal/subject"
	"github.com/sluice-net/sluice/services/policy/evaluation"
)

// Errors of an API.
var (
	// ErrChanged: the object is not in the form of the resource version any more.
	ErrChanged = errors.New("the object has changed")
	// ErrGone: the object does not exist.
	ErrGone = errors.New("the object is gone")
	// ErrNoStatus: the API server keeps no status of objects of the kind.
	ErrNoStatus = errors.New("the kind has no status")
	// ErrRefused: the API server answered that it does not take the request. The
	// same request has no better answer soon.
	ErrRefused = errors.New("the API server refuses it")
)

// Object is an object of the API in one form.
type Object struct {
	evaluation.Key
	APIVersion string
	evaluation.Record
}

// API is where the status is written. Other errors than the ones above mean that
// there was no answer.
type API interface {
	// SetConditions writes status.conditions, in JSON, of the object in this form.
	SetConditions(ctx context.Context, o Object, conditions []byte) error
	// Record makes an Event on an object. One that exists by its name is kept as it
	// is, and no error.
	Record(ctx context.Context, o Object, e Event) error
}

// evaluator evaluates the objects.
type evaluator interface {
	evaluation.Sink
	Outcomes(ctx context.Context, keys []evaluation.Key) (map[evaluation.Key]evaluation.Outcome, error)
	// Run gives the objects of the API server to a sink.
	Run(ctx context.Context, to evaluation.Sink) error
}

// Times of a writer.
const (
	firstPause   = time.Second
	longestPause = 30 * time.Second
	refusedIn    = 5 * time.Minute // until a request that was refused is tried again
)

// Writer writes the status. It is the Sink of the source.
type Writer struct {
	evaluator
	api      API
	leads    subject.Leadership
	log      *slog.Logger
	requests subject.Requests
	now      func() time.Time

	wake chan struct{} // has a token when something may be due

	mu      sync.Mutex
	objects map[evaluation.Key]*object
	refused map[evaluation.Key]Nodes     // policies that some nodes do not enforce as written
	due     map[evaluation.Key]time.Time // when to look whether the status is right
	mute    map[string]time.Time         // until when kinds have no status, by APIVersion and kind
}

// object is one with the verdict on it.
type object struct {
	Object
	judged  Verdict // for all nodes
	verdict Verdict // judged, with what some nodes refuse
	said    Event
}

// New returns a writer of the outcomes of an evaluator, which belongs to it.
func New(e *evaluation.Evaluator, api API, leads subject.Leadership, l *slog.Logger) *Writer {
	return newWriter(e, api, leads, l)
}

func newWriter(e evaluator, api API, leads subject.Leadership, l *slog.Logger) *Writer {
	return &Writer{
		evaluator: e, api: api, leads: leads, log: l, now: time.Now, wake: make(chan struct{}, 1),
		objects: make(map[evaluation.Key]*object), due: make(map[evaluation.Key]time.Time), mute: make(map[string]time.Time),
	}
}

// Run follows the objects, and writes while the process is elected, until ctx ends; it then returns nil.
func (w *Writer) Run(ctx context.Context) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var leading sync.WaitGroup
	leading.Go(func() { w.leads.While(ctx, w.lead) })
	err := w.evaluator.Run(ctx, w)
	stop()
	leading.Wait()
	return err
}

// Status returns how many objects are to be compared, and written if they differ, and how the requests went.
func (w *Writer) Status() subject.Status {
	w.mu.Lock()
	pending := len(w.due)
	w.mu.Unlock()
	return w.requests.Status("policy status", pending)
}

// Answers reports whether the evaluator answers.
func (w *Writer) Answers(ctx context.Context) error {
	_, err := w.Outcomes(ctx, nil)
	return err
}

// Apply implements watch.Sink.
func (w *Writer) Apply(ctx context.Context, c watch.Changes[evaluation.Key, evaluation.Object]) error {
	if err := w.evaluator.Apply(ctx, c); err != nil {
		return err
	}
	keys := make([]evaluation.Key, 0, len(c.Upserts))
	for k := range c.Upserts {
		keys = append(keys, k)
	}
	if len(c.Upserts) == 0 { // which tries again what was refused; shares may be others, too
		w.mu.Lock()
		for k := range w.objects {
			keys = append(keys, k)
		}
		w.mu.Unlock()
	}
	judged, err := w.Outcomes(ctx, keys)
	if err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for k := range c.Deletes {
		w.forget(k)
	}
	for _, k := range keys {
		o := w.objects[k]
		if written, ok := c.Upserts[k]; ok && written.Record != nil {
			said := Event{}
			if o != nil && o.UID == written.Record.UID {
				said = o.said
			}
			o = &object{Object: Object{Key: k, APIVersion: written.APIVersion, Record: *written.Record}, said: said}
			w.objects[k] = o
		}
		if o == nil {
			continue
		}
		v := Judge(k.Kind, judged[k])
		o.judged = v
		v = v.on(w.refused[k])
		if _, ok := c.Upserts[k]; !ok && v == o.verdict {
			continue
		}
		o.verdict = v
		w.due[k] = time.Time{}
	}
	w.notify()
	return nil
}

// Complete implements watch.Sink.
func (w *Writer) Complete(ctx context.Context, listed map[evaluation.Key]struct{}) error {
	if err := w.evaluator.Complete(ctx, listed); err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for k := range w.objects {
		if _, ok := listed[k]; !ok {
			w.forget(k)
		}
	}
	return nil
}

// SetRefused replaces which policies some nodes do not enforce as written.
func (w *Writer) SetRefused(refused map[evaluation.Key]Nodes) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.refused = refused
	for k, o := range w.objects {
		if v := o.judged.on(refused[k]); v != o.verdict {
			o.verdict = v
			w.due[k] = time.Time{}
		}
	}
	w.notify()
}

func (w *Writer) forget(k evaluation.Key) {
	delete(w.objects, k)
	delete(w.due, k)
}

func (w *Writer) notify() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// lead writes until the context ends. It looks at every object first: what the
// last leader has written is in the objects.
func (w *Writer) lead(ctx context.Context) {
	w.mu.Lock()
	clear(w.mute)
	for k := range w.objects {
		w.due[k] = time.Time{}
	}
	w.mu.Unlock()
	wait := firstPause
	for ctx.Err() == nil {
		keys, next := w.take()
		var failed error
		for i, k := range keys {
			if failed = w.write(ctx, k); failed != nil {
				w.putBack(keys[i:])
				break
			}
		}
		var timer <-chan time.Time
		wake := w.wake
		switch {
		case ctx.Err() != nil:
			return
		case failed != nil:
			w.log.Warn("the status of policies is not written", log.Err(failed), "again", wait)
			timer, wake, wait = time.After(wait), nil, min(2*wait, longestPause)
		case len(keys) > 0:
			wait = firstPause
			continue
		case !next.IsZero():
			timer = time.After(max(0, next.Sub(w.now())))
		}
		select {
		case <-timer:
		case <-wake:
		case <-ctx.Done():
		}
	}
}

// take returns the keys that are due, sorted, and when the next one is.
func (w *Writer) take() (keys []evaluation.Key, next time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := w.now()
	for k, at := range w.due {
		switch {
		case !at.After(now):
			keys = append(keys, k)
			delete(w.due, k)
		case next.IsZero() || at.Before(next):
			next = at
		}
	}
	slices.SortFunc(keys, evaluation.Key.Compare)
	return keys, next
}

func (w *Writer) putBack(keys []evaluation.Key) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, k := range keys {
		if w.objects[k] != nil {
			w.due[k] = time.Time{}
		}
	}
}

// later has a key looked at again, unless that is due earlier.
func (w *Writer) later(k evaluation.Key, in time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if _, ok := w.due[k]; !ok && w.objects[k] != nil {
		w.due[k] = w.now().Add(in)
	}
}

// write writes the status of one object if it differs. An error means that the API
// server does not answer.
func (w *Writer) write(ctx context.Context, k evaluation.Key) error {
	w.mu.Lock()
	o := w.objects[k]
	var now object
	if o != nil {
		now = *o
	}
	kind := now.APIVersion + " " + k.Kind
	mute := w.mute[kind]
	w.mu.Unlock()
	if o == nil {
		return nil
	}
	requests := []func(object) (func(context.Context) error, error){w.record}
	if k.Kind != withoutStatus {
		requests = requests[:0]
		if now.verdict.Reason == ExceedsShare || now.said.Reason == ExceedsShare { // an Event beside the condition
			requests = append(requests, w.record)
		}
		requests = append(requests, w.setConditions)
	}
	var send func(context.Context) error
	var err error
	left := len(requests)
	for _, request := range requests {
		left--
		if send, err = request(now); send != nil || err != nil {
			break
		}
	}
	if err != nil {
		w.log.Warn("a status that is not understood is not changed", "object", k.String(), log.Err(err))
		return nil
	}
	if send == nil {
		return nil
	}
	if left := mute.Sub(w.now()); left > 0 {
		w.later(k, left)
		return nil
	}
	err = w.requests.Do(ctx, send)
	switch {
	case err == nil:
		if left > 0 {
			w.later(k, 0) // the condition after the Event
		}
		w.log.Debug("status written", "object", k.String(), "reason", now.verdict.Reason)
	case errors.Is(err, ErrGone):
	case errors.Is(err, ErrChanged):
		w.later(k, firstPause) // the newer form comes, most likely before
	case errors.Is(err, ErrNoStatus):
		w.mu.Lock()
		w.mute[kind] = w.now().Add(refusedIn)
		w.mu.Unlock()
		w.later(k, refusedIn)
		w.log.Warn("the API server keeps no status of a kind; its policies have none",
			"kind", k.Kind, "version", now.APIVersion)
	case errors.Is(err, ErrRefused):
		w.log.Warn("a status is not written", "object", k.String(), log.Err(err))
		w.later(k, refusedIn)
	default:
		return err
	}
	return nil
}

// setConditions returns the request that an object needs; nil: none.
func (w *Writer) setConditions(o object) (func(context.Context) error, error) {
	conditions, err := merge(o.Conditions, o.verdict, o.Generation, w.now())
	if err != nil || conditions == nil {
		return nil, err
	}
	return func(ctx context.Context) error { return w.api.SetConditions(ctx, o.Object, conditions) }, nil
}

// record returns the request that an object without a status needs; nil: none.
func (w *Writer) record(o object) (func(context.Context) error, error) {
	e := event(o.Object, o.verdict)
	if e.Name == o.said.Name || !e.Warning && o.said.Name == "" { // an accepted policy is no news
		return nil, nil
	}
	return func(ctx context.Context) error {
		if err := w.api.Record(ctx, o.Object, e); err != nil {
			return err
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		if now := w.objects[o.Key]; now != nil && now.UID == o.UID {
			now.said = e
		}
		return nil
	}, nil
}

// withoutStatus is the kind of which the API has no status. Events say what
// becomes of its objects.
const withoutStatus = "NetworkPolicy"
