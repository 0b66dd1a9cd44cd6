// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package exchange decides how each DNS message of a redirected connection is handled. A query passes if the rules
// allow its name. An answer passes once sluice-policy enforces its addresses. If the rules allow every name, messages
// that cannot be parsed pass, too.
//
// Addresses are learned only from answers to queries that this process has passed. Any other message from the
// server's port could be forged. After a restart, earlier queries are unknown; their clients ask again.
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
	MaxQueries = 512 // unanswered queries; beyond them, the oldest is forgotten and its answer dropped
	MaxHeld    = 512 // answers that wait for sluice-policy; further answers pass, and are not learned
)

// maxEvicted limits the evicted addresses that sluice-policy still has to remove. Beyond the limit, sluice-policy
// keeps evicted addresses until they expire.
const maxEvicted = 65_536

// clusterTime is how long an answer waits in order to find out which of its addresses belong to the cluster. It is
// one limit for all addresses of the answer. So even if sluice-identity does not answer, time is left to learn the
// addresses.
const clusterTime = 200 * time.Millisecond

// queryTime is how long a query waits for its answer.
const queryTime = 10 * time.Second

// ErrNoCapacity is returned by an Enforcer that has no capacity for an address. The answer passes, and connections to
// the address are denied.
var ErrNoCapacity = errors.New("no space for addresses of DNS names")

// ErrNotSelected is returned by an Enforcer if no rule of the asking pod selects the name. The answer passes, and its
// addresses are not learned. Otherwise a pod could fill in addresses of names that only the policies of other pods
// select.
var ErrNotSelected = errors.New("no egress rule of the pod that asked selects the name")

// Enforcer is sluice-policy.
type Enforcer interface {
	// Learn returns once the kernel allows connections to the addresses of the name. It allows them to pods of the
	// asker's namespace whose policies select the name. The asker is the pod whose query was answered; the addresses
	// count for its share.
	Learn(ctx context.Context, by names.Asker, name string, addrs []netip.Addr, ttl time.Duration) error
	// Forget removes an address of a name that pods of the namespace may use.
	Forget(ctx context.Context, name, namespace string, addr netip.Addr) error
}

// errShare is the reason for which an abandoned answer was not learned.
var errShare = errors.New("other answers need the memory")

// Connection is a redirected connection.
type Connection struct {
	Client, Server netip.AddrPort
	TCP            bool        // instead of UDP
	Endpoint       uint16      // endpoint ID of the client; the limits for queries and held answers apply to it
	Asker          names.Asker // the pod that pays for learned addresses
	// Unknown is set if the pod of the endpoint is not known yet. It is then unknown which pods may use the addresses
	// of an answer.
	Unknown bool
	Tag     rules.Tag
}

// Action says how to handle a message.
type Action uint8

// The actions.
const (
	Release Action = iota + 1 // forward the message unchanged
	Reply                     // drop the query, and send the reply to the client
	Drop                      // drop the message without a reply
	Wait                      // a rule set is not known: wait for it with rules.Wait, and call Query again
	Hold                      // call Settle, then release the answer
)

// Cluster knows which addresses belong to the cluster.
type Cluster interface {
	// Has reports whether an address belongs to a node, a pod or an API server. An error means that it cannot find
	// out.
	Has(ctx context.Context, addr netip.Addr) (bool, error)
}

// Reporter passes the evaluated messages to observers.
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
	// LearnFrom are the DNS servers from whose answers addresses are learned; empty: all servers that rules allow.
	LearnFrom []netip.Prefix
	// HoldFor is the maximum time for which an answer waits for sluice-policy.
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
	calling map[string]chan struct{} // guarded by mu; names with a running call of the enforcer
	evicted map[names.Pair]struct{}  // guarded by mu; addresses that sluice-policy should remove
	woken   chan struct{}            // has a token when addresses were added to evicted
}

// Counts contains the numbers of messages by result.
type Counts struct {
	Allowed, Refused, Malformed         atomic.Uint64 // queries
	Answered, Unasked, BadAnswers       atomic.Uint64 // answers that passed, that had no query, and that were malformed
	Held, Late, NoCapacity, BeyondShare atomic.Uint64 // answers with new addresses
}

// reader has the buffers for one message.
type reader struct {
	query  message.Query
	answer message.Answer
	addrs  []names.Address
	links  []byte
	chain  []string
	key    []byte // key of the name in the table
}

// maxReaders limits the number of unused readers that are kept.
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
			return Release, dst // all names are allowed, and the message would also pass if this process did not run
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

// Leave removes the state of a pod that no longer exists.
func (x *Exchange) Leave(endpoint uint16) {
	x.mu.Lock()
	delete(x.pods, endpoint)
	x.mu.Unlock()
	x.o.Table.Leave(uint32(endpoint))
}

