// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package netdev

import (
	"errors"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"
)

func TestListIsTakenAgainUntilNothingChangedMeanwhile(t *testing.T) {
	other := errors.New("another error")
	for _, c := range []struct {
		name  string
		after int // interrupted lists
		end   error
		want  error
	}{
		{"quiet", 0, nil, nil},
		{"changed", 3, nil, nil},
		{"changed, then another error", 1, other, other},
		{"changed each time", mostLists, nil, netlink.ErrDumpInterrupted},
	} {
		calls := 0
		got, err := whole(func() ([]int, error) {
			if calls++; calls <= c.after {
				return []int{1}, netlink.ErrDumpInterrupted
			}
			return []int{1, 2}, c.end
		})
		if !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
		if c.want == nil && !slices.Equal(got, []int{1, 2}) {
			t.Errorf("%s: %v", c.name, got)
		}
	}
}
