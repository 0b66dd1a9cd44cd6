// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package exchange

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/sluice-net/sluice/model/dnsname"
	"github.com/sluice-net/sluice/services/dns/internal/names"
	"github.com/sluice-net/sluice/services/dns/internal/rules"
)

// policy simulates sluice-policy, and records the calls.
type policy struct {
	mu    sync.Mutex
	calls []string      // guarded by mu
	err   error         // guarded by mu; result of the next calls
	delay time.Duration // guarded by mu
	busy  map[string]int
	most  int // guarded by mu; maximum number of concurrent calls for one name

	cluster map[netip.Addr]bool
	unknown error // of Has
	hung    bool  // Has returns only when ctx ends
	slow    bool  // Forget returns only when ctx ends
	full    bool  // guarded by mu; Learn has no capacity until Forget is called
}

func (p *policy) Has(ctx context.Context, addr netip.Addr) (bool, error) {
	if p.hung {
		<-ctx.Done()
		return false, ctx.Err()
	}
	return p.cluster[addr], p.unknown
}

func (p *policy) Learn(ctx context.Context, _ names.Asker, name string, addrs []netip.Addr, ttl time.Duration) error {
	p.mu.Lock()
	p.calls = append(p.calls, fmt.Sprint(name, addrs, ttl))
	err, delay := p.err, p.delay
	if p.full {
		err = ErrNoCapacity
	}
	if p.busy == nil {
		p.busy = make(map[string]int)
	}
	p.busy[name]++
	p.most = max(p.most, p.busy[name])
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		p.busy[name]--
		p.mu.Unlock()
	}()
	select {
	case <-time.After(delay):
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (p *policy) Forget(ctx context.Context, name, _ string, addr netip.Addr) error {
	if p.slow {
		<-ctx.Done()
		return ctx.Err()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.full = false
	p.calls = append(p.calls, fmt.Sprint("forget ", name, addr))
	return nil
}

func (p *policy) take() (calls []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	calls, p.calls = p.calls, nil
	return calls
}

type bench struct {
	*Exchange
	policy *policy
	rules  *rules.Rules
	table  *names.Table
}

func newBench(t testing.TB, change ...func(*Options)) *bench {
	t.Helper()
	b := &bench{
		policy: &policy{}, rules: rules.New(), table: names.New(names.Limits{Names: 100, Addresses: 1000}, time.Now()),
	}
	refusal, err := rules.NewRefusal(rules.Auto, []string{"cluster.local"})
	if err != nil {
		t.Fatal(err)
	}
	if err := b.rules.Upsert(1, rules.Content{Names: []string{"*.example.com", "a.example.net"}}); err != nil {
		t.Fatal(err)
	}
	o := Options{
		Rules: b.rules, Table: b.table, Enforcer: b.policy, Cluster: b.policy, Refusal: refusal,
		HoldFor: 2 * time.Second, Now: time.Now,
	}
	for _, f := range change {
		f(&o)
	}
	b.Exchange = New(o)
	return b
}

var (
	server = netip.MustParseAddrPort("10.96.0.10:53")
	client = Connection{
		Client: netip.MustParseAddrPort("10.244.0.7:40000"), Server: server, Tag: rules.Tag{Egress: 1},
		Endpoint: 7, Asker: names.Asker{Endpoint: 7, Tenant: "namespace shop"},
	}
)

func question(name string) dnsmessage.Question {
	return dnsmessage.Question{Name: dnsmessage.MustNewName(name), Type: dnsmessage.TypeA, Class: dnsmessage.ClassINET}
}

func query(t testing.TB, id uint16, name string) []byte {
	t.Helper()
	m := dnsmessage.Message{
		Header: dnsmessage.Header{ID: id, RecursionDesired: true}, Questions: []dnsmessage.Question{question(name)},
	}
	return pack(t, m)
}

func pack(t testing.TB, m dnsmessage.Message) []byte {
	t.Helper()
	b, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// answer returns an answer with a TTL of 100 s.
func answer(t testing.TB, id uint16, name string, addrs ...string) []byte {
	t.Helper()
	m := dnsmessage.Message{
		Header: dnsmessage.Header{ID: id, Response: true}, Questions: []dnsmessage.Question{question(name)},
	}
	for _, a := range addrs {
		m.Answers = append(m.Answers, dnsmessage.Resource{
			Header: dnsmessage.ResourceHeader{Name: dnsmessage.MustNewName(name), Class: dnsmessage.ClassINET, TTL: 100},
			Body:   &dnsmessage.AResource{A: netip.MustParseAddr(a).As4()},
		})
	}
	return pack(t, m)
}

// ask sends a query that must pass.
func (b *bench) ask(t testing.TB, c Connection, id uint16, name string) {
	t.Helper()
	if action, _ := b.Query(c, query(t, id, name), nil); action != Release {
		t.Fatalf("query for %s: action %d", name, action)
	}
}

// settled handles an answer, and waits until it may be released.
func (b *bench) settled(t testing.TB, c Connection, message []byte) {
	t.Helper()
	action, held := b.Answer(c, message)
	if action == Hold {
		b.Settle(t.Context(), held)
	} else if action != Release {
		t.Fatalf("answer: action %d", action)
	}
}

func TestQueriesPassIfTheRulesAllowTheirName(t *testing.T) {
	b := newBench(t)
	unknown := client
	unknown.Tag.Ingress = 9
	update := query(t, 5, "www.example.com.")
	update[2] |= 5 << 3
	for what, c := range map[string]struct {
		connection Connection
		message    []byte
		action     Action
		code       dnsmessage.RCode
	}{
		"allowed":      {client, query(t, 5, "wWw.eXample.com."), Release, 0},
		"refused":      {client, query(t, 5, "www.example.net."), Reply, dnsmessage.RCodeRefused},
		"search":       {client, query(t, 5, "www.example.net.default.svc.cluster.local."), Reply, dnsmessage.RCodeNameError},
		"unknown set":  {unknown, query(t, 5, "www.example.com."), Wait, 0},
		"malformed":    {client, append(query(t, 5, "www.example.com."), 0), Reply, dnsmessage.RCodeFormatError},
		"an update":    {client, update, Reply, dnsmessage.RCodeNotImplemented},
		"not DNS":      {client, []byte("GET /"), Drop, 0},
		"as an answer": {client, answer(t, 5, "www.example.com."), Drop, 0},
	} {
		action, reply := b.Query(c.connection, c.message, []byte("xx"))
		if action != c.action || (action == Reply) != (len(reply) > 2) {
			t.Errorf("%s: action %d, reply % x; want action %d", what, action, reply, c.action)
			continue
		}
		if action != Reply {
			continue
		}
		var m dnsmessage.Message
		if err := m.Unpack(reply[2:]); err != nil || m.ID != 5 || m.RCode != c.code || !m.Response {
			t.Errorf("%s: %v, %+v", what, err, m.Header)
		}
	}
	if got := b.Counts.Allowed.Load() + 10*b.Counts.Refused.Load() + 100*b.Counts.Malformed.Load(); got != 421 {
		t.Errorf("counts %d", got)
	}
}

func TestOnlyTheAnswerToAQueryTeaches(t *testing.T) {
	const name = "www.example.com."
	other := client
	other.Client = netip.AddrPortFrom(client.Client.Addr(), 40001)
	spoofed := client
	spoofed.Server = netip.MustParseAddrPort("10.96.0.11:53")
	pod := client
	pod.Endpoint = 8
	for what, c := range map[string]struct {
		connection Connection
		message    []byte
	}{
		"another ID":        {client, answer(t, 6, name, "192.0.2.1")},
		"another name":      {client, answer(t, 5, "ftp.example.com.", "192.0.2.1")},
		"another port":      {other, answer(t, 5, name, "192.0.2.1")},
		"another server":    {spoofed, answer(t, 5, name, "192.0.2.1")},
		"another pod":       {pod, answer(t, 5, name, "192.0.2.1")},
		"a query":           {client, query(t, 5, name)},
		"data behind it":    {client, append(answer(t, 5, name, "192.0.2.1"), 0)},
		"without questions": {client, pack(t, dnsmessage.Message{Header: dnsmessage.Header{ID: 5, Response: true}})},
	} {
		b := newBench(t)
		b.ask(t, client, 5, "WWW.example.com.")
		if action, _ := b.Answer(c.connection, c.message); action != Drop {
			t.Errorf("%s: action %d", what, action)
		}
		if n, _ := b.table.Len(); n != 0 || len(b.policy.take()) != 0 {
			t.Errorf("%s: %d names were learned", what, n)
		}
		// The query still waits for its answer, which is learned once.
		b.settled(t, client, answer(t, 5, name, "192.0.2.1"))
		if calls := b.policy.take(); !slices.Equal(calls, []string{"www.example.com.[192.0.2.1] 1m40s"}) {
			t.Errorf("%s: then %v", what, calls)
		}
		if action, _ := b.Answer(client, answer(t, 5, name, "192.0.2.2")); action != Drop {
			t.Errorf("%s: second answer: action %d", what, action)
		}
	}
}

func TestQueriesAreForgottenAfterTheirTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.ask(t, client, 5, "www.example.com.")
		time.Sleep(queryTime)
		if action, _ := b.Answer(client, answer(t, 5, "www.example.com.", "192.0.2.1")); action != Drop {
			t.Errorf("too late: action %d", action)
		}
		// The time of a repeated query counts from its last repetition.
		b.ask(t, client, 5, "www.example.com.")
		time.Sleep(queryTime - time.Second)
		b.ask(t, client, 5, "www.example.com.")
		time.Sleep(2 * time.Second)
		if action, _ := b.Answer(client, answer(t, 5, "www.example.com.")); action != Release {
			t.Errorf("repeated: action %d", action)
		}
	})
}

