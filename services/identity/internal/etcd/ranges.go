// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package etcd

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/etcd/session"
	"github.com/sluice-net/sluice/services/identity/internal/registry"
)

// maxCandidates is how many blocks one transaction tries, one after the other.
// Each takes a comparison and up to two operations, of which a server allows 128.
const maxCandidates = 16

// ipamKey has the settings that all nodes agree on.
func (s *Store) ipamKey() string { return s.cfg.Prefix + "/ipam" }

func (s *Store) rangesPrefix() string { return s.cfg.Prefix + "/range/default/" }

func (s *Store) holder(incarnation string) rangeHolder {
	return rangeHolder{Node: s.cfg.Node, Incarnation: incarnation}
}

// agree compares the settings of the node with those of the cluster, which
// become the node's if there are none. If they differ, all ranges are refused.
func (b *claiming) agree(have *mvccpb.KeyValue) bool {
	if b.ipam == nil {
		return true
	}
	key := b.s.ipamKey()
	b.unchanged = append(b.unchanged, session.Unchanged(key, have))
	if have == nil {
		b.ops = append(b.ops, clientv3.OpPut(key, toJSON(b.ipam)))
		return true
	}
	if string(have.Value) == toJSON(b.ipam) {
		return true
	}
	for _, p := range b.rec.Ranges {
		b.refuse(p, "", differ(*b.ipam, have))
	}
	return false
}

// differ says which settings the cluster has, and which the node.
func differ(mine registry.IPAM, have *mvccpb.KeyValue) string {
	theirs := fmt.Sprintf("%q", have.Value)
	var other registry.IPAM
	if json.Unmarshal(have.Value, &other) == nil {
		theirs = other.String()
	}
	return fmt.Sprintf("this node's ipam has %s, the cluster (%s) %s", mine, have.Key, theirs)
}

// Agrees implements registry.Store.
func (s *Store) Agrees(ctx context.Context, mine registry.IPAM) error {
	have, err := s.getAll(ctx, "read settings of ipam", s.ipamKey())
	if err == nil && have[0] != nil && string(have[0].Value) != toJSON(mine) {
		err = fmt.Errorf("%w: %s", registry.ErrIPAMDiffers, differ(mine, have[0]))
	}
	return err
}

// Own implements registry.Store.
func (s *Store) Own(ctx context.Context) (r registry.Record, revision int64, err error) {
	have, err := s.getAll(ctx, "read node", s.nodeKey(s.cfg.Node))
	if err != nil || have[0] == nil {
		return r, 0, err
	}
	r, err = s.readRecord(have[0])
	return r, have[0].ModRevision, err
}

// ClaimRange implements registry.Store. It tries blocks that the node's name leads
// to, so that nodes that come at once try different ones; only when all of them
// are taken does it list what is.
func (s *Store) ClaimRange(ctx context.Context, c registry.RangeClaim) (p netip.Prefix, revision int64, err error) {
	var taken map[netip.Prefix]*mvccpb.KeyValue // nil: not listed yet
	for range maxRaces {
		blocks, err := s.candidates(c, taken)
		if err != nil {
			return p, 0, err
		}
		resp, err := s.session.Commit(ctx, "claim range", s.claimTxn(ctx, c, blocks, taken))
		if err != nil {
			return p, 0, err
		}
		if !resp.Succeeded {
			return p, 0, s.claimRefused(ctx, c, resp.Responses)
		}
		at, i := resp.Responses[0].GetResponseTxn(), 0
		for ; !at.Succeeded && i < len(blocks)-1; i++ {
			at = at.Responses[0].GetResponseTxn()
		}
		if at.Succeeded {
			return blocks[i], resp.Header.Revision, nil
		}
		taken = map[netip.Prefix]*mvccpb.KeyValue{}
		for _, kv := range at.Responses[0].GetResponseRange().Kvs {
			if p, err := netip.ParsePrefix(strings.TrimPrefix(string(kv.Key), s.rangesPrefix())); err == nil {
				taken[p] = kv
			}
		}
	}
	return p, 0, fmt.Errorf("%w: other nodes claim the blocks of the pool all the time", allocator.ErrUnavailable)
}

