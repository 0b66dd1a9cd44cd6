// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package bpfmap

import (
	"strings"
	"testing"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/test/nodetest"
)

func TestMaps(t *testing.T) {
	n := nodetest.New(t, Command)
	out, _ := n.Want(t, 0, "map", "list")
	nodetest.WantLines(t, out, "MAP ENTRIES OF MEMORY", "sl_ct ? 65536 1.0 KiB", "sl_peer 3 16 512 B",
		"2 maps - - 1.5 KiB")
	out, _ = n.Want(t, 0, "map", "dump", "sl_peer")
	nodetest.WantLines(t, out, "set 16 class 2 => class 2")
	out, _ = n.Want(t, 0, "map", "dump", "sl_peer", "--limit", "1", "-o", "json")
	if want := `{"key":"set 16 class 0","value":"class 2","omittedEntryCount":2}` + "\n"; out != want {
		t.Errorf("JSON %s, want %s", out, want)
	}
	_, errOut := n.Want(t, 0, "map", "dump", "sl_peer", "--limit", "2")
	nodetest.WantLines(t, errOut, "note: 1 more entry is not shown because of --limit")
	_, errOut = n.Want(t, invocation.ExitFailed, "map", "dump", "sl_per")
	if !strings.Contains(errOut, "no map sl_per; see `sluice map list`; did you mean sl_peer?") {
		t.Errorf("a misspelled map: %s", errOut)
	}
	_, errOut = n.Want(t, invocation.ExitFailed, "map", "dump", "sl_x")
	nodetest.WantLines(t, errOut, "sluice: no map sl_x; see `sluice map list`")
	n.Want(t, invocation.ExitUsage, "map", "dump")
}
