// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"time"

	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/listeners"
	"github.com/sluice-net/sluice/kit/work"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpoints"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/kernelmaps"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/lifecycle"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/netdev"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/record"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/proxymap"
	nodes "github.com/sluice-net/sluice/services/datapath/internal/node"
	"github.com/sluice-net/sluice/services/datapath/internal/node/belief"
	"github.com/sluice-net/sluice/services/datapath/internal/node/cluster"
	"github.com/sluice-net/sluice/services/datapath/internal/node/firewall"
	"github.com/sluice-net/sluice/services/datapath/internal/node/podrange"
	"github.com/sluice-net/sluice/services/datapath/internal/node/underlay"
	"github.com/sluice-net/sluice/services/datapath/internal/observation"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/policy"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/auditmode"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/learned"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policystream"
	"github.com/sluice-net/sluice/services/datapath/internal/proxy"
	"github.com/sluice-net/sluice/services/datapath/internal/proxy/proxyns"
	"github.com/sluice-net/sluice/services/datapath/internal/proxy/tap"
	"github.com/sluice-net/sluice/services/datapath/internal/server"
	services "github.com/sluice-net/sluice/services/datapath/internal/service"
	"github.com/sluice-net/sluice/services/datapath/internal/service/frontendstream"
)

// around has the dependencies of the parts of the datapath.
type around struct {
	instance string
	bootID   string
	home     *netns.Namespace // the node's network namespace; nil: the caller's
	log      *slog.Logger

	leases     endpoint.Leases
	ranges     podrange.Source
	cluster    cluster.Source   // nil: other nodes are unknown
	publisher  nodes.Publisher  // nil: publication of endpoints to other nodes is not awaited
	registry   cluster.Registry // nil: the node is not registered
	numbers    string           // file of the node IDs; "": none
	hearing    belief.Service   // nil: the age of the store's data is unknown
	beliefs    string           // file of the trust in mappings of other nodes; "": none
	identities endpoint.Identities
	records    endpoint.Records

	owners   func(*lifecycle.Relabeller) endpoints.IdentityStream // nil: identities do not change
	ipam     endpoint.Connection                                  // sluice-ipam; nil: allocations are not reconciled
	identity endpoint.Service                                     // sluice-identity; nil: allocations are not reconciled
	spool    *record.Spool                                        // nil: no deletions are spooled

	policies      policystream.Service   // nil in policy mode none
	names         learned.Service        // nil in policy mode none
	enforced      policystream.Memory    // nil: the enforced state is not kept
	audits        auditmode.Store        // nil in policy mode none, and with validateOnly
	frontends     frontendstream.Service // nil: services are not translated
	frontendState frontendstream.Memory  // nil: the state is not kept

	proxies func(policytable.Proxy) (net.Listener, error) // opens the socket for a kind of proxy; nil: none can attach
	// listeners opens the socket by which sluice-loadbalancer keeps its listening sockets over a restart; nil: it
	// does not.
	listeners func() (net.Listener, error)
	tun       string // device node of TAP devices; "": the machine's

	phase    func(name string, f func() error) error // runs and reports a step of the start; nil: just calls it
	patience time.Duration                           // how long a creation waits for its tables; 0: 10 s
}

// datapath holds the parts of the process without its server, in the order in which they are opened: each part uses the
// parts before it.
type datapath struct {
	Home        *netns.Namespace
	Kernel      *kernel.Kernel
	Ranges      *podrange.Set
	Devices     *netdev.Netdev
	Proxies     proxy.List // nil with validateOnly
	Node        *nodes.Node
	Policy      *policy.Policy     // nil in policy mode none
	Services    *services.Services // nil: services are not translated
	Observation *observation.Observation
	Endpoints   *endpoints.Endpoints
	Collector   *conntrack.Collector // nil with validateOnly

	index    *lifecycle.Index     // the records of Endpoints, which other subjects read
	changed  *endpoint.SlotEvents // endpoints whose policy has changed, from Policy to Endpoints
	sysctls  bool                 // the sysctls of the whole node are set
	subjects []subject            // in the order in which their work begins
	closers  []func() error
}

// subject is one subject of the process.
type subject interface {
	server.Subject
	// Tasks returns the background work.
	Tasks() []work.Task
	// Awaits returns the events that must happen before the process is ready.
	Awaits() []work.Await
}

