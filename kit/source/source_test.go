// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package source

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/watch"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// keeper is a sink that keeps the set.
type keeper struct {
	mu        sync.Mutex
	set       map[string]int // guarded by mu
	completed int            // guarded by mu; calls of Complete
	empty     int            // guarded by mu; calls without changes
	largest   int            // guarded by mu; largest number of changes in a call
	failures  []string       // guarded by mu
	fault     error          // guarded by mu; returned by Apply and Complete
}

func (k *keeper) Apply(_ context.Context, c watch.Changes[string, int]) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.fault != nil {
		return k.fault
	}
	for key := range c.Deletes {
		delete(k.set, key)
	}
	maps.Copy(k.set, c.Upserts)
	n := len(c.Upserts) + len(c.Deletes)
	k.largest = max(k.largest, n)
	if n == 0 {
		k.empty++
	}
	return nil
}

func (k *keeper) Complete(_ context.Context, listed map[string]struct{}) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.fault != nil {
		return k.fault
	}
	k.completed++
	maps.DeleteFunc(k.set, func(key string, _ int) bool { _, ok := listed[key]; return !ok })
	return nil
}

func (k *keeper) Failed(_ context.Context, why error) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.failures = append(k.failures, fmt.Sprint(why))
	return nil
}

func (k *keeper) fail(err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.fault = err
}

// want fails the test unless the sink has the set, in the form "a=1 b=2".
func (k *keeper) want(t *testing.T, what, set string, completed int) {
	t.Helper()
	synctest.Wait()
	k.mu.Lock()
	defer k.mu.Unlock()
	var have []string
	for _, key := range slices.Sorted(maps.Keys(k.set)) {
		have = append(have, fmt.Sprintf("%s=%d", key, k.set[key]))
	}
	if got := strings.Join(have, " "); got != set || k.completed != completed {
		t.Errorf("%s: the sink has %q after %d completions, want %q after %d", what, got, k.completed, set, completed)
	}
}

// lastFailure returns the failure that was last reported to the sink.
func (k *keeper) lastFailure() string {
	synctest.Wait()
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.failures) == 0 {
		return ""
	}
	return k.failures[len(k.failures)-1]
}

// joined runs a Joint of two kinds in a synctest bubble.
func joined(t *testing.T, f func(*Joint[string, int], *keeper)) {
	synctest.Test(t, func(t *testing.T) {
		k := &keeper{set: map[string]int{"earlier": 1, "stays": 1}}
		j := New(k, []string{"policies", "groups"}, Options{RetryMin: 50 * time.Millisecond, RetryMax: 2 * time.Second, Refresh: 30 * time.Second, Log: log.Discard()})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- j.Run(ctx) }()
		f(j, k)
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run returned %v, want nil after its context has ended", err)
		}
	})
}

func TestSetIsCompleteWhenEveryKindIs(t *testing.T) {
	joined(t, func(j *Joint[string, int], k *keeper) {
		j.Upsert("stays", 2)
		j.Complete("policies")
		k.want(t, "one kind is complete", "earlier=1 stays=2", 0)
		j.Upsert("group", 3)
		j.Upsert("gone", 3)
		j.Delete("gone")
		j.Complete("groups")
		k.want(t, "both are complete", "group=3 stays=2", 1)
		j.Complete("groups")
		j.Upsert("later", 4)
		j.Delete("group")
		k.want(t, "changes", "later=4 stays=2", 1)
	})
}

func TestKindThatNeverCompletesDeletesNothing(t *testing.T) {
	joined(t, func(j *Joint[string, int], k *keeper) {
		j.Complete("policies")
		j.Failed("groups", errors.New("forbidden"))
		if got := k.lastFailure(); got != "groups: forbidden" {
			t.Errorf("the sink knows of %q, want the kind and why", got)
		}
		j.Upsert("new", 2)
		j.Delete("earlier") // a deletion may arrive before the kind is complete
		time.Sleep(24 * time.Hour)
		k.want(t, "a day later", "new=2 stays=1", 0)
		j.Complete("groups")
		k.want(t, "at last", "new=2", 1)
		if got := k.lastFailure(); got != "<nil>" {
			t.Errorf("the sink knows of %q, want nothing", got)
		}
	})
}

