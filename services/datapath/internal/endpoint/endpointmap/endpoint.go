// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package endpointmap

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// ID is the number of an endpoint on this node: its index into the array of endpoints.
type ID = uint16

const (
	// HostID is the local host.
	HostID ID = 0
	// NoID means that an address or device belongs to no local endpoint.
	NoID ID = 0xFFFF
	// MaxEndpoints is the largest number of endpoints on a node; ID 0 is the host.
	MaxEndpoints = 4096 - 1
)

// Policy is the packed policy entry of an endpoint: its tables and its epoch.
type Policy struct {
	Egress, Ingress nodetable.ID
	// Epoch comes from the node-wide counter. It changes with every change of the entry, and no two
	// endpoints ever share one.
	Epoch uint32
}

// Deliver selects how packets from other local pods are delivered to the endpoint.
type Deliver uint8

const (
	// DeliverPeer moves the packet into the pod's namespace, bypassing the host end's queues.
	DeliverPeer Deliver = 1
	// DeliverRedirect sends it out of the host end, for devices whose root qdisc must see the
	// traffic.
	DeliverRedirect Deliver = 2
)

// Endpoint is one local pod, as stored in the maps.
type Endpoint struct {
	// Slot is set by Publish.
	Slot ID
	// Ifindex of the host end, in the node's network namespace.
	Ifindex uint32
	// Identity, 256 to 0xFEFFFF: neither reserved nor local to the node.
	Identity identity.Numeric
	// IPv4 and IPv6 are the pod's addresses; one of them may be invalid.
	IPv4, IPv6 netip.Addr
	// MAC is the pod's Ethernet address, HostMAC the address of the host end. The programs accept
	// only MAC as the source address of the pod's packets.
	MAC, HostMAC [6]byte
	// MTU of both ends of the device, 576 to 65535 bytes, at least 1280 with
	// IPv6.
	MTU uint16
	// Deliver is DeliverPeer or DeliverRedirect.
	Deliver Deliver
	// Policy that evaluates the endpoint's first packet. Publish sets Epoch.
	Policy Policy
	// Audit is set by At, Lookup and List if the endpoint is in audit mode: packets that the policy
	// denies pass and are reported.
	Audit bool
	// Incomplete is set by Lookup and List if some keys of the endpoint are missing, because a
	// process was killed between two writes. Such an endpoint has to be unpublished; it may then be
	// published again.
	Incomplete bool
}

// ErrNotFound: no endpoint has the ID.
var ErrNotFound = errors.New("no such endpoint")

// record encodes the endpoint for the map. Its policy entry still denies everything.
func (e Endpoint) record() bpf.MapsSlEndpoint {
	r := bpf.MapsSlEndpoint{
		Ifindex:  e.Ifindex,
		Identity: uint32(e.Identity),
		Mtu:      e.MTU,
		Deliver:  uint8(e.Deliver),
		Mac:      e.MAC,
		Hmac:     e.HostMAC,
	}
	if e.IPv4.IsValid() {
		a := e.IPv4.As4()
		r.Ip4 = binary.NativeEndian.Uint32(a[:])
	}
	if e.IPv6.IsValid() {
		r.Ip6 = e.IPv6.As16()
	}
	return r
}

// EndpointOf decodes a record of sl_ep. The policy entry selects one of the record's two identities.
func EndpointOf(s ID, r *bpf.MapsSlEndpoint) Endpoint {
	e := Endpoint{
		Slot:     s,
		Ifindex:  r.Ifindex,
		Identity: identity.Numeric(r.Identity),
		MAC:      r.Mac,
		HostMAC:  r.Hmac,
		MTU:      r.Mtu,
		Deliver:  Deliver(r.Deliver),
		Policy:   policyOf(r.Pol),
		Audit:    r.Flags&AuditBit != 0,
	}
	if r.Pol&secondIdentity != 0 {
		e.Identity = identity.Numeric(binary.NativeEndian.Uint32(r.Second[:]))
	}
	if r.Ip4 != 0 {
		var a [4]byte
		binary.NativeEndian.PutUint32(a[:], r.Ip4)
		e.IPv4 = netip.AddrFrom4(a)
	}
	if r.Ip6 != [16]byte{} {
		e.IPv6 = netip.AddrFrom16(r.Ip6)
	}
	return e
}

