// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package journal keeps what the policy service may not forget: policies with
// the revision they are in, and what it last knew of identities, subscribers
// and learned names.
//
// Policies are in a file of kit/store that is synced with each change: without
// them a node would allow what they deny, so a file that is lost or damaged
// stops the start. The rest is in a second file, which is not synced and is
// worth one boot: it lets a killed process serve the same tables before its
// sources have answered, and after a boot the sources say it again. So neither
// can damage the other.
package journal

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"sync"

	"github.com/sluice-net/sluice/kit/fault"
	"github.com/sluice-net/sluice/kit/store"
)

// Names of the files. The second has the boot in its name.
const (
	File      = "policies.db"
	CacheFile = "cache.db"
)

// dirMode is that of a state directory at most: others may list it, the files
// are their owner's alone.
const dirMode = 0o755

const (
	bucketPolicies    = "policies"
	bucketState       = "state"
	bucketIdentities  = "identities"
	bucketSubscribers = "subscribers"
	bucketNames       = "names"
)

// Keys of bucketState.
var (
	keyRevision = []byte("revision")
	keyName     = []byte("name")
	keyNumber   = []byte("change") // of the last one that counts
)

// beforeWrite is where a test may kill the process or make it fail.
var beforeWrite = fault.Register("policy/journal/before-write")

// Change is what one call of Commit or Note writes. Its fields are never given another
// meaning: they are those of the lines of the first format, too.
type Change struct {
	// State is the name of the state that is kept here, in hexadecimal.
	State string `json:"state,omitempty"`
	// Revision of the policies after the change; 0: as before.
	Revision        uint64       `json:"revision,omitempty"`
	Policies        []Policy     `json:"policies,omitempty"`
	GonePolicies    []Key        `json:"gone_policies,omitempty"`
	Identities      []Identity   `json:"identities,omitempty"`
	GoneIdentities  []uint32     `json:"gone_identities,omitempty"`
	Subscribers     []Subscriber `json:"subscribers,omitempty"`
	GoneSubscribers []string     `json:"gone_subscribers,omitempty"`
	Names           []Name       `json:"names,omitempty"`
	GoneNames       []string     `json:"gone_names,omitempty"`
}

// Key names a policy.
type Key struct {
	Kind      string `json:"kind"`
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name"`
}

// Policy is a policy as it came.
type Policy struct {
	Key      Key    `json:"key"`
	Source   string `json:"source"`
	Origin   string `json:"origin,omitempty"`
	Manager  string `json:"manager,omitempty"`
	Manifest []byte `json:"manifest"`
	Revision uint64 `json:"revision"`
	Updated  int64  `json:"updated"` // seconds since 1970
	// Place is what decides about the policy's place in the limits.
	Place Place `json:"-"`
}

// Identity is a number with its labels as source, key, value.
type Identity struct {
	Number uint32      `json:"number"`
	Labels [][3]string `json:"labels"`
}

// Subscriber is what a subscriber asked for.
type Subscriber struct {
	Name      string     `json:"name"`
	Subjects  []uint32   `json:"subjects,omitempty"`
	Locations []Location `json:"locations,omitempty"`
	// Enforces is absent in records of versions that did not know it.
	Enforces bool `json:"enforces,omitempty"`
}

// Location is where an identity lives.
type Location struct {
	Address  string `json:"address"`
	Identity uint32 `json:"identity"`
}

// Name is a DNS name with all addresses learned for it.
type Name struct {
	Name      string    `json:"name"`
	Addresses []Address `json:"addresses"`
}

// Address is one of them.
type Address struct {
	Address string `json:"address"`
	Expires int64  `json:"expires"` // seconds since 1970
}

// Journal is the open state. It belongs to one goroutine, but for changes of
// policies: one at a time is staged by another.
type Journal struct {
	dir     *store.Dir
	cache   *store.Store
	waiting map[record][]byte // for the cache, nil removes; what could not be written

	policies  *store.Store
	number    uint64   // of the last change of policies that counts
	leftovers []string // policies with records of a later change, which have to go before the next one is committed
	outdated  []string // policies with records that count no more

	mu     sync.Mutex // held by each transaction of policies
	closed bool       // guarded by mu
}

// record names a record of the cache.
type record struct{ bucket, key string }

