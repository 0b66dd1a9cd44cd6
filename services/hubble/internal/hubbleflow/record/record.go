// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package record writes the events of the datapath to the history, and reads them.
//
// A record is the message of the datapath, so that `sluice observe` shows a stored event in the same way as a new
// event. It is converted to Hubble's message when a client reads it. A record about losses is Hubble's message,
// because it contains their time.
package record

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/kit/log"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	"github.com/sluice-net/sluice/services/hubble/internal/api/flow"
	"github.com/sluice-net/sluice/services/hubble/internal/history"
	"github.com/sluice-net/sluice/services/hubble/internal/hubbleflow"
)

// lossInterval is the minimum time between two records about losses of one source. It is needed because the datapath
// may report a loss before each event.
const lossInterval = time.Second

// History stores records.
type History interface{ Append(history.Entry) }

// Metrics counts flows.
type Metrics interface {
	Count(tenant string, f *flow.Flow)
	CountLost(source flow.LostEventSource, count uint64)
}

// Options describe a Recorder. All fields are required.
type Options struct {
	// Labels is set if Metrics need the labels of flows.
	Labels  bool
	Parts   hubbleflow.Parts
	History History
	Metrics Metrics
	// Last is the time of the last stored record; zero without one.
	Last time.Time
	Now  func() time.Time
	Log  *slog.Logger
}

// Recorder is the sink for the events of the datapath.
type Recorder struct {
	o Options

	writing sync.Mutex                      // held while a record is written
	losses  map[datapathv1.LossSource]*loss // guarded by writing

	mu      sync.Mutex
	node    string       // guarded by mu; name of this node in the latest event
	seconds [60]struct { // guarded by mu; flows in each second of the last minute
		second int64
		flows  int
	}
}

// loss describes the events that one source has lost since the last record about its losses.
type loss struct {
	count       uint64
	first, last time.Time
	written     time.Time
}

// New returns a Recorder.
func New(o Options) *Recorder {
	return &Recorder{o: o, losses: make(map[datapathv1.LossSource]*loss)}
}

// NodeName returns the name of this node in the latest event; empty before the first event.
func (r *Recorder) NodeName() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.node
}

// count counts a flow in the current second.
func (r *Recorder) count(node string, second int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.node = node
	x := &r.seconds[second%int64(len(r.seconds))]
	if x.second != second {
		x.second, x.flows = second, 0
	}
	x.flows++
}

// Rate returns the flows per second in the last minute.
func (r *Recorder) Rate() float64 {
	now := r.o.Now().Unix()
	r.mu.Lock()
	defer r.mu.Unlock()
	flows := 0
	for _, x := range r.seconds {
		if age := now - x.second; age >= 0 && age < int64(len(r.seconds)) {
			flows += x.flows
		}
	}
	return float64(flows) / float64(len(r.seconds))
}

// Flow records an event.
func (r *Recorder) Flow(f *datapathv1.Flow) {
	r.writing.Lock()
	defer r.writing.Unlock()
	r.count(f.GetNodeName(), r.o.Now().Unix())
	r.writeLosses(false)
	data, err := proto.Marshal(&datapathv1.ObserveResponse{Event: &datapathv1.ObserveResponse_Flow{Flow: f}})
	if err != nil {
		r.o.Log.Warn("event not recorded", "uuid", f.GetUuid(), log.Err(err))
		return
	}
	part, x := r.o.Parts.Of(f), hubbleflow.Brief(f)
	if r.o.Labels {
		hubbleflow.AddLabels(x, f)
	}
	r.o.Metrics.Count(part, x)
	r.o.History.Append(history.Entry{Part: part, Time: f.GetTime().AsTime(), Data: data, Facts: Facts(x)})
	r.o.Last = f.GetTime().AsTime()
}

// Repair records the repair of a program. Hubble has no such event, but sluice observe shows it.
func (r *Recorder) Repair(e *datapathv1.AttachmentRepair) {
	r.writing.Lock()
	defer r.writing.Unlock()
	r.writeLosses(false)
	data, err := proto.Marshal(&datapathv1.ObserveResponse{Event: &datapathv1.ObserveResponse_Repair{Repair: e}})
	if err != nil {
		r.o.Log.Warn("event not recorded", "uuid", e.GetUuid(), log.Err(err))
		return
	}
	r.o.History.Append(history.Entry{Part: "system", Time: e.GetTime().AsTime(), Data: data, Facts: repairFacts(e)})
	r.o.Last = e.GetTime().AsTime()
}

// Lost records that events are missing. Losses of one source within a second become one record.
func (r *Recorder) Lost(source datapathv1.LossSource, count uint64) {
	r.writing.Lock()
	defer r.writing.Unlock()
	now := r.o.Now()
	l := r.losses[source]
	if l == nil {
		l = &loss{}
		r.losses[source] = l
	}
	if l.first.IsZero() {
		// The missing events came after the last event that was received.
		if l.first = r.o.Last; l.first.IsZero() {
			l.first = now
		}
	}
	l.count, l.last = l.count+count, now
	r.o.Metrics.CountLost(lossSources[source], count)
	r.writeLosses(false)
}

