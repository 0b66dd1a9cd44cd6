// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/sluice-net/sluice/kit/durable"
	"github.com/sluice-net/sluice/services/policy/internal/stream"
)

// listed keeps subscribers waiting until the objects of SourceKubernetes were all
// listed once since the state began: what is missing until then may be what
// denies. From then on the state has what was in force, also while the API is
// away. A file holds the name of that state.
type listed struct {
	file   string
	noted  bool          // the file says so
	passed chan struct{} // closed once subscribers need not wait
}

// read finds out whether subscribers have to wait.
func (l *listed) read(dir string, state stream.StateID, sources []string) error {
	l.file, l.passed = filepath.Join(dir, "kubernetes.listed"), make(chan struct{})
	text, err := os.ReadFile(l.file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	l.noted = string(text) == hex.EncodeToString(state[:])
	if l.noted || !slices.Contains(sources, SourceKubernetes) {
		l.pass()
	}
	return nil
}

// write notes that the state has had a listing.
func (l *listed) write(state stream.StateID) error {
	l.pass()
	if l.noted {
		return nil
	}
	if err := durable.WriteFile(l.file, []byte(hex.EncodeToString(state[:])), 0o600, durable.SyncAll); err != nil {
		return fmt.Errorf("the next start will wait for the Kubernetes API: %w", err)
	}
	l.noted = true
	return nil
}

// pass lets subscribers pass.
func (l *listed) pass() {
	select {
	case <-l.passed:
	default:
		close(l.passed)
	}
}