func TestQueriesOfOnePodAreBounded(t *testing.T) {
	b := newBench(t)
	quiet := client
	quiet.Endpoint, quiet.Asker.Endpoint = 8, 8
	b.ask(t, quiet, 1, "www.example.com.")
	for i := range uint16(MaxQueries + 1) {
		b.ask(t, client, i, "www.example.com.")
	}
	if action, _ := b.Answer(client, answer(t, 0, "www.example.com.")); action != Drop {
		t.Errorf("the oldest: action %d", action)
	}
	for _, c := range []Connection{client, quiet} {
		if action, _ := b.Answer(c, answer(t, 1, "www.example.com.")); action != Release {
			t.Errorf("endpoint %d: action %d", c.Endpoint, action)
		}
	}
	if p := b.pods[7]; len(p.order)-p.head > MaxQueries || len(p.open) > MaxQueries {
		t.Errorf("%d queries, %d in order", len(p.open), len(p.order)-p.head)
	}
	b.Leave(7)
	if len(b.pods) != 1 {
		t.Errorf("%d pods are left", len(b.pods))
	}
}

// TestSlowQueryIsNotDroppedForAnsweredOnes: only unanswered queries count towards the limit. So a slow query stays
// although many later queries were answered.
func TestSlowQueryIsNotDroppedForAnsweredOnes(t *testing.T) {
	b := newBench(t)
	b.ask(t, client, 0, "slow.example.com.")
	const others = 5 * MaxQueries
	for i := range uint16(others) {
		b.ask(t, client, i, "www.example.com.")
		if i == others-1 {
			break
		}
		if action, _ := b.Answer(client, answer(t, i, "www.example.com.")); action != Release {
			t.Fatalf("answer %d: action %d", i, action)
		}
		if p := b.pods[7]; len(p.order)-p.head+len(p.free) > 2*MaxQueries+1 {
			t.Fatalf("%d queries are kept in order, %d free", len(p.order)-p.head, len(p.free))
		}
	}
	for id, name := range map[uint16]string{0: "slow.example.com.", others - 1: "www.example.com."} {
		if action, _ := b.Answer(client, answer(t, id, name)); action != Release {
			t.Errorf("answer to %s: action %d", name, action)
		}
	}
}

