// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package label

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
)

func TestSetFindsWhatAScanOfTheListFinds(t *testing.T) {
	pick := func(of ...string) string { return of[rand.IntN(len(of))] }
	draw := func() Label {
		key := pick("a", "app", "ap", "io.kubernetes.pod.namespace")
		return Label{pick("k8s", "cni", "reserved"), key, pick("", "1", "2")}
	}
	for range 2000 {
		list := make([]Label, rand.IntN(9))
		for i := range list {
			list[i] = draw()
		}
		set, l := NewSet(list...), draw()
		var want []Label
		for _, x := range slices.SortedFunc(slices.Values(list), Label.Compare) {
			if x.Key == l.Key && !slices.Contains(want, x) {
				want = append(want, x)
			}
		}
		if got := slices.Collect(set.Key(l.Key)); !slices.Equal(got, want) {
			t.Fatalf("key %s of %v: %v, want %v", l.Key, list, got, want)
		}
		if got, want := set.Has(l), slices.Contains(list, l); got != want {
			t.Fatalf("%v has %s: %t", list, l, got)
		}
		value, ok := set.Value(l.Source, l.Key)
		at := slices.IndexFunc(want, func(x Label) bool { return x.Source == l.Source })
		if ok != (at >= 0) || ok && value != want[at].Value {
			t.Fatalf("%v has the value %q, %t of %s", list, value, ok, l.Name())
		}
		from := slices.ContainsFunc(list, func(x Label) bool { return x.Source == l.Source })
		if got := set.HasSource(l.Source); got != from {
			t.Fatalf("%v has a label of %s: %t", list, l.Source, got)
		}
		again := NewSet(append(slices.Clone(list), list...)...)
		if !again.Equal(set) || again.Len() != set.Len() || again.Text() != set.Text() {
			t.Fatalf("%v twice is %s, once %s", list, again, set)
		}
	}
}

func BenchmarkSetKey(b *testing.B) {
	var list []Label
	for i := range 12 {
		list = append(list, Kubernetes(fmt.Sprint("app.kubernetes.io/label-", i), "x"))
	}
	set := NewSet(list...)
	for b.Loop() {
		for l := range set.Key("app.kubernetes.io/label-7") {
			_ = l
		}
	}
}