// The compiler checks what each subject contributes to status, metrics and calls.
var (
	_ interface {
		server.Endpoints
	} = (*endpoints.Endpoints)(nil)
	_ interface {
		server.Policy
	} = (*policy.Policy)(nil)
	_ interface {
		server.Frontends
		server.Backends
	} = (*services.Services)(nil)
	_ interface {
		server.Proxies
	} = proxy.List(nil)
	_ interface {
		server.Cluster
	} = (*nodes.Node)(nil)
	_ interface {
		server.Packets
		server.Events
		server.Ends
		server.Tracked
		server.Explainer
	} = (*observation.Observation)(nil)
	_ interface {
		server.Maps
		server.MapUsages
		server.Bounds
		server.Budgets
		server.ConnectionCounts
		server.Services
	} = kernel.Subject{}
)

// open adopts or creates maps and programs and opens everything else. It does not change any endpoint.
func open(ctx context.Context, cfg Config, a around) (_ *datapath, err error) {
	d := &datapath{Home: a.home, index: lifecycle.NewIndex(), changed: endpoint.NewSlotEvents()}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.Close())
		}
	}()
	if err := d.openKernel(ctx, cfg, a); err != nil {
		return nil, err
	}
	for _, part := range []func(Config, around) error{
		d.openRanges, d.openDevices, d.openProxies, d.openNode, d.openPolicy, d.openServices, d.openObservation,
		d.openEndpoints, d.openCollector, d.list,
	} {
		if err := part(cfg, a); err != nil {
			return nil, err
		}
	}
	return d, nil
}

// list lists the subjects that the configuration turns on.
func (d *datapath) list(_ Config, a around) error {
	add := func(s subject) { d.subjects = append(d.subjects, s) }
	add(d.Endpoints)
	if d.Policy != nil {
		add(d.Policy)
	}
	if d.Services != nil {
		add(d.Services)
	}
	if d.Proxies != nil {
		add(d.Proxies)
	}
	if d.Services != nil && a.listeners != nil {
		add(keptListeners{listeners.NewStore(listeners.StoreOptions{
			Listen: a.listeners, Users: []uint32{0, instance.LoadBalancerID}, Log: a.log,
		})})
	}
	add(d.Node)
	add(d.Observation)
	add(kernel.Subject{Kernel: d.Kernel, Collector: d.Collector, NodeName: d.Node.Name})
	return nil
}

// openKernel opens the node's network namespace, and the maps and programs.
func (d *datapath) openKernel(ctx context.Context, cfg Config, a around) (err error) {
	if d.Home == nil {
		if d.Home, err = netns.Current(); err != nil {
			return fmt.Errorf("open the node's network namespace: %w", err)
		}
		d.closers = append(d.closers, d.Home.Close)
	}
	if d.Kernel, err = kernel.Open(ctx, cfg.kernel(a.log)); err != nil {
		return err
	}
	d.closers = append(d.closers, d.Kernel.Close)
	return nil
}

// openDevices opens the devices of endpoints.
func (d *datapath) openDevices(cfg Config, a around) (err error) {
	if d.sysctls, err = d.setsSysctls(cfg); err != nil {
		return err
	}
	d.Devices, err = netdev.Open(netdev.Options{
		Home: d.Home, Instance: a.instance, Ranges: d.Ranges, ServiceDevices: cfg.ServiceDevices, SetGlobal: d.sysctls,
		Programs:   func() []*program.Program { return d.Kernel.Programs.On(program.Endpoints) },
		ProcSysNet: cfg.ProcSysNet,
	})
	if err != nil {
		return err
	}
	d.closers = append(d.closers, func() error { d.Devices.Close(); return nil })
	return nil
}

// openServices opens the translation of services, if it is on.
func (d *datapath) openServices(cfg Config, a around) error {
	if a.frontends == nil || cfg.ValidateOnly {
		return nil
	}
	d.Services = services.Open(services.Options{
		Name: service, Maps: d.Kernel.Services, Slots: d.Kernel.Endpoints, Connections: d.Kernel.Connections,
		Translations: d.Kernel.Translations, Namespaces: d.Kernel.Namespaces, Sockets: d.Kernel.Sockets,
		SocketList: d.Kernel.SocketList, Frontends: d.Kernel.Frontends(), Timeouts: cfg.Connections.options().Timeouts,
		Service: a.frontends, Memory: a.frontendState, Home: d.Home, Endpoints: d.index, Links: d.Devices,
		Closed: cfg.reservedPorts(), Log: a.log,
	})
	return nil
}

