// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package etcd

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/etcd/session"
	"github.com/sluice-net/sluice/services/identity/internal/registry"
)

// RangeQuarantine is how long only its last holder may claim a range that it
// returned, or lost when it was forgotten.
const RangeQuarantine = 15 * time.Minute

// Most that a record or an endpoint in etcd may have; more is not read.
const (
	maxRanges    = 64
	maxAddresses = 16
	// maxNodeLabels is that of RegisterNode.
	maxNodeLabels = 1000
)

// Observe has Follow pass what it reads of nodes and addresses to sink, after
// the identities that were written before them. It is called before Follow.
func (s *Store) Observe(sink func(registry.Update)) { s.observe = sink }

func (s *Store) nodesPrefix() string           { return s.cfg.Prefix + "/ip/" }
func (s *Store) nodePrefix(node string) string { return s.nodesPrefix() + node + "/" }
func (s *Store) nodeKey(node string) string    { return s.nodePrefix(node) + "node" }

func (s *Store) endpointKey(endpoint string) string {
	return s.nodePrefix(s.cfg.Node) + "ep/" + endpoint
}

func (s *Store) rangeKey(p netip.Prefix) string { return s.cfg.Prefix + "/range/default/" + p.String() }

// rangeHolder is the value of a range.
type rangeHolder struct {
	Node        string `json:"node"`
	Incarnation string `json:"incarnation"`
	Quarantine  bool   `json:"quarantine,omitempty"` // no node has the range; the key expires
}

func toJSON(v any) string {
	text, err := json.Marshal(v)
	if err != nil {
		panic(err) // none of the types here can fail
	}
	return string(text)
}

// read decodes a value of this file.
func read[T any](kv *mvccpb.KeyValue) (v T, err error) {
	if err := json.Unmarshal(kv.Value, &v); err != nil {
		return v, fmt.Errorf("%s: %w: %w", kv.Key, allocator.ErrCorrupt, err)
	}
	return v, nil
}

func (s *Store) readRecord(kv *mvccpb.KeyValue) (registry.Record, error) {
	r, err := read[registry.Record](kv)
	if err != nil {
		return r, err
	}
	bad := func(a netip.Addr) bool { return !a.IsValid() || a.Zone() != "" || a.Is4In6() }
	switch {
	case r.Incarnation == "":
		err = fmt.Errorf("no incarnation")
	case len(r.Ranges) > maxRanges:
		err = fmt.Errorf("%d ranges, at most %d", len(r.Ranges), maxRanges)
	case slices.ContainsFunc(r.Ranges, func(p netip.Prefix) bool {
		return !p.IsValid() || p != p.Masked() ||
			bad(p.Addr())
	}):
		err = fmt.Errorf("a range is no prefix")
	case len(r.Underlay.Addresses) > maxAddresses, len(r.Underlay.Overlay) > maxAddresses:
		err = fmt.Errorf("more than %d addresses", maxAddresses)
	case slices.ContainsFunc(r.Underlay.Addresses, bad), slices.ContainsFunc(r.Underlay.Overlay, bad):
		err = fmt.Errorf("an address is none")
	}
	if err != nil {
		return r, fmt.Errorf("%s: %w: %w", kv.Key, allocator.ErrCorrupt, err)
	}
	if len(r.Labels) > maxNodeLabels {
		// Its addresses are a remote node's all the same, and its ranges its own.
		s.cfg.Log.Error("labels of a node in etcd are ignored", "key", string(kv.Key), "labels", len(r.Labels),
			"at most", maxNodeLabels)
		r.Labels = nil
	}
	return r, nil
}

func (s *Store) readAddresses(kv *mvccpb.KeyValue) (registry.Addresses, error) {
	a, err := read[registry.Addresses](kv)
	if err != nil {
		return a, err
	}
	// A reserved or node-local identity is never a workload's on another node.
	if _, err := parseNumber(fmt.Sprint(uint32(a.Identity))); err != nil {
		return a, fmt.Errorf("%s: %w", kv.Key, err)
	}
	if len(a.Addresses) == 0 || len(a.Addresses) > maxAddresses ||
		slices.ContainsFunc(a.Addresses, func(a netip.Addr) bool {
			return !a.IsValid() || a.Zone() != "" ||
				a.Is4In6()
		}) {
		return a, fmt.Errorf("%s: %w: addresses %v", kv.Key, allocator.ErrCorrupt, a.Addresses)
	}
	return a, nil
}

