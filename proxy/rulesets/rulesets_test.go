// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package rulesets

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/rpc/client"
	"github.com/sluice-net/sluice/kit/servicetest"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// policy simulates sluice-policy.
type policy struct {
	policyv1.UnimplementedPolicyServiceServer
	streams chan []*policyv1.WatchRuleSetsResponse // messages to send; nil: the stream ends, its token is lost
}

func (n *policy) WatchRuleSets(
	r *policyv1.WatchRuleSetsRequest, stream grpc.ServerStreamingServer[policyv1.WatchRuleSetsResponse],
) error {
	if len(r.GetResumeToken()) > 0 {
		return status.Error(codes.OutOfRange, "the token is of another run")
	}
	for {
		select {
		case list := <-n.streams:
			if list == nil {
				return status.Error(codes.Unavailable, "stopping")
			}
			for _, m := range list {
				if err := stream.Send(m); err != nil {
					return err
				}
			}
		case <-stream.Context().Done():
			return stream.Context().Err()
		}
	}
}

func start(t *testing.T) (*policy, *grpc.ClientConn) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	n, s := &policy{}, grpc.NewServer()
	policyv1.RegisterPolicyServiceServer(s, n)
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	conn, err := client.Dial(path, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.Stop()
		if err := errors.Join(conn.Close(), <-served); err != nil {
			t.Error(err)
		}
	})
	return n, conn
}

// named returns a logger that fails the test if a line lacks the source.
func named(t *testing.T) *slog.Logger { return slog.New(sourceHandler{t, false}) }

type sourceHandler struct {
	t   *testing.T
	has bool
}

func (h sourceHandler) Enabled(context.Context, slog.Level) bool { return true }

func (h sourceHandler) Handle(_ context.Context, r slog.Record) error {
	if !h.has {
		h.t.Errorf("the line %q does not name its source", r.Message)
	}
	return nil
}

func (h sourceHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	h.has = h.has || slices.ContainsFunc(attrs, func(a slog.Attr) bool { return a.Key == "source" })
	return h
}

func (h sourceHandler) WithGroup(string) slog.Handler { return h }

// recorder is the Rules of a proxy. It cannot decode names with a space.
type recorder struct {
	mu     sync.Mutex
	sets   map[uint16][]string
	wanted string
}

func (r *recorder) Upsert(number uint16, s *policyv1.RuleSet) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, name := range s.GetDnsNames() {
		if strings.Contains(name, " ") {
			delete(r.sets, number)
			return errors.New("no name")
		}
	}
	r.sets[number] = s.GetDnsNames()
	return nil
}

func (r *recorder) Delete(number uint16) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.sets, number)
}

func (r *recorder) Keep(listed map[uint16]struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	maps.DeleteFunc(r.sets, func(number uint16, _ []string) bool { _, ok := listed[number]; return !ok })
}

func (r *recorder) Want(w *policyv1.WantedNames) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case w == nil:
		r.wanted = "unknown"
	case w.GetAll():
		r.wanted = "all"
	default:
		r.wanted = fmt.Sprint(w.GetDnsNames())
	}
	return nil
}

func (r *recorder) String() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var all []string
	for _, number := range slices.Sorted(maps.Keys(r.sets)) {
		all = append(all, fmt.Sprint(number, " ", r.sets[number]))
	}
	return strings.Join(append(all, "wanted "+r.wanted), ", ")
}

func TestRulesFollowSluicePolicy(t *testing.T) {
	n, conn := start(t)
	n.streams = make(chan []*policyv1.WatchRuleSetsResponse)
	r := &recorder{sets: map[uint16][]string{}}
	var listings atomic.Int32
	const dns, http = netv1.Proxy_PROXY_DNS, netv1.Proxy_PROXY_HTTP
	s := New(conn, Options{Proxies: []netv1.Proxy{dns}, Rules: r, Listed: func() { listings.Add(1) }, Log: named(t)})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	if s.Err() == nil {
		t.Error("complete before the listing")
	}
	upsert := func(number uint32, proxy netv1.Proxy, names ...string) *policyv1.WatchRuleSetsResponse {
		return &policyv1.WatchRuleSetsResponse{Event: &policyv1.WatchRuleSetsResponse_Upsert{
			Upsert: &policyv1.RuleSet{Number: number, Proxy: proxy, DnsNames: names},
		}}
	}
	wanted := func(all bool, names ...string) *policyv1.WatchRuleSetsResponse {
		return &policyv1.WatchRuleSetsResponse{Event: &policyv1.WatchRuleSetsResponse_WantedNames{
			WantedNames: &policyv1.WantedNames{All: all, DnsNames: names},
		}}
	}
	bookmark := &policyv1.WatchRuleSetsResponse{
		ResumeToken: []byte("1"), Event: &policyv1.WatchRuleSetsResponse_Bookmark{
			Bookmark: &policyv1.RuleSetBookmark{SnapshotComplete: true, Revision: 1},
		},
	}
	has := func(wanted string, sets ...string) func() bool {
		return func() bool { return s.Err() == nil && r.String() == strings.Join(append(sets, "wanted "+wanted), ", ") }
	}
	await := func(what string, ok func() bool) {
		t.Helper()
		for deadline := time.Now().Add(servicetest.Patience); !ok(); time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("%s: not reached, but %s; the watch says %v", what, r, s.Err())
			}
		}
	}
	n.streams <- []*policyv1.WatchRuleSetsResponse{
		upsert(1, dns, "a.example."), upsert(2, dns, "b.example."), upsert(3, http), upsert(4, dns, "a.example."),
		upsert(5, dns, "a b"), upsert(70_000, dns), wanted(false, "a.example."), bookmark,
	}
	await("listing", has("[a.example.]", "1 [a.example.]", "2 [b.example.]", "4 [a.example.]"))
	n.streams <- []*policyv1.WatchRuleSetsResponse{
		upsert(2, dns, "*"), upsert(1, http), {Event: &policyv1.WatchRuleSetsResponse_Delete{Delete: 4}}, wanted(true),
	}
	await("changes", has("all", "2 [*]"))
	n.streams <- nil // the stream ends: sluice-policy restarts
	n.streams <- []*policyv1.WatchRuleSetsResponse{upsert(6, dns, "a.example."), wanted(false), bookmark}
	await("second listing", has("[]", "6 [a.example.]"))
	if n := listings.Load(); n != 2 {
		t.Errorf("%d listings were reported, want 2: each time, sluice-policy may have forgotten what it had learned", n)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
