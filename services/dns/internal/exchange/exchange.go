// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package exchange decides about each DNS message of a redirected connection: a query passes if the rules allow its
// name, and an answer passes after sluice-policy enforces its addresses. Under rules that allow every name, messages
// that cannot be read pass, too.
//
// Only the answer to a query that this process has passed teaches: another message from the server's port could be
// forged. After a restart the queries before it are not known; their clients ask again.
//
// The package does not send or receive packets.
package exchange

import (
	"context"
	"errors"
	"hash/maphash"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-net/sluice/model/dnsname"
	"github.com/sluice-net/sluice/services/dns/internal/message"
	"github.com/sluice-net/sluice/services/dns/internal/names"
	"github.com/sluice-net/sluice/services/dns/internal/report"
	"github.com/sluice-net/sluice/services/dns/internal/rules"
)

// Limits of one pod.
const (
	MaxQueries = 512 // without an answer; the oldest is forgotten, and its answer dropped
	MaxHeld    = 512 // answers that wait for sluice-policy; further ones pass and teach nothing
)

// maxEvicted limits the evicted addresses that wait to be forgotten. sluice-policy keeps further ones until their time
// ends.
const maxEvicted = 65_536

// clusterTime is how long an answer waits at most to know which of its addresses belong to the cluster. It is one limit
// for all of them, so that time is left to learn them while sluice-identity does not answer.
const clusterTime = 200 * time.Millisecond

// queryTime is how long a query waits for its answer.
const queryTime = 10 * time.Second

// ErrNoCapacity is returned by an Enforcer that has no space for an address. The answer passes, and connections to the
// address are denied.
var ErrNoCapacity = errors.New("no space for addresses of DNS names")

// ErrNotSelected is returned by an Enforcer if no rule of the asking pod selects the name. The answer passes, and
// teaches nothing: otherwise a pod could teach names that only the policies of other pods select.
var ErrNotSelected = errors.New("no egress rule of the pod that asked selects the name")

// Enforcer is sluice-policy.
type Enforcer interface {
	// Learn returns once the kernel allows the addresses of the name to the pods of the asker's namespace whose
	// policies select the name. The asker, whose query was answered, pays for them.
	Learn(ctx context.Context, by names.Asker, name string, addrs []netip.Addr, ttl time.Duration) error
	// Forget removes an address of a name for the pods of a namespace.
	Forget(ctx context.Context, name, namespace string, addr netip.Addr) error
}

// errShare is the reason why an abandoned answer was not learned.
var errShare = errors.New("other answers need the memory")

// Connection is a redirected connection.
type Connection struct {
	Client, Server netip.AddrPort
	Endpoint       uint16      // endpoint ID of the client, to which its queries and held answers count
	Asker          names.Asker // pays for what answers teach
	// Unknown is set if the pod of the endpoint is not known yet. Then it is not known for which pods an answer
	// teaches.
	Unknown bool
	Tag     rules.Tag
}

// Action says how to handle a message.
type Action uint8

// The actions.
const (
	Release Action = iota + 1 // send it on, unchanged
	Reply                     // drop the query, and send the reply to the client
	Drop                      // drop it without an answer
	Wait                      // a rule set is not known: wait for it with rules.Wait, and ask again
	Hold                      // call Settle, then release it
)

// Cluster knows the addresses of the cluster.
type Cluster interface {
	// Has reports whether an address belongs to a node, a pod or an API server. An error means that this is not known.
	Has(ctx context.Context, addr netip.Addr) (bool, error)
}

// Reporter shows the evaluated messages to observers.
type Reporter interface {
	// Wants reports whether a message of a pod would be reported.
	Wants(endpoint uint16) bool
	// Add adds a message of a pod, and keeps its slices.
	Add(endpoint uint16, m report.Message)
}

