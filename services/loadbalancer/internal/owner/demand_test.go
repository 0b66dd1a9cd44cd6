// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/compile"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// joinedItems returns n JSON objects of a list, formatted from their numbers.
func joinedItems(n int, format func(int) string) string {
	all := make([]string, n)
	for i := range all {
		all[i] = format(i)
	}
	return strings.Join(all, ",")
}

// portsOf returns n named ports.
func portsOf(n int) string {
	return joinedItems(n, func(i int) string { return fmt.Sprintf(`{"name":"p%d","port":%d}`, i, i+1) })
}

// vast returns Service a with the given number of ports and load balancer addresses, and its slices. Each slice has
// its own endpoints, with a hundred ports.
func vast(ports, ingress, parts, endpoints int) (web, ends string) {
	web = fmt.Sprintf(`{"apiVersion":"v1","kind":"Service","metadata":{"name":"a"},"spec":{"type":"LoadBalancer",`+
		`"clusterIP":"10.96.0.1","ports":[%s]},"status":{"loadBalancer":{"ingress":[%s]}}}`, portsOf(ports),
		joinedItems(ingress, func(i int) string { return fmt.Sprintf(`{"ip":"198.%d.%d.1"}`, 18+i>>8, i&255) }))
	for part := range parts {
		ends += fmt.Sprintf(`---
{"apiVersion":"discovery.k8s.io/v1","kind":"EndpointSlice","addressType":"IPv4","ports":[%s],"endpoints":[%s],`+
			`"metadata":{"name":"a-%d","labels":{"kubernetes.io/service-name":"a"}}}
`, portsOf(100), joinedItems(endpoints, func(i int) string {
			return fmt.Sprintf(`{"addresses":["10.%d.%d.%d"]}`, part, i>>8, i&255)
		}), part)
	}
	return "---\n" + web + "\n", ends
}

// TestVastServicesAreRefusedByName: a few hundred kilobytes of manifests describe millions of frontends or backends.
// They are refused before the frontends are computed, in whatever order they arrive. The error contains the name of
// the service.
func TestVastServicesAreRefusedByName(t *testing.T) {
	config := testConfig(&clock{now: time.Unix(1e9, 0)})
	config.Limits = Limits{
		Services: 65_536, Slices: 131_072, Frontends: 65_536, Backends: 131_072, BackendsPerService: 65_536,
	}
	o := start(t, config, t.TempDir())
	refused := func(what, text, want string) {
		t.Helper()
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, err := o.Upsert(t.Context(), Request{Manifests: []byte(text)})
		runtime.ReadMemStats(&after)
		if !errors.Is(err, failure.ErrLimit) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", what, err, want)
		}
		if n := (after.TotalAlloc - before.TotalAlloc) >> 20; n > 200 {
			t.Errorf("%s: %d MiB of memory were allocated", what, n)
		}
	}
	web, ends := vast(100, 0, 2, 1000)
	refused("200,000 backends", web+ends, "service default/a would have 200000 backends, the limit is 65536")
	web, ends = vast(100, 0, 20, 1000)
	refused("2,000,000 backends", web+ends, "service default/a would have up to 2000000 backends, the limit is 65536")
	o.apply(ends)
	refused("their service alone", web, "service default/a would have up to 2000000 backends, the limit is 65536")
	// First the service uses another protocol than its slices, so it has no backends. The change to the protocol of
	// the slices is rejected.
	o.apply(strings.ReplaceAll(web, `"port":`, `"protocol":"UDP","port":`))
	refused("the protocol of its slices", web, "service default/a would have up to 2000000 backends")
	frontends, _ := vast(1000, 2000, 0, 0)
	refused("2,003,000 frontends", frontends,
		"service default/a would have up to 2003000 frontends; the limit for all services is 65536")
	if st, err := o.Reader().Status(t.Context()); err != nil || st.Services != 1 || st.Revision != 2 {
		t.Errorf("a change beyond a limit had an effect: %+v, %v", st, err)
	}
}

// TestSlicesMayRepeatEndpoints: duplicate endpoints count once, up to a limit.
func TestSlicesMayRepeatEndpoints(t *testing.T) {
	config := testConfig(&clock{now: time.Unix(1e9, 0)})
	config.Limits.BackendsPerService = 100
	o := start(t, config, t.TempDir())
	web, ends := vast(100, 0, 1, 1)
	o.apply(web)
	var err error
	n := 0
	for ; err == nil; n++ {
		_, err = o.Upsert(t.Context(), Request{Manifests: []byte(strings.Replace(ends, "a-0", fmt.Sprintf("a-%d", n), 1))})
	}
	const want = "service default/a would have up to 500 backends, the limit is 100"
	if n != maxRepeats+1 || !strings.Contains(err.Error(), want) {
		t.Errorf("slice %d: %v", n, err)
	}
}

// TestSumsAdmitCallsFarBelowTheLimits: for a call far below the limits, the sum of the listed frontends and backends
// is enough to admit it. The sum never admits a call that the complete computation refuses.
func TestSumsAdmitCallsFarBelowTheLimits(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	sure, refused := 0, 0
	for range 300 {
		ix := newIndex(&compile.Node{}, everyNamespace{shares.NewTenants(shares.Settings{})})
		l := &Limits{Frontends: 1 + r.IntN(60), Backends: 1 + r.IntN(200), BackendsPerService: 1 + r.IntN(30)}
		after := map[service.Name]*joined{}
		for _, o := range large("shop", 0, 1+r.IntN(10), 1+r.IntN(20)) {
			name := o.Key.Name
			if after[name] == nil {
				after[name] = &joined{name: name}
			}
			if o.Service != nil {
				after[name].object = &object{service: o.Service}
			} else {
				after[name].slices = append(after[name].slices, &object{slice: o.Slice})
			}
		}
		if ix.surelyWithinLimits(l, after) {
			sure++
			if err := ix.computeDemand(l, after); err != nil {
				t.Fatalf("a sum admits a call that the complete computation refuses: %v", err)
			}
		} else if ix.checkLimits(l, after) != nil {
			refused++
		}
	}
	if sure < 30 || refused < 30 {
		t.Errorf("%d calls surely fit and %d are refused, want many of both", sure, refused)
	}
}
