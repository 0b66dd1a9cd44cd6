// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package netns

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

func fresh(t *testing.T) *Namespace {
	t.Helper()
	ch := make(chan any)
	go func() {
		runtime.LockOSThread() // the thread ends with the goroutine
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			ch <- err
			return
		}
		n, err := Current()
		if err != nil {
			ch <- err
			return
		}
		ch <- n
	}()
	switch r := (<-ch).(type) {
	case *Namespace:
		t.Cleanup(func() { r.Close() })
		return r
	default:
		t.Fatalf("make a network namespace (kernel tests need root): %v", r)
		return nil
	}
}

func TestKernelOnlyNetworkNamespacesAreOpened(t *testing.T) {
	dir := t.TempDir()
	file, fifo, link := filepath.Join(dir, "file"), filepath.Join(dir, "fifo"), filepath.Join(dir, "link")
	if err := errors.Join(os.WriteFile(file, nil, 0o600), unix.Mkfifo(fifo, 0o600), os.Symlink("/proc/self/ns/net", link)); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]error{
		file: ErrNotNetns, fifo: ErrNotNetns, dir: ErrNotNetns, "/dev/null": ErrNotNetns,
		"/proc/self/ns/mnt": ErrNotNetns, "/proc/self/ns/user": ErrNotNetns, "/proc/self/status": ErrNotNetns,
		filepath.Join(dir, "nothing"): fs.ErrNotExist, "/proc/self/ns/net": nil, link: nil,
	} {
		n, err := Open(path)
		if !errors.Is(err, want) || (err == nil) != (want == nil) {
			t.Errorf("open %s: %v, want %v", path, err, want)
		}
		if n != nil {
			n.Close()
		}
	}
}

func TestKernelEqualNamespacesHaveEqualIDs(t *testing.T) {
	a, b := fresh(t), fresh(t)
	again, err := Open(fmt.Sprintf("/proc/self/fd/%d", a.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if a.ID() != again.ID() || a.ID() == b.ID() {
		t.Errorf("a %v, a again %v, b %v", a.ID(), again.ID(), b.ID())
	}
}

func TestKernelDoRunsInsideAndNothingElseDoes(t *testing.T) {
	home, err := Current()
	if err != nil {
		t.Fatal(err)
	}
	defer home.Close()
	a, b := fresh(t), fresh(t)
	where := func() ID {
		n, err := Current()
		if err != nil {
			t.Error(err)
			return ID{}
		}
		defer n.Close()
		return n.ID()
	}
	var wg sync.WaitGroup
	for range 4 {
		for _, n := range []*Namespace{a, b, home} {
			wg.Go(func() {
				for range 50 {
					if err := n.Do(func() error {
						if got := where(); got != n.ID() {
							t.Errorf("inside %v: in %v", n.ID(), got)
						}
						return nil
					}); err != nil {
						t.Error(err)
					}
					if got := where(); got != home.ID() {
						t.Errorf("outside: in %v, want %v", got, home.ID())
					}
				}
			})
		}
	}
	wg.Wait()
	want := errors.New("from inside")
	if err := a.Do(func() error { return want }); !errors.Is(err, want) {
		t.Errorf("the error of the function: %v", err)
	}
}

func TestKernelThreadThatCannotGoBackEnds(t *testing.T) {
	home, err := Current()
	if err != nil {
		t.Fatal(err)
	}
	defer home.Close()
	a, b := fresh(t), fresh(t)
	// the function itself changes the namespace; the thread must return or end
	if err := a.Do(func() error { return unix.Setns(b.Fd(), unix.CLONE_NEWNET) }); err != nil {
		t.Fatal(err)
	}
	for range 100 {
		done := make(chan ID)
		go func() {
			n, err := Current()
			if err != nil {
				t.Error(err)
				done <- ID{}
				return
			}
			defer n.Close()
			done <- n.ID()
		}()
		if got := <-done; got != home.ID() {
			t.Fatalf("a goroutine runs in %v, want %v", got, home.ID())
		}
	}
}
