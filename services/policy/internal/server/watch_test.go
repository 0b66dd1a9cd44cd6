// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/sluice-net/sluice/kit/rpc/client"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	"github.com/sluice-net/sluice/proto/wire/policywire"
	"github.com/sluice-net/sluice/services/policy/internal/owner"
	"github.com/sluice-net/sluice/services/policy/internal/port"
	"github.com/sluice-net/sluice/services/policy/internal/table"
	"github.com/sluice-net/sluice/services/policy/internal/wire/wiretest"
)

// replica is the state of a datapath: tables that it has built only from messages.
type replica struct {
	words   map[uint32]table.Entry
	classes map[uint32]string
	tables  map[uint64]*table.Table
	bound   map[uint32]*[2]*uint64
	binds   map[uint32]*policyv1.BindSubject // the last binding on ingress
}

func newReplica() *replica {
	return &replica{
		words: map[uint32]table.Entry{}, classes: map[uint32]string{}, tables: map[uint64]*table.Table{},
		bound: map[uint32]*[2]*uint64{}, binds: map[uint32]*policyv1.BindSubject{},
	}
}

func (r *replica) define(d *policyv1.PolicyTable) *table.Table {
	t := &table.Table{Peers: map[policytable.IdentityClass]policytable.Class{}}
	wiretest.Grow(t, d.GetClasses())
	if d.GetDefaultAllow() {
		t.Flags |= table.DefaultAllow
	}
	if d.GetHostAllow() {
		t.Flags |= table.HostAllow
	}
	if d.GetHasAddresses() {
		t.Flags |= table.HasAddresses
	}
	for _, c := range d.GetDefaultClasses() {
		t.Default[c.GetKind()-1] = policytable.Class(c.GetClass())
	}
	t.Address = wiretest.PrefixClasses(d.GetAddressClasses())
	for _, x := range d.GetRules() {
		t.Rules = append(t.Rules, policytable.Rule{
			Action: policytable.Action(x.GetAction() - 1), Tier: policytable.Tier(x.GetTier()),
			Proxy: policytable.Proxy(x.GetProxy()), RuleSet: policytable.RuleSet(x.GetRuleSet()), PassesWithoutProxy: x.GetPassesWithoutProxy(),
		})
	}
	for _, p := range d.GetPeers() {
		t.Peers[policytable.IdentityClass(p.GetIdentityClass())] = policytable.Class(p.GetClass())
	}
	for _, b := range d.GetPrefixes() {
		t.Prefixes.Set(netip.MustParsePrefix(b.GetPrefix()), wiretest.PrefixClasses(b.GetClasses()))
	}
	return t
}

// apply applies one step; an error means that the stream violates its contract.
func (r *replica) apply(s *policyv1.Step) error {
	switch x := s.GetStep().(type) {
	case *policyv1.Step_DefineIdentityClass:
		r.classes[x.DefineIdentityClass.GetIdentityClass()] = string(x.DefineIdentityClass.GetKey())
	case *policyv1.Step_RetireIdentityClass:
		delete(r.classes, x.RetireIdentityClass.GetIdentityClass())
	case *policyv1.Step_SetIdentity:
		u := x.SetIdentity
		if u.GetIdentityClass() == 0 {
			delete(r.words, u.GetIdentity())
			break
		}
		if _, ok := r.classes[u.GetIdentityClass()]; !ok {
			return fmt.Errorf("identity %d has a class without a name", u.GetIdentity())
		}
		r.words[u.GetIdentity()] = table.Entry{
			IdentityClass: policytable.IdentityClass(u.GetIdentityClass()), Kind: identity.Kind(u.GetKind() - 1), Scope: identity.PeerScope(u.GetScope() - 1), Known: true,
		}
	case *policyv1.Step_DefineTable:
		d := x.DefineTable
		if r.tables[d.GetTable()] != nil || d.GetTable() == 0 || len(d.GetStructureHash()) != 32 {
			return fmt.Errorf("table %d is defined wrongly", d.GetTable())
		}
		r.tables[d.GetTable()] = r.define(d)
	case *policyv1.Step_GrowTable:
		t := r.tables[x.GrowTable.GetTable()]
		if t == nil {
			return fmt.Errorf("table %d grows but does not exist", x.GrowTable.GetTable())
		}
		wiretest.Grow(t, x.GrowTable.GetClasses())
	case *policyv1.Step_RetireTable:
		for n, b := range r.bound {
			for _, id := range b {
				if id != nil && *id == x.RetireTable.GetTable() {
					return fmt.Errorf("table %d is retired while identity %d is bound to it", *id, n)
				}
			}
		}
		delete(r.tables, x.RetireTable.GetTable())
	case *policyv1.Step_SetPeer:
		t, c := r.tables[x.SetPeer.GetTable()], policytable.IdentityClass(x.SetPeer.GetRow().GetIdentityClass())
		if t == nil {
			return fmt.Errorf("row for table %d, which does not exist", x.SetPeer.GetTable())
		}
		if _, there := t.Peers[c]; there {
			return fmt.Errorf("row %d of table %d exists already", c, x.SetPeer.GetTable())
		}
		t.Peers[c] = policytable.Class(x.SetPeer.GetRow().GetClass())
	case *policyv1.Step_DeletePeer:
		t, c := r.tables[x.DeletePeer.GetTable()], policytable.IdentityClass(x.DeletePeer.GetIdentityClass())
		if t == nil {
			return fmt.Errorf("row of table %d, which does not exist", x.DeletePeer.GetTable())
		}
		if _, there := t.Peers[c]; !there {
			return fmt.Errorf("row %d of table %d does not exist", c, x.DeletePeer.GetTable())
		}
		delete(t.Peers, c)
	case *policyv1.Step_SetPrefix:
		t, p := r.tables[x.SetPrefix.GetTable()], x.SetPrefix.GetPrefix()
		if t == nil {
			return fmt.Errorf("prefix for table %d, which does not exist", x.SetPrefix.GetTable())
		}
		t.Prefixes.Set(netip.MustParsePrefix(p.GetPrefix()), wiretest.PrefixClasses(p.GetClasses()))
	case *policyv1.Step_DeletePrefix:
		t := r.tables[x.DeletePrefix.GetTable()]
		if t == nil {
			return fmt.Errorf("prefix of table %d, which does not exist", x.DeletePrefix.GetTable())
		}
		t.Prefixes.Delete(netip.MustParsePrefix(x.DeletePrefix.GetPrefix()))
	case *policyv1.Step_BindSubject:
		b := x.BindSubject
		if t := r.tables[b.GetTable()]; b.GetTable() != 0 && (t == nil || len(t.Rules) != len(b.GetRules())) {
			return fmt.Errorf("identity %d is bound to table %d, which does not exist or has other rules", b.GetSubject(),
				b.GetTable())
		}
		if r.bound[b.GetSubject()] == nil {
			r.bound[b.GetSubject()] = new([2]*uint64)
		}
		id := b.GetTable()
		d := policytable.Ingress
		if b.GetDirection() == netv1.Direction_DIRECTION_EGRESS {
			d = policytable.Egress
		} else {
			r.binds[b.GetSubject()] = b
		}
		r.bound[b.GetSubject()][d] = &id
	case *policyv1.Step_RemoveSubject:
		delete(r.bound, x.RemoveSubject.GetSubject())
	}
	return nil
}

