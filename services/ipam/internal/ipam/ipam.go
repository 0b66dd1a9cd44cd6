// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package ipam decides who holds which address of this node.
//
// Allocate gives an owner one address per family as a lease. A lease that is not confirmed in time is freed. A
// confirmed address stays until it is released; a released address is in quarantine before another owner gets it.
// Confirmed and released addresses are on stable storage before the caller gets the answer. So a process that is
// killed at any point neither forgets such an address nor gives it out twice. Leases are only in memory and end with
// the process. The address may then be leased to another owner, and only the owner with the present lease can confirm
// it.
//
// The package knows Go values and the Store that it declares. It has never
// heard of sockets, messages or files.
package ipam

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/sluice-net/sluice/model/workload"
)

// Limits and defaults.
const (
	DefaultLease      = 120 * time.Second
	DefaultQuarantine = 60 * time.Second
)

// Sentinels, for callers that branch.
var (
	// ErrExhausted: no address of a family is free. The error is an *ExhaustedError with the figures.
	ErrExhausted = errors.New("no free address")
	// ErrOtherContent: the owner holds addresses other than the requested ones.
	ErrOtherContent = errors.New("the owner holds other addresses")
	// ErrUnavailable means that a requested address is in use, in quarantine or is
	// reserved.
	ErrUnavailable = errors.New("the address is not available")
	// ErrNoPool: a requested address or family has no pool.
	ErrNoPool = errors.New("no pool")
	// ErrNoRange: the node has no range to allocate from, not yet or no longer.
	ErrNoRange = errors.New("this node has no range of addresses")
	// ErrBadRequest: a request contradicts itself. The error is a *FieldError.
	ErrBadRequest = errors.New("bad request")
	// ErrNotHeld: the owner holds nothing. It never did, or its lease has ended, by time or with the process.
	ErrNotHeld = errors.New("the owner holds no address")
	// ErrMismatch: the addresses to confirm or release differ from the owner's addresses.
	ErrMismatch = errors.New("the given addresses differ from the owner's addresses")
	// ErrBusy: too many calls are waiting. The caller may retry.
	ErrBusy = errors.New("too many calls are waiting")
	// ErrStopped: the service is stopping.
	ErrStopped = errors.New("the service is stopping")
	// ErrStore: the state could not be written; nothing was changed.
	ErrStore = errors.New("the state could not be written")
	// ErrStoreLost is returned by a Store when the content of stable storage is uncertain. The process must end and
	// read it again.
	ErrStoreLost = errors.New("the state on disk is uncertain")
	// ErrInconsistent: the stored state contradicts itself.
	ErrInconsistent = errors.New("the state contradicts itself")
)

// Family is an IP version.
type Family uint8

// The families.
const (
	IPv4 Family = 4
	IPv6 Family = 6
)

func (f Family) String() string { return fmt.Sprintf("IPv%d", uint8(f)) }

// FamilyOf is the family of an address.
func FamilyOf(a netip.Addr) Family {
	if a.Is4() {
		return IPv4
	}
	return IPv6
}

// State is where an allocation is in its life. The numbers are stored.
type State uint8

// The states.
const (
	Leased    State = 1 // freed at Expires unless it is confirmed
	Confirmed State = 2 // held until it is released
)

func (s State) String() string {
	switch s {
	case Leased:
		return "leased"
	case Confirmed:
		return "confirmed"
	}
	return fmt.Sprintf("State(%d)", uint8(s))
}

// Address is an address and the length of the prefix it was taken from.
type Address struct {
	Addr     netip.Addr
	PoolBits int
}

// Allocation holds the addresses of one owner. It is never changed, only replaced.
type Allocation struct {
	Owner     workload.Owner // one interface of one container
	Addresses []Address      // one or two, IPv4 first
	State     State
	Expires   time.Time // of a lease; zero once confirmed
	Manager   string    // who answers for it; empty: the datapath
}

// Has reports whether the owner holds an address.
func (a *Allocation) Has(addr netip.Addr) bool {
	return slices.ContainsFunc(a.Addresses, func(x Address) bool { return x.Addr == addr })
}

// List names the addresses for people.
func (a *Allocation) List() string {
	s := ""
	for i, x := range a.Addresses {
		if i > 0 {
			s += " and "
		}
		s += x.Addr.String()
	}
	return s
}

// Request is a request for addresses.
type Request struct {
	Owner        workload.Owner
	Families     []Family     // empty: every family that has a pool
	Wanted       []netip.Addr // at most one per family
	ValidateOnly bool         // answer, but lease nothing
	Manager      string       // see Allocation
}

// FieldError is an ErrBadRequest or ErrNoPool about one field of a request.
type FieldError struct {
	Field string // "families" or "requested_addresses[1]"
	Text  string
	Kind  error
}

func (e *FieldError) Error() string { return e.Field + ": " + e.Text }