func TestFailureOfACompleteKindIsToldAndTakenBack(t *testing.T) {
	joined(t, func(j *Joint[string, int], k *keeper) {
		j.Complete("policies")
		j.Failed("policies", errors.New("connection refused"))
		j.Complete("groups")
		want := func(want string) {
			t.Helper()
			if got := k.lastFailure(); got != want {
				t.Errorf("the sink knows of %q, want %q", got, want)
			}
		}
		want("policies: connection refused") // failures are also reported after the set was complete
		j.Failed("groups", errors.New("connection refused"))
		want("groups, policies: connection refused")
		j.Failed("policies", errors.New("forbidden"))
		want("groups: connection refused; policies: forbidden")
		j.Failed("groups", nil)
		want("policies: forbidden")
		j.Failed("policies", nil)
		want("<nil>")
		k.want(t, "a kind that failed", "", 1)
	})
}

func TestSourceWithoutObjectsCompletes(t *testing.T) {
	joined(t, func(j *Joint[string, int], k *keeper) {
		j.Complete("policies")
		k.want(t, "one kind", "earlier=1 stays=1", 0)
		j.Complete("groups")
		k.want(t, "both", "", 1)
	})
}

func TestSinkThatFailedGetsTheNewestAgain(t *testing.T) {
	joined(t, func(j *Joint[string, int], k *keeper) {
		k.fail(errors.New("disk full"))
		j.Upsert("a", 1)
		j.Upsert("b", 1)
		j.Complete("policies")
		j.Complete("groups")
		time.Sleep(10 * time.Second)
		j.Upsert("a", 2)
		j.Delete("b")
		j.Upsert("c", 2)
		k.want(t, "while it fails", "earlier=1 stays=1", 0)
		if got := k.lastFailure(); got != "disk full" {
			t.Errorf("failure %q", got)
		}
		k.fail(nil)
		time.Sleep(2 * time.Second)
		k.want(t, "afterwards", "a=2 c=2", 1)
		if got := k.lastFailure(); got != "<nil>" {
			t.Errorf("failure %q, want none", got)
		}
		k.mu.Lock()
		defer k.mu.Unlock()
		if n := len(k.failures); n > 15 {
			t.Errorf("%d attempts in twelve seconds", n)
		}
	})
}

func TestSinkMayTryAgainFromTimeToTime(t *testing.T) {
	joined(t, func(j *Joint[string, int], k *keeper) {
		time.Sleep(5 * time.Minute)
		synctest.Wait()
		k.mu.Lock()
		defer k.mu.Unlock()
		if k.empty != 10 {
			t.Errorf("%d calls without changes in five minutes, want one each 30s", k.empty)
		}
	})
}

func TestBurstComesInBatchesMergedByKey(t *testing.T) {
	joined(t, func(j *Joint[string, int], k *keeper) {
		var all sync.WaitGroup
		for w := range 8 {
			all.Go(func() {
				rnd := rand.New(rand.NewPCG(uint64(w), 1))
				for range 20_000 {
					if key := fmt.Sprintf("%d-%03d", w, rnd.IntN(300)); rnd.IntN(3) == 0 {
						j.Delete(key)
					} else {
						j.Upsert(key, rnd.IntN(10))
					}
				}
				for i := range 300 {
					j.Upsert(fmt.Sprintf("%d-%03d", w, i), i)
				}
			})
		}
		all.Wait()
		j.Complete("policies")
		j.Complete("groups")
		synctest.Wait()
		k.mu.Lock()
		defer k.mu.Unlock()
		if k.completed != 1 || len(k.set) != 2400 || k.set["7-299"] != 299 || k.largest > batch {
			t.Errorf("%d keys, %d completions, at most %d changes at once; want 2400, 1, %d", len(k.set), k.completed, k.largest, batch)
		}
	})
}
