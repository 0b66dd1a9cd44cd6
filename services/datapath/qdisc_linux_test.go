// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/lifecycle"
)

// TestKernelForeignQdiscIsReported adds a foreign root qdisc to a host end, as the CNI plugin bandwidth does. CHECK,
// the audit and the status must report it, and nothing may remove it.
func TestKernelForeignQdiscIsReported(t *testing.T) {
	w := newWorld(t)
	w.start(true)
	p := w.pod("shaped")
	if found := w.findings(true, endpoint.SubjectRootQdisc); len(found) != 0 {
		t.Fatalf("before: %+v", found)
	}
	qdisc := &netlink.GenericQdisc{
		QdiscAttrs: netlink.QdiscAttrs{
			LinkIndex: int(p.ep.Device.HostIndex), Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT,
		},
		QdiscType: "pfifo",
	}
	if err := w.home.Do(func() error { return netlink.QdiscAdd(qdisc) }); err != nil {
		t.Fatal(err)
	}
	named := func(d endpoint.Difference) bool {
		return d.Subject == endpoint.SubjectRootQdisc && d.Key == p.ep.Device.HostName && strings.Contains(d.Have, "pfifo")
	}
	diffs, err := w.node.Endpoints.Reconciler.Check(t.Context(), p.owner, lifecycle.Expected{})
	if err != nil || !slices.ContainsFunc(diffs, named) {
		t.Errorf("check returns %+v, %v", diffs, err)
	}
	for range 2 {
		found := w.findings(true, endpoint.SubjectRootQdisc)
		if len(found) != 1 || !named(found[0].Difference) || found[0].Repaired || found[0].Err == nil {
			t.Errorf("audit returns %+v, want one finding that is not repaired", found)
		}
	}
	left := w.node.Endpoints.Report.Counts().Unrepaired
	if !slices.ContainsFunc(left, func(s string) bool { return strings.Contains(s, "pfifo") }) {
		t.Errorf("status returns %q", left)
	}
}
