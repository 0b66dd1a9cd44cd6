// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package etcd

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/etcd/session"
)

// How a cluster migrates from layout 1 to layout 2.
//
// This version reads both forms of labels/<sha256> at any time. As long as the key layout is absent, it writes the form
// of layout 1. Nodes of both versions then use the same identities, and each version sees the fence of the other: a
// reference to an identity of layout 1 writes both labels/ and fence/, and the collector of this version compares both.
//
// Once every node with references has this version, the collector writes the key layout. From then on, identities are
// created in layout 2, and the collector converts the others. A node of the old version that starts later reports
// layout 2 as corrupt: it neither refers to such identities nor collects them.
const (
	layoutSplit = 1 // text and fence in labels/; the key layout is absent
	layoutFinal = 2
)

// layout is the layout in which the cluster creates identities.
type layout struct {
	session *session.Session
	cfg     session.Config // of the session
	ids     identityKeys

	mu      sync.Mutex
	version int // guarded by mu; 0: not read yet
}

func (s *layout) key() string { return s.cfg.Prefix + "/layout" }

// read reads the layout in which identities are created. A prefix without identities gets the final layout.
func (s *layout) read(ctx context.Context) error {
	resp, err := s.session.Get(ctx, "read layout", s.key())
	if err != nil {
		return err
	}
	if len(resp.Kvs) > 0 {
		return s.set(resp.Kvs[0])
	}
	var empty []clientv3.Cmp
	for _, below := range []string{s.ids.all(), s.ids.allLabels()} {
		empty = append(empty, clientv3.Compare(clientv3.CreateRevision(below).WithPrefix(), "=", 0))
	}
	return s.write(ctx, empty...)
}

// write writes the final layout under conditions, and reads the resulting layout.
func (s *layout) write(ctx context.Context, conditions ...clientv3.Cmp) error {
	want := strconv.Itoa(layoutFinal)
	resp, err := s.session.Commit(ctx, "write layout", s.session.Txn(ctx).
		If(append(conditions, clientv3.Compare(clientv3.CreateRevision(s.key()), "=", 0))...).
		Then(clientv3.OpPut(s.key(), want)).Else(clientv3.OpGet(s.key())))
	if err != nil {
		return err
	}
	if resp.Succeeded {
		return s.set(&mvccpb.KeyValue{Value: []byte(want)})
	}
	if kvs := resp.Responses[0].GetResponseRange().GetKvs(); len(kvs) > 0 {
		return s.set(kvs[0])
	}
	return s.set(nil) // there are identities of layout 1
}

func (s *layout) set(kv *mvccpb.KeyValue) error {
	have := layoutSplit
	if kv != nil {
		var err error
		if have, err = strconv.Atoi(string(kv.Value)); err != nil || have < layoutFinal {
			return fmt.Errorf("%w: value %.40q of %s", allocator.ErrCorrupt, kv.Value, s.key())
		}
	}
	if have > layoutFinal {
		return fmt.Errorf("%w: %s is %d, this version knows up to %d: update this node", allocator.ErrLayout, s.key(), have, layoutFinal)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.version = have
	return nil
}

// value returns the value of labels/ in the layout in which the cluster creates identities.
func (s *layout) value(n identity.Numeric, l label.Canonical) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.version == layoutFinal {
		return labelsValue(n)
	}
	return labelsValue1(n, l)
}

func labelsValue(n identity.Numeric) string { return decimal(n) }

// labelsValue1 returns the value in layout 1.
func labelsValue1(n identity.Numeric, l label.Canonical) string {
	return labelsValue(n) + " " + l.Text()
}

// parseLabelsValue parses a value of labels/ in layout 1 or in the final layout. final reports whether it is in the
// final layout; text is empty then.
func parseLabelsValue(kv *mvccpb.KeyValue) (n identity.Numeric, text string, final bool, err error) {
	number, text, split := strings.Cut(string(kv.Value), " ")
	if n, err = parseNumber(number); err != nil {
		return 0, "", false, fmt.Errorf("%s: %w", kv.Key, err)
	}
	return n, text, !split, nil
}

// numberOf reads the number of a label set from labels/. If the value contains another text, it returns ErrCorrupt: two
// label sets should not have the same hash. If the value contains no text, the caller compares id/.
func numberOf(kv *mvccpb.KeyValue, l label.Canonical) (identity.Numeric, error) {
	n, text, final, err := parseLabelsValue(kv)
	if err != nil {
		return 0, err
	}
	if !final && text != l.Text() {
		return 0, fmt.Errorf("%w: %s belongs to the label set %s, which should not have the same hash as %s",
			allocator.ErrCorrupt, kv.Key, text, l)
	}
	return n, nil
}

// finish writes the final layout once every node with references is alive in this version, and reports whether it is
// written.
func (s *layout) finish(ctx context.Context, nodes map[string]int) (bool, error) {
	s.mu.Lock()
	have := s.version
	s.mu.Unlock()
	if have == layoutFinal {
		return true, nil
	}
	alive := map[string]bool{}
	prefix := s.cfg.Prefix + "/alive/"
	if _, err := s.session.List(ctx, prefix, true, func(kv *mvccpb.KeyValue) {
		alive[strings.TrimPrefix(string(kv.Key), prefix)] = true
	}); err != nil {
		return false, err
	}
	for node, references := range nodes {
		if references > 0 && !alive[node] {
			return false, nil
		}
	}
	if err := s.write(ctx); err != nil {
		return false, err
	}
	s.cfg.Log.Info("all nodes know the final layout of etcd's keys; identities are converted", "nodes", len(nodes))
	return true, nil
}

// convert rewrites identities in the final layout.
func (s *layout) convert(ctx context.Context, old []*mvccpb.KeyValue) error {
	for _, kv := range old {
		n, text, _, err := parseLabelsValue(kv)
		if err != nil {
			continue // reported by who listed it
		}
		limited, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
		// If a reference writes the key at the same time, the next round tries again.
		_, err = s.session.Commit(limited, "convert identity", s.session.Txn(limited).If(
			session.Unchanged(string(kv.Key), kv),
			clientv3.Compare(clientv3.Value(s.ids.id(n)), "=", text),
		).Then(clientv3.OpPut(string(kv.Key), labelsValue(n))))
		cancel()
		if err != nil {
			return err
		}
	}
	return nil
}
