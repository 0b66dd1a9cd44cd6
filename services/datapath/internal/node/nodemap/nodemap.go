// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package nodemap reads and writes the maps of nodes: the next hops to each other node, by node ID, and which node has
// an underlay address. It does not decide on next hops.
package nodemap

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync/atomic"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// Flags describe how packets travel to a node.
type Flags uint16

// Flags of a next hop. Without Overlay, packets are sent without encapsulation.
const (
	// Overlay: in the tunnel, through the device in the next hop.
	Overlay Flags = 1 << iota
	// Underlay6: the outer packets of the tunnel are IPv6.
	Underlay6
	// Hop: the node is directly reachable on the device.
	Hop
	// Lookup: the program looks up device and gateway in the kernel's routes.
	Lookup

	native // in the element of this node

	// Fragments: the outer packets may be fragmented.
	Fragments

	byStack // in the element of this node
)

// NextHop describes how packets to the pods of a node leave this node; zero: they do not leave.
type NextHop struct {
	Ifindex uint32
	// MTU is the size of the largest IP packet of a pod, in bytes.
	MTU   uint16
	Flags Flags
}

func (w NextHop) packed() uint64 { return uint64(w.Ifindex) | uint64(w.MTU)<<32 | uint64(w.Flags)<<48 }

func wayOf(word uint64) NextHop { return NextHop{uint32(word), uint16(word >> 32), Flags(word >> 48)} }

// Direct is the path of tunnel packets that the programs encapsulate and decapsulate themselves, without the tunnel
// device. If it is zero, packets go through the tunnel device.
type Direct struct {
	Ifindex uint32     // uplink
	Via     netip.Addr // IPv4 address of the next hop on it
	// Local is this node's IPv4 address on the path: the source of tunnel packets to the node. The programs only
	// decapsulate packets of the node with this destination.
	Local netip.Addr
}

// Node holds the addresses of another node.
type Node struct {
	// IPv4 and IPv6 are the destinations of packets to the node; invalid: none.
	IPv4, IPv6 netip.Addr
	// Addrs are all addresses that its packets may come from.
	Addrs []netip.Addr
}

// Entry is the state of a node in the maps.
type Entry struct {
	Node
	// NextHops of IPv4 and IPv6 packets.
	NextHops [2]NextHop
	Direct   Direct
}

// Local is the state of this node in the maps.
type Local struct {
	// Overlay or Native is set if packets travel between pods of two nodes.
	Overlay, Native bool
	// ByStack, with Native: packets between pods of two nodes pass the host stack.
	ByStack bool
	// TunnelIfindex is the tunnel device; 0 without Overlay or while the device is missing.
	TunnelIfindex uint32
	// Sources are the address IDs of the sources of packets to backends on other nodes; 0: none.
	Sources [Sources]uint16
}

// Indices of Sources for IPv4: the source addresses that external packets get on their way to a backend on another
// node. The index for IPv6 is one higher.
const (
	SourceOverlay = 0 // SL_SOURCE_OVERLAY: through the tunnel
	SourceUplink  = 2 // SL_SOURCE_UPLINK: without a tunnel
	Sources       = 4 // number of indices
)

const (
	MaxNumber = 1<<14 - 1
	MaxAddrs  = 16 // of one node
)

// Maps are the maps of nodes. Their methods may be called concurrently.
type Maps struct {
	gate  pin.Gate
	addrs *ebpf.Map
	nodes []byte // value of sl_node
	paths []byte // value of sl_direct

	owned map[netip.Addr]uint16 // content of addrs, nil before the first read; guarded by gate
}

// Open finds the maps of nodes. It writes nothing.
func Open(pm *pin.Maps) *Maps {
	return &Maps{
		gate:  pin.Gate{ValidateOnly: pm.ValidateOnly},
		addrs: pm.Map(bpf.MapsMapSlNodeAddr), nodes: pm.Memory(bpf.MapsMapSlNode),
		paths: pm.Memory(bpf.MapsMapSlDirect),
	}
}

// Close makes every later call fail.
func (m *Maps) Close() { m.gate.Close() }

const nodeSize = 64

// Offsets in an element of sl_node.
const (
	placeIPv6 = 16
	placeIPv4 = 32
)

func (m *Maps) at(number uint16) []byte {
	return m.nodes[int(number)*nodeSize : (int(number)+1)*nodeSize]
}

func (m *Maps) nextHop(number uint16, family int) *uint64 {
	return pin.Word(m.nodes, int(number)*nodeSize+8*family)
}

