// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/kit/disktest"
	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/source"
	"github.com/sluice-net/sluice/services/policy/internal/stream"
)

func TestMain(m *testing.M) {
	disktest.InMemory()
	leaktest.Main(m)
}

// run starts an owner on a state directory and returns a function that stops it.
func run(t testing.TB, dir string, change ...func(*Config)) (*Owner, func()) {
	t.Helper()
	return runWith(t, dir, []string{source.Identity, managed.SourceFile}, change...)
}

func runWith(t testing.TB, dir string, sources []string, change ...func(*Config)) (*Owner, func()) {
	t.Helper()
	config := Config{
		Engine: engine.Config{Cluster: "default", AllowHost: true}, MaxPolicies: 100_000, MaxManifestBytes: 256 << 20,
		MaxNames: 10, MaxAddresses: 20, NameGrace: time.Minute, Linger: time.Hour, Stream: stream.Defaults(), Log: log.Discard(),
	}
	for _, c := range change {
		c(&config)
	}
	o, err := New(config, dir, sources)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := o.Run(ctx); err != nil {
			t.Errorf("run: %v", err)
		}
	})
	stop := sync.OnceFunc(func() {
		cancel()
		wg.Wait()
		if err := o.Close(); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(stop)
	return o, stop
}

func text(namespace, name string, port int) string {
	return fmt.Sprintf("apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: %s, namespace: %s}\nspec:\n"+
		"  podSelector: {matchLabels: {app: %s}}\n  ingress:\n  - from: [{podSelector: {matchLabels: {app: web}}}]\n    ports: [{protocol: TCP, port: %d}]\n", name, namespace, name, port)
}

func BenchmarkOneChangeBesideManyPolicies(b *testing.B) {
	for _, count := range []int{100, 10_000} {
		b.Run(fmt.Sprint(count), func(b *testing.B) {
			dir := b.TempDir()
			o, stop := run(b, dir)
			var all strings.Builder
			for i := range count {
				all.WriteString("---\n" + text(fmt.Sprint("ns", i%200), fmt.Sprint("p", i), 80))
				if all.Len() > 256<<10 || i == count-1 {
					if _, err := o.Upsert(b.Context(), []byte(all.String()), "", false); err != nil {
						b.Fatal(err)
					}
					all.Reset()
				}
			}
			port := 1000
			for b.Loop() {
				port = 1000 + (port+1)%60000
				if _, err := o.Upsert(b.Context(), []byte(text("ns0", "p0", port)), "", false); err != nil {
					b.Fatal(err)
				}
			}
			stop()
			began := time.Now()
			_, again := run(b, dir)
			b.ReportMetric(float64(time.Since(began).Milliseconds()), "ms/restart")
			again()
		})
	}
}