// Options describe an Exchange. All fields are required except LearnFrom and Report.
type Options struct {
	Rules    *rules.Rules
	Table    *names.Table
	Enforcer Enforcer
	Cluster  Cluster
	Refusal  rules.Refusal
	// LearnFrom are the servers that may teach; empty: every server that rules allow.
	LearnFrom []netip.Prefix
	// HoldFor is how long an answer waits for sluice-policy.
	HoldFor time.Duration
	Now     func() time.Time
	// Report gets the evaluated messages; nil: they are not reported.
	Report Reporter
}

// Exchange decides about messages. It is safe for concurrent use.
type Exchange struct {
	o       Options
	Counts  Counts
	readers readers
	seed    maphash.Seed

	mu      sync.Mutex
	pods    map[uint16]*pod          // guarded by mu; by endpoint
	calling map[string]chan struct{} // guarded by mu; names for which the enforcer is called
	evicted map[names.Pair]struct{}  // guarded by mu; what sluice-policy should forget
	woken   chan struct{}            // evicted has got addresses
}

// Counts are the numbers of messages by their result.
type Counts struct {
	Allowed, Refused, Malformed         atomic.Uint64 // queries
	Answered, Unasked, BadAnswers       atomic.Uint64 // answers: passed, without a query, and malformed
	Held, Late, NoCapacity, BeyondShare atomic.Uint64 // answers with new addresses
}

// reader has the buffers for one message.
type reader struct {
	query  message.Query
	answer message.Answer
	addrs  []names.Address
	links  []byte
	chain  []string
	key    []byte // of the name, for the table
}

// maxReaders limits the readers that are kept.
const maxReaders = 32

// readers keeps readers for further messages.
type readers struct {
	mu   sync.Mutex
	free []*reader // guarded by mu
}

func (r *readers) get() *reader {
	r.mu.Lock()
	defer r.mu.Unlock()
	if n := len(r.free); n > 0 {
		out := r.free[n-1]
		r.free = r.free[:n-1]
		return out
	}
	return &reader{}
}

func (r *readers) put(used *reader) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.free) < maxReaders {
		r.free = append(r.free, used)
	}
}

// New returns an Exchange.
func New(o Options) *Exchange {
	return &Exchange{
		o: o, pods: make(map[uint16]*pod), calling: make(map[string]chan struct{}),
		evicted: make(map[names.Pair]struct{}), woken: make(chan struct{}, 1),
		seed: maphash.MakeSeed(),
	}
}

// Query decides about a query. The reply is appended to dst.
func (x *Exchange) Query(c Connection, b, dst []byte) (Action, []byte) {
	r := x.readers.get()
	defer x.readers.put(r)
	q := &r.query
	if err := q.Read(b); err != nil {
		if x.o.Rules.AllowEvery(c.Tag) {
			x.Counts.Malformed.Add(1)
			return Release, dst // no name is refused, and the message passes without this process, too
		}
		if x.o.Rules.Decide(c.Tag, "").Verdict == rules.Unknown {
			return Wait, dst
		}
		x.Counts.Malformed.Add(1)
		code, ok := q.Reply(err)
		if !ok {
			return Drop, dst
		}
		return Reply, q.AppendAnswer(dst, code, "")
	}
	name := view(q.Name())
	switch x.o.Rules.Decide(c.Tag, name).Verdict {
	case rules.Allowed:
		x.Counts.Allowed.Add(1)
		x.reportQuery(c, q, 0)
		x.note(c, q.ID, q.Type, q.Class, q.Name())
		return Release, dst
	case rules.Unknown:
		return Wait, dst
	}
	x.Counts.Refused.Add(1)
	if zone, missing := x.o.Refusal.Missing(name); missing {
		x.reportQuery(c, q, message.NXDomain)
		return Reply, q.AppendAnswer(dst, message.NXDomain, zone)
	}
	x.reportQuery(c, q, message.Refused)
	return Reply, q.AppendAnswer(dst, message.Refused, "")
}

// Leave forgets a pod that does not exist any more.
func (x *Exchange) Leave(endpoint uint16) {
	x.mu.Lock()
	delete(x.pods, endpoint)
	x.mu.Unlock()
	x.o.Table.Leave(uint32(endpoint))
}

