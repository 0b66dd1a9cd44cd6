// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package access

import (
	"context"
	"errors"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/server/v3/auth"
	"go.etcd.io/etcd/server/v3/etcdserver"
)

// repeating is an etcd whose reads and writes are repeated if users or roles changed between a call and its turn: etcd
// refuses such a call and does nothing. Each node that enrols makes several such changes.
type repeating struct{ *etcdserver.EtcdServer }

// maxRepeats is how often a call is repeated. Other calls change users only a few times for each node.
const maxRepeats = 64

func repeat[Req, Resp any](ctx context.Context, call func(context.Context, Req) (Resp, error), r Req) (Resp, error) {
	resp, err := call(ctx, r)
	for range maxRepeats {
		if !errors.Is(err, auth.ErrAuthOldRevision) || ctx.Err() != nil {
			break
		}
		resp, err = call(ctx, r)
	}
	return resp, err
}

// Range is the call of etcd.
func (s repeating) Range(ctx context.Context, r *pb.RangeRequest) (*pb.RangeResponse, error) {
	return repeat(ctx, s.EtcdServer.Range, r)
}

// Put is the call of etcd.
func (s repeating) Put(ctx context.Context, r *pb.PutRequest) (*pb.PutResponse, error) {
	return repeat(ctx, s.EtcdServer.Put, r)
}

// DeleteRange is the call of etcd.
func (s repeating) DeleteRange(ctx context.Context, r *pb.DeleteRangeRequest) (*pb.DeleteRangeResponse, error) {
	return repeat(ctx, s.EtcdServer.DeleteRange, r)
}

// Txn is the call of etcd.
func (s repeating) Txn(ctx context.Context, r *pb.TxnRequest) (*pb.TxnResponse, error) {
	return repeat(ctx, s.EtcdServer.Txn, r)
}
