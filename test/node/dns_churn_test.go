// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/sluice-net/sluice/devnode"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// Names of the churn. Ten names share 16 addresses, as the names of one CDN do: a subject's table has at most 16,384.
const (
	churnAddresses = 16
	churnAnswered  = 8
	churnSharing   = 10
)

// churnRange has the addresses of the names. All belong to the host outside.
var churnRange = netip.MustParsePrefix("198.18.0.0/16")

// churn is one run.
type churn struct {
	names   int
	lookups int           // until the end; 0: as long as "lasts"
	lasts   time.Duration // in the long form
	pace    time.Duration // between lookups; 0: none

	asked  []atomic.Uint32 // queries for each name that the server has answered
	done   atomic.Int64    // lookups
	failed atomic.Int64
	kept   atomic.Int64 // exchanges of connections that stay open
}

// address returns one of the 16 addresses of a name.
func (c *churn) address(name, i int) netip.Addr {
	n := name/churnSharing*churnAddresses + i + 256
	return netip.AddrFrom4([4]byte{198, 18, byte(n >> 8), byte(n)})
}

// answer returns 8 of the 16 addresses of a name, which rotate, with a TTL of 5 s.
func (c *churn) answer(query dnsmessage.Message) []byte {
	q := query.Questions[0]
	label, rest, _ := strings.Cut(q.Name.String(), ".")
	name, err := strconv.Atoi(strings.TrimPrefix(label, "c"))
	if err != nil || rest != "service.example." || name >= len(c.asked) {
		return nil
	}
	first := int(c.asked[name].Add(1)) * 3
	query.Response, query.RecursionAvailable = true, true
	for i := range churnAnswered {
		a := c.address(name, (first+i)%churnAddresses)
		query.Answers = append(query.Answers, dnsmessage.Resource{
			Header: dnsmessage.ResourceHeader{Name: q.Name, Class: q.Class, TTL: 5}, Body: &dnsmessage.AResource{A: a.As4()},
		})
	}
	b, err := query.Pack()
	if err != nil {
		return nil
	}
	return b
}

// TestAddressesThatRotateAreNeverDenied resolves names whose answers rotate, and connects to answered addresses. No
// connection is dropped. Some connections stay open, to names that are not asked for again: in the long form for longer
// than an address is kept without a connection. With SLUICE_TEST_CHURN,
// a duration, it runs for that long with 10,000 names, and the memory of the processes must stay flat.
func TestAddressesThatRotateAreNeverDenied(t *testing.T) {
	c := &churn{names: 200, lookups: 1000}
	if text := os.Getenv("SLUICE_TEST_CHURN"); text != "" {
		lasts, err := time.ParseDuration(text)
		if err != nil {
			t.Fatalf("SLUICE_TEST_CHURN: %v", err)
		}
		c.names, c.lookups, c.lasts, c.pace = 10_000, 0, lasts, time.Second/300
	} else {
		t.Parallel()
	}
	// The pod asks once for each name to which a connection stays open.
	const stay = 8
	c.asked = make([]atomic.Uint32, c.names+stay*churnSharing)
	n := newNode(t, func(o *devnode.Options) {
		o.Args = map[string][]string{devnode.Policy: {"--names-grace=1s"}}
	})
	client := n.addPods(t, "client")[0]
	s := &nameServer{world: n.outside(t)}
	s.forge = func(query dnsmessage.Message, _ netip.AddrPort, send func([]byte)) bool {
		if b := c.answer(query); b != nil {
			send(b)
		}
		return true
	}
	n.awaitProxy(t)
	s.start(t, n)
	s.own(t, n, churnRange)
	enforce(t, n.policies(t), namesPolicy)
	drops := n.observe(t, &datapathv1.ObserveRequest{Reasons: []datapathv1.Reason{policyDenied}})

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var open sync.WaitGroup
	for i := range stay {
		r := newResolver(t, client, netip.AddrPortFrom(s.world.IPv4, 53))
		_, addresses, err := r.ask(fmt.Sprintf("c%d.service.example.", c.names+i*churnSharing), dnsmessage.TypeA, 3)
		if err != nil || len(addresses) != churnAnswered {
			t.Fatalf("before the churn: %v, %v", addresses, err)
		}
		open.Go(func() { c.stay(ctx, t, client, netip.AddrPortFrom(addresses[0], servedPort)) })
	}
	c.run(t, n, client, netip.AddrPortFrom(s.world.IPv4, 53))
	cancel()
	open.Wait()
	if denied := drops.since(0); len(denied) > 0 {
		t.Errorf("%d packets to answered addresses were denied, the first: %v", len(denied), denied[0])
	}
	t.Logf("%d names, %d lookups with a connection each, %d failed; %d exchanges of connections that stayed open",
		c.names, c.done.Load(), c.failed.Load(), c.kept.Load())
}