// Held is an answer whose addresses sluice-policy must learn before it is released.
type Held struct {
	pod     *pod
	name    string // text of a dnsname.Learned; of an unknown pod, the name alone
	asker   names.Asker
	addrs   []names.Address
	evicted []names.Pair
	began   time.Time

	unknown bool     // the asker is not known
	chain   []string // of an answer that the table has not learned, because the asker was not known; else nil
}

// NeedsAsker reports whether the pod that has asked is not known. If it is known before Settle, call SetAsker.
func (h *Held) NeedsAsker() bool { return h.unknown }

// SetAsker sets the pod that has asked.
func (h *Held) SetAsker(by names.Asker) { h.asker, h.unknown = by, false }

// Answer decides about an answer. If the action is Hold, Settle must be called, also if the answer is dropped for
// another reason.
func (x *Exchange) Answer(c Connection, b []byte) (Action, *Held) {
	r := x.readers.get()
	defer x.readers.put(r)
	a := &r.answer
	if err := a.Read(b); err != nil {
		x.Counts.BadAnswers.Add(1)
		if x.o.Rules.AllowEvery(c.Tag) {
			return Release, nil // as in Query; it teaches nothing
		}
		return Drop, nil
	}
	if !x.answered(c, a.ID, a.Type, a.Class, a.Name()) {
		x.Counts.Unasked.Add(1)
		if x.o.Rules.AllowEvery(c.Tag) {
			return Release, nil // the query passed while this process did not run, and teaches nothing
		}
		x.reportAnswer(c, r, true)
		return Drop, nil
	}
	x.Counts.Answered.Add(1)
	x.reportAnswer(c, r, false)
	name := view(a.Name())
	if len(a.Addresses) == 0 || !x.o.Rules.Wants(name) {
		return Release, nil
	}
	now := x.o.Now()
	r.addrs = r.addrs[:0]
	for _, addr := range a.Addresses {
		r.addrs = append(r.addrs, names.Address(addr))
	}
	r.key = dnsname.AppendForNamespace(r.key[:0], name, c.Asker.Namespace)
	key := view(r.key)
	if !x.mayTeach(c.Server.Addr()) {
		x.o.Table.Refuse(c.Asker, key, r.addrs, names.Server, now)
		return Release, nil
	}
	r.readChain()
	if c.Unknown {
		return x.holdUnknown(c, r, now)
	}
	result := x.o.Table.Learn(c.Asker, key, r.chain, r.addrs, now)
	x.evict(result.Evicted)
	if len(result.Enforce) == 0 {
		return Release, nil
	}
	p := x.hold(c.Endpoint)
	if p == nil {
		x.Counts.BeyondShare.Add(1)
		x.o.Table.NotEnforced(c.Asker, key, result.Enforce, now)
		return Release, nil
	}
	x.Counts.Held.Add(1)
	return Hold, &Held{
		pod: p, name: strings.Clone(key), asker: c.Asker, addrs: result.Enforce, evicted: result.Evicted, began: now,
	}
}

// holdUnknown holds an answer to a pod that is not known yet, until it is.
func (x *Exchange) holdUnknown(c Connection, r *reader, now time.Time) (Action, *Held) {
	p := x.hold(c.Endpoint)
	if p == nil {
		x.Counts.BeyondShare.Add(1)
		x.o.Table.NotEnforced(c.Asker, view(r.key), r.addrs, now)
		return Release, nil
	}
	x.Counts.Held.Add(1)
	return Hold, &Held{
		pod: p, name: string(r.answer.Name()), asker: c.Asker, addrs: slices.Clone(r.addrs), began: now, unknown: true,
		chain: append([]string{}, r.chain...),
	}
}

// errUnknown is the reason why an answer to an unknown pod was not learned.
var errUnknown = errors.New("sluice-datapath has not reported the pod that asked")

