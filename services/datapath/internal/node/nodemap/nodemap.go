// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package nodemap writes and reads the maps of nodes: how each other node is
// reached, by its number, and which node has an address of the network between
// them. It does not know why a packet goes one way or another.
package nodemap

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync/atomic"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// Flags say how packets travel on a way.
type Flags uint16

// Flags of a way. Without Overlay a packet travels as it is.
const (
	// Overlay: in the tunnel, whose device the way names.
	Overlay Flags = 1 << iota
	// Underlay6: the packets around those in the tunnel are IPv6.
	Underlay6
	// Hop: the node is the next hop on the way's device.
	Hop
	// Lookup: the kernel's routes say the device and the next hop.
	Lookup

	native // of the element of this node

	// Fragments: the packets of the tunnel may be fragmented.
	Fragments

	byStack // of the element of this node
)

// NextHop is how packets for the pods of a node leave this node; zero: they do not leave.
type NextHop struct {
	Ifindex uint32
	// MTU is the largest IP packet of a pod, in bytes.
	MTU   uint16
	Flags Flags
}

func (w NextHop) packed() uint64 { return uint64(w.Ifindex) | uint64(w.MTU)<<32 | uint64(w.Flags)<<48 }

func wayOf(word uint64) NextHop { return NextHop{uint32(word), uint16(word >> 32), Flags(word >> 48)} }

// Node is where another node is.
type Node struct {
	// IPv4 and IPv6 are where packets are sent to; invalid: nowhere.
	IPv4, IPv6 netip.Addr
	// Addrs are all addresses that its packets may come from.
	Addrs []netip.Addr
}

// Entry is what the maps have of a node.
type Entry struct {
	Node
	// NextHops of IPv4 and of IPv6 packets.
	NextHops [2]NextHop
}

// Local is what the programs know of this node.
type Local struct {
	// Overlay or Native: how packets travel between pods of two nodes; neither: not
	// at all.
	Overlay, Native bool
	// ByStack, with Native: packets between pods of two nodes go by the host's stack.
	ByStack bool
	// TunnelIfindex is the tunnel device, 0 without Overlay or while it is missing.
	TunnelIfindex uint32
	// Sources are the places, plus 1, of the addresses that packets to backends
	// elsewhere come from; 0: there is none.
	Sources [Sources]uint16
}

// Kinds of addresses that packets of senders outside get on their way to a backend
// elsewhere, of IPv4; those of IPv6 are one more.
const (
	SourceOverlay = 0 // SL_SOURCE_OVERLAY: into the tunnel
	SourceUplink  = 2 // SL_SOURCE_UPLINK: as they are
	Sources       = 4 // how many there are
)

// Limits of the maps.
const (
	MaxNumber = 1<<14 - 1
	MaxAddrs  = 16 // of one node
)

// Maps are the maps of nodes. Its methods may be called concurrently.
type Maps struct {
	gate  pin.Gate
	addrs *ebpf.Map
	nodes []byte // of sl_node

	owned map[netip.Addr]uint16 // of addrs, once it was read; guarded by gate
}

// Open finds the maps of nodes among all. It writes nothing.
func Open(pm *pin.Maps) *Maps {
	return &Maps{
		gate:  pin.Gate{ValidateOnly: pm.ValidateOnly},
		addrs: pm.Map(bpf.MapsMapSlNodeAddr), nodes: pm.Memory(bpf.MapsMapSlNode),
	}
}

// Close refuses every later call.
func (m *Maps) Close() { m.gate.Close() }

const nodeSize = 64

// Places in the value of sl_node.
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

func check(number uint16) error {
	if number == 0 || number > MaxNumber {
		return fmt.Errorf("%w: %d is no number of a node", pin.ErrInvalid, number)
	}
	return nil
}

// SetNode says where a node is. It has no way until SetNextHops gives it one. Addresses
// that packets are sent to stay as long as the number: others are pin.ErrExists.
// Another node's address among Addrs is pin.ErrExists, too; the rest is written
// all the same.
func (m *Maps) SetNode(number uint16, n Node) error {
	if err := check(number); err != nil {
		return err
	}
	if len(n.Addrs) > MaxAddrs {
		return fmt.Errorf("%w: %d addresses of a node, at most %d", pin.ErrInvalid, len(n.Addrs), MaxAddrs)
	}
	for _, a := range slices.Concat(n.Addrs, []netip.Addr{n.IPv4, n.IPv6}) {
		if a.Is4In6() || a.Zone() != "" {
			return fmt.Errorf("%w: %v is no address of a node", pin.ErrInvalid, a)
		}
	}
	if n.IPv4.IsValid() && !n.IPv4.Is4() || n.IPv6.IsValid() && !n.IPv6.Is6() {
		return fmt.Errorf("%w: %v and %v are not of their families", pin.ErrInvalid, n.IPv4, n.IPv6)
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

// SetNextHops says how packets for the pods of a node leave, by one store a family.
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

// RemoveNode removes a node. Nothing may name its number by then. One that is not
// there is no error.
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
	for family := range 2 {
		atomic.StoreUint64(m.nextHop(number, family), 0)
	}
	clear(m.at(number)[placeIPv6:])
	return errors.Join(errs...)
}

// SetLocal says what this node is, by two stores.
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

// Local is what the programs know of this node.
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

// Nodes are the nodes that the maps have, by number.
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
		if e.IPv4.IsValid() || e.IPv6.IsValid() || e.NextHops != [2]NextHop{} {
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

// owners are all addresses with the numbers of their nodes. The caller holds the gate
// for changes.
func (m *Maps) owners() (_ map[netip.Addr]uint16, err error) {
	if m.owned == nil {
		m.owned, err = m.list()
	}
	return m.owned, err
}

// insert writes an address once.
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

// String is the way in words.
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
