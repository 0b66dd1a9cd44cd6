// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package equivalence

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/ringbuf"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	vectorv1 "github.com/sluice-net/sluice/proto/gen/sluice/policyvector/v1"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/client"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/auditmode"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policysync"
)

// node is a kernel whose programs can be run on packets.
type node struct {
	k              *kernel.Kernel
	evaluator      *ebpf.Program
	fromPod, toPod *ebpf.Program
	events         *ringbuf.Reader
	record         ringbuf.Record
	flows          flows
	addresses      map[netip.Addr]identity.Numeric
	ifindex        uint32 // of the last endpoint without a device

	question, answer []byte // buffers of evaluate
	out              []byte
	frame            []byte
}

func newNode(t testing.TB) *node {
	t.Helper()
	k, dir := openKernel(t)
	n := &node{k: k, addresses: map[netip.Addr]identity.Numeric{}, ifindex: 1}
	must := func(what string, err error) {
		t.Helper()
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
	}
	maps := map[string]*ebpf.Map{}
	infos, err := k.Pins.Infos()
	must("list the maps", err)
	for _, info := range infos {
		m, err := ebpf.LoadPinnedMap(filepath.Join(dir, info.Pin), nil)
		must("open map "+info.Name, err)
		t.Cleanup(func() { m.Close() })
		maps[info.Name] = m
	}
	spec, err := bpf.LoadJudge()
	must("read sluice_judge", err)
	declared := map[string]*ebpf.Map{}
	for name := range spec.Maps {
		declared[name] = maps[name]
	}
	coll, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{
		MapReplacements: declared, Cache: btf.NewCache(),
	})
	must("load sluice_judge", err)
	t.Cleanup(coll.Close)
	n.evaluator = coll.Programs["sluice_judge"]
	for name, p := range map[string]**ebpf.Program{program.FromPod: &n.fromPod, program.ToPod: &n.toPod} {
		found, err := k.Programs.Find(name)
		must("find "+name, err)
		*p = found.Prog
	}
	n.events, err = ringbuf.NewReader(maps[bpf.MapsMapSlEvents])
	must("open the events", err)
	t.Cleanup(func() { n.events.Close() })
	n.events.SetDeadline(time.Unix(1, 0)) // read only what is available, do not wait

	n.question = make([]byte, 14+binary.Size(bpf.MapsSlQuestion{})+binary.Size(bpf.MapsSlAnswer{}))
	n.answer = make([]byte, len(n.question)+256)
	n.out = make([]byte, 512)
	return n
}

// kernelOf is the kernel as the subscriber uses it. Barrier does nothing, so that retired tables
// stay until capacity is needed: a grace period for each of thousands of views would take too long.
type kernelOf struct{ kernel.Policies }

func (kernelOf) Barrier(ctx context.Context) error { return ctx.Err() }

// state is one view, with a newly started subscriber.
type state struct {
	n       *node
	ctx     context.Context
	cancel  context.CancelFunc
	done    chan error
	service *service
	applier *policysync.Applier
	anchors map[uint32]uint16 // by subject, an endpoint of it
	probe   probe
}

// probe is the endpoint at the device on which the programs run.
type probe struct {
	slot    uint16 // 0: none
	subject uint32
	addr    netip.Addr
}

func (n *node) begin(ctx context.Context) (*state, error) {
	s := &state{n: n, service: newService(), anchors: map[uint32]uint16{}, done: make(chan error, 1)}
	s.ctx, s.cancel = context.WithCancel(ctx)
	s.applier = policysync.New(policysync.Config{
		Name: "equivalence", Kernel: kernelOf{n.k.Policies()}, Service: client.NewPolicy(s.service),
	})
	if err := s.applier.Adopt(func(uint16) bool { return false }, auditmode.Audited{}); err != nil {
		return nil, fmt.Errorf("adopt: %w", err)
	}
	go func() { s.done <- s.applier.Run(s.ctx) }()
	return s, nil
}

// end removes the endpoints and leaves the tables to the next subscriber.
func (s *state) end() error {
	s.cancel()
	if err := <-s.done; err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	errs := []error{s.dropProbe()}
	for _, slot := range s.anchors {
		errs = append(errs, s.drop(slot))
	}
	return errors.Join(errs...)
}

