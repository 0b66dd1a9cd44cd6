// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/desired/directory"
	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/kit/desired/journal"
	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/kit/disktest"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/names"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/record"
	"github.com/sluice-net/sluice/services/policy/internal/source"
	"github.com/sluice-net/sluice/services/policy/internal/stream"
	"github.com/sluice-net/sluice/services/policy/internal/summary"
	"golang.org/x/sys/unix"
)

// onDisk runs an owner that writes to the disk, and calls f concurrently. It returns the result of Run.
func onDisk(t *testing.T, disk *disktest.Disk, dir string, f func(o *Owner), sources ...string) (ran error) {
	t.Helper()
	config := Config{
		Engine: engine.Config{Cluster: "default", AllowHost: true}, MaxPolicies: 100, MaxManifestBytes: 1 << 20,
		MaxNames: 10, MaxAddresses: 20, NameGrace: time.Minute, Linger: time.Hour, Stream: stream.Defaults(), Log: log.Discard(),
	}
	o, err := New(config, dir, sources)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer cancel()
		f(o)
	}()
	disk.Run(t, func() { ran = o.Run(ctx) })
	<-done
	if err := o.Close(); err != nil {
		t.Error(err)
	}
	return ran
}

func storageProblem(t *testing.T, o *Owner) string {
	t.Helper()
	st, err := o.Reader().Status(t.Context())
	if err != nil {
		t.Error(err)
		return ""
	}
	for _, p := range st.Problems {
		if p.Kind == summary.ProblemStorage {
			return p.Text
		}
	}
	return ""
}

func TestFullDiskUndoesAChangeAndIsShownUntilItTakesWrites(t *testing.T) {
	for _, errno := range []unix.Errno{unix.ENOSPC, unix.EROFS} {
		root := t.TempDir()
		dir := filepath.Join(root, "policy")
		disk := disktest.New(t, root)
		if ran := onDisk(t, disk, dir, func(o *Owner) {
			if _, err := o.Upsert(t.Context(), []byte(text("shop", "one", 80)), "", false); err != nil {
				t.Error(err)
			}
			disk.Fail(func(o disktest.Op) error {
				if o.Kind == disktest.Write || o.Kind == disktest.Truncate {
					return errno
				}
				return nil
			})
			if _, err := o.Upsert(t.Context(), []byte(text("shop", "two", 80)), "", false); !errors.Is(err, failure.ErrStorage) || !errors.Is(err, errno) || !strings.Contains(err.Error(), filepath.Join(dir, record.File)) {
				t.Errorf("%v: %v, want failure.ErrStorage with the name of the file", errno, err)
			}
			// Records that are not synced take effect at once and are written later.
			at := []netip.Addr{netip.MustParseAddr("192.0.2.1")}
			_, err := o.Names().Learn(t.Context(), names.Asker{}, "n.example", at, time.Hour)
			if err != nil {
				t.Error(err)
			}
			if p := storageProblem(t, o); !strings.Contains(p, record.File) || !strings.Contains(p, "cache.") {
				t.Errorf("%v: the status says %q", errno, p)
			}
			list, revision, err := o.Reader().List(t.Context(), Filter{})
			if err != nil || len(list) != 1 || revision != 1 {
				t.Errorf("%v: %d policies at revision %d, %v; want one at 1", errno, len(list), revision, err)
			}
			disk.Fail(nil)
			// The owner retries by itself.
			for deadline := time.Now().Add(time.Minute); storageProblem(t, o) != ""; {
				if time.Now().After(deadline) {
					t.Error("with space again, the problem is still shown")
					break
				}
			}
		}); ran != nil {
			t.Errorf("%v: %v", errno, ran)
		}
		o, _ := run(t, dir)
		list, revision, err := o.Reader().List(t.Context(), Filter{})
		if err != nil || len(list) != 1 || revision != 1 {
			t.Errorf("%v: after a restart %d policies at revision %d, %v", errno, len(list), revision, err)
		}
		st, err := o.Reader().Status(t.Context())
		if err != nil || st.Names != 1 {
			t.Errorf("%v: after a restart %d names, %v", errno, st.Names, err)
		}
	}
}

