// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"github.com/sluice-net/sluice/kit/boottime"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/audit"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/kernelmaps"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/lifecycle"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/netdev"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/record"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/node/belief"
	"github.com/sluice-net/sluice/services/datapath/internal/node/cluster"
	"github.com/sluice-net/sluice/services/datapath/internal/node/fabric"
	"github.com/sluice-net/sluice/services/datapath/internal/node/guard"
	"github.com/sluice-net/sluice/services/datapath/internal/node/host"
	"github.com/sluice-net/sluice/services/datapath/internal/node/podrange"
	"github.com/sluice-net/sluice/services/datapath/internal/node/probe"
	"github.com/sluice-net/sluice/services/datapath/internal/node/underlay"
	"github.com/sluice-net/sluice/services/datapath/internal/node/xfrm"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/observe"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/auditmode"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/learned"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policystream"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policysync"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policysync/unenforce"
	"github.com/sluice-net/sluice/services/datapath/internal/server"
	"github.com/sluice-net/sluice/services/datapath/internal/service/frontendstream"
	"github.com/sluice-net/sluice/services/datapath/internal/service/hostport"
	"github.com/sluice-net/sluice/services/datapath/internal/service/socketend"
)

// publisher says when other nodes can know the addresses of an endpoint.
type publisher interface {
	Published(ctx context.Context, o workload.Owner, atMost time.Duration) bool
}

// publicationWait is how long a creation waits until other nodes can know its
// addresses. Without a tunnel they drop what comes from one that they do not know.
const publicationWait = 200 * time.Millisecond

// hostPortPart is the part of the frontends that is for host ports.
const hostPortPart = 16

// around is what the node's parts work with.
type around struct {
	instance string
	bootID   string
	home     *netns.Namespace // the node's network namespace; nil for that of the caller
	log      *slog.Logger

	leases     endpoint.Leases
	ranges     podrange.Source
	cluster    cluster.Source   // nil: other nodes are not known
	publisher  publisher        // nil: nothing says when others know an endpoint
	registry   cluster.Registry // nil: the node is not registered
	numbers    string           // file of the numbers of nodes; "": none
	hearing    belief.Service   // nil: nothing says when the node heard from the store
	beliefs    string           // file of what is believed of other nodes; "": none
	identities endpoint.Identities
	records    endpoint.Records

	policies      policystream.Service   // nil in policy mode none
	names         learned.Service        // nil in policy mode none
	enforced      policystream.Memory    // nil: nothing keeps it
	audits        auditmode.Store        // nil in policy mode none, and with validateOnly
	frontends     frontendstream.Service // nil: services are not translated
	frontendState frontendstream.Memory  // nil: nothing keeps it

	patience time.Duration // how long a creation waits for its tables; 0 is 10 s
}

// node is the parts of the datapath without its server.
type node struct {
	around
	Core      *lifecycle.Core
	Policy    *policysync.Applier      // nil in policy mode none
	Frontends *frontendstream.Follower // nil: services are not translated
	Ender     *socketend.Ender         // nil: services are not translated
	HostPorts *hostport.Ports          // nil: services are not translated
	Kernel    *kernel.Kernel
	// AuditModes says which endpoints are in audit mode; nil without policies.
	AuditModes *auditmode.Modes
	Collector  *conntrack.Collector // of connections; nil with validateOnly
	Learned    *learned.Reporter    // nil in policy mode none
	timeouts   conntrack.Timeouts   // of connections
	Ring       *observe.Ring
	Host       *host.Host
	Auditor    *audit.Auditor
	Ranges     *podrange.Set
	Keeper     *podrange.Keeper // nil: the ranges are those of the configuration
	Numbers    *cluster.Numbers
	Follower   *cluster.Follower  // nil without a source
	Registrar  *cluster.Registrar // nil without a registry
	Prober     *probe.Prober      // nil: other nodes are not probed
	Beliefs    *belief.Beliefs    // nil without a source
	Fabric     *fabric.Fabric     // nil if no packets travel to other nodes

	unpublished atomic.Uint64 // creations that ended before others could know the addresses

	compared chan struct{} // closed when the devices were compared with the records
	attached chan struct{} // closed when the programs of sockets are attached

	mtu      uint16 // of pods
	sysctls  bool   // those of the whole node are set
	underlay *underlay.Underlay
	here     *netns.Namespace // closed by Close
	dev      *netdev.Netdev
	guard    *guard.Table
}

