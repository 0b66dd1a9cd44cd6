// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"golang.org/x/sync/errgroup"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	"github.com/sluice-net/sluice/services/identity/internal/registry"
)

const (
	prefix     = "/sluice/v1/identity"
	watchedEnd = prefix + "/ip0" // the first key after those that nodes watch
	publishers = 20
	perTxn     = 100 // keys per transaction while the cluster is being loaded
)

// value is the value of an endpoint's key, with the time at which the node wrote it.
type value struct {
	registry.Addresses
	Sent int64 `json:"sent"` // nanoseconds since 1970; nodes ignore it
}

// member is a node that only exists as keys. It belongs to one publisher.
type member struct {
	name      string
	index     int
	record    registry.Record
	endpoints map[int]identity.Numeric // by slot
	forgotten bool
}

// cluster has the state of all members, and the publishers that write it.
type cluster struct {
	perNode    int
	slots      int // of endpoints a node
	identities []identity.Identity
	members    []*member
	clients    []*clientv3.Client

	written atomic.Int64   // number of events of the members' keys
	newest  atomic.Int64   // revision of the last write
	sent    []atomic.Int64 // by member and slot: time of the last write, in nanoseconds since 1970

	mu     sync.Mutex
	others map[string]map[string]uint32 // guarded by mu; full node → prefix → identity
}

func newCluster(endpoint string, nodes, addresses, identities int) (*cluster, error) {
	c := &cluster{perNode: addresses / nodes, others: map[string]map[string]uint32{}}
	c.slots = c.perNode + c.perNode/5 + 1
	c.sent = make([]atomic.Int64, nodes*c.slots)
	for i := range identities {
		labels, err := label.Canonicalize(
			label.Kubernetes("app", fmt.Sprint("app-", i)), label.Kubernetes("tier", "backend"),
			label.Kubernetes(label.KeyNamespace, fmt.Sprint("team-", i%50)),
			label.Kubernetes(label.KeyNamespaceName, fmt.Sprint("team-", i%50)),
			label.Kubernetes(label.KeyCluster, "default"))
		if err != nil {
			return nil, err
		}
		number := identity.MinCluster + identity.Numeric(i)
		c.identities = append(c.identities, identity.Identity{Number: number, Labels: labels})
	}
	for i := range nodes {
		hi, lo := byte(i>>8), byte(i)
		v6 := netip.AddrFrom16([16]byte{0xfd, 6: hi, 7: lo})
		c.members = append(c.members, &member{
			name: fmt.Sprintf("n%04d", i), index: i, endpoints: map[int]identity.Numeric{},
			record: registry.Record{
				Incarnation: fmt.Sprintf("%032x", i+1), Version: "simulated",
				Underlay: registry.Underlay{
					Addresses: []netip.Addr{netip.AddrFrom4([4]byte{172, 16, hi, lo})},
					Overlay:   []netip.Addr{c.addressOf(i, -1)}, Mode: registry.ModeOverlay, TunnelPort: 4789, MTU: 1450,
				},
				Ranges: []netip.Prefix{
					netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 1 + hi, lo, 0}), 24), netip.PrefixFrom(v6, 64),
				},
			},
		})
	}
	for range publishers {
		client, err := clientv3.New(clientv3.Config{Endpoints: []string{endpoint}, Logger: zap.NewNop()})
		if err != nil {
			return nil, err
		}
		c.clients = append(c.clients, client)
	}
	return c, nil
}

func (c *cluster) close() {
	if c != nil {
		for _, client := range c.clients {
			client.Close()
		}
	}
}

// addressOf returns the address of a slot of a member; slot -1 is the member's own address.
func (c *cluster) addressOf(index, slot int) netip.Addr {
	return netip.AddrFrom4([4]byte{10, byte(1 + index>>8), byte(index), byte(2 + slot)})
}

