// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"strings"
	"testing"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	"github.com/sluice-net/sluice/services/identity/internal/registry"
)

// pool returns the settings of a pool of 4 blocks for each family.
func pool(maxBlocks uint32) *identityv1.IPAMSettings {
	return &identityv1.IPAMSettings{
		Mode: identityv1.IPAMMode_IPAM_MODE_POOL, PoolPrefixes: []string{"fd00:9::/62", "10.9.0.0/22"},
		Ipv4BlockLength: 24, Ipv6BlockLength: 64, MaxBlocks: maxBlocks,
	}
}

func TestClaimsAreCheckedAndAnsweredOnce(t *testing.T) {
	s := serve(t)
	s.reg.Observe(registry.Update{Complete: true})
	for field, req := range map[string]*identityv1.ClaimRangeRequest{
		"settings":            {},
		"settings.mode":       {Settings: &identityv1.IPAMSettings{}},
		"settings.max_blocks": {Settings: pool(0)},
		"settings.pool_prefixes": {Settings: &identityv1.IPAMSettings{
			Mode:      identityv1.IPAMMode_IPAM_MODE_POOL,
			MaxBlocks: 1,
		}},
		"settings.pool_prefixes[1]": {Settings: &identityv1.IPAMSettings{
			Mode:      identityv1.IPAMMode_IPAM_MODE_POOL,
			MaxBlocks: 1, PoolPrefixes: []string{"10.9.0.0/16", "10.9.1.0/24"}, Ipv4BlockLength: 24,
		}},
		"settings.pool_prefixes[0]": {Settings: &identityv1.IPAMSettings{
			Mode:      identityv1.IPAMMode_IPAM_MODE_POOL,
			MaxBlocks: 1, PoolPrefixes: []string{"10.9.0.0/24"}, Ipv4BlockLength: 16,
		}},
		"ipv6": {Settings: &identityv1.IPAMSettings{
			Mode:      identityv1.IPAMMode_IPAM_MODE_POOL,
			MaxBlocks: 1, PoolPrefixes: []string{"10.9.0.0/16"}, Ipv4BlockLength: 24,
		}, Ipv6: true},
		"known_ranges[0]": {Settings: pool(2), KnownRanges: []string{"10.9.0.1/24"}},
	} {
		_, err := s.cluster.ClaimRange(t.Context(), req)
		if got := violated(err); status.Code(err) != codes.InvalidArgument || got != field {
			t.Errorf("%s: %v names %q", field, err, got)
		}
	}
	claim := func(ipv6 bool, known ...string) (string, error) {
		resp, err := s.cluster.ClaimRange(t.Context(), &identityv1.ClaimRangeRequest{
			Settings: pool(2), Ipv6: ipv6,
			KnownRanges: known,
		})
		return resp.GetRange(), err
	}
	for _, ipv6 := range []bool{false, true} {
		first, err := claim(ipv6)
		if err != nil {
			t.Fatal(err)
		}
		if again, err := claim(ipv6); err != nil || again != first {
			t.Errorf("a claim that is repeated gets %s, %v, want %s", again, err, first)
		}
		known := []string{first}
		for range 3 {
			next, err := claim(ipv6, known...)
			if err != nil {
				t.Fatal(err)
			}
			known = append(known, next)
		}
		_, err = claim(ipv6, known...)
		var quota string
		for _, d := range status.Convert(err).Details() {
			if q, ok := d.(*errdetails.QuotaFailure); ok {
				quota = q.GetViolations()[0].GetDescription()
			}
		}
		prefix := map[bool]string{
			false: "10.9.0.0/22 has 4 blocks of /24",
			true:  "fd00:9::/62 has 4 blocks of /64",
		}[ipv6]
		if status.Code(err) != codes.ResourceExhausted || !strings.Contains(quota, prefix) {
			t.Errorf("a claim of a pool without a free block: %v, %q", err, quota)
		}
	}
	other := pool(3)
	if _, err := s.cluster.ClaimRange(t.Context(), &identityv1.ClaimRangeRequest{
		Settings:     other,
		ValidateOnly: true,
	}); status.Code(err) != codes.FailedPrecondition ||
		!strings.Contains(err.Error(), "2 for a node") || !strings.Contains(err.Error(), "3 for a node") {
		t.Errorf("a claim with other settings: %v", err)
	}
	// The last block of a family stays.
	give := func(p string) (bool, error) {
		resp, err := s.cluster.ReturnRange(t.Context(), &identityv1.ReturnRangeRequest{Range: p})
		return resp.GetReturned(), err
	}
	for i, want := range []codes.Code{codes.OK, codes.OK, codes.OK, codes.FailedPrecondition} {
		p := []string{"10.9.2.0/24", "10.9.1.0/24", "10.9.3.0/24", "10.9.0.0/24"}[i]
		if returned, err := give(p); status.Code(err) != want || returned != (want == codes.OK) {
			t.Errorf("return %s: %v, %v", p, returned, err)
		}
		if returned, err := give(p); status.Code(err) != want || returned {
			t.Errorf("return %s again: %v, %v", p, returned, err)
		}
	}
}

// TestReuseIsAskedByAddress: the answer has the addresses in the order of the request, and is empty unless the mode is
// native.
func TestReuseIsAskedByAddress(t *testing.T) {
	s := serve(t)
	s.reg.Observe(registry.Update{Complete: true})
	ask := func(addresses ...string) *identityv1.CheckReuseResponse {
		t.Helper()
		resp, err := s.cluster.CheckReuse(t.Context(), &identityv1.CheckReuseRequest{Addresses: addresses})
		if err != nil {
			t.Fatal(err)
		}
		return resp
	}
	for _, mode := range []identityv1.RoutingMode{
		identityv1.RoutingMode_ROUTING_MODE_UNSPECIFIED, identityv1.RoutingMode_ROUTING_MODE_OVERLAY,
		identityv1.RoutingMode_ROUTING_MODE_NATIVE,
	} {
		known := mode != identityv1.RoutingMode_ROUTING_MODE_UNSPECIFIED
		if known {
			if _, err := s.cluster.RegisterNode(t.Context(), &identityv1.RegisterNodeRequest{
				Underlay: &identityv1.Underlay{Mode: mode},
			}); err != nil {
				t.Fatal(err)
			}
		}
		resp := ask("10.9.9.2", "fd00::5")
		if resp.GetMode() != mode || resp.GetModeKnown() != known {
			t.Errorf("the mode is %s, want %s", resp.GetMode(), mode)
		}
		if mode != identityv1.RoutingMode_ROUTING_MODE_NATIVE {
			if len(resp.GetAddresses()) != 0 {
				t.Errorf("%s: %v", mode, resp)
			}
			continue
		}
		all := resp.GetAddresses()
		if len(all) != 2 || all[0].GetAddress() != "10.9.9.2" || all[1].GetAddress() != "fd00::5" ||
			all[0].GetReusable() || all[0].GetReason() == "" {
			t.Errorf("without a store the addresses are %v", all)
		}
	}
	_, err := s.cluster.CheckReuse(t.Context(), &identityv1.CheckReuseRequest{Addresses: []string{"x"}})
	if violated(err) != "addresses[0]" {
		t.Errorf("a malformed address: %v", err)
	}
}