func (r *replica) lookup(subject uint32, d policytable.Direction, peer uint32, addr netip.Addr, q port.Point) (policytable.Action, bool) {
	b := r.bound[subject]
	if b == nil || b[d] == nil {
		return 0, false
	}
	if *b[d] == 0 {
		return policytable.Allow, true
	}
	return r.tables[*b[d]].Lookup(r.words[peer], addr, q).Action, true
}

// follower is a subscriber that applies and acknowledges every message.
type follower struct {
	t *testing.T
	policyv1.PolicyService_WatchPolicyTablesClient
	cancel context.CancelFunc
	ended  chan struct{}

	mu sync.Mutex // guards the following fields
	*replica
	incarnation []byte
	seq         uint64
	complete    bool // the snapshot is complete
	barrier     *policyv1.Barrier
	messages    int
	err         error // the end of the stream, or a contract violation
}

// watch subscribes. decide returns whether to acknowledge a message.
func (s *service) watch(sub *policyv1.Subscribe, decide ...func(*follower, *policyv1.WatchPolicyTablesResponse) bool) *follower {
	s.t.Helper()
	return s.continueWith(sub, newReplica(), 0, decide...)
}

// continueWith subscribes with existing tables.
func (s *service) continueWith(sub *policyv1.Subscribe, r *replica, seq uint64, decide ...func(*follower, *policyv1.WatchPolicyTablesResponse) bool) *follower {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), 2*servicetest.Patience)
	w, err := s.WatchPolicyTables(ctx)
	if err != nil {
		s.t.Fatal(err)
	}
	f := &follower{t: s.t, PolicyService_WatchPolicyTablesClient: w, replica: r, seq: seq, cancel: cancel, ended: make(chan struct{})}
	s.t.Cleanup(f.leave)
	if sub.Formats == nil {
		sub.Formats = []policyv1.TableFormat{policywire.Format}
	}
	f.send(&policyv1.WatchPolicyTablesRequest{Message: &policyv1.WatchPolicyTablesRequest_Subscribe{Subscribe: sub}})
	go func() {
		defer close(f.ended)
		for {
			m, err := f.Recv()
			ack := true
			f.mu.Lock()
			if err == nil {
				err = f.take(m)
			}
			f.err = err
			f.mu.Unlock()
			if err != nil {
				return
			}
			for _, d := range decide {
				ack = ack && d(f, m)
			}
			if ack {
				f.Send(ackOf(m.GetSeq())) //nolint:errcheck // Recv returns the error
			}
		}
	}()
	return f
}

func ackOf(seq uint64) *policyv1.WatchPolicyTablesRequest {
	return &policyv1.WatchPolicyTablesRequest{Message: &policyv1.WatchPolicyTablesRequest_Ack{Ack: &policyv1.Ack{Seq: seq}}}
}

func (f *follower) send(m *policyv1.WatchPolicyTablesRequest) {
	f.t.Helper()
	if err := f.Send(m); err != nil {
		f.t.Fatal(err)
	}
}

// leave ends the stream and returns when no more messages arrive.
func (f *follower) leave() {
	f.cancel()
	<-f.ended
}

