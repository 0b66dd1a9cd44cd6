// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package servicemap

import (
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"testing"
	"time"

	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
	"github.com/sluice-net/sluice/services/datapath/internal/service/frontendtx"
)

// nodePort returns a NodePort without source ranges and without a separate list for outside.
func nodePort(port uint16, is6 bool, inside *frontend.List) *frontend.Frontend {
	addr := netip.IPv4Unspecified()
	if is6 {
		addr = netip.IPv6Unspecified()
	}
	return &frontend.Frontend{
		Key:  frontend.Key{Addr: addr, Port: port, Protocol: frontend.TCP, Node: true},
		Kind: frontend.NodePort, Service: fmt.Sprintf("shop/web%d:http", port), Inside: inside,
	}
}

// fill adds NodePorts until one is refused, and returns them.
func (i *instance) fill(t *testing.T, is6 bool) state {
	t.Helper()
	s := state{}
	for port := uint16(30000); ; port++ {
		f := nodePort(port, is6, listOf(is6, int(port)%10))
		res, err := i.Apply(t.Context(), state{f.Key: f}.all())
		if err != nil {
			t.Fatal(err)
		}
		if len(res.Refused) > 0 {
			i.apply(t, state{f.Key: f}.to(state{}))
			return s
		}
		s[f.Key] = f
	}
}

// TestKernelNewFrontendsWithoutRoomRefuseConnections: when a map is full, packets to a new frontend must not reach
// another socket of the node, or leave it. The frontend is served when there is space, and removing it removes all its
// entries.
func TestKernelNewFrontendsWithoutRoomRefuseConnections(t *testing.T) {
	for name, sz := range map[string]sizes{
		"keys":     {keys: 64, fronts: 512, members: 512, backends: 256},
		"fronts":   {keys: 512, fronts: 64, members: 512, backends: 256},
		"members":  {keys: 512, fronts: 512, members: 16, backends: 256},
		"backends": {keys: 512, fronts: 512, members: 512, backends: 16},
	} {
		for _, is6 := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, IPv6 %t", name, is6), func(t *testing.T) {
				dir := kerneltest.NewBPFFS(t)
				i := start(t, dir, sz)
				find := func(k frontend.Key, outside bool) *leads { return reader{t, i}.find(k, outside) }
				s := state{}
				if name == "keys" || name == "fronts" {
					s = i.fill(t, is6)
				}
				var many []int // more than fit
				for n := range 15 {
					many = append(many, 100+n)
				}
				cluster, lb := service(1, is6, listOf(is6, many...)), service(2, is6, listOf(is6, many...))
				lb.Kind = frontend.LoadBalancer
				node := nodePort(31000, is6, listOf(is6, many...))
				news := state{cluster.Key: cluster, lb.Key: lb, node.Key: node}
				refuses := func(what string) {
					t.Helper()
					for _, f := range []*frontend.Frontend{cluster, lb} {
						if is, err := i.IsOfServices(f.Key.Addr); err != nil || !is {
							t.Errorf("%s: the address of %v is a virtual IP: %t, %v", what, f.Key, is, err)
						}
					}
					for _, outside := range []bool{false, true} {
						if l := find(node.Key, outside); l == nil || len(l.backends) > 0 {
							t.Errorf("%s: at the node port, outside %t: %+v, want a front without backends", what, outside, l)
						}
					}
					i.sound(t)
				}
				for n := range 3 { // repeatedly, as a follower does
					res, err := i.Apply(t.Context(), news.all())
					if err != nil || len(res.Refused) != len(news) {
						t.Fatalf("%+v, %v, want %d refusals", res, err, len(news))
					}
					for _, r := range res.Refused {
						var room *frontendtx.NoRoomError
						if !errors.As(r.Err, &room) || room.Open {
							t.Errorf("%v: %v, want one about capacity, and that it is closed", r.Key, r.Err)
						}
					}
					if n > 0 && res.Changed > 0 {
						t.Errorf("%d changes for an unchanged transaction", res.Changed)
					}
					refuses("in the same process")
				}
				keys, err := i.Keys()
				if err != nil || len(keys) != len(s)+len(news) {
					t.Errorf("%d keys (%v), want %d, including frontends that did not fit", len(keys), err, len(s)+len(news))
				}
				i.close(t)
				i = start(t, dir, sz)
				refuses("before all frontends are named, in the next process")
				all := state{}
				for _, part := range []state{s, news} {
					for k, f := range part {
						all[k] = f
					}
				}
				if _, err := i.Apply(t.Context(), all.all()); err != nil {
					t.Fatal(err)
				}
				refuses("in the next process")
				i.apply(t, all.to(s))
				s.check(t, i)
				i.sound(t)
				// a frontend that fits is served
				if _, err := i.Apply(t.Context(), news.all()); err != nil {
					t.Fatal(err)
				}
				i.apply(t, all.to(news.without(lb.Key, node.Key)))
				for range 2 { // the IDs of removed elements are in quarantine
					if _, err := i.Collect(t.Context(), nil); err != nil {
						t.Fatal(err)
					}
					i.clock = i.clock.Add(time.Hour)
				}
				cluster.Inside = listOf(is6, 100)
				i.apply(t, state{cluster.Key: cluster}.all())
				state{cluster.Key: cluster}.check(t, i)
				i.sound(t)
			})
		}
	}
}

// without returns the state without some frontends.
func (s state) without(keys ...frontend.Key) state {
	less := state{}
	for k, f := range s {
		less[k] = f
	}
	for _, k := range keys {
		delete(less, k)
	}
	return less
}

// TestKernelRefusedFrontendsLeaveRoomForOthers: refused frontends use at most half of the reserve for changes of
// existing ones. Beyond that, the refusal states that packets pass.
func TestKernelRefusedFrontendsLeaveRoomForOthers(t *testing.T) {
	i := start(t, kerneltest.NewBPFFS(t), sizes{keys: 128, fronts: 128, members: 64, backends: 64})
	s := i.fill(t, false)
	free := func() int { return min(i.store.keyRoom(ip4), i.store.frontNumbers.Free()) }
	before, open, closed := free(), 0, 0
	for n := range 64 {
		for _, f := range []*frontend.Frontend{
			service(n, false, listOf(false, 1)), nodePort(uint16(31000+n), false, listOf(false, 1)),
		} {
			res := i.refused(t, state{f.Key: f}.all())
			var room *frontendtx.NoRoomError
			if !errors.As(res.Refused[0].Err, &room) {
				t.Fatal(res.Refused[0].Err)
			}
			if room.Open {
				open++
			} else {
				closed++
			}
		}
	}
	if open == 0 || closed == 0 {
		t.Errorf("%d are closed and %d open, want some of both", closed, open)
	}
	if left := free(); left < before/2-1 {
		t.Errorf("%d of %d places are left for frontends that are there", left, before)
	}
	for k, f := range s {
		if got := (reader{t, i}).find(k, false); !reflect.DeepEqual(got, wanted(f, false)) {
			t.Fatalf("%v: %+v", k, got)
		}
	}
	i.sound(t)
}
