// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package policysync writes the tables of the policy service to the kernel.
//
// The service sends steps. Applied one by one and in order, they lead from one set of tables to the next, and after
// each step every verdict is either the old or the new one. The Applier preserves this property while it handles three
// things that the service does not know. It maps the service's numbers to the kernel's, so that a restart of either
// side rewrites nothing. It isolates subjects, in one direction, whose table exceeds the capacity. And it finds the
// endpoints whose connections have to be evaluated again.
//
// It owns the policy entry of every endpoint, the tables, and the entries of identities. It rejects
// invalid steps before it writes anything, because its process has privileges that the service does
// not have.
//
// The lock of the Applier guards all state. Each part of the state has a type: model is the service's state, incoming a
// snapshot that is not adopted yet, rooms the division of the maps among tenants, identities the kernel's entries of
// identities, and endpoints the endpoints with their subjects.
package policysync

import (
	"context"
	"errors"
	"net/netip"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
)

// Kernel writes tables. Calls are synchronous, and a failed call has changed nothing, except
// SetIdentities, which may stop half-way and may be repeated.
type Kernel interface {
	// DefineTable writes a table under an unused ID. ErrNoCapacity, with details, if it does not
	// fit.
	DefineTable(c nodetable.Content) (nodetable.ID, error)
	// GrowTable appends classes. ErrNoCapacity if they do not fit.
	GrowTable(t nodetable.ID, classes []policytable.Ranges) error
	// SetPeer adds a row. ErrNoCapacity if it does not fit.
	SetPeer(t nodetable.ID, ic nodetable.IdentityClass, class policytable.Class) error
	DeletePeer(t nodetable.ID, ic nodetable.IdentityClass) error
	// SetPrefix adds or replaces a prefix. ErrNoCapacity if it does not fit.
	SetPrefix(t nodetable.ID, p netip.Prefix, classes policytable.PrefixClasses) error
	DeletePrefix(t nodetable.ID, p netip.Prefix) error
	// SetDefaults replaces the classes of peers without a row, by one store for each kind.
	SetDefaults(t nodetable.ID, classes [identity.Kinds]policytable.Class) error
	// RetireTables retires tables that no endpoint uses. Their space is free after the next
	// Barrier.
	RetireTables(ts ...nodetable.ID) error
	// Tables lists the tables.
	Tables() ([]nodetable.Info, error)
	// TableSize returns the space that a table takes in the maps. A set of prefixes that tables
	// share is divided among them.
	TableSize(t nodetable.ID) nodetable.Size
	// SizeOf returns the largest space that a new table could take in the maps.
	SizeOf(c nodetable.Content) nodetable.Size
	// MapSizes returns the sizes of the maps.
	MapSizes() nodetable.Size
	// TableContent reads a table back.
	TableContent(t nodetable.ID) (nodetable.Content, error)

	// DefineIdentityClass returns the number of an identity class, and assigns one if needed.
	// ErrNoCapacity if all are used.
	DefineIdentityClass(key policytable.ClassKey) (nodetable.IdentityClass, error)
	IdentityClasses() map[policytable.ClassKey]nodetable.IdentityClass
	// RetireIdentityClasses retires identity classes; their numbers are free after the next
	// Barrier.
	RetireIdentityClasses(ics ...nodetable.IdentityClass) error

	// SetIdentities writes the entries of identities, by one store each.
	SetIdentities(ids map[uint32]nodetable.Identity) error
	// Identities lists the entries that are not zero.
	Identities() (map[uint32]nodetable.Identity, error)

	// SetPolicy replaces both tables of an endpoint by one store.
	SetPolicy(slot uint16, egress, ingress nodetable.ID) (epoch uint32, err error)
	// BumpEpochs causes the connections of the endpoints to be evaluated again. Without arguments, it does so for all
	// endpoints.
	BumpEpochs(slots ...uint16) error
	// SetAudit switches audit mode of endpoints on or off. It ignores IDs without an endpoint.
	SetAudit(ctx context.Context, on bool, slots ...uint16) error
	// Bindings lists the endpoints with their tables.
	Bindings() ([]nodetable.Binding, error)
	// Barrier returns when every program run that started before the call has ended.
	Barrier(ctx context.Context) error
}

// Addresses is informed about which identities the tables include. It must not call the Applier.
type Addresses interface {
	// Gate sets the identities that the tables include at the start. It is called once.
	Gate(ids []identity.Numeric) error
	// Known adds identities that the tables include now.
	Known(ids ...identity.Numeric) error
	// Unknown removes identities that are about to be removed from the tables. It returns nil when no address is published
	// with one of them.
	Unknown(ids ...identity.Numeric) error
}

// ErrUnavailable: the tables of a subject did not arrive in time.
var ErrUnavailable = errors.New("unavailable")

// ErrHeld: the tables of a subject did not arrive in time because the policies of the service are not adopted: the
// service's state is older than the enforced one, or the service has sent a step that this datapath does not know. It
// always comes with ErrUnavailable.
var ErrHeld = errors.New("policies are not adopted")

// ErrNoEndpoint: no endpoint has the ID.
var ErrNoEndpoint = errors.New("no such endpoint")