func (p Policy) packed() uint64 {
	return uint64(p.Egress) | uint64(p.Ingress)<<16 | uint64(p.Epoch)<<32
}

func policyOf(word uint64) Policy {
	return Policy{Egress: nodetable.ID(word &^ secondIdentity), Ingress: nodetable.ID(word >> 16), Epoch: uint32(word >> 32)}
}

// Addrs returns the endpoint's addresses.
func (e Endpoint) Addrs() []netip.Addr {
	var as []netip.Addr
	for _, a := range []netip.Addr{e.IPv4, e.IPv6} {
		if a.IsValid() {
			as = append(as, a)
		}
	}
	return as
}

func (e Endpoint) validate() error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: "+format, append([]any{pin.ErrInvalid}, args...)...)
	}
	if e.Ifindex == 0 {
		return bad("Ifindex is 0")
	}
	if err := ipmap.CheckIdentity(e.Identity); err != nil {
		return err
	}
	if len(e.Addrs()) == 0 {
		return bad("the endpoint has neither IPv4 nor IPv6 address")
	}
	if e.IPv4.IsValid() && (!e.IPv4.Is4() || !unicast(e.IPv4)) {
		return bad("IPv4: %v is not a unicast IPv4 address", e.IPv4)
	}
	if e.IPv6.IsValid() && (!e.IPv6.Is6() || e.IPv6.Is4In6() || e.IPv6.Zone() != "" ||
		!unicast(e.IPv6) || e.IPv6.IsLinkLocalUnicast()) {
		return bad("IPv6: %v is not a global unicast IPv6 address", e.IPv6)
	}
	if !unicastMAC(e.MAC) {
		return bad("MAC: %x is not a unicast Ethernet address", e.MAC)
	}
	if !unicastMAC(e.HostMAC) {
		return bad("HostMAC: %x is not a unicast Ethernet address", e.HostMAC)
	}
	if e.MTU < 576 || e.IPv6.IsValid() && e.MTU < 1280 {
		return bad("MTU: %d is below 576 (IPv4) or 1280 (IPv6)", e.MTU)
	}
	if e.Deliver != DeliverPeer && e.Deliver != DeliverRedirect {
		return bad("Deliver: %d is neither peer nor redirect", e.Deliver)
	}
	return nil
}

// ofEndpoint checks that an endpoint may have the identity. Every policy table treats reserved
// identities as the host or the world, except init, the identity of isolated endpoints. Node-local
// identities belong to addresses.
func ofEndpoint(id identity.Numeric) error {
	if id == identity.Init {
		return nil
	}
	if id < 256 || id >= identity.MinNodeLocal {
		return fmt.Errorf("%w: Identity: %d is not between 256 and %d", pin.ErrInvalid, id, identity.MinNodeLocal-1)
	}
	return nil
}

// mayBeEndpoint is like ofEndpoint, but allows reserved identities with Options.Reserved.
func (eps *Maps) mayBeEndpoint(id identity.Numeric) error {
	if eps.reserved {
		return ipmap.CheckIdentity(id)
	}
	return ofEndpoint(id)
}

func unicast(a netip.Addr) bool {
	return !a.IsUnspecified() && !a.IsMulticast() && !a.IsLoopback() && a != netip.AddrFrom4([4]byte{255, 255, 255, 255})
}

func unicastMAC(m [6]byte) bool { return m != [6]byte{} && m[0]&1 == 0 }

const slotSize = int(unsafe.Sizeof(bpf.MapsSlEndpoint{}))

