// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/model/workload"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// historyLimit is the number of changes of endpoints that are remembered.
const historyLimit = 1024

// history remembers the latest changes of endpoints. The zero value is empty.
type history struct {
	mu      sync.Mutex
	changes []*datapathv1.ListEndpointEventsResponse // guarded by mu; a ring buffer
	next    int                                      // guarded by mu; the oldest change, if the buffer is full
}

func (h *history) add(previous, now *datapathv1.Endpoint) {
	c := &datapathv1.ListEndpointEventsResponse{Time: timestamppb.Now(), Endpoint: now, Previous: previous}
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.changes) < historyLimit {
		h.changes = append(h.changes, c)
		return
	}
	h.changes[h.next] = c
	h.next = (h.next + 1) % historyLimit
}

// list returns the changes, oldest first.
func (h *history) list() []*datapathv1.ListEndpointEventsResponse {
	h.mu.Lock()
	defer h.mu.Unlock()
	return append(append([]*datapathv1.ListEndpointEventsResponse{}, h.changes[h.next:]...), h.changes[:h.next]...)
}

// Remember records the changes of endpoints for ListEndpointEvents until ctx ends. Endpoints that exist when it begins
// are not changes.
func (s *Server) Remember(ctx context.Context) error {
	r := historian{to: &s.history, convert: s.endpoint, known: map[workload.Owner]*datapathv1.Endpoint{}}
	for {
		// A reader that is too slow loses its subscription. The next listing has the changes that it missed.
		if err := r.follow(ctx, s.endpoints.Report.Hub()); err != nil && ctx.Err() != nil {
			return ctx.Err()
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// historian adds the changes of a hub to a history.
type historian struct {
	to       *history
	convert  func(endpoint.Endpoint) *datapathv1.Endpoint
	known    map[workload.Owner]*datapathv1.Endpoint
	complete bool // the first listing was received
}

// follow records changes until the subscription or ctx ends.
func (r *historian) follow(ctx context.Context, hub *watch.Hub[workload.Owner, endpoint.Endpoint]) error {
	changes, err := hub.Subscribe(nil)
	if err != nil {
		return err
	}
	defer changes.Close()
	listed := map[workload.Owner]struct{}{} // nil once the listing is complete
	for {
		e, err := changes.Next(ctx)
		if err != nil {
			return err
		}
		switch {
		case e.Kind == watch.Upsert:
			previous, now := r.known[e.Key], r.convert(e.Value)
			r.known[e.Key] = now
			if listed != nil {
				listed[e.Key] = struct{}{}
			}
			if r.complete && changed(previous, now) {
				r.to.add(previous, now)
			}
		case e.Kind == watch.Delete:
			r.forget(e.Key)
		case e.SnapshotComplete && listed != nil:
			for owner := range r.known {
				if _, there := listed[owner]; !there {
					r.forget(owner)
				}
			}
			r.complete, listed = true, nil
		}
	}
}

// changed says whether the endpoints differ. A change of policy differs in its epoch, and may concern each endpoint of
// the node, so the comparison of all fields is left to the other changes.
func changed(previous, now *datapathv1.Endpoint) bool {
	return previous.GetPolicy().GetEpoch() != now.GetPolicy().GetEpoch() || !proto.Equal(previous, now)
}

func (r *historian) forget(owner workload.Owner) {
	if previous := r.known[owner]; previous != nil {
		delete(r.known, owner)
		r.to.add(previous, nil)
	}
}

// ListEndpointEvents implements the API.
func (s *Server) ListEndpointEvents(_ *datapathv1.ListEndpointEventsRequest,
	stream grpc.ServerStreamingServer[datapathv1.ListEndpointEventsResponse],
) error {
	for _, c := range s.history.list() {
		if err := stream.Send(c); err != nil {
			return err
		}
	}
	return nil
}
