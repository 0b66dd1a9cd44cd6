// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package snapshot stores the service's state on disk, in three files:
//
//   - holds.<boot id>.db has the references of holders to numbers, and the changes of the cluster that were learned
//     after known.db was written. It is state: it is written before callers and readers see a change. The service does
//     not start with a corrupt file, because without it the cluster could collect numbers that endpoints use.
//   - known.db is a cache of the cluster's identities, nodes and addresses, for times without etcd. It contains the
//     etcd revision up to which it is complete. A corrupt file is renamed, and its content is read from etcd again.
//     Answers do not depend on it, because references contain their label sets.
//   - incarnation.json identifies this directory, because another node may use the same name. It also contains the
//     boot whose file of holds exists.
//
// References belong to one boot of the machine, because endpoints end with it: files of another boot are removed
// unread. Therefore the holds must survive a killed process, but not a power failure. The page cache is enough for
// that; fsync would delay each answer by milliseconds. The cache is synced; one commit contains the changes of some
// seconds.
package snapshot

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"time"

	"github.com/sluice-net/sluice/kit/durable"
	"github.com/sluice-net/sluice/kit/store"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/cluster"
	"github.com/sluice-net/sluice/services/identity/internal/registry"
)

// Names of the files.
const (
	KnownFile              = "known.db"
	DamagedFile            = "known.db.damaged"
	DamagedIncarnationFile = "incarnation.json.damaged"
	IncarnationFile        = "incarnation.json"

	holdsName = "holds.db" // the file's name also has the boot ID: see HoldsFile
)

// HoldsFile returns the name of the holds of one boot.
func HoldsFile(bootID string) string { return "holds." + bootID + ".db" }

// Buckets.
const (
	bucketHolders    = "holders"    // holder → holderRecord
	bucketRecent     = "recent"     // number → text of the set; empty: the number was collected
	bucketState      = "state"      // see the keys
	bucketIdentities = "identities" // number → text of the set
	bucketKeys       = "keys"       // only in known.db: name of a key of etcd → see keys.go
	bucketRecentKeys = "recent keys"
)

// Keys of bucketState.
var (
	keyNode    = []byte("node")
	keySession = []byte("session")
	keyNext    = []byte("next node-local")
	keyHeard   = []byte("heard") // milliseconds since 1970
	// The parts of the node's record that RegisterNode received, as JSON.
	keyRegistration = []byte("registration")
)

// isolatedPrefix is the prefix of keys of bucketState for holders of reserved:init; the key is the prefix and the
// holder, the value a holderRecord. Earlier versions would refuse such a number in bucketHolders, and ignore unknown
// keys of bucketState.
const isolatedPrefix = "isolated "

// ErrOtherNode: the state belongs to a node with another name.
var ErrOtherNode = errors.New("state of another node")

var errRecord = errors.New("it has a record that this service does not write")

// holderRecord is a value of bucketHolders. The meaning of a field never changes.
type holderRecord struct {
	Number uint32 `json:"number"`
	Labels string `json:"labels"` // canonical text

	// The holder's description, if its caller gave one.
	Manager   string   `json:"manager,omitempty"`
	Network   string   `json:"network,omitempty"`
	Pod       string   `json:"pod,omitempty"` // namespace/name
	PodUID    string   `json:"podUid,omitempty"`
	Addresses []string `json:"addresses,omitempty"`
}

type incarnationRecord struct {
	Incarnation string `json:"incarnation"`
	Boot        string `json:"boot,omitempty"` // boot for which a file of holds exists
}

var incarnationSchema = durable.Schema{Name: "sluice.identity.incarnation", Version: 1}

