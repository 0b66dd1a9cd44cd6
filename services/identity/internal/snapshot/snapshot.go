// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package snapshot keeps on disk what this service may not forget, and what it
// would like to remember.
//
// Two files with different rights to exist:
//
//   - holds.<boot id>.json says who holds which number. It is state: written
//     before the answer that depends on it, and refused when it is damaged, because
//     starting without it would let the cluster collect numbers that endpoints use.
//   - known.json is a cache of the cluster's identities for the time without
//     etcd. A damaged one is put aside and read again from etcd: nothing that
//     was answered depends on it, since the holds carry label sets themselves.
//
// Holders belong to a boot of the machine, because no endpoint survives one:
// files that another boot wrote are removed unread. So the holds need to
// survive a killed process, which the page cache does, and not a loss of
// power, which fsync costs milliseconds for in every answer.
package snapshot

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/sluice-net/sluice/kit/durable"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/identity"
)

// Names of the files.
const (
	KnownFile   = "known.json"
	DamagedFile = "known.json.damaged"
	LockFile    = "lock"

	IncarnationFile = "incarnation.json"
)

// lockWait is how long Open waits for a process that is on its way out.
const lockWait = 3 * time.Second

// HoldsFile is the name of the holds of one boot.
func HoldsFile(bootID string) string { return "holds." + bootID + ".json" }

// maxFile bounds what is read, in bytes: all numbers of a cluster with long labels.
const maxFile = 256 << 20

// The kinds of record. Their fields are never given another meaning.
var (
	holdsSchema       = durable.Schema{Name: "sluice.identity.holds", Version: 1}
	incarnationSchema = durable.Schema{Name: "sluice.identity.incarnation", Version: 1}
	knownSchema       = durable.Schema{Name: "sluice.identity.known", Version: 1}
)

// ErrOtherNode: the state belongs to a node of another name.
var ErrOtherNode = errors.New("state of another node")

type holdsRecord struct {
	BootID        string         `json:"boot_id"`
	Node          string         `json:"node"`
	NextNodeLocal uint32         `json:"next_node_local"`
	Session       string         `json:"session,omitempty"`
	Holders       []holderRecord `json:"holders"`
}

type holderRecord struct {
	Holder string `json:"holder"`
	Number uint32 `json:"number"`
	Labels string `json:"labels"` // canonical text
}

type knownRecord struct {
	// Heard is when the store was last heard, in milliseconds since 1970. Files
	// of older versions do not say: 0, never.
	Heard      int64            `json:"heard,omitempty"`
	Identities []identityRecord `json:"identities"`
}

type identityRecord struct {
	Number uint32 `json:"number"`
	Labels string `json:"labels"` // canonical text
}

// Dir is the directory with both files. It is one process's at a time: of two
// that write holds each would forget those of the other, and the cluster would
// collect numbers that endpoints use.
type Dir struct {
	path   string
	node   string
	bootID string
	lock   *os.File
}

// BootID reads the identifier that the kernel made at this boot.
func BootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", err
	}
	return strings.TrimSpace(string(b)), nil
}

// Open takes an existing directory for this process and removes what a killed
// one left half-written there. It is durable.ErrLocked, and nothing was
// touched, while another process has it.
func Open(path, node, bootID string) (*Dir, error) { return open(path, node, bootID, lockWait) }

func open(path, node, bootID string, wait time.Duration) (*Dir, error) {
	if !bootIDRE.MatchString(bootID) {
		return nil, fmt.Errorf("boot id %.40q is not one", bootID)
	}
	lock, err := durable.Lock(filepath.Join(path, LockFile), wait)
	if err != nil {
		return nil, fmt.Errorf("state directory: %w", err)
	}
	if _, err := durable.RemoveTemp(path); err != nil {
		lock.Close()
		return nil, fmt.Errorf("state directory: %w", err)
	}
	return &Dir{path: path, node: node, bootID: bootID, lock: lock}, nil
}

// Close gives the directory to the next process.
func (d *Dir) Close() error { return d.lock.Close() }

