// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package snapshot

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/disktest"
	"github.com/sluice-net/sluice/kit/durable"
	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/store"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
)

func TestMain(m *testing.M) {
	disktest.InMemory()
	leaktest.Main(m)
}

const otherBoot = "99999999-2222-3333-4444-555555555555"

func id(t testing.TB, n identity.Numeric, app string) identity.Identity {
	t.Helper()
	l, err := label.Canonicalize(label.Label{Source: "k8s", Key: "app", Value: app})
	if err != nil {
		t.Fatal(err)
	}
	return identity.Identity{Number: n, Labels: l}
}

func opened(t testing.TB, path, node string) (*Dir, Loaded, error) {
	t.Helper()
	d, err := Open(path, node)
	if err != nil {
		t.Fatal(err)
	}
	l, err := d.Load()
	slices.SortFunc(l.Holds.Holders, func(x, y allocator.HolderRecord) int { return cmp.Compare(x.Holder, y.Holder) })
	slices.SortFunc(l.Known.Identities, identity.Compare)
	return d, l, err
}

// load starts like a process: it opens the directory, loads the state and closes the directory.
func load(t testing.TB, path, node string) (Loaded, error) {
	t.Helper()
	d, l, err := opened(t, path, node)
	if cerr := d.Close(); cerr != nil {
		t.Fatal(cerr)
	}
	return l, err
}

// saveKnown is like SaveKnown, but with a change that is known beforehand.
func saveKnown(d *Dir, c allocator.KnownChange) error {
	return d.SaveKnown(func() allocator.KnownChange { return c })
}

func boot(t testing.TB) string {
	t.Helper()
	b, err := durable.BootID()
	if err != nil || len(b) != 36 {
		t.Fatalf("boot id %q, %v", b, err)
	}
	return b
}

// stateDir returns a directory that does not exist yet: the service creates it.
func stateDir(t testing.TB) string { return filepath.Join(t.TempDir(), "state") }

func saved(t testing.TB) (path string, want Loaded) {
	t.Helper()
	path = stateDir(t)
	d, l, err := opened(t, path, "n1")
	if err != nil {
		t.Fatal(err)
	}
	want = Loaded{
		Incarnation: l.Incarnation, Cached: true,
		Holds: allocator.Holds{NextNodeLocal: identity.MinNodeLocal + 7, Session: "1 2", Holders: []allocator.HolderRecord{
			{Holder: allocator.EndpointHolder("c1", "eth0"), Identity: id(t, 300, "web;=\\"), Workload: allocator.Workload{
				Manager: "kubernetes", Network: "pods", Pod: workload.PodReference{Namespace: "shop", Name: "web-0"}, Addresses: []string{"10.0.0.2", "fd00::2"},
			}},
			{Holder: allocator.EndpointHolder("c2", "eth0"), Identity: id(t, 300, "web;=\\")},
			{Holder: allocator.ReferenceHolder("x"), Identity: id(t, identity.MinNodeLocal, "local")},
		}},
		Known: allocator.Known{Identities: []identity.Identity{id(t, 300, "web;=\\"), id(t, 301, "db")}, Heard: time.UnixMilli(1_700_000_000_123)},
	}
	if err := errors.Join(
		d.SaveHolds(allocator.HoldsChange{Put: want.Holds.Holders, NextNodeLocal: want.Holds.NextNodeLocal, Session: want.Holds.Session}),
		saveKnown(d, allocator.KnownChange{Put: want.Known.Identities, Heard: want.Known.Heard}),
		d.Close(),
	); err != nil {
		t.Fatal(err)
	}
	return path, want
}

func TestWhatWasSavedIsLoaded(t *testing.T) {
	path, want := saved(t)
	if got, err := load(t, path, "n1"); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("loaded %+v, %v\nwant %+v", got, err, want)
	}
}

func TestEmptyDirectoryIsAFirstStart(t *testing.T) {
	got, err := load(t, stateDir(t), "n1")
	if err != nil || !reflect.DeepEqual(got, Loaded{Incarnation: got.Incarnation}) || len(got.Incarnation) != 32 {
		t.Errorf("loaded %+v, %v, want nothing", got, err)
	}
}

