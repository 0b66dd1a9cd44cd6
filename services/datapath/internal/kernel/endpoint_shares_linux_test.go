// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/bound"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
	"github.com/sluice-net/sluice/services/datapath/internal/service/translation"
)

// TestKernelTranslationsOfOnePodLeaveThoseOfOthers: a pod sends requests to itself through a Service from
// 60,000 ports, twice from each so that the LRU map considers them used. A connection of another pod, whose
// Service has another list by then, keeps its backend.
func TestKernelTranslationsOfOnePodLeaveThoseOfOthers(t *testing.T) {
	n := newServiceNode(t)
	col, err := n.k.Connections.NewCollector(conntrack.CollectorOptions{})
	must(t, "make a collector", err)
	collect(t, col)
	client := newPod(t, n.k, "sl-client", 10, endpointmap.DeliverPeer)
	flooder := newPod(t, n.k, "sl-flooder", 11, endpointmap.DeliverPeer)
	var backends []netip.AddrPort
	for i := range byte(2) {
		s := newPod(t, n.k, fmt.Sprintf("sl-server%d", i), 20+i, endpointmap.DeliverPeer)
		backends = append(backends, netip.AddrPortFrom(s.IPv4, 8080))
		tell(t, s.ns, backends[i])
	}
	vip := serviceAddr(backends[0].Addr(), 1)
	front := n.lead(vip, feAddress, backends[0])
	own := serviceAddr(flooder.IPv4, 2)
	n.lead(own, feAddress, netip.AddrPortFrom(flooder.IPv4, 8080))
	stream, err := dialIn(t, client.ns, "tcp", vip)
	must(t, "connect", err)
	_, err = readLine(stream)
	must(t, "read", err)
	// change the list; the connection keeps its backend
	n.backend++
	putBackend(t, n.k, n.backend, backends[1], beActive, 1)
	f := bpf.MapsSlFront{List: putMembers(t, n.k, n.member+1, n.backend), Port: vip.Port()}
	copy(f.Addr[:], vip.Addr().AsSlice())
	putFront(t, n.k, front, f)
	echo := func() error {
		_ = stream.SetDeadline(time.Now().Add(3 * time.Second))
		if _, err := stream.Write([]byte("on\n")); err != nil {
			return err
		}
		got, err := readLine(stream)
		if err == nil && got != "on" {
			return fmt.Errorf("%q", got)
		}
		return err
	}
	must(t, "echo", echo())
	for round := range 3 {
		before := n.counters(t)
		inNetns(t, flooder.ns, func() {
			var frames [][]byte
			for i := range 60000 {
				proto := []byte{protoTCP, protoUDP}[round&1]
				b := frame(flooder.HostMAC, flooder.MAC, etherIPv4,
					ip4Header{src: flooder.IPv4, dst: own.Addr(), proto: proto}.with(tcp(uint16(2000+i), own.Port(), flagSYN)))
				frames = append(frames, b, b)
			}
			sendRaw(t, "eth0", frames...)
		})
		servicetest.Eventually(t, "the flood", func() bool {
			sum := uint64(0)
			for c, now := range n.counters(t) {
				if c.direction == event.Egress {
					sum += now.Packets - before[c].Packets
				}
			}
			return sum >= 110_000
		})
		collect(t, col)
	}
	still := false
	must(t, "list", n.k.Translations.Each(func(tr translation.Translation) error {
		still = still || tr.Source.Addr() == client.IPv4 && tr.Protocol == protoTCP && tr.Backend == backends[0]
		return nil
	}))
	if !still {
		t.Error("the translation of another pod's connection was evicted")
	}
	if err := echo(); err != nil {
		t.Errorf("a pod's requests to itself through a Service have ended another pod's connection: %v", err)
	}
}

// hairpins sends one datagram from each of count ports of a pod, starting at first, to a Service whose backend
// is the pod. It returns how many passed.
func (n *serviceNode) hairpins(pod *pod, vip netip.AddrPort, first, count int) int {
	n.Helper()
	var frames [][]byte
	for i := range count {
		frames = append(frames, frame(pod.HostMAC, pod.MAC, etherIPv4,
			ip4Header{src: pod.IPv4, dst: vip.Addr(), proto: protoUDP}.with(udp(uint16(first+i), vip.Port()))))
	}
	over := cell{event.TranslationShare, event.Egress}
	held := func() int { return n.k.Bounds.Held(bound.Translations4, pod.Slot) }
	before, had, passed := n.counters(n.T), held(), 0
	inNetns(n.T, pod.ns, func() { sendRaw(n.T, "eth0", frames...) })
	servicetest.Eventually(n.T, "the datagrams", func() bool {
		passed = (held() - had) / 2
		return passed+int(n.counters(n.T)[over].Packets-before[over].Packets) >= count
	})
	return passed
}

