// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package apiserver

import (
	"context"
	"errors"
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

// process is what one start of the service has.
type process struct {
	t          *testing.T
	identities *watch.Hub[identity.Numeric, identity.Identity]
	cluster    *watch.Hub[registry.Key, registry.Item]
	registry   *registry.Registry
	follower   *Follower

	mu      sync.Mutex
	servers []netip.Addr  // guarded by mu
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
	p.registry = registry.New(registry.Config{Node: "n1", Incarnation: "i", Log: discard}, nil, r, p.cluster,
		registry.Registration{Underlay: underlay})
	p.follower = New(t.Context(), p.addresses, alloc, p.registry, discard)
	return p
}

func (p *process) addresses() ([]netip.Addr, <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.servers), p.changed
}

func (p *process) set(servers ...string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.servers = nil
	for _, a := range servers {
		p.servers = append(p.servers, netip.MustParseAddr(a))
	}
	close(p.changed)
	p.changed = make(chan struct{})
}

// at is an underlay with an address.
func at(a string) *registry.Underlay {
	return &registry.Underlay{Addresses: []netip.Addr{netip.MustParseAddr(a)}}
}

// moveTo gives the node another address.
func (p *process) moveTo(a string) {
	p.t.Helper()
	if _, _, err := p.registry.Register(p.t.Context(), at(a), nil, nil, false); err != nil {
		p.t.Fatal(err)
	}
}

// of are the node and the labels of an address, as readers of both watches know them.
func (p *process) of(address string) (on, labels string) {
	a := netip.MustParseAddr(address)
	item, ok := p.cluster.Get(registry.Key{Prefix: netip.PrefixFrom(a, a.BitLen())})
	if !ok {
		return "", ""
	}
	id, ok := p.identities.Get(item.Identity)
	if !ok {
		p.t.Errorf("%s has the identity %d, which nobody announced", address, item.Identity)
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
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() {
			if err := p.follower.Run(ctx); err != nil {
				t.Error(err)
			}
		})
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
		cancel()
		running.Wait()
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
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() {
			if err := p.follower.Run(ctx); err != nil {
				t.Error(err)
			}
		})
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
		cancel()
		running.Wait()
	})
}
