// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package devnode

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/durable"
)

// Bounds of a cluster.
const (
	MaxNodes       = 16
	maxEtcdMembers = 3
)

// Devices of the namespace between the nodes.
const (
	bridge     = "br0"
	callerPort = "caller"
)

// callerHost is the host part of the caller's addresses in the network between the nodes. A node's host part is its
// number.
const callerHost = 254

// ClusterOptions describe a cluster. Of the node options, Instance names the cluster, and PolicyDir and PolicyMode
// apply to every node. PodCIDRs must be empty, because every node has its own pod CIDRs.
type ClusterOptions struct {
	Options
	// Nodes is the initial number of nodes, 1 to MaxNodes.
	Nodes int
	// EtcdMembers is the number of etcd members, 1 or 3. Default: 1.
	EtcdMembers int
	// Routing is how packets travel between the nodes' pods: "overlay", "native" or
	// "none". Default: DefaultRouting.
	Routing string
}

// DefaultRouting is how packets travel between the pods of a cluster's nodes.
const DefaultRouting = "overlay"

// Cluster is a set of nodes that share an etcd. A network namespace with the name of the cluster contains the bridge
// that joins the nodes. The caller has one device on that bridge, which reaches every node and its pods.
type Cluster struct {
	hub   *Node // runs the etcd members
	state clusterState
}

// clusterState is the file from which the nodes of a cluster are found. It is written before the first node is made,
// and removed after the last one is removed.
type clusterState struct {
	Nodes []int `json:"nodes"` // numbers of the nodes that exist or whose creation began
	// Network contains the uplink prefixes of the nodes, one per family.
	Network []netip.Prefix `json:"network,omitempty"`
	Routing string         `json:"routing,omitempty"`
	// Services are the names of the services that run on every node.
	Services []string `json:"services,omitempty"`
	Hub      state    `json:"hub"`
}

// member is the part of a node's state that refers to its cluster.
type member struct {
	Netns     string         `json:"netns"`  // of the bridge
	Device    string         `json:"device"` // the caller's device, which reaches the nodes
	Number    int            `json:"number"`
	Etcd      []string       `json:"etcd"`
	Addresses []netip.Prefix `json:"addresses"`
	Gateways  []netip.Addr   `json:"gateways"`
	Routing   string         `json:"routing,omitempty"`
}

// etcdMembers returns the names of the etcd processes in a cluster with n members.
func etcdMembers(n int) []string {
	if n == 1 {
		return []string{Etcd}
	}
	var names []string
	for i := range n {
		names = append(names, Etcd+"-"+strconv.Itoa(i+1))
	}
	return names
}

// memberArguments returns the arguments with which an etcd member joins the others over the loopback device of the
// cluster's namespace.
func memberArguments(all []string, service string) []string {
	if len(all) < 2 || service == Etcd {
		return nil
	}
	var peers []string
	peer := ""
	for i, name := range all {
		url := fmt.Sprintf("http://127.0.0.%d:2380", i+1)
		peers = append(peers, name+"="+url)
		if name == service {
			peer = url
		}
	}
	return []string{"--name=" + service, "--peer=" + peer, "--members=" + strings.Join(peers, ",")}
}

// UpCluster starts a cluster and returns when every service of every node serves. The first node gets the first free
// address ranges. If a step fails, UpCluster removes what it started.
//
// The error wraps ErrRunning if the instance or one of its nodes is up.
func UpCluster(ctx context.Context, o ClusterOptions) (*Cluster, error) {
	if o.EtcdMembers == 0 {
		o.EtcdMembers = 1
	}
	switch {
	case o.Nodes < 1 || o.Nodes > MaxNodes:
		return nil, fmt.Errorf("%d nodes: want 1 to %d", o.Nodes, MaxNodes)
	case o.EtcdMembers != 1 && o.EtcdMembers != maxEtcdMembers:
		return nil, fmt.Errorf("%d members of etcd: want 1 or %d", o.EtcdMembers, maxEtcdMembers)
	case o.Store:
		return nil, errors.New("store: must be off: the nodes of a cluster share an etcd")
	case len(o.PodCIDRs) > 0:
		return nil, errors.New("pod CIDRs: must be empty: every node of a cluster has its own")
	}
	hub, err := newNode(o.Instance)
	if err != nil {
		return nil, err
	}
	c := &Cluster{hub: hub, state: clusterState{Routing: cmp.Or(o.Routing, DefaultRouting)}}
	for k := 1; k <= o.Nodes; k++ {
		c.state.Nodes = append(c.state.Nodes, k)
	}
	err = hub.up(ctx, func() error {
		if hub.state, err = o.withDefaults(); err != nil {
			return err
		}
		c.state.Services = slices.DeleteFunc(hub.state.services(), isEtcd)
		hub.state.Services = etcdMembers(o.EtcdMembers)
		unlock, err := c.reserve(c.state.Nodes...)
		if err != nil {
			return err
		}
		defer unlock()
		return c.build(ctx)
	})
	if err != nil {
		return nil, err
	}
	return c, nil
}

