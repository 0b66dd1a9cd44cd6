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

// Kinds implements kinds.Store.
type Kinds struct {
	session *session.Session
	cfg     session.Config // of the session
}

// NewKinds returns Kinds below the prefix of a session.
func NewKinds(s *session.Session) *Kinds { return &Kinds{session: s, cfg: s.Config()} }

func (s *Kinds) key() string { return clusterPrefix(s.cfg.Prefix) + "kinds" }

// kindsRecord is the value of the key.
type kindsRecord struct {
	Kinds []string `json:"kinds"` // group/version/resource, sorted
}

// PublishKinds implements kinds.Store.
func (s *Kinds) PublishKinds(ctx context.Context, all []string) error {
	resp, err := s.session.Get(ctx, "read the kinds of policy", s.key())
	if err != nil {
		return err
	}
	if len(resp.Kvs) > 0 {
		if have := s.read(resp.Kvs[0]); have.Published && slices.Equal(have.Kinds, all) {
			return nil
		}
	}
	value, err := json.Marshal(kindsRecord{Kinds: all})
	if err != nil {
		return fmt.Errorf("write the kinds of policy: %w", err)
	}
	_, err = s.session.Commit(ctx, "write the kinds of policy",
		s.session.Txn(ctx).Then(clientv3.OpPut(s.key(), string(value))))
	return err
}

// FollowKinds implements kinds.Store.
func (s *Kinds) FollowKinds(ctx context.Context, sink func(kinds.State)) error {
	var state kinds.State
	return s.session.Follow(ctx, session.Reader{
		Prefix: s.key(), End: s.key() + "\x00",
		Begin:    func() { state = kinds.State{} },
		Listed:   func(kv *mvccpb.KeyValue) { state = s.read(kv) },
		Complete: func(cluster.Point, time.Time) { sink(state) },
		Changes: func(events []*clientv3.Event, _ int64, _ time.Time) {
			for _, e := range events {
				if state = (kinds.State{}); e.Type == clientv3.EventTypePut {
					state = s.read(e.Kv)
				}
			}
			sink(state)
		},
	})
}

// read decodes a value. A corrupt value counts as missing; the next publication overwrites it.
func (s *Kinds) read(kv *mvccpb.KeyValue) kinds.State {
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
