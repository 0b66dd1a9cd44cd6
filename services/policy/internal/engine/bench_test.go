// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package engine

import (
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/policy/internal/manifest"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
	"github.com/sluice-net/sluice/services/policy/internal/table"
	"github.com/sluice-net/sluice/services/policy/internal/test/synthetic"
)

var shapes = []struct {
	name string
	synthetic.Shape
}{
	{"2000-policies-25-namespaces", synthetic.Shape{Namespaces: 200, Apps: 50, Policies: 2000, Subjects: 500, SubjectNamespaces: 25}},
	{"2000-policies-random-pods", synthetic.Shape{Namespaces: 200, Apps: 50, Policies: 2000, Subjects: 500}},
	{"10000-policies-25-namespaces", synthetic.Shape{Namespaces: 200, Apps: 50, Policies: 10000, Subjects: 500, SubjectNamespaces: 25}},
	{"10000-policies-random-pods", synthetic.Shape{Namespaces: 200, Apps: 50, Policies: 10000, Subjects: 500}},
}

var options = rule.Options{Cluster: synthetic.Name, LocalClusterOnly: true}

func decodeAll(t testing.TB, manifests []string) []policy.Object {
	t.Helper()
	var out []policy.Object
	for _, m := range manifests {
		out = append(out, decodeOne(t, m))
	}
	return out
}

func decodeOne(t testing.TB, m string) policy.Object {
	t.Helper()
	docs, err := manifest.Parse([]byte(m))
	if err != nil {
		t.Fatalf("%v\n%s", err, m)
	}
	o, err := policy.Decode(docs[0], options)
	if err != nil {
		t.Fatalf("%v\n%s", err, m)
	}
	return o
}

func makeCluster(t testing.TB, s synthetic.Shape) (*synthetic.Cluster, Change) {
	t.Helper()
	c, err := synthetic.Make(s)
	if err != nil {
		t.Fatal(err)
	}
	return c, Change{UpsertPolicies: decodeAll(t, c.Manifests), AddIdentities: c.Identities, AddSubjects: c.Subjects}
}

func loaded(t testing.TB, s synthetic.Shape) *Engine {
	t.Helper()
	_, change := makeCluster(t, s)
	e := New(Config{Cluster: synthetic.Name, AllowHost: true})
	if err := e.Apply(change); err != nil {
		t.Fatal(err)
	}
	return e
}

func BenchmarkDecode2000Manifests(b *testing.B) {
	c, err := synthetic.Make(shapes[0].Shape)
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		decodeAll(b, c.Manifests)
	}
}

func BenchmarkFromScratch(b *testing.B) {
	for _, s := range shapes {
		b.Run(s.name, func(b *testing.B) {
			_, change := makeCluster(b, s.Shape)
			var e *Engine
			for b.Loop() {
				e = New(Config{Cluster: synthetic.Name, AllowHost: true})
				if err := e.Apply(change); err != nil {
					b.Fatal(err)
				}
			}
			size := e.Size()
			b.ReportMetric(float64(size.Tables), "tables")
			b.ReportMetric(float64(size.IdentityClasses), "nodeclasses")
			b.ReportMetric(float64(size.PeerRows), "peerrows")
			b.ReportMetric(float64(size.Intervals), "intervals")
		})
	}
}

// known returns an identity that the selectors of policies cannot distinguish from existing identities: another
// service account of an app that exists.
func known(t testing.TB, s synthetic.Shape, i int) peer.Identity {
	t.Helper()
	id, err := synthetic.Identity(s, i%s.Namespaces, i%s.Apps)
	if err != nil {
		t.Fatal(err)
	}
	id.Number = identity.Numeric(40000 + i)
	return id
}

func BenchmarkAddIdentity(b *testing.B) {
	for _, s := range shapes {
		b.Run(s.name, func(b *testing.B) {
			e := loaded(b, s.Shape)
			var times []time.Duration
			i := 0
			for b.Loop() {
				id := known(b, s.Shape, i%2000)
				i++
				start := time.Now()
				if err := e.Apply(Change{AddIdentities: []peer.Identity{id}}); err != nil {
					b.Fatal(err)
				}
				times = append(times, time.Since(start))
				if err := e.Apply(Change{RemoveIdentities: []identity.Numeric{id.Number}}); err != nil {
					b.Fatal(err)
				}
			}
			slices.Sort(times)
			b.ReportMetric(float64(times[len(times)/2].Nanoseconds()), "ns-add-p50")
			b.ReportMetric(float64(times[len(times)*99/100].Nanoseconds()), "ns-add-p99")
		})
	}
}