// take applies one message.
func (f *follower) take(m *policyv1.WatchPolicyTablesResponse) error {
	if f.seq != 0 && m.GetSeq() != f.seq+1 {
		return fmt.Errorf("message %d follows %d", m.GetSeq(), f.seq)
	}
	f.seq, f.incarnation = m.GetSeq(), m.GetIncarnation()
	f.messages++
	for i, step := range m.GetSteps() {
		if err := f.apply(step); err != nil {
			return fmt.Errorf("message %d, step %d: %w", m.GetSeq(), i, err)
		}
		f.complete = f.complete || step.GetSnapshotComplete() != nil
		if b := step.GetBarrier(); b != nil {
			f.barrier = b
			if i != len(m.GetSteps())-1 {
				return fmt.Errorf("message %d has steps after its barrier", m.GetSeq())
			}
		}
	}
	return nil
}

// look calls at while it holds the lock. It releases the lock even if at ends the test.
func (f *follower) look(at func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	at()
}

// until waits for a condition, which is checked with the lock held.
func (f *follower) until(what string, ok func() bool) {
	f.t.Helper()
	servicetest.Eventually(f.t, what, func() bool {
		f.mu.Lock()
		good, err := ok(), f.err
		f.mu.Unlock()
		if !good && err != nil {
			f.t.Fatalf("until %s: %v", what, err)
		}
		return good
	})
}

func (f *follower) snapshot() *follower {
	f.t.Helper()
	f.until("the snapshot", func() bool { return f.complete && f.barrier != nil })
	return f
}

func subscribe(name string, subjects ...uint32) *policyv1.Subscribe {
	return &policyv1.Subscribe{Name: name, Subjects: subjects, Role: policyv1.SubscriberRole_SUBSCRIBER_ROLE_ENFORCES, Formats: []policyv1.TableFormat{policywire.Format}}
}

// eventually waits until the status meets the condition.
func (s *service) eventually(what string, ok func(*policyv1.GetStatusResponse) bool) {
	s.t.Helper()
	servicetest.EventuallyNil(s.t, what, func() error {
		st, err := s.GetStatus(s.ctx(), &policyv1.GetStatusRequest{})
		if err != nil {
			s.t.Fatal(err)
		}
		if !ok(st) {
			return fmt.Errorf("the status is %v", st)
		}
		return nil
	})
}

const tcp5432 = port.Point(6<<16 | 5432)

func TestSubscriberGetsSnapshotThenChanges(t *testing.T) {
	s := serve(t)
	s.know(town)
	s.apply(allowWeb)
	f := s.watch(subscribe("datapath", 301, 999)).snapshot()
	if a, ok := f.lookup(301, policytable.Ingress, 300, netip.Addr{}, tcp5432); !ok || a != policytable.Allow {
		t.Errorf("web to db: %v %t", a, ok)
	}
	if a, ok := f.lookup(301, policytable.Ingress, 302, netip.Addr{}, tcp5432); !ok || a != policytable.Deny {
		t.Errorf("other to db: %v %t", a, ok)
	}
	if b := f.binds[301]; b.GetPolicyRevision() != 1 || b.GetRules()[0].GetSources()[0].GetName() != "db" {
		t.Errorf("bind: %v", b)
	}
	// An identity that appears later gets its tables then.
	s.know(map[uint32]string{999: "k8s:app=late " + namespaceLabel + "shop"})
	f.until("tables of 999", func() bool { return f.bound[999] != nil && f.bound[999][1] != nil })
	// Other subjects.
	f.send(&policyv1.WatchPolicyTablesRequest{Message: &policyv1.WatchPolicyTablesRequest_Subjects{Subjects: &policyv1.SubjectChange{Add: []uint32{302}, Remove: []uint32{301}}}})
	f.until("302 instead of 301", func() bool { return f.bound[302] != nil && f.bound[301] == nil })
}

