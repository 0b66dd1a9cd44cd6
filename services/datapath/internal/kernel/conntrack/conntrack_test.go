// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package conntrack

import (
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
)

// The generated code has no preprocessor constants, so the flags are compared with the header.
func TestConnectionFlagsAreThoseOfTheHeader(t *testing.T) {
	header, err := os.ReadFile("../../../../../bpf/include/sluice/abi.h")
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]Flags{
		"ORIG_LO": OriginLow, "SEEN_REPLY": SeenReply, "FIN_I": InitiatorFinished, "FIN_R": ResponderFinished, "RST": Reset,
		"VIA_STACK": ViaStack, "PROXY": Proxied, "HAIRPIN": Hairpin, "PICKED_UP": PickedUp, "CLOSED_SENT": CloseReported, "BY_RESPONDER": ByResponder,
		"UNORIENTED": Unoriented, "REVOKED": Terminated, "ESTABLISHED": Established, "RST_R": ByResponderReset,
		"IN_RING": InRing, "ASKS": Asks, "RETURNED": Returned, "BY_DEVICE": ByDevice, "HELD": Held,
		"HELD_HTTP": HeldByHTTP,
	}
	for _, m := range regexp.MustCompile(`#define SL_CT_(\w+) (0x[0-9a-f]+)`).FindAllStringSubmatch(string(header), -1) {
		n, err := strconv.ParseUint(m[2], 0, 32)
		if err != nil {
			t.Fatal(err)
		}
		if got, ok := want[m[1]]; !ok || got != Flags(n) {
			t.Errorf("SL_CT_%s is %#x in the header, %#x here", m[1], n, uint32(got))
		}
		delete(want, m[1])
	}
	if len(want) > 0 {
		t.Errorf("not in the header: %v", want)
	}
	if StatExpired < uint32(bpf.MapsSlCtStatSL_CT_STAT_UNREMEMBERED)+1 || StatExpired >= uint32(bpf.MapsSlCtStatSL_CT_STATS) {
		t.Errorf("the collector's cell %d is a program's, or outside", StatExpired)
	}
}

func tuple(proto uint8, initiator, responder string) Tuple {
	return Tuple{Initiator: netip.MustParseAddrPort(initiator), Responder: netip.MustParseAddrPort(responder), Protocol: proto}
}

func TestBothDirectionsOfAConnectionHaveOneKey(t *testing.T) {
	for _, c := range []struct {
		tuple    Tuple
		low      bool // the initiator is the lower end
		lo, plo  string
		reversed bool
	}{
		{tuple: tuple(6, "10.0.0.1:1000", "10.0.0.2:80"), low: true},
		{tuple: tuple(6, "10.0.0.2:80", "10.0.0.1:1000"), low: false},
		// ordered by the first byte on the wire, not by the last one
		{tuple: tuple(6, "10.0.0.2:1", "11.0.0.1:1"), low: true},
		{tuple: tuple(17, "[fd00::1]:9", "[fd00::2]:1"), low: true},
		{tuple: tuple(17, "[fd00::2]:9", "[fd00::1]:1"), low: false},
		// the ports decide between equal addresses
		{tuple: tuple(6, "10.0.0.1:9", "10.0.0.1:10"), low: true},
		{tuple: tuple(6, "10.0.0.1:10", "10.0.0.1:9"), low: false},
		{tuple: tuple(1, "10.0.0.1:7", "10.0.0.1:7"), low: true},
	} {
		back := Tuple{Initiator: c.tuple.Responder, Responder: c.tuple.Initiator, Protocol: c.tuple.Protocol}
		lo, _, low := c.tuple.sorted()
		if low != c.low || (lo == c.tuple.Initiator) != (c.low || c.tuple.Initiator == c.tuple.Responder) {
			t.Errorf("%v: lower end %v, initiator is lower: %v", c.tuple, lo, low)
		}
		if c.tuple.Initiator.Addr().Is4() {
			if a, b := c.tuple.Key4(), back.Key4(); a != b {
				t.Errorf("%v: keys %+v and %+v", c.tuple, a, b)
			}
		} else if a, b := c.tuple.Key6(), back.Key6(); a != b {
			t.Errorf("%v: keys %+v and %+v", c.tuple, a, b)
		}
		conn := Connection{
			Tuple: c.tuple, From: End{1, 2, 3, 4}, To: End{5, 6, 7, 8}, LastSeen: 9, Flags: SeenReply, EgressRule: 10, IngressRule: 11,
		}
		v := ValueOf(conn)
		var got Connection
		if c.tuple.Initiator.Addr().Is4() {
			key := c.tuple.Key4()
			got = Of(Tuple4(&key, v.Flags), &v)
		} else {
			key := c.tuple.Key6()
			got = Of(Tuple6(&key, v.Flags), &v)
		}
		got.Value, got.Flags = bpf.MapsSlCt{}, got.Flags&^OriginLow
		if got != conn {
			t.Errorf("written and read\n got %+v\nwant %+v", got, conn)
		}
	}
}

