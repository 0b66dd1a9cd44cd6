// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package labelfilter

import (
	"errors"
	"testing"

	"github.com/sluice-net/sluice/model/label"
)

func TestLongestRuleDecidesAndIsNamed(t *testing.T) {
	f, err := New([]Rule{
		{"app", false},
		{"k8s:app", true},
		{"*.example.com", false},
		{"app.kubernetes.io/", true},
		{"app.kubernetes.io/", false},
	})
	if err != nil {
		t.Fatal(err)
	}
	for l, want := range map[label.Label]string{
		{Source: "k8s", Key: "app"}:                    "k8s:app",
		{Source: "cni", Key: "app"}:                    "app",
		{Source: "k8s", Key: "a.example.com/x"}:        "*.example.com",
		{Source: "k8s", Key: "app.kubernetes.io/name"}: "app.kubernetes.io/",
		{Source: "k8s", Key: "tier"}:                   "",
	} {
		keep, by := f.Decide(l)
		if by != want || keep != (want != "app" && want != "*.example.com") {
			t.Errorf("%v: kept %t by %q, want %q", l, keep, by, want)
		}
	}
	var bad *RuleError
	if _, err := New([]Rule{{"app", true}, {"*.", false}}); !errors.As(err, &bad) || bad.Index != 1 {
		t.Errorf("a rule without a domain: %v", err)
	}
	if keep, by := Default().Decide(label.Label{Source: "k8s", Key: "job-name"}); keep || by != "job-name" {
		t.Errorf("job-name is kept by default: %t, %q", keep, by)
	}
}