// BootID is the boot that the holds belong to.
func (d *Dir) BootID() string { return d.bootID }

// Loaded is what a directory had.
type Loaded struct {
	// Incarnation is of this directory: random, made once, and lost with it.
	Incarnation string
	Holds       allocator.Holds
	Removed     []string // names of files with holds of other boots
	Known       allocator.Known
	Cached      bool  // there was a cache, perhaps an empty one
	Damaged     error // why the cache was put aside; nil if it was not
}

// Load reads both files. Its error is about the holds, and ends with what to do;
// the file stays as it is.
func (d *Dir) Load() (Loaded, error) {
	var l Loaded
	if err := d.removeOtherBoots(&l); err != nil {
		return Loaded{}, err
	}
	if err := d.loadIncarnation(&l); err != nil {
		return Loaded{}, err
	}
	path := filepath.Join(d.path, HoldsFile(d.bootID))
	var rec holdsRecord
	switch err := durable.Load(path, maxFile, holdsSchema, &rec); {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return Loaded{}, fmt.Errorf("%w; without this file the cluster may reuse numbers of running endpoints: restore it, or remove it after the endpoints of this node are gone", err)
	default:
		if rec.Node != d.node {
			return Loaded{}, fmt.Errorf("%s: %w: %q, this node is %q; remove the file if the node was renamed and has no endpoints", path, ErrOtherNode, rec.Node, d.node)
		}
		if l.Holds, err = rec.holds(); err != nil {
			return Loaded{}, &durable.RecordError{File: path, Field: "data.holders", Err: fmt.Errorf("%w: %w", durable.ErrCorrupt, err)}
		}
		if rec.BootID != d.bootID {
			return Loaded{}, &durable.RecordError{File: path, Field: "data.boot_id", Err: fmt.Errorf("%w: %.40q, the name says another", durable.ErrCorrupt, rec.BootID)}
		}
	}

	path = filepath.Join(d.path, KnownFile)
	var known knownRecord
	err := durable.Load(path, maxFile, knownSchema, &known)
	if err == nil {
		l.Known.Identities, err = known.identities()
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		l.Damaged = fmt.Errorf("%s: %w", path, err)
		if err := os.Rename(path, filepath.Join(d.path, DamagedFile)); err != nil {
			return Loaded{}, errors.Join(l.Damaged, fmt.Errorf("put it aside: %w", err))
		}
	default:
		l.Cached = true
		if known.Heard > 0 {
			l.Known.Heard = time.UnixMilli(known.Heard)
		}
	}
	return l, nil
}

// loadIncarnation reads the name of this directory, or makes it. One that is
// damaged is made anew: it only costs the time until the old one's lease ends.
func (d *Dir) loadIncarnation(l *Loaded) error {
	path := filepath.Join(d.path, IncarnationFile)
	var rec incarnationRecord
	err := durable.Load(path, 4096, incarnationSchema, &rec)
	if err == nil && incarnationRE.MatchString(rec.Incarnation) {
		l.Incarnation = rec.Incarnation
		return nil
	}
	var random [16]byte
	rand.Read(random[:]) //nolint:errcheck // never fails
	l.Incarnation = hex.EncodeToString(random[:])
	if err := durable.Save(path, incarnationSchema, incarnationRecord{l.Incarnation}, durable.SyncFile); err != nil {
		return fmt.Errorf("incarnation: %w", err)
	}
	return nil
}

var incarnationRE = regexp.MustCompile(`^[0-9a-f]{32}$`)

type incarnationRecord struct {
	Incarnation string `json:"incarnation"`
}

// removeOtherBoots removes holds that no endpoint can have any more.
func (d *Dir) removeOtherBoots(l *Loaded) error {
	entries, err := os.ReadDir(d.path)
	if err != nil {
		return fmt.Errorf("state directory: %w", err)
	}
	for _, e := range entries {
		boot, ok := strings.CutPrefix(e.Name(), "holds.")
		boot, ok2 := strings.CutSuffix(boot, ".json")
		if !ok || !ok2 || boot == d.bootID || !bootIDRE.MatchString(boot) || !e.Type().IsRegular() {
			continue
		}
		if err := os.Remove(filepath.Join(d.path, e.Name())); err != nil {
			return fmt.Errorf("holds of an earlier boot: %w", err)
		}
		l.Removed = append(l.Removed, e.Name())
	}
	return nil
}

