// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package etcd

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/registry"
	"github.com/sluice-net/sluice/services/identity/internal/test/etcdtest"
	"github.com/sluice-net/sluice/services/identity/internal/test/storetest"
)

// Tests of the registry over a real etcd, as nodes use it.

func prefix(i int) netip.Prefix { return netip.MustParsePrefix(fmt.Sprintf("10.0.%d.0/24", i)) }

func address(i, host int) netip.Addr {
	return netip.AddrFrom4([4]byte{10, 0, byte(i), byte(host)})
}

func nodeAddress(i int) netip.Addr { return netip.AddrFrom4([4]byte{192, 0, 2, byte(i)}) }

// register registers the i-th node with its ranges.
func (n *node) register(i int, ranges ...netip.Prefix) {
	n.t.Helper()
	u := &registry.Underlay{
		Addresses: []netip.Addr{nodeAddress(i)}, Overlay: []netip.Addr{address(i, 1)},
		Mode: registry.ModeOverlay, TunnelPort: 4789, MTU: 1450,
	}
	if _, _, err := n.reg.Register(n.t.Context(), registry.Registration{Underlay: u, Ranges: &ranges}, false); err != nil {
		n.t.Fatal(err)
	}
}

// endpoint gives an endpoint of the node an identity and an address.
func (n *node) endpoint(name, labels string, a netip.Addr) identity.Identity {
	n.t.Helper()
	id, err := n.HoldEndpoint(n.t.Context(), allocator.EndpointHolder(name, "eth0"), storetest.Labels(n.t, labels),
		allocator.Workload{Addresses: []string{a.String()}})
	if err != nil {
		n.t.Fatal(err)
	}
	return id
}

// mapping returns the node and identity that this node maps an address to; "" without a mapping.
func (n *node) mapping(a netip.Addr) string {
	item, ok := n.cluster.Get(registry.Key{Prefix: netip.PrefixFrom(a, a.BitLen())})
	if !ok {
		return ""
	}
	return fmt.Sprint(item.On, " ", item.Identity)
}

func (n *node) seesMapping(a netip.Addr, want string) {
	n.t.Helper()
	servicetest.Eventually(n.t, fmt.Sprintf("%s to be %q, is %q", a, want, n.mapping(a)),
		func() bool { return n.mapping(a) == want })
}

func (n *node) seesNode(name string, want bool) {
	n.t.Helper()
	servicetest.Eventually(n.t, "node "+name, func() bool {
		_, ok := n.cluster.Get(registry.Key{Node: name})
		return ok == want
	})
}

// published waits until etcd has the record and the mappings of the node.
func (n *node) published() {
	n.t.Helper()
	servicetest.Eventually(n.t, "everything to be published", func() bool {
		s := n.reg.Status()
		_, registered, err := n.reg.Register(n.t.Context(), registry.Registration{}, false)
		return err == nil && registered && s.Pending == 0
	})
}

func keysBelow(t testing.TB, admin *clientv3.Client, below string) map[string]string {
	t.Helper()
	resp, err := admin.Get(t.Context(), testPrefix+below, clientv3.WithPrefix())
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for _, kv := range resp.Kvs {
		out[strings.TrimPrefix(string(kv.Key), testPrefix+below)] = string(kv.Value)
	}
	return out
}

