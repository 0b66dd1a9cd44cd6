// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package record

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/kit/desired/journal"
	"github.com/sluice-net/sluice/kit/disktest"
	"github.com/sluice-net/sluice/kit/durable"
	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/store"
	"github.com/sluice-net/sluice/kit/store/storetest"
)

func TestMain(m *testing.M) {
	disktest.InMemory()
	leaktest.Main(m)
}

// open opens the journal and returns the replayed records by name.
func open(t testing.TB, dir string) (j *Journal, got map[string]string, cached bool, err error) {
	t.Helper()
	got = make(map[string]string)
	put := func(key, value string) error { got[key] = value; return nil }
	j, revision, cached, err := Open(dir, Contents{
		Name: func(name string) error { return put("state", name) },
		Policy: func(p Policy) error {
			return put(p.Key.Kind+"/"+p.Key.Namespace+"/"+p.Key.Name, fmt.Sprintf(
				"%s %s %s %q %d %d", p.Source, p.Origin, p.Manager, p.Manifest, p.Revision, p.Updated))
		},
		Identity:   func(x Identity) error { return put(fmt.Sprint("identity ", x.Number), fmt.Sprint(x.Labels)) },
		Subscriber: func(x Subscriber) error { return put("subscriber "+x.Name, fmt.Sprint(x.Subjects, x.Locations)) },
		DNSName:    func(x Name) error { return put("name "+x.Name, fmt.Sprint(x.Addresses)) },
	})
	if revision != 0 {
		got["revision"] = fmt.Sprint(revision)
	}
	return j, got, cached, err
}

func mustOpen(t testing.TB, dir string) (j *Journal, got map[string]string, cached bool) {
	t.Helper()
	j, got, cached, err := open(t, dir)
	if err != nil {
		t.Fatal(err)
	}
	return j, got, cached
}

func closed(t testing.TB, j *Journal) {
	t.Helper()
	if err := j.Close(); err != nil {
		t.Error(err)
	}
}

func describe(got map[string]string) string {
	var b strings.Builder
	for _, k := range slices.Sorted(maps.Keys(got)) {
		fmt.Fprintf(&b, "%s: %s\n", k, got[k])
	}
	return b.String()
}

func policy(name string, revision uint64) Policy {
	return Policy{Key: Key{Kind: "K", Namespace: "ns", Name: name}, Source: "grpc", Manifest: fmt.Appendf(nil, "text of %s\n", name), Revision: revision}
}

func commit(t testing.TB, j *Journal, c Change) {
	t.Helper()
	if err := j.Commit(t.Context(), c); err != nil {
		t.Fatal(err)
	}
}

func note(t testing.TB, j *Journal, c Cache) {
	t.Helper()
	if err := j.Note(t.Context(), c.Records()); err != nil {
		t.Fatal(err)
	}
}

// state returns a closed directory with records of every kind.
func state(t testing.TB) (dir, contents string) {
	t.Helper()
	dir = filepath.Join(t.TempDir(), "policy")
	j, _, _ := mustOpen(t, dir)
	commit(t, j, Change{State: StateName("name")})
	commit(t, j, Change{Revision: 1, Puts: []Policy{policy("a", 1), policy("b", 1)}})
	commit(t, j, Change{Revision: 2, Puts: []Policy{policy("c", 2)}, Deletes: []string{policy("a", 0).Key.Encode()}})
	note(t, j, Cache{Identities: []Identity{{Number: 300, Labels: [][3]string{{"k8s", "app", "db"}}}, {Number: 301}}})
	note(t, j, Cache{GoneIdentities: []uint32{301}, Subscribers: []Subscriber{{Name: "s", Subjects: []uint32{300}}, {Name: "gone"}}})
	note(t, j, Cache{GoneSubscribers: []string{"gone"}, Names: []Name{{Name: "n.example"}, {Name: "gone.example"}}})
	note(t, j, Cache{GoneNames: []string{"gone.example"}})
	closed(t, j)
	j, got, _ := mustOpen(t, dir)
	closed(t, j)
	return dir, describe(got)
}

func TestStateIsThereAfterARestart(t *testing.T) {
	dir, got := state(t)
	want := `K/ns/b: grpc   "text of b\n" 1 0
K/ns/c: grpc   "text of c\n" 2 0
identity 300: [[k8s app db]]
name n.example: []
revision: 2
state: name
subscriber s: [300] []
`
	if got != want {
		t.Errorf("got\n%swant\n%s", got, want)
	}
	if fi, err := os.Stat(filepath.Join(dir, File)); err != nil || fi.Mode() != 0o600 {
		t.Errorf("%v, %v", fi, err)
	}
}

