// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/devnode"
)

// TestKernelUnreadableSpooledDeletionIsDone: a DEL succeeds while the datapath is down, and its spool file is
// corrupted before the datapath returns. The file's name still identifies the endpoint to delete; another pod's
// endpoint stays.
func TestKernelUnreadableSpooledDeletionIsDone(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	config := n.config(t, "1.0.0", labels("app", "spool"))
	spool := filepath.Join(n.Paths().ServiceStateDir("cni"), "deletes")
	for name, content := range map[string]string{
		"empty": "", "garbled": "\x00\xff{",
		"newer": `{"version":9,"owner":"x"}`,
	} {
		kept, deleted := n.add(t, newPod(t, "kept"), config), n.add(t, newPod(t, "deleted"), config)
		if err := n.Kill(t.Context(), devnode.Datapath); err != nil {
			t.Fatal(err)
		}
		n.del(t, deleted)
		entries, err := os.ReadDir(spool)
		if err != nil {
			t.Fatal(err)
		}
		var entry string
		for _, e := range entries {
			if !strings.HasSuffix(e.Name(), ".bad") && !strings.HasPrefix(e.Name(), ".") {
				entry = filepath.Join(spool, e.Name())
			}
		}
		if entry == "" {
			t.Fatalf("%s: no spooled deletion among %v", name, entries)
		}
		if err := os.WriteFile(entry, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
		// A file that names no endpoint is set aside, too.
		if err := os.WriteFile(filepath.Join(spool, strings.Repeat("0", 64)), nil, 0o644); err != nil {
			t.Fatal(err)
		}
		if err := n.Start(t.Context(), devnode.Datapath); err != nil {
			t.Fatal(err)
		}
		held, err := n.holdings(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, h := range held {
			if h == "endpoint "+deleted.Name {
				t.Errorf("%s: %s is still held", name, h)
			}
		}
		if b, err := os.ReadFile(entry + ".bad"); err != nil || string(b) != content {
			t.Errorf("%s: the file is not kept for a look: %q, %v", name, b, err)
		}
		if log, err := os.ReadFile(n.Log(devnode.Datapath)); err != nil ||
			!strings.Contains(string(log), filepath.Base(entry)) {
			t.Errorf("%s: the log does not name the file: %v", name, err)
		}
		n.del(t, kept)
		for _, bad := range []string{entry, filepath.Join(spool, strings.Repeat("0", 64))} {
			if err := os.Remove(bad + ".bad"); err != nil {
				t.Error(err)
			}
		}
		n.wantNothingHeld(t)
	}
}
