// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package store

import (
	"crypto/x509"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// enrolled returns credentials of the node n1 from a member.
func enrolled(t *testing.T, m *fakeMember) Credentials {
	t.Helper()
	c, err := tryEnrol(t, Token{Addresses: []string{m.address}, CA: m.a.hash(), Secret: "join"})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func tryEnrol(t *testing.T, token Token) (Credentials, error) {
	t.Helper()
	r, err := NewRequest()
	if err != nil {
		t.Fatal(err)
	}
	return Enrol(t.Context(), token, "n1", r)
}

// nowhere is an address at which nothing listens.
const nowhere = "127.0.0.1:1"

func TestEnrolTriesMembersUntilOneAnswers(t *testing.T) {
	a := newAuthority(t)
	m, other := newMember(t, a, 3), newMember(t, a, 3)
	c, err := tryEnrol(t, Token{Addresses: []string{nowhere, m.address, other.address}, CA: a.hash(), Secret: "join"})
	if err != nil {
		t.Fatal(err)
	}
	if c.Node != "n1" || c.Epoch != 3 || !slices.Equal(c.Clients, []string{"192.0.2.1:23790"}) {
		t.Errorf("credentials %+v", c)
	}
	if got := other.seen(); len(got) > 0 {
		t.Errorf("a member got a call after another one had answered: %q", got)
	}
	// A refusal is an answer. The other member would refuse, too, and would learn the secret.
	m.fails(status.Error(codes.Unauthenticated, "no"))
	both := Token{Addresses: []string{m.address, other.address}, CA: a.hash(), Secret: "join"}
	if _, err := tryEnrol(t, both); err == nil || !strings.Contains(err.Error(), "Unauthenticated") {
		t.Errorf("a refusal: %v", err)
	}
	if got := other.seen(); len(got) > 0 {
		t.Errorf("a member got a call after another one had refused: %q", got)
	}
	m.fails(status.Error(codes.Unavailable, "no quorum"))
	if _, err := tryEnrol(t, both); err != nil {
		t.Errorf("a member without a quorum, and another one: %v", err)
	}
}

func TestSecretIsSentOnlyToAMemberOfTheStore(t *testing.T) {
	a, strange := newAuthority(t), newAuthority(t)
	for what, m := range map[string]*fakeMember{
		"another store":         newMember(t, strange, 1),
		"a node as a server":    startMember(t, a, 1, a.server(1, x509.ExtKeyUsageClientAuth)),
		"another store's chain": startMember(t, a, 1, withCA(strange.server(1, x509.ExtKeyUsageServerAuth), a)),
	} {
		if _, err := tryEnrol(t, Token{Addresses: []string{m.address}, CA: a.hash(), Secret: "join"}); err == nil {
			t.Errorf("%s gives credentials", what)
		}
		if got := m.seen(); len(got) > 0 {
			t.Errorf("%s got %q", what, got)
		}
	}
}

func TestLocateUsesTheHighestEpoch(t *testing.T) {
	a := newAuthority(t)
	behind, ahead := newMember(t, a, 1), newMember(t, a, 2)
	c := enrolled(t, behind)
	for _, enrol := range [][]string{
		{behind.address, ahead.address, nowhere}, {nowhere, ahead.address, behind.address},
	} {
		c.Enrol = enrol
		got, err := Locate(t.Context(), c)
		if err != nil || got.Epoch != 2 || !slices.Equal(got.Enrol, []string{ahead.address}) {
			t.Errorf("%q: epoch %d at %q, %v", enrol, got.Epoch, got.Enrol, err)
		}
	}
	// A node that knows epoch 2 never accepts a lower epoch, neither in the certificate nor in the answer.
	c.Epoch, c.Enrol = 2, []string{behind.address}
	if got, err := Locate(t.Context(), c); err == nil {
		t.Errorf("back to epoch %d", got.Epoch)
	}
	if got, err := Renew(t.Context(), c); err == nil {
		t.Errorf("renewed by epoch %d", got.Epoch)
	}
	if got := behind.seen(); slices.Contains(got, "renew") {
		t.Errorf("the member that was left behind got %q", got)
	}
	ahead.list.Epoch, c.Enrol = 1, []string{ahead.address}
	if got, err := Locate(t.Context(), c); err == nil || got.Epoch != 2 {
		t.Errorf("an answer with a lower epoch: %d, %v", got.Epoch, err)
	}
	ahead.list.Epoch, ahead.list.ClientAddresses = 2, nil
	if got, err := Locate(t.Context(), c); err == nil || len(got.Clients) == 0 {
		t.Errorf("an answer without addresses: %q, %v", got.Clients, err)
	}
}

func TestCredentialsAreReadAsTheyWereSaved(t *testing.T) {
	dir := t.TempDir()
	if _, err := Load(dir); err == nil || !strings.Contains(err.Error(), "sluice store join") {
		t.Errorf("no credentials: %v", err)
	}
	want := enrolled(t, newMember(t, newAuthority(t), 7))
	if err := want.Save(dir); err != nil {
		t.Fatal(err)
	}
	if got, err := Load(dir); err != nil || !same(got, want) {
		t.Errorf("%v, want %v, %v", got, want, err)
	}
	info, err := os.Stat(filepath.Join(dir, File))
	if err != nil || info.Mode().Perm()&0o077 != 0 {
		t.Errorf("the file with the key: %v, %v", info.Mode(), err)
	}
	if err := (Credentials{Node: "n1", Epoch: 1}).Save(dir); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(dir); err == nil || !strings.Contains(err.Error(), "join again") {
		t.Errorf("credentials without addresses: %v", err)
	}
	want.Key = ""
	if _, err := want.TLS(); err == nil {
		t.Error("credentials without a key")
	}
}

func TestMachineJoinsOneStore(t *testing.T) {
	dir := t.TempDir()
	if err := FreeForMember(dir); err != nil {
		t.Fatal(err)
	}
	if _, err := RequestRestore(dir, nil); err == nil || !strings.Contains(err.Error(), "the keys of the store's") {
		t.Errorf("a restore without the keys: %v", err)
	}
	if _, err := CheckRestore(dir); err == nil || !strings.Contains(err.Error(), "the keys of the store's") {
		t.Errorf("a check without the keys: %v", err)
	}
	if err := SaveMember(dir, "n2", "192.0.2.2", nil); err != nil {
		t.Fatal(err)
	}
	if err := SaveMember(dir, "n3", "192.0.2.3", nil); !errors.Is(err, ErrExists) {
		t.Errorf("a second store: %v", err)
	}
	if got, err := CheckRestore(dir); err != nil || got != 1 {
		t.Errorf("a check: epoch %d, %v", got, err)
	}
	if _, err := os.Lstat(filepath.Join(dir, RestoreFile)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the check has requested a restore: %v", err)
	}
	for _, epoch := range []uint64{1, 1} { // a repeated request replaces the earlier one
		got, err := RequestRestore(dir, strings.NewReader("snapshot"))
		if err != nil || got != epoch {
			t.Errorf("epoch %d, %v, want %d", got, err, epoch)
		}
	}
	if text, err := os.ReadFile(filepath.Join(dir, SnapshotFile)); err != nil || string(text) != "snapshot" {
		t.Errorf("the snapshot: %q, %v", text, err)
	}
	// A service could have replaced the snapshot of an earlier request by a link. The next request must not follow the
	// link.
	link, target := filepath.Join(dir, SnapshotFile), filepath.Join(t.TempDir(), "target")
	if err := errors.Join(os.Remove(link), os.Symlink(target, link)); err != nil {
		t.Fatal(err)
	}
	if _, err := RequestRestore(dir, strings.NewReader("snapshot")); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(target); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the snapshot went through a link: %v", err)
	}
}
