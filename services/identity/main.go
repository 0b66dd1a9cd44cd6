// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// sluice-identity turns label sets into numbers that are the same on
// every node of a cluster. See docs/identity.md.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/process"
	"github.com/sluice-net/sluice/kit/rpc"
	"github.com/sluice-net/sluice/kit/version"
	"github.com/sluice-net/sluice/kube"
	"github.com/sluice-net/sluice/proto/wire"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/cluster"
	"github.com/sluice-net/sluice/services/identity/internal/confirmed"
	"github.com/sluice-net/sluice/services/identity/internal/etcd"
	"github.com/sluice-net/sluice/services/identity/internal/etcd/session"
	"github.com/sluice-net/sluice/services/identity/internal/kinds"
	"github.com/sluice-net/sluice/services/identity/internal/labels"
	"github.com/sluice-net/sluice/services/identity/internal/nodes"
	"github.com/sluice-net/sluice/services/identity/internal/pods"
	"github.com/sluice-net/sluice/services/identity/internal/registry"
	"github.com/sluice-net/sluice/services/identity/internal/server"
	"github.com/sluice-net/sluice/services/identity/internal/snapshot"
	"github.com/sluice-net/sluice/store"
)

func main() {
	os.Exit(process.Run("identity", defaults, run))
}

func run(ctx context.Context, p *process.Process, cfg Config) error {
	started := time.Now()
	filter, err := labels.NewFilter(cfg.Labels.Include, cfg.Labels.Exclude)
	if err != nil {
		return err
	}

	nodeFilter, err := labels.NewNodeFilter(cfg.NodeLabels.Include, cfg.NodeLabels.Exclude)
	if err != nil {
		return err
	}

	dir, last, err := openState(p, cfg)
	if err != nil {
		return err
	}

	client := cfg.Etcd.client()
	switch {
	case !cfg.Etcd.store():
	case cfg.Etcd.StoreToken != "":
		client.Store = store.NewKubernetesRenewer(cfg.Etcd.StoreDir, cfg.Node, cfg.Etcd.token, time.Now, p.Log)
	default:
		client.Store, err = store.NewRenewer(cfg.Etcd.StoreDir, cfg.Node, time.Now, p.Log)
		if err != nil {
			return process.Misconfigured(fmt.Errorf("etcd.storeDir: %w", err))
		}
	}
	sess, err := session.Open(session.Config{
		Client: client, Prefix: cfg.Etcd.Prefix, Node: cfg.Node, TTL: cfg.Etcd.LeaseTTL,
		AliveTTL: cfg.Etcd.AliveTTL, Incarnation: last.Incarnation, Boot: dir.BootID(), Last: last.Holds.Session,
		Timeout: cfg.Etcd.Timeout, Listen: cfg.listen(), Log: p.Log,
	})
	if err != nil {
		return err
	}
	p.OnExit(sess.Close)

	var kubernetes *kube.Client
	if cfg.Kubernetes.Enabled() {
		kubernetes, err = kube.New(cfg.Kubernetes, kube.Options{
			Name: "sluice-identity", StateFile: filepath.Join(cfg.StateDir, "kubernetes-api.json"), Log: p.Log,
		})
		if err != nil {
			return err
		}
	}

	if err := p.Confine(cfg.files(kubernetes)); err != nil {
		return err
	}

	var roles session.Roles
	hub, endpoints, nodes := server.NewHub(), server.NewEndpointHub(), server.NewClusterHub()
	nodeStore := etcd.NewNodes(sess)
	reg := registry.New(cfg.registry(last.Incarnation, p.Log), nodeStore, dir, nodes, last.Registration)
	reg.Restore(last.Pins)
	keys := etcd.New(sess, nodeStore, etcd.Readers{
		Prepare: reg.Prepare, Mirror: dir, Observe: reg.Observe,
		Spread: func() time.Duration { return spread(reg.Status().Nodes) },
	})
	exchange := confirmed.New(confirmed.Options{
		Store: etcd.NewConfirmed(sess), Node: mappings{reg, dir}, Incarnation: last.Incarnation, Rest: reg.Rest(),
		Log: p.Log,
	})
	settings := cfg.allocator(p.Log)
	settings.Leading = exchange.Lead
	var set *pods.Set
	if kubernetes != nil {
		set = pods.New(cfg.Node, cfg.Cluster.Name, filter)
		set.SetShares(cfg.Shares.Settings())
		settings.Tenant = set.Tenant
	}
	alloc, err := allocator.New(settings, keys, dir, hub,
		server.EndpointPublisher{EndpointHub: endpoints, Registry: reg},
		last.Holds, last.Known, last.Cached)
	if err != nil {
		return err
	}
	keys.Resume(last.Keys) // after the allocator has published this node's endpoints
	if err := p.Metrics.Register(server.Collector{Allocator: alloc, Registry: reg, Listings: keys.Listings}); err != nil {
		return err
	}

	service := &server.Server{
		Process: wire.NewProcess(p.Effective.Paths.Name, p.Effective.File, p.Effective.Ignored, p.Effective.Each,
			p.LogLevel, p.Log),
		Allocator: alloc, Hub: hub, Endpoints: endpoints, Filter: filter, NodeFilter: nodeFilter,
		Node: cfg.Node, Version: version.Get().String(), Started: started,
		Cluster: &server.Cluster{
			Registry: reg, Hub: nodes, Node: cfg.Node, NodeFilter: nodeFilter,
			Connected: func() bool { up, _ := alloc.Connected(); return up },
			Kinds:     kinds.New(etcd.NewKinds(sess), p.Log),
			Refusals:  etcd.NewRefusals(sess), Confirming: exchange.Err,
			Roles: roles.Err,
		},
	}
	if client.Store != nil {
		service.Credentials = client.Store.Problem
	}
	if set != nil {
		service.Pods = set
		service.Relabeler = pods.NewRelabeler(service.Pods, alloc, endpoints, p.Log)
	}
	srv, err := p.NewServer(rpc.Options{Register: service.Register, Methods: server.Methods()})
	if err != nil {
		return err
	}
	p.Go("allocator", alloc.Run)
	if client.Store != nil {
		p.Go("credentials of the store", func(ctx context.Context) error {
			return client.Store.Run(ctx, func(c store.Credentials) { sess.Move(c.Endpoints()) })
		})
	}
	p.Go("registry", func(ctx context.Context) error { return reg.Run(ctx, alloc.Connected) })
	p.Go("confirmations", exchange.Run)
	p.Go("state", dir.Watch)
	p.Go("roles of etcd", func(ctx context.Context) error { return sess.CheckRoles(ctx, &roles) })
	p.Go("kinds of policy", service.Cluster.Kinds.Run)
	if kubernetes != nil {
		followKubernetes(ctx, p, kubernetes, service)
	}
	if client.Store != nil && cfg.Etcd.StoreToken != "" {
		if err := followStore(p, kubernetes, cfg.Etcd.Namespace, client.Store); err != nil {
			return err
		}
	}
	p.Waiting("waiting for etcd")
	p.Go("readiness", func(ctx context.Context) error {
		told := sync.OnceFunc(p.Ready)
		for {
			ready, _ := alloc.Ready()
			numbers, changed := alloc.Numbers()
			srv.SetAllServing(ready)
			srv.SetServing(wire.NewLabelSets, numbers)
			if ready {
				told()
			}
			select {
			case <-changed:
			case <-ctx.Done():
				return nil
			}
		}
	})
	return p.Serve(ctx, srv)
}

