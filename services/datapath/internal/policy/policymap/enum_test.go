// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policymap

import (
	"testing"

	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
)

// TestActionsAreThoseOfThePrograms compares the numbers in Go with those in the compiled programs.
func TestActionsAreThoseOfThePrograms(t *testing.T) {
	for name, pair := range map[string][2]uint32{
		"Action Deny":     {uint32(policytable.Deny), uint32(bpf.MapsSlActionSL_ACTION_DENY)},
		"Action Redirect": {uint32(policytable.Redirect), uint32(bpf.MapsSlActionSL_ACTION_REDIRECT)},
		"Action Allow":    {uint32(policytable.Allow), uint32(bpf.MapsSlActionSL_ACTION_ALLOW)},
		"Action Pass":     {uint32(policytable.Pass), uint32(bpf.MapsSlActionSL_ACTION_PASS)},
	} {
		if pair[0] != pair[1] {
			t.Errorf("%s is %d in Go and %d in the programs", name, pair[0], pair[1])
		}
	}
}
