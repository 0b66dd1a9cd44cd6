// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package journal

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/disktest"
	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/store"
)

func TestMain(m *testing.M) {
	disktest.InMemory()
	leaktest.Main(m)
}

// object is the object type of the tests. Its record is its revision and its text.
type object struct {
	Name     string
	Revision uint64
	Text     []byte
	Note     string // the annotation
}

var errUnknown = errors.New("the record has no revision")

func optionsOf(staged bool) Options[object] {
	return Options[object]{
		Codec: Codec[object]{
			Key:    func(o *object) string { return o.Name },
			Size:   func(o *object) int { return len(o.Text) },
			Encode: func(o *object) []byte { return fmt.Appendf(nil, "%d %s", o.Revision, o.Text) },
			Decode: func(key string, record, annotation []byte) (object, error) {
				revision, text, found := bytes.Cut(record, []byte(" "))
				o := object{Name: key, Text: bytes.Clone(text), Note: string(annotation)}
				if _, err := fmt.Sscan(string(revision), &o.Revision); err != nil || !found {
					return o, errUnknown
				}
				return o, nil
			},
			Annotate: func(o *object) []byte { return []byte(o.Note) },
		},
		File: store.Options{
			Name: "objects.db", Layout: store.Layout{Format: "test", Version: 1, Buckets: []string{"objects", "state"}},
			Reserve: 256 << 20,
			Loss:    "nothing is needed", Doc: "no page",
		},
		Objects: "objects", State: "state", Staged: staged, Annotations: "note\x00",
		Cache: &store.Options{
			Name: "cache.db", Layout: store.Layout{Format: "test-cache", Version: 1, Buckets: []string{"one", "two"}},
			Boot: true, Loss: "it is said again",
		},
	}
}

// openAs opens a journal and returns it with the replayed objects, by name.
func openAs(t testing.TB, dir string, o Options[object]) (j *Journal[object], got map[string]string, err error) {
	t.Helper()
	d, err := store.OpenDir(dir, DirMode)
	if err != nil {
		return nil, nil, err
	}
	if j, err = Open(d, o); err != nil {
		return nil, nil, err
	}
	got = make(map[string]string)
	revision, err := j.Replay(Contents[object]{
		State:  func(key string, value []byte) error { got["state "+key] = string(value); return nil },
		Object: func(o object) error { got["object "+o.Name] = description(o); return nil },
		Cached: func(bucket string, value []byte) error { got["cached "+bucket] += string(value); return nil },
	})
	if err != nil {
		return nil, nil, errors.Join(err, j.Close())
	}
	if revision != 0 {
		got["revision"] = fmt.Sprint(revision)
	}
	return j, got, nil
}

func description(o object) string { return fmt.Sprintf("%d %q %s", o.Revision, o.Text, o.Note) }

func open(t testing.TB, dir string) (*Journal[object], map[string]string, error) {
	t.Helper()
	return openAs(t, dir, optionsOf(true))
}

func mustOpen(t testing.TB, dir string) (*Journal[object], map[string]string) {
	t.Helper()
	j, got, err := open(t, dir)
	if err != nil {
		t.Fatal(err)
	}
	return j, got
}

func closed(t testing.TB, j *Journal[object]) {
	t.Helper()
	if err := j.Close(); err != nil {
		t.Error(err)
	}
}

func describe(got map[string]string) string {
	var b strings.Builder
	for _, k := range slices.Sorted(maps.Keys(got)) {
		fmt.Fprintf(&b, "%s: %s\n", k, got[k])
	}
	return b.String()
}

func named(name string, revision uint64) object {
	return object{Name: name, Revision: revision, Text: fmt.Appendf(nil, "text of %s", name)}
}

func commit(t testing.TB, j *Journal[object], c Change[object]) {
	t.Helper()
	if err := j.Commit(t.Context(), c); err != nil {
		t.Fatal(err)
	}
}

// many returns a change of 10,000 objects with texts of the given size.
func many(size int) Change[object] {
	c := Change[object]{Revision: 1}
	for i := range 10_000 {
		o := named(fmt.Sprint("object ", i), 1)
		o.Text = bytes.Repeat([]byte("x"), size)
		c.Puts = append(c.Puts, o)
	}
	return c
}

