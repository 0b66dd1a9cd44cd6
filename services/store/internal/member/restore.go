// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package member

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"go.etcd.io/bbolt"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/etcdutl/v3/snapshot"

	"github.com/sluice-net/sluice/kit/durable"
	"github.com/sluice-net/sluice/store"
)

// bump is how far the revision of restored data moves on. It is larger than the number of revisions that are lost with
// the former data, so no client sees the same revision twice with different content.
const bump = 1 << 32

// formerSuffix is between the name of the data and the epoch, in the name of former data.
const formerSuffix = ".epoch-"

// restores reports whether a restore is requested.
func (m *Member) restores() bool {
	_, err := os.Lstat(m.path(store.RestoreFile))
	return err == nil
}

// restore executes the request in the state directory, if there is one. If it is interrupted, the next start begins it
// again. The former data stay in a directory with the number of their epoch.
func (m *Member) restore() error {
	var r store.Restore
	request, built := m.path(store.RestoreFile), m.path(restoredDir)
	err := durable.Load(request, store.MemberLimit, store.RestoreSchema, &r)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("%w; remove the file, and request the restore again", err)
	}
	if m.state.ClusterToken != r.ClusterToken {
		if err := m.build(r, built); err != nil {
			return fmt.Errorf("restore the epoch %d: %w; if the snapshot is not intact, remove %s to keep the present data",
				r.Epoch, err, request)
		}
		last, err := m.lastEpoch(built)
		if err != nil {
			return fmt.Errorf("restore the epoch %d: %w", r.Epoch, err)
		}
		m.state.Epoch, m.state.ClusterToken, m.state.InitialCluster = max(r.Epoch, last+1), r.ClusterToken, ""
		m.state.Joined, m.state.Started = false, true
		if err := durable.Save(m.path(store.MemberFile), store.MemberSchema, m.state, durable.SyncAll); err != nil {
			return err
		}
	}
	if err := m.exchange(built, m.state.Epoch-1); err != nil {
		return fmt.Errorf("restore the epoch %d: %w", m.state.Epoch, err)
	}
	m.o.Log.Warn("the store continues with restored data and one member", "epoch", m.state.Epoch, "snapshot", r.Snapshot)
	for _, name := range []string{request, m.path(store.SnapshotFile)} {
		if _, err := durable.Remove(name, durable.SyncAll); err != nil {
			return err
		}
	}
	return nil
}

// build makes the data of a cluster whose only member is this one.
func (m *Member) build(r store.Restore, at string) error {
	if err := os.RemoveAll(at); err != nil {
		return err
	}
	from := m.path(store.SnapshotFile)
	if !r.Snapshot {
		from = filepath.Join(m.path(dataDir), "member", "snap", "db")
	}
	urls := m.peerURLs()
	return snapshot.NewV3(zapTo(m.o.Log)).Restore(snapshot.RestoreConfig{
		SnapshotPath: from, SkipHashCheck: !r.Snapshot, // the database of a member has no hash at its end
		Name: m.state.Name, OutputDataDir: at, PeerURLs: []string{urls[0].String()},
		InitialCluster: m.state.Name + "=" + urls[0].String(), InitialClusterToken: r.ClusterToken,
		RevisionBump: bump, MarkCompacted: true,
	})
}

// EpochKey is the key with the epoch of the data, in etcd.
const EpochKey = "/sluice/v1/store/epoch"

// lastEpoch returns the last epoch that this machine knows of: by its state, by the names of former data, and by the
// restored data. The state may be a copy of an earlier epoch. If the store used the epoch of the data again, it would
// not begin a new epoch: join tokens would stay valid, and nodes would allocate at once.
func (m *Member) lastEpoch(built string) (uint64, error) {
	last := m.state.Epoch
	former := m.path(dataDir) + formerSuffix
	names, err := filepath.Glob(former + "*")
	if err != nil {
		return 0, err
	}
	for _, name := range names {
		if n, err := strconv.ParseUint(strings.TrimPrefix(name, former), 10, 64); err == nil {
			last = max(last, n)
		}
	}
	path := filepath.Join(built, "member", "snap", "db")
	db, err := bbolt.Open(path, 0o600, &bbolt.Options{ReadOnly: true, Timeout: dataLock})
	if err != nil {
		return 0, fmt.Errorf("open the database %s: %w", path, err)
	}
	defer db.Close() //nolint:errcheck // a read
	err = db.View(func(tx *bbolt.Tx) error {
		bucket := tx.Bucket([]byte("key"))
		if bucket == nil {
			return nil // no data
		}
		return bucket.ForEach(func(_, value []byte) error {
			if !bytes.Contains(value, []byte(EpochKey)) {
				return nil
			}
			var kv mvccpb.KeyValue
			if err := kv.Unmarshal(value); err != nil {
				return err
			}
			if n, err := strconv.ParseUint(string(kv.Value), 10, 64); err == nil && string(kv.Key) == EpochKey {
				last = max(last, n)
			}
			return nil
		})
	})
	if err != nil {
		return 0, fmt.Errorf("read the epoch in %s: %w", path, err)
	}
	return last, nil
}

// exchange puts the restored data in the place of the former data. It succeeds if that has happened.
func (m *Member) exchange(built string, former uint64) error {
	if _, err := os.Lstat(built); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	data := m.path(dataDir)
	if err := os.Rename(data, fmt.Sprint(data, formerSuffix, former)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.Rename(built, data); err != nil {
		return err
	}
	return durable.SyncDir(m.o.Dir)
}
