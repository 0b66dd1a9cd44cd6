// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/names"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/port"
	"github.com/sluice-net/sluice/services/policy/internal/query"
	"github.com/sluice-net/sluice/services/policy/internal/table"
)

// TestExpiredAddressesMakeRoomInAFullTable: the table of a subject is full of learned addresses. A new address is not
// learned while all of them are valid, and takes the place of the oldest ones whose TTL is over otherwise. Addresses
// with a connection stay, and so do the addresses of other namespaces.
func TestExpiredAddressesMakeRoomInAFullTable(t *testing.T) {
	c := &clock{now: time.Now()}
	d, _ := objects(t, t.TempDir(), func(cfg *Config) {
		cfg.Now, cfg.NameGrace, cfg.MaxNames, cfg.MaxAddresses = c.Now, time.Hour, 100, 262_144
	})
	d.complete()
	tenant(t, d.owner)
	world, err := peer.New(9, label.NewSet(label.Reserved(identity.NameWorldIPv4)))
	if err != nil {
		t.Fatal(err)
	}
	if err := d.owner.Identities().SetIdentities(t.Context(), []peer.Identity{world}, nil); err != nil {
		t.Fatal(err)
	}
	for _, namespace := range []string{"evil", "shop"} {
		k := policy.Key{Kind: "CiliumNetworkPolicy", Namespace: namespace, Name: "names"}
		d.apply(map[policy.Key]policy.Written{k: object("cilium.io/v2", k,
			`"spec":{"endpointSelector":{},"egress":[{"toFQDNs":[{"matchPattern":"*.example"}]}]}`)})
	}
	evil, shop := "evil", "shop"
	learn := func(namespace *string, name string, addrs ...netip.Addr) (err error) {
		t.Helper()
		by := names.Asker{Endpoint: uint32(len(*namespace)), Tenant: *namespace, Namespace: namespace}
		if doErr := d.owner.loop.Do(t.Context(), opLearn, func() {
			err = d.owner.Names().learn(by, by.Key(name), addrs, time.Minute)
		}); doErr != nil {
			t.Fatal(doErr)
		}
		return err
	}
	address := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{192, byte(i >> 16), byte(i >> 8), byte(i)}) }
	open := func(a netip.Addr) bool {
		t.Helper()
		x, err := d.owner.Reader().Explain(t.Context(), query.Peer{Identity: 301}, query.Peer{Addr: a}, port.At(port.TCP, 80))
		if err != nil {
			t.Fatal(err)
		}
		return x.Egress.Verdict.Action == policytable.Allow
	}
	if err := learn(&shop, "other.example", address(table.MaxPrefixes+100)); err != nil {
		t.Fatal(err)
	}
	const each = 1024
	for i := 0; i < table.MaxPrefixes; i += each {
		var addrs []netip.Addr
		for k := range each {
			addrs = append(addrs, address(i+k))
		}
		if err := learn(&evil, fmt.Sprintf("n%d.example", i), addrs...); err != nil {
			t.Fatalf("address %d: %v", i, err)
		}
		if i == 0 {
			c.add(time.Second) // the first name ends first
		}
	}
	fresh := address(table.MaxPrefixes + 1)
	if err := learn(&evil, "fresh.example", fresh); !errors.Is(err, failure.ErrLimit) {
		t.Fatalf("an address in addition to %d valid ones: %v", table.MaxPrefixes, err)
	}
	// Its last report names a connection to the first address.
	c.add(5 * time.Minute)
	hold := func(inUse ...netip.Addr) {
		if _, err := d.owner.Names().HoldAddresses(t.Context(), inUse); err != nil {
			t.Fatal(err)
		}
	}
	hold()
	hold(address(0))
	if err := learn(&evil, "fresh.example", fresh); err != nil {
		t.Fatalf("an address in addition to expired ones: %v", err)
	}
	for a, want := range map[netip.Addr]bool{
		fresh: true, address(0): true, address(1): false, address(each): false, address(each + 1): true,
	} {
		if got := open(a); got != want {
			t.Errorf("%s is open: %t, want %t", a, got, want)
		}
	}
	list, err := d.owner.Names().List(t.Context(), names.Filter{Pattern: "other.example"})
	if err != nil || len(list) != 1 {
		t.Errorf("the name of another namespace: %v, %v", list, err)
	}
}
