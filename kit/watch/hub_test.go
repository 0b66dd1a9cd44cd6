// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package watch

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// replica is a reader's copy of the set; it checks the contract on each event.
type replica struct {
	state    map[string]int
	listed   map[string]bool // not nil during a listing
	complete bool
	token    []byte
}

func (r *replica) apply(e Event[string, int]) error {
	switch e.Kind {
	case Upsert:
		if r.state == nil {
			r.state = map[string]int{}
		}
		r.state[e.Key] = e.Value
		if r.listed != nil {
			r.listed[e.Key] = true
		}
	case Delete:
		delete(r.state, e.Key)
	case Bookmark:
		if e.Token == nil {
			return errors.New("a bookmark without a token")
		}
		if e.SnapshotComplete {
			if r.listed == nil {
				return errors.New("the end of a listing without its beginning")
			}
			for k := range r.state {
				if !r.listed[k] {
					delete(r.state, k) // keys that were not listed do not exist
				}
			}
			r.listed, r.complete = nil, true
		}
	}
	if (e.Token == nil) != (r.listed != nil) {
		return fmt.Errorf("token %x while listing is %v", e.Token, r.listed != nil)
	}
	if e.Token != nil && r.token != nil && bytes.Equal(e.Token[:8], r.token[:8]) && bytes.Compare(e.Token, r.token) < 0 {
		return fmt.Errorf("token %x after %x", e.Token, r.token)
	}
	r.token = e.Token
	return nil
}

// drain reads all available events.
func drain(t *testing.T, s *Subscription[string, int]) []Event[string, int] {
	t.Helper()
	var events []Event[string, int]
	for {
		e, ok, err := s.take()
		if err != nil {
			t.Fatal(err)
		}
		if !ok {
			return events
		}
		events = append(events, e)
	}
}