// mappings adapts this node's mappings of other nodes for package confirmed.
type mappings struct {
	*registry.Registry
	dir *snapshot.Dir
}

// Applied returns the point up to which both the kernel and the files of this node have
// every removal.
func (m mappings) Applied() cluster.Point {
	at, saved := m.Registry.Applied(), m.dir.Saved()
	if saved.Cluster != at.Cluster {
		saved.Revision = 0
	}
	at.Revision = min(at.Revision, saved.Revision)
	return at
}

// Wants returns the revision that this node asks the other nodes to confirm.
func (m mappings) Wants() int64 { return m.WantsConfirmed() }

// Nodes returns how many other nodes there are.
func (m mappings) Nodes() int { return m.Status().Nodes }

// SetConfirmed sets the revision that all nodes have confirmed.
func (m mappings) SetConfirmed(s confirmed.Summary) {
	m.Registry.SetConfirmed(registry.Confirmed{Cluster: s.Cluster, Revision: s.Revision})
}

// spread returns the longest delay of a listing, for a number of other known nodes. Each listing of a large cluster
// costs etcd a tenth of a second of processor time, and after an outage all nodes list at the same time. A node that
// knows no other nodes cannot serve data yet, so its listing begins at once.
func spread(nodes int) time.Duration {
	return min(time.Duration(nodes)*time.Second/20, time.Minute)
}

// followKubernetes starts the watches of the Kubernetes API.
func followKubernetes(ctx context.Context, p *process.Process, client *kube.Client, s *server.Server) {
	servers := nodes.NewAPIServers(ctx, client.Servers, s.Allocator, s.Cluster.Registry, p.Log)
	labels := nodes.NewLabels(ctx, s.Allocator, s.Cluster.Registry, p.Log)
	p.Go("addresses of the Kubernetes API", client.Run)
	p.Go("identities of the Kubernetes API", servers.Run)
	p.Go("identities of nodes", labels.Run)
	p.Go("relabelling", s.Relabeler.Run)
	p.Go("pods", func(ctx context.Context) error { return s.Pods.Follow(ctx, client, p.Log) })
}

// openState opens the state directory, which is closed when the process ends, and reads the former process's state.
func openState(p *process.Process, cfg Config) (dir *snapshot.Dir, last snapshot.Loaded, err error) {
	last, err = process.Phase(p, "load state", func() (last snapshot.Loaded, err error) {
		dir, err = snapshot.Open(cfg.StateDir, cfg.Node)
		if err != nil {
			return last, err
		}
		return dir.Load()
	})
	if err != nil {
		return nil, last, err
	}
	p.OnExit(dir.Close)
	if last.Damaged != nil {
		p.Log.Error("the cache of identities is corrupt; it was put aside and is read from etcd again",
			"kept_as", snapshot.DamagedFile, log.Err(last.Damaged))
	}
	if last.DamagedIncarnation != nil {
		p.Log.Error("the incarnation of this node cannot be read; it was put aside, and the node waits until its old name is free",
			"kept_as", snapshot.DamagedIncarnationFile, log.Err(last.DamagedIncarnation))
	}
	return dir, last, nil
}
