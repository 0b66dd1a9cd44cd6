// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package node is the subject of nodes in the datapath: what this node has for all of its
// endpoints, what it says of itself, what it knows of other nodes, and the way there.
package node

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

// Publisher says when other nodes can know the addresses of an endpoint.
type Publisher interface {
	Published(ctx context.Context, o workload.Owner, atMost time.Duration) bool
}

// Maps are those of the kernel that nodes have to do with.
type Maps struct {
	Addresses *ipmap.Maps // to be read
	IPCache   *ipcache.Cache
	Endpoints *endpointmap.Maps
	Nodes     *nodemap.Maps
	Pins      host.Pins // nil: the maps have none
	// Numbers are those of other nodes that the maps have, Overlay this node's own
	// addresses in the tunnel, as an earlier process wrote them.
	Numbers []uint16
	Overlay []netip.Addr
	// Programs returns the programs of a set of devices that were loaded last.
	Programs func(program.Devices) []*program.Program
}

// Options say what the node is, and what it works with.
type Options struct {
	Instance string
	BootID   string
	Home     *netns.Namespace // the node's network namespace
	Maps     Maps
	Devices  *netdev.Netdev
	Ranges   *podrange.Set
	Log      *slog.Logger

	Mode      cluster.Mode
	Port      uint16       // UDP, of the tunnel; 0: there is none
	Addresses []netip.Addr // by which other nodes reach this one; none: those of Uplinks
	Uplinks   []string     // devices; none: those that have routes
	MTU       uint16       // of pods; 0: the default route's, less the tunnel's
	Services  bool         // packets from outside may be for services
	// Masquerade gives pods the node's address beyond the cluster but at these
	// destinations; nil: none is given.
	Masquerade *[]netip.Prefix
	SetSysctls bool   // those of the whole node
	ProcSysNet string // where they are; "": /proc/sys/net
	ProbePort  uint16 // UDP, of probes of other nodes; 0: they are not probed
	Repair     bool   // what differs, beside reporting it

	Source    cluster.Source   // nil: other nodes are not known
	Registry  cluster.Registry // nil: the node is not registered
	Publisher Publisher        // nil: nothing says when others know an endpoint
	Hearing   belief.Service   // nil: nothing says when the node heard from the store
	// Files of the numbers of nodes, and of what is believed of them; "": none.
	Numbers, Beliefs string

	// ValidateOnly leaves out everything that other nodes could notice.
	ValidateOnly bool
}

// Node is this node among others. Fields may be nil as they say.
type Node struct {
	Host      *host.Host
	Guard     *firewall.Table
	Numbers   *cluster.Numbers   // nil with ValidateOnly
	Follower  *cluster.Follower  // nil without a source
	Registrar *cluster.Registrar // nil without a registry
	Prober    *probe.Prober      // nil: other nodes are not probed
	Fabric    *routing.Router    // nil if no packets travel to other nodes
	MTU       uint16             // of pods

	o           Options
	underlay    *underlay.Underlay // nil with ValidateOnly
	beliefs     *belief.Beliefs    // nil if nothing says when the node heard from the store
	unpublished atomic.Uint64      // creations that ended before others could know the addresses
}

// Open takes over what an earlier process left. It changes no device before Restore.
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
	n.openGuard(earlier)
	changes := cluster.NewChanges()
	if !o.ValidateOnly {
		n.Numbers = cluster.OpenNumbers(cluster.NumbersOptions{
			Path: o.Numbers, BootID: o.BootID, InUse: o.Maps.IPCache.InUse, Found: o.Maps.Numbers, Log: o.Log,
		})
		if err := n.openFabric(entries); err != nil {
			return nil, err
		}
		n.openCluster(earlier, changes)
	}
	ho := host.Options{
		Devices: o.Devices, Firewall: n.Guard, Addresses: o.Maps.Endpoints, Pins: o.Maps.Pins, Ranges: o.Ranges,
		Changed: changes.Add, Log: o.Log,
	}
	if n.Fabric != nil {
		ho.Fabric = n.Fabric
	}
	n.Host = host.New(ho)
	return n, nil
}

// Close lets go of everything and leaves the kernel as it is.
func (n *Node) Close() {
	if n.underlay != nil {
		n.underlay.Close()
	}
}

// Restore removes what is left of another mode of an earlier process.
func (n *Node) Restore() {
	if n.Fabric == nil && n.underlay != nil {
		// What is left of it harms nobody.
		if err := routing.Remove(n.underlay, n.o.Maps.Nodes); err != nil {
			n.o.Log.Error("the way to other nodes not removed", log.Err(err))
		}
	}
}