// keptListeners are the listening sockets of sluice-loadbalancer, which survive its restart.
type keptListeners struct{ *listeners.Store }

func (k keptListeners) Tasks() []work.Task {
	return []work.Task{{Name: "listeners", Run: k.Run}}
}

func (keptListeners) Awaits() []work.Await { return nil }
func (keptListeners) Warnings() []string   { return nil }

// Close releases all resources of the process and leaves the kernel state unchanged.
func (d *datapath) Close() error {
	var errs []error
	for i := len(d.closers) - 1; i >= 0; i-- {
		errs = append(errs, d.closers[i]())
	}
	return errors.Join(errs...)
}

// openRanges finds the node's pod ranges.
func (d *datapath) openRanges(cfg Config, _ around) (err error) {
	ranges := cfg.PodCIDRs
	if len(ranges) == 0 {
		if ranges, err = d.Kernel.Addresses.Ranges(); err != nil {
			return err
		}
	}
	d.Ranges = podrange.Of(ranges, len(cfg.PodCIDRs) == 0)
	return nil
}

// setsSysctls reports whether the datapath sets the sysctls of the whole node.
func (d *datapath) setsSysctls(cfg Config) (set bool, err error) {
	if cfg.NodeSysctls != "auto" {
		return cfg.NodeSysctls == "set", nil
	}
	err = d.Home.Do(func() error { set = !netdev.InitialNamespace(); return nil })
	return set, err
}

// openProxies opens what sluice-dns and sluice-http attach to. It opens the device node of TAP devices, which the sandbox
// forbids later.
func (d *datapath) openProxies(cfg Config, a around) error {
	if cfg.ValidateOnly || a.proxies == nil {
		return nil
	}
	device, err := tap.Open(tap.Options{
		Home: d.Home, Instance: a.instance, Kind: policytable.ProxyDNS, Queue: proxymap.QueueLength,
		Programs: func() []*program.Program { return d.Kernel.Programs.On(program.Taps) }, ProcSysNet: cfg.ProcSysNet,
		File: a.tun,
	})
	if err != nil {
		return err
	}
	d.closers = append(d.closers, func() error { device.Close(); return nil })
	for _, o := range []proxy.Options{
		{Kind: policytable.ProxyDNS, Device: device, Users: []uint32{0, instance.DNSID}},
		{Kind: policytable.ProxyHTTP, Users: []uint32{0, instance.HTTPID}},
	} {
		if err := d.openProxy(cfg, a, o); err != nil {
			return err
		}
	}
	return nil
}

// openProxy opens the proxy namespace of a kind of proxy, and what its process attaches to.
func (d *datapath) openProxy(cfg Config, a around, o proxy.Options) error {
	heartbeats, err := d.Kernel.Proxies.Heartbeats(o.Kind)
	if err != nil {
		return fmt.Errorf("open the heartbeats of proxies: %w", err)
	}
	d.closers = append(d.closers, heartbeats.Close)
	space, err := proxyns.Open(proxyns.Options{
		Home: d.Home, Instance: a.instance, Kind: o.Kind, ProcSysNet: cfg.ProcSysNet,
		Programs: func() []*program.Program { return d.Kernel.Programs.On(program.Taps) },
		Inside:   func() []*program.Program { return d.Kernel.Programs.On(program.ProxyNamespaces) },
	})
	if err != nil {
		return err
	}
	d.closers = append(d.closers, func() error { space.Close(); return nil })
	o.Maps, o.Heartbeats, o.Namespace, o.Log = d.Kernel.Proxies, heartbeats.FD(), space, a.log
	o.Listen = func() (net.Listener, error) { return a.proxies(o.Kind) }
	o.Encode, o.Decode, o.EncodeReply = server.ProxyAttachment, server.ProxyRequest, server.ProxyReply
	d.Proxies = append(d.Proxies, proxy.Open(o))
	return nil
}

