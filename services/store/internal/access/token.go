// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package access

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/sluice-net/sluice/services/store/internal/member"
)

// token is a join token as the store keeps it, under the hash of its secret.
type token struct {
	Node    string    `json:"node"` // the only node that may use it; empty: any node without credentials
	Member  bool      `json:"member"`
	Expires time.Time `json:"expires"`
	// UsedBy is the hash of the public key that used it, or a member. The same user may repeat its call.
	UsedBy    string `json:"usedBy"`
	UsedNode  string `json:"usedNode"`
	Enrolment string `json:"enrolment"` // of UsedNode
}

// kept is how long an expired token is kept, so that a refusal can name the reason.
const kept = time.Hour

func tokenKey(secret string) string {
	sum := sha256.Sum256([]byte(secret))
	return tokensPrefix + hex.EncodeToString(sum[:])
}

// NewToken stores a token and returns its secret.
func (a *Access) NewToken(ctx context.Context, node string, forMember bool, valid time.Duration) (
	secret string, expires time.Time, err error,
) {
	if node != "" {
		if err := CheckName(node); err != nil {
			return "", time.Time{}, err
		}
	}
	secret, expires = newSecret(), a.now().Add(valid).UTC()
	value, err := json.Marshal(token{Node: node, Member: forMember, Expires: expires})
	if err != nil {
		return "", time.Time{}, err
	}
	root := member.Root(ctx)
	// The lease also removes the token if the clock of a member is wrong.
	lease, err := a.etcd.LeaseGrant(root, &pb.LeaseGrantRequest{TTL: int64((valid + kept) / time.Second)})
	if err != nil {
		return "", time.Time{}, fmt.Errorf("grant a lease for the token: %w", err)
	}
	entry := &pb.PutRequest{Key: []byte(tokenKey(secret)), Value: value, Lease: lease.ID}
	if _, err := a.etcd.Put(root, entry); err != nil {
		return "", time.Time{}, fmt.Errorf("store the token: %w", err)
	}
	return secret, expires, nil
}

// redeem marks a token as used, in one transaction with other operations. It returns the used token.
func (a *Access) redeem(ctx context.Context, secret, node, by string, forMember bool,
	also func(t token) ([]*pb.Compare, []*pb.RequestOp, error),
) (token, error) {
	root, key := member.Root(ctx), tokenKey(secret)
	resp, err := a.etcd.Range(root, &pb.RangeRequest{Key: []byte(key)})
	if err != nil {
		return token{}, fmt.Errorf("read the token: %w", err)
	}
	if len(resp.Kvs) == 0 {
		return token{}, fmt.Errorf("%w: it is unknown, or expired more than %s ago", ErrToken, kept)
	}
	kv := resp.Kvs[0]
	var t token
	if err := json.Unmarshal(kv.Value, &t); err != nil {
		return token{}, fmt.Errorf("the stored token: %w", err)
	}
	switch {
	case !a.now().Before(t.Expires):
		return token{}, fmt.Errorf("%w: it expired at %s; make another one", ErrToken, t.Expires.Format(time.RFC3339))
	case t.Member != forMember:
		return token{}, fmt.Errorf("%w: it is for %s", ErrToken, kindOf(t.Member))
	case t.Node != "" && t.Node != node:
		return token{}, fmt.Errorf("%w: it is for the node %s, not for %s", ErrToken, t.Node, node)
	case t.UsedBy == by && t.UsedNode == node:
		return t, nil
	case t.UsedBy != "":
		return token{}, fmt.Errorf("%w: it has been used, for the node %s; make another one", ErrToken, t.UsedNode)
	}
	t.UsedBy, t.UsedNode, t.Enrolment = by, node, newSecret()
	compare, success, err := also(t)
	if err != nil {
		return token{}, err
	}
	value, err := json.Marshal(t)
	if err != nil {
		return token{}, err
	}
	txn, err := a.etcd.Txn(root, &pb.TxnRequest{
		Compare: append(compare, unchanged(key, kv.ModRevision)),
		Success: append(success, put(key, value, kv.Lease)),
	})
	if err != nil {
		return token{}, fmt.Errorf("use the token: %w", err)
	}
	if !txn.Succeeded {
		return token{}, fmt.Errorf("%w: another machine used it, or joined as node %s, at the same time", ErrToken, node)
	}
	return t, nil
}

func kindOf(forMember bool) string {
	if forMember {
		return "members: join with --member"
	}
	return "nodes: join without --member"
}

// Enrol uses a token for a node, and gives the node its rights. by identifies the machine. It returns the enrolment for
// the certificate.
func (a *Access) Enrol(ctx context.Context, secret, node, by string) (enrolment string, err error) {
	if err := CheckName(node); err != nil {
		return "", err
	}
	t, err := a.redeem(ctx, secret, node, by, false, func(t token) ([]*pb.Compare, []*pb.RequestOp, error) {
		value, err := json.Marshal(Node{Enrolment: t.Enrolment, Issued: a.now().UTC()})
		if err != nil {
			return nil, nil, err
		}
		ops := []*pb.RequestOp{put(nodesPrefix+node, value, 0)}
		if t.Node == node {
			return nil, ops, nil
		}
		if n, _, err := a.node(ctx, node, false); err != nil {
			return nil, nil, err
		} else if n != nil {
			return nil, nil, fmt.Errorf("%w: %s; if this machine replaces it, make a token with --node %s",
				ErrExists, node, node)
		}
		return []*pb.Compare{absent(nodesPrefix + node)}, ops, nil
	})
	if err != nil {
		return "", err
	}
	return t.Enrolment, a.allow(ctx, node)
}

// EnrolMember uses a token for a member.
func (a *Access) EnrolMember(ctx context.Context, secret, name, address string) error {
	if err := CheckMemberName(name); err != nil {
		return err
	}
	_, err := a.redeem(ctx, secret, name, "member at "+address, true,
		func(token) ([]*pb.Compare, []*pb.RequestOp, error) { return nil, nil, nil })
	return err
}