// tables applies a message.
func (s *state) tables(m *policyv1.WatchPolicyTablesResponse) error {
	// a subject ends with its last endpoint
	for _, step := range m.GetSteps() {
		gone := step.GetRemoveSubject()
		if gone == nil || s.anchors[gone.GetSubject()] == 0 {
			continue
		}
		if s.probe.subject == gone.GetSubject() {
			if err := s.dropProbe(); err != nil {
				return err
			}
		}
		if err := s.drop(s.anchors[gone.GetSubject()]); err != nil {
			return err
		}
		delete(s.anchors, gone.GetSubject())
	}
	// subscribe to the policies of the subjects in the message
	for _, step := range m.GetSteps() {
		b := step.GetBindSubject()
		if b == nil || s.anchors[b.GetSubject()] != 0 {
			continue
		}
		s.n.ifindex++
		a := netip.AddrFrom4([4]byte{198, 18, byte(s.n.ifindex >> 8), byte(s.n.ifindex)})
		slot, err := s.publish(b.GetSubject(), a, 1+s.n.ifindex%(1<<16))
		if err != nil {
			return err
		}
		s.anchors[b.GetSubject()] = slot
	}
	if err := s.service.say(s.ctx, m); err != nil {
		return fmt.Errorf("message %d: %w", m.GetSeq(), err)
	}
	return nil
}

// MAC addresses of the probe and of its device.
var podMAC, hostMAC = [6]byte{2, 0, 0, 0, 0, 1}, [6]byte{2, 0, 0, 0, 0, 2}

func (s *state) publish(subject uint32, addr netip.Addr, ifindex uint32) (uint16, error) {
	e := endpointmap.Endpoint{
		Ifindex: ifindex, Identity: identity.Numeric(subject), MAC: podMAC, HostMAC: hostMAC, MTU: 1500, Deliver: endpointmap.DeliverPeer,
	}
	if addr.Is4() {
		e.IPv4 = addr
	} else {
		e.IPv6 = addr
	}
	slot, err := s.applier.Publish(subject, []netip.Addr{addr}, func(egress, ingress nodetable.ID) (uint16, uint32, error) {
		e.Policy = endpointmap.Policy{Egress: egress, Ingress: ingress}
		slot, err := s.n.k.Endpoints.Publish(s.ctx, e)
		if err != nil {
			return 0, 0, err
		}
		now, err := s.n.k.Endpoints.Lookup(slot)
		return slot, now.Policy.Epoch, err
	})
	if err != nil {
		return 0, fmt.Errorf("endpoint of subject %d at %v: %w", subject, addr, err)
	}
	// programs may have cached a lookup of the address from before
	s.n.addresses[addr] = 0
	return slot, s.n.k.Addresses.Bump(addr)
}

func (s *state) drop(slot uint16) error {
	return s.applier.Drop(slot, func() error { return s.n.k.Endpoints.Unpublish(slot) })
}

func (s *state) dropProbe() error {
	if s.probe.slot == 0 {
		return nil
	}
	slot := s.probe.slot
	s.probe = probe{}
	return s.drop(slot)
}

// verdict is an answer of the engine or of a program.
type verdict struct {
	action policyv1.Action
	by     netv1.DecidedBy
	rule   uint32
}

func (v verdict) String() string {
	if v.rule == 0 {
		return fmt.Sprintf("%s by %s", v.action, v.by)
	}
	return fmt.Sprintf("%s by %s, rule %d", v.action, v.by, v.rule)
}

func wanted(q *vectorv1.Question) verdict {
	return verdict{q.GetAction(), q.GetDecidedBy(), q.GetRule()}
}

// answerOf returns the verdict of one side. The table that allows everything means that no policy
// is enforced.
func answerOf(side bpf.MapsSlSide) (verdict, error) {
	v := verdict{policyv1.Action(side.Action) + 1, netv1.DecidedBy(side.By), uint32(side.Rule)}
	if side.By == uint8(bpf.MapsSlBySL_BY_TABLE) && side.Table != uint16(nodetable.Allow) {
		return v, fmt.Errorf("evaluated by table %d", side.Table)
	}
	return v, nil
}

// reasonOf returns the drop reason of a verdict; 0: it passes.
func reasonOf(v verdict) event.Reason {
	switch {
	case v.action == policyv1.Action_ACTION_ALLOW:
		return 0
	case v.action == policyv1.Action_ACTION_REDIRECT:
		return event.NoProxy
	case v.by == netv1.DecidedBy_DECIDED_BY_UNKNOWN_IDENTITY:
		return event.IdentityUnknown
	}
	return event.PolicyDenied
}

