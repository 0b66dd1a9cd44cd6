// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/manifest"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// givenOf returns objects in the form in which a source delivers them.
func givenOf(t testing.TB, texts ...string) map[service.ObjectKey]Given {
	t.Helper()
	out := make(map[service.ObjectKey]Given)
	for _, text := range texts {
		all, err := manifest.Options{}.Decode([]byte(text))
		if err != nil {
			t.Fatal(err)
		}
		for _, x := range all {
			out[x.Key] = Given{Object: x}
		}
	}
	return out
}

// serviceText returns a Service with the given number of ports, from 80.
func serviceText(namespace, name, ip string, ports int) string {
	var b strings.Builder
	fmt.Fprintf(&b, "apiVersion: v1\nkind: Service\nmetadata: {name: %s, namespace: %s}\n"+
		"spec:\n  clusterIP: %q\n  ports:\n", name, namespace, ip)
	for i := range ports {
		fmt.Fprintf(&b, "  - {name: p%d, port: %d}\n", i, 80+i)
	}
	return b.String()
}

// sliceText returns a slice of a Service with the given number of ports, from 8080.
func sliceText(namespace, name string, ports int, addresses ...string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\naddressType: IPv4\n"+
		"metadata: {name: %s-x, namespace: %s, labels: {kubernetes.io/service-name: %s}}\nports:\n", name, namespace, name)
	for i := range ports {
		fmt.Fprintf(&b, "- {name: p%d, port: %d}\n", i, 8080+i)
	}
	b.WriteString("endpoints:\n")
	for _, a := range addresses {
		fmt.Fprintf(&b, "- {addresses: [%s]}\n", a)
	}
	return b.String()
}

// servedAt returns the frontend at port 80 of a cluster IP.
func (r *running) servedAt(ip string) string {
	r.t.Helper()
	x := r.subscribe("servedAt", [16]byte{}, 0)
	defer x.Close()
	st, err := r.Reader().Status(r.t.Context())
	if err != nil {
		r.t.Fatal(err)
	}
	x.until(st.Revision)
	addr := netip.MustParseAddr(ip)
	return x.has[frontend.Key{Addr: addr, Port: 80, Protocol: frontend.TCP}]
}

// apiSource is a source that passes objects to an owner with small limits.
type apiSource struct {
	*running
	*Objects
	clock *clock
}

func startShared(t *testing.T, limits Limits) *apiSource {
	t.Helper()
	c := &clock{now: time.Unix(1e9, 0)}
	config := testConfig(c)
	config.Limits = limits
	o := start(t, config, t.TempDir(), managed.SourceKubernetes)
	return &apiSource{running: o, Objects: o.Objects(managed.SourceKubernetes), clock: c}
}

func (s *apiSource) give(texts ...string) {
	s.t.Helper()
	c := watch.Changes[service.ObjectKey, Given]{Upserts: givenOf(s.t, texts...)}
	if err := s.Objects.Apply(s.t.Context(), c); err != nil {
		s.t.Fatal(err)
	}
}

func (s *apiSource) remove(keys ...service.ObjectKey) {
	s.t.Helper()
	c := watch.Changes[service.ObjectKey, Given]{Deletes: make(map[service.ObjectKey]struct{})}
	for _, k := range keys {
		c.Deletes[k] = struct{}{}
	}
	if err := s.Objects.Apply(s.t.Context(), c); err != nil {
		s.t.Fatal(err)
	}
}

// complete completes the listing, and computes the levels.
func (s *apiSource) complete() {
	s.t.Helper()
	held, err := s.Held(s.t.Context())
	if err != nil {
		s.t.Fatal(err)
	}
	listed := make(map[service.ObjectKey]struct{})
	for _, k := range held {
		listed[k] = struct{}{}
	}
	if err := s.Objects.Complete(s.t.Context(), listed); err != nil {
		s.t.Fatal(err)
	}
	s.level()
}

func (s *apiSource) level() {
	s.t.Helper()
	if err := s.computeLevels(s.t.Context()); err != nil {
		s.t.Fatal(err)
	}
}