// reserve locks the instances of nodes. It fails if one of them is running.
func (c *Cluster) reserve(numbers ...int) (_ func(), err error) {
	var locked []func()
	unlock := func() {
		for _, f := range locked {
			f()
		}
	}
	defer func() {
		if err != nil {
			unlock()
		}
	}()
	for _, k := range numbers {
		n, err := newNode(c.nodeName(k))
		if err != nil {
			return nil, err
		}
		f, err := n.lock()
		if err != nil {
			return nil, err
		}
		locked = append(locked, f)
		running, err := n.runningServices()
		if err != nil {
			return nil, err
		}
		if len(running) > 0 {
			return nil, fmt.Errorf("instance %s %w: %v", n.paths.Name, ErrRunning, running)
		}
		if err := n.remove(context.Background()); err != nil {
			return nil, err
		}
	}
	return unlock, nil
}

// build makes what the nodes share, then all nodes in parallel.
func (c *Cluster) build(ctx context.Context) error {
	if err := c.hub.makePlace(); err != nil {
		return err
	}
	if err := c.write(); err != nil {
		return err
	}
	if err := c.makeNetwork(); err != nil {
		return err
	}
	if err := c.write(); err != nil {
		return err
	}
	// Prepare nodes in sequence, so that the first node gets the first free ranges.
	var nodes []*Node
	for _, k := range c.state.Nodes {
		n, err := c.prepareNode(k)
		if err != nil {
			return err
		}
		nodes = append(nodes, n)
	}
	group, groupCtx := errgroup.WithContext(ctx)
	group.Go(func() error { return c.hub.startAll(groupCtx) })
	for _, n := range nodes {
		group.Go(func() error { return beginNode(groupCtx, n) })
	}
	return group.Wait()
}

func (c *Cluster) prepareNode(k int) (*Node, error) {
	n, err := newNode(c.nodeName(k))
	if err != nil {
		return nil, err
	}
	n.state = c.nodeState(k)
	if err := n.prepare(); err != nil {
		return nil, fmt.Errorf("node %d: %w", k, err)
	}
	return n, nil
}

func beginNode(ctx context.Context, n *Node) error {
	if err := n.begin(ctx); err != nil {
		return fmt.Errorf("node %d: %w", n.state.Member.Number, err)
	}
	return nil
}

// nodeState returns the state of node k.
func (c *Cluster) nodeState(k int) state {
	s := c.hub.state
	s.Services = slices.Clone(c.state.Services)
	if s.Services == nil { // an earlier version wrote the state
		s.Services = slices.DeleteFunc(Services(), isEtcd)
	}
	s.Policies, s.Manifests = c.hub.PolicyDir(), c.hub.ServiceDir()
	s.Member = &member{Netns: c.hub.Netns(), Device: c.hub.link(), Number: k, Routing: c.state.Routing}
	for _, service := range c.hub.Services() {
		s.Member.Etcd = append(s.Member.Etcd, c.hub.etcdURL(service))
	}
	for _, p := range c.state.Network {
		s.Member.Addresses = append(s.Member.Addresses, netip.PrefixFrom(host(p, k), p.Bits()))
		s.Member.Gateways = append(s.Member.Gateways, host(p, callerHost))
	}
	return s
}

// host returns the address in a prefix with this last byte.
func host(p netip.Prefix, last int) netip.Addr {
	b := p.Addr().AsSlice()
	b[len(b)-1] = byte(last)
	a, _ := netip.AddrFromSlice(b)
	return a
}

// OpenCluster returns the cluster of an instance that another process started.
//
// The error wraps ErrNotRunning if the cluster is not running.
func OpenCluster(name string) (*Cluster, error) {
	hub, err := newNode(name)
	if err != nil {
		return nil, err
	}
	c := &Cluster{hub: hub}
	content, err := os.ReadFile(c.path())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("instance %s as a cluster %w", hub.paths.Name, ErrNotRunning)
	}
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(content, &c.state); err != nil {
		return nil, fmt.Errorf("read %s: %w", c.path(), err)
	}
	hub.state = c.state.Hub
	return c, nil
}