// askAlone asks the function by which the programs decide.
func (s *state) askAlone(q *vectorv1.Question) (verdict, error) {
	n := s.n
	slot, ok := s.anchors[q.GetSubject()]
	if !ok {
		return verdict{}, fmt.Errorf("subject %d is not bound", q.GetSubject())
	}
	p, ok := s.applier.Of(slot)
	if !ok {
		return verdict{}, fmt.Errorf("subject %d has no policy", q.GetSubject())
	}
	table, direction := p.Egress, bpf.MapsSlDirectionSL_EGRESS
	if q.GetDirection() == netv1.Direction_DIRECTION_INGRESS {
		table, direction = p.Ingress, bpf.MapsSlDirectionSL_INGRESS
	}
	in := bpf.MapsSlQuestion{
		Identity: q.GetPeer(), Point: uint32(q.GetProtocol())<<16 | q.GetPort(), Table: uint16(table), Family: 6,
		Direction: uint8(direction),
	}
	copy(in.Addr[:], q.GetPeerAddress())
	if len(q.GetPeerAddress()) == 4 {
		in.Family = 4
	}
	if _, err := binary.Encode(n.question[14:], binary.NativeEndian, in); err != nil {
		return verdict{}, err
	}
	opts := &ebpf.RunOptions{Data: n.question, DataOut: n.answer}
	ret, err := n.evaluator.Run(opts)
	if err != nil || ret != 0 {
		return verdict{}, fmt.Errorf("the evaluation returns %d: %w", ret, err)
	}
	var out bpf.MapsSlAnswer
	if _, err := binary.Decode(opts.DataOut[14+binary.Size(in):], binary.NativeEndian, &out); err != nil {
		return verdict{}, err
	}
	v, err := answerOf(out.Side)
	if err != nil {
		return v, fmt.Errorf("%w: %s", err, event.Reason(out.Reason))
	}
	if want := reasonOf(v); event.Reason(out.Reason) != want {
		return v, fmt.Errorf("%s, with reason %s, want %s", v, event.Reason(out.Reason), want)
	}
	return v, nil
}

// errElsewhere: a program dropped the packet before any policy evaluated it: such a packet is not
// allowed to be sent.
var errElsewhere = errors.New("no policy was asked")

