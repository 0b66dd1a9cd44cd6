// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	identities "github.com/sluice-net/sluice/services/policy/internal/client"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
)

// leastFree is how many bytes a disk has free that is not full. The processes of a node keep
// their state on one disk in most installations.
const leastFree = 1 << 20

// storage reports a disk that takes no writes in the report of this node, and since when.
type storage struct {
	dir     string
	failure func(context.Context) (string, error) // of the owner
	free    func(dir string) (uint64, error)
	now     func() time.Time

	reason string // that was reported
	since  time.Time
}

// freeBytes returns how many bytes the disk of a directory has free.
func freeBytes(dir string) (uint64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, err
	}
	return st.Bavail * uint64(st.Bsize), nil //nolint:gosec // the size of a block
}

// nodeStorage is the key by which the report of a node names its disk beside policies.
var nodeStorage = policy.Key{Kind: "Node", Name: "storage"}

// report returns the entry of the report; none: the disk takes writes.
func (s *storage) report(ctx context.Context) ([]identities.Refused, error) {
	reason, err := s.failure(ctx)
	if err != nil {
		return nil, err
	}
	if reason == "" {
		if free, err := s.free(s.dir); err == nil && free < leastFree {
			reason = fmt.Sprintf("the disk of %s is full", s.dir)
		}
	}
	switch {
	case reason == "":
		s.reason, s.since = "", time.Time{}
		return nil, nil
	case s.since.IsZero():
		s.since = s.now()
	}
	if s.reason == "" { // the first reason stays, so that the report does not change all the time
		s.reason = reason
	}
	text := fmt.Sprintf("since %s: %s", s.since.UTC().Format(time.RFC3339), s.reason)
	return []identities.Refused{{Key: nodeStorage, Reason: text}}, nil
}
