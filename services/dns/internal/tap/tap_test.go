// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package tap

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/proxy/pods"
	"github.com/sluice-net/sluice/services/dns/internal/exchange"
	"github.com/sluice-net/sluice/services/dns/internal/frame"
	"github.com/sluice-net/sluice/services/dns/internal/frame/frametest"
	"github.com/sluice-net/sluice/services/dns/internal/names"
	"github.com/sluice-net/sluice/services/dns/internal/rules"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// policy simulates sluice-policy. While gate is not nil, each call of Learn waits for a value from gate.
type policy struct {
	mu    sync.Mutex
	calls []string      // guarded by mu
	gate  chan struct{} // guarded by mu
}

func (p *policy) Has(context.Context, netip.Addr) (bool, error) { return false, nil }

func (p *policy) Learn(ctx context.Context, _ names.Asker, name string, addrs []netip.Addr, _ time.Duration) error {
	p.mu.Lock()
	p.calls = append(p.calls, fmt.Sprint(name, addrs))
	gate := p.gate
	p.mu.Unlock()
	if gate == nil {
		return nil
	}
	select {
	case <-gate:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (p *policy) Forget(context.Context, string, string, netip.Addr) error { return nil }

func (p *policy) learned() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.calls)
}

func (p *policy) close() chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.gate = make(chan struct{})
	return p.gate
}

// device is the other end of a queue. The loop reads what is sent to it.
type device struct {
	*Loop
	t      testing.TB
	policy *policy
	rules  *rules.Rules
	table  *names.Table
	x      *exchange.Exchange
	pods   *pods.Pods
	fd     int
}

func newDevice(t testing.TB, hold time.Duration) *device {
	t.Helper()
	d := &device{
		t: t, policy: &policy{}, rules: rules.New(),
		table: names.New(names.Limits{Names: 10_000, Addresses: 100_000}, time.Now()),
	}
	refusal, err := rules.NewRefusal(rules.Auto, []string{"cluster.local"})
	if err != nil {
		t.Fatal(err)
	}
	if err := d.rules.Upsert(9, rules.Content{Names: []string{"*.example.com"}}); err != nil {
		t.Fatal(err)
	}
	d.x = exchange.New(exchange.Options{
		Rules: d.rules, Table: d.table, Enforcer: d.policy, Cluster: d.policy, Refusal: refusal, HoldFor: hold, Now: time.Now,
	})
	d.pods = pods.New(shares.Settings{}, d.x.Leave)
	for _, id := range []uint32{7, 8} {
		d.pods.Upsert(owner(id), pods.Endpoint{ID: id, Namespace: fmt.Sprint("ns", id)})
	}
	d.Loop = New(Options{
		Exchange: d.x, Rules: d.rules, Pods: d.pods, Held: func(time.Duration) {}, Log: slog.New(slog.DiscardHandler),
	})
	ctx, cancel := context.WithCancel(context.Background())
	stopped := make(chan error, 1)
	go func() { stopped <- d.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-stopped; err != nil {
			t.Error(err)
		}
		unix.Close(d.fd)
	})
	d.fd = d.attach()
	return d
}

func owner(id uint32) workload.Owner {
	return workload.Owner{ContainerID: fmt.Sprint("container", id), Interface: "eth0"}
}

// attach gives the loop another queue, and returns the other end of this queue.
func (d *device) attach() int {
	d.t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		d.t.Fatal(err)
	}
	for _, fd := range fds {
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, 8<<20); err != nil {
			d.t.Fatal(err)
		}
	}
	if err := unix.SetsockoptTimeval(fds[1], unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 60}); err != nil {
		d.t.Fatal(err)
	}
	if _, err := d.Use(fds[0]); err != nil {
		d.t.Fatal(err)
	}
	return fds[1]
}

func (d *device) send(frames ...[]byte) {
	d.t.Helper()
	for _, b := range frames {
		if _, err := unix.Write(d.fd, b); err != nil {
			d.t.Fatal(err)
		}
	}
}

func (d *device) receive() []byte {
	d.t.Helper()
	b := make([]byte, frame.MaxSize)
	n, err := unix.Read(d.fd, b)
	if err != nil {
		d.t.Fatal(err)
	}
	return b[:n]
}

