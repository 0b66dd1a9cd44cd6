// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"errors"
	"testing"

	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/policy/internal/initialsync"
	"github.com/sluice-net/sluice/services/policy/internal/stream"
)

// TestStateOfAnotherClusterHasNewEndpointsWait: a machine was moved from another cluster and still has the policies
// of that cluster. New endpoints wait until the policies of the new cluster are listed.
func TestStateOfAnotherClusterHasNewEndpointsWait(t *testing.T) {
	dir := t.TempDir()
	away := errors.New("connection refused")
	for _, start := range []struct {
		what, uid string
		err       error
		open      bool // new endpoints do not wait at the start
		listed    bool // everything is listed in this run
	}{
		{what: "the first start", uid: "a", listed: true},
		{what: "the same cluster", uid: "a", open: true},
		{what: "the API server is unavailable", err: away, open: true},
		{what: "another cluster", uid: "b"},
		{what: "before its first listing", uid: "b"},
		{what: "before its first listing, the API server is unavailable", err: away, listed: true},
		{what: "afterwards", uid: "b", open: true},
		{what: "the first cluster again", uid: "a", listed: true},
		{what: "and again", uid: "a", open: true},
	} {
		uid := func(context.Context) (string, error) { return start.uid, start.err }
		if err := compareCluster(t.Context(), uid, dir, log.Discard()); err != nil {
			t.Fatal(err)
		}
		g, err := initialsync.New(dir, stream.StateID{1}, []initialsync.Source{{Name: managed.SourceKubernetes}})
		if err != nil {
			t.Fatal(err)
		}
		if g.IsOpen() != start.open {
			t.Errorf("%s: new endpoints wait: %t, want %t", start.what, !g.IsOpen(), !start.open)
		}
		if start.listed {
			if err := g.Listed(managed.SourceKubernetes); err != nil {
				t.Fatal(err)
			}
		}
	}
}
