// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// sluice-policy compiles the network policies of a node into tables that a datapath can enforce, and explains every
// verdict. See docs/policy.md.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"time"

	"github.com/sluice-net/sluice/kit/desired/directory"
	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/kit/process"
	"github.com/sluice-net/sluice/kit/rpc"
	"github.com/sluice-net/sluice/kit/version"
	"github.com/sluice-net/sluice/kube"
	"github.com/sluice-net/sluice/kube/tenants"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	"github.com/sluice-net/sluice/proto/wire"
	"github.com/sluice-net/sluice/proto/wire/reportwire"
	identities "github.com/sluice-net/sluice/services/policy/internal/client"
	"github.com/sluice-net/sluice/services/policy/internal/owner"
	"github.com/sluice-net/sluice/services/policy/internal/server"
	"github.com/sluice-net/sluice/services/policy/internal/source"
	"github.com/sluice-net/sluice/services/policy/internal/source/kubernetes"
)

// loadGCPercent is the GC percentage while the state is loaded. With the usual value of 50, garbage collection takes
// a third of the time. With a value above 100, long-lived objects are scattered among garbage.
const loadGCPercent = 100

func main() {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case "validate":
			os.Exit(validate(os.Args[2:], os.Stdin, os.Stdout, os.Stderr))
		case "fields":
			os.Exit(listFields(os.Args[2:], os.Stdout, os.Stderr))
		}
	}
	os.Exit(process.Run("policy", defaults, run))
}

func run(ctx context.Context, p *process.Process, cfg Config) error {
	started := time.Now()
	sources := []string{source.Identity}
	if cfg.Sources.Directory != "" {
		sources = append(sources, managed.SourceFile)
	}
	if cfg.Kubernetes.Enabled() {
		sources = append(sources, managed.SourceKubernetes)
	}
	var o *owner.Owner
	set := tenants.WithoutKubernetes(cfg.Shares.Settings())
	if cfg.Kubernetes.Enabled() {
		set = tenants.New(cfg.Shares.Settings(), func() { o.TenantsChanged() }) // called once Follow runs
	}
	var api *kube.Client
	if cfg.Kubernetes.Enabled() {
		state := filepath.Join(cfg.StateDir, "kubernetes-api.json")
		var err error
		api, err = kube.New(cfg.Kubernetes.Settings, kube.Options{Name: "sluice-policy", StateFile: state, Log: p.Log})
		if err == nil {
			err = compareCluster(ctx, api.Cluster, cfg.StateDir, p.Log)
		}
		if err != nil {
			return err
		}
	}
	loaded, err := process.Phase(p, "load state", func() (*owner.Owner, error) {
		// Nearly all objects that are allocated while the state is loaded are either kept, or become garbage only at
		// the end.
		defer debug.SetGCPercent(debug.SetGCPercent(loadGCPercent))
		return owner.New(cfg.owner(p.Log, set), cfg.StateDir, sources)
	})
	if err != nil {
		return err
	}
	o = loaded
	p.OnExit(o.Close)
	debug.FreeOSMemory() // return the memory that loading has used

	if err := p.Metrics.Register(server.Collector{Owner: o}); err != nil {
		return err
	}

	conn, err := p.Dial(cfg.Sources.Identity, 0)
	if err != nil {
		return fmt.Errorf("sources.identity: %w", err)
	}

	files := cfg.files()
	if api != nil {
		files.Read = append(files.Read, api.Files()...)
	}
	if err := p.Confine(files); err != nil {
		return err
	}

	service := &server.Server{
		Owner: o, Version: version.Get().String(), Started: started, Addresses: identities.NewAddresses(conn),
	}
	service.Process = wire.NewProcess(p.Effective.Paths.Name, p.Effective.File, p.Effective.Ignored, p.Effective.Each,
		p.LogLevel, p.Log)
	srv, err := p.NewServer(rpc.Options{Register: service.Register, Methods: server.Methods()})
	if err != nil {
		return err
	}
	p.Go("owner", o.Run)
	p.Go("refused policies", func(ctx context.Context) error {
		reports := reportwire.New(identityv1.NewClusterServiceClient(conn), reportwire.Options{Log: p.Log})
		return reports.Report(ctx, unenforced(o.Reader(), cfg.StateDir, set.Of))
	})
	p.Go("waiting labels", func(ctx context.Context) error {
		return identities.AdmitNarrowing(ctx, conn, o.Reader().Narrows, p.Log)
	})
	p.Go("identities", identities.NewIdentities(conn, source.Identity, o.Identities(), p.Log).Run)
	if cfg.Sources.Directory != "" {
		feed := o.Feed(managed.SourceFile)
		files := directory.New(cfg.Sources.Directory, "policies", feed, feed.Failed, p.Log)
		files.MaxBytes = int(cfg.Limits.Manifests)
		p.Go("directory", files.Run)
	}
	if api != nil {
		p.Go("kubernetes addresses", api.Run)
		p.Go("kubernetes namespaces", func(ctx context.Context) error { return set.Follow(ctx, api, p.Log) })
		source := kubernetes.New(api, o.Objects(managed.SourceKubernetes), p.Log)
		source.Kinds = identities.NewKinds(conn, p.Log)
		o.OnAgain(source.Again)
		p.Go("kubernetes", source.Run)
	}
	p.Waiting("waiting until every source of identities and manifests is complete")
	p.Go("readiness", func(ctx context.Context) error {
		select {
		case <-o.Ready():
			srv.SetAllServing(true)
			p.Ready()
		case <-ctx.Done():
		}
		<-ctx.Done()
		return nil
	})
	return p.Serve(ctx, srv)
}
