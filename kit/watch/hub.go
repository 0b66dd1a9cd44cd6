// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package watch distributes the changes of a keyed set to many readers.
//
// A reader receives a listing of the set, a bookmark that marks the end of the listing, and then
// changes. Each event carries a token, from which a reader can resume after an interruption. A
// token that is too old, or from another run of the process, is refused with ErrExpired, and the
// reader must list again.
//
// The producer never waits. Changes that a slow reader has not read yet are merged by key; a reader
// with more than Options.Pending unread keys is disconnected with ErrSlow. So a reader never has an
// unnoticed gap, and its memory use is bounded.
//
// Follow reads such a set from another process: it keeps a Sink equal to a Source across
// interrupted watches and restarts of the source.
//
// Order: the changes of a key arrive in order. A new key never arrives before a key that was added earlier, and a
// deletion never before an earlier deletion. Because changes are merged, a reader may receive a value before changes of
// other keys that preceded it. It must ignore the deletion of a key that it never received.
package watch

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
)

var (
	// ErrExpired means that the watch cannot be resumed from the token; list again.
	ErrExpired = errors.New("resume token expired")
	// ErrSlow means that the reader fell too far behind and was disconnected; its last token may
	// still be valid.
	ErrSlow = errors.New("reader too slow")
	// ErrClosed means that the hub or the subscription was closed.
	ErrClosed = errors.New("watch closed")
)

// Kind is the kind of an Event.
type Kind uint8

const (
	Upsert   Kind = iota + 1 // the key exists with this value
	Delete                   // the key does not exist
	Bookmark                 // no change, but a newer token
)

func (k Kind) String() string {
	switch k {
	case Upsert:
		return "upsert"
	case Delete:
		return "delete"
	case Bookmark:
		return "bookmark"
	}
	return fmt.Sprintf("Kind(%d)", uint8(k))
}

// Event is one message to a reader.
type Event[K comparable, V any] struct {
	Kind  Kind
	Key   K // not set in a bookmark
	Value V // only set in an upsert; shared, must not be modified
	// SnapshotComplete is set on the bookmark after a listing: keys that were not listed do not
	// exist.
	SnapshotComplete bool
	// Token resumes after this event. It is nil until the listing is complete.
	Token []byte
	// Revision is the number of changes in the hub's run that are included up to this event. 0
	// until the listing is complete.
	Revision uint64
	// Incarnation identifies the run of the hub to which Revision belongs. It is nil if Revision is
	// 0 or the source has none.
	Incarnation []byte
	// Origin is the revision of the store up to which changes are included after this event. Zero
	// means the Origin of the previous event.
	Origin Origin
}

// Origin is a revision of the store from which the set of a Hub is derived.
type Origin struct {
	Store    uint64 // identifies the store; 0 if unknown
	Revision int64  // revision of the store
}

// Options of a Hub. The zero value is usable.
type Options[V any] struct {
	History int // number of changes after which a token expires; 8,192 if 0
	Pending int // maximum number of unread keys of a reader; 8,192 if 0
	// Loading delays the bookmark after listings until Loaded is called, because the hub's own
	// source is not complete yet.
	Loading bool
	// Equal reports whether an upsert can be ignored because the value is equal. Nil ignores none.
	Equal func(a, b V) bool
	// Quiet is the maximum delay of the bookmark for a call of Reach that follows no change. Many revisions of a
	// store do not concern the readers, so their bookmarks are merged. 0 sends each at once.
	Quiet time.Duration
}

// Hub holds the set and its readers. All methods are safe for concurrent use.
type Hub[K comparable, V any] struct {
	opts        Options[V]
	incarnation [8]byte

	mu       sync.Mutex
	revision uint64                           // guarded by mu; of the last change
	items    map[K]*item[V]                   // guarded by mu
	history  []change[K, V]                   // guarded by mu; a ring buffer
	first    uint64                           // guarded by mu; oldest revision in history
	subs     map[*Subscription[K, V]]struct{} // guarded by mu
	origin   Origin                           // guarded by mu; the items contain all changes up to it
	told     uint64                           // guarded by mu; revision of the hub when readers last received an origin
	telling  bool                             // guarded by mu; a timer will send the origin
	changed  chan struct{}                    // guarded by mu; closed at the next change; nil if no caller waits for it
	loaded   bool                             // guarded by mu
	closed   bool                             // guarded by mu
}

type item[V any] struct {
	value   V
	created uint64 // revision of the first upsert: the order of listings
}

type change[K comparable, V any] struct {
	kind     Kind
	key      K
	value    V
	revision uint64
}

