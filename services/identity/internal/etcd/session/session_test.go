// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package session

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/identity/internal/cluster"
	"github.com/sluice-net/sluice/services/identity/internal/test/etcdtest"
)

func TestMain(m *testing.M) {
	code := leaktest.Run(m)
	etcdtest.Cleanup()
	os.Exit(code)
}

const prefix = "/test/session"

// prepared is a prepare function that does nothing.
func prepared(context.Context) error { return nil }

// open returns a session of a node that is closed after the test.
func open(t *testing.T, server *etcdtest.Server, node string) *Session {
	t.Helper()
	return openAs(t, Client{Endpoints: []string{server.Endpoint}}, node)
}

// openAs is like open, with all settings of the client.
func openAs(t *testing.T, client Client, node string) *Session {
	t.Helper()
	s, err := Open(Config{
		Client: client, Prefix: prefix, Node: node, TTL: time.Hour, AliveTTL: time.Minute,
		Incarnation: "state-of-" + node, Boot: "boot", Timeout: 20 * time.Second, Listen: 50 * time.Millisecond, Log: log.Discard(),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func TestWrongConfigurationIsNamed(t *testing.T) {
	good := Client{Endpoints: []string{"unix:///x"}}
	for want, cfg := range map[string]Config{
		"node name":  {Client: good, Prefix: "/p", Node: "a/b", TTL: time.Minute, AliveTTL: time.Minute, Incarnation: "i", Timeout: 1, Listen: 1},
		"key prefix": {Client: good, Prefix: "/p/", Node: "a", TTL: time.Minute, AliveTTL: time.Minute, Incarnation: "i", Timeout: 1, Listen: 1},
		"lease":      {Client: good, Prefix: "/p", Node: "a", AliveTTL: time.Minute, Incarnation: "i", Timeout: 1, Listen: 1},
	} {
		if s, err := Open(cfg); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, %v, want an error with %q", cfg, s, err, want)
		}
	}
}

// TestCopiesOfOneDiskDoNotTakeTurns: two machines with copies of one state directory have different boot IDs. The
// machine that started last owns the name.
func TestCopiesOfOneDiskDoNotTakeTurns(t *testing.T) {
	s := etcdtest.Start(t)
	boots := func(boot string) *Session {
		t.Helper()
		st, err := Open(Config{
			Client: Client{Endpoints: []string{s.Endpoint}}, Prefix: prefix, Node: "a", TTL: time.Hour, AliveTTL: time.Minute,
			Incarnation: "one", Boot: boot, Timeout: 20 * time.Second, Listen: time.Second, Log: log.Discard(),
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { st.Close() })
		return st
	}
	first, second := boots("1"), boots("2")
	for _, st := range []*Session{first, second} {
		if _, err := st.Join(t.Context(), prepared); err != nil {
			t.Fatal(err)
		}
	}
	for range 3 {
		if err := first.Ping(t.Context()); !errors.Is(err, cluster.ErrNameTaken) {
			t.Errorf("the first after the second started: %v, want ErrNameTaken", err)
		}
		if err := second.Ping(t.Context()); err != nil {
			t.Errorf("the second: %v", err)
		}
	}
}

// TestAClosedConnectionIsNoticedAndExplained: when the server ends, the kernel closes its connections. The session then
// reports the kernel's error, without waiting for a request.
func TestAClosedConnectionIsNoticedAndExplained(t *testing.T) {
	server := etcdtest.Start(t)
	s := open(t, server, "a")
	if _, err := s.Join(t.Context(), prepared); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.Severed(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("of a connection that is there: %v, want the context's error", err)
	}
	severed := make(chan error, 1)
	go func() { severed <- s.Severed(t.Context()) }()
	server.Down()
	want := func(what string, err error) {
		t.Helper()
		if !errors.Is(err, cluster.ErrUnavailable) || !strings.Contains(err.Error(), "connect: ") {
			t.Errorf("%s: %v, want ErrUnavailable and what the kernel says", what, err)
		}
	}
	want("closed", <-severed)
	short, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_, err := s.Alive(short, "a")
	want("a request", err)
	server.Up()
}

func TestWatchFromACompactedRevisionIsAGap(t *testing.T) {
	server := etcdtest.Start(t)
	s := open(t, server, "a")
	var first int64
	for i := range 2 {
		resp, err := s.Commit(t.Context(), "write", s.Txn(t.Context()).Then(clientv3.OpPut(prefix+"/x", fmt.Sprint(i))))
		if err != nil {
			t.Fatal(err)
		}
		if first == 0 {
			first = resp.Header.Revision
		}
	}
	server.Compact()
	// Watch as a node does after a long absence: its client resumes here.
	_, err := s.watch(t.Context(), Reader{Prefix: prefix + "/x", Changes: func(e []*clientv3.Event, _ int64, _ time.Time) {
		t.Errorf("events %v out of a gap", e)
	}}, first, s.History())
	if !errors.Is(err, errGap) {
		t.Errorf("watch: %v, want errGap", err)
	}
}

func TestListingsOfManyPagesAreOfOneRevision(t *testing.T) {
	s := open(t, etcdtest.Start(t), "a")
	const n = pageSize + 10
	put := func(first, end int) {
		t.Helper()
		var ops []clientv3.Op
		for i := first; i < end; i++ {
			ops = append(ops, clientv3.OpPut(fmt.Sprintf("%s/x/%05d", prefix, i), ""))
			if len(ops) == 100 || i == end-1 {
				if _, err := s.Commit(t.Context(), "write", s.Txn(t.Context()).Then(ops...)); err != nil {
					t.Fatal(err)
				}
				ops = nil
			}
		}
	}
	put(0, n)
	var listed int
	if _, err := s.List(t.Context(), prefix+"/x/", false, func(*mvccpb.KeyValue) {
		if listed++; listed == 1 {
			put(n, n+5) // keys after the first page
		}
	}); err != nil {
		t.Fatal(err)
	}
	if listed != n {
		t.Errorf("%d keys listed, want the %d of the first page's revision", listed, n)
	}
}

// TestKeysOfSeveralOwnersLiveOnOneSession: other keys that a node attached to its lease are deleted with the node; keys
// of other nodes are not.
func TestKeysOfSeveralOwnersLiveOnOneSession(t *testing.T) {
	server := etcdtest.Start(t)
	admin := server.Client()
	s := open(t, server, "a")
	if _, err := s.Lease(); !errors.Is(err, cluster.ErrSessionLost) {
		t.Errorf("a lease before the session: %v, want ErrSessionLost", err)
	}
	broken := errors.New("not prepared")
	if _, err := s.Join(t.Context(), func(context.Context) error { return broken }); !errors.Is(err, broken) {
		t.Errorf("join: %v, want the error of its preparation", err)
	}
	if resp, err := admin.Get(t.Context(), prefix, clientv3.WithPrefix()); err != nil || len(resp.Kvs) != 0 {
		t.Errorf("before it was prepared the session wrote %v, %v", resp.Kvs, err)
	}
	if fresh, err := s.Join(t.Context(), prepared); err != nil || !fresh {
		t.Fatalf("join: fresh %t, %v", fresh, err)
	}
	lease, err := s.Lease()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Commit(t.Context(), "write", s.Txn(t.Context()).Then(
		clientv3.OpPut(prefix+"/node/a", "address", clientv3.WithLease(lease)),
		clientv3.OpPut(prefix+"/range/a", "10.0.0.0/24", clientv3.WithLease(lease)),
		clientv3.OpPut(prefix+"/range/all", "10.0.0.0/16"))); err != nil {
		t.Fatal(err)
	}
	// The next process of the node continues with the lease.
	next, err := Open(withLast(s.Config(), s.Name()))
	if err != nil {
		t.Fatal(err)
	}
	defer next.Close()
	if fresh, err := next.Join(t.Context(), prepared); err != nil || fresh {
		t.Errorf("join of the next process: fresh %t, %v", fresh, err)
	}
	if id, err := next.Lease(); err != nil || id != lease {
		t.Errorf("lease of the next process: %x, %v, want %x", id, err, lease)
	}
	if _, err := admin.Revoke(t.Context(), lease); err != nil {
		t.Fatal(err)
	}
	resp, err := admin.Get(t.Context(), prefix, clientv3.WithPrefix(), clientv3.WithKeysOnly())
	if err != nil {
		t.Fatal(err)
	}
	var left []string
	for _, kv := range resp.Kvs {
		left = append(left, strings.TrimPrefix(string(kv.Key), prefix))
	}
	if want := []string{"/alive/a", "/range/all"}; !slices.Equal(left, want) {
		t.Errorf("keys %q after the lease, want %q", left, want)
	}
	if fresh, err := next.Join(t.Context(), prepared); err != nil || !fresh {
		t.Errorf("join after the lease: fresh %t, %v; want a new one", fresh, err)
	}
}

func withLast(c Config, last string) Config {
	c.Last = last
	return c
}

func TestTransactionsOfANodeFailOnceAnotherHasItsName(t *testing.T) {
	server := etcdtest.Start(t)
	s := open(t, server, "a")
	if alive, err := s.Alive(t.Context(), "a"); err != nil || alive != nil {
		t.Errorf("before the session the node is alive: %v, %v", alive, err)
	}
	if _, err := s.Join(t.Context(), prepared); err != nil {
		t.Fatal(err)
	}
	alive, err := s.Alive(t.Context(), "a")
	if err != nil || alive == nil || string(alive.Key) != s.AliveKey("a") {
		t.Fatalf("the node is not alive: %v, %v", alive, err)
	}
	write := func() bool {
		t.Helper()
		resp, err := s.Commit(t.Context(), "write", s.Txn(t.Context()).If(s.Named()).Then(clientv3.OpPut(prefix+"/x",
			"")))
		if err != nil {
			t.Fatal(err)
		}
		return resp.Succeeded
	}
	if !write() {
		t.Error("the node owns its name, but its transaction failed")
	}
	if _, err := server.Client().Put(t.Context(), s.AliveKey("a"), "state-of-another boot"); err != nil {
		t.Fatal(err)
	}
	if write() {
		t.Error("another node owns the name, but the transaction succeeded")
	}
}

func TestOneReaderFollowsNeighbouringPrefixesUpToAnEnd(t *testing.T) {
	server := etcdtest.Start(t)
	admin := server.Client()
	s := open(t, server, "a")
	put := func(keys ...string) {
		t.Helper()
		for _, k := range keys {
			if _, err := admin.Put(t.Context(), prefix+k, ""); err != nil {
				t.Fatal(err)
			}
		}
	}
	put("/id/1", "/ip/1", "/labels/1")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var seen []string
	note := func(kv *mvccpb.KeyValue) { seen = append(seen, strings.TrimPrefix(string(kv.Key), prefix)) }
	err := s.Follow(ctx, Reader{
		Prefix: prefix + "/id/", End: clientv3.GetPrefixRangeEnd(prefix + "/ip/"),
		Begin:    func() {},
		Listed:   note,
		Complete: func(cluster.Point, time.Time) { put("/labels/2", "/id/2", "/ip/2") },
		Changes: func(events []*clientv3.Event, _ int64, _ time.Time) {
			for _, e := range events {
				note(e.Kv)
			}
			if len(seen) >= 4 {
				cancel()
			}
		},
	})
	if !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	if want := []string{"/id/1", "/ip/1", "/id/2", "/ip/2"}; !slices.Equal(seen, want) {
		t.Errorf("the reader saw %q, want %q", seen, want)
	}
}

// TestDeletedKeysAreNoOtherHistory: the newest key that a node has seen is deleted, and etcd compacts its revision. The
// node must not take this for another history.
func TestDeletedKeysAreNoOtherHistory(t *testing.T) {
	server := etcdtest.Start(t)
	admin := server.Client()
	s := open(t, server, "a")
	if _, err := s.Join(t.Context(), prepared); err != nil {
		t.Fatal(err)
	}
	ping := func(what string) {
		t.Helper()
		if err := s.Ping(t.Context()); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := admin.Put(t.Context(), prefix+"/x/1", ""); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	err := s.Follow(ctx, Reader{
		Prefix: prefix + "/x/", Begin: func() {}, Listed: func(*mvccpb.KeyValue) {},
		Complete: func(cluster.Point, time.Time) {
			ping("the key exists")
			if _, err := admin.Delete(t.Context(), prefix+"/x/1"); err != nil {
				t.Error(err)
			}
		},
		Changes: func(events []*clientv3.Event, _ int64, _ time.Time) {
			if len(events) > 0 {
				cancel()
			}
		},
	})
	if !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	ping("the key is deleted")
	server.Compact()
	ping("its revision is compacted")
	select {
	case <-s.History():
		t.Error("the deletion of a key is taken for another history")
	default:
	}
}
