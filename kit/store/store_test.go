// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package store_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	bolt "go.etcd.io/bbolt"

	"github.com/sluice-net/sluice/kit/disktest"
	"github.com/sluice-net/sluice/kit/durable"
	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/store"
	"github.com/sluice-net/sluice/kit/store/storetest"
)

func TestMain(m *testing.M) {
	if os.Getenv(inChild) != "" {
		os.Exit(m.Run()) // bbolt leaves a goroutine behind, for which leaktest would wait
	}
	disktest.InMemory()
	leaktest.Main(m)
}

const records = "records"

// options returns the options of the file that the tests use.
func options() store.Options {
	return store.Options{
		Name:   "state.db",
		Layout: store.Layout{Format: "test", Version: 2, Buckets: []string{records}},
		Loss:   "nothing depends on it",
		Doc:    "docs/test.md",
	}
}

// open opens the file in dir. The end of the test, or done, closes it.
func open(t testing.TB, dir string, o store.Options) (s *store.Store, done func(), err error) {
	t.Helper()
	d, err := store.OpenDir(dir, 0o700)
	if err != nil {
		return nil, nil, err
	}
	if s, err = d.Open(o); err != nil {
		if cerr := d.Close(); cerr != nil {
			t.Error(cerr)
		}
		return nil, nil, err
	}
	closed := false
	done = func() {
		if closed {
			return
		}
		closed = true
		if err := errors.Join(s.Close(), d.Close()); err != nil {
			t.Error(err)
		}
	}
	t.Cleanup(done)
	return s, done, nil
}

func mustOpen(t testing.TB, dir string) (s *store.Store, done func()) {
	t.Helper()
	s, done, err := open(t, dir, options())
	if err != nil {
		t.Fatal(err)
	}
	return s, done
}

