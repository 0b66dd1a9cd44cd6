// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package etcd

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/etcd/session"
	"github.com/sluice-net/sluice/services/identity/internal/registry"
)

// maxCandidates is the number of blocks that one transaction tries, in order. Each block takes a comparison and up to
// two operations, and a server allows 128.
const maxCandidates = 16

func (s *Nodes) holder(incarnation string) rangeHolder {
	return rangeHolder{Node: s.cfg.Node, Incarnation: incarnation}
}

// agree compares the settings of the node with the cluster's. If the cluster has none, the node's settings become the
// cluster's. Former settings still apply to older claims. A node with other settings keeps its ranges and gets no new
// ones.
func (b *claiming) agree(have *mvccpb.KeyValue) {
	if b.ipam == nil {
		return
	}
	b.unchanged = append(b.unchanged, session.Unchanged(b.s.keys.ipam(), have))
	if have == nil {
		settings := *b.ipam
		settings.Former = b.cluster.Settings()
		b.ops = append(b.ops, clientv3.OpPut(b.s.keys.ipam(), toJSON(settings)))
		return
	}
	b.differs = differ(*b.ipam, have)
}

// differ returns a text with both settings if the node's settings differ from the cluster's; "" if they are equal. The
// number of blocks per node is not compared: the cluster's number applies to all nodes.
func differ(mine registry.IPAM, have *mvccpb.KeyValue) string {
	other, err := readSettings(have)
	mine.MaxBlocks = other.MaxBlocks
	switch {
	case err != nil:
		return fmt.Sprintf("this node's ipam has %s, the cluster (%s) %q, which cannot be read", mine, have.Key, have.Value)
	case other.Equal(mine):
		return ""
	}
	return fmt.Sprintf("this node's ipam has %s, the cluster (%s) %s", mine, have.Key, other)
}

// Agrees implements registry.Store.
func (s *Nodes) Agrees(ctx context.Context, mine registry.IPAM) error {
	have, err := getAll(ctx, s.session, "read settings of ipam", s.keys.ipam())
	if err != nil || have[0] == nil {
		return err
	}
	if text := differ(mine, have[0]); text != "" {
		return fmt.Errorf("%w: %s", registry.ErrIPAMDiffers, text)
	}
	return nil
}

// seen returns the revision up to which the ranges of all nodes are known. It returns registry.ErrNotListed while the
// known ranges may belong to another history of etcd.
func (s *Nodes) seen(known registry.Ranges) (int64, error) {
	at := known.Seen()
	if at.Revision != 0 && s.followed.Load() != s.session.History() {
		return 0, registry.ErrNotListed
	}
	return at.Revision, nil
}

// ownKeys contains keys that this node writes, as last read or written.
type ownKeys struct {
	slots map[registry.Slot]netip.Prefix
	ipam  *mvccpb.KeyValue // nil: the cluster has no settings
}

// readOwn reads the slots of this node; ipam contains the settings that were read.
func (s *Nodes) readOwn(ctx context.Context, ipam *mvccpb.KeyValue) error {
	prefix := s.keys.slots(s.cfg.Node)
	resp, err := s.session.Get(ctx, "read claims", prefix, clientv3.WithPrefix())
	if err != nil {
		return err
	}
	s.own = ownKeys{slots: map[registry.Slot]netip.Prefix{}, ipam: ipam}
	for _, kv := range resp.Kvs {
		slot, ok := registry.ParseSlot(strings.TrimPrefix(string(kv.Key), prefix))
		if !ok {
			continue
		}
		c, err := readClaim(kv, slot)
		if err != nil {
			s.cfg.Log.Error("an unreadable claim of this node in etcd is overwritten", log.Err(err))
		}
		s.own.slots[slot] = c.Range
	}
	return nil
}

func sortedSlots(all map[registry.Slot]netip.Prefix) []registry.Slot {
	return slices.SortedFunc(maps.Keys(all), func(a, b registry.Slot) int { return cmp.Compare(a.Number, b.Number) })
}

// freeSlot returns the first slot of a family that is not used.
func freeSlot(ipv6 bool, used map[registry.Slot]bool) (registry.Slot, bool) {
	for n := range registry.MostRanges {
		if slot := (registry.Slot{IPv6: ipv6, Number: n}); !used[slot] {
			return slot, true
		}
	}
	return registry.Slot{}, false
}

// Own implements registry.Store.
func (s *Nodes) Own(ctx context.Context) (r registry.Record, revision int64, err error) {
	have, err := getAll(ctx, s.session, "read node", s.keys.record(s.cfg.Node), s.keys.ipam())
	if err == nil {
		err = s.readOwn(ctx, have[1])
	}
	if err != nil || have[0] == nil {
		return r, 0, err
	}
	r, err = s.decoder.record(have[0])
	return r, have[0].ModRevision, err
}

