// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package watch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/rpc/client"
)

// remote is a Source that reads a hub, as a service does.
type remote struct {
	hub atomic.Pointer[Hub[string, int]]
	// cut is called before each event, numbered from 0 in each watch. If it returns an error, the
	// watch ends with it. May be nil.
	cut    func(watch, event int) error
	opened []time.Time // start of each watch
	tokens []bool      // whether each watch continued from a token
}

func remoteOf(h *Hub[string, int], cut func(watch, event int) error) *remote {
	r := &remote{cut: cut}
	r.hub.Store(h)
	return r
}

func (r *remote) Watch(ctx context.Context, token []byte) iter.Seq2[Event[string, int], error] {
	return func(yield func(Event[string, int], error) bool) {
		turn.Load()
		r.opened, r.tokens = append(r.opened, time.Now()), append(r.tokens, token != nil)
		n := len(r.opened) - 1
		s, err := r.hub.Load().Subscribe(token)
		if err != nil {
			yield(Event[string, int]{}, err)
			return
		}
		defer s.Close()
		for i := 0; ; i++ {
			if r.cut != nil {
				err = r.cut(n, i)
			}
			var e Event[string, int]
			if err == nil {
				e, err = s.Next(ctx)
			}
			if !yield(e, err) || err != nil {
				return
			}
		}
	}
}

// keeper is a Sink that keeps the set and checks the contract.
type keeper struct {
	set       map[string]int
	applied   int // calls of Apply with changes
	completed int
	failures  []string // an empty text where a failure was cleared
	revision  uint64   // valid with incarnation
	run       string
	origin    Origin                  // never decreases
	fault     func(call string) error // called before each call; may be nil
}

func (k *keeper) hit(call string) error {
	turn.Load()
	if k.fault == nil {
		return nil
	}
	return k.fault(call)
}

func (k *keeper) Apply(_ context.Context, c Changes[string, int]) error {
	if err := k.hit("apply"); err != nil {
		return err
	}
	for key := range c.Deletes {
		if _, ok := c.Upserts[key]; ok {
			return fmt.Errorf("%s is set and deleted by one call", key)
		}
		delete(k.set, key)
	}
	maps.Copy(k.set, c.Upserts)
	if len(c.Upserts)+len(c.Deletes) > 0 {
		k.applied++
	}
	if c.Revision != 0 && c.Origin.Revision < k.origin.Revision {
		return fmt.Errorf("the store went from %v back to %v", k.origin, c.Origin)
	}
	k.revision, k.run = c.Revision, c.Incarnation
	if c.Revision != 0 {
		k.origin = c.Origin
	}
	return nil
}

func (k *keeper) Complete(_ context.Context, listed map[string]struct{}) error {
	if err := k.hit("complete"); err != nil {
		return err
	}
	k.completed++
	maps.DeleteFunc(k.set, func(key string, _ int) bool { _, ok := listed[key]; return !ok })
	for key := range listed {
		if _, ok := k.set[key]; !ok {
			return fmt.Errorf("%s is listed and was never set", key)
		}
	}
	return nil
}

func (k *keeper) Failed(_ context.Context, why error) error {
	if err := k.hit("failed"); err != nil {
		return err
	}
	text := ""
	if why != nil {
		text = why.Error()
	}
	k.failures = append(k.failures, text)
	return nil
}

// want fails the test unless the keeper has the content and the revision of the hub.
func (k *keeper) want(t *testing.T, h *Hub[string, int], completed int) {
	t.Helper()
	k.wantSet(t, h, completed)
	if k.origin != h.Origin() {
		t.Errorf("at %v of the store, want %v", k.origin, h.Origin())
	}
	if k.revision != h.Revision() || k.run != string(h.Incarnation()) {
		t.Errorf("at revision %d of %x, want %d of %x", k.revision, k.run, h.Revision(), h.Incarnation())
	}
}

// wantSet is want without the revision: if the hub merged changes, the sink only learns the
// revision with the next bookmark.
func (k *keeper) wantSet(t *testing.T, h *Hub[string, int], completed int) {
	t.Helper()
	want := map[string]int{}
	for _, key := range h.Keys() {
		want[key], _ = h.Get(key)
	}
	if !maps.Equal(k.set, want) {
		t.Errorf("the sink has %v, want %v", k.set, want)
	}
	if k.completed != completed {
		t.Errorf("%d complete listings, want %d", k.completed, completed)
	}
}