// readChain sets the targets of the chain. It keeps the texts of the answer before where they are equal.
func (r *reader) readChain() {
	links := r.answer.Links()
	for i := range links {
		r.links = r.answer.AppendLink(r.links[:0], i)
		if i < len(r.chain) {
			if r.chain[i] != string(r.links) {
				r.chain[i] = string(r.links)
			}
			continue
		}
		r.chain = append(r.chain, string(r.links))
	}
	r.chain = r.chain[:links]
}

func (x *Exchange) mayTeach(server netip.Addr) bool {
	return len(x.o.LearnFrom) == 0 || slices.ContainsFunc(x.o.LearnFrom, func(p netip.Prefix) bool {
		return p.Contains(server.Unmap())
	})
}

// hold counts a held answer of a pod; nil: it has too many.
func (x *Exchange) hold(endpoint uint16) *pod {
	x.mu.Lock()
	defer x.mu.Unlock()
	p := x.pods[endpoint]
	if p == nil || p.held >= MaxHeld {
		return nil
	}
	p.held++
	return p
}

func (x *Exchange) unhold(p *pod) {
	x.mu.Lock()
	defer x.mu.Unlock()
	p.held--
}

// Abandon is called in place of Settle for an answer that cannot be held. It passes and teaches nothing.
func (x *Exchange) Abandon(h *Held) {
	x.unhold(h.pod)
	x.fail(h, h.addrs, errShare)
}

// Settle returns when the answer may be released: sluice-policy enforces its addresses, has no space for them, or did
// not answer within HoldFor. For each name there is one call at a time.
func (x *Exchange) Settle(ctx context.Context, h *Held) {
	defer x.unhold(h.pod)
	ctx, cancel := context.WithDeadline(ctx, time.Now().Add(x.o.HoldFor-x.o.Now().Sub(h.began)))
	defer cancel()
	if h.unknown {
		h.name = string(dnsname.ForNamespace(h.name, h.asker.Namespace))
		x.fail(h, h.addrs, errUnknown)
		return
	}
	if h.chain != nil {
		h.name = string(dnsname.ForNamespace(h.name, h.asker.Namespace))
		result := x.o.Table.Learn(h.asker, h.name, h.chain, h.addrs, x.o.Now())
		x.evict(result.Evicted)
		h.addrs, h.evicted, h.chain = result.Enforce, result.Evicted, nil
	}
	left, err := x.learn(ctx, h)
	if errors.Is(err, ErrNoCapacity) && len(h.evicted) > 0 { // for which these addresses were evicted
		for _, p := range h.evicted {
			x.forget(ctx, p)
		}
		left, err = x.learn(ctx, h)
	}
	if err != nil {
		x.fail(h, left, err)
	}
}

// learn passes the addresses of a held answer to the enforcer. If this fails, it returns those that are left.
func (x *Exchange) learn(ctx context.Context, h *Held) (left []names.Address, err error) {
	if !x.lock(ctx, h.name) {
		return h.addrs, ctx.Err()
	}
	defer x.unlock(h.name)
	// The call before may have been for the same addresses.
	left = x.outside(ctx, h, x.o.Table.Missing(h.name, h.addrs, x.o.Now()))
	slices.SortStableFunc(left, func(a, b names.Address) int { return int(a.TTL/time.Second - b.TTL/time.Second) })
	for len(left) > 0 {
		n := batch(left)
		now := x.o.Now()
		addrs := make([]netip.Addr, 0, n)
		for _, a := range left[:n] {
			addrs = append(addrs, a.Addr)
		}
		if err := x.o.Enforcer.Learn(ctx, h.asker, dnsname.Learned(h.name).Name(), addrs, left[0].TTL); err != nil {
			return left, err
		}
		x.o.Table.Enforced(h.name, left[:n], now)
		left = left[n:]
	}
	return nil, nil
}

