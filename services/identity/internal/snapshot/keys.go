// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package snapshot

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/sluice-net/sluice/kit/store"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/cluster"
)

// known.db contains the keys of nodes as of its last write. Later changes are in the holds of this boot; they are
// written without a sync, before readers receive them. Therefore readers never get an older state after a process was
// killed.
//
// Both files have a revision of their own, which also covers the identities: known.db is written together with its
// identities, and the holds only after theirs. The holds belong to one generation of known.db. Each listing starts a
// new generation, so that changes noted before a listing are not applied after it.

// knownReserve is the address space for a cluster of 50,000 addresses, in bytes: see store.Options.
const knownReserve = 64 << 20

// Keys of bucketState, in both files.
var (
	keyGeneration = []byte("generation") // 8 bytes
	// Cluster and revision, 8 bytes each, and the prefix of the keys.
	keyPoint = []byte("point")
	// Revision and name of the newest deletion, as in keyPoint. Earlier versions ignore the key.
	keyGone = []byte("newest deletion")
)

// keys are the nodes' keys that have to be written.
type keys struct {
	mu         sync.Mutex
	generation uint64                  // guarded by mu; generation of known.db
	of         string                  // guarded by mu
	at         cluster.Point           // guarded by mu; point up to which the keys are complete; zero: unknown
	gone       cluster.Removed         // guarded by mu; the newest deletion since the last listing
	changed    map[string]*cluster.Key // guarded by mu; changes since known.db was written; nil: removed
	unnoted    map[string]*cluster.Key // guarded by mu; changes that are not in the holds yet
	// guarded by mu; identities that could not be written to the holds: number → text, empty for a removal
	identities map[identity.Numeric]string
	broken     bool // guarded by mu; a listing could not be written, so known.db has the former content
	// guarded by mu; point up to which known.db has the keys, so that no later process has fewer; zero: unknown
	saved cluster.Point
}

// Saved returns the point up to which the keys of nodes survive a loss of power: no later process starts with keys
// that were removed up to there. Zero: unknown.
func (d *Dir) Saved() cluster.Point {
	d.keys.mu.Lock()
	defer d.keys.mu.Unlock()
	return d.keys.saved
}

// keysChange is a part of keys that is being written to known.
type keysChange struct {
	of      string
	at      cluster.Point
	gone    cluster.Removed
	changed map[string]*cluster.Key
}

// take returns the changes to write. Changes noted later belong to the next write.
func (k *keys) take() keysChange {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.broken {
		return keysChange{}
	}
	c := keysChange{of: k.of, at: k.at, gone: k.gone, changed: k.changed}
	k.changed = nil
	return c
}

// giveBack restores changes that could not be written.
func (k *keys) giveBack(c keysChange) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if c.changed == nil {
		c.changed = map[string]*cluster.Key{}
	}
	maps.Copy(c.changed, k.changed) // newer
	k.changed = c.changed
}

func (c keysChange) put(t *store.Tx) {
	for _, name := range slices.Sorted(maps.Keys(c.changed)) {
		if key := c.changed[name]; key != nil {
			t.Put(bucketKeys, []byte(name), encodeKey(*key))
		} else {
			t.Delete(bucketKeys, []byte(name))
		}
	}
	if c.at.Revision != 0 {
		t.Put(bucketState, keyPoint, encodePoint(c.of, c.at))
		putGone(t, c.gone)
	}
}

// forget removes keys from the holds that are now in known.db.
func (c keysChange) forget(t *store.Tx) {
	for name, key := range c.changed {
		var value []byte
		if key != nil {
			value = encodeKey(*key)
		}
		if bytes.Equal(t.Get(bucketRecentKeys, []byte(name)), value) {
			t.Delete(bucketRecentKeys, []byte(name))
		}
	}
}

