// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package access

import (
	"fmt"
	"strings"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/log"
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
