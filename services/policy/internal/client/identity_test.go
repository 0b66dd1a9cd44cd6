// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package client

import (
	"context"
	"fmt"
	"maps"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/rpc/client"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/labelfilter"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// registry simulates the identity service, with a watch hub as in the real service.
type registry struct {
	identityv1.UnimplementedIdentityServiceServer
	t      *testing.T
	socket string
	hub    *watch.Hub[uint32, string] // number → value of the label app
	stop   func()
}

// notUnderstood is the app of an identity whose named ports are invalid.
const notUnderstood = "?"

func (r *registry) WatchIdentities(req *identityv1.WatchIdentitiesRequest, s grpc.ServerStreamingServer[identityv1.WatchIdentitiesResponse]) error {
	return watch.Serve(s.Context(), r.hub, req.GetResumeToken(), func(e watch.Event[uint32, string]) error {
		m := &identityv1.WatchIdentitiesResponse{ResumeToken: e.Token, Incarnation: r.hub.Incarnation(), Revision: e.Revision, StoreRevision: &identityv1.StoreRevision{ClusterId: e.Origin.Store, Revision: e.Origin.Revision}}
		ports := "http.TCP.80"
		if e.Value == notUnderstood {
			ports = "x"
		}
		switch e.Kind {
		case watch.Upsert:
			m.Event = &identityv1.WatchIdentitiesResponse_Upsert{Upsert: &identityv1.Identity{Number: e.Key, Labels: []*workloadv1.Label{
				{Source: "k8s", Key: "app", Value: e.Value}, {Source: "generated", Key: "named-ports", Value: ports},
			}}}
		case watch.Delete:
			m.Event = &identityv1.WatchIdentitiesResponse_Delete{Delete: e.Key}
		default:
			m.Event = &identityv1.WatchIdentitiesResponse_Bookmark{Bookmark: &identityv1.Bookmark{SnapshotComplete: e.SnapshotComplete}}
		}
		return s.Send(m)
	})
}

// start starts a run of the service with the given values.
func (r *registry) start(values map[uint32]string) {
	r.t.Helper()
	r.hub = watch.NewHub[uint32](watch.Options[string]{})
	for n, v := range values {
		r.hub.Upsert(n, v)
	}
	r.serve()
}

// serve opens the socket of the same run.
func (r *registry) serve() {
	r.t.Helper()
	l, err := net.Listen("unix", r.socket)
	if err != nil {
		r.t.Fatal(err)
	}
	srv := grpc.NewServer()
	identityv1.RegisterIdentityServiceServer(srv, r)
	done := make(chan struct{})
	go func() {
		defer close(done)
		srv.Serve(l) //nolint:errcheck // it ends with the test
	}()
	r.stop = sync.OnceFunc(func() { srv.Stop(); <-done })
	r.t.Cleanup(r.stop)
}

// sink records its calls.
type sink struct {
	t    *testing.T
	mu   sync.Mutex
	ids  map[identity.Numeric]peer.Identity
	full int // complete listings
	sets int
	err  string
	at   peer.Revision

	filters []string
}

func (s *sink) SetLabelFilter(_ context.Context, workloads, nodes []labelfilter.Rule) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.filters = append(s.filters, fmt.Sprint(workloads, nodes))
	return nil
}

func (s *sink) TakeIdentities(_ context.Context, set []peer.Identity, gone []identity.Numeric, at peer.Revision) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.at = at; len(set)+len(gone) > 0 {
		s.sets++
	}
	for _, n := range gone {
		delete(s.ids, n)
	}
	for _, id := range set {
		s.ids[id.Number] = id
	}
	return nil
}

func (s *sink) CompleteIdentities(_ context.Context, listed map[identity.Numeric]struct{}) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.full++
	s.err = ""
	maps.DeleteFunc(s.ids, func(n identity.Numeric, _ peer.Identity) bool { _, ok := listed[n]; return !ok })
	return nil
}

func (s *sink) SourceFailed(_ context.Context, _ string, why error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.err = ""
	if why != nil {
		s.err = why.Error()
	}
	return nil
}

// want waits for the identities, as NUMBER=app, and for the number of listings.
func (s *sink) want(what string, full int, list ...string) {
	s.t.Helper()
	servicetest.EventuallyNil(s.t, what, func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		var got []string
		for n, id := range s.ids {
			app, _ := id.Labels.Value("k8s", "app")
			got = append(got, fmt.Sprintf("%d=%s", n, app))
		}
		slices.Sort(got)
		if s.full != full || s.err != "" || !slices.Equal(got, list) {
			return fmt.Errorf("got %v, %d listings, error %q; want %v, %d", got, s.full, s.err, list, full)
		}
		return nil
	})
}

