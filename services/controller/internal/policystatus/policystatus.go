// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package policystatus reports to the authors of policies how Sluice treats them, in the objects of the Kubernetes
// API.
//
// A Writer receives the objects from the watch of the API server and passes them on to the evaluation. For each
// object it keeps the outcome of the evaluation and the current status. While the process is elected, the Writer
// writes each status that differs from the outcome. The watch then delivers the written object. So the Writer repeats
// a write that was lost or that another process has overwritten.
//
// The number of requests per second is limited. Tenants take turns, so that many policies of one tenant do not delay
// the status of other tenants' policies.
//
// A write names the resource version that the Writer has seen. A process that has lost the Lease without knowing it
// can therefore at worst write the same status as the next leader.
package policystatus

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"sync"
	"time"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/controller/internal/subject"
	"github.com/sluice-net/sluice/services/policy/evaluation"
)

// Errors of an API.
var (
	// ErrChanged: the object has a newer resource version.
	ErrChanged = errors.New("the object has changed")
	// ErrGone: the object does not exist.
	ErrGone = errors.New("the object does not exist any more")
	// ErrNoStatus: objects of the kind have no status on this API server.
	ErrNoStatus = errors.New("the kind has no status")
	// ErrRefused: the API server rejected the request. Repeating the same request soon is useless.
	ErrRefused = errors.New("the API server refuses it")
)

// Object is one version of an object of the API.
type Object struct {
	evaluation.Key
	APIVersion string
	evaluation.Record
}

// API writes to the API server. Any error except ErrChanged, ErrGone, ErrNoStatus and ErrRefused means that there was
// no response.
type API interface {
	// SetConditions replaces status.conditions of this version of the object. conditions is JSON.
	SetConditions(ctx context.Context, o Object, conditions []byte) error
	// Record creates an Event on an object. An existing Event of the same name is kept, without an error.
	Record(ctx context.Context, o Object, e Event) error
}

// evaluator evaluates the objects.
type evaluator interface {
	evaluation.Sink
	Outcomes(ctx context.Context, keys []evaluation.Key) (map[evaluation.Key]evaluation.Outcome, error)
	// Tenant returns the tenant of the objects in a namespace.
	Tenant(namespace string) shares.Tenant
	// Run passes the objects of the API server to a sink.
	Run(ctx context.Context, to evaluation.Sink) error
}

// refusedIn is the delay before a rejected request is repeated.
const refusedIn = 5 * time.Minute

// Writer writes the status of objects. It is the Sink of the source.
type Writer struct {
	evaluator
	api      API
	leads    subject.Leadership
	log      *slog.Logger
	requests subject.Requests
	now      func() time.Time

	queue *subject.Queue[evaluation.Key] // objects whose status must be compared with the verdict

	mu      sync.Mutex
	objects map[evaluation.Key]*object
	refused map[evaluation.Key]Nodes // policies that some nodes do not enforce as written
	others  Nodes                    // applies to policies that are not in refused
	mute    map[string]time.Time     // kinds without a status, by APIVersion and kind, and when to try them again
}

// object is an object and its verdict.
type object struct {
	Object
	judged  Verdict // cluster-wide
	verdict Verdict // the outcome, and which nodes do not enforce it
	said    Event
	// usesNames and hasDNSRule are as in evaluation.Outcome.
	usesNames, hasDNSRule bool
}

// New returns a Writer. It owns the evaluator.
func New(e *evaluation.Evaluator, api API, leads subject.Leadership, l *slog.Logger) *Writer {
	return newWriter(e, api, leads, l)
}