// openNode opens this node and its view of other nodes.
func (d *datapath) openNode(cfg Config, a around) (err error) {
	k := d.Kernel
	maps := nodes.Maps{Addresses: k.Addresses, IPCache: k.IPCache, Endpoints: k.Endpoints, Nodes: k.Nodes, Programs: k.Programs.On}
	if !cfg.ValidateOnly { // with validateOnly, maps are private to this process and have no pins
		maps.Pins = k.Pins
		if maps.Numbers, err = k.NodeNumbers(); err != nil {
			return fmt.Errorf("read the node IDs: %w", err)
		}
		if maps.Overlay, err = k.OverlayAddrs(); err != nil {
			return fmt.Errorf("find the overlay addresses of an earlier process: %w", err)
		}
	}
	o := nodes.Options{
		Instance: a.instance, BootID: a.bootID, Home: d.Home, Maps: maps, Devices: d.Devices, Ranges: d.Ranges, Log: a.log,
		Mode: cluster.Mode(cfg.Routing.Mode), Port: cfg.Routing.port(), Shortcut: cfg.Routing.direct(),
		Addresses: cfg.Underlay.Addresses,
		Uplinks:   cfg.Underlay.Devices, MTU: cfg.MTU, Services: cfg.LoadBalancing.on(), SetSysctls: d.sysctls,
		ProcSysNet: cfg.ProcSysNet, Repair: cfg.Audit.Repair,
		Source: a.cluster, Registry: a.registry, Publisher: a.publisher, Hearing: a.hearing,
		Numbers: a.numbers, Beliefs: a.beliefs, ValidateOnly: cfg.ValidateOnly,
	}
	if d.Proxies != nil {
		o.Proxy = d.Proxies
	}
	if cfg.Masquerade.Enabled {
		o.Masquerade = &cfg.Masquerade.Except
	}
	if cfg.Routing.probes() {
		o.ProbePort = cfg.Routing.ProbePort
	}
	if d.Node, err = nodes.Open(o); err != nil {
		return err
	}
	d.closers = append(d.closers, func() error { d.Node.Close(); return nil })
	return nil
}

// openPolicy adopts the policy tables in the kernel. In policy mode none it removes them.
func (d *datapath) openPolicy(cfg Config, a around) (err error) {
	if cfg.Policy.Mode == policyNone {
		if cfg.ValidateOnly {
			return nil
		}
		return policy.Remove(d.Kernel.Policies(), a.records)
	}
	o := policy.Options{
		Name: service, BootID: a.bootID, Kernel: d.Kernel.Policies(), Service: a.policies, Memory: a.enforced,
		Audits: a.audits, Records: a.records, Endpoints: d.index.List, Changed: d.changed.Add,
		Wait: cfg.Policy.Mode == policyRequired, Timeout: a.patience, Audit: cfg.Policy.Audit, Linger: cfg.Policy.Linger, Log: a.log,
	}
	if !cfg.ValidateOnly { // with validateOnly, the ipcache is private to this process, and no service is called
		o.Addresses, o.Names = d.Kernel.IPCache, a.names
	}
	d.Policy, err = policy.Open(o)
	return err
}

// openObservation opens the reports of what the programs do.
func (d *datapath) openObservation(Config, around) error {
	k, names := d.Kernel, event.Names{Owners: d.index, Services: d.Kernel.Services}
	if d.Policy != nil {
		names.Policies = d.Policy.History()
	}
	d.Observation = observation.Open(observation.Options{
		Maps: observation.Maps{
			Events: k.Events, Endpoints: k.Endpoints, Addresses: k.Addresses, Nodes: k.Nodes, Tables: k.Tables,
			Connections: k.Connections, Services: k.Services, Replicas: k.Replicas,
		},
		Names: names, Worlds: k.Worlds(), TunnelPorts: k.TunnelPorts(),
	})
	return nil
}

