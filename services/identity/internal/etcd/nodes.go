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
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/etcd/session"
	"github.com/sluice-net/sluice/services/identity/internal/registry"
)

// RangeQuarantine is the time after a node has returned a range, or was forgotten, in which only this node may claim
// the range.
const RangeQuarantine = 15 * time.Minute

// Nodes implements registry.Store in etcd.
type Nodes struct {
	session *session.Session
	cfg     session.Config // of the session
	keys    nodeKeys
	decoder nodeDecoder
	// followed is the history of etcd to which the updates belong that readers have received; Watch sets it.
	followed atomicHistory
	own      ownKeys // only one call of Register, Own or ClaimRange uses it at a time
}

// NewNodes returns the Nodes below the prefix of a session.
func NewNodes(s *session.Session) *Nodes {
	cfg := s.Config()
	keys := nodeKeys{prefix: cfg.Prefix, node: cfg.Node}
	return &Nodes{session: s, cfg: cfg, keys: keys, decoder: nodeDecoder{keys: keys, log: cfg.Log}}
}

// atomicHistory is a history of the session that one goroutine sets and other goroutines read.
type atomicHistory struct{ v atomic.Value }

func (a *atomicHistory) Store(h <-chan struct{}) { a.v.Store(h) }

func (a *atomicHistory) Load() <-chan struct{} {
	h, _ := a.v.Load().(<-chan struct{})
	return h
}

// rangeHolder is the value of a range's key.
type rangeHolder struct {
	Node        string `json:"node"`
	Incarnation string `json:"incarnation"`
	Quarantine  bool   `json:"quarantine,omitempty"` // no node has the range; the key expires
}

func toJSON(v any) string {
	text, err := json.Marshal(v)
	if err != nil {
		panic(err) // these types never fail to encode
	}
	return string(text)
}

// read decodes a JSON value of this file.
func read[T any](kv *mvccpb.KeyValue) (v T, err error) {
	if err := json.Unmarshal(kv.Value, &v); err != nil {
		return v, fmt.Errorf("%s: %w: %w", kv.Key, allocator.ErrCorrupt, err)
	}
	return v, nil
}

