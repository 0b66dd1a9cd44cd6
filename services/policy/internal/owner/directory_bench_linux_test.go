// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/sluice-net/sluice/kit/desired/directory"
	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/owner"
	"github.com/sluice-net/sluice/services/policy/internal/stream"
)

// told sends a message when a listing was applied.
type told struct {
	directory.Feed
	taken chan struct{}
}

func (t told) Set(ctx context.Context, files []directory.File) error {
	err := t.Feed.Set(ctx, files)
	select {
	case t.taken <- struct{}{}:
	case <-ctx.Done():
	}
	return err
}

// BenchmarkChange measures the time from a finished rename, or from a call, until the change is compiled and on
// stable storage.
func BenchmarkChange(b *testing.B) {
	for _, files := range []int{1, 100} {
		dir := b.TempDir()
		o, err := owner.New(owner.Config{
			Engine: engine.Config{Cluster: "default"}, MaxPolicies: 10_000, MaxManifestBytes: 64 << 20, MaxNames: 4, MaxAddresses: 4,
			Stream: stream.Defaults(), Log: log.Discard(),
		}, b.TempDir(), []string{managed.SourceFile})
		if err != nil {
			b.Fatal(err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		var wg sync.WaitGroup
		wg.Go(func() { o.Run(ctx) }) //nolint:errcheck // it ends with the context
		for i := range files {
			if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("f%d.yaml", i)), []byte(policy(fmt.Sprintf("f%d", i), 1)), 0o644); err != nil {
				b.Fatal(err)
			}
		}
		taken := make(chan struct{})
		source := directory.New(dir, "policies", told{o.Feed(managed.SourceFile), taken}, func(context.Context, error) error { return nil }, log.Discard())
		source.Rest = 0 // changes follow each other immediately
		// The other files are old enough to count as completely written.
		source.Grain = 0
		wg.Go(func() { source.Run(ctx) }) //nolint:errcheck // it ends with the context
		revision := func() uint64 {
			st, err := o.Reader().Status(ctx)
			if err != nil {
				b.Fatal(err)
			}
			return st.Revision
		}
		<-taken
		b.Run(fmt.Sprintf("file/of=%d", files), func(b *testing.B) {
			port := 1
			for b.Loop() {
				b.StopTimer()
				port = port%60_000 + 1
				next := filepath.Join(dir, ".next")
				if err := os.WriteFile(next, []byte(policy("f0", port)), 0o644); err != nil {
					b.Fatal(err)
				}
				before := revision()
				b.StartTimer()
				if err := os.Rename(next, filepath.Join(dir, "f0.yaml")); err != nil {
					b.Fatal(err)
				}
				<-taken
				b.StopTimer()
				for revision() == before { // an earlier scan had another reason
					<-taken
				}
				b.StartTimer()
			}
		})
		b.Run(fmt.Sprintf("call/beside=%d", files), func(b *testing.B) {
			port := 1
			for b.Loop() {
				port = port%60_000 + 1
				if _, err := o.Upsert(ctx, []byte(policy("called", port)), "", false); err != nil {
					b.Fatal(err)
				}
			}
		})
		cancel()
		wg.Wait()
		if err := o.Close(); err != nil {
			b.Error(err)
		}
	}
}

// BenchmarkRescan measures the scan that reads all files of a directory every 30 s. There are 30,000 policies, and
// none has changed.
func BenchmarkRescan(b *testing.B) {
	const files, each = 300, 100
	dir := b.TempDir()
	o, err := owner.New(owner.Config{
		Engine: engine.Config{Cluster: "default"}, MaxPolicies: 40_000, MaxManifestBytes: 64 << 20, MaxNames: 4,
		MaxAddresses: 4, Stream: stream.Defaults(), Log: log.Discard(),
	}, b.TempDir(), []string{managed.SourceFile})
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { o.Run(ctx) }) //nolint:errcheck // it ends with the context
	for i := range files {
		all := make([]string, each)
		for k := range all {
			all[k] = peerPolicy(i*each + k)
		}
		name := filepath.Join(dir, fmt.Sprintf("f%03d.yaml", i))
		if err := os.WriteFile(name, []byte(strings.Join(all, "---\n")), 0o644); err != nil {
			b.Fatal(err)
		}
	}
	feed := o.Feed(managed.SourceFile)
	scan := func() { // a new source reads every file
		failed := func(context.Context, error) error { return nil }
		s := directory.New(dir, "policies", feed, failed, log.Discard())
		if err := s.Scan(ctx); err != nil {
			b.Fatal(err)
		}
	}
	scan()
	b.ReportAllocs()
	for b.Loop() {
		scan()
	}
	cancel()
	wg.Wait()
	if err := o.Close(); err != nil {
		b.Error(err)
	}
}

// peerPolicy returns a policy with one peer, like the policies of a cluster with many apps.
func peerPolicy(i int) string {
	return fmt.Sprintf(`apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: p%d, namespace: team-%d}
spec:
  podSelector: {matchLabels: {app: app-%d}}
  ingress:
  - from:
    - namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: team-%d}}
      podSelector: {matchLabels: {app: app-%d}}
    ports: [{protocol: TCP, port: %d}]
`, i, i%50, i%6000, (i+1)%50, (i+1)%6000, 8000+i/6000)
}