// TestReplicaOfTheStreamAnswersLikeTheService proves INV-63.
func TestReplicaOfTheStreamAnswersLikeTheService(t *testing.T) {
	s := serve(t, func(c *owner.Config) { c.Stream.Message = 400; c.MaxNames, c.MaxAddresses = 100, 1000 })
	seed := [2]uint64{rand.Uint64(), rand.Uint64()}
	r := rand.New(rand.NewPCG(seed[0], seed[1]))
	t.Logf("seed %v", seed)
	labels := func() string {
		return fmt.Sprintf("k8s:app=%c k8s:tier=%d %s%s",
			'a'+rune(r.IntN(4)), r.IntN(3), namespaceLabel, []string{"x", "z"}[r.IntN(2)])
	}
	manifest := func() string {
		name, ns := fmt.Sprint("p", r.IntN(6)), []string{"x", "z"}[r.IntN(2)]
		peers := []string{
			fmt.Sprintf("{podSelector: {matchLabels: {app: %c}}}", 'a'+rune(r.IntN(4))),
			"{podSelector: {}, namespaceSelector: {}}",
			fmt.Sprintf("{ipBlock: {cidr: 10.%[1]d.0.0/16, except: [10.%[1]d.1.0/24]}}", r.IntN(3)),
		}
		if r.IntN(3) == 0 {
			return fmt.Sprintf("apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: %s, namespace: %s}\nspec:\n  endpointSelector: {matchLabels: {app: %c}}\n  egress:\n  - toFQDNs: [{matchPattern: '*.example.com'}]\n  - toEndpoints: [{matchLabels: {tier: '%d'}}]\n    toPorts: [{ports: [{port: '%d', protocol: TCP}]}]\n  ingressDeny:\n  - fromEndpoints: [{matchLabels: {tier: '%d'}}]\n",
				name, ns, 'a'+rune(r.IntN(4)), r.IntN(3), 80+r.IntN(3), r.IntN(3))
		}
		direction, side := "ingress", "from"
		if r.IntN(2) == 0 {
			direction, side = "egress", "to"
		}
		p := peers[r.IntN(len(peers))]
		// A policy with an egress section has both policy types.
		return fmt.Sprintf("apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: %s, namespace: %s}\nspec:\n  podSelector: {matchLabels: {tier: '%d'}}\n  %s:\n  - %s: [%s]\n    ports: [{protocol: TCP, port: %d, endPort: %d}]\n",
			name, ns, r.IntN(3), direction, side, p, 80+r.IntN(2), 82+r.IntN(2))
	}
	s.know(town)
	known := map[uint32]bool{}
	subjects := []uint32{400, 401, 402, 403}
	f := s.watch(subscribe("datapath", subjects...)).snapshot()
	for step := range 120 {
		switch r.IntN(6) {
		case 0, 1:
			s.apply(manifest())
		case 2:
			key := &policyv1.PolicyKey{Kind: "NetworkPolicy", Namespace: "x", Name: fmt.Sprint("p", r.IntN(6))}
			if _, err := s.DeletePolicies(s.ctx(), &policyv1.DeletePoliciesRequest{Keys: []*policyv1.PolicyKey{key}}); err != nil {
				t.Fatal(err)
			}
		case 3:
			n := 400 + uint32(r.IntN(12))
			if known[n] && n >= 404 {
				if err := s.owner.Identities().SetIdentities(s.ctx(), nil, []identity.Numeric{identity.Numeric(n)}); err != nil {
					t.Fatal(err)
				}
				delete(known, n)
			} else {
				s.know(map[uint32]string{n: labels()})
				known[n] = true
			}
		case 4:
			name, addr := fmt.Sprintf("h%d.example.com", r.IntN(4)), fmt.Sprintf("10.%d.%d.7", r.IntN(3), r.IntN(2))
			if _, err := s.LearnNames(s.ctx(), &policyv1.LearnNamesRequest{Name: name, Addresses: []string{addr}}); err != nil {
				t.Fatal(err)
			}
		case 5:
			next := append(slices.Clone(subjects[:r.IntN(4)]), 400+uint32(r.IntN(12)))
			var gone []uint32
			for n := uint32(400); n < 412; n++ {
				if !slices.Contains(next, n) {
					gone = append(gone, n)
				}
			}
			f.send(&policyv1.WatchPolicyTablesRequest{Message: &policyv1.WatchPolicyTablesRequest_Subjects{Subjects: &policyv1.SubjectChange{Add: next, Remove: gone}}})
		}
		// An acknowledged message was applied, so the replica does not change now. The change of subjects has no
		// answer, but precedes the acknowledgement in the same stream.
		revision := s.apply(marker(step)).GetRevision()
		s.ordered(f)
		if _, err := s.WaitForRevision(s.ctx(), &policyv1.WaitForRevisionRequest{Revision: revision}); err != nil {
			t.Fatal(err)
		}
		f.look(func() {
			if f.err != nil || f.barrier.GetPolicyRevision() != revision {
				t.Fatalf("step %d: the barrier is at %d, waited for %d; %v", step, f.barrier.GetPolicyRevision(), revision, f.err)
			}
			bound := slices.Sorted(maps.Keys(f.bound))
			for _, n := range bound {
				if !known[n] {
					continue // its tables stay, but it has no labels to explain
				}
				for range 6 {
					peer := 400 + uint32(r.IntN(12))
					p := &policyv1.Peer{Identity: peer}
					addr := netip.AddrFrom4([4]byte{10, byte(r.IntN(3)), byte(r.IntN(2)), 7})
					p.Address = addr.String()
					if !known[peer] || r.IntN(3) == 0 {
						peer, p.Identity = 9, 9
					}
					q := port.Point(6<<16 | 79 + r.IntN(6))
					for d, req := range map[policytable.Direction]*policyv1.ExplainRequest{
						policytable.Ingress: {From: p, To: &policyv1.Peer{Identity: n}, Protocol: 6, Port: q & 0xffff},
						policytable.Egress:  {To: p, From: &policyv1.Peer{Identity: n}, Protocol: 6, Port: q & 0xffff},
					} {
						x, err := s.Explain(s.ctx(), req)
						if err != nil {
							t.Fatal(err)
						}
						want := x.GetIngress()
						if d == policytable.Egress {
							want = x.GetEgress()
						}
						got, ok := f.lookup(n, d, peer, addr, q)
						if !ok || got != policytable.Action(want.GetAction()-1) {
							t.Fatalf("step %d: %s of %d with %d at %s, %d: the replica says %s (%t), the service %v", step, d, n, peer, addr, q, got, ok, want)
						}
					}
				}
			}
		})
	}
	// A later subscriber gets the same state.
	late := s.watch(subscribe("late", slices.Collect(maps.Keys(f.bound))...)).snapshot()
	if len(late.tables) != len(f.tables) || len(late.words) != len(f.words) || !maps.Equal(late.classes, f.classes) {
		t.Errorf("late: %d tables, %d identities, %d classes; want %d, %d, %d", len(late.tables), len(late.words), len(late.classes), len(f.tables), len(f.words), len(f.classes))
	}
}

