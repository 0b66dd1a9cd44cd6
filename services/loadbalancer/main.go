// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// sluice-loadbalancer computes the frontends of one node from the services of a cluster: addresses with the backends
// for their connections. See docs/loadbalancer.md.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/sluice-net/sluice/kit/burst"
	"github.com/sluice-net/sluice/kit/desired/directory"
	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/process"
	"github.com/sluice-net/sluice/kit/rpc"
	"github.com/sluice-net/sluice/kit/version"
	"github.com/sluice-net/sluice/kube"
	"github.com/sluice-net/sluice/kube/tenants"
	"github.com/sluice-net/sluice/proto/wire"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/healthport"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/owner"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/server"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/source/kubernetes"
)

// systemInterval is the interval at which the process checks whether the cluster's own services are enforced. The
// process is ready only if they are.
const systemInterval = 5 * time.Second

func main() { os.Exit(process.Run("loadbalancer", defaults, run)) }

func run(ctx context.Context, p *process.Process, cfg Config) error {
	started := time.Now()
	var sources []string
	if cfg.Sources.Directory != "" {
		sources = append(sources, managed.SourceFile)
	}
	if cfg.Kubernetes.Enabled() {
		sources = append(sources, managed.SourceKubernetes)
	}
	of := tenants.WithoutKubernetes(cfg.Shares.Settings())
	changed := make(chan struct{}, 1)
	if cfg.Kubernetes.Enabled() {
		of = tenants.New(cfg.Shares.Settings(), func() {
			select {
			case changed <- struct{}{}:
			default:
			}
		})
	}
	o, err := process.Phase(p, "load state", func() (*owner.Owner, error) {
		burst.Begin() // most memory that is allocated from here on stays in use
		config := cfg.owner(p.Log)
		config.Tenants = of
		return owner.New(config, cfg.StateDir, sources)
	})
	if err != nil {
		return err
	}
	p.OnExit(o.Close)
	if err := p.Metrics.Register(server.Collector{Owner: o}); err != nil {
		return err
	}
	files := cfg.files()
	var api *kube.Client
	if cfg.Kubernetes.Enabled() {
		state := filepath.Join(cfg.StateDir, "kubernetes-api.json")
		api, err = kube.New(cfg.Kubernetes, kube.Options{Name: "sluice-loadbalancer", StateFile: state, Log: p.Log})
		if err != nil {
			return err
		}
		files.Read = append(files.Read, api.Files()...)
	}
	if err := p.Confine(files); err != nil {
		return err
	}
	service := &server.Server{Owner: o, Version: version.Get().String(), Started: started}
	service.Process = wire.NewProcess(p.Effective.Paths.Name, p.Effective.File, p.Effective.Ignored, p.Effective.Each,
		p.LogLevel, p.Log)
	var ports *healthport.Ports
	if cfg.HealthChecks.Address != healthChecksOff {
		ports = healthport.New(o.Reader(), healthport.Options{
			Address: cfg.HealthChecks.Address, Path: filepath.Join(cfg.StateDir, "health-checks.json"),
			Store: instance.ListenersSocketBeside(p.Config.Socket.Path), Log: p.Log,
		})
		service.HealthPorts = ports.Open
	}
	srv, err := p.NewServer(rpc.Options{Register: service.Register, Methods: server.Methods()})
	if err != nil {
		return err
	}
	p.Go("owner", o.Run)
	p.Go("memory", func(ctx context.Context) error {
		for {
			select {
			case <-o.Garbage():
				p.GiveBackMemory()
			case <-ctx.Done():
				return nil
			}
		}
	})
	if ports != nil {
		p.Go("health check ports", ports.Run)
	}
	if cfg.Sources.Directory != "" {
		feed := o.Feed(managed.SourceFile)
		files := directory.New(cfg.Sources.Directory, "services", feed, feed.Failed, p.Log)
		files.MaxBytes = int(cfg.Limits.Manifests)
		p.Go("directory", files.Run)
	}
	if api != nil {
		p.Go("kubernetes addresses", api.Run)
		objects := &kubernetes.Source{Client: api, Sink: o.Objects(managed.SourceKubernetes), Log: p.Log, SetZone: o.SetZone}
		if cfg.Node.Zone == "" {
			objects.Node = cfg.Node.Name
		}
		p.Go("kubernetes", objects.Run)
		conn, err := p.Dial(cfg.Sources.Identity, 0)
		if err != nil {
			return fmt.Errorf("sources.identity: %w", err)
		}
		p.Go("services beyond their share", func(ctx context.Context) error {
			return newReporter(conn, api.Nodes, p.Log).Report(ctx, beyondShare(o.Reader()))
		})
		p.Go("tenants", func(ctx context.Context) error { return of.Follow(ctx, api, p.Log) })
		p.Go("changes of tenants", func(ctx context.Context) error {
			for {
				select {
				case <-changed:
					if err := o.TenantsChanged(ctx); err != nil && ctx.Err() == nil {
						return err
					}
				case <-ctx.Done():
					return nil
				}
			}
		})
	}
	p.Waiting("waiting until every source of services was listed")
	p.Go("readiness", func(ctx context.Context) error {
		select {
		case <-o.Ready():
			srv.SetAllServing(true)
			p.Ready()
		case <-ctx.Done():
			return nil
		}
		look := time.NewTicker(systemInterval)
		defer look.Stop()
		for {
			why := o.Reader().SystemRefused(ctx)
			if ctx.Err() != nil {
				return nil
			}
			p.Unready(why)
			select {
			case <-look.C:
			case <-ctx.Done():
				return nil
			}
		}
	})
	return p.Serve(ctx, srv)
}
