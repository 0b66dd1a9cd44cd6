// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package record defines the format of the policy service's state directory: the policies and their revision, and the
// last known identities, subscribers and learned names.
//
// A node that lost its policies would allow traffic that they deny. Therefore policies are stored in a journal that
// is synced to disk. All other records are in the cache.
package record

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/sluice-net/sluice/kit/desired/journal"
	"github.com/sluice-net/sluice/kit/store"
	"github.com/sluice-net/sluice/model/dnsname"
)

// Names of the files. The name of the cache also contains the boot ID.
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

// Journal stores the records.
type Journal = journal.Journal[Policy]

// Change is a change of the journal: policies that are stored and policies that are deleted.
type Change = journal.Change[Policy]

// Staged is a change of policies that is not effective yet.
type Staged = journal.Staged[Policy]

// Contents receives the records that Open reads. If one of its functions returns an error, Open returns it.
type Contents struct {
	Name       func(string) error // name of the state; not called for a new state
	Policy     func(Policy) error
	Identity   func(Identity) error
	Subscriber func(Subscriber) error
	DNSName    func(Name) error
}

// Cache is a change of the cache. The meaning of its fields must never change, because lines of the first format have
// the same fields.
type Cache struct {
	Identities      []Identity   `json:"identities,omitempty"`
	GoneIdentities  []uint32     `json:"gone_identities,omitempty"`
	Subscribers     []Subscriber `json:"subscribers,omitempty"`
	GoneSubscribers []string     `json:"gone_subscribers,omitempty"`
	Names           []Name       `json:"names,omitempty"`
	GoneNames       []string     `json:"gone_names,omitempty"`
}

// Key identifies a policy.
type Key struct {
	Kind      string `json:"kind"`
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name"`
}

// Policy is a policy as received.
type Policy struct {
	Key      Key    `json:"key"`
	Source   string `json:"source"`
	Origin   string `json:"origin,omitempty"`
	Manager  string `json:"manager,omitempty"`
	Manifest []byte `json:"manifest"`
	Revision uint64 `json:"revision"`
	Updated  int64  `json:"updated"` // seconds since 1970
	// Place is the policy's admission to the limits.
	Place Place `json:"-"`
}

// Identity is a number and its labels, each as source, key, value.
type Identity struct {
	Number uint32      `json:"number"`
	Labels [][3]string `json:"labels"`
}

// Subscriber holds the interests of a subscriber.
type Subscriber struct {
	Name      string     `json:"name"`
	Subjects  []uint32   `json:"subjects,omitempty"`
	Locations []Location `json:"locations,omitempty"`
	// Enforces is absent in records of versions that did not have it.
	Enforces bool `json:"enforces,omitempty"`
}

// Location maps an address to its identity.
type Location struct {
	Address  string `json:"address"`
	Identity uint32 `json:"identity"`
}

// Name is a DNS name with all its learned addresses.
type Name struct {
	Name      string    `json:"name"`
	Addresses []Address `json:"addresses"`
	// Namespace is the only namespace whose pods may use the addresses; nil: all pods may. An older version ignores
	// it.
	Namespace *string `json:"namespace,omitempty"`
}

// NewName returns the record of a key, without addresses.
func NewName(key dnsname.Learned) Name {
	n := Name{Name: key.Name()}
	if namespace, limited := key.Namespace(); limited {
		n.Namespace = &namespace
	}
	return n
}

// Key returns the key of the name.
func (n Name) Key() dnsname.Learned {
	if n.Namespace == nil {
		return dnsname.ForAll(n.Name)
	}
	return dnsname.ForNamespace(n.Name, *n.Namespace)
}

// Address is an address of a name.
type Address struct {
	Address string `json:"address"`
	Expires int64  `json:"expires"` // seconds since 1970
}

// reserve is the address space for each file. 10,000 policies of 3 KB, together with a commit that replaces all of
// them, use a quarter of it.
const reserve = 256 << 20

var (
	policiesOptions = store.Options{
		Name:   File,
		Layout: store.Layout{Format: "sluice-policy", Version: 3, Buckets: []string{bucketPolicies, bucketState}},
		// Version 1 had policies as JSON with the manifest in base64. Version 2 had no numbers of changes.
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
		// Version 1 had another key for the named ports of identities.
		Previous: []store.Layout{{Format: "sluice-policy-cache", Version: 1, Buckets: []string{bucketIdentities, bucketSubscribers, bucketNames}}},
		Migrate:  migrateCache,
		Boot:     true,

		Reserve: reserve,
		Loss:    "the sources of policies and identities are reachable",
		Doc:     `docs/policy.md, "What it remembers"`,
	}
)

// Open opens the directory for this process and passes its whole content to c. It returns the revision of the
// policies, and whether the cache had any records. The error for a corrupt file ends with instructions.
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
					return nil // the record comes from a later version
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

// cached passes a record of the cache to the function for its bucket.
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
			err = errors.New("the record belongs to another policy")
		}
		if err != nil {
			return p, err
		}
		p.Place, err = decodePlace(place, &p)
		return p, err
	},
}

// Encode returns the key of a policy in the file. No part of a Key has a zero byte, because names in Kubernetes have
// none.
func (k Key) Encode() string { return k.Kind + "\x00" + k.Namespace + "\x00" + k.Name }

func identityKey(number uint32) string {
	return string(binary.BigEndian.AppendUint32(nil, number))
}

// encode returns the JSON of a record. Its type must be one that can always be encoded.
func encode(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(fmt.Sprintf("record: encode %T: %v", v, err))
	}
	return b
}

// StateName returns the State of a Change that sets the name of the state.
func StateName(name string) map[string][]byte { return map[string][]byte{keyName: []byte(name)} }

// Records returns the records of the cache that the change writes; nil values are deleted.
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
		out[journal.CacheKey{Bucket: bucketNames, Key: string(x.Key())}] = encode(x)
	}
	for _, x := range c.GoneNames {
		out[journal.CacheKey{Bucket: bucketNames, Key: x}] = nil
	}
	return out
}
