// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package client

import (
	"context"
	"errors"
	"iter"
	"log/slog"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/model/workload"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	"github.com/sluice-net/sluice/proto/wire"
	"github.com/sluice-net/sluice/services/dns/internal/pods"
)

// Endpoints follows the endpoints of sluice-datapath.
type Endpoints struct {
	client datapathv1.DatapathServiceClient
	pods   *pods.Pods
	log    *slog.Logger

	mu  sync.Mutex
	err error // guarded by mu; why the endpoints are not up to date
}

// NewEndpoints returns a client that keeps the pods equal to the endpoints of sluice-datapath while Run runs.
func NewEndpoints(conn grpc.ClientConnInterface, p *pods.Pods, l *slog.Logger) *Endpoints {
	return &Endpoints{
		client: datapathv1.NewDatapathServiceClient(conn), pods: p, log: l,
		err: errors.New("sluice-datapath has not sent all endpoints yet"),
	}
}

// Err returns why the endpoints are not up to date; nil if they are.
func (e *Endpoints) Err() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.err
}

func (e *Endpoints) setErr(err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.err = err
}

// Run follows the endpoints until ctx ends.
func (e *Endpoints) Run(ctx context.Context) error {
	return watch.Follow(ctx, e, e, watch.FollowOptions{
		Max: 4 * pods.MaxEndpoint, RetryMin: 50 * time.Millisecond, RetryMax: 2 * time.Second, Log: e.log,
	})
}

// Watch implements watch.Source.
func (e *Endpoints) Watch(
	ctx context.Context, token []byte,
) iter.Seq2[watch.Event[workload.Owner, pods.Endpoint], error] {
	return watch.Receive(func() (grpc.ServerStreamingClient[datapathv1.WatchEndpointsResponse], error) {
		return e.client.WatchEndpoints(ctx, &datapathv1.WatchEndpointsRequest{ResumeToken: token})
	}, endpointOf)
}

func endpointOf(m *datapathv1.WatchEndpointsResponse) watch.Event[workload.Owner, pods.Endpoint] {
	e := watch.Event[workload.Owner, pods.Endpoint]{Kind: watch.Bookmark, Token: m.GetResumeToken()}
	switch x := m.GetEvent().(type) {
	case *datapathv1.WatchEndpointsResponse_Upsert:
		e.Kind, e.Key = watch.Upsert, wire.OwnerOf(x.Upsert.GetOwner())
		e.Value = pods.Endpoint{
			ID: x.Upsert.GetEndpointIndex(), Namespace: x.Upsert.GetPod().GetNamespace(),
			Created: x.Upsert.GetCreateTime().AsTime(),
		}
	case *datapathv1.WatchEndpointsResponse_Delete:
		e.Kind, e.Key = watch.Delete, wire.OwnerOf(x.Delete)
	case *datapathv1.WatchEndpointsResponse_Bookmark:
		e.SnapshotComplete = x.Bookmark.GetSnapshotComplete()
	}
	return e
}

// Apply implements watch.Sink.
func (e *Endpoints) Apply(_ context.Context, c watch.Changes[workload.Owner, pods.Endpoint]) error {
	for owner := range c.Deletes { // before their IDs have other owners
		e.pods.Delete(owner)
	}
	for owner, x := range c.Upserts {
		e.pods.Upsert(owner, x)
	}
	return nil
}

// Complete implements watch.Sink.
func (e *Endpoints) Complete(_ context.Context, listed map[workload.Owner]struct{}) error {
	e.pods.Keep(listed)
	e.setErr(nil)
	return nil
}

// Failed implements watch.Sink. The last known endpoints stay.
func (e *Endpoints) Failed(_ context.Context, why error) error {
	e.setErr(why)
	return nil
}