func TestChangesAreAddedToWhatWasSaved(t *testing.T) {
	path, want := saved(t)
	d, _, err := opened(t, path, "n1")
	if err != nil {
		t.Fatal(err)
	}
	moved := want.Holds.Holders[1]
	moved.Identity = id(t, 302, "new")
	if err := errors.Join(
		d.SaveHolds(allocator.HoldsChange{Put: []allocator.HolderRecord{moved}, Drop: []allocator.Holder{want.Holds.Holders[2].Holder}, NextNodeLocal: identity.MinNodeLocal, Session: "3 4"}),
		saveKnown(d, allocator.KnownChange{
			Put: []identity.Identity{id(t, 302, "new")}, Drop: []identity.Numeric{301},
			Heard: time.UnixMilli(1_800_000_000_000),
		}),
		d.Close(),
	); err != nil {
		t.Fatal(err)
	}
	want.Holds = allocator.Holds{NextNodeLocal: identity.MinNodeLocal, Session: "3 4", Holders: []allocator.HolderRecord{want.Holds.Holders[0], moved}}
	want.Known = allocator.Known{Identities: []identity.Identity{id(t, 300, "web;=\\"), id(t, 302, "new")}, Heard: time.UnixMilli(1_800_000_000_000)}
	if got, err := load(t, path, "n1"); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("loaded %+v, %v\nwant %+v", got, err, want)
	}
}