// stay keeps a connection open until the context ends.
func (c *churn) stay(ctx context.Context, t *testing.T, client pod.Pod, to netip.AddrPort) {
	conn, err := client.Dial(ctx, to)
	if err != nil {
		t.Errorf("a connection that stays open: %v", err)
		return
	}
	defer conn.Close()
	for {
		limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
		err := say(limited, conn, "hello")
		cancel()
		if err != nil {
			t.Errorf("a connection that stays open, to %s: %v", to, err)
			return
		}
		c.kept.Add(1)
		select {
		case <-ctx.Done():
			return
		case <-time.After(time.Second):
		}
	}
}

// run makes the lookups.
func (c *churn) run(t *testing.T, n *testNode, client pod.Pod, server netip.AddrPort) {
	t.Helper()
	const workers = 8
	tickets := make(chan int)
	var running sync.WaitGroup
	for range workers {
		r := newResolver(t, client, server)
		running.Go(func() {
			for i := range tickets {
				name := fmt.Sprintf("c%d.service.example.", i%c.names)
				_, addresses, err := r.ask(name, dnsmessage.TypeA, 3)
				if err == nil && len(addresses) != churnAnswered {
					err = fmt.Errorf("%d addresses", len(addresses))
				}
				if err == nil {
					to := netip.AddrPortFrom(addresses[rand.IntN(len(addresses))], servedPort) //nolint:gosec // no secret
					ctx, cancel := context.WithTimeout(t.Context(), patience)
					err = talk(ctx, client, to)
					cancel()
				}
				if err != nil {
					c.failed.Add(1)
					t.Errorf("lookup %d: %s: %v", i, name, err)
				}
				c.done.Add(1)
			}
		})
	}
	began, noted := time.Now(), time.Now()
	flat := newFlatness(n)
	for i := 0; c.lookups > 0 && i < c.lookups || c.lookups == 0 && time.Since(began) < c.lasts; i++ {
		if c.failed.Load() > 20 {
			t.Error("the churn ends early")
			break
		}
		tickets <- i
		time.Sleep(c.pace) // the rate of lookups
		if c.lookups == 0 && time.Since(noted) >= 30*time.Second {
			noted = time.Now()
			flat.note(t, time.Since(began), c.done.Load())
		}
	}
	close(tickets)
	running.Wait()
	if c.lookups == 0 {
		flat.check(t)
	}
}

// flatness has the memory of the processes of a node during a run.
type flatness struct {
	n    *testNode
	size map[string][]int // resident, in KiB
}

func newFlatness(n *testNode) *flatness { return &flatness{n: n, size: make(map[string][]int)} }

var churnServices = []string{devnode.DNS, devnode.Policy, devnode.Datapath}

func (f *flatness) note(t *testing.T, at time.Duration, lookups int64) {
	t.Helper()
	line := fmt.Sprintf("after %s, %d lookups:", at.Round(time.Second), lookups)
	for _, service := range churnServices {
		size, err := f.resident(service)
		if err != nil {
			t.Fatalf("memory of %s: %v", service, err)
		}
		f.size[service] = append(f.size[service], size)
		line += fmt.Sprintf(" %s %d KiB", service, size)
	}
	t.Log(line)
}

func (f *flatness) resident(service string) (size int, err error) {
	pid, err := f.n.PID(service)
	if err != nil {
		return 0, err
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	_, rest, found := strings.Cut(string(b), "VmRSS:")
	if !found {
		return 0, errors.New("no VmRSS")
	}
	_, err = fmt.Sscan(rest, &size)
	return size, err
}

// check compares the last quarter of a run with its second quarter, by which all names are known: the largest size
// grows by at most an eighth and 4 MiB.
func (f *flatness) check(t *testing.T) {
	t.Helper()
	for service, sizes := range f.size {
		if len(sizes) < 8 {
			continue
		}
		quarter := len(sizes) / 4
		early, late := most(sizes[quarter:2*quarter]), most(sizes[len(sizes)-quarter:])
		if late > early+early/8+4096 {
			t.Errorf("%s has grown from %d to %d KiB", service, early, late)
		}
	}
}

func most(list []int) (out int) {
	for _, n := range list {
		out = max(out, n)
	}
	return out
}
