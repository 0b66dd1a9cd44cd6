// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package snapshot

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/durable"
	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/identity"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

const (
	boot1 = "11111111-2222-3333-4444-555555555555"
	boot2 = "99999999-2222-3333-4444-555555555555"
)

func id(t testing.TB, n identity.Numeric, app string) identity.Identity {
	t.Helper()
	l, err := identity.NewLabels(identity.Label{Source: "k8s", Key: "app", Value: app})
	if err != nil {
		t.Fatal(err)
	}
	return identity.Identity{Number: n, Labels: l}
}

// load is a start: it opens the directory, loads and gives it back.
func load(t testing.TB, path, node, boot string) (Loaded, error) {
	t.Helper()
	d, err := Open(path, node, boot)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	return d.Load()
}

func saved(t testing.TB) (path string, holds allocator.Holds, known allocator.Known) {
	t.Helper()
	path = t.TempDir()
	holds = allocator.Holds{NextNodeLocal: identity.MinNodeLocal + 7, Session: "1 2", Holders: []allocator.HolderRecord{
		{Holder: allocator.EndpointHolder("c1", "eth0"), Identity: id(t, 300, "web;=\\")},
		{Holder: allocator.EndpointHolder("c2", "eth0"), Identity: id(t, 300, "web;=\\")},
		{Holder: allocator.ReferenceHolder("x"), Identity: id(t, identity.MinNodeLocal, "local")},
	}}
	known = allocator.Known{Identities: []identity.Identity{id(t, 300, "web;=\\"), id(t, 301, "db")}, Heard: time.UnixMilli(1_700_000_000_123)}
	d, err := Open(path, "n1", boot1)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(d.SaveHolds(holds), d.SaveKnown(known), d.Close()); err != nil {
		t.Fatal(err)
	}
	return path, holds, known
}

// TestCacheOfAnOlderVersionWasNeverHeard: files without a time must not be
// taken for fresh.
func TestCacheOfAnOlderVersionWasNeverHeard(t *testing.T) {
	path := t.TempDir()
	old := `{"identities":[{"number":300,"labels":"k8s:app=web;"}]}`
	if err := durable.Save(filepath.Join(path, KnownFile), knownSchema, json.RawMessage(old), durable.SyncNone); err != nil {
		t.Fatal(err)
	}
	got, err := load(t, path, "n1", boot1)
	if err != nil || !got.Cached || len(got.Known.Identities) != 1 || !got.Known.Heard.IsZero() {
		t.Errorf("loaded %+v, %v, want one identity, never heard", got, err)
	}
}

func TestWhatWasSavedIsLoaded(t *testing.T) {
	path, holds, known := saved(t)
	got, err := load(t, path, "n1", boot1)
	want := Loaded{Incarnation: got.Incarnation, Holds: holds, Known: known, Cached: true}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("loaded %+v, %v\nwant %+v", got, err, want)
	}
}

// TestLongestReferenceIsReadAgain: whatever the API accepts.
func TestLongestReferenceIsReadAgain(t *testing.T) {
	path := t.TempDir()
	d, err := Open(path, "n1", boot1)
	if err != nil {
		t.Fatal(err)
	}
	want := allocator.Holds{NextNodeLocal: identity.MinNodeLocal, Holders: []allocator.HolderRecord{
		{Holder: allocator.ReferenceHolder(strings.Repeat("😀", 256)), Identity: id(t, 300, "web")},
	}}
	if err := errors.Join(d.SaveHolds(want), d.Close()); err != nil {
		t.Fatal(err)
	}
	if got, err := load(t, path, "n1", boot1); err != nil || !reflect.DeepEqual(got.Holds, want) {
		t.Errorf("loaded %+v, %v", got, err)
	}
}

func TestEmptyDirectoryIsAFirstStart(t *testing.T) {
	got, err := load(t, t.TempDir(), "n1", boot1)
	if err != nil || !reflect.DeepEqual(got, Loaded{Incarnation: got.Incarnation}) {
		t.Errorf("loaded %+v, %v, want nothing", got, err)
	}
}