// NewHub returns an empty hub with a new incarnation.
func NewHub[K comparable, V any](o Options[V]) *Hub[K, V] {
	if o.History <= 0 {
		o.History = 8192
	}
	if o.Pending <= 0 {
		o.Pending = 8192
	}
	h := &Hub[K, V]{
		opts:   o,
		items:  map[K]*item[V]{},
		subs:   map[*Subscription[K, V]]struct{}{},
		first:  1,
		loaded: !o.Loading,
	}
	rand.Read(h.incarnation[:]) // never fails since Go 1.24
	return h
}

// Upsert sets a key. It returns the revision of the change, or the current revision if the value is
// unchanged.
func (h *Hub[K, V]) Upsert(key K, value V) uint64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return h.revision
	}
	it, ok := h.items[key]
	if ok && h.opts.Equal != nil && h.opts.Equal(it.value, value) {
		return h.revision
	}
	h.revision++
	if ok {
		it.value = value
	} else {
		h.items[key] = &item[V]{value: value, created: h.revision}
	}
	h.publish(change[K, V]{kind: Upsert, key: key, value: value, revision: h.revision})
	return h.revision
}

// Delete removes a key and reports whether it existed.
func (h *Hub[K, V]) Delete(key K) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if _, ok := h.items[key]; !ok || h.closed {
		return false
	}
	delete(h.items, key)
	h.revision++
	h.publish(change[K, V]{kind: Delete, key: key, revision: h.revision})
	return true
}

// Get returns the value of a key.
func (h *Hub[K, V]) Get(key K) (V, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if it, ok := h.items[key]; ok {
		return it.value, true
	}
	var zero V
	return zero, false
}

// Len returns the number of keys.
func (h *Hub[K, V]) Len() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.items)
}

// Keys returns all keys in the order in which they were added.
func (h *Hub[K, V]) Keys() []K {
	h.mu.Lock()
	listing := h.list()
	h.mu.Unlock()
	sorted(listing)
	keys := make([]K, len(listing))
	for i, c := range listing {
		keys[i] = c.key
	}
	return keys
}

// Revision returns the number of changes so far.
func (h *Hub[K, V]) Revision() uint64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.revision
}

// Changed returns a channel that is closed at the next change. It is for callers that read the
// whole set after each change, without a subscription: call Changed before reading the set, so that
// no change is missed.
func (h *Hub[K, V]) Changed() <-chan struct{} {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.changed == nil {
		h.changed = make(chan struct{})
	}
	return h.changed
}

// Origin returns the arguments of the last call of Reach.
func (h *Hub[K, V]) Origin() Origin {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.origin
}

// Reach declares that the hub includes everything up to a revision of its store. Readers receive the revision with the
// next event, or in a bookmark. The bookmark is sent at once, or within Options.Quiet if nothing has changed since
// readers last received an origin.
func (h *Hub[K, V]) Reach(store uint64, revision int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	before, at := h.origin, Origin{store, revision}
	if at == before {
		return
	}
	h.origin = at
	onward := at.Store == before.Store && at.Revision > before.Revision
	switch {
	case !h.loaded: // the bookmark after the listing will contain it
	case h.opts.Quiet <= 0 || h.revision != h.told || !onward:
		h.tell()
	case !h.telling:
		h.telling = true
		time.AfterFunc(h.opts.Quiet, func() {
			h.mu.Lock()
			defer h.mu.Unlock()
			if h.telling {
				h.tell()
			}
		})
	}
}

// tell sends the origin to all readers. Called with mu held.
func (h *Hub[K, V]) tell() {
	h.told, h.telling = h.revision, false
	for s := range h.subs {
		s.reach(h.revision, h.origin)
	}
}

// Incarnation returns the 8-byte identifier of this run of the hub.
func (h *Hub[K, V]) Incarnation() []byte { return h.incarnation[:8:8] }

// Readers returns the number of open subscriptions.
func (h *Hub[K, V]) Readers() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.subs)
}

// Loaded declares that the hub's source is complete: readers that wait for their bookmark get it.
// Further calls do nothing.
func (h *Hub[K, V]) Loaded() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.loaded {
		return
	}
	h.loaded = true
	for s := range h.subs {
		s.mark(h.revision, h.origin)
	}
}

// Close ends every subscription with ErrClosed and refuses new ones.
func (h *Hub[K, V]) Close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closed, h.telling = true, false
	for s := range h.subs {
		s.fail(ErrClosed)
		delete(h.subs, s)
	}
}