// open adopts or makes maps and programs and opens everything else. It changes
// no endpoint.
func open(ctx context.Context, cfg Config, a around) (_ *node, err error) {
	n := &node{around: a, Ring: observe.NewRing(), compared: make(chan struct{}), attached: make(chan struct{})}
	defer func() {
		if err != nil {
			err = errors.Join(err, n.Close())
		}
	}()
	if n.home == nil {
		if n.here, err = netns.Current(); err != nil {
			return nil, fmt.Errorf("open the node's network namespace: %w", err)
		}
		n.home = n.here
	}
	if err := n.openKernel(ctx, cfg); err != nil {
		return nil, err
	}
	ranges := cfg.PodCIDRs
	if len(ranges) == 0 {
		if ranges, err = n.Kernel.Addresses.Ranges(); err != nil {
			return nil, err
		}
	}
	n.Ranges = podrange.Of(ranges, len(cfg.PodCIDRs) == 0)
	if err := n.openDevices(cfg); err != nil {
		return nil, err
	}
	if err := n.openPolicy(cfg); err != nil {
		return nil, err
	}
	if err := n.openCore(cfg); err != nil {
		return nil, err
	}
	if err := n.openFabric(cfg); err != nil {
		return nil, err
	}
	n.Prober = newProber(cfg, n.home, n.log, n.silence)
	if err := n.openCluster(cfg); err != nil {
		return nil, err
	}
	return n, nil
}

func (n *node) openKernel(ctx context.Context, cfg Config) (err error) {
	n.Kernel, err = kernel.Open(ctx, kernel.Options{
		Dir: cfg.BPFDir, PodCIDRs: cfg.PodCIDRs, TunnelPorts: cfg.closedPorts(), EventsPerSecond: cfg.Events.PerSecond,
		Routing: cfg.Routing.kernel(), CopyDSCP: cfg.Routing.CopyDSCP,
		Services: cfg.LoadBalancing.on(), Sockets: cfg.LoadBalancing.sockets(),
		ValidateOnly: cfg.ValidateOnly, Log: n.log,
	})
	if err != nil || cfg.ValidateOnly {
		return err
	}
	found, err := n.Kernel.NodeNumbers()
	if err != nil {
		return fmt.Errorf("find the numbers of nodes: %w", err)
	}
	n.Numbers = cluster.OpenNumbers(cluster.NumbersOptions{
		Path: n.numbers, BootID: n.bootID, InUse: n.Kernel.IPCache.InUse, Found: found, Log: n.log,
	})
	n.Kernel.NodeName = n.Numbers.Name
	if n.frontends != nil {
		n.Ender = socketend.New(socketend.Options{
			Sockets: n.Kernel.SocketList, Each: n.eachNamespace, Keeps: n.Kernel.Services.Keeps,
		})
		var capacity frontend.Capacity
		hostPorts := 0 // frontends for host ports, which services do not get
		if c, ok := n.Kernel.Services.Capacity(); ok {
			hostPorts = c.Frontends / hostPortPart
			c.Frontends, c.Backends, c.Members = c.Frontends-hostPorts, c.Backends-hostPorts, c.Members-hostPorts
			capacity = c
		}
		n.HostPorts = hostport.New(hostport.Options{
			Kernel: n.Kernel.Frontends(), Ender: flowEnder{n}, Own: n.isOwn, Closed: cfg.reservedPorts(),
			Room: hostPorts, Log: n.log,
		})
		n.Frontends = frontendstream.New(frontendstream.Options{
			Name: service, Service: n.frontends, Kernel: n.HostPorts.Services(), Ender: flowEnder{n}, Memory: n.frontendState,
			Freed: n.HostPorts.Freed(), Capacity: capacity, Log: n.log,
		})
	}
	o := cfg.Connections.options()
	o.Log = n.log
	n.timeouts = o.Timeouts
	o.Passed = func(began time.Time, p conntrack.Pass) { n.Numbers.Passed(began, p.Nodes) }
	if n.names != nil {
		n.Learned = learned.New(n.names, n.log)
		o.Wanted = n.Learned.Wanted
	}
	n.Collector, err = n.Kernel.Connections.NewCollector(o)
	return err
}

