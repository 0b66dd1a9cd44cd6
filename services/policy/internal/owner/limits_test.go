// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/desired/directory"
	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/manifest"
	"github.com/sluice-net/sluice/services/policy/internal/names"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/port"
	"github.com/sluice-net/sluice/services/policy/internal/query"
	"github.com/sluice-net/sluice/services/policy/internal/source"
	"github.com/sluice-net/sluice/services/policy/internal/stream"
	"github.com/sluice-net/sluice/services/policy/internal/summary"
)

func TestRemovingWhatIsNotThereMakesNoRoomForASubscriber(t *testing.T) {
	o, _ := run(t, t.TempDir())
	session, err := o.Subscribers().Subscribe(t.Context(), Subscription{Name: "datapath"})
	if err != nil {
		t.Fatal(err)
	}
	defer o.Subscribers().Unsubscribe("datapath", session)
	var last error
	for round := range 8 {
		var add, remove Interest
		for i := range 4096 {
			add.Subjects = append(add.Subjects, identity.Numeric(256+4096*round+i))
			remove.Subjects = append(remove.Subjects, 1)
			at := netip.AddrFrom4([4]byte{10, byte(round), byte(i >> 8), byte(i)})
			add.Locations = append(add.Locations, engine.Location{Addr: at, Identity: 256})
			remove.Locations = append(remove.Locations, engine.Location{Addr: netip.MustParseAddr("192.0.2.1")})
		}
		if err := o.Subscribers().Change(t.Context(), "datapath", session, Interest{Locations: add.Locations}, Interest{Locations: remove.Locations}); err != nil {
			last = errors.Join(last, err)
		}
		if err := o.Subscribers().Change(t.Context(), "datapath", session, Interest{Subjects: add.Subjects}, Interest{Subjects: remove.Subjects}); err != nil {
			last = errors.Join(last, err)
		}
	}
	if !errors.Is(last, failure.ErrLimit) {
		t.Errorf("the result of the last call is %v", last)
	}
	s := o.interests.all["datapath"] // no concurrent calls
	if len(s.subjects) > maxSubjects || len(s.locations) > maxLocations {
		t.Errorf("%d subjects and %d locations, the limits are %d and %d", len(s.subjects), len(s.locations), maxSubjects, maxLocations)
	}
	// Removing existing interests frees capacity.
	var some []identity.Numeric
	for x := range s.subjects {
		some = append(some, x)
	}
	if err := o.Subscribers().Change(t.Context(), "datapath", session, Interest{Subjects: []identity.Numeric{60_000}}, Interest{Subjects: some[:1]}); err != nil {
		t.Errorf("one for another: %v", err)
	}
}