func TestTimeoutFollowsProtocolAndState(t *testing.T) {
	d := DefaultTimeouts()
	const both = InitiatorFinished | ResponderFinished
	for _, c := range []struct {
		proto uint8
		flags Flags
		want  time.Duration
	}{
		{6, 0, d.TCPOpening},
		{6, ViaStack, d.TCPOpening},
		{6, SeenReply, d.TCPOpening},
		{6, PickedUp, d.TCPOpening},
		{6, SeenReply | Established, d.TCPEstablished},
		{6, PickedUp | SeenReply | Established, d.TCPEstablished},
		{6, SeenReply | Established | InitiatorFinished, d.TCPEstablished},
		{6, SeenReply | both, d.TCPClosing},
		{6, SeenReply | Reset, d.TCPClosing},
		{6, Reset, d.TCPClosing},
		// a policy has terminated it, and its ends may not know
		{6, CloseReported | Terminated, d.TCPEstablished},
		{6, SeenReply | CloseReported | Terminated, d.TCPEstablished},
		{6, SeenReply | Reset | CloseReported, d.TCPClosing},
		{132, 0, d.TCPOpening},
		{132, SeenReply, d.TCPOpening},
		{132, SeenReply | Established, d.TCPEstablished},
		{132, Reset, d.TCPClosing},
		{17, 0, d.UDPUnanswered},
		{17, SeenReply, d.UDPAnswered},
		{136, SeenReply, d.UDPAnswered},
		{1, SeenReply, d.ICMP},
		{58, 0, d.ICMP},
		{47, SeenReply, d.Other},
	} {
		if got := d.Of(c.proto, c.flags); got != c.want {
			t.Errorf("protocol %d, %v: %s, want %s", c.proto, c.flags.Names(), got, c.want)
		}
	}
}

// When nf_conntrack has forgotten a flow, the host's NAT may assign its port to another client. Our entry of
// the old flow must be gone by then.
func TestUDPIsForgottenNoLaterThanByTheHostsTranslation(t *testing.T) {
	d := DefaultTimeouts()
	for path, ours := range map[string]time.Duration{"": d.UDPUnanswered, "_stream": d.UDPAnswered} {
		// the default of nf_conntrack; kernels without it have no such file
		theirs := map[string]time.Duration{"": 30 * time.Second, "_stream": 120 * time.Second}[path]
		if b, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_udp_timeout" + path); err == nil {
			n, err := strconv.Atoi(strings.TrimSpace(string(b)))
			if err != nil {
				t.Fatal(err)
			}
			theirs = time.Duration(n) * time.Second
		}
		if ours > theirs {
			t.Errorf("udp%s: %s, nf_conntrack forgets after %s", path, ours, theirs)
		}
	}
}

func TestWordsOfAConnectionBeginWithItsStage(t *testing.T) {
	for flags, want := range map[Flags]string{
		0:                                        "opening",
		OriginLow:                                "opening",
		SeenReply:                                "opening",
		PickedUp:                                 "opening picked-up",
		SeenReply | Established:                  "established",
		SeenReply | Established | PickedUp:       "established picked-up",
		SeenReply | InitiatorFinished | ViaStack: "half-closed via-stack",
		SeenReply | InitiatorFinished | ResponderFinished:                      "closing",
		SeenReply | Reset | Hairpin | Proxied:                                  "reset proxied hairpin",
		SeenReply | InitiatorFinished | CloseReported | Terminated:             "revoked",
		SeenReply | Reset | Terminated:                                         "revoked",
		SeenReply | Established | PickedUp | Unoriented:                        "established picked-up either-way",
		InitiatorFinished | ResponderFinished | CloseReported:                  "closing",
		SeenReply | Established | OriginLow | ViaStack | PickedUp | Proxied<<9: "established picked-up via-stack",
	} {
		if got := strings.Join(flags.Names(), " "); got != want {
			t.Errorf("%#x: %q, want %q", uint32(flags), got, want)
		}
	}
}

