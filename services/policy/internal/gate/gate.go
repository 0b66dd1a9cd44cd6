// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package gate keeps subscribers waiting until the objects of the Kubernetes API
// were all listed once since the policy state began: what is missing until then
// may be what denies. From then on the state has what was in force, also while
// the API is away. A file beside the state holds the name of that state.
package gate

import (
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/sluice-net/sluice/kit/durable"
	"github.com/sluice-net/sluice/services/policy/internal/stream"
)

// Gate belongs to one goroutine, but for Opened.
type Gate struct {
	file   string
	state  string // its name, as the file has it
	noted  bool   // the file says so
	opened chan struct{}
}

// New returns the gate of the policy state in dir. It is open already if nothing
// lists objects, or if the state has had a listing in an earlier run.
func New(dir string, state stream.StateID, lists bool) (*Gate, error) {
	g := &Gate{
		file: filepath.Join(dir, "kubernetes.listed"), state: hex.EncodeToString(state[:]), opened: make(chan struct{}),
	}
	text, err := os.ReadFile(g.file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	if g.noted = string(text) == g.state; g.noted || !lists {
		g.Open()
	}
	return g, nil
}

// Opened is closed once subscribers need not wait.
func (g *Gate) Opened() <-chan struct{} { return g.opened }

// Open lets subscribers pass in this run.
func (g *Gate) Open() {
	select {
	case <-g.opened:
	default:
		close(g.opened)
	}
}

// Listed notes that the state has had a listing, and lets subscribers pass in this
// run and, unless it returns an error, in later ones.
func (g *Gate) Listed() error {
	g.Open()
	if g.noted {
		return nil
	}
	if err := durable.WriteFile(g.file, []byte(g.state), 0o600, durable.SyncAll); err != nil {
		return fmt.Errorf("the next start will wait for the Kubernetes API: %w", err)
	}
	g.noted = true
	return nil
}