// marker returns a policy that selects no endpoint and whose text depends on the step.
func marker(step int) string {
	return fmt.Sprintf("apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: marker, namespace: nowhere}\nspec: {podSelector: {matchLabels: {step: 's%d'}}}\n", step)
}

// ordered waits until the service has processed everything that the follower has sent. For this, the follower adds a
// location, which the service counts as a change.
func (s *service) ordered(f *follower) {
	s.t.Helper()
	before := f.addressRevision()
	addr := netip.AddrFrom4([4]byte{192, 0, byte(before >> 8), byte(before)})
	f.send(&policyv1.WatchPolicyTablesRequest{Message: &policyv1.WatchPolicyTablesRequest_Locate{Locate: &policyv1.Locate{
		Add: []*policyv1.Location{{Address: addr.String(), Identity: 300}},
	}}})
	f.until("the location is taken", func() bool { return f.barrier.GetAddressRevision() > before })
}

func (f *follower) addressRevision() uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.barrier.GetAddressRevision()
}

func TestResumeContinuesBehindTheLastMessage(t *testing.T) {
	s := serve(t)
	s.know(town)
	s.apply(allowWeb)
	f := s.watch(subscribe("datapath", 301)).snapshot()
	f.leave()
	s.eventually("disconnected", func(st *policyv1.GetStatusResponse) bool { return !st.GetSubscribers()[0].GetConnected() })
	s.apply(named("away", allowWeb))
	again := subscribe("datapath", 301)
	again.Incarnation, again.Seq = f.incarnation, f.seq
	g := s.continueWith(again, f.replica, f.seq)
	g.until("the change", func() bool { return g.barrier.GetPolicyRevision() == 2 })
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.complete || g.messages != 1 || len(g.binds[301].GetRules()[0].GetSources()) != 2 {
		t.Errorf("resumed: snapshot %t, %d messages, %v", g.complete, g.messages, g.binds[301])
	}
}

func TestResumeThatCannotBeStartsWithEverything(t *testing.T) {
	s := serve(t, func(c *owner.Config) { c.Stream.Resume = 1 })
	s.know(town)
	s.apply(allowWeb)
	f := s.watch(subscribe("datapath", 301)).snapshot()
	f.leave()
	s.eventually("disconnected", func(st *policyv1.GetStatusResponse) bool { return !st.GetSubscribers()[0].GetConnected() })
	s.apply(named("a", allowWeb))
	s.apply(named("b", allowWeb)) // the log keeps only the last change
	for what, change := range map[string]func(*policyv1.Subscribe){
		"too old":           func(*policyv1.Subscribe) {},
		"of another run":    func(s *policyv1.Subscribe) { s.Incarnation = []byte("0123456789abcdef") },
		"from the future":   func(s *policyv1.Subscribe) { s.Seq += 1 << 40 },
		"before everything": func(s *policyv1.Subscribe) { s.Seq = 0 },
	} {
		again := subscribe("datapath", 301)
		again.Incarnation, again.Seq = f.incarnation, f.seq
		change(again)
		g := s.watch(again).snapshot()
		if g.barrier.GetPolicyRevision() != 3 || g.seq <= f.seq || len(g.bound) != 1 {
			t.Errorf("%s: revision %d, seq %d, %d subjects", what, g.barrier.GetPolicyRevision(), g.seq, len(g.bound))
		}
		g.leave()
	}
}

func TestNewerConnectionEndsTheOlder(t *testing.T) {
	s := serve(t)
	s.know(town)
	f := s.watch(subscribe("datapath", 301)).snapshot()
	g := s.watch(subscribe("datapath", 301)).snapshot()
	<-f.ended
	wantCode(t, f.err, codes.Aborted, "newer connection")
	s.apply(allowWeb)
	g.until("the change", func() bool { return g.barrier.GetPolicyRevision() == 1 })
}

func TestSlowSubscriberIsDisconnectedAndStartsAnew(t *testing.T) {
	s := serve(t, func(c *owner.Config) { c.Stream.Unacked = 3 })
	s.know(town)
	f := s.watch(subscribe("datapath", 301), func(*follower, *policyv1.WatchPolicyTablesResponse) bool { return false }).snapshot()
	for i := range 3 {
		s.apply(named(fmt.Sprint("p", i), allowWeb))
	}
	<-f.ended
	wantCode(t, f.err, codes.ResourceExhausted, "too far behind")
	s.watch(subscribe("datapath", 301)).snapshot()
}

// manyRules returns a policy whose table fills a message. Each i gives a different policy.
func manyRules(i int) string {
	var b strings.Builder
	b.WriteString("apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: db, namespace: shop}\nspec:\n  podSelector: {matchLabels: {app: db}}\n  ingress:\n")
	for j := range 300 {
		fmt.Fprintf(&b, "  - from: [{ipBlock: {cidr: 10.%d.%d.0/24}}]\n    ports: [{protocol: TCP, port: %d}]\n", j/250, j%250, 1000+i+j)
	}
	return b.String()
}