// flowEnder ends what still sends UDP to a removed backend: connected sockets, and flows by packets,
// which choose another backend of their Service.
type flowEnder struct{ *node }

// End implements frontendstream.Ender and hostport.Ender.
func (e flowEnder) End(ctx context.Context) error {
	_, err := e.Kernel.Translations.Release(ctx, e.Kernel.Services.Keeps)
	return errors.Join(err, e.Ender.End(ctx))
}

// isOwn says whether an address is the node's, so that host ports may answer there.
func (n *node) isOwn(a netip.Addr) (bool, error) {
	own, err := n.Kernel.Endpoints.HostAddrs()
	return slices.Contains(own, a), err
}

// openCluster prepares the exchange with other nodes.
func (n *node) openCluster(cfg Config) error {
	if cfg.ValidateOnly {
		return nil
	}
	earlier, err := n.others()
	if err != nil {
		return err
	}
	if n.cluster != nil {
		n.Follower = cluster.NewFollower(n.cluster, n.Kernel.IPCache, n.Numbers, n.log)
		n.Follower.Moved, n.Follower.Earlier = n.guard.SetOthers, earlier
		n.Follower.Local = func() []netip.Addr {
			addrs, err := n.addresses(cfg)
			if err != nil {
				n.log.Warn("addresses of the node not read", log.Err(err))
			}
			return addrs
		}
		// Behind the stack's masquerade a pod reaches what the node itself reaches.
		n.Follower.NodesByStack = cfg.Masquerade.Enabled && cluster.Mode(cfg.Routing.Mode) == cluster.Overlay
		if n.Prober != nil {
			n.Follower.Known = n.probe
		}
		if n.Fabric != nil && n.Fabric.State().Mode != cluster.None {
			n.Follower.Fabric = n.Fabric
		}
		n.openBeliefs(cfg)
	}
	if n.registry == nil {
		return nil
	}
	n.Registrar = cluster.NewRegistrar(n.registry, func() (u cluster.Underlay, err error) {
		overlay, known := n.Ranges.OverlayAddrs()
		if !known {
			return u, errors.New("sluice-ipam has not said yet which range has the overlay address")
		}
		u = cluster.Underlay{
			Overlay: overlay, MTU: n.mtu, Mode: cluster.Mode(cfg.Routing.Mode), Port: cfg.Routing.port(),
		}
		u.Addresses, err = n.addresses(cfg)
		if n.Prober != nil && err == nil {
			n.Prober.SetLocal(u.Addresses)
		}
		return u, err
	}, n.log)
	n.Host.Changed = n.Registrar.Changed
	if n.Follower != nil {
		n.Follower.Away, n.Follower.Back = n.Registrar.Lost, n.Registrar.Changed
	}
	return nil
}

// openBeliefs prepares the confirmations, and with native routing the doubts about nodes
// that hear from the store while this one does not.
func (n *node) openBeliefs(cfg Config) {
	if n.hearing == nil {
		return
	}
	n.Beliefs = belief.Open(belief.Options{
		Service: n.hearing, Applied: n.Follower.Applied, Changed: n.Follower.Reconsider, Path: n.beliefs,
		BootID: n.bootID, Now: boottime.Now, Log: n.log.With("source", "cluster"),
		Peers: func() map[string]belief.Peer {
			peers := map[string]belief.Peer{}
			if n.Prober == nil {
				return peers
			}
			for name, s := range n.Prober.Silences() {
				peers[name] = belief.Peer{Silence: s.For, Valid: s.Valid, Said: s.Said}
			}
			return peers
		},
	})
	if cluster.Mode(cfg.Routing.Mode) == cluster.Native {
		n.Follower.Believes = n.Beliefs.Believes
	}
}