// passes sends frames, which must come back unchanged and in the same order.
func (d *device) passes(frames ...[]byte) {
	d.t.Helper()
	d.send(frames...)
	for i, want := range frames {
		if got := d.receive(); !bytes.Equal(got, want) {
			d.t.Fatalf("frame %d: released % x, want % x", i, got, want)
		}
	}
}

// until waits for a condition that depends on another goroutine.
func until(t testing.TB, what string, condition func() bool) {
	t.Helper()
	for began := time.Now(); !condition(); time.Sleep(time.Millisecond) {
		if time.Since(began) > time.Minute {
			t.Fatalf("%s did not happen", what)
		}
	}
}

// drops sends frames, all of which the loop must drop. count returns the number of dropped packets.
func (d *device) drops(what string, count func() uint64, frames ...[]byte) {
	d.t.Helper()
	before, n := count(), uint64(len(frames))
	d.send(frames...)
	until(d.t, what+": a drop", func() bool { return count() >= before+n })
	// No frame was released, so the sentinel is the next frame that arrives.
	d.passes(query(65_000, "sentinel.example.com.", dnsmessage.TypeA).Bytes())
	if got := count(); got != before+n {
		d.t.Errorf("%s: %d were dropped, want %d", what, got-before, n)
	}
}

var (
	client4 = netip.MustParseAddrPort("10.244.0.7:40000")
	server4 = netip.MustParseAddrPort("10.96.0.10:53")
	client6 = netip.MustParseAddrPort("[fd00::7]:40000")
	server6 = netip.MustParseAddrPort("[fd00:96::10]:5353")
)

func question(name string, kind dnsmessage.Type) dnsmessage.Question {
	return dnsmessage.Question{Name: dnsmessage.MustNewName(name), Type: kind, Class: dnsmessage.ClassINET}
}

func pack(m dnsmessage.Message) []byte {
	b, err := m.Pack()
	if err != nil {
		panic(err)
	}
	return b
}

func query(id uint16, name string, kind dnsmessage.Type) frametest.Packet {
	return frametest.Packet{
		Tag: frame.Tag{Set: 9, Endpoint: 7, Role: frame.Initiator}, Source: client4, Destination: server4, ID: uint32(id),
		Payload: pack(dnsmessage.Message{
			Header:    dnsmessage.Header{ID: id, RecursionDesired: true},
			Questions: []dnsmessage.Question{question(name, kind)},
		}),
	}
}

// answer returns the answer to a query. Records are "OWNER ADDRESS" or "OWNER TARGET.".
func answer(q frametest.Packet, records ...string) frametest.Packet {
	var m dnsmessage.Message
	if err := m.Unpack(q.Payload); err != nil {
		panic(err)
	}
	m.Response, m.RecursionAvailable = true, true
	for _, r := range records {
		owner, data, _ := strings.Cut(r, " ")
		h := dnsmessage.ResourceHeader{Name: dnsmessage.MustNewName(owner), Class: dnsmessage.ClassINET, TTL: 100}
		if a, err := netip.ParseAddr(data); err != nil {
			m.Answers = append(m.Answers, dnsmessage.Resource{
				Header: h, Body: &dnsmessage.CNAMEResource{CNAME: dnsmessage.MustNewName(data)},
			})
		} else if a.Is4() {
			m.Answers = append(m.Answers, dnsmessage.Resource{Header: h, Body: &dnsmessage.AResource{A: a.As4()}})
		} else {
			m.Answers = append(m.Answers, dnsmessage.Resource{Header: h, Body: &dnsmessage.AAAAResource{AAAA: a.As16()}})
		}
	}
	q.Payload = pack(m)
	q.Role, q.Source, q.Destination = frame.Responder, q.Destination, q.Source
	return q
}

func in6(p frametest.Packet) frametest.Packet {
	p.Source, p.Destination = client6, server6
	return p
}

func TestLookupsPassUnchanged(t *testing.T) {
	d := newDevice(t, time.Minute)
	for _, size := range []int{0, 8} {
		for _, q := range []frametest.Packet{
			query(1, "www.example.com.", dnsmessage.TypeA), in6(query(2, "ipv6.example.com.", dnsmessage.TypeAAAA)),
		} {
			q.Options = size
			d.passes(q.Bytes())
			record := "www.example.com. 192.0.2.1"
			if q.Source == client6 {
				record = "ipv6.example.com. 2001:db8::1"
			}
			d.passes(answer(q, record).Bytes())
		}
	}
	want := []string{"www.example.com.[192.0.2.1]", "ipv6.example.com.[2001:db8::1]"}
	if got := d.policy.learned(); !slices.Equal(got, want) { // once each, and then enforced
		t.Errorf("learned %v, want %v", got, want)
	}
}