// allFrontends returns the frontends that a datapath gets, by key.
func (r *running) allFrontends() map[frontend.Key]string {
	r.t.Helper()
	x := r.subscribe("allFrontends", [16]byte{}, 0)
	defer x.Close()
	st, err := r.Reader().Status(r.t.Context())
	if err != nil {
		r.t.Fatal(err)
	}
	x.until(st.Revision)
	return x.has
}

// count returns how many frontends of a service fit into the share, and how many exceed it and refuse connections.
func count(all map[frontend.Key]string, of string) (within, exceed int) {
	for _, text := range all {
		switch {
		case !strings.Contains(text, " of "+of):
		case strings.Contains(text, "exceeds the share"):
			exceed++
		default:
			within++
		}
	}
	return within, exceed
}

func keyOf(kind service.Kind, namespace, name string) service.ObjectKey {
	return service.ObjectKey{Kind: kind, Name: service.Name{Namespace: namespace, Name: name}}
}

// TestFloodOfFrontendsKeepsNoServiceOfOthersOut: one namespace requests more frontends than the limit. The services
// of other namespaces have all their frontends, before and after the levels are first computed. The newest frontends
// of the first namespace refuse connections. They are served when other frontends are removed.
func TestFloodOfFrontendsKeepsNoServiceOfOthersOut(t *testing.T) {
	o := startShared(t, Limits{Services: 1000, Slices: 1000, Frontends: 100, Backends: 1000, BackendsPerService: 500})
	for i := range 10 {
		o.give(serviceText("evil", fmt.Sprint("s", i), fmt.Sprint("10.96.1.", i+1), 10))
	}
	served := func(what string) {
		t.Helper()
		const want = "10.96.0.1:80/tcp of shop/web:p0 inside 10.244.0.5:8080"
		if got := o.servedAt("10.96.0.1"); got != want {
			t.Errorf("%s: %q, want %q", what, got, want)
		}
	}
	o.give(serviceText("shop", "web", "10.96.0.1", 1), sliceText("shop", "web", 1, "10.244.0.5"))
	served("before the first levels")
	o.complete()
	served("after the first levels")
	all := o.allFrontends()
	// Tenants other than the system share 90 of the 100 units. shop uses one of them.
	if within, exceed := count(all, "evil/"); within != 89 || exceed != 0 {
		t.Errorf("the flood has %d frontends, and %d that refuse", within, exceed)
	}
	// The addresses of all services come first. The rest goes to the oldest services.
	for name, want := range map[string]int{"s0": 10, "s7": 10, "s8": 8, "s9": 1} {
		if within, _ := count(all, "evil/"+name); within != want {
			t.Errorf("the service %s of the flood has %d frontends of 10, want %d", name, within, want)
		}
	}
	// With more services than units, the newest addresses refuse connections as far as the share allows.
	for i := range 4 {
		o.give(serviceText("evil", fmt.Sprint("t", i), fmt.Sprint("10.96.2.", i+1), 10))
	}
	o.level()
	if within, exceed := count(o.allFrontends(), "evil/"); within+exceed != 89 {
		t.Errorf("the flood has %d frontends, and %d that refuse", within, exceed)
	}
	l, _, err := o.Reader().Get(t.Context(), service.Name{Namespace: "evil", Name: "t1"})
	if err != nil || len(l.Notes) == 0 || !strings.HasPrefix(l.Notes[0], "ExceedsShare: 9 of 10 frontends") {
		t.Errorf("the notes of a service beyond the share: %q, %v", l.Notes, err)
	}
	o.give(serviceText("shop", "more", "10.96.0.2", 20))
	o.level()
	if within, exceed := count(o.allFrontends(), "shop/more"); within != 20 || exceed != 0 {
		t.Errorf("a new service has %d of 20 frontends, %d refuse", within, exceed)
	}
	for i := range 10 {
		o.remove(keyOf(service.KindService, "evil", fmt.Sprint("s", i)))
	}
	o.level()
	if within, exceed := count(o.allFrontends(), "evil/"); within != 40 || exceed != 0 {
		t.Errorf("when the flood is deleted, what is left of it has %d frontends of 40, %d refuse", within, exceed)
	}
	l, _, err = o.Reader().Get(t.Context(), service.Name{Namespace: "evil", Name: "t1"})
	if err != nil || len(l.Notes) != 0 {
		t.Errorf("notes of a service within the share: %q, %v", l.Notes, err)
	}
}