// Dir is the directory with the files. Only one process may use it at a time: two processes would overwrite each
// other's holds, and the cluster would collect numbers that endpoints use. Its methods may be called concurrently.
type Dir struct {
	dir  *store.Dir
	node string
	boot string

	mu    sync.Mutex   // one commit of holds at a time; guards the results of changes
	holds *store.Store // guarded by mu
	cache sync.Mutex   // one change of known at a time
	known *store.Store // guarded by cache; nil if it cannot be written
	// Identities that were in the holds at the start, but not in known.db: number → text of the label set, empty if it
	// was collected. Guarded by cache; nil once they are in known.db.
	noted map[identity.Numeric]string
	keys  keys

	queue   sync.Mutex
	changes []*change // changes of the holds that wait for mu; guarded by queue

	lost chan error // has the first error after which a file accepts no more changes
}

// Open opens a directory for this process, and creates it if its parent exists. While another process has it open, Open
// returns store.ErrLocked and changes nothing.
func Open(path, node string) (*Dir, error) {
	boot, err := durable.BootID()
	if err != nil {
		return nil, err
	}
	if err := os.Mkdir(path, 0o750); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("state directory: %w", err)
	}
	// An existing directory may be readable by other users: the files in it are not.
	dir, err := store.OpenDir(path, 0o755)
	if err != nil {
		return nil, err
	}
	return &Dir{dir: dir, node: node, boot: boot, lost: make(chan error, 1)}, nil
}

// Close releases the directory for the next process.
func (d *Dir) Close() error {
	var errs []error
	for _, f := range []*store.Store{d.holds, d.known} {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	return errors.Join(append(errs, d.dir.Close())...)
}

// BootID returns the boot that the holds belong to.
func (d *Dir) BootID() string { return d.boot }

// Loaded is the content of a directory.
type Loaded struct {
	// Incarnation identifies this directory. It is random, created once, and lost with the directory.
	Incarnation string
	Holds       allocator.Holds
	// Registration contains what this node's other processes have registered in this boot.
	Registration registry.Registration
	Known        allocator.Known
	// Keys are the keys of nodes. Their point is zero if it is unknown.
	Keys cluster.Keys
	// Pins are the ranges that nodes had before etcd was rebuilt.
	Pins    []registry.Pin
	Cached  bool  // a cache existed, perhaps an empty one
	Damaged error // why the cache was renamed; nil if it was not
	// DamagedIncarnation is the reason why the file of the incarnation was renamed and Incarnation is new; nil if it
	// was not.
	DamagedIncarnation error
}

// Load reads the files, and creates missing ones. It returns errors of the holds and of the disk. An error of the holds
// ends with the operator's next step; the file stays unchanged.
func (d *Dir) Load() (l Loaded, err error) {
	node, damaged, err := d.loadIncarnation()
	if err != nil {
		return Loaded{}, err
	}
	l.Incarnation, l.DamagedIncarnation = node.Incarnation, damaged
	if err := d.openHolds(node, damaged); err != nil {
		return Loaded{}, err
	}
	recent := map[identity.Numeric]string{}
	if l.Holds, err = d.loadHolds(recent, &l.Registration); err != nil {
		return Loaded{}, err
	}
	if node.Boot != d.boot {
		node.Boot = d.boot
		if damaged != nil {
			if err := d.putAside(IncarnationFile, DamagedIncarnationFile); err != nil {
				return Loaded{}, errors.Join(damaged, err)
			}
		}
		if err := d.saveIncarnation(node); err != nil {
			return Loaded{}, err
		}
	}
	l.Damaged = d.loadKnown(&l)
	if l.Damaged != nil {
		d.known = nil
		// If an error of the disk prevented reading the cache, its content may still be valid.
		if !errors.Is(l.Damaged, store.ErrCorrupt) && !errors.Is(l.Damaged, store.ErrForeign) && !errors.Is(l.Damaged, store.ErrVersion) {
			return Loaded{}, l.Damaged
		}
		if err := d.putAside(KnownFile, DamagedFile); err != nil {
			return Loaded{}, errors.Join(l.Damaged, err)
		}
		l.Known, l.Keys, l.Pins, l.Cached = allocator.Known{}, cluster.Keys{}, nil, false
		d.keys = keys{}
		var again Loaded
		if err := d.loadKnown(&again); err != nil {
			return Loaded{}, errors.Join(l.Damaged, err)
		}
	}
	if l.Cached {
		if err := overlay(&l.Known, recent); err != nil {
			return Loaded{}, d.holds.Refuse(err)
		}
		d.noted = recent
		if err := d.overlayKeys(&l.Keys); err != nil {
			return Loaded{}, err
		}
	} else {
		l.Keys = cluster.Keys{}
	}
	return l, d.removeOld()
}

const (
	holdsLoss = "this node has no endpoints (without it the cluster may reuse numbers of running endpoints)"
	holdsDoc  = `docs/identity.md, "When etcd or the service is unavailable"`
)

// putAside renames a corrupt file.
func (d *Dir) putAside(name, to string) error {
	err := os.Rename(filepath.Join(d.dir.Path(), name), filepath.Join(d.dir.Path(), to))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("rename the corrupt file: %w", err)
	}
	return nil
}