// TestNotedChangesAreKnownAfterAKill: changes that were noted between two writes of the cache survive a kill.
func TestNotedChangesAreKnownAfterAKill(t *testing.T) {
	path, want := saved(t)
	d, _, err := opened(t, path, "n1")
	if err != nil {
		t.Fatal(err)
	}
	note := func(d *Dir, c allocator.KnownChange) {
		t.Helper()
		if err := d.NoteKnown(c); err != nil {
			t.Fatal(err)
		}
	}
	note(d, allocator.KnownChange{Put: []identity.Identity{id(t, 302, "new"), id(t, 303, "newer")}})
	note(d, allocator.KnownChange{Drop: []identity.Numeric{301, 303}})
	if err := d.Close(); err != nil { // nothing else is written at the end
		t.Fatal(err)
	}
	want.Known.Identities = []identity.Identity{id(t, 300, "web;=\\"), id(t, 302, "new")}
	d, got, err := opened(t, path, "n1")
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("loaded %+v, %v\nwant %+v", got, err, want)
	}
	// Writing the cache removes the notes that it contains. A note that differs from the cache stays, here the note of
	// identity 304.
	note(d, allocator.KnownChange{Put: []identity.Identity{id(t, 304, "late")}})
	if err := errors.Join(saveKnown(d, allocator.KnownChange{
		Put: []identity.Identity{id(t, 302, "new")}, Drop: []identity.Numeric{301, 303, 304}, Heard: want.Known.Heard,
	}), d.Close()); err != nil {
		t.Fatal(err)
	}
	d, got, err = opened(t, path, "n1")
	want.Known.Identities = append(want.Known.Identities, id(t, 304, "late"))
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("loaded %+v, %v\nwant %+v", got, err, want)
	}
	left := 0
	if err := d.holds.View(func(tx *store.Tx) error {
		return tx.ForEach(bucketRecent, func(_, _ []byte) error { left++; return nil })
	}); err != nil || left != 1 {
		t.Errorf("%d changes are noted, %v, want 1", left, err)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestCacheWithoutAChangeWritesNoHolders: the time of the last contact with the store is only in the cache. Writing the
// file of holders for it would cost a sync each time.
func TestCacheWithoutAChangeWritesNoHolders(t *testing.T) {
	path, _ := saved(t)
	d, _, err := opened(t, path, "n1")
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	holds := func() []byte {
		t.Helper()
		files, err := filepath.Glob(filepath.Join(path, "holds.*"))
		if err != nil || len(files) != 1 {
			t.Fatalf("files of holders: %q, %v", files, err)
		}
		content, err := os.ReadFile(files[0])
		if err != nil {
			t.Fatal(err)
		}
		return content
	}
	before := holds()
	if err := saveKnown(d, allocator.KnownChange{Heard: time.UnixMilli(1_800_000_000_001)}); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(holds(), before) {
		t.Error("the file of the holders has changed")
	}
}

func TestHoldersOfAnotherBootAreDropped(t *testing.T) {
	path, want := saved(t)
	// The content of the file does not matter.
	for _, name := range []string{HoldsFile(otherBoot), oldHoldsFile(otherBoot)} {
		if err := os.WriteFile(filepath.Join(path, name), []byte("junk"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := load(t, path, "n1"); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("loaded %+v, %v\nwant %+v", got, err, want)
	}
	for _, name := range []string{HoldsFile(otherBoot), oldHoldsFile(otherBoot)} {
		if _, err := os.Stat(filepath.Join(path, name)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is still there: %v", name, err)
		}
	}
	// This is the state after a reboot: the cache exists, the holds and the data of that boot do not.
	rec := incarnationRecord{Incarnation: want.Incarnation, Boot: otherBoot}
	if err := errors.Join(
		os.Rename(filepath.Join(path, HoldsFile(boot(t))), filepath.Join(path, HoldsFile(otherBoot))),
		durable.Save(filepath.Join(path, IncarnationFile), incarnationSchema, rec, durable.SyncNone),
	); err != nil {
		t.Fatal(err)
	}
	want.Holds = allocator.Holds{}
	if got, err := load(t, path, "n1"); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("after a reboot: loaded %+v, %v\nwant %+v", got, err, want)
	}
}

func TestStateOfAnotherNodeIsRefused(t *testing.T) {
	path, _ := saved(t)
	if _, err := load(t, path, "n2"); !errors.Is(err, ErrOtherNode) || !strings.Contains(err.Error(), HoldsFile(boot(t))) {
		t.Errorf("error %v, want ErrOtherNode that names the file", err)
	}
}

// wayOut is a command that a shell takes: a file gets another name.
var wayOut = regexp.MustCompile(`: mv (/\S+) /\S+\.refused`)

// TestCorruptHoldsAreRefusedAndLeftAlone: if the service started without them, the cluster could collect numbers that
// endpoints use.
func TestCorruptHoldsAreRefusedAndLeftAlone(t *testing.T) {
	corrupt := map[string]func(path string, whole []byte) error{
		"absent": func(path string, _ []byte) error { return os.Remove(path) },
		"empty":  func(path string, _ []byte) error { return os.WriteFile(path, nil, 0o600) },
		"junk":   func(path string, _ []byte) error { return os.WriteFile(path, []byte("junk"), 0o600) },
		"cut":    func(path string, whole []byte) error { return os.WriteFile(path, whole[:len(whole)/2], 0o600) },
		"garbled": func(path string, whole []byte) error {
			return os.WriteFile(path, bytes.ReplaceAll(whole, []byte("k8s:app=web"), []byte("k8s:app=xxx")), 0o600)
		},
	}
	for name, damage := range corrupt {
		path, _ := saved(t)
		file := filepath.Join(path, HoldsFile(boot(t)))
		whole, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if err := damage(file, whole); err != nil {
			t.Fatal(err)
		}
		before, _ := os.ReadFile(file)
		for range 2 { // also the next time
			_, err := load(t, path, "n1")
			known := errors.Is(err, store.ErrCorrupt) || errors.Is(err, store.ErrForeign) || errors.Is(err, store.ErrMissing)
			if !known || !strings.Contains(fmt.Sprint(err), "state file "+file+" is ") {
				t.Errorf("%s: %v, want a refusal that names the file", name, err)
			}
			if !wayOut.MatchString(fmt.Sprint(err)) {
				t.Errorf("%s: %v, want the command that leads out of it", name, err)
			}
		}
		if after, _ := os.ReadFile(file); !bytes.Equal(after, before) {
			t.Errorf("%s: the file was changed", name)
		}
	}
}

func TestCorruptCacheIsPutAsideAndHoldsStay(t *testing.T) {
	for name, junk := range map[string][]byte{"junk": []byte("junk"), "empty": nil} {
		path, want := saved(t)
		file := filepath.Join(path, KnownFile)
		if err := os.WriteFile(file, junk, 0o600); err != nil {
			t.Fatal(err)
		}
		got, err := load(t, path, "n1")
		if err != nil || got.Cached || len(got.Known.Identities) != 0 || !got.Known.Heard.IsZero() || !reflect.DeepEqual(got.Holds, want.Holds) {
			t.Errorf("%s: loaded %+v, %v, want the holds and no cache", name, got, err)
		}
		if got.Damaged == nil || !strings.Contains(got.Damaged.Error(), file) {
			t.Errorf("%s: %v does not name %s", name, got.Damaged, file)
		}
		if kept, err := os.ReadFile(filepath.Join(path, DamagedFile)); err != nil || !bytes.Equal(kept, junk) {
			t.Errorf("%s: put aside: %q, %v, want %q", name, kept, err, junk)
		}
		if got, err := load(t, path, "n1"); err != nil || got.Damaged != nil || got.Cached {
			t.Errorf("%s: the next start: %+v, %v, want no cache", name, got, err)
		}
	}
}

// TestFilesOfTheVersionBeforeAreTakenOver: the first start converts the files of the previous version and removes
// them; the second start loads the same state.
func TestFilesOfTheVersionBeforeAreTakenOver(t *testing.T) {
	path := stateDir(t)
	if err := os.Mkdir(path, 0o750); err != nil {
		t.Fatal(err)
	}
	write := func(name string, s durable.Schema, data string) {
		t.Helper()
		if err := durable.Save(filepath.Join(path, name), s, json.RawMessage(data), durable.SyncNone); err != nil {
			t.Fatal(err)
		}
	}
	write(oldHoldsFile(boot(t)), holdsSchema, `{"boot_id":"`+boot(t)+`","node":"n1","next_node_local":16711687,`+
		`"holders":[{"holder":"endpoint:c1/eth0","number":300,"labels":"k8s:app=web;"}]}`)
	write(oldKnownFile, knownSchema, `{"identities":[{"number":300,"labels":"k8s:app=web;"},{"number":301,"labels":"k8s:app=db;"}]}`)
	for range 2 {
		got, err := load(t, path, "n1")
		want := Loaded{
			Incarnation: got.Incarnation, Cached: true,
			Holds: allocator.Holds{NextNodeLocal: 16711687, Holders: []allocator.HolderRecord{{Holder: allocator.EndpointHolder("c1", "eth0"), Identity: id(t, 300, "web")}}},
			Known: allocator.Known{Identities: []identity.Identity{id(t, 300, "web"), id(t, 301, "db")}}, // never heard
		}
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("loaded %+v, %v\nwant %+v", got, err, want)
		}
	}
	for _, name := range []string{oldHoldsFile(boot(t)), oldKnownFile} {
		if _, err := os.Stat(filepath.Join(path, name)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is still there: %v", name, err)
		}
	}
}

func TestCorruptHoldsOfTheVersionBeforeAreRefused(t *testing.T) {
	path := stateDir(t)
	if err := os.Mkdir(path, 0o750); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(path, oldHoldsFile(boot(t)))
	if err := os.WriteFile(file, []byte(`{"schema"`), 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if _, err := load(t, path, "n1"); !errors.Is(err, durable.ErrCorrupt) || !strings.Contains(err.Error(), file) {
			t.Errorf("%v, want a refusal that names %s", err, file)
		}
	}
}

// TestLongestReferenceIsReadAgain: the longest reference that the API accepts is loaded again.
func TestLongestReferenceIsReadAgain(t *testing.T) {
	path := stateDir(t)
	d, _, err := opened(t, path, "n1")
	if err != nil {
		t.Fatal(err)
	}
	want := []allocator.HolderRecord{{Holder: allocator.ReferenceHolder(strings.Repeat("😀", 256)), Identity: id(t, 300, "web")}}
	if err := errors.Join(d.SaveHolds(allocator.HoldsChange{Put: want}), d.Close()); err != nil {
		t.Fatal(err)
	}
	if got, err := load(t, path, "n1"); err != nil || !reflect.DeepEqual(got.Holds.Holders, want) {
		t.Errorf("loaded %+v, %v", got, err)
	}
}

func TestDirectoryIsOneProcesssAtATime(t *testing.T) {
	t.Parallel()
	path, _ := saved(t)
	first, err := Open(path, "n1")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Open(path, "n1"); !errors.Is(err, store.ErrLocked) || !strings.Contains(err.Error(), path) {
		t.Errorf("a second Open: %v, want ErrLocked with the path", err)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := load(t, path, "n1"); err != nil {
		t.Errorf("after the first: %v", err)
	}
}

// FuzzRecords loads files with arbitrary content, and accepts only valid holds.
func FuzzRecords(f *testing.F) {
	f.Add([]byte("endpoint:a/b"), []byte(`{"number":300,"labels":"k8s:a=;"}`))
	f.Add([]byte("reference:x"), []byte(`{"number":16711680,"labels":"k8s:a=;","manager":"m","addresses":["10.0.0.1"]}`))
	f.Fuzz(func(t *testing.T, key, value []byte) {
		r, err := parseHolder(key, value)
		if err != nil {
			return
		}
		if s := r.Identity.Number.Scope(); s != identity.ScopeCluster && s != identity.ScopeNodeLocal || r.Identity.Labels.IsZero() {
			t.Fatalf("accepted %+v", r)
		}
	})
}

// BenchmarkSaves measures one change in a directory with all identities of a full cluster.
func BenchmarkSaves(b *testing.B) {
	d, _, err := opened(b, stateDir(b), "n1")
	if err != nil {
		b.Fatal(err)
	}
	defer d.Close()
	var all allocator.KnownChange
	for i := range 65_000 {
		all.Put = append(all.Put, id(b, identity.MinCluster+identity.Numeric(i), fmt.Sprintf("an application with a long name, number %d", i)))
	}
	all.Heard = time.Now()
	began := time.Now()
	if err := d.NoteKnown(all); err != nil {
		b.Fatal(err)
	}
	noted := time.Since(began)
	if err := saveKnown(d, all); err != nil {
		b.Fatal(err)
	}
	b.Logf("a first listing of 65,000: noted in %s, all in %s", noted, time.Since(began))
	one := allocator.KnownChange{Put: all.Put[:1], Heard: all.Heard}
	b.Run("note", func(b *testing.B) {
		for b.Loop() {
			if err := d.NoteKnown(one); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("save", func(b *testing.B) {
		for b.Loop() {
			if err := saveKnown(d, one); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// TestIsolatedHoldersAreLoaded: and the part of the file that earlier versions read contains no number that they would
// refuse.
func TestIsolatedHoldersAreLoaded(t *testing.T) {
	path := stateDir(t)
	d, _, err := opened(t, path, "n1")
	if err != nil {
		t.Fatal(err)
	}
	isolated := allocator.HolderRecord{
		Holder:   allocator.EndpointHolder("c1", "eth0"),
		Identity: identity.Identity{Number: identity.Init, Labels: allocator.Isolated()},
		Workload: allocator.Workload{
			Manager: "kubernetes", Pod: workload.PodReference{Namespace: "shop", Name: "web-0", UID: "u"},
		},
	}
	former := allocator.HolderRecord{Holder: "former:c1/eth0", Identity: id(t, 300, "web")}
	moved := isolated
	moved.Identity = id(t, 301, "db")
	step := func(c allocator.HoldsChange, want ...allocator.HolderRecord) {
		t.Helper()
		if err := errors.Join(d.SaveHolds(c), d.Close()); err != nil {
			t.Fatal(err)
		}
		var l Loaded
		if d, l, err = opened(t, path, "n1"); err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(l.Holds.Holders, want) {
			t.Errorf("loaded %+v, want %+v", l.Holds.Holders, want)
		}
		if err := d.holds.View(func(tx *store.Tx) error {
			return tx.ForEach(bucketHolders, func(k, v []byte) error { _, err := parseHolder(k, v); return err })
		}); err != nil {
			t.Error(err)
		}
	}
	step(allocator.HoldsChange{Put: []allocator.HolderRecord{isolated, former}}, isolated, former)
	step(allocator.HoldsChange{Put: []allocator.HolderRecord{moved}, Drop: []allocator.Holder{former.Holder}}, moved)
	step(allocator.HoldsChange{Put: []allocator.HolderRecord{isolated}}, isolated)
	step(allocator.HoldsChange{Drop: []allocator.Holder{isolated.Holder}})
	if err := d.Close(); err != nil {
		t.Error(err)
	}
}
