// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package snapshot

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/sluice-net/sluice/kit/disktest"
	"github.com/sluice-net/sluice/kit/store"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/cluster"
	"github.com/sluice-net/sluice/services/identity/internal/registry"
)

// past has a store's state at each revision, and passes it to the Dir as the follower does: identities before keys.
type past struct {
	t      testing.TB
	random *rand.Rand
	steps  []step // of revision i+1
	// what SaveKnown has not got yet
	put  map[identity.Numeric]identity.Identity
	drop map[identity.Numeric]bool
}

type step struct {
	key     string // empty for a change of an identity
	value   string // empty for a removal
	number  identity.Numeric
	present bool
}

const keysOf = "/x/ip/"

func (p *past) head() cluster.Point { return cluster.Point{Cluster: 7, Revision: int64(len(p.steps))} }

// at returns the names and identities that existed at a revision.
func (p *past) at(revision int64) (map[string]string, map[identity.Numeric]bool) {
	return replay(map[string]string{}, map[identity.Numeric]bool{}, p.steps[:revision])
}

func replay(names map[string]string, ids map[identity.Numeric]bool, steps []step) (map[string]string,
	map[identity.Numeric]bool,
) {
	for _, s := range steps {
		switch {
		case s.key != "" && s.value == "":
			delete(names, s.key)
		case s.key != "":
			names[s.key] = s.value
		case s.present:
			ids[s.number] = true
		default:
			delete(ids, s.number)
		}
	}
	return names, ids
}

func (p *past) identity(n identity.Numeric) identity.Identity {
	return id(p.t, n, fmt.Sprint("app", n))
}

// change appends one to three random steps and passes them to the Dir in one change.
func (p *past) change(d *Dir) error {
	from := len(p.steps)
	for range 1 + p.random.IntN(3) {
		s := step{key: fmt.Sprint(keysOf, "n", p.random.IntN(6))}
		switch p.random.IntN(4) {
		case 0:
			s = step{number: identity.MinCluster + identity.Numeric(p.random.IntN(6)), present: p.random.IntN(3) > 0}
		case 1: // a removal
		default:
			s.value = fmt.Sprint("value ", len(p.steps))
		}
		p.steps = append(p.steps, s)
	}
	return p.tell(d, from)
}

// tell passes the steps with an index of at least from to the directory, in one change.
func (p *past) tell(d *Dir, from int) error {
	c := cluster.Change{}
	var known allocator.KnownChange
	for i, s := range p.steps[from:] {
		c.Put = slices.DeleteFunc(c.Put, func(k cluster.Key) bool { return k.Name == s.key })
		c.Drop = slices.DeleteFunc(c.Drop, func(name string) bool { return name == s.key })
		switch {
		case s.key == "":
			known = p.noteIdentity(known, s)
		case s.value == "":
			c.Drop = append(c.Drop, s.key)
		default:
			c.Put = append(c.Put, cluster.Key{
				Name: s.key, Value: []byte(s.value), Created: 1, Modified: int64(from + i + 1),
			})
		}
	}
	c.At = p.head()
	var err error
	if len(known.Put)+len(known.Drop) > 0 {
		err = d.NoteKnown(known)
	}
	return errors.Join(err, d.NoteKeys(keysOf, c))
}

func (p *past) noteIdentity(c allocator.KnownChange, s step) allocator.KnownChange {
	if p.put == nil {
		p.put, p.drop = map[identity.Numeric]identity.Identity{}, map[identity.Numeric]bool{}
	}
	c.Put = slices.DeleteFunc(c.Put, func(id identity.Identity) bool { return id.Number == s.number })
	c.Drop = slices.DeleteFunc(c.Drop, func(n identity.Numeric) bool { return n == s.number })
	if s.present {
		p.put[s.number] = p.identity(s.number)
		delete(p.drop, s.number)
		c.Put = append(c.Put, p.identity(s.number))
	} else {
		p.drop[s.number] = true
		delete(p.put, s.number)
		c.Drop = append(c.Drop, s.number)
	}
	return c
}