// openHolds opens the holds of this boot, or creates them from the file of the previous version. If the incarnation is
// damaged, it creates them only if there is evidence that the damaged file was of another boot.
func (d *Dir) openHolds(node incarnationRecord, damaged error) (err error) {
	old, err := d.oldHolds()
	if err != nil {
		return err
	}
	path := filepath.Join(d.dir.Path(), HoldsFile(d.boot))
	_, err = os.Lstat(path)
	absent := errors.Is(err, fs.ErrNotExist)
	file := filepath.Join(d.dir.Path(), IncarnationFile)
	refuse := func(detail error) error {
		return &store.Refusal{
			Path: path, Kind: store.ErrMissing, Detail: detail, Commands: store.SetAside(file), Loss: holdsLoss, Doc: holdsDoc,
		}
	}
	if absent && damaged != nil {
		others, err := filepath.Glob(filepath.Join(d.dir.Path(), "holds.*"))
		if err != nil {
			return err
		}
		if len(others) == 0 {
			return refuse(fmt.Errorf("%w; it may have recorded that the file was created in this boot", damaged))
		}
	}
	if absent && node.Boot == d.boot {
		return refuse(fmt.Errorf("%s says that it was created in this boot", file))
	}
	d.holds, err = d.dir.Open(store.Options{
		Name: holdsName, Boot: true,
		Layout: store.Layout{
			Format: "sluice-identity-holds", Version: 2,
			Buckets: []string{bucketHolders, bucketRecent, bucketState, bucketRecentKeys},
		},
		Previous: []store.Layout{{Version: 1, Buckets: []string{bucketHolders, bucketRecent, bucketState}}},
		Migrate:  func(*store.Tx, uint32) error { return nil }, // it has no keys yet
		Loss:     holdsLoss,
		Doc:      holdsDoc,
		Init: func(t *store.Tx) error {
			t.Put(bucketState, keyNode, []byte(d.node))
			return putHolds(t, allocator.HoldsChange{Put: old.Holders, NextNodeLocal: old.NextNodeLocal})
		},
	})
	return err
}