// getAll reads keys in one request; the result is nil for a missing key.
func getAll(ctx context.Context, s *session.Session, what string, keys ...string) ([]*mvccpb.KeyValue, error) {
	var ops []clientv3.Op
	for _, key := range keys {
		ops = append(ops, clientv3.OpGet(key))
	}
	resp, err := s.Commit(ctx, what, s.Txn(ctx).Then(ops...))
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
func (s *Nodes) Register(ctx context.Context, statement registry.Statement) (registry.Written, error) {
	for range maxRaces {
		b, err := s.registration(ctx, statement)
		if err != nil {
			return registry.Written{}, err
		}
		resp, err := s.session.Commit(ctx, "register node", s.session.Txn(ctx).If(b.unchanged...).Then(b.ops...))
		if err != nil {
			return registry.Written{}, err
		}
		if resp.Succeeded {
			s.own.slots = b.slots
			if s.own.ipam == nil && b.ipam != nil {
				s.own.ipam = &mvccpb.KeyValue{
					Key: []byte(s.keys.ipam()), Value: []byte(toJSON(b.ipam)), ModRevision: resp.Header.Revision,
				}
			}
			return registry.Written{Record: b.rec, Revision: resp.Header.Revision, Refused: b.refused}, nil
		}
		// Another node changed the keys after they were read, or this node lost its name.
		if err := s.session.Ping(ctx); err != nil {
			return registry.Written{}, err
		}
	}
	return registry.Written{}, fmt.Errorf("%w: the ranges of this node changed during each of %d attempts",
		allocator.ErrUnavailable, maxRaces)
}

// registration prepares the transaction of Register from the current content of etcd.
func (s *Nodes) registration(ctx context.Context, statement registry.Statement) (*claiming, error) {
	key, rec := s.keys.record(s.cfg.Node), statement.Record
	have, err := getAll(ctx, s.session, "read node", key, s.keys.ipam())
	if err != nil {
		return nil, err
	}
	if err := s.readOwn(ctx, have[1]); err != nil {
		return nil, err
	}
	var before registry.Record
	if have[0] != nil {
		if before, err = s.decoder.record(have[0]); err != nil {
			s.cfg.Log.Error("the unreadable record of this node in etcd is overwritten", log.Err(err))
		}
	}
	same := before.Incarnation == rec.Incarnation
	if statement.KeepUnderlay && same {
		rec.Underlay = before.Underlay
	}
	b := &claiming{s: s, rec: rec, ipam: statement.IPAM, before: before.Ranges, cluster: statement.Cluster}
	b.unchanged = []clientv3.Cmp{s.session.Named(), session.Unchanged(key, have[0])}
	b.agree(have[1])
	if err := b.claim(ctx); err != nil {
		return nil, err
	}
	if err := b.giveBack(ctx); err != nil {
		return nil, err
	}
	b.writeSlots()
	if !same {
		// The mappings of another installation of this node are deleted with its record.
		b.ops = append(b.ops, clientv3.OpDelete(s.keys.endpoints(s.cfg.Node), clientv3.WithPrefix()))
	}
	b.ops = append(b.ops, clientv3.OpPut(key, toJSON(b.rec)))
	return b, nil
}

// claiming builds the transaction of a registration.
type claiming struct {
	s         *Nodes
	rec       registry.Record // the node's record, with the ranges that it gets
	ipam      *registry.IPAM  // settings of this node's ipam; nil: unknown
	before    []netip.Prefix  // the ranges in the record that etcd has now
	cluster   registry.Ranges
	differs   string                         // why the node gets no further range; "": it may
	slots     map[registry.Slot]netip.Prefix // the node's slots after the transaction
	unchanged []clientv3.Cmp
	ops       []clientv3.Op
	refused   []registry.Refusal
}

// mine reports whether the node already has a range. No other node can write the record and slots of this node, unless
// that node took over the range while this node was silent.
func (b *claiming) mine(p netip.Prefix) bool {
	had, _ := b.cluster.Mine(p)
	return had || slices.Contains(b.before, p)
}

// claim claims the ranges that are free, that this node has, or that a silent node has. Other ranges are left out of
// the record.
func (b *claiming) claim(ctx context.Context) error {
	s := b.s
	var keys []string
	for _, p := range b.rec.Ranges {
		keys = append(keys, s.keys.holder(p))
	}
	if len(keys) == 0 {
		return nil
	}
	seen, err := s.seen(b.cluster) // read before etcd is read
	if err != nil {
		return err
	}
	have, err := getAll(ctx, s.session, "read ranges", keys...)
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
				s.cfg.Log.Error("an unreadable key of a range in etcd is ignored", log.Err(err))
			}
		}
		loser, refused, err := b.mayHave(ctx, p, holder, have[i], seen)
		if err != nil {
			return err
		}
		if refused != nil {
			b.refuse(*refused)
			continue
		}
		if loser != "" {
			b.unchanged = append(b.unchanged, session.Unchanged(s.session.AliveKey(loser), nil))
			losers[loser] = append(losers[loser], p)
		}
		b.unchanged = append(b.unchanged, session.Unchanged(keys[i], have[i]))
		b.rec.Ranges = append(b.rec.Ranges, p)
		if holder != mine {
			b.ops = append(b.ops, clientv3.OpPut(keys[i], toJSON(mine)))
		}
		if holder.Quarantine {
			b.ops = append(b.ops, clientv3.OpDelete(s.keys.rest(s.cfg.Node, p)))
		}
	}
	return b.takeOver(ctx, losers)
}

