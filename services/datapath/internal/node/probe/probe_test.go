// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package probe

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-net/sluice/kit/leaktest"
)

func TestMain(m *testing.M) {
	runtime.LockOSThread() // new namespaces need another thread than the main one
	os.Exit(leaktest.Run(m))
}

const port = 4242

// network delivers packets between fake sockets.
type network struct {
	mu    sync.Mutex
	socks map[netip.Addr]*fakeConn
	// carry returns the delay of a packet with that size; ok false: lost.
	carry func(from, to netip.Addr, size int) (after time.Duration, ok bool)
	bytes map[netip.Addr]int // bytes of payload, by sender
}

func newNetwork() *network {
	return &network{
		socks: map[netip.Addr]*fakeConn{}, bytes: map[netip.Addr]int{},
		carry: func(_, _ netip.Addr, size int) (time.Duration, bool) { return time.Millisecond, size <= 1500 },
	}
}

type datagram struct {
	b    []byte
	from netip.AddrPort
	to   netip.Addr
}

// fakeConn is the socket of one address.
type fakeConn struct {
	net    *network
	addr   netip.Addr
	in     chan datagram
	closed chan struct{}
}

func (n *network) listen(addr netip.Addr) *fakeConn {
	c := &fakeConn{net: n, addr: addr, in: make(chan datagram, 1024), closed: make(chan struct{})}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.socks[addr] = c
	return c
}

func (c *fakeConn) Read(b []byte) (int, netip.AddrPort, netip.Addr, error) {
	select {
	case d := <-c.in:
		return copy(b, d.b), d.from, d.to, nil
	case <-c.closed:
		return 0, netip.AddrPort{}, netip.Addr{}, net.ErrClosed
	}
}

func (c *fakeConn) Write(b []byte, to netip.AddrPort, from netip.Addr) error {
	if !from.IsValid() {
		from = c.addr
	}
	return c.net.send(b, netip.AddrPortFrom(from, port), to.Addr())
}

func (c *fakeConn) Close() error {
	c.net.mu.Lock()
	defer c.net.mu.Unlock()
	if c.net.socks[c.addr] == c {
		delete(c.net.socks, c.addr)
	}
	close(c.closed)
	return nil
}

// send delivers a packet from any sender.
func (n *network) send(b []byte, from netip.AddrPort, to netip.Addr) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.bytes[from.Addr()] += len(b)
	after, ok := n.carry(from.Addr(), to, len(b)+overhead[familyOf(to)])
	if !ok {
		return nil
	}
	d := datagram{append([]byte{}, b...), from, to}
	time.AfterFunc(after, func() {
		n.mu.Lock()
		c := n.socks[to]
		n.mu.Unlock()
		if c == nil {
			return
		}
		select {
		case c.in <- d:
		default:
		}
	})
	return nil
}

// total returns the number of bytes sent from an address.
func (n *network) total(from netip.Addr) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.bytes[from]
}

// set changes how packets are delivered.
func (n *network) set(carry func(from, to netip.Addr, size int) (time.Duration, bool)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.carry = carry
}

var errNoIPv6 = errors.New("address family not supported")

// node runs a prober at an address until the test ends.
func (n *network) node(t *testing.T, addr netip.Addr, peers ...Peer) *Prober {
	t.Helper()
	p := New(Options{Port: port, Listen: func(f Family) (Conn, error) {
		if f != familyOf(addr) {
			return nil, errNoIPv6
		}
		return n.listen(addr), nil
	}})
	if err := p.SetPeers(peers); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- p.Run(ctx) }()
	synctest.Wait() // until it listens
	t.Cleanup(func() {
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("Run: %v", err)
		}
	})
	return p
}

var (
	addrA = netip.MustParseAddr("192.0.2.1")
	addrB = netip.MustParseAddr("192.0.2.2")
	addrC = netip.MustParseAddr("192.0.2.3")
)

// pair runs two nodes that know each other, and returns the first.
func (n *network) pair(t *testing.T) *Prober {
	t.Helper()
	n.node(t, addrB, Peer{"a", []netip.Addr{addrA}, 1500})
	return n.node(t, addrA, Peer{"b", []netip.Addr{addrB}, 1500})
}

func only(t *testing.T, p *Prober) Path {
	t.Helper()
	s := p.State()
	if len(s.Paths) != 1 {
		t.Fatalf("paths %+v, want one", s.Paths)
	}
	return s.Paths[0]
}

// within waits for a condition, at most limit, and returns how long it took.
func within(t *testing.T, limit time.Duration, what string, ok func() bool) time.Duration {
	t.Helper()
	begin := time.Now()
	for !ok() {
		if time.Since(begin) > limit {
			t.Fatalf("%s: not within %s", what, limit)
		}
		time.Sleep(10 * time.Millisecond)
	}
	return time.Since(begin)
}

