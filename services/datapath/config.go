// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"cmp"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/config"
	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/sandbox"
	"github.com/sluice-net/sluice/model/deletion"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	nodes "github.com/sluice-net/sluice/services/datapath/internal/node"
	"github.com/sluice-net/sluice/services/datapath/internal/node/cluster"
	"github.com/sluice-net/sluice/services/datapath/internal/service/sockets"
)

// Config is the datapath's own part of the configuration.
type Config struct {
	Node      string         `config:"node" help:"name of this node in flows until sluice-identity names it"`
	StateDir  string         `config:"stateDir" help:"directory of the endpoint records"`
	SpoolDir  string         `config:"spoolDir" help:"directory where the CNI plugin spools deletions while this process is down"`
	BPFDir    string         `config:"bpfDir" help:"bpffs in which maps and programs are pinned; sluice prepare mounts it"`
	NetnsDirs []string       `config:"netnsDirs" help:"directories under which container runtimes mount network namespaces; namespaces elsewhere cannot be opened"`
	PodCIDRs  []netip.Prefix `config:"podCIDRs" help:"this node's pod ranges, equal to the pools of sluice-ipam; empty: the ranges that sluice-ipam announces, which may change at run time"`
	Underlay  UnderlayConfig `config:"underlay"`
	Routing   RoutingConfig  `config:"routing"`
	MTU       uint16         `config:"mtu" help:"MTU of pods; 0: the MTU of the default route minus the tunnel overhead"`

	TunnelPorts []uint16 `config:"tunnelPorts" help:"UDP ports of nodes that pods may not reach, because packets to them could forge identities"`

	Masquerade MasqueradeConfig `config:"masquerade"`

	ServiceDevices []string `config:"serviceDevices" help:"devices that carry addresses of services, not of the node, by name or pattern (*, ?, [a-z])"`

	LoadBalancing LoadBalancingConfig `config:"loadBalancing"`

	Policy   PolicyConfig   `config:"policy"`
	Services ServicesConfig `config:"services"`
	Audit    AuditConfig    `config:"audit"`
	Events   EventsConfig   `config:"events"`

	Connections ConnectionsConfig `config:"connections"`

	SecondInterfaces string `config:"secondInterfaces" enum:"allow,refuse" help:"a second interface of a container: allow adds it with a routing table for packets from its addresses; refuse fails its creation"`

	ProcSysNet       string `config:"procSysNet" help:"directory of the network sysctls; in a container, where /proc/sys is read-only: where the machine's /proc/sys/net is mounted"`
	MountPropagation string `config:"mountPropagation" enum:"ignore,require" help:"require: exit with code 2 unless later mounts by runtimes under netnsDirs propagate to this process; for containers"`

	NodeSysctls  string `config:"nodeSysctls" enum:"auto,set,report" help:"sysctls of the whole node (forwarding, redirects): set or report them; auto: report in the machine's own network namespace, set in another"`
	Uninstall    bool   `config:"uninstall" help:"remove devices, rules, routes, addresses and the firewall table, and exit; containers lose their network"`
	ValidateOnly bool   `config:"validateOnly" help:"check everything, report what a start would repair, change nothing and exit: 0 without differences, 1 with"`
}

// UnderlayConfig configures the addresses by which other nodes reach this node.
type UnderlayConfig struct {
	Addresses []netip.Addr `config:"addresses" help:"addresses by which other nodes reach this node; empty: the addresses of the underlay devices"`
	Devices   []string     `config:"devices" help:"devices that carry traffic to other nodes, by name or pattern (*, ?, [a-z]); empty: detected"`
}

// RoutingConfig configures how packets travel between pods of two nodes.
type RoutingConfig struct {
	Mode       string `config:"mode" enum:"none,overlay,native" help:"how packets travel between pods of two nodes"`
	TunnelPort uint16 `config:"tunnelPort" help:"UDP port of the tunnel, the same on all nodes; 0: 4789"`
	CopyDSCP   bool   `config:"copyDSCP" help:"copy the DSCP of the inner packet to the tunnel packet"`
	Shortcut   string `config:"shortcut" enum:"auto,off" help:"let tunnel packets bypass the tunnel device"`
	ProbePort  uint16 `config:"probePort" help:"UDP port of the probes between nodes, the same on all nodes; 0: no probes"`
}

