// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"fmt"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/proto/wire/reportwire"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
)

// leastFree is the free space in bytes below which a disk counts as full.
const leastFree = 1 << 20

// stateDirs returns the state directory of this process, and the directories of the node's other services next to it.
func stateDirs(own string) []string {
	all := []string{own}
	for _, name := range []string{"identity", "ipam", "policy", "loadbalancer", "datapath", "cni"} {
		if dir := filepath.Join(filepath.Dir(own), name); dir != filepath.Clean(own) {
			all = append(all, dir)
		}
	}
	return all
}

// storage adds an entry to the report of this node when a disk cannot be written. The entry contains the time at
// which the failure began.
type storage struct {
	dirs    []string                              // watched directories; some may not exist
	failure func(context.Context) (string, error) // returns the owner's storage failure
	full    func(dir string) (bool, error)
	now     func() time.Time

	reason string // last reported reason
	since  time.Time
}

// isFull reports whether the disk of a directory has no space for another state file. The directory may belong to
// another user.
func isFull(dir string) (bool, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return false, err
	}
	// A file system that creates inodes on demand reports a total of 0 inodes.
	return st.Bavail*uint64(st.Bsize) < leastFree || st.Files > 0 && st.Ffree == 0, nil //nolint:gosec // a block's size
}

// report returns the entry for the report, or none if all disks can be written.
func (s *storage) report(ctx context.Context) ([]reportwire.Refused, error) {
	reason, err := s.failure(ctx)
	if err != nil {
		return nil, err
	}
	for _, dir := range s.dirs {
		if full, err := s.full(dir); err == nil && full && reason == "" {
			reason = fmt.Sprintf("the disk of %s is full", dir)
		}
	}
	switch {
	case reason == "":
		s.reason, s.since = "", time.Time{}
		return nil, nil
	case s.since.IsZero():
		s.since = s.now()
	}
	if s.reason == "" { // keep the first reason, so that an unchanged failure does not change the report
		s.reason = reason
	}
	text := fmt.Sprintf("since %s: %s", s.since.UTC().Format(time.RFC3339), s.reason)
	return []reportwire.Refused{{Kind: policy.NodeStorage.Kind, Name: policy.NodeStorage.Name, Reason: text}}, nil
}