// sentAt returns the time at which a member last wrote the endpoint with the address, and false if no member has it.
func (c *cluster) sentAt(a netip.Addr) (time.Time, bool) {
	if !a.Is4() {
		return time.Time{}, false
	}
	b := a.As4()
	index, slot := int(b[1]-1)<<8+int(b[2]), int(b[3])-2
	if b[0] != 10 || index >= len(c.members) || slot < 0 || slot >= c.slots {
		return time.Time{}, false
	}
	at := c.sent[index*c.slots+slot].Load()
	return time.Unix(0, at), at != 0
}

// changes returns the number of events of members since begin.
func (c *cluster) changes() int64 { return c.written.Load() }

// begin starts to count changes from 0.
func (c *cluster) begin() { c.written.Store(0) }

// revision returns the revision of the members' last write.
func (c *cluster) revision() int64 { return c.newest.Load() }

func (c *cluster) commit(ctx context.Context, publisher int, ops []clientv3.Op, events int) error {
	resp, err := c.clients[publisher].Txn(ctx).Then(ops...).Commit()
	if err != nil {
		return err
	}
	c.wrote(resp.Header.Revision, events)
	return nil
}

func (c *cluster) wrote(revision int64, events int) {
	c.written.Add(int64(events))
	for {
		if have := c.newest.Load(); have >= revision || c.newest.CompareAndSwap(have, revision) {
			return
		}
	}
}

func text(v any) string {
	out, err := json.Marshal(v)
	if err != nil {
		panic(err) // the types here always encode
	}
	return string(out)
}

func (m *member) key(slot int) string {
	return fmt.Sprintf("%s/ip/%s/ep/%032x", prefix, m.name, slot)
}

// put returns the write of an endpoint of a member.
func (c *cluster) put(m *member, slot int, n identity.Numeric) clientv3.Op {
	now := time.Now().UnixNano()
	c.sent[m.index*c.slots+slot].Store(now)
	m.endpoints[slot] = n
	return clientv3.OpPut(m.key(slot), text(value{Sent: now, Addresses: registry.Addresses{
		Addresses: []netip.Addr{c.addressOf(m.index, slot)}, Identity: n, Incarnation: m.record.Incarnation,
	}}))
}

func (c *cluster) anyIdentity() identity.Numeric {
	return c.identities[rand.IntN(len(c.identities))].Number
}

// name writes the identities of the cluster to etcd.
func (c *cluster) name(ctx context.Context) error {
	var ops []clientv3.Op
	for i, id := range c.identities {
		ops = append(ops, clientv3.OpPut(fmt.Sprintf("%s/id/%d", prefix, id.Number), id.Labels.Text()))
		if len(ops) == perTxn || i == len(c.identities)-1 {
			if err := c.commit(ctx, 0, ops, 0); err != nil {
				return err
			}
			ops = nil
		}
	}
	return nil
}

// each calls do with the members of each publisher.
func (c *cluster) each(ctx context.Context, do func(ctx context.Context, publisher int, m *member) error) error {
	all, ctx := errgroup.WithContext(ctx)
	for p := range publishers {
		all.Go(func() error {
			for i := p; i < len(c.members); i += publishers {
				if err := do(ctx, p, c.members[i]); err != nil {
					return err
				}
			}
			return nil
		})
	}
	return all.Wait()
}

// load registers every member and writes all of its endpoints.
func (c *cluster) load(ctx context.Context) error {
	return c.each(ctx, func(ctx context.Context, p int, m *member) error {
		ops := []clientv3.Op{clientv3.OpPut(fmt.Sprintf("%s/ip/%s/node", prefix, m.name), text(m.record))}
		for _, r := range m.record.Ranges {
			ops = append(ops, clientv3.OpPut(fmt.Sprintf("%s/range/default/%s", prefix, r),
				text(map[string]string{"node": m.name, "incarnation": m.record.Incarnation})))
		}
		if err := c.commit(ctx, p, ops, 1); err != nil {
			return err
		}
		ops = nil
		for slot := range c.perNode {
			ops = append(ops, c.put(m, slot, c.anyIdentity()))
			if len(ops) == perTxn || slot == c.perNode-1 {
				if err := c.commit(ctx, p, ops, len(ops)); err != nil {
					return err
				}
				ops = nil
			}
		}
		return nil
	})
}