// wantAt waits until the sink is at the hub's revision.
func (s *sink) wantAt(what string, h *watch.Hub[uint32, string]) {
	s.t.Helper()
	want := peer.Revision{
		Incarnation: string(h.Incarnation()), Number: h.Revision(),
		Store: peer.StoreRevision{Cluster: h.Origin().Store, Revision: h.Origin().Revision},
	}
	servicetest.EventuallyNil(s.t, what, func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		if got := s.at; got != want {
			return fmt.Errorf("at %+v, want %+v", got, want)
		}
		return nil
	})
}

// follow runs Identities until the end of the test.
func (r *registry) follow(s *sink) {
	t := r.t
	conn, err := client.Dial(r.socket, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	i := NewIdentities(conn, "identity", s, log.Discard())
	i.options.RetryMin, i.options.RetryMax = time.Millisecond, 10*time.Millisecond
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := i.Run(ctx); err != nil {
			t.Errorf("run: %v", err)
		}
	})
	t.Cleanup(func() { cancel(); wg.Wait(); conn.Close() })
}

func TestIdentitiesAreFollowedThroughRestartsOfTheService(t *testing.T) {
	r := &registry{t: t, socket: filepath.Join(t.TempDir(), "s")}
	r.start(map[uint32]string{300: "a", 301: "b"})
	s := &sink{t: t, ids: map[identity.Numeric]peer.Identity{999: {Number: 999}}}
	r.follow(s)
	s.want("the listing, without what is not in it", 1, "300=a", "301=b")
	s.wantAt("the listing", r.hub)
	r.hub.Reach(7, 20)
	s.wantAt("the store goes on", r.hub)
	s.mu.Lock()
	if p := s.ids[300].Ports; len(p) != 1 || p[0].Name != "http" || p[0].Port != 80 {
		t.Errorf("named ports: %v", p)
	}
	s.mu.Unlock()
	r.hub.Upsert(302, "c")
	r.hub.Delete(300)
	s.want("changes", 1, "301=b", "302=c")
	s.wantAt("changes", r.hub)

	// The connection is lost; the service is the same run.
	r.stop()
	r.hub.Upsert(303, "d")
	r.hub.Reach(7, 30)
	servicetest.Eventually(t, "an error about the service that is down", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.err != ""
	})
	r.serve()
	s.want("continued without a listing", 1, "301=b", "302=c", "303=d")
	s.wantAt("continued without a listing", r.hub)

	// A new run of the service does not know the resume token of the former run.
	r.stop()
	r.start(map[uint32]string{400: "z"})
	s.want("listed anew", 2, "400=z")
	s.wantAt("listed anew", r.hub)
	// The stream sends many identities in few batches.
	s.mu.Lock()
	before := s.sets
	s.mu.Unlock()
	want := []string{"400=z"}
	for n := uint32(1000); n < 3000; n++ {
		r.hub.Upsert(n, "m")
		want = append(want, fmt.Sprintf("%d=m", n))
	}
	slices.Sort(want)
	s.want("many", 2, want...)
	s.mu.Lock()
	defer s.mu.Unlock()
	if n := s.sets - before; n > 1000 {
		t.Errorf("2000 identities came in %d batches", n)
	}
}

func TestIdentityThatIsNotUnderstoodStaysUnknown(t *testing.T) {
	r := &registry{t: t, socket: filepath.Join(t.TempDir(), "s")}
	r.start(map[uint32]string{300: "a", 301: notUnderstood, 302: "c"})
	s := &sink{t: t, ids: map[identity.Numeric]peer.Identity{}}
	r.follow(s)
	s.want("the listing", 1, "300=a", "302=c")
	// The hub merges the deletion of a key with a following upsert of the same key.
	r.hub.Upsert(300, notUnderstood)
	s.want("a number that was reused", 1, "302=c")
	r.hub.Upsert(300, "d")
	s.want("understood again", 1, "300=d", "302=c")

	_, err := new(Identities).fromIdentity(&identityv1.Identity{Number: 300, Labels: []*workloadv1.Label{{Source: "generated", Key: "named-ports", Value: "x"}}})
	if err == nil || !strings.Contains(err.Error(), "named-ports") {
		t.Errorf("got %v", err)
	}
}
