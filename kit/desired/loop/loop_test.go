// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package loop

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// idle is the Work of a loop without timed work.
func idle() Work {
	return Work{Pause: func() time.Duration { return time.Hour }, Fatal: func() error { return nil }}
}

// start runs a loop until the test ends or stop is called. stop returns the error of Run.
func start(t *testing.T, l *Loop, w Work) (stop func() error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- l.Run(ctx, w) }()
	stopped := false
	stop = func() error {
		if stopped {
			return nil
		}
		stopped = true
		cancel()
		return <-ended
	}
	t.Cleanup(func() { stop() }) //nolint:errcheck // checked by the tests that need it
	return stop
}

// count runs a turn that returns n.
func count(ctx context.Context, l *Loop, n int) (int, error) {
	return Ask(ctx, l, "count", func() (int, error) { return n, nil })
}

func TestTurnsRunAloneAndAnswer(t *testing.T) {
	after := 0
	l := New(Options{After: func() { after++ }})
	start(t, l, idle())
	why := errors.New("why")
	if _, err := Ask(t.Context(), l, "fail", func() (int, error) { return 0, why }); !errors.Is(err, why) {
		t.Errorf("got %v, want the error of the turn", err)
	}
	const callers, each = 8, 50
	sum := 0 // owned by the loop
	errs := make(chan error, callers)
	for range callers {
		go func() {
			for range each {
				if err := l.Do(t.Context(), "add", func() { sum++ }); err != nil {
					errs <- err
					return
				}
			}
			errs <- nil
		}()
	}
	for range callers {
		if err := <-errs; err != nil {
			t.Fatal(err)
		}
	}
	seen := 0
	got, err := Ask(t.Context(), l, "read", func() (int, error) { seen = after; return sum, nil })
	if err != nil || got != callers*each || seen != callers*each+1 {
		t.Errorf("%d turns added, %v, and After ran %d times before the last; want %d", got, err, seen, callers*each+1)
	}
}

func TestAnswerComesAfterAfter(t *testing.T) {
	done := false // owned by the loop until the answer
	l := New(Options{After: func() { done = true }})
	start(t, l, idle())
	if _, err := count(t.Context(), l, 1); err != nil || !done {
		t.Errorf("%v; After has run: %v", err, done)
	}
}

