// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package store

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/sluice-net/sluice/kit/durable"
	storev1 "github.com/sluice-net/sluice/proto/gen/sluice/store/v1"
)

// MemberState is the file of a member in its state directory, in addition to etcd's data. It is secret: it contains the
// keys of the CAs.
type MemberState struct {
	Name           string `json:"name"`
	Epoch          uint64 `json:"epoch"`
	ClusterToken   string `json:"clusterToken"`
	InitialCluster string `json:"initialCluster"` // etcd's, without an address for a member that was the first
	Joined         bool   `json:"joined"`         // the member joined an existing cluster, so it never begins one
	Address        string `json:"address"`        // IP address with which the member joined
	Started        bool   `json:"started"`        // etcd's data exists
	Authority      string `json:"authority"`      // PEM
}

// Restore is a request to continue the store as one member with other data, in the next epoch. sluice-store executes
// it at its next start.
type Restore struct {
	Epoch        uint64 `json:"epoch"` // the next epoch, as far as MemberFile knows
	ClusterToken string `json:"clusterToken"`
	Snapshot     bool   `json:"snapshot"` // the data is in SnapshotFile; else this member's own data continue
}

// The files in a member's state directory that other programs than sluice-store write.
const (
	MemberFile   = "member.json"
	LockFile     = "lock"
	RestoreFile  = "restore.json"
	SnapshotFile = "restore.db"
)

var (
	// MemberSchema is the schema of MemberFile.
	MemberSchema = durable.Schema{Name: "sluice.store.member.v1", Version: 1}
	// RestoreSchema is the schema of RestoreFile.
	RestoreSchema = durable.Schema{Name: "sluice.store.restore.v1", Version: 1}
)

// MemberLimit is the maximum size of the file, larger than any MemberState.
const MemberLimit = 64 << 10

// ErrExists is returned if the machine is already a member.
var ErrExists = errors.New("this machine has a store")

// SaveMember writes the state of a member that joins, for the first start of its process.
func SaveMember(dir, name, address string, r *storev1.EnrolMemberResponse) error {
	path := filepath.Join(dir, MemberFile)
	if err := FreeForMember(dir); err != nil {
		return err
	}
	return durable.Save(path, MemberSchema, MemberState{
		Name: name, Epoch: r.GetEpoch(), ClusterToken: r.GetClusterToken(), InitialCluster: r.GetInitialCluster(),
		Joined: true, Address: address, Authority: string(r.GetAuthority()),
	}, durable.SyncAll)
}

// FreeForMember returns ErrExists if the state directory belongs to a member.
func FreeForMember(dir string) error {
	path := filepath.Join(dir, MemberFile)
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: %s exists; stop sluice-store and move %s away to join another store", ErrExists, path, dir)
	}
	return nil
}

// lockWait is how long nextEpoch waits for an ending process to release the lock.
const lockWait = 5 * time.Second

// CheckRestore returns the epoch that RequestRestore would return, or its error, and changes nothing. It does not check
// a snapshot.
func CheckRestore(dir string) (epoch uint64, err error) {
	epoch, lock, err := nextEpoch(dir)
	if err != nil {
		return 0, err
	}
	return epoch, lock.Close()
}

// nextEpoch locks a state directory, and returns the epoch after its present one.
func nextEpoch(dir string) (uint64, io.Closer, error) {
	lock, err := durable.Lock(filepath.Join(dir, LockFile), lockWait)
	if err != nil {
		return 0, nil, fmt.Errorf("%w; stop sluice-store first", err)
	}
	var state MemberState
	if err := durable.Load(filepath.Join(dir, MemberFile), MemberLimit, MemberSchema, &state); err != nil {
		_ = lock.Close()
		return 0, nil, fmt.Errorf("%w: the keys of the store's certificates are needed; restore the file from a backup", err)
	}
	return state.Epoch + 1, lock, nil
}

// RequestRestore makes the member of a state directory, whose process does not run, continue as the only member, in the
// next epoch: with a snapshot or, if snapshot is nil, with its own data. It returns the least number of that epoch:
// sluice-store takes a later one if MemberFile is a copy that is older than the data.
func RequestRestore(dir string, snapshot io.Reader) (epoch uint64, err error) {
	epoch, lock, err := nextEpoch(dir)
	if err != nil {
		return 0, err
	}
	defer lock.Close() //nolint:errcheck // the lock was only held
	r := Restore{Epoch: epoch, ClusterToken: rand.Text(), Snapshot: snapshot != nil}
	// A former request must not find this request's snapshot.
	if _, err := durable.Remove(filepath.Join(dir, RestoreFile), durable.SyncAll); err != nil {
		return 0, err
	}
	if snapshot != nil {
		if err := copyTo(filepath.Join(dir, SnapshotFile), snapshot); err != nil {
			return 0, err
		}
	}
	return r.Epoch, durable.Save(filepath.Join(dir, RestoreFile), RestoreSchema, r, durable.SyncAll)
}

// copyTo replaces a file. It follows no link, because the user of sluice-store may have created the former file.
func copyTo(path string, from io.Reader) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.Close(), os.Remove(f.Name()))
		}
	}()
	if _, err := io.Copy(f, from); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return err
	}
	return f.Close()
}
