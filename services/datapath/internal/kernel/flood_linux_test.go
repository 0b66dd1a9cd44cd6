// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"context"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
)

// begin sends the first packets of n UDP flows from pod a to the world, numbered from first, and returns how
// many passed.
func (r runner) begin(t testing.TB, first, n int) (passed int) {
	t.Helper()
	prog := r.k.program(program.FromPod)
	for i := first; i < first+n; i++ {
		dst := netip.AddrFrom4([4]byte{198, 51, byte(i >> 16), byte(i >> 8)})
		in := from4(dst, 17, udp(uint16(i), uint16(i&0xff)+1000))
		verdict, err := prog.Run(&ebpf.RunOptions{Data: in})
		must(t, "run", err)
		if verdict == verdictOK {
			passed++
		}
	}
	return passed
}

// TestKernelFloodOfOneEndpointPushesOutNobody: one endpoint begins as many connections as it can. The connections of
// another endpoint stay, and the map evicts nothing.
func TestKernelFloodOfOneEndpointPushesOutNobody(t *testing.T) {
	o := testOptions(kerneltest.NewBPFFS(t))
	o.EventsPerSecond = 1
	k := openKernel(t, o)
	r := runner{k}
	publish(t, k, a)
	other := publish(t, k, b)
	// Nothing may expire meanwhile: under emulation the flood takes minutes.
	patient := conntrack.DefaultTimeouts()
	patient.TCPOpening, patient.UDPUnanswered = time.Hour, time.Hour
	col, err := k.Connections.NewCollector(conntrack.CollectorOptions{Timeouts: patient})
	must(t, "NewCollector", err)

	const idle = 2000
	k.putAll(t, begun(remotes(other, 6, 0, idle, conntrack.SeenReply, conntrack.MonotonicSeconds())))
	sent, passed := 0, 0
	for range 12 {
		collect(t, col)
		passed += r.begin(t, sent, 15_000)
		sent += 15_000
	}
	p := collect(t, col)
	kept := 0
	for tu := range k.tracked(t) {
		if tu.Initiator.Addr() == b.IPv4 {
			kept++
		}
	}
	t.Logf("%d flows begun, %d let pass, %d live, %d evicted", sent, passed, p.Live[0], p.Evicted)
	if kept != idle {
		t.Errorf("%d connections of the other endpoint are left of %d", kept, idle)
	}
	const room = 131072 - 131072/8
	if p.Evicted != 0 || p.Live[0] > room+13*conntrack.LeastBudget {
		t.Errorf("%d evicted and %d live, want none and at most %d", p.Evicted, p.Live[0], room)
	}
	dropped := r.counters(t)[cell{event.ConnectionBudget, event.Egress}].Packets
	if passed+int(dropped) != sent || dropped == 0 {
		t.Errorf("%d passed and %d were over the budget, want together %d", passed, dropped, sent)
	}
	if _, limit := col.Budget(other.Slot, 0); limit < 20_000 {
		t.Errorf("the other endpoint may begin %d connections", limit)
	}
}

// TestKernelBudgetsOutliveTheirCollector: the collector was killed, so no new periods begin. Used-up budgets are
// renewed in parts, and a flood of connections evicts none that is in use.
func TestKernelBudgetsOutliveTheirCollector(t *testing.T) {
	o := testOptions(kerneltest.NewBPFFS(t))
	o.EventsPerSecond = 1
	k := openKernel(t, o)
	r := runner{k}
	must(t, "add a device", netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "sltalk"}, PeerName: "sltalk1"}))
	link, err := netlink.LinkByName("sltalk")
	must(t, "find the device", err)
	defer func() { must(t, "delete the device", netlink.LinkDel(link)) }()
	must(t, "set the device up", netlink.LinkSetUp(link))
	flooder, other := publish(t, k, a), publish(t, k, testEndpoint(uint32(link.Attrs().Index), 20))
	col, err := k.Connections.NewCollector(conntrack.CollectorOptions{})
	must(t, "NewCollector", err)
	collect(t, col)
	budgets := k.Pins.Map(bpf.MapsMapSlBudget)
	read := func() (v bpf.MapsSlBudget) {
		must(t, "read the budget", budgets.Lookup(uint32(flooder.Slot)<<1, &v))
		return v
	}
	// only the process's memory is lost

	const talks = 2000
	flows := begun(remotes(other, 17, 0, talks, conntrack.SeenReply, conntrack.MonotonicSeconds()))
	k.putAll(t, flows)
	tuples := make([]conntrack.Tuple, 0, talks)
	for _, c := range flows {
		tuples = append(tuples, c.Tuple)
	}
	limit, sent := read().Limit, 0
	begin := func(n int) int {
		passed := r.begin(t, sent, n)
		sent += n
		return passed
	}
	if passed := begin(int(limit) + 1000); passed != int(limit) {
		t.Fatalf("%d begun, want the limit of %d", passed, limit)
	}
	for round := range 12 {
		since := read().Begun >> 32
		if since == 0 {
			t.Fatalf("round %d: the budget is not marked as used up", round)
		}
		// as if the time had passed
		update(t, k, bpf.MapsMapSlBudget, uint32(flooder.Slot)<<1, bpf.MapsSlBudget{Begun: (since-11)<<32 | limit, Limit: limit})
		if passed := begin(int(limit)/8 + 1000); passed != int(limit)/8 {
			t.Errorf("round %d: %d begun, want an eighth, %d", round, passed, limit/8)
		}
		r.talk(t, other, tuples)
	}
	all := k.tracked(t)
	for _, tu := range tuples {
		if _, there := all[tu]; !there {
			t.Fatalf("%v was evicted", tu)
		}
	}
}

