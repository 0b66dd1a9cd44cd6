// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/sluice-net/sluice/kit/config"
	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/sandbox"
	"github.com/sluice-net/sluice/kube"
	"github.com/sluice-net/sluice/kube/tenants"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/compile"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/owner"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// Config contains the service's own settings.
type Config struct {
	StateDir     string             `config:"stateDir" help:"directory of the file that survives a restart"`
	Sources      SourcesConfig      `config:"sources"`
	Kubernetes   kube.Settings      `config:"kubernetes"`
	Node         NodeConfig         `config:"node"`
	ExternalIPs  ExternalIPsConfig  `config:"externalIPs"`
	Backends     BackendsConfig     `config:"backends"`
	HealthChecks HealthChecksConfig `config:"healthChecks"`
	Limits       LimitsConfig       `config:"limits"`
	Shares       tenants.Config     `config:"shares"`
	Subscribers  SubscribersConfig  `config:"subscribers"`

	external []netip.Prefix     // set by Validate
	reserved []compile.Reserved // set by Validate
}

// SourcesConfig configures the sources of services other than API calls, and the identity service.
type SourcesConfig struct {
	Identity  string `config:"identity" help:"unix socket of the identity service, which publishes what exceeds a share"`
	Directory string `config:"directory" help:"directory of manifests, which is watched; empty for none"`
}

// NodeConfig describes the node whose frontends are computed.
type NodeConfig struct {
	Name string `config:"name" help:"name of the node in endpoint slices; empty: no endpoint is local"`
	Zone string `config:"zone" help:"zone of the node, for topology hints; empty: the zone of its Node in Kubernetes"`
}

// ExternalIPsConfig lists the addresses that services may claim. Every user who may write a Service can take over the
// traffic to these addresses.
type ExternalIPsConfig struct {
	Allow []string `config:"allow" help:"prefixes of the addresses that services may have as external IPs"`
}

// BackendsConfig lists endpoints that cannot be backends. It must list tunnel ports: if a packet of a client were
// forwarded to a tunnel port of another node, that node would treat it as a tunnel packet from this node.
type BackendsConfig struct {
	Reserved []string `config:"reserved" help:"ports that no backend may have, as protocol/port or protocol/prefix:port"`
}

// HealthChecksConfig configures the health check ports of services.
type HealthChecksConfig struct {
	Address string `config:"address" help:"address of the health check ports; empty: all addresses; off: none"`
}

// LimitsConfig limits the number and size of the stored objects. For frontends and backends, the smaller of this limit
// and the datapath's capacity applies.
type LimitsConfig struct {
	Services           int             `config:"services" help:"services that are kept"`
	EndpointSlices     int             `config:"endpointSlices" help:"endpoint slices that are kept"`
	Frontends          int             `config:"frontends" help:"frontends of all services together, which tenants share"`
	Backends           int             `config:"backends" help:"addresses and ports of all endpoints, which tenants share"`
	BackendsPerService int             `config:"backendsPerService" help:"addresses and ports of one service"`
	Manifests          config.ByteSize `config:"manifests" help:"size of all files together"`
}

// SubscribersConfig configures the subscribers of frontends, which are datapaths.
type SubscribersConfig struct {
	Linger time.Duration `config:"linger" help:"how long a disconnected subscriber is remembered and may resume"`
}

func defaults(p instance.Paths) Config {
	return Config{
		StateDir:   p.ServiceStateDir("loadbalancer"),
		Sources:    SourcesConfig{Identity: p.Socket("identity")},
		Kubernetes: kube.Defaults(),
		Backends:   BackendsConfig{Reserved: []string{"udp/4789", "udp/8472"}},
		Limits: LimitsConfig{
			Services: 65_536, EndpointSlices: 131_072, Frontends: 65_536, Backends: 280_000, BackendsPerService: 65_536,
			Manifests: 256 << 20,
		},
		Shares:      tenants.Defaults(),
		Subscribers: SubscribersConfig{Linger: 10 * time.Minute},
	}
}

// healthChecksOff is the value of healthChecks.address that disables health check ports.
const healthChecksOff = "off"