// An element of sl_direct, and the offsets of its words.
const (
	directSize  = 16
	placeLocal  = 8
	placeSource = 12
)

func (m *Maps) direct(number uint16) (hop *uint64, local, sources *uint32) {
	at := int(number) * directSize
	return pin.Word(m.paths, at), pin.Word32(m.paths, at+placeLocal), pin.Word32(m.paths, at+placeSource)
}

// word32 returns the four bytes of an IPv4 address in memory order; 0 for an invalid one.
func word32(a netip.Addr) uint32 {
	if !a.Is4() {
		return 0
	}
	b := a.As4()
	return binary.NativeEndian.Uint32(b[:])
}

func addr4(word uint32) netip.Addr {
	if word == 0 {
		return netip.Addr{}
	}
	return netip.AddrFrom4([4]byte(binary.NativeEndian.AppendUint32(nil, word)))
}

func check(number uint16) error {
	if number == 0 || number > MaxNumber {
		return fmt.Errorf("%w: %d is not a node ID", pin.ErrInvalid, number)
	}
	return nil
}

// SetNode writes the addresses of a node. Packets are sent to it only after SetNextHops. IPv4 and IPv6 cannot change
// while the node ID is in use: other values return pin.ErrExists. If another node has an address in Addrs, SetNode
// returns pin.ErrExists, too, but writes the remaining addresses.
func (m *Maps) SetNode(number uint16, n Node) error {
	if err := check(number); err != nil {
		return err
	}
	if len(n.Addrs) > MaxAddrs {
		return fmt.Errorf("%w: %d addresses of a node, at most %d", pin.ErrInvalid, len(n.Addrs), MaxAddrs)
	}
	for _, a := range slices.Concat(n.Addrs, []netip.Addr{n.IPv4, n.IPv6}) {
		if a.Is4In6() || a.Zone() != "" {
			return fmt.Errorf("%w: %v is not valid as the address of a node", pin.ErrInvalid, a)
		}
	}
	if n.IPv4.IsValid() && !n.IPv4.Is4() || n.IPv6.IsValid() && !n.IPv6.Is6() {
		return fmt.Errorf("%w: %v is not IPv4, or %v is not IPv6", pin.ErrInvalid, n.IPv4, n.IPv6)
	}
	if err := m.gate.Lock(); err != nil {
		return err
	}
	defer m.gate.Unlock()
	var have Node
	have.readAddrs(m.at(number))
	fresh := !have.IPv4.IsValid() && !have.IPv6.IsValid()
	if !fresh && (have.IPv4 != n.IPv4 || have.IPv6 != n.IPv6) {
		return fmt.Errorf("%w: node %d is at %v and %v", pin.ErrExists, number, have.IPv4, have.IPv6)
	}
	if fresh {
		n.writeAddrs(m.at(number))
	}
	owners, err := m.owners()
	if err != nil {
		return err
	}
	var errs []error
	for a, owner := range owners {
		if owner == number && !slices.Contains(n.Addrs, a) {
			errs = append(errs, m.remove(a))
		}
	}
	for _, a := range n.Addrs {
		switch owner, ok := owners[a]; {
		case ok && owner != number:
			errs = append(errs, fmt.Errorf("address %v: %w: node %d has it", a, pin.ErrExists, owner))
		case !ok:
			errs = append(errs, m.insert(a, number))
		}
	}
	return errors.Join(errs...)
}

func (n *Node) writeAddrs(b []byte) {
	if n.IPv4.IsValid() {
		copy(b[placeIPv4:], n.IPv4.AsSlice())
	}
	if n.IPv6.IsValid() {
		copy(b[placeIPv6:], n.IPv6.AsSlice())
	}
}

func (n *Node) readAddrs(b []byte) {
	if a := netip.AddrFrom4([4]byte(b[placeIPv4:])); !a.IsUnspecified() {
		n.IPv4 = a
	}
	if a := netip.AddrFrom16([16]byte(b[placeIPv6:])); !a.IsUnspecified() {
		n.IPv6 = a
	}
}

// SetNextHops writes the next hops to a node, with one store per family.
func (m *Maps) SetNextHops(number uint16, ipv4, ipv6 NextHop) error {
	if err := check(number); err != nil {
		return err
	}
	if err := m.gate.Lock(); err != nil {
		return err
	}
	defer m.gate.Unlock()
	for family, w := range []NextHop{ipv4, ipv6} {
		atomic.StoreUint64(m.nextHop(number, family), w.packed())
	}
	return nil
}