func (p *past) save(d *Dir) error {
	var during error
	err := d.SaveKnown(func() allocator.KnownChange {
		if p.random.IntN(3) == 0 {
			during = p.change(d) // the follower does not wait
		}
		return allocator.KnownChange{
			Put: slices.Collect(maps.Values(p.put)), Drop: slices.Collect(maps.Keys(p.drop)), Heard: heardAt(1),
		}
	})
	saved := err == nil
	if err = cmp.Or(err, during); saved {
		clear(p.put)
		clear(p.drop)
	}
	return err
}

// list passes a complete listing to the directory.
func (p *past) list(d *Dir) error {
	names, ids := p.at(int64(len(p.steps)))
	c := allocator.KnownChange{}
	for n := range identity.Numeric(6) {
		n += identity.MinCluster
		c = p.noteIdentity(c, step{number: n, present: ids[n]})
	}
	k := cluster.Keys{Of: keysOf, At: p.head()}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		k.All = append(k.All, cluster.Key{
			Name: name, Value: []byte(names[name]), Created: 1, Modified: max(1, p.head().Revision),
		})
	}
	return errors.Join(d.NoteKnown(c), d.ReplaceKeys(k))
}

// follow runs the start of a process.
func (p *past) follow(d *Dir, at int64) error {
	p.put, p.drop = nil, nil // as a new process has them
	if at == 0 {
		return p.list(d)
	}
	return p.tell(d, int(at))
}

// leadsOn checks that the loaded state with the steps after its point results in the present state, and returns the
// point.
func (p *past) leadsOn(l Loaded, what string) int64 {
	p.t.Helper()
	names, ids := map[string]string{}, map[identity.Numeric]bool{}
	for _, k := range l.Keys.All {
		names[k.Name] = string(k.Value)
	}
	for _, id := range l.Known.Identities {
		ids[id.Number] = true
	}
	at := l.Keys.At.Revision
	if at == 0 {
		return 0 // all of it is listed
	}
	if l.Keys.At.Cluster != 7 || l.Keys.Of != keysOf || at > int64(len(p.steps)) {
		p.t.Fatalf("%s: point %+v of %q", what, l.Keys.At, l.Keys.Of)
	}
	names, ids = replay(names, ids, p.steps[at:])
	wantNames, wantIDs := p.at(int64(len(p.steps)))
	if !maps.Equal(names, wantNames) || !maps.Equal(ids, wantIDs) {
		p.t.Fatalf("%s: going on from revision %d of %d leads to\n%v %v\nwant\n%v %v",
			what, at, len(p.steps), names, ids, wantNames, wantIDs)
	}
	return at
}

// TestKeysSurviveTheProcess (INV-87): the next process resumes with the state that the readers of the previous process
// had.
func TestKeysSurviveTheProcess(t *testing.T) {
	path := stateDir(t)
	p := &past{t: t, random: rand.New(rand.NewPCG(1, 2))} //nolint:gosec // the same random numbers in each run
	for run := range 60 {
		d, l, err := opened(t, path, "n1")
		if err != nil {
			t.Fatal(err)
		}
		at := p.leadsOn(l, fmt.Sprint("run ", run))
		if run > 0 && at != p.head().Revision {
			t.Fatalf("run %d resumes from revision %d, but readers got revision %d", run, at, p.head().Revision)
		}
		if run == 0 || p.random.IntN(8) == 0 {
			err = errors.Join(err, p.list(d))
			if run == 0 {
				err = errors.Join(err, p.save(d))
			}
		}
		for range p.random.IntN(6) {
			err = errors.Join(err, p.change(d))
			if p.random.IntN(4) == 0 {
				err = errors.Join(err, p.save(d))
			}
		}
		if err := errors.Join(err, d.Close()); err != nil {
			t.Fatal(err)
		}
	}
}

