// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package access decides what a node may do in the store: which users and roles etcd has, which machines have
// credentials, and which join tokens are valid.
//
// All of this is stored in etcd, below a prefix that no node can read, so all members decide alike.
package access

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"go.etcd.io/etcd/api/v3/authpb"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/auth"
	"go.etcd.io/etcd/server/v3/etcdserver"

	"github.com/sluice-net/sluice/services/store/internal/authority"
	"github.com/sluice-net/sluice/services/store/internal/member"
)

var (
	// ErrToken is returned for a join token that does not allow what its bearer wants.
	ErrToken = errors.New("the join token is refused")
	// ErrExists is returned for a node that has credentials already.
	ErrExists = errors.New("the node has credentials")
	// ErrRefused is returned for a certificate that is no longer accepted.
	ErrRefused = errors.New("the certificate is refused")
	// ErrName is returned for a name that no node can have.
	ErrName = errors.New("invalid name of a node")
)

// Keys of the store itself. No role of a node covers them.
const (
	prefix       = "/sluice/v1/store/"
	nodesPrefix  = prefix + "nodes/"
	tokensPrefix = prefix + "tokens/"
)

// restoredKey is below the prefix of the nodes, which read it: while it exists, they allocate no new number or range.
const restoredKey = "/restored"

// allocateKey is below the prefix of the nodes: while it is absent, nodes of a store in Kubernetes allocate no new
// number or range, because another store may have the next epoch.
const allocateKey = "/allocate"

// zoneKey is below the prefix of the nodes, which read it: the epoch, which decides where they look for new numbers.
const zoneKey = "/epoch"

// settingsKey is below the prefix of the nodes: the settings of ipam, which the first node writes.
const settingsKey = "/ipam"

// The roles that several users have.
const (
	commonRole   = "nodes"
	settingsRole = "settings"
	assignerRole = "assigner"
)

// Access changes etcd with every right.
type Access struct {
	etcd   repeating
	prefix string // prefix of the keys of nodes
	now    func() time.Time

	allowed int64 // lease of allocateKey; used by one goroutine
}

// New returns the Access of a member. prefix begins the keys of the nodes.
func New(etcd *etcdserver.EtcdServer, prefix string, now func() time.Time) *Access {
	return &Access{etcd: repeating{etcd}, prefix: prefix, now: now}
}

// CheckName returns ErrName for a name that no node can have.
func CheckName(name string) error {
	unusable := func(r rune) bool { return r == '/' || unicode.IsSpace(r) || !unicode.IsPrint(r) }
	if name == "" || len(name) > 253 || strings.ContainsFunc(name, unusable) || strings.HasPrefix(name, ".") {
		return fmt.Errorf("%w: %q is not 1 to 253 printable characters without '/', white space and a leading '.'",
			ErrName, name)
	}
	return nil
}

// CheckMemberName returns ErrName for a name that no member can have.
func CheckMemberName(name string) error {
	if strings.ContainsAny(name, "=,") {
		return fmt.Errorf("%w: %q has a '=' or ',', which the list of members cannot contain", ErrName, name)
	}
	return CheckName(name)
}

// Prepare creates the administrator and the common roles, and makes etcd require a user for every request. If the data
// are from an earlier epoch, it removes all join tokens, because a used token could be valid again, and prevents new
// allocations for claimTime. No client may be served before Prepare. It may be repeated.
func (a *Access) Prepare(ctx context.Context, epoch uint64) error {
	root := member.Root(ctx)
	if err := a.begin(root, epoch); err != nil {
		return err
	}
	if a.etcd.AuthStore().IsAuthEnabled() {
		return nil
	}
	// Nodes do not write the version of the layout: a wrong one would stop all others.
	if _, err := a.etcd.Txn(root, &pb.TxnRequest{
		Compare: []*pb.Compare{absent(a.prefix + "/layout")},
		Success: []*pb.RequestOp{put(a.prefix+"/layout", []byte("2"), 0)},
	}); err != nil {
		return fmt.Errorf("write the version of the layout: %w", err)
	}
	if err := a.role(ctx, commonRole, a.common()); err != nil {
		return err
	}
	if err := a.role(ctx, settingsRole, []*authpb.Permission{a.settings()}); err != nil {
		return err
	}
	if err := a.role(ctx, "root", nil); err != nil {
		return err
	}
	if err := a.user(ctx, "root", "root"); err != nil {
		return err
	}
	if _, err := a.etcd.AuthEnable(root, &pb.AuthEnableRequest{}); err != nil {
		return fmt.Errorf("have etcd demand a user: %w", err)
	}
	return nil
}