// TestKernelPodsThatComeLaterHaveTheirShareOfTranslations: one pod has used the capacity that pods share. A
// second pod gets its guarantee immediately, and the translations of the first pod are reduced.
func TestKernelPodsThatComeLaterHaveTheirShareOfTranslations(t *testing.T) {
	n := newServiceNode(t)
	greedy := newPod(t, n.k, "sl-greedy", 10, endpointmap.DeliverPeer)
	late := newPod(t, n.k, "sl-late", 11, endpointmap.DeliverPeer)
	vip := func(p *pod, last byte) netip.AddrPort {
		at := serviceAddr(p.IPv4, last)
		n.lead(at, feAddress, netip.AddrPortFrom(p.IPv4, 8080))
		return at
	}
	first, second := vip(greedy, 1), vip(late, 2)
	size := n.k.Bounds.Size(bound.Translations4)
	if passed := n.hairpins(greedy, first, 1000, size); passed != size/2 {
		t.Fatalf("%d hairpins passed, want all translations of pods, two for each: %d", passed, size/2)
	}
	const few = 500
	if passed := n.hairpins(late, second, 1000, few); passed != few {
		t.Errorf("%d of %d passed of the pod that came later", passed, few)
	}
	pass := func() translation.Pass {
		p, err := n.k.Translations.Collect(conntrack.MonotonicSeconds(), n.k.Connections, conntrack.DefaultTimeouts())
		must(t, "collect", err)
		return p
	}
	p := pass()
	if p.Surplus != 2*few {
		t.Errorf("%d translations were removed, want those beyond the half: %d", p.Surplus, 2*few)
	}
	of := func(e *pod) int { return n.k.Bounds.Held(bound.Translations4, e.Slot) }
	if of(greedy) != size-2*few || of(late) != 2*few {
		t.Errorf("the pods have %d and %d translations, want %d and %d", of(greedy), of(late), size-2*few, 2*few)
	}
	if got := n.k.Bounds.Guarantee(bound.Translations4); got != size/4 {
		t.Errorf("each of two pods is guaranteed %d translations, want %d", got, size/4)
	}
	if passed := n.hairpins(greedy, first, 30_000, 100); passed != 0 {
		t.Errorf("%d more passed of the pod that is above its guarantee", passed)
	}
	rest := size/8 - few
	if passed := n.hairpins(late, second, 30_000, rest+100); passed != rest {
		t.Errorf("%d more passed of the other one, want up to its guarantee: %d", passed, rest)
	}
}

