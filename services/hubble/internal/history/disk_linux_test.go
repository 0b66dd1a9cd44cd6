// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package history

import (
	"errors"
	"strings"
	"syscall"
	"testing"

	"github.com/sluice-net/sluice/kit/disktest"
)

// TestFullDiskStopsOnlyTheFiles: while the disk is full, new records can be read from memory, and the status contains
// the error. Writing continues when there is space again.
func TestFullDiskStopsOnlyTheFiles(t *testing.T) {
	dir := t.TempDir()
	h := open(t, dir, 64<<20, start)
	disk := disktest.New(t, dir)
	flush := func() { disk.Run(t, h.Flush) }
	h.Append(entry("tenant", 0, 200))
	flush()
	disk.Fail(func(disktest.Op) error { return syscall.ENOSPC })
	h.Append(entry("tenant", 1, 200))
	h.Append(entry("other", 2, 200)) // a new part, whose journal cannot even be created
	flush()
	s := h.Status()
	if !errors.Is(s.Problem, syscall.ENOSPC) || !strings.Contains(s.Problem.Error(), "flows are not written") ||
		s.Unwritten != 2 {
		t.Errorf("on the full disk: %v, %d not written", s.Problem, s.Unwritten)
	}
	want(t, "on the full disk", forward(t, h, 0, Query{}), upTo(1, 3))
	disk.Fail(nil)
	h.Append(entry("tenant", 3, 200))
	flush()
	if s := h.Status(); s.Problem != nil || s.Unwritten != 2 {
		t.Errorf("with space again: %v, %d not written", s.Problem, s.Unwritten)
	}
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
	h = open(t, dir, 64<<20, start)
	want(t, "after a restart", forward(t, h, 0, Query{}), []uint64{1, 4})
	if p := h.Status().Problem; p != nil {
		t.Errorf("after a restart: %v", p)
	}
}