// ClaimRange implements registry.Store. It first tries blocks selected by hashes of the node's name, so that nodes that
// join at the same time try different blocks. Only if all of these are taken does it list the ranges.
func (s *Nodes) ClaimRange(ctx context.Context, c registry.RangeClaim) (p netip.Prefix, revision int64, err error) {
	if s.own.ipam != nil {
		if text := differ(c.IPAM, s.own.ipam); text != "" {
			return p, 0, fmt.Errorf("%w: %s", registry.ErrIPAMDiffers, text)
		}
	}
	used := map[registry.Slot]bool{}
	for slot := range s.own.slots {
		used[slot] = true
	}
	most := c.IPAM.MaxBlocks
	if s.own.ipam != nil {
		if theirs, err := readSettings(s.own.ipam); err == nil {
			most = theirs.MaxBlocks // other nodes accept no claims beyond the cluster's limit
		}
	}
	slot, ok := freeSlot(c.IPv6, used)
	if !ok || slot.Number >= most {
		return p, 0, fmt.Errorf("%w: %d", registry.ErrMaxRanges, most)
	}
	b := &blockClaim{s: s, RangeClaim: c, slot: slot}
	for range maxRaces {
		seen, err := s.seen(c.Cluster) // read before etcd is read
		if err != nil {
			return p, 0, err
		}
		blocks, err := b.candidates(ctx, seen)
		if err != nil {
			return p, 0, err
		}
		resp, err := s.session.Commit(ctx, "claim range", b.txn(ctx, blocks))
		if err != nil {
			return p, 0, err
		}
		if !resp.Succeeded {
			return p, 0, b.refused(ctx, resp.Responses)
		}
		answer := resp.Responses[0]
		for _, p := range blocks {
			if answer.GetResponseTxn().Succeeded {
				s.own.slots[slot] = p
				return p, resp.Header.Revision, nil
			}
			answer = answer.GetResponseTxn().Responses[0]
		}
		b.taken = map[netip.Prefix]*mvccpb.KeyValue{}
		for _, kv := range answer.GetResponseRange().Kvs {
			if p, err := netip.ParsePrefix(strings.TrimPrefix(string(kv.Key), s.keys.ranges())); err == nil {
				b.taken[p] = kv
			}
		}
	}
	return p, 0, fmt.Errorf("%w: no block claimed in %d attempts, because other nodes claimed the same blocks",
		allocator.ErrUnavailable, maxRaces)
}

// blockClaim is one call of ClaimRange.
type blockClaim struct {
	s *Nodes
	registry.RangeClaim
	slot  registry.Slot                     // gets the block
	taken map[netip.Prefix]*mvccpb.KeyValue // the keys of ranges; nil: not listed yet
}

// txn claims the first block that is unchanged since it was read. Without such a block, it lists the ranges.
func (b *blockClaim) txn(ctx context.Context, blocks []netip.Prefix) clientv3.Txn {
	s := b.s
	next := clientv3.OpGet(s.keys.ranges(), clientv3.WithPrefix())
	rec := b.Record
	for _, p := range slices.Backward(blocks) {
		rec.Ranges = slices.SortedFunc(slices.Values(append(slices.Clone(b.Record.Ranges), p)), netip.Prefix.Compare)
		next = clientv3.OpTxn(
			[]clientv3.Cmp{session.Unchanged(s.keys.holder(p), b.taken[p])},
			[]clientv3.Op{
				clientv3.OpPut(s.keys.holder(p), toJSON(s.holder(rec.Incarnation))),
				clientv3.OpPut(s.keys.record(s.cfg.Node), toJSON(rec)),
				clientv3.OpPut(s.keys.slot(b.slot), toJSON(registry.Claim{Range: p})),
				clientv3.OpDelete(s.keys.rest(s.cfg.Node, p)),
			},
			[]clientv3.Op{next})
	}
	when, reads := waiting(s.cfg)
	return s.session.Txn(ctx).If(append(when,
		s.session.Named(),
		clientv3.Compare(clientv3.ModRevision(s.keys.record(s.cfg.Node)), "=", b.Revision),
		session.Unchanged(s.keys.slot(b.slot), nil),
		session.Unchanged(s.keys.ipam(), s.own.ipam),
	)...).Then(next).Else(append([]clientv3.Op{clientv3.OpGet(s.keys.ipam())}, reads...)...)
}

// refused returns the reason why the conditions of a claim did not hold.
func (b *blockClaim) refused(ctx context.Context, have []*etcdserverpb.ResponseOp) error {
	if kvs := have[0].GetResponseRange().Kvs; len(kvs) > 0 {
		if text := differ(b.IPAM, kvs[0]); text != "" {
			return fmt.Errorf("%w: %s", registry.ErrIPAMDiffers, text)
		}
	}
	if err := refused(b.s.cfg, have[1:]); err != nil {
		return err
	}
	if err := b.s.session.Ping(ctx); err != nil {
		return err
	}
	return registry.ErrForgotten
}