// Held is an answer whose addresses sluice-policy must learn before it is released.
type Held struct {
	pod     *pod
	name    string // text of a dnsname.Learned; for an unknown pod, only the name
	asker   names.Asker
	addrs   []names.Address
	evicted []names.Pair
	began   time.Time

	unknown bool     // the pod that asked is not known
	chain   []string // CNAME chain of an answer that was not learned because the asker was unknown; else nil
}

// NeedsAsker reports whether the pod that asked is unknown. If the caller finds out before Settle, it must call
// SetAsker.
func (h *Held) NeedsAsker() bool { return h.unknown }

// SetAsker sets the pod that asked.
func (h *Held) SetAsker(by names.Asker) { h.asker, h.unknown = by, false }

// Answer decides about an answer. If the action is Hold, the caller must call Settle, even if it drops the answer for
// another reason.
func (x *Exchange) Answer(c Connection, b []byte) (Action, *Held) {
	r := x.readers.get()
	defer x.readers.put(r)
	a := &r.answer
	if err := a.Read(b); err != nil {
		x.Counts.BadAnswers.Add(1)
		if x.o.Rules.AllowEvery(c.Tag) {
			return Release, nil // as in Query; no address is learned
		}
		return Drop, nil
	}
	if !x.answered(c, a.ID, a.Type, a.Class, a.Name()) {
		x.Counts.Unasked.Add(1)
		if x.o.Rules.AllowEvery(c.Tag) {
			return Release, nil // the query passed while this process did not run, so no address is learned
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

// holdUnknown holds the answer to a pod that is not known yet until the pod is known.
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

// errUnknown is the reason for which an answer to an unknown pod was not learned.
var errUnknown = errors.New("sluice-datapath has not reported the pod that asked")

// readChain sets the targets of the CNAME chain. It reuses the texts of the former answer where they are equal.
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

// hold counts a held answer of a pod. It returns nil if the pod has too many held answers.
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

// Abandon must be called in place of Settle for an answer that cannot be held. The answer passes, and its addresses
// are not learned.
func (x *Exchange) Abandon(h *Held) {
	x.unhold(h.pod)
	x.fail(h, h.addrs, errShare)
}

// Settle returns when the answer may be released: sluice-policy enforces its addresses, has no capacity for them, or
// did not answer within HoldFor. For each name, only one call of the enforcer runs at a time.
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
	if errors.Is(err, ErrNoCapacity) && len(h.evicted) > 0 { // the evictions free capacity there, too
		for _, p := range h.evicted {
			x.forget(ctx, p)
		}
		left, err = x.learn(ctx, h)
	}
	if err != nil {
		x.fail(h, left, err)
	}
}

// learn passes the addresses of a held answer to the enforcer. If this fails, it returns the addresses that were not
// learned.
func (x *Exchange) learn(ctx context.Context, h *Held) (left []names.Address, err error) {
	if !x.lock(ctx, h.name) {
		return h.addrs, ctx.Err()
	}
	defer x.unlock(h.name)
	// The previous call for the name may have learned the same addresses.
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

// evict records addresses that sluice-policy should remove.
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

// Run makes sluice-policy remove evicted addresses until ctx ends. The answers for which the addresses were evicted
// do not wait for this.
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

// forget makes sluice-policy remove an evicted address, unless it was removed already or learned again. If this
// fails, sluice-policy keeps the address until it expires.
func (x *Exchange) forget(ctx context.Context, p names.Pair) {
	x.mu.Lock()
	_, waits := x.evicted[p]
	delete(x.evicted, p)
	x.mu.Unlock()
	if !waits || !x.lock(ctx, p.Name) { // without the lock, Forget could run after a later Learn
		return
	}
	defer x.unlock(p.Name)
	if !x.o.Table.Has(p) {
		key := dnsname.Learned(p.Name)
		namespace, _ := key.Namespace()
		_ = x.o.Enforcer.Forget(ctx, key.Name(), namespace, p.Addr)
	}
}

// outside returns the addresses that do not belong to the cluster, and removes all others from the table. If this is
// unknown for an address, the address is learned: rules with DNS names never allow addresses of the cluster.
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

// maxBatch is the maximum number of addresses in one call.
const maxBatch = 256

// batch returns how many addresses at the start of the list have the same TTL.
func batch(list []names.Address) int {
	n := 1
	for n < len(list) && n < maxBatch && list[n].TTL == list[0].TTL {
		n++
	}
	return n
}

// fail records why addresses are not enforced.
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

// lock waits until no other call for the name runs. It returns false if ctx ends first.
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
