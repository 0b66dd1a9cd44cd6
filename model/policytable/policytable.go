// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package policytable has the types in which the policy service and the datapath exchange
// compiled policy: what a table consists of, and the steps by which tables change.
//
// A table evaluates one direction of one subject. It has rules, numbered from 1, and classes
// of peers. A class says for each protocol and port which rules decide. A peer has two
// classes: one by its identity and one by its address. Of the rules that both name, the one
// with the lower number decides.
//
// proto/wire converts the types to the messages of sluice.policy.v1 and back.
package policytable

import (
	"net/netip"

	"github.com/sluice-net/sluice/model/identity"
)

// Direction is the side of a connection that a rule or a table evaluates.
type Direction uint8

// The directions.
const (
	Ingress Direction = iota // what the subject receives
	Egress                   // what the subject sends
)

// Directions is the number of directions.
const Directions = 2

// String is the lower-case name.
func (d Direction) String() string {
	if d == Egress {
		return "egress"
	}
	return "ingress"
}

// Tier orders groups of rules. What no rule decides falls to the defaults of the table,
// which are flags and not a tier.
type Tier uint8

// The tiers in the order in which they are evaluated. Isolation holds only the rule that a
// NetworkPolicy implies: it follows what the owner of the namespace wrote, and Baseline does
// not decide what it denies.
const (
	Admin Tier = iota
	Normal
	Isolation
	Baseline
)

// String is the name the tier has in messages.
func (t Tier) String() string {
	return [...]string{"Admin", "Normal", "Isolation", "Baseline"}[t]
}

// Action is what a rule does with a connection, or what a table says about it. The values
// are in the order in which equal rules are evaluated, and those of enum sl_action.
type Action uint8

// The actions.
const (
	Deny Action = iota
	Redirect
	Allow
	Pass // leaves the decision to the next tier; only of rules
)

// String is the lower-case name.
func (a Action) String() string {
	return [...]string{"deny", "redirect", "allow", "pass"}[a]
}

// Proxy is the kind of proxy that a redirect leads to.
type Proxy uint16

// The proxies, in the order in which they are preferred.
const (
	NoProxy Proxy = iota
	ProxyDNS
	ProxyHTTP
	ProxyTLS
	ProxyListener
)

// String names the proxy for messages.
func (p Proxy) String() string {
	return [...]string{"none", "dns", "http", "tls", "listener"}[p]
}

// Source says where a rule was written.
type Source struct {
	Kind      string // as in the manifest
	Namespace string // empty for policies without one
	Name      string
	Path      string // such as spec.egress[2].toPorts[0]
}

// Policy is the policy of the source: "Kind namespace/name".
func (s Source) Policy() string {
	if s.Namespace == "" {
		return s.Kind + " " + s.Name
	}
	return s.Kind + " " + s.Namespace + "/" + s.Name
}

// String is the policy and the path in it.
func (s Source) String() string {
	if s.Path == "" {
		return s.Policy()
	}
	return s.Policy() + " " + s.Path
}

// Rule is what a table says of one of its rules.
type Rule struct {
	Action Action
	Tier   Tier
	Proxy  Proxy // of a redirect, else NoProxy
}

// ID numbers the tables of one run of the policy service. It is never used twice.
type ID uint64

// AllowAll is the table of directions in which nothing is enforced. It is never defined.
const AllowAll ID = 0

// IdentityClass numbers the peers that match the same selectors. 0 is none.
type IdentityClass uint32

// ClassKey is the name of an identity class that every run of the policy service gives it.
// The zero key belongs to no class.
type ClassKey [16]byte

// Class is the index of a class of peers in its table.
type Class = uint16

// PrefixClasses are the classes of the addresses in a prefix, by identity.PeerScope.
type PrefixClasses = [identity.PeerScopes]Class

// Table is a table without its rows.
type Table struct {
	// Hash names the rules, the classes that the table has at first, and the defaults. Two
	// tables with one hash differ in rows, prefixes and later classes only. It is not zero.
	Hash         [32]byte
	DefaultAllow bool // what no rule decides is allowed
	HostAllow    bool // what no rule decides is allowed for the local host
	HasAddresses bool // the class by address is evaluated
	// DefaultClasses are those of peers without a row, by identity.Kind.
	DefaultClasses [identity.Kinds]Class
	// AddressClasses are those of addresses in no prefix.
	AddressClasses PrefixClasses
	Rules          []Rule // number 1 first
	Classes        []Ranges
	Prefixes       map[netip.Prefix]PrefixClasses
}

// Row leads from an identity class to a class of the table.
type Row struct {
	IdentityClass IdentityClass
	Class         Class
}
