// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package store

import (
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/log"
)

// renewer returns a Renewer of saved credentials at a clock.
func renewer(t *testing.T, c Credentials, now *time.Time) *Renewer {
	t.Helper()
	dir := t.TempDir()
	if err := c.Save(dir); err != nil {
		t.Fatal(err)
	}
	r, err := NewRenewer(dir, c.Node, func() time.Time { return *now }, log.Discard())
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestCertificateIsRenewedAfterTwoThirdsOfItsLife(t *testing.T) {
	m := newMember(t, newAuthority(t), 1)
	c := enrolled(t, m)
	from, to, err := c.Validity()
	if err != nil {
		t.Fatal(err)
	}
	now := from.Add(to.Sub(from) * 65 / 100)
	r := renewer(t, c, &now)
	changes := 0
	step := func() bool { return r.step(t.Context(), func(Credentials) { changes++ }) }
	if !step() || changes != 0 || !same(r.Current(), c) {
		t.Errorf("before it is due: %d changes, %v", changes, m.seen())
	}
	now = from.Add(to.Sub(from) * 67 / 100)
	if !step() || changes != 1 || r.Current().Certificate == c.Certificate {
		t.Errorf("when it is due: %d changes, %v", changes, m.seen())
	}
	if saved, err := Load(r.dir); err != nil || !same(saved, r.Current()) {
		t.Errorf("saved are %v, %v, and in use %v", saved, err, r.Current())
	}
	if want := []string{"join", "list", "renew"}; !slices.Equal(m.seen(), want) {
		t.Errorf("calls %q, want %q", m.seen(), want)
	}
}

func TestRenewalThatFailsIsShownAndTriedAgain(t *testing.T) {
	m := newMember(t, newAuthority(t), 1)
	c := enrolled(t, m)
	_, now, err := c.Validity()
	if err != nil {
		t.Fatal(err)
	}
	r := renewer(t, c, &now)
	step := func() bool { return r.step(t.Context(), func(Credentials) {}) }
	m.fails(status.Error(codes.Unauthenticated, "the node n1 was revoked"))
	if step() || r.Problem() == nil || !strings.Contains(r.Problem().Error(), "was revoked") || !same(r.Current(), c) {
		t.Errorf("a refusal: %v, %v", r.Problem(), r.Current())
	}
	m.fails(nil)
	if !step() || r.Problem() != nil || same(r.Current(), c) {
		t.Errorf("after that: %v, %v", r.Problem(), r.Current())
	}
}

func TestRenewerFollowsTheMembers(t *testing.T) {
	a := newAuthority(t)
	m, next := newMember(t, a, 1), newMember(t, a, 2)
	c := enrolled(t, m)
	now := time.Now()
	m.list.EnrolAddresses = []string{m.address, next.address}
	r := renewer(t, c, &now)
	var changes []Credentials
	step := func() { r.step(t.Context(), func(c Credentials) { changes = append(changes, c) }) }
	step()
	step()
	if len(changes) != 2 || len(changes[0].Enrol) != 2 || changes[1].Epoch != 2 || r.Current().Epoch != 2 {
		t.Errorf("changes %v", changes)
	}
	if saved, err := Load(r.dir); err != nil || saved.Epoch != 2 {
		t.Errorf("saved is epoch %d, %v", saved.Epoch, err)
	}
}

func TestCredentialsOfAnotherNodeAreRefused(t *testing.T) {
	c := enrolled(t, newMember(t, newAuthority(t), 1))
	dir := t.TempDir()
	if err := c.Save(dir); err != nil {
		t.Fatal(err)
	}
	if _, err := NewRenewer(dir, "n2", time.Now, log.Discard()); err == nil || !strings.Contains(err.Error(), `"n1"`) {
		t.Errorf("credentials of another node: %v", err)
	}
}