func TestNewPeerIsAskedAtOnceInBothSizes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newNetwork().pair(t)
		within(t, 200*time.Millisecond, "reachable with its MTU", func() bool {
			w := only(t, p)
			return w.State == Reachable && w.MTU == 1500
		})
		w := only(t, p)
		if w.Latency != 2*time.Millisecond || w.Smoothed != 2*time.Millisecond || w.Trouble != "" || w.Searching {
			t.Errorf("path %+v", w)
		}
		if s := p.State(); s.Nodes != 1 || s.Answering != 1 || s.Slowest != 2*time.Millisecond {
			t.Errorf("state %+v", s)
		}
	})
}

func TestNodeThatGoesAndComesIsSeen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork()
		p := n.pair(t)
		time.Sleep(time.Minute)
		whole := n.carry
		n.set(func(netip.Addr, netip.Addr, int) (time.Duration, bool) { return 0, false })
		within(t, 10*time.Second, "unreachable", func() bool { return only(t, p).State == Unreachable })
		w := only(t, p)
		if w.Trouble != "no answer to 3 probes" || w.MTU != 0 || time.Since(w.Since) > time.Second ||
			time.Since(w.LastAnswer) > 10*time.Second || w.Lost != 3 {
			t.Errorf("path %+v", w)
		}
		time.Sleep(10 * time.Minute)
		n.set(whole)
		within(t, 10*time.Second, "reachable", func() bool { return only(t, p).State == Reachable })
		within(t, time.Second, "MTU known again", func() bool { return only(t, p).MTU == 1500 })
		if w := only(t, p); w.Trouble != "" || w.Losses != 0 {
			t.Errorf("path %+v", w)
		}
	})
}

// TestAnswersSayHowLongAgoTheNodeHeardFromTheStore also tests nodes that do not know it and nodes of an earlier
// version, which report nothing. An old answer is not valid.
func TestAnswersSayHowLongAgoTheNodeHeardFromTheStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork()
		b := n.node(t, addrB, Peer{"a", []netip.Addr{addrA}, 1500})
		var silence atomic.Int64 // in ns; -1: unknown
		silence.Store(-1)
		b.o.Silence = func() (time.Duration, bool) { d := silence.Load(); return time.Duration(d), d >= 0 }
		a := n.node(t, addrA, Peer{"b", []netip.Addr{addrB}, 1500})
		check := func(when string, want Silence) {
			t.Helper()
			time.Sleep(time.Minute)
			if got := a.Silences(); len(got) != 1 || got["b"] != want {
				t.Errorf("%s: %+v, want %+v", when, got, want)
			}
		}
		check("not known", Silence{Said: true})
		for _, d := range []time.Duration{0, time.Second, 90 * time.Second, 400 * 24 * time.Hour} {
			silence.Store(int64(d))
			check(d.String(), Silence{For: d, Valid: true, Said: true})
		}
		silence.Store(math.MaxInt64)
		check("never", Silence{For: (math.MaxUint32 - 1) * time.Second, Valid: true, Said: true})
		silence.Store(0)
		time.Sleep(time.Minute)
		n.set(func(netip.Addr, netip.Addr, int) (time.Duration, bool) { return 0, false })
		time.Sleep(time.Minute)
		check("two minutes without an answer", Silence{Said: true})
	})
}

// TestDatapathOfAnEarlierVersionAnswersAndIsAnswered: probes of an earlier version have 40 bytes, and its answers
// contain zeros.
func TestDatapathOfAnEarlierVersionAnswersAndIsAnswered(t *testing.T) {
	p := New(Options{Port: port, Silence: func() (time.Duration, bool) { return time.Minute, true }})
	if err := p.SetPeers([]Peer{{"b", []netip.Addr{addrB}, 1500}}); err != nil {
		t.Fatal(err)
	}
	former := packet{kind: question, size: formerSize, run: 7, sequence: 8, nonce: nonce{9}}.append(nil)
	out, ok := p.receive(former, netip.AddrPortFrom(addrB, port), addrA, time.Now())
	if !ok {
		t.Fatal("its question is not answered")
	}
	want := slices.Clone(former)
	want[5] = byte(answer)
	if got := out.append(nil); !bytes.Equal(got, want) {
		t.Errorf("answer %x, want %x", got, want)
	}
	asked, _ := p.step(time.Now())
	back := asked[0].append(nil)
	back[5] = byte(answer)
	p.receive(back, netip.AddrPortFrom(addrB, port), addrA, time.Now())
	if got := p.Silences()["b"]; got != (Silence{Said: true}) {
		t.Errorf("its answer reports %+v", got)
	}
}