// TestPointIsNeverAheadOfTheKeys (INV-87): the disk is repeatedly full and then loses power. The saved keys and the
// changes since the saved point are complete.
func TestPointIsNeverAheadOfTheKeys(t *testing.T) {
	t.Parallel()
	for seed := range uint64(2) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			failAndCut(t, seed)
		})
	}
}

func failAndCut(t *testing.T, seed uint64) {
	root := t.TempDir()
	path := filepath.Join(root, "state")
	if err := os.Mkdir(path, 0o750); err != nil {
		t.Fatal(err)
	}
	disk := disktest.New(t, root)
	p := &past{t: t, random: rand.New(rand.NewPCG(3, seed))} //nolint:gosec // the same random numbers in each run
	disk.Run(t, func() {
		for run := range 50 {
			d, l, err := opened(t, path, "n1")
			if err != nil {
				t.Error(err)
				return
			}
			err = p.follow(d, p.leadsOn(l, fmt.Sprint("restart ", run, " on a disk that failed")))
			if err != nil {
				t.Error(err)
			}
			for range p.random.IntN(20) {
				if p.random.IntN(2) == 0 {
					fail, _ := failing(p.random.IntN(5), syscall.ENOSPC, true)
					disk.Fail(fail)
				}
				act := p.change
				switch p.random.IntN(8) {
				case 0, 1, 2:
					act = p.save
				case 3, 4:
					act = p.list
				}
				err := act(d)
				disk.Fail(nil)
				if errors.Is(err, store.ErrLost) {
					break // the process ends
				}
				if err != nil && !errors.Is(err, store.ErrFull) {
					t.Error(err)
				}
			}
			if err := d.Close(); err != nil && !errors.Is(err, store.ErrLost) {
				t.Error(err)
			}
		}
	})
	ops, points := len(disk.Ops()), map[int64]bool{}
	for range 200 {
		n := p.random.IntN(ops + 1)
		after := t.TempDir()
		disk.Cut(t, n, p.random, after)
		state := filepath.Join(after, "state")
		if err := os.MkdirAll(state, 0o750); err != nil {
			t.Fatal(err)
		}
		reboot(t, state)
		got, err := load(t, state, "n1")
		if err != nil {
			t.Fatalf("a loss of power after %d of %d operations: %v", n, ops, err)
		}
		points[p.leadsOn(got, fmt.Sprintf("a loss of power after %d of %d operations", n, ops))] = true
	}
	if len(points) < 10 {
		t.Errorf("only the points %v", slices.Sorted(maps.Keys(points)))
	}
}

