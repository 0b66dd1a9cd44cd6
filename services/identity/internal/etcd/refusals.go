// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package etcd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/identity/internal/cluster"
	"github.com/sluice-net/sluice/services/identity/internal/etcd/session"
	"github.com/sluice-net/sluice/services/identity/internal/refusals"
)

// Refusals implements refusals.Store.
type Refusals struct {
	session *session.Session
	cfg     session.Config // of the session
}

// NewRefusals returns Refusals below the prefix of a session.
func NewRefusals(s *session.Session) *Refusals { return &Refusals{session: s, cfg: s.Config()} }

// refusedSuffix is the suffix of the key with the policies that a node does not enforce as written.
const refusedSuffix = "/refused"

// ReportRefusals implements refusals.Store.
func (s *Refusals) ReportRefusals(ctx context.Context, r refusals.Report) error {
	const what = "report refused policies"
	key := reportPrefix(s.cfg.Prefix) + s.cfg.Node + refusedSuffix
	resp, err := s.session.Get(ctx, what, key)
	if err != nil {
		return err
	}
	if r.Empty() {
		if len(resp.Kvs) > 0 {
			_, err = s.session.Commit(ctx, what, s.session.Txn(ctx).Then(clientv3.OpDelete(key)))
		}
		return err
	}
	value, err := json.Marshal(r)
	switch {
	case err != nil:
		return fmt.Errorf("%s: %w", what, err)
	case len(value) > refusals.MaxBytes:
		return refusals.ErrTooLarge
	}
	lease, err := s.session.Lease()
	if err != nil {
		return err
	}
	if len(resp.Kvs) > 0 && string(resp.Kvs[0].Value) == string(value) && clientv3.LeaseID(resp.Kvs[0].Lease) == lease {
		return nil
	}
	_, err = s.session.Commit(ctx, what,
		s.session.Txn(ctx).Then(clientv3.OpPut(key, string(value), clientv3.WithLease(lease))))
	return err
}

// FollowRefusals implements refusals.Store.
func (s *Refusals) FollowRefusals(ctx context.Context, sink refusals.Sink) error {
	give := func(kv *mvccpb.KeyValue, gone bool) {
		node, ok := strings.CutSuffix(strings.TrimPrefix(string(kv.Key), reportPrefix(s.cfg.Prefix)), refusedSuffix)
		if !ok || strings.Contains(node, "/") {
			return // another report
		}
		var r refusals.Report
		if !gone {
			err := json.Unmarshal(kv.Value, &r)
			if err == nil && r.Empty() {
				err = errors.New("it is empty, but an empty report is never stored")
			}
			if err != nil {
				s.cfg.Log.Warn("a report of refused policies in etcd is corrupt", "key", string(kv.Key), log.Err(err))
				r = refusals.Report{Corrupt: true}
			}
		}
		sink.Node(node, r)
	}
	return s.session.Follow(ctx, session.Reader{
		Prefix:   reportPrefix(s.cfg.Prefix),
		Begin:    sink.Begin,
		Listed:   func(kv *mvccpb.KeyValue) { give(kv, false) },
		Complete: func(cluster.Point, time.Time) { sink.Complete() },
		Changes: func(events []*clientv3.Event, _ int64, _ time.Time) {
			for _, e := range events {
				give(e.Kv, e.Type != clientv3.EventTypePut)
			}
		},
	})
}
