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
	StateDir  string         `config:"stateDir" help:"where the records of endpoints are"`
	SpoolDir  string         `config:"spoolDir" help:"where the CNI plugin leaves deletions while this process is away"`
	BPFDir    string         `config:"bpfDir" help:"bpffs in which maps and programs are pinned; sluice prepare mounts it"`
	NetnsDirs []string       `config:"netnsDirs" help:"directories below which container runtimes mount network namespaces; the process cannot open those that lie elsewhere"`
	PodCIDRs  []netip.Prefix `config:"podCIDRs" help:"this node's pod ranges, the same as pools of sluice-ipam; empty: those that sluice-ipam announces, which may change at run time"`
	Underlay  UnderlayConfig `config:"underlay"`
	Routing   RoutingConfig  `config:"routing"`
	MTU       uint16         `config:"mtu" help:"MTU of pods; 0: the default route's, less the tunnel's"`

	TunnelPorts []uint16 `config:"tunnelPorts" help:"UDP ports that pods may reach on no node, because packets to them could forge identities"`

	Masquerade MasqueradeConfig `config:"masquerade"`

	ServiceDevices []string `config:"serviceDevices" help:"devices whose addresses are those of services and not of the node, by name or pattern (*, ?, [a-z])"`

	LoadBalancing LoadBalancingConfig `config:"loadBalancing"`

	Policy   PolicyConfig   `config:"policy"`
	Services ServicesConfig `config:"services"`
	Audit    AuditConfig    `config:"audit"`
	Events   EventsConfig   `config:"events"`

	Connections ConnectionsConfig `config:"connections"`

	SecondInterfaces string `config:"secondInterfaces" enum:"allow,refuse" help:"a further interface for a container that has one: allow gives it its addresses and a routing table for what it sends from them, refuse fails its creation"`

	ProcSysNet       string `config:"procSysNet" help:"directory that the network's sysctls are written to: in a container, where /proc/sys is read-only, the machine's /proc/sys/net mounted elsewhere"`
	MountPropagation string `config:"mountPropagation" enum:"ignore,require" help:"require: end with code 2 unless mounts that runtimes make later below netnsDirs are seen here; for containers"`

	NodeSysctls  string `config:"nodeSysctls" enum:"auto,set,report" help:"forwarding and redirects of the whole node: set them, only report them, or auto: report in the machine's own network namespace, set in another"`
	Uninstall    bool   `config:"uninstall" help:"remove devices, rules, routes, addresses and the firewall table, and exit; containers lose their network"`
	ValidateOnly bool   `config:"validateOnly" help:"look at everything, say what would be put right, change nothing and exit: 0 if all is well, 1 if not"`
}

// UnderlayConfig says by which addresses other nodes reach this one.
type UnderlayConfig struct {
	Addresses []netip.Addr `config:"addresses" help:"addresses of this node for the others; empty: of the devices"`
	Devices   []string     `config:"devices" help:"devices of these and to other nodes (*, ?, [a-z]); empty: detected"`
}

// RoutingConfig says how packets travel between pods of two nodes.
type RoutingConfig struct {
	Mode       string `config:"mode" enum:"none,overlay,native" help:"how packets travel between pods of two nodes"`
	TunnelPort uint16 `config:"tunnelPort" help:"UDP port of the tunnel, the same on all nodes; 0: 4789"`
	CopyDSCP   bool   `config:"copyDSCP" help:"give the packets of the tunnel the DSCP of those inside"`
	ProbePort  uint16 `config:"probePort" help:"UDP port of probes between nodes, the same on all of them; 0: no probes"`
}

// defaultTunnelPort is that of VXLAN.
const defaultTunnelPort = 4789

// port of the tunnel; 0: there is none.
func (c RoutingConfig) port() uint16 {
	if c.Mode != string(cluster.Overlay) {
		return 0
	}
	return cmp.Or(c.TunnelPort, defaultTunnelPort)
}

// kernel says which programs the mode needs.
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

// closedPorts are the UDP ports that pods may reach on no node: that of the tunnel is
// always one.
func (c *Config) closedPorts() []uint16 {
	ports := slices.Clone(c.TunnelPorts)
	if port := c.Routing.port(); port != 0 && !slices.Contains(ports, port) {
		ports = append(ports, port)
	}
	return ports
}

