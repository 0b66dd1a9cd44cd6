// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package flow

import (
	"testing"

	"github.com/sluice-net/sluice/model/label"
)

// is requires a label with a key and one of the values, if there are any.
func is(source, key string, values ...string) Requirement {
	r := Requirement{Source: source, Key: key}
	for _, v := range values {
		if r.Values == nil {
			r.Values = map[string]bool{}
		}
		r.Values[v] = true
	}
	return r
}

func isNot(source, key string, values ...string) Requirement {
	r := is(source, key, values...)
	r.Not = true
	return r
}

func TestSelectorMatchesAsKubectlSelects(t *testing.T) {
	web := []label.Label{
		{Source: "k8s", Key: "app", Value: "web"},
		{Source: "cni", Key: "app", Value: "shop"},
		{Source: "k8s", Key: "tier", Value: "front"},
		{Source: "k8s", Key: "io.kubernetes.pod.namespace", Value: "default"},
		{Source: "reserved", Key: "host"},
	}
	for _, c := range []struct {
		selector Selector
		want     bool
	}{
		{Selector{}, true},
		{Selector{is("", "app", "web")}, true},
		{Selector{is("", "app", "shop")}, true}, // of another source
		{Selector{is("k8s", "app", "web")}, true},
		{Selector{is("k8s", "app", "shop")}, false},
		{Selector{is("cni", "app", "shop")}, true},
		{Selector{is("", "app", "db")}, false},
		{Selector{isNot("", "app", "web")}, false},
		{Selector{isNot("", "app", "db")}, true},
		{Selector{isNot("cni", "app", "web")}, true},
		{Selector{isNot("", "color", "red")}, true}, // the key is missing
		{Selector{is("", "app")}, true},
		{Selector{is("", "color")}, false},
		{Selector{isNot("", "color")}, true},
		{Selector{isNot("", "app")}, false},
		{Selector{isNot("cni", "tier")}, true},
		{Selector{is("", "tier", "front", "back")}, true},
		{Selector{is("", "tier", "back")}, false},
		{Selector{isNot("", "tier", "back")}, true},
		{Selector{isNot("", "tier", "front", "back")}, false},
		{Selector{is("", "app", "web"), is("", "tier", "front", "back"), isNot("", "x")}, true},
		{Selector{is("", "app", "web"), is("", "tier", "back")}, false},
		{Selector{is("", "io.kubernetes.pod.namespace", "default")}, true},
		{Selector{is("reserved", "host", "")}, true}, // the empty value
		{Selector{is("", "tier", "")}, false},
	} {
		if got := c.selector.Matches(web); got != c.want {
			t.Errorf("%+v matches: %v, want %v", c.selector, got, c.want)
		}
	}
	if (Selector{is("", "app")}).Matches(nil) || !(Selector{isNot("", "app")}).Matches(nil) {
		t.Error("no label at all is taken for one")
	}
}
