// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package process

import (
	"testing"

	"golang.org/x/sys/unix"
)

func TestConnectionsLeaveDescriptorsForTheWork(t *testing.T) {
	for _, c := range []struct {
		limit          uint64
		open           int
		metrics, conns int
		scarce         bool
	}{
		{524_288, 100, 64, 1024, false},
		{4096, 100, 64, 1024, false},
		{1024, 60, 64, 1024 - 60 - 64 - 256, false},
		{256, 60, 16, 90, false},
		{128, 60, 8, 30, false},
		{64, 20, 4, 20, false},
		{64, 50, 4, 16, true},
		{40, 50, 2, 16, true},
		{0, 3, 2, 16, true},
		{unix.RLIM_INFINITY, 3, 64, 1024, false},
	} {
		metrics := metricsConnections(c.limit)
		conns, scarce := socketConnections(c.limit, c.open, metrics)
		if metrics != c.metrics || conns != c.conns || scarce != c.scarce {
			t.Errorf("limit %d, %d open: %d connections and %d for metrics, scarce %v, want %d, %d, %v",
				c.limit, c.open, conns, metrics, scarce, c.conns, c.metrics, c.scarce)
		}
		if free := c.limit - uint64(c.open+metrics+conns); !scarce && free < uint64(conns) && free < mostForWork {
			t.Errorf("limit %d, %d open: %d are left for the work", c.limit, c.open, free)
		}
	}
}

func TestOpenDescriptorsAreCounted(t *testing.T) {
	before, err := openDescriptors()
	if err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	after, err := openDescriptors()
	if err != nil || after != before+1 {
		t.Errorf("%d descriptors after one more was opened, %d before, %v", after, before, err)
	}
	if err := unix.Close(fd); err != nil {
		t.Fatal(err)
	}
}
