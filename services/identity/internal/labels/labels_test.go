// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package labels

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/workload"
)

func of(source, key, value string) label.Label {
	return label.Label{Source: source, Key: key, Value: value}
}

func TestCallersMayNotUseOurSources(t *testing.T) {
	for source, ok := range map[string]bool{
		"k8s": true, "cni": true, "nomad": true, "reserved": false, "generated": false, "cidr": false, "cidrgroup": false,
		"fqdn": false, "node": false, "any": false, "all": false, "unspec": false,
	} {
		_, err := Workload(Filter{}, []label.Label{of("cni", "a", ""), of(source, "host", "")}, nil)
		var e *label.Error
		if ok != (err == nil) || !ok && (!errors.As(err, &e) || e.Field() != "labels[1].source") {
			t.Errorf("source %s: error %v", source, err)
		}
	}
}

// TestDerivedKeysAreOfKubernetesAndFitTogether: selectors without a source match every source, so labels with the keys
// of derived labels must have the source of Kubernetes.
func TestDerivedKeysAreOfKubernetesAndFitTogether(t *testing.T) {
	namespace := of("k8s", "io.kubernetes.pod.namespace", "shop")
	const name = "io.cilium.k8s.namespace.labels.kubernetes.io/metadata.name"
	for _, c := range []struct {
		labels []label.Label
		field  string // empty: accepted
	}{
		{[]label.Label{namespace, of("k8s", name, "shop"), of("k8s", "io.cilium.k8s.policy.serviceaccount", "admin")}, ""},
		{[]label.Label{of("k8s", "io.cilium.k8s.policy.cluster", "one"), namespace}, ""},
		{[]label.Label{of("cni", "io.kubernetes.container.name", "x")}, ""},
		{[]label.Label{of("cni", "io.kubernetes.pod.namespace", "shop")}, "labels[0].key"},
		{[]label.Label{namespace, of("cni", "io.kubernetes.pod.namespace", "kube-system")}, "labels[1].key"},
		{[]label.Label{namespace, of("nomad", "io.cilium.k8s.policy.serviceaccount", "admin")}, "labels[1].key"},
		{[]label.Label{of("k8s", "io.cilium.k8s.policy.serviceaccount", "admin")}, "labels[0].key"},
		{[]label.Label{of("k8s", "app", "x"), of("k8s", name, "shop")}, "labels[1].key"},
		{[]label.Label{of("k8s", name, "monitoring"), namespace}, "labels[0].value"},
	} {
		_, err := Workload(Filter{}, c.labels, nil)
		var e *label.Error
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
		for _, source := range []string{label.SourceKubernetes, label.SourceCNI} {
			if got := f.Keeps(of(source, key, "v")); got != keep {
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
		label label.Label
		keep  bool
	}{
		{of("k8s", "statefulset.kubernetes.io/pod-name", "x"), true},
		{of("cni", "statefulset.kubernetes.io/pod-name", "x"), false},
		{of("k8s", "pod-template-hash", "x"), true},
		{of("k8s", "app.kubernetes.io/version", "x"), false},
		{of("k8s", "app.kubernetes.io/name", "x"), true},
		{of("k8s", "team", "x"), false},
		{of("k8s", "a.corp.example/x", "x"), false},
		{of("k8s", "corp.example/x", "x"), true},
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
	http := workload.NamedPort{Name: "http", Port: 80, Protocol: workload.TCP}
	dns := workload.NamedPort{Name: "dns", Port: 53, Protocol: workload.UDP}
	labels := []label.Label{of("cni", "app", "web")}
	without, err := Workload(Filter{}, labels, nil)
	if err != nil {
		t.Fatal(err)
	}
	a, err := Workload(Filter{}, labels, []workload.NamedPort{http, dns, http})
	if err != nil {
		t.Fatal(err)
	}
	b, err := Workload(Filter{}, labels, []workload.NamedPort{dns, http})
	if err != nil {
		t.Fatal(err)
	}
	if a.Text() != "cni:app=web;generated:named-ports=dns.UDP.53_http.TCP.80;" || a.Text() != b.Text() || a.Text() == without.Text() {
		t.Errorf("sets are %q, %q, without ports %q", a, b, without)
	}
	if _, err := Workload(Filter{}, labels, []workload.NamedPort{http, {Name: "http", Protocol: workload.TCP}}); !errors.Is(err, workload.ErrNamedPort) {
		t.Errorf("port 0: error %v", err)
	}
}

func TestWorkloadWithoutLabelsHasASet(t *testing.T) {
	f, err := NewFilter(nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, labels := range [][]label.Label{nil, {of("k8s", "pod-template-hash", "5d")}} {
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
	_, err = Workload(f, []label.Label{of("k8s", "pod-template-hash", "1"), of("k8s", "app", "a"), of("k8s", "app", "b")}, nil)
	var e *label.Error
	if !errors.As(err, &e) || e.Field() != "labels[2].key" {
		t.Errorf("error %v, want one about labels[2].key", err)
	}
}

func TestTopKeysCountValuesAndLeaveOutHiddenLabels(t *testing.T) {
	var sets []label.Canonical
	for i := range 5 {
		set, err := label.Canonicalize(of("k8s", "id", fmt.Sprint(i)), of("k8s", "app", fmt.Sprint(i%2)),
			of("generated", workload.KeyNamedPorts, fmt.Sprint(i)), of("k8s", "b", "1"))
		if err != nil {
			t.Fatal(err)
		}
		sets = append(sets, set)
	}
	got := TopKeys(slices.Values(sets), 2)
	if want := []KeyCount{{"k8s:id", 5}, {"k8s:app", 2}}; !slices.Equal(got, want) {
		t.Errorf("top keys %v, want %v", got, want)
	}
}
