// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package nodetable

import (
	"errors"
	"testing"

	"github.com/sluice-net/sluice/model/policytable"
)

func TestRangesThatCannotBeLookedUpAreRefused(t *testing.T) {
	many := make(policytable.Ranges, MaxRanges/2+1)
	for i := range many {
		many[i] = policytable.PortRange{First: uint32(2 * i), Last: uint32(2 * i), Rest: 1}
	}
	for name, list := range map[string]policytable.Ranges{
		"backwards":   {{First: 2, Last: 1}},
		"overlapping": {{First: 1, Last: 2}, {First: 2, Last: 3}},
		"unsorted":    {{First: 5, Last: 6}, {First: 1, Last: 2}},
		"admin":       {{Admin: 2}},
		"rest":        {{Rest: 2}},
		"too many":    many,
	} {
		if err := validateRanges(list, 1); !errors.Is(err, policytable.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := validateRanges(many[:MaxRanges/2], 1); err != nil {
		t.Errorf("as many as there can be: %v", err)
	}
}