// ReplaceKeys implements etcd.Mirror. It does not rewrite keys that the file already has.
func (d *Dir) ReplaceKeys(k cluster.Keys) error {
	d.cache.Lock()
	defer d.cache.Unlock()
	d.keys.mu.Lock()
	defer d.keys.mu.Unlock()
	d.keys.of, d.keys.changed, d.keys.unnoted, d.keys.saved = k.Of, nil, nil, cluster.Point{}
	next := d.keys.generation + 1
	if err := d.update(d.known, func(t *store.Tx) error { return replaceKeys(t, k, next) }); err != nil {
		d.keys.broken = true
		return err
	}
	d.keys.broken, d.keys.generation, d.keys.at, d.keys.gone = false, next, k.At, k.Gone
	return d.note(func(t *store.Tx) error {
		var old [][]byte
		if err := t.ForEach(bucketRecentKeys, func(name, _ []byte) error {
			old = append(old, bytes.Clone(name))
			return nil
		}); err != nil {
			return err
		}
		for _, name := range old {
			t.Delete(bucketRecentKeys, name)
		}
		t.Put(bucketState, keyGeneration, binary.BigEndian.AppendUint64(nil, next))
		t.Put(bucketState, keyPoint, encodePoint(k.Of, k.At))
		putGone(t, k.Gone)
		return nil
	})
}

func replaceKeys(t *store.Tx, k cluster.Keys, generation uint64) error {
	want := make(map[string][]byte, len(k.All))
	for _, key := range k.All {
		want[key.Name] = encodeKey(key)
	}
	var gone [][]byte
	if err := t.ForEach(bucketKeys, func(name, value []byte) error {
		switch text, ok := want[string(name)]; {
		case !ok:
			gone = append(gone, bytes.Clone(name))
		case bytes.Equal(text, value):
			delete(want, string(name))
		}
		return nil
	}); err != nil {
		return err
	}
	for _, name := range gone {
		t.Delete(bucketKeys, name)
	}
	for _, name := range slices.Sorted(maps.Keys(want)) {
		t.Put(bucketKeys, []byte(name), want[name])
	}
	t.Put(bucketState, keyGeneration, binary.BigEndian.AppendUint64(nil, generation))
	// The identities of the listing are not in this file yet.
	t.Put(bucketState, keyPoint, encodePoint(k.Of, cluster.Point{}))
	putGone(t, k.Gone) // The former deletion may belong to another history.
	return nil
}

// NoteKeys implements etcd.Mirror.
func (d *Dir) NoteKeys(of string, c cluster.Change) error {
	d.keys.mu.Lock()
	defer d.keys.mu.Unlock()
	k := &d.keys
	if k.broken || of == k.of && c.At == k.at && len(c.Put)+len(c.Drop) == 0 {
		return nil
	}
	if k.changed == nil {
		k.changed = map[string]*cluster.Key{}
	}
	now := k.unnoted
	if now == nil {
		now = make(map[string]*cluster.Key, len(c.Put)+len(c.Drop))
	}
	for _, key := range c.Put {
		now[key.Name] = &key
	}
	for _, name := range c.Drop {
		now[name] = nil
	}
	maps.Copy(k.changed, now)
	k.of, k.at, k.unnoted = of, c.At, nil
	if c.Gone.Name != "" {
		k.gone = c.Gone
	}
	err := d.note(func(t *store.Tx) error {
		for name, key := range now {
			var value []byte
			if key != nil {
				value = encodeKey(*key)
			}
			t.Put(bucketRecentKeys, []byte(name), value)
		}
		t.Put(bucketState, keyPoint, encodePoint(of, c.At))
		putGone(t, k.gone)
		return nil
	})
	if err != nil {
		k.unnoted = now
	}
	return err
}

// NoteKnown implements allocator.Records.
func (d *Dir) NoteKnown(c allocator.KnownChange) error {
	d.keys.mu.Lock()
	defer d.keys.mu.Unlock()
	if d.keys.identities == nil {
		d.keys.identities = make(map[identity.Numeric]string, len(c.Put)+len(c.Drop))
	}
	for _, n := range c.Drop {
		d.keys.identities[n] = ""
	}
	for _, id := range c.Put {
		d.keys.identities[id.Number] = id.Labels.Text()
	}
	return d.note(func(*store.Tx) error { return nil })
}

// note writes to the holds, together with the identities that were not noted yet, so that no point is ahead of the
// identities. Called with keys.mu held.
func (d *Dir) note(f func(*store.Tx) error) error {
	err := d.change(func(t *store.Tx) error {
		for n, text := range d.keys.identities {
			t.Put(bucketRecent, key(n), []byte(text))
		}
		return f(t)
	})
	if err == nil {
		d.keys.identities = nil
	}
	return err
}

