// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package policy carries the tables of the policy service into the kernel.
//
// The service sends steps; carried out one by one and in order they lead from
// one set of tables to the next, and after each of them every verdict is that
// of before or that of after. The Applier keeps that property while it adds
// what the service cannot know: numbers of the kernel's own, so that a restart
// of either side rewrites nothing; what did not fit, which leaves the subject
// on the tables it had; and which endpoints have to look at their connections
// again.
//
// It owns the policy word of every endpoint, the tables, and the words of
// identities. It refuses steps that make no sense, before any of them is
// written: the process that runs it has rights that the service has not.
package policy

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
)

// Table is the kernel's number of a table.
type Table uint16

// Tables with a fixed meaning.
const (
	// Deny drops everything: the endpoint is cut.
	Deny Table = 0
	// Allow lets everything pass: nothing is enforced.
	Allow Table = 1
	// Pending lets in what comes from the own node, and nothing else.
	Pending Table = 2
	// First is the smallest number of a table made from policies.
	First Table = 16
)

// NodeClass is the kernel's number of a node class; 0 is none.
type NodeClass uint16

// ClassKey is what a node class is, the same in every run of the service.
type ClassKey [16]byte

// Kinds of peers and their scopes, as the kernel counts them.
const (
	Kinds       = 8
	KindHost    = 3
	KindUnknown = 6
	Scopes      = 3
)

// Word is what the kernel knows of an identity; zero: nothing.
type Word struct {
	Class       NodeClass
	Kind, Scope uint8
	Known       bool
}

// Actions of a rule.
const (
	ActionDeny = iota
	ActionRedirect
	ActionAllow
	ActionPass
)

// Rule is what the kernel knows of a rule.
type Rule struct {
	Action, Tier uint8
	Proxy        uint16
}

// Fanout is the number of entries of a node.
const Fanout = 16

// Node is a node of a tree of intervals over protocol << 16 | port.
type Node struct {
	High, Value [Fanout]uint32
}

// Content is one direction of one policy.
type Content struct {
	// Hash of what never changes: rules, ports, defaults.
	Hash         [32]byte
	DefaultAllow bool
	HostAllow    bool
	HasAddresses bool
	// DefaultClasses are those of peers without a row, by kind.
	DefaultClasses [Kinds]uint16
	// AddressClasses are those of addresses in no block, by scope.
	AddressClasses [Scopes]uint16
	Rules          []Rule   // number 1 first
	Classes        []uint32 // class → index of its root in Nodes
	Nodes          []Node
	Peers          map[NodeClass]uint16
	Blocks         map[netip.Prefix][Scopes]uint16
}

// Source is the place of a rule.
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

// Policy is the place without the path.
func (s Source) Policy() string {
	if s.Namespace == "" {
		return s.Kind + " " + s.Name
	}
	return s.Kind + " " + s.Namespace + "/" + s.Name
}

// Direction is the side that a table judges.
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

// Message is some steps, to be carried out in their order.
type Message struct {
	// Incarnation is the run of the service in which Seq counts.
	Incarnation string
	Seq         uint64
	Steps       []Step
}

// Step is one change.
type Step interface{ step() }

// The steps. Tables and node classes in them have the numbers of the service,
// which never reach the kernel.
type (
	// NodeClassDefine names a node class, before it is used.
	NodeClassDefine struct {
		NodeClass uint32
		Key       ClassKey
	}
	// NodeClassRetire ends a node class that nobody uses.
	NodeClassRetire struct{ NodeClass uint32 }
	// IdentityUpdate says what an identity is; node class 0: not known.
	IdentityUpdate struct {
		Identity, NodeClass uint32
		Kind, Scope         uint8
	}
	// TableDefine is a whole table. Content.Peers is empty; the rows are here.
	TableDefine struct {
		Table   uint64
		Content Content
		Peers   []Row
	}
	// Row is a row: node class → class.
	Row struct {
		NodeClass uint32
		Class     uint16
	}
	// TableGrow appends nodes and classes.
	TableGrow struct {
		Table   uint64
		Nodes   []Node
		Classes []uint32
	}
	// TableRetire ends a table.
	TableRetire struct{ Table uint64 }
	// PeerUpdate inserts or deletes a row.
	PeerUpdate struct {
		Table  uint64
		Row    Row
		Delete bool
	}
	// AddressUpdate inserts, replaces or deletes a block.
	AddressUpdate struct {
		Table   uint64
		Prefix  netip.Prefix
		Classes [Scopes]uint16
		Delete  bool
	}
	// Bind points a direction of a subject at a table; 0: nothing is enforced.
	Bind struct {
		Subject   uint32
		Direction Direction
		Table     uint64
		Revision  uint64
		Rules     [][]Source
	}
	// SubjectGone ends a subject.
	SubjectGone struct{ Subject uint32 }
	// Barrier is a consistent point.
	Barrier struct {
		PolicyRevision, IdentityRevision, AddressRevision uint64
		// State is the name of the policy state that the revision counts in;
		// empty: the service does not say. Sources have policies in it.
		State   string
		Sources []string
		// Incomplete is what Subscription.Enforced needs and has not said
		// everything in this run of the service.
		Incomplete []string
	}
	// SnapshotComplete ends a beginning that names everything.
	SnapshotComplete struct{}
)