func (d *Dir) loadHolds(recent map[identity.Numeric]string, registration *registry.Registration) (allocator.Holds,
	error,
) {
	var h allocator.Holds
	sets := map[identity.Numeric]string{}
	err := d.holds.View(func(t *store.Tx) error {
		if node := string(t.Get(bucketState, keyNode)); node != d.node {
			return fmt.Errorf("%s: %w: %q, this node is %q; remove the file if the node was renamed and has no endpoints", d.holds.Path(), ErrOtherNode, node, d.node)
		}
		h.Session = string(t.Get(bucketState, keySession))
		if text := t.Get(bucketState, keyRegistration); text != nil {
			if err := json.Unmarshal(text, registration); err != nil {
				return d.holds.Refuse(fmt.Errorf("%w: registration: %w", errRecord, err))
			}
		}
		if next := t.Get(bucketState, keyNext); len(next) == 4 {
			h.NextNodeLocal = identity.Numeric(binary.BigEndian.Uint32(next))
		}
		if err := t.ForEachWith(bucketState, []byte(isolatedPrefix), func(k, v []byte) error {
			r, _, err := parseWorkload(k[len(isolatedPrefix):], v)
			if err != nil {
				return d.holds.Refuse(err)
			}
			r.Identity = identity.Identity{Number: identity.Init, Labels: allocator.Isolated()}
			h.Holders = append(h.Holders, r)
			return nil
		}); err != nil {
			return err
		}
		if err := t.ForEach(bucketHolders, func(k, v []byte) error {
			r, err := parseHolder(k, v)
			if err != nil {
				return d.holds.Refuse(err)
			}
			if old, ok := sets[r.Identity.Number]; ok && old != r.Identity.Labels.Text() {
				return d.holds.Refuse(fmt.Errorf("%w: number %d has two label sets", errRecord, r.Identity.Number))
			}
			sets[r.Identity.Number] = r.Identity.Labels.Text()
			h.Holders = append(h.Holders, r)
			return nil
		}); err != nil {
			return err
		}
		return t.ForEach(bucketRecent, func(k, v []byte) error {
			if len(k) != 4 {
				return d.holds.Refuse(fmt.Errorf("%w: key %x of recent", errRecord, k))
			}
			recent[identity.Numeric(binary.BigEndian.Uint32(k))] = string(v)
			return nil
		})
	})
	return h, err
}

func parseHolder(key, value []byte) (allocator.HolderRecord, error) {
	holder, r, err := parseWorkload(key, value)
	if err != nil {
		return allocator.HolderRecord{}, err
	}
	holder.Identity, err = parseIdentity(r.Number, r.Labels)
	if err != nil {
		return allocator.HolderRecord{}, fmt.Errorf("%w: %s: %w", errRecord, holder.Holder, err)
	}
	if s := holder.Identity.Number.Scope(); s != identity.ScopeCluster && s != identity.ScopeNodeLocal {
		return allocator.HolderRecord{}, fmt.Errorf("%w: %s: a workload cannot have the identity %d",
			errRecord, holder.Holder, r.Number)
	}
	return holder, nil
}

// parseWorkload decodes a record without its identity.
func parseWorkload(key, value []byte) (allocator.HolderRecord, holderRecord, error) {
	var r holderRecord
	holder, err := allocator.ParseHolder(string(key))
	if err != nil {
		return allocator.HolderRecord{}, r, fmt.Errorf("%w: %w", errRecord, err)
	}
	if err := json.Unmarshal(value, &r); err != nil {
		return allocator.HolderRecord{}, r, fmt.Errorf("%w: %s: %w", errRecord, holder, err)
	}
	namespace, pod, _ := strings.Cut(r.Pod, "/")
	return allocator.HolderRecord{Holder: holder, Workload: allocator.Workload{
		Manager: r.Manager, Network: r.Network, Addresses: r.Addresses,
		Pod: workload.PodReference{Namespace: namespace, Name: pod, UID: r.PodUID},
	}}, r, nil
}

func parseIdentity(number uint32, text string) (identity.Identity, error) {
	labels, err := label.Parse(text)
	if err != nil {
		return identity.Identity{}, fmt.Errorf("number %d: %w", number, err)
	}
	// Only identities of this node have such labels: API servers in the world.
	if identity.Numeric(number).Scope() != identity.ScopeNodeLocal && labels.Set().HasSource(label.SourceReserved) {
		return identity.Identity{}, fmt.Errorf("number %d has reserved labels", number)
	}
	return identity.Identity{Number: identity.Numeric(number), Labels: labels}, nil
}