// nodeUpdate adds a key below ip/ to a step. An unreadable one is reported, and
// counts as removed: one bad key must not hide all others.
func (s *Store) nodeUpdate(u *registry.Update, kv *mvccpb.KeyValue, removed bool) {
	node, kind, _ := strings.Cut(strings.TrimPrefix(string(kv.Key), s.nodesPrefix()), "/")
	endpoint, isEndpoint := strings.CutPrefix(kind, "ep/")
	if !isEndpoint {
		endpoint = ""
	}
	var err error
	switch {
	case node == "" || kind != "node" && (!isEndpoint || endpoint == ""):
		return // of a later version
	case removed:
	case isEndpoint:
		var a registry.Addresses
		if a, err = s.readAddresses(kv); err == nil {
			u.Addresses = append(u.Addresses, registry.AddressesKey{
				Node: node, Endpoint: endpoint, Value: a,
				Revision: kv.ModRevision,
			})
			return
		}
	default:
		var r registry.Record
		if r, err = s.readRecord(kv); err == nil {
			u.Nodes = append(u.Nodes, registry.NodeKey{
				Name: node, Record: r, Created: kv.CreateRevision,
				Revision: kv.ModRevision,
			})
			return
		}
	}
	if err != nil {
		s.cfg.Log.Error("unreadable node or endpoint in etcd is ignored", log.Err(err))
	}
	u.Removed = append(u.Removed, registry.Removal{Node: node, Endpoint: endpoint, Revision: kv.ModRevision})
}

// getAll reads keys in one step; nil for one that does not exist.
func (s *Store) getAll(ctx context.Context, what string, keys ...string) ([]*mvccpb.KeyValue, error) {
	var ops []clientv3.Op
	for _, key := range keys {
		ops = append(ops, clientv3.OpGet(key))
	}
	resp, err := s.session.Commit(ctx, what, s.session.Txn(ctx).Then(ops...))
	if err != nil {
		return nil, err
	}
	out := make([]*mvccpb.KeyValue, len(keys))
	for i, r := range resp.Responses {
		if kvs := r.GetResponseRange().GetKvs(); len(kvs) > 0 {
			out[i] = kvs[0]
		}
	}
	return out, nil
}

// Register implements registry.Store.
func (s *Store) Register(ctx context.Context, statement registry.Statement) (registry.Written, error) {
	for range maxRaces {
		txn, written, err := s.registration(ctx, statement)
		if err != nil {
			return registry.Written{}, err
		}
		resp, err := s.session.Commit(ctx, "register node", txn)
		if err != nil {
			return registry.Written{}, err
		}
		if resp.Succeeded {
			written.Revision = resp.Header.Revision
			return written, nil
		}
		// Another node changed what was read; or this one lost its name.
		if err := s.session.Ping(ctx); err != nil {
			return registry.Written{}, err
		}
	}
	return registry.Written{}, fmt.Errorf("%w: the ranges of this node change all the time", allocator.ErrUnavailable)
}

// registration is the transaction of Register, from what etcd has now.
func (s *Store) registration(ctx context.Context, statement registry.Statement) (txn clientv3.Txn, w registry.Written,
	err error,
) {
	key, rec := s.nodeKey(s.cfg.Node), statement.Record
	have, err := s.getAll(ctx, "read node", key, s.ipamKey())
	if err != nil {
		return nil, w, err
	}
	var before registry.Record
	if have[0] != nil {
		if before, err = s.readRecord(have[0]); err != nil {
			s.cfg.Log.Error("the unreadable record of this node in etcd is written anew", log.Err(err))
		}
	}
	same := before.Incarnation == rec.Incarnation
	if statement.KeepUnderlay && same {
		rec.Underlay = before.Underlay
	}
	b := &claiming{s: s, rec: rec, ipam: statement.IPAM}
	b.unchanged = []clientv3.Cmp{s.session.Named(), session.Unchanged(key, have[0])}
	if !b.agree(have[1]) {
		b.rec.Ranges = nil
	} else if err := b.claim(ctx); err != nil {
		return nil, w, err
	}
	if err := b.giveBack(ctx, before.Ranges); err != nil {
		return nil, w, err
	}
	if !same {
		// The mappings of another installation of this node go with its record.
		b.ops = append(b.ops, clientv3.OpDelete(s.nodePrefix(s.cfg.Node)+"ep/", clientv3.WithPrefix()))
	}
	b.ops = append(b.ops, clientv3.OpPut(key, toJSON(b.rec)))
	return s.session.Txn(ctx).If(b.unchanged...).Then(b.ops...), registry.Written{Record: b.rec, Refused: b.refused},
		nil
}