// TestKernelUDPFlowsAreNotRefused: UDP flows of a pod use at most three quarters of the shared translations; the
// packets of further flows pass without a stored translation. If other translations use the rest, the collector runs
// early, and removes the translations of flows that have been idle for 10 s.
func TestKernelUDPFlowsAreNotRefused(t *testing.T) {
	n := newServiceNode(t)
	client, server := newPod(t, n.k, "sl-client", 10, endpointmap.DeliverPeer),
		newPod(t, n.k, "sl-server", 11, endpointmap.DeliverPeer)
	vip, own := serviceAddr(server.IPv4, 1), serviceAddr(client.IPv4, 2)
	n.lead(vip, feAddress, netip.AddrPortFrom(server.IPv4, 8080))
	n.lead(own, feAddress, netip.AddrPortFrom(client.IPv4, 8080))
	size := n.k.Bounds.Size(bound.Translations4)
	held := func() int { return n.k.Bounds.Held(bound.Translations4, client.Slot) }
	sent := func() (all, refused uint64) {
		for c, now := range n.counters(t) {
			if c.direction == event.Egress {
				all += now.Packets
			}
			if c == (cell{event.TranslationShare, event.Egress}) {
				refused += now.Packets
			}
		}
		return all, refused
	}
	flows := func(first, count int) {
		t.Helper()
		var frames [][]byte
		for i := range count {
			frames = append(frames, frame(client.HostMAC, client.MAC, etherIPv4,
				ip4Header{src: client.IPv4, dst: vip.Addr(), proto: protoUDP}.with(udp(uint16(first+i), vip.Port()))))
		}
		before, refusedBefore := sent()
		inNetns(t, client.ns, func() { sendRaw(t, "eth0", frames...) })
		servicetest.Eventually(t, "the datagrams", func() bool {
			all, refused := sent()
			if refused != refusedBefore {
				t.Fatalf("%d of %d datagrams were refused", refused-refusedBefore, count)
			}
			return all >= before+uint64(count)
		})
	}
	pass := func(later uint32, surplus int) {
		t.Helper()
		now := conntrack.MonotonicSeconds() + later
		p, err := n.k.Translations.Collect(now, n.k.Connections, conntrack.DefaultTimeouts())
		must(t, "collect", err)
		if p.Surplus != surplus {
			t.Errorf("%d idle translations were removed, want %d; %d are left", p.Surplus, surplus, held())
		}
	}
	wanted := func(want bool) {
		t.Helper()
		if got := n.k.Translations.Pressed(); got != want {
			t.Errorf("Pressed() = %t with %d of %d translations", got, held(), size)
		}
	}
	flows(1000, size)
	flows(1000, size) // the same ones again
	if held() != size*3/4 {
		t.Errorf("%d translations are stored, want %d", held(), size*3/4)
	}
	wanted(false)
	if passed := n.hairpins(client, own, 1000, size/16); passed != size/16 {
		t.Errorf("%d of %d requests of the pod to itself passed", passed, size/16)
	}
	wanted(true)
	pass(0, 0) // nothing is idle
	wanted(false)
	pass(10, size/8)
	if held() != size*3/4 {
		t.Errorf("%d translations are left, want %d", held(), size*3/4)
	}
}

// TestKernelRecordsLeaveCapacityForConnections: only half of a pod's share goes to records and copies, which a
// connection can do without.
func TestKernelRecordsLeaveCapacityForConnections(t *testing.T) {
	n := newServiceNode(t)
	client, server := newPod(t, n.k, "sl-client", 10, endpointmap.DeliverPeer),
		newPod(t, n.k, "sl-server", 11, endpointmap.DeliverPeer)
	backend, vip := netip.AddrPortFrom(server.IPv4, 8080), serviceAddr(server.IPv4, 1)
	tell(t, server.ns, backend)
	n.lead(vip, feAddress, backend)
	const guarantee = 60
	update(t, n.k, bpf.MapsMapSlBound, uint32(bound.Translations4), bpf.MapsSlBound{Guarantee: guarantee})
	// with three translations each until half is used, then with one
	const want = guarantee/2/3 + guarantee/2
	for i := range want {
		c, err := dialIn(t, client.ns, "tcp", vip)
		if err != nil {
			t.Fatalf("connection %d of %d: %v", i+1, want, err)
		}
		if _, err := readLine(c); err != nil {
			t.Fatalf("connection %d of %d: read: %v", i+1, want, err)
		}
	}
	if got := n.k.Bounds.Held(bound.Translations4, client.Slot); got != guarantee {
		t.Errorf("%d translations are charged to the pod, want %d", got, guarantee)
	}
	if n.k.Bounds.Refused(bound.Translations4) {
		t.Error("a pass is wanted because of a record that was left out")
	}
}

// TestKernelAnsweredHairpinIsChargedThreeTranslations: for a pod's connection to itself through a Service, the programs
// charge the pod for the translation of requests, the translation of answers and a copy of the latter. The collector
// counts the same three.
func TestKernelAnsweredHairpinIsChargedThreeTranslations(t *testing.T) {
	n := newServiceNode(t)
	p := newPod(t, n.k, "sl-pod", 10, endpointmap.DeliverPeer)
	vip, at := serviceAddr(p.IPv4, 1), netip.AddrPortFrom(p.IPv4, 8080)
	tell(t, p.ns, at)
	n.lead(vip, feAddress, at)
	update(t, n.k, bpf.MapsMapSlBound, uint32(bound.Translations4), bpf.MapsSlBound{Guarantee: 100})
	askUDP(t, p.ns, vip, 64)
	if got := n.k.Bounds.Held(bound.Translations4, p.Slot); got != 3 {
		t.Errorf("%d translations are charged to the pod, want 3", got)
	}
	_, err := n.k.Translations.Collect(conntrack.MonotonicSeconds(), n.k.Connections, conntrack.DefaultTimeouts())
	must(t, "collect", err)
	if got := n.k.Bounds.Held(bound.Translations4, p.Slot); got != 3 {
		t.Errorf("the collector counts %d translations of the pod, want 3", got)
	}
}

