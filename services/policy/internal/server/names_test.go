// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/sluice-net/sluice/model/policytable"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	"github.com/sluice-net/sluice/services/policy/internal/owner"
)

// learned returns the names that a filter selects.
func (s *service) learned(req *policyv1.ListNamesRequest) []*policyv1.LearnedName {
	s.t.Helper()
	list, err := s.ListNames(s.ctx(), req)
	if err != nil {
		s.t.Fatal(err)
	}
	var out []*policyv1.LearnedName
	for {
		m, err := list.Recv()
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			s.t.Fatal(err)
		}
		out = append(out, m.GetName())
	}
}

// texts formats names with their addresses.
func texts(list []*policyv1.LearnedName) (out []string) {
	for _, n := range list {
		var addrs []string
		for _, a := range n.GetAddresses() {
			addrs = append(addrs, a.GetAddress())
		}
		out = append(out, n.GetName()+" "+strings.Join(addrs, ","))
	}
	return out
}

// learnPolicy returns a policy like learnWeb with another name and another DNS name.
func learnPolicy(name, fqdn string) string {
	return strings.NewReplacer("name: dns", "name: "+name, "matchName: api.example.com", fqdn).Replace(learnWeb)
}

func (s *service) learn(name string, ttl time.Duration, addresses ...string) {
	s.t.Helper()
	req := &policyv1.LearnNamesRequest{Name: name, Addresses: addresses, Ttl: durationpb.New(ttl)}
	if _, err := s.LearnNames(s.ctx(), req); err != nil {
		s.t.Fatal(err)
	}
}

func (s *service) forget(pattern, address string, validateOnly bool, names, addresses uint32) {
	s.t.Helper()
	out, err := s.ForgetNames(s.ctx(), &policyv1.ForgetNamesRequest{
		Pattern: pattern, Address: address, ValidateOnly: validateOnly,
	})
	if err != nil || out.GetNameCount() != names || out.GetAddressCount() != addresses {
		s.t.Errorf("forget %q %q: %v, %v; want %d names and %d addresses", pattern, address, out, err, names, addresses)
	}
}

func TestLearnedNamesAreListedWithTheirRulesAndTimes(t *testing.T) {
	clock := &fakeClock{now: time.Unix(1_700_000_000, 0)}
	s := serve(t, func(c *owner.Config) { c.Now, c.MaxNames = clock.Now, 100 })
	s.know(town)
	s.apply(learnWeb)
	var many strings.Builder
	for i := range 20 {
		fmt.Fprintf(&many, "---\n%s", learnPolicy(fmt.Sprintf("m%02d", i), "matchPattern: '*.many.example.com'"))
	}
	s.apply(many.String())
	s.watch(subscribe("datapath", 300)).snapshot()
	s.learn("api.example.com", time.Hour, "192.0.2.9", "2001:db8::1", "192.0.2.8")
	s.learn("WWW.many.example.com", 0, "192.0.2.9")
	s.learn("other.example.com", 0, "192.0.2.10")

	all := s.learned(&policyv1.ListNamesRequest{})
	want := []string{
		"api.example.com. 192.0.2.8,192.0.2.9,2001:db8::1", "other.example.com. 192.0.2.10",
		"www.many.example.com. 192.0.2.9",
	}
	if got := texts(all); !slices.Equal(got, want) {
		t.Fatalf("listed %q, want %q", got, want)
	}
	a := all[0].GetAddresses()[0]
	if e, f := a.GetExpireTime().AsTime(), a.GetForgetTime().AsTime(); !e.Equal(clock.Now().Add(time.Hour)) ||
		f.Sub(e) != time.Minute {
		t.Errorf("expires %s, is removed %s", e, f)
	}
	if u := all[0].GetUsedBy(); len(u) != 1 || u[0].GetName() != "dns" || u[0].GetPath() != "spec.egress[0]" {
		t.Errorf("used by %v", u)
	}
	if u := all[1].GetUsedBy(); len(u) != 0 {
		t.Errorf("a name that no rule selects is used by %v", u)
	}
	if u := all[2].GetUsedBy(); len(u) != 16 || all[2].GetOmittedUseCount() != 4 || u[0].GetName() != "m00" {
		t.Errorf("used by %v and %d more", u, all[2].GetOmittedUseCount())
	}
	for _, c := range []struct {
		pattern, address string
		want             []string
	}{
		{"API.example.com", "", want[:1]},
		{"*.example.com", "", want[:2]},
		{"**.example.com", "", want},
		{"*", "192.0.2.9", []string{want[0], want[2]}},
		{"", "192.0.2.10", want[1:2]},
		{"nothing.example.com", "", nil},
	} {
		got := texts(s.learned(&policyv1.ListNamesRequest{Pattern: c.pattern, Address: c.address}))
		if !slices.Equal(got, c.want) {
			t.Errorf("%q %q: listed %q, want %q", c.pattern, c.address, got, c.want)
		}
	}
}