// TestFrontendsBeyondTheShareRefuseConnections: beyond the share, a virtual IP keeps one frontend, which makes it
// refuse connections at all ports. Each node port refuses connections. Packets to external addresses are forwarded
// unchanged.
func TestFrontendsBeyondTheShareRefuseConnections(t *testing.T) {
	limits := Limits{Services: 1000, Slices: 1000, Frontends: 20, Backends: 1000, BackendsPerService: 500}
	o := startShared(t, limits)
	text := strings.Replace(serviceText("evil", "s", "10.96.1.1", 10), "spec:\n",
		"spec:\n  type: LoadBalancer\n  externalIPs: [198.51.100.1]\n", 1) +
		"status: {loadBalancer: {ingress: [{ip: 203.0.113.1}, {ip: 203.0.113.2, ipMode: Proxy}]}}\n"
	for i := range 10 {
		text = strings.Replace(text, fmt.Sprintf("port: %d}", 80+i), fmt.Sprintf("port: %d, nodePort: %d}", 80+i, 30080+i), 1)
	}
	ends := sliceText("evil", "s", 10, "10.244.9.1")
	o.index.node.ExternalIPs = []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")}
	o.give(serviceText("evil", "a", "10.96.1.9", 15), text, ends)
	o.complete()
	// Ten units are reserved for the node ports. Ten remain, of which the tenant gets nine. Three of the nine are for
	// the addresses.
	all := o.allFrontends()
	if within, exceed := count(all, "evil/a"); within != 7 || exceed != 0 {
		t.Errorf("the older service has %d frontends, %d refuse", within, exceed)
	}
	within, exceed := count(all, "evil/s")
	if within != 1 || exceed != 11 {
		t.Errorf("the newer service has %d frontends, %d refuse", within, exceed)
	}
	o.remove(keyOf(service.KindService, "evil", "a"))
	o.level()
	all = o.allFrontends()
	has := func(addr string, port uint16) string {
		a := netip.MustParseAddr(addr)
		return all[frontend.Key{Addr: a, Port: port, Protocol: frontend.TCP, Node: a.IsUnspecified()}]
	}
	// Its 50 frontends get 9 units: two for the addresses, and seven for the frontends with the lowest ports.
	for _, c := range []struct {
		addr string
		port uint16
		want string
	}{
		{"10.96.1.1", 80, "10.96.1.1:80/tcp of evil/s:p0 inside 10.244.9.1:8080"},
		{"0.0.0.0", 30080, "0.0.0.0:30080/tcp of evil/s:p0 inside 10.244.9.1:8080"},
		{"198.51.100.1", 80, "198.51.100.1:80/tcp of evil/s:p0 inside 10.244.9.1:8080"},
		{"203.0.113.1", 80, "203.0.113.1:80/tcp of evil/s:p0 inside 10.244.9.1:8080"},
		{"10.96.1.1", 82, ""},
		{"198.51.100.1", 82, ""},
		{"203.0.113.1", 82, ""},
		{"203.0.113.2", 82, ""},
		{"0.0.0.0", 30082, "0.0.0.0:30082/tcp of evil/s:p2 exceeds the share inside reject"},
		{"0.0.0.0", 30089, "0.0.0.0:30089/tcp of evil/s:p9 exceeds the share inside reject"},
	} {
		if got := has(c.addr, c.port); got != c.want {
			t.Errorf("%s port %d: %q, want %q", c.addr, c.port, got, c.want)
		}
	}
}