// stuck is a subscriber on a separate connection that responds to gRPC but never reads a message.
func (s *service) stuck(name string, subjects ...uint32) {
	s.t.Helper()
	conn, err := client.Dial(filepath.Join(s.dir, "s"), client.Options{})
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { conn.Close() })
	w, err := policyv1.NewPolicyServiceClient(conn).WatchPolicyTables(s.t.Context())
	if err == nil {
		err = w.Send(&policyv1.WatchPolicyTablesRequest{Message: &policyv1.WatchPolicyTablesRequest_Subscribe{Subscribe: subscribe(name, subjects...)}})
	}
	if err != nil {
		s.t.Fatal(err)
	}
	// The subscriber may have been disconnected again already.
	s.eventually(name+" is known", func(st *policyv1.GetStatusResponse) bool {
		return slices.ContainsFunc(st.GetSubscribers(), func(x *policyv1.SubscriberStatus) bool { return x.GetName() == name })
	})
}

func gone(name string) func(*policyv1.GetStatusResponse) bool {
	return func(st *policyv1.GetStatusResponse) bool {
		return !slices.ContainsFunc(st.GetSubscribers(), func(x *policyv1.SubscriberStatus) bool { return x.GetName() == name && x.GetConnected() })
	}
}

func TestSubscriberThatNeverReadsIsDisconnected(t *testing.T) {
	s := serve(t, func(c *owner.Config) {
		c.Stream.Message, c.Stream.Behind, c.Stream.Resume = 16<<10, 256<<10, 64<<10
	})
	s.know(town)
	f := s.watch(subscribe("datapath", 301)).snapshot()
	s.stuck("stuck", 301)
	var revision uint64
	for i := range 30 {
		revision = s.apply(manyRules(i)).GetRevision()
		// The subscriber that reads is not delayed.
		f.until("the change", func() bool { return f.barrier.GetPolicyRevision() == revision })
	}
	s.eventually("disconnected", gone("stuck"))
	if _, n := s.owner.Reader().Figures(); n != 1 {
		t.Errorf("%d were disconnected because they are slow, want 1", n)
	}
	if out, err := s.WaitForRevision(s.ctx(), &policyv1.WaitForRevisionRequest{Revision: revision}); err != nil || out.GetRevision() != revision {
		t.Errorf("wait for the revision: %v, %v", out, err)
	}
}

// TestSubscriberThatTakesNothingIsDisconnected: a subscriber reads nothing, but stays below all size limits. It is
// disconnected after a time.
func TestSubscriberThatTakesNothingIsDisconnected(t *testing.T) {
	s := serve(t, func(c *owner.Config) { c.Stream.Stall = 50 * time.Millisecond })
	s.know(town)
	s.stuck("stuck", 301)
	revision := s.apply(manyRules(0)).GetRevision()
	s.eventually("disconnected", gone("stuck"))
	if out, err := s.WaitForRevision(s.ctx(), &policyv1.WaitForRevisionRequest{Revision: revision}); err != nil || out.GetRevision() != revision {
		t.Errorf("wait for the revision: %v, %v", out, err)
	}
}

func TestWaitForRevisionWaitsForTheAcknowledgement(t *testing.T) {
	s := serve(t)
	s.know(town)
	hold := make(chan struct{})
	f := s.watch(subscribe("datapath", 301), func(f *follower, m *policyv1.WatchPolicyTablesResponse) bool {
		for _, step := range m.GetSteps() {
			if step.GetBarrier().GetPolicyRevision() == 1 {
				<-hold
			}
		}
		return true
	}).snapshot()
	s.apply(allowWeb)
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err := s.WaitForRevision(short, &policyv1.WaitForRevisionRequest{Revision: 1})
	wantCode(t, err, codes.DeadlineExceeded, "")
	// WaitForRevision does not wait if no subscriber has the subjects.
	if _, err := s.WaitForRevision(s.ctx(), &policyv1.WaitForRevisionRequest{Revision: 1, Subjects: []uint32{302}}); err != nil {
		t.Errorf("other subjects: %v", err)
	}
	close(hold)
	out, err := s.WaitForRevision(s.ctx(), &policyv1.WaitForRevisionRequest{Revision: 1, Subjects: []uint32{301}})
	if err != nil || out.GetRevision() != 1 || len(out.GetDisconnected()) != 0 {
		t.Errorf("after the acknowledgement: %v, %v", out, err)
	}
	_, err = s.WaitForRevision(s.ctx(), &policyv1.WaitForRevisionRequest{Revision: 2})
	wantCode(t, err, codes.OutOfRange, "no such revision yet")
	f.leave()
	s.eventually("disconnected", func(st *policyv1.GetStatusResponse) bool { return !st.GetSubscribers()[0].GetConnected() })
	s.apply(named("b", allowWeb))
	out, err = s.WaitForRevision(s.ctx(), &policyv1.WaitForRevisionRequest{Revision: 2})
	if err != nil || !slices.Equal(out.GetDisconnected(), []string{"datapath"}) {
		t.Errorf("disconnected: %v, %v", out, err)
	}
}

