// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package storetest has a Store in memory for tests, and a test suite that this Store and every real Store must pass.
package storetest

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
)

// Fake is the shared memory of a cluster, in this process.
type Fake struct {
	mu       sync.Mutex
	revision int64                                 // guarded by mu, like all below
	byNumber map[identity.Numeric]fakeID           //
	byText   map[string]fakeLabels                 //
	refs     map[string]map[identity.Numeric]int64 // node → number → revision of the reference
	rests    map[identity.Numeric]fakeQuarantine   //
	sessions map[string]int                        // node → its session, 0 for none
	serial   int                                   // number of the last session
	leader   string                                //
	numbers  allocator.Numbers                     // published
	denied   bool                                  // the node's etcd role is an old one: it may not publish numbers
	log      []fakeEvent                           // the changes that were not compacted
	first    int64                                 // oldest revision that Follow can continue from
	down     bool                                  //
	cut      bool                                  // down, with its connections closed
	changed  chan struct{}                         // closed at every change
}

type fakeID struct {
	labels   label.Canonical
	revision int64
}

type fakeLabels struct {
	number   identity.Numeric
	revision int64
}

type fakeQuarantine struct {
	text string
	ends time.Time
}

type fakeEvent struct {
	revision int64
	id       identity.Identity
	deleted  bool
}

// NewFake returns an empty cluster.
func NewFake() *Fake {
	return &Fake{
		revision: 1, first: 1,
		byNumber: map[identity.Numeric]fakeID{}, byText: map[string]fakeLabels{},
		refs: map[string]map[identity.Numeric]int64{}, rests: map[identity.Numeric]fakeQuarantine{},
		sessions: map[string]int{}, changed: make(chan struct{}),
	}
}

// Node returns the Store of a node.
func (f *Fake) Node(name string) allocator.Store { return &fakeStore{Fake: f, node: name} }

// Down makes the cluster stop answering until Up.
func (f *Fake) Down() { f.set(true, false) }

// Cut is like Down, and closes the connections.
func (f *Fake) Cut() { f.set(true, true) }

// Up ends Down and Cut.
func (f *Fake) Up() { f.set(false, false) }

func (f *Fake) set(down, cut bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.down, f.cut = down, cut
	f.notify()
}

// Expire ends the session of a node, as if it had been silent for too long.
func (f *Fake) Expire(node string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.sessions[node] = 0
	if len(f.refs[node]) > 0 {
		f.revision++
	}
	delete(f.refs, node)
	if f.leader == node {
		f.leader = ""
	}
	f.notify()
}

// Compact discards all changes up to now.
func (f *Fake) Compact() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.log, f.first = nil, f.revision+1
	f.notify()
}

func (f *Fake) notify() {
	close(f.changed)
	f.changed = make(chan struct{})
}

type fakeStore struct {
	*Fake
	node    string
	session int // guarded by mu
}

func (s *fakeStore) Endpoints() []string { return []string{"fake://cluster"} }

// enter locks the cluster if it answers.
func (s *fakeStore) enter(ctx context.Context) error {
	s.mu.Lock()
	switch {
	case ctx.Err() == context.Canceled:
		s.mu.Unlock()
		return ctx.Err()
	case s.down || ctx.Err() != nil:
		s.mu.Unlock()
		return allocator.ErrUnavailable
	}
	return nil
}

func (s *fakeStore) joined() bool { return s.session != 0 && s.sessions[s.node] == s.session }

func (s *fakeStore) Join(ctx context.Context) (bool, error) {
	if err := s.enter(ctx); err != nil {
		return false, err
	}
	defer s.mu.Unlock()
	if s.joined() {
		return false, nil
	}
	// References of another process of this node stay until its lease ends.
	s.serial++
	s.session, s.sessions[s.node] = s.serial, s.serial
	return true, nil
}

func (s *fakeStore) Session() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return strconv.Itoa(s.session)
}

func (s *fakeStore) Ping(ctx context.Context) error {
	if err := s.enter(ctx); err != nil {
		return err
	}
	defer s.mu.Unlock()
	if !s.joined() {
		return allocator.ErrSessionLost
	}
	return nil
}

