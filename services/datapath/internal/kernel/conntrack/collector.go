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

// Timeouts say how long a connection is remembered after its last
// packet. SCTP has the times of TCP. All are whole seconds, one at least.
type Timeouts struct {
	// TCPOpening holds until the initiator has gone on after an answer, and for
	// one that was picked up until it is answered.
	TCPOpening time.Duration
	// TCPEstablished holds for open and for half-closed connections, and for
	// those that a policy has terminated: while their ends try on, they must be
	// known.
	TCPEstablished time.Duration
	// TCPClosing holds once both ends have finished or one has reset. Under
	// pressure it is shorter, down to a second.
	TCPClosing time.Duration
	// UDPUnanswered and UDPAnswered hold without and with an answer. By default
	// they are those of nf_conntrack: a port that the host's translation gives
	// to another client must not find the flow of the one before.
	UDPUnanswered, UDPAnswered time.Duration
	// ICMP holds for echoes.
	ICMP time.Duration
	// Other holds for protocols without ports.
	Other time.Duration
}

// DefaultTimeouts are what docs/datapath.md explains.
func DefaultTimeouts() Timeouts {
	return Timeouts{
		TCPOpening: time.Minute, TCPEstablished: 8000 * time.Second, TCPClosing: 10 * time.Second,
		UDPUnanswered: 30 * time.Second, UDPAnswered: 2 * time.Minute,
		ICMP: time.Minute, Other: 10 * time.Minute,
	}
}

// Of is the time of a connection.
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
	Timeouts Timeouts // zero: DefaultConnectionTimeouts
	// MinInterval and MaxInterval bound the time between two passes, 1 s and
	// 60 s by default.
	MinInterval, MaxInterval time.Duration
	Log                      *slog.Logger // nil discards
	// Passed is called after each whole pass with when it began; nil: it is not.
	Passed func(began time.Time, p Pass)
	// Wanted returns addresses that a pass looks for, and what is called with those that
	// live connections have, after the whole pass; nil: it looks for none.
	Wanted func() (addresses map[netip.Addr]struct{}, passed func(inUse []netip.Addr))

	Now func() uint32 // tests have a clock of their own
}

// Collector removes connections that are idle, closed or of endpoints that are
// gone, and gives every endpoint its budget of new ones. There is one per
// Kernel, and Run has returned before that is closed. The last limits stay, and
// the programs renew what is used up, an eighth at a time, until the next
// collector comes.
type Collector struct {
	ct     *Connections
	o      CollectorOptions
	budget []byte // memory of sl_budget
	counts *count.Counts

	mu   sync.Mutex
	last Pass // guarded by mu

	// of the loop alone
	interval time.Duration
	// unremembered is the count of the last pass, stoppedSince when it last grew
	// or the collector began, in seconds.
	unremembered uint64
	stoppedSince uint32
	mayPickUp    bool // nothing is stopped
}

// Pass is what one pass found and did.
type Pass struct {
	// Live connections afterwards, of IPv4 and IPv6.
	Live [2]int
	// Idle or closed ones that were removed, and those of endpoints that are
	// gone.
	Expired, Orphaned int
	// Ended are open TCP connections from outside that were idle longest, of the senders
	// that had most of them, when nearly all room for those was in use.
	Ended int
	// Kept are those that were about to be removed when a packet came.
	Kept int
	// Batches that were read, and how long all of it took.
	Batches int
	Took    time.Duration
	// Evicted, since the maps were made, by newer connections: what was
	// created, and neither removed nor is there. It is a lower bound while
	// connections come and go, and never decreases.
	Evicted uint64
	// EvictedAt is when a pass of this process last found more of them; zero: none has.
	EvictedAt time.Time
	// OutsideSpent is when what comes from outside last had no budget left, so that a packet
	// of it was dropped; zero: never while this process collects.
	OutsideSpent time.Time
	// Endpoints that are charged with connections which are still open.
	Endpoints int
	// Owned are the open connections of each slot, and of Outside, of IPv4 and IPv6.
	Owned [][2]int
	// Nodes are the numbers of the nodes that connections are with, those that
	// were removed too.
	Nodes map[uint16]struct{}
	// Revoked TCP connections that are remembered, of IPv4 and IPv6.
	Revoked [2]int
}

