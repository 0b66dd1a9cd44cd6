// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/servicetest"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
)

// rangePoints are the fault points of claims and returns.
var rangePoints = []string{
	"identity/claim/before-txn", "identity/claim/after-txn", "identity/claim/before-answer",
	"identity/return/before-save", "identity/return/before-txn", "identity/return/before-answer",
}

// claimer is a caller that claims ranges. known are the ranges that it has stored on its disk.
type claimer struct {
	t     *testing.T
	p     *proc
	known []string
}

func (c *claimer) settings() *identityv1.IPAMSettings {
	return &identityv1.IPAMSettings{
		Mode: identityv1.IPAMMode_IPAM_MODE_POOL, PoolPrefixes: []string{"10.9.0.0/22"}, Ipv4BlockLength: 24,
		MaxBlocks: 4,
	}
}

func (c *claimer) cluster() identityv1.ClusterServiceClient {
	return identityv1.NewClusterServiceClient(c.p.Conn)
}

func (c *claimer) claim() error {
	resp, err := c.cluster().ClaimRange(servicetest.Context(c.t),
		&identityv1.ClaimRangeRequest{Settings: c.settings(), KnownRanges: c.known})
	if err == nil {
		c.known = append(c.known, resp.GetRange())
	}
	return err
}

// giveBack forgets a block, and then returns it.
func (c *claimer) giveBack(p string) error {
	c.known = slices.DeleteFunc(c.known, func(q string) bool { return p == q })
	_, err := c.cluster().ReturnRange(servicetest.Context(c.t), &identityv1.ReturnRangeRequest{Range: p})
	return err
}

// TestKernelKilledAnywhereLeaksNoRange proves the identity service's part of INV-85: a block that the caller has not
// stored is returned by its next claim, or is in quarantine.
func TestKernelKilledAnywhereLeaksNoRange(t *testing.T) {
	for _, point := range rangePoints {
		for _, kill := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/%v", point, kill), func(t *testing.T) {
				b := newBench(t)
				c := &claimer{t: t, p: b.start()}
				c.p.Serving()
				servicetest.EventuallyNil(t, "the first block", c.claim)
				if strings.HasPrefix(point, "identity/return/") {
					servicetest.EventuallyNil(t, "the second block", c.claim)
				}
				change := func() error {
					if len(c.known) == 2 {
						return c.giveBack(c.known[1])
					}
					if strings.HasPrefix(point, "identity/return/") {
						return nil // it is repeated with the registration
					}
					return c.claim()
				}
				if kill {
					c.p.Faults.KillAt(point, 0)
				} else {
					c.p.Faults.FailAt(point, 0, "as the test wants")
				}
				if err := change(); status.Code(err) != codes.Unavailable {
					t.Fatalf("the call ended with %v", err)
				}
				if kill {
					c.p.Killed()
					c.p = b.start()
					c.p.Serving()
				} else {
					c.p.Faults.Pass(point)
				}
				servicetest.EventuallyNil(t, "the same call again", change)
				// Write as ipam does at its start and from time to time.
				admin := b.etcd.Client()
				servicetest.EventuallyNil(t, "etcd to have what the caller has", func() error {
					resp, err := c.cluster().RegisterNode(servicetest.Context(t), &identityv1.RegisterNodeRequest{
						PodRanges: &identityv1.PodRanges{Prefixes: c.known}, Ipam: c.settings(),
					})
					if err != nil || !resp.GetRegistered() || len(resp.GetNode().GetRefusedRanges()) > 0 {
						return fmt.Errorf("%v, %w", resp, err)
					}
					var held []string
					got, err := admin.Get(t.Context(), "/sluice/v1/identity/range/default/", clientv3.WithPrefix())
					if err != nil {
						return err
					}
					for _, kv := range got.Kvs {
						if kv.Lease == 0 {
							held = append(held, strings.TrimPrefix(string(kv.Key),
								"/sluice/v1/identity/range/default/"))
						}
					}
					slices.Sort(held)
					if want := slices.Sorted(slices.Values(c.known)); !slices.Equal(held, want) {
						return fmt.Errorf("etcd has %v, the caller %v", held, want)
					}
					return nil
				})
			})
		}
	}
}
