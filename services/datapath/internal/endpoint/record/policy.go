// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package record

import (
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/sluice-net/sluice/kit/durable"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policystream"
)

var policySchema = durable.Schema{Name: "sluice.datapath.policy", Version: 1}

// maxPolicy is the maximum size of the file in bytes: 1,024 names of sources.
const maxPolicy = 1 << 20

// Policy stores in one file the policy state that was enforced last. Unlike the records of
// endpoints it survives a reboot: also after a power loss, a policy service that lost its policies
// must not lift them on the node.
//
// A second file, whose name ends in ".created", records that the first was written. So a lost file
// is not mistaken for a node that never enforced anything.
type Policy struct{ path string }

const createdSuffix = ".created"

var createdSchema = durable.Schema{Name: "sluice.datapath.policy.created", Version: 1}

type enforced struct {
	State    string   `json:"state"` // hexadecimal
	Revision uint64   `json:"revision"`
	Sources  []string `json:"sources"`
}

// OpenPolicy uses the file at path. Only the process that opened the records may write it.
func OpenPolicy(path string) *Policy { return &Policy{path: path} }

// Load implements policystream.Memory.
func (p *Policy) Load() (policystream.Enforced, error) {
	var e enforced
	err := durable.Load(p.path, maxPolicy, policySchema, &e)
	if errors.Is(err, fs.ErrNotExist) {
		created, err := p.created()
		if err == nil && created {
			err = fmt.Errorf("state file %s is missing: %s says that it was created", p.path, p.path+createdSuffix)
		}
		if err != nil {
			return policystream.Enforced{}, fmt.Errorf("read the enforced policy revision: %w", err)
		}
		return policystream.Enforced{}, nil
	}
	if err != nil {
		return policystream.Enforced{}, fmt.Errorf("read the enforced policy revision: %w", err)
	}
	state, err := hex.DecodeString(e.State)
	if err != nil || len(state) == 0 {
		return policystream.Enforced{}, &durable.RecordError{File: p.path, Field: "state", Err: durable.ErrCorrupt}
	}
	return policystream.Enforced{State: string(state), Revision: e.Revision, Sources: e.Sources}, nil
}

// created reports whether the file was written since Forget.
func (p *Policy) created() (bool, error) {
	_, err := os.Lstat(p.path + createdSuffix) // its content is ignored
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

// Save implements policystream.Memory.
func (p *Policy) Save(e policystream.Enforced) error {
	if err := durable.Save(p.path, policySchema, enforced{
		State: hex.EncodeToString([]byte(e.State)), Revision: e.Revision, Sources: e.Sources,
	}, durable.SyncAll); err != nil {
		return err
	}
	if created, err := p.created(); created || err != nil {
		return err
	}
	return durable.Save(p.path+createdSuffix, createdSchema, struct{}{}, durable.SyncAll)
}

// Forget removes both files, when policies are disabled. It removes the file of the state last:
// without the ".created" file, its absence is not an error.
func (p *Policy) Forget() error {
	for _, path := range []string{p.path + createdSuffix, p.path} {
		if _, err := durable.Remove(path, durable.SyncAll); err != nil {
			return err
		}
	}
	return nil
}
