// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// sluice-controller performs tasks that one process of a cluster does for all nodes: it writes the status of
// policies, removes nodes whose Node was deleted, creates Events about pod ranges, disks and Services beyond their
// share, and publishes the podCIDRs of Nodes and the kinds of policy. It also assigns addresses of pools to Services
// of type LoadBalancer. It serves no node. See docs/controller.md.
package main

import (
	"context"
	"crypto/rand"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"time"

	"github.com/sluice-net/sluice/kit/process"
	"github.com/sluice-net/sluice/kit/rpc"
	"github.com/sluice-net/sluice/kit/version"
	"github.com/sluice-net/sluice/kube"
	"github.com/sluice-net/sluice/proto/wire"
	"github.com/sluice-net/sluice/services/controller/internal/client"
	"github.com/sluice-net/sluice/services/controller/internal/election"
	"github.com/sluice-net/sluice/services/controller/internal/kinds"
	"github.com/sluice-net/sluice/services/controller/internal/kubernetes"
	"github.com/sluice-net/sluice/services/controller/internal/lbipam"
	"github.com/sluice-net/sluice/services/controller/internal/nodegc"
	"github.com/sluice-net/sluice/services/controller/internal/nodereports"
	"github.com/sluice-net/sluice/services/controller/internal/podcidrs"
	"github.com/sluice-net/sluice/services/controller/internal/policystatus"
	"github.com/sluice-net/sluice/services/controller/internal/poolevents"
	"github.com/sluice-net/sluice/services/controller/internal/server"
	"github.com/sluice-net/sluice/services/controller/internal/serviceevents"
	"github.com/sluice-net/sluice/services/policy/evaluation"
)

func main() { os.Exit(process.Run("controller", defaults, run)) }

func run(ctx context.Context, p *process.Process, cfg Config) error {
	started := time.Now()
	host, err := os.Hostname()
	if err != nil {
		return fmt.Errorf("host name, which is part of the candidate's name for the Lease: %w", err)
	}
	api, err := kube.New(cfg.Kubernetes, kube.Options{
		Name: "sluice-controller", StateFile: filepath.Join(cfg.StateDir, "kubernetes-api.json"), Log: p.Log,
	})
	if err != nil {
		return err
	}
	conn, err := p.Dial(cfg.Identity, 0)
	if err != nil {
		return fmt.Errorf("identity: %w", err)
	}
	writer, err := kubernetes.NewWriter(api.Config, host, p.Log)
	if err != nil {
		return err
	}
	check, err := kubernetes.NewNodeCheck(api)
	if err != nil {
		return err
	}
	discovery, err := evaluation.NewDiscovery(api)
	if err != nil {
		return err
	}
	leads, err := election.New(api.Config, cfg.Election.Namespace, cfg.Election.Lease, host+"_"+rand.Text(), p.Log)
	if err != nil {
		return err
	}

	registry := client.NewNodes(conn)
	policyKinds := kinds.New(discovery, client.NewKinds(conn, p.Log), leads, p.Log)
	evaluator, err := process.Phase(p, "load state", func() (*evaluation.Evaluator, error) {
		return evaluation.Open(cfg.Settings, cfg.StateDir, api, policyKinds, p.Log)
	})
	if err != nil {
		return err
	}
	p.OnExit(evaluator.Close)
	status := policystatus.New(evaluator, writer, leads, p.Log)
	gone, err := nodegc.New(filepath.Join(cfg.StateDir, "nodes.json"), check, registry, leads, p.Log)
	if err != nil {
		return err
	}
	pools := poolevents.New(writer, leads, p.Log)
	ranges := podcidrs.New(registry, leads, p.Log)
	balancers := lbipam.New(writer, cfg.Announce.DefaultClass, evaluator.Tenant, leads, p.Log)
	services, err := kubernetes.NewBalancers(api, balancers, p.Log)
	if err != nil {
		return err
	}
	nodes, err := kubernetes.NewNodes(api, gone, pools, ranges, balancers, p.Log)
	if err != nil {
		return err
	}
	beyond := serviceevents.New(writer, evaluator.Tenant, leads, p.Log)
	reports := nodereports.New(client.NewReports(conn, p.Log), api.Nodes, status, beyond, pools)
	debug.FreeOSMemory() // memory that loading used

	service := server.New(server.Options{
		Version: version.Get().String(), Started: started, Election: leads.Status, Answers: status.Answers,
		Subjects: []server.Subject{policyKinds, gone, ranges, status, pools, beyond, balancers},
		Process: wire.NewProcess(p.Effective.Paths.Name, p.Effective.File, p.Effective.Ignored, p.Effective.Each,
			p.LogLevel, p.Log),
	})
	if err := p.Metrics.Register(service.Collector()); err != nil {
		return err
	}
	files := cfg.files()
	files.Read = append(files.Read, api.Files()...)
	if err := p.Confine(files); err != nil {
		return err
	}
	srv, err := p.NewServer(rpc.Options{Register: service.Register, Methods: server.Methods()})
	if err != nil {
		return err
	}
	p.Go("kubernetes addresses", api.Run)
	p.Go("election", leads.Run)
	p.Go("policy status", status.Run)
	p.Go("kinds of policy", policyKinds.Run)
	p.Go("node garbage collection", gone.Run)
	p.Go("pool events", pools.Run)
	p.Go("service events", beyond.Run)
	p.Go("load balancer addresses", balancers.Run)
	p.Go("services and pools", services.Run)
	p.Go("pod CIDRs", ranges.Run)
	p.Go("nodes", nodes.Run)
	p.Go("reports of nodes", reports.Run)
	p.Waiting("waiting until every kind of policy is listed")
	p.Go("readiness", func(ctx context.Context) error {
		select {
		case <-evaluator.Ready():
			srv.SetAllServing(true)
			p.Ready()
		case <-ctx.Done():
		}
		<-ctx.Done()
		return nil
	})
	return p.Serve(ctx, srv)
}