// claimTime is how long, after a restore, nodes only claim the numbers and ranges that they hold, before new ones are
// allocated. A node notices the new epoch within seconds.
const claimTime = time.Minute

// begin begins an epoch, unless the data are already of this epoch: it removes all tokens and, after a restore, writes
// the key that prevents new allocations for claimTime.
func (a *Access) begin(root context.Context, epoch uint64) error {
	value := []byte(strconv.FormatUint(epoch, 10))
	have, err := a.etcd.Range(root, &pb.RangeRequest{Key: []byte(member.EpochKey)})
	if err != nil {
		return fmt.Errorf("read the epoch of the data: %w", err)
	}
	if len(have.Kvs) > 0 && string(have.Kvs[0].Value) == string(value) {
		return nil
	}
	writes := []*pb.RequestOp{
		put(member.EpochKey, value, 0),
		put(a.prefix+zoneKey, value, 0),
		{Request: &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: &pb.DeleteRangeRequest{
			Key: []byte(tokensPrefix), RangeEnd: []byte(clientv3.GetPrefixRangeEnd(tokensPrefix)),
		}}},
	}
	if epoch > 1 {
		lease, err := a.etcd.LeaseGrant(root, &pb.LeaseGrantRequest{TTL: int64(claimTime.Seconds())})
		if err != nil {
			return fmt.Errorf("begin the epoch %d: %w", epoch, err)
		}
		writes = append(writes, put(a.prefix+restoredKey, value, lease.ID))
	}
	if _, err := a.etcd.Txn(root, &pb.TxnRequest{Success: writes}); err != nil {
		return fmt.Errorf("begin the epoch %d: %w", epoch, err)
	}
	return nil
}

// common are the permissions that all nodes have.
func (a *Access) common() []*authpb.Permission {
	all := []*authpb.Permission{below(authpb.READ, a.prefix+"/")}
	for _, shared := range []string{"id", "labels", "fence", "rest", "range", "cluster"} {
		all = append(all, below(authpb.READWRITE, a.prefix+"/"+shared+"/"))
	}
	return append(all, one(authpb.READWRITE, a.prefix+"/collector"))
}

// settings is the permission to write the settings of ipam.
func (a *Access) settings() *authpb.Permission { return one(authpb.READWRITE, a.prefix+settingsKey) }

// own are the permissions that one node has.
func (a *Access) own(node string) []*authpb.Permission {
	var all []*authpb.Permission
	for _, kind := range []string{"ref", "ip", "report"} {
		all = append(all, below(authpb.READWRITE, a.prefix+"/"+kind+"/"+node+"/"))
	}
	return append(all, one(authpb.READWRITE, a.prefix+"/alive/"+node))
}

func one(kind authpb.Permission_Type, key string) *authpb.Permission {
	return &authpb.Permission{PermType: kind, Key: []byte(key)}
}

func below(kind authpb.Permission_Type, key string) *authpb.Permission {
	return &authpb.Permission{PermType: kind, Key: []byte(key), RangeEnd: []byte(clientv3.GetPrefixRangeEnd(key))}
}

// role makes a role if it is absent, and adds permissions that it lacks. It avoids needless writes: each one makes etcd
// repeat all requests in progress.
func (a *Access) role(ctx context.Context, name string, want []*authpb.Permission) error {
	root := member.Root(ctx)
	have, err := a.etcd.RoleGet(root, &pb.AuthRoleGetRequest{Role: name})
	if errors.Is(err, auth.ErrRoleNotFound) {
		if _, err = a.etcd.RoleAdd(root, &pb.AuthRoleAddRequest{Name: name}); errors.Is(err, auth.ErrRoleAlreadyExist) {
			err = nil
		}
	}
	if err != nil {
		return fmt.Errorf("make etcd's role %s: %w", name, err)
	}
	for _, p := range want {
		if have != nil && slices.ContainsFunc(have.Perm, func(x *authpb.Permission) bool {
			return same(x, p)
		}) {
			continue
		}
		if _, err := a.etcd.RoleGrantPermission(root, &pb.AuthRoleGrantPermissionRequest{Name: name, Perm: p}); err != nil {
			return fmt.Errorf("grant %s to etcd's role %s: %w", p.Key, name, err)
		}
	}
	return nil
}