// TestFirstListingIsDividedWhateverItsOrder: the objects of a first listing arrive in batches in any order. Neither
// the order nor a restart affects which objects fit. The services of the cluster itself always fit.
func TestFirstListingIsDividedWhateverItsOrder(t *testing.T) {
	limits := Limits{Services: 1000, Slices: 1000, Frontends: 40, Backends: 60, BackendsPerService: 500}
	var texts []string
	for i := range 12 {
		name := fmt.Sprintf("flood%02d", i)
		texts = append(texts, serviceText("acme", name, fmt.Sprint("10.96.9.", i+1), 4),
			sliceText("acme", name, 4, fmt.Sprintf("10.244.9.%d", 2*i), fmt.Sprintf("10.244.9.%d", 2*i+1)))
	}
	texts = append(texts, serviceText("kube-system", "kube-dns", "10.96.0.10", 3),
		sliceText("kube-system", "kube-dns", 3, "10.244.0.2", "10.244.0.3"),
		serviceText("default", "kubernetes", "10.96.0.1", 1), serviceText("shop", "web", "10.96.0.9", 2),
		sliceText("shop", "web", 2, "10.244.0.9"))
	var want map[frontend.Key]string
	for try := range 5 {
		c := &clock{now: time.Unix(1e9, 0)}
		config := testConfig(c)
		config.Limits = limits
		dir := t.TempDir()
		o := &apiSource{running: start(t, config, dir, managed.SourceKubernetes)}
		o.Objects = o.running.Objects(managed.SourceKubernetes)
		order := rand.Perm(len(texts))
		for i, n := range order {
			// All objects have the same age, so the order of names decides.
			text := strings.Replace(texts[n], "metadata: {", "metadata: {creationTimestamp: '2026-01-01T00:00:00Z', ", 1)
			o.give(text)
			if i == len(order)/2 {
				if _, exceed := count(o.allFrontends(), "kube-system/"); exceed != 0 {
					t.Error("a service of the cluster has no place before the first levels")
				}
			}
		}
		o.complete()
		got := o.allFrontends()
		if want == nil {
			want = got
			for _, of := range []string{"kube-system/kube-dns", "default/kubernetes", "shop/web"} {
				if within, exceed := count(got, of); within == 0 || exceed != 0 {
					t.Errorf("%s has %d frontends, and %d that refuse", of, within, exceed)
				}
			}
			if !strings.Contains(got[frontend.Key{Addr: netip.MustParseAddr("10.96.0.10"), Port: 80, Protocol: frontend.TCP}],
				"10.244.0.2:8080 10.244.0.3:8080") {
				t.Error("the cluster's DNS has not all of its backends")
			}
		}
		if !maps.Equal(got, want) {
			t.Fatalf("try %d: %d frontends, want %d:\n%v\n%v", try, len(got), len(want), got, want)
		}
		o.stop()
		o.running = start(t, config, dir, managed.SourceKubernetes)
		if got := o.allFrontends(); !maps.Equal(got, want) {
			t.Fatalf("after a restart: %d frontends, want %d:\n%v\n%v", len(got), len(want), got, want)
		}
	}
}

