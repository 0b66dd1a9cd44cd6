// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/desired/directory"
	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/compile"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/manifest"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// clock is a clock that advances by a second with each reading.
type clock struct {
	mu  sync.Mutex
	now time.Time
}

func (c *clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(time.Second)
	return c.now
}

// running is an owner whose Run is running.
type running struct {
	*Owner
	t    testing.TB
	stop func()
}

func testConfig(c *clock) Config {
	return Config{
		Node:   compile.Node{Name: "here", Zone: "east"},
		Limits: Limits{Services: 1000, Slices: 1000, Frontends: 1000, Backends: 1000, BackendsPerService: 500},
		Linger: time.Hour, Log: log.Discard(), Now: c.Now,
	}
}

func start(t testing.TB, config Config, dir string, sources ...string) *running {
	t.Helper()
	o, err := New(config, dir, sources)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ran := make(chan error, 1)
	go func() { ran <- o.Run(ctx) }()
	r := &running{Owner: o, t: t}
	r.stop = sync.OnceFunc(func() {
		cancel()
		if err := errors.Join(<-ran, o.Close()); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(r.stop)
	return r
}

func (r *running) apply(text string) Outcome {
	r.t.Helper()
	out, err := r.Upsert(r.t.Context(), Request{Manifests: []byte(text)})
	if err != nil {
		r.t.Fatal(err)
	}
	return out
}

// reader is a subscriber that stores its frontends.
type reader struct {
	*Session
	t       testing.TB
	has     map[frontend.Key]string
	barrier frontend.Barrier
	message int // size of the largest, in steps
}

func (r *running) subscribe(name string, in [16]byte, seq uint64) *reader {
	r.t.Helper()
	s, err := r.Subscribers().Subscribe(r.t.Context(), Subscription{Name: name, Enforces: true, Incarnation: in, Seq: seq})
	if err != nil {
		r.t.Fatal(err)
	}
	return &reader{Session: s, t: r.t, has: make(map[frontend.Key]string)}
}

// until applies steps up to the barrier of a revision.
func (x *reader) until(revision uint64) {
	x.t.Helper()
	for {
		steps, err := x.Next(x.t.Context())
		if err != nil {
			x.t.Fatal(err)
		}
		x.message = max(x.message, len(steps))
		for _, s := range steps {
			switch {
			case s.Barrier != nil:
				if s.Barrier.SnapshotComplete && x.barrier.Seq != 0 {
					x.t.Fatal("a stream that had a barrier has a snapshot")
				}
				if s.Barrier.Seq <= x.barrier.Seq || s.Barrier.Revision < x.barrier.Revision {
					x.t.Fatalf("the barrier %+v follows %+v", s.Barrier, x.barrier)
				}
				x.barrier = *s.Barrier
			case s.Upsert != nil:
				x.has[s.Upsert.Key] = s.Upsert.String()
			default:
				delete(x.has, *s.Remove)
			}
		}
		if x.barrier.Seq != 0 && x.barrier.Revision >= revision && steps[len(steps)-1].Barrier != nil {
			return
		}
	}
}

// world has the objects that a test has applied.
type world struct {
	services map[string]string // manifests
	slices   map[string]string
	born     map[string]int // when a service was created
	births   int
}

// frontends computes the frontends of the world by a simple and slow method.
func (w *world) frontends(t testing.TB, n compile.Node) (map[frontend.Key]string, int) {
	t.Helper()
	decode := func(text string) manifest.Object {
		out, err := manifest.Options{}.Decode([]byte(text))
		if err != nil || len(out) != 1 {
			t.Fatalf("%q: %v", text, err)
		}
		return out[0]
	}
	out := make(map[frontend.Key]string)
	backends := make(map[netip.AddrPort]bool)
	names := slices.SortedFunc(maps.Keys(w.services), func(a, b string) int { return w.born[a] - w.born[b] })
	for _, name := range names {
		v := compile.View{Service: decode(w.services[name]).Service}
		for _, s := range slices.Sorted(maps.Keys(w.slices)) {
			if x := decode(w.slices[s]).Slice; x.Service == name {
				v.Slices = append(v.Slices, x)
			}
		}
		for _, f := range n.Of(v, nil) {
			if _, ok := out[f.Key]; !ok {
				out[f.Key] = f.String()
			}
		}
		for _, b := range n.Backends(v) {
			backends[b] = true
		}
	}
	return out, len(backends)
}

func randomService(r *rand.Rand, name string) string {
	kind := []string{"ClusterIP", "NodePort", "LoadBalancer"}[r.IntN(3)]
	node := ""
	if kind != "ClusterIP" {
		node = fmt.Sprintf(", nodePort: %d", 30000+r.IntN(3))
	}
	policy := []string{"Cluster", "Local"}[r.IntN(2)]
	label := ""
	if r.IntN(8) == 0 {
		label = ", labels: {service.kubernetes.io/service-proxy-name: other}"
	}
	return fmt.Sprintf("apiVersion: v1\nkind: Service\nmetadata: {name: %s%s}\nspec: {type: %s, clusterIP: 10.96.0.%d, "+
		"internalTrafficPolicy: %s, ports: [{port: %d%s}]}\n",
		name, label, kind, 1+r.IntN(4), policy, 80+r.IntN(2), node)
}

func randomSlice(r *rand.Rand, name, of string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: %s, labels: "+
		"{kubernetes.io/service-name: %s}}\naddressType: IPv4\nports: [{port: 8080}]\nendpoints:\n", name, of)
	hinted := r.IntN(2) == 0
	for i := range 4 {
		hints := ""
		if hinted {
			hints = fmt.Sprintf(", hints: {forZones: [{name: %s}]}", []string{"east", "west"}[r.IntN(2)])
		}
		if r.IntN(2) == 0 {
			fmt.Fprintf(&b, "- {addresses: [10.0.0.%d], nodeName: %s, conditions: {ready: %v, serving: true, terminating: "+
				"%v}%s}\n",
				i, []string{"here", "there"}[r.IntN(2)], r.IntN(2) == 0, r.IntN(2) == 0, hints)
		}
	}
	if strings.HasSuffix(b.String(), "endpoints:\n") {
		return strings.TrimSuffix(b.String(), "endpoints:\n") + "endpoints: []\n"
	}
	return b.String()
}

// TestChangesComeToTheSameAsFromScratch: after any sequence of changes, subscribers have the same frontends as a new
// owner computes from the objects. The sequences include slow readers, resumed streams and restarts.
func TestChangesComeToTheSameAsFromScratch(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	c := &clock{now: time.Unix(1e9, 0)}
	dir := t.TempDir()
	config := testConfig(c)
	config.Node.Zone = ""
	node := config.Node
	o := start(t, config, dir, managed.SourceKubernetes)
	fast, slow := o.subscribe("fast", [16]byte{}, 0), o.subscribe("slow", [16]byte{}, 0)
	w := &world{services: make(map[string]string), slices: make(map[string]string), born: make(map[string]int)}
	revision := uint64(0)
	for i := range 300 {
		var texts []string
		var gone []service.ObjectKey
		for range 1 + r.IntN(3) {
			name := fmt.Sprint("s", r.IntN(5))
			slice := fmt.Sprint("x", r.IntN(6))
			switch r.IntN(6) {
			case 0, 1:
				text := randomService(r, name)
				if w.services[name] == "" {
					w.births++
					w.born[name] = w.births*10 + int(name[1]-'0') // services of one change are ordered by name
				}
				w.services[name] = text
			case 2, 3, 4:
				w.slices[slice] = randomSlice(r, slice, name)
			default:
				gone = append(gone, service.ObjectKey{
					Kind: service.KindService,
					Name: service.Name{Namespace: "default", Name: name},
				},
					service.ObjectKey{Kind: service.KindSlice, Name: service.Name{Namespace: "default", Name: slice}})
				delete(w.services, name)
				delete(w.slices, slice)
			}
		}
		if len(gone) > 0 {
			out, err := o.Delete(t.Context(), managed.Caller{}, gone)
			if err != nil {
				t.Fatal(err)
			}
			revision = out.Revision
		}
		for _, name := range slices.SortedFunc(maps.Keys(w.services),
			func(a, b string) int { return w.born[a] - w.born[b] }) {
			texts = append(texts, w.services[name])
		}
		for _, text := range w.slices {
			texts = append(texts, text)
		}
		// Apply one service after the other, so that no two have the same age.
		for _, text := range texts {
			out := o.apply(text)
			if out.Revision < revision || out.Revision > revision+1 {
				t.Fatalf("revision %d follows %d", out.Revision, revision)
			}
			revision = out.Revision
		}
		if r.IntN(5) == 0 { // the node is found to be in another zone
			node.Zone = []string{"", "east", "west"}[r.IntN(3)]
			if err := o.SetZone(t.Context(), node.Zone); err != nil {
				t.Fatal(err)
			}
			st, err := o.Reader().Status(t.Context())
			if err != nil || st.Revision < revision || st.Revision > revision+1 {
				t.Fatalf("revision %d follows %d: %v", st.Revision, revision, err)
			}
			revision = st.Revision
		}
		want, backends := w.frontends(t, node)
		check := func(x *reader) {
			t.Helper()
			x.until(revision)
			if !maps.Equal(x.has, want) {
				t.Fatalf("after change %d the subscriber %s has\n%s\nwant\n%s", i, x.name, show(x.has), show(want))
			}
			if err := x.Ack(t.Context(), x.barrier.Seq, x.barrier.Seq); err != nil {
				t.Fatal(err)
			}
		}
		if x := fast.barrier.Revision; x < revision {
			check(fast)
		}
		if r.IntN(10) == 0 && slow.barrier.Revision < revision {
			check(slow)
		}
		st, err := o.Reader().Status(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if st.Frontends != len(want) || st.Backends != backends || st.Services != len(w.services) ||
			st.Slices != len(w.slices) {
			t.Fatalf("after change %d the status is %+v, want %d frontends, %d backends, %d services, %d slices", i, st,
				len(want), backends, len(w.services), len(w.slices))
		}
		switch r.IntN(30) {
		case 0: // the stream ends and is resumed
			slow.Close()
			again := o.subscribe("slow", o.Incarnation(), slow.barrier.Seq)
			if slow.barrier.Seq != 0 {
				again.has, again.barrier = slow.has, slow.barrier
			}
			slow = again
		case 1: // the process ends
			o.stop()
			o = start(t, config, dir, managed.SourceKubernetes)
			fast, slow = o.subscribe("fast", fast.subscribers.incarnation, fast.barrier.Seq), o.subscribe("slow", [16]byte{}, 0)
			check(fast)
		}
	}
}

func show(has map[frontend.Key]string) string {
	return strings.Join(slices.Sorted(maps.Values(has)), "\n")
}

const (
	web = "apiVersion: v1\nkind: Service\nmetadata: {name: web}\nspec: {clusterIP: 10.96.0.1, ports: [{port: 80}]}\n"
	api = "apiVersion: v1\nkind: Service\nmetadata: {name: api}\nspec: {clusterIP: 10.96.0.1, ports: [{port: 80}]}\n"
	end = "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: web-1, labels: " +
		"{kubernetes.io/service-name: web}}\n" +
		"addressType: IPv4\nports: [{port: 8080}]\nendpoints: [{addresses: [10.0.0.1], nodeName: here}]\n"
)

func named(name string) service.Name { return service.Name{Namespace: "default", Name: name} }

func serviceKey(name string) service.ObjectKey {
	return service.ObjectKey{Kind: service.KindService, Name: named(name)}
}

func TestSliceWaitsForItsService(t *testing.T) {
	o := start(t, testConfig(&clock{now: time.Unix(1e9, 0)}), t.TempDir())
	o.apply(end)
	_, refused, _, err := o.Reader().List(t.Context(), Filter{})
	if err != nil || len(refused) != 1 || !strings.Contains(refused[0].Err, "its service default/web is missing") {
		t.Errorf("refused %+v, %v", refused, err)
	}
	o.apply(web)
	list, refused, revision, err := o.Reader().List(t.Context(), Filter{WithFrontends: true})
	if err != nil || len(refused) != 0 || len(list) != 1 || revision != 2 || list[0].Endpoints != 1 ||
		list[0].Ready != 1 ||
		list[0].Frontends[0].String() != "10.96.0.1:80/tcp of default/web inside 10.0.0.1:8080" {
		t.Errorf("list %+v, refused %+v, revision %d, %v", list, refused, revision, err)
	}
}

func TestSameObjectsChangeNothing(t *testing.T) {
	o := start(t, testConfig(&clock{now: time.Unix(1e9, 0)}), t.TempDir())
	first := o.apply(web + "---\n" + end)
	again := o.apply(web + "---\n" + end)
	if first.Revision != 1 || again.Revision != 1 || first.Changes[0].Type != managed.Created ||
		again.Changes[0].Type != managed.Unchanged || again.Changes[1].Type != managed.Unchanged {
		t.Errorf("%+v, then %+v", first, again)
	}
	changed := o.apply(strings.Replace(web, "port: 80", "port: 81", 1))
	if changed.Revision != 2 || changed.Changes[0].Type != managed.Replaced {
		t.Errorf("%+v", changed)
	}
}

func TestObjectsBelongToTheirManagers(t *testing.T) {
	o := start(t, testConfig(&clock{now: time.Unix(1e9, 0)}), t.TempDir(), managed.SourceFile)
	upsert := func(manager, text string) error {
		_, err := o.Upsert(t.Context(), Request{Caller: managed.Caller{Manager: manager}, Manifests: []byte(text)})
		return err
	}
	remove := func(manager, name string) error {
		_, err := o.Delete(t.Context(), managed.Caller{Manager: manager}, []service.ObjectKey{serviceKey(name)})
		return err
	}
	if err := upsert("a", web); err != nil {
		t.Fatal(err)
	}
	f := o.Feed(managed.SourceFile)
	if err := f.Set(t.Context(), []directory.File{{Origin: "api.yaml", Data: []byte(api)}}); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		what string
		err  error
		want error
	}{
		{"another manager replaces", upsert("b", web), failure.ErrOwned},
		{"no manager replaces", upsert("", web), failure.ErrOwned},
		{"a manager replaces a file's", upsert("a", api), failure.ErrOwned},
		{"another manager deletes", remove("b", "web"), failure.ErrForeign},
		{"a manager deletes a file's", remove("a", "api"), failure.ErrForeign},
		{"deletes a missing object", remove("b", "none"), nil},
	} {
		if !errors.Is(c.err, c.want) || c.want == nil && c.err != nil {
			t.Errorf("%s: %v, want %v", c.what, c.err, c.want)
		}
	}
	// An object that a manager has applied stays with the manager. The rest of the file is applied.
	if err := f.Set(t.Context(), []directory.File{
		{Origin: "api.yaml", Data: []byte(api)},
		{Origin: "web.yaml", Data: []byte(end + "---\n" + web)},
	}); err != nil {
		t.Fatal(err)
	}
	_, refused, _, err := o.Reader().List(t.Context(), Filter{})
	if err != nil || len(refused) != 1 || refused[0].Origin != "web.yaml" ||
		!strings.Contains(refused[0].Err, "belongs to the source grpc") {
		t.Errorf("refused %+v, %v", refused, err)
	}
}

func TestCompleteSourceDeletesWhatWasNotNamed(t *testing.T) {
	dir := t.TempDir()
	o := start(t, testConfig(&clock{now: time.Unix(1e9, 0)}), dir)
	mine := managed.Caller{Manager: "m"}
	upsert := func(text string) {
		t.Helper()
		if _, err := o.Upsert(t.Context(), Request{Caller: mine, Manifests: []byte(text)}); err != nil {
			t.Fatal(err)
		}
	}
	upsert(web + "---\n" + end)
	upsert(api)
	first := o.Incarnation()
	o.stop()
	o = start(t, testConfig(&clock{now: time.Unix(1e9, 0)}), dir)
	if _, err := o.Complete(t.Context(), mine, first); !errors.Is(err, failure.ErrChanged) {
		t.Errorf("of another run: %v", err)
	}
	if _, err := o.Complete(t.Context(), mine, o.Incarnation()); !errors.Is(err, failure.ErrEmpty) {
		t.Errorf("without a listing: %v", err)
	}
	upsert(web) // unchanged, but sent by the manager in this run
	dry := mine
	dry.ValidateOnly = true
	for _, c := range []managed.Caller{dry, mine, mine} {
		out, err := o.Complete(t.Context(), c, o.Incarnation())
		if err != nil {
			t.Fatal(err)
		}
		var keys []string
		for _, x := range out.Changes {
			keys = append(keys, x.Key.String())
		}
		want := "EndpointSlice default/web-1, Service default/api"
		if len(keys) > 0 && strings.Join(keys, ", ") != want {
			t.Errorf("deleted %q, want %s", keys, want)
		}
	}
	st, err := o.Reader().Status(t.Context())
	if err != nil || st.Services != 1 || st.Slices != 0 || !st.Sources[1].Synced {
		t.Errorf("%+v, %v", st, err)
	}
	o.stop()
	o = start(t, testConfig(&clock{now: time.Unix(1e9, 0)}), dir)
	empty := mine
	empty.AllowEmpty = true
	if out, err := o.Complete(t.Context(), empty, o.Incarnation()); err != nil || len(out.Changes) != 1 {
		t.Errorf("an intended empty listing: %+v, %v", out, err)
	}
}

// TestListingsAndDeletionsSpareWhatIsOfOthers: a listing or deletion by a manager or source affects only the objects
// of this manager or source.
func TestListingsAndDeletionsSpareWhatIsOfOthers(t *testing.T) {
	dir := t.TempDir()
	config := testConfig(&clock{now: time.Unix(1e9, 0)})
	o := start(t, config, dir, managed.SourceKubernetes)
	upsert := func(manager, text string) {
		t.Helper()
		r := Request{Caller: managed.Caller{Manager: manager}, Manifests: []byte(text)}
		if _, err := o.Upsert(t.Context(), r); err != nil {
			t.Fatal(err)
		}
	}
	all := func(when string) {
		t.Helper()
		if st, err := o.Reader().Status(t.Context()); err != nil || st.Services != 2 || st.Slices != 1 {
			t.Errorf("%s: %d services and %d slices, %v; want 2 and 1", when, st.Services, st.Slices, err)
		}
	}
	upsert("m", web)
	upsert("other", end)
	objects, err := manifest.Options{}.Decode([]byte(api))
	if err != nil || len(objects) != 1 {
		t.Fatal(err)
	}
	own := objects[0].Key
	slices, err := manifest.Options{}.Decode([]byte(end))
	if err != nil || len(slices) != 1 {
		t.Fatal(err)
	}
	f := o.Objects(managed.SourceKubernetes)
	apply := func(c watch.Changes[service.ObjectKey, Given]) {
		t.Helper()
		if err := f.Apply(t.Context(), c); err != nil {
			t.Fatal(err)
		}
	}
	apply(watch.Changes[service.ObjectKey, Given]{Upserts: map[service.ObjectKey]Given{own: {Object: objects[0]}}})
	all("at the beginning")
	apply(watch.Changes[service.ObjectKey, Given]{
		Deletes: map[service.ObjectKey]struct{}{serviceKey("web"): {}, slices[0].Key: {}},
	})
	all("after a source has deleted objects of managers")
	if err := f.Complete(t.Context(), map[service.ObjectKey]struct{}{own: {}}); err != nil {
		t.Fatal(err)
	}
	all("after the listing of a source")
	o.stop()
	o = start(t, config, dir, managed.SourceKubernetes)
	upsert("m", web)
	if _, err := o.Complete(t.Context(), managed.Caller{Manager: "m"}, o.Incarnation()); err != nil {
		t.Fatal(err)
	}
	all("after the listing of a manager")
}

func TestConditionsAndTrials(t *testing.T) {
	o := start(t, testConfig(&clock{now: time.Unix(1e9, 0)}), t.TempDir())
	revision := uint64(7)
	if _, err := o.Upsert(t.Context(), Request{
		Caller:    managed.Caller{IfRevision: &revision},
		Manifests: []byte(web),
	}); !errors.Is(err, failure.ErrChanged) {
		t.Errorf("at another revision: %v", err)
	}
	out, err := o.Upsert(t.Context(), Request{Caller: managed.Caller{ValidateOnly: true}, Manifests: []byte(web)})
	if err != nil || out.Revision != 0 || out.Changes[0].Type != managed.Created {
		t.Errorf("a trial: %+v, %v", out, err)
	}
	if _, _, err := o.Reader().Get(t.Context(), named("web")); !errors.Is(err, failure.ErrNotFound) {
		t.Errorf("after a trial: %v", err)
	}
	var bad *manifest.Error
	if _, err := o.Upsert(t.Context(), Request{Manifests: []byte(web + "---\n" + web)}); !errors.As(err, &bad) ||
		bad.Violations[0].Document != 1 {
		t.Errorf("an object twice: %v", err)
	}
	revision = 0
	if out, err := o.Upsert(t.Context(), Request{
		Caller:    managed.Caller{IfRevision: &revision},
		Manifests: []byte(web),
	}); err != nil || out.Revision != 1 {
		t.Errorf("at this revision: %+v, %v", out, err)
	}
}

func TestLimitsNameTheService(t *testing.T) {
	many := func(name, ip string, ports, endpoints int) string {
		var b strings.Builder
		fmt.Fprintf(&b, "apiVersion: v1\nkind: Service\nmetadata: {name: %s}\nspec:\n  clusterIP: %s\n  ports:\n", name, ip)
		for i := range ports {
			fmt.Fprintf(&b, "  - {name: p%d, port: %d}\n", i, i+1)
		}
		fmt.Fprintf(&b, "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: %s-1, labels: "+
			"{kubernetes.io/service-name: %s}}\naddressType: IPv4\nports: [{name: p0, port: 8080}]\nendpoints:\n", name, name)
		for i := range endpoints {
			fmt.Fprintf(&b, "- {addresses: [10.%s.%d]}\n", ip[strings.LastIndex(ip, ".")+1:]+".0", i+1)
		}
		return b.String()
	}
	config := testConfig(&clock{now: time.Unix(1e9, 0)})
	config.Limits = Limits{Services: 3, Slices: 3, Frontends: 5, Backends: 6, BackendsPerService: 4}
	o := start(t, config, t.TempDir())
	o.apply(many("a", "10.96.0.1", 2, 3))
	for _, c := range []struct{ what, text, want string }{
		{
			"frontends", many("b", "10.96.0.2", 4, 1),
			"6 frontends, the limit is 5 (limits.frontends); service default/b adds most, 4",
		},
		{"backends of one", many("b", "10.96.0.2", 1, 5), "service default/b would have 5 backends, the limit is 4"},
		{
			"backends", many("b", "10.96.0.2", 1, 4),
			"7 backends, the limit is 6 (limits.backends); service default/b adds most, 4",
		},
		{
			"backends of two", many("b", "10.96.0.2", 1, 2) + "---\n" + many("c", "10.96.0.3", 1, 2),
			"at least 7 backends, the limit is 6 (limits.backends); service default/b adds most, 2",
		},
		{"services", web + "---\n" + strings.Replace(web, "name: web", "name: c", 1) + "---\n" +
			strings.Replace(web, "name: web", "name: d", 1), "4 services with Service default/d, the limit is 3"},
	} {
		_, err := o.Upsert(t.Context(), Request{Manifests: []byte(c.text)})
		if !errors.Is(err, failure.ErrLimit) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.what, err, c.want)
		}
	}
	if st, err := o.Reader().Status(t.Context()); err != nil || st.Services != 1 || st.Revision != 1 {
		t.Errorf("a change beyond a limit had an effect: %+v, %v", st, err)
	}
	o.apply(many("b", "10.96.0.2", 3, 3))
}