func TestAnswerIsHeldUntilItsAddressesAreEnforced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.policy.delay = time.Second
		done := make(chan time.Time, 2)
		for id := range uint16(2) { // the second answer waits for the call of the first one, and makes no call itself
			b.ask(t, client, id, "www.example.com.")
			action, held := b.Answer(client, answer(t, id, "www.example.com.", "192.0.2.1", "192.0.2.2"))
			if action != Hold {
				t.Fatalf("action %d", action)
			}
			go func() {
				b.Settle(t.Context(), held)
				done <- time.Now()
			}()
		}
		began := time.Now()
		for range 2 {
			if d := (<-done).Sub(began); d != time.Second {
				t.Errorf("released after %s", d)
			}
		}
		if calls := b.policy.take(); len(calls) != 1 || b.policy.most != 1 {
			t.Errorf("calls %v, %d at a time", calls, b.policy.most)
		}
		b.ask(t, client, 3, "www.example.com.")
		if action, _ := b.Answer(client, answer(t, 3, "www.example.com.", "192.0.2.2")); action != Release {
			t.Errorf("enforced already: action %d", action)
		}
		b.ask(t, client, 4, "www.example.com.")
		b.settled(t, client, answer(t, 4, "www.example.com.", "192.0.2.2", "192.0.2.3"))
		if calls := b.policy.take(); !slices.Equal(calls, []string{"www.example.com.[192.0.2.3] 1m40s"}) {
			t.Errorf("one new address: %v", calls)
		}
	})
}

