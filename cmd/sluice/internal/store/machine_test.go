// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package store

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/store"
)

// TestJoinWithDryRunChangesNothing has a token whose member does not run, so a call to it would fail.
func TestJoinWithDryRunChangesNothing(t *testing.T) {
	root := t.TempDir()
	if err := os.Chmod(filepath.Dir(root), 0o755); err != nil { // the user of sluice-store looks for its state below
		t.Fatal(err)
	}
	p, err := instance.New("x")
	if err != nil {
		t.Fatal(err)
	}
	p = p.Under(root)
	for _, member := range []bool{false, true} {
		token := store.Token{Addresses: []string{"127.0.0.1:1"}, Secret: "s", Member: member}
		j := join{file: "-", node: "node-b", dryRun: true}
		last := "store the credentials of node node-b in " + p.ServiceStateDir("identity")
		if member {
			j.address = "192.0.2.2"
			last = "store the state of the new member node-b in " + p.ServiceStateDir("store")
		}
		changes, err := j.run(t.Context(), p, strings.NewReader(token.String()))
		if err != nil || !slices.Contains(changes, "use the token, which is then spent") ||
			!slices.Contains(changes, "create "+p.StateDir) || changes[len(changes)-1] != last {
			t.Errorf("member %v: %q, %v", member, changes, err)
		}
	}
	if left, err := os.ReadDir(root); err != nil || len(left) > 0 {
		t.Errorf("created %v, %v", left, err)
	}
	if _, err := (join{file: "-", dryRun: true}).run(t.Context(), p, strings.NewReader("sluice-join-1-x")); err == nil {
		t.Error("a truncated token was accepted")
	}
}
