// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package batch

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/sluice-net/sluice/kit/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

func TestWhatComesWhileAnActRunsIsInTheNextOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var acts [][]int
		act := make(chan struct{})
		g := &Group[int]{
			Do: func(calls []int) {
				mu.Lock()
				acts = append(acts, slices.Clone(calls))
				mu.Unlock()
				<-act
			},
			// an act has no two numbers with the same last digit
			Fits: func(with []int, call int) bool {
				return !slices.ContainsFunc(with, func(x int) bool { return x%10 == call%10 })
			},
		}
		var wg sync.WaitGroup
		call := func(i int) {
			wg.Go(func() {
				if err := g.Call(t.Context(), i); err != nil {
					t.Error(err)
				}
			})
			synctest.Wait()
		}
		call(1)
		ctx, cancel := context.WithCancel(t.Context())
		wg.Go(func() {
			if err := g.Call(ctx, 9); !errors.Is(err, context.Canceled) {
				t.Errorf("a call that gave up: %v", err)
			}
		})
		synctest.Wait()
		for _, i := range []int{2, 12, 3, 22} {
			call(i)
		}
		cancel()
		close(act)
		wg.Wait()
		if want := [][]int{{1}, {2, 3}, {12}, {22}}; !slices.EqualFunc(acts, want, slices.Equal) {
			t.Errorf("the acts were %v, want %v", acts, want)
		}
		call(5) // after the last act has ended
		wg.Wait()
		if n := len(acts); n != 5 {
			t.Errorf("%d acts, want one more", n)
		}
	})
}

func TestNoMoreActsThanAllowedAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		running, most, calls := 0, 0, 0
		act := make(chan struct{})
		few := func(with []int, _ int) bool { return len(with) < 10 }
		g := &Group[int]{AtOnce: 2, Fits: few, Do: func(all []int) {
			mu.Lock()
			running++
			most, calls = max(most, running), calls+len(all)
			mu.Unlock()
			<-act
			mu.Lock()
			running--
			mu.Unlock()
		}}
		var wg sync.WaitGroup
		for i := range 100 {
			wg.Go(func() {
				if err := g.Call(t.Context(), i); err != nil {
					t.Error(err)
				}
			})
		}
		synctest.Wait()
		close(act)
		wg.Wait()
		if most != 2 || calls != 100 {
			t.Errorf("%d calls, %d acts at once; want 100 and 2", calls, most)
		}
	})
}