func TestAnswerIsReleasedWhenSluicePolicyCannotHelp(t *testing.T) {
	for what, c := range map[string]struct {
		err       error
		delay     time.Duration
		released  time.Duration
		late, out uint64
	}{
		"away":    {nil, time.Hour, 2 * time.Second, 1, 0},
		"failing": {errors.New("no socket"), 0, 0, 1, 0},
		"full":    {fmt.Errorf("policy: %w", ErrNoCapacity), 0, 0, 0, 1},
	} {
		synctest.Test(t, func(t *testing.T) {
			b := newBench(t)
			b.policy.err, b.policy.delay = c.err, c.delay
			began := time.Now()
			b.ask(t, client, 1, "www.example.com.")
			b.settled(t, client, answer(t, 1, "www.example.com.", "192.0.2.1"))
			if d := time.Since(began); d != c.released || b.Counts.Late.Load() != c.late ||
				b.Counts.NoCapacity.Load() != c.out {
				t.Errorf("%s: released after %s, %d late, %d without capacity", what, d, b.Counts.Late.Load(),
					b.Counts.NoCapacity.Load())
			}
			r := b.table.Refusals("www.example.com.")
			if len(r) != 1 || r[0].Reason != names.NotEnforced {
				t.Errorf("%s: refused %+v", what, r)
			}
			// The next answer tries again.
			b.policy.err, b.policy.delay = nil, 0
			b.policy.take()
			b.ask(t, client, 2, "www.example.com.")
			b.settled(t, client, answer(t, 2, "www.example.com.", "192.0.2.1"))
			if calls := b.policy.take(); len(calls) != 1 {
				t.Errorf("%s: then %v", what, calls)
			}
		})
	}
}

func TestHeldAnswersOfOnePodAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.policy.delay = time.Second
		var running sync.WaitGroup
		for i := range uint16(MaxHeld + 3) {
			b.ask(t, client, i, "www.example.com.")
			action, held := b.Answer(client, answer(t, i, "www.example.com.", fmt.Sprintf("192.0.2.%d", i%200)))
			if want := map[bool]Action{true: Hold, false: Release}[i < MaxHeld]; action != want {
				t.Fatalf("answer %d: action %d, want %d", i, action, want)
			}
			if action == Hold {
				running.Go(func() { b.Settle(t.Context(), held) })
			}
		}
		quiet := client
		quiet.Endpoint, quiet.Asker.Endpoint = 8, 8
		b.ask(t, quiet, 1, "a.example.net.")
		if action, held := b.Answer(quiet, answer(t, 1, "a.example.net.", "192.0.2.7")); action != Hold {
			t.Errorf("another pod: action %d", action)
		} else {
			b.Settle(t.Context(), held)
		}
		running.Wait()
		if b.pods[7].held != 0 || b.pods[8].held != 0 || b.Counts.BeyondShare.Load() != 3 || len(b.calling) != 0 {
			t.Errorf("%d and %d are held, %d beyond, %d calls", b.pods[7].held, b.pods[8].held, b.Counts.BeyondShare.Load(),
				len(b.calling))
		}
	})
}

func TestOnlyListedServersTeach(t *testing.T) {
	b := newBench(t, func(o *Options) { o.LearnFrom = []netip.Prefix{netip.MustParsePrefix("10.96.0.10/32")} })
	foreign := client
	foreign.Server = netip.MustParseAddrPort("10.96.0.11:53")
	b.ask(t, foreign, 1, "www.example.com.")
	b.settled(t, foreign, answer(t, 1, "www.example.com.", "192.0.2.1"))
	if r := b.table.Refusals("www.example.com."); len(b.policy.take()) != 0 || len(r) != 1 || r[0].Reason != names.Server {
		t.Errorf("%+v", r)
	}
	b.ask(t, client, 1, "www.example.com.")
	b.settled(t, client, answer(t, 1, "www.example.com.", "192.0.2.1"))
	if len(b.policy.take()) != 1 {
		t.Error("a listed server taught nothing")
	}
}

func TestAddressesOfNodesAndPodsAreNotLearned(t *testing.T) {
	b := newBench(t)
	node := netip.MustParseAddr("10.0.0.5")
	b.policy.cluster = map[netip.Addr]bool{node: true}
	for id := range uint16(2) {
		b.ask(t, client, id, "www.example.com.")
		b.settled(t, client, answer(t, id, "www.example.com.", "192.0.2.1", "10.0.0.5"))
	}
	if calls := b.policy.take(); !slices.Equal(calls, []string{"www.example.com.[192.0.2.1] 1m40s"}) {
		t.Errorf("learned %v", calls)
	}
	if r := b.table.Refusals("www.example.com."); len(r) != 1 || r[0].Addr != node || r[0].Reason != names.Cluster {
		t.Errorf("refused %+v", r)
	}
	b.policy.unknown = errors.New("sluice-identity does not answer")
	b.ask(t, client, 1, "a.example.net.")
	b.settled(t, client, answer(t, 1, "a.example.net.", "192.0.2.9"))
	if calls := b.policy.take(); len(calls) != 1 {
		t.Errorf("while it is not known: %v", calls)
	}
}

// TestManyAddressesAreLearnedWhileSluiceIdentityHangs: sluice-identity does not answer. All addresses of an answer
// together wait for it only once.
func TestManyAddressesAreLearnedWhileSluiceIdentityHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.policy.hung = true
		var list []string
		for i := range 12 {
			list = append(list, fmt.Sprintf("192.0.2.%d", i))
		}
		began := time.Now()
		b.ask(t, client, 1, "www.example.com.")
		b.settled(t, client, answer(t, 1, "www.example.com.", list...))
		if d := time.Since(began); d != clusterTime || b.Counts.Late.Load() != 0 || len(b.policy.take()) != 1 {
			t.Errorf("released after %s, %d late: want all addresses learned after %s", d, b.Counts.Late.Load(), clusterTime)
		}
	})
}

func TestNamesThatNoPolicySelectsAreNotLearned(t *testing.T) {
	b := newBench(t)
	if err := b.rules.Want([]string{"a.example.net"}); err != nil {
		t.Fatal(err)
	}
	b.ask(t, client, 1, "www.example.com.")
	if action, _ := b.Answer(client, answer(t, 1, "www.example.com.", "192.0.2.1")); action != Release {
		t.Errorf("action %d", action)
	}
	if n, _ := b.table.Len(); n != 0 {
		t.Errorf("%d names", n)
	}
}

