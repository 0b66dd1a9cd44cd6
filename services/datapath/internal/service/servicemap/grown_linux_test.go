// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package servicemap

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
	"github.com/sluice-net/sluice/services/datapath/internal/service/frontendtx"
)

// former are the sizes of the previous version: see pin.earlierSizes.
var former = sizes{members: 262_144, backends: 131_072}

// numbers returns the numbers of the backends by address.
func (i *instance) numbers() map[netip.AddrPort]string {
	out := map[netip.AddrPort]string{}
	for fam := range families {
		for addr, b := range i.store.backends[fam] {
			out[addr] = fmt.Sprintf("%d, generation %d, gone %t", b.number, b.gen, b.gone)
		}
	}
	return out
}

// TestKernelServicesSurviveAnUpgradeToLargerMaps: the previous version has smaller arrays of members and backends. An
// upgrade finds the same backends under the same numbers, because sockets and translations refer to them, and so does
// a rollback, whose changes the next upgrade finds.
func TestKernelServicesSurviveAnUpgradeToLargerMaps(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	dir, s := kerneltest.NewBPFFS(t), state{}
	numbers := map[netip.AddrPort]string{}
	for n, sz := range []sizes{former, {}, {}, former, {}} {
		i := open(t, dir, sz)
		for addr, want := range numbers {
			if got := i.numbers()[addr]; got != want {
				t.Errorf("process %d: backend %v has number %s, want %s", n, addr, got, want)
			}
		}
		i.close(t)
		i = start(t, dir, sz)
		s.check(t, i)
		i.sound(t)
		next := randomState(r, 60)
		i.apply(t, s.to(next))
		s = next
		s.check(t, i)
		i.sound(t)
		numbers = map[netip.AddrPort]string{}
		for _, f := range s {
			for _, l := range []*frontend.List{f.Inside, f.Outside} {
				if l == nil {
					continue
				}
				for _, b := range l.Backends {
					numbers[b.AddrPort] = i.numbers()[b.AddrPort]
				}
			}
		}
		i.close(t)
	}
}

// TestKernelProgramsOfThePreviousVersionFindNewBackends: until every device has the new programs, the programs of the
// previous version read its smaller arrays. Therefore each change is written there, too.
func TestKernelProgramsOfThePreviousVersionFindNewBackends(t *testing.T) {
	dir := kerneltest.NewBPFFS(t)
	was := start(t, dir, former)
	i := start(t, dir, sizes{})
	s := state{}
	for n := range 20 {
		f := service(n, n%2 == 0, listOf(n%2 == 0, n, n+1))
		s[f.Key] = f
	}
	i.apply(t, s.all())
	for k, f := range s {
		for _, outside := range []bool{false, true} {
			got, want := (reader{t, was}).find(k, outside), wanted(f, outside)
			if got == nil || fmt.Sprint(got.backends) != fmt.Sprint(want.backends) {
				t.Errorf("%v, outside %t: the previous version finds %+v, want %+v", k, outside, got, want)
			}
		}
	}
}

// manyBackends are the backends that the default limits promise.
const manyBackends = 280_000

// TestKernelMapsHoldTheirLimitOfBackends fills the maps of the default sizes: 280,000 backends of one family, each in
// two lists of its frontend. A further frontend is refused, and those that exist can still change.
func TestKernelMapsHoldTheirLimitOfBackends(t *testing.T) {
	for _, is6 := range []bool{false, true} {
		t.Run(fmt.Sprintf("IPv6 %t", is6), func(t *testing.T) {
			const each = 50
			i := start(t, kerneltest.NewBPFFS(t), sizes{})
			c, ok := i.Capacity()
			if !ok || c.Backends < manyBackends || c.Members < 2*manyBackends {
				t.Fatalf("the maps report %+v, want %d backends, each in two lists", c, manyBackends)
			}
			backend := func(n int) frontend.Backend {
				n %= manyBackends
				a := netip.AddrFrom4([4]byte{10, byte(n >> 16), byte(n >> 8), byte(n)})
				if is6 {
					a = netip.AddrFrom16([16]byte{0: 0xfd, 13: byte(n >> 16), 14: byte(n >> 8), 15: byte(n)})
				}
				return frontend.Backend{AddrPort: netip.AddrPortFrom(a, 8080)}
			}
			list := func(first int) *frontend.List {
				l := &frontend.List{}
				for n := range each {
					l.Backends = append(l.Backends, backend(first+n))
				}
				slices.SortFunc(l.Backends, func(a, b frontend.Backend) int { return a.AddrPort.Compare(b.AddrPort) })
				return l
			}
			tx := &frontendtx.Transaction{}
			for n := range manyBackends / each {
				f := service(n, is6, list(n*each))
				f.Kind, f.Outside = frontend.LoadBalancer, list(n*each+each/2)
				tx.Upsert(f)
			}
			i.apply(t, tx)
			counts, err := i.Counts()
			if err != nil || counts.Backends != manyBackends || counts.Members != 2*manyBackends {
				t.Errorf("%+v, %v, want %d backends and twice as many members", counts, err, manyBackends)
			}
			i.sound(t)

			more := &frontend.List{}
			for n := range c.Backends - manyBackends + 1 {
				a := netip.AddrPortFrom(backend(n).Addr(), 9090)
				more.Backends = append(more.Backends, frontend.Backend{AddrPort: a})
			}
			tx = &frontendtx.Transaction{}
			tx.Upsert(service(60_000, is6, more))
			res, err := i.Apply(t.Context(), tx)
			if err != nil || len(res.Refused) != 1 {
				t.Fatalf("%+v, %v, want a refusal", res, err)
			}
			want := bpf.MapsMapSlBe4
			if is6 {
				want = bpf.MapsMapSlBe6
			}
			var room *frontendtx.NoRoomError
			if !errors.As(res.Refused[0].Err, &room) || room.Map != want {
				t.Errorf("%v, want that %s is full", res.Refused[0].Err, want)
			}
			existing := service(0, is6, more)
			existing.Kind, existing.Outside = frontend.LoadBalancer, list(each/2)
			tx = &frontendtx.Transaction{}
			tx.Upsert(existing)
			i.apply(t, tx)
		})
	}
}
