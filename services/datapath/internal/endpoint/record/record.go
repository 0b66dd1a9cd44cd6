// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package record stores the endpoints of a node in files.
//
// A file's name is <owner>.<phase>.json. A new phase is written to a new file, and then the earlier
// file is removed: replacing a file by renaming makes ext4 write it out at once, which costs more
// than all other bookkeeping of an ADD. If a process is killed between the two steps, the later phase takes precedence.
//
// Each file is created atomically, so a killed process leaves only complete files. Files are not
// synced to disk: the described state ends with the boot, and a record of another boot is treated
// as a tombstone anyway. Records lost with a power failure are found by comparing sluice-ipam's
// allocations with the records.
package record

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/durable"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// Version 2 added manager, network and pod to the request; version 3 the labels and ports of an
// update and whether labels come from the pod; version 4 port mappings and LeaveSockets.
var schema = durable.Schema{Name: "sluice.datapath.endpoint", Version: 4, Oldest: 1}

const (
	suffix = ".json"
	// maxSize is the maximum size of a file in bytes. 1,024 labels of the maximum size exceed it;
	// Save rejects them.
	maxSize = 4 << 20
)

// Store implements endpoint.Records in a directory that no other process writes.
type Store struct {
	dir string
	// lock excludes other processes while it is open; the kernel releases it when the process
	// ends. nil if read-only.
	lock *os.File
	// failed is set while the last write failed because the disk was full or broken.
	failed atomic.Bool
}

// lockWait is the time that Open waits for an exiting process to release the lock.
const lockWait = 5 * time.Second

// ErrGone: the directory existed earlier in this boot, and is missing now.
var ErrGone = errors.New("the records of endpoints are gone")

// Open creates the directory if it is missing and locks it until Close, with a file in the parent
// directory whose name ends in ".lock". It removes incomplete files of a killed process, and
// unreadable files of an earlier boot, because no kernel state belongs to them. A file whose name
// ends in ".boot" stores the boot.
//
// The error wraps durable.ErrLocked if another process has the directory open: two processes that
// own the same endpoints would undo each other's work. It wraps ErrGone if the directory existed in
// this boot and is missing: without records, the endpoints of running pods would be removed.
func Open(dir, bootID string, logger *slog.Logger) (*Store, error) {
	return open(dir, bootID, logger, lockWait)
}

func open(dir, bootID string, logger *slog.Logger, wait time.Duration) (*Store, error) {
	if err := os.MkdirAll(filepath.Dir(dir), 0o700); err != nil {
		return nil, fmt.Errorf("open the records: %w", err)
	}
	lock, err := durable.Lock(dir+".lock", wait)
	if err != nil {
		return nil, fmt.Errorf("open the records: %w", err)
	}
	s := &Store{dir: dir, lock: lock}
	if err := s.begin(bootID, logger); err != nil {
		_ = lock.Close()
		return nil, fmt.Errorf("open the records: %w", err)
	}
	return s, nil
}

// Exclude locks the directory until release is called, so that no other process opens it. It
// creates no directory: if the parent of the lock file is missing, no process has the records open.
// The error wraps durable.ErrLocked if a process has.
func Exclude(dir string) (release func() error, err error) {
	return exclude(dir, lockWait)
}

func exclude(dir string, wait time.Duration) (release func() error, err error) {
	lock, err := durable.Lock(dir+".lock", wait)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return func() error { return nil }, nil
	case err != nil:
		return nil, fmt.Errorf("lock the records: %w", err)
	}
	return lock.Close, nil
}

// Close releases the lock.
func (s *Store) Close() error {
	if s.lock == nil {
		return nil
	}
	return s.lock.Close()
}

// OpenReadOnly opens the directory, which need not exist. The returned Store must not be written
// to.
func OpenReadOnly(dir string) *Store { return &Store{dir: dir} }

func (s *Store) path(o workload.Owner, p endpoint.Phase) string {
	return filepath.Join(s.dir, name(o, p)+suffix)
}

func name(o workload.Owner, p endpoint.Phase) string { return o.Key() + "." + string(p) }

