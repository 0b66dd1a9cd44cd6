// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package node is the part of the datapath about nodes: the configuration that all endpoints of this node share, the
// registration of this node, the known other nodes, and packet forwarding to them.
package node

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/boottime"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/work"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/netdev"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipcache"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/node/belief"
	"github.com/sluice-net/sluice/services/datapath/internal/node/cluster"
	"github.com/sluice-net/sluice/services/datapath/internal/node/firewall"
	"github.com/sluice-net/sluice/services/datapath/internal/node/host"
	"github.com/sluice-net/sluice/services/datapath/internal/node/nodemap"
	"github.com/sluice-net/sluice/services/datapath/internal/node/podrange"
	"github.com/sluice-net/sluice/services/datapath/internal/node/probe"
	"github.com/sluice-net/sluice/services/datapath/internal/node/routing"
	"github.com/sluice-net/sluice/services/datapath/internal/node/underlay"
	"github.com/sluice-net/sluice/services/datapath/internal/node/xfrm"
)

// Publisher waits until an endpoint is published.
type Publisher interface {
	Published(ctx context.Context, o workload.Owner, atMost time.Duration) bool
}

// Maps are the kernel maps that the package uses.
type Maps struct {
	Addresses *ipmap.Maps // only read
	IPCache   *ipcache.Cache
	Endpoints *endpointmap.Maps
	Nodes     *nodemap.Maps
	Pins      host.Pins // nil: the maps are not pinned
	// Numbers are the node IDs in the maps, Overlay this node's own addresses in the tunnel, both as a previous process
	// wrote them.
	Numbers []uint16
	Overlay []netip.Addr
	// Programs returns the most recently loaded programs for a kind of device.
	Programs func(program.Devices) []*program.Program
}

// Options are the configuration and the dependencies of the node.
type Options struct {
	Instance string
	BootID   string
	Home     *netns.Namespace // the node's network namespace
	Maps     Maps
	Devices  *netdev.Netdev
	Ranges   *podrange.Set
	Log      *slog.Logger

	Mode      cluster.Mode
	Port      uint16       // UDP port of the tunnel; 0: none
	Addresses []netip.Addr // by which other nodes reach this node; none: the addresses of Uplinks
	Uplinks   []string     // devices; none: the devices that have routes
	MTU       uint16       // of pods; 0: the default route's, minus the tunnel overhead
	Services  bool         // external packets may be for services
	Shortcut  bool         // tunnel packets bypass the tunnel device where that is equivalent
	// Masquerade replaces the source of pods' connections beyond the cluster by the node's address, except for these
	// destinations; nil: no masquerade.
	Masquerade *[]netip.Prefix
	SetSysctls bool   // set the sysctls of the whole node
	ProcSysNet string // directory of the sysctls; "": /proc/sys/net
	ProbePort  uint16 // UDP port of probes of other nodes; 0: no probes
	Repair     bool   // repair differences, in addition to reporting them

	Source    cluster.Source   // nil: other nodes are unknown
	Registry  cluster.Registry // nil: the node is not registered
	Publisher Publisher        // nil: publication of endpoints to other nodes is not awaited
	Hearing   belief.Service   // nil: the age of the store's data is unknown
	Proxy     host.Proxy       // nil: no proxy can attach
	// Numbers is the path of the file with the node IDs, Beliefs the path of the state of package belief; "": no file.
	Numbers, Beliefs string

	// ValidateOnly disables everything that other nodes could notice.
	ValidateOnly bool
}

// Node is this node and its view of the other nodes. Fields may be nil as documented.
type Node struct {
	Host      *host.Host
	Firewall  *firewall.Table
	Numbers   *cluster.Numbers   // nil with ValidateOnly
	Follower  *cluster.Follower  // nil without a source
	Registrar *cluster.Registrar // nil without a registry
	Prober    *probe.Prober      // nil: other nodes are not probed
	Router    *routing.Router    // nil: no packets travel to other nodes
	MTU       uint16             // of pods

	o           Options
	underlay    *underlay.Underlay // nil with ValidateOnly
	beliefs     *belief.Beliefs    // nil: the age of the store's data is unknown
	unpublished atomic.Uint64      // creations that returned before other nodes had the addresses
}