func same(a, b *authpb.Permission) bool {
	return a.PermType == b.PermType && string(a.Key) == string(b.Key) && string(a.RangeEnd) == string(b.RangeEnd)
}

func (a *Access) user(ctx context.Context, name string, roles ...string) error {
	root := member.Root(ctx)
	have, err := a.etcd.UserGet(root, &pb.AuthUserGetRequest{Name: name})
	if errors.Is(err, auth.ErrUserNotFound) {
		_, err = a.etcd.UserAdd(root, &pb.AuthUserAddRequest{Name: name, Options: &authpb.UserAddOptions{NoPassword: true}})
		if errors.Is(err, auth.ErrUserAlreadyExist) {
			err = nil
		}
	}
	if err != nil {
		return fmt.Errorf("make etcd's user %s: %w", name, err)
	}
	for _, role := range roles {
		if have != nil && slices.Contains(have.Roles, role) {
			continue
		}
		if _, err := a.etcd.UserGrantRole(root, &pb.AuthUserGrantRoleRequest{User: name, Role: role}); err != nil {
			return fmt.Errorf("grant the role %s to etcd's user %s: %w", role, name, err)
		}
	}
	return nil
}

// Node is the record of a node with credentials.
type Node struct {
	Name      string    `json:"-"`
	Enrolment string    `json:"enrolment"` // in its certificates; empty for the node of a member's machine
	Issued    time.Time `json:"issued"`
	Expires   time.Time `json:"expires"`
}

// allow gives a node its user and roles.
func (a *Access) allow(ctx context.Context, node string, also ...string) error {
	user := authority.User(node)
	if err := a.role(ctx, user, a.own(node)); err != nil {
		return err
	}
	return a.user(ctx, user, append([]string{commonRole, user}, also...)...)
}

// AllowLocal gives the node of a member's machine its rights. This node may also write the settings of ipam, which must
// be equal on all nodes. That is no additional risk, because its machine has the keys of the store.
func (a *Access) AllowLocal(ctx context.Context, node string) error {
	if err := CheckName(node); err != nil {
		return err
	}
	// If another machine is enrolled under this name, its record stays: both can then connect as this node.
	value, err := json.Marshal(Node{})
	if err != nil {
		return err
	}
	if _, err := a.etcd.Txn(member.Root(ctx), &pb.TxnRequest{
		Compare: []*pb.Compare{absent(nodesPrefix + node)},
		Success: []*pb.RequestOp{put(nodesPrefix+node, value, 0)},
	}); err != nil {
		return fmt.Errorf("record the node %s: %w", node, err)
	}
	return a.allow(ctx, node, settingsRole)
}

// Nodes returns the nodes with credentials, by name, as this member knows them.
func (a *Access) Nodes(ctx context.Context) (out []Node, err error) {
	resp, err := a.etcd.Range(member.Root(ctx), &pb.RangeRequest{
		Key: []byte(nodesPrefix), RangeEnd: []byte(clientv3.GetPrefixRangeEnd(nodesPrefix)), Serializable: true,
	})
	if err != nil {
		return nil, fmt.Errorf("list nodes: %w", err)
	}
	for _, kv := range resp.Kvs {
		n := Node{Name: strings.TrimPrefix(string(kv.Key), nodesPrefix)}
		if err := json.Unmarshal(kv.Value, &n); err != nil {
			return nil, fmt.Errorf("%s: %w", kv.Key, err)
		}
		out = append(out, n)
	}
	return out, nil
}

// Check returns ErrRefused unless a certificate of this enrolment is accepted for the node. It only reads the data of
// this member, so that nodes can connect to a store without a quorum, and read.
func (a *Access) Check(ctx context.Context, node, enrolment string) error {
	n, _, err := a.node(ctx, node, true)
	switch {
	case err != nil:
		return err
	case n == nil:
		return fmt.Errorf("%w: the node %s is not enrolled, or was revoked; join again with a token", ErrRefused, node)
	case enrolment == "" || n.Enrolment != enrolment:
		return fmt.Errorf("%w: another machine was enrolled as node %s later", ErrRefused, node)
	}
	return nil
}

