// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package explain

import (
	"fmt"
	"slices"
	"testing"
)

// TestPartsRunAfterThoseWhoseFactsTheyRead gives the parts of New in every order.
func TestPartsRunAfterThoseWhoseFactsTheyRead(t *testing.T) {
	e := New(Maps{})
	for _, parts := range [][]part{e.direct, e.outside} {
		var try func(given, rest []part)
		try = func(given, rest []part) {
			for i, p := range rest {
				try(append(slices.Clone(given), p), slices.Delete(slices.Clone(rest), i, i+1))
			}
			if len(rest) > 0 {
				return
			}
			var known facts
			for _, p := range ordered(given...) {
				if p.reads()&^known != 0 {
					t.Errorf("given as %T, %T runs before a part whose facts it reads", given, p)
				}
				known |= p.sets()
			}
		}
		try(nil, parts)
	}
}

func TestPartsWithoutAnOrderAreRefused(t *testing.T) {
	for name, parts := range map[string][]part{
		"nothing sets the ends": {packets{}, policies{}},
		"two set the verdict":   {peers{}, packets{}, uplink{}},
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Error(fmt.Sprint(name, ": accepted"))
				}
			}()
			ordered(parts...)
		}()
	}
}