// reserve is the address space for each file: 10,000 policies of 3 KB and as
// much again for the commit that replaces them take a quarter.
const reserve = 256 << 20

var (
	policiesOptions = store.Options{
		Name:   File,
		Layout: store.Layout{Format: "sluice-policy", Version: 3, Buckets: []string{bucketPolicies, bucketState}},
		// Version 1 had policies as JSON, with the manifest in base64, and version 2
		// no numbers of changes.
		Previous: []store.Layout{
			{Format: "sluice-policy", Version: 1, Buckets: []string{bucketPolicies, bucketState}},
			{Format: "sluice-policy", Version: 2, Buckets: []string{bucketPolicies, bucketState}},
		},
		Migrate: migratePolicies,
		Reserve: reserve,
		Loss:    "all policies will be applied again",
		Doc:     `docs/policy.md, "What it remembers"`,
	}
	cacheOptions = store.Options{
		Name:   CacheFile,
		Layout: store.Layout{Format: "sluice-policy-cache", Version: 2, Buckets: []string{bucketIdentities, bucketSubscribers, bucketNames}},
		// Version 1 had the named ports of identities under another key.
		Previous: []store.Layout{{Format: "sluice-policy-cache", Version: 1, Buckets: []string{bucketIdentities, bucketSubscribers, bucketNames}}},
		Migrate:  migrateCache,
		Boot:     true,

		Reserve: reserve,
		Loss:    "the sources of policies and identities answer",
		Doc:     `docs/policy.md, "What it remembers"`,
	}
)

// Open takes the directory for this process and gives everything in it to
// replay; nothing of that is gone. Cached is false if nothing but policies was there. The error of a
// damaged file ends with what to do.
func Open(dir string, replay func(Change) error) (j *Journal, cached bool, err error) {
	d, err := store.OpenDir(dir, dirMode)
	if err != nil {
		return nil, false, err
	}
	opened := &Journal{dir: d, waiting: make(map[record][]byte)}
	if cached, err = opened.load(replay); err != nil {
		return nil, false, errors.Join(err, opened.Close())
	}
	return opened, cached, nil
}

func (j *Journal) load(replay func(Change) error) (cached bool, err error) {
	old, err := readFirstFormat(j.dir)
	if err != nil {
		return false, err
	}
	cache, policies := cacheOptions, policiesOptions
	cache.Init, policies.Init = old.initCache, old.initPolicies
	// The cache first: the policies mark what was taken over.
	if j.cache, err = j.dir.Open(cache); err != nil {
		return false, err
	}
	if j.policies, err = j.dir.Open(policies); err != nil {
		return false, err
	}
	if err := old.retire(j.dir); err != nil {
		return false, err
	}
	if err := j.policies.View(func(t *store.Tx) error {
		if err := j.replayState(t, replay); err != nil {
			return err
		}
		return j.replayPolicies(t, replay)
	}); err != nil {
		return false, err
	}
	// On a full disk it stays: nothing is committed before it is removed.
	if err := j.Tidy(context.Background()); err != nil && !errors.Is(err, store.ErrFull) {
		return false, err
	}
	err = j.cache.View(func(t *store.Tx) error { cached, err = j.replayCache(t, replay); return err })
	return cached, err
}

func (j *Journal) replayState(t *store.Tx, replay func(Change) error) error {
	if name := t.Get(bucketState, keyName); name != nil {
		if err := replay(Change{State: string(name)}); err != nil {
			return err
		}
	}
	if b := t.Get(bucketState, keyRevision); b != nil {
		if len(b) != 8 {
			return j.policies.Refuse(fmt.Errorf("a revision of %d bytes", len(b)))
		}
		return replay(Change{Revision: binary.BigEndian.Uint64(b)})
	}
	return nil
}

func (j *Journal) replayCache(t *store.Tx, replay func(Change) error) (some bool, err error) {
	give := func(c Change) error { some = true; return replay(c) }
	err = errors.Join(
		each(t, j.cache, bucketIdentities, func(x Identity) error { return give(Change{Identities: []Identity{x}}) }),
		each(t, j.cache, bucketSubscribers, func(x Subscriber) error { return give(Change{Subscribers: []Subscriber{x}}) }),
		each(t, j.cache, bucketNames, func(x Name) error { return give(Change{Names: []Name{x}}) }),
	)
	return some, err
}

