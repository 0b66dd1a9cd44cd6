// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package hubble

import (
	"testing"
	"time"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/test/nodetest"
)

func TestDeleteSendsTheCriteria(t *testing.T) {
	n := nodetest.New(t, Command)
	out, _ := n.Want(t, 0, "hubble", "history", "delete", "--namespace", "shop", "--before", "2026-11-30T10:00:00Z",
		"--dry-run")
	nodetest.WantLines(t, out, "to delete: 7 events")
	if r := n.DeletedFlows; r.GetNamespace() != "shop" || !r.GetValidateOnly() ||
		!r.GetBefore().AsTime().Equal(time.Date(2026, 11, 30, 10, 0, 0, 0, time.UTC)) {
		t.Errorf("asked %v", r)
	}
	out, _ = n.Want(t, 0, "hubble", "history", "delete", "--before", "24h")
	nodetest.WantLines(t, out, "deleted: 7 events")
	if r := n.DeletedFlows; r.GetNamespace() != "" || r.GetValidateOnly() ||
		time.Since(r.GetBefore().AsTime()) < 24*time.Hour {
		t.Errorf("asked %v", r)
	}
	n.Want(t, invocation.ExitUsage, "hubble", "history", "delete")
	n.Want(t, invocation.ExitUsage, "hubble", "history", "delete", "--before", "yesterday")
}

func TestUIPrintsTheAddressWithTheToken(t *testing.T) {
	n := nodetest.New(t, Command)
	out, _ := n.Want(t, 0, "hubble", "ui")
	nodetest.WantLines(t, out, "http://127.0.0.1:4246/#token")
}
