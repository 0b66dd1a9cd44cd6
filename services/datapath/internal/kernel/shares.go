// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"context"
	"time"

	"github.com/sluice-net/sluice/kit/work"
)

// shareInterval is the interval at which DivideShares checks whether an endpoint was refused. shareCollection is the
// interval at which it divides the bounds if none was.
const (
	shareInterval   = time.Second
	shareCollection = 30 * time.Second
)

// DivideShares divides the bounds of fragments, events and affinity among the endpoints at intervals, and
// earlier if an endpoint was refused, until ctx ends. The bounds of translations are divided with the services.
func (k *Kernel) DivideShares(ctx context.Context) error {
	var due time.Time
	return work.Every(ctx, shareInterval, k.opened.Log, "divide shares of endpoints", func() error {
		if time.Now().Before(due) && !k.Bounds.Pressed() {
			return nil
		}
		due = time.Now().Add(shareCollection)
		endpoints, err := k.Endpoints.Count()
		if err != nil {
			return err
		}
		k.Bounds.DivideEvents(endpoints)
		local, err := k.Endpoints.Local()
		if err != nil {
			return err
		}
		if err := k.Bounds.CollectAffinity(local); err != nil {
			return err
		}
		_, _, err = k.Bounds.CollectFragments()
		return err
	})
}
