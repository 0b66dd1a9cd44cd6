// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package lbipam

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

var birth = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// newPool returns a pool of blocks "192.0.2.0/30" or "192.0.2.4-192.0.2.9" that is age seconds younger than birth.
func newPool(t *testing.T, name string, age int, blocks ...string) *Pool {
	t.Helper()
	var all []Block
	for _, b := range blocks {
		if start, stop, ok := strings.Cut(b, "-"); ok {
			all = append(all, Block{Start: start, Stop: stop})
		} else {
			all = append(all, Block{CIDR: b})
		}
	}
	ranges, faults := NewRanges(all, true)
	if len(faults) > 0 {
		t.Fatal(faults)
	}
	return &Pool{Name: name, UID: "uid-" + name, Created: birth.Add(time.Duration(age) * time.Second), Ranges: ranges}
}

// newService returns a Service "NAMESPACE/NAME" with port 80 that is age seconds younger than birth.
func newService(name string, age int, change ...func(*Service)) *Service {
	namespace, name, _ := strings.Cut(name, "/")
	s := &Service{
		Key: Key{namespace, name}, UID: "uid-" + name, Created: birth.Add(time.Duration(age) * time.Second),
		Balanced: true, Bits: []int{32}, Ports: []Port{{"TCP", 80}},
	}
	for _, f := range change {
		f(s)
	}
	return s
}

func requests(addresses ...string) func(*Service) {
	return func(s *Service) { s.Requested = addresses }
}

func has(addresses ...string) func(*Service) {
	return func(s *Service) {
		for _, a := range addresses {
			s.Ingress = append(s.Ingress, netip.MustParseAddr(a))
		}
		s.Conditions = []Condition{{Type: ConditionSatisfied, Status: "True"}}
	}
}

func sharing(key string, with ...string) func(*Service) {
	return func(s *Service) { s.SharingKey, s.SharedWith = key, with }
}

func port(n int32) func(*Service) { return func(s *Service) { s.Ports = []Port{{"TCP", n}} } }

func v6(s *Service) { s.Bits = []int{128} }

func dual(f Families) func(*Service) {
	return func(s *Service) { s.Bits, s.Families = []int{32, 128}, f }
}

func nobody(a netip.Addr) (string, netip.Addr) { return "", a }