func TestForgettingANameTakesItsPermissionsAway(t *testing.T) {
	s := serve(t)
	s.know(town)
	s.apply(learnWeb)
	s.apply(learnPolicy("cdn", "matchName: cdn.example.com"))
	f := s.watch(subscribe("datapath", 300)).snapshot()
	shared, own := netip.MustParseAddr("192.0.2.7"), netip.MustParseAddr("192.0.2.8")
	s.learn("api.example.com", time.Hour, shared.String(), own.String())
	s.learn("cdn.example.com", time.Hour, shared.String())
	verdicts := func(when string, wantShared, wantOwn policytable.Action) {
		t.Helper()
		f.look(func() { // acknowledged messages have been applied
			for addr, want := range map[netip.Addr]policytable.Action{shared: wantShared, own: wantOwn} {
				if a, ok := f.lookup(300, policytable.Egress, 9, addr, tcp5432); !ok || a != want {
					t.Errorf("%s, to %s: %v %t, want %v", when, addr, a, ok, want)
				}
			}
		})
	}
	verdicts("learned", policytable.Allow, policytable.Allow)
	s.forget("*", "", true, 2, 3)
	s.forget("*", shared.String(), true, 2, 2)
	verdicts("asked", policytable.Allow, policytable.Allow)
	s.forget("nothing.example.com", "", false, 0, 0)
	s.forget("api.example.com", "", false, 1, 2)
	verdicts("one forgotten", policytable.Allow, policytable.Deny) // the other name has the shared address
	s.forget("", shared.String(), false, 1, 1)
	verdicts("its address forgotten", policytable.Deny, policytable.Deny)
	s.forget("*", "", false, 0, 0)
	s.learn("api.example.com", time.Hour, shared.String(), own.String())
	verdicts("learned again", policytable.Allow, policytable.Allow)
	s.forget("api.example.com", own.String(), false, 1, 1)
	verdicts("one address forgotten", policytable.Allow, policytable.Deny)
	s.stop()
	s.start()
	if got := texts(s.learned(&policyv1.ListNamesRequest{})); !slices.Equal(got, []string{"api.example.com. 192.0.2.7"}) {
		t.Errorf("after a restart: %q", got)
	}

	for _, req := range []*policyv1.ForgetNamesRequest{
		{},
		{Pattern: "a b"},
		{Pattern: "[a"},
		{Pattern: strings.Repeat("a", 256)},
		{Address: "192.0.2"},
		{Address: "fe80::1%eth0"},
		{Address: "::ffff:192.0.2.10"},
		{ValidateOnly: true},
	} {
		_, err := s.ForgetNames(s.ctx(), req)
		wantCode(t, err, codes.InvalidArgument, "")
	}
	list, err := s.ListNames(s.ctx(), &policyv1.ListNamesRequest{Pattern: "\x00"})
	if err == nil {
		_, err = list.Recv()
	}
	wantCode(t, err, codes.InvalidArgument, "pattern")
}

