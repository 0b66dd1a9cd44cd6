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

// clusterTimeout limits how long the start of the service waits for the API server, which may be unreachable.
const clusterTimeout = 2 * time.Second

// clusterFile is the file with the UID of the cluster that the stored policies come from.
const clusterFile = "kubernetes-cluster"

// compareCluster checks whether the policies in dir belong to this cluster. If they belong to another cluster, for
// example because the machine was moved, new endpoints wait until the policies of this cluster have been listed once.
// uid reads the UID of the cluster from the API server. If the API server does not answer, the policies are assumed to
// belong to this cluster.
func compareCluster(ctx context.Context, uid func(context.Context) (string, error), dir string, l *slog.Logger) error {
	ctx, cancel := context.WithTimeout(ctx, clusterTimeout)
	defer cancel()
	now, err := uid(ctx)
	if err != nil {
		l.Info("cannot read the UID of the cluster; policies of another cluster would go unnoticed",
			log.Err(err))
		return nil
	}
	file := filepath.Join(dir, clusterFile)
	before, err := os.ReadFile(file)
	switch {
	case errors.Is(err, fs.ErrNotExist): // first start, or state of an earlier version
	case err != nil:
		return err
	case string(before) == now:
		return nil
	default:
		l.Warn("the stored policies belong to another cluster; new endpoints wait for the policies of this cluster",
			"state", string(before), "cluster", now)
		if err := initialsync.Forget(dir, managed.SourceKubernetes); err != nil {
			return err
		}
	}
	return durable.WriteFile(file, []byte(now), 0o600, durable.SyncAll)
}