func TestServicesGetAddresses(t *testing.T) {
	foreign := func(s *Service) { s.Ingress = []netip.Addr{netip.MustParseAddr("203.0.113.9")} }
	class := func(c string) func(*Service) { return func(s *Service) { s.Class = &c } }
	local := func(backends string) func(*Service) {
		return func(s *Service) { s.Local, s.Backends = true, backends }
	}
	disabled := newPool(t, "disabled", 0, "192.0.2.0/30")
	disabled.Disabled = true
	picky := newPool(t, "picky", 0, "192.0.2.0/30")
	picky.Selects = func(s *Service) bool { return s.Namespace == "a" }
	for _, tt := range []struct {
		name     string
		pools    []*Pool
		services []*Service
		want     []string // NAMESPACE/NAME=ADDRESS,… REASON
	}{
		{
			"the oldest Service has the first address",
			[]*Pool{newPool(t, "p", 0, "192.0.2.0/30")},
			[]*Service{newService("a/x", 2), newService("a/y", 1)},
			[]string{"a/x=192.0.2.1 satisfied", "a/y=192.0.2.0 satisfied"},
		},
		{
			"an address stays, and no other Service gets it",
			[]*Pool{newPool(t, "p", 0, "192.0.2.0/30")},
			[]*Service{newService("a/x", 2, has("192.0.2.0")), newService("a/y", 1)},
			[]string{"a/x=192.0.2.0 satisfied", "a/y=192.0.2.1 satisfied"},
		},
		{
			"of two with one address the older keeps it",
			[]*Pool{newPool(t, "p", 0, "192.0.2.0/30")},
			[]*Service{newService("a/x", 2, has("192.0.2.0")), newService("a/y", 1, has("192.0.2.0"))},
			[]string{"a/x=192.0.2.1 satisfied", "a/y=192.0.2.0 satisfied"},
		},
		{
			"an address that no pool contains stays",
			[]*Pool{newPool(t, "p", 0, "192.0.2.0/30")},
			[]*Service{newService("a/x", 1, has("192.0.2.99"))},
			[]string{"a/x=192.0.2.99 satisfied"},
		},
		{
			"an address of another controller is not touched",
			[]*Pool{newPool(t, "p", 0, "192.0.2.0/30")},
			[]*Service{newService("a/x", 1, foreign)},
			[]string{"a/x left"},
		},
		{
			"an address of a pool is adopted",
			[]*Pool{newPool(t, "p", 0, "203.0.113.0/24")},
			[]*Service{newService("a/x", 1, foreign)},
			[]string{"a/x=203.0.113.9 satisfied"},
		},
		{"without a pool there is no condition", nil, []*Service{newService("a/x", 1)}, []string{"a/x left"}},
		{
			"another class is left alone",
			[]*Pool{newPool(t, "p", 0, "192.0.2.0/30")},
			[]*Service{newService("a/x", 1, class("example.com/other")), newService("a/y", 2, class(Classes[0]))},
			[]string{"a/x left", "a/y=192.0.2.0 satisfied"},
		},
		{
			"a Service that needs no address any more",
			[]*Pool{newPool(t, "p", 0, "192.0.2.0/30")},
			[]*Service{newService("a/x", 1, has("192.0.2.0"), func(s *Service) { s.Balanced = false })},
			[]string{"a/x released"},
		},
		{
			"a Service that is being deleted keeps its address from others",
			[]*Pool{newPool(t, "p", 0, "192.0.2.0/31")},
			[]*Service{newService("a/x", 1, has("192.0.2.0"), func(s *Service) { s.Deleting = true }), newService("a/y", 2)},
			[]string{"a/x left", "a/y=192.0.2.1 satisfied"},
		},
		{
			"a pool that is full",
			[]*Pool{newPool(t, "p", 0, "192.0.2.0/32")},
			[]*Service{newService("a/x", 1), newService("a/y", 2)},
			[]string{"a/x=192.0.2.0 satisfied", "a/y= out_of_ips"},
		},
		{
			"the next pool when one is full",
			[]*Pool{newPool(t, "q", 1, "198.51.100.0/32"), newPool(t, "p", 0, "192.0.2.0/32")},
			[]*Service{newService("a/x", 1), newService("a/y", 2)},
			[]string{"a/x=192.0.2.0 satisfied", "a/y=198.51.100.0 satisfied"},
		},
		{
			"a disabled pool gives none and takes none away",
			[]*Pool{disabled},
			[]*Service{newService("a/x", 1, has("192.0.2.0")), newService("a/y", 2)},
			[]string{"a/x=192.0.2.0 satisfied", "a/y= pool_disabled"},
		},
		{
			"of two pools that overlap the younger gives none",
			[]*Pool{newPool(t, "old", 0, "192.0.2.0/32"), newPool(t, "young", 1, "192.0.2.0/30")},
			[]*Service{newService("a/x", 1), newService("a/y", 2), newService("a/z", 3, requests("192.0.2.3"))},
			[]string{"a/x=192.0.2.0 satisfied", "a/y= out_of_ips", "a/z= pool_disabled"},
		},
		{
			"a selector by namespace",
			[]*Pool{picky},
			[]*Service{newService("a/x", 1), newService("b/y", 2), newService("b/z", 3, requests("192.0.2.3"))},
			[]string{"a/x=192.0.2.0 satisfied", "b/y= no_pool", "b/z= pool_selector_mismatch"},
		},
		{
			"an address that a pool no longer gives to the Service",
			[]*Pool{picky},
			[]*Service{newService("b/x", 1, has("192.0.2.0"))},
			[]string{"b/x= no_pool"},
		},
		{"requests", []*Pool{newPool(t, "p", 0, "192.0.2.0/30")}, []*Service{
			newService("a/v", 1, requests("192.0.2.2", "192.0.2.3")), newService("a/w", 2, requests("192.0.2.2")),
			newService("a/x", 3, requests("10.0.0.1")), newService("a/y", 4, requests("nonsense")),
			newService("a/z", 5, requests("2001:db8::1")),
		}, []string{
			"a/v=192.0.2.2,192.0.2.3 satisfied", "a/w= already_allocated", "a/x= no_pool", "a/y= invalid_request",
			"a/z= invalid_request",
		}},
		{
			"a younger request does not take an address",
			[]*Pool{newPool(t, "p", 0, "192.0.2.0/30")},
			[]*Service{newService("a/x", 1, has("192.0.2.0")), newService("b/y", 0, requests("192.0.2.0"))},
			[]string{"a/x=192.0.2.0 satisfied", "b/y= already_allocated"},
		},
		{
			"a request that changes moves the Service",
			[]*Pool{newPool(t, "p", 0, "192.0.2.0/30")},
			[]*Service{newService("a/x", 1, has("192.0.2.0"), requests("192.0.2.3"))},
			[]string{"a/x=192.0.2.3 satisfied"},
		},
		{
			"an address of a node",
			[]*Pool{newPool(t, "p", 0, "198.18.0.1-198.18.0.3")},
			[]*Service{newService("a/x", 1), newService("a/y", 2, requests("198.18.0.1"))},
			[]string{"a/x=198.18.0.2 satisfied", "a/y= address_in_use"},
		},
		{
			"a range of pods",
			[]*Pool{newPool(t, "p", 0, "2001:db8:1::/64"), newPool(t, "q", 1, "2001:db8:2::/128")},
			[]*Service{newService("a/x", 1, v6), newService("a/y", 2, v6, requests("2001:db8:1::1"))},
			[]string{"a/x=2001:db8:1:0:8000:: satisfied", "a/y= address_in_use"},
		},
		{
			"nothing but pods",
			[]*Pool{newPool(t, "p", 0, "2001:db8:1::/66")},
			[]*Service{newService("a/x", 1, v6)},
			[]string{"a/x= out_of_ips"},
		},
		{"a shared address", []*Pool{newPool(t, "p", 0, "192.0.2.0/30")}, []*Service{
			newService("a/v", 1, sharing("k"), port(80)), newService("a/w", 2, sharing("k"), port(443)),
			newService("a/x", 3, sharing("k"), port(80)), newService("a/y", 4, sharing("other"), port(1)),
			newService("b/z", 5, sharing("k"), port(8080)),
		}, []string{
			"a/v=192.0.2.0 satisfied", "a/w=192.0.2.0 satisfied", "a/x=192.0.2.1 satisfied", "a/y=192.0.2.2 satisfied",
			"b/z=192.0.2.3 satisfied",
		}},
		{"both namespaces must agree", []*Pool{newPool(t, "p", 0, "192.0.2.0/30")}, []*Service{
			newService("a/v", 1, sharing("k", "b"), port(80)), newService("b/w", 2, sharing("k"), port(443)),
			newService("b/x", 3, sharing("k", "a"), port(444)), newService("c/y", 4, sharing("k", "*"), port(445)),
		}, []string{
			"a/v=192.0.2.0 satisfied", "b/w=192.0.2.1 satisfied", "b/x=192.0.2.0 satisfied", "c/y=192.0.2.2 satisfied",
		}},
		{"a request for a shared address", []*Pool{newPool(t, "p", 0, "192.0.2.0/30")}, []*Service{
			newService("a/v", 1, sharing("k"), port(80), requests("192.0.2.3")),
			newService("a/w", 2, sharing("k"), port(443), requests("192.0.2.3")),
			newService("a/x", 3, sharing("k"), port(443), requests("192.0.2.3")),
		}, []string{"a/v=192.0.2.3 satisfied", "a/w=192.0.2.3 satisfied", "a/x= already_allocated"}},
		{"traffic policies of a shared address", []*Pool{newPool(t, "p", 0, "192.0.2.0/30")}, []*Service{
			newService("a/v", 1, sharing("k"), port(80), local("app=a")), newService("a/w", 2, sharing("k"), port(443)),
			newService("a/x", 3, sharing("k"), port(444), local("app=b")),
			newService("a/y", 4, sharing("k"), port(445), local("app=a")),
		}, []string{
			"a/v=192.0.2.0 satisfied", "a/w=192.0.2.1 satisfied", "a/x=192.0.2.2 satisfied", "a/y=192.0.2.0 satisfied",
		}},
		{"two families", []*Pool{newPool(t, "p", 0, "192.0.2.0/32", "2001:db8::/127")}, []*Service{
			newService("a/v", 1, dual(Require)), newService("a/w", 2, dual(Require)), newService("a/x", 3, dual(Prefer)),
			newService("a/y", 4, dual(Prefer)),
		}, []string{
			"a/v=192.0.2.0,2001:db8:: satisfied", "a/w= out_of_ips", "a/x=2001:db8::1 satisfied", "a/y= out_of_ips",
		}},
		{"too many requests", []*Pool{newPool(t, "p", 0, "192.0.2.0/24")}, []*Service{
			newService("a/x", 1, requests(slices.Repeat([]string{"192.0.2.7"}, MaxRequested+1)...)),
		}, []string{"a/x= invalid_request"}},
	} {
		t.Run(strings.ReplaceAll(tt.name, " ", "_"), func(t *testing.T) {
			owner := func(a netip.Addr) (string, netip.Addr) {
				pods := netip.MustParsePrefix("2001:db8:1::/65")
				switch {
				case a == netip.MustParseAddr("198.18.0.1"):
					return "node n1", a
				case pods.Contains(a):
					return "pods on node n1", last(pods)
				}
				return "", a
			}
			grants, _ := Plan(State{Pools: tt.pools, Services: tt.services, DefaultClass: true, Owner: owner})
			var got []string
			for _, k := range slices.SortedFunc(maps.Keys(grants), Key.Compare) {
				got = append(got, k.Namespace+"/"+k.Name+text(grants[k]))
				if g := grants[k]; !g.Leave && !g.Release && g.Satisfied == (g.Reason != ReasonSatisfied) ||
					g.Reason != "" && !g.Satisfied && g.Message == "" {
					t.Errorf("%v: %+v", k, g)
				}
			}
			if !slices.Equal(got, tt.want) {
				t.Errorf("got  %q\nwant %q", got, tt.want)
			}
		})
	}
}