// phases in the order of precedence, the highest last. Files in addition to a tombstone were
// about to be removed, or a new creation had only begun.
var phases = []endpoint.Phase{endpoint.PhaseCreating, endpoint.PhaseReady, endpoint.PhaseDeleted}

// Save implements endpoint.Records.
func (s *Store) Save(r endpoint.Record) error {
	o := r.Spec.Owner
	b, err := durable.Encode(schema, r)
	if err != nil {
		return fmt.Errorf("record of %s: %w", o, err)
	}
	if len(b) > maxSize {
		return fmt.Errorf("record of %s: %w: %d bytes, at most %d", o, durable.ErrTooLarge, len(b), maxSize)
	}
	if err := s.written(durable.WriteFile(s.path(o, r.Phase), b, 0o600, durable.SyncNone)); err != nil {
		return fmt.Errorf("record of %s: %w", o, err)
	}
	return s.remove(o, r.Phase)
}

// Remove implements endpoint.Records.
func (s *Store) Remove(o workload.Owner) error { return s.remove(o, "") }

// remove removes the owner's files except the one of phase but. It removes the latest phase last,
// so that an earlier one never counts again.
func (s *Store) remove(o workload.Owner, but endpoint.Phase) error {
	for _, p := range phases {
		if p == but {
			continue
		}
		if _, err := durable.Remove(s.path(o, p), durable.SyncNone); err != nil {
			return fmt.Errorf("record of %s: %w", o, s.written(err))
		}
	}
	return nil
}

// Load implements endpoint.Records. Invalid records and records under another owner's name are
// returned in bad. If an owner has several files, the latest phase takes precedence, even if it is unreadable.
// Unreadable files of an earlier phase are leftovers of a killed process; the next Save removes them.
func (s *Store) Load() (records []endpoint.Record, bad []endpoint.Unreadable, err error) {
	list, errs, err := durable.List[endpoint.Record](s.dir, suffix, maxSize, schema)
	if err != nil {
		return nil, nil, err
	}
	latest := map[string]endpoint.Record{} // by key
	for _, r := range list {
		if err := check(r.Name, r.Value); err != nil {
			errs = append(errs, &durable.RecordError{File: filepath.Join(s.dir, r.Name+suffix), Err: err})
			continue
		}
		key := r.Value.Spec.Owner.Key()
		if other, ok := latest[key]; !ok || later(r.Value.Phase, other.Phase) {
			latest[key] = r.Value
		}
	}
	for _, err := range errs {
		var re *durable.RecordError
		if !errors.As(err, &re) {
			return nil, nil, err
		}
		u := endpoint.Unreadable{File: re.File, Err: err}
		key, phase, ok := parseName(strings.TrimSuffix(filepath.Base(re.File), suffix))
		if ok {
			u.Key = key
			if good, both := latest[key]; both && later(good.Phase, phase) {
				continue
			}
		}
		bad = append(bad, u)
	}
	for _, u := range bad {
		delete(latest, u.Key)
	}
	return slices.Collect(maps.Values(latest)), bad, nil
}

func later(a, b endpoint.Phase) bool { return slices.Index(phases, a) > slices.Index(phases, b) }

// parseName is the inverse of name.
func parseName(name string) (key string, phase endpoint.Phase, ok bool) {
	key, p, _ := strings.Cut(name, ".")
	raw, err := hex.DecodeString(key)
	phase = endpoint.Phase(p)
	return key, phase, err == nil && len(raw) == sha256.Size && strings.ToLower(key) == key && slices.Contains(phases, phase)
}

// bootSuffix ends the name of the file that stores in which boot the records were written. If that file is unreadable,
// damagedSuffix is appended to its name.
const (
	bootSuffix    = ".boot"
	damagedSuffix = ".damaged"
)

type boot struct {
	ID string `json:"id"`
}

var bootSchema = durable.Schema{Name: "sluice.datapath.boot", Version: 1}