func newWriter(e evaluator, api API, leads subject.Leadership, l *slog.Logger) *Writer {
	tenant := func(k evaluation.Key) shares.Tenant { return e.Tenant(k.Namespace) }
	return &Writer{
		evaluator: e, api: api, leads: leads, log: l, now: time.Now,
		queue:   subject.NewQueue(evaluation.Key.Compare, tenant, time.Now),
		objects: make(map[evaluation.Key]*object), mute: make(map[string]time.Time),
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

// Status returns the number of objects whose status must be compared, and the statistics of the requests.
func (w *Writer) Status() subject.Status {
	return w.requests.Status("policy status", w.queue.Pending())
}

// Answers returns an error if the evaluator does not respond.
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
	if len(c.Upserts) == 0 { // a deletion lets refused policies be tried again, and may change shares
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
	if keys, err = w.judgeNames(ctx, c, keys, judged); err != nil {
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
		o.judged, o.usesNames, o.hasDNSRule = v, judged[k].UsesNames, judged[k].HasDNSRule
		v = v.on(w.nodes(k))
		if _, ok := c.Upserts[k]; !ok && v == o.verdict {
			continue
		}
		o.verdict = v
		w.queue.Soon(k)
	}
	return nil
}

// judgeNames also evaluates the objects with DNS names if an object with a DNS rule has changed: the notes of these
// objects depend on all DNS rules.
func (w *Writer) judgeNames(ctx context.Context, c watch.Changes[evaluation.Key, evaluation.Object],
	keys []evaluation.Key, judged map[evaluation.Key]evaluation.Outcome,
) ([]evaluation.Key, error) {
	w.mu.Lock()
	had := func(k evaluation.Key) bool { return w.objects[k] != nil && w.objects[k].hasDNSRule }
	changed := false
	for k := range c.Deletes {
		changed = changed || had(k)
	}
	for k := range c.Upserts {
		changed = changed || had(k) || judged[k].HasDNSRule
	}
	var others []evaluation.Key
	for k, o := range w.objects {
		if _, ok := judged[k]; changed && !ok && o.usesNames {
			others = append(others, k)
		}
	}
	w.mu.Unlock()
	if len(others) == 0 {
		return keys, nil
	}
	more, err := w.Outcomes(ctx, others)
	maps.Copy(judged, more)
	return append(keys, others...), err
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

// nodes returns the nodes that do not enforce a policy as written. Called with mu held.
func (w *Writer) nodes(k evaluation.Key) Nodes {
	if n, ok := w.refused[k]; ok {
		return n
	}
	return w.others
}

// SetRefused replaces the set of policies that some nodes do not enforce as written. others describes the nodes that
// may not enforce a policy which is not in the set.
func (w *Writer) SetRefused(refused map[evaluation.Key]Nodes, others Nodes) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.refused, w.others = refused, others
	for k, o := range w.objects {
		if v := o.judged.on(w.nodes(k)); v != o.verdict {
			o.verdict = v
			w.queue.Soon(k)
		}
	}
}

func (w *Writer) forget(k evaluation.Key) {
	delete(w.objects, k)
	w.queue.Forget(k)
}

// lead writes until ctx ends. First it compares the status of every object, because the previous leader may have
// written other statuses.
func (w *Writer) lead(ctx context.Context) {
	w.mu.Lock()
	clear(w.mute)
	for k := range w.objects {
		w.queue.Soon(k)
	}
	w.mu.Unlock()
	w.queue.Lead(ctx, w.log, "status of policies", w.write)
}

// later schedules the next comparison of an object, unless an earlier one is scheduled.
func (w *Writer) later(k evaluation.Key, in time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.objects[k] != nil {
		w.queue.Later(k, in)
	}
}

// write writes the status of one object if it differs. requested reports whether it has sent a request. It returns an
// error only if the API server does not respond.
func (w *Writer) write(ctx context.Context, k evaluation.Key) (requested bool, err error) {
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
		return false, nil
	}
	requests := []func(object) (func(context.Context) error, error){w.record}
	if k.Kind != withoutStatus {
		requests = requests[:0]
		if now.verdict.Reason == ExceedsShare || now.said.Reason == ExceedsShare { // an Event in addition to the condition
			requests = append(requests, w.record)
		}
		requests = append(requests, w.setConditions)
	}
	var send func(context.Context) error
	left := len(requests)
	for _, request := range requests {
		left--
		if send, err = request(now); send != nil || err != nil {
			break
		}
	}
	if err != nil {
		w.log.Warn("cannot parse the status of an object; leaving it unchanged", "object", k.String(), log.Err(err))
		return false, nil
	}
	if send == nil {
		return false, nil
	}
	if left := mute.Sub(w.now()); left > 0 {
		w.later(k, left)
		return false, nil
	}
	err = w.requests.Do(ctx, send)
	switch {
	case err == nil:
		if left > 0 {
			w.later(k, 0) // next write the condition
		}
		w.log.Debug("status written", "object", k.String(), "reason", now.verdict.Reason)
	case errors.Is(err, ErrGone):
	case errors.Is(err, ErrChanged):
		w.later(k, subject.FirstPause) // in case the watch does not deliver the newer version before
	case errors.Is(err, ErrNoStatus):
		w.mu.Lock()
		w.mute[kind] = w.now().Add(refusedIn)
		w.mu.Unlock()
		w.later(k, refusedIn)
		w.log.Warn("the API server keeps no status of a kind; its policies get none",
			"kind", k.Kind, "version", now.APIVersion)
	case errors.Is(err, ErrRefused):
		w.log.Warn("cannot write the status of an object", "object", k.String(), log.Err(err))
		w.later(k, refusedIn)
	default:
		return true, err
	}
	return true, nil
}

// setConditions returns the request that updates an object's conditions; nil if none is needed.
func (w *Writer) setConditions(o object) (func(context.Context) error, error) {
	conditions, err := merge(o.Conditions, o.verdict, o.Generation, w.now())
	if err != nil || conditions == nil {
		return nil, err
	}
	return func(ctx context.Context) error { return w.api.SetConditions(ctx, o.Object, conditions) }, nil
}

// record returns the request that informs about an object without a status; nil if none is needed.
func (w *Writer) record(o object) (func(context.Context) error, error) {
	e := event(o.Object, o.verdict)
	if e.Name == o.said.Name || !e.Warning && o.said.Name == "" { // no Event for a policy that was always accepted
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

// withoutStatus is the kind that has no status in the API. Events inform about its objects.
const withoutStatus = "NetworkPolicy"