var bootIDRE = regexp.MustCompile(`^[0-9a-f-]{36}$`)

func (r holdsRecord) holds() (allocator.Holds, error) {
	h := allocator.Holds{NextNodeLocal: identity.Numeric(r.NextNodeLocal), Session: r.Session}
	sets := map[identity.Numeric]string{}
	seen := map[allocator.Holder]bool{}
	for _, x := range r.Holders {
		holder, err := allocator.ParseHolder(x.Holder)
		if err != nil {
			return allocator.Holds{}, err
		}
		id, err := identityRecord{Number: x.Number, Labels: x.Labels}.identity()
		if err != nil {
			return allocator.Holds{}, fmt.Errorf("%s: %w", holder, err)
		}
		if s := id.Number.Scope(); s != identity.ScopeCluster && s != identity.ScopeNodeLocal {
			return allocator.Holds{}, fmt.Errorf("%s: %d is no number that can be held", holder, x.Number)
		}
		if old, ok := sets[id.Number]; ok && old != x.Labels {
			return allocator.Holds{}, fmt.Errorf("%s: number %d has two label sets", holder, x.Number)
		}
		if seen[holder] {
			return allocator.Holds{}, fmt.Errorf("%s is there twice", holder)
		}
		sets[id.Number], seen[holder] = x.Labels, true
		h.Holders = append(h.Holders, allocator.HolderRecord{Holder: holder, Identity: id})
	}
	return h, nil
}

func (r knownRecord) identities() ([]identity.Identity, error) {
	out := make([]identity.Identity, 0, len(r.Identities))
	seen := make(map[identity.Numeric]bool, len(r.Identities))
	for _, x := range r.Identities {
		id, err := x.identity()
		if err != nil {
			return nil, err
		}
		if id.Number.Scope() != identity.ScopeCluster || seen[id.Number] {
			return nil, fmt.Errorf("number %d is not one of the cluster, or there twice", x.Number)
		}
		seen[id.Number] = true
		out = append(out, id)
	}
	return out, nil
}

func (r identityRecord) identity() (identity.Identity, error) {
	labels, err := identity.ParseLabels(r.Labels)
	if err != nil {
		return identity.Identity{}, fmt.Errorf("number %d: %w", r.Number, err)
	}
	if labels.Has(identity.SourceReserved) {
		return identity.Identity{}, fmt.Errorf("number %d has reserved labels", r.Number)
	}
	return identity.Identity{Number: identity.Numeric(r.Number), Labels: labels}, nil
}

// SaveHolds implements allocator.Records.
func (d *Dir) SaveHolds(h allocator.Holds) error {
	rec := holdsRecord{BootID: d.bootID, Node: d.node, NextNodeLocal: uint32(h.NextNodeLocal), Session: h.Session, Holders: make([]holderRecord, len(h.Holders))}
	for i, x := range h.Holders {
		rec.Holders[i] = holderRecord{Holder: x.Holder.String(), Number: uint32(x.Identity.Number), Labels: x.Identity.Labels.Text()}
	}
	return durable.Save(filepath.Join(d.path, HoldsFile(d.bootID)), holdsSchema, rec, durable.SyncNone)
}

// SaveKnown implements allocator.Records.
func (d *Dir) SaveKnown(k allocator.Known) error {
	rec := knownRecord{Identities: make([]identityRecord, len(k.Identities))}
	if !k.Heard.IsZero() {
		rec.Heard = k.Heard.UnixMilli()
	}
	for i, id := range k.Identities {
		rec.Identities[i] = identityRecord{Number: uint32(id.Number), Labels: id.Labels.Text()}
	}
	return durable.Save(filepath.Join(d.path, KnownFile), knownSchema, rec, durable.SyncFile)
}
