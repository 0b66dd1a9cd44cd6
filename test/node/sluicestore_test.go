// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"slices"
	"testing"

	"github.com/sluice-net/sluice/devnode"
	storev1 "github.com/sluice-net/sluice/proto/gen/sluice/store/v1"
)

// TestKernelNodeRunsOnTheStore: a node has sluice-store in place of an etcd. While the store was killed, connections
// work, and afterwards new label sets get numbers again.
func TestKernelNodeRunsOnTheStore(t *testing.T) {
	n := newNode(t, func(o *devnode.Options) { o.Store = true })
	if slices.Contains(n.Services(), devnode.Etcd) {
		t.Errorf("the node has an etcd: %v", n.Services())
	}
	pods := n.addPods(t, "server", "client")
	serve(t, pods[0], 8080)
	wantAllowed(t, pods[1], pods[0], 8080)
	ctx, cancel := deadline(t)
	defer cancel()
	if err := n.Kill(ctx, devnode.Store); err != nil {
		t.Fatal(err)
	}
	wantAllowed(t, pods[1], pods[0], 8080)
	if err := n.Start(ctx, devnode.Store); err != nil {
		t.Fatal(err)
	}
	n.addPods(t, "new")
	st, err := storev1.NewStoreServiceClient(dial(t, n.Node, devnode.Store)).GetStatus(ctx, &storev1.GetStatusRequest{})
	if err != nil || st.GetEpoch() != 1 || len(st.GetNodes()) != 1 || st.GetNodes()[0].GetName() != n.Name() ||
		len(st.GetService().GetProblems()) != 0 {
		t.Errorf("the store: %v, %v", st, err)
	}
}