// claimTxn takes the first of the blocks that is as it was read, and else lists
// the ranges.
func (s *Store) claimTxn(ctx context.Context, c registry.RangeClaim, blocks []netip.Prefix,
	taken map[netip.Prefix]*mvccpb.KeyValue,
) clientv3.Txn {
	next := clientv3.OpGet(s.rangesPrefix(), clientv3.WithPrefix())
	rec := c.Record
	for _, p := range slices.Backward(blocks) {
		rec.Ranges = slices.SortedFunc(slices.Values(append(slices.Clone(c.Record.Ranges), p)), netip.Prefix.Compare)
		next = clientv3.OpTxn(
			[]clientv3.Cmp{session.Unchanged(s.rangeKey(p), taken[p])},
			[]clientv3.Op{
				clientv3.OpPut(s.rangeKey(p), toJSON(s.holder(rec.Incarnation))),
				clientv3.OpPut(s.nodeKey(s.cfg.Node), toJSON(rec)),
			},
			[]clientv3.Op{next})
	}
	return s.session.Txn(ctx).If(
		s.session.Named(),
		clientv3.Compare(clientv3.ModRevision(s.nodeKey(s.cfg.Node)), "=", c.Revision),
		clientv3.Compare(clientv3.Value(s.ipamKey()), "=", toJSON(c.IPAM)),
	).Then(next).Else(clientv3.OpGet(s.ipamKey()), clientv3.OpGet(s.nodeKey(s.cfg.Node)))
}

// claimRefused is why the conditions of a claim do not hold.
func (s *Store) claimRefused(ctx context.Context, c registry.RangeClaim, have []*etcdserverpb.ResponseOp) error {
	if kvs := have[0].GetResponseRange().Kvs; len(kvs) > 0 && string(kvs[0].Value) != toJSON(c.IPAM) {
		return fmt.Errorf("%w: %s", registry.ErrIPAMDiffers, differ(c.IPAM, kvs[0]))
	}
	if err := s.session.Ping(ctx); err != nil {
		return err
	}
	return registry.ErrForgotten
}

// candidates are the blocks that a claim tries. Without a listing they are those
// that the node's name leads to; with one they are free, and if none is, in this
// node's own quarantine.
func (s *Store) candidates(c registry.RangeClaim, taken map[netip.Prefix]*mvccpb.KeyValue) (blocks []netip.Prefix,
	err error,
) {
	n := c.IPAM.Blocks(c.IPv6)
	if n == 0 {
		return nil, &registry.FullError{IPAM: c.IPAM, IPv6: c.IPv6}
	}
	if taken == nil {
		for i := range 4 * maxCandidates {
			p := c.IPAM.Block(c.IPv6, s.place(i)%n)
			if !slices.Contains(blocks, p) && !slices.Contains(c.Record.Ranges, p) {
				blocks = append(blocks, p)
			}
			if len(blocks) == maxCandidates {
				break
			}
		}
		if len(blocks) == 0 { // a small pool, of which the node has much
			blocks = append(blocks, c.IPAM.Block(c.IPv6, s.place(0)%n))
		}
		return blocks, nil
	}
	// Each block that is passed over is one of the keys.
	for i := range min(n, uint64(len(taken)+maxCandidates)) {
		if p := c.IPAM.Block(c.IPv6, (s.place(maxCandidates)+i)%n); taken[p] == nil {
			blocks = append(blocks, p)
		}
		if len(blocks) == maxCandidates {
			break
		}
	}
	if len(blocks) > 0 {
		return blocks, nil
	}
	full := &registry.FullError{IPAM: c.IPAM, IPv6: c.IPv6, Blocks: n}
	for p, kv := range taken {
		holder, err := read[rangeHolder](kv)
		switch {
		case !c.IPAM.Has(c.IPv6, p):
		case err != nil || !holder.Quarantine:
			full.Held++
		case holder.Node == s.cfg.Node && len(blocks) < maxCandidates:
			blocks = append(blocks, p)
		default:
			full.Resting++
		}
	}
	if len(blocks) == 0 {
		return nil, full
	}
	return blocks, nil
}

// place is where the node's name leads to at the i-th attempt.
func (s *Store) place(i int) uint64 {
	sum := sha256.Sum256(fmt.Appendf(nil, "%s/%d", s.cfg.Node, i))
	return binary.BigEndian.Uint64(sum[:])
}
