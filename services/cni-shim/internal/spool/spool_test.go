// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package spool

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/model/deletion"
	"github.com/sluice-net/sluice/model/workload"
)

func owner(container string) workload.Owner {
	return workload.Owner{ContainerID: container, Interface: "eth0"}
}

// prepare makes the spool of a state directory as what prepares a node does.
func prepare(t *testing.T, state string) (dir string) {
	t.Helper()
	dir = deletion.Dir(state)
	if err := os.MkdirAll(dir, 0o755); err != nil { //nolint:gosec // the directory above is for all
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o700); err != nil { //nolint:gosec // a directory
		t.Fatal(err)
	}
	if os.Geteuid() == 0 {
		if err := os.Chown(dir, int(instance.DatapathID), int(instance.GroupID)); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestPutIsBoundedUnderConcurrentWriters(t *testing.T) {
	state := t.TempDir()
	dir := prepare(t, state)
	for i := range Max - 5 {
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("%064x", i)), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	// Left by a writer that was killed: neither counted nor kept.
	if err := os.WriteFile(filepath.Join(dir, ".x.tmp-1"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	var (
		wg         sync.WaitGroup
		mu         sync.Mutex
		stored     int
		full, rest []error
	)
	for i := range 16 {
		wg.Go(func() {
			err := Put(t.Context(), state, deletion.Entry{Owner: owner(fmt.Sprint("c", i)), Time: time.Now()})
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err == nil:
				stored++
			case errors.Is(err, ErrFull):
				full = append(full, err)
			default:
				rest = append(rest, err)
			}
		})
	}
	wg.Wait()
	if stored != 5 || len(full) != 11 || len(rest) > 0 {
		t.Fatalf("%d stored, %d refused, other errors %v; want 5, 11 and none", stored, len(full), rest)
	}
	if _, err := os.Stat(filepath.Join(dir, ".x.tmp-1")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the killed writer's file is still there: %v", err)
	}
}

// TestKernelOnlyThePreparedSpoolOfANodeTakesDeletions: a deletion in a directory that no datapath reads is lost: it
// must be refused, and no file may be created there.
func TestKernelOnlyThePreparedSpoolOfANodeTakesDeletions(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("this test gives directories to other users and needs root")
	}
	own := func(uid int) func(state string) error {
		return func(state string) error { return os.Chown(deletion.Dir(state), uid, uid) }
	}
	mode := func(dir func(state string) string, m os.FileMode) func(state string) error {
		return func(state string) error { return os.Chmod(dir(state), m) }
	}
	itself := func(state string) string { return state }
	for name, c := range map[string]struct {
		make func(state string) error // from a prepared one
		ok   bool
	}{
		"a spool of the datapath's":      {make: func(string) error { return nil }, ok: true},
		"no spool, as of another runDir": {make: func(state string) error { return os.RemoveAll(deletion.Dir(state)) }},
		"an empty state directory":       {make: func(state string) error { return os.RemoveAll(filepath.Dir(deletion.Dir(state))) }},
		"nothing, as after a typo":       {make: os.RemoveAll},
		"a file":                         {make: func(state string) error { return errors.Join(os.RemoveAll(state), os.WriteFile(state, nil, 0o600)) }},
		"root's":                         {make: own(0)},
		"another user's":                 {make: own(65799)},
		"writable to all":                {make: mode(deletion.Dir, 0o777)},
		"open to a group":                {make: mode(deletion.Dir, 0o770)},
		"in a directory open to all":     {make: mode(itself, 0o777)},
		"in a directory of the service": {make: func(state string) error {
			return os.Chown(filepath.Dir(deletion.Dir(state)), int(instance.DatapathID), 0)
		}},
		"a link to another": {make: func(state string) error {
			return errors.Join(os.Rename(deletion.Dir(state), state+"/real"), os.Symlink(state+"/real", deletion.Dir(state)))
		}},
	} {
		state := filepath.Join(t.TempDir(), "sluice")
		prepare(t, state)
		if err := c.make(state); err != nil {
			t.Fatal(err)
		}
		before, _ := os.Lstat(deletion.Dir(state))
		err := Put(t.Context(), state, deletion.Entry{Owner: owner("a")})
		if c.ok != (err == nil) || !c.ok && !errors.Is(err, ErrNoState) {
			t.Errorf("%s: %v", name, err)
		}
		if err != nil && !strings.Contains(err.Error(), state) {
			t.Errorf("%s: %v does not name the directory", name, err)
		}
		entries, _ := os.ReadDir(deletion.Dir(state))
		if after, _ := os.Lstat(deletion.Dir(state)); c.ok != (len(entries) == 1) || (before == nil) != (after == nil) {
			t.Errorf("%s: it has %v", name, entries)
		}
	}
}

// TestKernelDatapathReadsAndRemovesWhatIsSpooled: the datapath runs as another user.
func TestKernelDatapathReadsAndRemovesWhatIsSpooled(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("this test acts as several users and needs root")
	}
	state, err := os.MkdirTemp("", "spool") // t.TempDir's parent is closed to others
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(state)
	if err := os.Chmod(state, 0o755); err != nil {
		t.Fatal(err)
	}
	dir := prepare(t, state)
	if err := Put(t.Context(), state, deletion.Entry{Owner: owner("a"), Time: time.Now()}); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, owner("a").Key())
	as := func(uid uint32, name string, args ...string) error {
		cmd := exec.Command(name, args...)
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: instance.GroupID, Groups: []uint32{instance.GroupID}}}
		return cmd.Run()
	}
	if err := as(65799, "/bin/cat", path); err == nil {
		t.Error("a reader of the services' group reads the entry")
	}
	if err := as(instance.DatapathID, "/bin/cat", path); err != nil {
		t.Errorf("the datapath's user reads the entry: %v", err)
	}
	if err := as(instance.DatapathID, "/bin/rm", path); err != nil {
		t.Errorf("the datapath's user removes the entry: %v", err)
	}
	if err := as(instance.DatapathID, "/bin/mv", dir, dir+".away"); err == nil {
		t.Error("the datapath's user exchanges the directory")
	}
}

func TestRemoveOfWhatIsNotThereSucceeds(t *testing.T) {
	state := t.TempDir()
	dir := prepare(t, state)
	if err := Remove(dir, owner("a")); err != nil {
		t.Fatal(err)
	}
	if err := Put(t.Context(), state, deletion.Entry{Owner: owner("a")}); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := Remove(dir, owner("a")); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, owner("a").Key())); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the entry is still there: %v", err)
	}
}

// TestPutWaitsForTheLockUntilItsTimeIsUp: a process that was stopped while it wrote must not hold every DEL for ever.
func TestPutWaitsForTheLockUntilItsTimeIsUp(t *testing.T) {
	state := t.TempDir()
	dir := prepare(t, state)
	holder, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer holder.Close()
	if err := unix.Flock(int(holder.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		err := Put(ctx, state, deletion.Entry{Owner: owner("a")})
		if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), dir) {
			t.Errorf("got %v, want the deadline and %s", err, dir)
		}
		// The holder ends while another one waits.
		time.AfterFunc(30*time.Second, func() {
			if err := unix.Flock(int(holder.Fd()), unix.LOCK_UN); err != nil {
				t.Error(err)
			}
		})
		ctx, cancel = context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := Put(ctx, state, deletion.Entry{Owner: owner("a")}); err != nil {
			t.Error(err)
		}
	})
	if waits, err := Has(dir, owner("a")); err != nil || !waits {
		t.Errorf("the entry: %v, %v", waits, err)
	}
}