// claiming gathers the transaction of a registration.
type claiming struct {
	s         *Store
	rec       registry.Record // with the ranges that the node gets
	ipam      *registry.IPAM  // of the node; nil: not said
	unchanged []clientv3.Cmp
	ops       []clientv3.Op
	refused   []registry.Refusal
}

// claim takes the ranges that are free, that this node has, or that a silent
// node has, and leaves the others out of the record.
func (b *claiming) claim(ctx context.Context) error {
	s := b.s
	var keys []string
	for _, p := range b.rec.Ranges {
		keys = append(keys, s.rangeKey(p))
	}
	if len(keys) == 0 {
		return nil
	}
	have, err := s.getAll(ctx, "read ranges", keys...)
	if err != nil {
		return err
	}
	mine := s.holder(b.rec.Incarnation)
	wanted := b.rec.Ranges
	b.rec.Ranges = nil
	losers := map[string][]netip.Prefix{}
	for i, p := range wanted {
		var holder rangeHolder
		if have[i] != nil {
			if holder, err = read[rangeHolder](have[i]); err != nil {
				b.refuse(p, "", err.Error())
				continue
			}
		}
		switch {
		case have[i] == nil, holder.Node == s.cfg.Node:
		case holder.Quarantine && b.ipam != nil && b.ipam.Mode == registry.IPAMKubernetes:
			// Kubernetes has given the range to this node; it does not wait.
		case holder.Quarantine:
			b.refuse(p, holder.Node, "node "+holder.Node+" had it until a short time ago, and it is in quarantine")
			continue
		default:
			alive, err := s.session.Alive(ctx, holder.Node)
			if err != nil {
				return err
			}
			if alive != nil {
				b.refuse(p, holder.Node, "node "+holder.Node+" has it and is alive")
				continue
			}
			b.unchanged = append(b.unchanged, session.Unchanged(s.session.AliveKey(holder.Node), nil))
			losers[holder.Node] = append(losers[holder.Node], p)
		}
		b.unchanged = append(b.unchanged, session.Unchanged(keys[i], have[i]))
		b.rec.Ranges = append(b.rec.Ranges, p)
		if holder != mine {
			b.ops = append(b.ops, clientv3.OpPut(keys[i], toJSON(mine)))
		}
	}
	return b.takeOver(ctx, losers)
}

func (b *claiming) refuse(p netip.Prefix, holder, reason string) {
	b.refused = append(b.refused, registry.Refusal{Range: p, Holder: holder, Reason: reason})
}

// takeOver takes ranges out of the records of silent nodes: they registered
// earlier, so their mappings would count.
func (b *claiming) takeOver(ctx context.Context, losers map[string][]netip.Prefix) error {
	for node, lost := range losers {
		key := b.s.nodeKey(node)
		have, err := b.s.getAll(ctx, "read node", key)
		if err != nil {
			return err
		}
		b.unchanged = append(b.unchanged, session.Unchanged(key, have[0]))
		if have[0] == nil {
			continue
		}
		rec, err := b.s.readRecord(have[0])
		if err != nil {
			continue // it counts for nothing
		}
		rec.Ranges = slices.DeleteFunc(rec.Ranges, func(p netip.Prefix) bool { return slices.Contains(lost, p) })
		b.ops = append(b.ops, clientv3.OpPut(key, toJSON(rec)))
		b.s.cfg.Log.Warn("ranges of a silent node are taken over", "node", node, "ranges", lost)
	}
	return nil
}