func TestPoliciesOutliveTheBootAndTheRestDoesNot(t *testing.T) {
	dir, _ := state(t)
	caches, err := filepath.Glob(filepath.Join(dir, "cache.*.db"))
	if err != nil || len(caches) != 1 {
		t.Fatal(caches, err)
	}
	// The file of another boot, corrupted by a power failure.
	if err := errors.Join(os.Remove(caches[0]), os.WriteFile(filepath.Join(dir, "cache.1b4e28ba-2fa1-11d2-883f-0016d3cca427.db"), []byte("half"), 0o600)); err != nil {
		t.Fatal(err)
	}
	j, got, cached := mustOpen(t, dir)
	closed(t, j)
	if cached || len(got) != 4 || got["revision"] != "2" {
		t.Errorf("cached %v:\n%s", cached, describe(got))
	}
}

// TestDamageIsRefused proves INV-43.
func TestDamageIsRefused(t *testing.T) {
	dir, _ := state(t)
	caches, err := filepath.Glob(filepath.Join(dir, "cache.*.db"))
	if err != nil || len(caches) != 1 {
		t.Fatal(caches, err)
	}
	s := storetest.State{Dir: dir, Open: func(dir string) (string, error) {
		j, got, _, err := open(t, dir)
		if err != nil {
			return "", err
		}
		closed(t, j)
		return describe(got), nil
	}}
	// The marker need not list the cache: without a file, the cache is empty.
	s.Replaceable = []string{filepath.Base(caches[0])}
	storetest.Sweep(t, s)
}

func TestLostPoliciesAreNotAnEmptySet(t *testing.T) {
	dir, _ := state(t)
	path := filepath.Join(dir, File)
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if _, _, _, err := open(t, dir); !errors.Is(err, store.ErrMissing) ||
		!strings.Contains(err.Error(), path) ||
		!strings.Contains(err.Error(), "if all policies will be applied again") {
		t.Errorf("%v, want a refusal", err)
	}
}

func TestRecordThatIsNotUnderstoodIsRefused(t *testing.T) {
	dir, _ := state(t)
	d, err := store.OpenDir(dir, journal.DirMode)
	if err != nil {
		t.Fatal(err)
	}
	s, err := d.Open(policiesOptions)
	if err != nil {
		t.Fatal(err)
	}
	header, err := json.Marshal(map[string]any{"key": map[string]string{"kind": "K", "name": "n"}, "expression": "deny"})
	if err != nil {
		t.Fatal(err)
	}
	later := append(binary.AppendUvarint(nil, uint64(len(header))), header...)
	if err := errors.Join(s.Update(func(t *store.Tx) error { t.Put(bucketPolicies, journal.StagedKey("K\x00\x00n", 0), later); return nil }), s.Close(), d.Close()); err != nil {
		t.Fatal(err)
	}
	if _, _, _, err := open(t, dir); !errors.Is(err, store.ErrCorrupt) || !strings.Contains(err.Error(), "expression") {
		t.Errorf("%v, want a refusal", err)
	}
}

func TestPolicyRecordsAreReadAsWritten(t *testing.T) {
	for _, manifest := range []string{"", "kind: X\n", "\x00\xff{}", strings.Repeat("long", 100_000)} {
		want := Policy{Key: Key{"K", "ns", "n"}, Source: "file", Origin: "a.yaml", Manager: "m", Manifest: []byte(manifest), Revision: 1 << 60, Updated: 1_795_000_000}
		record := encodePolicy(want)
		if extra := len(record) - len(manifest); extra > 150 {
			t.Errorf("a record is %d bytes longer than its manifest", extra)
		}
		got, err := decodePolicy(record)
		if err != nil || fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("got %.200v, %v, want %.200v", got, err, want)
		}
		for end := range len(record) - len(manifest) {
			if _, err := decodePolicy(record[:end]); err == nil {
				t.Fatalf("a record truncated to %d bytes was read", end)
			}
		}
	}
}

// ofVersion returns the directory of an earlier version of the service.
func ofVersion(t testing.TB, version int, policies map[string][]byte) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "policy")
	d, err := store.OpenDir(dir, journal.DirMode)
	if err != nil {
		t.Fatal(err)
	}
	s, err := d.Open(optionsOf(version))
	if err != nil {
		t.Fatal(err)
	}
	err = s.Update(func(t *store.Tx) error {
		t.Put(bucketState, []byte(keyName), []byte("name"))
		t.Put(bucketState, []byte(keyRevision), binary.BigEndian.AppendUint64(nil, 7))
		for key, record := range policies {
			t.Put(bucketPolicies, []byte(key), record)
		}
		return nil
	})
	if err := errors.Join(err, s.Close(), d.Close()); err != nil {
		t.Fatal(err)
	}
	return dir
}

