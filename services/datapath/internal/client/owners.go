// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package client

import (
	"context"
	"iter"
	"log/slog"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/model/workload"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	"github.com/sluice-net/sluice/proto/wire"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// Wishes receives the identities that the identity service wants endpoints to have.
type Wishes interface {
	Wishes(wanted map[workload.Owner]endpoint.Identity, withdrawn map[workload.Owner]struct{})
	OnlyWishesOf(listed map[workload.Owner]struct{})
}

// maxOwners is larger than the number of endpoints of a node. A longer list is rejected.
const maxOwners = 1 << 14

// Owners follows the identity service's stream of the desired identities of owners. While the service is unavailable,
// nothing changes.
type Owners struct {
	client identityv1.IdentityServiceClient
	sink   Wishes
	log    *slog.Logger

	mu       sync.Mutex
	complete bool  // guarded by mu
	err      error // guarded by mu
}

// NewOwners returns a client that uses cc, a connection to identity's socket.
func NewOwners(cc grpc.ClientConnInterface, sink Wishes, l *slog.Logger) *Owners {
	return &Owners{client: identityv1.NewIdentityServiceClient(cc), sink: sink, log: l.With("source", "identity")}
}

// Run follows the stream until ctx ends.
func (s *Owners) Run(ctx context.Context) error {
	return watch.Follow(ctx, s, s, watch.FollowOptions{
		Max: maxOwners, RetryMin: 50 * time.Millisecond, RetryMax: 2 * time.Second, Log: s.log,
	})
}

// State reports whether the initial listing was received, and the last error of the stream.
func (s *Owners) State() (complete bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.complete, s.err
}

// owned is the desired state of an owner.
type owned struct {
	identity endpoint.Identity
	confirm  bool // the identity is new to the owner and must be confirmed
}

// Watch implements watch.Source.
func (s *Owners) Watch(ctx context.Context, token []byte) iter.Seq2[watch.Event[workload.Owner, owned], error] {
	return watch.Receive(func() (grpc.ServerStreamingClient[identityv1.WatchEndpointsResponse], error) {
		return s.client.WatchEndpoints(ctx, &identityv1.WatchEndpointsRequest{ResumeToken: token})
	}, s.event)
}

func (s *Owners) event(m *identityv1.WatchEndpointsResponse) watch.Event[workload.Owner, owned] {
	out := watch.Event[workload.Owner, owned]{Kind: watch.Bookmark, Token: m.GetResumeToken()}
	switch e := m.GetEvent().(type) {
	case *identityv1.WatchEndpointsResponse_Upsert:
		out.Kind, out.Key = watch.Upsert, wire.OwnerOf(e.Upsert.GetOwner())
		id, err := identityOf(e.Upsert)
		if err != nil {
			// The datapath has more privileges than sluice-identity, which cannot give a container the identity of the
			// host. The endpoint keeps its identity.
			s.log.Error("invalid identity for an endpoint ignored", "owner", out.Key.String(), log.Err(err))
			break
		}
		out.Value = owned{id, e.Upsert.GetConfirm()}
	case *identityv1.WatchEndpointsResponse_Delete:
		out.Kind, out.Key = watch.Delete, wire.OwnerOf(e.Delete)
	case *identityv1.WatchEndpointsResponse_Bookmark:
		out.SnapshotComplete = e.Bookmark.GetSnapshotComplete()
	}
	return out
}

// Apply implements watch.Sink. It drops the announced identity of an owner if the new one needs no confirmation: a call
// of this process has assigned that identity, so the process knows it already.
func (s *Owners) Apply(_ context.Context, c watch.Changes[workload.Owner, owned]) error {
	wanted, withdrawn := map[workload.Owner]endpoint.Identity{}, map[workload.Owner]struct{}{}
	for o, v := range c.Upserts {
		if v.confirm {
			wanted[o] = v.identity
		} else {
			withdrawn[o] = struct{}{}
		}
	}
	for o := range c.Deletes {
		withdrawn[o] = struct{}{}
	}
	if len(wanted)+len(withdrawn) > 0 {
		s.sink.Wishes(wanted, withdrawn)
	}
	return nil
}

// Complete implements watch.Sink.
func (s *Owners) Complete(_ context.Context, listed map[workload.Owner]struct{}) error {
	s.sink.OnlyWishesOf(listed)
	return s.state(true, nil)
}

// Failed implements watch.Sink.
func (s *Owners) Failed(_ context.Context, why error) error { return s.state(why == nil, why) }

func (s *Owners) state(complete bool, err error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.complete, s.err = complete, err
	return nil
}