func TestJumboFramesPass(t *testing.T) {
	d := newDevice(t, time.Minute)
	for id, count := range []int{300, 3900} { // 300 addresses fit into a jumbo frame, 3,900 nearly fill an IP packet
		q := query(uint16(id), "large.example.com.", dnsmessage.TypeA)
		var records []string
		for i := range count {
			records = append(records, fmt.Sprintf("large.example.com. 192.0.%d.%d", i/250, i%250))
		}
		a := answer(q, records...)
		a.Payload = a.Payload[:len(a.Payload):len(a.Payload)]
		d.passes(q.Bytes())
		d.passes(a.Bytes())
	}
	if n := len(d.policy.learned()); n == 0 {
		t.Error("nothing was learned")
	}
}

func TestRefusedInTheServersName(t *testing.T) {
	d := newDevice(t, time.Minute)
	for what, c := range map[string]struct {
		packet frametest.Packet
		code   dnsmessage.RCode
	}{
		"refused":   {query(1, "X.Refused.", dnsmessage.TypeA), dnsmessage.RCodeRefused},
		"in IPv6":   {in6(query(2, "x.refused.", dnsmessage.TypeA)), dnsmessage.RCodeRefused},
		"search":    {query(3, "www.example.org.shop.svc.cluster.local.", dnsmessage.TypeA), dnsmessage.RCodeNameError},
		"questions": {twoQuestions(), dnsmessage.RCodeFormatError},
		"loop":      {loop(), dnsmessage.RCodeFormatError},
	} {
		d.send(c.packet.Bytes())
		var f frame.Frame
		var m dnsmessage.Message
		b := d.receive()
		if err := f.Read(b); err != nil || f.Source != c.packet.Destination || f.Destination != c.packet.Source ||
			!f.Intact() || f.Role != frame.Responder || f.Endpoint != 7 || f.Set != 9 {
			t.Errorf("%s: %v, %+v", what, err, f)
			continue
		}
		if err := m.Unpack(f.Payload); err != nil || m.RCode != c.code || m.ID != uint16(c.packet.ID) || !m.Response {
			t.Errorf("%s: %v, %+v", what, err, m.Header)
		}
	}
	broken := query(6, "x.refused.", dnsmessage.TypeA).Bytes()
	broken[len(broken)-1] ^= 1
	d.drops("a wrong checksum", d.Counts.BadChecksum.Load, broken)
}

// twoQuestions returns a query with two questions: an allowed and a refused name.
func twoQuestions() frametest.Packet {
	q := query(4, "www.example.com.", dnsmessage.TypeA)
	q.Payload = pack(dnsmessage.Message{
		Header: dnsmessage.Header{ID: 4},
		Questions: []dnsmessage.Question{
			question("www.example.com.", dnsmessage.TypeA), question("x.refused.", dnsmessage.TypeA),
		},
	})
	return q
}

// loop returns a query whose name points to itself.
func loop() frametest.Packet {
	q := query(5, ".", dnsmessage.TypeA)
	q.Payload = append(q.Payload[:12:12], 0xc0, 12, 0, 1, 0, 1)
	return q
}