func (c *Cluster) path() string { return filepath.Join(c.hub.paths.RunDir, "cluster.json") }

func (c *Cluster) write() error {
	c.state.Hub = c.hub.state
	content, err := json.MarshalIndent(c.state, "", "  ")
	if err != nil {
		return err
	}
	return durable.WriteFile(c.path(), content, 0o600, durable.SyncNone)
}

func (c *Cluster) nodeName(k int) string { return c.hub.paths.Name + "-" + strconv.Itoa(k) }

// Instance is the cluster's name.
func (c *Cluster) Instance() string { return c.hub.paths.Name }

// Hub returns the node that runs the etcd members. Its namespace contains the bridge between the nodes.
func (c *Cluster) Hub() *Node { return c.hub }

// Nodes returns the running nodes by number.
func (c *Cluster) Nodes() ([]*Node, error) {
	var nodes []*Node
	for _, k := range c.state.Nodes {
		n, err := c.Node(k)
		if errors.Is(err, ErrNotRunning) {
			continue
		}
		if err != nil {
			return nil, err
		}
		nodes = append(nodes, n)
	}
	return nodes, nil
}

// Node returns the node with a number, from 1 on.
//
// The error wraps ErrNotRunning if the node is not running.
func (c *Cluster) Node(k int) (*Node, error) {
	if !slices.Contains(c.state.Nodes, k) {
		return nil, fmt.Errorf("node %d of instance %s %w", k, c.hub.paths.Name, ErrNotRunning)
	}
	return Open(c.nodeName(k))
}

// AddNode starts one more node, numbered one above the highest number.
func (c *Cluster) AddNode(ctx context.Context) (*Node, error) {
	unlock, err := c.hub.lock()
	if err != nil {
		return nil, err
	}
	defer unlock()
	k := slices.Max(c.state.Nodes) + 1
	if k > MaxNodes {
		return nil, fmt.Errorf("there are %d nodes already", MaxNodes)
	}
	unlockNode, err := c.reserve(k)
	if err != nil {
		return nil, err
	}
	defer unlockNode()
	c.state.Nodes = append(c.state.Nodes, k)
	if err := c.write(); err != nil {
		return nil, err
	}
	n, err := c.prepareNode(k)
	if err == nil {
		err = beginNode(ctx, n)
	}
	if err != nil {
		if n, invalid := newNode(c.nodeName(k)); invalid == nil {
			err = errors.Join(err, n.remove(context.WithoutCancel(ctx)))
		}
		return nil, err
	}
	return n, nil
}

// Down ends the cluster, as the function Down does.
func (c *Cluster) Down(ctx context.Context) error { return Down(ctx, c.hub.paths.Name) }

// members returns the nodes of the instance's cluster, or none if the instance is not a cluster.
func (n *Node) members() ([]*Node, error) {
	c, err := OpenCluster(n.paths.Name)
	if errors.Is(err, ErrNotRunning) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var nodes []*Node
	for _, k := range c.state.Nodes {
		m, err := newNode(c.nodeName(k))
		if err != nil {
			return nil, err
		}
		nodes = append(nodes, m)
	}
	return nodes, nil
}

// removeMembers removes the nodes of the cluster of this instance.
func (n *Node) removeMembers(ctx context.Context) error {
	members, err := n.members()
	if err != nil {
		return err
	}
	var group errgroup.Group
	errs := make([]error, len(members))
	for i, m := range members {
		group.Go(func() error {
			unlock, err := m.lock()
			if err == nil {
				err = m.remove(ctx)
				unlock()
			}
			errs[i] = err
			return nil
		})
	}
	return errors.Join(group.Wait(), errors.Join(errs...))
}

// clusterOf returns the cluster that an instance is a node of.
func clusterOf(name string) (*Cluster, bool) {
	i := strings.LastIndexByte(name, '-')
	if i < 0 {
		return nil, false
	}
	k, err := strconv.Atoi(name[i+1:])
	if err != nil {
		return nil, false
	}
	c, err := OpenCluster(name[:i])
	if err != nil || !slices.Contains(c.state.Nodes, k) || c.nodeName(k) != name {
		return nil, false
	}
	return c, true
}