// begin prepares records of earlier boots for this boot. The boot file is written once per boot and
// synced: if a power failure lost it together with records, the remaining records would look like
// the records of running pods.
func (s *Store) begin(bootID string, logger *slog.Logger) error {
	path := s.dir + bootSuffix
	var before boot
	err := durable.Load(path, maxSize, bootSchema, &before)
	known := err == nil
	_, gone := os.Stat(s.dir)
	missing := errors.Is(gone, fs.ErrNotExist)
	switch {
	case known && before.ID == bootID:
		if missing {
			return fmt.Errorf("%w: %s; put it back, or remove %s to give up every endpoint of this node", ErrGone, s.dir, path)
		}
	case known, errors.Is(err, fs.ErrNotExist):
	case errors.As(err, new(*durable.RecordError)):
		if missing { // the records may be of this boot
			return fmt.Errorf("%w: %s, and %w; put it back, or remove %s to give up every endpoint of this node", ErrGone, s.dir, err, path)
		}
		logger.Error("cannot tell in which boot the records of endpoints were written; the unreadable boot file is renamed",
			log.Err(err), "kept_as", path+damagedSuffix)
		if err := os.Rename(path, path+damagedSuffix); err != nil {
			return s.written(err)
		}
	default:
		return err
	}
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return err
	}
	if _, err := durable.RemoveTemp(s.dir); err != nil {
		return err
	}
	if known && before.ID == bootID {
		return nil
	}
	if known {
		removed, err := s.removeUnreadable()
		if err != nil {
			return err
		}
		for _, u := range removed {
			logger.Error("record of an endpoint of an earlier boot cannot be read and was removed", log.Err(u.Err))
		}
	}
	if err := durable.Save(path, bootSchema, boot{bootID}, durable.SyncAll); err != nil {
		// The next start tries again; until then no records are removed.
		logger.Error("cannot save the boot ID of the endpoint records", log.Err(err))
	}
	return nil
}

func (s *Store) removeUnreadable() (removed []endpoint.Unreadable, err error) {
	_, bad, err := s.Load()
	if err != nil {
		return nil, err
	}
	for _, u := range bad {
		if _, err := durable.Remove(u.File, durable.SyncNone); err != nil {
			return removed, err
		}
		removed = append(removed, u)
	}
	return removed, nil
}

func check(file string, r endpoint.Record) error {
	if err := r.Validate(); err != nil {
		return errors.Join(durable.ErrCorrupt, err)
	}
	if name(r.Spec.Owner, r.Phase) != file {
		return fmt.Errorf("%w: it is the record of %s, phase %s", durable.ErrForeign, r.Spec.Owner, r.Phase)
	}
	return nil
}

// written turns errors of the disk into ErrStorage: a full or read-only disk is a reason to retry, and not a bug of
// this program.
func (s *Store) written(err error) error {
	full := errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT)
	broken := errors.Is(err, unix.EROFS) || errors.Is(err, unix.EIO)
	s.failed.Store(full || broken)
	if full || broken {
		return fmt.Errorf("%w: %w", endpoint.ErrStorage, err)
	}
	return err
}

// Minimum disk space of a record: one block and one file.
const (
	minBytes = 4 << 10
	minFiles = 1
)

// Err implements endpoint.Records. Some limits, such as quotas, are not visible in the file
// system's statistics. So after a failed write, Err writes a probe file: otherwise a node without
// ADD or DEL calls would never notice that the disk has space again.
func (s *Store) Err() error {
	err := s.space()
	if err == nil && s.failed.Load() {
		path := filepath.Join(s.dir, "probe")
		err = s.written(durable.WriteFile(path, make([]byte, minBytes), 0o600, durable.SyncNone))
		if err == nil {
			_, err = durable.Remove(path, durable.SyncNone)
		}
	}
	if err != nil {
		return fmt.Errorf("records of endpoints cannot be written: %w", err)
	}
	return nil
}

func (s *Store) space() error {
	d, err := os.Open(s.dir)
	if err != nil {
		return err
	}
	defer d.Close()
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(d.Fd()), &st); err != nil {
		return fmt.Errorf("statfs %s: %w", s.dir, err)
	}
	switch {
	case st.Flags&unix.ST_RDONLY != 0:
		return fmt.Errorf("%s: %w", s.dir, unix.EROFS)
	case st.Blocks > 0 && st.Bavail*uint64(st.Bsize) < minBytes, st.Files > 0 && st.Ffree < minFiles: //nolint:gosec // a block's size is positive
		return fmt.Errorf("%s: %w", s.dir, unix.ENOSPC)
	}
	return nil
}
