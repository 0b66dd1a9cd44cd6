// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package frontend

import (
	"net/netip"
	"testing"
	"time"
)

func TestServicePortIsSplitAsItWasMade(t *testing.T) {
	for want, parts := range map[string][3]string{
		"shop/web:http": {"shop", "web", "http"}, "shop/web": {"shop", "web", ""}, "/": {},
	} {
		if got := ServicePort(parts[0], parts[1], parts[2]); got != want {
			t.Errorf("ServicePort of %q is %q, want %q", parts, got, want)
		}
		if a, b, c := SplitServicePort(want); [3]string{a, b, c} != parts {
			t.Errorf("%q has the parts %q, %q and %q, want %q", want, a, b, c, parts)
		}
	}
}

func TestEqualComparesEveryField(t *testing.T) {
	whole := func() *Frontend {
		b := []Backend{{AddrPort: netip.MustParseAddrPort("10.0.0.1:80")}}
		return &Frontend{
			Key:    Key{Addr: netip.MustParseAddr("10.96.0.1"), Port: 80, Protocol: TCP},
			Inside: &List{Backends: b}, Outside: &List{Draining: b},
		}
	}
	if !whole().Equal(whole()) {
		t.Error("two equal frontends are not equal")
	}
	for what, change := range map[string]func(*Frontend){
		"key":           func(f *Frontend) { f.Key.Port++ },
		"kind":          func(f *Frontend) { f.Kind = ClusterIP },
		"service":       func(f *Frontend) { f.Service = "shop/web" },
		"no inside":     func(f *Frontend) { f.Inside = nil },
		"no outside":    func(f *Frontend) { f.Outside = nil },
		"backends":      func(f *Frontend) { f.Inside.Backends = nil },
		"terminating":   func(f *Frontend) { f.Inside.Backends[0].Terminating = true; f.Outside.Draining = nil },
		"draining":      func(f *Frontend) { f.Outside.Draining = nil },
		"drop":          func(f *Frontend) { f.Inside.Drop = true },
		"table":         func(f *Frontend) { f.Inside.Table = true },
		"affinity":      func(f *Frontend) { f.Affinity = time.Second },
		"source ranges": func(f *Frontend) { f.SourceRanges = []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0")} },
		"share":         func(f *Frontend) { f.ExceedsShare = true },
	} {
		f := whole()
		change(f)
		if f.Equal(whole()) || whole().Equal(f) {
			t.Errorf("%s: two frontends that differ are equal", what)
		}
	}
}