// each decodes the records of a bucket.
func each[T any](t *store.Tx, s *store.Store, bucket string, f func(T) error) error {
	return t.ForEach(bucket, func(k, v []byte) error {
		var x T
		if err := decode(v, &x); err != nil {
			return s.Refuse(fmt.Errorf("%s %.100q: %w", bucket, k, err))
		}
		return f(x)
	})
}

// policyKey has no part with a zero byte: names of Kubernetes have none.
func policyKey(k Key) string { return k.Kind + "\x00" + k.Namespace + "\x00" + k.Name }

func identityKey(number uint32) string {
	return string(binary.BigEndian.AppendUint32(nil, number))
}

// encode is the form of a record, whose type has nothing that JSON cannot say.
func encode(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(fmt.Sprintf("journal: encode %T: %v", v, err))
	}
	return b
}

// Commit stages and commits a change of policies, the revision and the name of
// the state. After ErrLost the process has to end; after any other error
// everything is as before.
func (j *Journal) Commit(ctx context.Context, c Change) error {
	s, err := j.Stage(ctx, c)
	if err != nil {
		return err
	}
	if err := s.Commit(ctx); err != nil {
		return errors.Join(err, s.Discard())
	}
	if err := j.Tidy(ctx); errors.Is(err, ErrLost) {
		return err
	}
	return nil // of what could not be tidied, Problem tells
}

// Note writes the rest of a change, which survives the process when it returns
// nil. After ErrLost the process has to end; after any other error it waits
// for Flush, or for the next Note.
func (j *Journal) Note(ctx context.Context, c Change) error {
	j.keep(c)
	if err := beforeWrite.Hit(ctx); err != nil {
		return err
	}
	return j.flush()
}

// keep adds the rest of a change to what waits for the cache.
func (j *Journal) keep(c Change) {
	for _, x := range c.Identities {
		j.waiting[record{bucketIdentities, identityKey(x.Number)}] = encode(x)
	}
	for _, x := range c.GoneIdentities {
		j.waiting[record{bucketIdentities, identityKey(x)}] = nil
	}
	for _, x := range c.Subscribers {
		j.waiting[record{bucketSubscribers, x.Name}] = encode(x)
	}
	for _, x := range c.GoneSubscribers {
		j.waiting[record{bucketSubscribers, x}] = nil
	}
	for _, x := range c.Names {
		j.waiting[record{bucketNames, x.Name}] = encode(x)
	}
	for _, x := range c.GoneNames {
		j.waiting[record{bucketNames, x}] = nil
	}
}

// flush writes what waits for the cache.
func (j *Journal) flush() error {
	if len(j.waiting) == 0 {
		return nil
	}
	if err := j.cache.Update(func(t *store.Tx) error {
		for r, value := range j.waiting {
			if value == nil {
				t.Delete(r.bucket, []byte(r.key))
			} else {
				t.Put(r.bucket, []byte(r.key), value)
			}
		}
		return nil
	}); err != nil {
		return err
	}
	clear(j.waiting)
	return nil
}

// Flush tries again what could not be written, and whether the disk takes
// writes.
func (j *Journal) Flush() error {
	return errors.Join(j.probe(), j.flush())
}

func (j *Journal) probe() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.policies.Probe()
}

// Problem is why there is something for Flush to do, on one line; nil if there
// is not.
func (j *Journal) Problem() error {
	policies, cache := j.policies.Problem(), j.cache.Problem()
	if policies != nil && cache != nil {
		return fmt.Errorf("%w; %w", policies, cache)
	}
	return errors.Join(policies, cache)
}

// Size is that of the files in bytes.
func (j *Journal) Size() int64 { return j.policies.Size() + j.cache.Size() }

// ErrLost: the state can take no more changes; the process has to start anew.
var ErrLost = store.ErrLost

// Close gives the directory to the next process.
func (j *Journal) Close() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.closed = true
	var err error
	for _, s := range []*store.Store{j.policies, j.cache} {
		if s != nil {
			err = errors.Join(err, s.Close())
		}
	}
	return errors.Join(err, j.dir.Close())
}
