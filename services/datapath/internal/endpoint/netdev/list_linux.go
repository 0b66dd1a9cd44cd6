// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package netdev

import (
	"errors"

	"github.com/vishvananda/netlink"

	"github.com/sluice-net/sluice/services/datapath/internal/kernel/rtnl"
)

// mostLists is how often something is listed that changes all the while.
const mostLists = 100

// whole lists again what changed while it was listed: the kernel gives a list in
// pieces, and says when they may not fit together. Containers that come and go
// change every list of the node.
func whole[T any](list func() (T, error)) (all T, err error) {
	for range mostLists {
		if all, err = list(); !errors.Is(err, netlink.ErrDumpInterrupted) && !errors.Is(err, rtnl.ErrInterrupted) {
			return all, err
		}
	}
	return all, err
}
