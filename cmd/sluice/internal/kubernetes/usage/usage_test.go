// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package usage

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/shares"
)

// answer is the output of `sluice shares -o json`.
func answer(admitted int) []byte {
	return fmt.Appendf(nil, `{"items": [{"process": "policy",
		"limit": {"name": "policies", "size": 100, "asked": 30, "used": %[1]d},
		"tenants": [{"kind": "labelled", "name": "acme", "asked": 30, "admitted": %[1]d, "allotment": 20}]}]}`, admitted)
}

func TestNodesWithTheSameFiguresShareARow(t *testing.T) {
	var all nodes
	for i := range 6 {
		n := &node{Name: fmt.Sprint("n", i)}
		admitted := 20
		if i == 5 {
			admitted = 10 // a node whose datapath has less capacity
		}
		if err := n.read(answer(admitted), nil); err != nil {
			t.Fatal(err)
		}
		all.Items = append(all.Items, n)
	}
	silent := &node{Name: "n6", Error: "no answer"}
	all.Items = append(all.Items, silent)
	var out bytes.Buffer
	if err := (&invocation.Invocation{Format: "table", Out: &out}).Show(all, all.table); err != nil {
		t.Fatal(err)
	}
	want := `LIMIT            SIZE  TENANT  ASKS FOR  HAS  GUARANTEED  MAY USE  NODES
policy/policies  100   all     30        20   -           -        n0, n1, n2, 2 more
policy/policies  100   acme    30        20   0           20       n0, n1, n2, 2 more
policy/policies  100   all     30        10   -           -        n5
policy/policies  100   acme    30        10   0           20       n5
`
	if out.String() != want {
		t.Errorf("got\n%s\nwant\n%s", out.String(), want)
	}
	all.Items = all.Items[:5]
	out.Reset()
	if err := (&invocation.Invocation{Format: "table", Out: &out}).Show(all, all.table); err != nil {
		t.Fatal(err)
	}
	if !bytes.Contains(out.Bytes(), []byte("20       all\n")) {
		t.Errorf("equal nodes are not one row:\n%s", out.String())
	}
}

// TestEqualFiguresOfManyNodesAreKeptOnce: otherwise, 2,000 nodes with 10,000 tenants would need gigabytes.
func TestEqualFiguresOfManyNodesAreKeptOnce(t *testing.T) {
	var all nodes
	once := &distinct{known: make(map[[sha256.Size]byte]*shares.Limit)}
	kept := make(map[*shares.Limit]bool)
	for i := range 2000 {
		n := &node{Name: fmt.Sprint("n", i)}
		admitted := 20
		if i%1000 == 5 {
			admitted = 10
		}
		if err := errors.Join(n.read(answer(admitted), nil), once.share(n.Limits)); err != nil {
			t.Fatal(err)
		}
		for _, l := range n.Limits {
			kept[l] = true
		}
		all.Items = append(all.Items, n)
	}
	if len(kept) != 2 {
		t.Errorf("%d limits are kept, want 2", len(kept))
	}
	var out bytes.Buffer
	if err := (&invocation.Invocation{Format: "table", Out: &out}).Show(all, all.table); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"n0, n1, n2, 1995 more\n", "n5, n1005\n"} {
		if strings.Count(out.String(), want) != 2 {
			t.Errorf("not two rows of %q:\n%s", want, out.String())
		}
	}
}

func TestPartOfAnAnswerIsKeptBesideItsError(t *testing.T) {
	n := &node{}
	gone := errors.New("sluice-identity does not answer")
	if err := n.read(answer(1), gone); !errors.Is(err, gone) || len(n.Limits) != 1 {
		t.Errorf("%v, %d limits", err, len(n.Limits))
	}
	if err := n.read([]byte("sh: sluice: not found"), nil); err == nil {
		t.Error("what is not JSON is taken for an answer")
	}
}
