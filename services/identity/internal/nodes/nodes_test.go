// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package nodes

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/registry"
	"github.com/sluice-net/sluice/services/identity/internal/test/storetest"
)

// records keep the holds of one process for the next.
type records struct {
	mu    sync.Mutex
	holds allocator.Holds // guarded by mu
	full  error           // guarded by mu
}

func (r *records) SaveHolds(c allocator.HoldsChange) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.full == nil {
		r.holds.Holders = append(r.holds.Holders, c.Put...)
	}
	return r.full
}

func (r *records) fail(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.full = err
}

func (*records) NoteKnown(allocator.KnownChange) error        { return nil }
func (*records) SaveKnown(func() allocator.KnownChange) error { return nil }
func (*records) SaveRegistration(registry.Registration) error { return nil }

func (*records) SavePins([]registry.Pin) error { return nil }

// process is one run of the service.
type process struct {
	t          *testing.T
	identities *watch.Hub[identity.Numeric, identity.Identity]
	cluster    *watch.Hub[registry.Key, registry.Item]
	registry   *registry.Registry
	servers    *APIServers
	labels     *Labels

	mu      sync.Mutex
	at      []netip.Addr  // guarded by mu; addresses of the API servers
	changed chan struct{} // guarded by mu
}

func start(t *testing.T, r *records, underlay *registry.Underlay, servers ...string) *process {
	p := &process{
		t: t, changed: make(chan struct{}),
		identities: watch.NewHub[identity.Numeric](watch.Options[identity.Identity]{Equal: identity.Identity.Equal}),
		cluster:    watch.NewHub[registry.Key](watch.Options[registry.Item]{Equal: registry.Item.Equal}),
	}
	p.set(servers...)
	endpoints := watch.NewHub[allocator.Holder](watch.Options[allocator.Endpoint]{Equal: allocator.Endpoint.Equal})
	discard := slog.New(slog.DiscardHandler)
	alloc, err := allocator.New(allocator.Config{Quota: 10, Log: discard}, storetest.NewFake().Node("n1"), r,
		p.identities, endpoints, r.holds, allocator.Known{}, false)
	if err != nil {
		t.Fatal(err)
	}
	p.registry = registry.New(registry.Config{Node: "n1", Incarnation: "i", NodeLabels: true, Log: discard}, nil, r, p.cluster,
		registry.Registration{Underlay: underlay})
	p.servers = NewAPIServers(t.Context(), p.addresses, alloc, p.registry, discard)
	p.labels = NewLabels(t.Context(), alloc, p.registry, discard)
	return p
}

// run keeps the identities until the returned function is called.
func (p *process) run() (stop func()) {
	ctx, cancel := context.WithCancel(p.t.Context())
	var running sync.WaitGroup
	for _, run := range []func(context.Context) error{p.servers.Run, p.labels.Run} {
		running.Go(func() {
			if err := run(ctx); err != nil {
				p.t.Error(err)
			}
		})
	}
	return func() {
		cancel()
		running.Wait()
	}
}

func (p *process) addresses() ([]netip.Addr, <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.at), p.changed
}

func (p *process) set(servers ...string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.at = nil
	for _, a := range servers {
		p.at = append(p.at, netip.MustParseAddr(a))
	}
	close(p.changed)
	p.changed = make(chan struct{})
}

// at returns an underlay with an address.
func at(a string) *registry.Underlay {
	return &registry.Underlay{Addresses: []netip.Addr{netip.MustParseAddr(a)}}
}

// moveTo gives the node another address.
func (p *process) moveTo(a string) {
	p.t.Helper()
	if _, _, err := p.registry.Register(p.t.Context(), registry.Registration{Underlay: at(a)}, false); err != nil {
		p.t.Fatal(err)
	}
}

