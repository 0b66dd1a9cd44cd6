// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package identity

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

func mustLabels(t testing.TB, labels ...Label) Labels {
	t.Helper()
	set, err := NewLabels(labels...)
	if err != nil {
		t.Fatalf("NewLabels(%v): %v", labels, err)
	}
	return set
}

func TestScopesCoverExactlyTheirRanges(t *testing.T) {
	for n, want := range map[Numeric]Scope{
		0: ScopeInvalid, 1: ScopeReserved, 255: ScopeReserved, 256: ScopeCluster, 65_535: ScopeCluster,
		65_536: ScopeInvalid, 0xFEFFFF: ScopeInvalid, 0xFF0000: ScopeNodeLocal, 0xFF0FFF: ScopeNodeLocal,
		0xFF1000: ScopeInvalid, 0xFFFFFF: ScopeInvalid, 0x1000000: ScopeInvalid,
	} {
		if got := n.Scope(); got != want {
			t.Errorf("%#x: scope %s, want %s", uint32(n), got, want)
		}
	}
}

func TestReservedIdentitiesAreThoseOfTheTable(t *testing.T) {
	want := []string{
		"1{reserved:host=;}", "2{reserved:world=;}", "3{reserved:unmanaged=;}", "4{reserved:health=;}", "5{reserved:init=;}",
		"6{reserved:remote-node=;}", "7{reserved:kube-apiserver=;reserved:remote-node=;}", "8{reserved:ingress=;}",
		"9{reserved:world-ipv4=;}", "10{reserved:world-ipv6=;}", "255{reserved:unknown-in-cluster=;}",
	}
	var got []string
	for _, id := range Reserved() {
		got = append(got, id.String())
		if id.Number.Scope() != ScopeReserved {
			t.Errorf("%s is not in the reserved range", id)
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("reserved identities\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func TestEqualSetsHaveEqualTexts(t *testing.T) {
	labels := []Label{
		{"k8s", "app", "web"}, {"k8s", "a;b=c\\", "x=y;z\\"}, {"cni", "app", "web"}, {"k8s", "empty", ""}, {"k8s", "with:colon", "v:w"}, {"k8s", "ключ", "знач"},
	}
	want := mustLabels(t, labels...)
	for range 50 {
		shuffled := slices.Clone(labels)
		rand.Shuffle(len(shuffled), func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
		shuffled = append(shuffled, shuffled[0]) // a duplicate changes nothing
		if got := mustLabels(t, shuffled...); got.Text() != want.Text() || got.Hash() != want.Hash() {
			t.Fatalf("%v gives %q, want %q", shuffled, got, want)
		}
	}
	if want.Text() != `cni:app=web;k8s:a\;b\=c\\=x=y\;z\\;k8s:app=web;k8s:empty=;k8s:with:colon=v:w;k8s:ключ=знач;` {
		t.Errorf("text is %s", want)
	}
	parsed, err := ParseLabels(want.Text())
	if err != nil || !slices.Equal(parsed.List(), want.List()) {
		t.Errorf("ParseLabels(%q) = %v, %v", want, parsed.List(), err)
	}
}

func TestDifferentSetsHaveDifferentTexts(t *testing.T) {
	sets := []Labels{
		mustLabels(t, Label{"k8s", "a", "b;k8s:c=d"}), mustLabels(t, Label{"k8s", "a", "b"}, Label{"k8s", "c", "d"}),
		mustLabels(t, Label{"k8s", "a=b", "c"}), mustLabels(t, Label{"k8s", "a", "b=c"}),
		mustLabels(t, Label{"k8s", "a", `\`}), mustLabels(t, Label{"k8s", "a", `\\`}),
	}
	for i, a := range sets {
		for _, b := range sets[:i] {
			if a.Text() == b.Text() {
				t.Errorf("%v and %v have the text %q", a.List(), b.List(), a)
			}
		}
	}
}

func TestBadLabelsAreRefusedWithTheField(t *testing.T) {
	good := Label{"k8s", "app", "web"}
	many := make([]Label, MaxLabels+1)
	for i := range many {
		many[i] = Label{"k8s", fmt.Sprint("k", i), ""}
	}
	large := make([]Label, 100)
	for i := range large {
		large[i] = Label{"k8s", fmt.Sprint("k", i), strings.Repeat("v", MaxValue)}
	}
	for _, c := range []struct {
		name   string
		labels []Label
		field  string
	}{
		{"none", nil, "labels"},
		{"no source", []Label{good, {"", "a", "b"}}, "labels[1].source"},
		{"upper case source", []Label{{"K8s", "a", "b"}}, "labels[0].source"},
		{"long source", []Label{{strings.Repeat("a", 64), "a", "b"}}, "labels[0].source"},
		{"no key", []Label{good, {"k8s", "", "b"}}, "labels[1].key"},
		{"long key", []Label{{"k8s", strings.Repeat("k", MaxKey+1), ""}}, "labels[0].key"},
		{"newline", []Label{{"k8s", "a\nb", ""}}, "labels[0].key"},
		{"long value", []Label{{"k8s", "a", strings.Repeat("v", MaxValue+1)}}, "labels[0].value"},
		{"broken UTF-8", []Label{{"k8s", "a", "\xff"}}, "labels[0].value"},
		{"NUL", []Label{{"k8s", "a", "\x00"}}, "labels[0].value"},
		{"two values", []Label{{"k8s", "app", "b"}, {"k8s", "app", "c"}}, "labels[1].key"},
		{"too many", many, "labels"},
		{"too large", large, "labels"},
	} {
		_, err := NewLabels(c.labels...)
		var e *LabelError
		if !errors.As(err, &e) || e.Field() != c.field || !errors.Is(err, ErrLabels) {
			t.Errorf("%s: error %v, want one about %s", c.name, err, c.field)
		}
	}
}

func TestTextThatIsNotCanonicalIsRefused(t *testing.T) {
	for _, text := range []string{
		"", "k8s", "k8s:", "k8s:a", "k8s:a=b", "a=b;", "k8s:b=;k8s:a=;", "k8s:a=;k8s:a=;", `k8s:a=\b;`, `k8s:a=b\=c;`, `k8s:a=b\`, "K8s:a=b;", "k8s:=b;", "k8s:a=b;;",
	} {
		if set, err := ParseLabels(text); err == nil {
			t.Errorf("ParseLabels(%q) = %q, want an error", text, set)
		}
	}
}

func TestCallersMayNotUseOurSources(t *testing.T) {
	for source, ok := range map[string]bool{
		"k8s": true, "cni": true, "nomad": true, "reserved": false, "generated": false, "cidr": false, "cidrgroup": false,
		"fqdn": false, "node": false, "any": false, "all": false, "unspec": false,
	} {
		_, err := Workload(Filter{}, []Label{{"cni", "a", ""}, {source, "host", ""}}, nil)
		var e *LabelError
		if ok != (err == nil) || !ok && (!errors.As(err, &e) || e.Field() != "labels[1].source") {
			t.Errorf("source %s: error %v", source, err)
		}
	}
}

// Selectors without a source match every source, so facts of Kubernetes under
// another source would count as facts.
func TestDerivedKeysAreOfKubernetesAndFitTogether(t *testing.T) {
	namespace := Label{"k8s", "io.kubernetes.pod.namespace", "shop"}
	const name = "io.cilium.k8s.namespace.labels.kubernetes.io/metadata.name"
	for _, c := range []struct {
		labels []Label
		field  string // empty: accepted
	}{
		{[]Label{namespace, {"k8s", name, "shop"}, {"k8s", "io.cilium.k8s.policy.serviceaccount", "admin"}}, ""},
		{[]Label{{"k8s", "io.cilium.k8s.policy.cluster", "one"}, namespace}, ""},
		{[]Label{{"cni", "io.kubernetes.container.name", "x"}}, ""},
		{[]Label{{"cni", "io.kubernetes.pod.namespace", "shop"}}, "labels[0].key"},
		{[]Label{namespace, {"cni", "io.kubernetes.pod.namespace", "kube-system"}}, "labels[1].key"},
		{[]Label{namespace, {"nomad", "io.cilium.k8s.policy.serviceaccount", "admin"}}, "labels[1].key"},
		{[]Label{{"k8s", "io.cilium.k8s.policy.serviceaccount", "admin"}}, "labels[0].key"},
		{[]Label{{"k8s", "app", "x"}, {"k8s", name, "shop"}}, "labels[1].key"},
		{[]Label{{"k8s", name, "monitoring"}, namespace}, "labels[0].value"},
	} {
		_, err := Workload(Filter{}, c.labels, nil)
		var e *LabelError
		if (err == nil) != (c.field == "") || err != nil && (!errors.As(err, &e) || e.Field() != c.field) {
			t.Errorf("%v: %v, want an error about %q", c.labels, err, c.field)
		}
	}
}

func TestDefaultFilterKeepsWhatPoliciesSelect(t *testing.T) {
	f, err := NewFilter(nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	for key, keep := range map[string]bool{
		"app": true, "tier": true, "app.kubernetes.io/name": true, "example.com/team": true,
		"io.kubernetes.pod.namespace": true, "io.cilium.k8s.namespace.labels.team": true, "io.cilium.k8s.policy.serviceaccount": true,
		"io.kubernetes.pod.name": false, "io.kubernetes.pod.uid": false, "pod-template-hash": false, "controller-revision-hash": false,
		"pod-template-generation": false, "statefulset.kubernetes.io/pod-name": false, "apps.kubernetes.io/pod-index": false,
		"batch.kubernetes.io/job-completion-index": false, "batch.kubernetes.io/controller-uid": false, "controller-uid": false,
		"kubernetes.io/config.source": false, "topology.k8s.io/zone": false, "annotation.x": false,
		"notkubernetes.io/x": true, "kubernetes.io": true,
	} {
		for _, source := range []string{SourceKubernetes, SourceCNI} {
			if got := f.Keeps(Label{source, key, "v"}); got != keep {
				t.Errorf("%s:%s kept: %t, want %t", source, key, got, keep)
			}
		}
	}
}

func TestConfiguredRulesBeatDefaultsOfTheSameLength(t *testing.T) {
	f, err := NewFilter([]string{"k8s:statefulset.kubernetes.io/pod-name", "pod-template-hash"}, []string{"k8s:app.kubernetes.io/version", "team", "*.corp.example"})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		label Label
		keep  bool
	}{
		{Label{"k8s", "statefulset.kubernetes.io/pod-name", "x"}, true},
		{Label{"cni", "statefulset.kubernetes.io/pod-name", "x"}, false},
		{Label{"k8s", "pod-template-hash", "x"}, true},
		{Label{"k8s", "app.kubernetes.io/version", "x"}, false},
		{Label{"k8s", "app.kubernetes.io/name", "x"}, true},
		{Label{"k8s", "team", "x"}, false},
		{Label{"k8s", "a.corp.example/x", "x"}, false},
		{Label{"k8s", "corp.example/x", "x"}, true},
	} {
		if got := f.Keeps(c.label); got != c.keep {
			t.Errorf("%s kept: %t, want %t", c.label.Name(), got, c.keep)
		}
	}
}

func TestBadFilterRulesAreRefused(t *testing.T) {
	for _, c := range []struct{ include, exclude []string }{
		{[]string{""}, nil}, {nil, []string{"k8s:"}}, {nil, []string{"*."}}, {nil, []string{"Bad Source:x"}}, {[]string{"a"}, []string{"b", "a"}},
	} {
		if _, err := NewFilter(c.include, c.exclude); err == nil {
			t.Errorf("include %q exclude %q is accepted", c.include, c.exclude)
		}
	}
}

func TestNamedPortsAreAHiddenPartOfTheSet(t *testing.T) {
	labels := []Label{{"cni", "app", "web"}}
	without, err := Workload(Filter{}, labels, nil)
	if err != nil {
		t.Fatal(err)
	}
	a, err := Workload(Filter{}, labels, []NamedPort{{"http", 80, TCP}, {"dns", 53, UDP}, {"http", 80, TCP}})
	if err != nil {
		t.Fatal(err)
	}
	b, err := Workload(Filter{}, labels, []NamedPort{{"dns", 53, UDP}, {"http", 80, TCP}})
	if err != nil {
		t.Fatal(err)
	}
	if a.Text() != "cni:app=web;generated:named-ports=dns.UDP.53_http.TCP.80;" || a.Text() != b.Text() || a.Text() == without.Text() {
		t.Errorf("sets are %q, %q, without ports %q", a, b, without)
	}
	for _, bad := range []NamedPort{{"", 80, TCP}, {"HTTP", 80, TCP}, {"name-of-sixteen-", 80, TCP}, {"http", 0, TCP}, {"http", 80, "ICMP"}} {
		if _, err := Workload(Filter{}, labels, []NamedPort{{"ok", 1, TCP}, bad}); !errors.Is(err, ErrNamedPort) || !strings.Contains(err.Error(), "named_ports[1]") {
			t.Errorf("port %v: error %v", bad, err)
		}
	}
}

func TestWorkloadWithoutLabelsHasASet(t *testing.T) {
	f, err := NewFilter(nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, labels := range [][]Label{nil, {{"k8s", "pod-template-hash", "5d"}}} {
		set, err := Workload(f, labels, nil)
		if err != nil || set.Text() != "generated:no-labels=;" {
			t.Errorf("%v: set %q, error %v", labels, set, err)
		}
	}
}

func TestFieldOfABadLabelCountsTheCallersList(t *testing.T) {
	f, err := NewFilter(nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	_, err = Workload(f, []Label{{"k8s", "pod-template-hash", "1"}, {"k8s", "app", "a"}, {"k8s", "app", "b"}}, nil)
	var e *LabelError
	if !errors.As(err, &e) || e.Field() != "labels[2].key" {
		t.Errorf("error %v, want one about labels[2].key", err)
	}
}

func TestTopKeysCountValuesAndLeaveOutHiddenLabels(t *testing.T) {
	var sets []Labels
	for i := range 5 {
		sets = append(sets, mustLabels(t, Label{"k8s", "id", fmt.Sprint(i)}, Label{"k8s", "app", fmt.Sprint(i % 2)},
			Label{"generated", KeyNamedPorts, fmt.Sprint(i)}, Label{"k8s", "b", "1"}))
	}
	got := TopKeys(slices.Values(sets), 2)
	if want := []KeyCount{{"k8s:id", 5}, {"k8s:app", 2}}; !slices.Equal(got, want) {
		t.Errorf("top keys %v, want %v", got, want)
	}
}

func FuzzLabelsTextRoundTrips(f *testing.F) {
	f.Add("k8s:app=web;")
	f.Add(`cni:a\=b\;=c\\;k8s:x=y=z;`)
	f.Add("k8s:a=;k8s:b=;")
	f.Fuzz(func(t *testing.T, text string) {
		set, err := ParseLabels(text)
		if err != nil {
			return
		}
		if set.Text() != text {
			t.Fatalf("ParseLabels(%q) has the text %q", text, set)
		}
		again, err := NewLabels(set.List()...)
		if err != nil || again.Text() != text {
			t.Fatalf("labels of %q give %q, %v", text, again, err)
		}
	})
}

func FuzzLabelsFromAnything(f *testing.F) {
	f.Add("k8s", "app", "web", "cni", "a=b;", `c\`)
	f.Add("", "", "", "reserved", "host", "\x00")
	f.Fuzz(func(t *testing.T, s1, k1, v1, s2, k2, v2 string) {
		a, b := Label{s1, k1, v1}, Label{s2, k2, v2}
		x, errX := NewLabels(a, b)
		y, errY := NewLabels(b, a, b)
		if (errX == nil) != (errY == nil) || x.Text() != y.Text() {
			t.Fatalf("order matters: %q %v, %q %v", x, errX, y, errY)
		}
		if errX != nil {
			return
		}
		if !slices.IsSortedFunc(x.List(), Label.Compare) {
			t.Fatalf("%v is not sorted", x.List())
		}
		back, err := ParseLabels(x.Text())
		if err != nil || !slices.Equal(back.List(), x.List()) {
			t.Fatalf("%q parses to %v, %v, want %v", x, back.List(), err, x.List())
		}
	})
}