// TestNamesAreLearnedWhileOthersAreForgotten: a proxy learns names while an operator removes names. Afterwards, the
// kernel allows exactly the listed addresses.
func TestNamesAreLearnedWhileOthersAreForgotten(t *testing.T) {
	const count = 200
	s := serve(t, func(c *owner.Config) { c.MaxNames, c.MaxAddresses = 2*count, 2*count })
	s.know(town)
	s.apply(learnPolicy("dns", "matchPattern: '*.example.com'"))
	f := s.watch(subscribe("datapath", 300)).snapshot()
	at := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{198, 18, byte(i >> 8), byte(i)}) }
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := range count {
			s.learn(fmt.Sprintf("n%d.example.com", i), time.Hour, at(i).String())
		}
	})
	wg.Go(func() {
		for range 20 {
			if _, err := s.ForgetNames(s.ctx(), &policyv1.ForgetNamesRequest{Pattern: "*"}); err != nil {
				t.Error(err)
			}
		}
	})
	wg.Wait()
	s.learn("last.example.com", time.Hour, at(count).String()) // acknowledged after everything else
	known := map[string]bool{}
	for _, n := range s.learned(&policyv1.ListNamesRequest{}) {
		known[n.GetName()] = true
	}
	f.look(func() {
		for i := range count {
			want := policytable.Deny
			if known[fmt.Sprintf("n%d.example.com.", i)] {
				want = policytable.Allow
			}
			if a, ok := f.lookup(300, policytable.Egress, 9, at(i), tcp5432); !ok || a != want {
				t.Errorf("n%d: %v %t, want %v", i, a, ok, want)
			}
		}
	})
}

func TestTenThousandNamesAreListedAndForgotten(t *testing.T) {
	const count = 10_000
	s := serve(t, func(c *owner.Config) { c.MaxNames, c.MaxAddresses = count, count })
	s.know(town)
	s.apply(learnPolicy("dns", "matchPattern: '*.example.com'"))
	s.watch(subscribe("datapath", 300)).snapshot()
	next := make(chan int)
	var wg sync.WaitGroup
	ctx, cancel := context.WithCancelCause(t.Context()) // without a timeout, because the calls take minutes under load
	defer cancel(nil)
	for range 64 {
		wg.Go(func() {
			for i := range next { // receive all values, even after a failure, because the test blocks on sending
				addr := netip.AddrFrom4([4]byte{198, 18, byte(i >> 8), byte(i)})
				if _, err := s.LearnNames(ctx, &policyv1.LearnNamesRequest{
					Name: fmt.Sprintf("n%d.example.com", i), Addresses: []string{addr.String()}, Ttl: durationpb.New(time.Hour),
				}); err != nil {
					cancel(fmt.Errorf("name %d: %w", i, err))
				}
			}
		})
	}
	for i := range count {
		next <- i
	}
	close(next)
	wg.Wait()
	if err := context.Cause(ctx); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	if got := s.learned(&policyv1.ListNamesRequest{}); len(got) != count || len(got[0].GetUsedBy()) != 1 {
		t.Errorf("%d are listed", len(got))
	}
	listed := time.Since(began)
	s.forget("n1*.example.com", "", false, 1111, 1111)
	s.forget("*", "", false, count-1111, count-1111)
	t.Logf("listed in %s, forgotten in %s", listed, time.Since(began)-listed)
	if got := s.learned(&policyv1.ListNamesRequest{}); len(got) != 0 {
		t.Errorf("%d are left", len(got))
	}
}

func TestLearnedAddressStaysWhileItsConnectionIsReported(t *testing.T) {
	clock := &fakeClock{now: time.Unix(1_700_000_000, 0)}
	s := serve(t, func(c *owner.Config) { c.Now = clock.Now })
	hold := func(inUse ...string) []string {
		t.Helper()
		out, err := s.HoldAddresses(s.ctx(), &policyv1.HoldAddressesRequest{InUse: inUse})
		if err != nil {
			t.Fatal(err)
		}
		return out.GetExpiring()
	}
	hold()
	s.learn("api.example.com", time.Minute, "192.0.2.1", "192.0.2.2", "2001:db8::1")
	for range 30 {
		clock.Add(time.Minute)
		hold("192.0.2.1", "2001:db8::1")
	}
	s.poke()
	s.poke() // wait until the first call has read the clock
	got := texts(s.learned(&policyv1.ListNamesRequest{}))
	if want := []string{"api.example.com. 192.0.2.1,2001:db8::1"}; !slices.Equal(got, want) {
		t.Errorf("stored: %v, want %v", got, want)
	}
	_, err := s.HoldAddresses(s.ctx(), &policyv1.HoldAddressesRequest{InUse: []string{"192.0.2"}})
	wantCode(t, err, codes.InvalidArgument, "in_use")
}
