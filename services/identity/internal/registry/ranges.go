// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package registry

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/sluice-net/sluice/kit/fault"
	"github.com/sluice-net/sluice/services/identity/internal/cluster"
)

// Errors of claims.
var (
	// ErrIPAMDiffers: the cluster has other ipam settings than the node, so the node gets no further range.
	ErrIPAMDiffers = errors.New("the node's ipam settings differ from the cluster's")
	// ErrNoFreeRange: no block of the pool is free. It is always a *FullError.
	ErrNoFreeRange = errors.New("no block of the cluster's pool is free")
	// ErrMaxRanges: the node has as many blocks of a family as the settings allow.
	ErrMaxRanges = errors.New("the node has its maximum number of blocks of the cluster's pool")
	// ErrLastRange: a node cannot return its last block of a family.
	ErrLastRange = errors.New("the node's last block of a family is not returned")
)

// Places where a test may interfere with a registration, a publication, a claim or
// a return.
var (
	faultRegisterStart  = fault.Register("identity/register/before-save")
	faultRegisterSaved  = fault.Register("identity/register/before-answer")
	faultRecordStart    = fault.Register("identity/register/before-txn")
	faultRecordWritten  = fault.Register("identity/register/after-txn")
	faultPublishStart   = fault.Register("identity/publish/before-txn")
	faultPublishWritten = fault.Register("identity/publish/after-txn")
	faultClaimStart     = fault.Register("identity/claim/before-txn")
	faultClaimWritten   = fault.Register("identity/claim/after-txn")
	faultClaimDurable   = fault.Register("identity/claim/before-answer")
	faultReturnStart    = fault.Register("identity/return/before-save")
	faultReturnDurable  = fault.Register("identity/return/before-txn")
	faultReturnWritten  = fault.Register("identity/return/before-answer")
	errNoPool           = errors.New("the mode has no pool")
	errBlockAndNoPrefix = errors.New("there is no prefix of that family")
)

// IPAMMode is the source of the ranges of all nodes.
type IPAMMode string

// Modes.
const (
	IPAMUnset      IPAMMode = ""
	IPAMStatic     IPAMMode = "static"
	IPAMKubernetes IPAMMode = "kubernetes"
	IPAMPool       IPAMMode = "pool"
)

// IPAM contains the settings of ranges that all nodes of a cluster agree on.
type IPAM struct {
	Mode      IPAMMode       `json:"mode"`
	Pool      []netip.Prefix `json:"pool,omitempty"`      // sorted; the prefixes that blocks are taken from
	IPv4Block int            `json:"ipv4Block,omitempty"` // prefix length of IPv4 blocks
	IPv6Block int            `json:"ipv6Block,omitempty"` // of IPv6 blocks
	MaxBlocks int            `json:"maxBlocks,omitempty"` // maximum number of blocks of a family that a node may have
	// Former are settings that the cluster had before; they are not compared.
	Former []FormerIPAM `json:"former,omitempty"`
}

// Equal reports whether the settings are equal, apart from the former ones.
func (s IPAM) Equal(t IPAM) bool {
	return s.Mode == t.Mode && slices.Equal(s.Pool, t.Pool) && s.IPv4Block == t.IPv4Block &&
		s.IPv6Block == t.IPv6Block && s.MaxBlocks == t.MaxBlocks
}

// String describes the settings for messages.
func (s IPAM) String() string {
	out := "mode " + string(s.Mode)
	if len(s.Pool) == 0 {
		return out
	}
	of := "in blocks of"
	if s.Mode != IPAMPool {
		of = "in ranges of at most"
	}
	var pool []string
	for _, p := range s.Pool {
		pool = append(pool, fmt.Sprintf("%s %s /%d", p, of, s.bits(p.Addr().Is6())))
	}
	out += " with " + strings.Join(pool, " and ")
	if s.MaxBlocks != 0 {
		out += fmt.Sprintf(", %d for a node", s.MaxBlocks)
	}
	return out
}

// maxBlockBits is the largest number of bits by which a block is longer than its prefix, so that the number of blocks
// fits a counter.
const maxBlockBits = 32