// Open adopts the state of a previous process. It does not change devices before Restore.
func Open(o Options) (_ *Node, err error) {
	n := &Node{o: o, MTU: o.MTU}
	defer func() {
		if err != nil {
			n.Close()
		}
	}()
	entries, err := o.Maps.Addresses.List()
	if err != nil {
		return nil, fmt.Errorf("find the ranges of other nodes: %w", err)
	}
	earlier := othersIn(entries)
	if n.MTU == 0 {
		if n.MTU, err = n.defaultMTU(); err != nil {
			return nil, fmt.Errorf("find the MTU of the uplink: %w", err)
		}
	}
	n.openFirewall(earlier)
	changes := cluster.NewChanges()
	if !o.ValidateOnly {
		n.Numbers = cluster.OpenNumbers(cluster.NumbersOptions{
			Path: o.Numbers, BootID: o.BootID, InUse: o.Maps.IPCache.InUse, Found: o.Maps.Numbers, Log: o.Log,
		})
		if err := n.openRouting(entries); err != nil {
			return nil, err
		}
		n.openCluster(earlier, changes)
	}
	ho := host.Options{
		Devices: o.Devices, Firewall: n.Firewall, Addresses: o.Maps.Endpoints, Pins: o.Maps.Pins, Ranges: o.Ranges,
		Proxy: o.Proxy, Changed: changes.Add, Log: o.Log,
	}
	if n.Router != nil {
		ho.Router = n.Router
	}
	if o.Shortcut {
		ho.TunnelPort = o.Port
	}
	n.Host = host.New(ho)
	return n, nil
}

// Close releases all resources and leaves the kernel state unchanged.
func (n *Node) Close() {
	if n.underlay != nil {
		n.underlay.Close()
	}
}

// Restore removes the state of another routing mode of a previous process.
func (n *Node) Restore() {
	if n.Router == nil && n.underlay != nil {
		// Leftovers do no harm.
		if err := routing.Remove(n.underlay, n.o.Maps.Nodes); err != nil {
			n.o.Log.Error("cannot remove the routes and devices of the former routing mode", log.Err(err))
		}
	}
}

// Tasks returns the background work.
func (n *Node) Tasks() []work.Task {
	var tasks []work.Task
	if n.Router != nil {
		tasks = append(tasks, work.Task{Name: "routing", Run: n.Router.Run})
	}
	if n.Follower != nil {
		tasks = append(tasks, work.Task{Name: "cluster", Run: n.Follower.Run})
	}
	if n.beliefs != nil && n.Follower != nil {
		tasks = append(tasks, work.Task{Name: "beliefs", Run: func(ctx context.Context) error {
			return n.beliefs.Run(ctx, belief.Inputs{
				Applied: n.Follower.Applied, Changed: n.Follower.Reconsider, Peers: n.peers,
			})
		}})
	}
	if n.Registrar != nil {
		tasks = append(tasks, work.Task{Name: "registration", Run: n.Registrar.Run})
	}
	if n.Prober != nil {
		tasks = append(tasks, work.Task{Name: "probes", Run: n.Prober.Run})
	}
	return tasks
}

// Awaits returns nil: endpoints of this node work without other nodes.
func (*Node) Awaits() []work.Await { return nil }

// Warnings lists problems with the configuration of the node, and problems that block packets from other nodes.
func (n *Node) Warnings() []string { return n.Host.Warnings() }

// Mode returns how packets travel to pods of other nodes.
func (n *Node) Mode() cluster.Mode {
	if n.Router == nil {
		return cluster.None
	}
	return n.Router.State().Mode
}

// Name returns the name of another node by its node ID; "" if it is unknown.
func (n *Node) Name(number uint16) string { return n.Numbers.Name(number) }

// publicationWait is the longest time that a creation waits until other nodes have the addresses. With native routing,
// other nodes drop packets from addresses that they do not know.
const publicationWait = 200 * time.Millisecond

// Published returns a function that waits until other nodes have an endpoint's addresses, or nil if this is not needed.
func (n *Node) Published() func(ctx context.Context, o workload.Owner) {
	if n.o.Publisher == nil || n.o.Mode != cluster.Native {
		return nil
	}
	return func(ctx context.Context, o workload.Owner) {
		if !n.o.Publisher.Published(ctx, o, publicationWait) && ctx.Err() == nil {
			n.unpublished.Add(1)
		}
	}
}

// Unpublished counts creations that returned before other nodes had the addresses.
func (n *Node) Unpublished() uint64 { return n.unpublished.Load() }

// addresses returns the addresses by which other nodes reach this node.
func (n *Node) addresses() ([]netip.Addr, error) {
	if len(n.o.Addresses) > 0 {
		return n.o.Addresses, nil
	}
	return n.o.Devices.UnderlayAddrs(n.o.Uplinks)
}

// MinMTU is the minimum MTU of pods, which IPv6 requires.
const MinMTU = 1280

