// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package ipmap reads and writes the maps of addresses: the ipcache, which maps prefixes to identities, and the
// address epochs, which make cached verdicts stale. It does not know why a prefix has its entry.
package ipmap

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync/atomic"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// Info is the ipcache entry of a prefix.
type Info struct {
	Identity identity.Numeric
	// Node is the ID of the node that has the prefix; 0: the local node or none.
	Node uint16
	// Flags describe the kind of prefix.
	Flags Flags
}

// Flags describe an ipcache entry.
type Flags uint16

// PodRange marks a pod CIDR of the local node. Every address in use has an endpoint; packets to all others are
// dropped with the reason no-route.
const PodRange Flags = 1

// Outside marks an address that the cluster knows and that is on no node, such as the address of an API server.
const Outside Flags = 2

// ByStack marks an address of another node. Packets to it go through the host's stack, with the source address
// that the stack selects.
const ByStack Flags = 4

// OfDevice marks a device address of another node. Requests from it to a local service arrive outside the
// tunnel.
const OfDevice Flags = 8

// Entry is an element of the ipcache: a prefix and its Info.
type Entry struct {
	Prefix netip.Prefix
	Info
}

// Maps are the maps of the ipcache and of address epochs.
type Maps struct {
	gate       pin.Gate
	ipc4, ipc6 *ebpf.Map
	epochs     []byte // of sl_pgen
}

// Open returns the maps of addresses in the given maps. It writes nothing.
func Open(pm *pin.Maps) *Maps {
	return &Maps{
		gate: pin.Gate{ValidateOnly: pm.ValidateOnly},
		ipc4: pm.Map(bpf.MapsMapSlIpc4), ipc6: pm.Map(bpf.MapsMapSlIpc6), epochs: pm.Memory(bpf.MapsMapSlPgen),
	}
}

// Close makes every later call fail.
func (as *Maps) Close() { as.gate.Close() }

// Set sets the entry of a prefix; the longest matching prefix applies to an address. Connections with an
// address whose entry changes are evaluated again.
func (as *Maps) Set(p netip.Prefix, i Info) error {
	if err := errors.Join(CheckPrefix(p), CheckIdentity(i.Identity)); err != nil {
		return err
	}
	return as.change(p, func(m *ebpf.Map, key any) error {
		return pin.ReplaceInTrie(m, key, &bpf.MapsSlIpcache{
			Identity: uint32(i.Identity), Node: i.Node, Flags: uint16(i.Flags),
		})
	})
}

// Remove removes a prefix, so that the next shorter match applies. As with Set, affected connections are
// evaluated again. It is not an error if the prefix is not there.
func (as *Maps) Remove(p netip.Prefix) error {
	if err := CheckPrefix(p); err != nil {
		return err
	}
	return as.change(p, pin.DeleteKey)
}

// change writes a prefix. After the write it bumps the epoch of every address whose longest match has changed,
// so that a verdict stored with the new epoch has used the new entry. Addresses that match a longer prefix are
// not bumped, except if the prefix has at least as many addresses as there are epochs.
func (as *Maps) change(p netip.Prefix, write func(m *ebpf.Map, key any) error) error {
	if err := as.gate.Lock(); err != nil {
		return err
	}
	defer as.gate.Unlock()
	was, err := as.answers(p)
	if err != nil {
		return err
	}
	m, key := as.trie(p)
	if err := write(m, key); err != nil {
		return err
	}
	is, err := as.answers(p)
	if err != nil {
		is = nil // assume that the entry of every address has changed
	}
	if large(p) {
		if !slices.Equal(is, was) {
			for i := range buckets {
				as.bump(i)
			}
		}
		return err
	}
	a := p.Addr()
	for i := range was {
		if is == nil || is[i] != was[i] {
			as.bump(Bucket(a))
		}
		a = a.Next()
	}
	return err
}

// buckets is the number of epochs. Addresses share them.
const buckets = 4096

// large reports whether a prefix has at least as many addresses as there are epochs.
func large(p netip.Prefix) bool { return p.Addr().BitLen()-p.Bits() >= 12 }

// answers returns the entry that applies to each address of a prefix, in order. For a large prefix it returns
// one entry, which applies to addresses without a longer match.
func (as *Maps) answers(p netip.Prefix) ([]bpf.MapsSlIpcache, error) {
	if large(p) {
		v, err := longest(as.trie(p))
		return []bpf.MapsSlIpcache{v}, err
	}
	answers := make([]bpf.MapsSlIpcache, 0, 1<<(p.Addr().BitLen()-p.Bits()))
	for a := p.Addr(); p.Contains(a); a = a.Next() {
		v, err := longest(as.trie(HostPrefix(a)))
		if err != nil {
			return nil, err
		}
		answers = append(answers, v)
	}
	return answers, nil
}

// longest returns the entry of the longest prefix that contains the key; zero if no prefix does.
func longest(m *ebpf.Map, key any) (v bpf.MapsSlIpcache, err error) {
	if err := m.Lookup(key, &v); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return v, err
	}
	return v, nil
}

func (as *Maps) bump(bucket int) { atomic.AddUint64(pin.Word(as.epochs, bucket*8), 1) }

// Match returns the entry of the longest prefix that contains an address.
func (as *Maps) Match(a netip.Addr) (Info, bool, error) {
	if err := as.gate.RLock(); err != nil {
		return Info{}, false, err
	}
	defer as.gate.RUnlock()
	m, key := as.trie(HostPrefix(a))
	var v bpf.MapsSlIpcache
	switch err := m.Lookup(key, &v); {
	case errors.Is(err, ebpf.ErrKeyNotExist):
		return Info{}, false, nil
	case err != nil:
		return Info{}, false, err
	}
	return infoOf(v), true, nil
}