// TestKernelSharesOutliveTheirCollector: while no collector runs, a pod that was refused gets another eighth of
// its guarantee every ten seconds.
func TestKernelSharesOutliveTheirCollector(t *testing.T) {
	n := newServiceNode(t)
	p := newPod(t, n.k, "sl-alone", 10, endpointmap.DeliverPeer)
	vip := serviceAddr(p.IPv4, 1)
	n.lead(vip, feAddress, netip.AddrPortFrom(p.IPv4, 8080))
	const guarantee = 160
	b := bpf.MapsSlBound{Guarantee: guarantee}
	update(t, n.k, bpf.MapsMapSlBound, uint32(bound.Translations4), b)
	if passed := n.hairpins(p, vip, 1000, 200); passed != guarantee/2 {
		t.Fatalf("%d passed, want %d", passed, guarantee/2)
	}
	if !n.k.Translations.Pressed() {
		t.Error("a pod was refused, and no pass is wanted")
	}
	for _, waits := range []uint32{1, 2} {
		b.RefusedS = conntrack.MonotonicSeconds() - 10*waits - 5 // as if the time had passed
		update(t, n.k, bpf.MapsMapSlBound, uint32(bound.Translations4), b)
		if passed := n.hairpins(p, vip, 1000+1000*int(waits), 200); passed != guarantee/8/2 {
			t.Errorf("%d passed after %d waits, want an eighth, %d", passed, waits, guarantee/8/2)
		}
	}
}

// TestKernelSharesOfASlotBeginAnew: an endpoint is not charged for the previous endpoint with its ID.
func TestKernelSharesOfASlotBeginAnew(t *testing.T) {
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	var held bpf.MapsSlHeld
	held.N[bound.Translations4] = 1000
	for s := range uint32(endpointmap.MaxEndpoints) {
		update(t, k, bpf.MapsMapSlHeld, s+1, held)
	}
	e := publish(t, k, a)
	if got := k.Bounds.Held(bound.Translations4, e.Slot); got != 0 {
		t.Errorf("the new endpoint with ID %d has %d translations", e.Slot, got)
	}
}

// answers runs the program of a pod's device on a datagram from the pod, and reports whether the pod got an
// answer.
func (n *serviceNode) answers(p *pod, to netip.AddrPort) bool {
	n.Helper()
	in := frame(p.HostMAC, p.MAC, etherIPv4,
		ip4Header{src: p.IPv4, dst: to.Addr(), proto: protoUDP}.with(udp(40000, to.Port())))
	verdict, err := n.k.program(program.FromPod).Run(&ebpf.RunOptions{
		Data: in, DataOut: make([]byte, len(in)+256), Context: skbContext{Ifindex: p.Ifindex},
	})
	must(n.T, "run", err)
	return verdict == verdictRedirect
}

// TestKernelAnswersToOnePodLeaveThoseToOthers: a pod sends more requests to a Service without backends than a
// CPU answers in a second. Other pods still get their port unreachable errors.
func TestKernelAnswersToOnePodLeaveThoseToOthers(t *testing.T) {
	stayOnOneCPU(t)
	n := newServiceNode(t)
	greedy := newPod(t, n.k, "sl-greedy", 10, endpointmap.DeliverPeer)
	others := []*pod{
		newPod(t, n.k, "sl-other0", 11, endpointmap.DeliverPeer), newPod(t, n.k, "sl-other1", 12, endpointmap.DeliverPeer),
	}
	vip := serviceAddr(greedy.IPv4, 1)
	n.lead(vip, feAddress)
	const flood, few = 3000, 20
	answered := 0
	for range flood {
		if n.answers(greedy, vip) {
			answered++
		}
	}
	for i := range few {
		for _, o := range others {
			if !n.answers(o, vip) {
				t.Fatalf("datagram %d of another pod was not answered, after %d of %d of the first pod", i, answered, flood)
			}
		}
	}
	if answered == flood {
		t.Errorf("all %d datagrams were answered", flood)
	}
	t.Logf("%d of %d datagrams of the first pod were answered", answered, flood)
}