// defaultTunnelPort is the registered port of VXLAN.
const defaultTunnelPort = 4789

// port returns the tunnel's UDP port, 0 if the mode has no tunnel.
func (c RoutingConfig) port() uint16 {
	if c.Mode != string(cluster.Overlay) {
		return 0
	}
	return cmp.Or(c.TunnelPort, defaultTunnelPort)
}

// direct reports whether tunnel packets may bypass the tunnel device.
func (c RoutingConfig) direct() bool {
	return c.Mode == string(cluster.Overlay) && c.Shortcut == shortcutAuto
}

// shortcutAuto is the value of routing.shortcut that allows direct paths.
const shortcutAuto = "auto"

// kernel returns the set of programs that the mode needs.
func (c RoutingConfig) kernel() kernel.Routing {
	switch cluster.Mode(c.Mode) {
	case cluster.Overlay:
		return kernel.RoutingOverlay
	case cluster.Native:
		return kernel.RoutingNative
	}
	return kernel.RoutingNone
}

func (c RoutingConfig) check(p *config.Problems) {
	if c.Mode == string(cluster.Overlay) {
		return
	}
	if c.TunnelPort != 0 {
		p.Addf("routing.tunnelPort", "%d, but with routing.mode %s there is no tunnel", c.TunnelPort, c.Mode)
	}
	if c.CopyDSCP {
		p.Addf("routing.copyDSCP", "with routing.mode %s there is no tunnel", c.Mode)
	}
}

// closedPorts returns the UDP ports that pods may not reach on any node. It always includes the tunnel's port.
func (c *Config) closedPorts() []uint16 {
	ports := slices.Clone(c.TunnelPorts)
	if port := c.Routing.port(); port != 0 && !slices.Contains(ports, port) {
		ports = append(ports, port)
	}
	return ports
}

// reservedPorts returns the UDP ports on which the node receives packets from other nodes. Containers cannot use them
// as host ports.
func (c *Config) reservedPorts() []uint16 {
	ports := c.closedPorts()
	if len(ports) == 0 {
		ports = []uint16{kernel.DefaultTunnelPort}
	}
	if c.Routing.probes() {
		ports = append(ports, c.Routing.ProbePort)
	}
	return ports
}

// probes reports whether the node probes other nodes.
func (c RoutingConfig) probes() bool { return c.ProbePort != 0 && c.Mode != string(cluster.None) }

// MasqueradeConfig configures source NAT: whether destinations beyond the node see the node's address or the pod's.
type MasqueradeConfig struct {
	Enabled bool           `config:"enabled" help:"masquerade connections from pods to destinations beyond the node with the node's address; pods of other nodes still see the pod's address"`
	Except  []netip.Prefix `config:"except" help:"destinations that see the pod's address"`
}

func (c MasqueradeConfig) check(p *config.Problems) {
	switch {
	case len(c.Except) > maxExcept:
		p.Addf("masquerade.except", "%d prefixes, at most %d", len(c.Except), maxExcept)
		return
	case len(c.Except) > 0 && !c.Enabled:
		p.Addf("masquerade.except", "has no effect without masquerade.enabled: every destination sees the pod's address")
	}
	for i, e := range c.Except {
		if !e.IsValid() || e != e.Masked() || e.Addr().Is4In6() {
			p.Addf(fmt.Sprintf("masquerade.except[%d]", i), "%v is not a masked prefix", e)
		}
	}
}

// maxExcept is the maximum number of exceptions: more than any network needs, and cheap to check.
const maxExcept = 1024

// PolicyConfig configures policy enforcement.
type PolicyConfig struct {
	Mode   string        `config:"mode" enum:"required,init,none" help:"required: creating a container waits for its policy tables, and fails after a timeout. init: it does not wait; until the tables arrive, only the local node can connect to the container. none: no policies"`
	Audit  bool          `config:"audit" help:"forward and report packets that policies of this node's containers would deny"`
	Linger time.Duration `config:"linger" help:"how long policy tables stay in the kernel after their last container; a new container with the same labels then need not wait"`
}

const (
	policyRequired = "required"
	policyInit     = "init"
	policyNone     = "none"
)