// List returns all prefixes, sorted by prefix, IPv4 first. Changes are allowed meanwhile: a listing takes some
// 3 µs per entry, for which the creation of an endpoint must not wait. Prefixes that are added or removed
// meanwhile may be missing.
func (as *Maps) List() (es []Entry, err error) {
	ipc4, ipc6, err := as.borrow()
	if err != nil {
		return nil, err
	}
	defer ipc4.Close()
	defer ipc6.Close()
	// After a deletion the kernel may restart the iteration, and may finally give up.
	for range listAttempts {
		if es, err = list(ipc4, ipc6); !errors.Is(err, ebpf.ErrIterationAborted) {
			break
		}
	}
	slices.SortStableFunc(es, func(a, b Entry) int { return a.Prefix.Compare(b.Prefix) })
	return slices.CompactFunc(es, func(a, b Entry) bool { return a.Prefix == b.Prefix }), err
}

const listAttempts = 5

// borrow returns handles of the maps that stay open after Close.
func (as *Maps) borrow() (ipc4, ipc6 *ebpf.Map, err error) {
	if err := as.gate.RLock(); err != nil {
		return nil, nil, err
	}
	defer as.gate.RUnlock()
	if ipc4, err = as.ipc4.Clone(); err != nil {
		return nil, nil, err
	}
	if ipc6, err = as.ipc6.Clone(); err != nil {
		ipc4.Close()
		return nil, nil, err
	}
	return ipc4, ipc6, nil
}

func list(ipc4, ipc6 *ebpf.Map) (es []Entry, err error) {
	var v bpf.MapsSlIpcache
	var k4 bpf.MapsSlPrefix4
	it := ipc4.Iterate()
	for it.Next(&k4, &v) {
		es = append(es, Entry{netip.PrefixFrom(netip.AddrFrom4(k4.Addr), int(k4.Bits)), infoOf(v)})
	}
	if err := it.Err(); err != nil {
		return nil, fmt.Errorf("list the IPv4 ipcache: %w", err)
	}
	var k6 bpf.MapsSlPrefix6
	it = ipc6.Iterate()
	for it.Next(&k6, &v) {
		es = append(es, Entry{netip.PrefixFrom(netip.AddrFrom16(k6.Addr), int(k6.Bits)), infoOf(v)})
	}
	if err := it.Err(); err != nil {
		return nil, fmt.Errorf("list the IPv6 ipcache: %w", err)
	}
	return es, nil
}

func infoOf(v bpf.MapsSlIpcache) Info {
	return Info{Identity: identity.Numeric(v.Identity), Node: v.Node, Flags: Flags(v.Flags)}
}

// CheckPrefix rejects prefixes that are not masked, or are IPv4-mapped, with pin.ErrInvalid.
func CheckPrefix(p netip.Prefix) error {
	if !p.IsValid() || p.Addr().Is4In6() || p != p.Masked() {
		return fmt.Errorf("%w: %v is not a masked prefix", pin.ErrInvalid, p)
	}
	return nil
}

// CheckIdentity rejects numbers that are not identities, with pin.ErrInvalid.
func CheckIdentity(id identity.Numeric) error {
	if id == 0 || id > identity.Max {
		return fmt.Errorf("%w: Identity: %d is not between 1 and %d", pin.ErrInvalid, id, identity.Max)
	}
	return nil
}

// HostPrefix returns the prefix that contains only a.
func HostPrefix(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

func (as *Maps) trie(p netip.Prefix) (*ebpf.Map, any) {
	if p.Addr().Is4() {
		return as.ipc4, &bpf.MapsSlPrefix4{Bits: uint32(p.Bits()), Addr: p.Addr().As4()}
	}
	return as.ipc6, &bpf.MapsSlPrefix6{Bits: uint32(p.Bits()), Addr: p.Addr().As16()}
}

// Ranges returns the pod CIDRs of the node.
func (as *Maps) Ranges() ([]netip.Prefix, error) {
	all, err := as.List()
	var ranges []netip.Prefix
	for _, e := range all {
		if e.Node == 0 && e.Flags&PodRange != 0 {
			ranges = append(ranges, e.Prefix)
		}
	}
	return ranges, err
}

// Bucket returns the index of an address in sl_pgen, as address_epoch_bucket of the programs computes it.
func Bucket(a netip.Addr) int {
	b := a.AsSlice()
	h := uint32(0)
	for i := 0; i < len(b); i += 4 {
		h = (h ^ binary.BigEndian.Uint32(b[i:])) * 0x9e3779b1
	}
	return int(h >> 20)
}

// Bump causes every connection with an address, or with one of the same bucket, to be evaluated again.
func (as *Maps) Bump(a netip.Addr) error {
	if !a.IsValid() || a.Is4In6() {
		return fmt.Errorf("%w: %v is not an address", pin.ErrInvalid, a)
	}
	if err := as.gate.Lock(); err != nil {
		return err
	}
	defer as.gate.Unlock()
	as.bump(Bucket(a))
	return nil
}

// Epoch returns the part of an address's epoch that connections store.
func (as *Maps) Epoch(a netip.Addr) (uint16, error) {
	if err := as.gate.RLock(); err != nil {
		return 0, err
	}
	defer as.gate.RUnlock()
	return uint16(atomic.LoadUint64(pin.Word(as.epochs, Bucket(a)*8))), nil
}