func subscribe(t *testing.T, h *Hub[string, int], token []byte) *Subscription[string, int] {
	t.Helper()
	s, err := h.Subscribe(token)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// brief formats events as "a=1 -b | a=2", with "|" for the end of a listing and "." for any other
// bookmark.
func brief(events []Event[string, int]) string {
	var s string
	for _, e := range events {
		if s != "" {
			s += " "
		}
		switch {
		case e.Kind == Upsert:
			s += fmt.Sprintf("%s=%d", e.Key, e.Value)
		case e.Kind == Delete:
			s += "-" + e.Key
		case e.SnapshotComplete:
			s += "|"
		default:
			s += "."
		}
	}
	return s
}

func wantEvents(t *testing.T, s *Subscription[string, int], want string) []Event[string, int] {
	t.Helper()
	events := drain(t, s)
	if got := brief(events); got != want {
		t.Fatalf("events are %q, want %q", got, want)
	}
	return events
}

func TestReaderGetsListingBookmarkAndChangesInOrder(t *testing.T) {
	h := NewHub[string, int](Options[int]{})
	h.Upsert("b", 1)
	h.Upsert("a", 2)
	h.Upsert("b", 3)
	h.Upsert("x", 1)
	h.Delete("x")
	s := subscribe(t, h, nil)
	wantEvents(t, s, "b=3 a=2 |") // in the order in which the keys were added
	h.Upsert("c", 4)
	h.Delete("a")
	if h.Delete("a") {
		t.Error("a key was deleted twice")
	}
	wantEvents(t, s, "c=4 -a")
	if v, ok := h.Get("b"); !ok || v != 3 || h.Len() != 2 || !reflect.DeepEqual(h.Keys(), []string{"b", "c"}) {
		t.Errorf("the hub has b=%d, %v, keys %v", v, ok, h.Keys())
	}
}

func TestEmptyHubSaysThatThisWasEverything(t *testing.T) {
	wantEvents(t, subscribe(t, NewHub[string, int](Options[int]{}), nil), "|")
}

func TestMergedChangesKeepAnOrderThatDependentsCanRelyOn(t *testing.T) {
	h := NewHub[string, int](Options[int]{})
	s := subscribe(t, h, nil)
	wantEvents(t, s, "|")
	h.Upsert("base", 1)
	h.Upsert("user", 1) // depends on base
	h.Upsert("base", 2)
	wantEvents(t, s, "base=2 user=1")
	h.Upsert("base", 3)
	h.Delete("user")
	h.Delete("base")
	wantEvents(t, s, "-user -base")
	h.Upsert("base", 4)
	wantEvents(t, s, "base=4")
	h.Delete("base")
	h.Upsert("other", 1)
	h.Upsert("base", 5)
	wantEvents(t, s, "other=1 base=5")
}

func TestResumedReaderGetsWhatItMissedAndABookmark(t *testing.T) {
	h := NewHub[string, int](Options[int]{})
	h.Upsert("a", 1)
	s := subscribe(t, h, nil)
	events := wantEvents(t, s, "a=1 |")
	token := events[1].Token
	s.Close()
	h.Upsert("b", 1)
	h.Upsert("a", 2)
	h.Delete("b")
	s = subscribe(t, h, token)
	events = wantEvents(t, s, "a=2 -b .")
	// A reader can resume from each of these tokens without losing merged changes.
	wantEvents(t, subscribe(t, h, events[0].Token), "-b .")
	wantEvents(t, subscribe(t, h, events[2].Token), ".")
	if !bytes.Equal(s.Token(), events[2].Token) {
		t.Error("Token differs from the token of the last event")
	}
}

func TestTokensThatCannotBeContinuedFromAreRefused(t *testing.T) {
	h := NewHub[string, int](Options[int]{History: 4})
	last := func(h *Hub[string, int]) []byte {
		e := drain(t, subscribe(t, h, nil))
		return e[len(e)-1].Token
	}
	old := last(h)
	for i := range 4 {
		h.Upsert("k", i)
	}
	wantEvents(t, subscribe(t, h, old), "k=3 .") // just within the history
	h.Upsert("k", 9)
	other := NewHub[string, int](Options[int]{})
	future := bytes.Clone(old)
	future[15] = 200
	for name, token := range map[string][]byte{
		"too old": old, "of another run": last(other), "from the future": future, "short": {1, 2}, "long": make([]byte, 64),
	} {
		_, err := h.Subscribe(token)
		if !errors.Is(err, ErrExpired) || status.Code(Status(err)) != codes.OutOfRange || !rpcerr.Has(Status(err), rpcerr.TokenExpired) {
			t.Errorf("token %s: %v, want ErrExpired and OUT_OF_RANGE", name, err)
		}
	}
}

// TestSlowReaderIsDisconnectedAndOthersAreNot proves INV-41.
func TestSlowReaderIsDisconnectedAndOthersAreNot(t *testing.T) {
	h := NewHub[string, int](Options[int]{Pending: 3})
	slow, fast := subscribe(t, h, nil), subscribe(t, h, nil)
	events := wantEvents(t, slow, "|")
	wantEvents(t, fast, "|")
	for i := range 3 {
		for range 5 { // changes of one key count once
			h.Upsert(fmt.Sprint("k", i), i)
		}
	}
	wantEvents(t, fast, "k0=0 k1=1 k2=2")
	h.Upsert("k3", 3)
	if _, err := slow.Next(t.Context()); !errors.Is(err, ErrSlow) || status.Code(Status(err)) != codes.ResourceExhausted || !rpcerr.Has(Status(err), rpcerr.ReaderTooSlow) {
		t.Fatalf("slow reader: %v, want ErrSlow and RESOURCE_EXHAUSTED", err)
	}
	wantEvents(t, fast, "k3=3")
	if h.Readers() != 1 {
		t.Errorf("%d readers, want the fast one", h.Readers())
	}
	// A replay longer than the limit does not count as slow, but later changes are limited.
	resumed := subscribe(t, h, events[0].Token)
	wantEvents(t, resumed, "k0=0 k1=1 k2=2 k3=3 .")
	for i := range 5 {
		h.Upsert(fmt.Sprint("n", i), i)
	}
	if _, err := resumed.Next(t.Context()); !errors.Is(err, ErrSlow) {
		t.Errorf("resumed reader: %v, want ErrSlow", err)
	}
}

func TestLoadingHubHoldsBackTheBookmark(t *testing.T) {
	h := NewHub[string, int](Options[int]{Loading: true})
	h.Upsert("a", 1)
	s := subscribe(t, h, nil)
	wantEvents(t, s, "a=1")
	h.Upsert("b", 1)
	events := wantEvents(t, s, "b=1")
	if events[0].Token != nil || s.Token() != nil {
		t.Error("there is a token before the listing is complete")
	}
	h.Delete("a")
	h.Loaded()
	h.Loaded()
	events = wantEvents(t, s, "-a |")
	h.Upsert("c", 1)
	wantEvents(t, s, "c=1")
	wantEvents(t, subscribe(t, h, events[1].Token), "c=1 .")
}

func TestReadersLearnHowFarTheStoreIsRead(t *testing.T) {
	h := NewHub[string, int](Options[int]{Loading: true})
	h.Upsert("a", 1)
	h.Reach(7, 10)
	s := subscribe(t, h, nil)
	h.Reach(7, 11)
	h.Loaded()
	want := func(what string, s *Subscription[string, int], brief string, origins ...Origin) {
		t.Helper()
		for i, e := range wantEvents(t, s, brief) {
			if e.Origin != origins[i] {
				t.Errorf("%s: event %d has %v, want %v", what, i, e.Origin, origins[i])
			}
		}
	}
	at := func(revision int64) Origin { return Origin{Store: 7, Revision: revision} }
	want("listing", s, "a=1 |", Origin{}, at(11))
	h.Upsert("a", 2)
	h.Reach(7, 12)
	h.Upsert("b", 1)
	h.Upsert("a", 3) // merged into the first change
	h.Reach(7, 13)
	h.Reach(7, 13)
	want("two changes", s, "a=3 b=1 .", at(11), at(11), at(13))
	token := s.Token()
	h.Upsert("c", 1)
	want("the next change", s, "c=1", at(13))
	h.Reach(8, 2) // the store was restored to an older state
	want("another store", s, ".", Origin{Store: 8, Revision: 2})
	want("resumed", subscribe(t, h, token), "c=1 .", Origin{}, Origin{Store: 8, Revision: 2})
	if got := h.Origin(); got != (Origin{Store: 8, Revision: 2}) {
		t.Errorf("the hub is at %v", got)
	}
}

// TestReadersAreNotWokenByWhatDoesNotConcernThem: store revisions that do not change the set are sent to the readers
// later, merged.
func TestReadersAreNotWokenByWhatDoesNotConcernThem(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := NewHub[string, int](Options[int]{Quiet: time.Second})
		s := subscribe(t, h, nil)
		wantEvents(t, s, "|")
		want := func(what, brief string, last Origin) {
			t.Helper()
			synctest.Wait()
			events := wantEvents(t, s, brief)
			if len(events) > 0 && events[len(events)-1].Origin != last {
				t.Errorf("%s: %v, want %v", what, events[len(events)-1].Origin, last)
			}
		}
		h.Reach(7, 10)
		want("the first", ".", Origin{7, 10})
		h.Reach(7, 11)
		time.Sleep(time.Second - 1)
		h.Reach(7, 12)
		want("nothing changed", "", Origin{})
		if got := h.Origin(); got != (Origin{7, 12}) {
			t.Errorf("the hub is at %v", got)
		}
		time.Sleep(time.Nanosecond)
		want("a second later", ".", Origin{7, 12})
		h.Reach(7, 13)
		h.Upsert("a", 1)
		h.Reach(7, 14)
		want("a change", "a=1 .", Origin{7, 14})
		time.Sleep(time.Minute)
		want("nothing after it", "", Origin{})
		h.Reach(7, 3)
		want("an older state", ".", Origin{7, 3})
		h.Reach(8, 20)
		want("another store", ".", Origin{8, 20})
		h.Reach(8, 21)
		h.Close()
		time.Sleep(time.Minute)
	})
}

