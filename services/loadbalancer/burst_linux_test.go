// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/servicetest"
	lbv1 "github.com/sluice-net/sluice/proto/gen/sluice/loadbalancer/v1"
)

// maxRequest is the largest size of a request's manifests in bytes.
const maxRequest = 3 << 20

// namespaces is the number of namespaces that the services belong to. It is large enough because a namespace may use
// an eighth of each limit before the shares are first computed.
const namespaces = 20

func namespaceOf(i int) string { return fmt.Sprintf("bench-%d", i%namespaces) }

// requests returns JSON lists of services. Each service has the given number of backends, and each list has at most
// maxRequest bytes.
func requests(services, backends int) [][]byte {
	var out [][]byte
	var list bytes.Buffer
	flush := func() {
		if list.Len() > 0 {
			out = append(out, []byte(`{"apiVersion":"v1","kind":"List","items":[`+list.String()+"]}"))
			list.Reset()
		}
	}
	for i := range services {
		name := fmt.Sprintf("service-%d", i)
		type object map[string]any
		var endpoints []object
		for j := range backends {
			n := i*backends + j
			endpoints = append(endpoints, object{
				"addresses":  []string{fmt.Sprintf("10.%d.%d.%d", 1+n>>16, n>>8&255, n&255)},
				"conditions": object{"ready": true, "serving": true, "terminating": false},
				"nodeName":   fmt.Sprintf("node-%d", n%100), "zone": fmt.Sprintf("zone-%d", n%3),
				"targetRef": object{
					"kind": "Pod", "namespace": namespaceOf(i), "name": fmt.Sprintf("%s-%d", name, j),
					"uid": "11111111-2222-3333-4444-555555555555",
				},
			})
		}
		for _, x := range []object{
			{
				"apiVersion": "v1", "kind": "Service",
				"metadata": object{"name": name, "namespace": namespaceOf(i), "labels": object{"app": name}},
				"spec": object{
					"clusterIP": fmt.Sprintf("10.96.%d.%d", i>>8, i&255), "selector": object{"app": name},
					"ports": []object{{"name": "http", "port": 80, "targetPort": 8080}},
				},
			},
			{
				"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
				"metadata": object{
					"name": name + "-abcde", "namespace": namespaceOf(i),
					"labels": object{"kubernetes.io/service-name": name},
				},
				"addressType": "IPv4", "ports": []object{{"name": "http", "port": 8080, "protocol": "TCP"}}, "endpoints": endpoints,
			},
		} {
			b, err := json.Marshal(x)
			if err != nil {
				panic(err)
			}
			if list.Len()+len(b)+100 > maxRequest {
				flush()
			}
			if list.Len() > 0 {
				list.WriteByte(',')
			}
			list.Write(b)
		}
	}
	flush()
	return out
}

// resident returns the resident memory of a process, and its anonymous part.
func resident(t testing.TB, pid int) (rss, anonymous float64) {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	of := func(name string) float64 {
		_, rest, _ := strings.Cut(string(text), name+":")
		kb, err := strconv.ParseFloat(strings.Fields(rest)[0], 64)
		if err != nil {
			t.Fatal(err)
		}
		return kb / 1024
	}
	return of("VmRSS"), of("RssAnon")
}

// settled returns the memory of a process that has become idle.
func settled(t testing.TB, pid int) (rss, anonymous float64) {
	t.Helper()
	time.Sleep(5 * time.Second) // give the process time to become idle
	return resident(t, pid)
}

// BenchmarkBurst applies 10,000 services to a process with a subscriber and waits until the subscriber has all
// frontends. Then it measures single changes and memory. If SLUICE_BIN is set, it measures the binary of `make build`,
// because a test binary is larger.
func BenchmarkBurst(b *testing.B) {
	for _, c := range []struct{ services, backends int }{{10_000, 2}, {10_000, 10}} {
		b.Run(fmt.Sprintf("%dx%d", c.services, c.backends), func(b *testing.B) {
			for range b.N {
				measureBurst(b, c.services, c.backends)
			}
		})
	}
}

func measureBurst(b *testing.B, services, backends int) {
	place := newBench(b)
	if binary, err := os.ReadFile(filepath.Join(os.Getenv("SLUICE_BIN"), "sluice-loadbalancer")); err == nil {
		if err := os.WriteFile(filepath.Join(place.Dir, "service"), binary, 0o755); err != nil {
			b.Fatal(err)
		}
	}
	p := place.start()
	p.Serving()
	all := requests(services, backends)
	s := p.subscribe(&lbv1.Subscribe{Name: "datapath"})
	s.until(0)
	idle, _ := resident(b, p.Cmd.Process.Pid)
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	began := time.Now()
	for _, text := range all {
		if _, err := p.UpsertServices(ctx, &lbv1.UpsertServicesRequest{Manifests: text, Manager: "bench"}); err != nil {
			b.Fatal(err)
		}
	}
	applied := time.Since(began)
	s.until(uint64(len(all)))
	streamed := time.Since(began)
	if len(s.has) != services {
		b.Fatalf("%d frontends, want %d", len(s.has), services)
	}
	s.ack(s.barrier.GetSeq(), s.barrier.GetSeq())
	const changes = 200
	revision := uint64(len(all))
	began = time.Now()
	for i := range changes {
		text := fmt.Sprintf("apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: service-7-abcde, "+
			"namespace: bench-7, labels: {kubernetes.io/service-name: service-7}}\n"+
			"addressType: IPv4\nports: [{name: http, port: 8080}]\nendpoints: [{addresses: [10.200.0.%d]}]\n", 1+i%200)
		if _, err := p.UpsertServices(ctx, &lbv1.UpsertServicesRequest{
			Manifests: []byte(text),
			Manager:   "bench",
		}); err != nil {
			b.Fatal(err)
		}
		revision++
		s.until(revision)
	}
	single := time.Since(began) / changes
	after, afterAnon := settled(b, p.Cmd.Process.Pid)
	p.Kill()

	p = place.start()
	began = time.Now()
	p.Serving()
	started := time.Since(began)
	s = p.subscribe(&lbv1.Subscribe{Name: "datapath"})
	s.until(revision)
	listed := time.Since(began)
	servicetest.Eventually(b, "the status", func() bool { return p.status().GetServices() == uint32(services) })
	again, againAnon := settled(b, p.Cmd.Process.Pid)
	file, err := os.Stat(filepath.Join(place.Dir, "state", "services.db"))
	if err != nil {
		b.Fatal(err)
	}
	p.Kill()
	report := func(v float64, unit string) { b.ReportMetric(v, unit) }
	report(float64(len(all)), "requests")
	report(applied.Seconds()*1000, "ms/applied")
	report(streamed.Seconds()*1000, "ms/streamed")
	report(float64(single.Microseconds()), "µs/change")
	report(started.Seconds()*1000, "ms/started")
	report(listed.Seconds()*1000, "ms/listed")
	report(idle, "MiB-idle")
	report(after, "MiB-after")
	report(afterAnon, "MiB-after-anon")
	report(again, "MiB-restarted")
	report(againAnon, "MiB-restarted-anon")
	report(float64(file.Size())/(1<<20), "MiB-file")
}