// rebooted simulates a reboot, and returns what the next process loads.
func rebooted(t *testing.T, path string) Loaded {
	t.Helper()
	reboot(t, path)
	l, err := load(t, path, "n1")
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// TestNotedIdentitiesOfTheProcessBeforeAreSaved: the next process saves identities that the previous process had only
// noted. After a reboot, the directory has all identities up to its point.
func TestNotedIdentitiesOfTheProcessBeforeAreSaved(t *testing.T) {
	path := stateDir(t)
	for _, act := range []func(d *Dir) error{
		func(d *Dir) error {
			return errors.Join(
				saveKnown(d, allocator.KnownChange{Put: []identity.Identity{id(t, 301, "old")}, Heard: heardAt(1)}),
				d.ReplaceKeys(cluster.Keys{Of: keysOf, At: cluster.Point{Cluster: 7, Revision: 1}}),
				d.NoteKnown(allocator.KnownChange{Put: []identity.Identity{id(t, 300, "web")}, Drop: []identity.Numeric{301}}),
				d.NoteKeys(keysOf, cluster.Change{At: cluster.Point{Cluster: 7, Revision: 3}}))
		},
		func(d *Dir) error { return saveKnown(d, allocator.KnownChange{Heard: heardAt(2)}) },
	} {
		d, _, err := opened(t, path, "n1")
		if err := errors.Join(err, act(d), d.Close()); err != nil {
			t.Fatal(err)
		}
	}
	l := rebooted(t, path)
	if l.Keys.At.Revision != 3 || len(l.Known.Identities) != 1 || l.Known.Identities[0].Number != 300 {
		t.Errorf("loaded %+v, %+v", l.Keys, l.Known)
	}
}

// TestNewestDeletionIsKeptUntilAListing: the deletion is loaded from the holds within the same boot, and from the cache
// after a reboot. A listing discards it, because the listing may be of another history.
func TestNewestDeletionIsKeptUntilAListing(t *testing.T) {
	path := stateDir(t)
	at := func(revision int64) cluster.Point { return cluster.Point{Cluster: 7, Revision: revision} }
	gone := func(revision int64) cluster.Removed {
		return cluster.Removed{Name: fmt.Sprint(keysOf, revision), Revision: revision}
	}
	next := func(what string, want cluster.Removed, act func(d *Dir) error) {
		t.Helper()
		d, l, err := opened(t, path, "n1")
		if l.Keys.Gone != want {
			t.Errorf("%s: loaded %+v, want %+v", what, l.Keys.Gone, want)
		}
		if err := errors.Join(err, act(d), d.Close()); err != nil {
			t.Fatal(err)
		}
	}
	next("new", cluster.Removed{}, func(d *Dir) error {
		return errors.Join(d.ReplaceKeys(cluster.Keys{Of: keysOf, At: at(1)}),
			saveKnown(d, allocator.KnownChange{Heard: heardAt(1)}),
			d.NoteKeys(keysOf, cluster.Change{At: at(3), Gone: gone(3)}),
			d.NoteKeys(keysOf, cluster.Change{At: at(4)}))
	})
	next("noted", gone(3), func(d *Dir) error {
		return errors.Join(saveKnown(d, allocator.KnownChange{Heard: heardAt(2)}),
			d.NoteKeys(keysOf, cluster.Change{At: at(5), Gone: gone(5)}))
	})
	next("noted after a save", gone(5), func(*Dir) error { return nil })
	if l := rebooted(t, path); l.Keys.Gone != gone(3) {
		t.Errorf("after a reboot: %+v", l.Keys)
	}
	next("after a reboot", gone(3), func(d *Dir) error {
		return d.ReplaceKeys(cluster.Keys{Of: keysOf, At: at(2)})
	})
	next("after a listing", cluster.Removed{}, func(*Dir) error { return nil })
}

// TestKeysNotedDuringASaveThatFails: keys that are noted during a failing save are saved by the next one.
func TestKeysNotedDuringASaveThatFails(t *testing.T) {
	root := t.TempDir()
	path := filepath.Join(root, "state")
	noted := func(revision int64) cluster.Change {
		return cluster.Change{At: cluster.Point{Cluster: 7, Revision: revision}, Put: []cluster.Key{
			{Name: fmt.Sprint(keysOf, revision), Value: []byte("{}"), Created: revision, Modified: revision},
		}}
	}
	disk := disktest.New(t, root)
	disk.Run(t, func() {
		d, _, err := opened(t, path, "n1")
		if err := errors.Join(err,
			d.ReplaceKeys(cluster.Keys{Of: keysOf, At: cluster.Point{Cluster: 7, Revision: 1}}),
			d.NoteKeys(keysOf, noted(2))); err != nil {
			t.Error(err)
		}
		var during error
		err = d.SaveKnown(func() allocator.KnownChange {
			during = d.NoteKeys(keysOf, noted(3))
			fail, _ := failing(0, syscall.ENOSPC, true)
			disk.Fail(fail)
			return allocator.KnownChange{Heard: heardAt(1)}
		})
		disk.Fail(nil)
		if during != nil || !errors.Is(err, syscall.ENOSPC) {
			t.Errorf("save: %v, note: %v", err, during)
		}
		if err := errors.Join(saveKnown(d, allocator.KnownChange{Heard: heardAt(2)}), d.Close()); err != nil {
			t.Error(err)
		}
	})
	if l := rebooted(t, path); l.Keys.At.Revision != 3 || len(l.Keys.All) != 2 {
		t.Errorf("loaded %+v", l.Keys)
	}
}

// TestKnownWithoutKeysIsRead: a file of the previous version, which has no keys, is loaded.
func TestKnownWithoutKeysIsRead(t *testing.T) {
	path, want := saved(t)
	dir, err := store.OpenDir(path, 0o755)
	if err != nil {
		t.Fatal(err)
	}
	for name, buckets := range map[string][]string{
		"known": {bucketIdentities, bucketState}, "holds": {bucketHolders, bucketRecent, bucketState},
	} {
		o := store.Options{
			Name: KnownFile, Unlisted: true,
			Layout:   store.Layout{Format: "sluice-identity-" + name, Version: 1, Buckets: buckets},
			Previous: []store.Layout{{Version: 2, Buckets: append(buckets, map[string]string{"known": bucketKeys, "holds": bucketRecentKeys}[name])}},
			Migrate:  func(*store.Tx, uint32) error { return nil },
		}
		if name == "holds" {
			o.Name, o.Unlisted, o.Boot = holdsName, false, true
		}
		f, err := dir.Open(o) // like the previous version would have written it
		if err := errors.Join(err, f.Close()); err != nil {
			t.Fatal(err)
		}
	}
	if err := dir.Close(); err != nil {
		t.Fatal(err)
	}
	if got, err := load(t, path, "n1"); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("loaded %+v, %v\nwant %+v", got, err, want)
	}
}