// publish must be called with mu held.
func (h *Hub[K, V]) publish(c change[K, V]) {
	if len(h.history) < h.opts.History {
		h.history = append(h.history, c)
	} else {
		h.history[int((c.revision-1)%uint64(h.opts.History))] = c
		h.first = c.revision - uint64(h.opts.History) + 1
	}
	if h.changed != nil {
		close(h.changed)
		h.changed = nil
	}
	for s := range h.subs {
		if !s.push(c) {
			delete(h.subs, s)
		}
	}
}

// list must be called with mu held. It does not sort: sorting takes longer than copying and must
// not delay the producer.
func (h *Hub[K, V]) list() []change[K, V] {
	all := make([]change[K, V], 0, len(h.items))
	for k, it := range h.items {
		all = append(all, change[K, V]{kind: Upsert, key: k, value: it.value, revision: it.created})
	}
	return all
}

// sorted sorts a listing by the order in which the keys were added.
func sorted[K comparable, V any](listing []change[K, V]) []change[K, V] {
	slices.SortFunc(listing, func(a, b change[K, V]) int { return cmp.Compare(a.revision, b.revision) })
	return listing
}

func (h *Hub[K, V]) token(revision uint64) []byte {
	return binary.BigEndian.AppendUint64(h.incarnation[:8:8], revision)
}

func (h *Hub[K, V]) parse(token []byte) (uint64, error) {
	if len(token) != 16 || [8]byte(token[:8]) != h.incarnation {
		return 0, fmt.Errorf("%w: the token is from another run of the server", ErrExpired)
	}
	return binary.BigEndian.Uint64(token[8:]), nil
}

// Subscribe opens a subscription. With an empty token it begins with a listing, else with the
// changes after the token. The reader must call Close.
func (h *Hub[K, V]) Subscribe(token []byte) (*Subscription[K, V], error) {
	s, err := h.subscribe(token)
	if err != nil {
		return nil, err
	}
	sorted(s.listing) // safe without mu: the listing belongs to the reader, which has not begun
	return s, nil
}

func (h *Hub[K, V]) subscribe(token []byte) (*Subscription[K, V], error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return nil, ErrClosed
	}
	s := &Subscription[K, V]{
		hub: h, limit: h.opts.Pending, queued: map[K]*entry[K, V]{}, wake: make(chan struct{}, 1), ended: make(chan struct{}),
	}
	if len(token) == 0 {
		s.listing = h.list()
		s.fresh = true
		if h.loaded {
			s.mark(h.revision, h.origin)
		}
	} else {
		revision, err := h.parse(token)
		if err != nil {
			return nil, err
		}
		if revision > h.revision || revision+1 < h.first {
			return nil, fmt.Errorf("%w: revision %d, have %d to %d", ErrExpired, revision, h.first, h.revision)
		}
		s.position = revision
		s.limit += h.opts.History // the replay must not count towards the limit
		for r := revision + 1; r <= h.revision; r++ {
			s.push(h.history[int((r-1)%uint64(h.opts.History))])
		}
		s.limit = max(h.opts.Pending, len(s.queued))
		s.mark(h.revision, h.origin)
	}
	h.subs[s] = struct{}{}
	return s, nil
}

// Subscription is one reader's view. Only one goroutine may call Next.
type Subscription[K comparable, V any] struct {
	hub     *Hub[K, V]
	limit   int
	fresh   bool           // the subscription began with a listing
	listing []change[K, V] // unread rest of the listing; owned by the reader
	wake    chan struct{}  // holds a token when there may be something to read
	ended   chan struct{}  // closed when err is set

	mu       sync.Mutex
	head     *entry[K, V]       // guarded by mu; oldest
	tail     *entry[K, V]       // guarded by mu
	queued   map[K]*entry[K, V] // guarded by mu; without bookmarks
	err      error              // guarded by mu
	reached  *entry[K, V]       // guarded by mu; the queued bookmark of the last Reach
	position uint64             // guarded by mu; the reader has read everything up to this revision
	origin   Origin             // guarded by mu; the reader has read everything up to this origin
	marked   bool               // guarded by mu; the bookmark after the listing was read
}

type entry[K comparable, V any] struct {
	change     change[K, V]
	origin     Origin // only for a bookmark
	prev, next *entry[K, V]
}

// push merges a change into the queue and reports whether the reader is still within its limit.
func (s *Subscription[K, V]) push(c change[K, V]) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return false
	}
	if e, ok := s.queued[c.key]; ok {
		if e.change.kind == Upsert && c.kind == Upsert {
			// The entry keeps its place in the queue, before keys that were added later. The token of that
			// place is older than the value; a reader that resumes there receives the value again.
			e.change.value = c.value
			return true
		}
		s.unlink(e)
	} else if len(s.queued) >= s.limit {
		s.failLocked(ErrSlow)
		return false
	}
	e := &entry[K, V]{change: c}
	s.queued[c.key] = e
	s.link(e)
	s.notify()
	return true
}