func TestClosedConnectionsGoEarlierUnderPressure(t *testing.T) {
	for live, want := range map[int]time.Duration{
		0: 10 * time.Second, 500: 10 * time.Second, 625: 5 * time.Second, 700: 2 * time.Second, 750: time.Second, 1000: time.Second,
	} {
		if got := closingTime(10*time.Second, live, 1000); got != want {
			t.Errorf("%d of 1000: %s, want %s", live, got, want)
		}
	}
}

func TestHalfOpenFromOutsideIsShortOfRoom(t *testing.T) {
	c := &Collector{ct: &Connections{}}
	full, capacity := Pass{Live: [2]int{501, 0}}, [2]int{1000, 1000}
	outside := Connection{
		Tuple: tuple(6, "203.0.113.1:1000", "10.0.0.1:80"), From: End{Slot: endpointmap.NoID}, To: End{Slot: 2},
	}
	with := func(change func(*Connection)) *Connection {
		conn := outside
		change(&conn)
		return &conn
	}
	transit := with(func(c *Connection) { c.Transit, c.To.Slot = true, endpointmap.NoID })
	other := with(func(c *Connection) { c.Tuple = tuple(6, "[fd00::1]:1", "[fd00::2]:1") })
	datagrams := with(func(c *Connection) { c.Protocol = 17 })
	opening, established := DefaultTimeouts().TCPOpening, DefaultTimeouts().TCPEstablished
	for name, tc := range map[string]struct {
		conn *Connection
		last Pass
		want time.Duration
	}{
		"with capacity":       {&outside, Pass{Live: [2]int{500, 0}}, opening},
		"without":             {&outside, full, halfOpenTime},
		"after an answer":     {with(func(c *Connection) { c.Flags = SeenReply }), full, halfOpenTime},
		"in transit":          {transit, full, halfOpenTime},
		"established":         {with(func(c *Connection) { c.Flags = SeenReply | Established }), full, established},
		"of a pod":            {with(func(c *Connection) { c.From.Slot = 3 }), full, opening},
		"the other map":       {other, full, opening},
		"UDP has its own way": {datagrams, full, DefaultTimeouts().UDPUnanswered},
	} {
		if got := c.timeOf(tc.conn, DefaultTimeouts(), tc.last, capacity); got != tc.want {
			t.Errorf("%s: %v, want %v", name, got, tc.want)
		}
	}
}