// Unwrap returns the sentinel.
func (e *FieldError) Unwrap() error { return e.Kind }

// ExhaustedError is an ErrExhausted with the pools of the family.
type ExhaustedError struct {
	Family Family
	Pools  []Figures
	// Waiting are the addresses of the family that were released and may not be allocated
	// again yet, and Why is the reason.
	Waiting uint64
	Why     string
	// NextFree is the earliest time at which an address of any family becomes free by itself; zero if none will.
	NextFree time.Time
}

func (e *ExhaustedError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "no free %s address:", e.Family)
	var quarantined uint64
	for i, f := range e.Pools {
		if i > 0 {
			b.WriteByte(';')
		}
		fmt.Fprintf(&b, " pool %s has %d confirmed, %d leased, %d quarantined, %d reserved of %d", f.Prefix, f.Confirmed, f.Leased, f.Quarantined, f.Reserved, f.Size)
		quarantined += f.Quarantined
	}
	if e.Waiting > 0 {
		fmt.Fprintf(&b, "; %d released addresses may not be allocated again yet: %s", e.Waiting, e.Why)
	} else if quarantined > 0 {
		fmt.Fprintf(&b, "; only quarantined addresses are left, %d of them, try again when that ends", quarantined)
	}
	return b.String()
}

// Unwrap returns ErrExhausted.
func (e *ExhaustedError) Unwrap() error { return ErrExhausted }

// Range is a range of the node's addresses as others see it.
type Range struct {
	Prefix   netip.Prefix
	Gateway  netip.Addr // the node's own address in it
	Draining bool       // no new address is taken from it
	Primary  bool       // its gateway is the node's overlay address; at most one range of a family
}

// Refusal is a range that this node claims and, according to the cluster, does not have.
type Refusal struct {
	Prefix netip.Prefix
	Reason string // for people
	// Kept means that the node keeps the range, and allocates no new addresses from it.
	Kept bool
}

// Figures are the fill of one pool. Counts are at most 2^64 - 1.
type Figures struct {
	Prefix      netip.Prefix
	Gateway     netip.Addr
	Size        uint64
	Reserved    uint64
	Leased      uint64
	Confirmed   uint64
	Quarantined uint64
	Free        uint64 // 0 while it drains, or is refused
	Draining    bool
	Refused     string // why no new address is taken from it; empty if the cluster does not refuse it
	Primary     bool   // its gateway is the node's overlay address
}

// Serves reports whether new addresses are allocated from the pool.
func (f *Figures) Serves() bool { return !f.Draining && f.Refused == "" }

// Summary are the figures of all pools, as of the last answer.
type Summary struct {
	Pools []Figures
	// Outside counts allocated addresses that no pool allows any more: a setting reserves them now, or their range is
	// no longer a pool because it overlaps a new one.
	Outside uint64
	// Owners is the number of allocations.
	Owners uint64
	// Waiting are addresses whose quarantine is over and that other nodes may still map to an earlier endpoint; Why is
	// the reason.
	Waiting []netip.Addr
	Why     string
}

// Quarantined is an address that was released and waits.
type Quarantined struct {
	Addr  netip.Addr
	Until time.Time
}

// Contents is everything that a Store holds.
type Contents struct {
	Allocations []*Allocation // confirmed; leased only if the previous version wrote them
	Quarantined []Quarantined
	Cursors     map[netip.Prefix]netip.Addr // where the search in each pool continues
	Serving     []netip.Prefix              // as SetRanges had them last, in order of use
	Refused     []Refusal                   // as SetRefused had them last
	Primary     []netip.Prefix              // at most one of a family, IPv4 first
}

// Changes is the content of one commit. Each key appears once, with its last value.
type Changes struct {
	Allocations map[workload.Owner]*Allocation // confirmed; nil removes
	Quarantined map[netip.Addr]time.Time       // zero removes
	Cursors     map[netip.Prefix]netip.Addr
	Serving     []netip.Prefix // replaces all; nil: unchanged
	Refused     []Refusal      // replaces all; nil: unchanged
	Primary     []netip.Prefix // replaces all; nil: unchanged
}

// Empty reports whether there is nothing to write.
func (c *Changes) Empty() bool {
	return len(c.Allocations)+len(c.Quarantined)+len(c.Cursors) == 0 &&
		c.Serving == nil && c.Refused == nil && c.Primary == nil
}

// Store keeps the state. It is used by one goroutine at a time, but for Size.
type Store interface {
	// Load reads everything.
	Load() (*Contents, error)
	// Commit makes all changes durable, or none, before it returns. After an error the caller must load again, because
	// it is uncertain whether they were written; after ErrStoreLost it must stop. Empty changes test whether the store
	// takes changes, which it does not while the disk is full.
	Commit(*Changes) error
	// Size is how many bytes the state takes.
	Size() int64
}