// reservedPorts are the UDP ports of the node at which it takes packets of other nodes:
// no container may have them.
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

// probes says whether other nodes are probed.
func (c RoutingConfig) probes() bool { return c.ProbePort != 0 && c.Mode != string(cluster.None) }

// MasqueradeConfig says whether destinations beyond the node see the address of the
// node or that of the pod.
type MasqueradeConfig struct {
	Enabled bool           `config:"enabled" help:"give connections of pods to addresses beyond the node the address of the node; pods of other nodes see that of the pod all the same"`
	Except  []netip.Prefix `config:"except" help:"destinations that see the address of the pod"`
}

func (c MasqueradeConfig) check(p *config.Problems) {
	switch {
	case len(c.Except) > maxExcept:
		p.Addf("masquerade.except", "%d prefixes, at most %d", len(c.Except), maxExcept)
		return
	case len(c.Except) > 0 && !c.Enabled:
		p.Addf("masquerade.except", "without masquerade.enabled every destination sees the address of the pod")
	}
	for i, e := range c.Except {
		if !e.IsValid() || e != e.Masked() || e.Addr().Is4In6() {
			p.Addf(fmt.Sprintf("masquerade.except[%d]", i), "%v is not a masked prefix", e)
		}
	}
}

// maxExcept is far more than a network has ranges, and little work to check.
const maxExcept = 1024

// PolicyConfig says what evaluates traffic.
type PolicyConfig struct {
	Mode   string        `config:"mode" enum:"required,init,none" help:"required: a container's creation waits until the kernel has the tables that evaluate it, and fails if they do not come in time. init: it does not wait, and until they come only the local node may call the container. none: every pod may talk to every pod, and the policy service is not used"`
	Audit  bool          `config:"audit" help:"let pass what the policies of this node's containers would deny, and report it"`
	Linger time.Duration `config:"linger" help:"how long tables stay in the kernel after the last container that they evaluate; a container with the same labels is then created without waiting"`
}

// The modes.
const (
	policyRequired = "required"
	policyInit     = "init"
	policyNone     = "none"
)

// LoadBalancingConfig says whether addresses of services lead to their backends.
type LoadBalancingConfig struct {
	Mode            string `config:"mode" enum:"off,on" help:"on: addresses of services lead to the backends that sluice-loadbalancer names. off: they are not translated, and another program may do so"`
	Cgroup          string `config:"cgroup" help:"directory of the cgroup2 hierarchy whose processes reach services, or that has one as unified; empty: /sys/fs/cgroup"`
	OtherNamespaces string `config:"otherNamespaces" enum:"translate,leave" help:"sockets in network namespaces that are neither the node's nor those of its endpoints: translate services for them, or leave them alone"`
}

// The modes.
const (
	balancingOff = "off"
	balancingOn  = "on"

	othersTranslate = "translate"
)

func (c LoadBalancingConfig) on() bool { return c.Mode == balancingOn }

// ServicesConfig is where the services are that this one calls.
type ServicesConfig struct {
	IPAM     string `config:"ipam" help:"socket of sluice-ipam"`
	Identity string `config:"identity" help:"socket of sluice-identity"`
	Policy   string `config:"policy" help:"socket of sluice-policy"`

	LoadBalancer string `config:"loadbalancer" help:"socket of sluice-loadbalancer"`

	Timeout time.Duration `config:"timeout" help:"how long one call may take"`
}

// AuditConfig is about the comparison of records and kernel.
type AuditConfig struct {
	Interval time.Duration `config:"interval" help:"between two audits"`
	Repair   bool          `config:"repair" help:"put right what is found, at once when the kernel reports a change; switch off only to look at a damaged node"`
}