// TestAddressBelongsToWhatStaysThere: two subscribers report the same address. When one of them removes it, the
// identity from the other subscriber stays.
func TestAddressBelongsToWhatStaysThere(t *testing.T) {
	at := netip.MustParseAddr("192.0.2.7")
	ports := func(name string) label.Label {
		return label.Label{Source: label.SourceGenerated, Key: workload.KeyNamedPorts, Value: name + ".TCP.8080"}
	}
	here := func(x identity.Numeric) Interest {
		return Interest{Locations: []engine.Location{{Addr: at, Identity: x}}}
	}
	for what, leave := range map[string]func(*Owner, *stream.Session, *stream.Session) error{
		"the later one vacates it": func(o *Owner, _, b *stream.Session) error {
			return o.Subscribers().Change(t.Context(), "b", b, Interest{}, here(301))
		},
		"the later one reconnects without it": func(o *Owner, _, b *stream.Session) error {
			o.Subscribers().Unsubscribe("b", b)
			_, err := o.Subscribers().Subscribe(t.Context(), Subscription{Name: "b", Role: RoleEnforces})
			return err
		},
		"the earlier one vacates it": func(o *Owner, a, _ *stream.Session) error {
			return o.Subscribers().Change(t.Context(), "a", a, Interest{}, here(301))
		},
	} {
		t.Run(what, func(t *testing.T) {
			o, _ := run(t, t.TempDir())
			var set []peer.Identity
			for x, l := range map[identity.Numeric]label.Label{300: {Source: "k8s", Key: "app", Value: "client"}, 301: ports("web")} {
				id, err := peer.New(x, label.NewSet(l, label.Label{Source: "k8s", Key: "io.kubernetes.pod.namespace", Value: "shop"}))
				if err != nil {
					t.Fatal(err)
				}
				set = append(set, id)
			}
			world, err := peer.New(9, label.NewSet(label.Label{Source: "reserved", Key: "world-ipv4"}))
			if err != nil {
				t.Fatal(err)
			}
			if err := o.Identities().SetIdentities(t.Context(), append(set, world), nil); err != nil {
				t.Fatal(err)
			}
			if _, err := o.Upsert(t.Context(), []byte("apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: out, namespace: shop}\nspec:\n"+
				"  endpointSelector: {matchLabels: {app: client}}\n  egress:\n  - toCIDR: [192.0.2.0/24]\n    toPorts: [{ports: [{port: web, protocol: TCP}]}]\n"), "", false); err != nil {
				t.Fatal(err)
			}
			verdict := func() policytable.Action {
				from, to := query.Peer{Identity: 300}, query.Peer{Addr: at}
				x, err := o.Reader().Explain(t.Context(), from, to, port.At(port.TCP, 8080))
				if err != nil {
					t.Fatal(err)
				}
				return x.Egress.Verdict.Action
			}
			if v := verdict(); v != policytable.Deny {
				t.Fatalf("no pod has the address: %s, want deny", v)
			}
			sessions := make(map[string]*stream.Session)
			for _, name := range []string{"a", "b"} {
				s, err := o.Subscribers().Subscribe(t.Context(), Subscription{Name: name, Role: RoleEnforces, Interest: here(301)})
				if err != nil {
					t.Fatal(err)
				}
				sessions[name] = s
			}
			if v := verdict(); v != policytable.Allow {
				t.Fatalf("two subscribers have the address: %s, want allow", v)
			}
			if err := leave(o, sessions["a"], sessions["b"]); err != nil {
				t.Fatal(err)
			}
			if v := verdict(); v != policytable.Allow {
				t.Errorf("one has given up the address, the other has it: %s, want allow", v)
			}
		})
	}
}

type clock struct {
	mu  sync.Mutex
	now time.Time // guarded by mu
}