// BenchmarkAddNewKind adds identities with unique named ports, so that each needs a new identity class.
func BenchmarkAddNewKind(b *testing.B) {
	for _, s := range shapes {
		b.Run(s.name, func(b *testing.B) {
			e := loaded(b, s.Shape)
			before := e.Counters()
			i := 0
			for b.Loop() {
				id, err := synthetic.Identity(s.Shape, i%200, i%50)
				if err != nil {
					b.Fatal(err)
				}
				l := label.Label{Source: label.SourceGenerated, Key: workload.KeyNamedPorts, Value: fmt.Sprintf("p%d.TCP.80", i%5000)}
				if id, err = peer.New(50000, label.NewSet(append(slices.Clone(id.Labels.All()), l)...)); err != nil {
					b.Fatal(err)
				}
				i++
				if err := e.Apply(Change{AddIdentities: []peer.Identity{id}}); err != nil {
					b.Fatal(err)
				}
				if err := e.Apply(Change{RemoveIdentities: []identity.Numeric{id.Number}}); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(e.Counters().PeerRows-before.PeerRows)/float64(i), "rows/op")
		})
	}
}

func benchmarkPolicy(b *testing.B, spec string) {
	for _, s := range shapes {
		b.Run(s.name, func(b *testing.B) {
			e := loaded(b, s.Shape)
			var versions []policy.Object
			for _, p := range []string{"80", "81"} {
				versions = append(versions, decodeOne(b, strings.ReplaceAll(spec, "PORT", p)))
			}
			before := e.Counters()
			i := 0
			for b.Loop() {
				if err := e.Apply(Change{UpsertPolicies: versions[i%2 : i%2+1]}); err != nil {
					b.Fatal(err)
				}
				i++
			}
			b.ReportMetric(float64(e.Counters().Tables-before.Tables)/float64(i), "tables/op")
			b.ReportMetric(float64(e.Counters().Binds-before.Binds)/float64(i), "binds/op")
		})
	}
}

func BenchmarkChangePolicyOfOneSubject(b *testing.B) {
	benchmarkPolicy(b, `{apiVersion: cilium.io/v2, kind: CiliumNetworkPolicy, metadata: {name: changed, namespace: ns-001},
spec: {endpointSelector: {matchLabels: {app: app-01}}, ingress: [{fromEndpoints: [{matchLabels: {app: app-02}}], toPorts: [{ports: [{port: "PORT", protocol: TCP}]}]}]}}`)
}

func BenchmarkChangePolicyOfTenSubjects(b *testing.B) {
	benchmarkPolicy(b, `{apiVersion: cilium.io/v2, kind: CiliumNetworkPolicy, metadata: {name: changed, namespace: ns-001},
spec: {endpointSelector: {matchExpressions: [{key: app, operator: In, values: [app-00, app-01, app-02, app-03, app-04, app-05, app-06, app-07, app-08, app-09]}]},
 ingress: [{fromEndpoints: [{matchLabels: {app: app-02}}], toPorts: [{ports: [{port: "PORT", protocol: TCP}]}]}]}}`)
}

func BenchmarkChangePolicyOfAllSubjects(b *testing.B) {
	benchmarkPolicy(b, `{apiVersion: cilium.io/v2, kind: CiliumClusterwideNetworkPolicy, metadata: {name: changed},
spec: {endpointSelector: {}, ingress: [{fromEndpoints: [{matchLabels: {app: app-02}}], toPorts: [{ports: [{port: "PORT", protocol: TCP}]}]}]}}`)
}

