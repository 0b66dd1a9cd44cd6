// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
)

func TestMetricsHaveTheConventionsNames(t *testing.T) {
	s := serve(t)
	s.know(town)
	s.apply(allowWeb)
	s.watch(subscribe("datapath", 301)).snapshot()
	s.eventually("acknowledged", func(st *policyv1.GetStatusResponse) bool { return st.GetSubscribers()[0].GetBehind() == 0 })
	r := prometheus.NewPedanticRegistry()
	if err := r.Register(Collector{Owner: s.owner}); err != nil {
		t.Fatal(err)
	}
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, f := range families {
		m := f.GetMetric()[0]
		got[f.GetName()] = m.GetGauge().GetValue() + m.GetCounter().GetValue()
		if strings.HasSuffix(f.GetName(), "_total") != (m.GetCounter() != nil) {
			t.Errorf("%s: the name does not fit its kind", f.GetName())
		}
	}
	for name, want := range map[string]float64{
		"sluice_policy_policies": 1, "sluice_policy_policy_revision": 1, "sluice_policy_subjects": 1, "sluice_policy_tables": 1,
		"sluice_policy_identities": float64(len(town)), "sluice_policy_connected_subscribers": 1, "sluice_policy_unsynced_sources": 1,
		"sluice_policy_refused_tables": 0, "sluice_policy_unacknowledged_messages": 0, "sluice_policy_problems": 0,
	} {
		if v, ok := got[name]; !ok || v != want {
			t.Errorf("%s is %v (present: %t), want %v", name, v, ok, want)
		}
	}
}

func TestMetricsAreThoseOfTheDocumentation(t *testing.T) {
	doc, err := os.ReadFile("../../../../docs/reference/policy.md")
	if err != nil {
		t.Fatal(err)
	}
	documented := map[string]bool{}
	for _, m := range regexp.MustCompile("`(sluice_policy_[a-z_]+)`").FindAllStringSubmatch(string(doc), -1) {
		documented[m[1]] = true
	}
	ch := make(chan *prometheus.Desc, len(metrics)+5)
	Collector{}.Describe(ch)
	close(ch)
	for d := range ch {
		name := regexp.MustCompile(`sluice_policy_[a-z_]+`).FindString(d.String())
		if !documented[name] {
			t.Errorf("%s is not in docs/reference/policy.md", name)
		}
		delete(documented, name)
	}
	for name := range documented {
		t.Errorf("docs/reference/policy.md has %s, but the service does not", name)
	}
}

func TestTheOwnersTimeIsCountedByOperation(t *testing.T) {
	s := serve(t)
	s.know(town)
	s.apply(allowWeb)
	s.apply(allowWeb)
	st, err := s.owner.Reader().Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	committed, changed := false, false
	for _, b := range st.Busy {
		counted := uint64(0)
		for _, n := range b.Buckets {
			counted += n
		}
		if counted > b.Count || b.Longest > b.Sum || b.Sum <= 0 {
			t.Errorf("%+v: %d are in buckets", b, counted)
		}
		changed = changed || b.Operation == "change policies" && b.Count == 2
		committed = committed || b.Operation == "commit" && b.Count == 1 // the second call changes nothing
	}
	if !changed || !committed {
		t.Errorf("got %+v, want two changes of policies and one commit", st.Busy)
	}
}
