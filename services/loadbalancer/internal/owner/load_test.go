// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/manifest"
)

// loadConfig returns a configuration with the default limits. The Services of a load do not exceed them.
func loadConfig() Config {
	config := testConfig(&clock{now: time.Unix(1e9, 0)})
	config.Limits = Limits{
		Services: 65_536, Slices: 131_072, Frontends: 65_536, Backends: 280_000, BackendsPerService: 65_536,
	}
	return config
}

// loadNamespaces is the number of namespaces of a load. Before the shares are first computed, a namespace may use an
// eighth of a limit.
const loadNamespaces = 20

// loadService returns a Service as JSON.
func loadService(i int) string {
	return fmt.Sprintf(`{"apiVersion":"v1","kind":"Service","metadata":{"name":"s%d","namespace":"load-%d"},"spec":{`+
		`"clusterIP":"10.%d.%d.%d","selector":{"app":"s%d"},"ports":[{"name":"p","protocol":"TCP","port":80,`+
		`"targetPort":8080}]}}`, i, i%loadNamespaces, 100+i>>14, i>>7&127, 1+i&127, i)
}

// loadSlice returns an EndpointSlice as JSON.
func loadSlice(i, backends int, port uint16) string {
	var endpoints []string
	for e := range backends {
		n := i*backends + e
		addr := netip.AddrFrom4([4]byte{10, 200 + byte(n>>16), byte(n >> 8), byte(n)})
		endpoints = append(endpoints, fmt.Sprintf(`{"addresses":[%q],"conditions":{"ready":true,"serving":true,`+
			`"terminating":false},"nodeName":"node-%d","zone":"zone-%d","targetRef":{"kind":"Pod","namespace":"load-%d",`+
			`"name":"s%d-%d","uid":"11111111-2222-3333-4444-555555555555"}}`, addr, n%100, n%3, i%loadNamespaces, i, e))
	}
	return fmt.Sprintf(`{"apiVersion":"discovery.k8s.io/v1","kind":"EndpointSlice","metadata":{"name":"s%d-a",`+
		`"namespace":"load-%d","labels":{"kubernetes.io/service-name":"s%d"}},"addressType":"IPv4",`+
		`"ports":[{"name":"p","protocol":"TCP","port":%d}],"endpoints":[%s]}`, i, i%loadNamespaces, i, port,
		strings.Join(endpoints, ","))
}

// loadLists returns services with their slices as JSON lists of at most 3 MB.
func loadLists(services, backends int) (lists [][]byte) {
	const begin, end, most = `{"apiVersion":"v1","kind":"List","items":[`, "]}", 3_000_000
	var items []string
	size := 0
	flush := func() {
		lists, items, size = append(lists, []byte(begin+strings.Join(items, ",")+end)), nil, 0
	}
	for i := range services {
		for _, text := range []string{loadService(i), loadSlice(i, backends, 8080)} {
			if size+len(text) > most {
				flush()
			}
			items, size = append(items, text), size+len(text)+1
		}
	}
	flush()
	return lists
}

// follow reads and acknowledges the frontends of a subscriber, and sends each revision.
func follow(b *testing.B, o *running) <-chan uint64 {
	b.Helper()
	s, err := o.Subscribers().Subscribe(b.Context(), Subscription{Name: "datapath", Enforces: true})
	if err != nil {
		b.Fatal(err)
	}
	out := make(chan uint64, 1024)
	go func() {
		defer s.Close()
		for {
			steps, err := s.Next(b.Context())
			if err != nil {
				return
			}
			revision, seq := uint64(0), uint64(0)
			for _, x := range steps {
				if x.Barrier != nil {
					revision, seq = x.Barrier.Revision, x.Barrier.Seq
				}
			}
			if seq > 0 {
				if s.Ack(b.Context(), seq, seq) != nil {
					return
				}
				out <- revision
			}
		}
	}()
	return out
}

// until waits until the subscriber has a revision.
func until(b *testing.B, revisions <-chan uint64, revision uint64) {
	b.Helper()
	for {
		select {
		case r := <-revisions:
			if r >= revision {
				return
			}
		case <-b.Context().Done():
			b.Fatal(context.Cause(b.Context()))
		}
	}
}

// upsertAll applies lists one after the other and returns the last revision.
func upsertAll(b *testing.B, o *running, lists [][]byte) (revision uint64) {
	b.Helper()
	for _, text := range lists {
		out, err := o.Upsert(b.Context(), Request{Caller: managed.Caller{Manager: "load"}, Manifests: text})
		if err != nil {
			b.Fatal(err)
		}
		revision = out.Revision
	}
	return revision
}

// BenchmarkLoad applies services and waits until a subscriber has all their frontends.
func BenchmarkLoad(b *testing.B) {
	for _, c := range []struct{ services, backends int }{{1000, 2}, {10_000, 2}, {10_000, 10}} {
		b.Run(fmt.Sprintf("%dx%d", c.services, c.backends), func(b *testing.B) {
			lists := loadLists(c.services, c.backends)
			b.ReportAllocs()
			for b.Loop() {
				b.StopTimer()
				o := start(b, loadConfig(), b.TempDir())
				revisions := follow(b, o)
				b.StartTimer()
				until(b, revisions, upsertAll(b, o, lists))
				b.StopTimer()
				o.stop()
				b.StartTimer()
			}
		})
	}
}

// BenchmarkDecode reads the manifests of services.
func BenchmarkDecode(b *testing.B) {
	for _, backends := range []int{2, 10} {
		b.Run(fmt.Sprintf("10000x%d", backends), func(b *testing.B) {
			lists := loadLists(10_000, backends)
			b.ReportAllocs()
			for b.Loop() {
				for _, text := range lists {
					if _, err := (manifest.Options{}).Decode(text); err != nil {
						b.Fatal(err)
					}
				}
			}
		})
	}
}

// BenchmarkChange changes one of 10,000 services at a time, and waits until a subscriber has its frontend.
func BenchmarkChange(b *testing.B) {
	const services, backends = 10_000, 10
	o := start(b, loadConfig(), b.TempDir())
	revisions := follow(b, o)
	until(b, revisions, upsertAll(b, o, loadLists(services, backends)))
	b.ReportAllocs()
	n := 0
	for b.Loop() {
		text := []byte(loadSlice(n%services, backends, uint16(8081+n/services)))
		n++
		until(b, revisions, upsertAll(b, o, [][]byte{text}))
	}
}

// BenchmarkRestart loads stored services and sends them to a subscriber.
func BenchmarkRestart(b *testing.B) {
	for _, backends := range []int{2, 10} {
		b.Run(fmt.Sprintf("10000x%d", backends), func(b *testing.B) {
			dir := b.TempDir()
			o := start(b, loadConfig(), dir)
			revision := upsertAll(b, o, loadLists(10_000, backends))
			o.stop()
			b.ReportAllocs()
			for b.Loop() {
				o := start(b, loadConfig(), dir)
				until(b, follow(b, o), revision)
				b.StopTimer()
				o.stop()
				b.StartTimer()
			}
		})
	}
}
