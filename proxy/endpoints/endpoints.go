// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package endpoints follows the endpoints of sluice-datapath, and records them in package pods.
package endpoints

import (
	"context"
	"errors"
	"iter"
	"log/slog"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/workload"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/proto/wire"
	"github.com/sluice-net/sluice/proxy/pods"
)

// Endpoints follows the endpoints of sluice-datapath.
type Endpoints struct {
	client      datapathv1.DatapathServiceClient
	pods        *pods.Pods
	tenantLabel string
	log         *slog.Logger

	mu  sync.Mutex
	err error // guarded by mu; why the endpoints are not up to date
}

// New returns a client that keeps p equal to the endpoints of sluice-datapath while Run runs. tenantLabel is
// the label of a Namespace that names its tenant.
func New(conn grpc.ClientConnInterface, p *pods.Pods, tenantLabel string, l *slog.Logger) *Endpoints {
	return &Endpoints{
		client: datapathv1.NewDatapathServiceClient(conn), pods: p, tenantLabel: tenantLabel,
		log: l.With("source", "endpoints"),
		err: errors.New("sluice-datapath has not sent all endpoints yet"),
	}
}

// Err returns the reason why the endpoints are not up to date; nil if they are.
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
		return e.client.WatchEndpoints(ctx, &datapathv1.WatchEndpointsRequest{ResumeToken: token, WithoutPolicy: true})
	}, e.endpointOf)
}

// labelOf returns the value of a Kubernetes label; empty without it.
func labelOf(labels []*workloadv1.Label, key string) string {
	for _, l := range labels {
		if l.GetSource() == label.SourceKubernetes && l.GetKey() == key {
			return l.GetValue()
		}
	}
	return ""
}

func (e *Endpoints) endpointOf(m *datapathv1.WatchEndpointsResponse) watch.Event[workload.Owner, pods.Endpoint] {
	out := watch.Event[workload.Owner, pods.Endpoint]{Kind: watch.Bookmark, Token: m.GetResumeToken()}
	switch x := m.GetEvent().(type) {
	case *datapathv1.WatchEndpointsResponse_Upsert:
		out.Kind, out.Key = watch.Upsert, wire.OwnerOf(x.Upsert.GetOwner())
		out.Value = pods.Endpoint{
			ID: x.Upsert.GetEndpointIndex(), Created: x.Upsert.GetCreateTime().AsTime(),
			Identity:  x.Upsert.GetIdentity(),
			Namespace: labelOf(x.Upsert.GetLabels(), label.KeyNamespace),
			Tenant:    labelOf(x.Upsert.GetLabels(), label.KeyNamespaceLabels+e.tenantLabel),
		}
		if x.Upsert.GetIdentity() == 0 {
			out.Kind = watch.Delete // the labels of the endpoint are not known yet
		}
	case *datapathv1.WatchEndpointsResponse_Delete:
		out.Kind, out.Key = watch.Delete, wire.OwnerOf(x.Delete)
	case *datapathv1.WatchEndpointsResponse_Bookmark:
		out.SnapshotComplete = x.Bookmark.GetSnapshotComplete()
	}
	return out
}

// Apply implements watch.Sink.
func (e *Endpoints) Apply(_ context.Context, c watch.Changes[workload.Owner, pods.Endpoint]) error {
	for owner := range c.Deletes { // first, because other owners may get the same IDs
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

// Failed implements watch.Sink. The last known endpoints stay in use.
func (e *Endpoints) Failed(_ context.Context, why error) error {
	e.setErr(why)
	return nil
}
