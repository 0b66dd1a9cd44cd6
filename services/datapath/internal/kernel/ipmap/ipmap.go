// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package ipmap writes and reads the maps of addresses: the ipcache, which says
// whose a prefix is, and the epochs of addresses, which make what was decided
// about them stale. It does not know why a prefix is there.
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

// Info is what the ipcache knows about a prefix.
type Info struct {
	Identity identity.Numeric
	// Node is the number of the node that holds the prefix, 0 for this node or
	// none.
	Node uint16
	// Flags say what kind of prefix it is.
	Flags Flags
}

// Flags describe an ipcache entry.
type Flags uint16

// PodRange marks a range of which every address in use has an endpoint on
// this node: what has none is dropped with the reason no-route.
const PodRange Flags = 1

// Outside marks an address that the cluster knows and that is on no node, such
// as that of an API server.
const Outside Flags = 2

// ByStack marks an address of another node itself to which packets go by the
// host's stack, and under the address that the stack gives them.
const ByStack Flags = 4

// OfDevice marks an address of a device of another node: packets that ask for a
// service of this one come from it past the tunnel.
const OfDevice Flags = 8

// Entry is one entry of the ipcache.
type Entry struct {
	Prefix netip.Prefix
	Info
}

// Maps are the maps of the ipcache, and the epochs of addresses.
type Maps struct {
	gate       pin.Gate
	ipc4, ipc6 *ebpf.Map
	epochs     []byte // of sl_pgen
}

// Open finds the maps of addresses among all. It writes nothing.
func Open(pm *pin.Maps) *Maps {
	return &Maps{
		gate: pin.Gate{ValidateOnly: pm.ValidateOnly},
		ipc4: pm.Map(bpf.MapsMapSlIpc4), ipc6: pm.Map(bpf.MapsMapSlIpc6), epochs: pm.Memory(bpf.MapsMapSlPgen),
	}
}

// Close refuses every later call.
func (as *Maps) Close() { as.gate.Close() }

// Set sets what is known about a prefix: the longest matching prefix counts.
// Connections with an address for which the answer changes are evaluated again.
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

// Remove removes a prefix: the next shorter one that matches counts from now
// on, and what Set says of connections holds here too. One that is not there is
// not an error.
func (as *Maps) Remove(p netip.Prefix) error {
	if err := CheckPrefix(p); err != nil {
		return err
	}
	return as.change(p, pin.DeleteKey)
}

// change writes a prefix, and bumps the epoch of every address for which the
// longest matching prefix says another thing than before, after the write: a
// verdict that was stored with an epoch from after the bump has seen the new
// entry. Addresses that a longer prefix answers for are left alone, but in a
// prefix of as many addresses as there are epochs, or more.
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
		is = nil // every address may have another answer
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

// buckets is how many epochs there are. Addresses share them.
const buckets = 4096

// large says whether a prefix has as many addresses as there are epochs.
func large(p netip.Prefix) bool { return p.Addr().BitLen()-p.Bits() >= 12 }

// answers are what the ipcache says of each address of a prefix, in order. Of a
// large one it is what counts for those that no longer prefix answers for.
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

// longest is what the longest prefix says that holds all of a key's; zero if
// none does.
func longest(m *ebpf.Map, key any) (v bpf.MapsSlIpcache, err error) {
	if err := m.Lookup(key, &v); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return v, err
	}
	return v, nil
}

func (as *Maps) bump(bucket int) { atomic.AddUint64(pin.Word(as.epochs, bucket*8), 1) }

// Match is what the longest prefix that holds an address says.
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

// List lists all prefixes, sorted by prefix, IPv4 first. Changes go on meanwhile:
// it takes some 3 µs for each entry, for which no creation of an endpoint is to
// wait. Prefixes that come or go meanwhile may be missing.
func (as *Maps) List() (es []Entry, err error) {
	ipc4, ipc6, err := as.borrow()
	if err != nil {
		return nil, err
	}
	defer ipc4.Close()
	defer ipc6.Close()
	// a deletion may have the kernel begin again, so often that it gives up
	for range listAttempts {
		if es, err = list(ipc4, ipc6); !errors.Is(err, ebpf.ErrIterationAborted) {
			break
		}
	}
	slices.SortStableFunc(es, func(a, b Entry) int { return a.Prefix.Compare(b.Prefix) })
	return slices.CompactFunc(es, func(a, b Entry) bool { return a.Prefix == b.Prefix }), err
}

const listAttempts = 5

// borrow gives handles of the maps that stay open over a Close.
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

// CheckPrefix refuses prefixes that are not masked, or are IPv4-mapped, with
// pin.ErrInvalid.
func CheckPrefix(p netip.Prefix) error {
	if !p.IsValid() || p.Addr().Is4In6() || p != p.Masked() {
		return fmt.Errorf("%w: %v is not a masked prefix", pin.ErrInvalid, p)
	}
	return nil
}

// CheckIdentity refuses what is no identity.
func CheckIdentity(id identity.Numeric) error {
	if id == 0 || id > identity.Max {
		return fmt.Errorf("%w: Identity: %d is not between 1 and %d", pin.ErrInvalid, id, identity.Max)
	}
	return nil
}

// HostPrefix is the prefix that holds a alone.
func HostPrefix(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

func (as *Maps) trie(p netip.Prefix) (*ebpf.Map, any) {
	if p.Addr().Is4() {
		return as.ipc4, &bpf.MapsSlPrefix4{Bits: uint32(p.Bits()), Addr: p.Addr().As4()}
	}
	return as.ipc6, &bpf.MapsSlPrefix6{Bits: uint32(p.Bits()), Addr: p.Addr().As16()}
}

// Ranges lists the pod ranges of the node.
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

// Bucket is the place of an address in sl_pgen, as address_epoch_bucket of
// the programs computes it.
func Bucket(a netip.Addr) int {
	b := a.AsSlice()
	h := uint32(0)
	for i := 0; i < len(b); i += 4 {
		h = (h ^ binary.BigEndian.Uint32(b[i:])) * 0x9e3779b1
	}
	return int(h >> 20)
}

// Bump makes every connection with an address, and with those that
// share its bucket, be evaluated again.
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

// Epoch is the part of an address's epoch that connections remember.
func (as *Maps) Epoch(a netip.Addr) (uint16, error) {
	if err := as.gate.RLock(); err != nil {
		return 0, err
	}
	defer as.gate.RUnlock()
	return uint16(atomic.LoadUint64(pin.Word(as.epochs, Bucket(a)*8))), nil
}