// silence is how long ago this node heard from the store.
func (n *node) silence() (time.Duration, bool) {
	if n.Beliefs == nil {
		return 0, false
	}
	return n.Beliefs.Silence()
}

// probe has the other nodes probed, with packets as large as those that carry the
// largest of a pod.
func (n *node) probe(nodes map[string]cluster.Node) {
	size := int(n.mtu)
	if n.Fabric.State().Mode == cluster.Overlay {
		size += fabric.Overhead4
	}
	var peers []probe.Peer
	for name, other := range nodes {
		peers = append(peers, probe.Peer{Name: name, Addresses: other.Addresses, MTU: size})
	}
	if err := n.Prober.SetPeers(peers); err != nil {
		n.log.Error("other nodes not probed", log.Err(err))
	}
}

// programs returns the programs of a set of devices that were loaded last.
func (n *node) programs(d program.Devices) func() []*program.Program {
	return func() []*program.Program { return n.Kernel.Programs.On(d) }
}

// addresses are those by which other nodes reach this one.
func (n *node) addresses(cfg Config) ([]netip.Addr, error) {
	if len(cfg.Underlay.Addresses) > 0 {
		return cfg.Underlay.Addresses, nil
	}
	return n.dev.UnderlayAddrs(cfg.Underlay.Devices)
}

// openFabric prepares the way to other nodes.
func (n *node) openFabric(cfg Config) (err error) {
	if cfg.ValidateOnly {
		return nil
	}
	n.underlay, err = underlay.Open(underlay.Options{
		Home: n.home, Instance: n.instance, Devices: cfg.Underlay.Devices, SetGlobal: n.sysctls,
		Tunnel: n.programs(program.Tunnel), Uplinks: n.programs(program.Uplinks),
		Services: cfg.LoadBalancing.on(), ProcSysNet: cfg.ProcSysNet,
	})
	if err != nil {
		return err
	}
	if err := n.rememberOverlay(); err != nil {
		return fmt.Errorf("find the overlay addresses of an earlier process: %w", err)
	}
	mode := cluster.Mode(cfg.Routing.Mode)
	if mode != cluster.Overlay && mode != cluster.Native {
		if !cfg.LoadBalancing.on() {
			return nil
		}
		mode = cluster.None // for what comes from outside for services
	}
	entries, err := n.Kernel.Addresses.List()
	if err != nil {
		return fmt.Errorf("find the ranges of other nodes: %w", err)
	}
	holders := map[netip.Prefix]uint16{}
	for _, e := range entries {
		if e.Node != 0 && !e.Prefix.IsSingleIP() {
			holders[e.Prefix] = e.Node
		}
	}
	n.Fabric, err = fabric.New(fabric.Options{
		Mode: mode, Port: cfg.Routing.port(), MTU: n.mtu, Limited: len(cfg.Underlay.Devices) > 0,
		Addresses: func() ([]netip.Addr, error) { return n.addresses(cfg) },
		Overlay:   n.Ranges.OverlayAddrs,
		Holders:   holders, Name: n.Numbers.Name, Repair: cfg.Audit.Repair,
		Services: cfg.LoadBalancing.on(), Place: n.Kernel.Endpoints.OwnPlace,
		Maps: n.Kernel.Nodes, Links: n.underlay, Policies: xfrm.New(n.home), Log: n.log,
	})
	if err == nil {
		n.Host.Fabric = n.Fabric
	}
	return err
}

