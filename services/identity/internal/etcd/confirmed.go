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
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/identity/internal/cluster"
	"github.com/sluice-net/sluice/services/identity/internal/confirmed"
	"github.com/sluice-net/sluice/services/identity/internal/etcd/session"
)

// Confirmed implements confirmed.Store.
type Confirmed struct {
	session *session.Session
	cfg     session.Config // of the session
}

// NewConfirmed returns a Confirmed below the prefix of a session.
func NewConfirmed(s *session.Session) *Confirmed { return &Confirmed{session: s, cfg: s.Config()} }

// confirmedSuffix is the end of the key with a node's confirmations.
const confirmedSuffix = "/confirmed"

func (s *Confirmed) summaryKey() string { return clusterPrefix(s.cfg.Prefix) + "confirmed" }

// denied names the grant that a role lacks.
func denied(err error, prefix, role string) error {
	if !errors.Is(err, rpctypes.ErrPermissionDenied) {
		return err
	}
	return fmt.Errorf("%w: grant readwrite on the prefix %s to %s (docs/identity.md): %w", confirmed.ErrDenied, prefix,
		role, err)
}

// Report implements confirmed.Store.
func (s *Confirmed) Report(ctx context.Context, r confirmed.Report) error {
	value, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("confirm mappings: %w", err)
	}
	lease, err := s.session.Lease()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	prefix := reportPrefix(s.cfg.Prefix) + s.cfg.Node + "/"
	_, err = s.session.Commit(ctx, "confirm mappings", s.session.Txn(ctx).If(s.session.Named()).
		Then(clientv3.OpPut(reportPrefix(s.cfg.Prefix)+s.cfg.Node+confirmedSuffix, string(value), clientv3.WithLease(lease))))
	return denied(err, prefix, "the etcd role of this node")
}

// Publish implements confirmed.Store.
func (s *Confirmed) Publish(ctx context.Context, sum confirmed.Summary) error {
	value, err := json.Marshal(sum)
	if err != nil {
		return fmt.Errorf("publish the summary of confirmations: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	_, err = s.session.Commit(ctx, "publish the summary of confirmations", s.session.Txn(ctx).
		If(collects(s.cfg)).
		Then(clientv3.OpPut(s.summaryKey(), string(value))))
	return denied(err, clusterPrefix(s.cfg.Prefix), "the etcd role of the nodes")
}

// FollowSummary implements confirmed.Store.
func (s *Confirmed) FollowSummary(ctx context.Context, sink func(confirmed.Summary, bool)) error {
	var last confirmed.Summary
	take := func(kv *mvccpb.KeyValue) {
		last = confirmed.Summary{}
		var sum confirmed.Summary
		if err := json.Unmarshal(kv.Value, &sum); err != nil {
			s.cfg.Log.Error("an unreadable summary of confirmations in etcd is ignored", "key", string(kv.Key), log.Err(err))
			return
		}
		if sum.Revision <= kv.ModRevision { // otherwise the summary is about another history of etcd
			last = sum
		}
	}
	return s.session.Follow(ctx, session.Reader{
		Prefix: s.summaryKey(), End: s.summaryKey() + "\x00",
		Begin:    func() { last = confirmed.Summary{} },
		Listed:   take,
		Complete: func(cluster.Point, time.Time) { sink(last, true) },
		Changes: func(events []*clientv3.Event, _ int64, _ time.Time) {
			for _, e := range events {
				if last = (confirmed.Summary{}); e.Type == clientv3.EventTypePut {
					take(e.Kv)
				}
			}
			if len(events) > 0 {
				sink(last, false)
			}
		},
	})
}

// FollowNodes implements confirmed.Store.
func (s *Confirmed) FollowNodes(ctx context.Context, t *confirmed.Tracker) error {
	prefix := s.session.AliveKey("")
	var at cluster.Point
	put := func(kv *mvccpb.KeyValue) {
		incarnation, _, _ := strings.Cut(string(kv.Value), " ")
		t.Node(strings.TrimPrefix(string(kv.Key), prefix), incarnation)
	}
	return s.session.Follow(ctx, session.Reader{
		Prefix: prefix, Begin: t.BeginNodes, Listed: put,
		Complete: func(to cluster.Point, _ time.Time) {
			at = to
			t.ReachNodes(at)
		},
		Changes: func(events []*clientv3.Event, revision int64, _ time.Time) {
			for _, e := range events {
				if e.Type == clientv3.EventTypePut {
					put(e.Kv)
				} else {
					t.NodeGone(strings.TrimPrefix(string(e.Kv.Key), prefix))
				}
			}
			at.Revision = revision
			t.ReachNodes(at)
		},
	})
}

// FollowReports implements confirmed.Store.
func (s *Confirmed) FollowReports(ctx context.Context, t *confirmed.Tracker) error {
	var at cluster.Point
	nodeOf := func(kv *mvccpb.KeyValue) (string, bool) {
		node, ok := strings.CutSuffix(strings.TrimPrefix(string(kv.Key), reportPrefix(s.cfg.Prefix)), confirmedSuffix)
		return node, ok && !strings.Contains(node, "/")
	}
	put := func(kv *mvccpb.KeyValue) {
		node, ok := nodeOf(kv)
		if !ok {
			return // another report
		}
		var r confirmed.Report
		if err := json.Unmarshal(kv.Value, &r); err != nil {
			s.cfg.Log.Error("an unreadable confirmation in etcd is ignored", "key", string(kv.Key), log.Err(err))
			t.ReportGone(node)
			return
		}
		t.Report(node, r, kv.ModRevision)
	}
	return s.session.Follow(ctx, session.Reader{
		Prefix: reportPrefix(s.cfg.Prefix), Begin: t.BeginReports, Listed: put,
		Complete: func(to cluster.Point, _ time.Time) {
			at = to
			t.ReachReports(at)
		},
		Changes: func(events []*clientv3.Event, revision int64, _ time.Time) {
			for _, e := range events {
				if node, ok := nodeOf(e.Kv); ok && e.Type != clientv3.EventTypePut {
					t.ReportGone(node)
				} else {
					put(e.Kv)
				}
			}
			at.Revision = revision
			t.ReachReports(at)
		},
	})
}
