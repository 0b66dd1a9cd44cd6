// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package conntrack

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/count"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// Timeouts are the times for which connections are kept after their last packet: whole seconds, at least one. SCTP uses
// the timeouts of TCP.
type Timeouts struct {
	// TCPOpening applies until the initiator continues after an answer. For a connection that was
	// picked up, it applies until the first answer.
	TCPOpening time.Duration
	// TCPEstablished applies to open and half-closed connections. It also applies to connections that a
	// policy has terminated: they must be known while their ends retransmit.
	TCPEstablished time.Duration
	// TCPClosing applies once both ends have sent FIN or one has sent RST. It is shortened, down to a
	// second, when the map fills up.
	TCPClosing time.Duration
	// UDPUnanswered and UDPAnswered apply before and after the first answer. The defaults equal the
	// timeouts of nf_conntrack: when the host's NAT reassigns a port to another client, the flow of the
	// previous client must be gone.
	UDPUnanswered, UDPAnswered time.Duration
	// ICMP applies to echoes.
	ICMP time.Duration
	// Other applies to protocols without ports.
	Other time.Duration
}

// DefaultTimeouts returns the timeouts that docs/reference/connections.md lists.
func DefaultTimeouts() Timeouts {
	return Timeouts{
		TCPOpening: time.Minute, TCPEstablished: 8000 * time.Second, TCPClosing: 10 * time.Second,
		UDPUnanswered: 30 * time.Second, UDPAnswered: 2 * time.Minute,
		ICMP: time.Minute, Other: 10 * time.Minute,
	}
}

// Of returns the timeout of a connection.
func (t Timeouts) Of(protocol uint8, flags Flags) time.Duration {
	switch protocol {
	case unix.IPPROTO_TCP, unix.IPPROTO_SCTP:
		switch {
		case flags.Closing():
			return t.TCPClosing
		case flags.Revoked(), flags&Established != 0:
			return t.TCPEstablished
		}
		return t.TCPOpening
	case unix.IPPROTO_UDP, unix.IPPROTO_UDPLITE:
		if flags&SeenReply != 0 {
			return t.UDPAnswered
		}
		return t.UDPUnanswered
	case unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6:
		return t.ICMP
	}
	return t.Other
}

// CollectorOptions configure a Collector; zero fields have defaults.
type CollectorOptions struct {
	Timeouts Timeouts // zero: DefaultTimeouts
	// MinInterval and MaxInterval limit the time between two passes; 1 s and 60 s by default.
	MinInterval, MaxInterval time.Duration
	Log                      *slog.Logger // nil discards
	// Passed is called after each complete pass with the time when it began. It may be nil.
	Passed func(began time.Time, p Pass)
	// Wanted returns addresses to search for, and a function that receives those addresses that live
	// connections use, after the complete pass. It may be nil.
	Wanted func() (addresses map[netip.Addr]struct{}, passed func(inUse []netip.Addr))

	Now func() uint32 // replaced by tests
}

// Collector removes connections that are idle, closed, or without endpoint, and gives each endpoint its budget
// of new connections. A Kernel has one Collector, and Run must return before the Kernel is closed. Without a
// running collector the last limits stay, and the programs renew used-up budgets by an eighth at a time.
type Collector struct {
	ct     *Connections
	o      CollectorOptions
	budget []byte // mapped memory of sl_budget
	counts *count.Counts

	mu   sync.Mutex
	last Pass // guarded by mu

	// used by Run only
	interval time.Duration
	// unremembered is Counters.Unremembered at the last pass. stoppedSince is the time in seconds at which it last
	// increased, or the collector started.
	unremembered uint64
	stoppedSince uint32
	mayPickUp    bool // no endpoint's pick-up is stopped
}