// TestNothingWaitsForSubscribersThatOnlyWatch: a debugging session with grpcurl, which sends no role, is connected in
// addition to the datapath. Calls wait only for the datapath.
func TestNothingWaitsForSubscribersThatOnlyWatch(t *testing.T) {
	s := serve(t)
	s.know(town)
	f := s.watch(subscribe("datapath", 301)).snapshot()
	never := func(*follower, *policyv1.WatchPolicyTablesResponse) bool { return false }
	silent := s.watch(&policyv1.Subscribe{Name: "nc-sub", Subjects: []uint32{301}}, never).snapshot()
	said := s.watch(&policyv1.Subscribe{Name: "watcher", Subjects: []uint32{300}, Role: policyv1.SubscriberRole_SUBSCRIBER_ROLE_WATCHES}, never).snapshot()
	s.apply(allowWeb)
	out, err := s.WaitForRevision(s.ctx(), &policyv1.WaitForRevisionRequest{Revision: 1})
	if err != nil || !slices.Equal(out.GetEnforcing(), []string{"datapath"}) || len(out.GetDisconnected()) != 0 {
		t.Errorf("with two that watch and acknowledge nothing: %v, %v", out, err)
	}
	s.apply(learnWeb)
	if out, err := s.LearnNames(s.ctx(), &policyv1.LearnNamesRequest{Name: "api.example.com", Addresses: []string{"192.0.2.7"}}); err != nil || !out.GetUsed() {
		t.Errorf("learn, with two that watch: %v, %v", out, err)
	}
	silent.until("the change", func() bool { return silent.barrier.GetPolicyRevision() == 2 })
	silent.leave()
	said.leave()
	s.eventually("both are removed with their interests", func(st *policyv1.GetStatusResponse) bool {
		return len(st.GetSubscribers()) == 1 && st.GetSubscribers()[0].GetEnforces() && st.GetSubjects() == 1
	})
	out, err = s.WaitForRevision(s.ctx(), &policyv1.WaitForRevisionRequest{Revision: 2})
	if err != nil || !slices.Equal(out.GetEnforcing(), []string{"datapath"}) || len(out.GetDisconnected()) != 0 {
		t.Errorf("after both left: %v, %v", out, err)
	}
	f.leave()
	s.eventually("disconnected", gone("datapath"))
	out, err = s.WaitForRevision(s.ctx(), &policyv1.WaitForRevisionRequest{Revision: 2})
	if err != nil || len(out.GetEnforcing()) != 0 || !slices.Equal(out.GetDisconnected(), []string{"datapath"}) {
		t.Errorf("without the datapath: %v, %v", out, err)
	}
}

// TestSubscriberThatWatchesStaysConnectedWithoutAcknowledging: a watching subscriber has nothing to acknowledge, so it
// cannot be late.
func TestSubscriberThatWatchesStaysConnectedWithoutAcknowledging(t *testing.T) {
	s := serve(t, func(c *owner.Config) { c.Stream.Unacked = 3 })
	s.know(town)
	f := s.watch(&policyv1.Subscribe{Name: "watcher", Subjects: []uint32{301}}, func(*follower, *policyv1.WatchPolicyTablesResponse) bool { return false }).snapshot()
	for i := range 8 {
		revision := s.apply(named(fmt.Sprint("p", i), allowWeb)).GetRevision()
		f.until("the change", func() bool { return f.barrier.GetPolicyRevision() == revision })
	}
}

// TestDatapathThatSaysNoRoleIsWaitedFor: calls wait for a datapath of an earlier version, which does not send its
// role.
func TestDatapathThatSaysNoRoleIsWaitedFor(t *testing.T) {
	s := serve(t)
	s.know(town)
	s.watch(&policyv1.Subscribe{Name: "datapath", Subjects: []uint32{301}}).snapshot()
	s.apply(allowWeb)
	out, err := s.WaitForRevision(s.ctx(), &policyv1.WaitForRevisionRequest{Revision: 1})
	if err != nil || !slices.Equal(out.GetEnforcing(), []string{"datapath"}) {
		t.Errorf("wait: %v, %v", out, err)
	}
}

func TestSubscribersThatWatchTakeNoPlaceOfTheDatapath(t *testing.T) {
	s := serve(t)
	for i := range 16 {
		s.watch(&policyv1.Subscribe{Name: fmt.Sprint("w", i)}).snapshot()
	}
	f := s.watch(&policyv1.Subscribe{Name: "one more"})
	<-f.ended
	wantCode(t, f.err, codes.ResourceExhausted, "16 subscribers that watch are connected")
	s.watch(subscribe("datapath")).snapshot()
}

func TestRefusedTableIsNamedUntilItIsReplaced(t *testing.T) {
	s := serve(t)
	s.know(town)
	refuse := true
	f := s.watch(subscribe("datapath", 301), func(f *follower, m *policyv1.WatchPolicyTablesResponse) bool {
		for _, step := range m.GetSteps() {
			if b := step.GetBindSubject(); b.GetTable() != 0 && refuse {
				refuse = f.Send(&policyv1.WatchPolicyTablesRequest{Message: &policyv1.WatchPolicyTablesRequest_Nack{Nack: &policyv1.Nack{
					Seq: m.GetSeq(), Subject: b.GetSubject(), Table: b.GetTable(), Reason: "the map has no capacity",
				}}}) != nil
			}
		}
		return true
	}).snapshot()
	s.apply(allowWeb)
	_, err := s.WaitForRevision(s.ctx(), &policyv1.WaitForRevisionRequest{Revision: 1})
	wantCode(t, err, codes.FailedPrecondition, "ingress of identity 301")
	wantCode(t, err, codes.FailedPrecondition,
		"the map has no capacity; the largest share of the table is from NetworkPolicy shop/db")
	s.eventually("refused", func(st *policyv1.GetStatusResponse) bool {
		return len(st.GetSubscribers()[0].GetRefusals()) == 1
	})
	out := s.apply(strings.Replace(allowWeb, "5432", "5433", 1))
	if _, err := s.WaitForRevision(s.ctx(), &policyv1.WaitForRevisionRequest{Revision: out.GetRevision()}); err != nil {
		t.Errorf("after another table: %v", err)
	}
	_ = f
}

