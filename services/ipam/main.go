// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Sluice-ipam hands out the pod addresses of one node.
package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/sluice-net/sluice/kit/config"
	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/process"
	"github.com/sluice-net/sluice/kit/rpc"
	"github.com/sluice-net/sluice/kit/sandbox"
	"github.com/sluice-net/sluice/kit/version"
	"github.com/sluice-net/sluice/services/ipam/internal/ipam"
	"github.com/sluice-net/sluice/services/ipam/internal/pool"
	"github.com/sluice-net/sluice/services/ipam/internal/server"
	"github.com/sluice-net/sluice/services/ipam/internal/store"
)

const service = "ipam"

// settings is the configuration of the service.
type settings struct {
	Pools      []string      `config:"pools" help:"ranges that pod addresses are taken from, in order of use"`
	Exclude    []string      `config:"exclude" help:"addresses and ranges inside the pools that are never given out"`
	Lease      time.Duration `config:"lease" help:"how long an address is kept for an ADD that has not finished, 1s to 1h"`
	Quarantine time.Duration `config:"quarantine" was:"rest" help:"how long a released address is not given out, 0 to 24h"`
	StateDir   string        `config:"stateDir" help:"directory of the state file, mode 0700"`

	ranges, exclusions []netip.Prefix // set by Validate
}

func defaults(p instance.Paths) settings {
	return settings{
		// For one node on its own; a node of a cluster is told its ranges.
		Pools:      []string{"10.244.0.0/24", "fd00:244::/64"},
		Lease:      ipam.DefaultLease,
		Quarantine: ipam.DefaultQuarantine,
		StateDir:   p.ServiceStateDir(service),
	}
}

// Validate implements the check of package config.
func (s *settings) Validate() error {
	var p config.Problems
	if s.Lease < time.Second || s.Lease > time.Hour {
		p.Addf("lease", "%s is not between 1s and 1h", s.Lease)
	}
	if s.Quarantine < 0 || s.Quarantine > 24*time.Hour {
		p.Addf("quarantine", "%s is not between 0 and 24h", s.Quarantine)
	}
	if !filepath.IsAbs(s.StateDir) {
		p.Addf("stateDir", "%q is not an absolute path", s.StateDir)
	}
	var err, xerr error
	s.ranges, err = pool.ParseRanges("pools", s.Pools)
	s.exclusions, xerr = pool.ParseExclusions("exclude", s.Exclude)
	if err == nil && xerr == nil { // together they may leave nothing
		_, err = pool.New("pools", s.ranges, s.exclusions)
	}
	return errors.Join(p.Err(), err, xerr)
}

func main() { os.Exit(process.Run(service, defaults, run)) }

func run(ctx context.Context, p *process.Process, cfg settings) error {
	started := time.Now()
	state, err := process.Phase(p, "open-state", func() (*store.Store, error) { return store.Open(cfg.StateDir) })
	if err != nil {
		return err
	}
	p.OnExit(state.Close)
	if err := p.Confine(sandbox.Files{Write: []string{cfg.StateDir}}); err != nil {
		return err
	}

	metrics := server.NewMetrics()
	observe := metrics.Observer()
	observe.Reloaded = func(cause error) { p.Log.Error("commit refused, state read again", log.Err(cause)) }
	addresses, err := process.Phase(p, "load-index", func() (*ipam.Allocator, error) {
		a, err := ipam.New(state, ipam.Options{
			Field: "pools", Ranges: cfg.ranges, Exclude: cfg.exclusions,
			Lease: cfg.Lease, Quarantine: cfg.Quarantine, Observe: observe,
		})
		if errors.Is(err, ipam.ErrInconsistent) {
			err = fmt.Errorf("state file %s was left as it is: %w (docs/ipam.md, \"A refused state file\")", state.Path(), err)
		}
		return a, err
	})
	if err != nil {
		return err
	}
	for _, a := range addresses.Outside() {
		p.Log.Warn("addresses held outside the pools are kept until released", "owner", a.Owner.String(), "addresses", a.List())
	}
	if err := metrics.Register(p.Metrics, addresses); err != nil {
		return err
	}
	srv, err := p.NewServer(rpc.Options{
		Register: server.New(addresses, metrics, version.Get().String(), started).Register,
		Methods:  server.Methods(),
	})
	if err != nil {
		return err
	}
	p.Go("allocator", addresses.Run)
	srv.SetAllServing(true)
	p.Ready()
	return p.Serve(ctx, srv)
}
