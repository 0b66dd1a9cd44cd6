// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package spool

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/instance"
)

func TestPutIsBoundedUnderConcurrentWriters(t *testing.T) {
	state := t.TempDir()
	dir := Dir(state)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
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
			err := Put(state, Entry{ContainerID: fmt.Sprint("c", i), InterfaceName: "eth0", Time: time.Now()})
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

// A deletion in a directory where no datapath looks is lost: the answer must
// not say that it was taken.
func TestOnlyTheStateDirectoryOfANodeTakesDeletions(t *testing.T) {
	for name, c := range map[string]struct {
		make func(state string) error
		ok   bool
	}{
		"a directory of root's":        {make: func(state string) error { return os.Mkdir(state, 0o755) }, ok: true},
		"nothing, as after a typo":     {make: func(string) error { return nil }},
		"a file":                       {make: func(state string) error { return os.WriteFile(state, nil, 0o600) }},
		"a directory open to everyone": {make: func(state string) error { return errors.Join(os.Mkdir(state, 0o755), os.Chmod(state, 0o777)) }},
	} {
		root := t.TempDir()
		state := filepath.Join(root, "sluice")
		if err := c.make(state); err != nil {
			t.Fatal(err)
		}
		err := Put(state, Entry{ContainerID: "a", InterfaceName: "eth0"})
		if c.ok != (err == nil) || !c.ok && !errors.Is(err, ErrNoState) {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := os.Stat(Dir(state)); c.ok != (err == nil) {
			t.Errorf("%s: the spool: %v", name, err)
		}
	}
}

// TestKernelDatapathReadsAndRemovesWhatIsSpooled: it is another user, and the
// directory may not have been prepared.
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
	dir := Dir(state)
	if err := Put(state, Entry{ContainerID: "a", InterfaceName: "eth0", Time: time.Now()}); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, Name("a", "eth0"))
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
	dir := Dir(state)
	if err := Remove(dir, "a", "eth0"); err != nil {
		t.Fatal(err)
	}
	if err := Put(state, Entry{ContainerID: "a", InterfaceName: "eth0"}); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := Remove(dir, "a", "eth0"); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, Name("a", "eth0"))); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the entry is still there: %v", err)
	}
}