// Check validates settings. It returns the name of the API field with the error.
func (s IPAM) Check() (field string, err error) {
	if s.Mode != IPAMPool && (s.Mode != IPAMStatic || len(s.Pool) == 0) {
		if len(s.Pool) > 0 || s.IPv4Block != 0 || s.IPv6Block != 0 || s.MaxBlocks != 0 {
			return "mode", fmt.Errorf("%w: %s", errNoPool, s.Mode)
		}
		return "", nil
	}
	if len(s.Pool) == 0 {
		return "pool_prefixes", errors.New("a pool needs a prefix")
	}
	if s.MaxBlocks < 1 {
		return "max_blocks", fmt.Errorf("%d is less than 1", s.MaxBlocks)
	}
	for i, p := range s.Pool {
		name := fmt.Sprintf("pool_prefixes[%d]", i)
		if bits := s.bits(p.Addr().Is6()); bits < p.Bits() || bits > p.Bits()+maxBlockBits ||
			bits > p.Addr().BitLen()-2 {
			return name,
				fmt.Errorf("%s has no blocks of /%d: they are at most %d bits longer, and at least of 4 addresses", p,
					bits, maxBlockBits)
		}
		for _, q := range s.Pool[:i] {
			if p.Overlaps(q) {
				return name, fmt.Errorf("%s overlaps %s", p, q)
			}
		}
	}
	for field, block := range map[string]struct {
		ipv6 bool
		bits int
	}{"ipv4_block_length": {false, s.IPv4Block}, "ipv6_block_length": {true, s.IPv6Block}} {
		if block.bits != 0 && s.Blocks(block.ipv6) == 0 {
			return field, errBlockAndNoPrefix
		}
	}
	return "", nil
}

func (s IPAM) bits(ipv6 bool) int {
	if ipv6 {
		return s.IPv6Block
	}
	return s.IPv4Block
}

// Blocks returns the number of blocks of a family in the pool.
func (s IPAM) Blocks(ipv6 bool) (n uint64) {
	for _, p := range s.Pool {
		if p.Addr().Is6() == ipv6 {
			n += 1 << (s.bits(ipv6) - p.Bits())
		}
	}
	return n
}

// Block returns the i-th block of a family, i below Blocks.
func (s IPAM) Block(ipv6 bool, i uint64) netip.Prefix {
	for _, p := range s.Pool {
		if p.Addr().Is6() != ipv6 {
			continue
		}
		bits := s.bits(ipv6)
		if n := uint64(1) << (bits - p.Bits()); i >= n {
			i -= n
			continue
		}
		// Write i to the address bits before the length of the block.
		a := p.Addr().AsSlice()
		for bit := bits - 1; bit >= p.Bits(); bit-- {
			a[bit/8] |= byte(i&1) << (7 - bit%8)
			i >>= 1
		}
		addr, _ := netip.AddrFromSlice(a)
		return netip.PrefixFrom(addr, bits)
	}
	panic(fmt.Sprintf("the pool has no block %d", i))
}

// Has reports whether a range is a block of a family of the pool.
func (s IPAM) Has(ipv6 bool, p netip.Prefix) bool {
	return p.Addr().Is6() == ipv6 && p.Bits() == s.bits(ipv6) &&
		slices.ContainsFunc(s.Pool, func(q netip.Prefix) bool { return q.Bits() <= p.Bits() && q.Contains(p.Addr()) })
}

// Within reports whether a range is inside a prefix of the settings and is not larger than a block.
func (s IPAM) Within(p netip.Prefix) bool {
	return p.Bits() >= s.bits(p.Addr().Is6()) && slices.ContainsFunc(s.Pool, func(q netip.Prefix) bool {
		return q.Bits() <= p.Bits() && q.Contains(p.Addr())
	})
}

// FullError is an ErrNoFreeRange with the figures of the pool.
type FullError struct {
	IPAM    IPAM
	IPv6    bool
	Blocks  uint64 // of the family
	Held    int    // that nodes have
	Resting int    // blocks that no node has, but that are in quarantine for other nodes
}

func (e *FullError) Error() string {
	return fmt.Sprintf("%v: %s", ErrNoFreeRange, e.Figures())
}

// Figures describes the pool and the use of its blocks.
func (e *FullError) Figures() string {
	var pool []string
	for _, p := range e.IPAM.Pool {
		if p.Addr().Is6() == e.IPv6 {
			pool = append(pool, p.String())
		}
	}
	return fmt.Sprintf("%s has %d blocks of /%d, of which nodes have %d and %d are in quarantine; give the pool another prefix, or forget nodes that are gone for good",
		strings.Join(pool, " and "), e.Blocks, e.IPAM.bits(e.IPv6), e.Held, e.Resting)
}

