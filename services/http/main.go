// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Sluice-http evaluates the HTTP requests and TLS server names of redirected connections. It forwards what the rules
// allow on a second connection, with the address and port of the client. It gets its sockets from sluice-datapath.
//
// See docs/reference/http.md.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"github.com/sluice-net/sluice/kit/process"
	"github.com/sluice-net/sluice/kit/rpc"
	"github.com/sluice-net/sluice/kit/sandbox"
	"github.com/sluice-net/sluice/kit/version"
	"github.com/sluice-net/sluice/model/shares"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	statusv1 "github.com/sluice-net/sluice/proto/gen/sluice/status/v1"
	"github.com/sluice-net/sluice/proto/wire"
	"github.com/sluice-net/sluice/proxy/attach"
	"github.com/sluice-net/sluice/proxy/endpoints"
	"github.com/sluice-net/sluice/proxy/pods"
	"github.com/sluice-net/sluice/proxy/rulesets"
	"github.com/sluice-net/sluice/services/http/internal/client"
	"github.com/sluice-net/sluice/services/http/internal/relay"
	"github.com/sluice-net/sluice/services/http/internal/rules"
	"github.com/sluice-net/sluice/services/http/internal/server"
)

func main() { os.Exit(process.Run("http", defaults, run)) }

func run(ctx context.Context, p *process.Process, cfg Config) error {
	started := time.Now()
	var files unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &files); err != nil {
		return fmt.Errorf("read the limit of descriptors: %w", err)
	}
	policy, err := p.Dial(cfg.Policy, 0)
	if err != nil {
		return err
	}
	datapath, err := p.Dial(cfg.Datapath, 0)
	if err != nil {
		return err
	}
	sets := rules.New()
	followed := rulesets.New(policy, rulesets.Options{
		Proxies: []netv1.Proxy{netv1.Proxy_PROXY_HTTP, netv1.Proxy_PROXY_TLS}, Rules: client.Sets{Rules: sets},
		Listed: func() {}, Log: p.Log,
	})
	known := pods.New(shares.Settings{}, func(uint16) {})
	watched := endpoints.New(datapath, known, shares.DefaultTenantLabel, p.Log)
	requests := server.NewRequests()
	var connections *server.Server
	attachment := attach.New(attach.Options{
		Proxy: netv1.Proxy_PROXY_HTTP, Socket: cfg.ProxySocket, Log: p.Log,
		Listen: func(fds []int) { connections.Listen(fds) },
	})
	connections = server.New(server.Options{
		Rules: sets, Pods: known, Take: attachment.Take, Log: p.Log, Connections: server.Connections(files.Cur),
		Report: func(namespace string, e relay.Event) {
			requests.Report(namespace, e)
			if e.Outcome != relay.Forwarded {
				p.Log.Debug("not forwarded", "outcome", string(e.Outcome), "namespace", namespace, "method", e.Method,
					"path", e.Path, "host", e.Host, "server_name", e.ServerName, "status", e.Status, "reason", e.Reason)
			}
		},
	})
	if err := errors.Join(p.Metrics.Register(requests), p.Metrics.Register(server.NewMetrics(server.Sources{
		Server: connections, RuleSets: sets.Len, Following: followed.Err, Attached: attachment.TCPErr, Endpoints: known.Len,
	}))); err != nil {
		return err
	}
	info := wire.NewProcess(p.Effective.Paths.Name, p.Effective.File, p.Effective.Ignored, p.Effective.Each,
		p.LogLevel, p.Log).Started(version.Get().String(), started)
	if err := p.Confine(sandbox.Files{}); err != nil {
		return err
	}
	srv, err := p.NewServer(rpc.Options{
		Register: func(r grpc.ServiceRegistrar) { statusv1.RegisterProcessServiceServer(r, info) },
		Methods: rpc.Methods{
			statusv1.ProcessService_GetConfig_FullMethodName:   {Access: rpc.Group()},
			statusv1.ProcessService_SetLogLevel_FullMethodName: {Access: rpc.Root()},
		},
	})
	if err != nil {
		return err
	}
	p.Go("rule sets", followed.Run)
	p.Go("endpoints", watched.Run)
	p.Go("connections", connections.Run)
	p.Go("attachment", attachment.Run)
	srv.SetAllServing(true)
	p.Ready()
	return p.Serve(ctx, srv)
}
