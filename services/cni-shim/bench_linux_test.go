// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/cni-shim/internal/test/nodetest"
)

// BenchmarkAddAndDel measures the plugin as a process, with services that answer at once. Compare with BenchmarkStart,
// a process that makes no calls.
func BenchmarkAddAndDel(b *testing.B) {
	n, ns := nodetest.New(b), newNetns(b)
	plugin := build(b)
	cpu(b, func() {
		for b.Loop() {
			for _, verb := range []string{"ADD", "DEL"} {
				plug(b, plugin, config(n, "1.0.0", ""), "CNI_COMMAND="+verb, "CNI_CONTAINERID=c1", "CNI_IFNAME=eth0", "CNI_NETNS="+ns)
			}
		}
	})
}

// cpu reports what the processes used, which other work on the machine does
// not change as it does their time.
func cpu(b *testing.B, run func()) {
	var before, after unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_CHILDREN, &before); err != nil {
		b.Fatal(err)
	}
	run()
	if err := unix.Getrusage(unix.RUSAGE_CHILDREN, &after); err != nil {
		b.Fatal(err)
	}
	used := after.Utime.Nano() + after.Stime.Nano() - before.Utime.Nano() - before.Stime.Nano()
	b.ReportMetric(float64(used)/float64(b.N), "cpu-ns/op")
}

func BenchmarkStart(b *testing.B) {
	plugin := build(b)
	cpu(b, func() {
		for b.Loop() {
			plug(b, plugin, "", "CNI_COMMAND=VERSION")
		}
	})
}

func build(b *testing.B) string {
	b.Helper()
	path := filepath.Join(b.TempDir(), "sluice-cni")
	cmd := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-ldflags", "-s -w", "-o", path, ".")
	cmd.Env = append(cmd.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		b.Fatalf("%v\n%s", err, out)
	}
	return path
}

func plug(b *testing.B, plugin, stdin string, env ...string) {
	b.Helper()
	cmd := exec.Command(plugin)
	cmd.Env, cmd.Stdin = env, strings.NewReader(stdin)
	if out, err := cmd.Output(); err != nil {
		b.Fatalf("%v: %v\n%s", env, err, out)
	}
}
