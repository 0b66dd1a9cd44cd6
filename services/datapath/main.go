// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Command sluice-datapath owns the network of one node: devices, addresses, routes, eBPF maps and programs. It is the
// only privileged process of Sluice, and keeps four capabilities.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"github.com/sluice-net/sluice/kit/config"
	"github.com/sluice-net/sluice/kit/durable"
	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/privilege"
	"github.com/sluice-net/sluice/kit/process"
	"github.com/sluice-net/sluice/kit/rpc"
	"github.com/sluice-net/sluice/kit/version"
	"github.com/sluice-net/sluice/kit/work"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/proto/wire"
	"github.com/sluice-net/sluice/services/datapath/internal/client"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpoints"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/lifecycle"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/record"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
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
	// openState takes the lock: from here on no other process works on this instance.
	records, a, err := openState(p, cfg, called)
	if err != nil {
		return err
	}
	d, err := process.Phase(p, "open the node", func() (*datapath, error) { return open(ctx, cfg, a) })
	if err != nil {
		return err
	}
	p.OnExit(d.Close)
	if cfg.ValidateOnly {
		return validate(ctx, p, d)
	}
	if err := p.Phase("restore endpoints", func() error { return d.restore(ctx) }); err != nil {
		return err
	}
	replay := func() error { return a.spool.Replay(ctx, d.Endpoints.Report, d.Endpoints.Lifecycle) }
	if err := p.Phase("replay deletions", replay); err != nil {
		// The replay is repeated while the process serves. If the process exited here because of a full disk, no other
		// container could be created or deleted.
		p.Log.Error("cannot replay spooled deletions; retrying", log.Err(err))
	}
	if err := p.Confine(cfg.files()); err != nil {
		return err
	}
	api, srv, err := newServer(p, cfg, d, called, records, started)
	if err != nil {
		return err
	}
	for _, t := range d.tasks() {
		p.Go(t.Name, t.Run)
	}
	p.Go("readiness for kubelet", func(ctx context.Context) error {
		return every(ctx, readyInterval, func() { p.Unready(api.Unready(ctx)) })
	})
	p.Go("endpoint history", api.Remember)
	p.Go("readiness", func(ctx context.Context) error {
		// The server already answers calls at this point: deletions need no other service, and creations wait on their own.
		for _, part := range d.subjects {
			for _, a := range part.Awaits() {
				if err := await(ctx, p, a); err != nil {
					return err
				}
			}
		}
		srv.SetAllServing(true)
		p.Ready()
		<-ctx.Done()
		return ctx.Err()
	})
	return p.Serve(ctx, srv)
}