// piece sends a fragment of a pod's datagram to another address, and reports whether it passed.
func (n *serviceNode) piece(p *pod, to netip.Addr, id uint16, last bool) bool {
	n.Helper()
	h := ip4Header{src: p.IPv4, dst: to, proto: protoUDP, frag: 0x2000}
	payload := udp(40000, 50000)
	if last {
		h.frag, payload = 64/8, make([]byte, 64)
	} else {
		payload = append(payload, make([]byte, 64-len(payload))...)
	}
	packet := h.with(payload)
	binary.BigEndian.PutUint16(packet[4:], id)
	binary.BigEndian.PutUint16(packet[10:], 0)
	binary.BigEndian.PutUint16(packet[10:], checksum(packet[:20]))
	in := frame(p.HostMAC, p.MAC, etherIPv4, packet)
	verdict, err := n.k.program(program.FromPod).Run(&ebpf.RunOptions{
		Data: in, DataOut: make([]byte, len(in)+256), Context: skbContext{Ifindex: p.Ifindex},
	})
	must(n.T, "run", err)
	return verdict != verdictShot
}

// TestKernelFragmentsOfOnePodLeaveThoseOfOthers: a pod sends the first fragments of more datagrams than the map holds,
// and completes none. The datagram whose first fragment another pod had already sent is still delivered. A pod that
// completes its datagrams is not limited.
func TestKernelFragmentsOfOnePodLeaveThoseOfOthers(t *testing.T) {
	n := newServiceNode(t)
	greedy := newPod(t, n.k, "sl-greedy", 10, endpointmap.DeliverPeer)
	other := newPod(t, n.k, "sl-other", 11, endpointmap.DeliverPeer)
	to := newPod(t, n.k, "sl-server", 12, endpointmap.DeliverPeer).IPv4
	size := n.k.Bounds.Size(bound.Fragments)
	if !n.piece(other, to, 1, false) {
		t.Fatal("the first fragment of a datagram did not pass")
	}
	before, passed := n.counters(t), 0
	const flood = 20_000
	for id := range flood {
		if n.piece(greedy, to, uint16(id), false) {
			passed++
		}
	}
	refused := cell{event.FragmentShare, event.Egress}
	dropped := n.counters(t)[refused].Packets - before[refused].Packets
	// emulation may be so slow that a part of the share is renewed
	if passed < size-1 || passed > flood/2 || int(dropped) != flood-passed {
		t.Errorf("%d of %d datagrams were begun and %d dropped for the share, want about %d", passed, flood, dropped, size)
	}
	if !n.piece(other, to, 1, true) {
		t.Error("the last fragment of another pod's datagram was dropped")
	}
	for id := range 2 * size {
		if !n.piece(other, to, uint16(id+2), false) || !n.piece(other, to, uint16(id+2), true) {
			t.Fatalf("datagram %d of a pod that ends its datagrams did not pass", id)
		}
	}
	for i, want := range []int{0, passed} {
		_, removed, err := n.k.Bounds.CollectFragments()
		must(t, "collect", err)
		if i == 0 && removed != 0 || removed < want {
			t.Errorf("pass %d removed %d datagrams, want %d", i, removed, want)
		}
	}
	if got := n.k.Bounds.Total(bound.Fragments); got != 0 {
		t.Errorf("%d datagrams are counted, and none is there", got)
	}
	if !n.piece(greedy, to, 7, false) || !n.piece(greedy, to, 7, true) {
		t.Error("the pod is refused although it has no datagrams any more")
	}
}

// TestKernelEventsOfOnePodLeaveRoomInTheRing: while events are not read, a pod causes more events than the ring
// holds. There is still capacity for the events of another pod.
func TestKernelEventsOfOnePodLeaveRoomInTheRing(t *testing.T) {
	stayOnOneCPU(t)
	th := newTheatre(t, false)
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	for _, e := range th.pods {
		e.Policy = endpointmap.Policy{}
		publish(t, k, e)
	}
	k.Bounds.DivideEvents(len(th.pods))
	send := func(who string, n uint32) {
		_, ctx, in := th.frame(say(who, "world", datagram(1, 53), 0))
		opts := &ebpf.RunOptions{Data: in, DataOut: make([]byte, 256+len(in)), Context: ctx, Repeat: n}
		_, err := k.program(program.FromPod).Run(opts)
		must(t, "run", err)
	}
	send("a", 20_000)
	const few = 100
	send("b", few)
	events, err := k.Events.Read()
	must(t, "Events", err)
	defer events.Close()
	of := map[netip.Addr]int{}
	for _, e := range drain(t, events) {
		of[e.Source.Addr()]++
	}
	size, all := k.Bounds.Size(bound.Events), 0
	for _, n := range of {
		all += n
	}
	if of[th.addr("b")] != few || of[th.addr("a")] < size/2 || all >= size {
		t.Errorf("%d events of the pod that floods and %d of the other, want all %d of these, in a ring of %d",
			of[th.addr("a")], of[th.addr("b")], few, size)
	}
	if got := k.Bounds.Total(bound.Events); got != 0 {
		t.Errorf("%d events are counted in an empty ring", got)
	}
}

