// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policytable

import (
	"net/netip"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/shares"
)

// Message is some steps, to be carried out in their order.
type Message struct {
	// Incarnation is the run of the service in which Seq counts.
	Incarnation string
	Seq         uint64
	Steps       []Step
}

// Step is one change.
type Step interface{ step() }

// The steps. Tables and identity classes in them have the numbers of the
// service, which never reach the kernel.
type (
	// DefineIdentityClass names an identity class, before it is used.
	DefineIdentityClass struct {
		IdentityClass uint32
		Key           ClassKey
	}
	// RetireIdentityClass ends an identity class that no identity has and no
	// table has a row for.
	RetireIdentityClass struct{ IdentityClass uint32 }
	// SetIdentity says what an identity is; identity class 0: not known.
	SetIdentity struct {
		Identity, IdentityClass uint32
		Kind                    identity.Kind
		Scope                   identity.PeerScope
	}
	// DefineTable is a whole table. Content.Peers is empty; the rows are here.
	DefineTable struct {
		Table   uint64
		Content Content
		Peers   []Row
	}
	// Row leads from an identity class to a class of the table.
	Row struct {
		IdentityClass uint32
		Class         Class
	}
	// GrowTable appends classes.
	GrowTable struct {
		Table   uint64
		Classes []Ranges
	}
	// RetireTable ends a table.
	RetireTable struct{ Table uint64 }
	// SetPeer inserts a row; it replaces none.
	SetPeer struct {
		Table uint64
		Row   Row
	}
	// DeletePeer deletes a row.
	DeletePeer struct {
		Table         uint64
		IdentityClass uint32
	}
	// SetPrefix inserts or replaces a prefix.
	SetPrefix struct {
		Table   uint64
		Prefix  netip.Prefix
		Classes PrefixClasses
	}
	// DeletePrefix deletes a prefix.
	DeletePrefix struct {
		Table  uint64
		Prefix netip.Prefix
	}
	// BindSubject points a direction of a subject at a table; 0: nothing is
	// enforced.
	BindSubject struct {
		Subject   uint32
		Direction Direction
		Table     uint64
		Revision  uint64
		Rules     [][]Source // source locations of the rules, number 1 first
		// Tenant is the tenant of the subject, with its guarantee in percent.
		Tenant    shares.Tenant
		Guarantee int
	}
	// RemoveSubject ends a subject.
	RemoveSubject struct{ Subject uint32 }
	// Barrier is a consistent point.
	Barrier struct {
		PolicyRevision, IdentityRevision, AddressRevision uint64
		// State is the name of the policy state that the revision counts in;
		// empty: the service does not say. Sources have policies in it.
		State   string
		Sources []string
		// Incomplete is what the enforced state of the subscription needs and
		// has not said everything in this run of the service.
		Incomplete []string
	}
	// SnapshotComplete ends a beginning that names everything.
	SnapshotComplete struct{}
	// UnknownStep is a step that this process does not know. The message that it
	// is in cannot be carried out.
	UnknownStep struct{ Field int32 } // its number in the message Step
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
func (Barrier) step()             {}
func (SnapshotComplete) step()    {}
func (UnknownStep) step()         {}

// Direction is the side of a connection that a table evaluates.
type Direction uint8

// The directions.
const (
	Egress  Direction = iota // what the subject sends
	Ingress                  // what the subject receives
)

// String is the direction in a word.
func (d Direction) String() string {
	if d == Egress {
		return "egress"
	}
	return "ingress"
}

// Source is the source location of a rule.
type Source struct {
	Kind, Namespace, Name, Path string
}

// String is "Kind namespace/name path".
func (s Source) String() string {
	text := s.Policy()
	if s.Path != "" {
		text += " " + s.Path
	}
	return text
}

// Policy is the source location without the path.
func (s Source) Policy() string {
	if s.Namespace == "" {
		return s.Kind + " " + s.Name
	}
	return s.Kind + " " + s.Namespace + "/" + s.Name
}
