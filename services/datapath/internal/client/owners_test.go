// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package client

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/workload"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	"github.com/sluice-net/sluice/proto/wire"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// wanting is the part of the core that the stream calls.
type wanting struct {
	mu      sync.Mutex
	wanted  map[workload.Owner]uint32 // guarded by mu
	changed chan struct{}             // after each call
}

func (w *wanting) Wishes(wanted map[workload.Owner]endpoint.Identity, withdrawn map[workload.Owner]struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for o := range withdrawn {
		delete(w.wanted, o)
	}
	for o, id := range wanted {
		w.wanted[o] = id.Number
	}
	w.changed <- struct{}{}
}

func (w *wanting) OnlyWishesOf(listed map[workload.Owner]struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	maps.DeleteFunc(w.wanted, func(o workload.Owner, _ uint32) bool { _, ok := listed[o]; return !ok })
	w.changed <- struct{}{}
}

func (w *wanting) now() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return fmt.Sprint(w.wanted)
}

// watching answers each watch with a stream that the test fills.
type watching struct {
	identityv1.IdentityServiceClient
	opened chan *filled
}

type filled struct {
	grpc.ClientStream
	ctx    context.Context
	token  string
	events chan *identityv1.WatchEndpointsResponse
	end    chan error
}

func (f *filled) Recv() (*identityv1.WatchEndpointsResponse, error) {
	select {
	case m := <-f.events:
		return m, nil
	case err := <-f.end:
		return nil, err
	case <-f.ctx.Done():
		return nil, f.ctx.Err()
	}
}

func (w watching) WatchEndpoints(ctx context.Context, r *identityv1.WatchEndpointsRequest, _ ...grpc.CallOption,
) (grpc.ServerStreamingClient[identityv1.WatchEndpointsResponse], error) {
	f := &filled{
		ctx: ctx, token: string(r.GetResumeToken()),
		events: make(chan *identityv1.WatchEndpointsResponse), end: make(chan error),
	}
	select {
	case w.opened <- f:
		return f, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func moves(token string, o workload.Owner, number uint32, confirm bool) *identityv1.WatchEndpointsResponse {
	return &identityv1.WatchEndpointsResponse{ResumeToken: []byte(token), Event: &identityv1.WatchEndpointsResponse_Upsert{
		Upsert: &identityv1.EndpointIdentity{
			Owner: wire.Owner(o), Identity: &identityv1.Identity{Number: number}, Confirm: confirm,
		},
	}}
}

func complete(token string) *identityv1.WatchEndpointsResponse {
	return &identityv1.WatchEndpointsResponse{ResumeToken: []byte(token), Event: &identityv1.WatchEndpointsResponse_Bookmark{
		Bookmark: &identityv1.Bookmark{SnapshotComplete: true},
	}}
}

// TestOwnersFollowTheStreamOverItsEnds proves INV-73: desired identities are kept while the stream is unavailable. The
// stream then resumes, or lists again if its position is unknown.
func TestOwnersFollowTheStreamOverItsEnds(t *testing.T) {
	one, two := workload.Owner{ContainerID: "a", Interface: "eth0"}, workload.Owner{ContainerID: "b", Interface: "eth0"}
	w := &wanting{wanted: map[workload.Owner]uint32{}, changed: make(chan struct{})}
	from := watching{opened: make(chan *filled)}
	s := &Owners{client: from, sink: w, log: log.Discard()}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	want := func(text string) {
		t.Helper()
		<-w.changed
		if got := w.now(); got != text {
			t.Fatalf("wanted %s, want %s", got, text)
		}
	}

	f := <-from.opened
	f.events <- moves("1", one, 300, true)
	want("map[a/eth0:300]")
	f.events <- moves("2", two, 301, false) // assigned by a call of this process
	want("map[a/eth0:300]")
	f.events <- moves("3", two, 1, true) // no container is the host
	want("map[a/eth0:300]")
	if ok, _ := s.State(); ok {
		t.Error("complete before the snapshot is")
	}
	f.events <- complete("4")
	want("map[a/eth0:300]")

	f.end <- status.Error(codes.Unavailable, "gone")
	f = <-from.opened
	if ok, err := s.State(); ok || err == nil || w.now() != "map[a/eth0:300]" || f.token != "4" {
		t.Errorf("away: complete %t, %v, wanted %s, token %q", ok, err, w.now(), f.token)
	}
	f.events <- moves("5", two, 302, true)
	want("map[a/eth0:300 b/eth0:302]")
	if ok, err := s.State(); !ok || err != nil {
		t.Errorf("back: complete %t, %v", ok, err)
	}

	f.end <- status.Error(codes.OutOfRange, "another run")
	if f = <-from.opened; f.token != "" {
		t.Errorf("token %q for another run of the service", f.token)
	}
	f.events <- moves("1", two, 302, true)
	want("map[a/eth0:300 b/eth0:302]")
	f.events <- complete("2")
	want("map[b/eth0:302]")

	cancel()
	if err := <-ended; err != nil && !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}