func text(g Grant) string {
	switch {
	case g.Leave:
		return " left"
	case g.Release:
		return " released"
	}
	var addresses []string
	for _, a := range g.Addresses {
		addresses = append(addresses, a.String())
	}
	return "=" + strings.Join(addresses, ",") + " " + g.Reason
}

// TestAddressesNeverMoveOrCollide changes Services and pools at random. After every change, two Services have one
// address only if they may share it, and a Service that did not change has kept its addresses. A process that starts
// with the status of the Services assigns the same addresses.
func TestAddressesNeverMoveOrCollide(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	for range 60 {
		pools := []*Pool{newPool(t, "p", 0, "192.0.2.0/29", "2001:db8::/125"), newPool(t, "q", 1, "198.51.100.0/30")}
		services := make(map[Key]*Service)
		held := make(map[Key][]netip.Addr)
		for step := range 80 {
			k := Key{string(rune('a' + r.IntN(3))), fmt.Sprint("s", r.IntN(9))}
			moved := map[Key]bool{}
			switch x := r.IntN(10); {
			case x < 6:
				s := newService(k.Namespace+"/"+k.Name, step, port(int32(1+r.IntN(3))))
				if old := services[k]; old != nil {
					s.Created, s.Ingress, s.Conditions = old.Created, old.Ingress, old.Conditions
				}
				if r.IntN(2) == 0 {
					sharing([]string{"k", "l"}[r.IntN(2)], []string{"", "*"}[r.IntN(2)])(s)
				}
				if r.IntN(3) == 0 {
					dual(Families(1 + r.IntN(2)))(s)
				}
				if r.IntN(4) == 0 {
					requests(fmt.Sprint("192.0.2.", r.IntN(9)))(s)
				}
				services[k], moved[k] = s, true
			case x < 8:
				delete(services, k)
				delete(held, k)
			default:
				pools[0].Disabled = !pools[0].Disabled
			}
			all := slices.Collect(maps.Values(services))
			state := State{Pools: pools, Services: all, DefaultClass: true, Held: held, Owner: nobody}
			grants, _ := Plan(state)
			users := make(map[netip.Addr][]*Service)
			for k, g := range grants {
				s := services[k]
				for _, a := range g.Addresses {
					for _, other := range users[a] {
						if why := separate(s, other); why != "" {
							t.Fatalf("step %d: %v and %v have %s, %s", step, k, other.Key, a, why)
						}
					}
					users[a] = append(users[a], s)
				}
				for _, a := range held[k] {
					// Of two that may no longer share an address, the older one keeps it.
					parted := slices.ContainsFunc(all, func(o *Service) bool {
						return moved[o.Key] && slices.Contains(held[o.Key], a) && separate(s, o) != ""
					})
					if !moved[k] && !parted && !slices.Contains(g.Addresses, a) {
						t.Fatalf("step %d: %v lost %s: %+v", step, k, a, g)
					}
				}
			}
			for k, g := range grants {
				held[k] = g.Addresses
				services[k].Ingress, services[k].Conditions = g.Addresses, []Condition{{Type: ConditionSatisfied}}
			}
			state.Held = nil
			restarted, _ := Plan(state)
			for k, g := range grants {
				if !slices.Equal(g.Addresses, restarted[k].Addresses) {
					t.Fatalf("step %d: %v has %v, after a restart %v", step, k, g.Addresses, restarted[k].Addresses)
				}
			}
		}
	}
}