// Pass contains the results of one pass.
type Pass struct {
	// Live is the number of connections after the pass, for IPv4 and IPv6.
	Live [2]int
	// Expired are removed connections that were idle or closed, Orphaned those without endpoint.
	Expired, Orphaned int
	// Ended are open TCP connections from outside that were removed because the capacity for them was
	// almost used up: the longest idle ones of the senders with the most connections.
	Ended int
	// Kept are connections that were about to be removed when a packet arrived.
	Kept int
	// Batches is the number of batches that were read, Took the duration of the pass.
	Batches int
	Took    time.Duration
	// Evicted is the number of evictions by newer connections since the maps were created: connections that were
	// created, were not removed, and are nevertheless not in the maps. It never decreases. While connections begin and
	// end, it is a lower bound.
	Evicted uint64
	// EvictedAt is the time at which a pass of this process last found new evictions; zero: never.
	EvictedAt time.Time
	// OutsideSpent is the time at which connections from outside last exceeded their budget, so that a packet was dropped;
	// zero: never while this process has collected.
	OutsideSpent time.Time
	// Endpoints is the number of endpoints that are charged with open connections.
	Endpoints int
	// Owned are the open connections of each endpoint ID, and of Outside, for IPv4 and IPv6.
	Owned [][2]int
	// Nodes are the IDs of the peer nodes of all connections, including removed ones.
	Nodes map[uint16]struct{}
	// Revoked is the number of records of revoked TCP connections, for IPv4 and IPv6.
	Revoked [2]int
}

// NewCollector returns a collector. It changes nothing before the first pass.
func (ct *Connections) NewCollector(o CollectorOptions) (*Collector, error) {
	if ct.gate.ValidateOnly {
		return nil, pin.ErrValidateOnly
	}
	if o.Timeouts == (Timeouts{}) {
		o.Timeouts = DefaultTimeouts()
	}
	o.MinInterval = cmp.Or(o.MinInterval, time.Second)
	o.MaxInterval = cmp.Or(o.MaxInterval, time.Minute)
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Now == nil {
		o.Now = MonotonicSeconds
	}
	if o.MinInterval < 0 || o.MaxInterval < o.MinInterval {
		return nil, fmt.Errorf("%w: MaxInterval: %s is below MinInterval %s",
			pin.ErrInvalid, o.MaxInterval, o.MinInterval)
	}
	for name, d := range map[string]time.Duration{
		"TCPOpening": o.Timeouts.TCPOpening, "TCPEstablished": o.Timeouts.TCPEstablished,
		"TCPClosing":    o.Timeouts.TCPClosing,
		"UDPUnanswered": o.Timeouts.UDPUnanswered, "UDPAnswered": o.Timeouts.UDPAnswered,
		"ICMP": o.Timeouts.ICMP, "Other": o.Timeouts.Other,
	} {
		if d < time.Second {
			return nil, fmt.Errorf("%w: Timeouts.%s: %s is below a second", pin.ErrInvalid, name, d)
		}
	}
	if err := ct.gate.RLock(); err != nil {
		return nil, err
	}
	defer ct.gate.RUnlock()
	counts, err := count.Open(ct.pins)
	if err != nil {
		return nil, err
	}
	return &Collector{
		ct: ct, o: o, counts: counts, budget: ct.pins.Memory(bpf.MapsMapSlBudget), interval: o.MinInterval,
		stoppedSince: o.Now(),
	}, nil
}

// Run collects until ctx ends: immediately, then at an interval that adapts to the load, and earlier if an
// endpoint's budget is running out. A failed pass is logged and retried.
func (c *Collector) Run(ctx context.Context) error {
	t := time.NewTicker(c.o.MinInterval)
	defer t.Stop()
	var due time.Time
	for {
		if now := time.Now(); !now.Before(due) || c.Pressed() {
			p, err := c.Collect(ctx)
			if err != nil && ctx.Err() == nil {
				c.o.Log.Error("garbage collection of connections failed; retrying", "error", err)
			} else if err == nil {
				c.interval = nextInterval(c.interval, p, c.ct.capacity(), c.o)
			}
			due = now.Add(c.interval)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-t.C:
		}
	}
}