func TestEqualValueIsNoChange(t *testing.T) {
	h := NewHub[string, int](Options[int]{Equal: func(a, b int) bool { return a == b }})
	s := subscribe(t, h, nil)
	r1 := h.Upsert("a", 1)
	r2 := h.Upsert("a", 1)
	if r1 != r2 || h.Revision() != 1 {
		t.Errorf("revisions %d, %d, hub %d; want 1", r1, r2, h.Revision())
	}
	wantEvents(t, s, "| a=1")
}

func TestClosedHubEndsReadersAndRefusesNewOnes(t *testing.T) {
	h := NewHub[string, int](Options[int]{})
	s := subscribe(t, h, nil)
	wantEvents(t, s, "|")
	got := make(chan error)
	go func() { _, err := s.Next(context.Background()); got <- err }()
	h.Close()
	if err := <-got; !errors.Is(err, ErrClosed) || status.Code(Status(err)) != codes.Unavailable || !rpcerr.Has(Status(err), rpcerr.ShuttingDown) {
		t.Errorf("reader got %v, want ErrClosed and UNAVAILABLE", err)
	}
	if _, err := h.Subscribe(nil); !errors.Is(err, ErrClosed) {
		t.Errorf("Subscribe: %v, want ErrClosed", err)
	}
	h.Upsert("a", 1)
	if h.Len() != 0 {
		t.Error("a closed hub took a change")
	}
	s.Close()
	s.Close()
}

