// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policysync

import (
	"log/slog"
	"time"

	"github.com/sluice-net/sluice/model/policytable"
)

// placer puts the tables of the service into the kernel: whole, in part if its tenant's share is smaller, or not at
// all. It keeps the kernel's tables as the service changes them, and retries what did not fit. It does not handle the
// stream, nor decide which policy an endpoint gets; the Applier does. The caller holds the lock.
type placer struct {
	kernel   Kernel
	log      *slog.Logger
	now      func() time.Time
	subjects flipper

	// The kernel's contents, as this process wrote or found them.
	tables     *kernelTables
	identities *identities
	endpoints  *endpoints

	model    *model // the service's state; nil before its first snapshot, and after an error that invalidates it
	rooms    rooms
	expected map[policytable.ID]policytable.BindSubject // bindings of the tables that the message defines

	drain chan struct{} // has a token when something waits for a grace period
}

// flipper switches subjects to their present tables. Tables that lose their space may be retired afterwards.
type flipper interface {
	flip(w *work) error
}
