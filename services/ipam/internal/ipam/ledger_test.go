// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package ipam

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/ipam/internal/pool"
)

// BenchmarkDecide measures the ledger alone, without a store: allocate, confirm and release one owner while many
// others hold addresses.
func BenchmarkDecide(b *testing.B) {
	for _, c := range []struct {
		cidr string
		fill int
	}{{"10.0.0.0/16", 0}, {"10.0.0.0/16", 60_000}, {"fd00::/64", 0}, {"fd00::/64", 60_000}} {
		b.Run(fmt.Sprintf("%s held=%d", c.cidr, c.fill), func(b *testing.B) {
			pools, err := pool.New("pools", []netip.Prefix{netip.MustParsePrefix(c.cidr)}, nil)
			if err != nil {
				b.Fatal(err)
			}
			now := time.Unix(1_800_000_000, 0)
			l, err := newLedger(pools, nil, &Contents{}, nil, time.Minute, 0, now)
			if err != nil {
				b.Fatal(err)
			}
			for i := range c.fill {
				if _, err := l.allocate(now, Request{Owner: workload.Owner{ContainerID: fmt.Sprint(i), Interface: "eth0"}}); err != nil {
					b.Fatal(err)
				}
			}
			l.takeChanges()
			o := workload.Owner{ContainerID: "benchmark", Interface: "eth0"}
			for b.Loop() {
				a, err := l.allocate(now, Request{Owner: o})
				if err != nil {
					b.Fatal(err)
				}
				if _, err := l.confirm(now, o, []netip.Addr{a.Addresses[0].Addr}); err != nil {
					b.Fatal(err)
				}
				l.release(now, o)
				l.takeChanges()
			}
		})
	}
}
