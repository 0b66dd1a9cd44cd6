// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/sluice-net/sluice/kit/desired/directory"
	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/source"
	"github.com/sluice-net/sluice/services/policy/internal/stream"
)

// waits reports whether a subscriber of an owner has to wait.
func waits(t *testing.T, o *Owner) bool {
	t.Helper()
	select {
	case <-o.sources.gate.Opened():
		return false
	default:
		return true
	}
}

func TestSubscribersWaitForTheFirstListingOfTheState(t *testing.T) {
	dir := t.TempDir()
	d, stop := objects(t, dir)
	pods(t, d.owner, "shop")
	subscribed := make(chan *stream.Session)
	go func() {
		interest := Interest{Subjects: []identity.Numeric{301}}
		s, err := d.owner.Subscribers().Subscribe(t.Context(), Subscription{Name: "datapath", Interest: interest})
		if err != nil {
			t.Error(err)
		}
		subscribed <- s
	}()
	d.apply(map[policy.Key]policy.Written{network("db"): isolating("db")})
	if !waits(t, d.owner) {
		t.Error("a subscriber passes before the listing is complete")
	}
	select {
	case <-subscribed:
		t.Error("a subscriber has tables before the listing is complete")
	default:
	}
	d.complete(network("db"))
	d.owner.Subscribers().Unsubscribe("datapath", <-subscribed)
	stop()

	d, stop = objects(t, dir)
	if waits(t, d.owner) {
		t.Error("a subscriber waits after a restart, although the state was listed once")
	}
	stop()
	// A new state must wait for a listing, whatever the file contains.
	if err := os.Remove(filepath.Join(dir, "policies.db")); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(dir, "created")); err != nil {
		t.Fatal(err)
	}
	d, stop = objects(t, dir)
	if !waits(t, d.owner) {
		t.Error("a subscriber passes with a new state")
	}
	if _, err := d.owner.Confirm(t.Context(), false); err != nil || waits(t, d.owner) {
		t.Errorf("a subscriber waits after the policies were confirmed: %v", err)
	}
	stop()
	o, stop := runWith(t, t.TempDir(), []string{source.Identity, managed.SourceFile})
	if waits(t, o) {
		t.Error("a subscriber waits without the source")
	}
	stop()
}

// TestUnreadableDocumentKeepsOnlyItsOwnPolicy changes one document of a file, and makes another one unreadable: the
// change is enforced, and the former policy of the unreadable document stays.
func TestUnreadableDocumentKeepsOnlyItsOwnPolicy(t *testing.T) {
	o, _ := run(t, t.TempDir())
	pods(t, o, "shop")
	policyOf := func(name, ports string) string {
		return "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: " + name + ", namespace: shop}\n" +
			"spec: {podSelector: {matchLabels: {app: " + name + "}}, ingress: [" + ports + "]}\n"
	}
	feed := o.Feed(managed.SourceFile)
	set := func(text string) {
		t.Helper()
		if err := feed.Set(t.Context(), []directory.File{{Origin: "all.yaml", Data: []byte(text)}}); err != nil {
			t.Fatal(err)
		}
	}
	set(policyOf("web", "{}") + "---\n" + policyOf("db", ""))
	if !passes(t, o, 301, 300) || passes(t, o, 300, 301) {
		t.Fatal("the policies of the file are not enforced")
	}
	set(policyOf("web", "") + "---\nkind: [\n")
	if passes(t, o, 301, 300) {
		t.Error("the stricter document is not enforced")
	}
	if passes(t, o, 300, 301) {
		t.Error("the policy of the unreadable document is no longer enforced")
	}
	set(policyOf("web", ""))
	if !passes(t, o, 300, 301) {
		t.Error("a policy that was removed from the file stays")
	}
}