// TestFullDiskUndoesALargeChange: the records of a large change are written outside of the owner's loop. If the disk
// becomes full, the whole change is undone.
func TestFullDiskUndoesALargeChange(t *testing.T) {
	var b strings.Builder
	for i := range 900 {
		b.WriteString("---\n" + text("shop", fmt.Sprint("p", i), 80))
	}
	root := t.TempDir()
	dir := filepath.Join(root, "policy")
	o, stop := run(t, dir, func(c *Config) { c.MaxPolicies, c.MaxManifestBytes = 20_000, 64<<20 })
	disk := disktest.New(t, root)
	disk.Run(t, func() {
		if _, err := o.Upsert(t.Context(), []byte(text("shop", "one", 80)), "", false); err != nil {
			t.Error(err)
		}
		for fail := range 6 { // each iteration fails at a later write
			writes := 0
			disk.Fail(func(o disktest.Op) error {
				if o.Kind == disktest.Write || o.Kind == disktest.Truncate {
					if writes++; writes > 7*fail {
						return unix.ENOSPC
					}
				}
				return nil
			})
			if _, err := o.Upsert(t.Context(), []byte(b.String()), "", false); !errors.Is(err, failure.ErrStorage) || !errors.Is(err, unix.ENOSPC) {
				t.Errorf("%d writes: %v, want failure.ErrStorage", 7*fail, err)
			}
			if p := storageProblem(t, o); !strings.Contains(p, record.File) {
				t.Errorf("the status says %q", p)
			}
			disk.Fail(nil)
			list, revision, err := o.Reader().List(t.Context(), Filter{})
			if err != nil || len(list) != 1 || revision != 1 {
				t.Errorf("%d policies at revision %d, %v; want one at 1", len(list), revision, err)
			}
		}
		if _, err := o.Upsert(t.Context(), []byte(b.String()), "", false); err != nil {
			t.Error(err)
		}
	})
	stop()
	o, _ = run(t, dir, func(c *Config) { c.MaxPolicies, c.MaxManifestBytes = 20_000, 64<<20 })
	if list, revision, err := o.Reader().List(t.Context(), Filter{}); err != nil || len(list) != 901 || revision != 2 {
		t.Errorf("after a restart %d policies at revision %d, %v", len(list), revision, err)
	}
}

func TestFailedSyncBesideTheOwnerEndsIt(t *testing.T) {
	var b strings.Builder
	for i := range 90 { // more bytes than the owner writes by itself
		b.WriteString("---\n" + text("shop", fmt.Sprint("p", i), 80) + "# " + strings.Repeat("x", 4000) + "\n")
	}
	root := t.TempDir()
	config := Config{
		Engine: engine.Config{Cluster: "default", AllowHost: true}, MaxPolicies: 100, MaxManifestBytes: 1 << 20,
		MaxNames: 10, MaxAddresses: 20, NameGrace: time.Minute, Linger: time.Hour, Stream: stream.Defaults(), Log: log.Discard(),
	}
	o, err := New(config, filepath.Join(root, "policy"), nil)
	if err != nil {
		t.Fatal(err)
	}
	ran := make(chan error, 1)
	go func() { ran <- o.Run(t.Context()) }()
	disk := disktest.New(t, root)
	disk.Fail(func(o disktest.Op) error {
		if o.Kind == disktest.Sync {
			return unix.EIO
		}
		return nil
	})
	disk.Run(t, func() {
		if _, err := o.Upsert(t.Context(), []byte(b.String()), "", false); !errors.Is(err, failure.ErrStorage) && !errors.Is(err, failure.ErrStopped) {
			t.Errorf("%v, want failure.ErrStorage", err)
		}
	})
	if err := <-ran; !errors.Is(err, journal.ErrLost) {
		t.Errorf("the owner ended with %v, want ErrLost", err)
	}
	if err := o.Close(); err != nil {
		t.Error(err)
	}
}

func TestFailedSyncEndsTheOwner(t *testing.T) {
	root := t.TempDir()
	disk := disktest.New(t, root)
	ran := onDisk(t, disk, filepath.Join(root, "policy"), func(o *Owner) {
		disk.Fail(func(o disktest.Op) error {
			if o.Kind == disktest.Sync {
				return unix.EIO
			}
			return nil
		})
		if _, err := o.Upsert(t.Context(), []byte(text("shop", "one", 80)), "", false); !errors.Is(err, failure.ErrStorage) && !errors.Is(err, failure.ErrStopped) {
			t.Errorf("%v, want failure.ErrStorage", err)
		}
	})
	if !errors.Is(ran, journal.ErrLost) {
		t.Errorf("the owner ended with %v, want ErrLost", ran)
	}
}