func TestForgedAnswersTeachNothing(t *testing.T) {
	d := newDevice(t, time.Minute)
	q := query(1, "www.example.com.", dnsmessage.TypeA)
	d.passes(q.Bytes())
	genuine := answer(q, "www.example.com. 192.0.2.1")
	change := func(f func(p *frametest.Packet)) []byte {
		p := genuine
		p.Payload = slices.Clone(p.Payload)
		f(&p)
		return p.Bytes()
	}
	from := func(text string) []byte {
		return change(func(p *frametest.Packet) { p.Source = netip.MustParseAddrPort(text) })
	}
	with := func(f func(message []byte) []byte) []byte {
		return change(func(p *frametest.Packet) { p.Payload = f(p.Payload) })
	}
	ftp := answer(query(1, "ftp.example.com.", dnsmessage.TypeA), "ftp.example.com. 192.0.2.9")
	unasked, bad := d.x.Counts.Unasked.Load, d.x.Counts.BadAnswers.Load
	for what, c := range map[string]struct {
		count func() uint64
		b     []byte
	}{
		"another server":      {unasked, from("10.96.0.11:53")},
		"another server port": {unasked, from("10.96.0.10:54")},
		"another client port": {unasked, change(func(p *frametest.Packet) {
			p.Destination = netip.MustParseAddrPort("10.244.0.7:1")
		})},
		"another pod":          {unasked, change(func(p *frametest.Packet) { p.Endpoint = 8 })},
		"an unknown endpoint":  {unasked, change(func(p *frametest.Packet) { p.Endpoint = 5000 })},
		"another ID":           {unasked, with(func(m []byte) []byte { m[1]++; return m })},
		"another name":         {unasked, ftp.Bytes()},
		"another type":         {unasked, answer(query(1, "www.example.com.", dnsmessage.TypeAAAA)).Bytes()},
		"two questions":        {bad, with(func([]byte) []byte { return answer(twoQuestions()).Payload })},
		"a compression loop":   {bad, with(func(m []byte) []byte { return append(m[:12], 0xc0, 12, 0, 1, 0, 1) })},
		"data behind it":       {bad, with(func(m []byte) []byte { return append(m, 0) })},
		"cut":                  {bad, with(func(m []byte) []byte { return m[:len(m)-1] })},
		"empty":                {bad, with(func([]byte) []byte { return nil })},
		"a query":              {bad, with(func([]byte) []byte { return q.Payload })},
		"a short UDP length":   {d.Counts.Invalid.Load, set(genuine.Bytes(), 39, 20)},
		"a long IPv4 length":   {d.Counts.Invalid.Load, set(genuine.Bytes(), 16, 4)},
		"a wrong version":      {d.Counts.Invalid.Load, set(genuine.Bytes(), 1, 2)},
		"an unknown ethertype": {d.Counts.Invalid.Load, set(genuine.Bytes(), 12, 0x81)},
		"a wrong checksum":     {d.Counts.BadChecksum.Load, set(genuine.Bytes(), len(genuine.Bytes())-1, 7)},
	} {
		d.drops(what, c.count, c.b)
	}
	if got := d.policy.learned(); len(got) != 0 {
		t.Errorf("learned %v", got)
	}
	d.passes(genuine.Bytes()) // the query still waits for the genuine answer
	if got := d.policy.learned(); len(got) != 1 {
		t.Errorf("then learned %v", got)
	}
	d.drops("the answer again", unasked, genuine.Bytes())
}

func set(b []byte, at int, value byte) []byte {
	b[at] = value
	return b
}

func TestOwnerOutsideTheChainTeachesNothing(t *testing.T) {
	d := newDevice(t, time.Minute)
	q := query(1, "www.example.com.", dnsmessage.TypeA)
	d.passes(q.Bytes())
	d.passes(answer(q, "www.example.com. edge.cdn.example.", "edge.cdn.example. 192.0.2.1",
		"other.example. 192.0.2.2").Bytes())
	if got := d.policy.learned(); !slices.Equal(got, []string{"www.example.com.[192.0.2.1]"}) {
		t.Errorf("learned %v", got)
	}
}

// withCookie adds an OPT record with a cookie.
func withCookie(message []byte) []byte {
	message = slices.Clone(message)
	message[11]++
	return append(message, "\x00\x00\x29\x04\xd0\x00\x00\x80\x00\x00\x0c\x00\x0a\x00\x08cookie12"...)
}

func TestChainsCaseEDNSTruncation(t *testing.T) {
	d := newDevice(t, time.Minute)
	plain := query(1, "wWw.ExAmple.CoM.", dnsmessage.TypeA)
	q := plain
	q.Payload = withCookie(q.Payload)
	d.passes(q.Bytes())
	chain := answer(plain, "wWw.ExAmple.CoM. a.cdn.example.", "A.CDN.example. B.cdn.example.", "b.CDN.example. 192.0.2.1")
	chain.Payload = withCookie(chain.Payload)
	d.passes(chain.Bytes())
	d.passes(q.Bytes())
	truncated := answer(plain, "wWw.ExAmple.CoM. 192.0.2.2")
	truncated.Payload = withCookie(truncated.Payload)
	truncated.Payload[2] |= 2                                         // TC
	truncated.Payload = truncated.Payload[:len(truncated.Payload)-23] // within the OPT record
	d.passes(truncated.Bytes())
	want := []string{"www.example.com.[192.0.2.1]", "www.example.com.[192.0.2.2]"}
	if got := d.policy.learned(); !slices.Equal(got, want) {
		t.Errorf("learned %v, want %v", got, want)
	}
}