// defaultMTU returns the MTU of the default route, minus the tunnel overhead if there is a tunnel.
func (n *Node) defaultMTU() (uint16, error) {
	mtu, err := netdev.DefaultMTU(n.o.Home)
	if err != nil || n.o.Port == 0 {
		return mtu, err
	}
	addrs, err := n.addresses()
	if len(addrs) > 0 && !slices.ContainsFunc(addrs, netip.Addr.Is4) {
		return max(mtu-routing.Overhead6, MinMTU), err
	}
	return max(mtu-routing.Overhead4, MinMTU), err
}

// othersIn returns the pod ranges and addresses of other nodes in the ipcache, for use until the cluster has sent them
// again.
func othersIn(entries []ipmap.Entry) (o cluster.Others) {
	for _, e := range entries {
		switch {
		case e.Node == 0:
		case !e.Prefix.IsSingleIP():
			o.Ranges = append(o.Ranges, e.Prefix)
		case e.Identity.OfNode():
			o.Nodes = append(o.Nodes, e.Prefix.Addr())
		}
	}
	// Only addresses of devices are used to reach another node, not its overlay addresses.
	o.Nodes = slices.DeleteFunc(o.Nodes, func(a netip.Addr) bool {
		return slices.ContainsFunc(o.Ranges, func(p netip.Prefix) bool { return p.Contains(a) })
	})
	return o
}

// openFirewall configures the firewall with the routing mode and the ranges and nodes that a previous process knew.
func (n *Node) openFirewall(earlier cluster.Others) {
	group := netdev.Group(n.o.Instance)
	n.Firewall = firewall.New(n.o.Home, n.o.Instance, []uint32{group, group | 1}, firewall.Marks{
		Mask: netdev.MarkMask, Pod: netdev.MarkPod, Pods: netdev.MarkLocal, Tunnel: netdev.MarkRemote,
		Others: netdev.MarkForwarded,
	})
	if n.o.Mode == cluster.Overlay || n.o.Mode == cluster.Native {
		f := firewall.Routing{
			Native: n.o.Mode == cluster.Native, TunnelPort: n.o.Port, Own: n.o.Ranges.All,
			Others: earlier.Ranges, Nodes: earlier.Nodes,
		}
		if n.o.Mode == cluster.Overlay {
			f.TunnelGroup = netdev.TunnelGroup(n.o.Instance)
		}
		n.Firewall.SetRouting(f)
	}
	if n.o.Masquerade != nil {
		n.Firewall.SetMasquerade(firewall.Masquerade{
			Mark: netdev.MarkPod, Own: n.o.Ranges.All, Except: *n.o.Masquerade, Others: earlier.Ranges,
		})
	}
}

// monotonic returns the clock that programs compare times with.
func monotonic() (time.Duration, error) {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return 0, fmt.Errorf("read CLOCK_MONOTONIC: %w", err)
	}
	return time.Duration(now.Nano()), nil
}

// openRouting prepares packet forwarding to other nodes.
func (n *Node) openRouting(entries []ipmap.Entry) (err error) {
	o := n.o
	programs := func(d program.Devices) func() []*program.Program {
		return func() []*program.Program { return o.Maps.Programs(d) }
	}
	n.underlay, err = underlay.Open(underlay.Options{
		Home: o.Home, Instance: o.Instance, Devices: o.Uplinks, SetGlobal: o.SetSysctls,
		Tunnel: programs(program.Tunnel), Uplinks: programs(program.Uplinks),
		Services: o.Services, ProcSysNet: o.ProcSysNet,
	})
	if err != nil {
		return err
	}
	if err := n.rememberOverlay(); err != nil {
		return fmt.Errorf("find the overlay addresses of an earlier process: %w", err)
	}
	mode := o.Mode
	if mode != cluster.Overlay && mode != cluster.Native {
		if !o.Services {
			return nil
		}
		mode = cluster.None // for external packets to services
	}
	holders := map[netip.Prefix]uint16{}
	for _, e := range entries {
		if e.Node != 0 && !e.Prefix.IsSingleIP() {
			holders[e.Prefix] = e.Node
		}
	}
	n.Router, err = routing.New(routing.Options{
		Mode: mode, Port: o.Port, MTU: n.MTU, Limited: len(o.Uplinks) > 0,
		Addresses: n.addresses, Overlay: o.Ranges.OverlayAddrs,
		Holders: holders, Name: n.Numbers.Name, Repair: o.Repair,
		Services: o.Services, AddressID: o.Maps.Endpoints.OwnPlace,
		Maps: o.Maps.Nodes, Links: n.underlay, Policies: xfrm.New(o.Home), Shortcut: o.Shortcut, Monotonic: monotonic,
		Log: o.Log,
	})
	return err
}

