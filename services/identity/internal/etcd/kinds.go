// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package etcd

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/identity/internal/cluster"
	"github.com/sluice-net/sluice/services/identity/internal/etcd/session"
	"github.com/sluice-net/sluice/services/identity/internal/kinds"
)

// kindsKey has the kinds of policy that the API server has.
func (s *Store) kindsKey() string { return s.cfg.Prefix + "/cluster/kinds" }

// kindsRecord is the value of kindsKey.
type kindsRecord struct {
	Kinds []string `json:"kinds"` // group/version/resource, sorted
}

// PublishKinds implements kinds.Store.
func (s *Store) PublishKinds(ctx context.Context, all []string) error {
	resp, err := s.session.Get(ctx, "read the kinds of policy", s.kindsKey())
	if err != nil {
		return err
	}
	if len(resp.Kvs) > 0 {
		if have := s.readKinds(resp.Kvs[0]); have.Published && slices.Equal(have.Kinds, all) {
			return nil
		}
	}
	value, err := json.Marshal(kindsRecord{Kinds: all})
	if err != nil {
		return fmt.Errorf("write the kinds of policy: %w", err)
	}
	_, err = s.session.Commit(ctx, "write the kinds of policy",
		s.session.Txn(ctx).Then(clientv3.OpPut(s.kindsKey(), string(value))))
	return err
}

// FollowKinds implements kinds.Store.
func (s *Store) FollowKinds(ctx context.Context, sink func(kinds.State)) error {
	var state kinds.State
	return s.session.Follow(ctx, session.Reader{
		Prefix: s.kindsKey(), End: s.kindsKey() + "\x00",
		Begin:    func() { state = kinds.State{} },
		Listed:   func(kv *mvccpb.KeyValue) { state = s.readKinds(kv) },
		Complete: func(cluster.Point, time.Time) { sink(state) },
		Changes: func(events []*clientv3.Event, _ int64, _ time.Time) {
			for _, e := range events {
				if state = (kinds.State{}); e.Type == clientv3.EventTypePut {
					state = s.readKinds(e.Kv)
				}
			}
			sink(state)
		},
	})
}

// readKinds reads a value. A corrupt one counts as missing; the next publication overwrites it.
func (s *Store) readKinds(kv *mvccpb.KeyValue) kinds.State {
	var r kindsRecord
	err := json.Unmarshal(kv.Value, &r)
	for _, k := range r.Kinds {
		if err == nil {
			err = kinds.Check(k)
		}
	}
	if err != nil {
		s.cfg.Log.Warn("the kinds of policy in etcd are corrupt", "key", string(kv.Key), log.Err(err))
		return kinds.State{}
	}
	return kinds.State{Published: true, Kinds: r.Kinds}
}