// mayHave reports whether this node may have a range with that holder in etcd. loser is a silent node that loses the
// range.
func (b *claiming) mayHave(ctx context.Context, p netip.Prefix, holder rangeHolder, have *mvccpb.KeyValue,
	seen int64,
) (loser string, refused *registry.Refusal, err error) {
	other, held := b.cluster.Holder(p)
	mine := b.mine(p)
	news := false
	if have != nil {
		all, err := b.s.newKeys(ctx, []netip.Prefix{p}, map[netip.Prefix]*mvccpb.KeyValue{p: have}, seen)
		if err != nil {
			return "", nil, err
		}
		news = all[p]
	}
	switch {
	case other != "":
		// Another node's record overlaps it, even if the key of the range contains this node.
	case b.differs != "" && mine:
		b.refuse(registry.Refusal{Range: p, Reason: b.differs, Kept: true})
		return "", nil, nil
	case b.differs != "":
		return "", &registry.Refusal{Range: p, Reason: b.differs}, nil
	case mine, have == nil, holder.Node == b.s.cfg.Node, b.cluster.Assigned(p):
		return "", nil, nil
	case holder.Quarantine && b.ipam != nil && b.ipam.Mode == registry.IPAMKubernetes:
		return "", nil, nil // Kubernetes has given the range to this node, so the quarantine does not apply.
	case holder.Quarantine && (news || b.cluster.Resting(p, holder.Node)):
		return "", &registry.Refusal{
			Range: p, Holder: holder.Node,
			Reason: "node " + holder.Node + " had it until a short time ago, and it is in quarantine",
		}, nil
	case holder.Quarantine, !news:
		return "", nil, nil // No record has the range: a node wrote only this key.
	default:
		other, held = holder.Node, p // The range was claimed so recently that this node has not received it yet.
	}
	alive, err := b.s.session.Alive(ctx, other)
	if err != nil {
		return "", nil, err
	}
	if alive == nil {
		return other, nil, nil
	}
	refused = &registry.Refusal{Range: p, Holder: other, Reason: "node " + other + " has it and is alive"}
	if held != p {
		refused.Reason = fmt.Sprintf("node %s has %s, which overlaps it, and is alive", other, held)
	}
	return "", refused, nil
}

func (b *claiming) refuse(r registry.Refusal) { b.refused = append(b.refused, r) }

// takeOver removes the claims of silent nodes that overlap ranges of this node: these claims are older, and would
// otherwise take precedence.
func (b *claiming) takeOver(ctx context.Context, losers map[string][]netip.Prefix) error {
	for node, lost := range losers {
		overlaps := func(p netip.Prefix) bool { return slices.ContainsFunc(lost, p.Overlaps) }
		key := b.s.keys.record(node)
		have, err := getAll(ctx, b.s.session, "read node", key)
		if err != nil {
			return err
		}
		b.unchanged = append(b.unchanged, session.Unchanged(key, have[0]))
		if have[0] == nil {
			continue
		}
		rec, err := b.s.decoder.record(have[0])
		if err != nil {
			continue // an unreadable claim has no effect
		}
		for _, p := range rec.Ranges {
			if overlaps(p) && !slices.Contains(lost, p) {
				b.ops = append(b.ops, clientv3.OpDelete(b.s.keys.holder(p)))
			}
		}
		rec.Ranges = slices.DeleteFunc(rec.Ranges, overlaps)
		b.ops = append(b.ops, clientv3.OpPut(key, toJSON(rec)))
		resp, err := b.s.session.Get(ctx, "read claims of a node", b.s.keys.slots(node), clientv3.WithPrefix())
		if err != nil {
			return err
		}
		for _, kv := range resp.Kvs {
			if c, err := read[registry.Claim](kv); err == nil && overlaps(c.Range) {
				b.ops = append(b.ops, clientv3.OpDelete(string(kv.Key)))
			}
		}
		b.s.cfg.Log.Warn("taking over the ranges of a silent node", "node", node, "ranges", lost)
	}
	return nil
}

// giveBack puts ranges that the node no longer needs into quarantine.
func (b *claiming) giveBack(ctx context.Context) error {
	var gone []netip.Prefix
	for _, p := range b.before {
		if !slices.Contains(b.rec.Ranges, p) && !slices.ContainsFunc(b.refused,
			func(r registry.Refusal) bool { return r.Range == p }) {
			gone = append(gone, p)
		}
	}
	ops, err := b.s.quarantine(ctx, b.s.cfg.Node, gone)
	b.ops = append(b.ops, ops...)
	return err
}