// rememberOverlay finds the overlay addresses that a previous process used: the sources of packets to backends on other
// nodes and, if services are off, the sources of routes.
func (n *Node) rememberOverlay() error {
	overlay := slices.Clone(n.o.Maps.Overlay)
	routes, err := n.underlay.Routes()
	if err != nil {
		return err
	}
	for _, r := range routes {
		overlay = append(overlay, r.Source)
	}
	n.o.Ranges.Remember(overlay)
	return nil
}

// openCluster creates what connects this node with others: the prober, the registrar of this node, and the follower of
// the other nodes' addresses.
func (n *Node) openCluster(earlier cluster.Others, changes cluster.Changes) {
	o := n.o
	if o.Hearing != nil && o.Source != nil {
		n.beliefs = belief.Open(belief.Options{
			Service: o.Hearing, Path: o.Beliefs, BootID: o.BootID, Now: boottime.Now, Log: o.Log.With("source", "cluster"),
		})
	}
	if o.ProbePort != 0 {
		n.Prober = probe.New(probe.Options{
			Port: o.ProbePort, Silence: n.silence, Log: o.Log.With("source", "probe"),
			Listen: func(f probe.Family) (conn probe.Conn, err error) {
				err = o.Home.Do(func() (err error) {
					conn, err = probe.Listen(f, o.ProbePort)
					return err
				})
				return conn, err
			},
		})
	}
	if o.Registry != nil {
		n.Registrar = cluster.NewRegistrar(o.Registry, n.registration, changes, o.Log)
	}
	if o.Source == nil {
		return
	}
	follow := cluster.FollowerOptions{
		Source: o.Source, Entries: o.Maps.IPCache, Numbers: n.Numbers, Log: o.Log,
		Moved: n.Firewall.SetOthers, Earlier: earlier,
		Local: func() []netip.Addr {
			addrs, err := n.addresses()
			if err != nil {
				o.Log.Warn("failed to read the addresses of the node", log.Err(err))
			}
			return addrs
		},
		// Because the host stack masquerades these packets, a pod can reach what the node itself can reach.
		NodesByStack: o.Masquerade != nil && o.Mode == cluster.Overlay,
	}
	if n.Prober != nil {
		follow.Known = n.probe
	}
	if n.Mode() != cluster.None {
		follow.Router = n.Router
	}
	if n.Registrar != nil {
		follow.Away, follow.Back = n.Registrar.Lost, n.Registrar.Changed
	}
	if n.beliefs != nil && o.Mode == cluster.Native {
		follow.Trusts = n.beliefs.Trusts
	}
	n.Follower = cluster.NewFollower(follow)
}

// registration returns the current description of this node.
func (n *Node) registration() (u cluster.Underlay, err error) {
	overlay, known := n.o.Ranges.OverlayAddrs()
	if !known {
		return u, fmt.Errorf("%w: sluice-ipam has not announced which range has the overlay address",
			cluster.ErrIncomplete)
	}
	u = cluster.Underlay{Overlay: overlay, MTU: n.MTU, Mode: n.o.Mode, Port: n.o.Port}
	u.Addresses, err = n.addresses()
	if n.Prober != nil && err == nil {
		n.Prober.SetLocal(u.Addresses)
	}
	return u, err
}

// silence returns how long ago this node heard from the store.
func (n *Node) silence() (time.Duration, bool) {
	if n.beliefs == nil {
		return 0, false
	}
	return n.beliefs.Silence()
}

// peers returns what other nodes last reported about their contact with the store.
func (n *Node) peers() map[string]belief.Peer {
	peers := map[string]belief.Peer{}
	if n.Prober == nil {
		return peers
	}
	for name, s := range n.Prober.Silences() {
		peers[name] = belief.Peer{Silence: s.For, Valid: s.Valid, Said: s.Said}
	}
	return peers
}

// probe sets the other nodes to probe, with packets as large as the largest packets of pods on the underlay.
func (n *Node) probe(nodes map[string]cluster.Node) {
	size := int(n.MTU)
	if n.Mode() == cluster.Overlay {
		size += routing.Overhead4
	}
	var peers []probe.Peer
	for name, other := range nodes {
		peers = append(peers, probe.Peer{Name: name, Addresses: other.Addresses, MTU: size})
	}
	if err := n.Prober.SetPeers(peers); err != nil {
		n.o.Log.Error("other nodes not probed", log.Err(err))
	}
}