// loadKeys reads the keys in known.
func (d *Dir) loadKeys(t *store.Tx, k *cluster.Keys) (err error) {
	if g := t.Get(bucketState, keyGeneration); len(g) == 8 {
		d.keys.generation = binary.BigEndian.Uint64(g)
	}
	if k.Of, k.At, err = decodePoint(t.Get(bucketState, keyPoint)); err != nil {
		return err
	}
	if k.Gone, err = readGone(t); err != nil {
		return err
	}
	return t.ForEach(bucketKeys, func(name, value []byte) error {
		key, err := decodeKey(name, value)
		k.All = append(k.All, key)
		return err
	})
}

// overlayKeys applies the changes that were noted since the last write of known.db.
func (d *Dir) overlayKeys(k *cluster.Keys) error {
	d.keys.mu.Lock()
	defer d.keys.mu.Unlock()
	recent := map[string]*cluster.Key{}
	err := d.holds.View(func(t *store.Tx) error {
		if g := t.Get(bucketState, keyGeneration); len(g) != 8 || binary.BigEndian.Uint64(g) != d.keys.generation {
			return nil
		}
		of, at, err := decodePoint(t.Get(bucketState, keyPoint))
		if err != nil {
			return d.holds.Refuse(err)
		}
		if at.Revision != 0 {
			k.Of, k.At = of, at
			if k.Gone, err = readGone(t); err != nil {
				return d.holds.Refuse(err)
			}
		}
		return t.ForEach(bucketRecentKeys, func(name, value []byte) error {
			if len(value) == 0 {
				recent[string(name)] = nil
				return nil
			}
			key, err := decodeKey(name, value)
			if err != nil {
				return d.holds.Refuse(err)
			}
			recent[key.Name] = &key
			return nil
		})
	})
	if err != nil {
		return err
	}
	if len(recent) > 0 {
		k.All = slices.DeleteFunc(k.All, func(key cluster.Key) bool { _, ok := recent[key.Name]; return ok })
		for _, name := range slices.Sorted(maps.Keys(recent)) {
			if key := recent[name]; key != nil {
				k.All = append(k.All, *key)
			}
		}
		d.keys.changed = recent
	}
	d.keys.of, d.keys.at, d.keys.gone = k.Of, k.At, k.Gone
	return nil
}

// encodeKey encodes a key for both files: the revisions of its creation and last change as unsigned varints, and its
// value in etcd.
func encodeKey(k cluster.Key) []byte {
	b := binary.AppendUvarint(make([]byte, 0, len(k.Value)+12), uint64(k.Created))
	b = binary.AppendUvarint(b, uint64(k.Modified))
	return append(b, k.Value...)
}

func decodeKey(name, value []byte) (k cluster.Key, err error) {
	created, n := binary.Uvarint(value)
	modified, m := uint64(0), 0
	if n > 0 {
		modified, m = binary.Uvarint(value[n:])
	}
	if m <= 0 || len(name) == 0 || created == 0 || modified < created || int64(modified) < 0 {
		return k, fmt.Errorf("%w: key %q", errRecord, name)
	}
	return cluster.Key{
		Name: string(name), Value: bytes.Clone(value[n+m:]), Created: int64(created), Modified: int64(modified),
	}, nil
}

func encodePoint(of string, at cluster.Point) []byte {
	b := binary.BigEndian.AppendUint64(nil, at.Cluster)
	return append(binary.BigEndian.AppendUint64(b, uint64(at.Revision)), of...)
}

// putGone writes the newest deletion, or removes it if none is known.
func putGone(t *store.Tx, gone cluster.Removed) {
	if gone.Name == "" {
		t.Delete(bucketState, keyGone)
		return
	}
	t.Put(bucketState, keyGone, encodePoint(gone.Name, cluster.Point{Revision: gone.Revision}))
}

func readGone(t *store.Tx) (cluster.Removed, error) {
	name, at, err := decodePoint(t.Get(bucketState, keyGone))
	return cluster.Removed{Name: name, Revision: at.Revision}, err
}

// decodePoint returns zero for a missing point. A listing whose identities were not written has a point with revision
// 0.
func decodePoint(b []byte) (of string, at cluster.Point, err error) {
	if b == nil {
		return "", at, nil
	}
	if len(b) < 16 || int64(binary.BigEndian.Uint64(b[8:])) < 0 {
		return "", at, fmt.Errorf("%w: point %x", errRecord, b)
	}
	return string(b[16:]), cluster.Point{
		Cluster: binary.BigEndian.Uint64(b), Revision: int64(binary.BigEndian.Uint64(b[8:])),
	}, nil
}