func TestIntervalIsShorterTheFullerTheMapAndStaysWithinBounds(t *testing.T) {
	o := CollectorOptions{MinInterval: time.Second, MaxInterval: time.Minute}
	capacity := [2]int{1000, 1000}
	for name, c := range map[string]struct {
		last time.Duration
		pass Pass
		want time.Duration
	}{
		"idle grows":         {10 * time.Second, Pass{}, 15 * time.Second},
		"idle has a bound":   {50 * time.Second, Pass{}, time.Minute},
		"much removed":       {10 * time.Second, Pass{Live: [2]int{100, 0}, Expired: 101}, 5 * time.Second},
		"removed, bounded":   {time.Second, Pass{Live: [2]int{100, 0}, Expired: 101}, time.Second},
		"half removed stays": {10 * time.Second, Pass{Live: [2]int{100, 0}, Expired: 100}, 10 * time.Second},
		"some removed stays": {10 * time.Second, Pass{Live: [2]int{79, 0}, Orphaned: 21}, 10 * time.Second},
		"few removed grows":  {10 * time.Second, Pass{Live: [2]int{80, 0}, Expired: 20}, 15 * time.Second},
		"half full":          {40 * time.Second, Pass{Live: [2]int{500, 0}}, 30 * time.Second},
		"other map full":     {40 * time.Second, Pass{Live: [2]int{0, 1000}}, time.Second},
		"both maps count":    {10 * time.Second, Pass{Live: [2]int{50, 51}, Expired: 100}, 10 * time.Second},
	} {
		if got := nextInterval(c.last, c.pass, capacity, o); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
	// the map of IPv6 is half as large
	got := nextInterval(40*time.Second, Pass{Live: [2]int{500, 0}}, [2]int{2000, 1000}, o)
	if got != 45*time.Second {
		t.Errorf("a quarter full: %s, want 45 s", got)
	}
}

func TestBudgetLeavesRoomForOthers(t *testing.T) {
	const capacity = 65536
	room := capacity - capacity/8
	for name, c := range map[string]struct{ open, owned, sharers, want int }{
		"nobody has anything":        {0, 0, 0, room},
		"alone with some":            {10000, 10000, 1, room - 10000},
		"alone and at the end":       {room, room, 1, LeastBudget},
		"a flood beside one other":   {room, room - 100, 2, LeastBudget},
		"the other of the two":       {room, 100, 2, room/2 - 100},
		"one of many, capacity left": {1000, 10, 100, (room - 1000) / 2},
		"one of many, over its part": {room + 5000, 2000, 100, LeastBudget},
	} {
		if got := budgetOf(capacity, c.open, c.owned, c.sharers); got != c.want {
			t.Errorf("%s: %d, want %d", name, got, c.want)
		}
	}
	// However the connections are distributed, an endpoint that uses its whole budget leaves the
	// connections of others in place.
	for _, others := range []int{0, 100, 10000, room / 2, room} {
		for _, own := range []int{0, 1, 5000, room - others} {
			open := others + max(own, 0)
			if open > room {
				continue
			}
			sharers := slices.Max([]int{1, min(others, 1) + min(own, 1)})
			b := budgetOf(capacity, open, max(own, 0), sharers)
			if total := open + b; b > LeastBudget && total > capacity-capacity/8+others {
				t.Errorf("others %d, own %d: %d more make %d of %d", others, own, b, total, capacity)
			}
		}
	}
}

func TestOpenConnectionsAreNeitherOpeningNorOver(t *testing.T) {
	const now = 100_000
	to := DefaultTimeouts()
	established := SeenReply | Established
	for name, c := range map[string]struct {
		proto uint8
		flags Flags
		idle  time.Duration
		open  bool
	}{
		"tcp":                        {6, established, 0, true},
		"tcp, seen after the batch":  {6, established, -time.Second, true},
		"tcp, idle":                  {6, established, to.TCPEstablished - time.Second, true},
		"tcp, idle for too long":     {6, established, to.TCPEstablished, false},
		"tcp, half-closed":           {6, established | InitiatorFinished, time.Minute, true},
		"tcp, closed":                {6, established | InitiatorFinished | ResponderFinished, 0, false},
		"tcp, reset":                 {6, established | Reset, 0, false},
		"tcp, terminated":            {6, established | Terminated, 0, false},
		"tcp, asked":                 {6, 0, 0, false},
		"tcp, answered":              {6, SeenReply, 0, false},
		"tcp, picked up":             {6, PickedUp, 0, false},
		"sctp":                       {132, established, 0, true},
		"sctp, asked":                {132, 0, 0, false},
		"udp":                        {17, SeenReply, 0, true},
		"udp, idle for too long":     {17, SeenReply, to.UDPAnswered, false},
		"udp, unanswered":            {17, 0, 0, true},
		"udp, unanswered for long":   {17, 0, to.UDPUnanswered, false},
		"udp, terminated":            {17, SeenReply | Terminated, 0, false},
		"udp, answered, and idle on": {17, SeenReply, to.UDPUnanswered, true},
	} {
		conn := Connection{
			Tuple:    tuple(c.proto, "10.0.0.1:1000", "10.0.0.2:80"),
			LastSeen: uint32(now - int64(c.idle/time.Second)), Flags: c.flags,
		}
		if got := conn.open(now, to); got != c.open {
			t.Errorf("%s: open is %t", name, got)
		}
	}
}

// TestConnectionsOfTheWorldAreOutsides: connections of the world are charged to Outside, in both families, and
// also with an address of the host.
func TestConnectionsOfTheWorldAreOutsides(t *testing.T) {
	ct := &Connections{worlds: [2]identity.Numeric{identity.WorldIPv4, identity.WorldIPv6}}
	const pod = endpointmap.ID(3)
	host := func(id identity.Numeric) End { return End{Slot: endpointmap.HostID, Identity: id} }
	four, six := tuple(6, "10.0.0.1:1", "10.0.0.2:2"), tuple(6, "[fd00::1]:1", "[fd00::2]:2")
	for name, c := range map[string]struct {
		conn Connection
		want int
	}{
		"the endpoint with the last slot": {
			Connection{Tuple: four, From: End{Slot: endpointmap.MaxEndpoints}, To: End{Slot: endpointmap.NoID}},
			endpointmap.MaxEndpoints,
		},
		"an endpoint":                   {Connection{Tuple: four, From: End{Slot: pod}, To: End{Slot: endpointmap.NoID}}, int(pod)},
		"outside":                       {Connection{Tuple: four, From: End{Slot: endpointmap.NoID}, To: End{Slot: pod}}, Outside},
		"the host":                      {Connection{Tuple: four, From: host(identity.Host)}, int(endpointmap.HostID)},
		"the world as the host":         {Connection{Tuple: four, From: host(identity.WorldIPv4)}, Outside},
		"the world as the host by IPv6": {Connection{Tuple: six, From: host(identity.WorldIPv6)}, Outside},
		"the world of the other family": {Connection{Tuple: six, From: host(identity.WorldIPv4)}, int(endpointmap.HostID)},
		"the responder's packet": {
			Connection{Tuple: four, From: End{Slot: endpointmap.NoID}, To: End{Slot: pod}, Flags: ByResponder}, int(pod),
		},
	} {
		if got := c.conn.charged(ct); got != c.want {
			t.Errorf("%s: slot %d is charged, want %d", name, got, c.want)
		}
	}
}

// TestFilterMeansConnections: filters match either end, and the requested address.
func TestFilterMeansConnections(t *testing.T) {
	conn := Connection{
		Tuple: tuple(6, "10.0.0.1:1000", "10.0.0.2:80"), From: End{Slot: 3}, To: End{Slot: 4}, Flags: Established | SeenReply,
	}
	service := conn
	service.Value.Front = 1
	asked := func(*Connection) netip.AddrPort { return netip.MustParseAddrPort("10.96.0.1:443") }
	record := conn
	record.Asked = true
	local := func(slot endpointmap.ID, addr string) []Local {
		return []Local{{slot, []netip.Addr{netip.MustParseAddr(addr)}}}
	}
	prefix := func(p string) []netip.Prefix { return []netip.Prefix{netip.MustParsePrefix(p)} }
	for name, c := range map[string]struct {
		f    Filter
		conn Connection
		want bool
	}{
		"everything":                  {Filter{}, conn, true},
		"no record":                   {Filter{}, record, false},
		"without the family":          {Filter{Without: [2]bool{true, false}}, conn, false},
		"without the other":           {Filter{Without: [2]bool{false, true}}, conn, true},
		"protocol":                    {Filter{Protocols: []uint8{17, 6}}, conn, true},
		"another protocol":            {Filter{Protocols: []uint8{17}}, conn, false},
		"state":                       {Filter{States: []string{"opening", "established"}}, conn, true},
		"another state":               {Filter{States: []string{"opening"}}, conn, false},
		"initiator":                   {Filter{Locals: local(3, "10.0.0.1")}, conn, true},
		"responder":                   {Filter{Locals: local(4, "10.0.0.2")}, conn, true},
		"the slot of an earlier one":  {Filter{Locals: local(3, "10.0.0.9")}, conn, false},
		"the address in another slot": {Filter{Locals: local(4, "10.0.0.1")}, conn, false},
		"prefix of the initiator":     {Filter{Prefixes: prefix("10.0.0.1/32")}, conn, true},
		"prefix of the responder":     {Filter{Prefixes: prefix("10.0.0.2/32")}, conn, true},
		"another prefix":              {Filter{Prefixes: prefix("10.0.1.0/24")}, conn, false},
		"prefix that was asked":       {Filter{Prefixes: prefix("10.96.0.0/16"), Asked: asked}, service, true},
		"asked by no service":         {Filter{Prefixes: prefix("10.96.0.0/16"), Asked: asked}, conn, false},
		"asked is not known":          {Filter{Prefixes: prefix("10.96.0.0/16")}, service, false},
		"port of the initiator":       {Filter{Ports: []uint16{1000}}, conn, true},
		"port of the responder":       {Filter{Ports: []uint16{80}}, conn, true},
		"port that was asked":         {Filter{Ports: []uint16{443}, Asked: asked}, service, true},
		"another port":                {Filter{Ports: []uint16{81}}, conn, false},
		"port 0, with an unknown requested address": {Filter{Ports: []uint16{0}}, service, false},
		"prefix and another port":                   {Filter{Prefixes: prefix("10.0.0.1/32"), Ports: []uint16{81}}, conn, false},
		"another prefix and port":                   {Filter{Prefixes: prefix("10.0.1.0/24"), Ports: []uint16{80}}, conn, false},
		"state, and another protocol":               {Filter{States: []string{"established"}, Protocols: []uint8{17}}, conn, false},
	} {
		if got := c.f.matches(&c.conn); got != c.want {
			t.Errorf("%s: %t, want %t", name, got, c.want)
		}
	}
}