func BenchmarkRelabelNamespaceOf50Pods(b *testing.B) {
	s := shapes[0].Shape
	e := loaded(b, s)
	var old, changed []peer.Identity
	var numbers, newNumbers []identity.Numeric
	for app := range s.Apps {
		id, err := synthetic.Identity(s, 100, app)
		if err != nil {
			b.Fatal(err)
		}
		old = append(old, id)
		numbers = append(numbers, id.Number)
		id.Number += 30000
		changed = append(changed, id)
		newNumbers = append(newNumbers, id.Number)
	}
	for b.Loop() {
		if err := e.Apply(Change{RemoveIdentities: numbers, AddIdentities: changed}); err != nil {
			b.Fatal(err)
		}
		if err := e.Apply(Change{RemoveIdentities: newNumbers, AddIdentities: old}); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkLearnAddress(b *testing.B) {
	e := loaded(b, shapes[0].Shape)
	if err := e.Apply(Change{UpsertPolicies: []policy.Object{decodeOne(b, `{apiVersion: cilium.io/v2, kind: CiliumNetworkPolicy,
metadata: {name: names, namespace: ns-001}, spec: {endpointSelector: {matchLabels: {app: app-01}}, egress: [{toFQDNs: [{matchPattern: "*.example.com"}]}]}}`)}}); err != nil {
		b.Fatal(err)
	}
	i := 0
	for b.Loop() {
		a := netip.AddrFrom4([4]byte{198, 51, byte(i % 100), 7})
		n := []Name{{"a.example.com", []netip.Addr{a}}}
		i++
		if err := e.Apply(Change{Learn: n}); err != nil {
			b.Fatal(err)
		}
		if err := e.Apply(Change{Forget: n}); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkLearnAddressAmong5000Prefixes learns an address for a table that also has many prefixes.
func BenchmarkLearnAddressAmong5000Prefixes(b *testing.B) {
	id, err := synthetic.Identity(shapes[0].Shape, 1, 1)
	if err != nil {
		b.Fatal(err)
	}
	e := New(Config{Cluster: synthetic.Name})
	if err := e.Apply(Change{AddIdentities: []peer.Identity{id}, AddSubjects: []identity.Numeric{id.Number}, UpsertPolicies: []policy.Object{
		prefixes(b), decodeOne(b, `{apiVersion: cilium.io/v2, kind: CiliumNetworkPolicy,
metadata: {name: names, namespace: ns-001}, spec: {endpointSelector: {}, egress: [{toFQDNs: [{matchPattern: "*.example.com"}]}]}}`),
	}}); err != nil {
		b.Fatal(err)
	}
	i := 0
	for b.Loop() {
		n := []Name{{"a.example.com", []netip.Addr{netip.AddrFrom4([4]byte{198, 51, byte(i % 100), 7})}}}
		i++
		if err := e.Apply(Change{Learn: n}); err != nil {
			b.Fatal(err)
		}
		if err := e.Apply(Change{Forget: n}); err != nil {
			b.Fatal(err)
		}
	}
}

// prefixes returns a policy with 5,000 prefixes with one exception each.
func prefixes(b *testing.B) policy.Object {
	b.Helper()
	var list []string
	for i := range 5000 {
		list = append(list, fmt.Sprintf(`{cidr: 10.%d.%d.0/24, except: [10.%d.%d.%d/32]}`, i/250, i%250, i/250, i%250, 1+i%200))
	}
	return decodeOne(b, `{apiVersion: cilium.io/v2, kind: CiliumNetworkPolicy, metadata: {name: blocks, namespace: ns-001},
spec: {endpointSelector: {}, egress: [{toCIDRSet: [`+strings.Join(list, ",")+`]}]}}`)
}

func BenchmarkPolicyWith5000PrefixesWithHoles(b *testing.B) {
	id, err := synthetic.Identity(shapes[0].Shape, 1, 1)
	if err != nil {
		b.Fatal(err)
	}
	o := prefixes(b)
	var e *Engine
	for b.Loop() {
		e = New(Config{Cluster: synthetic.Name})
		if err := e.Apply(Change{AddIdentities: []peer.Identity{id}, AddSubjects: []identity.Numeric{id.Number}, UpsertPolicies: []policy.Object{o}}); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(e.Size().Prefixes), "prefixes")
	b.ReportMetric(float64(e.Size().Classes), "classes")
}

func BenchmarkLookup(b *testing.B) {
	e := loaded(b, shapes[0].Shape)
	var t *table.Table
	for n := range e.subjects {
		if x, _ := e.Bound(n, policytable.Ingress); x.Table != nil && x.Table.Prefixes.Len() > 0 {
			t = x.Table
		}
	}
	w := e.Entry(identity.MinCluster + 77)
	a := netip.MustParseAddr("10.0.0.1")
	for b.Loop() {
		t.Lookup(w, a, 6<<16|8080)
	}
}

// TestALoadedEngineStaysWithinItsMemory: a loaded engine and the decoded policies fit into the memory budget of a node.
func TestALoadedEngineStaysWithinItsMemory(t *testing.T) {
	for _, s := range shapes {
		// The race detector makes the large shape take 15 s.
		if s.SubjectNamespaces == 0 || s.Policies > 2000 && slower > 1 {
			continue
		}
		limit := uint64(64 << 20)
		if s.Policies > 2000 {
			limit = 150 << 20
		}
		e := loaded(t, s.Shape)
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		t.Logf("%s: heap in use %d MB, from the system %d MB, %+v", s.name, m.HeapInuse>>20, m.Sys>>20, e.Size())
		if m.HeapInuse > limit {
			t.Errorf("%s: heap in use is %d MB, more than %d", s.name, m.HeapInuse>>20, limit>>20)
		}
		runtime.KeepAlive(e)
	}
}
