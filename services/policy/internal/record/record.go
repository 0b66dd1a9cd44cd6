// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package record is the form of what the policy service keeps in its state
// directory: policies with the revision they are in, and what it last knew of
// identities, subscribers and learned names.
//
// Without the policies a node would allow what they deny, so their file is the
// synced one of a journal. The rest is the cache.
package record

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/sluice-net/sluice/kit/desired/journal"
	"github.com/sluice-net/sluice/kit/store"
)

// Names of the files. The second has the boot in its name.
const (
	File      = "policies.db"
	CacheFile = "cache.db"
)

const (
	bucketPolicies    = "policies"
	bucketState       = "state"
	bucketIdentities  = "identities"
	bucketSubscribers = "subscribers"
	bucketNames       = "names"
)

// Keys of bucketState.
const (
	keyRevision = "revision"
	keyName     = "name"
)

// Journal keeps the records.
type Journal = journal.Journal[Policy]

// Change is a change of policies.
type Change = journal.Change[Policy]

// Staged is a change of policies that does not count yet.
type Staged = journal.Staged[Policy]

// Contents takes what Open finds. The error of one of its functions ends Open.
type Contents struct {
	Name       func(string) error // of the state; not called for a new one
	Policy     func(Policy) error
	Identity   func(Identity) error
	Subscriber func(Subscriber) error
	DNSName    func(Name) error
}

// Cache is a change of the cache. Its fields are never given another meaning: they
// are also fields of the lines of the first format.
type Cache struct {
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

// Open takes the directory for this process and gives everything in it to c;
// nothing of that is gone. It returns the revision of the policies, and whether
// anything was in the cache. The error of a damaged file ends with what to do.
func Open(dir string, c Contents) (j *Journal, revision uint64, cached bool, err error) {
	d, err := store.OpenDir(dir, journal.DirMode)
	if err != nil {
		return nil, 0, false, err
	}
	old, err := readFirstFormat(d)
	if err != nil {
		return nil, 0, false, errors.Join(err, d.Close())
	}
	cache, policies := cacheOptions, policiesOptions
	cache.Init, policies.Init = old.initCache, old.initPolicies
	if j, err = journal.Open(d, journal.Options[Policy]{
		Codec: codec, File: policies, Objects: bucketPolicies, State: bucketState, Staged: true,
		Annotations: placePrefix, Cache: &cache,
	}); err != nil {
		return nil, 0, false, err
	}
	if err = old.retire(d); err == nil {
		revision, err = j.Replay(journal.Contents[Policy]{
			State: func(key string, value []byte) error {
				if key != keyName {
					return nil // a later version's
				}
				return c.Name(string(value))
			},
			Object: c.Policy,
			Cached: func(bucket string, value []byte) error { cached = true; return c.cached(bucket, value) },
		})
	}
	if err != nil {
		return nil, 0, false, errors.Join(err, j.Close())
	}
	return j, revision, cached, nil
}

// cached gives a record of the cache.
func (c *Contents) cached(bucket string, value []byte) error {
	switch bucket {
	case bucketIdentities:
		return decodeTo(value, c.Identity)
	case bucketSubscribers:
		return decodeTo(value, c.Subscriber)
	}
	return decodeTo(value, c.DNSName)
}

func decodeTo[T any](value []byte, give func(T) error) error {
	var x T
	if err := decode(value, &x); err != nil {
		return err
	}
	return give(x)
}

// codec encodes policies.
var codec = journal.Codec[Policy]{
	Key:      func(p *Policy) string { return p.Key.Encode() },
	Size:     func(p *Policy) int { return len(p.Manifest) },
	Encode:   func(p *Policy) []byte { return encodePolicy(*p) },
	Annotate: encodePlace,
	Decode: func(key string, record, place []byte) (Policy, error) {
		p, err := decodePolicy(record)
		if err == nil && p.Key.Encode() != key {
			err = errors.New("it is the record of another policy")
		}
		p.Place = decodePlace(place, &p)
		return p, err
	},
}

// Encode returns the key of a policy in the file. No part of a Key has a zero byte: names
// of Kubernetes have none.
func (k Key) Encode() string { return k.Kind + "\x00" + k.Namespace + "\x00" + k.Name }

func identityKey(number uint32) string {
	return string(binary.BigEndian.AppendUint32(nil, number))
}

// encode is the form of a record, whose type has nothing that JSON cannot say.
func encode(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(fmt.Sprintf("record: encode %T: %v", v, err))
	}
	return b
}

// StateName is the state of a Change that names the state.
func StateName(name string) map[string][]byte { return map[string][]byte{keyName: []byte(name)} }

// Records are the records of the cache that the change writes and, with nil, deletes.
func (c *Cache) Records() map[journal.CacheKey][]byte {
	out := make(map[journal.CacheKey][]byte)
	for _, x := range c.Identities {
		out[journal.CacheKey{Bucket: bucketIdentities, Key: identityKey(x.Number)}] = encode(x)
	}
	for _, x := range c.GoneIdentities {
		out[journal.CacheKey{Bucket: bucketIdentities, Key: identityKey(x)}] = nil
	}
	for _, x := range c.Subscribers {
		out[journal.CacheKey{Bucket: bucketSubscribers, Key: x.Name}] = encode(x)
	}
	for _, x := range c.GoneSubscribers {
		out[journal.CacheKey{Bucket: bucketSubscribers, Key: x}] = nil
	}
	for _, x := range c.Names {
		out[journal.CacheKey{Bucket: bucketNames, Key: x.Name}] = encode(x)
	}
	for _, x := range c.GoneNames {
		out[journal.CacheKey{Bucket: bucketNames, Key: x}] = nil
	}
	return out
}