// NewCollector prepares a collector. It changes nothing before the first pass.
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

// Run collects until ctx ends: at once, then at an interval that follows the
// load, and early if an endpoint uses up its budget. A pass that fails is
// logged and made again.
func (c *Collector) Run(ctx context.Context) error {
	t := time.NewTicker(c.o.MinInterval)
	defer t.Stop()
	var due time.Time
	for {
		if now := time.Now(); !now.Before(due) || c.Pressed() {
			p, err := c.Collect(ctx)
			if err != nil && ctx.Err() == nil {
				c.o.Log.Error("connections not collected, trying again", "error", err)
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

// nextInterval shortens the interval while passes find much to do and lengthens
// it while they do not, because each pass reads all that stays, too; the fuller
// the maps, the less may pass between two.
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

// Outside stands for the slot of what no local endpoint begins.
const Outside = endpointmap.MaxEndpoints + 1

// Pressed says whether a quarter of any budget is used, so that a recount may
// give its owner more, or less to others.
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

// cell is the budget of a slot, or of outside, in a family. The upper half of limit counts the
// connections that have ended since the last pass.
func (c *Collector) cell(slot, family int) (begun, limit *uint64) {
	const size = int(unsafe.Sizeof(bpf.MapsSlBudget{}))
	at := (slot<<1 | family) * size
	return pin.Word(c.budget, at), pin.Word(c.budget, at+int(unsafe.Offsetof(bpf.MapsSlBudget{}.Limit)))
}

// Budget is what a slot, or Outside, has begun in a family since the last pass,
// and how much it may begin; a limit of 0 is none.
func (c *Collector) Budget(slot endpointmap.ID, family int) (begun, limit uint64) {
	b, l := c.cell(int(slot), family)
	return atomic.LoadUint64(b), uint64(uint32(atomic.LoadUint64(l)))
}

// Use is how many connections of a family a slot, or Outside, has: those that the last pass found open, and
// those that it has begun since. It may have at most so many before the next pass; 0: there is no limit.
// Before the first pass nothing is known.
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

// Capacity is how many connections of a family fit.
func (c *Collector) Capacity(family int) int { return c.ct.capacity()[family] }

// capacity of the connection maps of IPv4 and IPv6.
func (ct *Connections) capacity() [2]int {
	return [2]int{
		int(ct.pins.Map(bpf.MapsMapSlCt4).MaxEntries()), int(ct.pins.Map(bpf.MapsMapSlCt6).MaxEntries()),
	}
}

// charged is the slot, or outside, in whose budget the programs count the
// connection: of the end whose packet made the entry.
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

// Collect makes one pass. Every candidate is looked at again right before it
// is deleted, so that a connection in use is not disturbed: see
// Remove for what remains.
func (c *Collector) Collect(ctx context.Context) (Pass, error) {
	start := time.Now()
	before, err := c.ct.Counters()
	if err != nil {
		return Pass{}, err
	}
	// before the maps of this version are read: a connection that is moved
	// meanwhile is counted in both, not in neither
	drained, err := c.ct.DrainPrevious(ctx, c.o.Now(), c.o.Timeouts)
	if err != nil {
		return Pass{}, fmt.Errorf("drain the maps of the version before: %w", err)
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
		// read after the batch: whoever is not there now is gone
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
	// Created is read before the pass and what ended after it: a connection
	// that comes or goes meanwhile makes the difference smaller, never larger.
	if gone := after.Deleted + after.Expired + uint64(p.Live[0]+p.Live[1]+drained.Left); before.Created > gone {
		p.Evicted = before.Created - gone
	}
	p.Evicted, p.EvictedAt = max(p.Evicted, previous.Evicted), previous.EvictedAt
	if previous.Took > 0 && p.Evicted > previous.Evicted { // the first pass counts those of earlier processes
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

// resumePickUp lets connections be picked up again when every revoked one that
// is not remembered has been idle for the life of a connection. A collector
// that begins does not know since when they are not.
func (c *Collector) resumePickUp(now uint32, unremembered uint64) {
	switch {
	case unremembered != c.unremembered:
		c.unremembered, c.stoppedSince, c.mayPickUp = unremembered, now, false
	case !c.mayPickUp && int32(now-c.stoppedSince) >= int32(c.o.Timeouts.TCPEstablished/time.Second):
		c.ct.endpoints.AllowPickUp()
		c.mayPickUp = true
	}
}

// Last is the last whole pass.
func (c *Collector) Last() Pass {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.last
}

// sorting is what a pass makes of the connections that it reads.
type sorting struct {
	ct   *Connections
	pass *Pass
	// open connections of each family, and of each slot and family
	open  [2]int
	owned [][2]int
	// over is what is removed next, one family at a time; lapsed has a bit for
	// each that is idle or closed, and none for an orphan.
	over   []Connection
	lapsed uint32
	proven *proven
	// wanted are addresses that are looked for, inUse those that connections have.
	wanted, inUse map[netip.Addr]struct{}
}

func (s *sorting) stays(conn *Connection) {
	f := conn.family()
	s.pass.Live[f]++
	if conn.Flags.Closing() {
		return // it may go at any moment and needs no room
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

// goes takes a connection to be removed, at the latest by flush.
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

// flush removes what goes has taken. What has changed since it was read stays.
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

// orphaned says whether a local end of the connection belongs to no endpoint
// any more: nobody leads to its slot, or whoever has the slot has another
// address. The host is never gone.
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
			present[s] = e // without addresses if nobody is there
		}
		if end.addr != any(e.IPv4) && end.addr != any(e.IPv6) {
			return true, nil
		}
	}
	return false, nil
}

// halfOpenTime is how long a TCP connection from outside may be half-open while its map
// is more than half full: a scanner holds no room for longer, and whoever means it has
// answered by then.
const halfOpenTime = 10 * time.Second

// timeOf is the time of a connection, by how full its map was after the last pass.
func (c *Collector) timeOf(conn *Connection, t Timeouts, last Pass, capacity [2]int) time.Duration {
	d, f := t.Of(conn.Protocol, conn.Flags), conn.family()
	const further = Established | PickedUp | Terminated
	opening := conn.Flags&further == 0 && !conn.Flags.Closing()
	if opening && conn.Protocol == unix.IPPROTO_TCP && 2*last.Live[f] > capacity[f] && conn.charged(c.ct) == Outside {
		return min(d, halfOpenTime)
	}
	return d
}

// closingTime shortens the life of what has ended, which is needed for late
// packets only, while its map is more than half full: to a second at three
// quarters.
func closingTime(full time.Duration, live, capacity int) time.Duration {
	over := max(0, float64(live)/float64(capacity)-0.5)
	t := time.Duration(float64(full) * max(0, 1-4*over))
	return max(t.Truncate(time.Second), time.Second)
}

// LeastBudget is what every endpoint may begin until the next pass, however
// full the maps are.
const LeastBudget = 128

// budgetOf is how many connections an endpoint may begin until the next pass
// in a map of the capacity, in which it has owned of open ones, and of which its
// fair share is one of sharers. An eighth of the map stays free for whoever
// comes. Of the rest, an endpoint may fill its fair share, and beyond it half
// of what nobody uses.
func budgetOf(capacity, open, owned, sharers int) int {
	room := capacity - capacity/8
	fair := room/max(sharers, 1) - owned
	unused := (room - open) / 2
	return max(LeastBudget, fair, unused)
}

// renew begins a new period of all budgets, counts the endpoints that have begun
// connections which are open, and returns when outside has used up its budget in
// this period, if it has. The host has no limit: whoever runs there
// can do worse. What comes from outside has one for all of it, the share of half
// of a map; while it has open connections, the endpoints share the other half.
// A free slot has the budget of an endpoint without connections, so that an
// endpoint is limited from its first packet. A connection that is begun between
// the two stores counts for neither period.
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
