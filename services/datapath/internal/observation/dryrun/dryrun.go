// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package dryrun runs the programs on a packet to find out what they would do. It loads replicas of the programs, from
// the same objects and with the same constants. Maps that the programs only read are the live maps. Every map that they
// write, and every map that this package does not know, is a private copy with only the entries that the packet needs.
// Therefore a run changes nothing: it creates no connections, counters, budgets or events, and sends no packet. The
// attached programs contain no code for dry runs.
package dryrun

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/proxymap"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
)

// live are the maps that the programs never write.
var live = []string{
	bpf.MapsMapSlIp4, bpf.MapsMapSlIp6, bpf.MapsMapSlIpc4, bpf.MapsMapSlIpc6, bpf.MapsMapSlPgen,
	bpf.MapsMapSlTable, bpf.MapsMapSlClass, bpf.MapsMapSlPorts, bpf.MapsMapSlRule, bpf.MapsMapSlId,
	bpf.MapsMapSlPeer, bpf.MapsMapSlCidr4, bpf.MapsMapSlCidr6, bpf.MapsMapSlNode, bpf.MapsMapSlNodeAddr,
	bpf.MapsMapSlProxyBeat, bpf.MapsMapSlHttpBeat,
}

// privateEntries is the size of a private hash: the two ends of a packet, the host, and the ends of its connection.
const privateEntries = 8

// Devices of a run. Test runs use the loopback device, the first one; an external packet enters through the second
// one, which belongs to no endpoint.
const (
	nearDevice  = 1
	otherDevice = 2
)

// Programs are replicas of the programs, with private maps. They are loaded on first use. Its methods may be called
// concurrently; runs are serialised.
type Programs struct {
	pins      *pin.Maps
	table     []program.Spec
	constants map[string]any

	mu     sync.Mutex // held during a run: the private maps hold the state of one packet
	closed bool
	maps   map[string]*ebpf.Map // private maps; nil until the first run
	progs  map[string]*ebpf.Program
}

// New returns replicas of the programs in a table, with its constants.
func New(pins *pin.Maps, table []program.Spec, constants map[string]any) *Programs {
	return &Programs{pins: pins, table: table, constants: constants, progs: map[string]*ebpf.Program{}}
}

// Question is a packet with the parameters of its run.
type Question struct {
	// Program is the name of the program to run.
	Program string
	// Near is the endpoint at whose device the program runs.
	Near endpointmap.Endpoint
	// Forwarded: the packet entered the node through a device of no endpoint.
	Forwarded bool
	// Tunnel is the device through which a packet from a pod on another node entered; 0 without a tunnel.
	Tunnel uint32
	// Frame is the packet with its Ethernet header.
	Frame []byte
	// Far is the endpoint ID of the other end, NoID if it has none.
	Far endpointmap.ID
	// Connection is the tracked connection of the packet; nil: none.
	Connection *conntrack.Connection
	// LetOut makes the near endpoint allow all egress, to find out what the other side would decide.
	LetOut bool
}

// Answer is the result of a run.
type Answer struct {
	// Reason is the reason why the packet was forwarded or dropped.
	Reason event.Reason
	// Source and Destination are identities, 0 if the program did not look them up.
	Source, Destination identity.Numeric
	// Egress and Ingress are the verdicts of the policies, ByNobody for a side that was not evaluated.
	Egress, Ingress event.SideVerdict
	// Evaluated: a policy was evaluated. Otherwise, policies do not affect the result.
	Evaluated bool
}

// Run runs a program on a packet.
func (ps *Programs) Run(q Question) (Answer, error) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	if ps.closed {
		return Answer{}, pin.ErrClosed
	}
	prog, err := ps.load(q.Program)
	if err != nil {
		return Answer{}, err
	}
	if err := errors.Join(ps.clear(), ps.fill(q)); err != nil {
		return Answer{}, fmt.Errorf("prepare a run of %s: %w", q.Program, err)
	}
	context := skb{Ifindex: nearDevice}
	if q.Forwarded {
		context.IngressIfindex = cmp.Or(q.Tunnel, otherDevice)
	}
	if _, err := prog.Run(&ebpf.RunOptions{Data: q.Frame, Context: context}); err != nil {
		return Answer{}, fmt.Errorf("run %s: %w", q.Program, err)
	}
	return ps.answer(q.Program)
}

