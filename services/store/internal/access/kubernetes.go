// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package access

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/server/v3/lease"

	"github.com/sluice-net/sluice/services/store/internal/member"
)

// EnrolAccount enrols a node whose token the Kubernetes API accepted, and gives it its rights. Certificates of earlier
// enrolments of the node end. It returns the enrolment for the certificate.
func (a *Access) EnrolAccount(ctx context.Context, node string) (enrolment string, err error) {
	if err := CheckName(node); err != nil {
		return "", err
	}
	enrolment = newSecret()
	value, err := json.Marshal(Node{Enrolment: enrolment, Issued: a.now().UTC()})
	if err != nil {
		return "", err
	}
	entry := &pb.PutRequest{Key: []byte(nodesPrefix + node), Value: value}
	if _, err := a.etcd.Put(member.Root(ctx), entry); err != nil {
		return "", fmt.Errorf("record the node %s: %w", node, err)
	}
	return enrolment, a.allow(ctx, node)
}

// Allow lets nodes allocate new numbers and ranges, until Forbid or for the time from now on.
func (a *Access) Allow(ctx context.Context, d time.Duration) error {
	root := member.Root(ctx)
	if a.allowed != 0 {
		_, err := a.etcd.LeaseRenew(root, lease.LeaseID(a.allowed))
		if err == nil {
			return nil
		}
		if !errors.Is(err, lease.ErrLeaseNotFound) {
			return fmt.Errorf("allow new numbers: %w", err)
		}
	}
	grant, err := a.etcd.LeaseGrant(root, &pb.LeaseGrantRequest{TTL: int64(d.Seconds())})
	if err != nil {
		return fmt.Errorf("allow new numbers: %w", err)
	}
	entry := &pb.PutRequest{Key: []byte(a.prefix + allocateKey), Value: []byte("1"), Lease: grant.ID}
	if _, err := a.etcd.Put(root, entry); err != nil {
		return fmt.Errorf("allow new numbers: %w", err)
	}
	a.allowed = grant.ID // only now: without the key, the next call must write it
	return nil
}

// Forbid ends what Allow of an earlier process allowed: etcd prolongs all leases when it starts.
func (a *Access) Forbid(ctx context.Context) error {
	_, err := a.etcd.DeleteRange(member.Root(ctx), &pb.DeleteRangeRequest{Key: []byte(a.prefix + allocateKey)})
	if err != nil {
		return fmt.Errorf("forbid new numbers: %w", err)
	}
	a.allowed = 0
	return nil
}