func TestNodesKnowEachOthersAddresses(t *testing.T) {
	t.Parallel() // it mostly waits
	s := etcdtest.StartThree(t)
	a := startNode(t, s.Endpoint, "a", t.TempDir(), quick())
	b := startNode(t, s.Endpoint, "b", t.TempDir(), quick())
	a.register(1, prefix(1))
	b.register(2, prefix(2))
	web := a.endpoint("c1", "web", address(1, 5))
	db := b.endpoint("c2", "db", address(2, 5))
	b.seesMapping(address(1, 5), fmt.Sprint("a ", web.Number))
	a.seesMapping(address(2, 5), fmt.Sprint("b ", db.Number))
	a.seesMapping(nodeAddress(2), "b 6")
	a.seesMapping(address(2, 1), "b 6")
	if got := a.mapping(address(1, 5)); got != "" {
		t.Errorf("a node receives the mapping of its own endpoint: %s", got)
	}
	// Another identity, and the end.
	other := a.endpoint("c1", "other", address(1, 5))
	b.seesMapping(address(1, 5), fmt.Sprint("a ", other.Number))
	// An endpoint without a number has no identity that counts elsewhere.
	holder := allocator.EndpointHolder("c1", "eth0")
	if err := a.Relabel(t.Context(), holder, allocator.Isolated()); err != nil {
		t.Fatal(err)
	}
	b.seesMapping(address(1, 5), "")
	a.published()
	if keys := keysBelow(t, s.Client(), "/ip/a/ep/"); len(keys) > 0 {
		t.Errorf("of an isolated endpoint a writes %v", keys)
	}
	if err := a.Confirm(t.Context(), holder, identity.Init); err != nil {
		t.Fatal(err)
	}
	if err := a.Relabel(t.Context(), holder, storetest.Labels(t, "other")); err != nil {
		t.Fatal(err)
	}
	b.seesMapping(address(1, 5), fmt.Sprint("a ", other.Number))
	if _, err := a.Release(t.Context(), allocator.EndpointHolder("c1", "eth0")); err != nil {
		t.Fatal(err)
	}
	b.seesMapping(address(1, 5), "")
	a.published()
	for key := range keysBelow(t, s.Client(), "/ip/a/ep/") {
		t.Errorf("endpoint %s is left of a", key)
	}
}

func TestOverlappingRangesReported(t *testing.T) {
	t.Parallel()
	s := etcdtest.StartThree(t)
	a := startNode(t, s.Endpoint, "a", t.TempDir(), quick())
	b := startNode(t, s.Endpoint, "b", t.TempDir(), quick())
	a.register(1, netip.MustParsePrefix("10.0.0.0/23"))
	a.published()
	b.register(2, netip.MustParsePrefix("10.0.1.0/24"), prefix(2))
	a.endpoint("c1", "a", address(1, 5))
	b.endpoint("c2", "b", address(1, 6))
	other := b.endpoint("c3", "b", address(2, 6))
	a.seesMapping(address(2, 6), fmt.Sprint("b ", other.Number))
	if got := a.mapping(address(1, 6)); got != "" {
		t.Errorf("a mapping in another node's range counts: %s", got)
	}
	f, err := a.reg.Find(address(1, 6))
	if err != nil || f.RangeNode != "a" || len(f.Refused) != 1 ||
		f.Refused[0].Reason != "the address lies in a range of node a" {
		t.Errorf("find: %+v, %v", f, err)
	}
	servicetest.Eventually(t, "b to list what is refused of it", func() bool {
		return slices.ContainsFunc(b.reg.Nodes(), func(k registry.Known) bool {
			return k.Node.Name == "b" && len(k.Node.Refused) == 1 && k.Node.Refused[0].Holder == "a" && k.Refused == 1
		})
	})
	// c claims exactly a range of b. The claim is refused.
	c := startNode(t, s.Endpoint, "c", t.TempDir(), quick())
	c.register(3, prefix(2), prefix(3))
	c.published()
	if r := c.reg.Status().Ranges; len(r) != 1 || r[0].Range != prefix(2) || r[0].Holder != "b" {
		t.Errorf("c is refused %v", r)
	}
	if got := keysBelow(t, s.Client(), "/range/default/")[prefix(2).String()]; !strings.Contains(got, `"node":"b"`) {
		t.Errorf("the range is %s", got)
	}
}

func TestIncarnationReplacesOldNode(t *testing.T) {
	t.Parallel()
	s := etcdtest.StartThree(t)
	cfg := quick()
	cfg.aliveTTL = time.Second
	a := startNode(t, s.Endpoint, "a", t.TempDir(), cfg)
	b := startNode(t, s.Endpoint, "b", t.TempDir(), quick())
	a.register(1, prefix(1))
	old := a.endpoint("c1", "web", address(1, 5))
	b.seesMapping(address(1, 5), fmt.Sprint("a ", old.Number))
	a.stop()
	// The machine is installed again, and its state is lost.
	again := startNode(t, s.Endpoint, "a", t.TempDir(), cfg)
	if got := b.mapping(address(1, 5)); got == "" {
		t.Error("a mapping went because its node is silent")
	}
	again.register(1, prefix(1))
	next := again.endpoint("c2", "db", address(1, 6))
	b.seesMapping(address(1, 6), fmt.Sprint("a ", next.Number))
	b.seesMapping(address(1, 5), "")
}