// ConnectionsConfig says how long connections are remembered after their last
// packet, and how often those that are over are collected.
type ConnectionsConfig struct {
	TCPOpening     time.Duration `config:"tcpOpening" help:"TCP and SCTP until the initiator goes on after an answer"`
	TCPEstablished time.Duration `config:"tcpEstablished" help:"TCP and SCTP, open or half-closed"`
	TCPClosing     time.Duration `config:"tcpClosing" help:"TCP and SCTP, closed or reset; shorter while the table is more than half full"`
	UDPUnanswered  time.Duration `config:"udpUnanswered" help:"UDP without an answer"`
	UDPAnswered    time.Duration `config:"udpAnswered" help:"UDP with an answer"`
	ICMP           time.Duration `config:"icmp" help:"ICMP echo"`
	Other          time.Duration `config:"other" help:"other protocols"`
	MinInterval    time.Duration `config:"minInterval" help:"least time between two collections"`
	MaxInterval    time.Duration `config:"maxInterval" help:"most time between two collections; budgets of new connections hold for that long"`
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

// EventsConfig is about what the programs report.
type EventsConfig struct {
	PerSecond uint32 `config:"perSecond" help:"events per second of one endpoint and reason, 16 times as many per CPU; what exceeds it is counted"`
}

func defaults(p instance.Paths) Config {
	node, _ := os.Hostname() // Validate asks for it
	return Config{
		Node:        node,
		StateDir:    p.ServiceStateDir(service),
		SpoolDir:    deletion.Dir(p.StateDir),
		BPFDir:      p.BPFDir,
		NetnsDirs:   []string{"/run"},
		TunnelPorts: []uint16{4789},
		// where kube-proxy in IPVS mode puts every address of a service
		ServiceDevices: []string{"kube-ipvs0"},
		Routing:        RoutingConfig{Mode: string(cluster.None), ProbePort: 4242},
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

// Validate says what no single value shows.
func (c *Config) Validate() error {
	var p config.Problems
	if dir := c.LoadBalancing.Cgroup; dir != "" && !filepath.IsAbs(dir) {
		p.Addf("loadBalancing.cgroup", "%q is not an absolute path", dir)
	}
	if c.Node == "" || len(c.Node) > 253 {
		p.Addf("node", "%q is no name of a node: want 1 to 253 bytes", c.Node)
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
			p.Addf("podCIDRs", "%v has no room for a pod", cidr)
		case slices.ContainsFunc(c.PodCIDRs[:i], cidr.Overlaps):
			p.Addf("podCIDRs", "%v overlaps a range before it", cidr)
		}
	}
	if len(c.Underlay.Addresses) > 16 {
		p.Addf("underlay.addresses", "%d addresses, at most 16", len(c.Underlay.Addresses))
	}
	for _, a := range c.Underlay.Addresses {
		if !a.IsGlobalUnicast() || a.Is4In6() || a.Zone() != "" {
			p.Addf("underlay.addresses", "%v is no address by which others reach a node", a)
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
		p.Addf("tunnelPorts", "%d ports with that of the tunnel, at most %d", n, kernel.MaxTunnelPorts)
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
		p.Addf("uninstall", "validateOnly changes nothing")
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
	return sandbox.Calls{Netlink: true, Datagram: c.Routing.probes(), Enter: true, Names: []string{"bpf"}}
}

// files are what the process opens after its start. A network namespace counts
// as a file of the directory in which it is mounted. Of the spool it is the
// directory above: the plugin may make it.
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

// kernel are the options of the maps and programs.
func (c Config) kernel(l *slog.Logger) kernel.Options {
	return kernel.Options{
		Dir: c.BPFDir, PodCIDRs: c.PodCIDRs, TunnelPorts: c.closedPorts(), EventsPerSecond: c.Events.PerSecond,
		Routing: c.Routing.kernel(), CopyDSCP: c.Routing.CopyDSCP,
		Services: c.LoadBalancing.on(), Sockets: c.LoadBalancing.sockets(),
		ValidateOnly: c.ValidateOnly, Log: l,
	}
}

// cgroup is the directory at which the programs of sockets are attached. Beside the
// first version, cgroup2 is mounted below the directory.
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

// sockets say whose sockets reach services; nil: nobody's do.
func (c LoadBalancingConfig) sockets() *sockets.Options {
	if !c.on() {
		return nil
	}
	// A cgroup that somebody names is meant, if it is not the root.
	return &sockets.Options{
		Cgroup:       c.cgroup(),
		Subtree:      c.Cgroup != "",
		TranslateAll: c.OtherNamespaces == othersTranslate,
	}
}