func optionsOf(version int) store.Options {
	o := policiesOptions
	o.Layout, o.Previous = o.Previous[version-1], nil
	return o
}

func TestPreviousVersionsAreTakenOver(t *testing.T) {
	headers := map[string]string{
		"K\x00ns\x00a": `{"key":{"kind":"K","namespace":"ns","name":"a"},"source":"file","origin":"a.yaml","revision":6,"updated":1795000000}`,
		"K\x00\x00b":   `{"key":{"kind":"K","name":"b"},"source":"grpc","manager":"m","revision":7,"updated":1795000001}`,
	}
	manifests := map[string]string{"K\x00ns\x00a": "kind: K\n", "K\x00\x00b": "\xff\x00\n"}
	two := make(map[string][]byte)
	for k, h := range headers {
		two[k] = fmt.Appendf(nil, "%c%s%s", len(h), h, manifests[k])
	}
	for version, policies := range map[int]map[string][]byte{
		1: { // as written by that version
			"K\x00ns\x00a": []byte(`{"key":{"kind":"K","namespace":"ns","name":"a"},"source":"file","origin":"a.yaml","manifest":"a2luZDogSwo=","revision":6,"updated":1795000000}`),
			"K\x00\x00b":   []byte(`{"key":{"kind":"K","name":"b"},"source":"grpc","manager":"m","manifest":"/wAK","revision":7,"updated":1795000001}`),
		},
		2: two,
	} {
		dir := ofVersion(t, version, policies)
		want := `K//b: grpc  m "\xff\x00\n" 7 1795000001
K/ns/a: file a.yaml  "kind: K\n" 6 1795000000
revision: 7
state: name
`
		for _, start := range []string{"first", "second"} {
			j, got, _ := mustOpen(t, dir)
			if describe(got) != want {
				t.Errorf("version %d, %s start: got\n%swant\n%s", version, start, describe(got), want)
			}
			if start == "second" {
				commit(t, j, Change{Revision: 8, Deletes: []string{Key{Kind: "K", Name: "b"}.Encode()}})
			}
			closed(t, j)
		}
		j, got, _ := mustOpen(t, dir)
		closed(t, j)
		if _, there := got["K//b"]; there || len(got) != 3 {
			t.Errorf("version %d: after a removal\n%s", version, describe(got))
		}
		// Earlier versions must reject files that they cannot read.
		d, err := store.OpenDir(dir, journal.DirMode)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := d.Open(optionsOf(version)); !errors.Is(err, store.ErrVersion) {
			t.Errorf("version %d reads %v, want a later version", version, err)
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestPreviousVersionsThatAreNotUnderstoodAreLeftAsTheyAre(t *testing.T) {
	header := `{"key":{"kind":"K","name":"n"},"expression":"deny"}`
	for version, record := range map[int][]byte{1: []byte(header), 2: fmt.Appendf(nil, "%c%s", len(header), header)} {
		dir := ofVersion(t, version, map[string][]byte{"K\x00\x00n": record})
		for range 2 {
			if _, _, _, err := open(t, dir); !errors.Is(err, store.ErrVersion) || !strings.Contains(err.Error(), "expression") || !strings.Contains(err.Error(), "mv "+filepath.Join(dir, File)) {
				t.Errorf("version %d: %v, want a refusal", version, err)
			}
		}
	}
}

func TestNamedPortsOfThePreviousCacheGetTheirKey(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "policy")
	d, err := store.OpenDir(dir, journal.DirMode)
	if err != nil {
		t.Fatal(err)
	}
	one := cacheOptions
	one.Layout, one.Previous, one.Migrate = one.Previous[0], nil, nil
	one.Init = func(tx *store.Tx) error {
		for k, v := range map[string]string{ // as written by that version
			"300": `{"number":300,"labels":[["generated","io.cilium.k8s.named-ports","http.TCP.80"],["k8s","app","web"]]}`,
			"301": `{"number":301,"labels":[["k8s","io.cilium.k8s.named-ports","x"],["k8s","app","web"]]}`,
		} {
			tx.Put(bucketIdentities, []byte(k), []byte(v))
		}
		return nil
	}
	cache, err := d.Open(one)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(cache.Close(), d.Close()); err != nil {
		t.Fatal(err)
	}
	want := `identity 300: [[generated named-ports http.TCP.80] [k8s app web]]
identity 301: [[k8s io.cilium.k8s.named-ports x] [k8s app web]]
`
	for _, start := range []string{"first", "second"} {
		j, got, cached := mustOpen(t, dir)
		closed(t, j)
		if describe(got) != want || !cached {
			t.Errorf("%s start: cached %v, got\n%swant\n%s", start, cached, describe(got), want)
		}
	}
	old, err := durable.Encode(firstSchema, firstChange{Cache: Cache{Identities: []Identity{{Number: 300, Labels: [][3]string{{"generated", "io.cilium.k8s.named-ports", "http.TCP.80"}}}}}})
	if err != nil {
		t.Fatal(err)
	}
	j, got, _ := mustOpen(t, firstFormat(t, old))
	closed(t, j)
	if want := "identity 300: [[generated named-ports http.TCP.80]]\n"; describe(got) != want {
		t.Errorf("of the first format: got\n%swant\n%s", describe(got), want)
	}
}

// firstFormat returns a directory as version 1 left it.
func firstFormat(t testing.TB, content []byte) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "policy")
	if err := errors.Join(os.Mkdir(dir, 0o700), os.WriteFile(filepath.Join(dir, FirstFile), content, 0o600)); err != nil {
		t.Fatal(err)
	}
	return dir
}

