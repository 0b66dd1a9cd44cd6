// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package client follows the identity service and turns what it says into the
// core's words.
package client

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/identity"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	"github.com/sluice-net/sluice/services/policy/internal/label"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
)

// namedPorts is the key of the hidden label in which the identity service
// carries the named ports of a workload. Its value has the form that
// peer.ParseNamedPorts reads.
const namedPorts = "named-ports"

// Sink takes what the identity service says.
type Sink interface {
	// TakeIdentities adds, replaces and removes identities. at is the revision of
	// the identity service up to which everything was taken then; zero: that is
	// not known.
	TakeIdentities(ctx context.Context, set []peer.Identity, gone []identity.Numeric, at peer.Revision) error
	// CompleteIdentities says that these are all there are.
	CompleteIdentities(ctx context.Context, listed map[identity.Numeric]struct{}) error
	// SourceFailed notes why nothing can be said; nil takes it back.
	SourceFailed(ctx context.Context, name string, why error) error
}

// maxIdentities is more than there are numbers for; a service that names more
// is not believed.
const maxIdentities = 1 << 17

// batch is how many changes are handed on at once.
const batch = 512

// Identities follows the watch of the identity service.
type Identities struct {
	Client identityv1.IdentityServiceClient
	Sink   Sink
	Name   string // of the source
	Log    *slog.Logger
	// RetryMin and RetryMax bound the pause after a failure.
	RetryMin, RetryMax time.Duration

	token []byte
	texts label.Interner
}

// NewIdentities uses a connection to the identity service's socket.
func NewIdentities(cc grpc.ClientConnInterface, name string, sink Sink, l *slog.Logger) *Identities {
	return &Identities{
		Client: identityv1.NewIdentityServiceClient(cc), Sink: sink, Name: name, Log: l,
		RetryMin: 50 * time.Millisecond, RetryMax: 2 * time.Second,
	}
}

// Run follows until the context ends.
func (i *Identities) Run(ctx context.Context) error {
	pause := i.RetryMin
	said := ""
	for {
		progress, err := i.follow(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if progress {
			pause, said = i.RetryMin, ""
		}
		if status.Code(err) == codes.OutOfRange {
			i.Log.Info("the identity service does not know where the watch was; everything is listed anew")
			i.token = nil
		} else {
			if err.Error() != said {
				said = err.Error()
				i.Log.Warn("the watch of identities ended, and is tried again until it works", log.Err(err))
			}
			if serr := i.Sink.SourceFailed(ctx, i.Name, err); serr != nil {
				return ignoreEnd(ctx, serr)
			}
		}
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return nil
		}
		pause = min(2*pause, i.RetryMax)
	}
}

func ignoreEnd(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// change is what was received and not yet handed on.
type change struct {
	set  map[identity.Numeric]peer.Identity
	gone map[identity.Numeric]struct{}
}

func (c *change) len() int { return len(c.set) + len(c.gone) }

// follow watches once. Progress says that something was taken over.
func (i *Identities) follow(ctx context.Context) (progress bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := i.Client.WatchIdentities(ctx, &identityv1.WatchIdentitiesRequest{ResumeToken: i.token})
	if err != nil {
		return false, err
	}
	received := make(chan *identityv1.WatchIdentitiesResponse, batch)
	ended := make(chan error, 1)
	go func() {
		defer close(received)
		for {
			m, err := stream.Recv()
			if err != nil {
				ended <- err
				return
			}
			select {
			case received <- m:
			case <-ctx.Done():
				ended <- ctx.Err()
				return
			}
		}
	}()
	defer func() { // the goroutine has ended when this returns
		cancel()
		for range received { //nolint:revive // drained
		}
	}()

	listed := make(map[identity.Numeric]struct{})
	listing := i.token == nil
	pending := change{make(map[identity.Numeric]peer.Identity), make(map[identity.Numeric]struct{})}
	var token []byte
	var at, taken peer.Revision // of the last message, and as it was said
	flush := func() error {
		now := at
		if listing {
			now = peer.Revision{}
		}
		if pending.len() > 0 || now != taken {
			set := make([]peer.Identity, 0, len(pending.set))
			for _, id := range pending.set {
				set = append(set, id)
			}
			gone := make([]identity.Numeric, 0, len(pending.gone))
			for n := range pending.gone {
				gone = append(gone, n)
			}
			if err := i.Sink.TakeIdentities(ctx, set, gone, now); err != nil {
				return err
			}
			taken = now
			clear(pending.set)
			clear(pending.gone)
		}
		if !listing && token != nil {
			i.token = token
		}
		progress = true
		return nil
	}
	if listing {
		if err := i.Sink.TakeIdentities(ctx, nil, nil, peer.Revision{}); err != nil {
			return false, err
		}
	} else {
		if err := i.Sink.SourceFailed(ctx, i.Name, nil); err != nil {
			return false, err
		}
	}
	for m := range received {
		token = m.GetResumeToken()
		at = peer.Revision{Incarnation: string(m.GetIncarnation()), Number: m.GetRevision()}
		switch e := m.GetEvent().(type) {
		case *identityv1.WatchIdentitiesResponse_Upsert:
			id, err := i.fromIdentity(e.Upsert)
			if err != nil {
				i.Log.Error("an identity is not understood and stays unknown", log.Err(err))
				break
			}
			if listing {
				listed[id.Number] = struct{}{}
				if len(listed) > maxIdentities {
					return progress, fmt.Errorf("identity: it lists more than %d identities", maxIdentities)
				}
			}
			delete(pending.gone, id.Number)
			pending.set[id.Number] = id
		case *identityv1.WatchIdentitiesResponse_Delete:
			n := identity.Numeric(e.Delete)
			delete(listed, n)
			delete(pending.set, n)
			pending.gone[n] = struct{}{}
		case *identityv1.WatchIdentitiesResponse_Bookmark:
			if listing && e.Bookmark.GetSnapshotComplete() {
				if err := flush(); err != nil {
					return progress, err
				}
				if err := i.Sink.CompleteIdentities(ctx, listed); err != nil {
					return progress, err
				}
				listing, listed, i.token = false, nil, token
				i.Log.Info("identities are complete")
			}
		}
		if len(received) == 0 || pending.len() >= batch {
			if err := flush(); err != nil {
				return progress, err
			}
		}
	}
	return progress, <-ended
}

func (i *Identities) fromIdentity(in *identityv1.Identity) (peer.Identity, error) {
	labels := make([]label.Label, 0, len(in.GetLabels()))
	for _, l := range in.GetLabels() {
		out := label.Label{Source: l.GetSource(), Key: l.GetKey(), Value: l.GetValue()}
		if out.Source == label.SourceGenerated && out.Key == namedPorts {
			out.Key = label.KeyNamedPorts
		}
		labels = append(labels, i.texts.Label(out))
	}
	return peer.New(identity.Numeric(in.GetNumber()), label.NewSet(labels...))
}