// candidates returns the blocks that a claim tries. Without a listing (taken is nil), hashes of the node's name select
// them. With a listing, they are blocks without a holder and not in quarantine, blocks without a key first. If no such
// block exists, they are blocks in this node's own quarantine. seen is the revision up to which the claims of all
// nodes are known.
func (b *blockClaim) candidates(ctx context.Context, seen int64) (blocks []netip.Prefix, err error) {
	n := b.IPAM.Blocks(b.IPv6)
	if n == 0 {
		return nil, &registry.FullError{IPAM: b.IPAM, IPv6: b.IPv6}
	}
	held := func(p netip.Prefix) bool { node, _ := b.Cluster.Holder(p); return node != "" }
	if b.taken == nil {
		for i := range 4 * maxCandidates {
			p := b.IPAM.Block(b.IPv6, hashOf(b.s.cfg.Node, i)%n)
			if !slices.Contains(blocks, p) && !slices.Contains(b.Record.Ranges, p) && !held(p) {
				blocks = append(blocks, p)
			}
			if len(blocks) == maxCandidates {
				break
			}
		}
		return blocks, nil // In a small pool with few free blocks, there may be none: then all ranges are listed.
	}
	// Each skipped block has a key, or overlaps another node's range.
	full := &registry.FullError{IPAM: b.IPAM, IPv6: b.IPv6, Blocks: n}
	var others []netip.Prefix
	for i := range min(n, uint64(len(b.taken)+mostPassed)) {
		p := b.IPAM.Block(b.IPv6, (hashOf(b.s.cfg.Node, maxCandidates)+i)%n)
		switch {
		case held(p) || slices.Contains(b.Record.Ranges, p):
			full.Held++
		case b.taken[p] == nil:
			blocks = append(blocks, p)
		default:
			others = append(others, p)
		}
		if len(blocks) == maxCandidates {
			break
		}
	}
	if len(blocks) > 0 {
		return blocks, nil
	}
	news, err := b.s.newKeys(ctx, others, b.taken, seen)
	if err != nil {
		return nil, err
	}
	var stray, own []netip.Prefix
	for _, p := range others {
		holder, err := read[rangeHolder](b.taken[p])
		switch {
		case err == nil && holder.Quarantine && holder.Node == b.s.cfg.Node:
			own = append(own, p)
		case err == nil && holder.Quarantine && (news[p] || b.Cluster.Resting(p, holder.Node)):
			full.Resting++
		case news[p]:
			full.Held++
		default:
			stray = append(stray, p) // No record has the block: a node wrote only this key.
		}
	}
	for _, some := range [][]netip.Prefix{stray, own} {
		if len(some) > 0 {
			return some[:min(len(some), maxCandidates)], nil
		}
	}
	return nil, full
}

// newKeys returns the ranges whose key was written after revision seen. The value is true if the holder's record, or the
// mark of the quarantine, was written after seen, too: every node can write the key, only the holder can write these.
func (s *Nodes) newKeys(ctx context.Context, ranges []netip.Prefix, keys map[netip.Prefix]*mvccpb.KeyValue, seen int64,
) (map[netip.Prefix]bool, error) {
	witness := map[netip.Prefix]string{}
	revisions := map[string]int64{}
	for _, p := range ranges {
		if keys[p].ModRevision <= seen {
			continue
		}
		holder, err := read[rangeHolder](keys[p])
		switch {
		case err != nil:
		case holder.Quarantine:
			witness[p] = s.keys.rest(holder.Node, p)
		default:
			witness[p] = s.keys.record(holder.Node)
		}
	}
	for some := range slices.Chunk(slices.Compact(slices.Sorted(maps.Values(witness))), maxOps) {
		have, err := getAll(ctx, s.session, "read nodes", some...)
		if err != nil {
			return nil, err
		}
		for i, kv := range have {
			if kv != nil {
				revisions[some[i]] = kv.ModRevision
			}
		}
	}
	out := map[netip.Prefix]bool{}
	for p, key := range witness {
		out[p] = revisions[key] > seen
	}
	return out, nil
}

// mostPassed is the maximum number of blocks without a key that are skipped because they overlap ranges of other sizes.
const mostPassed = 4096

// hashOf returns the hash of a node's name at the i-th attempt.
func hashOf(node string, i int) uint64 {
	sum := sha256.Sum256(fmt.Appendf(nil, "%s/%d", node, i))
	return binary.BigEndian.Uint64(sum[:])
}
