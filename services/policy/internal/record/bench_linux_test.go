// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package record

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// made makes a change, and adds the CPU time of its commit to commit. Every other call waits for the commit.
func made(b *testing.B, j *Journal, c Change, commit *time.Duration) {
	b.Helper()
	s, err := j.Stage(b.Context(), c)
	if err != nil {
		b.Fatal(err)
	}
	began := processorTime(b)
	if err := s.Commit(b.Context()); err != nil {
		b.Fatal(err)
	}
	*commit += processorTime(b) - began
	if err := j.Tidy(b.Context()); err != nil {
		b.Fatal(err)
	}
}

// BenchmarkCommit replaces 10,000 policies in one change. It measures the CPU time of the thread, because the
// remaining time is spent waiting, mainly for the disk.
func BenchmarkCommit(b *testing.B) {
	for _, size := range []int{400, 3200} {
		b.Run(fmt.Sprintf("10,000 manifests of %d bytes", size), func(b *testing.B) {
			j, _, _ := mustOpen(b, filepath.Join(b.TempDir(), "policy"))
			defer closed(b, j)
			c := many(size)
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			var commits time.Duration
			began := processorTime(b)
			for b.Loop() {
				c.Revision++
				made(b, j, c, &commits)
			}
			b.ReportMetric(float64((processorTime(b)-began).Milliseconds())/float64(b.N), "processor-ms/op")
			b.ReportMetric(float64(commits.Microseconds())/1000/float64(b.N), "commit-processor-ms/op")
		})
	}
}

// BenchmarkFirstCommit adds 10,000 policies to a new file in one change.
func BenchmarkFirstCommit(b *testing.B) {
	for _, size := range []int{400, 3200} {
		b.Run(fmt.Sprintf("10,000 manifests of %d bytes", size), func(b *testing.B) {
			c := many(size)
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			var used, commits time.Duration
			for b.Loop() {
				b.StopTimer()
				dir := filepath.Join(b.TempDir(), "policy")
				j, _, _ := mustOpen(b, dir)
				began := processorTime(b)
				b.StartTimer()
				made(b, j, c, &commits)
				b.StopTimer()
				used += processorTime(b) - began
				if err := errors.Join(j.Close(), os.RemoveAll(dir)); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
			}
			b.ReportMetric(float64(used.Milliseconds())/float64(b.N), "processor-ms/op")
			b.ReportMetric(float64(commits.Microseconds())/1000/float64(b.N), "commit-processor-ms/op")
		})
	}
}

// many returns a change of 10,000 policies with manifests of the given size.
func many(size int) Change {
	c := Change{Revision: 1}
	for i := range 10_000 {
		p := policy(fmt.Sprint("policy-", i), 1)
		p.Manifest = bytes.Repeat([]byte("x"), size)
		c.Puts = append(c.Puts, p)
	}
	return c
}

// processorTime returns the CPU time of the calling thread.
func processorTime(b *testing.B) time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_THREAD, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