// SetDirect writes the direct path to a node. Packets use it only while SetShortcut allows it. One store changes the
// next hop together with its uplink. While the local address changes, packets may have the old or the new one as
// source.
func (m *Maps) SetDirect(number uint16, d Direct) error {
	if err := check(number); err != nil {
		return err
	}
	if d != (Direct{}) && (d.Ifindex == 0 || !d.Via.Is4() || !d.Local.Is4()) {
		return fmt.Errorf("%w: %+v is not a direct path", pin.ErrInvalid, d)
	}
	if err := m.gate.Lock(); err != nil {
		return err
	}
	defer m.gate.Unlock()
	m.setDirect(number, d)
	return nil
}

// setDirect writes a direct path. The caller holds the gate for writing.
func (m *Maps) setDirect(number uint16, d Direct) {
	hop, local, _ := m.direct(number)
	if d == (Direct{}) {
		atomic.StoreUint64(hop, 0)
	}
	atomic.StoreUint32(local, word32(d.Local))
	atomic.StoreUint64(hop, uint64(d.Ifindex)|uint64(word32(d.Via))<<32)
}

// directOf returns the direct path to a node. The caller holds the gate.
func (m *Maps) directOf(number uint16) Direct {
	hop, local, _ := m.direct(number)
	word := atomic.LoadUint64(hop)
	if word == 0 {
		return Direct{}
	}
	return Direct{Ifindex: uint32(word), Via: addr4(uint32(word >> 32)), Local: addr4(atomic.LoadUint32(local))}
}

// Shortcut allows the direct paths of all nodes.
type Shortcut struct {
	// Until is when the permission ends: CLOCK_MONOTONIC, in ns; 0: no direct path is used.
	Until uint64
	// Lowest and Highest are the range of the source ports of tunnel packets.
	Lowest, Highest uint16
}

// SetShortcut allows or forbids direct paths, from the next packet on.
func (m *Maps) SetShortcut(s Shortcut) error {
	if s.Until != 0 && (s.Lowest == 0 || s.Highest < s.Lowest) {
		return fmt.Errorf("%w: source ports %d to %d of the tunnel", pin.ErrInvalid, s.Lowest, s.Highest)
	}
	if err := m.gate.Lock(); err != nil {
		return err
	}
	defer m.gate.Unlock()
	until, _, sources := m.direct(0)
	if s.Until != 0 {
		atomic.StoreUint32(sources, uint32(s.Lowest)|uint32(s.Highest)<<16)
	}
	atomic.StoreUint64(until, s.Until)
	return nil
}

// Shortcut returns the value of SetShortcut.
func (m *Maps) Shortcut() (Shortcut, error) {
	if err := m.gate.RLock(); err != nil {
		return Shortcut{}, err
	}
	defer m.gate.RUnlock()
	until, _, sources := m.direct(0)
	ports := atomic.LoadUint32(sources)
	return Shortcut{Until: atomic.LoadUint64(until), Lowest: uint16(ports), Highest: uint16(ports >> 16)}, nil
}

// RemoveNode removes a node. No entry may refer to its node ID any more. A missing node is not an error.
func (m *Maps) RemoveNode(number uint16) error {
	if err := check(number); err != nil {
		return err
	}
	if err := m.gate.Lock(); err != nil {
		return err
	}
	defer m.gate.Unlock()
	owners, err := m.owners()
	if err != nil {
		return err
	}
	var errs []error
	for a, owner := range owners {
		if owner == number {
			errs = append(errs, m.remove(a))
		}
	}
	m.setDirect(number, Direct{})
	for family := range 2 {
		atomic.StoreUint64(m.nextHop(number, family), 0)
	}
	clear(m.at(number)[placeIPv6:])
	return errors.Join(errs...)
}

// SetLocal writes the state of this node, with two stores.
func (m *Maps) SetLocal(l Local) error {
	if err := m.gate.Lock(); err != nil {
		return err
	}
	defer m.gate.Unlock()
	w := NextHop{Ifindex: l.TunnelIfindex}
	switch {
	case l.Overlay:
		w.Flags = Overlay
	case l.Native:
		w = NextHop{Flags: native}
		if l.ByStack {
			w.Flags |= byStack
		}
	default:
		w = NextHop{}
	}
	var sources uint64
	for i, place := range l.Sources {
		sources |= uint64(place) << (16 * i)
	}
	atomic.StoreUint64(m.nextHop(0, 1), sources)
	atomic.StoreUint64(m.nextHop(0, 0), w.packed())
	return nil
}

