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

// Step is one change of the tables. A reader that carries out the steps in their order has
// the tables of the policy service. After every step each verdict is that of before the
// change or that of after it.
type Step interface{ step() }

// The steps.
type (
	// DefineIdentityClass names an identity class, before it is used.
	DefineIdentityClass struct {
		IdentityClass IdentityClass
		Key           ClassKey
	}
	// RetireIdentityClass ends an identity class that no identity has and no table has a
	// row for.
	RetireIdentityClass struct{ IdentityClass IdentityClass }
	// SetIdentity says what an identity is. With identity class 0 the identity is unknown
	// from now on; kind and scope are 0 then.
	SetIdentity struct {
		Identity      identity.Numeric
		IdentityClass IdentityClass
		Kind          identity.Kind
		Scope         identity.PeerScope
	}
	// DefineTable is a whole table. It belongs to the reader.
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
	// RetireTable ends a table that no direction is bound to.
	RetireTable struct{ Table ID }
	// SetPeer inserts a row; it replaces none.
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
	// BindSubject has a table evaluate a direction of a subject.
	BindSubject struct {
		Subject   identity.Numeric
		Direction Direction
		Table     ID         // AllowAll: nothing is enforced
		Revision  uint64     // of the policies that the table is made of
		Rules     [][]Source // where each rule was written, number 1 first
		// Tenant is the tenant of the subject. Guarantee is what the tenant is guaranteed
		// of each limit, in percent.
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
	// Barrier says that the tables are those of some revisions.
	Barrier struct {
		PolicyRevision, IdentityRevision, AddressRevision uint64
		// State is the name of the policy state that PolicyRevision counts in. It is empty if
		// the service does not say. Sources have policies in it.
		State   string
		Sources []string
		// Incomplete are the sources that the enforced state of the subscription had, and
		// that have not listed all their policies in this run of the service.
		Incomplete []string
	}
	// SnapshotComplete ends a beginning that names everything.
	SnapshotComplete struct{}
	// UnknownStep is a step that this build does not know, with its number in the message
	// Step. The message that it is in cannot be carried out.
	UnknownStep struct{ Field int32 }
)

func (Barrier) step()          {}
func (SnapshotComplete) step() {}
func (UnknownStep) step()      {}

// Message is some steps, to be carried out in their order.
type Message struct {
	// Incarnation is the run of the service in which Seq counts.
	Incarnation string
	Seq         uint64
	Steps       []Step
}

// ErrInvalid says that a step makes no sense. The text of the error names the field.
var ErrInvalid = errors.New("invalid step")

// invalid is an ErrInvalid whose text begins with the name of the field, so that a caller can
// put the path to it in front.
type invalid string

func (e invalid) Error() string { return string(e) }

func (invalid) Is(target error) bool { return target == ErrInvalid }

// Invalid returns an ErrInvalid with a text that begins with the name of the field.
func Invalid(format string, args ...any) error { return invalid(fmt.Sprintf(format, args...)) }