// nextInterval shortens the interval while passes remove much, and lengthens it while they remove little,
// because each pass also reads all connections that stay. The fuller the maps, the shorter the maximum
// interval.
func nextInterval(last time.Duration, p Pass, capacity [2]int, o CollectorOptions) time.Duration {
	removed := p.Expired + p.Orphaned
	seen := p.Live[0] + p.Live[1] + removed
	next := last
	switch {
	case removed*2 > seen:
		next = last / 2
	case removed*5 <= seen:
		next = last * 3 / 2
	}
	full := max(float64(p.Live[0])/float64(capacity[0]), float64(p.Live[1])/float64(capacity[1]))
	most := time.Duration(float64(o.MaxInterval) * max(0, 1-full))
	return max(o.MinInterval, min(next, most, o.MaxInterval))
}

// Outside is the index, after the endpoint IDs, of connections that no local endpoint begins.
const Outside = endpointmap.MaxEndpoints + 1

// Pressed reports whether an endpoint, or Outside, has used a quarter of a budget. An early pass then computes the
// budgets again.
func (c *Collector) Pressed() bool {
	for s := range Outside + 1 {
		for family := range 2 {
			begun, limit := c.cell(s, family)
			if l := uint32(atomic.LoadUint64(limit)); l > 0 && uint32(atomic.LoadUint64(begun)) >= max(l/4, 1) {
				return true
			}
		}
	}
	return false
}

// cell returns the budget of an endpoint ID, or of Outside, in a family. The upper half of limit counts
// connections that ended since the last pass.
func (c *Collector) cell(slot, family int) (begun, limit *uint64) {
	const size = int(unsafe.Sizeof(bpf.MapsSlBudget{}))
	at := (slot<<1 | family) * size
	return pin.Word(c.budget, at), pin.Word(c.budget, at+int(unsafe.Offsetof(bpf.MapsSlBudget{}.Limit)))
}

// Budget returns how many connections an endpoint ID, or Outside, has begun in a family since the last pass,
// and how many it may begin; a limit of 0 means unlimited.
func (c *Collector) Budget(slot endpointmap.ID, family int) (begun, limit uint64) {
	b, l := c.cell(int(slot), family)
	return atomic.LoadUint64(b), uint64(uint32(atomic.LoadUint64(l)))
}

// Use returns how many connections of a family an endpoint ID, or Outside, has: those open at the last pass, and those
// begun since. most is the limit until the next pass; 0: unlimited. Before the first pass both are 0.
func (c *Collector) Use(slot endpointmap.ID, family int) (used, most int) {
	p := c.Last()
	if int(slot) >= len(p.Owned) {
		return 0, 0
	}
	owned := p.Owned[slot][family]
	begun, limit := c.Budget(slot, family)
	switch {
	case slot == Outside:
		return owned + int(uint32(begun)), c.ct.capacity()[family] / 2
	case limit == 0:
		return owned + int(uint32(begun)), 0
	}
	return owned + int(uint32(begun)), owned + int(limit)
}

// Capacity returns how many connections of a family the map can hold.
func (c *Collector) Capacity(family int) int { return c.ct.capacity()[family] }

// capacity returns the capacities of the IPv4 and IPv6 connection maps.
func (ct *Connections) capacity() [2]int {
	return [2]int{
		int(ct.pins.Map(bpf.MapsMapSlCt4).MaxEntries()), int(ct.pins.Map(bpf.MapsMapSlCt6).MaxEntries()),
	}
}

// charged returns the endpoint ID, or Outside, whose budget the programs have charged for the connection: the end whose
// packet created the entry.
func (c *Connection) charged(ct *Connections) int {
	end := c.From
	if c.Flags&ByResponder != 0 {
		end = c.To
	}
	switch {
	case end.Slot > endpointmap.MaxEndpoints:
		return Outside
	case end.Slot == endpointmap.HostID && end.Identity == ct.worlds[c.family()]:
		return Outside
	}
	return int(end.Slot)
}