// rememberOverlay finds the overlay addresses that an earlier process used: the sources of
// packets to backends elsewhere and, where services are off, those of routes.
func (n *node) rememberOverlay() error {
	overlay, err := n.Kernel.OverlayAddrs()
	if err != nil {
		return err
	}
	routes, err := n.underlay.Routes()
	if err != nil {
		return err
	}
	for _, r := range routes {
		overlay = append(overlay, r.Source)
	}
	n.Ranges.Remember(overlay)
	return nil
}

// others are the pod ranges and the addresses of other nodes as the ipcache has them,
// before the cluster says them again.
func (n *node) others() (o cluster.Others, err error) {
	entries, err := n.Kernel.Addresses.List()
	if err != nil {
		return o, fmt.Errorf("find the ranges of other nodes: %w", err)
	}
	for _, e := range entries {
		switch {
		case e.Node == 0:
		case !e.Prefix.IsSingleIP():
			o.Ranges = append(o.Ranges, e.Prefix)
		case e.Identity.OfNode():
			o.Nodes = append(o.Nodes, e.Prefix.Addr())
		}
	}
	// Other nodes are reached by the addresses of their devices alone.
	o.Nodes = slices.DeleteFunc(o.Nodes, func(a netip.Addr) bool {
		return slices.ContainsFunc(o.Ranges, func(p netip.Prefix) bool { return p.Contains(a) })
	})
	return o, nil
}

// clusterStream is what the node knows of others.
func (n *node) clusterStream() server.ClusterStream {
	counts := n.Kernel.IPCache.Counts()
	return server.ClusterStream{
		State: n.Follower.State(), Prefixes: counts.Prefixes, Waiting: counts.Waiting,
		Unpublished: n.unpublished.Load(),
		Resting:     n.Numbers.Resting(), Numbers: n.Numbers.Err(), Registration: n.Registrar.Err(),
	}
}

func (n *node) openDevices(cfg Config) (err error) {
	set := cfg.NodeSysctls == "set"
	if cfg.NodeSysctls == "auto" {
		if err := n.home.Do(func() error { set = !netdev.InitialNamespace(); return nil }); err != nil {
			return err
		}
	}
	n.sysctls = set
	group := netdev.Group(n.instance)
	n.guard = guard.New(n.home, n.instance, []uint32{group, group | 1}, guard.Marks{
		Mask: netdev.MarkMask, Pod: netdev.MarkPod, Pods: netdev.MarkLocal, Tunnel: netdev.MarkRemote,
		Others: netdev.MarkForwarded,
	})
	if err := n.guardFabric(cfg); err != nil {
		return err
	}
	if cfg.Masquerade.Enabled {
		others, err := n.others()
		if err != nil {
			return err
		}
		n.guard.SetMasquerade(guard.Masquerade{
			Mark: netdev.MarkPod, Own: n.Ranges.All, Except: cfg.Masquerade.Except, Others: others.Ranges,
		})
	}
	n.dev, err = netdev.Open(netdev.Options{
		Home: n.home, Instance: n.instance, Programs: n.programs(program.Endpoints),
		Ranges: n.Ranges, ServiceDevices: cfg.ServiceDevices, SetGlobal: set,
		ProcSysNet: cfg.ProcSysNet,
	})
	return err
}

// guardFabric has the firewall know how packets travel between nodes, and the ranges
// and nodes that an earlier process knew.
func (n *node) guardFabric(cfg Config) error {
	mode := cluster.Mode(cfg.Routing.Mode)
	if mode != cluster.Overlay && mode != cluster.Native {
		return nil
	}
	others, err := n.others()
	if err != nil {
		return err
	}
	f := guard.Fabric{
		Native: mode == cluster.Native, TunnelPort: cfg.Routing.port(), Own: n.Ranges.All,
		Others: others.Ranges, Nodes: others.Nodes,
	}
	if mode == cluster.Overlay {
		f.TunnelGroup = netdev.TunnelGroup(n.instance)
	}
	n.guard.SetFabric(f)
	return nil
}