func TestBlocksOfPools(t *testing.T) {
	for _, tt := range []struct {
		block     Block
		firstLast bool
		want      string // of the range, or a part of the error
	}{
		{Block{CIDR: "192.0.2.0/24"}, true, "192.0.2.0-192.0.2.255"},
		{Block{CIDR: "192.0.2.0/24"}, false, "192.0.2.1-192.0.2.254"},
		{Block{CIDR: "192.0.2.0/31"}, false, "192.0.2.0-192.0.2.1"},
		{Block{CIDR: "192.0.2.7/32"}, false, "192.0.2.7"},
		{Block{CIDR: "2001:db8::/126"}, false, "2001:db8::1-2001:db8::2"},
		{Block{CIDR: "192.0.2.9/24"}, true, "use 192.0.2.0/24"},
		{Block{CIDR: "192.0.2.9"}, true, "is not a prefix"},
		{Block{Start: "192.0.2.9"}, true, "192.0.2.9"},
		{Block{Start: "192.0.2.9", Stop: "192.0.2.12"}, false, "192.0.2.9-192.0.2.12"},
		{Block{Start: "192.0.2.9", Stop: "192.0.2.1"}, true, "before start"},
		{Block{Start: "192.0.2.9", Stop: "2001:db8::"}, true, "two families"},
		{Block{CIDR: "192.0.2.0/24", Start: "192.0.2.9"}, true, "together with start and stop"},
		{Block{Stop: "192.0.2.9"}, true, "cidr or start is required"},
		{Block{CIDR: "127.0.0.0/24"}, true, "loopback"},
		{Block{CIDR: "224.0.0.0/24"}, true, "multicast"},
		{Block{CIDR: "0.0.0.0/0"}, true, "unspecified"},
		{Block{CIDR: "fe80::/64"}, true, "link-local"},
		{Block{Start: "::ffff:192.0.2.1"}, true, "write it as IPv4"},
	} {
		ranges, faults := NewRanges([]Block{tt.block}, tt.firstLast)
		if got := fmt.Sprint(ranges, faults); !strings.Contains(got, tt.want) || len(ranges)+len(faults) != 1 {
			t.Errorf("%+v: %s, want %s", tt.block, got, tt.want)
		}
	}
	ranges, _ := NewRanges([]Block{{CIDR: "192.0.2.4/30"}, {CIDR: "192.0.2.0/29"}, {Start: "192.0.2.3"}}, true)
	if got := fmt.Sprint(ranges); got != "[192.0.2.0-192.0.2.7]" {
		t.Errorf("blocks that overlap are %s", got)
	}
}
