// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package policytable defines the types in which the policy service sends compiled policy to the datapath: tables,
// and the steps that change them.
//
// A table evaluates one direction of one subject. It has rules, numbered from 1, and classes of peers. For each
// protocol and port, a class determines which rules apply. A peer has two classes: one by its identity and one by its
// address. If a rule applies in both classes, the rule with the lower number decides.
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
	Ingress Direction = iota // connections to the subject
	Egress                   // connections from the subject
)

// Directions is the number of directions.
const Directions = 2

// String returns the lower-case name.
func (d Direction) String() string {
	if d == Egress {
		return "egress"
	}
	return "ingress"
}

// Tier orders groups of rules. If no rule decides, the defaults of the table apply; they are flags, not a tier.
type Tier uint8

// The tiers in the order of evaluation. Isolation holds only the deny rule that a NetworkPolicy implies: it comes
// after the rules of the namespace's owner, and before Baseline, which cannot override it.
const (
	Admin Tier = iota
	Normal
	Isolation
	Baseline
)

// String returns the name of the tier in messages.
func (t Tier) String() string {
	return [...]string{"Admin", "Normal", "Isolation", "Baseline"}[t]
}

// Action is the effect of a rule on a connection, or the verdict of a table. The order of the values is the order in
// which equal rules are evaluated. enum sl_action has the same values.
type Action uint8

// The actions.
const (
	Deny Action = iota
	Redirect
	Allow
	Pass // leaves the decision to the next tier; never a verdict
)

// String returns the lower-case name.
func (a Action) String() string {
	return [...]string{"deny", "redirect", "allow", "pass"}[a]
}

// Proxy is the kind of proxy that a redirect rule sends connections to.
type Proxy uint16

// The proxies in order of preference.
const (
	NoProxy Proxy = iota
	ProxyDNS
	ProxyHTTP
	ProxyTLS
	ProxyListener
)

// String returns the name of the proxy in messages.
func (p Proxy) String() string {
	return [...]string{"none", "dns", "http", "tls", "listener"}[p]
}

// Source is the source location of a rule.
type Source struct {
	Kind      string // as in the manifest
	Namespace string // empty for cluster-wide policies
	Name      string
	Path      string // such as spec.egress[2].toPorts[0]
}

// Policy returns the policy of the source: "Kind namespace/name".
func (s Source) Policy() string {
	if s.Namespace == "" {
		return s.Kind + " " + s.Name
	}
	return s.Kind + " " + s.Namespace + "/" + s.Name
}

// String returns the policy and the path in it.
func (s Source) String() string {
	if s.Path == "" {
		return s.Policy()
	}
	return s.Policy() + " " + s.Path
}

// Rule is one rule of a table.
type Rule struct {
	Action Action
	Tier   Tier
	Proxy  Proxy // NoProxy unless Action is Redirect
	// RuleSet is the number of the set of layer 7 rules that the proxy evaluates. A redirect rule with 0 must drop its
	// packets: a proxy understands 0 as a side that redirects nothing. It is 0 unless Action is Redirect.
	RuleSet RuleSet
	// PassesWithoutProxy is set if the packets of a redirect with a RuleSet pass while the proxy does not run.
	PassesWithoutProxy bool
}

// RuleSet numbers the sets of layer 7 rules of a node. The same content has the same number as long as a table uses it,
// in every run of the policy service.
type RuleSet uint16

// ID numbers the tables of one run of the policy service. Numbers are not reused.
type ID uint64

// AllowAll is the ID for directions without enforcement. No table has it.
const AllowAll ID = 0

// IdentityClass numbers the identity classes; 0 means no class. An identity class is a set of peers that match the
// same selectors.
type IdentityClass uint32

// ClassKey identifies an identity class across runs of the policy service. No class has the zero key.
type ClassKey [16]byte

// Class is the index of a peer class in its table.
type Class = uint16

// PrefixClasses holds the classes of the addresses in a prefix, indexed by identity.PeerScope.
type PrefixClasses = [identity.PeerScopes]Class

// Table is a table without its rows.
type Table struct {
	// Hash covers the rules, the initial classes and the defaults. Two tables with the same hash can differ only in
	// rows, prefixes and appended classes. It is never zero.
	Hash         [32]byte
	DefaultAllow bool // allow if no rule decides
	HostAllow    bool // allow the local host if no rule decides
	HasAddresses bool // peers also have a class by address
	// DefaultClasses are the classes of peers without a row, indexed by identity.Kind.
	DefaultClasses [identity.Kinds]Class
	// AddressClasses are the classes of addresses that no prefix contains.
	AddressClasses PrefixClasses
	Rules          []Rule // starting with number 1
	Classes        []Ranges
	Prefixes       map[netip.Prefix]PrefixClasses
}

// Row maps an identity class to a peer class of the table.
type Row struct {
	IdentityClass IdentityClass
	Class         Class
}