// loadKnown opens and reads the cache. A missing cache is created from the file of the previous version.
func (d *Dir) loadKnown(l *Loaded) (err error) {
	old, cached := d.oldKnown()
	d.known, err = d.dir.Open(store.Options{
		Name: KnownFile, Unlisted: true, Reserve: knownReserve,
		Layout: store.Layout{
			Format: "sluice-identity-known", Version: 2, Buckets: []string{bucketIdentities, bucketState, bucketKeys},
		},
		Previous: []store.Layout{{Version: 1, Buckets: []string{bucketIdentities, bucketState}}},
		Migrate:  func(*store.Tx, uint32) error { return nil }, // it has no keys yet, and no point
		Loss:     "etcd answers",
		Init: func(t *store.Tx) error {
			putKnown(t, allocator.KnownChange{Put: old.Identities, Heard: old.Heard})
			return nil
		},
	})
	if err != nil {
		return err
	}
	l.Cached = cached || !d.known.Fresh()
	seen := map[string]bool{}
	err = d.known.View(func(t *store.Tx) error {
		if heard := t.Get(bucketState, keyHeard); len(heard) == 8 {
			l.Known.Heard = time.UnixMilli(int64(binary.BigEndian.Uint64(heard)))
		}
		// A file that was created but never received a listing is not a cache.
		l.Cached = l.Cached && t.Get(bucketState, keyListed) != nil
		if err := d.loadKeys(t, &l.Keys); err != nil {
			return d.known.Refuse(err)
		}
		if text := t.Get(bucketState, keyPins); text != nil {
			if err := json.Unmarshal(text, &l.Pins); err != nil {
				return d.known.Refuse(fmt.Errorf("%w: pins: %w", errRecord, err))
			}
		}
		return t.ForEach(bucketIdentities, func(k, v []byte) error {
			if len(k) != 4 {
				return d.known.Refuse(fmt.Errorf("%w: key %x", errRecord, k))
			}
			id, err := parseIdentity(binary.BigEndian.Uint32(k), string(v))
			if err != nil || id.Number.Scope() != identity.ScopeCluster || seen[string(v)] {
				return d.known.Refuse(fmt.Errorf("%w: number %d: %w", errRecord, binary.BigEndian.Uint32(k), err))
			}
			seen[string(v)] = true
			l.Known.Identities = append(l.Known.Identities, id)
			return nil
		})
	})
	if err != nil {
		err = errors.Join(err, d.known.Close())
	}
	return err
}

// keyPins contains the pins, as JSON. They are in the cache, which survives a reboot, because the keys of nodes in the
// cache are of the rebuilt etcd, too. Earlier versions ignore the key.
var keyPins = []byte("pins")

// SavePins implements registry.Records.
func (d *Dir) SavePins(pins []registry.Pin) error {
	d.cache.Lock()
	defer d.cache.Unlock()
	return d.update(d.known, func(t *store.Tx) error {
		if len(pins) == 0 {
			t.Delete(bucketState, keyPins)
			return nil
		}
		text, err := json.Marshal(pins)
		if err != nil {
			return fmt.Errorf("pins: %w", err)
		}
		t.Put(bucketState, keyPins, text)
		return nil
	})
}

// keyListed exists if the cache has a complete listing of the cluster.
var keyListed = []byte("listed")

// overlay applies changes to the content of the cache that were noted after its last write.
func overlay(k *allocator.Known, recent map[identity.Numeric]string) error {
	out := k.Identities[:0]
	for _, id := range k.Identities {
		if _, ok := recent[id.Number]; !ok {
			out = append(out, id)
		}
	}
	for n, text := range recent {
		if text == "" {
			continue
		}
		id, err := parseIdentity(uint32(n), text)
		if err != nil {
			return fmt.Errorf("%w: recent: %w", errRecord, err)
		}
		out = append(out, id)
	}
	k.Identities = out
	return nil
}

