// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package client calls the identity service and converts its messages to the types of this service.
package client

import (
	"context"
	"iter"
	"log/slog"
	"maps"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/labelfilter"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
)

// Sink receives the updates of the identity service.
type Sink interface {
	// TakeIdentities adds, replaces and removes identities. at is the revision of the identity service whose state
	// the sink has after this call; zero means unknown.
	TakeIdentities(ctx context.Context, set []peer.Identity, gone []identity.Numeric, at peer.Revision) error
	// CompleteIdentities reports that identities that are not listed do not exist.
	CompleteIdentities(ctx context.Context, listed map[identity.Numeric]struct{}) error
	// SetLabelFilter sets the filter that determines which labels identities have.
	SetLabelFilter(ctx context.Context, workloads, nodes []labelfilter.Rule) error
	// SourceFailed records the reason for which a source delivers nothing; nil clears the failure.
	SourceFailed(ctx context.Context, name string, why error) error
}

// maxIdentities is larger than the number of possible identities. The stream of a service that sends more is rejected.
const maxIdentities = 1 << 17

// Identities follows the identities of the identity service.
type Identities struct {
	client  identityv1.IdentityServiceClient
	sink    Sink
	name    string // name of the source
	log     *slog.Logger
	options watch.FollowOptions
	texts   peer.Interner // used only by the watch's goroutine
}

// NewIdentities returns Identities that use a connection to the identity service's socket.
func NewIdentities(cc grpc.ClientConnInterface, name string, sink Sink, l *slog.Logger) *Identities {
	l = l.With("source", name)
	return &Identities{
		client: identityv1.NewIdentityServiceClient(cc), sink: sink, name: name, log: l,
		options: watch.FollowOptions{Max: maxIdentities, RetryMin: 50 * time.Millisecond, RetryMax: 2 * time.Second, Log: l},
	}
}

// Run follows the identities until ctx ends.
func (i *Identities) Run(ctx context.Context) error {
	return watch.Follow(ctx, i, i, i.options)
}

// Watch implements watch.Source.
func (i *Identities) Watch(ctx context.Context, token []byte) iter.Seq2[watch.Event[identity.Numeric, peer.Identity], error] {
	return watch.Receive(func() (grpc.ServerStreamingClient[identityv1.WatchIdentitiesResponse], error) {
		if err := i.takeFilter(ctx); err != nil {
			return nil, err
		}
		return i.client.WatchIdentities(ctx, &identityv1.WatchIdentitiesRequest{ResumeToken: token})
	}, i.event)
}

// takeFilter passes the label filter on before any identity, because the filter may change when the service restarts.
// The call is not implemented in earlier versions of the service.
func (i *Identities) takeFilter(ctx context.Context) error {
	m, err := i.client.GetLabelFilter(ctx, &identityv1.GetLabelFilterRequest{})
	if status.Code(err) == codes.Unimplemented {
		return nil
	}
	if err != nil {
		return err
	}
	rules := func(list []*identityv1.LabelFilterRule) (out []labelfilter.Rule) {
		for _, r := range list {
			out = append(out, labelfilter.Rule{Text: r.GetRule(), Counts: r.GetCounts()})
		}
		return out
	}
	return i.sink.SetLabelFilter(ctx, rules(m.GetRules()), rules(m.GetNodeRules()))
}

func (i *Identities) event(m *identityv1.WatchIdentitiesResponse) watch.Event[identity.Numeric, peer.Identity] {
	out := watch.Event[identity.Numeric, peer.Identity]{
		Kind: watch.Bookmark, Token: m.GetResumeToken(), Revision: m.GetRevision(), Incarnation: m.GetIncarnation(),
		Origin: watch.Origin{Store: m.GetStoreRevision().GetClusterId(), Revision: m.GetStoreRevision().GetRevision()},
	}
	switch e := m.GetEvent().(type) {
	case *identityv1.WatchIdentitiesResponse_Upsert:
		id, err := i.fromIdentity(e.Upsert)
		if err != nil {
			// Treat the number as unknown: what it meant before no longer applies.
			i.log.Error("cannot decode an identity; it stays unknown", log.Err(err))
			out.Kind, out.Key = watch.Delete, identity.Numeric(e.Upsert.GetNumber())
			break
		}
		out.Kind, out.Key, out.Value = watch.Upsert, id.Number, id
	case *identityv1.WatchIdentitiesResponse_Delete:
		out.Kind, out.Key = watch.Delete, identity.Numeric(e.Delete)
	case *identityv1.WatchIdentitiesResponse_Bookmark:
		out.SnapshotComplete = e.Bookmark.GetSnapshotComplete()
	}
	return out
}

// Apply implements watch.Sink.
func (i *Identities) Apply(ctx context.Context, c watch.Changes[identity.Numeric, peer.Identity]) error {
	return i.sink.TakeIdentities(ctx, slices.Collect(maps.Values(c.Upserts)), slices.Collect(maps.Keys(c.Deletes)),
		peer.Revision{
			Incarnation: c.Incarnation, Number: c.Revision,
			Store: peer.StoreRevision{Cluster: c.Origin.Store, Revision: c.Origin.Revision},
		})
}

// Complete implements watch.Sink.
func (i *Identities) Complete(ctx context.Context, listed map[identity.Numeric]struct{}) error {
	return i.sink.CompleteIdentities(ctx, listed)
}

// Failed implements watch.Sink.
func (i *Identities) Failed(ctx context.Context, why error) error {
	return i.sink.SourceFailed(ctx, i.name, why)
}

func (i *Identities) fromIdentity(in *identityv1.Identity) (peer.Identity, error) {
	labels := make([]label.Label, 0, len(in.GetLabels()))
	for _, l := range in.GetLabels() {
		out := label.Label{Source: l.GetSource(), Key: l.GetKey(), Value: l.GetValue()}
		labels = append(labels, i.texts.Label(out))
	}
	return peer.New(identity.Numeric(in.GetNumber()), label.NewSet(labels...))
}
