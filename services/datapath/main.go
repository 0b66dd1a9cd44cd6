// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Command sluice-datapath owns the network of one node: devices, addresses,
// routes, eBPF maps and programs. It is the only process of Sluice with
// privileges, and keeps four of them.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/privilege"
	"github.com/sluice-net/sluice/kit/process"
	"github.com/sluice-net/sluice/kit/rpc"
	"github.com/sluice-net/sluice/kit/store"
	"github.com/sluice-net/sluice/kit/version"
	"github.com/sluice-net/sluice/services/datapath/internal/client"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/event"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
	"github.com/sluice-net/sluice/services/datapath/internal/node"
	"github.com/sluice-net/sluice/services/datapath/internal/observe"
	"github.com/sluice-net/sluice/services/datapath/internal/record"
	"github.com/sluice-net/sluice/services/datapath/internal/server"
)

const service = "datapath"

func main() {
	os.Exit(process.Run(service, defaults, run, process.Privileged(instance.DatapathID, capabilities...)))
}

func run(ctx context.Context, p *process.Process, cfg Config) error {
	started := time.Now()
	if cfg.Uninstall {
		return uninstall(p, cfg)
	}
	if err := p.Phase("probe the kernel", func() error { return pin.Probe(ctx).Err() }); err != nil {
		return err
	}
	if err := p.Phase("probe the mounts", func() error { return process.Misconfigured(cfg.probeMounts()) }); err != nil {
		return err
	}
	called, err := dial(p, cfg)
	if err != nil {
		return err
	}
	// Locked: from here on no other process works on this instance.
	bootID, err := store.BootID()
	if err != nil {
		return err
	}
	records, err := openRecords(cfg, bootID, p.Log)
	if err != nil {
		return err
	}
	p.OnExit(records.Close)
	memory, err := openMemory(cfg)
	if err != nil {
		return err
	}
	n, err := process.Phase(p, "open the node", func() (*node.Node, error) {
		return node.Open(ctx, node.Options{
			Instance: p.Paths.Name, BPFDir: cfg.BPFDir, PodCIDRs: cfg.PodCIDRs, MTU: cfg.MTU, TunnelPorts: cfg.TunnelPorts,
			ServiceDevices: cfg.ServiceDevices, RefuseSecond: cfg.SecondInterfaces == "refuse",
			EventsPerSecond: cfg.Events.PerSecond, NodeSysctls: cfg.NodeSysctls, ProcSysNet: cfg.ProcSysNet,
			Leases: called.ipam, Identities: called.identity, Records: records, Log: p.Log, ValidateOnly: cfg.ValidateOnly,
			Policy: cfg.Policy.options(called.policy, memory), Connections: cfg.Connections.options(), BootID: bootID,
		})
	})
	if err != nil {
		return err
	}
	p.OnExit(n.Close)
	if cfg.ValidateOnly {
		return validate(ctx, p, n)
	}
	if err := p.Phase("restore endpoints", func() error { return n.Restore(ctx) }); err != nil {
		return err
	}
	spool := record.OpenSpool(cfg.SpoolDir, p.Log)
	if err := p.Phase("replay deletions", func() error { return spool.Replay(ctx, n.Core) }); err != nil {
		// ReplayLoop tries again. A process that ended here over a full disk would
		// keep every other container from coming and going.
		p.Log.Error("spooled deletions wait", log.Err(err))
	}

	if err := p.Confine(cfg.files()); err != nil {
		return err
	}

	s := &server.Server{
		Core: n.Core, Ring: n.Ring, Explainer: n.Kernel.Explainer, Maps: n.Kernel, Counts: counts{n}, Policy: n.Policy, Records: records,
		Facts: server.Facts{
			Version: version.Get().String(), Start: started, KernelRelease: n.KernelRelease, PodCIDRs: cfg.PodCIDRs, NodeAddrs: n.NodeAddrs,
			PolicyMode: cfg.Policy.Mode, PolicyRequired: cfg.Policy.Mode == policyRequired,
		},
		Called:   server.Called{IPAM: called.ipam, Identity: called.identity, Policy: called.policy},
		Warnings: func() []string { return append(n.Host.Warnings(), p.MissingLayers()...) },
	}
	s.Labels = &observe.Labels{Local: n.Core.LabelsOf, Source: called.identity}
	if n.Policy != nil {
		s.Rules = &n.Policy.History
	}
	for _, r := range event.Reasons() {
		s.Reasons = append(s.Reasons, r.String())
	}
	if err := p.Metrics.Register(s.Metrics()); err != nil {
		return err
	}
	srv, err := p.NewServer(rpc.Options{Register: s.Register, Methods: server.Methods()})
	if err != nil {
		return err
	}
	p.Go("release", n.Core.Releases)
	p.Go("reap", n.Core.Reaper.Run)
	p.Go("events", func(ctx context.Context) error { return n.Kernel.Events.Observe(ctx, n.Core, n.Ring) })
	p.Go("connections", n.Collector.Run)
	p.Go("kernel changes", func(ctx context.Context) error { return n.Auditor.Watch(ctx, cfg.Audit.Repair) })
	p.Go("audit", func(ctx context.Context) error { return n.AuditLoop(ctx, cfg.Audit.Interval, cfg.Audit.Repair) })
	p.Go("replay deletions", func(ctx context.Context) error { return n.ReplayLoop(ctx, spool) })
	p.Go("reconcile", func(ctx context.Context) error { return n.Core.ReconcileLoop(ctx, called.ipam, called.identity) })
	if n.Policy == nil {
		srv.SetAllServing(true)
		p.Ready()
		return p.Serve(ctx, srv)
	}
	p.Go("policy", n.Policy.Run)
	p.Waiting("waiting for the policy tables of sluice-policy")
	p.Go("readiness", func(ctx context.Context) error {
		// Calls are answered before that: a deletion needs nobody, and a creation
		// waits by itself.
		if cfg.Policy.Mode == policyRequired {
			select {
			case <-n.Policy.Synced():
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		srv.SetAllServing(true)
		p.Ready()
		<-ctx.Done()
		return ctx.Err()
	})
	return p.Serve(ctx, srv)
}

// capabilities are all that the process keeps; docs/privileges.md has the reasons.
// Files are opened as its user: it reads nothing that is root's alone.
var capabilities = []privilege.Cap{unix.CAP_BPF, unix.CAP_PERFMON, unix.CAP_NET_ADMIN, unix.CAP_SYS_ADMIN}

// services are those that this one calls.
type services struct {
	ipam     *client.IPAM
	identity *client.Identity
	policy   *client.Policy // nil if no policy is wanted
}

// dial prepares the connections; they need no service to be there.
func dial(p *process.Process, cfg Config) (s services, err error) {
	open := func(path string) grpc.ClientConnInterface {
		cc, derr := p.Dial(path, cfg.Services.Timeout)
		err = errors.Join(err, derr)
		return cc
	}
	s.ipam, s.identity = client.NewIPAM(open(cfg.Services.IPAM)), client.NewIdentity(open(cfg.Services.Identity))
	if cfg.Policy.Mode != policyNone {
		s.policy = client.NewPolicy(open(cfg.Services.Policy))
	}
	return s, err
}

// openMemory is where the enforced policy revision is kept. Without policies
// nothing is enforced, which is what the operator wants then.
func openMemory(cfg Config) (*record.Policy, error) {
	m := record.OpenPolicy(filepath.Join(cfg.StateDir, "policy.json"))
	if cfg.Policy.Mode == policyNone && !cfg.ValidateOnly {
		if err := m.Forget(); err != nil {
			return nil, fmt.Errorf("forget the enforced policy revision: %w", err)
		}
	}
	return m, nil
}

func openRecords(cfg Config, bootID string, logger *slog.Logger) (*record.Store, error) {
	dir := filepath.Join(cfg.StateDir, "endpoints")
	if cfg.ValidateOnly {
		return record.OpenReadOnly(dir), nil
	}
	return record.Open(dir, bootID, logger)
}

// uninstall removes what the process made in the kernel, but for the pins, whose
// bpffs somebody else mounted. A process that runs keeps it from that.
func uninstall(p *process.Process, cfg Config) error {
	bootID, err := store.BootID()
	if err != nil {
		return err
	}
	records, err := openRecords(cfg, bootID, p.Log)
	if err != nil {
		return err
	}
	return errors.Join(node.Uninstall(p.Paths.Name, cfg.PodCIDRs), records.Close())
}

// validate says what a start would put right.
func validate(ctx context.Context, p *process.Process, n *node.Node) error {
	findings, err := n.Core.Inspect(ctx)
	if err != nil {
		return err
	}
	for _, f := range findings {
		p.Log.Warn("difference", "subject", f.Subject, "key", f.Key, "want", f.Want, "have", f.Have)
	}
	if bad := n.Core.Counts().BadRecords; len(findings)+len(bad) > 0 {
		return fmt.Errorf("%d differences, %d unreadable records; nothing was changed", len(findings), len(bad))
	}
	p.Log.Info("nothing to put right")
	return nil
}
