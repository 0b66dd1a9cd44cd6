// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Sluice-dns evaluates the DNS messages of redirected connections. It passes the addresses of allowed names to
// sluice-policy before it releases an answer. It gets the packets from sluice-datapath through a TAP device.
//
// See docs/reference/dns.md.
package main

import (
	"context"
	"errors"
	"os"
	"time"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/process"
	"github.com/sluice-net/sluice/kit/rpc"
	"github.com/sluice-net/sluice/kit/sandbox"
	"github.com/sluice-net/sluice/kit/version"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	"github.com/sluice-net/sluice/proto/wire"
	"github.com/sluice-net/sluice/proxy/attach"
	"github.com/sluice-net/sluice/proxy/endpoints"
	"github.com/sluice-net/sluice/proxy/pods"
	"github.com/sluice-net/sluice/proxy/rulesets"
	"github.com/sluice-net/sluice/services/dns/internal/client"
	"github.com/sluice-net/sluice/services/dns/internal/exchange"
	"github.com/sluice-net/sluice/services/dns/internal/names"
	"github.com/sluice-net/sluice/services/dns/internal/report"
	"github.com/sluice-net/sluice/services/dns/internal/rules"
	"github.com/sluice-net/sluice/services/dns/internal/server"
	"github.com/sluice-net/sluice/services/dns/internal/store"
	"github.com/sluice-net/sluice/services/dns/internal/stream"
	"github.com/sluice-net/sluice/services/dns/internal/tap"
)

func main() { os.Exit(process.Run("dns", defaults, run)) }

func run(ctx context.Context, p *process.Process, cfg Config) error {
	started := time.Now()
	table := names.New(names.Limits{Names: cfg.Names.Max, Addresses: cfg.Names.Addresses}, time.Now())
	table.Exclude(cfg.exclusions(), time.Now())
	var file *store.Store
	if err := p.Phase("load names", func() error {
		s, list, aside, err := store.Open(cfg.StateDir)
		if err != nil {
			return err
		}
		file = s
		if aside != nil {
			p.Log.Error("the file of learned names was put aside; starting without names", "file", store.AsideName,
				log.Err(aside))
		}
		if omitted := table.Restore(list, time.Now()); omitted > 0 {
			p.Log.Warn("addresses were not restored: they are beyond the limits, or never learned", "addresses", omitted)
		}
		return nil
	}); err != nil {
		return err
	}
	saver := &saver{table: table, file: file, log: p.Log}
	p.OnExit(func() error { return errors.Join(saver.save(), file.Close()) })
	conn, err := p.Dial(cfg.Policy, 0)
	if err != nil {
		return err
	}
	cluster, err := p.Dial(cfg.Identity, 0)
	if err != nil {
		return err
	}
	datapath, err := p.Dial(cfg.Datapath, 0)
	if err != nil {
		return err
	}
	sets := rules.New()
	followed := rulesets.New(conn, rulesets.Options{
		Proxies: []netv1.Proxy{netv1.Proxy_PROXY_DNS}, Rules: client.Sets{Rules: sets}, Listed: table.Unenforced, Log: p.Log,
	})
	reporter := report.New(cfg.events, client.NewObservers(datapath))
	messages := exchange.New(exchange.Options{
		Rules: sets, Table: table, Enforcer: client.New(conn), Cluster: client.NewCluster(cluster),
		Refusal: cfg.refusal, LearnFrom: cfg.learnFrom, HoldFor: cfg.Hold, Now: time.Now,
		Report: reporter,
	})
	known := pods.New(cfg.Shares.Settings(), messages.Leave)
	watched := endpoints.New(datapath, known, cfg.Shares.Settings().Label(), p.Log)
	held := server.NewHeld()
	packets := tap.New(tap.Options{
		Exchange: messages, Rules: sets, Pods: known, Log: p.Log,
		Held: func(d time.Duration) { held.Observe(d.Seconds()) },
	})
	var streams *stream.Server
	attachment := attach.New(attach.Options{
		Proxy: netv1.Proxy_PROXY_DNS, Socket: cfg.ProxySocket, Log: p.Log,
		Use:    func(fd int) (attach.Queue, error) { return packets.Use(fd) },
		Listen: func(fds []int) { streams.Listen(fds) },
	})
	streams = stream.New(stream.Options{
		Exchange: messages, Rules: sets, Pods: known, Take: attachment.Take, Later: packets.Later,
		Held: func(d time.Duration) { held.Observe(d.Seconds()) }, Log: p.Log,
	})
	if err := errors.Join(p.Metrics.Register(held), p.Metrics.Register(server.NewMetrics(server.Sources{
		Table: table, Rules: sets, RuleSets: followed.Err, Counts: &messages.Counts, State: file.Problem,
		Packets: &packets.Counts, Fragments: packets.Fragments, Attached: attachment.Err,
		Endpoints: known.Len, EndpointWatch: watched.Err, Unreported: reporter.Lost,
		Streams: streams.Len, StreamCounts: &streams.Counts, StreamsAttached: attachment.TCPErr,
	}))); err != nil {
		return err
	}
	service := server.New(server.Options{
		Table: table, Rules: sets, Now: time.Now,
		Process: wire.NewProcess(p.Effective.Paths.Name, p.Effective.File, p.Effective.Ignored, p.Effective.Each,
			p.LogLevel, p.Log).Started(version.Get().String(), started),
	})
	if err := p.Confine(sandbox.Files{Write: []string{cfg.StateDir}}); err != nil {
		return err
	}
	srv, err := p.NewServer(rpc.Options{Register: service.Register, Methods: server.Methods()})
	if err != nil {
		return err
	}
	p.Go("names", saver.run)
	p.Go("rule sets", followed.Run)
	p.Go("evictions", messages.Run)
	p.Go("endpoints", watched.Run)
	p.Go("events", reporter.Run)
	p.Go("packets", packets.Run)
	p.Go("connections", streams.Run)
	p.Go("attachment", attachment.Run)
	srv.SetAllServing(true)
	p.Ready()
	return p.Serve(ctx, srv)
}