// Close unloads the programs, after the current run.
func (ps *Programs) Close() error {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	ps.closed = true
	var errs []error
	for _, p := range ps.progs {
		errs = append(errs, p.Close())
	}
	for _, m := range ps.maps {
		errs = append(errs, m.Close())
	}
	return errors.Join(errs...)
}

// skb is the part of struct __sk_buff that a test run accepts.
type skb struct {
	Len, PktType, Mark, QueueMapping, Protocol, VlanPresent, VlanTCI, VlanProto, Priority uint32
	IngressIfindex, Ifindex                                                               uint32
}

// cells are the indices of the programs in sl_run.
var cells = map[string]uint32{
	program.FromPod: uint32(bpf.MapsSlProgramSL_PROGRAM_FROM_POD),
	program.ToPod:   uint32(bpf.MapsSlProgramSL_PROGRAM_TO_POD),
}

// load loads a program and its maps, if it is not loaded yet.
func (ps *Programs) load(name string) (*ebpf.Program, error) {
	if p := ps.progs[name]; p != nil {
		return p, nil
	}
	at := slices.IndexFunc(ps.table, func(s program.Spec) bool { return s.Name == name })
	if at < 0 {
		return nil, fmt.Errorf("%q: %w", name, program.ErrNoProgram)
	}
	spec, err := ps.table[at].Load()
	if err != nil {
		return nil, fmt.Errorf("read the compiled program %s: %w", name, err)
	}
	if err := program.SetConstants(spec, ps.constants); err != nil {
		return nil, fmt.Errorf("program %s: %w", name, err)
	}
	bound := map[string]*ebpf.Map{}
	for _, m := range live {
		bound[m] = ps.pins.Map(m)
	}
	private := privateMaps(spec, bound)
	if ps.maps == nil {
		if ps.maps, err = create(private); err != nil {
			return nil, err
		}
	}
	for m := range private {
		bound[m] = ps.maps[m]
	}
	coll, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: bound})
	if err != nil {
		return nil, fmt.Errorf("load a replica of %s: %w", name, err)
	}
	defer coll.Close()
	ps.progs[name] = coll.DetachProgram(name)
	return ps.progs[name], nil
}

// privateMaps replaces the maps of a program that are not bound by small private ones, and returns them. A run needs no
// per-CPU maps and no LRU: it is the only user.
func privateMaps(spec *ebpf.CollectionSpec, bound map[string]*ebpf.Map) map[string]*ebpf.MapSpec {
	private := map[string]*ebpf.MapSpec{}
	for name, ms := range spec.Maps {
		if bound[name] != nil || name == ".rodata" {
			continue
		}
		ms.Flags = 0
		switch name {
		case bpf.MapsMapSlEvents:
			ms.MaxEntries = uint32(os.Getpagesize()) // the minimum size
		case bpf.MapsMapSlMetrics, bpf.MapsMapSlRun:
			ms.Type = ebpf.Array
		default:
			ms.Type, ms.MaxEntries = ebpf.Hash, privateEntries
		}
		private[name] = ms
	}
	return private
}

func create(specs map[string]*ebpf.MapSpec) (_ map[string]*ebpf.Map, err error) {
	made := map[string]*ebpf.Map{}
	for name, ms := range specs {
		if made[name], err = ebpf.NewMap(ms); err != nil {
			delete(made, name)
			for _, m := range made {
				m.Close()
			}
			return nil, fmt.Errorf("create map %s of the replicas: %w", name, err)
		}
	}
	return made, nil
}

// clear empties the private hashes.
func (ps *Programs) clear() error {
	for name, m := range ps.maps {
		if m.Type() != ebpf.Hash {
			continue
		}
		key := make([]byte, m.KeySize())
		err := m.NextKey(nil, &key)
		for err == nil {
			if err = m.Delete(key); err == nil {
				err = m.NextKey(nil, &key)
			}
		}
		if !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("map %s: %w", name, err)
		}
	}
	return nil
}