func TestJournalHasItsContentsAfterARestart(t *testing.T) {
	for _, staged := range []bool{false, true} {
		dir := filepath.Join(t.TempDir(), "state")
		o := optionsOf(staged)
		j, _, err := openAs(t, dir, o)
		if err != nil {
			t.Fatal(err)
		}
		noted, gone := named("noted", 1), named("gone", 1)
		noted.Note, gone.Note = "a note", "another"
		commit(t, j, Change[object]{State: map[string][]byte{"name": []byte("x")}})
		commit(t, j, Change[object]{Revision: 1, Puts: []object{noted, gone, named("once noted", 1)}})
		commit(t, j, Change[object]{Revision: 2, Puts: []object{named("once noted", 2)}, Deletes: []string{"gone", "absent"}})
		for _, records := range []map[CacheKey][]byte{
			{{"one", "a"}: []byte("1"), {"one", "b"}: []byte("2"), {"two", "a"}: []byte("3")}, {{"one", "a"}: nil},
		} {
			if err := j.Note(t.Context(), records); err != nil {
				t.Fatal(err)
			}
			if len(j.waiting) > 0 {
				t.Errorf("%d cache records still wait after they were written", len(j.waiting))
			}
		}
		closed(t, j)
		want := `cached one: 2
cached two: 3
object noted: 1 "text of noted" a note
object once noted: 2 "text of once noted" 
revision: 2
state name: x
`
		for range 2 {
			j, got, err := openAs(t, dir, o)
			if err != nil || describe(got) != want {
				t.Fatalf("staged %v: %v, got\n%swant\n%s", staged, err, describe(got), want)
			}
			if n := records(t, j, "state"); n != 3+map[bool]int{true: 1}[staged] { // name, revision, note; number
				t.Errorf("staged %v: %d records of the state: a removed object still has an annotation", staged, n)
			}
			closed(t, j)
		}
	}
}

// TestUnstagedChangeIsOneTransaction: records without change numbers in their keys take effect when they are written.
func TestUnstagedChangeIsOneTransaction(t *testing.T) {
	root := t.TempDir()
	dir := filepath.Join(root, "state")
	disk := disktest.New(t, root)
	disk.Run(t, func() {
		j, _, err := openAs(t, dir, optionsOf(false))
		if err != nil {
			t.Error(err)
			return
		}
		defer closed(t, j)
		commit(t, j, Change[object]{Revision: 1, Puts: []object{named("first", 1)}})
		c := many(1000)
		c.Revision = 2
		if !j.Fits(c) {
			t.Error("Fits reports that a change must be staged")
		}
		for _, limit := range []int{20, 200, 1000} { // limit on the writes of one transaction
			writes := 0
			disk.Fail(func(o disktest.Op) error {
				if o.Kind == disktest.Write {
					if writes++; writes > limit {
						return unix.ENOSPC
					}
				}
				return nil
			})
			if err := j.Commit(t.Context(), c); !errors.Is(err, store.ErrFull) {
				t.Errorf("after %d writes: %v, want ErrFull", limit, err)
			}
			if !errors.Is(j.Problem(), store.ErrFull) {
				t.Errorf("after %d writes, the problem is %v", limit, j.Problem())
			}
			if n := records(t, j, "objects"); n != 1 {
				t.Errorf("after %d writes there are %d objects, want 1", limit, n)
			}
		}
		disk.Fail(nil)
		if err := j.Flush(); err != nil || j.Problem() != nil {
			t.Errorf("with space again: %v, problem %v", err, j.Problem())
		}
	})
	j, got, err := openAs(t, dir, optionsOf(false))
	if err != nil || len(got) != 2 || got["revision"] != "1" {
		t.Fatalf("%v, got\n%s", err, describe(got))
	}
	commit(t, j, many(1000))
	closed(t, j)
	j, got, err = openAs(t, dir, optionsOf(false))
	if err != nil || len(got) != 10_002 {
		t.Fatalf("%v, got %d", err, len(got))
	}
	closed(t, j)
}

// TestRecordsThatAreNotUnderstoodAreRefused checks that an unreadable record prevents the start
// with an error that names the file and the steps to recover.
func TestRecordsThatAreNotUnderstoodAreRefused(t *testing.T) {
	for name, put := range map[string]func(*store.Tx){
		"no revision":    func(tx *store.Tx) { tx.Put("objects", StagedKey("a", 0), []byte("text")) },
		"no number":      func(tx *store.Tx) { tx.Put("objects", []byte("a"), []byte("1 text")) },
		`"revision"`:     func(tx *store.Tx) { tx.Put("state", []byte(keyRevision), []byte("seven")) },
		`"change"`:       func(tx *store.Tx) { tx.Put("state", []byte(keyNumber), []byte("seven")) },
		"bad name, said": func(tx *store.Tx) { tx.Put("state", []byte("bad"), []byte("name, said")) },
	} {
		dir := filepath.Join(t.TempDir(), "state")
		j, _ := mustOpen(t, dir)
		err := j.update(func(tx *store.Tx) error { put(tx); return nil })
		path := j.file.Path()
		closed(t, j)
		d, derr := store.OpenDir(dir, DirMode)
		if err := errors.Join(err, derr); err != nil {
			t.Fatal(err)
		}
		if j, err = Open(d, optionsOf(true)); err != nil {
			t.Fatal(err)
		}
		_, err = j.Replay(Contents[object]{
			State: func(key string, value []byte) error {
				return fmt.Errorf("%s %s", key, value)
			},
			Object: func(object) error { return nil },
		})
		if !errors.Is(err, store.ErrCorrupt) || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
		closed(t, j)
	}
}
