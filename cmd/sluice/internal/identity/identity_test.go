// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package identity

import (
	"slices"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/test/nodetest"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

func TestIdentities(t *testing.T) {
	n := nodetest.New(t, Command)
	out, _ := n.Want(t, 0, "identity", "list")
	nodetest.WantLines(t, out, "300 cluster 2 app=web,tier")
	wide, _ := n.Want(t, 0, "identity", "list", "-o", "wide")
	nodetest.WantLines(t, wide, "300 cluster 2 app=web,tier k8s:app=web,k8s:tier")
	if strings.Contains(out, "reserved:host") {
		t.Errorf("reserved identities are listed unasked:\n%s", out)
	}
	out, _ = n.Want(t, 0, "identity", "list", "--all")
	nodetest.WantLines(t, out, "1 reserved 0 reserved:host")
	out, _ = n.Want(t, 0, "identity", "get", "300")
	nodetest.WantLines(t, out, "Identity 300", "Held by endpoint:a/eth0", "Held by reference:warm")
	_, errOut := n.Want(t, invocation.ExitFailed, "identity", "get", "301")
	nodetest.WantLines(t, errOut, "sluice: no identity 301; see `sluice identity list --all`")
	for _, bad := range []string{"0", "x", "-1", "16777216"} {
		n.Want(t, invocation.ExitUsage, "identity", "get", "--", bad)
	}
}

func TestTopLabelsBeginWithTheKeyOfMostValues(t *testing.T) {
	n := nodetest.New(t, Command)
	n.Identity.More = [][]*workloadv1.Label{
		{nodetest.Label("app", "db"), nodetest.Label("job", "1")},
		{nodetest.Label("app", "web"), nodetest.Label("job", "2")},
		{nodetest.Label("app", "web"), nodetest.Label("job", "3")},
	}
	out, _ := n.Want(t, 0, "identity", "top-labels", "-o", "json")
	var got []labelKey
	if err := nodetest.UnmarshalItems(out, &got); err != nil {
		t.Fatal(err)
	}
	want := []labelKey{{"k8s:job", 3, 3}, {"k8s:app", 2, 4}, {"k8s:tier", 1, 1}}
	if !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	out, _ = n.Want(t, 0, "identity", "top-labels")
	nodetest.WantLines(t, out, "LABEL KEY VALUES IDENTITIES", "k8s:app 2 4")
}