// Unwrap returns ErrNoFreeRange.
func (e *FullError) Unwrap() error { return ErrNoFreeRange }

// RangeClaim is a request for a block.
type RangeClaim struct {
	Record   Record // the record of this node, as it is in the store
	Revision int64  // of that record
	IPAM     IPAM
	IPv6     bool
	Cluster  Ranges
}

// ClaimRange claims a block of the cluster's pool for this node. If the node already has a block that is not among the
// known ones, the response to an earlier call was lost, and ClaimRange returns that block.
func (r *Registry) ClaimRange(ctx context.Context, settings IPAM, ipv6 bool, known []netip.Prefix) (netip.Prefix,
	error,
) {
	ctx, cancel := context.WithTimeout(ctx, r.cfg.Timeout)
	defer cancel()
	if err := r.lockStore(ctx); err != nil {
		return netip.Prefix{}, err
	}
	defer r.unlockStore()
	if err := faultClaimStart.Hit(ctx); err != nil {
		return netip.Prefix{}, fmt.Errorf("%w: %w", ErrRecords, err)
	}
	if err := r.said(ctx, settings, known); err != nil {
		return netip.Prefix{}, err
	}
	for try := range maxClaims {
		// This process's copy of the store may lack the node's last write.
		if err := wait(ctx, time.Duration(try*try)*claimPause); err != nil {
			return netip.Prefix{}, fmt.Errorf("claim a block: %w: %w", cluster.ErrUnavailable, ErrForgotten)
		}
		record, revision, err := r.registered(ctx)
		if errors.Is(err, ErrForgotten) {
			continue
		}
		if err != nil {
			return netip.Prefix{}, err
		}
		claim := RangeClaim{
			Record: record, Revision: revision, IPAM: settings, IPv6: ipv6, Cluster: knownRanges{r},
		}
		p, again := unknown(claim, known)
		if !again {
			p, revision, err = r.store.ClaimRange(ctx, claim)
		}
		if again || errors.Is(err, ErrForgotten) {
			// Read from the store whether an earlier claim was written.
			if claim.Record, revision, err = r.store.Own(ctx); err == nil {
				p, again = unknown(claim, known)
				if again = again && claim.Record.Incarnation == r.cfg.Incarnation; !again {
					r.mu.Lock()
					r.refresh()
					r.mu.Unlock()
					continue
				}
			}
		}
		if err != nil {
			return netip.Prefix{}, fmt.Errorf("claim a block: %w", err)
		}
		if err := faultClaimWritten.Hit(ctx); err != nil {
			return netip.Prefix{}, fmt.Errorf("%w: %w", ErrRecords, err)
		}
		if !again {
			claim.Record.Ranges = sorted(append(slices.Clone(record.Ranges), p))
		}
		if err := r.noteClaimed(p, claim.Record, revision); err != nil {
			return netip.Prefix{}, err
		}
		if err := faultClaimDurable.Hit(ctx); err != nil {
			return netip.Prefix{}, fmt.Errorf("%w: %w", ErrRecords, err)
		}
		r.cfg.Log.Info("this node has a block of the cluster's pool", "range", p, "again", again)
		return p, nil
	}
	return netip.Prefix{}, fmt.Errorf("claim a block: %w: %w", cluster.ErrUnavailable, ErrForgotten)
}

// unknown returns a block of the record, in the pool and family of the claim, that is not among the known ones.
func unknown(c RangeClaim, known []netip.Prefix) (netip.Prefix, bool) {
	for _, p := range c.Record.Ranges {
		if c.IPAM.Has(c.IPv6, p) && !slices.Contains(known, p) {
			return p, true
		}
	}
	return netip.Prefix{}, false
}

// ValidateClaim checks whether a claim with these settings would be accepted, without claiming.
func (r *Registry) ValidateClaim(ctx context.Context, settings IPAM) error {
	ctx, cancel := context.WithTimeout(ctx, r.cfg.Timeout)
	defer cancel()
	return r.store.Agrees(ctx, settings)
}

// maxClaims is the number of attempts of a claim, which fails if this process's copy of the node's record or of the
// ranges is outdated. The n-th attempt waits n² claimPauses first.
const (
	maxClaims  = 6
	claimPause = 10 * time.Millisecond
)

