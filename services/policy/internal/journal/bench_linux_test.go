// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package journal

import (
	"bytes"
	"fmt"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// BenchmarkCommit replaces 10,000 policies in one change. The processor time is
// that of the committing thread; the rest of the time it waits, for the disk above all.
func BenchmarkCommit(b *testing.B) {
	for _, size := range []int{400, 3200} {
		b.Run(fmt.Sprintf("10,000 manifests of %d bytes", size), func(b *testing.B) {
			j, _, _ := mustOpen(b, filepath.Join(b.TempDir(), "policy"))
			defer closed(b, j)
			c := Change{Revision: 1}
			for i := range 10_000 {
				p := policy(fmt.Sprint("policy-", i), 1)
				p.Manifest = bytes.Repeat([]byte("x"), size)
				c.Policies = append(c.Policies, p)
			}
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			began := processorTime(b)
			for b.Loop() {
				c.Revision++
				commit(b, j, c)
			}
			b.ReportMetric(float64((processorTime(b)-began).Milliseconds())/float64(b.N), "processor-ms/op")
		})
	}
}

// processorTime is that of the calling thread.
func processorTime(b *testing.B) time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_THREAD, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
