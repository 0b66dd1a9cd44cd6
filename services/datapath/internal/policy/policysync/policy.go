// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package policysync carries the tables of the policy service into the kernel.
//
// The service sends steps; carried out one by one and in order they lead from
// one set of tables to the next, and after each of them every verdict is that
// of before or that of after. The Applier keeps that property while it adds
// what the service cannot know: numbers of the kernel's own, so that a restart
// of either side rewrites nothing; what did not fit, which closes the direction
// of the subject that lacks its table; and which endpoints have to look at their
// connections again.
//
// It owns the policy entry of every endpoint, the tables, and the words of
// identities. It refuses steps that make no sense, before any of them is
// written: the process that runs it has rights that the service has not.
//
// The state of the Applier is divided by subject, and all of it is under the Applier's lock:
// model has what the service has said and incoming a snapshot that is not taken over; rooms
// divides the maps among tenants; identities has the kernel's entries of identities, endpoints
// the slots with their subjects.
package policysync

import (
	"context"
	"errors"
	"net/netip"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
)

// Kernel is where tables are written. Every call is done when it returns, and
// what it says was not done was not begun, but for SetIdentities, which may stop
// half-way and may be repeated.
type Kernel interface {
	// DefineTable writes a table under an unused number. ErrNoCapacity with the
	// figures if it does not fit.
	DefineTable(c nodetable.Content) (nodetable.ID, error)
	// GrowTable appends classes. ErrNoCapacity.
	GrowTable(t nodetable.ID, classes []policytable.Ranges) error
	// SetPeer adds a row. ErrNoCapacity.
	SetPeer(t nodetable.ID, ic nodetable.IdentityClass, class policytable.Class) error
	DeletePeer(t nodetable.ID, ic nodetable.IdentityClass) error
	// SetPrefix adds or replaces a prefix. ErrNoCapacity.
	SetPrefix(t nodetable.ID, p netip.Prefix, classes policytable.PrefixClasses) error
	DeletePrefix(t nodetable.ID, p netip.Prefix) error
	// SetDefaults replaces the classes of peers without a row, one store for each kind.
	SetDefaults(t nodetable.ID, classes [identity.Kinds]policytable.Class) error
	// RetireTables ends tables that no endpoint uses. What they take is free
	// after the next Barrier.
	RetireTables(ts ...nodetable.ID) error
	// Tables lists the tables.
	Tables() ([]nodetable.Info, error)
	// TableSize is what a table takes of the maps. A set of prefixes that tables share is
	// divided among them.
	TableSize(t nodetable.ID) nodetable.Size
	// SizeOf is what a new table would take of the maps at most.
	SizeOf(c nodetable.Content) nodetable.Size
	// MapSizes are the sizes of the maps.
	MapSizes() nodetable.Size
	// TableContent reads a table back.
	TableContent(t nodetable.ID) (nodetable.Content, error)

	// DefineIdentityClass finds or allocates a number. ErrNoCapacity.
	DefineIdentityClass(key policytable.ClassKey) (nodetable.IdentityClass, error)
	IdentityClasses() map[policytable.ClassKey]nodetable.IdentityClass
	// RetireIdentityClasses ends identity classes; free after the next Barrier.
	RetireIdentityClasses(ics ...nodetable.IdentityClass) error

	// SetIdentities says what identities are, by one store each.
	SetIdentities(ids map[uint32]nodetable.Identity) error
	// Identities lists those that are not zero.
	Identities() (map[uint32]nodetable.Identity, error)

	// SetPolicy replaces both tables of an endpoint by one store.
	SetPolicy(slot uint16, egress, ingress nodetable.ID) (epoch uint32, err error)
	// BumpEpochs has the connections of endpoints evaluated again; without a slot
	// those of all.
	BumpEpochs(slots ...uint16) error
	// SetAudit lets pass, and reports, what the endpoints' policies would deny, or ends
	// that. Slots that nobody has are left alone.
	SetAudit(ctx context.Context, on bool, slots ...uint16) error
	// Bindings lists the endpoints with their tables.
	Bindings() ([]nodetable.Binding, error)
	// Barrier returns when no program runs any more that began before.
	Barrier(ctx context.Context) error
}

// Addresses learns which identities the tables know. It must not call the Applier.
type Addresses interface {
	// Gate says which identities the tables know at the start. It is called once.
	Gate(ids []identity.Numeric) error
	// Known says that the tables know more identities, after they do.
	Known(ids ...identity.Numeric) error
	// Unknown says that the tables are about to forget identities. It returns nil
	// when no address is published with one of them.
	Unknown(ids ...identity.Numeric) error
}

// ErrUnavailable says that the tables of a subject did not come in time.
var ErrUnavailable = errors.New("unavailable")

// ErrHeld says that the tables of a subject did not come in time because the policies of
// the service are not taken over: the service is behind what the kernel enforces, or
// sends what this datapath does not know. It is always an ErrUnavailable too.
var ErrHeld = errors.New("policies are not taken over")

// ErrNoEndpoint says that no endpoint has the slot.
var ErrNoEndpoint = errors.New("no such endpoint")