// TestPolicyThatCannotBeStoredIsReported: a policy of an API server arrives while the disk is full. It isolates the
// pods that it selects, and the report of the node contains it.
func TestPolicyThatCannotBeStoredIsReported(t *testing.T) {
	root := t.TempDir()
	disk := disktest.New(t, root)
	if ran := onDisk(t, disk, filepath.Join(root, "policy"), func(o *Owner) {
		d := deltas{o.Objects(managed.SourceKubernetes), t}
		pods(t, o, "shop")
		disk.Fail(func(op disktest.Op) error {
			if op.Kind == disktest.Write || op.Kind == disktest.Truncate {
				return unix.ENOSPC
			}
			return nil
		})
		c := watch.Changes[policy.Key, policy.Written]{Upserts: map[policy.Key]policy.Written{network("db"): isolating("db")}}
		if err := d.Apply(t.Context(), c); !errors.Is(err, unix.ENOSPC) {
			t.Errorf("%v, want ENOSPC", err)
		}
		if passes(t, o, 300, 301) {
			t.Error("the policy does not isolate")
		}
		all, err := o.Reader().Unenforced(t.Context())
		if err != nil || all[network("db")].Code != NotStored ||
			!strings.Contains(all[network("db")].Why, "no space left on device") {
			t.Errorf("the report: %q, %v", all, err)
		}
		if why, err := o.Reader().StorageFailure(t.Context()); err != nil || !strings.Contains(why, "no space left") {
			t.Errorf("the disk: %q, %v", why, err)
		}
		disk.Fail(nil)
		if err := d.Apply(t.Context(), c); err != nil {
			t.Error(err)
		}
		if all, err := o.Reader().Unenforced(t.Context()); err != nil || len(all) != 0 {
			t.Errorf("the report with free space: %q, %v", all, err)
		}
	}, source.Identity, managed.SourceFile, managed.SourceKubernetes); ran != nil {
		t.Error(ran)
	}
}

// TestRenamesBeforeAFailedListingAreKept: after a start, a renamed file is read, but its policies cannot be stored.
// Then the file becomes unreadable. Its former policies stay.
func TestRenamesBeforeAFailedListingAreKept(t *testing.T) {
	root := t.TempDir()
	disk := disktest.New(t, root)
	listed := func(o *Owner) string {
		list, _, err := o.Reader().List(t.Context(), Filter{})
		if err != nil {
			t.Error(err)
		}
		var origins []string
		for _, l := range list {
			if l.Accepted {
				origins = append(origins, l.Origin)
			}
		}
		return strings.Join(origins, " ")
	}
	state := filepath.Join(root, "policy")
	for _, former := range []string{"", "a.yaml"} {
		if ran := onDisk(t, disk, state, func(o *Owner) {
			feed := o.Feed(managed.SourceFile)
			if former == "" {
				err := feed.Set(t.Context(), []directory.File{{Origin: "a.yaml", Data: []byte(text("shop", "one", 80))}})
				if got := listed(o); err != nil || got != "a.yaml" {
					t.Errorf("%q, %v", got, err)
				}
				return
			}
			disk.Fail(func(op disktest.Op) error {
				if op.Kind == disktest.Write || op.Kind == disktest.Truncate {
					return unix.ENOSPC
				}
				return nil
			})
			err := feed.Set(t.Context(), []directory.File{{Origin: "b.yaml", Data: []byte(text("shop", "one", 81))}})
			if !errors.Is(err, unix.ENOSPC) {
				t.Errorf("%v, want ENOSPC", err)
			}
			disk.Fail(nil)
			err = feed.Set(t.Context(), []directory.File{{Origin: "b.yaml", Err: errors.New("permission denied")}})
			if got := listed(o); err != nil || got != former {
				t.Errorf("%q, %v", got, err)
			}
		}, source.Identity, managed.SourceFile); ran != nil {
			t.Error(ran)
		}
	}
}
