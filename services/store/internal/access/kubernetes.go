// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package access

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.etcd.io/etcd/api/v3/authpb"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/server/v3/auth"
	"go.etcd.io/etcd/server/v3/lease"

	"github.com/sluice-net/sluice/services/store/internal/authority"
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
	return enrolment, a.allow(ctx, node, settingsRole)
}

// LimitSettings allows the nodes of a store in Kubernetes to write the settings of ipam while the key is absent: each
// epoch begins without settings, and any node may be the first. Afterwards no node may change them.
func (a *Access) LimitSettings(ctx context.Context) error {
	root := member.Root(ctx)
	have, err := a.etcd.Range(root, &pb.RangeRequest{Key: []byte(a.prefix + settingsKey), CountOnly: true})
	if err != nil {
		return fmt.Errorf("read the settings of ipam: %w", err)
	}
	role, err := a.etcd.AuthStore().RoleGet(&pb.AuthRoleGetRequest{Role: settingsRole})
	if err != nil {
		return fmt.Errorf("read etcd's role %s: %w", settingsRole, err)
	}
	p := a.settings()
	granted := slices.ContainsFunc(role.Perm, func(x *authpb.Permission) bool { return same(x, p) })
	switch {
	case have.Count == 0 && !granted:
		_, err = a.etcd.RoleGrantPermission(root, &pb.AuthRoleGrantPermissionRequest{Name: settingsRole, Perm: p})
	case have.Count > 0 && granted:
		_, err = a.etcd.RoleRevokePermission(root, &pb.AuthRoleRevokePermissionRequest{
			Role: settingsRole, Key: p.Key, RangeEnd: p.RangeEnd,
		})
	}
	if err != nil {
		return fmt.Errorf("change etcd's role %s: %w", settingsRole, err)
	}
	return nil
}

// LetAssign allows exactly these nodes to publish the podCIDRs of all nodes. With this permission, a compromised node
// could take the ranges of other nodes.
func (a *Access) LetAssign(ctx context.Context, nodes []string) error {
	assigned := below(authpb.READWRITE, a.prefix+"/ip/.assigned/")
	if err := a.role(ctx, assignerRole, []*authpb.Permission{assigned}); err != nil {
		return err
	}
	all, err := a.Nodes(ctx)
	if err != nil {
		return err
	}
	for _, n := range all {
		user := authority.User(n.Name)
		have, err := a.etcd.AuthStore().UserGet(&pb.AuthUserGetRequest{Name: user})
		if errors.Is(err, auth.ErrUserNotFound) {
			continue // it is enrolling
		}
		if err != nil {
			return fmt.Errorf("read etcd's user %s: %w", user, err)
		}
		want, has := slices.Contains(nodes, n.Name), slices.Contains(have.Roles, assignerRole)
		switch {
		case want && !has:
			err = a.user(ctx, user, assignerRole)
		case has && !want:
			_, err = a.etcd.UserRevokeRole(member.Root(ctx), &pb.AuthUserRevokeRoleRequest{Name: user, Role: assignerRole})
		}
		if err != nil {
			return fmt.Errorf("change the role %s of etcd's user %s: %w", assignerRole, user, err)
		}
	}
	return nil
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
	a.allowed = grant.ID // only now: if a step before failed, the next call must write the key
	return nil
}

// Forbid revokes what Allow of an earlier process has allowed: when etcd starts, it extends all leases.
func (a *Access) Forbid(ctx context.Context) error {
	_, err := a.etcd.DeleteRange(member.Root(ctx), &pb.DeleteRangeRequest{Key: []byte(a.prefix + allocateKey)})
	if err != nil {
		return fmt.Errorf("forbid new numbers: %w", err)
	}
	a.allowed = 0
	return nil
}
