// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
)

// subject matches the subjects of differences in the source code.
var subject = regexp.MustCompile(`(?:\bds\.add\(|Subject: |Difference\{|Subject[A-Z][A-Za-z]* += )"([^"]+)"`)

// TestEverySubjectOfADifferenceHasAKind searches the source code for subjects. Clients use the kind, so a new subject
// needs one.
func TestEverySubjectOfADifferenceHasAKind(t *testing.T) {
	seen := map[string]bool{}
	err := filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		content, err := os.ReadFile(path)
		for _, m := range subject.FindAllStringSubmatch(string(content), -1) {
			seen[m[1]] = true
			if targetOf(m[1]).GetKind() == datapathv1.TargetKind_TARGET_KIND_UNSPECIFIED {
				t.Errorf("%s: a difference about %q has no kind", path, m[1])
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(seen) < 20 {
		t.Errorf("only %d subjects were found: %v", len(seen), seen)
	}
	want := &datapathv1.DifferenceTarget{Kind: datapathv1.TargetKind_TARGET_KIND_ROUTE, InContainer: true}
	if got := targetOf("container route"); got.GetKind() != want.GetKind() || !got.GetInContainer() {
		t.Errorf("container route: %v, want %v", got, want)
	}
}