const learnWeb = `apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: dns, namespace: shop}
spec:
  endpointSelector: {matchLabels: {app: web}}
  egress:
  - toFQDNs: [{matchName: api.example.com}]
`

func TestLearnNamesAnswersAfterTheKernelKnows(t *testing.T) {
	s := serve(t)
	s.know(town)
	s.apply(learnWeb)
	f := s.watch(subscribe("datapath", 300)).snapshot()
	addr := netip.MustParseAddr("192.0.2.7")
	out, err := s.LearnNames(s.ctx(), &policyv1.LearnNamesRequest{Name: "API.example.com.", Addresses: []string{addr.String()}, Ttl: durationpb.New(time.Second)})
	if err != nil || !out.GetUsed() {
		t.Fatalf("learn: %v, %v", out, err)
	}
	f.look(func() { // acknowledged messages have been applied
		if a, ok := f.lookup(300, policytable.Egress, 9, addr, tcp5432); !ok || a != policytable.Allow {
			t.Errorf("to the learned address: %v %t", a, ok)
		}
		if a, ok := f.lookup(300, policytable.Egress, 9, netip.MustParseAddr("192.0.2.8"), tcp5432); !ok || a != policytable.Deny {
			t.Errorf("to another: %v %t", a, ok)
		}
	})
	out, err = s.LearnNames(s.ctx(), &policyv1.LearnNamesRequest{Name: "unused.example.com", Addresses: []string{addr.String()}})
	if err != nil || out.GetUsed() {
		t.Errorf("unused: %v, %v", out, err)
	}
	for i := range 2 {
		if _, err := s.LearnNames(s.ctx(), &policyv1.LearnNamesRequest{Name: fmt.Sprint("n", i, ".example.com"), Addresses: []string{addr.String()}}); err != nil {
			t.Fatal(err)
		}
	}
	_, err = s.LearnNames(s.ctx(), &policyv1.LearnNamesRequest{Name: "fifth.example.com", Addresses: []string{addr.String()}})
	wantCode(t, err, codes.ResourceExhausted, "the maximum of 4 DNS names is reached")
	_, err = s.LearnNames(s.ctx(), &policyv1.LearnNamesRequest{Name: "not a name", Addresses: []string{addr.String()}})
	wantCode(t, err, codes.InvalidArgument, "name")
}

func TestBadMessagesEndTheStream(t *testing.T) {
	s := serve(t)
	s.know(town)
	for what, send := range map[string]*policyv1.WatchPolicyTablesRequest{
		"ack of a future message": ackOf(1 << 50),
		"second subscribe":        {Message: &policyv1.WatchPolicyTablesRequest_Subscribe{Subscribe: subscribe("datapath")}},
		"no address": {Message: &policyv1.WatchPolicyTablesRequest_Locate{Locate: &policyv1.Locate{
			Add: []*policyv1.Location{{Address: "1.2", Identity: 300}},
		}}},
		"no message": {},
	} {
		f := s.watch(subscribe("datapath", 301)).snapshot()
		f.send(send)
		<-f.ended
		wantCode(t, f.err, codes.InvalidArgument, "")
		_ = what
	}
	w, err := s.WatchPolicyTables(s.ctx())
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Send(ackOf(1)); err != nil {
		t.Fatal(err)
	}
	_, err = w.Recv()
	wantCode(t, err, codes.InvalidArgument, "first message is not subscribe")
}

func TestSubjectsOfAGoneSubscriberStayForAWhile(t *testing.T) {
	clock := &fakeClock{now: time.Unix(1_700_000_000, 0)}
	s := serve(t, func(c *owner.Config) { c.Now = clock.Now; c.Linger = time.Hour })
	s.know(town)
	s.apply(allowWeb)
	s.watch(subscribe("datapath", 301)).snapshot().leave()
	s.eventually("disconnected", func(st *policyv1.GetStatusResponse) bool { return !st.GetSubscribers()[0].GetConnected() })
	clock.Add(59 * time.Minute)
	s.poke()
	s.eventually("still there", func(st *policyv1.GetStatusResponse) bool { return st.GetSubjects() == 1 })
	clock.Add(2 * time.Minute)
	s.poke()
	s.eventually("forgotten", func(st *policyv1.GetStatusResponse) bool {
		return st.GetSubjects() == 0 && len(st.GetSubscribers()) == 0
	})
}

// poke makes the owner read its clock.
func (s *service) poke() { s.know(map[uint32]string{700: "k8s:poke=" + fmt.Sprint(rand.Uint64())}) }

type fakeClock struct {
	mu  sync.Mutex
	now time.Time
}

func (c *fakeClock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *fakeClock) Add(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}