// evict notes addresses that sluice-policy should forget.
func (x *Exchange) evict(pairs []names.Pair) {
	if len(pairs) == 0 {
		return
	}
	x.mu.Lock()
	for _, p := range pairs {
		if len(x.evicted) < maxEvicted {
			x.evicted[p] = struct{}{}
		}
	}
	x.mu.Unlock()
	select {
	case x.woken <- struct{}{}:
	default:
	}
}

// Run makes sluice-policy forget evicted addresses until ctx ends, so that the answers for which they were evicted do
// not wait for it.
func (x *Exchange) Run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-x.woken:
		}
		x.mu.Lock()
		pairs := slices.Collect(maps.Keys(x.evicted))
		x.mu.Unlock()
		for _, p := range pairs {
			limited, cancel := context.WithTimeout(ctx, x.o.HoldFor)
			x.forget(limited, p)
			cancel()
		}
	}
}

// forget makes sluice-policy forget an evicted address, unless that has been done, or an answer has taught the address
// again. If it fails, sluice-policy keeps the address until its time ends.
func (x *Exchange) forget(ctx context.Context, p names.Pair) {
	x.mu.Lock()
	_, waits := x.evicted[p]
	delete(x.evicted, p)
	x.mu.Unlock()
	if !waits || !x.lock(ctx, p.Name) { // without the lock, it could overtake a later Learn
		return
	}
	defer x.unlock(p.Name)
	if !x.o.Table.Has(p) {
		key := dnsname.Learned(p.Name)
		namespace, _ := key.Namespace()
		_ = x.o.Enforcer.Forget(ctx, key.Name(), namespace, p.Addr)
	}
}

// outside returns the addresses that do not belong to the cluster, and removes the others. An address is also learned
// if this is not known, because the rules of sluice-policy allow no address of the cluster by a name.
func (x *Exchange) outside(ctx context.Context, h *Held, addrs []names.Address) []names.Address {
	ctx, cancel := context.WithTimeout(ctx, clusterTime)
	defer cancel()
	return slices.DeleteFunc(addrs, func(a names.Address) bool {
		if ctx.Err() != nil {
			return false
		}
		inside, err := x.o.Cluster.Has(ctx, a.Addr)
		if err != nil || !inside {
			return false
		}
		x.o.Table.Remove(h.name, a.Addr, x.o.Now())
		x.o.Table.Refuse(h.asker, h.name, []names.Address{a}, names.Cluster, x.o.Now())
		return true
	})
}

// maxBatch is the number of addresses of one call.
const maxBatch = 256

// batch returns the number of addresses at the front that have the same TTL.
func batch(list []names.Address) int {
	n := 1
	for n < len(list) && n < maxBatch && list[n].TTL == list[0].TTL {
		n++
	}
	return n
}

// fail notes why addresses are not enforced.
func (x *Exchange) fail(h *Held, addrs []names.Address, err error) {
	switch {
	case errors.Is(err, ErrNotSelected):
		for _, a := range addrs {
			x.o.Table.Remove(h.name, a.Addr, x.o.Now())
		}
		x.o.Table.Refuse(h.asker, h.name, addrs, names.NotSelected, x.o.Now())
		return
	case errors.Is(err, ErrNoCapacity):
		x.Counts.NoCapacity.Add(1)
	case errors.Is(err, errShare):
		x.Counts.BeyondShare.Add(1)
	default:
		x.Counts.Late.Add(1)
	}
	x.o.Table.NotEnforced(h.asker, h.name, addrs, x.o.Now())
}

// lock waits until no other call for a name runs. It returns false if ctx ends before.
func (x *Exchange) lock(ctx context.Context, name string) bool {
	for {
		x.mu.Lock()
		busy := x.calling[name]
		if busy == nil {
			x.calling[name] = make(chan struct{})
		}
		x.mu.Unlock()
		if busy == nil {
			return true
		}
		select {
		case <-busy:
		case <-ctx.Done():
			return false
		}
	}
}

func (x *Exchange) unlock(name string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	close(x.calling[name])
	delete(x.calling, name)
}
