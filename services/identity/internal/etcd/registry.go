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
	// maxNodeLabels is the limit of RegisterNode.
	maxNodeLabels = 1000
)

// Observe sets the sink of the updates of nodes and addresses. It gets them after the identities that were written
// before them. It is called before Follow.
func (s *Store) Observe(sink func(registry.Update)) { s.observe = sink }

func (s *Store) nodesPrefix() string           { return s.cfg.Prefix + "/ip/" }
func (s *Store) nodePrefix(node string) string { return s.nodesPrefix() + node + "/" }
func (s *Store) nodeKey(node string) string    { return s.nodePrefix(node) + "node" }

func (s *Store) endpointKey(endpoint string) string {
	return s.nodePrefix(s.cfg.Node) + "ep/" + endpoint
}

// slotsPrefix begins the keys of the claims of a node.
func (s *Store) slotsPrefix(node string) string { return s.nodePrefix(node) + "range/" }

func (s *Store) slotKey(slot registry.Slot) string { return s.slotsPrefix(s.cfg.Node) + slot.String() }

// restKey is below the node that may have a range in quarantine, so that no other node can
// write it.
func (s *Store) restKey(node string, p netip.Prefix) string {
	return s.nodePrefix(node) + "rest/" + strings.ReplaceAll(p.String(), "/", "_")
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
		panic(err) // these types never fail to encode
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
		// Its addresses still belong to a remote node, and it keeps its ranges.
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

// nodeUpdate adds a key below ip/, or the settings of ipam, to a step. An unreadable one is reported, and
// counts as removed: one bad key must not hide all others.
func (s *Store) nodeUpdate(u *registry.Update, kv *mvccpb.KeyValue, removed bool) {
	if string(kv.Key) == s.ipamKey() {
		s.settingsUpdate(u, kv, removed)
		return
	}
	if assigned, ok := strings.CutPrefix(string(kv.Key), s.assignedPrefix()); ok {
		s.assignmentUpdate(u, assigned, kv, removed)
		return
	}
	node, kind, _ := strings.Cut(strings.TrimPrefix(string(kv.Key), s.nodesPrefix()), "/")
	endpoint, isEndpoint := strings.CutPrefix(kind, "ep/")
	if !isEndpoint {
		endpoint = ""
	}
	slot, isSlot := strings.CutPrefix(kind, "range/")
	if !isSlot {
		slot = ""
	}
	rest, isRest := strings.CutPrefix(kind, "rest/")
	var err error
	switch {
	case node == "":
		return
	case isSlot:
		place, ok := registry.ParseSlot(slot)
		if !ok {
			return
		}
		var c registry.Claim
		if removed {
			break
		}
		if c, err = s.readClaim(kv, place); err == nil {
			u.Claims = append(u.Claims, registry.ClaimKey{Node: node, Slot: place, Claim: c, Revision: kv.ModRevision})
			return
		}
	case isRest:
		s.restUpdate(u, node, rest, kv, removed)
		return
	case kind != "node" && (!isEndpoint || endpoint == ""):
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
	u.Removed = append(u.Removed,
		registry.Removal{Node: node, Endpoint: endpoint, Slot: slot, Revision: kv.ModRevision})
}

// settingsUpdate adds the settings of ipam to a step. While there are no readable settings, readers keep using the
// last ones.
func (s *Store) settingsUpdate(u *registry.Update, kv *mvccpb.KeyValue, removed bool) {
	u.IPAM = &registry.IPAMKey{}
	if removed {
		return
	}
	settings, err := readSettings(kv)
	if err != nil {
		s.cfg.Log.Error("unreadable settings of ipam in etcd are ignored", log.Err(err))
		return
	}
	u.IPAM = &registry.IPAMKey{Settings: settings, Revision: kv.ModRevision}
}

// restUpdate adds a range in quarantine to a step.
func (s *Store) restUpdate(u *registry.Update, node, rest string, kv *mvccpb.KeyValue, removed bool) {
	p, err := netip.ParsePrefix(strings.ReplaceAll(rest, "_", "/"))
	switch {
	case err != nil || s.restKey(node, p) != string(kv.Key):
		return
	case removed:
		u.Removed = append(u.Removed, registry.Removal{Node: node, Rest: p, Revision: kv.ModRevision})
	default:
		u.Resting = append(u.Resting, registry.RestKey{Node: node, Range: p})
	}
}

// readClaim reads a slot.
func (s *Store) readClaim(kv *mvccpb.KeyValue, slot registry.Slot) (registry.Claim, error) {
	c, err := read[registry.Claim](kv)
	if err != nil {
		return c, err
	}
	if p := c.Range; !p.IsValid() || p != p.Masked() || p.Addr().Is4In6() || p.Addr().Is6() != slot.IPv6 {
		return c, fmt.Errorf("%s: %w: range %v", kv.Key, allocator.ErrCorrupt, p)
	}
	return c, nil
}

// getAll reads keys in one step; the result is nil for a missing key.
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
					Key: []byte(s.ipamKey()), Value: []byte(toJSON(b.ipam)), ModRevision: resp.Header.Revision,
				}
			}
			return registry.Written{Record: b.rec, Revision: resp.Header.Revision, Refused: b.refused}, nil
		}
		// Another node changed the keys that were read, or this node lost its name.
		if err := s.session.Ping(ctx); err != nil {
			return registry.Written{}, err
		}
	}
	return registry.Written{}, fmt.Errorf("%w: the ranges of this node changed during each of %d attempts",
		allocator.ErrUnavailable, maxRaces)
}