// openPolicy takes over the tables that are in the kernel, or removes them if
// nothing shall evaluate packets.
func (n *node) openPolicy(cfg Config) error {
	if cfg.Policy.Mode == policyNone {
		if cfg.ValidateOnly {
			return nil
		}
		if err := record.ForgetEvaluated(n.records); err != nil {
			return err
		}
		if err := unenforce.Policies(n.Kernel.Policies()); err != nil {
			return fmt.Errorf("remove policies: %w", err)
		}
		return nil
	}
	c := policysync.Config{
		Name: service, Kernel: n.Kernel.Policies(), Service: n.policies, Memory: n.enforced, Timeout: n.patience, Log: n.log,
		Wait: cfg.Policy.Mode == policyRequired, Audit: cfg.Policy.Audit, Linger: cfg.Policy.Linger,
		Changed: func(slots []uint16) { n.Core.PolicyChanged(slots) },
	}
	if !cfg.ValidateOnly { // its ipcache is its own
		c.Addresses = n.Kernel.IPCache
	}
	n.Policy = policysync.New(c)
	evaluated, err := record.Evaluated(n.records, n.bootID)
	if err != nil {
		return err
	}
	audited, err := n.openAuditModes()
	if err != nil {
		return err
	}
	if err := n.Policy.Adopt(func(slot uint16) bool { return evaluated[slot] }, audited); err != nil {
		return fmt.Errorf("take over policies: %w", err)
	}
	return nil
}

// openAuditModes finds what was in audit mode when the process before ended, and still
// is.
func (n *node) openAuditModes() (auditmode.Audited, error) {
	if n.audits == nil {
		return auditmode.Audited{}, nil
	}
	n.AuditModes = auditmode.New(auditmode.Config{
		Store: n.audits, Log: n.log, Endpoints: func() []endpoint.Endpoint { return n.Core.List() },
		Apply: n.Policy.SetAudit,
	})
	was, err := record.Endpoints(n.records, n.bootID)
	if err != nil {
		return auditmode.Audited{}, err
	}
	return n.AuditModes.Audited(was), nil
}

// defaultMTU is what pods can send to others by the default route, in a tunnel if
// there is one.
func (n *node) defaultMTU(cfg Config) (uint16, error) {
	mtu, err := netdev.DefaultMTU(n.home)
	if err != nil || cfg.Routing.port() == 0 {
		return mtu, err
	}
	addrs, err := n.addresses(cfg)
	if len(addrs) > 0 && !slices.ContainsFunc(addrs, netip.Addr.Is4) {
		return max(mtu-fabric.Overhead6, minMTU), err
	}
	return max(mtu-fabric.Overhead4, minMTU), err
}

