// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/proto/wire/reportwire"
	"github.com/sluice-net/sluice/services/policy/internal/owner"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
)

// unenforced returns a function for the report of this node. The report contains the disk if it cannot be written,
// and the policies that this node does not enforce as written, in the order of shares.InTurns.
func unenforced(
	r *owner.Reader, dir string, tenant func(namespace string) shares.Tenant,
) func(context.Context) ([]reportwire.Refused, error) {
	disk := &storage{dirs: stateDirs(dir), failure: r.StorageFailure, full: isFull, now: time.Now}
	return func(ctx context.Context) ([]reportwire.Refused, error) {
		all, err := r.Unenforced(ctx)
		if err != nil {
			return nil, err
		}
		out, err := disk.report(ctx)
		if err != nil {
			return nil, err
		}
		of := func(k policy.Key) shares.Tenant { return tenant(k.Namespace) }
		for _, k := range shares.InTurns(slices.Collect(maps.Keys(all)), policy.Key.Compare, of) {
			out = append(out, reportwire.Refused{
				Kind: k.Kind, Namespace: k.Namespace, Name: k.Name, Reason: all[k].Why, Code: all[k].Code,
			})
		}
		return out, nil
	}
}