// writeSlots writes the node's ranges to its slots. It does not rewrite a slot that already has its range, because the
// slot's revision shows since when the node has the range.
func (b *claiming) writeSlots() {
	own := b.s.own.slots
	used := map[registry.Slot]bool{}
	place := map[netip.Prefix]registry.Slot{}
	for _, slot := range sortedSlots(own) {
		p := own[slot]
		if _, again := place[p]; !again && slices.Contains(b.rec.Ranges, p) {
			used[slot], place[p] = true, slot
		}
	}
	for _, p := range b.rec.Ranges {
		if _, ok := place[p]; ok {
			continue
		}
		slot, ok := freeSlot(p.Addr().Is6(), used)
		if !ok {
			continue // The range is not valid; this node sees that like all others.
		}
		used[slot], place[p] = true, slot
		_, former := b.cluster.Mine(p)
		b.ops = append(b.ops, clientv3.OpPut(b.s.keys.slot(slot), toJSON(registry.Claim{Range: p, Former: former})))
	}
	for _, slot := range sortedSlots(own) {
		if !used[slot] {
			b.ops = append(b.ops, clientv3.OpDelete(b.s.keys.slot(slot)))
		}
	}
	b.slots = map[registry.Slot]netip.Prefix{}
	for p, slot := range place {
		b.slots[slot] = p
	}
}

// quarantine returns the writes that put ranges of a node into quarantine.
func (s *Nodes) quarantine(ctx context.Context, node string, ranges []netip.Prefix) ([]clientv3.Op, error) {
	if len(ranges) == 0 {
		return nil, nil
	}
	lease, err := s.session.Grant(ctx, RangeQuarantine)
	if err != nil {
		return nil, err
	}
	rests := toJSON(rangeHolder{Node: node, Quarantine: true})
	var ops []clientv3.Op
	for _, p := range ranges {
		ops = append(ops, clientv3.OpPut(s.keys.holder(p), rests, clientv3.WithLease(lease)),
			clientv3.OpPut(s.keys.rest(node, p), rests, clientv3.WithLease(lease)))
	}
	return ops, nil
}

// Publish implements registry.Store.
func (s *Nodes) Publish(ctx context.Context, record int64, changes []registry.Change) (int64, error) {
	var ops []clientv3.Op
	for _, c := range changes {
		if key := s.keys.endpoints(s.cfg.Node) + c.Endpoint; c.Value != nil {
			ops = append(ops, clientv3.OpPut(key, toJSON(c.Value)))
		} else {
			ops = append(ops, clientv3.OpDelete(key))
		}
	}
	resp, err := s.session.Commit(ctx, "publish endpoints", s.session.Txn(ctx).
		If(clientv3.Compare(clientv3.ModRevision(s.keys.record(s.cfg.Node)), "=", record)).Then(ops...))
	if err != nil {
		return 0, err
	}
	if !resp.Succeeded {
		return 0, registry.ErrForgotten
	}
	return resp.Header.Revision, nil
}

// Forget implements registry.Store.
func (s *Nodes) Forget(ctx context.Context, node string, force, validateOnly bool) (registry.Record, error) {
	key := s.keys.record(node)
	for range maxRaces {
		have, err := getAll(ctx, s.session, "read node", key)
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
		rec, err := s.decoder.record(have[0])
		if err != nil {
			rec = registry.Record{} // an unreadable record is removed, too
		}
		if validateOnly {
			return rec, nil
		}
		ops, err := s.quarantine(ctx, node, rec.Ranges)
		if err != nil {
			return registry.Record{}, err
		}
		unchanged := []clientv3.Cmp{session.Unchanged(key, have[0])}
		if !force {
			unchanged = append(unchanged, session.Unchanged(s.session.AliveKey(node), nil))
		}
		// Delete all keys of the node except the new ones of the quarantine.
		ops = append(ops, clientv3.OpDelete(key), clientv3.OpDelete(s.keys.slots(node), clientv3.WithPrefix()),
			clientv3.OpDelete(s.keys.endpoints(node), clientv3.WithPrefix()))
		resp, err := s.session.Commit(ctx, "forget node", s.session.Txn(ctx).If(unchanged...).Then(ops...))
		if err != nil {
			return registry.Record{}, err
		}
		if resp.Succeeded {
			return rec, nil
		}
	}
	return registry.Record{}, fmt.Errorf("%w: node %q changed during each of %d attempts", allocator.ErrUnavailable, node,
		maxRaces)
}

// Alive implements registry.Store.
func (s *Nodes) Alive(ctx context.Context) (map[string]bool, error) {
	alive := map[string]bool{}
	prefix := s.session.AliveKey("")
	_, err := s.session.List(ctx, prefix, true, func(kv *mvccpb.KeyValue) {
		alive[strings.TrimPrefix(string(kv.Key), prefix)] = true
	})
	return alive, err
}