func (n *node) openCore(cfg Config) (err error) {
	if cfg.MTU == 0 {
		if cfg.MTU, err = n.defaultMTU(cfg); err != nil {
			return fmt.Errorf("find the MTU of the uplink: %w", err)
		}
	}
	n.mtu = cfg.MTU
	maps := kernelmaps.Maps{
		Endpoints: n.Kernel.Endpoints, Tables: n.Kernel.Tables, IPCache: n.Kernel.IPCache, Policy: n.Policy,
		Services: n.Kernel.Services,
	}
	if cfg.LoadBalancing.on() {
		maps.Namespaces = n.Kernel.Namespaces
	}
	n.Host = &host.Host{Devices: n.dev, Firewall: n.guard, Addresses: n.Kernel.Endpoints, Ranges: n.Ranges, Log: n.log}
	c := lifecycle.Config{
		Instance: n.instance, BootID: n.bootID, Ranges: n.Ranges, MTU: cfg.MTU,
		RefuseSecond: cfg.SecondInterfaces == "refuse", Sockets: cfg.LoadBalancing.on(),
		Maps: maps, Links: n.dev, Leases: n.leases, Identities: n.identities, Records: n.records, Host: n.Host,
		Repaired: n.Ring.AddRepair, Log: n.log,
	}
	if n.publisher != nil && cluster.Mode(cfg.Routing.Mode) == cluster.Native {
		c.Published = func(ctx context.Context, o workload.Owner) {
			if !n.publisher.Published(ctx, o, publicationWait) && ctx.Err() == nil {
				n.unpublished.Add(1)
			}
		}
	}
	c.HostPorts = endpoint.NoHostPorts{}
	if n.HostPorts != nil {
		c.HostPorts = n.HostPorts
	}
	if n.Policy != nil {
		c.Policies = kernelmaps.Policies{Policy: n.Policy}
	}
	if !cfg.ValidateOnly { // its maps are its own, and have no pins
		c.Tables, n.Host.Pins = maps.AuditTables, n.Kernel.Pins
	}
	n.Core = lifecycle.New(c)
	if n.Ranges.Changes() && n.ranges != nil && !cfg.ValidateOnly {
		n.Keeper = podrange.New(podrange.Options{
			Set: n.Ranges, Source: n.ranges, Entries: n.Kernel.IPCache, Host: n.Host, Endpoints: n.Core, Log: n.log,
		})
	}
	n.Auditor = &audit.Auditor{Core: n.Core, Host: n.Host, Changes: n.dev, Log: n.log}
	return nil
}

// Close lets go of everything and leaves the kernel as it is.
func (n *node) Close() error {
	var errs []error
	if n.dev != nil {
		n.dev.Close()
	}
	if n.underlay != nil {
		n.underlay.Close()
	}
	if n.Kernel != nil {
		errs = append(errs, n.Kernel.Close())
	}
	if n.here != nil {
		errs = append(errs, n.here.Close())
	}
	return errors.Join(errs...)
}

// restore brings records and maps together, so that calls can be served.
func (n *node) restore(ctx context.Context) error {
	// What changes from now on is looked at after the comparison of devices.
	if err := n.dev.Subscribe(); err != nil {
		return err
	}
	if n.Fabric == nil {
		// An earlier process had another mode. What is left of it harms nobody.
		if err := fabric.Remove(n.underlay, n.Kernel.Nodes); err != nil {
			n.log.Error("the way to other nodes not removed", log.Err(err))
		}
	}
	return n.Auditor.Restore(ctx)
}

// comparisonPause is before a comparison is tried again that failed.
const comparisonPause = time.Second