// turn orders the test's reads before the follower's later writes for the race detector, which does
// not treat the passing of time as synchronisation.
var turn atomic.Int64

// after lets fake time pass, including everything that happens in it.
func after(d time.Duration) {
	turn.Add(1)
	time.Sleep(d)
	synctest.Wait()
}

var followOptions = FollowOptions{Max: 100, RetryMin: 50 * time.Millisecond, RetryMax: 2 * time.Second, Log: log.Discard()}

// followed runs Follow while f runs.
func followed(t *testing.T, r Source[string, int], k *keeper, f func()) {
	t.Helper()
	if k.set == nil {
		k.set = map[string]int{}
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- Follow(ctx, r, k, followOptions) }()
	synctest.Wait()
	f()
	cancel()
	if err := <-ended; err != nil {
		t.Errorf("follow ended with %v, want nil after its context", err)
	}
}

// hubOf returns a hub with these keys; a key's value is its position.
func hubOf(o Options[int], keys ...string) *Hub[string, int] {
	h := NewHub[string](o)
	for i, k := range keys {
		h.Upsert(k, i)
	}
	return h
}

var errDead = errors.New("connection lost")

func TestFollowTakesTheListingAndEveryChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := hubOf(Options[int]{}, "a", "b")
		k := &keeper{set: map[string]int{"of an earlier run": 9}}
		followed(t, remoteOf(h, nil), k, func() {
			k.want(t, h, 1)
			h.Upsert("c", 3)
			h.Delete("a")
			h.Upsert("b", 4)
			synctest.Wait()
			k.want(t, h, 1)
			if len(k.failures) > 0 {
				t.Errorf("failures %q, want none", k.failures)
			}
			for i := range 20 * followBatch {
				h.Upsert(fmt.Sprint("k", i%50), i)
			}
			synctest.Wait()
			k.wantSet(t, h, 1)
		})
	})
}

func TestFollowContinuesAfterTheSourceDiedAtAnyEvent(t *testing.T) {
	// Three keys, the bookmark and two changes: the watch can fail at seven positions, in the first
	// watch and again in the second.
	for first := range 7 {
		for second := range 5 {
			t.Run(fmt.Sprintf("events %d and %d", first, second), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					h := hubOf(Options[int]{}, "a", "b", "stays")
					r := remoteOf(h, nil)
					r.cut = func(watch, event int) error {
						if watch == 0 && event == first || watch == 1 && event == second {
							return errDead
						}
						return nil
					}
					k := &keeper{set: map[string]int{"stays": 2}}
					k.fault = func(string) error {
						if _, ok := k.set["stays"]; !ok {
							t.Error("a key that the source always had was deleted")
						}
						return nil
					}
					followed(t, r, k, func() {
						h.Upsert("c", 4) // while the watch is open, or interrupted
						h.Delete("a")
						h.Reach(1, 20)
						after(time.Minute)
						h.Upsert("d", 5)
						h.Delete("b")
						h.Reach(1, 30)
						after(time.Minute)
						k.want(t, h, 1)
						if n := len(k.failures); n > 0 && k.completed == 1 && first > 3 && k.failures[n-1] != "" {
							t.Errorf("failures %q, want the last taken back", k.failures)
						}
					})
					if len(r.tokens) > 1 && r.tokens[1] != (first > 3) {
						t.Errorf("the second watch continues: %t, and the first had its bookmark: %t", r.tokens[1], first > 3)
					}
				})
			})
		}
	}
}