// filled returns an exchange whose table one client has filled with four addresses, and a pod of another tenant.
func filled(t *testing.T) (b *bench, quiet Connection) {
	t.Helper()
	b = newBench(t, func(o *Options) { o.Table = names.New(names.Limits{Names: 100, Addresses: 4}, time.Now()) })
	for i := range uint16(4) {
		b.ask(t, client, i, "www.example.com.")
		b.settled(t, client, answer(t, i, "www.example.com.", fmt.Sprintf("192.0.2.%d", i)))
	}
	b.policy.take()
	quiet = client
	quiet.Endpoint, quiet.Asker = 8, names.Asker{Endpoint: 8, Tenant: "namespace other"}
	b.ask(t, quiet, 1, "a.example.net.")
	return b, quiet
}

// runs executes Run until it waits.
func (b *bench) runs(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() { _ = b.Run(ctx) }()
	synctest.Wait()
}

func TestEvictedAddressesAreForgotten(t *testing.T) {
	for what, c := range map[string]struct {
		change func(b *bench)
		before string // call before Run
		after  string
	}{
		"after the answer": {
			func(*bench) {}, "a.example.net.[192.0.2.77] 1m40s", "forget www.example.com.192.0.2.0",
		},
		"though the answer is not held": {
			func(b *bench) { b.pods[8].held = MaxHeld }, "", "forget www.example.com.192.0.2.0",
		},
		"before the answer, for its capacity": {
			func(b *bench) { b.policy.full = true }, "a.example.net.[192.0.2.77] 1m40s " +
				"forget www.example.com.192.0.2.0 a.example.net.[192.0.2.77] 1m40s", "",
		},
		"but not if they are learned again": {
			func(b *bench) {
				b.policy.err = errors.New("away")
			}, "a.example.net.[192.0.2.77] 1m40s", "",
		},
	} {
		synctest.Test(t, func(t *testing.T) {
			b, quiet := filled(t)
			c.change(b)
			b.settled(t, quiet, answer(t, 1, "a.example.net.", "192.0.2.77"))
			if got := strings.Join(b.policy.take(), " "); got != c.before {
				t.Errorf("%s: calls %q, want %q", what, got, c.before)
			}
			if b.policy.err != nil {
				b.policy.err = nil
				same := func(text string) bool { return dnsname.Learned(text).Name() == "a.example.net." }
				b.o.Table.Delete(same, netip.Addr{}, time.Now())
				b.ask(t, client, 9, "www.example.com.")
				b.settled(t, client, answer(t, 9, "www.example.com.", "192.0.2.0"))
				b.policy.take()
			}
			b.runs(t)
			if got := strings.Join(b.policy.take(), " "); got != c.after || len(b.evicted) != 0 {
				t.Errorf("%s: then calls %q, want %q; %d wait", what, got, c.after, len(b.evicted))
			}
		})
	}
}

// TestAnswerDoesNotWaitForEvictions: addresses of other pods are evicted for the answer of a pod within its share.
// The answer does not wait until sluice-policy has removed them.
func TestAnswerDoesNotWaitForEvictions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, quiet := filled(t)
		b.policy.slow = true
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go func() { _ = b.Run(ctx) }()
		began := time.Now()
		b.settled(t, quiet, answer(t, 1, "a.example.net.", "192.0.2.77"))
		if d := time.Since(began); d != 0 || len(b.policy.take()) != 1 {
			t.Errorf("released after %s", d)
		}
	})
}

