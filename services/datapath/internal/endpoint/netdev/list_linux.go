// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package netdev

import (
	"errors"

	"github.com/vishvananda/netlink"

	"github.com/sluice-net/sluice/services/datapath/internal/kernel/rtnl"
)

// mostLists bounds the attempts to list something that changes continuously.
const mostLists = 100

// whole repeats a listing until it is consistent: the kernel returns a list in pieces, and reports
// when it changed in between. Every container that is created or deleted changes all lists of the
// node.
func whole[T any](list func() (T, error)) (all T, err error) {
	for range mostLists {
		if all, err = list(); !errors.Is(err, netlink.ErrDumpInterrupted) && !errors.Is(err, rtnl.ErrInterrupted) {
			return all, err
		}
	}
	return all, err
}