func TestFollowListsAgainWhenTheTokenIsTooOld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := hubOf(Options[int]{History: 2}, "a", "b", "c")
		var away atomic.Bool
		r := remoteOf(h, func(_, event int) error {
			if away.Load() {
				return errDead
			}
			return nil
		})
		k := &keeper{}
		followed(t, r, k, func() {
			k.want(t, h, 1)
			away.Store(true)
			for i := range 10 {
				h.Upsert("d", i) // the first change is read, and then the watch ends
			}
			h.Delete("a")
			after(10 * time.Second)
			if _, ok := k.set["a"]; !ok || k.completed != 1 {
				t.Errorf("%v after %d listings while the source is unavailable, want no change", k.set, k.completed)
			}
			failures := len(k.failures)
			away.Store(false)
			after(10 * time.Second)
			k.want(t, h, 2)
			if len(k.failures) != failures {
				t.Errorf("failures %q, want none about the token", k.failures[failures:])
			}
		})
		if i := slices.Index(r.tokens[1:], false); i < 0 {
			t.Errorf("tokens %v, want a watch that lists", r.tokens)
		}
	})
}

func TestFollowListsAgainAfterARestartOfTheSource(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := remoteOf(hubOf(Options[int]{}, "a", "b"), nil)
		k := &keeper{}
		followed(t, r, k, func() {
			old, fresh := r.hub.Load(), hubOf(Options[int]{Loading: true}, "b")
			// The new run has not loaded its keys yet, which must not cause deletions.
			r.hub.Store(fresh)
			old.Close()
			after(time.Minute)
			if _, ok := k.set["a"]; !ok || k.completed != 1 || k.revision != 0 {
				t.Errorf("%v after %d listings, at revision %d, while the source loads; want a, one, 0", k.set, k.completed, k.revision)
			}
			fresh.Loaded()
			synctest.Wait()
			k.want(t, fresh, 2)
		})
	})
}

// script is a Source that yields these events, and then blocks.
type script []Event[string, int]

func (s script) Watch(ctx context.Context, _ []byte) iter.Seq2[Event[string, int], error] {
	return func(yield func(Event[string, int], error) bool) {
		for _, e := range s {
			if !yield(e, nil) {
				return
			}
		}
		<-ctx.Done()
	}
}

func TestFollowTakesDuplicatesAndDeletionsOfUnknownKeys(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		up := func(k string, v int) Event[string, int] {
			return Event[string, int]{Kind: Upsert, Key: k, Value: v}
		}
		end := Event[string, int]{Kind: Bookmark, SnapshotComplete: true, Token: []byte("t"), Revision: 7, Incarnation: []byte("run")}
		s := script{
			up("a", 1), up("a", 1), up("b", 1),
			{Kind: Delete, Key: "never"},
			up("a", 2),
			{Kind: Delete, Key: "b"},
			end,
			end, up("a", 2),
			{Kind: Delete, Key: "c"},
			up("c", 3),
			{Kind: Delete, Key: "c"},
			{Kind: Delete, Key: "c"},
			up("d", 4), end,
		}
		k := &keeper{set: map[string]int{"b": 0, "c": 0}}
		followed(t, s, k, func() {
			if want := map[string]int{"a": 2, "d": 4}; !maps.Equal(k.set, want) || k.completed != 1 || k.revision != 7 || k.run != "run" {
				t.Errorf("%v after %d listings, at %d of %q; want %v, 1, 7 of run", k.set, k.completed, k.revision, k.run, want)
			}
		})
	})
}

func TestFollowRefusesASetOverItsBound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := hubOf(Options[int]{})
		for i := range followOptions.Max + 1 {
			h.Upsert(fmt.Sprint(i), i)
		}
		r := remoteOf(h, nil)
		k := &keeper{set: map[string]int{"had": 1}}
		followed(t, r, k, func() {
			after(time.Minute)
			if n := len(k.failures); k.completed != 0 || n == 0 || !strings.Contains(k.failures[n-1], "more than 100 keys") {
				t.Errorf("%d listings, failures %q; want none, and the bound", k.completed, k.failures)
			}
			if _, ok := k.set["had"]; !ok {
				t.Error("the sink has lost its content")
			}
			// A listing is expensive, so it must not be repeated many times a second.
			if n := len(r.opened); n > 60 {
				t.Errorf("%d watches in a minute", n)
			}
			h.Delete("0")
			after(10 * time.Second)
			k.want(t, h, 1)

			h.Upsert("one too many", 1) // the set was complete before
			after(10 * time.Second)
			if k.completed != 1 || k.failures[len(k.failures)-1] == "" {
				t.Errorf("%d listings, failures %q; want 1, and the bound", k.completed, k.failures)
			}
			h.Delete("1")
			after(10 * time.Second)
			k.want(t, h, 2)
		})
	})
}