// Local returns the state of this node.
func (m *Maps) Local() (Local, error) {
	if err := m.gate.RLock(); err != nil {
		return Local{}, err
	}
	defer m.gate.RUnlock()
	w, sources := wayOf(atomic.LoadUint64(m.nextHop(0, 0))), atomic.LoadUint64(m.nextHop(0, 1))
	l := Local{Overlay: w.Flags&Overlay != 0, Native: w.Flags&native != 0, TunnelIfindex: w.Ifindex}
	l.ByStack = w.Flags&byStack != 0
	for i := range l.Sources {
		l.Sources[i] = uint16(sources >> (16 * i))
	}
	return l, nil
}

// Nodes returns all nodes in the maps, by node ID.
func (m *Maps) Nodes() (map[uint16]Entry, error) {
	if err := m.gate.RLock(); err != nil {
		return nil, err
	}
	defer m.gate.RUnlock()
	owners, err := m.list()
	if err != nil {
		return nil, err
	}
	nodes := map[uint16]Entry{}
	for number := uint16(1); number <= MaxNumber; number++ {
		var e Entry
		e.readAddrs(m.at(number))
		for family := range e.NextHops {
			e.NextHops[family] = wayOf(atomic.LoadUint64(m.nextHop(number, family)))
		}
		e.Direct = m.directOf(number)
		if e.IPv4.IsValid() || e.IPv6.IsValid() || e.NextHops != [2]NextHop{} || e.Direct != (Direct{}) {
			nodes[number] = e
		}
	}
	for a, owner := range owners {
		e := nodes[owner]
		e.Addrs = append(e.Addrs, a)
		nodes[owner] = e
	}
	for _, e := range nodes {
		slices.SortFunc(e.Addrs, netip.Addr.Compare)
	}
	return nodes, nil
}

// owners returns all addresses with their node IDs. The caller holds the gate for writing.
func (m *Maps) owners() (_ map[netip.Addr]uint16, err error) {
	if m.owned == nil {
		m.owned, err = m.list()
	}
	return m.owned, err
}

// insert writes an address that must not exist yet.
func (m *Maps) insert(a netip.Addr, number uint16) error {
	if err := pin.InsertOnce(m.addrs, keyOf(a), uint32(number)); err != nil {
		return fmt.Errorf("address %v: %w", a, err)
	}
	m.owned[a] = number
	return nil
}

func (m *Maps) remove(a netip.Addr) error {
	if err := pin.DeleteKey(m.addrs, keyOf(a)); err != nil {
		return fmt.Errorf("address %v: %w", a, err)
	}
	delete(m.owned, a)
	return nil
}

func (m *Maps) list() (map[netip.Addr]uint16, error) {
	owners := map[netip.Addr]uint16{}
	var key bpf.MapsSlNodeAddr
	var number uint32
	it := m.addrs.Iterate()
	for it.Next(&key, &number) {
		owners[addrOf(key)] = uint16(number)
	}
	if err := it.Err(); err != nil {
		return nil, fmt.Errorf("list the addresses of nodes: %w", err)
	}
	return owners, nil
}

func keyOf(a netip.Addr) *bpf.MapsSlNodeAddr {
	key := &bpf.MapsSlNodeAddr{Family: 4}
	if a.Is6() {
		key.Family = 6
	}
	copy(key.Addr[:], a.AsSlice())
	return key
}

func addrOf(key bpf.MapsSlNodeAddr) netip.Addr {
	if key.Family == 4 {
		return netip.AddrFrom4([4]byte(key.Addr[:4]))
	}
	return netip.AddrFrom16(key.Addr)
}

// String describes the direct path.
func (d Direct) String() string {
	if d == (Direct{}) {
		return "none"
	}
	return fmt.Sprintf("device %d via %v from %v", d.Ifindex, d.Via, d.Local)
}

// String describes the next hop.
func (w NextHop) String() string {
	if w == (NextHop{}) {
		return "none"
	}
	s := fmt.Sprintf("device %d mtu %d", w.Ifindex, w.MTU)
	for i, name := range []string{"overlay", "underlay-ipv6", "hop", "lookup", "native", "pieces"} {
		if w.Flags>>i&1 != 0 {
			s += " " + name
		}
	}
	return s
}
