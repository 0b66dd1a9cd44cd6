// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policytable

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/shares"
)

// Step is one change of the tables. A reader that applies all steps in order has the same tables as the policy
// service. After each step, every verdict equals the verdict before or after the whole change.
type Step interface{ step() }

// The steps.
type (
	// DefineIdentityClass announces an identity class before its first use.
	DefineIdentityClass struct {
		IdentityClass IdentityClass
		Key           ClassKey
	}
	// RetireIdentityClass removes an identity class. No identity belongs to it, and no table has a row for it.
	RetireIdentityClass struct{ IdentityClass IdentityClass }
	// SetIdentity describes an identity. With identity class 0 the identity is unknown from now on; kind and scope
	// are 0 then.
	SetIdentity struct {
		Identity      identity.Numeric
		IdentityClass IdentityClass
		Kind          identity.Kind
		Scope         identity.PeerScope
	}
	// DefineTable defines a complete table. The reader owns it.
	DefineTable struct {
		Table   ID
		Content Table
		Peers   []Row // in ascending order of the identity classes
	}
	// GrowTable appends classes to a table.
	GrowTable struct {
		Table   ID
		Classes []Ranges
	}
	// RetireTable removes a table. No direction is bound to it.
	RetireTable struct{ Table ID }
	// SetPeer inserts a row. The table has no row for the identity class yet.
	SetPeer struct {
		Table ID
		Row   Row
	}
	// DeletePeer deletes a row.
	DeletePeer struct {
		Table         ID
		IdentityClass IdentityClass
	}
	// SetPrefix inserts or replaces a prefix.
	SetPrefix struct {
		Table   ID
		Prefix  netip.Prefix
		Classes PrefixClasses
	}
	// DeletePrefix deletes a prefix.
	DeletePrefix struct {
		Table  ID
		Prefix netip.Prefix
	}
	// BindSubject binds a direction of a subject to a table, which evaluates it from now on.
	BindSubject struct {
		Subject   identity.Numeric
		Direction Direction
		Table     ID         // AllowAll: nothing is enforced
		Revision  uint64     // of the policies that the table was compiled from
		Rules     [][]Source // source locations of each rule, starting with number 1
		// Tenant is the tenant of the subject. Guarantee is the tenant's guaranteed part of each limit, in percent.
		Tenant    shares.Tenant
		Guarantee int
	}
	// RemoveSubject ends a subject.
	RemoveSubject struct{ Subject identity.Numeric }
)

func (DefineIdentityClass) step() {}
func (RetireIdentityClass) step() {}
func (SetIdentity) step()         {}
func (DefineTable) step()         {}
func (GrowTable) step()           {}
func (RetireTable) step()         {}
func (SetPeer) step()             {}
func (DeletePeer) step()          {}
func (SetPrefix) step()           {}
func (DeletePrefix) step()        {}
func (BindSubject) step()         {}
func (RemoveSubject) step()       {}

// The steps that end a message of the stream.
type (
	// Barrier states the revisions that the tables have reached.
	Barrier struct {
		PolicyRevision, IdentityRevision, AddressRevision uint64
		// State is the name of the policy state in which PolicyRevision counts; it is empty if the service does not
		// send it. Sources lists the sources that have policies in it.
		State   string
		Sources []string
		// Incomplete lists the sources that were part of the subscriber's enforced state, and that have not listed
		// all their policies in this run of the service.
		Incomplete []string
	}
	// SnapshotComplete ends the initial steps of a stream that starts with all tables.
	SnapshotComplete struct{}
	// UnknownStep is a step that this build does not know, with its field number in the message Step. Its message
	// cannot be applied.
	UnknownStep struct{ Field int32 }
)

func (Barrier) step()          {}
func (SnapshotComplete) step() {}
func (UnknownStep) step()      {}

// Message is a sequence of steps that are applied in order.
type Message struct {
	// Incarnation is the run of the service in which Seq counts.
	Incarnation string
	Seq         uint64
	Steps       []Step
}

// ErrInvalid means that a step is invalid. The text of the error names the field.
var ErrInvalid = errors.New("invalid step")

// invalid is an ErrInvalid whose text starts with the name of the field, so that a caller can prepend the path.
type invalid string

func (e invalid) Error() string { return string(e) }

func (invalid) Is(target error) bool { return target == ErrInvalid }

// Invalid returns an ErrInvalid with a text that starts with the name of the field.
func Invalid(format string, args ...any) error { return invalid(fmt.Sprintf(format, args...)) }