// wait waits for a time, or until ctx ends.
func wait(ctx context.Context, d time.Duration) error {
	if d == 0 {
		return nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// registered returns the record of this node in the store, after writing it if necessary.
func (r *Registry) registered(ctx context.Context) (Record, int64, error) {
	if err := r.writeRecord(ctx); err != nil {
		return Record{}, 0, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.revision == 0 { // the registration changed meanwhile
		return Record{}, 0, ErrForgotten
	}
	return r.record, r.revision, nil
}

// said registers the settings of a claim. If the node is not registered yet, it also registers the known ranges.
func (r *Registry) said(ctx context.Context, settings IPAM, known []netip.Prefix) error {
	r.mu.Lock()
	var ranges *[]netip.Prefix
	if r.registration.Ranges == nil {
		ranges = &known
	}
	r.mu.Unlock()
	_, _, err := r.Register(ctx, Registration{Ranges: ranges, IPAM: &settings}, false)
	return err
}

// noteClaimed adds a block to this node's registration. If that fails, the next registration returns the block.
func (r *Registry) noteClaimed(p netip.Prefix, record Record, revision int64) error {
	r.registering.Lock()
	defer r.registering.Unlock()
	r.mu.Lock()
	next, said := r.registration, r.revision == 0 // the registration changed meanwhile
	r.revision = 0
	r.mu.Unlock()
	if !slices.Contains(*next.Ranges, p) {
		ranges := append(slices.Clone(*next.Ranges), p)
		next = next.with(Registration{Ranges: &ranges})
		if err := r.records.SaveRegistration(next); err != nil {
			r.kick()
			return fmt.Errorf("%w: %w", ErrRecords, err)
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.registration = next
	if said {
		r.kick()
		return nil
	}
	r.record, r.revision = record, revision
	return nil
}

// ReturnRange puts a block of this node into quarantine. It returns false if the node does not have the block. The
// block is removed from this node's registration before it is removed from the store.
func (r *Registry) ReturnRange(ctx context.Context, p netip.Prefix, validateOnly bool) (returned bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, r.cfg.Timeout)
	defer cancel()
	if err := r.lockStore(ctx); err != nil {
		return false, err
	}
	defer r.unlockStore()
	if err := r.writeRecord(ctx); err != nil {
		return false, err
	}
	r.mu.Lock()
	have, known := r.record.Ranges, r.revision != 0
	r.mu.Unlock()
	if !known {
		return false, fmt.Errorf("return a block: %w: this node is not registered yet", cluster.ErrUnavailable)
	}
	others := slices.DeleteFunc(slices.Clone(have), func(q netip.Prefix) bool {
		return p == q ||
			p.Addr().Is6() != q.Addr().Is6()
	})
	returned = slices.Contains(have, p)
	if returned && len(others) == 0 {
		return false, fmt.Errorf("%w: %s", ErrLastRange, p)
	}
	if validateOnly {
		return returned, nil
	}
	for _, step := range []func() error{
		func() error { return faultReturnStart.Hit(ctx) },
		func() error { return r.forgetRange(p) },
		func() error { return faultReturnDurable.Hit(ctx) },
	} {
		if err := step(); err != nil {
			return false, fmt.Errorf("%w: %w", ErrRecords, err)
		}
	}
	if err := r.writeRecord(ctx); err != nil {
		return false, err
	}
	if err := faultReturnWritten.Hit(ctx); err != nil {
		return false, fmt.Errorf("%w: %w", ErrRecords, err)
	}
	if returned {
		r.cfg.Log.Info("returning a block of this node to the cluster's pool", "range", p)
	}
	return returned, nil
}

// forgetRange removes a range from this node's registration.
func (r *Registry) forgetRange(p netip.Prefix) error {
	r.registering.Lock()
	defer r.registering.Unlock()
	r.mu.Lock()
	last := r.registration
	r.mu.Unlock()
	if last.Ranges == nil || !slices.Contains(*last.Ranges, p) {
		return nil
	}
	ranges := slices.DeleteFunc(slices.Clone(*last.Ranges), func(q netip.Prefix) bool { return p == q })
	next := last.with(Registration{Ranges: &ranges})
	if err := r.records.SaveRegistration(next); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.registration, r.revision = next, 0
	r.kick() // if the caller does not write the record, Run does
	return nil
}

// lockStore serialises writes of the record and of data that depends on it.
func (r *Registry) lockStore(ctx context.Context) error {
	select {
	case r.storing <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (r *Registry) unlockStore() { <-r.storing }