// LoadBalancingConfig configures the translation of service addresses to backends.
type LoadBalancingConfig struct {
	Mode            string `config:"mode" enum:"off,on" help:"on: translate addresses of services to the backends that sluice-loadbalancer sends. off: do not translate; another program may"`
	Cgroup          string `config:"cgroup" help:"directory of the cgroup2 hierarchy whose processes can use services; its subdirectory unified is tried, too; empty: /sys/fs/cgroup"`
	OtherNamespaces string `config:"otherNamespaces" enum:"translate,leave" help:"sockets in network namespaces of neither the node nor an endpoint: translate services for them, or leave them alone"`
}

const (
	balancingOff = "off"
	balancingOn  = "on"

	othersTranslate = "translate"
)

func (c LoadBalancingConfig) on() bool { return c.Mode == balancingOn }

// ServicesConfig configures the connections to the other services of Sluice.
type ServicesConfig struct {
	IPAM     string `config:"ipam" help:"socket of sluice-ipam"`
	Identity string `config:"identity" help:"socket of sluice-identity"`
	Policy   string `config:"policy" help:"socket of sluice-policy"`

	LoadBalancer string `config:"loadbalancer" help:"socket of sluice-loadbalancer"`

	Timeout time.Duration `config:"timeout" help:"how long one call may take"`
}

// AuditConfig configures the comparison of records with the kernel.
type AuditConfig struct {
	Interval time.Duration `config:"interval" help:"time between two audits"`
	Repair   bool          `config:"repair" help:"repair differences, immediately when the kernel reports a change; switch off only to examine a broken node"`
}

// ConnectionsConfig configures how long a connection is tracked after its last packet, and how often expired
// connections are collected.
type ConnectionsConfig struct {
	TCPOpening     time.Duration `config:"tcpOpening" help:"TCP and SCTP until the handshake is complete"`
	TCPEstablished time.Duration `config:"tcpEstablished" help:"TCP and SCTP, open or half-closed"`
	TCPClosing     time.Duration `config:"tcpClosing" help:"TCP and SCTP, closed or reset; shorter while the table is more than half full"`
	UDPUnanswered  time.Duration `config:"udpUnanswered" help:"UDP without an answer"`
	UDPAnswered    time.Duration `config:"udpAnswered" help:"UDP with an answer"`
	ICMP           time.Duration `config:"icmp" help:"ICMP echo"`
	Other          time.Duration `config:"other" help:"other protocols"`
	MinInterval    time.Duration `config:"minInterval" help:"minimum time between two collections"`
	MaxInterval    time.Duration `config:"maxInterval" help:"maximum time between two collections; budgets of new connections are for this interval"`
}

func (c ConnectionsConfig) options() conntrack.CollectorOptions {
	return conntrack.CollectorOptions{
		MinInterval: c.MinInterval, MaxInterval: c.MaxInterval,
		Timeouts: conntrack.Timeouts{
			TCPOpening: c.TCPOpening, TCPEstablished: c.TCPEstablished, TCPClosing: c.TCPClosing,
			UDPUnanswered: c.UDPUnanswered, UDPAnswered: c.UDPAnswered, ICMP: c.ICMP, Other: c.Other,
		},
	}
}

func defaultConnections() ConnectionsConfig {
	t := conntrack.DefaultTimeouts()
	return ConnectionsConfig{
		TCPOpening: t.TCPOpening, TCPEstablished: t.TCPEstablished, TCPClosing: t.TCPClosing,
		UDPUnanswered: t.UDPUnanswered, UDPAnswered: t.UDPAnswered, ICMP: t.ICMP, Other: t.Other,
		MinInterval: time.Second, MaxInterval: time.Minute,
	}
}

// EventsConfig configures the events that the programs report.
type EventsConfig struct {
	PerSecond uint32 `config:"perSecond" help:"events per second of one endpoint and reason, 16 times as many per CPU; events beyond the limit are only counted"`
}

