// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package servicetest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Comments returns the comments of the calls in the .proto files of a directory, by "Service/Call".
func Comments(t testing.TB, dir string) map[string]string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*.proto"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no .proto file in %s: %v", dir, err)
	}
	out := map[string]string{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		service, comment := "", []string(nil)
		for line := range strings.Lines(string(text)) {
			line = strings.TrimSpace(line)
			switch name, rest, _ := strings.Cut(line, " "); {
			case strings.HasPrefix(line, "//"):
				comment = append(comment, strings.TrimSpace(strings.TrimPrefix(line, "//")))
				continue
			case name == "service":
				service, _, _ = strings.Cut(rest, " ")
			case name == "rpc":
				call, _, _ := strings.Cut(rest, "(")
				out[service+"/"+call] = strings.Join(comment, " ")
			}
			comment = nil
		}
	}
	return out
}