// loadIncarnation reads the name of this directory, or creates one that is not saved yet. damaged is the reason why the
// file cannot be used. A new name only causes a wait until the lease of the old name ends.
func (d *Dir) loadIncarnation() (rec incarnationRecord, damaged, err error) {
	path := filepath.Join(d.dir.Path(), IncarnationFile)
	err = durable.Load(path, 4096, incarnationSchema, &rec)
	if err == nil && !incarnationRE.MatchString(rec.Incarnation) {
		err = &durable.RecordError{File: path, Field: "data.incarnation", Err: fmt.Errorf("%w: %q", durable.ErrCorrupt, rec.Incarnation)}
	}
	switch {
	case err == nil:
		return rec, nil, nil
	case errors.Is(err, durable.ErrCorrupt), errors.Is(err, durable.ErrForeign), errors.Is(err, durable.ErrVersion), errors.Is(err, durable.ErrTooLarge):
		damaged = err
	case !errors.Is(err, fs.ErrNotExist):
		return rec, nil, fmt.Errorf("incarnation: %w", err)
	}
	var random [16]byte
	rand.Read(random[:]) //nolint:errcheck // never fails
	return incarnationRecord{Incarnation: hex.EncodeToString(random[:])}, damaged, nil
}

func (d *Dir) saveIncarnation(rec incarnationRecord) error {
	if err := durable.Save(filepath.Join(d.dir.Path(), IncarnationFile), incarnationSchema, rec, durable.SyncAll); err != nil {
		return fmt.Errorf("incarnation: %w", err)
	}
	return nil
}

var incarnationRE = regexp.MustCompile(`^[0-9a-f]{32}$`)

type change struct {
	make func(*store.Tx) error
	made bool
	err  error
}

// change changes the holds. Calls that arrive during a commit share the next commit, and fail together.
func (d *Dir) change(f func(*store.Tx) error) error {
	c := &change{make: f}
	d.queue.Lock()
	d.changes = append(d.changes, c)
	d.queue.Unlock()
	d.mu.Lock()
	defer d.mu.Unlock()
	if c.made {
		return c.err
	}
	d.queue.Lock()
	all := d.changes
	d.changes = nil
	d.queue.Unlock()
	err := d.update(d.holds, func(t *store.Tx) error {
		for _, c := range all {
			if err := c.make(t); err != nil {
				return err
			}
		}
		return nil
	})
	for _, c := range all {
		c.made, c.err = true, err
	}
	return err
}

// update writes to a file.
func (d *Dir) update(f *store.Store, change func(*store.Tx) error) error {
	err := f.Update(change)
	if errors.Is(err, store.ErrLost) {
		select {
		case d.lost <- err:
		default: // only the first reason is needed
		}
	}
	return err
}

// Watch returns an error once a file can no longer be changed, because the content on the disk is uncertain: only a new
// process that opens the file can read it. It returns nil when ctx ends.
func (d *Dir) Watch(ctx context.Context) error {
	select {
	case err := <-d.lost:
		return err
	case <-ctx.Done():
		return nil
	}
}

// SaveRegistration implements registry.Records.
func (d *Dir) SaveRegistration(r registry.Registration) error {
	text, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("registration: %w", err)
	}
	return d.change(func(t *store.Tx) error {
		t.Put(bucketState, keyRegistration, text)
		return nil
	})
}

// SaveHolds implements allocator.Records.
func (d *Dir) SaveHolds(c allocator.HoldsChange) error {
	return d.change(func(t *store.Tx) error { return putHolds(t, c) })
}

func putHolds(t *store.Tx, c allocator.HoldsChange) error {
	for _, holder := range c.Drop {
		t.Delete(bucketHolders, []byte(holder))
		t.Delete(bucketState, []byte(isolatedPrefix+holder))
	}
	for _, r := range c.Put {
		w := r.Workload
		stored := holderRecord{
			Number: uint32(r.Identity.Number), Labels: r.Identity.Labels.Text(),
			Manager: w.Manager, Network: w.Network, PodUID: w.Pod.UID, Addresses: w.Addresses,
		}
		if w.Pod.Name != "" {
			stored.Pod = w.Pod.Namespace + "/" + w.Pod.Name
		}
		value, err := json.Marshal(stored)
		if err != nil {
			return err
		}
		isolated, other := []byte(isolatedPrefix+r.Holder), []byte(r.Holder)
		if r.Identity.Number == identity.Init {
			t.Put(bucketState, isolated, value)
			t.Delete(bucketHolders, other)
		} else {
			t.Put(bucketHolders, other, value)
			t.Delete(bucketState, isolated)
		}
	}
	t.Put(bucketState, keyNext, key(c.NextNodeLocal))
	t.Put(bucketState, keySession, []byte(c.Session))
	return nil
}