func fixture(t testing.TB) []byte {
	t.Helper()
	b, err := os.ReadFile("testdata/journal-v1") // written by that version
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestFirstFormatIsTakenOver(t *testing.T) {
	named, err := durable.Encode(firstSchema, firstChange{State: "name"})
	if err != nil {
		t.Fatal(err)
	}
	dir := firstFormat(t, append(fixture(t), named...))
	want := `CiliumClusterwideNetworkPolicy//all: grpc  m "kind: X\n" 5 1795000001
NetworkPolicy/shop/p1: file a.yaml  "kind: NetworkPolicy\n" 1 1795000000
NetworkPolicy/shop/p3: file a.yaml  "kind: NetworkPolicy\n" 3 1795000000
NetworkPolicy/shop/p4: file a.yaml  "kind: NetworkPolicy\n" 4 1795000000
identity 301: [[k8s app web]]
name a.example: [{192.0.2.1 1795000100}]
revision: 5
state: name
subscriber datapath: [301] [{10.0.0.2 301}]
`
	for _, start := range []string{"first", "second"} {
		j, got, cached := mustOpen(t, dir)
		closed(t, j)
		if describe(got) != want || !cached {
			t.Errorf("%s start: cached %v, got\n%swant\n%s", start, cached, describe(got), want)
		}
	}
	// The previous version must not start without policies.
	if err := durable.Load(filepath.Join(dir, FirstFile), 1<<20, firstSchema, new(firstChange)); !errors.Is(err, durable.ErrVersion) {
		t.Errorf("the previous version reads %v, want a later version", err)
	}
	// Even without the new file and its marker, the file of the first format shows that there were policies.
	if err := errors.Join(os.Remove(filepath.Join(dir, File)), os.Remove(filepath.Join(dir, store.MarkerName))); err != nil {
		t.Fatal(err)
	}
	if _, _, _, err := open(t, dir); !errors.Is(err, store.ErrMissing) ||
		!strings.Contains(err.Error(), "rm "+filepath.Join(dir, FirstFile)) {
		t.Errorf("%v, want a refusal", err)
	}
}

func TestDamagedFirstFormatIsRefused(t *testing.T) {
	good := fixture(t)
	for at := 0; at < len(good)-1; at += 3 {
		bad := slices.Clone(good)
		bad[at] ^= 1
		dir := firstFormat(t, bad)
		path := filepath.Join(dir, FirstFile)
		_, _, _, err := open(t, dir)
		if err == nil ||
			!strings.Contains(err.Error(), "state file "+path+" is ") ||
			!strings.Contains(err.Error(), "begin without it: mv "+path) {
			t.Fatalf("byte %d, %q instead of %q: %v", at, bad[at], good[at], err)
		}
		if now, _ := os.ReadFile(path); !slices.Equal(now, bad) {
			t.Fatalf("byte %d: the file was changed", at)
		}
	}
}

func TestUnfinishedEndOfTheFirstFormatIsLeftOut(t *testing.T) {
	good := fixture(t)
	j, got, _ := mustOpen(t, firstFormat(t, good[:len(good)-7]))
	closed(t, j)
	if _, there := got["name b.example"]; !there || got["revision"] != "5" {
		t.Errorf("got\n%s", describe(got))
	}
	j, got, _ = mustOpen(t, firstFormat(t, append(slices.Clone(good), make([]byte, 4096)...)))
	closed(t, j)
	if got["revision"] != "5" {
		t.Errorf("got\n%s", describe(got))
	}
}
