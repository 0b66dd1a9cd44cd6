// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package count is the Go side of sl_count: counters for bounds that endpoints and senders share. Programs add
// to them when they create an entry; collectors correct them.
package count

import (
	"cmp"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"sync/atomic"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// Cells of sl_count, as in service_abi.h.
const (
	cellSeed     = 0
	cellTime     = 2
	cellForget   = 3
	cellBackends = 8
	// Backends and Senders are the numbers of cells for each.
	Backends    = 8192
	cellSenders = cellBackends + Backends
	Senders     = 16384
	cellProven  = cellSenders + Senders
	cellBuckets = cellProven + 8
	// Buckets is the number of sender buckets per family.
	Buckets = 1024
	// Cells is the number of cells that count; the bitmaps of ports follow.
	Cells = cellBuckets + 2*Buckets
)

// Ports is a kind of record with a bitmap of ports in sl_count. Programs skip the lookup for a port whose bit
// is 0.
type Ports uint32

// Kinds of records. Each has a bitmap of ports: answers of services, by the backend's port; requests of pods to the
// host, by the host's port; and copies of claims, by the node's port.
const (
	Answered Ports = Cells
	Asked          = Answered + portCells
	Claimed        = Asked + portCells

	portCells = 65536 / 32
)

// IsOfPorts reports whether a cell counts ports of the node.
func IsOfPorts(at uint32) bool { return at >= cellBackends && at < cellProven }

// Counts are the counters. Their methods may be called concurrently.
type Counts struct {
	memory []byte
	seed   uint64
}

// Open returns the counters in the given maps. The first process that may write draws the seed of the hashes,
// which stays as long as the map.
func Open(pm *pin.Maps) (*Counts, error) {
	c := &Counts{memory: pm.Memory(bpf.MapsMapSlCount)}
	if !pm.ValidateOnly && atomic.LoadUint64(pin.Word(c.memory, cellSeed)) == 0 {
		var b [8]byte
		if _, err := rand.Read(b[:]); err != nil {
			return nil, fmt.Errorf("generate the seed of shares: %w", err)
		}
		low := uint64(binary.NativeEndian.Uint32(b[:4]))
		high := uint64(binary.NativeEndian.Uint32(b[4:]))
		atomic.StoreUint32(c.cell(cellSeed), uint32(low)|1)
		atomic.StoreUint32(c.cell(cellSeed+1), uint32(high))
	}
	c.seed = uint64(c.Get(cellSeed+1))<<32 | uint64(c.Get(cellSeed))
	return c, nil
}

// KeepPort sets the bit of a port for a kind of records.
func (c *Counts) KeepPort(kind Ports, port uint16) {
	atomic.OrUint32(c.cell(uint32(kind)+uint32(port)/32), 1<<(port%32))
}

// Forgetting reports whether the removal of direct connections to new frontends was begun and not finished, perhaps by
// an earlier process.
func (c *Counts) Forgetting() bool { return c.Get(cellForget) != 0 }

// SetForgetting stores for the next process whether direct connections to new frontends are being removed.
func (c *Counts) SetForgetting(on bool) {
	n := uint32(0)
	if on {
		n = 1
	}
	atomic.StoreUint32(c.cell(cellForget), n)
}

func (c *Counts) cell(at uint32) *uint32 { return pin.Word32(c.memory, int(at)*4) }

// Get reads a counter.
func (c *Counts) Get(at uint32) uint32 { return atomic.LoadUint32(c.cell(at)) }

// Add changes a counter; concurrent additions by programs are kept.
func (c *Counts) Add(at, n uint32) { atomic.AddUint32(c.cell(at), n) }

// Recounted stores for the programs when a collector last counted, in seconds of CLOCK_MONOTONIC.
func (c *Counts) Recounted(now uint32) { atomic.StoreUint32(c.cell(cellTime), now) }

// Sender returns the number of an outside sender in shares: a hash of its IPv4 address or its /64.
func (c *Counts) Sender(a netip.Addr) uint32 {
	var word uint64
	if a.Is4() {
		b := a.As4()
		word = uint64(binary.NativeEndian.Uint32(b[:]))
	} else {
		b := a.As16()
		word = binary.NativeEndian.Uint64(b[:8])
	}
	return uint32(scramble(word^c.seed)>>16) | 1
}

func (c *Counts) backend(at netip.AddrPort, protocol uint8) uint64 {
	var b [16]byte
	copy(b[:], at.Addr().AsSlice())
	d0, d1 := binary.NativeEndian.Uint64(b[:8]), binary.NativeEndian.Uint64(b[8:])
	return scramble(scramble(d0^c.seed) ^ d1 ^ uint64(at.Port())<<16 ^ uint64(protocol))
}

// OfBackend returns the cell that counts the ports to a backend.
func (c *Counts) OfBackend(at netip.AddrPort, protocol uint8) uint32 {
	return cellBackends + uint32(c.backend(at, protocol)&(Backends-1))
}

// OfSender returns the cell that counts a sender's ports to a backend.
func (c *Counts) OfSender(at netip.AddrPort, protocol uint8, sender uint32) uint32 {
	return cellSenders + uint32(scramble(c.backend(at, protocol)^uint64(sender))&(Senders-1))
}

// IsOfProven reports whether a cell counts proven connections.
func IsOfProven(at uint32) bool { return at >= cellProven && at < Cells }

// ProvenOf returns the cell that counts all proven TCP connections from outside in a family.
func ProvenOf(family int) uint32 { return cellProven + uint32(family) }

// Proven returns the cells that count the proven TCP connections from outside in a family (0 IPv4, 1 IPv6), in
// all and by the sender's bucket.
func (c *Counts) Proven(family int, sender netip.Addr) (all, bucket uint32) {
	return ProvenOf(family), cellBuckets + uint32(family)*Buckets + c.Sender(sender)/2%Buckets
}

// AnyBackend reports whether the function is returns true for the counter of any backend.
func (c *Counts) AnyBackend(is func(uint32) bool) bool {
	for at := range uint32(Backends) {
		if is(c.Get(cellBackends + at)) {
			return true
		}
	}
	return false
}

// Idle reports for how many seconds an entry has been idle. ok is false for an entry that has to stay.
type Idle[T any] func(T) (seconds uint32, ok bool)

// Surplus selects entries to remove, so that keep entries remain. It repeatedly selects the longest idle entry of the
// sender that has the most entries. It selects fewer if too many entries have to stay.
func Surplus[T any](held map[uint32][]T, keep int, idle Idle[T]) []T {
	type sender struct {
		of  []T // entries that may be removed; the last one is idle longest
		has int
	}
	total := 0
	for _, of := range held {
		total += len(of)
	}
	if total <= keep {
		return nil
	}
	senders := make([]sender, 0, len(held))
	for _, of := range held {
		s := sender{has: len(of)}
		for _, e := range of {
			if _, ok := idle(e); ok {
				s.of = append(s.of, e)
			}
		}
		if len(s.of) > 0 {
			senders = append(senders, s)
		}
	}
	for _, s := range senders {
		slices.SortFunc(s.of, func(a, b T) int {
			of, _ := idle(a)
			than, _ := idle(b)
			return cmp.Compare(of, than)
		})
	}
	chosen := make([]T, 0, total-keep)
	for ; total > keep && len(senders) > 0; total-- {
		most := 0
		for i := range senders {
			if senders[i].has > senders[most].has {
				most = i
			}
		}
		s := &senders[most]
		last := len(s.of) - 1
		chosen = append(chosen, s.of[last])
		s.of, s.has = s.of[:last], s.has-1
		if last == 0 {
			senders = slices.Delete(senders, most, most+1)
		}
	}
	return chosen
}

// scramble is the same function as scramble in service.h.
func scramble(x uint64) uint64 {
	x ^= x >> 33
	x *= 0xff51afd7ed558ccd
	x ^= x >> 33
	x *= 0xc4ceb9fe1a85ec53
	x ^= x >> 33
	return x
}