func (NodeClassDefine) step()  {}
func (NodeClassRetire) step()  {}
func (IdentityUpdate) step()   {}
func (TableDefine) step()      {}
func (TableGrow) step()        {}
func (TableRetire) step()      {}
func (PeerUpdate) step()       {}
func (AddressUpdate) step()    {}
func (Bind) step()             {}
func (SubjectGone) step()      {}
func (Barrier) step()          {}
func (SnapshotComplete) step() {}

// Endpoint is an endpoint of the kernel as far as policy goes.
type Endpoint struct {
	Slot            uint16
	Identity        uint32
	Addrs           []netip.Addr
	Egress, Ingress Table
	Generation      uint32
}

// Cut says whether the endpoint is denied everything, as one is that goes.
func (e Endpoint) Cut() bool { return e.Egress == Deny && e.Ingress == Deny }

// Kernel is where tables are written. Every call is done when it returns, and
// what it says was not done was not begun, but for SetWords, which may stop
// half-way and may be repeated.
type Kernel interface {
	// DefineTable writes a table under an unused number. ErrNoRoom with the
	// figures if it does not fit.
	DefineTable(c Content) (Table, error)
	// GrowTable appends nodes and classes. ErrNoRoom.
	GrowTable(t Table, nodes []Node, classes []uint32) error
	// SetPeer adds a row. ErrNoRoom.
	SetPeer(t Table, nc NodeClass, class uint16) error
	DeletePeer(t Table, nc NodeClass) error
	// SetBlock adds or replaces a block. ErrNoRoom.
	SetBlock(t Table, p netip.Prefix, classes [Scopes]uint16) error
	DeleteBlock(t Table, p netip.Prefix) error
	// RetireTables ends tables that no endpoint uses. Their room is free after
	// the next Barrier.
	RetireTables(ts ...Table) error
	// Tables lists the tables with their hashes.
	Tables() (map[Table][32]byte, error)
	// TableContent reads a table back.
	TableContent(t Table) (Content, error)

	// NodeClass finds or allocates a number. ErrNoRoom.
	NodeClass(key ClassKey) (NodeClass, error)
	NodeClasses() (map[ClassKey]NodeClass, error)
	// RetireNodeClasses ends node classes; free after the next Barrier.
	RetireNodeClasses(ncs ...NodeClass) error

	// SetWords says what identities are, by one store each.
	SetWords(ws map[uint32]Word) error
	// Words lists those that are not zero.
	Words() (map[uint32]Word, error)

	// SetPolicy replaces both tables of an endpoint by one store.
	SetPolicy(slot uint16, egress, ingress Table) (gen uint32, err error)
	// BumpGens has the connections of endpoints judged again; without a slot
	// those of all.
	BumpGens(slots ...uint16) error
	// SetAudit lets pass, and reports, what the endpoint's policy would deny.
	SetAudit(slot uint16, on bool) error
	Endpoints() ([]Endpoint, error)
	// Barrier returns when no program runs any more that began before.
	Barrier(ctx context.Context) error
}

// Subscription is how a stream begins.
type Subscription struct {
	Name        string
	Incarnation string // of the last message that was carried out; empty: none
	Seq         uint64
	Subjects    []uint32
	Locations   map[netip.Addr]uint32
	Enforced    *Enforced // that the service must not be behind; nil: nothing
}

// Hold says that everything up to a message has come and is not enforced.
type Hold struct {
	Seq      uint64
	Revision uint64 // that stays enforced
	Reason   string
}

// Nack says that a subject stays on the tables it had.
type Nack struct {
	Seq     uint64
	Subject uint32
	Table   uint64
	Reason  string
}

// Stream is one subscription to the service. Recv is called by one goroutine,
// the rest by another.
type Stream interface {
	Recv() (Message, error)
	Subjects(add, remove []uint32) error
	Locate(add map[netip.Addr]uint32, remove []netip.Addr) error
	Ack(seq uint64) error
	Hold(h Hold) error
	Nack(n Nack) error
}

// Service is where the tables come from. The stream ends with ctx.
type Service interface {
	Subscribe(ctx context.Context, s Subscription) (Stream, error)
}

// Sentinels that callers branch on.
var (
	// ErrNoRoom: a map of the kernel is too small; the text has the figures.
	ErrNoRoom = errors.New("no room")
	// ErrInvalid: the service sent something that makes no sense; the text
	// names the field.
	ErrInvalid = errors.New("invalid step")
	// ErrUnavailable: the tables of a subject did not come in time.
	ErrUnavailable = errors.New("unavailable")
)

// invalid names the field of a step that makes no sense.
func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{ErrInvalid}, args...)...)
}
