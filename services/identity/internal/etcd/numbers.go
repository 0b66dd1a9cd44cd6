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
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/cluster"
	"github.com/sluice-net/sluice/services/identity/internal/etcd/session"
)

func (s *Collection) numbersKey() string { return clusterPrefix(s.cfg.Prefix) + "numbers" }

// Resting implements allocator.Store.
func (s *Collection) Resting(ctx context.Context) (all []identity.Numeric, err error) {
	prefix := s.ids.quarantines()
	_, err = s.session.List(ctx, prefix, true, func(kv *mvccpb.KeyValue) {
		if n, err := parseNumber(strings.TrimPrefix(string(kv.Key), prefix)); err == nil {
			all = append(all, n)
		}
	})
	return all, err
}

// PublishNumbers implements allocator.Store. Only the collector writes: a former collector must not overwrite the
// counts of its successor.
func (s *Collection) PublishNumbers(ctx context.Context, n allocator.Numbers) error {
	value, err := json.Marshal(n)
	if err != nil {
		return fmt.Errorf("publish numbers: %w", err)
	}
	_, err = s.session.Commit(ctx, "publish numbers", s.session.Txn(ctx).
		If(collects(s.cfg)).
		Then(clientv3.OpPut(s.numbersKey(), string(value))))
	if errors.Is(err, rpctypes.ErrPermissionDenied) {
		return fmt.Errorf("%w: grant readwrite on the prefix %s to the etcd role of the nodes (docs/identity.md): %w",
			allocator.ErrDenied, clusterPrefix(s.cfg.Prefix), err)
	}
	return err
}

// FollowNumbers implements allocator.Store.
func (s *Collection) FollowNumbers(ctx context.Context, sink func(allocator.Numbers)) error {
	var last allocator.Numbers
	take := func(kv *mvccpb.KeyValue) {
		var n allocator.Numbers
		if err := json.Unmarshal(kv.Value, &n); err != nil {
			s.cfg.Log.Error("unreadable counts of numbers in etcd are ignored", "key", string(kv.Key), log.Err(err))
			return
		}
		last = n
	}
	return s.session.Follow(ctx, session.Reader{
		Prefix: s.numbersKey(), End: s.numbersKey() + "\x00",
		Begin:    func() { last = allocator.Numbers{} },
		Listed:   take,
		Complete: func(cluster.Point, time.Time) { sink(last) },
		Changes: func(events []*clientv3.Event, _ int64, _ time.Time) {
			for _, e := range events {
				if last = (allocator.Numbers{}); e.Type == clientv3.EventTypePut {
					take(e.Kv)
				}
			}
			if len(events) > 0 {
				sink(last)
			}
		},
	})
}