// TestSecondNodeOfANameWritesNothing: two machines use the same name. The running machine keeps its record, its range
// and its mappings. The other machine writes nothing to etcd until the first is silent for longer than its lease. From
// then on, the first machine's keys are not valid.
func TestSecondNodeOfANameWritesNothing(t *testing.T) {
	t.Parallel() // it mostly waits
	s := etcdtest.StartThree(t)
	cfg := quick()
	cfg.aliveTTL = 2 * time.Second
	first := startNode(t, s.Endpoint, "a", t.TempDir(), cfg)
	watcher := startNode(t, s.Endpoint, "w", t.TempDir(), quick())
	first.register(1, prefix(1))
	web := first.endpoint("c1", "web", address(1, 5))
	watcher.seesMapping(address(1, 5), fmt.Sprint("a ", web.Number))
	first.published()
	admin := s.Client()
	wrote := func() string { return fmt.Sprint(keysBelow(t, admin, "/ip/"), keysBelow(t, admin, "/range/")) }
	before := wrote()

	second := startNode(t, s.Endpoint, "a", t.TempDir(), cfg)
	second.register(2, prefix(2), prefix(1))
	servicetest.Eventually(t, "the refusal", func() bool {
		return strings.Contains(second.Summary().StoreError, "is taken")
	})
	// The other machine keeps trying to claim its name.
	asked := time.Now()
	servicetest.Eventually(t, "two terms of the name", func() bool { return time.Since(asked) > 2*cfg.aliveTTL })
	if got := wrote(); got != before {
		t.Errorf("etcd has\n%s\nbefore the second node of the name\n%s", got, before)
	}
	if second.reg.Status().Registered {
		t.Error("the second node says that it is registered")
	}
	db := first.endpoint("c2", "db", address(1, 6))
	watcher.seesMapping(address(1, 6), fmt.Sprint("a ", db.Number))

	first.stop()
	second.connected()
	second.published()
	cache := second.endpoint("c1", "cache", address(2, 5))
	watcher.seesMapping(address(2, 5), fmt.Sprint("a ", cache.Number))
	for _, a := range []netip.Addr{address(1, 5), address(1, 6)} {
		watcher.seesMapping(a, "")
	}
	second.published()
	before = wrote()
	first = startNode(t, s.Endpoint, "a", first.dir, cfg)
	servicetest.Eventually(t, "the refusal of the first", func() bool {
		return strings.Contains(first.Summary().StoreError, "is taken")
	})
	if got := wrote(); got != before {
		t.Errorf("etcd has\n%s\nbefore the first node was back\n%s", got, before)
	}
	watcher.seesMapping(address(1, 5), "")
}

// TestRestartPublishesNothingAnew: the registration and the endpoints survive the process, so a restart writes nothing.
func TestRestartPublishesNothingAnew(t *testing.T) {
	t.Parallel()
	s := etcdtest.StartThree(t)
	dir := t.TempDir()
	a := startNode(t, s.Endpoint, "a", dir, quick())
	a.register(1, prefix(1))
	web := a.endpoint("c1", "web", address(1, 5))
	a.published()
	// The stopped node repeats a write whose effect it may not have seen.
	servicetest.Eventually(t, "the node to read what it wrote", func() bool {
		known := a.reg.Nodes()
		return len(known) == 1 && known[0].Mappings == 1
	})
	admin := s.Client()
	before, err := admin.Get(t.Context(), testPrefix+"/ip/", clientv3.WithPrefix())
	if err != nil {
		t.Fatal(err)
	}
	a.stop()
	b := startNode(t, s.Endpoint, "b", t.TempDir(), quick())
	b.seesMapping(address(1, 5), fmt.Sprint("a ", web.Number))
	a = startNode(t, s.Endpoint, "a", dir, quick())
	a.published()
	after, err := admin.Get(t.Context(), testPrefix+"/ip/", clientv3.WithPrefix())
	if err != nil {
		t.Fatal(err)
	}
	for i, kv := range after.Kvs {
		// A node always writes its own record at its start.
		if !strings.HasSuffix(string(kv.Key), "/node") && kv.ModRevision != before.Kvs[i].ModRevision {
			t.Errorf("%s was written again", kv.Key)
		}
		if string(kv.Value) != string(before.Kvs[i].Value) {
			t.Errorf("%s is %s, was %s", kv.Key, kv.Value, before.Kvs[i].Value)
		}
	}
}

