// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package client

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/sluice-net/sluice/model/layer7"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	"github.com/sluice-net/sluice/services/http/internal/rules"
)

func request(method, path string, header ...string) *layer7.Request {
	return &layer7.Request{Method: method, Path: path, Host: "a.test", Values: func(name string) (all []string) {
		for i := 0; i < len(header); i += 2 {
			if header[i] == name {
				all = append(all, header[i+1])
			}
		}
		return all
	}}
}

func TestSetsEvaluateAsSluicePolicySaysThem(t *testing.T) {
	r := Sets{rules.New()}
	value := "blue"
	for number, m := range map[uint16]*policyv1.RuleSet{
		1: {Http: []*policyv1.HTTPRule{{Method: "GET", Path: "/a"}}},
		2: {Http: []*policyv1.HTTPRule{{Headers: []*policyv1.HTTPHeader{{Name: "X-Team", Value: &value}}}}},
		3: {Http: []*policyv1.HTTPRule{{HeaderMatches: []*policyv1.HTTPHeaderMatch{
			{Name: "X-Team", Value: "blue", Mismatch: policyv1.HeaderMismatch_HEADER_MISMATCH_REPLACE},
		}}}},
		4: {All: true},
		5: {},
		6: {ServerNames: []string{"a.test."}},
	} {
		if err := r.Upsert(number, m); err != nil {
			t.Fatal(err)
		}
	}
	for number, bad := range map[uint16]*policyv1.RuleSet{
		7: {All: true, ServerNames: []string{"a b"}},
		8: {Http: []*policyv1.HTTPRule{{}, {HeaderMatches: []*policyv1.HTTPHeaderMatch{{Name: "X", Mismatch: 99}}}}},
	} {
		if err := r.Upsert(number, bad); err == nil {
			t.Errorf("set %d is accepted", number)
		}
	}
	for _, c := range []struct {
		set        uint16
		request    *layer7.Request
		allowed    bool
		mismatches int
		name       bool // whether the server name a.test is allowed
	}{
		{set: 1, request: request("GET", "/a"), allowed: true},
		{set: 1, request: request("GET", "/ab")},
		{set: 1, request: request("POST", "/a")},
		{set: 2, request: request("GET", "/", "X-Team", "blue"), allowed: true},
		{set: 2, request: request("GET", "/", "X-Team", "red")},
		{set: 3, request: request("GET", "/", "X-Team", "red"), allowed: true, mismatches: 1},
		{set: 4, request: request("GET", "/"), allowed: true, name: true},
		{set: 5, request: request("GET", "/")},
		{set: 6, request: request("GET", "/"), allowed: true, name: true}, // the host is the name
		{set: 7, request: request("GET", "/")},                            // what cannot be decoded allows nothing
		{set: 8, request: request("GET", "/")},
	} {
		s, err := r.Wait(t.Context(), c.set)
		if err != nil {
			t.Fatal(err)
		}
		v := s.AllowsRequest(c.request)
		if v.Allowed != c.allowed || len(v.Mismatches) != c.mismatches {
			t.Errorf("set %d: %+v, want %t with %d mismatches", c.set, v, c.allowed, c.mismatches)
		}
		if got := s.AllowsServerName("a.test"); got != c.name || s.ServerNames != c.name {
			t.Errorf("set %d: the server name is allowed: %t, names %t, want %t", c.set, got, s.ServerNames, c.name)
		}
	}
}

func TestWaitForASet(t *testing.T) {
	r := Sets{rules.New()}
	if err := r.Upsert(1, &policyv1.RuleSet{All: true}); err != nil {
		t.Fatal(err)
	}
	r.Keep(map[uint16]struct{}{2: {}}) // 1 is not listed any more
	got := make(chan error, 1)
	go func() {
		_, err := r.Wait(t.Context(), 1)
		got <- err
	}()
	if err := r.Upsert(3, &policyv1.RuleSet{All: true}); err != nil { // another one
		t.Fatal(err)
	}
	select {
	case err := <-got:
		t.Errorf("set 1 is there: %v", err)
	default:
	}
	if err := r.Upsert(1, &policyv1.RuleSet{}); err != nil {
		t.Fatal(err)
	}
	if err := <-got; err != nil {
		t.Error(err)
	}
	if r.Delete(1); r.Len() != 1 {
		t.Errorf("%d sets", r.Len())
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if _, err := r.Wait(ctx, 1); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a deleted set: %v", err)
	}
}