// TestPathMTUIsFoundAndHeals changes the MTU of paths in one or both directions. The result must only depend on the
// last state of the path.
func TestPathMTUIsFoundAndHeals(t *testing.T) {
	for _, direction := range []string{"there", "back"} {
		synctest.Test(t, func(t *testing.T) {
			n := newNetwork()
			p := n.pair(t)
			time.Sleep(time.Second)
			for _, mtu := range []int{1400, 1500, 1280, 1499, 1281, 1279, 600, 1500, 74, 1450} {
				n.set(func(from, _ netip.Addr, size int) (time.Duration, bool) {
					return time.Millisecond, size <= mtu || direction == "there" == (from == addrB) && size <= 1500
				})
				took := within(t, 3*time.Minute, fmt.Sprint(direction, " ", mtu), func() bool {
					w := only(t, p)
					return w.MTU == mtu && !w.Searching
				})
				w := only(t, p)
				want := fmt.Sprintf("path MTU %d < 1500 expected", mtu)
				if mtu == 1500 {
					want = ""
				}
				if w.State != Reachable || w.Trouble != want || w.Losses != 0 {
					t.Errorf("%s, %d: %+v", direction, mtu, w)
				}
				t.Logf("%s %d after %s", direction, mtu, took)
			}
		})
	}
}

func TestBlackHoleIsReportedBeforeItsSizeIsFound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork()
		p := n.pair(t)
		time.Sleep(time.Minute)
		n.set(func(_, _ netip.Addr, size int) (time.Duration, bool) { return time.Millisecond, size <= 1400 })
		within(t, 30*time.Second, "trouble", func() bool { return only(t, p).Trouble != "" })
		w := only(t, p)
		if !w.Searching || w.State != Reachable || !strings.HasPrefix(w.Trouble, "packets of 1500 bytes are lost") {
			t.Errorf("path %+v", w)
		}
	})
}

// TestRandomLossIsNoPathMTU drops every twentieth packet for an hour.
func TestRandomLossIsNoPathMTU(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork()
		n.carry = func(_, _ netip.Addr, size int) (time.Duration, bool) {
			return time.Millisecond, size <= 1500 && rand.IntN(20) > 0
		}
		p := n.pair(t)
		away, lost := 0, 0
		for range 3600 {
			time.Sleep(time.Second)
			w := only(t, p)
			lost = max(lost, w.Lost)
			if w.State != Reachable {
				away++
			} else if w.Trouble != "" {
				t.Fatalf("path %+v", w)
			}
		}
		w := only(t, p)
		// A probe or its answer is lost in a tenth of all rounds, and three in a row in a thousandth of them; the next
		// answer ends that.
		if away > 60 {
			t.Errorf("not reachable in %d of 3600 seconds; now %+v", away, w)
		}
		if w.Asked != 64 || lost == 0 || lost > 30 {
			t.Errorf("at most %d of the last %d were lost, want about a tenth of 64", lost, w.Asked)
		}
		// Without loss, all effects disappear.
		n.set(func(_, _ netip.Addr, size int) (time.Duration, bool) { return time.Millisecond, size <= 1500 })
		within(t, 2*time.Minute, "well", func() bool { w := only(t, p); return w.Trouble == "" && w.MTU == 1500 })
	})
}

func TestWithoutExpectedMTUOnlySmallQuestionsAreAsked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork()
		n.node(t, addrB, Peer{"a", []netip.Addr{addrA}, 0})
		p := n.node(t, addrA, Peer{"b", []netip.Addr{addrB}, 0})
		time.Sleep(5 * time.Minute)
		c := p.State().Counts
		if w := only(t, p); w.State != Reachable || w.MTU != 0 || w.Trouble != "" {
			t.Errorf("path %+v", w)
		}
		if c.Asked[Large] != 0 || c.Asked[Small] < 50 {
			t.Errorf("counts %+v", c)
		}
		// The MTU becomes known later, and changes.
		for _, mtu := range []int{1500, 9000, 1400} {
			if err := p.SetPeers([]Peer{{"b", []netip.Addr{addrB}, mtu}}); err != nil {
				t.Fatal(err)
			}
			within(t, 3*time.Minute, fmt.Sprint(mtu), func() bool {
				w := only(t, p)
				return w.MTU == min(mtu, 1500) && !w.Searching && w.ExpectedMTU == mtu
			})
		}
	})
}