// TestEveryReadersReplicaEndsEqualToTheHub: readers of every kind follow a random history, with random pauses,
// interruptions and resumptions. At the end the state of each must equal the hub's.
func TestEveryReadersReplicaEndsEqualToTheHub(t *testing.T) {
	for seed := range uint64(300) {
		rng := rand.New(rand.NewPCG(seed, 1))
		loading := rng.IntN(3) == 0
		h := NewHub[string, int](Options[int]{History: 1 + rng.IntN(40), Pending: 1 + rng.IntN(12), Loading: loading})
		truth := map[string]int{}
		type reader struct {
			replica
			sub *Subscription[string, int]
		}
		readers := make([]*reader, 4)
		for i := range readers {
			readers[i] = &reader{}
		}
		open := func(r *reader) {
			sub, err := h.Subscribe(r.token)
			if errors.Is(err, ErrExpired) {
				r.token = nil
				sub, err = h.Subscribe(nil)
			}
			if err != nil {
				t.Fatal(err)
			}
			if r.sub = sub; r.token == nil {
				r.listed = map[string]bool{}
			}
		}
		read := func(r *reader, n int) {
			for ; n > 0; n-- {
				if r.sub == nil {
					open(r)
				}
				e, ok, err := r.sub.take()
				if errors.Is(err, ErrSlow) {
					r.sub.Close()
					r.sub = nil
					continue
				}
				if err != nil {
					t.Fatal(err)
				}
				if !ok {
					return
				}
				if err := r.apply(e); err != nil {
					t.Fatalf("seed %d: %v", seed, err)
				}
			}
		}
		for step := range 400 {
			key := fmt.Sprint("k", rng.IntN(15))
			switch n := rng.IntN(20); {
			case n < 8:
				h.Upsert(key, step)
				truth[key] = step
			case n < 12:
				h.Delete(key)
				delete(truth, key)
			case n < 18:
				read(readers[rng.IntN(len(readers))], rng.IntN(12))
			case n == 18:
				if r := readers[rng.IntN(len(readers))]; r.sub != nil {
					r.sub.Close()
					r.sub = nil
				}
			default:
				if step > 200 {
					h.Loaded()
				}
			}
		}
		h.Loaded()
		for i, r := range readers {
			read(r, 1<<20)
			if r.sub != nil {
				r.sub.Close()
			}
			if !r.complete || r.listed != nil || !maps.Equal(r.state, truth) {
				t.Fatalf("seed %d, reader %d: has %v (complete %v), want %v", seed, i, r.state, r.complete, truth)
			}
		}
		if h.Readers() != 0 {
			t.Fatalf("seed %d: %d subscriptions leaked", seed, h.Readers())
		}
	}
}

