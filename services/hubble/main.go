// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// sluice-hubble serves the flows of a node through Hubble's API, so that the hubble CLI works. It keeps the flows on
// disk, and counts them in metrics with Hubble's names. The datapath does not depend on it. See docs/hubble.md.
package main

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/sluice-net/sluice/kit/process"
	"github.com/sluice-net/sluice/kit/rpc"
	"github.com/sluice-net/sluice/kit/version"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	"github.com/sluice-net/sluice/proto/wire"
	"github.com/sluice-net/sluice/services/hubble/internal/client"
	"github.com/sluice-net/sluice/services/hubble/internal/client/peers"
	"github.com/sluice-net/sluice/services/hubble/internal/history"
	"github.com/sluice-net/sluice/services/hubble/internal/hubbleflow"
	"github.com/sluice-net/sluice/services/hubble/internal/hubbleflow/flowmetrics"
	"github.com/sluice-net/sluice/services/hubble/internal/hubbleflow/record"
	"github.com/sluice-net/sluice/services/hubble/internal/server"
	"github.com/sluice-net/sluice/services/hubble/internal/server/export"
	"github.com/sluice-net/sluice/services/hubble/internal/server/page"
	"github.com/sluice-net/sluice/services/hubble/internal/server/remote"
)

func main() { os.Exit(process.Run("hubble", defaults, run)) }

func run(ctx context.Context, p *process.Process, cfg Config) error {
	started := time.Now()
	node := cfg.NodeName
	if node == "" {
		var err error
		if node, err = os.Hostname(); err != nil {
			return fmt.Errorf("host name, which names this node in answers: %w", err)
		}
	}
	stored, err := process.Phase(p, "load history", func() (*history.History, error) {
		return history.Open(history.Options{
			Dir: filepath.Join(cfg.StateDir, "history"), MaxBytes: int64(cfg.History.MaxSize), MaxAge: cfg.History.MaxAge,
			Describe: record.Describe, Now: time.Now, Log: p.Log,
		})
	})
	if err != nil {
		return err
	}
	p.OnExit(stored.Close)
	metrics := flowmetrics.New(cfg.metrics())
	if err := p.Metrics.Register(metrics); err != nil {
		return err
	}
	after, last := latest(ctx, stored)
	parts := hubbleflow.Parts{Settings: cfg.Shares.Settings()}
	sink := record.New(record.Options{
		Labels: metrics.NeedLabels(), Parts: parts, History: stored, Metrics: metrics,
		Last: last, Now: time.Now, Log: p.Log,
	})
	conn, err := p.Dial(cfg.Datapath, 0)
	if err != nil {
		return fmt.Errorf("datapath: %w", err)
	}
	events := client.New(conn, sink, p.Log)
	identity, err := p.Dial(cfg.Identity, 0)
	if err != nil {
		return fmt.Errorf("identity: %w", err)
	}
	nodes := peers.New(identity, p.Log)
	var web *page.Server // set before the server starts
	service := server.New(server.Options{
		Page: func() string {
			if web == nil {
				return ""
			}
			return web.URL()
		},
		Version: version.Get().String(), Started: started, Now: time.Now, History: stored,
		Flow: record.Flow(hubbleflow.Converter{Version: strings.TrimPrefix(version.Get().String(), "v")}),
		Node: func() string {
			if name := sink.NodeName(); name != "" {
				return name
			}
			return node
		},
		Parts: parts, Rate: sink.Rate, Source: events.Err, Others: nodes.Others,
		Address: cfg.Listen.advertised(p.Config.Socket.Path), ServerName: cfg.Listen.ServerName,
		Process: wire.NewProcess(p.Effective.Paths.Name, p.Effective.File, p.Effective.Ignored, p.Effective.Each,
			p.LogLevel, p.Log).Started(version.Get().String(), started),
	})
	if err := p.Metrics.Register(service.Collector()); err != nil {
		return err
	}
	if err := p.Confine(cfg.files()); err != nil {
		return err
	}
	srv, err := p.NewServer(rpc.Options{Register: service.Register, Methods: server.Methods()})
	if err != nil {
		return err
	}
	if cfg.Listen.Address != "" {
		listener, err := remote.Listen(remote.Options{
			Address:  cfg.Listen.Address,
			Files:    remote.Files{Cert: cfg.Listen.Cert, Key: cfg.Listen.Key, ClientCA: cfg.Listen.ClientCA},
			Register: service.RegisterRemote, Healthy: []string{"", server.HealthName}, Log: p.Log,
		})
		if err != nil {
			return fmt.Errorf("listen.address %s: %w", cfg.Listen.Address, err)
		}
		p.Log.Info("listening for clients with a certificate", "address", listener.Address())
		p.Go("clients over TCP", listener.Run)
	}
	if cfg.Page.Address != "" {
		conn, err := p.Dial(cfg.Policy, 0)
		if err != nil {
			return fmt.Errorf("policy: %w", err)
		}
		if web, err = page.Listen(page.Options{
			Address: cfg.Page.Address, Flows: service.GetFlows, Policies: policyv1.NewPolicyServiceClient(conn), Log: p.Log,
		}); err != nil {
			return fmt.Errorf("page.address %s: %w", cfg.Page.Address, err)
		}
		p.Log.Info("serving the web page", "address", cfg.Page.Address)
		p.Go("web page", web.Run)
	}
	if x := cfg.History.Export; x.File != "" {
		exporter, err := export.New(export.Options{
			File: x.File, Selection: x.selection(), MaxBytes: int64(x.MaxSize), Backups: x.Backups,
			Flows: service.GetFlows, Log: p.Log,
		})
		if err != nil {
			return fmt.Errorf("history.export: %w", err)
		}
		if err := p.Metrics.Register(exporter); err != nil {
			return err
		}
		p.Go("export", exporter.Run)
	}
	p.Go("history", stored.Run)
	p.Go("losses", sink.Run)
	p.Go("nodes", nodes.Run)
	p.Go("events", func(ctx context.Context) error { return events.Run(ctx, after) })
	// Stored flows can be read even while the datapath is unavailable.
	srv.SetAllServing(true)
	srv.SetServing(server.HealthName, true)
	p.Ready()
	return p.Serve(ctx, srv)
}

// latest returns the ID and the time of the latest stored event; zero values without one.
func latest(ctx context.Context, stored *history.History) (id string, at time.Time) {
	for r := range stored.Backward(ctx, history.Query{}) {
		if r.Loss {
			continue
		}
		if m, err := record.Event(r.Data); err == nil { // a client that reads an unreadable record gets an error
			return cmp.Or(m.GetFlow().GetUuid(), m.GetRepair().GetUuid()), r.Time
		}
	}
	return "", time.Time{}
}
