// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"fmt"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
	"github.com/sluice-net/sluice/services/policy/internal/source"
	"github.com/sluice-net/sluice/services/policy/internal/stream"
	"github.com/sluice-net/sluice/services/policy/internal/test/synthetic"
)

// town fills a state directory with a synthetic cluster.
func town(t testing.TB, dir string, s synthetic.Shape) Config {
	t.Helper()
	config := Config{
		Engine: engine.Config{Cluster: synthetic.Name, AllowHost: true}, Rules: rule.Options{Cluster: synthetic.Name, LocalClusterOnly: true},
		MaxPolicies: 100_000, MaxManifestBytes: 256 << 20, Stream: stream.Defaults(), Log: log.Discard(),
	}
	c, err := synthetic.Make(s)
	if err != nil {
		t.Fatal(err)
	}
	o, stop := run(t, dir, func(of *Config) { config.Linger = of.Linger; *of = config })
	defer stop()
	ctx := t.Context()
	if err := o.Identities().SetIdentities(ctx, c.Identities, nil); err != nil {
		t.Fatal(err)
	}
	session, err := o.Subscribers().Subscribe(ctx, Subscription{Name: "datapath", Interest: Interest{Subjects: c.Subjects}})
	if err != nil {
		t.Fatal(err)
	}
	defer o.Subscribers().Unsubscribe("datapath", session)
	for all := c.Manifests; len(all) > 0; {
		part := all[:min(1000, len(all))]
		if _, err := o.Upsert(ctx, []byte(strings.Join(part, "---\n")), "", false); err != nil {
			t.Fatal(err)
		}
		all = all[len(part):]
	}
	return config
}

func BenchmarkRestart(b *testing.B) {
	for _, policies := range []int{2000, 10_000} {
		b.Run(fmt.Sprint(policies), func(b *testing.B) {
			dir := b.TempDir()
			config := town(b, dir, synthetic.Shape{Namespaces: 200, Apps: 50, Policies: policies, Subjects: 500})
			for b.Loop() {
				o, err := New(config, dir, []string{source.Identity})
				if err != nil {
					b.Fatal(err)
				}
				b.StopTimer()
				if err := o.Close(); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
			}
		})
	}
}