func TestPeersComeAndGo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork()
		p := n.pair(t)
		n.node(t, addrC, Peer{"a", []netip.Addr{addrA}, 1500})
		time.Sleep(time.Second)
		since := only(t, p).Since
		set := func(peers ...Peer) {
			t.Helper()
			if err := p.SetPeers(peers); err != nil {
				t.Fatal(err)
			}
		}
		b, c := Peer{"b", []netip.Addr{addrB}, 1500}, Peer{"c", []netip.Addr{addrC}, 1500}
		set(c, b)
		within(t, 100*time.Millisecond, "c", func() bool { return p.State().Answering == 2 })
		if s := p.State(); s.Paths[0].Node != "b" || s.Paths[0].Since != since {
			t.Errorf("unchanged paths were reset: %+v", s.Paths)
		}
		set(c)
		if w := only(t, p); w.Node != "c" || w.State != Reachable {
			t.Errorf("path %+v", w)
		}
		// Another node has the address of a removed one, while a probe is pending.
		set(Peer{"d", []netip.Addr{addrC}, 1500})
		if w := only(t, p); w.Node != "d" || w.State != Unknown {
			t.Errorf("path %+v", w)
		}
		within(t, 100*time.Millisecond, "d", func() bool { return p.State().Answering == 1 })
		set(Peer{"d", []netip.Addr{addrB}, 1500})
		if w := only(t, p); w.Address != addrB || w.State != Unknown {
			t.Errorf("path %+v", w)
		}
		within(t, 100*time.Millisecond, "d at another address", func() bool { return p.State().Answering == 1 })
		set(Peer{Name: "nowhere"})
		if s := p.State(); s.Nodes != 0 || len(s.Paths) != 0 {
			t.Errorf("state %+v", s)
		}
		set()
		before := p.State().Counts.Asked
		time.Sleep(time.Hour)
		if after := p.State().Counts.Asked; after != before {
			t.Errorf("without peers, %v questions became %v", before, after)
		}
		if err := p.SetPeers(make([]Peer, MaxPeers+1)); err == nil {
			t.Error("too many peers are no error")
		}
	})
}

func TestNoPortIsOpenWithoutPeers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork()
		p := n.node(t, addrA)
		open := func() bool {
			n.mu.Lock()
			defer n.mu.Unlock()
			return n.socks[addrA] != nil
		}
		time.Sleep(time.Hour)
		if open() {
			t.Error("open without a peer")
		}
		if err := p.SetPeers([]Peer{{"b", []netip.Addr{addrB}, 1500}}); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if !open() {
			t.Error("not open with a peer")
		}
	})
}

// TestSocketThatIsNotOpenIsTheTrouble: if the socket cannot be opened, this is the reported problem, and opening is
// retried.
func TestSocketThatIsNotOpenIsTheTrouble(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork()
		n.node(t, addrB, Peer{"a", []netip.Addr{addrA}, 1500})
		var mu sync.Mutex
		taken := true
		p := New(Options{Port: port, Listen: func(f Family) (Conn, error) {
			mu.Lock()
			defer mu.Unlock()
			if taken || f == IPv6 {
				return nil, syscall.EADDRINUSE
			}
			return n.listen(addrA), nil
		}})
		if err := p.SetPeers([]Peer{{"b", []netip.Addr{addrB}, 1500}}); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- p.Run(ctx) }()
		time.Sleep(time.Minute)
		if w := only(t, p); w.State != Unreachable || w.Trouble != syscall.EADDRINUSE.Error() {
			t.Errorf("path %+v", w)
		}
		mu.Lock()
		taken = false
		mu.Unlock()
		within(t, 20*time.Second, "reachable", func() bool {
			w := only(t, p)
			return w.State == Reachable && w.Trouble == ""
		})
		cancel()
		<-done
	})
}

// TestQuestionsComeFromTheFirstAddressOfAFamily: the node is registered with that address, and other nodes only answer
// registered addresses.
func TestQuestionsComeFromTheFirstAddressOfAFamily(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork()
		p := n.node(t, addrA)
		p.SetLocal([]netip.Addr{netip.MustParseAddr("fd00::1"), addrA, addrC})
		if err := p.SetPeers([]Peer{{"b", []netip.Addr{addrB}, 1500}}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		if n.total(addrA) == 0 || n.total(addrC) != 0 {
			t.Errorf("%d bytes from the first address and %d from the second", n.total(addrA), n.total(addrC))
		}
	})
}

// TestSocketIsTriedAgainWhenItIsDue: opening the socket is retried at the due time, also if the loop runs for other
// reasons before.
func TestSocketIsTriedAgainWhenItIsDue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		var mu sync.Mutex
		var tried []time.Duration
		p := New(Options{Port: port, Listen: func(Family) (Conn, error) {
			mu.Lock()
			defer mu.Unlock()
			tried = append(tried, time.Since(began))
			return nil, syscall.EADDRINUSE
		}})
		if err := p.SetPeers([]Peer{{"b", []netip.Addr{addrB}, 1500}}); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- p.Run(ctx) }()
		time.Sleep(3*reopening + time.Second)
		cancel()
		<-done
		for i, at := range tried {
			if at != time.Duration(i)*reopening {
				t.Errorf("tried at %v, want every %s", tried, reopening)
				break
			}
		}
		if len(tried) != 4 {
			t.Errorf("tried %d times", len(tried))
		}
	})
}