// talk sends a packet of each of an endpoint's UDP flows.
func (r runner) talk(t testing.TB, e endpointmap.Endpoint, flows []conntrack.Tuple) {
	t.Helper()
	prog := r.k.program(program.FromPod)
	for _, tu := range flows {
		in := frame(e.HostMAC, e.MAC, etherIPv4, ip4Header{src: e.IPv4, dst: tu.Responder.Addr(), proto: 17}.with(udp(tu.Initiator.Port(), tu.Responder.Port())))
		ctx := skbContext{Ifindex: e.Ifindex}
		_, err := prog.Run(&ebpf.RunOptions{Data: in, DataOut: make([]byte, len(in)+256), Context: ctx})
		must(t, "run", err)
	}
}

// TestKernelCollectorTakesNoFlowFromThePrograms: packets of some flows keep coming, others have ended: the collector
// removes exactly the latter.
func TestKernelCollectorTakesNoFlowFromThePrograms(t *testing.T) {
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	r := runner{k}
	publish(t, k, a)
	times := conntrack.DefaultTimeouts()
	times.UDPUnanswered = 2 * time.Second
	col, err := k.Connections.NewCollector(conntrack.CollectorOptions{Timeouts: times, MinInterval: 10 * time.Millisecond, MaxInterval: 20 * time.Millisecond})
	must(t, "NewCollector", err)

	const busy, idle = 300, 700
	if passed := r.begin(t, 0, busy+idle); passed != busy+idle {
		t.Fatalf("%d of %d flows passed", passed, busy+idle)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- col.Run(ctx) }()
	wait(t, func() bool {
		r.begin(t, 0, busy)
		return len(k.tracked(t)) == busy
	})
	stop()
	<-ended
	c, err := k.Connections.Counters()
	must(t, "ConnectionCounters", err)
	if c.Created != busy+idle || c.Expired != idle {
		t.Errorf("%d begun and %d expired, want %d and %d: a flow in use was taken and began again", c.Created, c.Expired, busy+idle, idle)
	}
}

// TestKernelFloodOfVerdictsTellsWhatIsMissing: many connections at once: each is counted, few are reported, and the
// next event contains the number of suppressed ones.
func TestKernelFloodOfVerdictsTellsWhatIsMissing(t *testing.T) {
	stayOnOneCPU(t)
	o := testOptions(kerneltest.NewBPFFS(t))
	o.EventsPerSecond = 5
	k := openKernel(t, o)
	r := runner{k}
	publish(t, k, a)
	events, err := k.Events.Read()
	must(t, "Events", err)
	defer events.Close()
	const sent = 3000
	if passed := r.begin(t, 0, sent); passed != sent {
		t.Fatalf("%d of %d flows passed", passed, sent)
	}
	var read, told uint64
	next := func() {
		e, err := events.Read(t.Context())
		must(t, "Read", err)
		if e.Type != event.ConnectionEvaluated || e.Egress.By != event.ByTable {
			t.Errorf("event %+v, want a verdict", e)
		}
		read++
		told += uint64(e.Lost)
	}
	for events.Waiting() > 0 {
		next()
	}
	// the first event of the next second contains the number of suppressed events
	more := uint64(0)
	wait(t, func() bool {
		more += uint64(r.begin(t, sent+int(more), 1))
		return events.Waiting() > 0
	})
	for events.Waiting() > 0 {
		next()
	}
	lost, err := k.Events.Lost()
	must(t, "EventsLost", err)
	if read+told != sent+more || told != lost || lost == 0 {
		t.Errorf("%d events read, %d reported as suppressed, %d lost, of %d", read, told, lost, sent+more)
	}
}