func key(n identity.Numeric) []byte { return binary.BigEndian.AppendUint32(nil, uint32(n)) }

// SaveKnown implements allocator.Records. It saves the identities together with the keys of nodes, and with the point
// up to which both are known, which it takes first.
func (d *Dir) SaveKnown(take func() allocator.KnownChange) error {
	d.cache.Lock()
	k := d.keys.take()
	c := d.withNoted(take())
	err := d.update(d.known, func(t *store.Tx) error {
		putKnown(t, c)
		k.put(t)
		return nil
	})
	if err == nil {
		d.noted = nil
	}
	d.cache.Unlock()
	if err != nil {
		d.keys.giveBack(k)
		return err
	}
	d.keys.mu.Lock()
	if k.at.Revision != 0 && k.at.Cluster == d.keys.at.Cluster && k.at.Revision <= d.keys.at.Revision {
		d.keys.saved = k.at
	}
	d.keys.mu.Unlock()
	// Identities in the cache need no note any more, unless they have changed again.
	if len(c.Put)+len(c.Drop)+len(k.changed) == 0 {
		return nil // Only the time and the point have to be written.
	}
	defer d.unload()
	return d.change(func(t *store.Tx) error {
		k.forget(t)
		for _, n := range c.Drop {
			if v := t.Get(bucketRecent, key(n)); len(v) == 0 {
				t.Delete(bucketRecent, key(n))
			}
		}
		for _, id := range c.Put {
			if string(t.Get(bucketRecent, key(id.Number))) == id.Labels.Text() {
				t.Delete(bucketRecent, key(id.Number))
			}
		}
		return nil
	})
}

// unload frees the memory of the files' pages: their number grows with the cluster, and they are read again when
// necessary. If it fails, it only costs that memory.
func (d *Dir) unload() {
	d.cache.Lock()
	_ = d.known.Unload()
	d.cache.Unlock()
	d.mu.Lock()
	_ = d.holds.Unload()
	d.mu.Unlock()
}

// withNoted adds the changes that the previous process noted and did not save. Called with cache held.
func (d *Dir) withNoted(c allocator.KnownChange) allocator.KnownChange {
	if len(d.noted) == 0 {
		return c
	}
	newer := make(map[identity.Numeric]bool, len(c.Put)+len(c.Drop))
	for _, n := range c.Drop {
		newer[n] = true
	}
	for _, id := range c.Put {
		newer[id.Number] = true
	}
	for n, text := range d.noted {
		switch {
		case newer[n]:
		case text == "":
			c.Drop = append(c.Drop, n)
		default:
			if id, err := parseIdentity(uint32(n), text); err == nil { // Load has already parsed it, so it is valid
				c.Put = append(c.Put, id)
			}
		}
	}
	return c
}

func putKnown(t *store.Tx, c allocator.KnownChange) {
	for _, n := range c.Drop {
		t.Delete(bucketIdentities, key(n))
	}
	for _, id := range c.Put {
		t.Put(bucketIdentities, key(id.Number), []byte(id.Labels.Text()))
	}
	if !c.Heard.IsZero() {
		t.Put(bucketState, keyHeard, binary.BigEndian.AppendUint64(nil, uint64(c.Heard.UnixMilli())))
	}
	if c.Heard.IsZero() && len(c.Put)+len(c.Drop) == 0 {
		return // a new file
	}
	t.Put(bucketState, keyListed, []byte{1})
}
