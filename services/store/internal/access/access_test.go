// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package access

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/server/v3/auth"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/store/internal/authority"
	"github.com/sluice-net/sluice/services/store/internal/member"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

const testPrefix = "/sluice/v1/identity"

// open returns the Access of a new store whose process is ready.
func open(t *testing.T) *Access {
	t.Helper()
	m, err := member.Open(member.Settings{
		Dir: t.TempDir(), Name: "m", Quota: 64 << 20, Now: time.Now, Log: log.Discard(),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	if err := m.Ready(t.Context()); err != nil {
		t.Fatal(err)
	}
	a := New(m.Server(), testPrefix, time.Now)
	if err := a.Prepare(t.Context(), m.Epoch()); err != nil {
		t.Fatal(err)
	}
	return a
}

// as returns a context of calls that a node makes.
func as(t *testing.T, node string) context.Context {
	t.Helper()
	p := &peer.Peer{AuthInfo: member.AuthInfo(authority.User(node))}
	return metadata.NewIncomingContext(peer.NewContext(t.Context(), p), metadata.MD{})
}

// value returns the value of a key; empty: none.
func (a *Access) value(t *testing.T, key string) string {
	t.Helper()
	resp, err := a.etcd.Range(member.Root(t.Context()), &pb.RangeRequest{Key: []byte(testPrefix + key)})
	if err != nil {
		t.Fatal(err)
	}
	if len(resp.Kvs) == 0 {
		return ""
	}
	return string(resp.Kvs[0].Value)
}

// TestNewNumbersAreAllowedAgainAfterAFailure: the lease of the key is not enough; the key itself must be written.
func TestNewNumbersAreAllowedAgainAfterAFailure(t *testing.T) {
	a := open(t)
	for _, step := range []struct {
		what string
		do   func() error
		want string
	}{
		{"Allow", func() error { return a.Allow(t.Context(), time.Minute) }, "1"},
		{"Allow again", func() error { return a.Allow(t.Context(), time.Minute) }, "1"},
		{"Forbid", func() error { return a.Forbid(t.Context()) }, ""},
		{"Allow after Forbid", func() error { return a.Allow(t.Context(), time.Minute) }, "1"},
	} {
		if err := step.do(); err != nil {
			t.Fatalf("%s: %v", step.what, err)
		}
		if got := a.value(t, allocateKey); got != step.want {
			t.Errorf("after %s, the key is %q, want %q", step.what, got, step.want)
		}
	}

	// The write of the key fails.
	if err := a.Forbid(t.Context()); err != nil {
		t.Fatal(err)
	}
	a.prefix = strings.Repeat("x", 2<<20) // more than a request may have
	if err := a.Allow(t.Context(), time.Minute); err == nil {
		t.Fatal("a write that failed is reported as success")
	}
	a.prefix = testPrefix
	if err := a.Allow(t.Context(), time.Minute); err != nil || a.value(t, allocateKey) != "1" {
		t.Errorf("after a write that failed, the key is %q, %v", a.value(t, allocateKey), err)
	}
}

// TestNodesThatEnrolAtTheSameTimeAllSucceed: each enrolment changes users and roles, and etcd refuses what was called
// before such a change.
func TestNodesThatEnrolAtTheSameTimeAllSucceed(t *testing.T) {
	a := open(t)
	const nodes = 32
	failed := make(chan error, nodes)
	for i := range nodes {
		go func() {
			node := fmt.Sprintf("n%d", i)
			enrolment, err := a.EnrolAccount(t.Context(), node)
			if err == nil {
				err = a.Renewed(t.Context(), node, enrolment, time.Now().Add(time.Hour))
			}
			if err == nil {
				err = a.Check(t.Context(), node, enrolment)
			}
			failed <- err
		}()
	}
	for range nodes {
		if err := <-failed; err != nil {
			t.Error(err)
		}
	}
}

// puts writes a key as a node, and checks whether it may.
func (a *Access) puts(t *testing.T, node, key string, may bool) {
	t.Helper()
	_, err := a.etcd.Put(as(t, node), &pb.PutRequest{Key: []byte(testPrefix + key), Value: []byte("x")})
	if may && err != nil || !may && !errors.Is(err, auth.ErrPermissionDenied) {
		t.Errorf("%s writes %s: %v, want success: %t", node, key, err, may)
	}
}

// enrols gives nodes in Kubernetes their rights.
func (a *Access) enrols(t *testing.T, nodes ...string) {
	t.Helper()
	for _, n := range nodes {
		if _, err := a.EnrolAccount(t.Context(), n); err != nil {
			t.Fatal(err)
		}
	}
}

// TestNodesInKubernetesWriteTheSettingsOnce: any node may be the first of an epoch. Later, a compromised node cannot
// change them.
func TestNodesInKubernetesWriteTheSettingsOnce(t *testing.T) {
	a := open(t)
	a.enrols(t, "n1", "n2")
	limit := func() {
		t.Helper()
		if err := a.LimitSettings(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	limit()
	a.puts(t, "n1", settingsKey, true)
	limit()
	a.enrols(t, "n3")
	for _, n := range []string{"n1", "n2", "n3"} {
		a.puts(t, n, settingsKey, false)
		a.puts(t, n, "/alive/"+n, true)
	}
	// An administrator removes them, so that other settings may follow.
	remove := &pb.DeleteRangeRequest{Key: []byte(testPrefix + settingsKey)}
	if _, err := a.etcd.DeleteRange(member.Root(t.Context()), remove); err != nil {
		t.Fatal(err)
	}
	limit()
	a.puts(t, "n2", settingsKey, true)
}

// TestOnlyNodesOfTheControllerPublishPodCIDRs: also after sluice-controller moved to another node.
func TestOnlyNodesOfTheControllerPublishPodCIDRs(t *testing.T) {
	a := open(t)
	a.enrols(t, "n1", "n2")
	for _, step := range []struct{ controllers, others []string }{
		{nil, []string{"n1", "n2"}},
		{[]string{"n1"}, []string{"n2"}},
		{[]string{"n1", "n2"}, nil},
		{[]string{"n2"}, []string{"n1"}},
	} {
		if err := a.LetAssign(t.Context(), append(step.controllers, "a node that has not enrolled")); err != nil {
			t.Fatal(err)
		}
		for _, n := range step.controllers {
			a.puts(t, n, "/ip/.assigned/of/other", true)
			a.puts(t, n, "/ip/.assigned/all", true)
			a.puts(t, n, "/ip/other/node", false)
		}
		for _, n := range step.others {
			a.puts(t, n, "/ip/.assigned/of/other", false)
			a.puts(t, n, "/ip/"+n+"/node", true)
		}
	}
}