// large returns an answer of about 3,000 bytes.
func large(q frametest.Packet, name string) frametest.Packet {
	var records []string
	for i := range 100 {
		records = append(records, fmt.Sprintf("%s 192.0.2.%d", name, i))
	}
	return answer(q, records...)
}

func TestFragmentedAnswerIsHeldWhole(t *testing.T) {
	d := newDevice(t, time.Minute)
	gate := d.policy.close()
	for i, q := range []frametest.Packet{
		query(1, "www.example.com.", dnsmessage.TypeA), in6(query(2, "ipv6.example.com.", dnsmessage.TypeA)),
	} {
		d.passes(q.Bytes())
		pieces := large(q, []string{"www.example.com.", "ipv6.example.com."}[i]).Fragments(600)
		if len(pieces) < 3 {
			t.Fatal(len(pieces))
		}
		received := slices.Clone(pieces)
		slices.Reverse(received)
		d.send(received...)
		until(t, "the call for the answer", func() bool { return len(d.policy.learned()) == i+1 })
		d.passes(query(9, "other.example.com.", dnsmessage.TypeA).Bytes()) // no fragment was released
		gate <- struct{}{}
		for n, want := range pieces {
			if got := d.receive(); !bytes.Equal(got, want) {
				t.Fatalf("fragment %d: released % x", n, got)
			}
		}
	}
}

func TestFragmentedQueryPassesUnderARuleOfEveryName(t *testing.T) {
	d := newDevice(t, time.Minute)
	if err := d.rules.Upsert(10, rules.Content{All: true}); err != nil {
		t.Fatal(err)
	}
	q := query(5, "www.example.com.", dnsmessage.TypeA)
	q.Set = 10
	for _, piece := range q.Fragments(16) {
		d.passes(piece)
	}
}

func TestAttacksByFragmentsTeachNothing(t *testing.T) {
	d := newDevice(t, time.Minute)
	q := query(1, "www.example.com.", dnsmessage.TypeA)
	d.passes(q.Bytes())
	whole := large(q, "www.example.com.")
	pieces := whole.Fragments(600)
	d.send(pieces[:2]...)
	until(t, "two fragments", func() bool { return d.Counts.Fragments.Load() == 2 })
	d.drops("an overlap", d.Counts.FragmentConflicts.Load, whole.Fragment(make([]byte, 600), 592, true))
	d.drops("what follows it", d.Counts.FragmentConflicts.Load, pieces...)
	d.drops("a fragmented query", d.Counts.FragmentedQueries.Load, q.Fragments(16)...)
	tiny := whole
	tiny.ID = 2
	d.drops("a first fragment without ports", d.Counts.Invalid.Load, tiny.Fragment([]byte("1234567"), 0, true))
	changed := whole.Fragments(600)
	last := changed[len(changed)-1]
	last[len(last)-1] ^= 1
	for i := range changed {
		changed[i][19] = 77 // another ID
	}
	d.send(changed...)
	until(t, "the checksum of the whole", func() bool { return d.Counts.BadChecksum.Load() == 1 })
	if got := d.policy.learned(); len(got) != 0 {
		t.Errorf("learned %v", got)
	}
	// Many packets that are never complete take no more memory than the limit, and do not disturb other lookups.
	for i := range 10_000 {
		endless := whole
		endless.ID, endless.Endpoint = uint32(1000+i), 8
		d.send(endless.Fragments(600)[1])
	}
	until(t, "all fragments", func() bool { return d.Counts.Fragments.Load() > 10_000 })
	whole.ID = 3
	d.send(whole.Fragments(600)...)
	for range pieces {
		d.receive()
	}
	if got := d.policy.learned(); len(got) != 1 {
		t.Errorf("learned %d", len(got))
	}
	if _, evicted := d.Loop.Fragments(); evicted == 0 {
		t.Error("no packet was evicted")
	}
}