// TestRemovedBackendsLeaveThoughNewOnesExceedTheShare: a rolling update in a tenant that uses its whole share.
// Removed pods must not stay backends, because pods of other namespaces may get their addresses.
func TestRemovedBackendsLeaveThoughNewOnesExceedTheShare(t *testing.T) {
	o := startShared(t, Limits{Services: 1000, Slices: 1000, Frontends: 1000, Backends: 10, BackendsPerService: 100})
	o.give(
		serviceText("shop", "web", "10.96.0.1", 1),
		sliceText("shop", "web", 1, "10.244.0.5", "10.244.0.6", "10.244.0.7"),
		serviceText("evil", "s", "10.96.1.1", 2),
		sliceText("evil", "s", 2, "10.244.9.1", "10.244.9.2", "10.244.9.3"),
	)
	o.complete()
	is := func(want string) {
		t.Helper()
		want = "10.96.0.1:80/tcp of shop/web:p0 inside" + want
		if got := o.servedAt("10.96.0.1"); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	is(" 10.244.0.5:8080 10.244.0.6:8080 10.244.0.7:8080")
	// Six backends replace three. Tenants may use nine units, which are then all in use, so only three of the six
	// backends are served.
	o.give(sliceText("shop", "web", 1,
		"10.244.0.15", "10.244.0.16", "10.244.0.17", "10.244.0.18", "10.244.0.19", "10.244.0.20"))
	is(" 10.244.0.15:8080 10.244.0.16:8080 10.244.0.17:8080")
	l, _, err := o.Reader().Get(t.Context(), service.Name{Namespace: "shop", Name: "web"})
	if err != nil || len(l.Notes) != 1 || !strings.HasPrefix(l.Notes[0], "ExceedsShare: 3 of 6 backends") {
		t.Errorf("notes %q, %v", l.Notes, err)
	}
	o.level()
	// Each service has four backends. The oldest service that needs a fifth gets it.
	is(" 10.244.0.15:8080 10.244.0.16:8080 10.244.0.17:8080 10.244.0.18:8080")
	o.remove(keyOf(service.KindSlice, "evil", "s-x"))
	o.level()
	is(" 10.244.0.15:8080 10.244.0.16:8080 10.244.0.17:8080 10.244.0.18:8080 10.244.0.19:8080 10.244.0.20:8080")
}

// TestLimitsAreThoseOfTheDatapath: if the capacity of the datapath's kernel is smaller than the configured limit,
// tenants share that capacity, in elements of its maps. For a datapath that does not report its capacity, the
// configured limit applies.
func TestLimitsAreThoseOfTheDatapath(t *testing.T) {
	o := startShared(t, Limits{Services: 1000, Slices: 1000, Frontends: 100, Backends: 1000, BackendsPerService: 500})
	for i := range 5 {
		o.give(serviceText("evil", fmt.Sprint("s", i), fmt.Sprint("10.96.1.", i+1), 10),
			sliceText("evil", fmt.Sprint("s", i), 10, fmt.Sprintf("10.244.9.%d", i+1)))
	}
	o.complete()
	connect := func(c *frontend.Capacity) *reader {
		t.Helper()
		s, err := o.Subscribers().Subscribe(t.Context(), Subscription{Name: "datapath", Enforces: true, Capacity: c})
		if err != nil {
			t.Fatal(err)
		}
		return &reader{Session: s, t: t, has: make(map[frontend.Key]string)}
	}
	is := func(what string, wantFrontends, wantBackends int) {
		t.Helper()
		o.level()
		all := o.allFrontends()
		within, _ := count(all, "evil/")
		backends := make(map[string]bool)
		for _, text := range all {
			for _, word := range strings.Fields(text) {
				if strings.HasPrefix(word, "10.244.") {
					backends[word] = true
				}
			}
		}
		if within != wantFrontends || len(backends) != wantBackends {
			t.Errorf("%s: %d frontends and %d backends, want %d and %d",
				what, within, len(backends), wantFrontends, wantBackends)
		}
	}
	is("without a datapath", 50, 50)
	// Tenants may use 36 of the 40 elements: each address with its first port needs two, and each other frontend one.
	// They may use 18 of 20 backends, because each needs two members.
	x := connect(&frontend.Capacity{Frontends: 40, Backends: 1000, Members: 40, BackendsPerList: 100})
	is("with a small datapath", 31, 18)
	st, err := o.Reader().Status(t.Context())
	if err != nil || len(st.Limits) != 4 ||
		st.Limits[0].Size != 40 || st.Limits[0].Asked != 55 || st.Limits[0].Used != 36 ||
		st.Limits[1].Size != 20 || st.Limits[0].Exceeding != 1 || st.Limits[0].System || st.ProblemCount != 2 {
		t.Errorf("the status has %+v, %+v, %v", st.Limits, st.Problems, err)
	}
	// A new service of another tenant gets everything it needs.
	o.give(serviceText("shop", "web", "10.96.0.1", 2), sliceText("shop", "web", 2, "10.244.0.5"))
	o.level()
	if within, exceed := count(o.allFrontends(), "shop/"); within != 2 || exceed != 0 {
		t.Errorf("a new service has %d frontends, %d refuse", within, exceed)
	}
	o.remove(keyOf(service.KindService, "shop", "web"), keyOf(service.KindSlice, "shop", "web-x"))
	x.Close()
	x = connect(&frontend.Capacity{Frontends: 1000, Backends: 1000, Members: 2000, BackendsPerList: 4})
	is("with lists of four backends", 50, 20)
	x.Close()
	connect(nil)
	is("with a datapath that does not report its capacity", 50, 50)
}

// TestServicesOfTheClusterThatHaveNoPlaceAreNamed: if services of the cluster itself get no capacity, the status
// names them, and the node is not ready.
func TestServicesOfTheClusterThatHaveNoPlaceAreNamed(t *testing.T) {
	o := startShared(t, Limits{Services: 1000, Slices: 1000, Frontends: 10, Backends: 1000, BackendsPerService: 500})
	o.give(serviceText("kube-system", "kube-dns", "10.96.0.10", 3))
	o.complete()
	if err := o.Reader().SystemRefused(t.Context()); err != nil {
		t.Errorf("everything is accepted: %v", err)
	}
	x := o.subscribe("datapath", [16]byte{}, 0)
	x.until(1)
	k := frontend.Key{Addr: netip.MustParseAddr("10.96.0.10"), Port: 81, Protocol: frontend.TCP}
	if err := x.Refuse(t.Context(), k, "no capacity"); err != nil {
		t.Fatal(err)
	}
	const want = "datapath does not enforce 10.96.0.10:81/TCP of service kube-system/kube-dns: no capacity"
	if err := o.Reader().SystemRefused(t.Context()); err == nil || err.Error() != want {
		t.Errorf("a refusal of the datapath: %v, want %s", err, want)
	}
	x.Close()
	o.give(serviceText("kube-system", "more", "10.96.0.11", 12))
	o.level()
	err := o.Reader().SystemRefused(t.Context())
	if err == nil || !strings.Contains(err.Error(), "exceed their share of the limit of frontends, 10") {
		t.Errorf("more than the limit: %v", err)
	}
	st, serr := o.Reader().Status(t.Context())
	if serr != nil || st.SystemRefused != err.Error() {
		t.Errorf("the status has %q, %v", st.SystemRefused, serr)
	}
}

// TestCallsBeyondTheShareAreRefused: objects of calls get only the capacity that the objects of the API server leave.
// They lose it if the API server gets more objects.
func TestCallsBeyondTheShareAreRefused(t *testing.T) {
	o := startShared(t, Limits{Services: 1000, Slices: 1000, Frontends: 100, Backends: 1000, BackendsPerService: 500})
	o.give(serviceText("a", "web", "10.96.0.1", 40))
	o.complete()
	text := serviceText("b", "mine", "10.96.0.2", 50)
	o.apply(text)
	_, err := o.Upsert(t.Context(), Request{Manifests: []byte(serviceText("c", "more", "10.96.0.3", 5))})
	if !errors.Is(err, failure.ErrLimit) || !strings.Contains(err.Error(), "service c/more needs") {
		t.Errorf("a call beyond the share: %v", err)
	}
	if within, exceed := count(o.allFrontends(), "c/more"); within+exceed != 0 {
		t.Errorf("a call that is refused has %d frontends", within+exceed)
	}
	o.give(serviceText("a", "later", "10.96.0.4", 20))
	o.level()
	all := o.allFrontends()
	if within, exceed := count(all, "a/later"); within != 20 || exceed != 0 {
		t.Errorf("a later service of the API server has %d frontends, %d refuse", within, exceed)
	}
	if within, _ := count(all, "b/mine"); within != 30 {
		t.Errorf("the service of the call has %d frontends, want the remaining 30", within)
	}
	// It may shrink.
	o.apply(serviceText("b", "mine", "10.96.0.2", 35))
	o.apply(serviceText("b", "mine", "10.96.0.2", 10))
}

// TestNamespacesOfOneTenantShare: namespaces with the same tenant label are one tenant. Levels are computed only
// after all Namespaces are listed.
func TestNamespacesOfOneTenantShare(t *testing.T) {
	c := &clock{now: time.Unix(1e9, 0)}
	config := testConfig(c)
	config.Limits.Frontends = 100
	tenants := &listedTenants{Tenants: shares.NewTenants(shares.Settings{})}
	config.Tenants = tenants
	o := &apiSource{running: start(t, config, t.TempDir(), managed.SourceKubernetes), clock: c}
	o.Objects = o.running.Objects(managed.SourceKubernetes)
	for i := range 8 {
		o.give(serviceText(fmt.Sprint("evil", i), "s", fmt.Sprint("10.96.1.", i+1), 20))
	}
	o.give(serviceText("shop", "web", "10.96.0.1", 40))
	o.complete()
	if within, _ := count(o.allFrontends(), "shop/web"); within > 11 {
		t.Errorf("before the Namespaces are listed a tenant has %d of 90", within)
	}
	st, err := o.Reader().Status(t.Context())
	if err != nil || !strings.Contains(fmt.Sprint(st.Problems), "the Namespaces could not be listed: forbidden") {
		t.Errorf("the status does not report why no shares are computed: %+v, %v", st.Problems, err)
	}
	if err := o.loop.Do(t.Context(), opOther, func() {
		for i := range 8 {
			tenants.Set(fmt.Sprint("evil", i), map[string]string{shares.DefaultTenantLabel: "evil"})
		}
		tenants.Set("shop", map[string]string{shares.DefaultTenantLabel: "shop"})
		tenants.complete = true
	}); err != nil {
		t.Fatal(err)
	}
	if err := o.TenantsChanged(t.Context()); err != nil {
		t.Fatal(err)
	}
	o.level()
	if within, exceed := count(o.allFrontends(), "shop/web"); within != 40 || exceed != 0 {
		t.Errorf("the other tenant has %d frontends of 40, %d refuse", within, exceed)
	}
	// The datapath still counts numbers in quarantine for the tenant.
	if err := o.loop.Do(t.Context(), opOther, func() {
		for _, f := range o.index.frontends(o.index.service(service.Name{Namespace: "evil0", Name: "s"})) {
			if f.Tenant != shares.Labelled("evil") {
				t.Errorf("%v is of %v", f.Key, f.Tenant)
			}
		}
	}); err != nil {
		t.Fatal(err)
	}
}

// listedTenants is a Tenants that gets its Namespaces only later.
type listedTenants struct {
	*shares.Tenants
	complete bool
}

func (l *listedTenants) Complete() bool { return l.complete }

func (l *listedTenants) Failure() error { return errors.New("forbidden") }

// TestDatapathThatSaysWhatItHoldsMovesNoFrontend: services have frontends before a datapath subscribes and reports
// its capacity. From then on, shares count elements of the datapath's maps, and the services keep their frontends.
// When the services are removed, no units stay in use.
func TestDatapathThatSaysWhatItHoldsMovesNoFrontend(t *testing.T) {
	o := startShared(t, Limits{Services: 1000, Slices: 1000, Frontends: 40, Backends: 1000, BackendsPerService: 500})
	var keys []service.ObjectKey
	for i := range 6 {
		name := fmt.Sprint("s", i)
		o.give(serviceText("evil", name, fmt.Sprint("10.96.1.", i+1), 10))
		keys = append(keys, keyOf(service.KindService, "evil", name))
	}
	o.complete()
	o.level()
	if _, err := o.Subscribers().Subscribe(t.Context(), Subscription{
		Name: "datapath", Enforces: true,
		Capacity: &frontend.Capacity{Frontends: 30, Backends: 1000, Members: 1000, BackendsPerList: 100},
	}); err != nil {
		t.Fatal(err)
	}
	o.level()
	for _, k := range keys {
		o.remove(k)
		o.level()
	}
	if all, n := o.allFrontends(), o.index.counts(); len(all) > 0 || n.frontends > 0 || n.contested > 0 {
		t.Errorf("without services: frontends %v, %d winners, %d contested", all, n.frontends, n.contested)
	}
}

// TestTablesCountForTheirTenant: a tenant requests more rendezvous tables than the datapath can hold. Its newest tables
// have fewer backends, or none, and another tenant keeps its tables.
func TestTablesCountForTheirTenant(t *testing.T) {
	const endpoints, limit = 20, 20000 // units
	o := startShared(t, Limits{
		Services: 1000, Slices: 1000, Frontends: 1000, Backends: limit, BackendsPerService: limit,
	})
	addresses := func(b int) (as []string) {
		for i := range endpoints {
			as = append(as, fmt.Sprintf("10.244.%d.%d", b, i+1))
		}
		return as
	}
	for i := range 40 {
		text := serviceText("evil", fmt.Sprint("s", i), fmt.Sprint("10.96.1.", i+1), 1)
		table := "metadata: {annotations: {sluice.io/load-balancing-algorithm: table}, "
		o.give(strings.Replace(text, "metadata: {", table, 1), sliceText("evil", fmt.Sprint("s", i), 1, addresses(i)...))
	}
	o.give(serviceText("shop", "web", "10.96.0.1", 1), sliceText("shop", "web", 1, addresses(100)...))
	o.complete()
	tables, backends := 0, 0
	for k, text := range o.allFrontends() {
		n := strings.Count(text, "10.244.")
		switch {
		case k.Addr == netip.MustParseAddr("10.96.0.1"):
			backends = n
		case strings.Contains(text, "by a table") && n > 16:
			tables++
		}
	}
	if backends != endpoints {
		t.Errorf("the other tenant has %d backends, want %d", backends, endpoints)
	}
	if most := limit * 9 / 10 / (68 * 17); tables == 0 || tables > most {
		t.Errorf("%d tables, want some and at most %d", tables, most)
	}
	st, err := o.Reader().Status(t.Context())
	if err != nil || st.Limits[1].Exceeding != 1 || st.Limits[1].Used > limit {
		t.Errorf("the status has %+v, %v", st.Limits, err)
	}
}

// TestServicesBeyondTheShareAreReported: each with the limit and what it lacks. The reason of a service changes only
// with what it lacks, so a tenant cannot change every report by each object. Tenants take turns.
func TestServicesBeyondTheShareAreReported(t *testing.T) {
	o := startShared(t, Limits{Services: 20, Slices: 40, Frontends: 100, Backends: 40, BackendsPerService: 30})
	reported := func(detailed int) (all []string) {
		t.Helper()
		list, err := o.Reader().Exceeding(t.Context(), detailed)
		if err != nil {
			t.Fatal(err)
		}
		for _, x := range list {
			all = append(all, fmt.Sprintf("%s: %s: %s", x.Name, x.Limit, x.Reason))
		}
		return all
	}
	for i := range 12 {
		o.give(serviceText("evil", fmt.Sprintf("s%02d", i), fmt.Sprint("10.96.1.", i+1), 10))
	}
	o.give(serviceText("shop", "web", "10.96.0.1", 1), sliceText("shop", "web", 1, "10.244.0.5"))
	o.complete()
	o.level()
	const oldest = "evil/s08: frontends: 4 frontends refuse connections (limits.frontends)"
	if all := reported(2); len(all) != 4 || all[0] != oldest ||
		!strings.HasPrefix(all[1], "evil/s09: frontends: 9 frontends") || all[3] != "evil/s11: frontends: " {
		t.Errorf("frontends: %q", all)
	}
	for i := range 12 {
		o.give(serviceText("evil", fmt.Sprintf("t%02d", i), fmt.Sprint("10.96.2.", i+1), 1))
	}
	o.give(serviceText("also", "a", "10.96.3.1", 80), serviceText("also", "b", "10.96.3.2", 80))
	o.level()
	all := reported(100)
	first, second := strings.HasPrefix(all[0], "also/"), strings.HasPrefix(all[1], "also/")
	if first == second {
		t.Errorf("two tenants have %q, want that they take turns", all)
	}
	if !slices.ContainsFunc(all, func(text string) bool {
		return strings.HasPrefix(text, "evil/t11: services: ") && strings.HasSuffix(text, "(limits.services)")
	}) {
		t.Errorf("a Service beyond limits.services is missing: %q", all)
	}
	for i := range 12 {
		o.remove(keyOf(service.KindService, "evil", fmt.Sprintf("s%02d", i)),
			keyOf(service.KindService, "evil", fmt.Sprintf("t%02d", i)))
	}
	o.remove(keyOf(service.KindService, "also", "a"), keyOf(service.KindService, "also", "b"))
	o.level()
	if all := reported(100); len(all) != 0 {
		t.Errorf("within the share: %q", all)
	}
}