func defaults(p instance.Paths) Config {
	node, _ := os.Hostname() // Validate rejects an empty name
	return Config{
		Node:        node,
		StateDir:    p.ServiceStateDir(service),
		SpoolDir:    deletion.Dir(p.StateDir),
		BPFDir:      p.BPFDir,
		NetnsDirs:   []string{"/run"},
		TunnelPorts: []uint16{4789},
		// kube-proxy in IPVS mode adds the addresses of services to this device
		ServiceDevices: []string{"kube-ipvs0"},
		Routing:        RoutingConfig{Mode: string(cluster.None), Shortcut: shortcutAuto, ProbePort: 4242},
		LoadBalancing:  LoadBalancingConfig{Mode: balancingOff, OtherNamespaces: othersTranslate},
		Policy:         PolicyConfig{Mode: policyRequired, Linger: time.Minute},
		Services: ServicesConfig{
			IPAM: p.Socket("ipam"), Identity: p.Socket("identity"), Policy: p.Socket("policy"),
			LoadBalancer: p.Socket("loadbalancer"), Timeout: 10 * time.Second,
		},
		Audit:       AuditConfig{Interval: 30 * time.Second, Repair: true},
		Events:      EventsConfig{PerSecond: 64},
		Connections: defaultConnections(),
		NodeSysctls: "auto", SecondInterfaces: "allow",
		ProcSysNet: "/proc/sys/net", MountPropagation: "ignore",
	}
}

// OneShot implements process.OneShot.
func (c *Config) OneShot() bool { return c.ValidateOnly || c.Uninstall }

// Validate checks the settings, including constraints between them.
func (c *Config) Validate() error {
	var p config.Problems
	if dir := c.LoadBalancing.Cgroup; dir != "" && !filepath.IsAbs(dir) {
		p.Addf("loadBalancing.cgroup", "%q is not an absolute path", dir)
	}
	if c.Node == "" || len(c.Node) > 253 {
		p.Addf("node", "%q is not a valid node name: want 1 to 253 bytes", c.Node)
	}
	for key, path := range map[string]string{
		"stateDir": c.StateDir, "spoolDir": c.SpoolDir, "bpfDir": c.BPFDir, "procSysNet": c.ProcSysNet,
		"services.ipam": c.Services.IPAM, "services.identity": c.Services.Identity, "services.policy": c.Services.Policy,
		"services.loadbalancer": c.Services.LoadBalancer,
	} {
		if !filepath.IsAbs(path) {
			p.Addf(key, "%q is not an absolute path", path)
		}
	}
	for i, dir := range c.NetnsDirs {
		if !filepath.IsAbs(dir) || filepath.Clean(dir) == "/" {
			p.Addf(fmt.Sprintf("netnsDirs[%d]", i), "%q is not an absolute path below the root", dir)
		}
	}
	for i, cidr := range c.PodCIDRs {
		switch {
		case !cidr.IsValid() || cidr != cidr.Masked() || cidr.Addr().Is4In6():
			p.Addf("podCIDRs", "%v is not a masked prefix", cidr)
		case cidr.Bits() > cidr.Addr().BitLen()-2:
			p.Addf("podCIDRs", "%v has no address for a pod", cidr)
		case slices.ContainsFunc(c.PodCIDRs[:i], cidr.Overlaps):
			p.Addf("podCIDRs", "%v overlaps a range before it", cidr)
		}
	}
	if len(c.Underlay.Addresses) > 16 {
		p.Addf("underlay.addresses", "%d addresses, at most 16", len(c.Underlay.Addresses))
	}
	for _, a := range c.Underlay.Addresses {
		if !a.IsGlobalUnicast() || a.Is4In6() || a.Zone() != "" {
			p.Addf("underlay.addresses", "%v is not an address by which other nodes can reach this node", a)
		}
	}
	for _, pattern := range c.Underlay.Devices {
		if _, err := path.Match(pattern, "lo"); err != nil || pattern == "" {
			p.Addf("underlay.devices", "%q is not the name of a device, or a pattern", pattern)
		}
	}
	c.Masquerade.check(&p)
	if c.MTU != 0 && c.MTU < nodes.MinMTU {
		p.Addf("mtu", "%d is below %d", c.MTU, nodes.MinMTU)
	}
	c.Routing.check(&p)
	if n := len(c.closedPorts()); n > kernel.MaxTunnelPorts {
		p.Addf("tunnelPorts", "%d ports including the tunnel's, at most %d", n, kernel.MaxTunnelPorts)
	}
	if c.Routing.probes() && slices.Contains(c.closedPorts(), c.Routing.ProbePort) {
		p.Addf("routing.probePort", "%d is a tunnel port", c.Routing.ProbePort)
	}
	for _, pattern := range c.ServiceDevices {
		if lo, err := path.Match(pattern, "lo"); err != nil || pattern == "" || lo {
			p.Addf("serviceDevices",
				"%q is not the name of a device, or a pattern, other than lo, which is always the node's", pattern)
		}
	}
	if c.Policy.Linger < time.Second || c.Policy.Linger > time.Hour {
		p.Addf("policy.linger", "%s is not between a second and an hour", c.Policy.Linger)
	}
	for key, d := range map[string]time.Duration{
		"tcpOpening": c.Connections.TCPOpening, "tcpEstablished": c.Connections.TCPEstablished,
		"tcpClosing":    c.Connections.TCPClosing,
		"udpUnanswered": c.Connections.UDPUnanswered, "udpAnswered": c.Connections.UDPAnswered, "icmp": c.Connections.ICMP,
		"other": c.Connections.Other, "minInterval": c.Connections.MinInterval,
	} {
		if d < time.Second || d > 30*24*time.Hour {
			p.Addf("connections."+key, "%s is not between a second and thirty days", d)
		}
	}
	if c.Connections.MaxInterval < c.Connections.MinInterval || c.Connections.MaxInterval > time.Hour {
		p.Addf("connections.maxInterval", "%s is not between minInterval and an hour", c.Connections.MaxInterval)
	}
	if c.Uninstall && c.ValidateOnly {
		p.Addf("uninstall", "cannot be combined with validateOnly, which changes nothing")
	}
	if c.Audit.Interval < time.Second {
		p.Addf("audit.interval", "%s is below a second", c.Audit.Interval)
	}
	if c.Services.Timeout <= 0 {
		p.Addf("services.timeout", "%s is not positive", c.Services.Timeout)
	}
	return p.Err()
}