func TestForgottenNodeIsNotBelieved(t *testing.T) {
	t.Parallel()
	s := etcdtest.StartThree(t)
	cfg := quick()
	cfg.aliveTTL = time.Second
	dir := t.TempDir()
	a := startNode(t, s.Endpoint, "a", dir, cfg)
	b := startNode(t, s.Endpoint, "b", t.TempDir(), quick())
	a.register(1, prefix(1))
	web := a.endpoint("c1", "web", address(1, 5))
	b.seesMapping(address(1, 5), fmt.Sprint("a ", web.Number))
	if _, err := b.reg.Forget(t.Context(), "a", false, false); !errors.Is(err, registry.ErrAlive) {
		t.Fatalf("a living node is forgotten: %v", err)
	}
	a.stop()
	servicetest.Eventually(t, "the silence of a", func() bool {
		alive, err := b.reg.Alive(t.Context())
		return err == nil && !alive["a"]
	})
	if got := b.mapping(address(1, 5)); got == "" {
		t.Error("a mapping went because its node is silent")
	}
	forgotten, err := b.reg.Forget(t.Context(), "a", false, false)
	if err != nil || forgotten.Mappings != 1 {
		t.Fatalf("forgotten %+v, %v", forgotten, err)
	}
	b.seesMapping(address(1, 5), "")
	b.seesNode("a", false)
	b.register(2, prefix(2), prefix(1))
	b.published()
	if r := b.reg.Status().Ranges; len(r) != 1 || r[0].Range != prefix(1) {
		t.Errorf("a range in quarantine is given away: %v", r)
	}
	// A mapping that node a writes without a record, while it is cut off, is not valid.
	admin := s.Client()
	late := toJSON(registry.Addresses{Addresses: []netip.Addr{address(1, 9)}, Identity: web.Number, Incarnation: "x"})
	if _, err := admin.Put(t.Context(), testPrefix+"/ip/a/ep/late", late); err != nil {
		t.Fatal(err)
	}
	servicetest.Eventually(t, "the late mapping", func() bool { return b.reg.Status().Refused > 0 })
	if got := b.mapping(address(1, 9)); got != "" {
		t.Errorf("a late mapping of a forgotten node counts: %s", got)
	}
	// Node a is connected again, registers, and has its range again.
	a = startNode(t, s.Endpoint, "a", dir, cfg)
	b.seesMapping(address(1, 5), fmt.Sprint("a ", web.Number))
	a.published()
	if left := keysBelow(t, admin, "/ip/a/ep/"); len(left) != 1 {
		t.Errorf("what a did not write is left: %v", left)
	}
}

// TestLivingNodeIsForgottenAsOftenAsItRegisters: a live node registers again after it was forgotten. A node that
// receives ForgetNode asks etcd whether the record exists, because its own copy may lack the new registration.
func TestLivingNodeIsForgottenAsOftenAsItRegisters(t *testing.T) {
	t.Parallel()
	s := etcdtest.StartThree(t)
	a := startNode(t, s.Endpoint, "a", t.TempDir(), quick())
	b := startNode(t, s.Endpoint, "b", t.TempDir(), quick())
	deaf := claimer(t, s.Endpoint, "deaf") // which follows nothing
	if _, err := deaf.Forget(t.Context(), "a", true, false); !errors.Is(err, registry.ErrNoNode) {
		t.Errorf("a node that never registered: %v", err)
	}
	a.register(1, prefix(1))
	web := a.endpoint("c1", "web", address(1, 5))
	b.seesMapping(address(1, 5), fmt.Sprint("a ", web.Number))
	admin := s.Client()
	for i := range 20 {
		servicetest.Eventually(t, "the registration of a in etcd", func() bool {
			got, err := admin.Get(t.Context(), testPrefix+"/ip/a/node")
			return err == nil && len(got.Kvs) == 1
		})
		by, validate := b.reg, i == 10
		if i%5 == 0 {
			by = deaf
		}
		if _, err := by.Forget(t.Context(), "a", false, validate); !errors.Is(err, registry.ErrAlive) {
			t.Fatalf("time %d: a living node is forgotten: %v", i, err)
		}
		known, err := by.Forget(t.Context(), "a", true, validate)
		if err != nil || !slices.Equal(known.Node.Record.Ranges, []netip.Prefix{prefix(1)}) {
			t.Fatalf("time %d: forgotten %+v, %v", i, known, err)
		}
	}
	a.published()
	b.seesMapping(address(1, 5), fmt.Sprint("a ", web.Number))
}