func TestConcurrentReadersFollowAConcurrentProducer(t *testing.T) {
	h := NewHub[string, int](Options[int]{Pending: 64})
	const changes = 4000
	var wg sync.WaitGroup
	for range 6 {
		wg.Go(func() {
			r := replica{}
			var sub *Subscription[string, int]
			for r.state["end"] == 0 {
				if sub == nil {
					var err error
					if sub, err = h.Subscribe(r.token); errors.Is(err, ErrExpired) {
						r.token = nil
						sub, err = h.Subscribe(nil)
					}
					if err != nil {
						t.Error(err)
						return
					}
					if r.token == nil {
						r.listed = map[string]bool{}
					}
				}
				e, err := sub.Next(t.Context())
				if errors.Is(err, ErrSlow) {
					sub.Close()
					sub = nil
					continue
				}
				if err == nil {
					err = r.apply(e)
				}
				if err != nil {
					t.Error(err)
					sub.Close()
					return
				}
			}
			// "end" was the last change, so nothing else may be missing. A merged change keeps its earlier
			// place in the queue, but "end" was not queued before, so it is last.
			for i := range 100 {
				if want := changes - 100 + i; r.state[fmt.Sprint("k", want%100)] != want {
					t.Errorf("k%d is %d, want %d", want%100, r.state[fmt.Sprint("k", want%100)], want)
				}
			}
			sub.Close()
		})
	}
	for i := range changes {
		h.Upsert(fmt.Sprint("k", i%100), i)
	}
	h.Upsert("end", 1)
	wg.Wait()
	if h.Readers() != 0 {
		t.Errorf("%d subscriptions leaked", h.Readers())
	}
}

func TestServeSendsBookmarksWhileIdleAndEndsWithTheContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := NewHub[string, int](Options[int]{})
		h.Upsert("a", 1)
		ctx, cancel := context.WithCancel(t.Context())
		events := make(chan Event[string, int])
		done := make(chan error, 1)
		go func() {
			done <- Serve(ctx, h, nil, func(e Event[string, int]) error { events <- e; return nil })
		}()
		first, second := <-events, <-events
		idle := <-events // synctest advances the time
		if brief([]Event[string, int]{first, second, idle}) != "a=1 | ." || !bytes.Equal(idle.Token, second.Token) {
			t.Errorf("got %v, %v, %v", first, second, idle)
		}
		cancel()
		if err := <-done; status.Code(err) != codes.Canceled {
			t.Errorf("Serve ended with %v, want CANCELED", err)
		}
		if h.Readers() != 0 {
			t.Error("the subscription leaked")
		}
		boom := errors.New("peer ended")
		if err := Serve(t.Context(), h, nil, func(Event[string, int]) error { return boom }); !errors.Is(err, boom) {
			t.Errorf("Serve returned %v, want what send said", err)
		}
		if err := Serve(t.Context(), h, []byte("x"), nil); status.Code(err) != codes.OutOfRange {
			t.Errorf("Serve with a bad token returned %v", err)
		}
	})
}

func TestStatusLeavesOtherErrorsAlone(t *testing.T) {
	boom := errors.New("x")
	if Status(nil) != nil || Status(boom) != boom || status.Code(Status(context.DeadlineExceeded)) != codes.DeadlineExceeded { //nolint:errorlint // the very same error
		t.Error("Status changed what is not its own")
	}
}

// BenchmarkUpsertWithOneReader: the producer's cost must not depend on the number of keys.
func BenchmarkUpsertWithOneReader(b *testing.B) {
	for _, keys := range []int{1_000, 65_000} {
		b.Run(fmt.Sprint(keys), func(b *testing.B) {
			h := NewHub[int, int](Options[int]{})
			for i := range keys {
				h.Upsert(i, 0)
			}
			s, err := h.Subscribe(nil)
			if err != nil {
				b.Fatal(err)
			}
			defer s.Close()
			for range keys + 1 {
				if _, err := s.Next(b.Context()); err != nil {
					b.Fatal(err)
				}
			}
			i := 0
			for b.Loop() {
				h.Upsert(i%keys, i)
				i++
				if _, err := s.Next(b.Context()); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func TestChangedTellsOfTheNextChangeAndOfNoneBefore(t *testing.T) {
	h := NewHub[string, int](Options[int]{Equal: func(a, b int) bool { return a == b }})
	told := func(changed <-chan struct{}) bool {
		select {
		case <-changed:
			return true
		default:
			return false
		}
	}
	h.Upsert("a", 1)
	first, second := h.Changed(), h.Changed()
	h.Upsert("a", 1)
	if told(first) {
		t.Error("notified of an equal value, which is not a change")
	}
	h.Upsert("a", 2)
	if !told(first) || !told(second) {
		t.Error("not notified of a change")
	}
	deleted := h.Changed()
	if told(deleted) {
		t.Error("notified of a change before the call")
	}
	if h.Delete("a"); !told(deleted) {
		t.Error("not notified of a deletion")
	}
}