// of returns the node and the labels of an address, as readers of both watches know them.
func (p *process) of(address string) (on, labels string) {
	a := netip.MustParseAddr(address)
	item, ok := p.cluster.Get(registry.Key{Prefix: netip.PrefixFrom(a, a.BitLen())})
	if !ok {
		return "", ""
	}
	id, ok := p.identities.Get(item.Identity)
	if !ok {
		p.t.Errorf("%s has the identity %d, which was not published", address, item.Identity)
	}
	return item.On, strings.TrimSuffix(strings.ReplaceAll(id.Labels.Text(), "reserved:", ""), "=;")
}

func (p *process) host() string {
	id, _ := p.identities.Get(identity.Host)
	return id.Labels.Text()
}

const (
	aloneText = "reserved:host=;"
	bothText  = "reserved:host=;reserved:kube-apiserver=;"
)

func TestServersHaveTheLabelWhereverTheyRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &records{}
		p := start(t, r, nil, "192.0.2.2", "192.0.2.3", "fd00::3", "127.0.0.1")
		defer p.run()()
		p.registry.Observe(registry.Update{Complete: true, Nodes: []registry.NodeKey{{
			Name: "n2", Created: 1, Record: registry.Record{Incarnation: "o", Underlay: *at("192.0.2.2")},
		}}})
		p.moveTo("192.0.2.1")
		check := func(when string, want map[string][2]string, host string) {
			t.Helper()
			synctest.Wait()
			for address, w := range want {
				if on, labels := p.of(address); on != w[0] || labels != w[1] {
					t.Errorf("%s: %s is on %q and has %q, want %q", when, address, on, labels, w)
				}
			}
			if p.host() != host {
				t.Errorf("%s: the host is %s, want %s", when, p.host(), host)
			}
		}
		check("at first", map[string][2]string{
			"192.0.2.2": {"n2", "kube-apiserver=;remote-node"},
			"192.0.2.3": {"", "kube-apiserver=;world-ipv4"},
			"fd00::3":   {"", "kube-apiserver=;world-ipv6"},
			"127.0.0.1": {}, "192.0.2.1": {},
		}, aloneText)

		p.set("192.0.2.1", "192.0.2.3")
		check("with one on this node", map[string][2]string{
			"192.0.2.1": {}, "192.0.2.2": {"n2", "remote-node"},
			"192.0.2.3": {"", "kube-apiserver=;world-ipv4"}, "fd00::3": {},
		}, bothText)
		// The node moves away from that address.
		p.moveTo("192.0.2.9")
		check("with another address of this node",
			map[string][2]string{"192.0.2.1": {"", "kube-apiserver=;world-ipv4"}}, aloneText)
	})
}

func TestServersKeepTheirNumbersOverARestart(t *testing.T) {
	r := &records{}
	here := at("192.0.2.1")
	var number identity.Numeric
	for i := range 2 {
		p := start(t, r, here, "192.0.2.1", "192.0.2.3")
		// Without the loop: what readers see first is right.
		if p.host() != bothText {
			t.Errorf("start %d: the host is %s, want %s", i, p.host(), bothText)
		}
		p.registry.Observe(registry.Update{Complete: true})
		a := netip.MustParseAddr("192.0.2.3")
		item, _ := p.cluster.Get(registry.Key{Prefix: netip.PrefixFrom(a, 32)})
		if item.Identity.Scope() != identity.ScopeNodeLocal || i > 0 && item.Identity != number {
			t.Errorf("start %d: number %d, before %d", i, item.Identity, number)
		}
		number = item.Identity
	}
}

func TestFullDiskDelaysTheIdentities(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &records{}
		r.fail(errors.New("no space"))
		p := start(t, r, &registry.Underlay{}, "192.0.2.3")
		defer p.run()()
		p.registry.Observe(registry.Update{Complete: true})
		synctest.Wait()
		if _, labels := p.of("192.0.2.3"); labels != "" {
			t.Errorf("with a full disk the address has %q", labels)
		}
		r.fail(nil)
		time.Sleep(retry)
		synctest.Wait()
		if _, labels := p.of("192.0.2.3"); labels != "kube-apiserver=;world-ipv4" {
			t.Errorf("with space the address has %q", labels)
		}
	})
}