func (s *fakeStore) Severed(ctx context.Context) error {
	for {
		s.mu.Lock()
		cut, changed := s.cut, s.changed
		s.mu.Unlock()
		if cut {
			return fmt.Errorf("%w: connection refused", allocator.ErrUnavailable)
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (s *fakeStore) refer(l label.Canonical) allocator.Claim {
	s.revision++
	e := s.byText[l.Text()]
	e.revision = s.revision
	s.byText[l.Text()] = e
	if s.refs[s.node] == nil {
		s.refs[s.node] = map[identity.Numeric]int64{}
	}
	s.refs[s.node][e.number] = s.revision
	s.notify()
	return allocator.Claim{Number: e.number, Revision: s.revision}
}

func (s *fakeStore) create(n identity.Numeric, l label.Canonical) allocator.Claim {
	delete(s.rests, n)
	s.byText[l.Text()] = fakeLabels{number: n}
	c := s.refer(l)
	c.Created = true
	s.byNumber[n] = fakeID{labels: l, revision: s.revision}
	s.log = append(s.log, fakeEvent{revision: s.revision, id: identity.Identity{Number: n, Labels: l}})
	s.notify()
	return c
}

// restsFor reports whether the number is in quarantine after another label set.
func (s *fakeStore) restsFor(n identity.Numeric, l label.Canonical) bool {
	r, ok := s.rests[n]
	return ok && r.text != l.Text() && time.Now().Before(r.ends)
}

func (s *fakeStore) Claim(ctx context.Context, l label.Canonical, _, candidate identity.Numeric) (allocator.Claim, error) {
	if err := s.enter(ctx); err != nil {
		return allocator.Claim{}, err
	}
	defer s.mu.Unlock()
	if !s.joined() {
		return allocator.Claim{}, allocator.ErrSessionLost
	}
	if _, ok := s.byText[l.Text()]; ok {
		return s.refer(l), nil
	}
	if _, taken := s.byNumber[candidate]; taken || candidate == 0 || s.restsFor(candidate, l) {
		return allocator.Claim{}, allocator.ErrOccupied
	}
	return s.create(candidate, l), nil
}

func (s *fakeStore) Zone() allocator.Zone { return allocator.Zone{} }

func (s *fakeStore) Restore(ctx context.Context, id identity.Identity) (allocator.Claim, error) {
	if err := s.enter(ctx); err != nil {
		return allocator.Claim{}, err
	}
	defer s.mu.Unlock()
	if !s.joined() {
		return allocator.Claim{}, allocator.ErrSessionLost
	}
	conflict := &allocator.ConflictError{Held: id}
	have, ok := s.byText[id.Labels.Text()]
	if ok && have.number == id.Number {
		return s.refer(id.Labels), nil
	}
	if ok {
		conflict.Moved = have.number
	}
	occupant, taken := s.byNumber[id.Number]
	if taken {
		conflict.Occupant = identity.Identity{Number: id.Number, Labels: occupant.labels}
		conflict.Revision = occupant.revision
	}
	if ok || taken || s.restsFor(id.Number, id.Labels) {
		return allocator.Claim{}, conflict
	}
	return s.create(id.Number, id.Labels), nil
}

func (s *fakeStore) Renew(ctx context.Context, ids []identity.Identity) ([]allocator.Claim, error) {
	if err := s.enter(ctx); err != nil {
		return nil, err
	}
	defer s.mu.Unlock()
	if !s.joined() {
		return nil, allocator.ErrSessionLost
	}
	var done []allocator.Claim
	for _, id := range ids {
		if have, ok := s.byText[id.Labels.Text()]; ok && have.number == id.Number {
			done = append(done, s.refer(id.Labels))
		}
	}
	return done, nil
}

func (s *fakeStore) Release(ctx context.Context, refs ...allocator.Reference) error {
	if err := s.enter(ctx); err != nil {
		return err
	}
	defer s.mu.Unlock()
	for _, ref := range refs {
		if s.refs[s.node][ref.Number] == ref.Revision {
			delete(s.refs[s.node], ref.Number)
			s.revision++
			s.notify()
		}
	}
	return nil
}

func (s *fakeStore) References(ctx context.Context) ([]allocator.Reference, error) {
	if err := s.enter(ctx); err != nil {
		return nil, err
	}
	defer s.mu.Unlock()
	var out []allocator.Reference
	for n, rev := range s.refs[s.node] {
		out = append(out, allocator.Reference{Number: n, Revision: rev})
	}
	return out, nil
}

// fakeCluster is the cluster ID of the store.
const fakeCluster = 0xfa4e

func (s *fakeStore) Follow(ctx context.Context, sink func(allocator.Update)) error {
	var next int64 // 0: list
	reset := true
	for {
		s.mu.Lock()
		changed, down := s.changed, s.down
		var u allocator.Update
		if !down {
			if next == 0 || next < s.first {
				u = allocator.Update{Complete: true, Reset: reset}
				for n, e := range s.byNumber {
					u.Upserts = append(u.Upserts, allocator.Entry{Identity: identity.Identity{Number: n, Labels: e.labels}, Revision: e.revision})
				}
				reset = false
			} else {
				for _, e := range s.log {
					switch {
					case e.revision < next:
					case e.deleted:
						u.Deletes = append(u.Deletes, allocator.Deletion{Number: e.id.Number, Revision: e.revision})
					default:
						u.Upserts = append(u.Upserts, allocator.Entry{Identity: e.id, Revision: e.revision})
					}
				}
				u = last(u)
			}
			u.Heard, u.Cluster, u.Revision = time.Now(), fakeCluster, s.revision
			next = s.revision + 1
		}
		s.mu.Unlock()
		if !u.Heard.IsZero() {
			sink(u)
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// last removes all events of a number except the newest.
func last(u allocator.Update) allocator.Update {
	newest := map[identity.Numeric]int64{}
	for _, e := range u.Upserts {
		newest[e.Identity.Number] = max(newest[e.Identity.Number], e.Revision)
	}
	for _, d := range u.Deletes {
		newest[d.Number] = max(newest[d.Number], d.Revision)
	}
	u.Upserts = slices.DeleteFunc(u.Upserts, func(e allocator.Entry) bool { return e.Revision < newest[e.Identity.Number] })
	u.Deletes = slices.DeleteFunc(u.Deletes, func(d allocator.Deletion) bool { return d.Revision < newest[d.Number] })
	return u
}

func (s *fakeStore) Lead(ctx context.Context) (bool, error) {
	if err := s.enter(ctx); err != nil {
		return false, err
	}
	defer s.mu.Unlock()
	if !s.joined() {
		return false, allocator.ErrSessionLost
	}
	if s.leader == "" {
		s.leader = s.node
	}
	return s.leader == s.node, nil
}

func (s *fakeStore) FollowReferences(ctx context.Context, sink func(allocator.References)) error {
	for {
		s.mu.Lock()
		changed, down := s.changed, s.down
		r := allocator.References{Complete: true, Revision: s.revision, Numbers: map[identity.Numeric]int{}, Nodes: map[string]int{}}
		for node, refs := range s.refs {
			for n := range refs {
				r.Numbers[n]++
				r.Nodes[node]++
			}
		}
		s.mu.Unlock()
		if !down {
			sink(r)
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (s *fakeStore) Resting(ctx context.Context) ([]identity.Numeric, error) {
	if err := s.enter(ctx); err != nil {
		return nil, err
	}
	defer s.mu.Unlock()
	var out []identity.Numeric
	for n, r := range s.rests {
		if time.Now().Before(r.ends) {
			out = append(out, n)
		}
	}
	return out, nil
}

func (s *fakeStore) PublishNumbers(ctx context.Context, n allocator.Numbers) error {
	if err := s.enter(ctx); err != nil {
		return err
	}
	defer s.mu.Unlock()
	if s.denied {
		return allocator.ErrDenied
	}
	if s.leader == s.node {
		s.revision++
		s.numbers = n
		s.notify()
	}
	return nil
}

// Deny makes the store refuse publications, as with roles of an earlier version.
func (f *Fake) Deny(denied bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.denied = denied
}

// Fill creates unreferenced identities, under the first free numbers.
func (f *Fake) Fill(sets ...label.Canonical) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.revision++
	n := identity.MinCluster
	for _, l := range sets {
		for ; f.byNumber[n].revision != 0; n++ {
		}
		f.byNumber[n], f.byText[l.Text()] = fakeID{l, f.revision}, fakeLabels{n, f.revision}
		f.log = append(f.log, fakeEvent{revision: f.revision, id: identity.Identity{Number: n, Labels: l}})
	}
	f.notify()
}

// Forget removes the identity of a label set at once, without quarantine.
func (f *Fake) Forget(l label.Canonical) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.revision++
	n := f.byText[l.Text()].number
	delete(f.byText, l.Text())
	delete(f.byNumber, n)
	f.log = append(f.log, fakeEvent{revision: f.revision, id: identity.Identity{Number: n, Labels: l}, deleted: true})
	f.notify()
}

// Published returns what was published last.
func (f *Fake) Published() allocator.Numbers {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.numbers
}

func (s *fakeStore) FollowNumbers(ctx context.Context, sink func(allocator.Numbers)) error {
	for {
		s.mu.Lock()
		changed, down, n := s.changed, s.down, s.numbers
		s.mu.Unlock()
		if !down {
			sink(n)
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (s *fakeStore) Candidates(ctx context.Context, ids []identity.Identity) ([]allocator.Candidate, error) {
	if err := s.enter(ctx); err != nil {
		return nil, err
	}
	defer s.mu.Unlock()
	var out []allocator.Candidate
	for _, id := range ids {
		out = append(out, allocator.Candidate{Identity: id, Fence: s.byText[id.Labels.Text()].revision})
	}
	return out, nil
}

func (s *fakeStore) Tidy(ctx context.Context, _ allocator.References) error {
	if err := s.enter(ctx); err != nil {
		return err
	}
	s.mu.Unlock()
	return nil
}

func (s *fakeStore) Collect(ctx context.Context, unused []allocator.Candidate, rest time.Duration) ([]identity.Numeric, error) {
	if err := s.enter(ctx); err != nil {
		return nil, err
	}
	defer s.mu.Unlock()
	var gone []identity.Numeric
	for _, c := range unused {
		n, text := c.Identity.Number, c.Identity.Labels.Text()
		if have, ok := s.byText[text]; !ok || have.number != n || have.revision != c.Fence {
			continue
		}
		s.revision++
		delete(s.byText, text)
		delete(s.byNumber, n)
		s.rests[n] = fakeQuarantine{text: text, ends: time.Now().Add(rest)}
		s.log = append(s.log, fakeEvent{revision: s.revision, id: c.Identity, deleted: true})
		gone = append(gone, n)
	}
	s.notify()
	return gone, nil
}