// change writes changes for a while: endpoints are added, removed and replaced. When all changes are written, it
// returns their number.
func (c *cluster) change(ctx context.Context, rate, together int, d time.Duration) (int64, error) {
	before := c.changes()
	queues := make([]chan struct{}, publishers)
	writers, ctx := errgroup.WithContext(ctx)
	total := rate * int(d/time.Second) / together
	for p := range queues {
		queues[p] = make(chan struct{}, total)
		writers.Go(func() error {
			for range queues[p] {
				if err := c.step(ctx, p, together); err != nil {
					return err
				}
			}
			return nil
		})
	}
	tick := time.NewTicker(time.Second * time.Duration(together) / time.Duration(rate))
	defer tick.Stop()
	for range total {
		select {
		case <-tick.C:
		case <-ctx.Done():
		}
		queues[rand.IntN(publishers)] <- struct{}{} // the queue never blocks: it has capacity for all changes
	}
	for _, q := range queues {
		close(q)
	}
	err := writers.Wait()
	return c.changes() - before, err
}

// step writes changes of one publisher in one transaction.
func (c *cluster) step(ctx context.Context, publisher, changes int) error {
	var ops []clientv3.Op
	seen := map[string]bool{}
	for len(ops) < changes {
		mine := (len(c.members) - publisher + publishers - 1) / publishers
		m := c.members[rand.IntN(mine)*publishers+publisher]
		slot := rand.IntN(c.slots)
		if m.forgotten || seen[m.key(slot)] {
			continue
		}
		seen[m.key(slot)] = true
		if _, ok := m.endpoints[slot]; ok && rand.IntN(3) == 0 {
			delete(m.endpoints, slot)
			ops = append(ops, clientv3.OpDelete(m.key(slot)))
		} else {
			ops = append(ops, c.put(m, slot, c.anyIdentity()))
		}
	}
	return c.commit(ctx, publisher, ops, len(ops))
}

// forget makes a full node forget a member.
func (c *cluster) forget(ctx context.Context, by *node) error {
	m := c.members[rand.IntN(len(c.members))]
	for m.forgotten {
		m = c.members[rand.IntN(len(c.members))]
	}
	answer, err := by.cluster.ForgetNode(ctx, &identityv1.ForgetNodeRequest{Name: m.name})
	if err != nil {
		return fmt.Errorf("forget %s: %w", m.name, err)
	}
	if int(answer.GetMappingCount()) != len(m.endpoints) {
		return fmt.Errorf("forget %s: %d mappings went, want %d", m.name, answer.GetMappingCount(), len(m.endpoints))
	}
	c.wrote(0, 1+len(m.endpoints))
	m.forgotten = true
	clear(m.endpoints)
	return nil
}

// compact compacts etcd's whole history.
func (c *cluster) compact(ctx context.Context) error {
	_, err := c.clients[0].Compact(ctx, c.revision())
	return err
}

// says records which endpoints a full node publishes.
func (c *cluster) says(node string, mappings map[string]uint32) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.others[node] = mappings
}

// mapping is the identity of a prefix, on a node.
type mapping struct {
	node   string
	number uint32
}

// desired returns the nodes and mappings that a full node should have from the others. No publisher
// may write meanwhile.
func (c *cluster) desired(own string) (nodes map[string]bool, mappings map[string]mapping) {
	nodes, mappings = map[string]bool{}, map[string]mapping{}
	set := func(a netip.Addr, node string, n identity.Numeric) {
		mappings[netip.PrefixFrom(a, a.BitLen()).String()] = mapping{node, uint32(n)}
	}
	for _, m := range c.members {
		if m.forgotten {
			continue
		}
		nodes[m.name] = true
		set(m.record.Underlay.Addresses[0], m.name, identity.RemoteNode)
		set(m.record.Underlay.Overlay[0], m.name, identity.RemoteNode)
		for slot, n := range m.endpoints {
			set(c.addressOf(m.index, slot), m.name, n)
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for node, all := range c.others {
		if node == own {
			continue
		}
		nodes[node] = true
		for p, n := range all {
			mappings[p] = mapping{node, n}
		}
	}
	return nodes, mappings
}