// packedPolicy points to the policy entry of an endpoint. Once an endpoint is published, only this
// entry and the identity change.
func (eps *Maps) packedPolicy(s ID) *uint64 {
	return pin.Word(eps.mem, int(s)*slotSize+int(unsafe.Offsetof(bpf.MapsSlEndpoint{}.Pol)))
}

func (eps *Maps) slotRecord(s ID) *bpf.MapsSlEndpoint {
	return (*bpf.MapsSlEndpoint)(unsafe.Pointer(&eps.mem[int(s)*slotSize]))
}

// At reads the entry of an endpoint ID, including the host's, even if no device refers to it.
func (eps *Maps) At(s ID) (Endpoint, error) {
	if s > MaxEndpoints {
		return Endpoint{}, fmt.Errorf("%w: %d is not an endpoint ID", pin.ErrInvalid, s)
	}
	if err := eps.gate.RLock(); err != nil {
		return Endpoint{}, err
	}
	defer eps.gate.RUnlock()
	return eps.at(s), nil
}

func (eps *Maps) at(s ID) Endpoint {
	r := eps.slotRecord(s)
	c := bpf.MapsSlEndpoint{
		Second:   r.Second,
		Ifindex:  r.Ifindex,
		Identity: atomic.LoadUint32(&r.Identity),
		Ip4:      r.Ip4,
		Mtu:      r.Mtu,
		Deliver:  r.Deliver,
		Mac:      r.Mac,
		Hmac:     r.Hmac,
		Ip6:      r.Ip6,
		Pol:      atomic.LoadUint64(eps.packedPolicy(s)),
		Flags:    uint8(atomic.LoadUint32(eps.flagsWord(s)) >> 24),
	}
	return EndpointOf(s, &c)
}

// setPolicy stores an endpoint's tables and epoch, and keeps the bit that selects the identity.
func (eps *Maps) setPolicy(s ID, p Policy) {
	atomic.StoreUint64(eps.packedPolicy(s), p.packed()|atomic.LoadUint64(eps.packedPolicy(s))&secondIdentity)
}

// nextEpoch increments the node-wide counter. It skips 0, which no endpoint has, and the maximum,
// which marks a connection that a program is changing.
func (eps *Maps) nextEpoch() uint32 {
	for {
		if g := uint32(atomic.AddUint64(pin.Word(eps.counter, 0), 1)); g != 0 && g != math.MaxUint32 {
			return g
		}
	}
}

// initHost initialises entry 0, the host, which no policy evaluates yet.
func (eps *Maps) initHost() error {
	if atomic.LoadUint64(eps.packedPolicy(HostID)) != 0 {
		return nil
	}
	eps.slotRecord(HostID).Identity = uint32(identity.Host)
	atomic.StoreUint64(eps.packedPolicy(HostID), Policy{Egress: nodetable.Allow, Ingress: nodetable.Allow, Epoch: eps.nextEpoch()}.packed())
	return nil
}

// addrMap returns the map and key that lead from an address to an endpoint ID.
func (eps *Maps) addrMap(a netip.Addr) (*ebpf.Map, any) {
	if a.Is4() {
		return eps.ip4, a.As4()
	}
	return eps.ip6, a.As16()
}

// SlotOf returns the endpoint ID of an address: HostID for an address of the host, NoID if unknown.
func (eps *Maps) SlotOf(a netip.Addr) (ID, error) {
	if err := eps.gate.RLock(); err != nil {
		return NoID, err
	}
	defer eps.gate.RUnlock()
	return eps.slotOf(a)
}

func (eps *Maps) slotOf(a netip.Addr) (ID, error) {
	m, key := eps.addrMap(a)
	return lookupID(m, key)
}

func lookupID(m *ebpf.Map, key any) (ID, error) {
	var s uint32
	switch err := m.Lookup(key, &s); {
	case errors.Is(err, ebpf.ErrKeyNotExist):
		return NoID, nil
	case err != nil:
		return NoID, err
	}
	return ID(s), nil
}

