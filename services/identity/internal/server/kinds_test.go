// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"slices"
	"sync"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/log"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	"github.com/sluice-net/sluice/services/identity/internal/kinds"
)

// kindsStore is a kinds.Store in memory.
type kindsStore struct {
	mu    sync.Mutex
	state kinds.State       // guarded by mu
	sink  func(kinds.State) // guarded by mu
}

func (s *kindsStore) PublishKinds(_ context.Context, all []string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.state = kinds.State{Published: true, Kinds: all}
	if s.sink != nil {
		s.sink(s.state)
	}
	return nil
}

func (s *kindsStore) FollowKinds(ctx context.Context, sink func(kinds.State)) error {
	s.mu.Lock()
	s.sink = sink
	sink(s.state)
	s.mu.Unlock()
	<-ctx.Done()
	return nil
}

func kindsBoard(t *testing.T) *kinds.Board {
	t.Helper()
	b := kinds.New(&kindsStore{}, log.Discard())
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- b.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return b
}

func TestKindsAreWatchedByEveryReader(t *testing.T) {
	s := serve(t)
	stream, err := s.cluster.WatchKinds(t.Context(), &identityv1.WatchKindsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	want := func(published bool, all ...string) {
		t.Helper()
		m, err := stream.Recv()
		if err != nil || m.GetPublished() != published || !slices.Equal(m.GetKinds(), all) {
			t.Errorf("%v, %v, want %t %q", m, err, published, all)
		}
	}
	want(false)
	publish := func(all ...string) error {
		_, err := s.cluster.PublishKinds(t.Context(), &identityv1.PublishKindsRequest{Kinds: all})
		return err
	}
	for _, bad := range [][]string{{"pods"}, {"v1/pods"}, {""}, {"a/v1/k", "a/v1/k"}} {
		if err := publish(bad...); status.Code(err) != codes.InvalidArgument {
			t.Errorf("%q: %v", bad, err)
		}
	}
	if err := publish("b/v1/k", "a/v1/k"); err != nil {
		t.Fatal(err)
	}
	want(true, "a/v1/k", "b/v1/k")
	if err := publish(); err != nil {
		t.Fatal(err)
	}
	want(true)
}
