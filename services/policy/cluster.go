// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/kit/durable"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/policy/internal/initialsync"
)

// clusterTimeout is how long a start waits for the API server, which may be away.
const clusterTimeout = 2 * time.Second

// clusterFile has the UID of the cluster whose policies the state has.
const clusterFile = "kubernetes-cluster"

// compareCluster looks whether the state in dir has the policies of this cluster. If it has those of
// another one, as on a machine that was in another cluster before, new endpoints wait until the
// policies of this cluster were listed once. uid asks the API server; without an answer the state
// is taken for that of this cluster.
func compareCluster(ctx context.Context, uid func(context.Context) (string, error), dir string, l *slog.Logger) error {
	ctx, cancel := context.WithTimeout(ctx, clusterTimeout)
	defer cancel()
	now, err := uid(ctx)
	if err != nil {
		l.Info("the API server does not say which cluster it belongs to: policies of another one would not be noticed",
			log.Err(err))
		return nil
	}
	file := filepath.Join(dir, clusterFile)
	before, err := os.ReadFile(file)
	switch {
	case errors.Is(err, fs.ErrNotExist): // a first start, or the state of an earlier version
	case err != nil:
		return err
	case string(before) == now:
		return nil
	default:
		l.Warn("the policies in the state are of another cluster: new endpoints wait for those of this one",
			"state", string(before), "cluster", now)
		if err := initialsync.Forget(dir, managed.SourceKubernetes); err != nil {
			return err
		}
	}
	return durable.WriteFile(file, []byte(now), 0o600, durable.SyncAll)
}