// Publish makes e visible to the programs and returns its ID. It writes the whole entry first, then the keys that lead
// to it, and last the identities of its addresses to the ipcache. It ignores e.Slot and replaces the policy's epoch by
// a new one.
//
// It returns pin.ErrExists if another endpoint has the device or one of the addresses, and
// pin.ErrFull if all MaxEndpoints IDs are taken. After any error no entry of e remains visible.
func (eps *Maps) Publish(ctx context.Context, e Endpoint) (ID, error) {
	if err := e.validate(); err != nil {
		return NoID, err
	}
	if err := eps.mayBeEndpoint(e.Identity); err != nil {
		return NoID, err
	}
	s, err := eps.takeID(ctx)
	if err != nil {
		return NoID, err
	}
	defer eps.gate.Unlock()

	e.Slot = s
	e.Policy.Epoch = eps.nextEpoch()
	delete(eps.renamed, s)
	eps.clearHeld(s)
	*eps.slotRecord(s) = e.record()
	atomic.StoreUint64(eps.packedPolicy(s), e.Policy.packed())

	undo, err := eps.insertKeys(e)
	if err != nil {
		atomic.StoreUint64(eps.packedPolicy(s), Policy{Epoch: eps.nextEpoch()}.packed())
		for i := len(undo) - 1; i >= 0; i-- {
			err = errors.Join(err, undo[i]())
		}
		if len(undo) == 0 {
			eps.slots.giveBack(s)
		} else {
			eps.slots.retire(s)
		}
		return NoID, err
	}
	return s, nil
}

// clearHeld resets the counters of node-wide shares and of refusals that the ID's previous endpoint
// left.
func (eps *Maps) clearHeld(s ID) {
	zero := func(mem []byte, size uintptr) {
		for at := int(s) * int(size); at < int(s+1)*int(size); at += 4 {
			atomic.StoreUint32(pin.Word32(mem, at), 0)
		}
	}
	zero(eps.held, unsafe.Sizeof(bpf.MapsSlHeld{}))
	zero(eps.refused, unsafe.Sizeof(bpf.MapsSlRefused{}))
}

// takeID returns a free ID. It returns with the lock held, unless it returns an error.
func (eps *Maps) takeID(ctx context.Context) (ID, error) {
	for {
		if err := eps.gate.Lock(); err != nil {
			return NoID, err
		}
		if s, ok := eps.slots.take(); ok {
			return s, nil
		}
		waiting := len(eps.slots.draining) > 0
		eps.gate.Unlock()
		if !waiting {
			return NoID, fmt.Errorf("%w: all %d endpoint IDs are in use", pin.ErrFull, MaxEndpoints)
		}
		if err := eps.Barrier(ctx); err != nil {
			return NoID, err
		}
	}
}

// insertKeys writes the keys that lead to e. undo removes the keys written.
func (eps *Maps) insertKeys(e Endpoint) (undo []func() error, err error) {
	slot := uint32(e.Slot)
	if err := pin.InsertOnce(eps.devices, e.Ifindex, slot); err != nil {
		return undo, fmt.Errorf("device %d: %w", e.Ifindex, err)
	}
	undo = append(undo, func() error { return pin.DeleteKey(eps.devices, e.Ifindex) })
	for _, a := range e.Addrs() {
		m, key := eps.addrMap(a)
		if err := pin.InsertOnce(m, key, slot); err != nil {
			return undo, fmt.Errorf("address %v: %w", a, err)
		}
		undo = append(undo, func() error { return pin.DeleteKey(m, key) })
	}
	for _, a := range e.Addrs() {
		if err := eps.addresses.SetLocal(a, e.Identity); err != nil {
			return undo, fmt.Errorf("ipcache of %v: %w", a, err)
		}
		undo = append(undo, func() error { return eps.addresses.RemoveLocal(a) })
	}
	return undo, nil
}