// TestKernelEventsFromOutsideLeaveRoomInTheRing: until a reader comes, packets that belong to no endpoint use at most the
// common half of the ring.
func TestKernelEventsFromOutsideLeaveRoomInTheRing(t *testing.T) {
	stayOnOneCPU(t)
	th := newTheatre(t, false)
	o := testOptions(kerneltest.NewBPFFS(t))
	o.Routing = RoutingOverlay
	k := openKernel(t, o)
	for _, e := range th.pods {
		e.Policy = endpointmap.Policy{}
		publish(t, k, e)
	}
	k.Bounds.DivideEvents(len(th.pods))
	_, ctx, in := th.frame(say("b", "world", datagram(1, 53), 0))
	// without a tunnel key
	_, err := k.program(program.FromOverlay).Run(&ebpf.RunOptions{Data: in, DataOut: make([]byte, 256+len(in)), Repeat: 20_000})
	must(t, "run", err)
	const few = 100
	opts := &ebpf.RunOptions{Data: in, DataOut: make([]byte, 256+len(in)), Context: ctx, Repeat: few}
	_, err = k.program(program.FromPod).Run(opts)
	must(t, "run", err)
	events, err := k.Events.Read()
	must(t, "Events", err)
	defer events.Close()
	outside, own := 0, 0
	for _, e := range drain(t, events) {
		if e.Reason == event.TunnelKey {
			outside++
		} else {
			own++
		}
	}
	if size := k.Bounds.Size(bound.Events); own != few || outside < size/3 || outside > size*2/3 {
		t.Errorf("%d events from outside and %d of the pod in a ring of %d, want all %d of the pod", outside, own, size, few)
	}
}

// TestKernelAffinityOfOnePodLeavesThatOfOthers: a pod uses more Services with affinity than its share allows
// entries. Another pod that comes later keeps its backend, and so does a pod that came earlier.
func TestKernelAffinityOfOnePodLeavesThatOfOthers(t *testing.T) {
	n := newServiceNode(t)
	greedy := newPod(t, n.k, "sl-greedy", 10, endpointmap.DeliverPeer)
	other := newPod(t, n.k, "sl-other", 11, endpointmap.DeliverPeer)
	server := newPod(t, n.k, "sl-server", 12, endpointmap.DeliverPeer)
	const guarantee, common, services = 40, 20, 200
	update(t, n.k, bpf.MapsMapSlBound, uint32(bound.Affinity4), bpf.MapsSlBound{Guarantee: guarantee, Common: common})
	at := netip.AddrPortFrom(server.IPv4, 8080)
	vip := func(i int) netip.AddrPort { return serviceAddr(server.IPv4, byte(i+1)) }
	for i := range services {
		number := n.lead(vip(i), feAddress, at)
		f := bpf.MapsSlFront{
			List: putMembers(t, n.k, n.member, n.backend), Port: vip(i).Port(), Timeout: 100, Group: uint16(i + 1),
		}
		copy(f.Addr[:], vip(i).Addr().AsSlice())
		putFront(t, n.k, number, f)
	}
	ask := func(p *pod, i int) {
		t.Helper()
		in := frame(p.HostMAC, p.MAC, etherIPv4,
			ip4Header{src: p.IPv4, dst: vip(i).Addr(), proto: protoUDP}.with(udp(uint16(40000+i), vip(i).Port())))
		verdict, err := n.k.program(program.FromPod).Run(&ebpf.RunOptions{
			Data: in, DataOut: make([]byte, len(in)+256), Context: skbContext{Ifindex: p.Ifindex},
		})
		must(t, "run", err)
		if verdict == verdictShot {
			t.Fatalf("a datagram to Service %d was dropped", i)
		}
	}
	kept := func(p *pod) (all int) {
		var k bpf.MapsSlAffKey4
		var v uint64
		it := n.k.Pins.Map(bpf.MapsMapSlPodAff4).Iterate()
		for it.Next(&k, &v) {
			if pin.Addr4(k.Client) == p.IPv4 {
				all++
			}
		}
		must(t, "list", it.Err())
		return all
	}
	ask(other, 0)
	for i := range services {
		ask(greedy, i)
	}
	if got := kept(greedy); got != guarantee+common {
		t.Errorf("the pod keeps %d backends, want its share, %d", got, guarantee+common)
	}
	for i := range guarantee {
		ask(other, i)
	}
	if got := kept(other); got != guarantee {
		t.Errorf("the other pod keeps %d backends, want %d", got, guarantee)
	}
	local, err := n.k.Endpoints.Local()
	must(t, "list the addresses", err)
	must(t, "collect", n.k.Bounds.CollectAffinity(local))
	for p, want := range map[*pod]int{greedy: guarantee + common, other: guarantee} {
		if got := n.k.Bounds.Held(bound.Affinity4, p.Slot); got != want {
			t.Errorf("%v: %d are counted, want %d", p.IPv4, got, want)
		}
	}
	size := n.k.Bounds.Size(bound.Affinity4)
	if got := n.k.Bounds.Guarantee(bound.Affinity4); got != size/4 {
		t.Errorf("each of two pods is guaranteed %d, want %d", got, size/4)
	}
}

