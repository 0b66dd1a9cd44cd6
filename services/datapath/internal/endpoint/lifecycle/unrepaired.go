// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package lifecycle

import (
	"errors"
	"slices"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// errRemains: a repair did not change the difference.
var errRemains = errors.New("the difference remains after a repair; its owner has to remove it")

// outcome returns why a difference was not repaired, or nil if it was.
func outcome(d endpoint.Difference, left []endpoint.Difference, err error) error {
	remains := slices.ContainsFunc(left, func(l endpoint.Difference) bool {
		return l.Subject == d.Subject && l.Key == d.Key
	})
	switch {
	case !remains:
		return nil
	case err != nil && d.Repairable():
		return err
	}
	return errRemains
}

// unrepaired are the differences that the last check found and the repair left.
type unrepaired struct {
	left   []endpoint.Difference
	checks int // consecutive checks that found exactly these differences
}

// mostVain is how many repairs in a row may leave the same differences. After that, events no longer trigger a repair,
// because each repair causes further events. It is more than one, because another program may undo a repair at once.
const mostVain = 5

// next returns the state after another check, whose repair left the given differences.
func (u unrepaired) next(left []endpoint.Difference) unrepaired {
	if !slices.Equal(left, u.left) {
		u.checks = 0
	}
	return unrepaired{left, u.checks + 1}
}

// settles reports whether an event triggers no repair: there are no differences, or the last repairs did not remove
// them.
func (u unrepaired) settles(diffs []endpoint.Difference) bool {
	return slices.Equal(diffs, u.left) &&
		(u.checks >= mostVain || !slices.ContainsFunc(diffs, endpoint.Difference.Repairable))
}

// noDevice reports whether the host end is missing.
func (u unrepaired) noDevice() bool {
	return slices.ContainsFunc(u.left, endpoint.Difference.IsNoDevice)
}