// node returns a key of another node with an address and labels.
func node(name, address string, revision int64, labels ...string) registry.NodeKey {
	of := map[string]string{}
	for _, l := range labels {
		key, value, _ := strings.Cut(l, "=")
		of[key] = value
	}
	return registry.NodeKey{
		Name: name, Created: 1, Revision: revision,
		Record: registry.Record{Incarnation: "o", Underlay: *at(address), Labels: of},
	}
}

// number of the identity of an address.
func (p *process) number(address string) identity.Numeric {
	item, _ := p.cluster.Get(registry.Key{Prefix: netip.MustParsePrefix(address + "/32")})
	return item.Identity
}

func TestNodesHaveTheirLabels(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := start(t, &records{}, at("192.0.2.1"), "192.0.2.3")
		stop := p.run()
		p.registry.Observe(registry.Update{Complete: true, Revision: 1, Nodes: []registry.NodeKey{
			node("n2", "192.0.2.2", 1, "pool=front", "zone=a"), node("n3", "192.0.2.3", 1, "pool=front", "zone=a"),
			node("n4", "192.0.2.4", 1, "pool=front", "zone=a"), node("n5", "192.0.2.5", 1),
		}})
		check := func(when string, want map[string]string) {
			t.Helper()
			synctest.Wait()
			for address, w := range want {
				if _, labels := p.of(address); labels != w {
					t.Errorf("%s: %s has %q, want %q", when, address, labels, w)
				}
			}
		}
		check("at first", map[string]string{
			"192.0.2.2": "node:pool=front;node:zone=a;remote-node",
			"192.0.2.3": "node:pool=front;node:zone=a;kube-apiserver=;remote-node",
			"192.0.2.5": "remote-node",
		})
		front := p.number("192.0.2.2")
		if front.Scope() != identity.ScopeNodeLocal || p.number("192.0.2.4") != front || p.number("192.0.2.3") == front ||
			p.number("192.0.2.5") != identity.RemoteNode {
			t.Errorf("the numbers are %d, %d and %d, with an API server %d", front, p.number("192.0.2.4"),
				p.number("192.0.2.5"), p.number("192.0.2.3"))
		}

		p.set("192.0.2.2")
		p.registry.Observe(registry.Update{Revision: 2, Nodes: []registry.NodeKey{node("n4", "192.0.2.4", 2, "pool=back")}})
		check("with another server and another pool", map[string]string{
			"192.0.2.2": "node:pool=front;node:zone=a;kube-apiserver=;remote-node",
			"192.0.2.3": "node:pool=front;node:zone=a;remote-node",
			"192.0.2.4": "node:pool=back;remote-node",
		})
		if _, _, err := p.registry.Register(t.Context(),
			registry.Registration{Labels: &map[string]string{"pool": "here"}}, false); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if want := "node:pool=here;" + aloneText; p.host() != want {
			t.Errorf("the host is %s, want %s", p.host(), want)
		}

		// All nodes leave: their numbers are others' a minute later.
		p.registry.Observe(registry.Update{Revision: 3, Removed: []registry.Removal{
			{Node: "n2"}, {Node: "n3"}, {Node: "n4"}, {Node: "n5"},
		}})
		synctest.Wait()
		if _, ok := p.identities.Get(front); !ok {
			t.Error("a number is given back while readers may have it")
		}
		time.Sleep(rest + 2*retry)
		synctest.Wait()
		if id, ok := p.identities.Get(front); ok {
			t.Errorf("%s is unused, but its number is still held", id)
		}
		stop()
	})
}