// compare brings records and devices together, while calls are served. One that
// fails is tried again: the endpoints have traffic meanwhile.
func (n *node) compare(ctx context.Context) error {
	for {
		err := n.Auditor.Compare(ctx)
		if err == nil {
			break
		}
		n.log.Error("devices not compared with the records, trying again", log.Err(err))
		select {
		case <-time.After(comparisonPause):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if err := n.Kernel.DropOldPrograms(); err != nil {
		n.log.Warn("old programs stay pinned", log.Err(err))
	}
	close(n.compared)
	return nil
}

// reloadInterval is how often the datapath looks whether nf_conntrack has been loaded.
const reloadInterval = 5 * time.Second

// followConntrack loads and attaches the programs again when nf_conntrack appears: a rule of
// the node's firewall may load it at any time.
func (n *node) followConntrack(ctx context.Context) error {
	select {
	case <-n.compared:
	case <-ctx.Done():
		return ctx.Err()
	}
	attach := false // what failed is tried again
	return n.every(ctx, reloadInterval, "load programs that ask nf_conntrack", func() error {
		changed, err := n.Kernel.Reload()
		attach = attach || changed
		if err != nil || !attach {
			return err
		}
		if err := n.Auditor.Compare(ctx); err != nil {
			return err
		}
		attach = false
		return n.Kernel.DropOldPrograms()
	})
}

// observe moves the programs' events into the ring.
func (n *node) observe(ctx context.Context) error {
	names := event.Names{Owners: n.Core, Services: n.Kernel.Services}
	if n.Policy != nil {
		names.Policies = &n.Policy.History
	}
	return n.Kernel.Events.Observe(ctx, names, n.Ring)
}

// spoolInterval is how often the spool is looked at while the process serves.
const spoolInterval = 3 * time.Second

// replay does the deletions that the plugin spooled between the replay at the
// start and the first accepted connection, or because the socket's queue was
// full.
func (n *node) replay(ctx context.Context, s *record.Spool) error {
	return n.every(ctx, spoolInterval, "replay deletions", func() error { return s.Replay(ctx, n.Core) })
}

// serviceInterval is how often numbers of removed frontends and backends are freed.
const serviceInterval = 30 * time.Second

// portInterval is how often the ports of the node are looked at.
const portInterval = 5 * time.Second

// collectServices removes translations whose connections are gone, and frees the
// numbers of removed frontends and backends, at intervals, and early where ports of the
// node run out.
func (n *node) collectServices(ctx context.Context) error {
	var due time.Time
	return n.every(ctx, portInterval, "free numbers of services", func() error {
		if time.Now().Before(due) && !n.Kernel.Translations.Pressed() {
			return nil
		}
		due = time.Now().Add(serviceInterval)
		now := conntrack.MonotonicSeconds()
		if _, err := n.Kernel.Translations.Collect(now, n.Kernel.Connections, n.timeouts); err != nil {
			return err
		}
		return n.freeNumbers(ctx)
	})
}

// shareInterval is how often the bounds that endpoints share are looked at.
const shareInterval = time.Second

// collectShares divides the bounds of fragments, events and affinity among the endpoints at intervals, and
// early if an endpoint was refused. Translations are collected with the services.
func (n *node) collectShares(ctx context.Context) error {
	var due time.Time
	return n.every(ctx, shareInterval, "divide shares of endpoints", func() error {
		if time.Now().Before(due) && !n.Kernel.Bounds.Pressed() {
			return nil
		}
		due = time.Now().Add(serviceInterval)
		endpoints, err := n.Kernel.Endpoints.Count()
		if err != nil {
			return err
		}
		n.Kernel.Bounds.DivideEvents(endpoints)
		local, err := n.Kernel.Endpoints.Local()
		if err != nil {
			return err
		}
		if err := n.Kernel.Bounds.CollectAffinity(local); err != nil {
			return err
		}
		_, _, err = n.Kernel.Bounds.CollectFragments()
		return err
	})
}

// freeNumbers frees the numbers of removed frontends and backends that nothing names.
func (n *node) freeNumbers(ctx context.Context) error {
	_, err := n.Kernel.Services.Collect(ctx, numberUsers{n})
	return err
}

// every calls fn at intervals until ctx ends. What fails is logged, and tried
// again the next time.
func (n *node) every(ctx context.Context, interval time.Duration, work string, fn func() error) error {
	t := time.NewTicker(interval)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-t.C:
		}
		if err := fn(); err != nil && ctx.Err() == nil {
			n.log.Error("work incomplete, trying again later", "work", work, log.Err(err))
		}
	}
}

// uninstallNode removes what an instance made in the caller's network namespace: the
// devices of its endpoints, then what the node has for all of them. What is not
// there is no error.
func uninstallNode(instance string, cidrs []netip.Prefix) error {
	home, err := netns.Current()
	if err != nil {
		return fmt.Errorf("open the node's network namespace: %w", err)
	}
	defer home.Close()
	dev, err := netdev.Open(netdev.Options{Home: home, Instance: instance, Ranges: podrange.Of(cidrs, false)})
	if err != nil {
		return err
	}
	defer dev.Close()
	others, err := underlay.Open(underlay.Options{Home: home, Instance: instance})
	if err != nil {
		return err
	}
	defer others.Close()
	err = errors.Join(others.RemoveAll(), dev.RemoveDevices(), dev.RemoveNode())
	// The firewall last: until then it drops what a device without programs sends.
	return errors.Join(err, guard.New(home, instance, nil, guard.Marks{}).Remove())
}
