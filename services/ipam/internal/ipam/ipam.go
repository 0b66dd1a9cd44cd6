// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package ipam allocates the addresses of this node to owners.
//
// Allocate gives an owner one address per family as a lease. A lease that is not confirmed in time is freed. A
// confirmed address stays until it is released; a released address is in quarantine before another owner gets it.
// Confirmed and released addresses are on stable storage before the caller gets the answer. So a process that is killed
// at any point neither loses such an address nor allocates it twice. Leases exist only in memory and end with the
// process. Their addresses may then be leased to other owners, and only the owner of the current lease can confirm an
// address.
//
// The package depends only on the Store that it declares, and not on sockets, messages or files.
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

// Errors that callers branch on.
var (
	// ErrExhausted: no address of a family is free. The error is an *ExhaustedError with the figures.
	ErrExhausted = errors.New("no free address")
	// ErrOtherContent: the addresses of the owner differ from the requested ones.
	ErrOtherContent = errors.New("the owner holds other addresses")
	// ErrUnavailable means that a requested address is in use, in quarantine or is
	// reserved.
	ErrUnavailable = errors.New("the address is not available")
	// ErrNoPool: a requested address or family has no pool.
	ErrNoPool = errors.New("no pool")
	// ErrNoRange: the node has no range to allocate from, either not yet or no longer.
	ErrNoRange = errors.New("this node has no range of addresses")
	// ErrBadRequest: a request contradicts itself. The error is a *FieldError.
	ErrBadRequest = errors.New("bad request")
	// ErrNotHeld: the owner has no addresses. It never had any, or its lease has expired or has ended with the
	// process.
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
	ErrInconsistent = errors.New("the stored state is inconsistent")
)

// Family is an IP version.
type Family uint8

// The families.
const (
	IPv4 Family = 4
	IPv6 Family = 6
)

func (f Family) String() string { return fmt.Sprintf("IPv%d", uint8(f)) }

// FamilyOf returns the family of an address.
func FamilyOf(a netip.Addr) Family {
	if a.Is4() {
		return IPv4
	}
	return IPv6
}

// State is the state of an allocation. The numbers are stored.
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

// Address is an address, and the length of the prefix from which it was allocated.
type Address struct {
	Addr     netip.Addr
	PoolBits int
}

// Allocation holds the addresses of one owner. It is never changed, only replaced.
type Allocation struct {
	Owner     workload.Owner // one interface of one container
	Addresses []Address      // one or two, IPv4 first
	State     State
	Expires   time.Time // end of the lease; zero once confirmed
	Manager   string    // the program that manages the allocation; empty: the datapath
}

// Has reports whether the owner holds an address.
func (a *Allocation) Has(addr netip.Addr) bool {
	return slices.ContainsFunc(a.Addresses, func(x Address) bool { return x.Addr == addr })
}

// List returns the addresses as text.
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
	ValidateOnly bool         // return the result, but create no lease
	Manager      string       // see Allocation
	Namespace    string       // namespace of the pod; empty: the owner is not a pod
}

// FieldError is an error about one field of a request. It wraps ErrBadRequest or ErrNoPool.
type FieldError struct {
	Field string // "families" or "requested_addresses[1]"
	Text  string
	Kind  error
}

func (e *FieldError) Error() string { return e.Field + ": " + e.Text }

// Unwrap returns ErrBadRequest or ErrNoPool.
func (e *FieldError) Unwrap() error { return e.Kind }

// ExhaustedError wraps ErrExhausted and contains the figures of the family's pools.
type ExhaustedError struct {
	Family Family
	Pools  []Figures
	// Waiting is the number of released addresses of the family that may not be allocated again yet, and Why is the
	// reason.
	Waiting uint64
	Why     string
	// NextFree is the earliest time at which an address of any family becomes free without a release; zero if there
	// is no such time.
	NextFree time.Time
	// Namespace is set if free addresses are left, which are reserved for other namespaces: Quarantined released
	// addresses count for this one.
	Namespace   string
	Quarantined uint64
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
	if e.Namespace != "" {
		fmt.Fprintf(&b, "; the free addresses are reserved for other namespaces, because %d released addresses in "+
			"quarantine count for the namespace %s", e.Quarantined, e.Namespace)
	}
	if e.Waiting > 0 {
		fmt.Fprintf(&b, "; %d released addresses may not be allocated again yet: %s", e.Waiting, e.Why)
	} else if quarantined > 0 && e.Namespace == "" {
		fmt.Fprintf(&b, "; only quarantined addresses are left, %d of them, try again when that ends", quarantined)
	}
	return b.String()
}

