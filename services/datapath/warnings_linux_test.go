// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"strings"
	"testing"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
)

func TestKernelRuleThatRestoresConnectionMarksIsAWarning(t *testing.T) {
	w := newWorld(t)
	w.start(false)
	if err := w.node.Endpoints.Auditor.Audit(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	if list := w.node.Node.Host.Warnings(); len(list) != 0 {
		t.Fatalf("on a fresh node %q", list)
	}
	c, err := nftables.New(nftables.WithNetNSFd(w.home.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	table := c.AddTable(&nftables.Table{Name: "wg-quick-wg0", Family: nftables.TableFamilyIPv4})
	chain := c.AddChain(&nftables.Chain{
		Name: "premangle", Table: table, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityMangle,
	})
	c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{
		&expr.Ct{Key: expr.CtKeyMARK, Register: 1}, &expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: 1},
	}})
	if err := c.Flush(); err != nil {
		t.Fatal(err)
	}
	if err := w.node.Endpoints.Auditor.Audit(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	if list := w.node.Node.Host.Warnings(); len(list) != 1 || !strings.Contains(list[0], "chain premangle of table ip wg-quick-wg0") {
		t.Errorf("warnings %q, want one that names the chain", list)
	}
	c.DelTable(table)
	if err := c.Flush(); err != nil {
		t.Fatal(err)
	}
	if err := w.node.Endpoints.Auditor.Audit(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	if list := w.node.Node.Host.Warnings(); len(list) != 0 {
		t.Errorf("after the rule was removed: %q", list)
	}
}
