// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
)

func TestCommandWritesTheSameArchiveTwice(t *testing.T) {
	dir := t.TempDir()
	program, out := filepath.Join(dir, "program"), filepath.Join(dir, "image.tar")
	if err := os.WriteFile(program, []byte("machine code"), 0o600); err != nil {
		t.Fatal(err)
	}
	var archives [2][]byte
	for i := range archives {
		err := run([]string{
			"-output", out, "-name", "example.org/app:v1", "-architecture", "amd64", "-file", "/usr/bin/program=" + program,
			"-link", "/var/run=../run", "-dir", "/run", "-env", "PATH=/usr/bin", "-label", "a=b=c",
			"-entrypoint", "/usr/bin/program", "-entrypoint", "serve", "-cmd", "--all",
		})
		if err != nil {
			t.Fatal(err)
		}
		if archives[i], err = os.ReadFile(out); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(archives[0], archives[1]) {
		t.Error("two runs wrote different archives")
	}
	// The archive contains the image's configuration uncompressed.
	if want := `"Entrypoint":["/usr/bin/program","serve"],"Cmd":["--all"]`; !bytes.Contains(archives[0], []byte(want)) {
		t.Errorf("the archive does not hold %s", want)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 2 {
		t.Errorf("the directory contains more than the archive and the program: %v, %v", entries, err)
	}
}

func TestFailureLeavesNoArchive(t *testing.T) {
	out := filepath.Join(t.TempDir(), "image.tar")
	for _, args := range [][]string{
		{"-output", out, "-name", "x", "-architecture", "amd64", "-file", "/program=" + out + "-missing"},
		{"-output", out},
		{"-name", "x", "-architecture", "amd64"},
		{"-output", out, "-name", "x", "-architecture", "amd64", "argument"},
	} {
		if run(args) == nil {
			t.Errorf("%q: no error", args)
		}
	}
	if entries, err := os.ReadDir(filepath.Dir(out)); err != nil || len(entries) > 0 {
		t.Errorf("there is %v, %v", entries, err)
	}
}