func TestLeaseLossChangesNoMapping(t *testing.T) {
	t.Parallel()
	s := etcdtest.StartThree(t)
	a := startNode(t, s.Endpoint, "a", t.TempDir(), quick())
	b := startNode(t, s.Endpoint, "b", t.TempDir(), quick())
	a.register(1, prefix(1))
	web := a.endpoint("c1", "web", address(1, 5))
	want := fmt.Sprint("a ", web.Number)
	b.seesMapping(address(1, 5), want)
	b.connected()
	sub, err := b.cluster.Subscribe(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer sub.Close()
	admin := s.Client()
	leases, err := admin.Leases(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range leases.Leases {
		if _, err := admin.Revoke(t.Context(), l.ID); err != nil {
			t.Fatal(err)
		}
	}
	a.connected()
	// The arrival of a later change proves that every earlier one arrived.
	late := a.endpoint("c2", "web", address(1, 6))
	seen := map[registry.Key]int{}
	for b.mapping(address(1, 6)) != fmt.Sprint("a ", late.Number) ||
		seen[registry.Key{Prefix: netip.PrefixFrom(address(1, 6), 32)}] == 0 {
		e, err := sub.Next(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if e.Kind == watch.Delete {
			t.Errorf("%v went with the leases", e.Key)
		}
		seen[e.Key]++
	}
	if n := seen[registry.Key{Prefix: netip.PrefixFrom(address(1, 5), 32)}]; n != 1 {
		t.Errorf("the mapping was sent %d times", n)
	}
}

// TestIdentityBeforeAddress: a reader receives an identity no later than an address with this identity.
func TestIdentityBeforeAddress(t *testing.T) {
	t.Parallel()
	s := etcdtest.StartThree(t)
	a := startNode(t, s.Endpoint, "a", t.TempDir(), quick())
	b := startNode(t, s.Endpoint, "b", t.TempDir(), quick())
	a.register(1, prefix(1))
	b.seesNode("a", true)
	sub, err := b.cluster.Subscribe(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer sub.Close()
	const endpoints = 200
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			for i := w; i < endpoints; i += 4 {
				a.endpoint(fmt.Sprint("c", i), fmt.Sprint("set", i), address(1, i+2))
			}
		})
	}
	for seen := 0; seen < endpoints; {
		e, err := sub.Next(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if n := e.Value.Identity; e.Kind == watch.Upsert && n >= identity.MinCluster {
			seen++
			if _, ok := b.hub.Get(n); !ok {
				t.Errorf("%v has the identity %d, which the node does not know", e.Key.Prefix, n)
			}
		}
	}
	wg.Wait()
}

func TestAddressesOutliveEtcd(t *testing.T) {
	t.Parallel()
	s := etcdtest.StartThree(t)
	a := startNode(t, s.Endpoint, "a", t.TempDir(), quick())
	b := startNode(t, s.Endpoint, "b", t.TempDir(), quick())
	a.register(1, prefix(1))
	web := a.endpoint("c1", "web", address(1, 5))
	gone := a.endpoint("c2", "web", address(1, 6))
	b.seesMapping(address(1, 6), fmt.Sprint("a ", gone.Number))
	a.published()
	s.Down()
	a.endpoint("c3", "web", address(1, 7)) // a set that the node holds
	if _, err := a.Release(t.Context(), allocator.EndpointHolder("c2", "eth0")); err != nil {
		t.Fatal(err)
	}
	s.Up()
	b.seesMapping(address(1, 7), fmt.Sprint("a ", web.Number))
	b.seesMapping(address(1, 6), "")
	// etcd loses all data: the nodes write all keys again.
	s.Down()
	s.Wipe()
	s.Up()
	servicetest.Eventually(t, "the keys to come back", func() bool {
		keys := keysBelow(t, s.Client(), "/ip/a/ep/")
		return len(keys) == 2
	})
	b.seesMapping(address(1, 5), fmt.Sprint("a ", web.Number))
	b.seesMapping(address(1, 7), fmt.Sprint("a ", web.Number))
}

// TestAddressesComeBackToAnEtcdThatIsAhead: etcd loses its data or is restored from a backup, and other clients write
// more revisions than were lost before the node reconnects. Neither the cluster ID nor the revision shows that the
// history differs.
func TestAddressesComeBackToAnEtcdThatIsAhead(t *testing.T) {
	t.Parallel()
	for name, loss := range map[string]func(*etcdtest.Server){
		"wiped": (*etcdtest.Server).Wipe, "restored": (*etcdtest.Server).Restore,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := etcdtest.StartThree(t)
			way, endpoint := newProxy(t, s)
			a := startNode(t, endpoint, "a", t.TempDir(), quick())
			a.register(1, prefix(1))
			a.published()
			s.Down()
			s.Backup()
			s.Up()
			web := a.endpoint("c1", "web", address(1, 5))
			a.published()
			wrote, err := s.Client().Get(t.Context(), testPrefix+"/ip/a/ep/", clientv3.WithPrefix())
			if err != nil {
				t.Fatal(err)
			}
			servicetest.Eventually(t, "the node to receive what it wrote", func() bool {
				return a.cluster.Origin().Revision >= wrote.Kvs[0].ModRevision
			})
			way.Cut()
			s.Down()
			loss(s)
			s.Up()
			admin := s.Client()
			for i := range 200 {
				if _, err := admin.Put(t.Context(), testPrefix+"/others", fmt.Sprint(i)); err != nil {
					t.Fatal(err)
				}
			}
			way.Heal()
			servicetest.Eventually(t, "the keys to come back", func() bool {
				return len(keysBelow(t, admin, "/ip/a/ep/")) == 1
			})
			b := startNode(t, s.Endpoint, "b", t.TempDir(), quick())
			b.seesMapping(address(1, 5), fmt.Sprint("a ", web.Number))
		})
	}
}

