// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package rules

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

func TestBothSidesMustAllowAQuery(t *testing.T) {
	r := New()
	for number, c := range map[uint16]Content{
		1: {Names: []string{"api.example.com.", "*.shop.example"}}, 2: {All: true}, 3: {Names: []string{"*"}}, 4: {},
		5: {Names: []string{"**.example.com."}},
	} {
		if err := r.Upsert(number, c); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		tag  Tag
		name string
		want Decision
	}{
		{Tag{}, "any.", Decision{Verdict: Allowed}},
		{Tag{Egress: 1}, "api.example.com.", Decision{Verdict: Allowed}},
		{Tag{Egress: 1}, "a.shop.example.", Decision{Verdict: Allowed}},
		{Tag{Egress: 1}, "a.b.shop.example.", Decision{Refused, 1}},
		{Tag{Egress: 1}, "example.com.", Decision{Refused, 1}},
		{Tag{Egress: 2}, `a\046b.`, Decision{Verdict: Allowed}},
		{Tag{Egress: 3}, `a\046b.`, Decision{Verdict: Allowed}},
		{Tag{Egress: 1}, `api\046example.com.`, Decision{Refused, 1}},
		{Tag{Ingress: 4}, "a.", Decision{Refused, 4}},
		{Tag{1, 5}, "api.example.com.", Decision{Verdict: Allowed}},
		{Tag{1, 5}, "a.shop.example.", Decision{Refused, 5}},
		{Tag{5, 1}, "a.example.com.", Decision{Refused, 1}},
		{Tag{1, 9}, "api.example.com.", Decision{Unknown, 9}},
		{Tag{9, 2}, "api.example.com.", Decision{Unknown, 9}},
		{Tag{1, 9}, "other.", Decision{Refused, 1}},
	} {
		if got := r.Decide(c.tag, c.name); got != c.want {
			t.Errorf("%+v %s: %+v, want %+v", c.tag, c.name, got, c.want)
		}
	}
	allow, refuse := r.Matching("api.example.com.")
	if !slices.Equal(allow, []uint16{1, 2, 3, 5}) || !slices.Equal(refuse, []uint16{4}) {
		t.Errorf("matching: %v, %v", allow, refuse)
	}
	r.Keep(map[uint16]struct{}{2: {}})
	if r.Len() != 1 || r.Decide(Tag{Egress: 1}, "a.").Verdict != Unknown {
		t.Errorf("%d sets are left", r.Len())
	}
}

func TestSetThatCannotBeReadAllowsNothing(t *testing.T) {
	r := New()
	if err := r.Upsert(0, Content{All: true}); err == nil {
		t.Error("number 0 was accepted")
	}
	if err := r.Upsert(1, Content{Names: []string{"a."}}); err != nil {
		t.Fatal(err)
	}
	err := r.Upsert(1, Content{Names: []string{"a.", "b c"}})
	if got := r.Decide(Tag{Egress: 1}, "a."); err == nil || got.Verdict != Unknown {
		t.Errorf("%v, %+v: the former content is still evaluated", err, got)
	}
}

func TestUnknownSetIsWaitedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := New()
		got := make(chan bool)
		go func() { got <- r.Wait(t.Context(), Tag{1, 2}) }()
		synctest.Wait()
		for number := range uint16(3) {
			select {
			case <-got:
				t.Fatalf("returned before set %d", number)
			default:
			}
			if number > 0 {
				if err := r.Upsert(number, Content{}); err != nil {
					t.Fatal(err)
				}
			}
			synctest.Wait()
		}
		if !<-got {
			t.Error("the sets are not known")
		}
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		if r.Wait(ctx, Tag{Egress: 3}) {
			t.Error("a set that never came is known")
		}
	})
}

func TestOnlyNamesThatPoliciesSelectAreWanted(t *testing.T) {
	r := New()
	if !r.Wants("a.") {
		t.Error("the patterns are not known, and a name is not wanted")
	}
	if err := r.Want([]string{"*.example.com"}); err != nil || r.Wants("a.") || !r.Wants("a.example.com.") {
		t.Errorf("%v, or the patterns are ignored", err)
	}
	if err := r.Want([]string{}); err != nil || r.Wants("a.") {
		t.Errorf("%v, or a name is wanted without patterns", err)
	}
	if err := r.Want([]string{" "}); err == nil {
		t.Error("accepted")
	}
	if err := r.Want(nil); err != nil || !r.Wants("a.") {
		t.Error(err)
	}
}

func TestRefusedNamesAreMissingBelowSearchDomains(t *testing.T) {
	domains := []string{"cluster.local", "Corp.example."}
	for _, c := range []struct {
		mode, name, zone string
		missing          bool
	}{
		{Auto, "a.default.svc.cluster.local.", "cluster.local.", true},
		{Auto, "cluster.local.", "", false},
		{Auto, "xcluster.local.", "", false},
		{Auto, "www.corp.example.", "corp.example.", true},
		{Auto, "www.example.", "", false},
		{AsMissing, "www.example.", ".", true},
		{AsMissing, "www.corp.example.", "corp.example.", true},
		{AsForbidden, "www.corp.example.", "", false},
	} {
		r, err := NewRefusal(c.mode, domains)
		if err != nil {
			t.Fatal(err)
		}
		zone, missing := r.Missing(c.name)
		if missing != c.missing || missing && zone != c.zone {
			t.Errorf("%s %s: %q, %t", c.mode, c.name, zone, missing)
		}
	}
	for _, bad := range []string{"", ".", "a..b", ".a", "a b", "*.a"} {
		if _, err := NewRefusal(Auto, []string{bad}); err == nil {
			t.Errorf("search domain %q was accepted", bad)
		}
	}
	if _, err := NewRefusal("never", nil); err == nil {
		t.Error("mode was accepted")
	}
}

// BenchmarkDecide uses a set with the maximum number of names, and a tenth as many patterns.
func BenchmarkDecide(b *testing.B) {
	r := New()
	var list []string
	for i := range 4096 {
		list = append(list, fmt.Sprintf("n%d.example.com.", i))
		if i%10 == 0 {
			list = append(list, fmt.Sprintf("*.d%d.example.com.", i))
		}
	}
	if err := r.Upsert(1, Content{Names: list}); err != nil {
		b.Fatal(err)
	}
	for what, name := range map[string]string{"allowed": "x.d4090.example.com.", "refused": "a.other.example.com."} {
		b.Run(what, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if (r.Decide(Tag{Egress: 1}, name).Verdict == Allowed) != (what == "allowed") {
					b.Fatal(name)
				}
			}
		})
	}
}
