// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package rulesets follows the rule sets of sluice-policy that a proxy evaluates.
package rulesets

import (
	"context"
	"errors"
	"iter"
	"log/slog"
	"math"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/watch"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
)

// Rules receive the rule sets.
type Rules interface {
	// Upsert adds or replaces a set. A set that cannot be decoded allows nothing; the error is logged.
	Upsert(number uint16, s *policyv1.RuleSet) error
	Delete(number uint16)
	// Keep removes all sets whose numbers are not in listed, which contains a complete listing.
	Keep(listed map[uint16]struct{})
	// Want receives the names by which policies select addresses; nil: unknown.
	Want(*policyv1.WantedNames) error
}

// Options describe a RuleSets. All fields are required.
type Options struct {
	Proxies []netv1.Proxy // the kinds of sets that this process evaluates
	Rules   Rules
	// Listed is called after each complete listing. sluice-policy may then have restarted.
	Listed func()
	Log    *slog.Logger
}

// RuleSets keeps rules equal to the rule sets of sluice-policy while Run runs.
type RuleSets struct {
	o      Options
	client policyv1.PolicyServiceClient

	mu  sync.Mutex
	err error // guarded by mu; why the sets are not up to date
}

// New returns a RuleSets with a connection to sluice-policy.
func New(conn grpc.ClientConnInterface, o Options) *RuleSets {
	o.Log = o.Log.With("source", "rule sets")
	return &RuleSets{
		o: o, client: policyv1.NewPolicyServiceClient(conn),
		err: errors.New("sluice-policy has not sent all rule sets yet"),
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

// wantedNames is the key of the names that tables select. No rule set has this number.
const wantedNames uint16 = 0

// maxKeys is the maximum number of keys: one for each rule set, and one for the names that tables select.
const maxKeys = math.MaxUint16 + 1

// content is the value of a key: a rule set, or the wanted names.
type content struct {
	set    *policyv1.RuleSet
	wanted *policyv1.WantedNames
}

// Run follows the rule sets until ctx ends.
func (s *RuleSets) Run(ctx context.Context) error {
	return watch.Follow(ctx, source{s}, sink{s}, watch.FollowOptions{
		Max: maxKeys, RetryMin: 100 * time.Millisecond, RetryMax: 2 * time.Second, Log: s.o.Log,
	})
}

// source is the watch of the sets.
type source struct{ *RuleSets }

// Watch implements watch.Source.
func (s source) Watch(ctx context.Context, token []byte) iter.Seq2[watch.Event[uint16, content], error] {
	return watch.Receive(func() (grpc.ServerStreamingClient[policyv1.WatchRuleSetsResponse], error) {
		return s.client.WatchRuleSets(ctx, &policyv1.WatchRuleSetsRequest{ResumeToken: token})
	}, s.eventOf)
}

// eventOf returns the event of a message. A rule set for another kind of proxy becomes a deletion, because its number
// may have belonged to a set for this one before.
func (s source) eventOf(m *policyv1.WatchRuleSetsResponse) watch.Event[uint16, content] {
	e := watch.Event[uint16, content]{Kind: watch.Bookmark, Token: m.GetResumeToken()}
	switch x := m.GetEvent().(type) {
	case *policyv1.WatchRuleSetsResponse_Upsert:
		if n := x.Upsert.GetNumber(); n > 0 && n <= math.MaxUint16 {
			e.Kind, e.Key, e.Value = watch.Upsert, uint16(n), content{set: x.Upsert}
			if !slices.Contains(s.o.Proxies, x.Upsert.GetProxy()) {
				e.Kind, e.Value = watch.Delete, content{}
			}
		}
	case *policyv1.WatchRuleSetsResponse_Delete:
		if n := x.Delete; n > 0 && n <= math.MaxUint16 {
			e.Kind, e.Key = watch.Delete, uint16(n)
		}
	case *policyv1.WatchRuleSetsResponse_WantedNames:
		e.Kind, e.Key, e.Value = watch.Upsert, wantedNames, content{wanted: x.WantedNames}
	case *policyv1.WatchRuleSetsResponse_Bookmark:
		e.SnapshotComplete, e.Revision = x.Bookmark.GetSnapshotComplete(), x.Bookmark.GetRevision()
	}
	return e
}

// sink receives the sets.
type sink struct{ *RuleSets }

// Apply implements watch.Sink.
func (s sink) Apply(_ context.Context, c watch.Changes[uint16, content]) error {
	for number, x := range c.Upserts {
		var err error
		if number == wantedNames {
			err = s.o.Rules.Want(x.wanted)
		} else {
			err = s.o.Rules.Upsert(number, x.set)
		}
		if err != nil {
			s.o.Log.Error("cannot decode rules of sluice-policy; is this process an older version?", log.Err(err))
		}
	}
	for number := range c.Deletes {
		if number != wantedNames {
			s.o.Rules.Delete(number)
		}
	}
	return nil
}

// Complete implements watch.Sink.
func (s sink) Complete(_ context.Context, listed map[uint16]struct{}) error {
	s.o.Rules.Keep(listed)
	if _, ok := listed[wantedNames]; !ok {
		if err := s.o.Rules.Want(nil); err != nil {
			return err
		}
	}
	s.o.Listed()
	s.setErr(nil)
	return nil
}

// Failed implements watch.Sink.
func (s sink) Failed(_ context.Context, why error) error {
	s.setErr(why)
	return nil
}
