// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package snapshot

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/sluice-net/sluice/kit/durable"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
)

// The previous version stored both in JSON files, each written as a whole. They are read once, to create the new files,
// and then removed.
const oldKnownFile = "known.json"

func oldHoldsFile(bootID string) string { return "holds." + bootID + ".json" }

// maxFile bounds the size of a file, in bytes: all numbers of a cluster with long labels.
const maxFile = 256 << 20

var (
	holdsSchema = durable.Schema{Name: "sluice.identity.holds", Version: 1}
	knownSchema = durable.Schema{Name: "sluice.identity.known", Version: 1}
)

type oldHoldsRecord struct {
	BootID        string            `json:"boot_id"`
	Node          string            `json:"node"`
	NextNodeLocal uint32            `json:"next_node_local"`
	Holders       []oldHolderRecord `json:"holders"`
}

type oldHolderRecord struct {
	Holder string `json:"holder"`
	Number uint32 `json:"number"`
	Labels string `json:"labels"` // canonical text
}

type oldKnownRecord struct {
	Heard      int64               `json:"heard,omitempty"` // milliseconds since 1970
	Identities []oldIdentityRecord `json:"identities"`
}

type oldIdentityRecord struct {
	Number uint32 `json:"number"`
	Labels string `json:"labels"` // canonical text
}

// oldHolds reads the holds that the previous version wrote in this boot; empty if there is no such file.
func (d *Dir) oldHolds() (allocator.Holds, error) {
	path := filepath.Join(d.dir.Path(), oldHoldsFile(d.boot))
	var rec oldHoldsRecord
	err := durable.Load(path, maxFile, holdsSchema, &rec)
	if errors.Is(err, fs.ErrNotExist) {
		return allocator.Holds{}, nil
	}
	if err != nil {
		return allocator.Holds{}, fmt.Errorf("%w; without this file the cluster may reuse numbers of running endpoints: restore it, or remove it after the endpoints of this node are gone", err)
	}
	if rec.Node != d.node {
		return allocator.Holds{}, fmt.Errorf("%s: %w: %q, this node is %q; remove the file if the node was renamed and has no endpoints", path, ErrOtherNode, rec.Node, d.node)
	}
	h := allocator.Holds{NextNodeLocal: identity.Numeric(rec.NextNodeLocal)}
	for _, x := range rec.Holders {
		holder, err := allocator.ParseHolder(x.Holder)
		if err == nil {
			var id identity.Identity
			id, err = parseIdentity(x.Number, x.Labels)
			h.Holders = append(h.Holders, allocator.HolderRecord{Holder: holder, Identity: id})
		}
		if err != nil {
			return allocator.Holds{}, &durable.RecordError{File: path, Field: "data.holders", Err: fmt.Errorf("%w: %w", durable.ErrCorrupt, err)}
		}
	}
	return h, nil
}

// oldKnown reads the cache of the previous version, if it is complete.
func (d *Dir) oldKnown() (k allocator.Known, ok bool) {
	var rec oldKnownRecord
	if err := durable.Load(filepath.Join(d.dir.Path(), oldKnownFile), maxFile, knownSchema, &rec); err != nil {
		return k, false
	}
	for _, x := range rec.Identities {
		id, err := parseIdentity(x.Number, x.Labels)
		if err != nil {
			return allocator.Known{}, false
		}
		k.Identities = append(k.Identities, id)
	}
	if rec.Heard > 0 {
		k.Heard = time.UnixMilli(rec.Heard)
	}
	return k, true
}

// removeOld removes the files of the previous version, of any boot.
func (d *Dir) removeOld() error {
	entries, err := os.ReadDir(d.dir.Path())
	if err != nil {
		return fmt.Errorf("state directory: %w", err)
	}
	for _, e := range entries {
		name := e.Name()
		if name != oldKnownFile && !(strings.HasPrefix(name, "holds.") && strings.HasSuffix(name, ".json")) {
			continue
		}
		if err := os.Remove(filepath.Join(d.dir.Path(), name)); err != nil {
			return fmt.Errorf("file of the previous version: %w", err)
		}
	}
	return nil
}