// makeNetwork makes the namespace with the bridge, and the caller's device on it. The device's route to the network
// between the nodes claims that network for the cluster.
func (c *Cluster) makeNetwork() error {
	n := c.hub
	if err := n.makeNamespace(); err != nil {
		return err
	}
	mtu, err := defaultRouteMTU()
	if err != nil {
		return err
	}
	if err := connect(n.link(), n.Netns(), callerPort, mtu); err != nil {
		return err
	}
	err = inNetns(n.Netns(), func() error {
		attributes := netlink.NewLinkAttrs()
		attributes.Name = bridge
		if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: attributes}); err != nil {
			return err
		}
		return errors.Join(setUp(bridge), plug(callerPort))
	})
	if err != nil {
		return fmt.Errorf("make the bridge between the nodes: %w", err)
	}
	link, err := netlink.LinkByName(n.link())
	if err != nil {
		return err
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return err
	}
	for c.state.Network == nil {
		free, err := freeRanges(245)
		if err != nil {
			return err
		}
		switch err := claim(link, free); {
		case err == nil:
			c.state.Network = free
		case !errors.Is(err, unix.EEXIST):
			return fmt.Errorf("route to the nodes: %w", err)
		}
	}
	return nil
}

// plug attaches a device of the calling thread's namespace to the bridge.
func plug(port string) error {
	link, err := netlink.LinkByName(port)
	if err != nil {
		return err
	}
	master, err := netlink.LinkByName(bridge)
	if err != nil {
		return err
	}
	return errors.Join(netlink.LinkSetMaster(link, master), netlink.LinkSetUp(link))
}

// claim adds the caller's routes to ranges, and gives link an address in each range. It returns EEXIST if another
// instance has claimed a range.
func claim(link netlink.Link, ranges []netip.Prefix) error {
	for i, p := range ranges {
		err := netlink.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Dst: ipNet(p), Scope: netlink.SCOPE_LINK})
		if err != nil {
			for _, added := range ranges[:i] {
				err = errors.Join(err, deleteRoute(link.Attrs().Name, added))
			}
			return err
		}
	}
	for _, p := range ranges {
		a := &netlink.Addr{
			IPNet: ipNet(netip.PrefixFrom(host(p, callerHost), p.Bits())),
			Flags: unix.IFA_F_NOPREFIXROUTE | unix.IFA_F_NODAD,
		}
		if err := netlink.AddrAdd(link, a); err != nil {
			return fmt.Errorf("address %s: %w", a.IPNet, err)
		}
	}
	return nil
}

func portName(k int) string { return "node" + strconv.Itoa(k) }

// joinNetwork makes the node's namespace and joins it to the bridge of its cluster.
func (n *Node) joinNetwork() error {
	m := n.state.Member
	if err := n.makeNamespace(); err != nil {
		return err
	}
	mtu, err := defaultRouteMTU()
	if err != nil {
		return err
	}
	err = inNetns(m.Netns, func() error {
		if err := connect(portName(m.Number), n.Netns(), uplink, mtu); err != nil {
			return err
		}
		return plug(portName(m.Number))
	})
	if err != nil {
		return err
	}
	if err := n.configureUplink(m.Addresses, m.Gateways...); err != nil {
		return err
	}
	if err := n.routePods(m.Device, m.Addresses[0].Addr(), m.Addresses[1].Addr()); err != nil {
		return fmt.Errorf("route to the pods: %w", err)
	}
	return nil
}

// leaveNetwork removes a node from its cluster's network: the bridge port, which the kernel would remove only some
// time after the node's namespace, and the caller's routes.
func (n *Node) leaveNetwork() error {
	c, ok := clusterOf(n.paths.Name)
	if !ok || len(c.state.Network) == 0 {
		return nil
	}
	number, err := strconv.Atoi(n.paths.Name[strings.LastIndexByte(n.paths.Name, '-')+1:])
	if err != nil {
		return err
	}
	var errs []error
	if exists(c.hub.Netns()) {
		errs = append(errs, inNetns(c.hub.Netns(), func() error { return removeLink(portName(number)) }))
	}
	for _, p := range c.state.Network {
		family := netlink.FAMILY_V4
		if p.Addr().Is6() {
			family = netlink.FAMILY_V6
		}
		routes, err := netlink.RouteListFiltered(family, &netlink.Route{Gw: host(p, number).AsSlice()}, netlink.RT_FILTER_GW)
		if err != nil {
			errs = append(errs, fmt.Errorf("list routes: %w", err))
		}
		for _, r := range routes {
			if err := netlink.RouteDel(&r); err != nil && !errors.Is(err, unix.ESRCH) {
				errs = append(errs, fmt.Errorf("delete the route to %s: %w", r.Dst, err))
			}
		}
	}
	return errors.Join(errs...)
}
