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
	"sync"
	"time"

	"github.com/sluice-net/sluice/kit/config"
	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/process"
	"github.com/sluice-net/sluice/kit/rpc"
	"github.com/sluice-net/sluice/kit/sandbox"
	"github.com/sluice-net/sluice/kit/version"
	"github.com/sluice-net/sluice/kube"
	"github.com/sluice-net/sluice/services/ipam/internal/ipam"
	"github.com/sluice-net/sluice/services/ipam/internal/nodeobject"
	"github.com/sluice-net/sluice/services/ipam/internal/pool"
	"github.com/sluice-net/sluice/services/ipam/internal/server"
	"github.com/sluice-net/sluice/services/ipam/internal/store"
)

const service = "ipam"

// settings is the configuration of the service.
type settings struct {
	Mode       string        `config:"mode" enum:"static,kubernetes" help:"where ranges come from, the same on all nodes of a cluster: static: pools; kubernetes: spec.podCIDRs of this machine's Node object"`
	Pools      []string      `config:"pools" help:"in mode static, ranges that pod addresses are taken from, in order of use"`
	Exclude    []string      `config:"exclude" help:"addresses and ranges inside the pools that are never given out"`
	Lease      time.Duration `config:"lease" help:"how long an address is kept for an ADD that has not finished, 1s to 1h"`
	Quarantine time.Duration `config:"quarantine" was:"rest" help:"how long a released address is not given out, 0 to 24h"`
	StateDir   string        `config:"stateDir" help:"directory of the state file, mode 0700"`

	Kubernetes kube.NodeSettings `config:"kubernetes"`

	ranges, exclusions []netip.Prefix // set by Validate
}

func defaults(p instance.Paths) settings {
	return settings{
		Mode: modeStatic,
		// For one node on its own; a node of a cluster is told its ranges.
		Pools:      []string{"10.244.0.0/24", "fd00:244::/64"},
		Lease:      ipam.DefaultLease,
		Quarantine: ipam.DefaultQuarantine,
		StateDir:   p.ServiceStateDir(service),
		Kubernetes: kube.NodeDefaults(),
	}
}

// The modes.
const (
	modeStatic     = "static"
	modeKubernetes = "kubernetes"
)

// learns says whether the ranges come from the Node object.
func (s *settings) learns() bool { return s.Mode == modeKubernetes }

// Calls implements process.Caller.
func (s *settings) Calls() sandbox.Calls { return sandbox.Calls{Inet: s.learns()} }

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
	if s.learns() && !s.Kubernetes.Enabled() {
		p.Addf("kubernetes.api", "needed in mode kubernetes; or kubernetes.kubeconfig")
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
	files := sandbox.Files{Write: []string{cfg.StateDir}}
	var client *kube.Client
	if cfg.learns() {
		client, err = kube.New(cfg.Kubernetes.Settings, kube.Options{
			Name: "sluice-ipam", StateFile: filepath.Join(cfg.StateDir, "kubernetes-api.json"), Log: p.Log,
		})
		if err != nil {
			return err
		}
		files.Read = client.Files()
	}
	if err := p.Confine(files); err != nil {
		return err
	}

	metrics := server.NewMetrics()
	observe := metrics.Observer()
	observe.Reloaded = func(cause error) { p.Log.Error("commit refused, state read again", log.Err(cause)) }
	field := "pools"
	if cfg.learns() {
		field = nodeobject.Field
	}
	addresses, err := process.Phase(p, "load-index", func() (*ipam.Allocator, error) {
		a, err := ipam.New(state, ipam.Options{
			Field: field, Ranges: cfg.ranges, Stored: cfg.learns(), Exclude: cfg.exclusions,
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
		p.Log.Warn("addresses held outside the pools are kept until released",
			"owner", a.Owner.String(), "addresses", a.List())
	}
	if err := metrics.Register(p.Metrics, addresses); err != nil {
		return err
	}
	service := server.New(addresses, metrics, version.Get().String(), started)
	srv, err := p.NewServer(rpc.Options{Register: service.Register, Methods: server.Methods()})
	if err != nil {
		return err
	}
	p.Go("allocator", addresses.Run)
	if !cfg.learns() {
		srv.SetAllServing(true)
		p.Ready()
		return p.Serve(ctx, srv)
	}
	ready := sync.OnceFunc(p.Ready)
	node, err := nodeobject.New(client, nodeobject.Options{
		Name: cfg.Kubernetes.Node, Ranges: addresses, Log: p.Log,
		Report: func(why error) {
			if why != nil {
				p.Waiting("waiting for a range: " + why.Error())
			} else {
				ready()
			}
			srv.SetAllServing(why == nil)
		},
	})
	if err != nil {
		return err
	}
	service.NoRange = node.Problem
	p.Go("addresses of the Kubernetes API", client.Run)
	p.Go("node object", node.Run)
	return p.Serve(ctx, srv)
}