// Calls implements process.Caller.
func (c *Config) Calls() sandbox.Calls {
	return sandbox.Calls{
		Netlink: true, Datagram: c.Routing.probes(), Enter: true, TAP: true, Namespace: true, Names: []string{"bpf"},
	}
}

// files returns the paths that the process opens after its start. Opening a network namespace counts as access to the
// directory under which it is mounted. The spool's parent is listed, because the CNI plugin may create the spool
// itself.
func (c *Config) files() sandbox.Files {
	read := append([]string{"/sys/devices/system/cpu", "/sys/kernel/btf"}, c.NetnsDirs...)
	if c.LoadBalancing.on() {
		read = append(read, c.LoadBalancing.cgroup())
	}
	return sandbox.Files{
		Read:   read,
		Change: []string{c.ProcSysNet},
		Write:  []string{c.StateDir, c.BPFDir, filepath.Dir(c.SpoolDir)},
	}
}

// kernel returns the options of maps and programs.
func (c Config) kernel(l *slog.Logger) kernel.Options {
	return kernel.Options{
		Dir: c.BPFDir, PodCIDRs: c.PodCIDRs, TunnelPorts: c.closedPorts(), EventsPerSecond: c.Events.PerSecond,
		Routing: c.Routing.kernel(), CopyDSCP: c.Routing.CopyDSCP,
		Shortcut: c.Routing.direct(), TunnelPort: c.Routing.port(),
		Services: c.LoadBalancing.on(), Sockets: c.LoadBalancing.sockets(),
		ValidateOnly: c.ValidateOnly, Log: l,
	}
}

// cgroup returns the directory at which the socket programs are attached. On hosts that still use cgroup v1, cgroup2 is
// mounted at its subdirectory unified.
func (c LoadBalancingConfig) cgroup() string {
	dir := cmp.Or(c.Cgroup, "/sys/fs/cgroup")
	for _, dir := range []string{dir, filepath.Join(dir, "unified")} {
		var st unix.Statfs_t
		if unix.Statfs(dir, &st) == nil && uint32(st.Type) == unix.CGROUP2_SUPER_MAGIC {
			return dir
		}
	}
	return dir
}

// sockets returns the options of the socket programs; nil if services are not translated.
func (c LoadBalancingConfig) sockets() *sockets.Options {
	if !c.on() {
		return nil
	}
	// A configured cgroup is used unchanged, even if it is not the root of its hierarchy.
	return &sockets.Options{
		Cgroup:       c.cgroup(),
		Subtree:      c.Cgroup != "",
		TranslateAll: c.OtherNamespaces == othersTranslate,
	}
}