// registration prepares the transaction of Register from etcd's present content.
func (s *Store) registration(ctx context.Context, statement registry.Statement) (*claiming, error) {
	key, rec := s.nodeKey(s.cfg.Node), statement.Record
	have, err := s.getAll(ctx, "read node", key, s.ipamKey())
	if err != nil {
		return nil, err
	}
	if err := s.readOwn(ctx, have[1]); err != nil {
		return nil, err
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
		// The mappings of another installation of this node go with its record.
		b.ops = append(b.ops, clientv3.OpDelete(s.nodePrefix(s.cfg.Node)+"ep/", clientv3.WithPrefix()))
	}
	b.ops = append(b.ops, clientv3.OpPut(key, toJSON(b.rec)))
	return b, nil
}

// claiming gathers the transaction of a registration.
type claiming struct {
	s         *Store
	rec       registry.Record // with the ranges that the node gets
	ipam      *registry.IPAM  // of the node; nil: unknown
	before    []netip.Prefix  // ranges of the record that etcd has
	cluster   registry.Ranges
	differs   string                         // why the node gets no further range; "": it may
	slots     map[registry.Slot]netip.Prefix // of the node after the transaction
	unchanged []clientv3.Cmp
	ops       []clientv3.Op
	refused   []registry.Refusal
}

// mine reports whether the node has a range already: no other node can write its record
// and its slots, unless it took the range over from a silent node and removed it there.
func (b *claiming) mine(p netip.Prefix) bool {
	had, _ := b.cluster.Mine(p)
	return had || slices.Contains(b.before, p)
}

// claim claims the ranges that are free, that this node has, or that a silent node has. It leaves the other ranges out
// of the record.
func (b *claiming) claim(ctx context.Context) error {
	s := b.s
	var keys []string
	for _, p := range b.rec.Ranges {
		keys = append(keys, s.rangeKey(p))
	}
	if len(keys) == 0 {
		return nil
	}
	seen, err := s.seen(b.cluster) // before etcd is read
	if err != nil {
		return err
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
				s.cfg.Log.Error("an unreadable key of a range in etcd counts for nothing", log.Err(err))
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
			b.ops = append(b.ops, clientv3.OpDelete(s.restKey(s.cfg.Node, p)))
		}
	}
	return b.takeOver(ctx, losers)
}