func FuzzKeys(f *testing.F) {
	f.Add([]byte("/x/ip/a/node"), encodeKey(cluster.Key{Name: "a", Value: []byte("{}"), Created: 1, Modified: 300}))
	f.Add([]byte(""), []byte{})
	f.Add([]byte("a"), encodePoint("/x/ip/", cluster.Point{Cluster: 1, Revision: 1 << 40}))
	f.Fuzz(func(t *testing.T, name, value []byte) {
		if k, err := decodeKey(name, value); err == nil {
			again, err := decodeKey([]byte(k.Name), encodeKey(k))
			if err != nil || !reflect.DeepEqual(k, again) {
				t.Errorf("%+v is read back as %+v, %v", k, again, err)
			}
		} else if !strings.Contains(err.Error(), errRecord.Error()) {
			t.Error(err)
		}
		if of, at, err := decodePoint(value); err == nil && len(value) > 0 {
			if of2, at2, err := decodePoint(encodePoint(of, at)); err != nil || of2 != of || at2 != at {
				t.Errorf("%q %+v is read back as %q %+v, %v", of, at, of2, at2, err)
			}
		}
	})
}

// TestPinsSurviveAReboot: saved pins are loaded after a reboot, and their file is removed with the last pin.
func TestPinsSurviveAReboot(t *testing.T) {
	path := stateDir(t)
	want := []registry.Pin{
		{Range: netip.MustParsePrefix("10.0.1.0/24"), Node: "n1", Former: registry.Former{Cluster: 1 << 63, Revision: 7}},
		{Range: netip.MustParsePrefix("10.0.2.0/24"), Node: "n2"},
	}
	for _, pins := range [][]registry.Pin{want, nil} {
		d, _, err := opened(t, path, "n1")
		if err := errors.Join(err, d.SavePins(pins), d.ReplaceKeys(cluster.Keys{Of: keysOf}), d.Close()); err != nil {
			t.Fatal(err)
		}
		if l := rebooted(t, path); !slices.Equal(l.Pins, pins) {
			t.Errorf("loaded %+v, want %+v", l.Pins, pins)
		}
	}
}