func (a *Access) node(ctx context.Context, name string, serializable bool) (*Node, int64, error) {
	resp, err := a.etcd.Range(member.Root(ctx), &pb.RangeRequest{
		Key: []byte(nodesPrefix + name), Serializable: serializable,
	})
	if err != nil {
		return nil, 0, fmt.Errorf("read the node %s: %w", name, err)
	}
	if len(resp.Kvs) == 0 {
		return nil, 0, nil
	}
	n := Node{Name: name}
	if err := json.Unmarshal(resp.Kvs[0].Value, &n); err != nil {
		return nil, 0, fmt.Errorf("%s: %w", nodesPrefix+name, err)
	}
	return &n, resp.Kvs[0].ModRevision, nil
}

// Renewed records that a certificate was issued.
func (a *Access) Renewed(ctx context.Context, node, enrolment string, expires time.Time) error {
	n, revision, err := a.node(ctx, node, false)
	if err != nil {
		return err
	}
	if n == nil || n.Enrolment != enrolment {
		return fmt.Errorf("%w: the node %s was revoked or enrolled again", ErrRefused, node)
	}
	n.Issued, n.Expires = a.now().UTC(), expires.UTC()
	value, err := json.Marshal(n)
	if err != nil {
		return err
	}
	resp, err := a.etcd.Txn(member.Root(ctx), &pb.TxnRequest{
		Compare: []*pb.Compare{unchanged(nodesPrefix+node, revision)},
		Success: []*pb.RequestOp{put(nodesPrefix+node, value, 0)},
	})
	if err != nil {
		return fmt.Errorf("record the certificate of the node %s: %w", node, err)
	}
	if !resp.Succeeded {
		return fmt.Errorf("%w: the node %s was revoked or enrolled again", ErrRefused, node)
	}
	return nil
}

// Revoke withdraws the credentials of a node, and reports whether it had any. From then on etcd refuses its requests.
// With validateOnly it changes nothing.
func (a *Access) Revoke(ctx context.Context, node string, validateOnly bool) (bool, error) {
	if err := CheckName(node); err != nil {
		return false, err
	}
	if validateOnly {
		n, _, err := a.node(ctx, node, false)
		return n != nil, err
	}
	root, user := member.Root(ctx), authority.User(node)
	resp, err := a.etcd.DeleteRange(root, &pb.DeleteRangeRequest{Key: []byte(nodesPrefix + node)})
	if err != nil {
		return false, fmt.Errorf("remove the record of the node %s: %w", node, err)
	}
	if _, err := a.etcd.UserDelete(root, &pb.AuthUserDeleteRequest{Name: user}); err != nil &&
		!errors.Is(err, auth.ErrUserNotFound) {
		return false, fmt.Errorf("remove etcd's user %s: %w", user, err)
	}
	if _, err := a.etcd.RoleDelete(root, &pb.AuthRoleDeleteRequest{Role: user}); err != nil &&
		!errors.Is(err, auth.ErrRoleNotFound) {
		return false, fmt.Errorf("remove etcd's role %s: %w", user, err)
	}
	return resp.Deleted > 0, nil
}

func absent(key string) *pb.Compare {
	return &pb.Compare{
		Target: pb.Compare_CREATE, Result: pb.Compare_EQUAL, Key: []byte(key),
		TargetUnion: &pb.Compare_CreateRevision{CreateRevision: 0},
	}
}

func unchanged(key string, revision int64) *pb.Compare {
	return &pb.Compare{
		Target: pb.Compare_MOD, Result: pb.Compare_EQUAL, Key: []byte(key),
		TargetUnion: &pb.Compare_ModRevision{ModRevision: revision},
	}
}

func put(key string, value []byte, lease int64) *pb.RequestOp {
	return &pb.RequestOp{Request: &pb.RequestOp_RequestPut{
		RequestPut: &pb.PutRequest{Key: []byte(key), Value: value, Lease: lease},
	}}
}

func newSecret() string { return rand.Text() + rand.Text() }
