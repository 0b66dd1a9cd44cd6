// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package member

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"

	"github.com/sluice-net/sluice/kit/durable"
	"github.com/sluice-net/sluice/store"
)

// ID returns the ID of a store's data in an epoch. It is published, unlike the token.
func ID(clusterToken string) string {
	sum := sha256.Sum256([]byte(clusterToken))
	return hex.EncodeToString(sum[:8])
}

// Stored returns the epoch and the ID of the data in a state directory; zero and empty if the directory has no data, or
// lacks a part of them.
func Stored(dir string) (epoch uint64, id string) {
	var s store.MemberState
	err := durable.Load(filepath.Join(dir, store.MemberFile), store.MemberLimit, store.MemberSchema, &s)
	if err != nil {
		return 0, ""
	}
	_, err = os.Stat(filepath.Join(dir, dataDir, "member"))
	if s.Started && err != nil {
		return 0, ""
	}
	return s.Epoch, ID(s.ClusterToken)
}

// startsFile contains the number of starts since etcd was last ready.
const startsFile = "starts"

// FailedStarts returns how many consecutive starts have not made etcd ready. With some corrupt data, etcd ends the
// process by a panic.
func FailedStarts(dir string) int {
	text, err := os.ReadFile(filepath.Join(dir, startsFile))
	if err != nil {
		return 0
	}
	n, _ := strconv.Atoi(string(text)) // a corrupt file counts as 0
	return n
}

// BeginStart counts a start, until EndStart.
func BeginStart(dir string) error {
	text := strconv.Itoa(FailedStarts(dir) + 1)
	return durable.WriteFile(filepath.Join(dir, startsFile), []byte(text), 0o600, durable.SyncAll)
}

// EndStart ends the count: etcd is ready, or a signal has ended the process before that.
func EndStart(dir string) error {
	_, err := durable.Remove(filepath.Join(dir, startsFile), durable.SyncNone)
	return err
}

// Clear removes the data of an earlier epoch from a state directory.
func Clear(dir string) error {
	// First the data: if only the state were removed, the member would not start.
	for _, name := range []string{
		dataDir, restoredDir, peerFile, caFile, store.RestoreFile, store.SnapshotFile,
		store.MemberFile, startsFile,
	} {
		if err := os.RemoveAll(filepath.Join(dir, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove the data of an earlier epoch: %w", err)
		}
	}
	return durable.SyncDir(dir)
}
