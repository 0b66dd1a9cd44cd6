// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
	"github.com/sluice-net/sluice/services/policy/internal/port"
	"github.com/sluice-net/sluice/services/policy/internal/query"
	"github.com/sluice-net/sluice/services/policy/internal/test/synthetic"
)

// questions are queries that compile tables, by name.
func questions(o *Owner, subject, stranger identity.Numeric) map[string]func(context.Context) error {
	return map[string]func(context.Context) error{
		"table of no subject": func(ctx context.Context) error { _, err := o.Reader().Table(ctx, stranger); return err },
		"explanation of no subject": func(ctx context.Context) error {
			from, to := query.Peer{Identity: stranger}, query.Peer{Identity: subject}
			_, err := o.Reader().Explain(ctx, from, to, port.At(port.TCP, 80))
			return err
		},
		"difference": func(ctx context.Context) error {
			change := Request{Manifests: []byte(text(synthetic.Namespace(0), "app-00", 80))}
			return o.Reader().Diff(ctx, change, nil, func(query.Difference) error { return nil })
		},
		"validation": func(ctx context.Context) error {
			_, err := o.Upsert(ctx, []byte(text(synthetic.Namespace(0), "app-00", 81)), "", true)
			return err
		},
		"validation of a deletion": func(ctx context.Context) error { _, err := o.Delete(ctx, nil, true); return err },
	}
}

func small(t *testing.T) (o *Owner, subject, stranger identity.Numeric) {
	t.Helper()
	s := synthetic.Shape{Namespaces: 4, Apps: 5, Policies: 40, Subjects: 3, SubjectNamespaces: 1}
	dir := t.TempDir()
	config := town(t, dir, s)
	o, _ = run(t, dir, func(c *Config) { config.Linger = c.Linger; *c = config })
	c, err := synthetic.Make(s)
	if err != nil {
		t.Fatal(err)
	}
	return o, c.Subjects[0], identity.MinCluster + identity.Numeric(3*s.Apps)
}

func TestQuestionThatCompilesKeepsNobodyElseWaiting(t *testing.T) {
	o, subject, stranger := small(t)
	release, err := o.reader.questions.Hold(t.Context()) // a query is in progress
	if err != nil {
		t.Fatal(err)
	}
	for what, ask := range questions(o, subject, stranger) {
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- ask(ctx) }()
		if _, err := o.Reader().Status(t.Context()); err != nil {
			t.Fatal(err)
		}
		if _, err := o.Reader().Table(t.Context(), subject); err != nil {
			t.Errorf("while a %s waits, the table of a subject: %v", what, err)
		}
		select {
		case err := <-ended:
			t.Errorf("%s: answered with %v while another query is in progress", what, err)
		default:
		}
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v, want it to stop waiting", what, err)
		}
	}
	release()
	for what, ask := range questions(o, subject, stranger) {
		if err := ask(t.Context()); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// TestQuestionsAreAnsweredWhilePoliciesChange: with the race detector, this also shows that queries share no mutable
// state with the owner.
func TestQuestionsAreAnsweredWhilePoliciesChange(t *testing.T) {
	o, subject, stranger := small(t)
	ctx := t.Context()
	done := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		defer close(done)
		for i := range 150 {
			ns := synthetic.Namespace(i % 4)
			if _, err := o.Upsert(ctx, []byte(text(ns, fmt.Sprintf("app-%02d", i%5), 1000+i)), "", false); err != nil {
				t.Errorf("change %d: %v", i, err)
			}
			id, err := synthetic.Identity(synthetic.Shape{Namespaces: 4, Apps: 5}, i%4, 5+i%3)
			if err != nil {
				t.Error(err)
				return
			}
			id.Number += 1000
			var gone []identity.Numeric
			if i%2 == 1 {
				gone = append(gone, id.Number)
			}
			if err := o.Identities().SetIdentities(ctx, []peer.Identity{id}, gone); err != nil {
				t.Error(err)
			}
		}
	})
	for what, ask := range questions(o, subject, stranger) {
		wg.Go(func() {
			for {
				if err := ask(ctx); err != nil {
					t.Errorf("%s: %v", what, err)
					return
				}
				select {
				case <-done:
					return
				default:
				}
			}
		})
	}
	wg.Wait()
}

func TestDifferenceIsThatOfApplyingIt(t *testing.T) {
	o, subject, _ := small(t)
	peer := identity.MinCluster + 3 // app-03 in the same namespace
	manifest := []byte(strings.ReplaceAll(text(synthetic.Namespace(0), "app-00", 4711), "app: web", "app: app-03"))
	verdict := func() policytable.Action {
		from, to := query.Peer{Identity: peer}, query.Peer{Identity: subject}
		x, err := o.Reader().Explain(t.Context(), from, to, port.At(port.TCP, 4711))
		if err != nil {
			t.Fatal(err)
		}
		return x.Ingress.Verdict.Action
	}
	ask := func() (found []query.Difference) {
		t.Helper()
		if err := o.Reader().Diff(t.Context(), Request{Manifests: manifest}, nil, func(d query.Difference) error { found = append(found, d); return nil }); err != nil {
			t.Fatal(err)
		}
		return found
	}
	found := ask()
	before := verdict()
	if _, err := o.Upsert(t.Context(), manifest, "", false); err != nil {
		t.Fatal(err)
	}
	after := verdict()
	if before != policytable.Deny || after != policytable.Allow {
		t.Fatalf("the policy makes %s of %s, want allow of deny", after, before)
	}
	if len(found) != 1 || found[0].Subject.Number != subject || found[0].Direction != policytable.Ingress || len(found[0].Peers) != 1 ||
		found[0].Peers[0].Identity.Number != peer || found[0].Changes[0].Before.Action != before || found[0].Changes[0].After.Action != after {
		t.Errorf("found %+v, want that %d may reach %d", found, peer, subject)
	}
	if again := ask(); len(again) != 0 {
		t.Errorf("a difference from the enforced policies: %v", again)
	}
	// Diff stops when its reader returns an error.
	enough := errors.New("enough")
	manifest = []byte(strings.ReplaceAll(text(synthetic.Namespace(0), "app-00", 4712), "app: web", "app: app-03"))
	if err := o.Reader().Diff(t.Context(), Request{Manifests: manifest}, nil, func(query.Difference) error { return enough }); !errors.Is(err, enough) {
		t.Errorf("got %v", err)
	}
}