// TestEnforcedNameAllocatesNothing: a lookup whose addresses are enforced allocates no memory.
func TestEnforcedNameAllocatesNothing(t *testing.T) {
	b := newBench(t)
	var queries, answers [][]byte
	for i := range uint16(50) {
		name := fmt.Sprintf("www%d.example.com.", i)
		queries = append(queries, query(t, i, name))
		answers = append(answers, answer(t, i, name, "192.0.2.1", "192.0.2.2"))
	}
	lookups := func() {
		for i := range queries {
			if action, _ := b.Query(client, queries[i], nil); action != Release {
				t.Fatalf("query: action %d", action)
			}
		}
		for i := range answers {
			if action, held := b.Answer(client, answers[i]); action == Hold {
				b.Settle(t.Context(), held)
			} else if action != Release {
				t.Fatalf("answer: action %d", action)
			}
		}
	}
	lookups()
	if n := testing.AllocsPerRun(100, lookups); n != 0 {
		t.Errorf("%v allocations for 50 lookups", n)
	}
}

// TestNamesOutliveTheirBuffer: the exchange reads names in a buffer, and keeps only copies, so the buffer can be
// reused.
func TestNamesOutliveTheirBuffer(t *testing.T) {
	b := newBench(t, func(o *Options) { o.LearnFrom = nil })
	for id, name := range []string{"www.example.com.", "ftp.example.com."} {
		b.ask(t, client, uint16(id), name)
		b.settled(t, client, answer(t, uint16(id), name, "192.0.2.1", "127.0.0.1"))
	}
	if n, _ := b.table.Len(); n != 2 {
		t.Errorf("%d names", n)
	}
	for _, name := range []string{"www.example.com.", "ftp.example.com."} {
		key := string(dnsname.ForNamespace(name, ""))
		got, ok := b.table.Get(key, time.Now())
		if r := b.table.Refusals(name); !ok || got.Name != key || len(r) != 1 || r[0].Name != key {
			t.Errorf("%s: %+v, %+v", name, got, r)
		}
	}
}

// TestAbandonedAnswerTeachesNothing: an abandoned answer counts as beyond the share. The next answer with the same
// addresses is held again.
func TestAbandonedAnswerTeachesNothing(t *testing.T) {
	b := newBench(t)
	for id := range uint16(2) {
		b.ask(t, client, id, "www.example.com.")
		action, held := b.Answer(client, answer(t, id, "www.example.com.", "192.0.2.1"))
		if action != Hold {
			t.Fatalf("action %d", action)
		}
		b.Abandon(held)
	}
	if n := b.Counts.BeyondShare.Load(); n != 2 || b.Counts.Late.Load() != 0 || b.pods[7].held != 0 {
		t.Errorf("%d beyond the share, %d late, %d held", n, b.Counts.Late.Load(), b.pods[7].held)
	}
}

// BenchmarkQueryAndAnswer handles a query and its answer for a name whose addresses are already enforced.
func BenchmarkQueryAndAnswer(b *testing.B) {
	x := newBench(b)
	q := query(b, 1, "www.example.com.")
	a := answer(b, 1, "www.example.com.", "192.0.2.1", "192.0.2.2", "192.0.2.3", "192.0.2.4", "192.0.2.5", "192.0.2.6",
		"192.0.2.7", "192.0.2.8")
	x.Query(client, q, nil)
	if action, held := x.Answer(client, a); action == Hold {
		x.Settle(b.Context(), held)
	}
	b.ReportAllocs()
	for b.Loop() {
		if action, _ := x.Query(client, q, nil); action != Release {
			b.Fatal(action)
		}
		if action, _ := x.Answer(client, a); action != Release {
			b.Fatal(action)
		}
	}
}

// BenchmarkRefusedQuery handles a query that is refused, and builds the reply.
func BenchmarkRefusedQuery(b *testing.B) {
	x := newBench(b)
	q := query(b, 1, "www.example.net.")
	var reply []byte
	b.ReportAllocs()
	for b.Loop() {
		var action Action
		if action, reply = x.Query(client, q, reply[:0]); action != Reply {
			b.Fatal(action)
		}
	}
}