// Tasks are the background work.
func (n *Node) Tasks() []work.Task {
	var tasks []work.Task
	if n.Fabric != nil {
		tasks = append(tasks, work.Task{Name: "fabric", Run: n.Fabric.Run})
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

// Awaits is empty: endpoints of this node work without other nodes.
func (*Node) Awaits() []work.Await { return nil }

// Warnings name what others have set up on the node, and what keeps packets from other nodes.
func (n *Node) Warnings() []string { return n.Host.Warnings() }

// Mode is how packets travel to pods of other nodes.
func (n *Node) Mode() cluster.Mode {
	if n.Fabric == nil {
		return cluster.None
	}
	return n.Fabric.State().Mode
}

// Name names another node by its number; "": it is not known.
func (n *Node) Name(number uint16) string { return n.Numbers.Name(number) }

// publicationWait is how long a creation waits until other nodes can know its
// addresses. Without a tunnel they drop what comes from one that they do not know.
const publicationWait = 200 * time.Millisecond

// Published returns nil if nobody waits until other nodes know an endpoint, and else what
// waits for it.
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

// Unpublished counts creations that ended before other nodes could know the addresses.
func (n *Node) Unpublished() uint64 { return n.unpublished.Load() }

// addresses are those by which other nodes reach this one.
func (n *Node) addresses() ([]netip.Addr, error) {
	if len(n.o.Addresses) > 0 {
		return n.o.Addresses, nil
	}
	return n.o.Devices.UnderlayAddrs(n.o.Uplinks)
}

// MinMTU is the least MTU of pods: IPv6 does not work with less.
const MinMTU = 1280

// defaultMTU is what pods can send to others by the default route, in a tunnel if
// there is one.
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

// othersIn are the pod ranges and the addresses of other nodes as the ipcache has them,
// before the cluster says them again.
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
	// Other nodes are reached by the addresses of their devices alone.
	o.Nodes = slices.DeleteFunc(o.Nodes, func(a netip.Addr) bool {
		return slices.ContainsFunc(o.Ranges, func(p netip.Prefix) bool { return p.Contains(a) })
	})
	return o
}

// openGuard has the firewall know how packets travel between nodes, and the ranges
// and nodes that an earlier process knew.
func (n *Node) openGuard(earlier cluster.Others) {
	group := netdev.Group(n.o.Instance)
	n.Guard = firewall.New(n.o.Home, n.o.Instance, []uint32{group, group | 1}, firewall.Marks{
		Mask: netdev.MarkMask, Pod: netdev.MarkPod, Pods: netdev.MarkLocal, Tunnel: netdev.MarkRemote,
		Others: netdev.MarkForwarded,
	})
	if n.o.Mode == cluster.Overlay || n.o.Mode == cluster.Native {
		f := firewall.Fabric{
			Native: n.o.Mode == cluster.Native, TunnelPort: n.o.Port, Own: n.o.Ranges.All,
			Others: earlier.Ranges, Nodes: earlier.Nodes,
		}
		if n.o.Mode == cluster.Overlay {
			f.TunnelGroup = netdev.TunnelGroup(n.o.Instance)
		}
		n.Guard.SetFabric(f)
	}
	if n.o.Masquerade != nil {
		n.Guard.SetMasquerade(firewall.Masquerade{
			Mark: netdev.MarkPod, Own: n.o.Ranges.All, Except: *n.o.Masquerade, Others: earlier.Ranges,
		})
	}
}

// openFabric prepares the way to other nodes.
func (n *Node) openFabric(entries []ipmap.Entry) (err error) {
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
		mode = cluster.None // for what comes from outside for services
	}
	holders := map[netip.Prefix]uint16{}
	for _, e := range entries {
		if e.Node != 0 && !e.Prefix.IsSingleIP() {
			holders[e.Prefix] = e.Node
		}
	}
	n.Fabric, err = routing.New(routing.Options{
		Mode: mode, Port: o.Port, MTU: n.MTU, Limited: len(o.Uplinks) > 0,
		Addresses: n.addresses, Overlay: o.Ranges.OverlayAddrs,
		Holders: holders, Name: n.Numbers.Name, Repair: o.Repair,
		Services: o.Services, AddressID: o.Maps.Endpoints.OwnPlace,
		Maps: o.Maps.Nodes, Links: n.underlay, Policies: xfrm.New(o.Home), Log: o.Log,
	})
	return err
}

// rememberOverlay finds the overlay addresses that an earlier process used: the sources of
// packets to backends elsewhere and, where services are off, those of routes.
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

// openCluster prepares the exchange with other nodes.
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
		Moved: n.Guard.SetOthers, Earlier: earlier,
		Local: func() []netip.Addr {
			addrs, err := n.addresses()
			if err != nil {
				o.Log.Warn("addresses of the node not read", log.Err(err))
			}
			return addrs
		},
		// Behind the stack's masquerade a pod reaches what the node itself reaches.
		NodesByStack: o.Masquerade != nil && o.Mode == cluster.Overlay,
	}
	if n.Prober != nil {
		follow.Known = n.probe
	}
	if n.Mode() != cluster.None {
		follow.Fabric = n.Fabric
	}
	if n.Registrar != nil {
		follow.Away, follow.Back = n.Registrar.Lost, n.Registrar.Changed
	}
	if n.beliefs != nil && o.Mode == cluster.Native {
		follow.Believes = n.beliefs.Believes
	}
	n.Follower = cluster.NewFollower(follow)
}

// registration is what this node says of itself.
func (n *Node) registration() (u cluster.Underlay, err error) {
	overlay, known := n.o.Ranges.OverlayAddrs()
	if !known {
		return u, errors.New("sluice-ipam has not said yet which range has the overlay address")
	}
	u = cluster.Underlay{Overlay: overlay, MTU: n.MTU, Mode: n.o.Mode, Port: n.o.Port}
	u.Addresses, err = n.addresses()
	if n.Prober != nil && err == nil {
		n.Prober.SetLocal(u.Addresses)
	}
	return u, err
}

// silence is how long ago this node heard from the store.
func (n *Node) silence() (time.Duration, bool) {
	if n.beliefs == nil {
		return 0, false
	}
	return n.beliefs.Silence()
}

// peers are what other nodes said last of what they hear from the store.
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

// probe has the other nodes probed, with packets as large as those that carry the
// largest of a pod.
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