// Unwrap returns ErrExhausted.
func (e *ExhaustedError) Unwrap() error { return ErrExhausted }

// Range is a range of the node's addresses, as WatchPools describes it.
type Range struct {
	Prefix   netip.Prefix
	Gateway  netip.Addr // the node's own address in the range
	Draining bool       // no new address is allocated from it
	Primary  bool       // its gateway is the node's overlay address; set for at most one range of a family
}

// Refusal is a range that this node claims although it does not belong to the node according to the cluster.
type Refusal struct {
	Prefix netip.Prefix
	Reason string // for people
	// Kept means that the node keeps the range, but allocates no new addresses from it.
	Kept bool
}

// Figures contains the usage of one pool. Counts are at most 2^64 - 1.
type Figures struct {
	Prefix      netip.Prefix
	Gateway     netip.Addr
	Size        uint64
	Reserved    uint64
	Leased      uint64
	Confirmed   uint64
	Quarantined uint64
	Free        uint64 // 0 while the pool drains or is refused
	Draining    bool
	// why the cluster refuses it, so that no new address is allocated from it; empty if it does not
	Refused string
	Primary bool // its gateway is the node's overlay address
}

// Serves reports whether new addresses are allocated from the pool.
func (f *Figures) Serves() bool { return !f.Draining && f.Refused == "" }

// Summary contains the figures of all pools at the time of the last answer.
type Summary struct {
	Pools []Figures
	// Outside counts allocated addresses that no pool allows any more: a setting now reserves them, or their former
	// range overlaps a new one.
	Outside uint64
	// Owners is the number of allocations.
	Owners uint64
	// Waiting contains the addresses whose quarantine is over, but which other nodes may still map to an earlier
	// endpoint. Why is the reason for which they wait.
	Waiting []netip.Addr
	Why     string
}

// Quarantined is a released address, and when its quarantine ends.
type Quarantined struct {
	Addr  netip.Addr
	Until time.Time
}

// Contents is the complete content of a Store.
type Contents struct {
	Allocations []*Allocation // confirmed; the previous version also wrote leased ones
	Quarantined []Quarantined
	Cursors     map[netip.Prefix]netip.Addr // where the search for a free address continues in each pool
	Serving     []netip.Prefix              // argument of the last SetRanges, in order of use
	Refused     []Refusal                   // argument of the last SetRefused
	Primary     []netip.Prefix              // at most one per family, IPv4 first
}

// Changes is the content of one commit. Each key appears once, with its last value.
type Changes struct {
	Allocations map[workload.Owner]*Allocation // confirmed; nil removes
	Quarantined map[netip.Addr]time.Time       // a zero time removes the address
	Cursors     map[netip.Prefix]netip.Addr
	Serving     []netip.Prefix // replaces the whole list; nil: unchanged
	Refused     []Refusal      // replaces the whole list; nil: unchanged
	Primary     []netip.Prefix // replaces the whole list; nil: unchanged
}

// Empty reports whether there is nothing to write.
func (c *Changes) Empty() bool {
	return len(c.Allocations)+len(c.Quarantined)+len(c.Cursors) == 0 &&
		c.Serving == nil && c.Refused == nil && c.Primary == nil
}

// Store stores the state. It is used by one goroutine at a time, except for Size.
type Store interface {
	// Load reads everything.
	Load() (*Contents, error)
	// Commit makes all changes durable, or none, before it returns. After an error, the caller must call Load
	// again, because it is unknown whether the changes were written. After ErrStoreLost, it must end the process. A
	// commit of empty changes tests whether the store accepts changes, which it does not while the disk is full.
	Commit(*Changes) error
	// Size returns the size of the stored state in bytes.
	Size() int64
}