// SetPolicy replaces both tables and the epoch of the endpoint by one 64-bit store, so that a
// packet sees either the old or the new entry. nodetable.ErrNoTable if a table is retired.
func (eps *Maps) SetPolicy(s ID, egress, ingress nodetable.ID) (epoch uint32, err error) {
	if err := eps.gate.Lock(); err != nil {
		return 0, err
	}
	defer eps.gate.Unlock()
	if err := eps.maySet(s, egress, ingress); err != nil {
		return 0, err
	}
	epoch = eps.nextEpoch()
	eps.setPolicy(s, Policy{Egress: egress, Ingress: ingress, Epoch: epoch})
	return epoch, nil
}

// maySet checks that s is a published endpoint and that no table is retired.
func (eps *Maps) maySet(s ID, tables ...nodetable.ID) error {
	if err := eps.mustLead(s); err != nil {
		return err
	}
	for _, t := range tables {
		if eps.withdrawn[t] {
			return fmt.Errorf("table %d: %w: it is retired", t, nodetable.ErrNoTable)
		}
	}
	return nil
}

// Cut denies all traffic of the endpoint in both directions by one store. It is the first step of a
// deletion, and may be repeated.
func (eps *Maps) Cut(s ID) error {
	_, err := eps.SetPolicy(s, nodetable.Deny, nodetable.Deny)
	return err
}

// Unpublish cuts the endpoint and deletes all keys that lead to it, the device last. ErrNotFound if
// no device leads to it. The ID is not reused before a grace period has passed (see Barrier).
//
// After an error the endpoint is cut, and the call may be repeated.
func (eps *Maps) Unpublish(s ID) error {
	if err := eps.gate.Lock(); err != nil {
		return err
	}
	defer eps.gate.Unlock()
	if err := eps.mustLead(s); err != nil {
		return err
	}
	eps.setPolicy(s, Policy{Epoch: eps.nextEpoch()})
	e := eps.at(s)
	for _, a := range e.Addrs() {
		owner, err := eps.slotOf(a)
		if err != nil {
			return fmt.Errorf("address %v: %w", a, err)
		}
		if owner != s {
			continue
		}
		if err := eps.addresses.RemoveLocal(a); err != nil {
			return fmt.Errorf("ipcache of %v: %w", a, err)
		}
		m, key := eps.addrMap(a)
		if err := pin.DeleteKey(m, key); err != nil {
			return fmt.Errorf("address %v: %w", a, err)
		}
	}
	if err := pin.DeleteKey(eps.devices, e.Ifindex); err != nil {
		return fmt.Errorf("device %d: %w", e.Ifindex, err)
	}
	eps.slots.retire(s)
	return nil
}

// mustLead checks that s is a published endpoint and not the host.
func (eps *Maps) mustLead(s ID) error {
	if s == HostID || s > MaxEndpoints {
		return fmt.Errorf("%w: endpoint ID %d does not belong to a pod", pin.ErrInvalid, s)
	}
	owner, err := lookupID(eps.devices, eps.slotRecord(s).Ifindex)
	if err != nil {
		return fmt.Errorf("endpoint ID %d: %w", s, err)
	}
	if owner != s {
		return fmt.Errorf("endpoint ID %d: %w", s, ErrNotFound)
	}
	return nil
}

// Lookup returns one endpoint as the maps hold it. ErrNotFound if no device leads to it.
func (eps *Maps) Lookup(s ID) (Endpoint, error) {
	if err := eps.gate.RLock(); err != nil {
		return Endpoint{}, err
	}
	defer eps.gate.RUnlock()
	if err := eps.mustLead(s); err != nil {
		return Endpoint{}, err
	}
	return eps.check(s)
}

// List returns the endpoints sorted by ID, without the host. Each call reads the kernel's maps.
func (eps *Maps) List() ([]Endpoint, error) {
	if err := eps.gate.RLock(); err != nil {
		return nil, err
	}
	defer eps.gate.RUnlock()
	slots, err := eps.usedSlots()
	if err != nil {
		return nil, err
	}
	var es []Endpoint
	for _, s := range slots {
		e, err := eps.check(s)
		if err != nil {
			return nil, err
		}
		es = append(es, e)
	}
	return es, nil
}

