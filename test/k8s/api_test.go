// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/test/k8s/apitest"
)

// running returns the processes that have a path below dir as an argument.
func running(t testing.TB, dir string) (all []string) {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if content, err := os.ReadFile(file); err == nil && strings.Contains(string(content), dir) {
			all = append(all, file+": "+strings.ReplaceAll(string(content), "\x00", " "))
		}
	}
	return all
}

func none(left []string) error {
	if len(left) > 0 {
		return fmt.Errorf("there is still %s", strings.Join(left, "\n"))
	}
	return nil
}

func TestAPIAloneServesUntilItsInputEnds(t *testing.T) {
	dir := t.TempDir()
	bin := os.Getenv("SLUICE_BIN")
	api := exec.Command(filepath.Join(bin, "test", "sluice-k8s"), "api", dir)
	api.Stderr = os.Stderr
	stdin, err := api.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := api.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	if err := api.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = api.Process.Kill() })
	var ready apitest.Ready
	if err := json.NewDecoder(stdout).Decode(&ready); err != nil {
		t.Fatalf("the API is not ready: %s", err)
	}
	t.Logf("the API was ready after %.1f s", time.Since(begin).Seconds())

	kubectl := func(args ...string) string {
		all := append([]string{"--kubeconfig=" + ready.Kubeconfig, "--cache-dir=" + dir}, args...)
		out, err := exec.CommandContext(t.Context(), filepath.Join(bin, "k8s", "kubectl"), all...).CombinedOutput()
		if err != nil {
			t.Fatalf("kubectl %s: %s: %s", strings.Join(args, " "), err, out)
		}
		return string(out)
	}
	kubectl("create", "namespace", "made-here")
	if len(running(t, dir)) < 2 {
		t.Errorf("of etcd and the API is seen %q", running(t, dir))
	}
	if got := kubectl("get", "namespace", "made-here", "--output=name"); got != "namespace/made-here\n" {
		t.Errorf("the API has %q, want namespace/made-here", got)
	}
	if err := stdin.Close(); err != nil {
		t.Fatal(err)
	}
	if err := api.Wait(); err != nil {
		t.Errorf("it did not end in order at the end of its input: %s", err)
	}
	if err := none(running(t, dir)); err != nil {
		t.Error(err)
	}
}