func TestQueryWaitsForItsRuleSet(t *testing.T) {
	d := newDevice(t, time.Minute)
	var waiting []frametest.Packet
	for i, name := range []string{"www.example.org.", "x.refused."} {
		q := query(uint16(i), name, dnsmessage.TypeA)
		q.Set = 10
		waiting = append(waiting, q)
		d.send(q.Bytes())
	}
	until(t, "two waits", func() bool { return d.waiting() == 2 })
	d.passes(query(9, "other.example.com.", dnsmessage.TypeA).Bytes())
	if err := d.rules.Upsert(10, rules.Content{Names: []string{"*.example.org"}}); err != nil {
		t.Fatal(err)
	}
	released, refused := d.receive(), d.receive()
	if !bytes.Equal(released, waiting[0].Bytes()) {
		released, refused = refused, released
	}
	var f frame.Frame
	if err := f.Read(refused); err != nil || f.Role != frame.Responder || !f.Intact() ||
		!bytes.Equal(released, waiting[0].Bytes()) {
		t.Errorf("%v, %+v; % x", err, f, released)
	}
	d.passes(answer(waiting[0]).Bytes())
}

func (d *device) waiting() int {
	d.waits.Lock()
	defer d.waits.Unlock()
	return d.waits.limit.Used()
}

func TestReusedEndpointInheritsNoQueries(t *testing.T) {
	d := newDevice(t, time.Minute)
	q := query(1, "www.example.com.", dnsmessage.TypeA)
	d.passes(q.Bytes())
	wait := query(2, "www.example.org.", dnsmessage.TypeA)
	wait.Set = 10
	d.send(wait.Bytes())
	until(t, "a wait", func() bool { return d.waiting() == 1 })
	d.pods.Upsert(owner(100), pods.Endpoint{ID: 7, Namespace: "bank"})
	d.drops("the answer to the former pod", d.x.Counts.Unasked.Load, answer(q, "www.example.com. 192.0.2.1").Bytes())
	if err := d.rules.Upsert(10, rules.Content{All: true}); err != nil {
		t.Fatal(err)
	}
	until(t, "the end of the wait", func() bool { return d.Counts.PodGone.Load() == 1 && d.waiting() == 0 })
	if got := d.policy.learned(); len(got) != 0 {
		t.Errorf("learned %v", got)
	}
	d.passes(q.Bytes())
	d.passes(answer(q).Bytes())
}

// TestOnePodDelaysNoOther: sluice-policy does not answer. One pod exceeds the limits of held answers and of waiting
// queries. Nevertheless, the next call of Learn is for the answer of another pod.
func TestOnePodDelaysNoOther(t *testing.T) {
	d := newDevice(t, time.Hour)
	gate := d.policy.close()
	const flood = 2000
	released := 0
	for i := range uint16(flood) {
		q := query(i, fmt.Sprintf("n%d.example.com.", i), dnsmessage.TypeA)
		d.send(q.Bytes())
		for !bytes.Equal(d.receive(), q.Bytes()) { // answers beyond the share arrive in between
			released++
		}
		d.send(answer(q, fmt.Sprintf("n%d.example.com. 192.0.%d.%d", i, i/250, i%250)).Bytes())
		q.Set = 10
		d.send(q.Bytes()) // the query waits for its rule set
	}
	until(t, "all packets of the noisy pod", func() bool {
		return d.Counts.Queries.Load() == 2*flood && d.Counts.Answers.Load() == flood
	})
	if n := d.waiting(); n > MaxWaitsPerPod {
		t.Errorf("%d queries wait", n)
	}
	before := len(d.policy.learned())
	if before != maxRunningPerPod {
		t.Errorf("%d calls for the noisy pod", before)
	}
	quiet := query(1, "quiet.example.com.", dnsmessage.TypeA)
	quiet.Endpoint = 8
	d.send(quiet.Bytes())
	a := answer(quiet, "quiet.example.com. 198.51.100.1").Bytes()
	for b := d.receive(); !bytes.Equal(b, quiet.Bytes()); b = d.receive() {
		released++
	}
	d.send(a)
	until(t, "the call for the quiet pod", func() bool {
		return slices.Contains(d.policy.learned(), "quiet.example.com.[198.51.100.1]")
	})
	if n := len(d.policy.learned()); n != before+1 {
		t.Errorf("%d calls were made before the call for the quiet pod", n-before-1)
	}
	close(gate)
	for b := d.receive(); !bytes.Equal(b, a); b = d.receive() {
		released++
	}
	for ; released < flood; released++ { // every answer is released in the end
		d.receive()
	}
}