// TestAddressWaitsForTheNumberOfItsLabels (INV-106): until the labels have a number, the address keeps its former
// identity. It is neither a node without labels nor unknown.
func TestAddressWaitsForTheNumberOfItsLabels(t *testing.T) {
	r := &records{}
	p := start(t, r, at("192.0.2.1"))
	p.registry.Observe(registry.Update{Complete: true, Revision: 1, Nodes: []registry.NodeKey{
		node("n2", "192.0.2.2", 1, "pool=front"),
	}})
	if n := p.number("192.0.2.2"); n != 0 {
		t.Errorf("before its labels have a number the address has %d", n)
	}
	p.labels.apply(t.Context())
	front := p.number("192.0.2.2")
	p.registry.Observe(registry.Update{Revision: 2, Nodes: []registry.NodeKey{node("n2", "192.0.2.2", 2, "pool=back")}})
	if n := p.number("192.0.2.2"); n != front || n == 0 {
		t.Errorf("while the new labels have no number the address has %d, want %d as before", n, front)
	}
	p.labels.apply(t.Context())
	back := p.number("192.0.2.2")
	if _, labels := p.of("192.0.2.2"); back == front || labels != "node:pool=back;remote-node" {
		t.Errorf("with its number the address has %d %s", back, labels)
	}
	// As another process of this boot finds it.
	again := start(t, r, at("192.0.2.1"))
	again.registry.Observe(registry.Update{Complete: true, Revision: 2, Nodes: []registry.NodeKey{
		node("n2", "192.0.2.2", 2, "pool=back"),
	}})
	again.labels.apply(t.Context())
	if n := again.number("192.0.2.2"); n != back {
		t.Errorf("after a restart the number is %d, before %d", n, back)
	}
}

// TestNodesWhoseLabelsHaveNoNumberAreRemoteNodes: nodes have the identity of remote nodes, like nodes without labels,
// if they have more labels than a set may have, if there are more sets than numbers, or if the disk is full.
func TestNodesWhoseLabelsHaveNoNumberAreRemoteNodes(t *testing.T) {
	var many []string
	for i := range 300 {
		many = append(many, fmt.Sprintf("key%d=value", i))
	}
	r := &records{}
	p := start(t, r, at("192.0.2.1"))
	p.registry.Observe(registry.Update{Complete: true, Revision: 1, Nodes: []registry.NodeKey{
		node("n2", "192.0.2.2", 1, many...), node("n3", "192.0.2.3", 1, "pool=front"),
	}})
	p.labels.apply(t.Context())
	if p.number("192.0.2.2") != identity.RemoteNode || p.number("192.0.2.3").Scope() != identity.ScopeNodeLocal {
		t.Errorf("with too many labels the number is %d, of the other %d", p.number("192.0.2.2"), p.number("192.0.2.3"))
	}
	r.fail(errors.New("no space"))
	p.registry.Observe(registry.Update{Revision: 2, Nodes: []registry.NodeKey{node("n4", "192.0.2.4", 2, "pool=back")}})
	if p.labels.apply(t.Context()); p.number("192.0.2.4") != identity.RemoteNode {
		t.Errorf("with a full disk the number is %d", p.number("192.0.2.4"))
	}
	r.fail(nil)
	if p.labels.apply(t.Context()); p.number("192.0.2.4").Scope() != identity.ScopeNodeLocal {
		t.Errorf("with space the number is %d", p.number("192.0.2.4"))
	}
	var nodes []registry.NodeKey
	for i := range identity.NodeLocalSize + 10 {
		address := fmt.Sprintf("198.18.%d.%d", i>>8, i&255)
		nodes = append(nodes, node(fmt.Sprintf("m%d", i), address, 3, fmt.Sprintf("name=%d", i)))
	}
	p.registry.Observe(registry.Update{Revision: 3, Nodes: nodes})
	p.labels.apply(t.Context())
	got := map[identity.Numeric]int{}
	for _, n := range nodes {
		got[p.number(n.Record.Underlay.Addresses[0].String())]++
	}
	if without := got[identity.RemoteNode]; without < 10 || without > 20 || len(got) < identity.NodeLocalSize-10 {
		t.Errorf("of %d nodes with labels of their own %d have no number, and there are %d numbers", len(nodes), without,
			len(got))
	}
}
