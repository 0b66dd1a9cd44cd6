// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package ipam

import (
	"strings"
	"testing"

	"github.com/sluice-net/sluice/cmd/sluice/internal/test/nodetest"
)

func TestPoolsAndAddressesAreListedExactly(t *testing.T) {
	n := nodetest.New(t, Command)
	out, _ := n.Want(t, 0, "ipam", "pools")
	nodetest.WantLines(t, out, "10.244.0.0/24 serving 10.244.0.1 256 3 0 2 0 251",
		"fd00:244::/64 serving fd00:244::1 2^64 2 0 2 0 ~2^64", "10.243.7.0/24 draining 10.243.7.1 256 3 0 1 0 0",
		"10.242.0.0/24 refused 10.242.0.1 256 3 0 0 0 0", "10.242.0.0/24 is refused: node n2 has it and is alive")
	out, _ = n.Want(t, 0, "ipam", "list")
	if !strings.Contains(out, "0123456789abc/eth0") || !strings.Contains(out, "leased") {
		t.Errorf("list\n%s", out)
	}
	out, _ = n.Want(t, 0, "ipam", "pools", "-o", "json")
	if !strings.Contains(out, `"free": 18446744073709551611`) {
		t.Errorf("JSON rounds: %s", out)
	}
}