// askProgram sends a packet out of the subject's device, or into it.
func (s *state) askProgram(q *vectorv1.Question) (verdict, event.Reason, error) {
	n := s.n
	subject, ok := netip.AddrFromSlice(q.GetSubjectAddress())
	peer, ok2 := netip.AddrFromSlice(q.GetPeerAddress())
	if !ok || !ok2 {
		return verdict{}, 0, fmt.Errorf("addresses %x and %x", q.GetSubjectAddress(), q.GetPeerAddress())
	}
	if subject == peer {
		return verdict{}, event.Hairpin, errElsewhere
	}
	if s.probe.subject != q.GetSubject() || s.probe.addr != subject {
		if err := s.dropProbe(); err != nil {
			return verdict{}, 0, err
		}
		slot, err := s.publish(q.GetSubject(), subject, 1)
		if err != nil {
			return verdict{}, 0, err
		}
		s.probe = probe{slot, q.GetSubject(), subject}
	}
	if n.addresses[peer] != identity.Numeric(q.GetPeer()) {
		// as for every change of an address: the mapping, then its bucket
		if err := n.k.Addresses.Set(netip.PrefixFrom(peer, peer.BitLen()), ipmap.Info{Identity: identity.Numeric(q.GetPeer())}); err != nil {
			return verdict{}, 0, err
		}
		if err := n.k.Addresses.Bump(peer); err != nil {
			return verdict{}, 0, err
		}
		n.addresses[peer] = identity.Numeric(q.GetPeer())
	}
	prog, src, dst, srcMAC, dstMAC := n.fromPod, subject, peer, podMAC, hostMAC
	egress := q.GetDirection() == netv1.Direction_DIRECTION_EGRESS
	if !egress {
		prog, src, dst, srcMAC, dstMAC = n.toPod, peer, subject, hostMAC, podMAC
	}
	sport, fresh := n.flows.port(src, dst, uint8(q.GetProtocol()), uint16(q.GetPort()))
	n.frame = packet(n.frame[:0], srcMAC, dstMAC, src, dst, uint8(q.GetProtocol()), sport, uint16(q.GetPort()))
	if !fresh {
		// the same connection in either direction may exist from an earlier question
		if err := n.forget(tupleOf(src, dst, uint8(q.GetProtocol()), sport, uint16(q.GetPort()))); err != nil {
			return verdict{}, 0, err
		}
	}
	ret, err := prog.Run(&ebpf.RunOptions{Data: n.frame, DataOut: n.out})
	if err != nil {
		return verdict{}, 0, fmt.Errorf("run on % x: %w", n.frame, err)
	}
	e, found, err := n.event()
	if err != nil {
		return verdict{}, 0, err
	}
	const shot = 2
	if !found {
		if ret == shot {
			return verdict{}, 0, errElsewhere // without an event
		}
		v := verdict{action: policyv1.Action_ACTION_ALLOW}
		if opensConnection(uint8(q.GetProtocol()), uint16(q.GetPort())) {
			return v, 0, errors.New("it passed without an event")
		}
		return v, 0, nil
	}
	side, other := e.Egress, identity.Numeric(e.DstIdentity)
	if !egress {
		side, other = e.Ingress, identity.Numeric(e.SrcIdentity)
	}
	reason := event.Reason(e.Reason)
	if side.By == uint8(bpf.MapsSlBySL_BY_NOBODY) {
		if reason.Dropped() {
			return verdict{}, reason, errElsewhere
		}
		return verdict{}, reason, fmt.Errorf("%s, and that side was not evaluated", reason)
	}
	if other != identity.Numeric(q.GetPeer()) {
		return verdict{}, reason, fmt.Errorf("the program sees identity %d for the peer", other)
	}
	v, err := answerOf(side)
	if err != nil {
		return v, reason, err
	}
	if want := reasonOf(v); want != 0 && reason != want || (want != 0) != (ret == shot) {
		return v, reason, fmt.Errorf("%s, with reason %s and action %d", v, reason, ret)
	}
	if v.action == policyv1.Action_ACTION_ALLOW && v.rule != 0 && q.GetAction() == policyv1.Action_ACTION_REDIRECT {
		// No proxy runs here, so packets pass a redirect that is not needed to restrict them.
		content, err := n.k.Policies().TableContent(nodetable.ID(side.Table))
		if err != nil {
			return v, reason, err
		}
		if r := content.Rules[v.rule-1]; r.Action == policytable.Redirect && r.PassesWithoutProxy {
			v.action = policyv1.Action_ACTION_REDIRECT
		}
	}
	return v, reason, nil
}

// flow identifies a connection, independent of its direction.
type flow struct {
	low, high         netip.Addr
	lowPort, highPort uint16
	proto             uint8
}

// flows chooses source ports so that no packet belongs to an earlier packet's connection or replies
// to one: the existing conntrack entry would decide such a packet, and no policy would be
// evaluated.
type flows struct {
	last uint16
	used map[flow]struct{}
	// again: flows were forgotten that may have connections in the kernel.
	again bool
}

// maxFlows is the number of flows that are remembered.
const maxFlows = 1 << 20

// ports is the number of source ports, from 1024 on.
const ports = 60000

// port returns the source port of a packet, or the identifier of an ICMP packet. It is not fresh if
// an earlier packet may have used it to the same destination: if the protocol has no ports, if all
// ports were used, or once flows were forgotten. Then the caller removes the connection of that
// packet.
func (f *flows) port(src, dst netip.Addr, proto uint8, dport uint16) (sport uint16, fresh bool) {
	if !hasPorts(proto) {
		return 0, false
	}
	if f.used == nil || len(f.used) >= maxFlows {
		f.used, f.again = make(map[flow]struct{}), f.used != nil
	}
	for range ports {
		f.last = 1024 + (f.last-1023)%ports
		k := flow{src, dst, f.last, dport, proto}
		if proto == protoICMP || proto == protoICMPv6 {
			k.highPort = f.last // its type does not distinguish connections
		}
		if k.high.Less(k.low) || k.high == k.low && k.highPort < k.lowPort {
			k = flow{k.high, k.low, k.highPort, k.lowPort, proto}
		}
		if _, ok := f.used[k]; !ok {
			f.used[k] = struct{}{}
			return f.last, !f.again
		}
	}
	return f.last, false
}

