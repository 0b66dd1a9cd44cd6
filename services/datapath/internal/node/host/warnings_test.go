// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package host

import (
	"os"
	"path/filepath"
	"testing"
)

func TestRealtimeKernelIsRecognised(t *testing.T) {
	dir := t.TempDir()
	for name, content := range map[string]string{"yes": "1\n", "no": "0\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string]bool{"yes": true, "no": false, "missing": false} {
		if got, err := realtime(filepath.Join(dir, name)); err != nil || got != want {
			t.Errorf("%s: %v, %v, want %v", name, got, err, want)
		}
	}
}