// Validate checks the configuration, as kit/config requires.
func (c *Config) Validate() error {
	var p config.Problems
	if !filepath.IsAbs(c.StateDir) {
		p.Addf("stateDir", "%q is not an absolute path", c.StateDir)
	}
	if !filepath.IsAbs(c.Sources.Identity) {
		p.Addf("sources.identity", "%q is not an absolute path", c.Sources.Identity)
	}
	if d := c.Sources.Directory; d != "" && !filepath.IsAbs(d) {
		p.Addf("sources.directory", "%q is not an absolute path", d)
	}
	c.external, c.reserved = nil, nil
	for i, text := range c.ExternalIPs.Allow {
		prefix, err := netip.ParsePrefix(text)
		if err != nil {
			p.Addf(fmt.Sprintf("externalIPs.allow[%d]", i), "%q is not a prefix", text)
			continue
		}
		c.external = append(c.external, prefix.Masked())
	}
	for i, text := range c.Backends.Reserved {
		r, err := parseReserved(text)
		if err != nil {
			p.Addf(fmt.Sprintf("backends.reserved[%d]", i), "%q: %v", text, err)
			continue
		}
		c.reserved = append(c.reserved, r)
	}
	if a := c.HealthChecks.Address; a != "" && a != healthChecksOff {
		if _, err := netip.ParseAddr(a); err != nil {
			p.Addf("healthChecks.address", "%q is not an address", a)
		}
	}
	l := c.Limits
	for _, x := range []struct {
		key   string
		value int
	}{
		{"limits.services", l.Services},
		{"limits.endpointSlices", l.EndpointSlices},
		{"limits.frontends", l.Frontends},
		{"limits.backends", l.Backends},
		{"limits.backendsPerService", l.BackendsPerService},
	} {
		if x.value < 1 || x.value > 1_000_000 {
			p.Addf(x.key, "%d is not between 1 and 1000000", x.value)
		}
	}
	if l.Manifests < 1 {
		p.Addf("limits.manifests", "%d is not positive", l.Manifests)
	}
	if d := c.Subscribers.Linger; d < 0 || d > 24*time.Hour {
		p.Addf("subscribers.linger", "%s is not between 0 and 24h", d)
	}
	return p.Err()
}

// parseReserved parses "udp/4789" and "udp/10.0.0.0/8:4789".
func parseReserved(text string) (compile.Reserved, error) {
	protocol, rest, _ := strings.Cut(text, "/")
	out := compile.Reserved{Protocol: service.ProtocolOf(strings.ToUpper(protocol))}
	if out.Protocol == 0 {
		return out, fmt.Errorf("the protocol is not tcp, udp or sctp")
	}
	port := rest
	if at := strings.LastIndexByte(rest, ':'); at >= 0 {
		prefix, err := netip.ParsePrefix(strings.Trim(rest[:at], "[]"))
		if err != nil {
			return out, fmt.Errorf("%q is not a prefix", rest[:at])
		}
		out.Prefix, port = prefix.Masked(), rest[at+1:]
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 {
		return out, fmt.Errorf("%q is not a port", port)
	}
	out.Port = uint16(n)
	return out, nil
}

// Calls returns the system calls that this service needs in addition to the common ones. It opens health check ports
// at any time.
func (c *Config) Calls() sandbox.Calls {
	return sandbox.Calls{Inet: c.HealthChecks.Address != healthChecksOff || c.Kubernetes.Enabled()}
}

func (c *Config) owner(l *slog.Logger) owner.Config {
	return owner.Config{
		Node: compile.Node{Name: c.Node.Name, Zone: c.Node.Zone, ExternalIPs: c.external, Reserved: c.reserved},
		Limits: owner.Limits{
			Services: c.Limits.Services, Slices: c.Limits.EndpointSlices, Frontends: c.Limits.Frontends,
			Backends: c.Limits.Backends, BackendsPerService: c.Limits.BackendsPerService,
		},
		Shares: c.Shares.Settings(), Linger: c.Subscribers.Linger, Log: l,
	}
}

// files returns the files that the service opens after its start: its state and the manifests. The directory of
// manifests may be a symbolic link that later points elsewhere, or may not exist yet.
func (c *Config) files() sandbox.Files {
	f := sandbox.Files{Write: []string{c.StateDir}}
	if dir := c.Sources.Directory; dir != "" {
		f.Read = append(f.Read, dir, filepath.Dir(filepath.Clean(dir)))
		if target, err := filepath.EvalSymlinks(dir); err == nil && target != filepath.Clean(dir) {
			f.Read = append(f.Read, target, filepath.Dir(target))
		}
	}
	return f
}