func TestHoldersOfAnotherBootAreDropped(t *testing.T) {
	path, _, known := saved(t)
	// A loss of power may leave anything; it is not even looked at.
	if err := os.WriteFile(filepath.Join(path, HoldsFile(boot1)), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := load(t, path, "n1", boot2)
	if want := (Loaded{Incarnation: got.Incarnation, Removed: []string{HoldsFile(boot1)}, Known: known, Cached: true}); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("loaded %+v, %v, want %+v", got, err, want)
	}
	if left, err := filepath.Glob(filepath.Join(path, "holds.*")); err != nil || len(left) != 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

func TestStateOfAnotherNodeIsRefused(t *testing.T) {
	path, _, _ := saved(t)
	if _, err := load(t, path, "n2", boot1); !errors.Is(err, ErrOtherNode) || !strings.Contains(err.Error(), HoldsFile(boot1)) {
		t.Errorf("load: %v, want ErrOtherNode with the file's name", err)
	}
}

func TestDamagedHoldsAreRefusedAndLeftAlone(t *testing.T) {
	path, _, _ := saved(t)
	file := filepath.Join(path, HoldsFile(boot1))
	good, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for name, bad := range map[string][]byte{
		"empty":         {},
		"cut":           good[:len(good)/2],
		"flipped":       bytes.Replace(good, []byte("300"), []byte("301"), 1),
		"another kind":  bytes.Replace(good, []byte("identity.holds"), []byte("identity.known"), 1),
		"not a file":    nil,
		"two sets":      encoded(t, holdsRecord{BootID: boot1, Node: "n1", Holders: []holderRecord{{"endpoint:a/b", 300, "k8s:a=;"}, {"endpoint:c/b", 300, "k8s:b=;"}}}),
		"twice":         encoded(t, holdsRecord{BootID: boot1, Node: "n1", Holders: []holderRecord{{"endpoint:a/b", 300, "k8s:a=;"}, {"endpoint:a/b", 300, "k8s:a=;"}}}),
		"reserved":      encoded(t, holdsRecord{BootID: boot1, Node: "n1", Holders: []holderRecord{{"endpoint:a/b", 1, "reserved:host=;"}}}),
		"not canonical": encoded(t, holdsRecord{BootID: boot1, Node: "n1", Holders: []holderRecord{{"endpoint:a/b", 300, "k8s:b=;k8s:a=;"}}}),
		"strange owner": encoded(t, holdsRecord{BootID: boot1, Node: "n1", Holders: []holderRecord{{"pod:a/b", 300, "k8s:a=;"}}}),
		"no boot":       encoded(t, holdsRecord{BootID: "", Node: "n1"}),
		"other boot":    encoded(t, holdsRecord{BootID: boot2, Node: "n1"}),
	} {
		if err := os.RemoveAll(file); err != nil {
			t.Fatal(err)
		}
		if name == "not a file" {
			err = os.Mkdir(file, 0o700)
		} else {
			err = os.WriteFile(file, bad, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		got, err := load(t, path, "n1", boot1)
		if err == nil || !strings.Contains(err.Error(), file) {
			t.Errorf("%s: loaded %+v, %v, want an error that names %s", name, got, err, file)
		}
		if name == "not a file" {
			continue
		}
		if after, err := os.ReadFile(file); err != nil || !bytes.Equal(after, bad) {
			t.Errorf("%s: the file was changed", name)
		}
	}
}

func encoded(t testing.TB, r holdsRecord) []byte {
	t.Helper()
	b, err := durable.Encode(holdsSchema, r)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestDamagedCacheIsPutAsideAndHoldsStay(t *testing.T) {
	path, holds, _ := saved(t)
	file := filepath.Join(path, KnownFile)
	junk := []byte(`{"schema":"sluice.identity.known"`)
	if err := os.WriteFile(file, junk, 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := load(t, path, "n1", boot1)
	if err != nil || got.Cached || len(got.Known.Identities) != 0 || !got.Known.Heard.IsZero() || !reflect.DeepEqual(got.Holds, holds) {
		t.Errorf("loaded %+v, %v, want the holds and no cache", got, err)
	}
	if got.Damaged == nil || !strings.Contains(got.Damaged.Error(), file) {
		t.Errorf("damage %v does not name %s", got.Damaged, file)
	}
	if kept, err := os.ReadFile(filepath.Join(path, DamagedFile)); err != nil || !bytes.Equal(kept, junk) {
		t.Errorf("put aside: %q, %v, want %q", kept, err, junk)
	}
}

func TestHalfWrittenFilesAreRemovedAtTheStart(t *testing.T) {
	path, holds, _ := saved(t)
	temp := filepath.Join(path, "."+HoldsFile(boot1)+".tmp-123")
	if err := os.WriteFile(temp, []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := load(t, path, "n1", boot1)
	if err != nil || !reflect.DeepEqual(got.Holds, holds) {
		t.Errorf("loaded %+v, %v", got, err)
	}
	if _, err := os.Stat(temp); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s is still there: %v", temp, err)
	}
}

func TestDirectoryIsOneProcesssAtATime(t *testing.T) {
	path, _, _ := saved(t)
	first, err := Open(path, "n1", boot1)
	if err != nil {
		t.Fatal(err)
	}
	// What the first one is writing just now.
	temp := filepath.Join(path, "."+HoldsFile(boot1)+".tmp-123")
	if err := os.WriteFile(temp, []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := open(path, "n1", boot1, 0); !errors.Is(err, durable.ErrLocked) || !strings.Contains(err.Error(), path) {
		t.Errorf("a second Open: %v, want ErrLocked with the path", err)
	}
	if _, err := os.Stat(temp); err != nil {
		t.Errorf("the second took from the first: %v", err)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := load(t, path, "n1", boot1); err != nil {
		t.Errorf("after the first: %v", err)
	}
}

func TestBootIDIsThatOfTheKernel(t *testing.T) {
	got, err := BootID()
	if err != nil || !bootIDRE.MatchString(got) {
		t.Errorf("boot id %q, %v", got, err)
	}
}

// FuzzDecode gives the fuzzer the record behind the checksum, which it would
// never guess, and the file as it is.
func FuzzDecode(f *testing.F) {
	f.Add([]byte(`{"boot_id":"` + boot1 + `","node":"n","next_node_local":1,"holders":[{"holder":"endpoint:a/b","number":300,"labels":"k8s:a=;"}]}`))
	f.Add([]byte(`{"identities":[{"number":300,"labels":"k8s:a=;"}]}`))
	f.Add([]byte(`{"identities":null}`))
	f.Add(encoded(f, holdsRecord{BootID: boot1, Node: "n1"}))
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, schema := range []durable.Schema{holdsSchema, knownSchema} {
			file := b
			if json.Valid(b) {
				var err error
				if file, err = durable.Encode(schema, json.RawMessage(b)); err != nil {
					t.Fatal(err)
				}
			}
			var holds holdsRecord
			if schema == holdsSchema && durable.Decode(file, schema, &holds) == nil {
				h, err := holds.holds()
				if err != nil {
					continue
				}
				for _, r := range h.Holders {
					if s := r.Identity.Number.Scope(); s != identity.ScopeCluster && s != identity.ScopeNodeLocal || r.Identity.Labels.IsZero() {
						t.Fatalf("accepted %+v", r)
					}
				}
			}
			var known knownRecord
			if schema == knownSchema && durable.Decode(file, schema, &known) == nil {
				ids, err := known.identities()
				if err != nil {
					continue
				}
				for _, x := range ids {
					if x.Number.Scope() != identity.ScopeCluster || x.Labels.IsZero() {
						t.Fatalf("accepted %+v", x)
					}
				}
			}
		}
	})
}