func TestQueueIsReplaced(t *testing.T) {
	d := newDevice(t, time.Minute)
	gate := d.policy.close()
	q := query(1, "www.example.com.", dnsmessage.TypeA)
	d.passes(q.Bytes())
	a := answer(q, "www.example.com. 192.0.2.1").Bytes()
	d.send(a)
	until(t, "the call for the answer", func() bool { return len(d.policy.learned()) == 1 })
	former := d.fd
	d.fd = d.attach()
	b := make([]byte, 1)
	if n, err := unix.Read(former, b); err != nil || n != 0 { // the former queue was closed
		t.Errorf("the former queue: %d bytes, %v", n, err)
	}
	unix.Close(former)
	gate <- struct{}{}
	if got := d.receive(); !bytes.Equal(got, a) { // a held answer is sent to the current queue
		t.Errorf("released % x", got)
	}
	d.passes(q.Bytes())
}

func TestFramesOfAReplacedQueueAreHandled(t *testing.T) {
	d := newDevice(t, time.Minute)
	const many = 300
	var want [][]byte
	for i := range uint16(many) {
		want = append(want, query(i, "www.example.com.", dnsmessage.TypeA).Bytes())
	}
	d.send(want...)
	former := d.fd
	d.fd = d.attach()
	if n := d.Counts.Queries.Load(); n != many {
		t.Errorf("%d of %d queries were handled", n, many)
	}
	unix.Close(former)
}

func TestQueueThatCannotBeReadEnds(t *testing.T) {
	d := newDevice(t, time.Minute)
	q := d.queue.Load()
	unix.Close(d.fd)
	<-q.Ended()
	if q.Err() == nil {
		t.Error("no reason")
	}
	d.fd = d.attach()
	d.passes(query(1, "www.example.com.", dnsmessage.TypeA).Bytes())
}

// TestFullDeviceBlocksNoReader: a full device drops packets. The readers do not block and continue to read.
func TestFullDeviceBlocksNoReader(t *testing.T) {
	d := newDevice(t, time.Minute)
	sent := uint64(0)
	for d.Counts.WriteErrors.Load() == 0 {
		d.send(query(uint16(sent), "www.example.com.", dnsmessage.TypeA).Bytes()) //nolint:gosec // may overflow
		sent++
	}
	b, received := make([]byte, frame.MaxSize), uint64(0)
	until(t, "reading all", func() bool {
		for {
			if _, _, err := unix.Recvfrom(d.fd, b, unix.MSG_DONTWAIT); err != nil {
				return received+d.Counts.WriteErrors.Load() == sent
			}
			received++
		}
	})
	d.passes(query(1, "www.example.com.", dnsmessage.TypeA).Bytes())
}

// TestPacketsAllocateNothing: handling a query that is released, and an answer whose addresses are enforced,
// allocates no memory.
func TestPacketsAllocateNothing(t *testing.T) {
	d := newDevice(t, time.Minute)
	r := d.newReader(d.queue.Load())
	for _, q := range []frametest.Packet{
		query(1, "www.example.com.", dnsmessage.TypeA), in6(query(2, "ipv6.example.com.", dnsmessage.TypeA)),
	} {
		name := []string{"www.example.com.", "ipv6.example.com."}[q.ID-1]
		ask, tell := q.Bytes(), answer(q, name+" 192.0.2.1", name+" 192.0.2.2").Bytes()
		d.passes(ask)
		d.passes(tell)
		out := make([]byte, frame.MaxSize)
		lookup := func() {
			for _, b := range [][]byte{ask, tell} {
				r.handle(b)
				if n, err := unix.Read(d.fd, out); err != nil || !bytes.Equal(out[:n], b) {
					t.Fatal(n, err)
				}
			}
		}
		if n := testing.AllocsPerRun(200, lookup); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}

// TestStopReleasesHeldAnswers: a stopping process releases the answers that it holds.
func TestStopReleasesHeldAnswers(t *testing.T) {
	d := newDevice(t, time.Hour)
	d.policy.close()
	q := query(1, "www.example.com.", dnsmessage.TypeA)
	d.passes(q.Bytes())
	a := answer(q, "www.example.com. 192.0.2.1").Bytes()
	d.send(a)
	until(t, "the call for the answer", func() bool { return len(d.policy.learned()) == 1 })
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		d.Loop.close()
	}()
	if got := d.receive(); !bytes.Equal(got, a) {
		t.Errorf("released % x", got)
	}
	<-stopped
}