// await reports what the process waits for, and blocks until it has happened.
func await(ctx context.Context, p *process.Process, a work.Await) error {
	p.Waiting("waiting for " + a.What)
	select {
	case <-a.Done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// newServer creates the gRPC server and registers its services.
func newServer(
	p *process.Process, cfg Config, d *datapath, called callees, records *record.Store, started time.Time,
) (*server.Server, *rpc.Server, error) {
	release, err := kernelRelease()
	if err != nil {
		return nil, nil, err
	}
	s := server.New(server.Options{
		Process: wire.NewProcess(p.Effective.Paths.Name, p.Effective.File, p.Effective.Ignored, p.Effective.Each,
			p.LogLevel, p.Log),
		Facts: server.Facts{
			Version: version.Get().String(), NodeName: cfg.Node, Start: started, KernelRelease: release,
			PolicyMode: cfg.Policy.Mode,
		},
		Called: server.Called{IPAM: called.ipam, Identity: called.identity, Policy: called.policy},
		Named:  called.cluster.NodeName, Labels: called.identity, Records: records,
		Subjects: append(d.shown(), settings{p, cfg.Node, called.cluster.NodeName}),
	})
	if err := p.Metrics.Register(s.Metrics()); err != nil {
		return nil, nil, err
	}
	srv, err := p.NewServer(rpc.Options{Register: s.Register, Methods: server.Methods()})
	return s, srv, err
}

// settings warns about settings that this process was started with.
type settings struct {
	p     *process.Process
	node  string        // the configured name
	named func() string // the name that sluice-identity registered this node under
}

// Warnings lists sandbox layers that the kernel lacks, and a configured node name that differs from the name in
// sluice-identity.
func (s settings) Warnings() []string {
	all := s.p.MissingLayers()
	set := slices.ContainsFunc(s.p.Effective.Entries, func(e config.Entry) bool {
		return e.Key == "node" && e.Source != config.FromDefault
	})
	if name := s.named(); set && name != "" && name != s.node {
		all = append(all,
			fmt.Sprintf("the setting node is %q, but sluice-identity registered this node as %q, the name that events use; "+
				"remove the setting, or use the same name in both", s.node, name))
	}
	return all
}

// readyInterval is the interval at which the readiness for CNI ADD is checked.
const readyInterval = time.Second

// every calls fn immediately and then at each interval, until ctx ends.
func every(ctx context.Context, interval time.Duration, fn func()) error {
	t := time.NewTicker(interval)
	defer t.Stop()
	for {
		fn()
		select {
		case <-t.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// kernelRelease returns the release, as uname -r prints it.
func kernelRelease() (string, error) {
	var uts unix.Utsname
	if err := unix.Uname(&uts); err != nil {
		return "", fmt.Errorf("uname: %w", err)
	}
	return unix.ByteSliceToString(uts.Release[:]), nil
}

// capabilities are the capabilities that the process keeps; docs/privileges.md has the reasons. Files are opened as the
// process's user, so it cannot read files that only root can read.
var capabilities = []privilege.Cap{unix.CAP_BPF, unix.CAP_PERFMON, unix.CAP_NET_ADMIN, unix.CAP_SYS_ADMIN}

// callees are clients of the processes that this one calls.
type callees struct {
	ipam     *client.IPAM
	identity *client.Identity
	cluster  *client.Cluster
	// owners opens the stream of the identities that endpoints should have.
	owners   func(*lifecycle.Relabeller) endpoints.IdentityStream
	policy   *client.Policy       // nil in policy mode none
	balancer *client.LoadBalancer // nil if services are not translated
}

// dial prepares the connections. It succeeds even if the services are down.
func dial(p *process.Process, cfg Config) (s callees, err error) {
	open := func(path string) grpc.ClientConnInterface {
		cc, derr := p.Dial(path, cfg.Services.Timeout)
		err = errors.Join(err, derr)
		return cc
	}
	identity := open(cfg.Services.Identity)
	s.cluster = client.NewCluster(identity, p.Log)
	s.ipam, s.identity = client.NewIPAM(open(cfg.Services.IPAM)), client.NewIdentity(identity)
	s.owners = func(r *lifecycle.Relabeller) endpoints.IdentityStream { return client.NewOwners(identity, r, p.Log) }
	if cfg.Policy.Mode != policyNone {
		s.policy = client.NewPolicy(open(cfg.Services.Policy))
	}
	if cfg.LoadBalancing.on() {
		s.balancer = client.NewLoadBalancer(open(cfg.Services.LoadBalancer))
	}
	return s, err
}

// openState opens the files in the state directory, and returns the surroundings of the datapath's parts.
func openState(p *process.Process, cfg Config, called callees) (*record.Store, around, error) {
	a := around{
		instance: p.Paths.Name, log: p.Log, leases: called.ipam, ranges: called.ipam, identities: called.identity,
		cluster: called.cluster, registry: called.cluster, publisher: called.cluster,
		numbers: filepath.Join(cfg.StateDir, "nodes.json"),
		phase:   p.Phase,
		owners:  called.owners, ipam: called.ipam, identity: called.identity, spool: record.OpenSpool(cfg.SpoolDir, p.Log),
		hearing: called.cluster, beliefs: filepath.Join(cfg.StateDir, "belief.json"),
		proxies: func(kind policytable.Proxy) (net.Listener, error) {
			if kind == policytable.ProxyHTTP {
				return listenBeside(p, instance.HTTPProxySocketName)
			}
			return listenBeside(p, instance.ProxySocketName)
		},
		listeners: func() (net.Listener, error) { return listenBeside(p, instance.ListenersSocketName) },
	}
	var err error
	if a.bootID, err = durable.BootID(); err != nil {
		return nil, a, err
	}
	records, err := openRecords(cfg, a.bootID, p.Log)
	if err != nil {
		return nil, a, err
	}
	p.OnExit(records.Close)
	a.records = records
	enforced := record.OpenPolicy(filepath.Join(cfg.StateDir, "policy.json"))
	if cfg.Policy.Mode != policyNone {
		a.policies, a.enforced, a.names = called.policy, enforced, called.policy
		if !cfg.ValidateOnly {
			a.audits = record.OpenAuditModes(filepath.Join(cfg.StateDir, "audit-mode.json"))
		}
	} else if !cfg.ValidateOnly {
		// Policy enforcement is disabled by configuration.
		if err := enforced.Forget(); err != nil {
			return nil, a, fmt.Errorf("forget the enforced policy revision: %w", err)
		}
	}
	frontends := record.OpenFrontends(filepath.Join(cfg.StateDir, "frontends.json"))
	if cfg.LoadBalancing.on() {
		a.frontends, a.frontendState = called.balancer, frontends
	} else if !cfg.ValidateOnly {
		if err := frontends.Forget(); err != nil {
			return nil, a, fmt.Errorf("forget the state of frontends: %w", err)
		}
	}
	return records, a, nil
}

// listenBeside opens a socket for messages in the directory of the process's own socket, for the same group.
func listenBeside(p *process.Process, name string) (net.Listener, error) {
	o := rpc.ListenOptions{Packets: true}
	if group := p.Config.Socket.Group; group >= 0 {
		gid := uint32(group) //nolint:gosec // checked with the configuration
		o.GID = &gid
	}
	return rpc.Listen(filepath.Join(filepath.Dir(p.Config.Socket.Path), name), o)
}

func openRecords(cfg Config, bootID string, logger *slog.Logger) (*record.Store, error) {
	dir := filepath.Join(cfg.StateDir, "endpoints")
	if cfg.ValidateOnly {
		return record.OpenReadOnly(dir), nil
	}
	return record.Open(dir, bootID, logger)
}

// uninstall removes devices, rules, routes and the firewall table. The pins stay, because another program mounted their
// bpffs. It fails while a process of the instance runs, creates no directories, and can be repeated.
func uninstall(p *process.Process, cfg Config) error {
	release, err := record.Exclude(filepath.Join(cfg.StateDir, "endpoints"))
	if err != nil {
		return err
	}
	ranges := cfg.PodCIDRs
	if len(ranges) == 0 {
		ranges, err = kernel.PinnedRanges(cfg.BPFDir)
	}
	return errors.Join(err, uninstallNode(p.Paths.Name, ranges), release())
}

// validate reports what a start would repair.
func validate(ctx context.Context, p *process.Process, d *datapath) error {
	findings, err := d.Endpoints.Reconciler.Inspect(ctx)
	if err != nil {
		return err
	}
	for _, f := range findings {
		p.Log.Warn("difference", "subject", f.Subject, "key", f.Key, "want", f.Want, "have", f.Have)
	}
	if bad := d.Endpoints.Report.Counts().BadRecords; len(findings)+len(bad) > 0 {
		return fmt.Errorf("%d differences, %d unreadable records; nothing was changed", len(findings), len(bad))
	}
	p.Log.Info("nothing to repair")
	return nil
}