func (c *Connection) family() int {
	if c.Initiator.Addr().Is4() {
		return 0
	}
	return 1
}

// Collect makes one pass. Every candidate is checked again immediately before it is deleted, so that
// connections in use are not disturbed; see Remove for the remaining race.
func (c *Collector) Collect(ctx context.Context) (Pass, error) {
	start := time.Now()
	before, err := c.ct.Counters()
	if err != nil {
		return Pass{}, err
	}
	// drained before the current maps are read, so that a connection that is moved meanwhile is counted in
	// both, rather than in neither
	drained, err := c.ct.DrainPrevious(ctx, c.o.Now(), c.o.Timeouts)
	if err != nil {
		return Pass{}, fmt.Errorf("drain the maps of the previous version: %w", err)
	}
	p := Pass{Expired: drained.Removed, Nodes: map[uint16]struct{}{}}
	previous := c.Last()
	capacity := c.ct.capacity()
	var timeouts [2]Timeouts
	for f := range timeouts {
		timeouts[f] = c.o.Timeouts
		timeouts[f].TCPClosing = closingTime(c.o.Timeouts.TCPClosing, previous.Live[f], capacity[f])
	}
	s := sorting{ct: c.ct, pass: &p, owned: make([][2]int, Outside+1), proven: c.beginProven(capacity)}
	var passed func([]netip.Addr)
	if c.o.Wanted != nil {
		s.wanted, passed = c.o.Wanted()
		s.inUse = make(map[netip.Addr]struct{})
	}
	err = c.ct.Each(func(cs []Connection) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		p.Batches++
		// Read after the batch: if an endpoint is missing now, it has been removed.
		present := map[endpointmap.ID]endpointmap.Endpoint{}
		now := c.o.Now()
		for i := range cs {
			conn := &cs[i]
			if conn.Value.Node != 0 {
				p.Nodes[conn.Value.Node] = struct{}{}
			}
			idle := int32(now - conn.LastSeen)
			expired := idle >= int32(c.timeOf(conn, timeouts[conn.family()], previous, capacity)/time.Second)
			orphaned := false
			if !expired {
				if orphaned, err = c.ct.orphaned(conn, present); err != nil {
					return err
				}
			}
			if !expired && !orphaned {
				s.stays(conn)
				continue
			}
			if err := s.goes(conn, expired); err != nil {
				return err
			}
		}
		return s.flush()
	})
	if err == nil {
		err = s.proven.finish(&p, c.o.Now())
	}
	if n := uint64(p.Expired + p.Orphaned + p.Ended); n > 0 {
		err = errors.Join(err, c.ct.countExpired(n))
	}
	if err != nil {
		return p, err
	}
	after, err := c.ct.Counters()
	if err != nil {
		return p, err
	}
	now := c.o.Now()
	if p.Revoked, err = c.ct.collectRevoked(now, uint32(c.o.Timeouts.TCPEstablished/time.Second)); err != nil {
		return p, err
	}
	c.resumePickUp(now, after.Unremembered)
	// Created is read before the pass, and the removals after it. A connection that begins or ends meanwhile therefore
	// makes the difference smaller, never larger.
	if gone := after.Deleted + after.Expired + uint64(p.Live[0]+p.Live[1]+drained.Left); before.Created > gone {
		p.Evicted = before.Created - gone
	}
	p.Evicted, p.EvictedAt = max(p.Evicted, previous.Evicted), previous.EvictedAt
	// the first pass includes the evictions under earlier processes
	if previous.Took > 0 && p.Evicted > previous.Evicted {
		p.EvictedAt = start
	}
	spent, wasSpent := c.renew(&p, s.owned, s.open)
	p.Owned = s.owned
	if p.OutsideSpent = previous.OutsideSpent; wasSpent {
		p.OutsideSpent = time.Now().Add(-time.Duration(int32(c.o.Now()-spent)) * time.Second)
	}
	p.Took = time.Since(start)
	c.mu.Lock()
	c.last = p
	c.mu.Unlock()
	if c.o.Passed != nil {
		c.o.Passed(start, p)
	}
	if passed != nil {
		passed(slices.Collect(maps.Keys(s.inUse)))
	}
	return p, nil
}

