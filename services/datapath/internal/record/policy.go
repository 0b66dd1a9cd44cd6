// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package record

import (
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"

	"github.com/sluice-net/sluice/kit/durable"
	"github.com/sluice-net/sluice/services/datapath/internal/policy"
)

var policySchema = durable.Schema{Name: "sluice.datapath.policy", Version: 1}

// maxPolicy bounds the file, in bytes: 1,024 names of sources.
const maxPolicy = 1 << 20

// Policy keeps the policy state that was enforced last, in one file. Unlike the
// records of endpoints it outlives the boot: after a power loss, too, a service
// that lost its policies must not open what they closed.
type Policy struct{ path string }

type enforced struct {
	State    string   `json:"state"` // hexadecimal
	Revision uint64   `json:"revision"`
	Sources  []string `json:"sources"`
}

// OpenPolicy uses the file of that name. Only one process may write it: the one
// that has the records open.
func OpenPolicy(path string) *Policy { return &Policy{path: path} }

// Load implements policy.Memory.
func (p *Policy) Load() (policy.Enforced, error) {
	var e enforced
	err := durable.Load(p.path, maxPolicy, policySchema, &e)
	if errors.Is(err, fs.ErrNotExist) {
		return policy.Enforced{}, nil
	}
	if err != nil {
		return policy.Enforced{}, fmt.Errorf("read the enforced policy revision: %w", err)
	}
	state, err := hex.DecodeString(e.State)
	if err != nil || len(state) == 0 {
		return policy.Enforced{}, &durable.RecordError{File: p.path, Field: "state", Err: durable.ErrCorrupt}
	}
	return policy.Enforced{State: string(state), Revision: e.Revision, Sources: e.Sources}, nil
}

// Save implements policy.Memory.
func (p *Policy) Save(e policy.Enforced) error {
	return durable.Save(p.path, policySchema, enforced{
		State: hex.EncodeToString([]byte(e.State)), Revision: e.Revision, Sources: e.Sources,
	}, durable.SyncAll)
}

// Forget removes the file: policies are not wanted any more.
func (p *Policy) Forget() error {
	_, err := durable.Remove(p.path, durable.SyncAll)
	return err
}