func TestFollowPausesLongerAfterEachFailureAndNeverAllAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var dead atomic.Bool
		dead.Store(true)
		h := hubOf(Options[int]{}, "a")
		r := remoteOf(h, nil)
		r.cut = func(int, int) error {
			if dead.Load() {
				return errDead
			}
			return nil
		}
		k := &keeper{}
		var pauses []time.Duration
		followed(t, r, k, func() {
			after(time.Minute)
			want := followOptions.RetryMin
			for i := range len(r.opened) - 1 {
				pause := r.opened[i+1].Sub(r.opened[i])
				pauses = append(pauses, pause)
				if pause < want/2 || pause > want {
					t.Errorf("pause %d is %v, want between %v and %v", i, pause, want/2, want)
				}
				want = min(2*want, followOptions.RetryMax)
			}
			slices.Sort(pauses)
			if n := len(slices.Compact(pauses)); n < 10 {
				t.Errorf("%d different pauses, want one for nearly each of %d", n, len(r.opened))
			}
			dead.Store(false)
			after(time.Minute)
			k.want(t, h, 1)
			n := len(r.opened)
			dead.Store(true)
			h.Upsert("b", 1)
			synctest.Wait()
			began := time.Now()
			after(followOptions.RetryMin)
			if len(r.opened) <= n || r.opened[n].Sub(began) > followOptions.RetryMin {
				t.Errorf("after a minute of health the first pause is longer than %v", followOptions.RetryMin)
			}
			dead.Store(false)
			after(time.Minute)
			k.want(t, h, 1)
		})
	})
}

// TestFollowFindsAServerThatIsBack: Follow notices a restarted server quickly, however long it was
// absent, and does not poll it continuously.
func TestFollowFindsAServerThatIsBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := hubOf(Options[int]{}, "a")
		back := time.Now().Add(time.Minute)
		r := remoteOf(h, func(int, int) error {
			if time.Now().Before(back) {
				return &client.AbsentError{Socket: "/x.sock", Err: syscall.ECONNREFUSED}
			}
			return nil
		})
		k := &keeper{}
		followed(t, r, k, func() {
			after(time.Minute + absentPause)
			k.want(t, h, 1)
			if n := len(r.opened); n > 1300 {
				t.Errorf("%d connection attempts in a minute", n)
			}
		})
	})
}

func TestFollowDeliversAgainWhatTheSinkDidNotTake(t *testing.T) {
	for _, call := range []string{"apply", "complete"} {
		for at := range 3 {
			t.Run(fmt.Sprintf("%s %d", call, at), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					h := hubOf(Options[int]{}, "a", "b")
					calls := 0
					k := &keeper{fault: func(c string) error {
						if c == call {
							if calls++; calls-1 == at {
								return errors.New("disk full")
							}
						}
						return nil
					}}
					followed(t, remoteOf(h, nil), k, func() {
						after(time.Minute)
						h.Delete("a")
						h.Upsert("c", 1)
						after(time.Minute)
						k.want(t, h, 1)
						if failed := len(k.failures) > 0; failed != (calls > at) {
							t.Errorf("failures %q after %d calls, of which call %d failed", k.failures, calls, at)
						}
					})
				})
			})
		}
	}
}

func TestFollowEndsWithItsContextWhereverItIs(t *testing.T) {
	for _, c := range []struct {
		name string
		cut  error
		run  time.Duration // before the context ends
	}{
		{"while the source is idle", nil, time.Second},
		{"in the pause after a failure", errDead, 10 * time.Second},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := remoteOf(hubOf(Options[int]{}, "a"), func(int, int) error { return c.cut })
				var end time.Time
				followed(t, r, &keeper{}, func() {
					after(c.run)
					end = time.Now()
				})
				if d := time.Since(end); d != 0 {
					t.Errorf("it took %v", d)
				}
				if n := r.hub.Load().Readers(); n != 0 {
					t.Errorf("%d subscriptions are left open", n)
				}
			})
		})
	}
	t.Run("when the sink is closed", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			closed := errors.New("closed")
			r := remoteOf(hubOf(Options[int]{}, "a"), func(int, int) error { return errDead })
			k := &keeper{fault: func(c string) error {
				if c == "failed" {
					return closed
				}
				return nil
			}}
			if err := Follow(t.Context(), r, k, followOptions); !errors.Is(err, closed) {
				t.Errorf("got %v, want the sink's error", err)
			}
		})
	})
}