// TestDeletedAddressesDoNotComeBackWithABackup: etcd loses only deletions, and other clients write more revisions than
// were lost before the node reconnects.
func TestDeletedAddressesDoNotComeBackWithABackup(t *testing.T) {
	t.Parallel()
	s := etcdtest.StartThree(t)
	way, endpoint := newProxy(t, s)
	a := startNode(t, endpoint, "a", t.TempDir(), quick())
	a.register(1, prefix(1))
	a.endpoint("c1", "web", address(1, 5))
	a.published()
	if err := a.store.Ping(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.Down()
	s.Backup()
	s.Up()
	a.published()
	if _, err := a.Release(t.Context(), allocator.EndpointHolder("c1", "eth0")); err != nil {
		t.Fatal(err)
	}
	admin := s.Client()
	servicetest.Eventually(t, "the address to leave etcd", func() bool {
		return len(keysBelow(t, admin, "/ip/a/ep/")) == 0
	})
	servicetest.Eventually(t, "the node to receive the deletion", func() bool {
		f, err := a.reg.Find(address(1, 5))
		return err == nil && f.Mapping.Identity == 0
	})
	way.Cut()
	s.Down()
	s.Restore()
	s.Up()
	for i := range 200 {
		if _, err := admin.Put(t.Context(), testPrefix+"/others", fmt.Sprint(i)); err != nil {
			t.Fatal(err)
		}
	}
	if len(keysBelow(t, admin, "/ip/a/ep/")) != 1 {
		t.Fatal("the backup has no address")
	}
	way.Heal()
	servicetest.Eventually(t, "the deleted address to leave etcd again", func() bool {
		return len(keysBelow(t, admin, "/ip/a/ep/")) == 0
	})
}

// TestCompactedBehindAnIdleWatcher: a compaction beyond the last change that a watcher received causes no new listing.
func TestCompactedBehindAnIdleWatcher(t *testing.T) {
	t.Parallel()
	s := etcdtest.StartThree(t)
	a := startNode(t, s.Endpoint, "a", t.TempDir(), quick())
	b := startNode(t, s.Endpoint, "b", t.TempDir(), quick())
	a.register(1, prefix(1))
	web := a.endpoint("c1", "web", address(1, 5))
	b.seesMapping(address(1, 5), fmt.Sprint("a ", web.Number))
	admin := s.Client()
	for range 20 { // make changes that the watch does not see
		if _, err := admin.Put(t.Context(), "/elsewhere", "x"); err != nil {
			t.Fatal(err)
		}
	}
	s.Compact()
	late := a.endpoint("c2", "web", address(1, 6))
	b.seesMapping(address(1, 6), fmt.Sprint("a ", late.Number))
}

// TestWatchFromTheFuture: after a restore from an older backup, the nodes write the keys that the backup lacks, and
// remove keys that no longer exist.
func TestWatchFromTheFuture(t *testing.T) {
	t.Parallel()
	s := etcdtest.StartThree(t)
	a := startNode(t, s.Endpoint, "a", t.TempDir(), quick())
	b := startNode(t, s.Endpoint, "b", t.TempDir(), quick())
	a.register(1, prefix(1))
	a.endpoint("c1", "web", address(1, 5))
	a.published()
	s.Down()
	s.Backup()
	s.Up()
	admin := s.Client()
	// If a state changes after the last revision that a node saw and before its next request, the test cannot
	// distinguish the two: keep the revisions far apart.
	for range 200 {
		if _, err := admin.Put(t.Context(), "/elsewhere", "x"); err != nil {
			t.Fatal(err)
		}
	}
	web := a.endpoint("c2", "web", address(1, 6))
	if _, err := a.Release(t.Context(), allocator.EndpointHolder("c1", "eth0")); err != nil {
		t.Fatal(err)
	}
	b.seesMapping(address(1, 6), fmt.Sprint("a ", web.Number))
	b.seesMapping(address(1, 5), "")
	a.published()
	s.Down()
	s.Restore()
	s.Up()
	servicetest.Eventually(t, "the keys of now", func() bool {
		values := slices.Collect(maps.Values(keysBelow(t, admin, "/ip/a/ep/")))
		return len(values) == 1 && strings.Contains(values[0], address(1, 6).String())
	})
	late := a.endpoint("c3", "web", address(1, 7))
	b.seesMapping(address(1, 7), fmt.Sprint("a ", late.Number))
	b.seesMapping(address(1, 6), fmt.Sprint("a ", web.Number))
	b.seesMapping(address(1, 5), "")
}

// TestRangeOfASilentNodeIsTakenOver: if another node claims a range of a silent node, the silent node loses the range
// at once on all nodes. A live node keeps its range.
func TestRangeOfASilentNodeIsTakenOver(t *testing.T) {
	t.Parallel()
	s := etcdtest.StartThree(t)
	cfg := quick()
	cfg.aliveTTL = time.Second
	dir := t.TempDir()
	a := startNode(t, s.Endpoint, "a", dir, cfg)
	b := startNode(t, s.Endpoint, "b", t.TempDir(), quick())
	watcher := startNode(t, s.Endpoint, "w", t.TempDir(), quick())
	a.register(1, prefix(1), prefix(3))
	web := a.endpoint("c1", "web", address(1, 5))
	kept := a.endpoint("c3", "web", address(3, 5))
	watcher.seesMapping(address(1, 5), fmt.Sprint("a ", web.Number))
	b.register(2, prefix(2), prefix(1))
	b.published()
	if r := b.reg.Status().Ranges; len(r) != 1 {
		t.Fatalf("the range of a living node is given away: %v", r)
	}
	a.stop()
	servicetest.Eventually(t, "the range of a silent node", func() bool { return len(b.reg.Status().Ranges) == 0 })
	b.published()
	db := b.endpoint("c2", "db", address(1, 5))
	watcher.seesMapping(address(1, 5), fmt.Sprint("b ", db.Number))
	watcher.seesMapping(address(3, 5), fmt.Sprint("a ", kept.Number))
	// Node a starts again and still claims the range.
	a = startNode(t, s.Endpoint, "a", dir, cfg)
	a.published()
	if r := a.reg.Status().Ranges; len(r) != 1 || r[0].Range != prefix(1) || r[0].Holder != "b" {
		t.Errorf("a is refused %v", r)
	}
	watcher.seesMapping(address(1, 5), fmt.Sprint("b ", db.Number))
}

// TestNoRangeInTwoHands: eight nodes claim the same ranges at once, and each range has one holder.
func TestNoRangeInTwoHands(t *testing.T) {
	t.Parallel()
	const nodes, ranges = 8, 6
	s := etcdtest.StartThree(t)
	var all [nodes]*node
	for i := range nodes {
		all[i] = startNode(t, s.Endpoint, fmt.Sprint("node", i), t.TempDir(), quick())
	}
	var want []netip.Prefix
	for i := range ranges {
		want = append(want, prefix(i))
	}
	var wg sync.WaitGroup
	for i, n := range all {
		wg.Go(func() { n.register(100+i, want...) })
	}
	wg.Wait()
	holders := map[netip.Prefix][]string{}
	for _, n := range all {
		n.published()
	}
	last := all[0]
	servicetest.Eventually(t, "all nodes", func() bool { return len(last.reg.Nodes()) == nodes })
	for _, k := range last.reg.Nodes() {
		for _, p := range k.Node.Record.Ranges {
			holders[p] = append(holders[p], k.Node.Name)
		}
	}
	for _, p := range want {
		if len(holders[p]) != 1 {
			t.Errorf("%s is held by %v", p, holders[p])
		}
	}
}

func TestUnreadableKeysHideNothingElse(t *testing.T) {
	t.Parallel()
	s := etcdtest.StartThree(t)
	b := startNode(t, s.Endpoint, "b", t.TempDir(), quick())
	b.connected()
	admin := s.Client()
	good := toJSON(registry.Record{
		Incarnation: "i",
		Underlay:    registry.Underlay{Addresses: []netip.Addr{nodeAddress(1)}}, Ranges: []netip.Prefix{prefix(1)},
	})
	at := func(a string, id any) string {
		return fmt.Sprintf(`{"addresses":[%q],"identity":%v,"incarnation":"i"}`, a, id)
	}
	for key, value := range map[string]string{
		"a/node": good, "a/ep/1": at("10.0.1.5", 300), "a/ep/host": at("10.0.1.6", 1),
		"a/ep/local": at("10.0.1.7", 0xFF0000),
		"a/ep/json":  "{", "a/ep/zone": at("fe80::1%eth0", 300), "a/ep/mapped": at("::ffff:10.0.1.8", 300),
		"a/ep/none": `{"identity":300,"incarnation":"i"}`,
		"c/node":    `{"incarnation":"i","ranges":["10.0.1.0/16"]}`, "d/node": `{}`, "e/node": "\x00", "/node": good,
		"a/other": "?",
	} {
		if _, err := admin.Put(context.Background(), testPrefix+"/ip/"+key, value); err != nil {
			t.Fatal(err)
		}
	}
	b.seesMapping(address(1, 5), "a 300")
	b.seesMapping(nodeAddress(1), "a 6")
	for host := 6; host < 10; host++ {
		if got := b.mapping(address(1, host)); got != "" {
			t.Errorf("10.0.1.%d is %s", host, got)
		}
	}
	if n := len(b.reg.Nodes()); n != 1 {
		t.Errorf("%d nodes", n)
	}
	// A readable record becomes unreadable: it no longer counts.
	if _, err := admin.Put(context.Background(), testPrefix+"/ip/a/node", "{"); err != nil {
		t.Fatal(err)
	}
	b.seesMapping(address(1, 5), "")
	b.seesNode("a", false)
}