// TestAnswerWithoutAQueryPassesUnderARuleOfEveryName: while this process does not run, queries pass without it if a
// rule allows every name. Their answers may arrive after it has started. These answers pass, and no addresses are
// learned from them.
func TestAnswerWithoutAQueryPassesUnderARuleOfEveryName(t *testing.T) {
	b := newBench(t)
	for number, content := range map[uint16]rules.Content{2: {Names: []string{"*"}}, 3: {All: true}, 4: {}} {
		if err := b.rules.Upsert(number, content); err != nil {
			t.Fatal(err)
		}
	}
	for tag, want := range map[rules.Tag]Action{
		{Egress: 2}: Release, {Egress: 3}: Release, {Egress: 2, Ingress: 3}: Release,
		{Egress: 1}: Drop, {Egress: 4}: Drop, {Egress: 5}: Drop, {Egress: 2, Ingress: 1}: Drop, {}: Drop,
	} {
		c := client
		c.Tag = tag
		if action, _ := b.Answer(c, answer(t, 1, "a.example.com.", "192.0.2.1")); action != want {
			t.Errorf("tag %v: %v, want %v", tag, action, want)
		}
	}
	if calls := b.policy.take(); len(calls) > 0 {
		t.Errorf("such answers taught: %v", calls)
	}
}

// TestOtherMessagesPassUnderARuleOfEveryName: if a rule allows every name, messages that cannot be evaluated pass, as
// they would without this process. No addresses are learned from them.
func TestOtherMessagesPassUnderARuleOfEveryName(t *testing.T) {
	const name = "www.example.com."
	b := newBench(t)
	for number, content := range map[uint16]rules.Content{2: {Names: []string{"*"}}, 3: {All: true}} {
		if err := b.rules.Upsert(number, content); err != nil {
			t.Fatal(err)
		}
	}
	update := query(t, 5, name)
	update[2] |= 5 << 3
	two := pack(t, dnsmessage.Message{
		Header: dnsmessage.Header{ID: 5}, Questions: []dnsmessage.Question{question(name), question("a.example.com.")},
	})
	record := dnsmessage.Resource{
		Header: dnsmessage.ResourceHeader{Name: dnsmessage.MustNewName(name), Class: dnsmessage.ClassINET},
		Body:   &dnsmessage.AResource{A: [4]byte{192, 0, 2, 1}},
	}
	for what, m := range map[string]struct{ query, answer []byte }{
		"not DNS":       {[]byte("GET /"), []byte("dns")},
		"empty":         {nil, nil},
		"an update":     {update, answer(t, 5, "other.example.com.")},
		"trailing byte": {append(query(t, 5, name), 0), append(answer(t, 5, name, "192.0.2.1"), 0)},
		"two questions": {two, pack(t, dnsmessage.Message{Header: dnsmessage.Header{ID: 5, Response: true}})},
		"a record": {pack(t, dnsmessage.Message{
			Header: dnsmessage.Header{ID: 5}, Questions: []dnsmessage.Question{question(name)},
			Answers: []dnsmessage.Resource{record},
		}), answer(t, 5, name, "192.0.2.1")[:40]},
		"the other direction": {answer(t, 5, name, "192.0.2.1"), query(t, 5, name)},
	} {
		for tag, passes := range map[rules.Tag]bool{
			{Egress: 2}: true, {Egress: 3}: true, {Egress: 2, Ingress: 3}: true,
			{Egress: 1}: false, {Egress: 2, Ingress: 1}: false,
		} {
			c := client
			c.Tag = tag
			if action, reply := b.Query(c, m.query, nil); (action == Release) != passes || passes && len(reply) > 0 {
				t.Errorf("%s, tag %v: query: action %d, reply % x", what, tag, action, reply)
			}
			if action, _ := b.Answer(c, m.answer); (action == Release) != passes {
				t.Errorf("%s, tag %v: answer: action %d", what, tag, action)
			}
		}
		unknown := client
		unknown.Tag = rules.Tag{Egress: 2, Ingress: 9}
		if action, _ := b.Query(unknown, m.query, nil); action != Wait {
			t.Errorf("%s, a set that is not known yet: action %d, want that it waits", what, action)
		}
	}
	if n, _ := b.table.Len(); n != 0 || len(b.policy.take()) != 0 {
		t.Errorf("%d names were learned", n)
	}
}
