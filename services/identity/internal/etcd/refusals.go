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

// refusedKeys has the last parts of the keys with the objects that a node does not enforce as written, by subject.
// Earlier versions ignore keys that they do not know.
var refusedKeys = map[string]refusals.Subject{"refused": refusals.Policies, "refused-services": refusals.Services}

// refusedKey returns the key of a node's report.
func refusedKey(prefix, node string, of refusals.Subject) string {
	for last, subject := range refusedKeys {
		if subject == of {
			return reportPrefix(prefix) + node + "/" + last
		}
	}
	panic(fmt.Sprintf("refusals: no key for subject %d", of))
}

// ReportRefusals implements refusals.Store.
func (s *Refusals) ReportRefusals(ctx context.Context, subject refusals.Subject, r refusals.Report) error {
	const what = "report what is not enforced as written"
	key := refusedKey(s.cfg.Prefix, s.cfg.Node, subject)
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
		node, last, _ := strings.Cut(strings.TrimPrefix(string(kv.Key), reportPrefix(s.cfg.Prefix)), "/")
		subject, ok := refusedKeys[last]
		if !ok {
			return // another report
		}
		var r refusals.Report
		if !gone {
			err := json.Unmarshal(kv.Value, &r)
			if err == nil && r.Empty() {
				err = errors.New("it is empty, but an empty report is never stored")
			}
			if err != nil {
				const what = "a report in etcd of what a node does not enforce as written is corrupt"
				s.cfg.Log.Warn(what, "key", string(kv.Key), log.Err(err))
				r = refusals.Report{Corrupt: true}
			}
		}
		sink.Node(node, subject, r)
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