// mark queues a bookmark.
func (s *Subscription[K, V]) mark(revision uint64, origin Origin) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.link(&entry[K, V]{change: change[K, V]{kind: Bookmark, revision: revision}, origin: origin})
	s.notify()
}

// reach queues a bookmark; it replaces a bookmark of an earlier call that is still queued.
func (s *Subscription[K, V]) reach(revision uint64, origin Origin) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return
	}
	if s.reached != nil {
		s.unlink(s.reached)
	}
	s.reached = &entry[K, V]{change: change[K, V]{kind: Bookmark, revision: revision}, origin: origin}
	s.link(s.reached)
	s.notify()
}

func (s *Subscription[K, V]) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.failLocked(err)
}

func (s *Subscription[K, V]) failLocked(err error) {
	if s.err == nil {
		s.err = err
		close(s.ended)
	}
	s.head, s.tail, s.queued, s.reached = nil, nil, nil, nil
	s.notify()
}

func (s *Subscription[K, V]) notify() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

func (s *Subscription[K, V]) link(e *entry[K, V]) {
	if e.prev = s.tail; e.prev != nil {
		e.prev.next = e
	} else {
		s.head = e
	}
	s.tail = e
}

func (s *Subscription[K, V]) unlink(e *entry[K, V]) {
	if e.prev != nil {
		e.prev.next = e.next
	} else {
		s.head = e.next
	}
	if e.next != nil {
		e.next.prev = e.prev
	} else {
		s.tail = e.prev
	}
	e.prev, e.next = nil, nil
}

// Next returns the next event, and waits for it until ctx ends. Errors other than the context's are
// final: ErrSlow, ErrClosed.
func (s *Subscription[K, V]) Next(ctx context.Context) (Event[K, V], error) {
	for {
		if e, ok, err := s.take(); ok || err != nil {
			return e, err
		}
		select {
		case <-s.wake:
		case <-ctx.Done():
			return Event[K, V]{}, ctx.Err()
		}
	}
}

func (s *Subscription[K, V]) take() (Event[K, V], bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		s.listing = nil
		return Event[K, V]{}, false, s.err
	}
	if len(s.listing) > 0 {
		c := s.listing[0]
		s.listing[0] = change[K, V]{} // release the value
		s.listing = s.listing[1:]
		return Event[K, V]{Kind: Upsert, Key: c.key, Value: c.value}, true, nil
	}
	e := s.head
	if e == nil {
		return Event[K, V]{}, false, nil
	}
	s.unlink(e)
	c := e.change
	s.position = c.revision
	out := Event[K, V]{Kind: c.kind, Key: c.key, Value: c.value}
	if c.kind == Bookmark {
		out.SnapshotComplete = s.fresh && !s.marked
		s.marked, s.origin = true, e.origin
		if s.reached == e {
			s.reached = nil
		}
	} else {
		delete(s.queued, c.key)
	}
	if s.marked || !s.fresh {
		out.Token, out.Revision, out.Incarnation = s.hub.token(s.position), s.position, s.hub.Incarnation()
		out.Origin = s.origin
	}
	return out, true, nil
}

// Ended is closed when the subscription ends, even if its reader does not call Next. Err then
// returns the reason.
func (s *Subscription[K, V]) Ended() <-chan struct{} { return s.ended }

// Err returns why the subscription ended, ErrSlow or ErrClosed; nil while it is open.
func (s *Subscription[K, V]) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// Token returns the token after the last event that Next returned; nil until the listing is
// complete.
func (s *Subscription[K, V]) Token() []byte {
	return s.bookmark().Token
}

// bookmark returns a bookmark after the last event, without a token until the listing is complete.
func (s *Subscription[K, V]) bookmark() Event[K, V] {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := Event[K, V]{Kind: Bookmark}
	if s.marked || !s.fresh {
		out.Token, out.Revision = s.hub.token(s.position), s.position
		out.Incarnation, out.Origin = s.hub.Incarnation(), s.origin
	}
	return out
}

// Close frees the subscription. Next then returns ErrClosed.
func (s *Subscription[K, V]) Close() {
	s.hub.mu.Lock()
	delete(s.hub.subs, s)
	s.hub.mu.Unlock()
	s.fail(ErrClosed)
}
