// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

//go:build hubble

package server

import (
	"context"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

var update = flag.Bool("update", false, "write the golden outputs of the hubble CLI")

// varying matches the parts of the output that differ between two runs.
var varying = regexp.MustCompile(`unix://[^ )]*|Uptime: .*|[0-9.]+(s|m|h)\b.*$`)

// TestHubbleCLIPrintsTheGoldenOutput: the unchanged CLI, which `make test-hubble` builds, prints the golden output.
// With -update, the test writes the output to the files.
func TestHubbleCLIPrintsTheGoldenOutput(t *testing.T) {
	socket := golden(t)
	program := filepath.Join(os.Getenv("SLUICE_BIN"), "hubble", "hubble")
	for _, q := range questions {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		//nolint:gosec // make test-hubble builds the program
		cmd := exec.CommandContext(ctx, program, strings.Fields(q.args)...)
		cmd.Env = []string{"HUBBLE_SERVER=unix://" + socket, "TZ=UTC", "HOME=" + t.TempDir()}
		var errOut strings.Builder
		cmd.Stderr = &errOut
		out, err := cmd.Output()
		cancel()
		if err != nil {
			t.Errorf("hubble %s: %v: %s", q.args, err, errOut.String())
			continue
		}
		got := varying.ReplaceAllString(string(out), "VARIES")
		if strings.Contains(q.args, "-o json") {
			if got, err = canonical(out); err != nil {
				t.Errorf("hubble %s: %v: %s", q.args, err, out)
				continue
			}
		}
		file := goldenOutput(q.args)
		if *update {
			if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil { //nolint:gosec // in the source tree
				t.Fatal(err)
			}
			if err := os.WriteFile(file, []byte(got), 0o644); err != nil { //nolint:gosec // likewise
				t.Fatal(err)
			}
			continue
		}
		want, err := os.ReadFile(file)
		if err != nil || got != string(want) {
			t.Errorf("hubble %s: %v\ngot\n%swant\n%s", q.args, err, got, want)
		}
	}
}