// resumePickUp allows connections to be picked up again once every revoked connection without a record must have
// expired: Timeouts.TCPEstablished after the latest one. A collector that starts assumes that the latest one was
// revoked just before.
func (c *Collector) resumePickUp(now uint32, unremembered uint64) {
	switch {
	case unremembered != c.unremembered:
		c.unremembered, c.stoppedSince, c.mayPickUp = unremembered, now, false
	case !c.mayPickUp && int32(now-c.stoppedSince) >= int32(c.o.Timeouts.TCPEstablished/time.Second):
		c.ct.endpoints.AllowPickUp()
		c.mayPickUp = true
	}
}

// Last returns the last complete pass.
func (c *Collector) Last() Pass {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.last
}

// sorting classifies the connections that a pass reads.
type sorting struct {
	ct   *Connections
	pass *Pass
	// open counts the open connections of each family, owned counts them for each endpoint ID and family.
	open  [2]int
	owned [][2]int
	// over is a batch of connections to remove, all of one family. lapsed has the bit of a connection set if it is
	// idle or closed, and not set if it is orphaned.
	over   []Connection
	lapsed uint32
	proven *proven
	// wanted holds the addresses to search for, inUse the addresses that connections use.
	wanted, inUse map[netip.Addr]struct{}
}

func (s *sorting) stays(conn *Connection) {
	f := conn.family()
	s.pass.Live[f]++
	if conn.Flags.Closing() {
		return // an ended connection may be removed at any time, so it needs no capacity
	}
	if len(s.wanted) > 0 && !conn.Flags.Revoked() {
		for _, a := range [...]netip.Addr{conn.Initiator.Addr(), conn.Responder.Addr()} {
			if _, ok := s.wanted[a]; ok {
				s.inUse[a] = struct{}{}
			}
		}
	}
	s.open[f]++
	owner := conn.charged(s.ct)
	s.owned[owner][f]++
	if owner == Outside {
		s.proven.add(conn)
	}
}

// goes queues a connection for removal. The next flush removes the queue.
func (s *sorting) goes(conn *Connection, expired bool) error {
	if expired {
		s.lapsed |= 1 << len(s.over)
	}
	s.over = append(s.over, *conn)
	if len(s.over) < RemoveAtOnce {
		return nil
	}
	return s.flush()
}

// flush removes the collected connections, except those that changed after they were read.
func (s *sorting) flush() error {
	if len(s.over) == 0 {
		return nil
	}
	deleted, err := s.ct.Remove(s.over...)
	if err != nil {
		return err
	}
	for i := range s.over {
		switch bit := uint32(1) << i; {
		case deleted&bit == 0:
			s.pass.Kept++
			s.stays(&s.over[i])
		case s.lapsed&bit != 0:
			s.pass.Expired++
			s.ct.ended.note(&s.over[i])
		default:
			s.pass.Orphaned++
			s.ct.ended.note(&s.over[i])
		}
	}
	s.over, s.lapsed = s.over[:0], 0
	return nil
}

// orphaned reports whether a local end of the connection no longer belongs to an endpoint: its endpoint ID is
// unused, or belongs to an endpoint with another address. The host is never removed.
func (ct *Connections) orphaned(conn *Connection, present map[endpointmap.ID]endpointmap.Endpoint) (bool, error) {
	for _, end := range []struct {
		End
		addr any
	}{{conn.From, conn.Initiator.Addr()}, {conn.To, conn.Responder.Addr()}} {
		s := end.Slot
		if s == endpointmap.HostID || s > endpointmap.MaxEndpoints {
			continue
		}
		e, ok := present[s]
		if !ok {
			var err error
			if e, err = ct.endpoints.Lookup(s); err != nil && !errors.Is(err, endpointmap.ErrNotFound) {
				return false, err
			}
			present[s] = e // without addresses if there is no endpoint
		}
		if end.addr != any(e.IPv4) && end.addr != any(e.IPv6) {
			return true, nil
		}
	}
	return false, nil
}