// TestFollowAgreesWithARandomSource: Follow ends with the content of a source that changes and fails at random,
// whatever was lost in between.
func TestFollowAgreesWithARandomSource(t *testing.T) {
	for seed := range uint64(50) {
		synctest.Test(t, func(t *testing.T) {
			// One generator per goroutine.
			rnd, cuts, faults := rand.New(rand.NewPCG(seed, 1)), rand.New(rand.NewPCG(seed, 2)), rand.New(rand.NewPCG(seed, 3))
			h := hubOf(Options[int]{History: 16, Pending: 16}, "a", "b")
			var calm atomic.Bool
			r := remoteOf(h, func(int, int) error {
				if !calm.Load() && cuts.IntN(10) == 0 {
					return errDead
				}
				return nil
			})
			k := &keeper{fault: func(call string) error {
				if call != "failed" && !calm.Load() && faults.IntN(20) == 0 {
					return errors.New("sink")
				}
				return nil
			}}
			followed(t, r, k, func() {
				for i := range 300 {
					for range rnd.IntN(5) {
						if key := fmt.Sprint(rnd.IntN(30)); rnd.IntN(3) == 0 {
							h.Delete(key)
						} else {
							h.Upsert(key, i)
						}
					}
					after(time.Duration(rnd.IntN(300)) * time.Millisecond)
				}
				calm.Store(true)
				after(time.Minute)
				k.wantSet(t, h, k.completed)
				if k.completed == 0 {
					t.Error("the sink was never complete")
				}
			})
		})
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

// answers is a client stream that ends with an error.
type answers struct {
	grpc.ClientStream
	messages []int
	end      error
}

func (a *answers) Recv() (*int, error) {
	if len(a.messages) == 0 {
		return nil, a.end
	}
	m := a.messages[0]
	a.messages = a.messages[1:]
	return &m, nil
}

func TestReceiveGivesTheEndOfACallItsMeaning(t *testing.T) {
	event := func(m *int) Event[string, int] { return Event[string, int]{Kind: Upsert, Value: *m} }
	for _, c := range []struct {
		name    string
		open    error
		end     error
		values  []int
		code    codes.Code
		expired bool
	}{
		{name: "end of the stream", end: io.EOF, values: []int{1, 2}},
		{name: "refused token", end: status.Error(codes.OutOfRange, "old"), values: []int{1, 2}, code: codes.OutOfRange, expired: true},
		{name: "refused call", open: status.Error(codes.PermissionDenied, "no"), code: codes.PermissionDenied},
		{name: "lost connection", end: status.Error(codes.Unavailable, "lost"), values: []int{1, 2}, code: codes.Unavailable},
	} {
		t.Run(c.name, func(t *testing.T) {
			open := func() (grpc.ServerStreamingClient[int], error) {
				if c.open != nil {
					return nil, c.open
				}
				return &answers{messages: []int{1, 2}, end: c.end}, nil
			}
			var values []int
			var end error
			for e, err := range Receive(open, event) {
				if end = err; err == nil {
					values = append(values, e.Value)
				}
			}
			if !slices.Equal(values, c.values) || errors.Is(end, ErrExpired) != c.expired || status.Code(end) != c.code {
				t.Errorf("values %v, error %v; want %v, %v, expired %t", values, end, c.values, c.code, c.expired)
			}
		})
	}
	for e, err := range Receive(func() (grpc.ServerStreamingClient[int], error) { return &answers{messages: []int{1, 2}}, nil }, event) {
		if err != nil || e.Value != 1 {
			t.Errorf("%d, %v was yielded first", e.Value, err)
		}
		break
	}
}
