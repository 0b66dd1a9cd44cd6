// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package store

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/log"
)

// publishes returns what a member publishes in Kubernetes.
func (m *fakeMember) publishes(epoch uint64) Published {
	return Published{
		Epoch: epoch, ID: "id", Clients: []string{"192.0.2.1:23790"}, Enrol: []string{m.address},
		CA: encodePEM("CERTIFICATE", m.a.cert.Raw),
	}
}

func TestPublishedIsReadAsItWasWritten(t *testing.T) {
	p := newMember(t, newAuthority(t), 7).publishes(7)
	if again, err := ParsePublished(p.Data()); err != nil || !reflect.DeepEqual(again, p) {
		t.Errorf("%v, %v, want %v", again, err, p)
	}
	for key, value := range map[string]string{
		epochData: "0", clientsData: "", enrolData: "store:23810", caData: "none",
	} {
		data := p.Data()
		data[key] = value
		if _, err := ParsePublished(data); err == nil || !strings.Contains(err.Error(), key) {
			t.Errorf("%s is %q: %v", key, value, err)
		}
	}
}

// TestStoreAnswersIfAMemberOfItsEpochDoes: an answer that refuses the call counts, too, because the call has no
// certificate.
func TestStoreAnswersIfAMemberOfItsEpochDoes(t *testing.T) {
	a := newAuthority(t)
	m := newMember(t, a, 2)
	other := m.publishes(2)
	other.CA = encodePEM("CERTIFICATE", newAuthority(t).cert.Raw)
	for what, c := range map[string]struct {
		p    Published
		err  error
		want bool
	}{
		"a member":                     {m.publishes(2), nil, true},
		"a member that refuses":        {m.publishes(2), status.Error(codes.Unauthenticated, "no certificate"), true},
		"a member without a quorum":    {m.publishes(2), status.Error(codes.Unavailable, "no leader"), false},
		"a member of an earlier epoch": {m.publishes(3), nil, false},
		"a member of another CA":       {other, nil, false},
	} {
		m.fails(c.err)
		if got := c.p.Answers(t.Context()); got != c.want {
			t.Errorf("%s answers: %t, want %t", what, got, c.want)
		}
	}
}

// TestNodeInKubernetesEnrolsInEachEpoch: the node enrols with the token of its account, because each epoch has another
// CA.
func TestNodeInKubernetesEnrolsInEachEpoch(t *testing.T) {
	dir := t.TempDir()
	token := "token1"
	r := NewKubernetesRenewer(dir, "n1", func() (string, error) { return token, nil }, time.Now, log.Discard())
	step := func() bool { return r.step(t.Context(), func(Credentials) {}) }
	if step() || !errors.Is(r.Problem(), ErrNone) {
		t.Errorf("without a store: %v", r.Problem())
	}
	if _, err := r.Current().TLS(); !errors.Is(err, ErrNone) {
		t.Errorf("without credentials: %v", err)
	}
	first, second := newMember(t, newAuthority(t), 1), newMember(t, newAuthority(t), 2)
	r.Publish(first.publishes(1))
	if !step() || r.Current().Epoch != 1 || r.Problem() != nil || !step() {
		t.Errorf("the first epoch: %v, %v", r.Current(), r.Problem())
	}
	token = "token2"
	r.Publish(second.publishes(2))
	if !step() || r.Current().Epoch != 2 || r.Current().CA != second.publishes(2).CA {
		t.Errorf("the second epoch: %v, %v", r.Current(), r.Problem())
	}
	for m, want := range map[*fakeMember]string{first: "token1", second: "token2"} {
		if seen := m.seen(); !slices.Equal(seen, []string{want}) {
			t.Errorf("calls %q, want %q", seen, want)
		}
	}
	// An earlier epoch is not used. The API server may publish one after it was restored.
	r.Publish(first.publishes(1))
	if step() || r.Current().Epoch != 2 || !strings.Contains(r.Problem().Error(), "this node knows epoch 2") {
		t.Errorf("an earlier epoch: %v, %v", r.Current(), r.Problem())
	}
	r.Publish(second.publishes(2))
	if !step() {
		t.Error(r.Problem())
	}

	// The next process uses the saved credentials. If the file is corrupt or belongs to another node, it enrols.
	again := func(node string) Credentials {
		return NewKubernetesRenewer(dir, node, r.token, time.Now, log.Discard()).Current()
	}
	if c := again("n1"); !same(c, r.Current()) {
		t.Errorf("the next process has %v, want %v", c, r.Current())
	}
	if c := again("n2"); c.Epoch != 0 {
		t.Errorf("another node has %v", c)
	}
	if err := os.WriteFile(filepath.Join(dir, File), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if c := again("n1"); c.Epoch != 0 {
		t.Errorf("a corrupt file gives %v", c)
	}
}

// TestNodeInKubernetesEnrolsAgainAfterARefusal: the Node was deleted and created again in the same epoch.
func TestNodeInKubernetesEnrolsAgainAfterARefusal(t *testing.T) {
	m := newMember(t, newAuthority(t), 1)
	token := "token1"
	r := NewKubernetesRenewer(t.TempDir(), "n1", func() (string, error) { return token, nil }, time.Now, log.Discard())
	r.Publish(m.publishes(1))
	step := func() bool { return r.step(t.Context(), func(Credentials) {}) }
	if once, twice := step(), step(); !once || !twice {
		t.Fatal(r.Problem())
	}
	calls := func(want ...string) {
		t.Helper()
		if seen := m.seen(); !slices.Equal(seen, want) {
			t.Errorf("calls %q, want %q", seen, want)
		}
	}
	calls("token1")
	first := r.Current()

	// A connection failed, but members accept the certificate or do not answer.
	m.fails(status.Error(codes.Unavailable, "no leader"))
	r.Failed()
	if !step() || !same(r.Current(), first) {
		t.Errorf("without an answer: %v", r.Problem())
	}
	m.fails(nil)
	once, twice := step(), step()
	if !once || !twice || !same(r.Current(), first) {
		t.Errorf("after an answer: %v", r.Problem())
	}
	calls("token1", "list", "list")

	// The certificate is refused, and at first the token, too.
	token = "token2"
	m.fails(status.Error(codes.Unauthenticated, "the node n1 is not enrolled, or was revoked"))
	r.Failed()
	if step() || r.Problem() == nil || !strings.Contains(r.Problem().Error(), "or was revoked") ||
		!same(r.Current(), first) {
		t.Errorf("a refusal: %v", r.Problem())
	}
	calls("token1", "list", "list", "list", "token2")
	m.refuses("list", status.Error(codes.Unauthenticated, "the node n1 is not enrolled, or was revoked"))
	if !step() || r.Problem() != nil || same(r.Current(), first) {
		t.Errorf("the node does not enrol again: %v", r.Problem())
	}
	calls("token1", "list", "list", "list", "token2", "list", "token2")
}