func put(t testing.TB, s *store.Store, pairs ...string) {
	t.Helper()
	if err := s.Update(func(tx *store.Tx) error {
		for i := 0; i < len(pairs); i += 2 {
			tx.Put(records, []byte(pairs[i]), []byte(pairs[i+1]))
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

func describe(s *store.Store, buckets ...string) (string, error) {
	var b strings.Builder
	err := s.View(func(tx *store.Tx) error {
		for _, name := range buckets {
			if err := tx.ForEach(name, func(k, v []byte) error { fmt.Fprintf(&b, "%s=%s ", k, v); return nil }); err != nil {
				return err
			}
		}
		return nil
	})
	return strings.TrimSpace(b.String()), err
}

func contents(t testing.TB, s *store.Store, buckets ...string) string {
	t.Helper()
	if buckets == nil {
		buckets = []string{records}
	}
	got, err := describe(s, buckets...)
	if err != nil {
		t.Fatal(err)
	}
	return got
}

// filled returns a closed directory whose file has branch pages, free pages and overflow pages.
func filled(t testing.TB) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "state")
	s, done := mustOpen(t, dir)
	defer done()
	for round := range 3 {
		if err := s.Update(func(tx *store.Tx) error {
			for i := range 300 {
				tx.Put(records, fmt.Appendf(nil, "key %04d", i), bytes.Repeat([]byte{byte('a' + round)}, 20+i%70))
			}
			tx.Put(records, []byte("large"), bytes.Repeat([]byte{byte('a' + round)}, 9000))
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	put(t, s, "last", "change")
	return dir
}

func TestUpdatesAreThereAfterARestart(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "b")
	s, done := mustOpen(t, dir)
	if !s.Fresh() {
		t.Error("a new file is not fresh")
	}
	put(t, s, "a", "1", "b", "2")
	put(t, s, "a", "3")
	if err := s.Update(func(tx *store.Tx) error {
		tx.Delete(records, []byte("b"))
		tx.Delete(records, []byte("absent"))
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	done()
	s, _ = mustOpen(t, dir)
	if got := contents(t, s); got != "a=3" || s.Fresh() {
		t.Errorf("%q, fresh %v; want a=3", got, s.Fresh())
	}
	if fi, err := os.Stat(dir); err != nil || fi.Mode().Perm() != 0o700 {
		t.Errorf("the directory: %v, %v; want mode 0700", fi.Mode(), err)
	}
}

func TestRefusedTransactionChangesNothing(t *testing.T) {
	s, _ := mustOpen(t, filepath.Join(t.TempDir(), "state"))
	put(t, s, "a", "1")
	mine := errors.New("mine")
	if err := s.Update(func(tx *store.Tx) error {
		tx.Put(records, []byte("a"), []byte("2"))
		return mine
	}); !errors.Is(err, mine) || errors.Is(err, store.ErrLost) || s.Problem() != nil {
		t.Errorf("%v, problem %v", err, s.Problem())
	}
	if err := s.Update(func(tx *store.Tx) error {
		tx.Put(records, nil, []byte("2"))
		return nil
	}); err == nil || errors.Is(err, store.ErrLost) {
		t.Errorf("a record without a key: %v", err)
	}
	put(t, s, "b", "2")
	if got := contents(t, s); got != "a=1 b=2" {
		t.Errorf("%q", got)
	}
}

// TestDamageIsRefused proves INV-43.
func TestDamageIsRefused(t *testing.T) {
	storetest.Sweep(t, storetest.State{Dir: filled(t), Open: func(dir string) (string, error) {
		s, done, err := open(t, dir, options())
		if err != nil {
			return "", err
		}
		defer done()
		return describe(s, records)
	}})
}

func TestLostFileIsNotANewOne(t *testing.T) {
	dir := filled(t)
	path, marker := filepath.Join(dir, "state.db"), filepath.Join(dir, store.MarkerName)
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	_, _, err := open(t, dir, options())
	if !errors.Is(err, store.ErrMissing) {
		t.Fatalf("%v, want ErrMissing", err)
	}
	for _, part := range []string{
		"state file " + path + " is missing: ", "if nothing depends on it, begin without it: rm -f " + marker, "docs/test.md",
	} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%q does not contain %q", err, part)
		}
	}
	// The steps to recover.
	if err := os.Remove(marker); err != nil {
		t.Fatal(err)
	}
	s, _ := mustOpen(t, dir)
	if got := contents(t, s); got != "" || !s.Fresh() {
		t.Errorf("%q", got)
	}
}

// TestUnlistedFileMayBeAbsent: a cache file that was moved away is created again.
func TestUnlistedFileMayBeAbsent(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	o := options()
	o.Unlisted = true
	for range 2 {
		s, done, err := open(t, dir, o)
		if err != nil || !s.Fresh() {
			t.Fatalf("open: %v, want a new file", err)
		}
		put(t, s, "a", "1")
		done()
		if s, done, err = open(t, dir, o); err != nil || s.Fresh() {
			t.Fatalf("open: %v, want the file with its content", err)
		}
		path := s.Path()
		done()
		if err := os.WriteFile(path, []byte("junk"), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, _, err := open(t, dir, o); !errors.Is(err, store.ErrForeign) && !errors.Is(err, store.ErrCorrupt) {
			t.Errorf("open of junk: %v, want a refusal", err)
		}
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
}

func TestFileWithoutAMarkerIsTakenOver(t *testing.T) {
	dir := filled(t)
	if err := os.Remove(filepath.Join(dir, store.MarkerName)); err != nil {
		t.Fatal(err)
	}
	s, done := mustOpen(t, dir)
	if s.Fresh() || !strings.Contains(contents(t, s), "last=change") {
		t.Error("the file was not read")
	}
	done()
	if err := os.Remove(filepath.Join(dir, "state.db")); err != nil {
		t.Fatal(err)
	}
	if _, _, err := open(t, dir, options()); !errors.Is(err, store.ErrMissing) {
		t.Errorf("%v: the file was not listed when an existing file was opened", err)
	}
}

func TestInterruptedCreationIsBegunAnew(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	half := filepath.Join(dir, "state.db.new")
	if err := os.WriteFile(half, []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	mustOpen(t, dir)
	if _, err := os.Stat(half); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the half file is left: %v", err)
	}
}

func TestNewFileHasWhatInitPuts(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	o := options()
	o.Init = func(tx *store.Tx) error { tx.Put(records, []byte("a"), []byte("1")); return nil }
	s, done, err := open(t, dir, o)
	if err != nil {
		t.Fatal(err)
	}
	if got := contents(t, s); got != "a=1" {
		t.Errorf("%q", got)
	}
	done()
	o.Init = func(*store.Tx) error { t.Error("init of a file that exists"); return nil }
	if s, _, err = open(t, dir, o); err != nil || contents(t, s) != "a=1" {
		t.Errorf("%v", err)
	}
	mine := errors.New("mine")
	o.Init = func(*store.Tx) error { return mine }
	dir = filepath.Join(t.TempDir(), "state")
	if _, _, err := open(t, dir, o); !errors.Is(err, mine) {
		t.Errorf("%v", err)
	}
	if s, _ := mustOpen(t, dir); !s.Fresh() {
		t.Error("a file without its content was created")
	}
}

func TestReserveChangesNothingInTheFile(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	o := options()
	o.Reserve = 4 << 20
	long := strings.Repeat("x", 1<<20)
	var list []string
	for range 8 { // together more than the reserve
		list = append(list, fmt.Sprint("k", len(list)/2), long)
	}
	s, done, err := open(t, dir, o)
	if err != nil {
		t.Fatal(err)
	}
	put(t, s, "a", "1")
	if size := s.Size(); size > 2<<20 {
		t.Errorf("a file with one record has %d bytes: the reserve must not be written", size)
	}
	put(t, s, list...)
	want := contents(t, s)
	done()
	for _, reserve := range []int{0, 64 << 20, 4 << 20} {
		o.Reserve = reserve
		s, done, err := open(t, dir, o)
		if err != nil {
			t.Fatal(err)
		}
		if contents(t, s) != want {
			t.Errorf("with a reserve of %d the contents differ", reserve)
		}
		put(t, s, "a", "1")
		done()
	}
}

// v3 returns options of version 3, which reads version 2 and moves its records to another bucket.
func v3(migrate func(*store.Tx, uint32) error) store.Options {
	o := options()
	o.Previous, o.Layout = []store.Layout{{Format: "test", Version: 1, Buckets: []string{records}}, o.Layout}, store.Layout{Format: "test", Version: 3, Buckets: []string{"moved"}}
	o.Migrate = migrate
	return o
}

func TestPreviousVersionIsMigratedInOneTransaction(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	s, done := mustOpen(t, dir)
	put(t, s, "a", "1", "b", "2")
	done()
	mine := errors.New("mine")
	if _, _, err := open(t, dir, v3(func(tx *store.Tx, _ uint32) error {
		tx.Put("moved", []byte("half"), nil)
		return mine
	})); !errors.Is(err, mine) || !errors.Is(err, store.ErrVersion) || !strings.Contains(err.Error(), "start the version that wrote it") {
		t.Errorf("a failed migration: %v, want its error with the steps to recover", err)
	}
	if s, done = mustOpen(t, dir); contents(t, s) != "a=1 b=2" {
		t.Errorf("after a failed migration: %q", contents(t, s))
	}
	done()
	move := func(tx *store.Tx, from uint32) error {
		if from != 2 {
			return fmt.Errorf("from version %d", from)
		}
		return tx.ForEach(records, func(k, v []byte) error { tx.Put("moved", k, append([]byte("was "), v...)); return nil })
	}
	s, done, err := open(t, dir, v3(move))
	if err != nil || contents(t, s, "moved") != "a=was 1 b=was 2" {
		t.Fatalf("%v", err)
	}
	done()
	if s, done, err = open(t, dir, v3(func(*store.Tx, uint32) error { return mine })); err != nil || contents(t, s, "moved") != "a=was 1 b=was 2" {
		t.Fatalf("the next start: %v", err)
	}
	done()
	if _, _, err := open(t, dir, options()); !errors.Is(err, store.ErrVersion) || !strings.Contains(err.Error(), "start the version that wrote it") {
		t.Errorf("the previous version: %v, want ErrVersion", err)
	}
	o := v3(move)
	o.Layout.Version, o.Previous = 6, []store.Layout{{Version: 4}, {Version: 5}}
	if _, _, err := open(t, dir, o); !errors.Is(err, store.ErrVersion) || !strings.Contains(err.Error(), "reads 4 and 5 and 6") {
		t.Errorf("with two earlier versions: %v, want ErrVersion", err)
	}
}

func TestEachPreviousVersionIsMigrated(t *testing.T) {
	for _, version := range []uint32{1, 2} {
		dir := filepath.Join(t.TempDir(), "state")
		o := options()
		o.Layout.Version = version
		s, done, err := open(t, dir, o)
		if err != nil {
			t.Fatal(err)
		}
		put(t, s, "a", "1")
		done()
		s, done, err = open(t, dir, v3(func(tx *store.Tx, from uint32) error {
			tx.Put("moved", []byte("from"), []byte(fmt.Sprint(from)))
			return nil
		}))
		if want := fmt.Sprint("from=", version); err != nil || contents(t, s, "moved") != want {
			t.Fatalf("version %d: %v, want %s", version, err, want)
		}
		done()
	}
}

func TestForEachWithVisitsTheKeysWithAPrefix(t *testing.T) {
	s, done := mustOpen(t, filepath.Join(t.TempDir(), "state"))
	defer done()
	put(t, s, "a", "1", "b", "2", "ba", "3", "bb\xff", "4", "c", "5")
	for prefix, want := range map[string]string{"": "a b ba bb\xff c", "b": "b ba bb\xff", "ba": "ba", "bb": "bb\xff", "bc": "", "c": "c", "d": "", "\xff": ""} {
		var got []string
		if err := s.View(func(tx *store.Tx) error {
			return tx.ForEachWith(records, []byte(prefix), func(k, _ []byte) error { got = append(got, string(k)); return nil })
		}); err != nil || strings.Join(got, " ") != want {
			t.Errorf("%q: got %q, %v; want %q", prefix, got, err, want)
		}
	}
	mine := errors.New("mine")
	if err := s.View(func(tx *store.Tx) error {
		return tx.ForEachWith(records, []byte("b"), func(_, _ []byte) error { return mine })
	}); !errors.Is(err, mine) {
		t.Errorf("%v, want the error of the function", err)
	}
}

func TestFilesOfOthersAreRefused(t *testing.T) {
	for name, place := range map[string]func(path string) error{
		"another bbolt database": func(path string) error {
			db, err := bolt.Open(path, 0o600, nil)
			if err != nil {
				return err
			}
			return errors.Join(db.Update(func(tx *bolt.Tx) error { _, err := tx.CreateBucket([]byte("meta")); return err }), db.Close())
		},
		"another service's": func(path string) error {
			o := options()
			o.Layout.Format = "other"
			_, done, err := open(t, filepath.Dir(path), o)
			if err == nil {
				done()
			}
			return err
		},
		"a directory": func(path string) error { return os.Mkdir(path, 0o700) },
		"a link":      func(path string) error { return os.Symlink("/etc/hostname", path) },
	} {
		dir := filepath.Join(t.TempDir(), "state")
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(dir, "state.db")
		if err := place(path); err != nil {
			t.Fatal(err)
		}
		_, _, err := open(t, dir, options())
		if err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v, want a refusal that names %s", name, err, path)
		}
	}
}

func TestMarkerOfALaterVersionIsRefused(t *testing.T) {
	dir := filled(t)
	marker := filepath.Join(dir, store.MarkerName)
	later := durable.Schema{Name: "sluice.state.created", Version: 2}
	if err := durable.Save(marker, later, map[string]any{"files": []string{}, "sums": 1}, durable.SyncNone); err != nil {
		t.Fatal(err)
	}
	if _, _, err := open(t, dir, options()); !errors.Is(err, store.ErrVersion) || !strings.Contains(err.Error(), marker) {
		t.Errorf("%v, want ErrVersion", err)
	}
}

func TestDirectoryIsOfOneProcessAndOneUser(t *testing.T) {
	dir := filled(t)
	_, done := mustOpen(t, dir)
	if _, err := durable.Lock(filepath.Join(dir, "lock"), 0); !errors.Is(err, store.ErrLocked) {
		t.Errorf("a second process: %v", err)
	}
	done()
	if err := os.Chmod(dir, 0o750); err != nil { //nolint:gosec // the tested mode
		t.Fatal(err)
	}
	if _, _, err := open(t, dir, options()); !errors.Is(err, store.ErrPermission) || !strings.Contains(err.Error(), "chmod 0700 "+dir) {
		t.Errorf("an open directory: %v", err)
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := store.OpenDir(file, 0o700); err == nil || !strings.Contains(err.Error(), file) {
		t.Errorf("a file: %v", err)
	}
	if _, err := store.OpenDir(filepath.Join(file, "x"), 0o700); err == nil {
		t.Error("a directory below a file was opened")
	}
}

func TestFileOfABootIsRemovedWithTheBoot(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	o := options()
	o.Name, o.Boot = "cache.db", true
	s, done, err := open(t, dir, o)
	if err != nil {
		t.Fatal(err)
	}
	put(t, s, "a", "1")
	path := s.Path()
	done()
	if s, done, err = open(t, dir, o); err != nil || contents(t, s) != "a=1" {
		t.Fatalf("the next process: %v", err)
	}
	done()
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	// Corruption during a boot is not explained by a loss of power.
	if err := os.WriteFile(path, before[:5000], 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := open(t, dir, o); !errors.Is(err, store.ErrCorrupt) || !strings.Contains(err.Error(), path) {
		t.Errorf("%v, want ErrCorrupt", err)
	}
	other := filepath.Join(dir, "cache.00000000-0000-0000-0000-000000000000.db")
	for _, leftover := range []string{other, other + ".new"} {
		if err := os.Rename(path, leftover); err != nil {
			t.Fatal(err)
		}
		if s, done, err = open(t, dir, o); err != nil || contents(t, s) != "" {
			t.Fatalf("the next boot: %v", err)
		}
		done()
		if _, err := os.Stat(leftover); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s of another boot is left", leftover)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, store.MarkerName)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the marker lists a file of one boot: %v", err)
	}
}

// inChild is set in the child process of TestFileCutUnderTheServiceIsAnError.
const inChild = "SLUICE_TEST_STORE_CUT"

func TestFileCutUnderTheServiceIsAnError(t *testing.T) {
	dir := os.Getenv(inChild)
	if dir == "" {
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$",
			"-test.v") //nolint:gosec // runs this test
		cmd.Env = append(os.Environ(), inChild+"="+filled(t))
		out, err := cmd.CombinedOutput()
		if err != nil || !bytes.Contains(out, []byte("--- PASS")) {
			t.Fatalf("%v\n%s", err, out)
		}
		return
	}
	s, _ := mustOpen(t, dir)
	if err := os.Truncate(s.Path(), 8192); err != nil {
		t.Fatal(err)
	}
	change := func(tx *store.Tx) error { tx.Put(records, []byte("a"), []byte("1")); return nil }
	for range 2 {
		if err := s.Update(change); !errors.Is(err, store.ErrLost) || !strings.Contains(err.Error(), s.Path()) {
			t.Errorf("Update: %v, want ErrLost", err)
		}
	}
	if err := s.View(func(tx *store.Tx) error { return tx.ForEach(records, func(_, _ []byte) error { return nil }) }); !errors.Is(err, store.ErrCorrupt) {
		t.Errorf("View: %v, want ErrCorrupt", err)
	}
	if !errors.Is(s.Problem(), store.ErrLost) {
		t.Errorf("problem %v", s.Problem())
	}
}

// FuzzFile corrupts a file arbitrarily: the store must not panic, and must not read anything that
// was not committed.
func FuzzFile(f *testing.F) {
	dir := filled(f)
	good, err := os.ReadFile(filepath.Join(dir, "state.db"))
	if err != nil {
		f.Fatal(err)
	}
	s, done := mustOpen(f, dir)
	want := contents(f, s)
	done()
	f.Add(uint32(4096*3), []byte{1, 2, 3}, uint32(0))
	f.Add(uint32(16), []byte{0xff}, uint32(5000))
	f.Fuzz(func(t *testing.T, at uint32, patch []byte, cut uint32) {
		bad := bytes.Clone(good)
		copy(bad[int(at)%len(bad):], patch)
		if cut > 0 {
			bad = bad[:int(cut)%len(bad)]
		}
		dir := filepath.Join(t.TempDir(), "state")
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "state.db"), bad, 0o600); err != nil {
			t.Fatal(err)
		}
		s, _, err := open(t, dir, options())
		if err != nil {
			return
		}
		if got, err := describe(s, records); err != nil || got != want {
			t.Errorf("a file corrupted at %d was read as something that was never committed: %v", int(at)%len(good), err)
		}
	})
}

// TestUnloadedFileIsReadAgain: the pages of the file leave the process, and the data stay readable.
func TestUnloadedFileIsReadAgain(t *testing.T) {
	s, done := mustOpen(t, filepath.Join(t.TempDir(), "state"))
	defer done()
	const count = 4_000
	value := bytes.Repeat([]byte("v"), 1_000)
	key := func(i int) []byte { return binary.BigEndian.AppendUint32(nil, uint32(i)) }
	if err := s.Update(func(tx *store.Tx) error {
		for i := range count {
			tx.Put(records, key(i), value)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	read := func() {
		t.Helper()
		if err := s.View(func(tx *store.Tx) error {
			for i := range count {
				if got := tx.Get(records, key(i)); !bytes.Equal(got, value) {
					return fmt.Errorf("record %d is %q", i, got)
				}
			}
			return nil
		}); err != nil {
			t.Error(err)
		}
	}
	mapped := func() (kb int) {
		t.Helper()
		smaps, err := os.ReadFile("/proc/self/smaps")
		if err != nil {
			t.Fatal(err)
		}
		_, after, ok := strings.Cut(string(smaps), s.Path()+"\n")
		if !ok {
			t.Fatalf("%s is not mapped", s.Path())
		}
		_, after, _ = strings.Cut(after, "Rss:")
		if _, err := fmt.Sscan(after, &kb); err != nil {
			t.Fatal(err)
		}
		return kb
	}
	read()
	before := mapped()
	if before < count {
		t.Fatalf("%d kB of the file are mapped, want more than its records", before)
	}
	if err := s.Unload(); err != nil {
		t.Fatal(err)
	}
	if after := mapped(); after > before/10 {
		t.Errorf("%d kB of the file were mapped, and %d kB afterwards", before, after)
	}
	read()
	if err := s.Update(func(tx *store.Tx) error { tx.Delete(records, key(0)); return nil }); err != nil {
		t.Error(err)
	}
}

// TestRefusalsSayTheSameOfAllFiles compares the whole text for each fault: other packages use it for their own files.
func TestRefusalsSayTheSameOfAllFiles(t *testing.T) {
	for kind, want := range map[error]string{
		store.ErrCorrupt: "state file /s/x.db is corrupt: page 3; the file was not changed: either restore a copy of it, " +
			"or, if no pod runs, begin without it: mv /s/x.db /s/x.db.refused (docs/x.md)",
		store.ErrForeign: "state file /s/x.db is of another program: page 3; the file was not changed: either restore a " +
			"copy of it, or, if no pod runs, begin without it: mv /s/x.db /s/x.db.refused (docs/x.md)",
		store.ErrVersion: "state file /s/x.db is written by another version: page 3; the file was not changed: either " +
			"start the version that wrote it, or, if no pod runs, begin without it: mv /s/x.db /s/x.db.refused (docs/x.md)",
		store.ErrMissing: "state file /s/x.db is missing: page 3; either restore a copy of it, or, if no pod runs, begin " +
			"without it: mv /s/x.db /s/x.db.refused (docs/x.md)",
	} {
		detail := errors.New("page 3")
		err := error(&store.Refusal{
			Path: "/s/x.db", Kind: kind, Detail: detail, Commands: store.SetAside("/s/x.db"), Loss: "no pod runs",
			Doc: "docs/x.md",
		})
		if err.Error() != want || !errors.Is(err, kind) || !errors.Is(err, detail) {
			t.Errorf("got  %v\nwant %s", err, want)
		}
	}
}