// tupleOf returns the conntrack tuple of a packet.
func tupleOf(src, dst netip.Addr, proto uint8, sport, dport uint16) conntrack.Tuple {
	switch {
	case !hasPorts(proto):
		sport, dport = 0, 0
	case proto == protoICMP || proto == protoICMPv6:
		dport = sport
	}
	return conntrack.Tuple{
		Initiator: netip.AddrPortFrom(src, sport), Responder: netip.AddrPortFrom(dst, dport), Protocol: proto,
	}
}

// hasPorts reports whether more than the addresses distinguishes connections of a protocol.
func hasPorts(proto uint8) bool {
	switch proto {
	case protoICMP, protoTCP, protoUDP, protoICMPv6, protoSCTP:
		return true
	}
	return false
}

// opensConnection reports whether a passing packet creates a conntrack entry, and with it an event:
// of ICMP, only an echo request does. The port holds type and code.
func opensConnection(proto uint8, port uint16) bool {
	const echo, echoV6 = 8 << 8, 128 << 8
	switch proto {
	case protoICMP:
		return port == echo
	case protoICMPv6:
		return port == echoV6
	}
	return true
}

func (n *node) forget(tuple conntrack.Tuple) error {
	c, found, err := n.k.Connections.Lookup(tuple)
	if err != nil || !found {
		return err
	}
	_, err = n.k.Connections.Remove(c)
	return err
}

// event returns the event of the last packet, if there is one.
func (n *node) event() (e bpf.MapsSlEvent, found bool, err error) {
	for {
		err := n.events.ReadInto(&n.record)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return e, found, nil
		}
		if err != nil {
			return e, false, fmt.Errorf("read events: %w", err)
		}
		var got bpf.MapsSlEvent
		if _, err := binary.Decode(n.record.RawSample[:binary.Size(got)], binary.NativeEndian, &got); err != nil {
			return e, false, err
		}
		if got.Type != bpf.MapsSlEventTypeSL_EVENT_CLOSED {
			e, found = got, true
		}
	}
}

const (
	protoICMP, protoTCP, protoUDP, protoICMPv6, protoSCTP = 1, 6, 17, 58, 132
)

// packet appends the first packet of a connection.
func packet(b []byte, srcMAC, dstMAC [6]byte, src, dst netip.Addr, proto uint8, sport, dport uint16) []byte {
	payload := slices.Grow([]byte(nil), 32)
	switch proto {
	case protoTCP:
		payload = binary.BigEndian.AppendUint16(payload, sport)
		payload = binary.BigEndian.AppendUint16(payload, dport)
		payload = append(payload, 0, 0, 0, 1, 0, 0, 0, 0, 5<<4, 0x02, 0xff, 0xff, 0, 0, 0, 0)
	case protoUDP:
		payload = binary.BigEndian.AppendUint16(payload, sport)
		payload = binary.BigEndian.AppendUint16(payload, dport)
		payload = append(payload, 0, 12, 0, 0, 1, 2, 3, 4)
	case protoSCTP:
		payload = binary.BigEndian.AppendUint16(payload, sport)
		payload = binary.BigEndian.AppendUint16(payload, dport)
		payload = append(payload, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 4) // INIT
	case protoICMP, protoICMPv6:
		payload = binary.BigEndian.AppendUint16(payload, dport) // type and code
		payload = append(payload, 0, 0)
		payload = binary.BigEndian.AppendUint16(payload, sport) // identifier
		payload = append(payload, 0, 1, 1, 2, 3, 4)
	default:
		payload = append(payload, 1, 2, 3, 4, 5, 6, 7, 8)
	}
	b = append(append(b, dstMAC[:]...), srcMAC[:]...)
	if src.Is4() {
		b = append(b, 0x08, 0x00)
		at := len(b)
		b = append(b, 0x45, 0)
		b = binary.BigEndian.AppendUint16(b, uint16(20+len(payload)))
		b = append(b, 0x12, 0x34, 0, 0, 64, proto, 0, 0)
		b = append(append(b, src.AsSlice()...), dst.AsSlice()...)
		binary.BigEndian.PutUint16(b[at+10:], checksum(b[at:]))
	} else {
		b = append(b, 0x86, 0xdd, 0x60, 0, 0, 0)
		b = binary.BigEndian.AppendUint16(b, uint16(len(payload)))
		b = append(b, proto, 64)
		b = append(append(b, src.AsSlice()...), dst.AsSlice()...)
	}
	return append(b, payload...)
}

func checksum(b []byte) uint16 {
	var sum uint32
	for i := 0; i+1 < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}