// block begins a turn that lasts until end is called.
func block(t *testing.T, l *Loop) (end func()) {
	t.Helper()
	begun, over, ended := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	go func() {
		ended <- l.Do(context.Background(), "block", func() { close(begun); <-over })
	}()
	<-begun
	return func() {
		close(over)
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
}

func TestCallerWhoseContextEndsStopsWaiting(t *testing.T) {
	l := New(Options{})
	start(t, l, idle())
	end := block(t, l)
	ctx, cancel := context.WithCancel(t.Context())
	ran := false // owned by the loop
	errs := make(chan error, queued+1)
	for range queued + 1 { // one more than the queue holds
		go func() { errs <- l.Do(ctx, "never", func() { ran = true }) }()
	}
	for len(l.calls) < queued { // until the queue is full
		select {
		case err := <-errs:
			t.Fatalf("a call ended with %v, want it to wait", err)
		default:
		}
	}
	cancel()
	for range queued + 1 {
		if err := <-errs; !errors.Is(err, context.Canceled) {
			t.Errorf("got %v, want the error of the context", err)
		}
	}
	end()
	if got, err := Ask(t.Context(), l, "read", func() (bool, error) { return ran, nil }); err != nil || got {
		t.Errorf("%v; a call without a caller has run: %v", err, got)
	}
	for _, f := range l.Figures() {
		if f.Operation == "never" {
			t.Error("a call that did not run is counted")
		}
	}
}

// TestATurnThatHasBegunIsWaitedFor: Do waits for a turn that has begun, even if the context of its caller has ended,
// because the caller reads what the turn has written.
func TestATurnThatHasBegunIsWaitedFor(t *testing.T) {
	l := New(Options{})
	start(t, l, idle())
	for range 100 {
		ctx, cancel := context.WithCancel(t.Context())
		written := 0
		err := l.Do(ctx, "write", func() {
			cancel()
			runtime.Gosched()
			written = 7
		})
		if err != nil || written != 7 {
			t.Fatalf("%v; the turn has written %d", err, written)
		}
	}
}

func TestStoppedLoopTakesNoCalls(t *testing.T) {
	l := New(Options{})
	w := idle()
	last := false
	w.Stop = func() { last = true }
	stop := start(t, l, w)
	lock := l.NewLock()
	release, err := lock.Hold(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := stop(); err != nil || !last {
		t.Errorf("%v; Stop has run: %v", err, last)
	}
	<-l.Stopped()
	for range queued + 2 { // more than the queue holds
		if _, err := count(t.Context(), l, 1); !errors.Is(err, ErrStopped) {
			t.Fatalf("got %v, want ErrStopped", err)
		}
	}
	if _, err := lock.Hold(t.Context()); !errors.Is(err, ErrStopped) {
		t.Errorf("a lock of a loop that has ended: %v, want ErrStopped", err)
	}
	if err := l.Wait(t.Context(), nil); !errors.Is(err, ErrStopped) {
		t.Errorf("got %v, want ErrStopped", err)
	}
	release()
}

// late is the context of a caller that only looks for its answer after the loop has ended: Ask
// calls Done once before it queues the call and once after.
type late struct {
	context.Context
	asked int
	until <-chan struct{}
}

func (c *late) Done() <-chan struct{} {
	if c.asked++; c.asked == 2 {
		<-c.until
	}
	return c.Context.Done()
}

// TestFatalTurnStillAnswers: the caller of the last turn receives its answer.
func TestFatalTurnStillAnswers(t *testing.T) {
	why, answer := errors.New("the disk is lost"), errors.New("the answer")
	for range 50 {
		l := New(Options{})
		var fatal error
		w := idle()
		w.Fatal = func() error { return fatal }
		ended := make(chan error, 1)
		go func() { ended <- l.Run(t.Context(), w) }()
		ctx := &late{Context: t.Context(), until: l.Stopped()}
		_, err := Ask(ctx, l, "fatal", func() (int, error) { fatal = why; return 0, answer })
		if !errors.Is(err, answer) {
			t.Fatalf("got %v, want the answer of the last turn", err)
		}
		if err := <-ended; !errors.Is(err, why) {
			t.Fatalf("Run ended with %v, want %v", err, why)
		}
	}
}

func TestSweepAndWokenAreTurns(t *testing.T) {
	wake, swept, woken := make(chan struct{}, 1), make(chan struct{}), make(chan struct{})
	due := true // owned by the loop
	l := New(Options{})
	start(t, l, Work{
		Pause: func() time.Duration {
			if due {
				return 0
			}
			return time.Hour
		},
		Sweep: func() { due = false; close(swept) }, SweepAs: "sweep",
		Wake: wake, Woken: func() { close(woken) }, WokenAs: "wake",
		Fatal: func() error { return nil },
	})
	<-swept
	wake <- struct{}{}
	<-woken
	if _, err := count(t.Context(), l, 1); err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, f := range l.Figures() {
		got = append(got, f.Operation)
	}
	if want := []string{"count", "sweep", "wake"}; !slices.Equal(got, want) {
		t.Errorf("operations %q, want %q", got, want)
	}
}

func TestFiguresOfTurns(t *testing.T) {
	used, done := time.Duration(0), 7 // owned by the loop; done is set before it starts
	l := New(Options{Processor: func() time.Duration { return used }, Done: func() int { return done }})
	start(t, l, idle())
	for _, n := range []int{3, 5, 2} {
		if err := l.Do(t.Context(), "early", func() {
			l.Rename("compile")
			used += time.Duration(n) * time.Second
			end := l.Part("write")
			used += time.Minute
			end()
			done += n
		}); err != nil {
			t.Fatal(err)
		}
	}
	all := l.Figures()
	if len(all) != 2 || all[0].Operation != "compile" || all[1].Operation != "write" {
		t.Fatalf("got %+v, want compile and write", all)
	}
	compile, write := all[0], all[1]
	if compile.Count != 3 || compile.Most != 5 || compile.Processor.Sum != 10*time.Second+3*time.Minute ||
		compile.Processor.Longest != 5*time.Second+time.Minute {
		t.Errorf("compile: %+v", compile)
	}
	if write.Count != 3 || write.Most != 0 || write.Processor.Sum != 3*time.Minute {
		t.Errorf("write: %+v", write)
	}
}

func TestLockIsHeldByOne(t *testing.T) {
	l := New(Options{})
	start(t, l, idle())
	lock := l.NewLock()
	release, err := lock.Hold(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, held := lock.TryHold(); held {
		t.Error("two goroutines hold the lock")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := lock.Hold(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want the error of the context", err)
	}
	release()
	again, held := lock.TryHold()
	if !held {
		t.Fatal("the lock is not free")
	}
	again()
}