// giveBack puts ranges that the node had and does not want any more into quarantine.
func (b *claiming) giveBack(ctx context.Context, before []netip.Prefix) error {
	var keys []string
	for _, p := range before {
		if !slices.Contains(b.rec.Ranges, p) && !slices.ContainsFunc(b.refused,
			func(r registry.Refusal) bool { return r.Range == p }) {
			keys = append(keys, b.s.rangeKey(p))
		}
	}
	ops, err := b.s.quarantine(ctx, b.s.cfg.Node, keys)
	b.ops = append(b.ops, ops...)
	return err
}

// quarantine are the writes that put ranges of a node into quarantine.
func (s *Store) quarantine(ctx context.Context, node string, keys []string) ([]clientv3.Op, error) {
	if len(keys) == 0 {
		return nil, nil
	}
	lease, err := s.session.Grant(ctx, RangeQuarantine)
	if err != nil {
		return nil, err
	}
	var ops []clientv3.Op
	for _, key := range keys {
		ops = append(ops, clientv3.OpPut(key, toJSON(rangeHolder{Node: node, Quarantine: true}),
			clientv3.WithLease(lease)))
	}
	return ops, nil
}

// Publish implements registry.Store.
func (s *Store) Publish(ctx context.Context, record int64, changes []registry.Change) (int64, error) {
	var ops []clientv3.Op
	for _, c := range changes {
		if key := s.endpointKey(c.Endpoint); c.Value != nil {
			ops = append(ops, clientv3.OpPut(key, toJSON(c.Value)))
		} else {
			ops = append(ops, clientv3.OpDelete(key))
		}
	}
	resp, err := s.session.Commit(ctx, "publish endpoints", s.session.Txn(ctx).
		If(clientv3.Compare(clientv3.ModRevision(s.nodeKey(s.cfg.Node)), "=", record)).Then(ops...))
	if err != nil {
		return 0, err
	}
	if !resp.Succeeded {
		return 0, registry.ErrForgotten
	}
	return resp.Header.Revision, nil
}

// Forget implements registry.Store.
func (s *Store) Forget(ctx context.Context, node string, force, validateOnly bool) (registry.Record, error) {
	key := s.nodeKey(node)
	for range maxRaces {
		have, err := s.getAll(ctx, "read node", key)
		if err != nil {
			return registry.Record{}, err
		}
		if have[0] == nil {
			return registry.Record{}, fmt.Errorf("%w: %q", registry.ErrNoNode, node)
		}
		alive, err := s.session.Alive(ctx, node)
		if err != nil {
			return registry.Record{}, err
		}
		if alive != nil && !force {
			return registry.Record{}, fmt.Errorf("%w: %q", registry.ErrAlive, node)
		}
		rec, err := s.readRecord(have[0])
		if err != nil {
			rec = registry.Record{} // it goes all the same
		}
		if validateOnly {
			return rec, nil
		}
		var ranges []string
		for _, p := range rec.Ranges {
			ranges = append(ranges, s.rangeKey(p))
		}
		ops, err := s.quarantine(ctx, node, ranges)
		if err != nil {
			return registry.Record{}, err
		}
		unchanged := []clientv3.Cmp{session.Unchanged(key, have[0])}
		if !force {
			unchanged = append(unchanged, session.Unchanged(s.session.AliveKey(node), nil))
		}
		ops = append(ops, clientv3.OpDelete(s.nodePrefix(node), clientv3.WithPrefix()))
		resp, err := s.session.Commit(ctx, "forget node", s.session.Txn(ctx).If(unchanged...).Then(ops...))
		if err != nil {
			return registry.Record{}, err
		}
		if resp.Succeeded {
			return rec, nil
		}
	}
	return registry.Record{}, fmt.Errorf("%w: node %q changes all the time", allocator.ErrUnavailable, node)
}

// Alive implements registry.Store.
func (s *Store) Alive(ctx context.Context) (map[string]bool, error) {
	alive := map[string]bool{}
	prefix := s.session.AliveKey("")
	_, err := s.session.List(ctx, prefix, true, func(kv *mvccpb.KeyValue) {
		alive[strings.TrimPrefix(string(kv.Key), prefix)] = true
	})
	return alive, err
}
