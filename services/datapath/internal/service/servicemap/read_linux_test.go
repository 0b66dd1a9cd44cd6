// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package servicemap

import (
	"math/rand/v2"
	"net/netip"
	"reflect"
	"testing"

	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
)

func TestKernelLookupReadsWhatWasWritten(t *testing.T) {
	dir := kerneltest.NewBPFFS(t)
	i := start(t, dir, small)
	s := randomState(rand.New(rand.NewPCG(3, 3)), 32)
	i.apply(t, s.all())
	compare := func() {
		t.Helper()
		all, err := i.List()
		if err != nil || len(all) != len(s) {
			t.Fatalf("%d frontends, %v, want %d", len(all), err, len(s))
		}
		for _, want := range all {
			// draining backends are not in the maps
			for _, list := range []*Front{want.Inside, want.Outside} {
				if list != nil {
					list.Draining = nil
				}
			}
			if got, ok, err := i.Lookup(want.Key); err != nil || !ok || !reflect.DeepEqual(got, want) {
				t.Errorf("%v: %+v, %v, %v, want %+v", want.Key, got, ok, err, want)
			}
		}
	}
	compare()
	for k, f := range s {
		if got, _, err := i.Lookup(k); err != nil || got.Kind != f.Kind || got.Service != f.Service {
			t.Errorf("%v: kind %d of %q, %v, want %d of %q", k, got.Kind, got.Service, err, f.Kind, f.Service)
		}
	}
	if f, ok, err := i.Lookup(clusterIP(999, false)); ok || err != nil {
		t.Errorf("a frontend that is not there: %+v, %v", f, err)
	}
	// A new process knows neither services nor kinds until they are sent.
	i.close(t)
	i = start(t, dir, small)
	compare()
	for k := range s {
		want := frontend.Kind(0)
		if k.Node {
			want = frontend.NodePort
		}
		if got, ok, err := i.Lookup(k); err != nil || !ok || got.Kind != want || got.Service != "" {
			t.Errorf("%v, adopted: %+v, %v", k, got, err)
		}
	}
}

// TestKernelLookupReadsTheMapsAndNotMemory: a lookup must return what the programs would find, so it reads the maps.
func TestKernelLookupReadsTheMapsAndNotMemory(t *testing.T) {
	i := start(t, kerneltest.NewBPFFS(t), small)
	f := service(1, false, listOf(false, 1, 2))
	i.apply(t, state{f.Key: f}.all())
	front := i.only(t, f.Key).Inside

	gone := i.store.backend(ip4, front.Backends[0].Number)
	gone.state = backendGone
	i.store.storeBackend(ip4, front.Backends[0].Number, gone)
	if got, _, err := i.Lookup(f.Key); err != nil || !reflect.DeepEqual(got.Inside.Backends, front.Backends[1:]) {
		t.Errorf("with a removed backend: %+v, %v", got.Inside, err)
	}
	i.store.storeFrontWord(front.Number, listWord, flagDrop<<flagsShift)
	if got, _, err := i.Lookup(f.Key); err != nil || len(got.Inside.Backends) > 0 || !got.Inside.Drop {
		t.Errorf("with an empty list: %+v, %v", got.Inside, err)
	}
	if err := i.store.deleteKey(rawKeyOf(f.Key)); err != nil {
		t.Fatal(err)
	}
	if got, ok, err := i.Lookup(f.Key); ok || err != nil {
		t.Errorf("without its key: %+v, %v", got, err)
	}
}

func TestKernelServiceIsNamedByTheAddressThatWasAsked(t *testing.T) {
	i := start(t, kerneltest.NewBPFFS(t), small)
	f := service(1, false, listOf(false, 1))
	node := &frontend.Frontend{
		Key:     frontend.Key{Addr: netip.IPv6Unspecified(), Port: 30080, Protocol: frontend.UDP, Node: true},
		Service: "shop/dns", Kind: frontend.NodePort, Outside: listOf(true, 2),
	}
	i.apply(t, state{f.Key: f, node.Key: node}.all())
	for _, c := range []struct {
		at       string
		protocol uint8
		want     string
	}{
		{"10.96.0.1:80", 6, f.Service},
		{"10.96.0.1:80", 17, ""},
		{"10.96.0.1:81", 6, ""},
		{"[fd00::7]:30080", 17, "shop/dns"},
		{"192.0.2.7:30080", 17, ""},
	} {
		if got := i.ServiceAt(netip.MustParseAddrPort(c.at), c.protocol); got != c.want {
			t.Errorf("%s by protocol %d: %q, want %q", c.at, c.protocol, got, c.want)
		}
	}
}