// mayHave decides whether this node may have a range with that holder in etcd. loser is a silent node that loses the
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
		// Another node's record overlaps it, even if the key of the range names this node.
	case b.differs != "" && mine:
		b.refuse(registry.Refusal{Range: p, Reason: b.differs, Kept: true})
		return "", nil, nil
	case b.differs != "":
		return "", &registry.Refusal{Range: p, Reason: b.differs}, nil
	case mine, have == nil, holder.Node == b.s.cfg.Node, b.cluster.Assigned(p):
		return "", nil, nil
	case holder.Quarantine && b.ipam != nil && b.ipam.Mode == registry.IPAMKubernetes:
		return "", nil, nil // Kubernetes has given the range to this node; it does not wait.
	case holder.Quarantine && (news || b.cluster.Resting(p, holder.Node)):
		return "", &registry.Refusal{
			Range: p, Holder: holder.Node,
			Reason: "node " + holder.Node + " had it until a short time ago, and it is in quarantine",
		}, nil
	case holder.Quarantine, !news:
		return "", nil, nil // no record has it: a node wrote the key alone
	default:
		other, held = holder.Node, p // claimed so recently that this node has not heard of it
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

// takeOver ends the claims of silent nodes that overlap ranges of this node: they are
// older, so they would count.
func (b *claiming) takeOver(ctx context.Context, losers map[string][]netip.Prefix) error {
	for node, lost := range losers {
		overlaps := func(p netip.Prefix) bool { return slices.ContainsFunc(lost, p.Overlaps) }
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
		for _, p := range rec.Ranges {
			if overlaps(p) && !slices.Contains(lost, p) {
				b.ops = append(b.ops, clientv3.OpDelete(b.s.rangeKey(p)))
			}
		}
		rec.Ranges = slices.DeleteFunc(rec.Ranges, overlaps)
		b.ops = append(b.ops, clientv3.OpPut(key, toJSON(rec)))
		resp, err := b.s.session.Get(ctx, "read claims of a node", b.s.slotsPrefix(node), clientv3.WithPrefix())
		if err != nil {
			return err
		}
		for _, kv := range resp.Kvs {
			if c, err := read[registry.Claim](kv); err == nil && overlaps(c.Range) {
				b.ops = append(b.ops, clientv3.OpDelete(string(kv.Key)))
			}
		}
		b.s.cfg.Log.Warn("ranges of a silent node are taken over", "node", node, "ranges", lost)
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

// writeSlots writes the node's ranges to its slots. It does not write a slot that already has its range, because the
// slot's revision tells since when the node has the range.
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
			continue // it does not count, and the node sees that as all others do
		}
		used[slot], place[p] = true, slot
		_, former := b.cluster.Mine(p)
		b.ops = append(b.ops, clientv3.OpPut(b.s.slotKey(slot), toJSON(registry.Claim{Range: p, Former: former})))
	}
	for _, slot := range sortedSlots(own) {
		if !used[slot] {
			b.ops = append(b.ops, clientv3.OpDelete(b.s.slotKey(slot)))
		}
	}
	b.slots = map[registry.Slot]netip.Prefix{}
	for p, slot := range place {
		b.slots[slot] = p
	}
}

// quarantine are the writes that put ranges of a node into quarantine.
func (s *Store) quarantine(ctx context.Context, node string, ranges []netip.Prefix) ([]clientv3.Op, error) {
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
		ops = append(ops, clientv3.OpPut(s.rangeKey(p), rests, clientv3.WithLease(lease)),
			clientv3.OpPut(s.restKey(node, p), rests, clientv3.WithLease(lease)))
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
		ops, err := s.quarantine(ctx, node, rec.Ranges)
		if err != nil {
			return registry.Record{}, err
		}
		unchanged := []clientv3.Cmp{session.Unchanged(key, have[0])}
		if !force {
			unchanged = append(unchanged, session.Unchanged(s.session.AliveKey(node), nil))
		}
		// All blocks except the new ones in quarantine.
		ops = append(ops, clientv3.OpDelete(key), clientv3.OpDelete(s.slotsPrefix(node), clientv3.WithPrefix()),
			clientv3.OpDelete(s.nodePrefix(node)+"ep/", clientv3.WithPrefix()))
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
func (s *Store) Alive(ctx context.Context) (map[string]bool, error) {
	alive := map[string]bool{}
	prefix := s.session.AliveKey("")
	_, err := s.session.List(ctx, prefix, true, func(kv *mvccpb.KeyValue) {
		alive[strings.TrimPrefix(string(kv.Key), prefix)] = true
	})
	return alive, err
}
