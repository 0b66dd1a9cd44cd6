// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package spool

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"
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
