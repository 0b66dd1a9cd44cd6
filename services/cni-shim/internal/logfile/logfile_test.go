// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package logfile

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

func TestTurningLosesNoRecordOfConcurrentWriters(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log", "cni.log")
	const writers, each, limit = 8, 20, 3000
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			for i := range each {
				f, err := open(path, limit)
				if err != nil {
					t.Error(err)
					return
				}
				if _, err := fmt.Fprintf(f, "{record %d-%d\n", w, i); err != nil {
					t.Error(err)
				}
				f.Close()
			}
		})
	}
	wg.Wait()
	seen := map[string]int{}
	files, err := filepath.Glob(path + "*")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range files {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		for line := range bytes.Lines(b) {
			seen[string(line)]++
		}
	}
	if len(seen) != writers*each {
		t.Errorf("%d different records in %v, want %d", len(seen), files, writers*each)
	}
}

func TestOldFilesGo(t *testing.T) {
	path := filepath.Join(t.TempDir(), "cni.log")
	for i := range 10 {
		f, err := open(path, 1)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(f, "{%d\n", i)
		f.Close()
	}
	files, err := filepath.Glob(path + "*")
	if err != nil {
		t.Fatal(err)
	}
	if len(files) != Keep+1 {
		t.Errorf("%v, want the log and %d old ones", files, Keep)
	}
	if b, err := os.ReadFile(path); err != nil || string(b) != "{9\n" {
		t.Errorf("newest record %q, %v", b, err)
	}
}

// TestOnlyALogIsAppendedTo: a configuration that names another file must not change it.
func TestOnlyALogIsAppendedTo(t *testing.T) {
	for name, c := range map[string]struct {
		path func(dir string) string // of the log
		make func(dir string) error
		ok   bool
	}{
		"nothing there":       {make: func(string) error { return nil }, ok: true},
		"a log":               {make: func(dir string) error { return os.WriteFile(dir+"/cni.log", []byte(`{"time":"x"}`+"\n"), 0o640) }, ok: true},
		"an empty file":       {make: func(dir string) error { return os.WriteFile(dir+"/cni.log", nil, 0o640) }, ok: true},
		"a directory to make": {path: func(dir string) string { return dir + "/a/cni.log" }, make: func(string) error { return nil }, ok: true},
		"a tree to make":      {path: func(dir string) string { return dir + "/a/b/cni.log" }, make: func(string) error { return nil }},
		"a file of others":    {make: func(dir string) error { return os.WriteFile(dir+"/cni.log", []byte("root:x:0:0\n"), 0o640) }},
		"a file that everybody can write": {make: func(dir string) error {
			return errors.Join(os.WriteFile(dir+"/cni.log", nil, 0o640), os.Chmod(dir+"/cni.log", 0o666))
		}},
		"a directory that everybody can write": {make: func(dir string) error { return os.Chmod(dir, 0o777|fs.ModeSticky) }},
		"a second name of a file": {make: func(dir string) error {
			return errors.Join(os.WriteFile(dir+"/other", []byte("{}"), 0o640), os.Link(dir+"/other", dir+"/cni.log"))
		}},
		"a directory that is a link": {
			path: func(dir string) string { return dir + "/log/cni.log" },
			make: func(dir string) error {
				return errors.Join(os.Mkdir(dir+"/elsewhere", 0o755), os.Symlink("elsewhere", dir+"/log"))
			},
		},
		"a pipe": {make: func(dir string) error { return unix.Mkfifo(dir+"/cni.log", 0o600) }},
	} {
		dir := t.TempDir()
		if err := c.make(dir); err != nil {
			t.Fatal(err)
		}
		path := dir + "/cni.log"
		if c.path != nil {
			path = c.path(dir)
		}
		before, _ := os.ReadFile(dir + "/other")
		f, err := Open(path)
		if f != nil {
			f.Close()
		}
		if c.ok != (err == nil) || c.path == nil && !c.ok && !errors.Is(err, ErrForeign) {
			t.Errorf("%s: %v", name, err)
		}
		if files, _ := os.ReadDir(dir + "/elsewhere"); len(files) > 0 {
			t.Errorf("%s: a file was made behind it", name)
		}
		if files, _ := os.ReadDir(dir); !c.ok && name == "a directory that everybody can write" && len(files) > 0 {
			t.Errorf("%s: a file was made", name)
		}
		if after, _ := os.ReadFile(dir + "/other"); !bytes.Equal(before, after) {
			t.Errorf("%s: the file was changed", name)
		}
	}
}

func TestALinkIsNotFollowed(t *testing.T) {
	dir := t.TempDir()
	if err := os.Symlink("/etc/passwd", filepath.Join(dir, "cni.log")); err != nil {
		t.Fatal(err)
	}
	if f, err := Open(filepath.Join(dir, "cni.log")); err == nil {
		f.Close()
		t.Error("the link was opened")
	}
}

func TestAProcessThatIsStuckWhileTurningHoldsNobodyUp(t *testing.T) {
	path := filepath.Join(t.TempDir(), "cni.log")
	if err := os.WriteFile(path, []byte("{old\n"), 0o640); err != nil {
		t.Fatal(err)
	}
	stuck, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer stuck.Close()
	if err := unix.Flock(int(stuck.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	f, err := open(path, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := fmt.Fprintln(f, "new"); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(path); err != nil || string(b) != "{old\nnew\n" {
		t.Errorf("the log holds %q, %v", b, err)
	}
}