// check reads an endpoint, and sets Incomplete if some keys of the endpoint are missing.
func (eps *Maps) check(s ID) (Endpoint, error) {
	e := eps.at(s)
	for _, a := range e.Addrs() {
		owner, err := eps.slotOf(a)
		if err != nil {
			return e, fmt.Errorf("address %v: %w", a, err)
		}
		info, found, err := eps.addresses.Match(a)
		if err != nil {
			return e, fmt.Errorf("ipcache of %v: %w", a, err)
		}
		if owner != s || !found || info.Identity != e.Identity {
			e.Incomplete = true
		}
	}
	return e, nil
}

// usedSlots returns the IDs that a device leads to, sorted.
func (eps *Maps) usedSlots() ([]ID, error) {
	var used []ID
	var ifindex, slot uint32
	it := eps.devices.Iterate()
	for it.Next(&ifindex, &slot) {
		if slot > 0 && slot <= MaxEndpoints && eps.slotRecord(ID(slot)).Ifindex == ifindex {
			used = append(used, ID(slot))
		}
	}
	if err := it.Err(); err != nil {
		return nil, fmt.Errorf("list devices: %w", err)
	}
	slices.Sort(used)
	return used, nil
}

// dropStrayKeys deletes keys whose endpoint does not have them. Such keys remain if a process is killed during Publish
// or Unpublish.
func (eps *Maps) dropStrayKeys() error {
	used, err := eps.usedSlots()
	if err != nil {
		return err
	}
	published := map[ID]Endpoint{}
	for _, s := range used {
		published[s] = eps.at(s)
	}

	var strayDevices []uint32
	var ifindex, slot uint32
	it := eps.devices.Iterate()
	for it.Next(&ifindex, &slot) {
		if e, ok := published[ID(slot)]; !ok || e.Ifindex != ifindex {
			strayDevices = append(strayDevices, ifindex)
		}
	}
	if err := it.Err(); err != nil {
		return fmt.Errorf("list devices: %w", err)
	}
	owners, err := eps.addrOwners()
	if err != nil {
		return err
	}
	var strayAddrs []netip.Addr
	for a, s := range owners {
		if e, ok := published[s]; s != HostID && (!ok || !slices.Contains(e.Addrs(), a)) {
			strayAddrs = append(strayAddrs, a)
		}
	}

	for _, a := range strayAddrs {
		eps.log.Info("stray address removed", "address", a)
		m, key := eps.addrMap(a)
		if err := pin.DeleteKey(m, key); err != nil {
			return fmt.Errorf("address %v: %w", a, err)
		}
	}
	for _, ifindex := range strayDevices {
		eps.log.Info("stray device removed", "ifindex", ifindex)
		if err := pin.DeleteKey(eps.devices, ifindex); err != nil {
			return fmt.Errorf("device %d: %w", ifindex, err)
		}
	}
	return nil
}

// addrOwners returns every local address with its endpoint ID.
func (eps *Maps) addrOwners() (map[netip.Addr]ID, error) {
	owners := map[netip.Addr]ID{}
	var slot uint32
	var a4 [4]byte
	it := eps.ip4.Iterate()
	for it.Next(&a4, &slot) {
		owners[netip.AddrFrom4(a4)] = ID(slot)
	}
	if err := it.Err(); err != nil {
		return nil, fmt.Errorf("list IPv4 addresses: %w", err)
	}
	var a16 [16]byte
	it = eps.ip6.Iterate()
	for it.Next(&a16, &slot) {
		owners[netip.AddrFrom16(a16)] = ID(slot)
	}
	if err := it.Err(); err != nil {
		return nil, fmt.Errorf("list IPv6 addresses: %w", err)
	}
	return owners, nil
}