// TestKernelRepeatedFirstPacketsTakeNoFurtherTranslations: a retransmitted SYN already has its translation and
// returns the second one that it has reserved, also to the common half.
func TestKernelRepeatedFirstPacketsTakeNoFurtherTranslations(t *testing.T) {
	for name, guarantee := range map[string]uint32{"within the guarantee": 4000, "of the common half": 1} {
		t.Run(name, func(t *testing.T) {
			n := newServiceNode(t)
			pod := newPod(t, n.k, "sl-pod", 10, endpointmap.DeliverPeer)
			vip := serviceAddr(pod.IPv4, 1)
			n.lead(vip, feAddress, netip.AddrPortFrom(pod.IPv4, 8080))
			update(t, n.k, bpf.MapsMapSlBound, uint32(bound.Translations4),
				bpf.MapsSlBound{Guarantee: guarantee, Common: 4000})
			const ports, times = 100, 5
			before := n.counters(t)
			inNetns(t, pod.ns, func() {
				var frames [][]byte
				for i := range ports * times {
					p := ip4Header{src: pod.IPv4, dst: vip.Addr(), proto: protoTCP}
					frames = append(frames, frame(pod.HostMAC, pod.MAC, etherIPv4,
						p.with(tcp(uint16(2000+i%ports), vip.Port(), flagSYN))))
				}
				sendRaw(t, "eth0", frames...)
			})
			passed := cell{event.ForwardedToPod, event.Egress}
			servicetest.Eventually(t, "the packets", func() bool {
				return n.counters(t)[passed].Packets-before[passed].Packets >= ports*times
			})
			if got := n.k.Bounds.Held(bound.Translations4, pod.Slot); got != 2*ports {
				t.Errorf("the pod has %d translations, want %d: two of each hairpin", got, 2*ports)
			}
			var b bpf.MapsSlBound
			must(t, "read the bound", n.k.Pins.Map(bpf.MapsMapSlBound).Lookup(uint32(bound.Translations4), &b))
			if b.Used > 2*ports {
				t.Errorf("%d of the common half are used, want <= %d", b.Used, 2*ports)
			}
		})
	}
}

// TestKernelShareOfEventsStaysOverAStart: a process that has not counted the endpoints yet leaves the ring divided as
// the previous process divided it.
func TestKernelShareOfEventsStaysOverAStart(t *testing.T) {
	o := testOptions(kerneltest.NewBPFFS(t))
	k := openKernel(t, o)
	usual := k.Bounds.Guarantee(bound.Events)
	k.Bounds.DivideEvents(2)
	want := k.Bounds.Guarantee(bound.Events)
	if want <= usual || usual == 0 {
		t.Fatalf("guarantee %d with two endpoints, %d before the first count", want, usual)
	}
	must(t, "Close", k.Close())
	if got := openKernel(t, o).Bounds.Guarantee(bound.Events); got != want {
		t.Errorf("guarantee %d after a start, want still %d", got, want)
	}
}
