// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/kit/desired/problem"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/source"
	"github.com/sluice-net/sluice/services/policy/internal/stream"
)

// someSources returns all kinds of sources over a state directory.
func someSources(t *testing.T, dir string) *sources {
	t.Helper()
	s, err := newSources(sourcesConfig{
		names:     []string{source.Identity, managed.SourceFile, managed.SourceKubernetes},
		directory: "/etc/policies", managers: []string{"argo"}, dir: dir, state: stream.StateID{1},
		now: func() time.Time { return time.Unix(1000, 0) }, log: log.Discard(),
	}, nil, problem.New(func(string, error) {}))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func none(func(string) bool) {}

// waitsFor checks the number of reasons for waiting, and that each text contains one of the words.
func waitsFor(t *testing.T, s *sources, words ...string) {
	t.Helper()
	got := s.waitsFor()
	if len(got) != len(words) || s.gate.IsOpen() != (len(words) == 0) {
		t.Fatalf("waits for %q, open %v; want %d", got, s.gate.IsOpen(), len(words))
	}
	for i, w := range words {
		if !strings.Contains(got[i], w) {
			t.Errorf("%q does not name %q", got[i], w)
		}
	}
}

func TestSubscribersWaitForEachSourceOnce(t *testing.T) {
	dir := t.TempDir()
	s := someSources(t, dir)
	waitsFor(t, s, "/etc/policies", "kubernetes", `"argo"`)
	s.took(&listing{source: managed.SourceKubernetes, deltas: true}, none) // some changes
	waitsFor(t, s, "/etc/policies", "kubernetes", `"argo"`)
	s.took(&listing{source: managed.SourceKubernetes, deltas: true, listed: map[string]struct{}{}}, none)
	waitsFor(t, s, "/etc/policies", `"argo"`)
	if s.listed("") || !s.listed(managed.SourceFile) || !s.foldingListed() {
		t.Errorf("listed %v, except for files %v, folding %v", s.listed(""), s.listed(managed.SourceFile), s.foldingListed())
	}
	s.managerCompleted("argo")
	s.took(&listing{source: managed.SourceFile, files: map[string]*file{"a.yaml": {err: errors.New("is no YAML")}}}, none)
	waitsFor(t, s, "a.yaml")
	if want := []string{"grpc/argo", managed.SourceKubernetes}; !slices.Equal(s.complete(), want) {
		t.Errorf("complete are %q, want %q", s.complete(), want)
	}
	before := s.changes
	s.took(&listing{source: managed.SourceFile, files: map[string]*file{"a.yaml": {}}}, none)
	waitsFor(t, s)
	if s.synced() || !s.listed("") || s.changes == before {
		t.Errorf("without identities: synced %v, listed %v, changes %d after %d", s.synced(), s.listed(""), s.changes, before)
	}
	s.completed(source.Identity)
	if !s.synced() {
		t.Error("every source is complete, but they are not synced")
	}
	// The state now has the enforced policies, so subscribers of the next run do not wait.
	next := someSources(t, dir)
	waitsFor(t, next)
	if next.synced() || next.listed("") {
		t.Error("a source counts as complete before it listed its objects in this run")
	}
}

func TestFileThatIsBeingWrittenIsMissingUnlessItHasPolicies(t *testing.T) {
	files := map[string]*file{"a.yaml": {keep: true}, "b.yaml": {keep: true}}
	s := someSources(t, t.TempDir())
	s.took(&listing{source: managed.SourceFile, files: files}, slices.Values([]string{"a.yaml"}))
	waitsFor(t, s, "b.yaml", "kubernetes", `"argo"`)
	for _, c := range []struct {
		name     string
		validate bool
		err      error
		waits    []string
	}{
		{"a.yaml", false, ErrNotMissing, []string{"b.yaml", "kubernetes", `"argo"`}},
		{"b.yaml", true, nil, []string{"b.yaml", "kubernetes", `"argo"`}},
		{"/etc/policies/b.yaml", false, nil, []string{"kubernetes", `"argo"`}},
		{"b.yaml", false, ErrNotMissing, []string{"kubernetes", `"argo"`}},
	} {
		if _, err := s.acceptWithout(c.name, c.validate); !errors.Is(err, c.err) {
			t.Errorf("accept without %s, validate %v: %v, want %v", c.name, c.validate, err, c.err)
		}
		waitsFor(t, s, c.waits...)
	}
}

func TestSourceThatFailsSaysWhy(t *testing.T) {
	s := someSources(t, t.TempDir())
	s.failed(managed.SourceKubernetes, errors.New("forbidden"))
	s.failed(managed.SourceFile, errors.New("no such directory"))
	waitsFor(t, s, "no such directory", "forbidden", `"argo"`)
	if got := s.all[managed.SourceKubernetes].state(); got != "forbidden" {
		t.Errorf("state %q, want why it fails", got)
	}
	s.failed(managed.SourceKubernetes, nil)
	if got := s.all[managed.SourceKubernetes].state(); got != "" {
		t.Errorf("state %q of a source that works again", got)
	}
	key := policy.Key{Kind: "NetworkPolicy", Namespace: "shop", Name: "web"}
	bad := map[string]refused{key.String(): {key: key, err: "is in x already"}}
	s.took(&listing{source: managed.SourceKubernetes, deltas: true, bad: bad}, none)
	if r, ok := s.refusal(managed.SourceKubernetes, key.String()); !ok || r.key != key {
		t.Errorf("refusal %+v, %v", r, ok)
	}
	if _, ok := s.refusal("of-an-earlier-configuration", key.String()); ok || s.configured("of-an-earlier-configuration") {
		t.Error("a source that is not configured refuses")
	}
	for by, r := range s.refusals() {
		if by.Source != managed.SourceKubernetes || by.Origin != key.String() || r.key != key {
			t.Errorf("refused %+v of %+v", r, by)
		}
	}
}

func TestManagersHaveStatesOfTheirOwn(t *testing.T) {
	d, s := newDesk(t, 10), someSources(t, t.TempDir())
	plain, flux := d.make(managed.SourceGRPC, "shop", 1), d.make(managed.SourceGRPC, "shop", 2)
	flux.Manager = "flux"
	broken := d.make(managed.SourceFile, "shop", 3)
	broken.Broken = "is not understood"
	orphan := d.make("of-an-earlier-configuration", "shop", 4)
	d.replace([]*Policy{plain, flux, broken, orphan, d.make(managed.SourceFile, "shop", 5)}, nil)
	s.managerCompleted("argo")
	var got []string
	for _, st := range s.states(d.policySet) {
		got = append(got, fmt.Sprintf("%s/%s %v %d", st.Name, st.Manager, st.Synced, st.Policies))
	}
	want := []string{
		"file/ false 1", "grpc/ true 1", "grpc/argo true 0", "grpc/flux false 1", "identity/ false 0", "kubernetes/ false 0",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}