// fill copies the entries that the run needs from the maps that the programs write. It copies no event limits: without
// them, the program sends no events.
func (ps *Programs) fill(q Question) error {
	var errs []error
	put := func(name string, key, value any) {
		// in place: no other program runs on these maps
		if err := ps.maps[name].Put(key, value); err != nil {
			errs = append(errs, fmt.Errorf("map %s: %w", name, err))
		}
	}
	// the device of the run instead of the endpoint's own
	var slot uint32
	switch err := ps.pins.Map(bpf.MapsMapSlIf).Lookup(q.Near.Ifindex, &slot); {
	case err == nil:
		put(bpf.MapsMapSlIf, uint32(nearDevice), slot)
	case !errors.Is(err, ebpf.ErrKeyNotExist):
		return fmt.Errorf("look up the endpoint ID of device %d: %w", q.Near.Ifindex, err)
	}
	slots := []endpointmap.ID{q.Near.Slot, q.Far, endpointmap.HostID}
	if c := q.Connection; c != nil {
		slots = append(slots, c.From.Slot, c.To.Slot)
		if c.Initiator.Addr().Is4() {
			put(bpf.MapsMapSlCt4, c.Key4(), c.Value)
		} else {
			put(bpf.MapsMapSlCt6, c.Key6(), c.Value)
		}
	}
	for _, s := range slots {
		if s <= endpointmap.MaxEndpoints {
			e := ps.endpoint(s)
			if q.LetOut && s == q.Near.Slot {
				e[0] = e[0]&^0xffff | uint64(nodetable.Allow)
			}
			put(bpf.MapsMapSlEp, uint32(s), e)
			put(bpf.MapsMapSlProxyTaken, uint32(s), bpf.MapsSlProxyTaken{})
			put(bpf.MapsMapSlHttpTaken, uint32(s), bpf.MapsSlProxyTaken{})
		}
	}
	// the state of the proxies; their queues are empty
	for kind := policytable.ProxyDNS; kind <= proxymap.DNSNamespace; kind++ {
		var p bpf.MapsSlProxy
		if err := ps.pins.Map(bpf.MapsMapSlProxy).Lookup(uint32(kind), &p); err != nil {
			return fmt.Errorf("look up the proxy for %s: %w", kind, err)
		}
		put(bpf.MapsMapSlProxy, uint32(kind), bpf.MapsSlProxy{Device: p.Device, State: p.State})
	}
	// the budgets of both families
	for _, sender := range []endpointmap.ID{q.Near.Slot, conntrack.Outside} {
		for family := range uint32(2) {
			at := uint32(sender)<<1 | family
			var b bpf.MapsSlBudget
			if err := ps.pins.Map(bpf.MapsMapSlBudget).Lookup(at, &b); err != nil {
				return fmt.Errorf("look up the budget of endpoint ID %d: %w", sender, err)
			}
			put(bpf.MapsMapSlBudget, at, b)
		}
	}
	return errors.Join(errs...)
}

// record is an element of sl_ep as packed entries; the first is the policy.
type record [unsafe.Sizeof(bpf.MapsSlEndpoint{}) / 8]uint64

// endpoint copies the record of an endpoint, with one load per packed entry.
func (ps *Programs) endpoint(s endpointmap.ID) (r record) {
	memory := ps.pins.Memory(bpf.MapsMapSlEp)
	for i := range r {
		r[i] = atomic.LoadUint64(pin.Word(memory, (int(s)*len(r)+i)*8))
	}
	return r
}

// answer reads the result of a run: the packet in its cell of sl_run, and the reason from the only counter that has
// changed.
func (ps *Programs) answer(name string) (a Answer, err error) {
	metrics := ps.maps[bpf.MapsMapSlMetrics]
	counters, err := pin.AllElements[bpf.MapsSlCounter](metrics)
	if err != nil {
		return a, fmt.Errorf("read the counters of %s: %w", name, err)
	}
	at := slices.IndexFunc(counters, func(c bpf.MapsSlCounter) bool { return c.Packets != 0 })
	if at < 0 {
		return a, fmt.Errorf("%s has not counted the packet", name)
	}
	// in place: as in fill
	if err := metrics.Put(uint32(at), bpf.MapsSlCounter{}); err != nil {
		return a, fmt.Errorf("clear the counters of %s: %w", name, err)
	}
	raw, err := ps.maps[bpf.MapsMapSlRun].LookupBytes(cells[name])
	if err != nil {
		return a, fmt.Errorf("read the cell of %s: %w", name, err)
	}
	var p bpf.MapsSlPacket
	if _, err := binary.Decode(raw, binary.NativeEndian, &p); err != nil {
		return a, fmt.Errorf("decode the cell of %s: %w", name, err)
	}
	return Answer{
		Reason: event.Reason(at >> 1),
		Source: identity.Numeric(p.SrcIdentity), Destination: identity.Numeric(p.DstIdentity),
		Egress: event.SideOf(p.Egress), Ingress: event.SideOf(p.Ingress), Evaluated: p.Sides != 0,
	}, nil
}