// openEndpoints opens the endpoints, which know no record before restore.
func (d *datapath) openEndpoints(cfg Config, a around) error {
	maps := kernelmaps.Maps{
		Endpoints: d.Kernel.Endpoints, Tables: d.Kernel.Tables, IPCache: d.Kernel.IPCache, Services: d.Kernel.Services,
	}
	if cfg.LoadBalancing.on() {
		maps.Namespaces = d.Kernel.Namespaces
	}
	c := lifecycle.Config{
		Index: d.index, Instance: a.instance, BootID: a.bootID, Ranges: d.Ranges, MTU: d.Node.MTU,
		RefuseSecond: cfg.SecondInterfaces == "refuse", Sockets: cfg.LoadBalancing.on(),
		Links: d.Devices, Leases: a.leases, Identities: a.identities, Records: a.records, Host: d.Node.Host,
		Published: d.Node.Published(), HostPorts: endpoint.NoHostPorts{}, Repaired: d.Observation.Ring.AddRepair, Log: a.log,
	}
	if d.Services != nil {
		c.HostPorts = d.Services.HostPorts
	}
	if d.Policy != nil {
		maps.Policy = d.Policy.Applier
		c.Policies = kernelmaps.Policies{Policy: d.Policy.Applier}
	}
	c.Maps = maps
	o := endpoints.Options{
		Lifecycle: c, PolicyEvents: d.changed, Devices: d.Devices, Host: d.Node.Host, Programs: d.Kernel,
		FollowConntrack: d.Services != nil, Ranges: d.Ranges, AuditInterval: cfg.Audit.Interval, Repair: cfg.Audit.Repair, Log: a.log,
		Overlay: cluster.Mode(cfg.Routing.Mode) == cluster.Overlay, Phase: a.phase,
		Follow: a.owners, Allocator: a.ipam, Identities: a.identity, Spool: a.spool,
	}
	if !cfg.ValidateOnly { // with validateOnly, maps are private to this process
		o.Lifecycle.Tables = maps.AuditTables
		if d.Ranges.Changes() && a.ranges != nil {
			o.Source, o.Entries = a.ranges, d.Kernel.IPCache
		}
	}
	d.Endpoints = endpoints.Open(o)
	return nil
}

// openCollector opens the collector of connections.
func (d *datapath) openCollector(cfg Config, a around) (err error) {
	if cfg.ValidateOnly {
		return nil
	}
	o := cfg.Connections.options()
	o.Log = a.log
	o.Passed = func(began time.Time, p conntrack.Pass) { d.Node.Numbers.Passed(began, p.Nodes) }
	if d.Policy != nil {
		o.Wanted = d.Policy.Wanted()
	}
	d.Collector, err = d.Kernel.Connections.NewCollector(o)
	return err
}

// restore reconciles records and maps, so that calls can be served.
func (d *datapath) restore(ctx context.Context) error {
	d.Node.Restore()
	return d.Endpoints.Restore(ctx)
}

// tasks returns the background work of all parts.
func (d *datapath) tasks() (all []work.Task) {
	for _, s := range d.subjects {
		all = append(all, s.Tasks()...)
	}
	return all
}

// shown returns what the server shows of all parts.
func (d *datapath) shown() (all []server.Subject) {
	for _, s := range d.subjects {
		all = append(all, s)
	}
	return all
}

// uninstallNode removes everything that an instance created in the caller's network namespace: first the devices of its
// endpoints, then the node-wide devices, routes and rules. Missing objects are not an error.
func uninstallNode(name string, cidrs []netip.Prefix) error {
	home, err := netns.Current()
	if err != nil {
		return fmt.Errorf("open the node's network namespace: %w", err)
	}
	defer home.Close()
	dev, err := netdev.Open(netdev.Options{Home: home, Instance: name, Ranges: podrange.Of(cidrs, false)})
	if err != nil {
		return err
	}
	defer dev.Close()
	others, err := underlay.Open(underlay.Options{Home: home, Instance: name})
	if err != nil {
		return err
	}
	defer others.Close()
	device, err := tap.Open(tap.Options{Home: home, Instance: name, Kind: policytable.ProxyDNS})
	if err != nil {
		return err
	}
	defer device.Close()
	err = errors.Join(device.Remove(), removeProxyNamespace(home, name, policytable.ProxyDNS),
		removeProxyNamespace(home, name, policytable.ProxyHTTP), others.RemoveAll(), dev.RemoveDevices(), dev.RemoveNode())
	// The firewall is removed last: until then it drops packets from devices without programs.
	return errors.Join(err, firewall.New(home, name, nil, firewall.Marks{}).Remove())
}

func removeProxyNamespace(home *netns.Namespace, name string, kind policytable.Proxy) error {
	space, err := proxyns.Open(proxyns.Options{Home: home, Instance: name, Kind: kind})
	if err != nil {
		return err
	}
	defer space.Close()
	return space.Remove()
}