// halfOpenTime limits how long a TCP connection from outside may be half-open while its map is more than half
// full, so that a scanner does not occupy it. A genuine client has answered by then.
const halfOpenTime = 10 * time.Second

// timeOf returns the timeout of a connection, depending on how full its map was after the last pass.
func (c *Collector) timeOf(conn *Connection, t Timeouts, last Pass, capacity [2]int) time.Duration {
	d, f := t.Of(conn.Protocol, conn.Flags), conn.family()
	const further = Established | PickedUp | Terminated
	opening := conn.Flags&further == 0 && !conn.Flags.Closing()
	if opening && conn.Protocol == unix.IPPROTO_TCP && 2*last.Live[f] > capacity[f] && conn.charged(c.ct) == Outside {
		return min(d, halfOpenTime)
	}
	return d
}

// closingTime shortens the timeout of ended connections, which are only needed for late packets, while their
// map is more than half full: down to a second at three quarters.
func closingTime(full time.Duration, live, capacity int) time.Duration {
	over := max(0, float64(live)/float64(capacity)-0.5)
	t := time.Duration(float64(full) * max(0, 1-4*over))
	return max(t.Truncate(time.Second), time.Second)
}

// LeastBudget is the number of connections that every endpoint may begin until the next pass, even if the maps are
// full.
const LeastBudget = 128

// budgetOf returns how many connections an endpoint may begin until the next pass. A map of the given capacity has
// open connections, owned of them by the endpoint, and is divided among sharers endpoints. An eighth of the map stays
// free for new endpoints. Of the rest, the endpoint may use what is left of its fair share, or half of the unused
// capacity, whichever is more.
func budgetOf(capacity, open, owned, sharers int) int {
	room := capacity - capacity/8
	fair := room/max(sharers, 1) - owned
	unused := (room - open) / 2
	return max(LeastBudget, fair, unused)
}

// renew begins a new period for all budgets. It counts the endpoints with open connections, and returns when
// Outside used up its budget in this period, if it did.
//
// The host has no limit, because a process there could do worse. Connections from outside have one common
// limit, half of a map. While there are any, the endpoints share the other half. An unused endpoint ID has the
// budget of an endpoint without connections, so that a new endpoint is limited from its first packet. A connection that
// begins between the two writes is counted in neither period.
func (c *Collector) renew(p *Pass, owned [][2]int, open [2]int) (spent uint32, wasSpent bool) {
	var sharing [2]int
	for s, n := range owned {
		if s == int(endpointmap.HostID) || s == Outside {
			continue
		}
		if n != [2]int{} {
			p.Endpoints++
		}
		for f := range n {
			sharing[f] += min(n[f], 1)
		}
	}
	capacity := c.ct.capacity()
	for s, n := range owned {
		for f := range n {
			shares := max(sharing[f], 1)
			switch {
			case s == Outside:
				shares = min(sharing[f], 1) + 1
			case owned[Outside][f] > 0:
				shares *= 2
			}
			limit := budgetOf(capacity[f], open[f], n[f], shares)
			if s == int(endpointmap.HostID) {
				limit = 0
			}
			begunCell, limitCell := c.cell(s, f)
			atomic.StoreUint64(limitCell, uint64(limit))
			begun := atomic.SwapUint64(begunCell, 0)
			if at := uint32(begun >> 32); s == Outside && at != 0 {
				spent, wasSpent = at, true
			}
		}
	}
	return spent, wasSpent
}
