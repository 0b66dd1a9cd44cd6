// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
)

// TestEveryConstantIsOfAProgramAndHasAValue: a node does not load all programs, so program.SetConstants ignores
// names that a program does not have. A misspelt name would have no effect, and a variable without a value
// would keep the default of its header.
func TestEveryConstantIsOfAProgramAndHasAValue(t *testing.T) {
	set := (&Kernel{}).constants(false)
	set["cfg_previous"] = nil // set by pin.Maps.Bind
	read := map[string][]string{}
	for _, p := range program.Table() {
		spec, err := p.Load()
		if err != nil {
			t.Fatal(err)
		}
		for name := range spec.Variables {
			read[name] = append(read[name], p.Name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(set)) {
		if len(read[name]) == 0 {
			t.Errorf("no program reads %s", name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(read)) {
		if _, ok := set[name]; !ok && strings.HasPrefix(name, "cfg_") {
			t.Errorf("%s of %v has no value", name, read[name])
		}
	}
}
