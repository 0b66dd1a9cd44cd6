// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package record

import (
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"

	"github.com/sluice-net/sluice/kit/durable"
)

var frontendsSchema = durable.Schema{Name: "sluice.datapath.frontends", Version: 1}

// maxFrontends is the maximum size of the file in bytes.
const maxFrontends = 4096

// Frontends stores in one file the name of the sluice-loadbalancer state whose frontends the kernel
// has. Losing the file is harmless: without it no name is known, and frontends stay until the
// service has listed all its sources.
type Frontends struct{ path string }

type frontendState struct {
	State string `json:"state"` // hexadecimal
}

// OpenFrontends uses the file at path. Only the process that opened the records may write it.
func OpenFrontends(path string) *Frontends { return &Frontends{path: path} }

// Load implements frontendstream.Memory.
func (f *Frontends) Load() (string, error) {
	var s frontendState
	err := durable.Load(f.path, maxFrontends, frontendsSchema, &s)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("read the state of frontends: %w", err)
	}
	state, err := hex.DecodeString(s.State)
	if err != nil || len(state) == 0 {
		return "", &durable.RecordError{File: f.path, Field: "state", Err: durable.ErrCorrupt}
	}
	return string(state), nil
}

// Save implements frontendstream.Memory.
func (f *Frontends) Save(state string) error {
	return durable.Save(f.path, frontendsSchema, frontendState{State: hex.EncodeToString([]byte(state))}, durable.SyncAll)
}

// Forget removes the file. Call it when services are disabled and the kernel has none.
func (f *Frontends) Forget() error {
	_, err := durable.Remove(f.path, durable.SyncAll)
	return err
}
