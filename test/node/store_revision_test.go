// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"context"
	"testing"

	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

// TestStreamsNameTheRevisionOfEtcd: the watches of identities and of tables report the same store, etcd, and its
// revision, which only grows.
func TestStreamsNameTheRevisionOfEtcd(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	defer cancel()
	identities, err := n.identity.WatchIdentities(ctx, &identityv1.WatchIdentitiesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	tables, err := n.policies(t).WatchPolicyTables(ctx)
	if err != nil {
		t.Fatal(err)
	}
	subscribe := &policyv1.WatchPolicyTablesRequest_Subscribe{Subscribe: &policyv1.Subscribe{
		Name: "test", Role: policyv1.SubscriberRole_SUBSCRIBER_ROLE_WATCHES,
		Formats: []policyv1.TableFormat{policyv1.TableFormat_TABLE_FORMAT_RANGES},
	}}
	if err := tables.Send(&policyv1.WatchPolicyTablesRequest{Message: subscribe}); err != nil {
		t.Fatal(err)
	}
	streams := map[string]func() *identityv1.StoreRevision{
		"identities": func() *identityv1.StoreRevision {
			m, err := identities.Recv()
			if err != nil {
				t.Fatal(err)
			}
			return m.GetStoreRevision()
		},
		"tables": func() *identityv1.StoreRevision {
			m, err := tables.Recv()
			if err != nil {
				t.Fatal(err)
			}
			for _, step := range m.GetSteps() {
				if b := step.GetBarrier(); b != nil {
					return b.GetStoreRevision()
				}
			}
			return nil
		},
	}
	last := map[string]*identityv1.StoreRevision{}
	// reach reads a stream until it has passed a revision.
	reach := func(name string, beyond int64) *identityv1.StoreRevision {
		t.Helper()
		for last[name].GetRevision() <= beyond {
			at := streams[name]()
			if at == nil {
				continue
			}
			before := last[name]
			if before != nil && (at.GetClusterId() != before.GetClusterId() || at.GetRevision() < before.GetRevision()) {
				t.Fatalf("%s went from %v to %v", name, before, at)
			}
			last[name] = at
		}
		return last[name]
	}
	for i := range 5 {
		before := reach("identities", 0).GetRevision()
		if _, err := n.identity.AllocateIdentity(ctx, &identityv1.AllocateIdentityRequest{
			Reference: "test", Labels: []*workloadv1.Label{{Source: "cni", Key: "n", Value: string(rune('a' + i))}},
		}); err != nil {
			t.Fatal(err)
		}
		a := reach("identities", before)
		b := reach("tables", before)
		if a.GetClusterId() == 0 || a.GetClusterId() != b.GetClusterId() {
			t.Fatalf("identities are at %v and tables at %v: different stores", a, b)
		}
		if _, err := n.identity.ReleaseIdentity(ctx, &identityv1.ReleaseIdentityRequest{
			Holder: &identityv1.ReleaseIdentityRequest_Reference{Reference: "test"},
		}); err != nil {
			t.Fatal(err)
		}
	}
}