func (c *clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *clock) add(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

func TestNamesWhoseTimeIsOverMakeRoom(t *testing.T) {
	c := &clock{now: time.Now()}
	o, _ := run(t, t.TempDir(), func(cfg *Config) { cfg.Now, cfg.NameGrace, cfg.MaxNames = c.Now, time.Hour, 3 })
	at := []netip.Addr{netip.MustParseAddr("192.0.2.1")}
	for i := range 3 {
		name, ttl := fmt.Sprintf("n%d.example", i), time.Duration(2+i)*time.Minute
		if _, err := o.Names().Learn(t.Context(), names.Asker{}, name, at, ttl); err != nil {
			t.Fatal(err)
		}
	}
	_, err := o.Names().Learn(t.Context(), names.Asker{}, "n3.example", at, time.Minute)
	if !errors.Is(err, failure.ErrLimit) {
		t.Fatalf("a fourth name: %v", err)
	}
	c.add(150 * time.Second) // the first name is in its grace period
	if _, err := o.Names().Learn(t.Context(), names.Asker{}, "n3.example", at, time.Hour); err != nil {
		t.Fatalf("a fourth name instead of an expired one: %v", err)
	}
	_, err = o.Names().Learn(t.Context(), names.Asker{}, "n4.example", at, time.Hour)
	if !errors.Is(err, failure.ErrLimit) {
		t.Errorf("a fifth name, while all others are valid: %v", err)
	}
}

func TestStatusNamesSomeOfManyProblems(t *testing.T) {
	o, _ := run(t, t.TempDir(), hundred)
	feed := o.Feed(managed.SourceFile)
	var files []directory.File
	for i := range 3000 {
		files = append(files, directory.File{Origin: fmt.Sprintf("%04d.yaml", i), Err: errors.New("not a regular file")})
	}
	if err := feed.Set(t.Context(), files); err != nil {
		t.Fatal(err)
	}
	st, err := o.Reader().Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if st.Refused != len(files) {
		t.Errorf("%d are refused, want %d", st.Refused, len(files))
	}
	if last := st.Problems[len(st.Problems)-1]; len(st.Problems) != summary.MaxProblems+1 || !strings.HasPrefix(last.Text, "2900 more problems") || st.Problems[0].Text != "file 0000.yaml is refused: not a regular file" {
		t.Errorf("%d problems, from %v to %v", len(st.Problems), st.Problems[0], last)
	}
	if st.ProblemCount != 3000 {
		t.Errorf("%d problems are counted", st.ProblemCount)
	}
}

func hundred(c *Config) { c.MaxPolicies = 100 }

func TestFilesBeyondTheShareIsolateInTheOneChange(t *testing.T) {
	o, _ := run(t, t.TempDir(), hundred)
	feed := o.Feed(managed.SourceFile)
	var files []directory.File
	for i := range 300 {
		files = append(files, directory.File{Origin: fmt.Sprintf("%03d.yaml", i), Data: []byte(text("shop", fmt.Sprintf("p%03d", i), 80))})
	}
	if err := feed.Set(t.Context(), files); err != nil {
		t.Fatal(err)
	}
	list, revision, err := o.Reader().List(t.Context(), Filter{})
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range list {
		// A tenth of the limit is reserved for cluster-wide objects.
		accepted := l.Origin < "090"
		if l.Accepted != accepted || !accepted && !strings.Contains(l.Error, "limits.policies (100)") {
			t.Fatalf("%s: accepted %t, %s", l.Origin, l.Accepted, l.Error)
		}
	}
	if len(list) != 300 || revision != 1 {
		t.Errorf("%d files, applied in changes up to revision %d, want one", len(list), revision)
	}
}

// TestReadersSeeALargeChangeWholeOrNot: a large change is prepared in many parts and compiled in many turns of the
// loop. List returns the state before or after the change, never a mixture.
func TestReadersSeeALargeChangeWholeOrNot(t *testing.T) {
	const policies = 2000
	dir := t.TempDir()
	many := func(c *Config) { c.MaxPolicies, c.MaxManifestBytes = 2*policies, 64<<20 }
	o, stop := run(t, dir, many)
	listing := func(port int) (files []directory.File) {
		for i := range 40 {
			var b strings.Builder
			for p := range policies / 40 {
				b.WriteString("---\n" + text("shop", fmt.Sprintf("p%d-%d", i, p), port))
			}
			files = append(files, directory.File{Origin: fmt.Sprintf("%03d.yaml", i), Data: []byte(b.String())})
		}
		return files
	}
	feed := o.Feed(managed.SourceFile)
	for i, files := range [][]directory.File{listing(80), listing(81), nil} {
		ended := make(chan error, 1)
		go func() { ended <- feed.Set(t.Context(), files) }()
		looks := 0
		for done := false; !done; looks++ {
			select {
			case err := <-ended:
				if err != nil {
					t.Fatal(err)
				}
				done = true
			default:
			}
			list, revision, err := o.Reader().List(t.Context(), Filter{})
			if err != nil {
				t.Fatal(err)
			}
			before, after := policies, policies
			switch i {
			case 0:
				before = 0
			case 2:
				after = 0
			}
			if !(revision == uint64(i) && len(list) == before) && !(revision == uint64(i+1) && len(list) == after) {
				t.Fatalf("change %d: %d policies at revision %d", i, len(list), revision)
			}
			port := fmt.Sprintf("port: %d", 79+revision)
			if x := slices.IndexFunc(list, func(l Listed) bool { return !bytes.Contains(l.Manifest, []byte(port)) }); x >= 0 {
				t.Fatalf("revision %d has %s", revision, list[x].Manifest)
			}
			if done && revision != uint64(i+1) {
				t.Errorf("change %d is made, but the revision is %d", i, revision)
			}
		}
		if looks < 3 {
			t.Errorf("change %d: %d reads, the test covers nothing", i, looks)
		}
	}
	if err := feed.Set(t.Context(), listing(82)); err != nil {
		t.Fatal(err)
	}
	stop()
	o, _ = run(t, dir, many)
	if list, revision, err := o.Reader().List(t.Context(), Filter{}); err != nil || len(list) != policies || revision != 4 {
		t.Errorf("%d policies at revision %d after a restart, %v", len(list), revision, err)
	}
}

// TestOneFileMayHaveAllPolicies: the limits apply to each document of a file; limits.manifests applies as well.
func TestOneFileMayHaveAllPolicies(t *testing.T) {
	const policies = 2500
	dir := t.TempDir()
	many := func(c *Config) { c.MaxPolicies, c.MaxManifestBytes = 2*policies, 64<<20 }
	o, stop := run(t, dir, many)
	var b strings.Builder
	for i := range policies {
		b.WriteString("---\n# " + strings.Repeat("x", 2000) + "\n" + text("shop", fmt.Sprint("p", i), 80))
	}
	if err := manifest.Check([]byte(b.String())); err == nil {
		t.Fatal("the file is within the bounds of one document: the test covers nothing")
	}
	for range 2 { // the second time after a restart, which recognises the enforced policies
		listing := []directory.File{{Origin: "all.yaml", Data: []byte(b.String())}}
		if err := o.Feed(managed.SourceFile).Set(t.Context(), listing); err != nil {
			t.Fatal(err)
		}
		st, err := o.Reader().Status(t.Context())
		if err != nil || st.Policies != policies || st.Revision != 1 || len(st.Problems) != 0 {
			t.Fatalf("%d policies at revision %d, problems %q, %v", st.Policies, st.Revision, st.Problems, err)
		}
		stop()
		o, stop = run(t, dir, many)
	}
	large := "---\n# " + strings.Repeat("x", manifest.MaxBytes) + "\n" + text("shop", "large", 80)
	listing := []directory.File{{Origin: "all.yaml", Data: []byte(b.String() + large)}}
	if err := o.Feed(managed.SourceFile).Set(t.Context(), listing); err != nil {
		t.Fatal(err)
	}
	st, err := o.Reader().Status(t.Context())
	const want = "file all.yaml is refused: document 2501 (line 25003): manifest of "
	if err != nil || st.Policies != policies || len(st.Problems) != 1 ||
		!strings.HasPrefix(st.Problems[0].Text, want) {
		t.Errorf("%d policies, problems %q, %v; want %q", st.Policies, st.Problems, err, want)
	}
	// For a single call, the limits still apply to all documents together.
	if _, err := o.Upsert(t.Context(), []byte(b.String()), "", false); err == nil || !strings.Contains(err.Error(), "is larger than") {
		t.Errorf("a call: %v", err)
	}
}

func TestCallerThatGoesLeavesNothingOfALargeChange(t *testing.T) {
	dir := t.TempDir()
	many := func(c *Config) { c.MaxPolicies, c.MaxManifestBytes = 100_000, 64<<20 }
	o, stop := run(t, dir, many)
	var b strings.Builder
	for i := range 2000 {
		b.WriteString("---\n" + text("shop", fmt.Sprint("p", i), 80))
	}
	docs, err := (&Request{Manifests: []byte(b.String())}).read(o.config.Rules)
	if err != nil {
		t.Fatal(err)
	}
	made := 0
	for turns := range 12 {
		// The caller gives up after some turns of the owner.
		ctx, cancel := context.WithCancel(t.Context())
		left := turns
		_, err := o.revise(ctx, opChange, func() (edit, error) {
			if left--; left < 0 {
				cancel()
			} else {
				time.AfterFunc(time.Duration(left)*5*time.Millisecond, cancel)
			}
			return o.upsert(&managed.Caller{}, docs)
		}, func(*edit) {})
		cancel()
		if err != nil && !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		list, revision, lerr := o.Reader().List(t.Context(), Filter{})
		if lerr != nil {
			t.Fatal(lerr)
		}
		limits, lerr := o.Reader().Shares(t.Context())
		if lerr != nil {
			t.Fatal(lerr)
		}
		for _, l := range limits {
			if l.Limit.Name == "policies" && l.Used != len(list) {
				t.Fatalf("after %d turns: %d policies are admitted, but there are %d", turns, l.Used, len(list))
			}
		}
		if len(list) == 2000 {
			made++
			if _, err := o.Delete(t.Context(), keysOf(list), false); err != nil {
				t.Fatal(err)
			}
		} else if len(list) != 0 {
			t.Fatalf("%d policies at revision %d", len(list), revision)
		}
	}
	if made == 12 {
		t.Error("no caller gave up before its change was made: the test covers nothing")
	}
	stop()
	o, _ = run(t, dir, many)
	if list, _, err := o.Reader().List(t.Context(), Filter{}); err != nil || len(list) != 0 {
		t.Errorf("%d policies after a restart, %v", len(list), err)
	}
}

func keysOf(list []Listed) (keys []policy.Key) {
	for _, l := range list {
		keys = append(keys, l.Key)
	}
	return keys
}

func TestFilesThatAreInForceAreNotKeptTwice(t *testing.T) {
	dir := t.TempDir()
	o, stop := run(t, dir, hundred)
	one, two := text("shop", "one", 80), text("shop", "two", 80)
	files := []directory.File{
		{Origin: "a.yaml", Data: []byte(one + "---\n" + two)},
		{Origin: "b.yaml", Data: []byte("---\n" + text("shop", "three", 80) + "---\n")},
		{Origin: "c.yaml", Data: []byte(text("shop", "four", 80))},
	}
	if err := o.Feed(managed.SourceFile).Set(t.Context(), files); err != nil {
		t.Fatal(err)
	}
	stop()
	o, _ = run(t, dir, hundred)
	files[2].Data = []byte(text("shop", "four", 81)) // now a policy with another name
	feed := o.Feed(managed.SourceFile)
	if err := feed.Set(t.Context(), files); err != nil {
		t.Fatal(err)
	}
	_, revision, err := o.Reader().List(t.Context(), Filter{})
	if err != nil || revision != 2 {
		t.Errorf("revision %d, %v; want 2: one has changed", revision, err)
	}
	for origin, f := range feed.decoded {
		for _, d := range f.docs {
			p := o.policies.all[d.Object.Key]
			if p == nil || p.Origin != origin || p.object != d.Object || &p.Manifest[0] != &d.Text[0] {
				t.Errorf("%s: %s is kept twice", origin, d.Object.Key)
			}
		}
	}
	if got := []int{len(feed.decoded["a.yaml"].docs), len(feed.decoded["b.yaml"].docs), len(feed.decoded["c.yaml"].docs)}; fmt.Sprint(got) != "[2 1 1]" {
		t.Errorf("documents: %v", got)
	}
	if !bytes.Contains(o.policies.all[feed.decoded["c.yaml"].docs[0].Object.Key].Manifest, []byte("81")) {
		t.Error("the change was not applied")
	}
}

func TestPoliciesOfASourceThatIsNotConfiguredStayAndAreReported(t *testing.T) {
	dir := t.TempDir()
	o, stop := run(t, dir, hundred)
	file := []directory.File{{Origin: "a.yaml", Data: []byte(text("shop", "db", 80))}}
	if err := o.Feed(managed.SourceFile).Set(t.Context(), file); err != nil {
		t.Fatal(err)
	}
	stop()
	o, stop = runWith(t, dir, []string{source.Identity}, hundred)
	list, _, err := o.Reader().List(t.Context(), Filter{})
	if err != nil || len(list) != 1 || !list[0].Accepted {
		t.Fatalf("%+v, %v; want the policy to stay", list, err)
	}
	st, err := o.Reader().Status(t.Context())
	if want := "the source file is not configured, but 1 of its policies are enforced: delete them, or configure it again"; err != nil || len(st.Problems) != 1 || st.Problems[0] != (summary.Problem{Kind: summary.ProblemSettings, Text: want}) {
		t.Errorf("problems %v, %v; want %q", st.Problems, err, want)
	}
	stop()
	// Configured again, the source has its former policies.
	o, _ = run(t, dir, hundred)
	if err := o.Feed(managed.SourceFile).Set(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	if st, err := o.Reader().Status(t.Context()); err != nil || st.Policies != 0 || len(st.Problems) != 0 {
		t.Errorf("%d policies, problems %v, %v", st.Policies, st.Problems, err)
	}
}

// TestLearnedAddressesEndThoughTheClockWentBack: a name is learned while the wall clock is far ahead. After the clock
// is corrected, the name still expires.
func TestLearnedAddressesEndThoughTheClockWentBack(t *testing.T) {
	dir := t.TempDir()
	c := &clock{now: time.Now().Add(365 * 24 * time.Hour)}
	use := func(cfg *Config) { cfg.Now = c.Now }
	o, stop := run(t, dir, use)
	at := []netip.Addr{netip.MustParseAddr("192.0.2.1")}
	_, err := o.Names().Learn(t.Context(), names.Asker{}, "a.example", at, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	stop()
	c.add(-365 * 24 * time.Hour)
	o, _ = run(t, dir, use)
	remembered := func() int {
		st, err := o.Reader().Status(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return st.Names
	}
	if remembered() != 1 {
		t.Fatal("the name was removed")
	}
	c.add(names.MaxTTL + 2*time.Minute)
	if err := o.loop.Do(t.Context(), opOther, o.sweep); err != nil {
		t.Fatal(err)
	}
	if remembered() != 0 {
		t.Error("the name stays")
	}
}

func TestFileThatIsTheSameIsNotDecodedAgain(t *testing.T) {
	o, _ := run(t, t.TempDir(), hundred)
	feed := o.Feed(managed.SourceFile)
	if err := feed.Set(t.Context(), []directory.File{{Origin: "a.yaml", Same: true}}); err == nil || !strings.Contains(err.Error(), "file a.yaml: it is listed as unchanged") {
		t.Errorf("nothing was listed before: %v", err)
	}
	a := directory.File{Origin: "a.yaml", Data: []byte(text("shop", "one", 80))}
	if err := feed.Set(t.Context(), []directory.File{a, {Origin: "b.yaml", Data: []byte("{")}}); err != nil {
		t.Fatal(err)
	}
	before := maps.Clone(feed.decoded)
	if err := feed.Set(t.Context(), []directory.File{{Origin: "a.yaml", Same: true}, {Origin: "b.yaml", Same: true}}); err != nil {
		t.Fatal(err)
	}
	if !maps.Equal(feed.decoded, before) {
		t.Errorf("decoded: %v, before %v", feed.decoded, before)
	}
	list, revision, err := o.Reader().List(t.Context(), Filter{})
	if err != nil || revision != 1 || len(list) != 2 || list[1].Error == "" && list[0].Error == "" {
		t.Errorf("revision %d, %+v, %v; want a.yaml enforced and b.yaml refused", revision, list, err)
	}
	// Files with Keep were not decoded, so the next listing must read them.
	if err := feed.Set(t.Context(), []directory.File{{Origin: "a.yaml", Keep: true}}); err != nil {
		t.Fatal(err)
	}
	if err := feed.Set(t.Context(), []directory.File{{Origin: "a.yaml", Same: true}}); err == nil {
		t.Error("a kept file is listed as unchanged: no error")
	}
}
