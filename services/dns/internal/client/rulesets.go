// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package client

import (
	"context"
	"iter"
	"log/slog"
	"math"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/watch"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	"github.com/sluice-net/sluice/services/dns/internal/rules"
)

// wantedNames is the key of the names that tables select. No rule set has this number.
const wantedNames uint16 = 0

// maxKeys is the maximum number of keys: one for each rule set, and one for the names that tables select.
const maxKeys = math.MaxUint16 + 1

// RuleSets follows the rule sets of sluice-policy.
type RuleSets struct {
	client policyv1.PolicyServiceClient
	rules  *rules.Rules
	listed func()
	log    *slog.Logger

	mu  sync.Mutex
	err error // guarded by mu; why the sets are not up to date
}

// errListing is the reason until the first listing is complete.
type errListing struct{}

func (errListing) Error() string { return "sluice-policy has not sent all rule sets yet" }

// NewRuleSets returns a client that keeps r equal to the rule sets of sluice-policy while Run runs. It calls listed
// after each complete listing. sluice-policy may then have restarted, and may have lost the addresses that it had
// learned.
func NewRuleSets(conn grpc.ClientConnInterface, r *rules.Rules, listed func(), l *slog.Logger) *RuleSets {
	return &RuleSets{
		client: policyv1.NewPolicyServiceClient(conn), rules: r, listed: listed, log: l.With("source", "rule sets"),
		err: errListing{},
	}
}

// Err returns the reason why the rule sets are not up to date; nil if they are. The last known sets stay in use.
func (s *RuleSets) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

func (s *RuleSets) setErr(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.err = err
}

// Run follows the rule sets until ctx ends.
func (s *RuleSets) Run(ctx context.Context) error {
	return watch.Follow(ctx, source{s}, sink{s}, watch.FollowOptions{
		Max: maxKeys, RetryMin: 100 * time.Millisecond, RetryMax: 2 * time.Second, Log: s.log,
	})
}

// source is the watch of the sets.
type source struct{ *RuleSets }

// Watch implements watch.Source.
func (s source) Watch(ctx context.Context, token []byte) iter.Seq2[watch.Event[uint16, rules.Content], error] {
	return watch.Receive(func() (grpc.ServerStreamingClient[policyv1.WatchRuleSetsResponse], error) {
		return s.client.WatchRuleSets(ctx, &policyv1.WatchRuleSetsRequest{ResumeToken: token})
	}, eventOf)
}

// eventOf returns the event of a message. A rule set for another kind of proxy becomes a deletion, because its number
// may have belonged to a DNS rule set before.
func eventOf(m *policyv1.WatchRuleSetsResponse) watch.Event[uint16, rules.Content] {
	e := watch.Event[uint16, rules.Content]{Kind: watch.Bookmark, Token: m.GetResumeToken()}
	switch x := m.GetEvent().(type) {
	case *policyv1.WatchRuleSetsResponse_Upsert:
		if n := x.Upsert.GetNumber(); n > 0 && n <= math.MaxUint16 {
			e.Kind, e.Key = watch.Upsert, uint16(n)
			e.Value = rules.Content{All: x.Upsert.GetAll(), Names: x.Upsert.GetDnsNames()}
			if x.Upsert.GetProxy() != netv1.Proxy_PROXY_DNS {
				e.Kind = watch.Delete
			}
		}
	case *policyv1.WatchRuleSetsResponse_Delete:
		if n := x.Delete; n > 0 && n <= math.MaxUint16 {
			e.Kind, e.Key = watch.Delete, uint16(n)
		}
	case *policyv1.WatchRuleSetsResponse_WantedNames:
		e.Kind, e.Key = watch.Upsert, wantedNames
		e.Value = rules.Content{All: x.WantedNames.GetAll(), Names: x.WantedNames.GetDnsNames()}
	case *policyv1.WatchRuleSetsResponse_Bookmark:
		e.SnapshotComplete, e.Revision = x.Bookmark.GetSnapshotComplete(), x.Bookmark.GetRevision()
	}
	return e
}

// sink receives the sets.
type sink struct{ *RuleSets }

// Apply implements watch.Sink. A rule set that cannot be decoded allows nothing; the error is logged.
func (s sink) Apply(_ context.Context, c watch.Changes[uint16, rules.Content]) error {
	for number, content := range c.Upserts {
		var err error
		switch {
		case number != wantedNames:
			err = s.rules.Upsert(number, content)
		case content.All:
			err = s.rules.Want(nil)
		default:
			err = s.rules.Want(append([]string{}, content.Names...))
		}
		if err != nil {
			s.log.Error("cannot decode rules of sluice-policy; is sluice-dns an older version?", log.Err(err))
		}
	}
	for number := range c.Deletes {
		s.rules.Delete(number)
	}
	return nil
}

// Complete implements watch.Sink.
func (s sink) Complete(_ context.Context, listed map[uint16]struct{}) error {
	s.rules.Keep(listed)
	if _, ok := listed[wantedNames]; !ok {
		if err := s.rules.Want(nil); err != nil {
			return err
		}
	}
	s.listed()
	s.setErr(nil)
	return nil
}

// Failed implements watch.Sink.
func (s sink) Failed(_ context.Context, why error) error {
	s.setErr(why)
	return nil
}