// Run writes pending records about losses even if no further event follows, until ctx ends.
func (r *Recorder) Run(ctx context.Context) error {
	tick := time.NewTicker(lossInterval)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			r.flush(false)
		case <-ctx.Done():
			r.flush(true)
			return nil
		}
	}
}

func (r *Recorder) flush(all bool) {
	r.writing.Lock()
	defer r.writing.Unlock()
	r.writeLosses(all)
}

// writeLosses writes the pending losses of each source whose last record is old enough, or of all sources. Called
// with writing held.
func (r *Recorder) writeLosses(all bool) {
	now := r.o.Now()
	for source, l := range r.losses {
		if l.first.IsZero() || !all && now.Sub(l.written) < lossInterval && !now.Before(l.written) {
			continue
		}
		data, err := proto.Marshal(&flow.LostEvent{
			Source: lossSources[source], NumEventsLost: l.count,
			First: timestamppb.New(l.first), Last: timestamppb.New(l.last),
		})
		if err != nil {
			r.o.Log.Warn("loss not recorded", log.Err(err))
			continue
		}
		r.o.History.Append(history.Entry{Part: "system", Time: now, Loss: true, Data: data})
		*l = loss{written: now}
	}
}

// lossSources maps sources of losses to Hubble's sources. Hubble has none for a restart of the datapath and for
// sluice-dns.
var lossSources = map[datapathv1.LossSource]flow.LostEventSource{
	datapathv1.LossSource_LOSS_SOURCE_KERNEL:   flow.LostEventSource_PERF_EVENT_RING_BUFFER,
	datapathv1.LossSource_LOSS_SOURCE_OBSERVER: flow.LostEventSource_OBSERVER_EVENTS_QUEUE,
	datapathv1.LossSource_LOSS_SOURCE_RESTART:  flow.LostEventSource_UNKNOWN_LOST_EVENT_SOURCE,
	datapathv1.LossSource_LOSS_SOURCE_DNS:      flow.LostEventSource_UNKNOWN_LOST_EVENT_SOURCE,
}

// Facts returns the facts about a flow for the index of the history.
func Facts(f *flow.Flow) (out history.Facts) {
	for _, e := range []*flow.Endpoint{f.GetSource(), f.GetDestination()} {
		if e.GetNamespace() != "" {
			out.Namespaces = append(out.Namespaces, e.GetNamespace())
		}
		if e.GetPodName() != "" {
			out.Pods = append(out.Pods, e.GetNamespace()+"/"+e.GetPodName())
		}
	}
	out.Verdict, out.Reason = int32(f.GetVerdict()), int32(f.GetDropReasonDesc())
	return out
}

// Describe returns the facts of a stored flow.
func Describe(data []byte) (history.Facts, error) {
	m, err := Event(data)
	switch {
	case err != nil:
		return history.Facts{}, err
	case m.GetRepair() != nil:
		return repairFacts(m.GetRepair()), nil
	}
	return Facts(hubbleflow.Brief(m.GetFlow())), nil
}

// repairFacts returns the facts about a repair for the index of the history.
func repairFacts(e *datapathv1.AttachmentRepair) (out history.Facts) {
	if p := e.GetPod(); p.GetName() != "" {
		out.Namespaces, out.Pods = []string{p.GetNamespace()}, []string{p.GetNamespace() + "/" + p.GetName()}
	}
	return out
}

// Event returns the event of a record. The record must not be about losses.
func Event(data []byte) (*datapathv1.ObserveResponse, error) {
	m := &datapathv1.ObserveResponse{}
	if err := proto.Unmarshal(data, m); err != nil {
		return nil, fmt.Errorf("a stored event: %w", err)
	}
	return m, nil
}

// Rest returns a record that contains only the ID of a record's event. If the latest record is deleted, the history
// keeps its rest, so that the stream of the datapath continues after this event when the process restarts.
func Rest(data []byte) []byte {
	m, err := Event(data)
	if err != nil {
		return nil
	}
	rest, err := proto.Marshal(&datapathv1.ObserveResponse{Event: &datapathv1.ObserveResponse_Flow{
		Flow: &datapathv1.Flow{Uuid: cmp.Or(m.GetFlow().GetUuid(), m.GetRepair().GetUuid())},
	}})
	if err != nil {
		return nil
	}
	return rest
}

// Flow returns a function that converts the event of a record to Hubble's flow. It returns nil for an event that is
// not a flow.
func Flow(c hubbleflow.Converter) func(data []byte) (*flow.Flow, error) {
	return func(data []byte) (*flow.Flow, error) {
		m, err := Event(data)
		if err != nil || m.GetFlow().GetTime() == nil {
			return nil, err
		}
		return c.Flow(m.GetFlow()), nil
	}
}
