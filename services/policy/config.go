// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"fmt"
	"log/slog"
	"path/filepath"
	"regexp"
	"slices"
	"time"

	"github.com/sluice-net/sluice/kit/config"
	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/sandbox"
	"github.com/sluice-net/sluice/kube"
	"github.com/sluice-net/sluice/kube/tenants"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/owner"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
	"github.com/sluice-net/sluice/services/policy/internal/stream"
)

// Config is the configuration of this service.
type Config struct {
	StateDir    string            `config:"stateDir" help:"directory of the files that survive a restart"`
	Sources     SourcesConfig     `config:"sources"`
	Kubernetes  KubernetesConfig  `config:"kubernetes"`
	Cluster     ClusterConfig     `config:"cluster"`
	Enforcement EnforcementConfig `config:"enforcement"`
	Limits      LimitsConfig      `config:"limits"`
	Shares      tenants.Config    `config:"shares"`
	DNS         DNSConfig         `config:"dns"`
	HTTP        HTTPConfig        `config:"http"`
	Names       NamesConfig       `config:"names"`
	Subscribers SubscribersConfig `config:"subscribers"`
}

// SourcesConfig configures the sources of identities and policies.
type SourcesConfig struct {
	Identity  string   `config:"identity" help:"unix socket of the identity service"`
	Directory string   `config:"directory" help:"directory of YAML and JSON files with policies, which is watched; empty for none"`
	Managers  []string `config:"managers" help:"managers that must send all their policies once, by ReplacePolicies or CompleteSource, before containers are connected"`
}

// KubernetesConfig configures the connection to the Kubernetes API.
type KubernetesConfig struct {
	kube.Settings `config:",inline"`
	Status        StatusConfig `config:"status"`
}

// StatusConfig exists only for configurations of earlier versions, in which sluice-policy wrote the status of
// policies. Now sluice-controller writes the status. The Kubernetes manifests of those versions set Write for a
// separate process. That process must not start as the policy service of a node.
type StatusConfig struct {
	Write bool `config:"write" help:"refused: sluice-controller writes the status of policies"`
}

// ClusterConfig contains properties of the cluster that manifests do not state.
type ClusterConfig struct {
	Name             string `config:"name" help:"name of this cluster, which peers of a policy may refer to"`
	LocalOnly        bool   `config:"localOnly" help:"peers that name no cluster mean this cluster only"`
	CIDRSelectsNodes bool   `config:"cidrSelectsNodes" help:"Cilium's address rules apply to nodes too"`
	NodeLabels       bool   `config:"nodeLabels" help:"identities of nodes carry the labels of the nodes"`
}

// EnforcementConfig selects the subjects for which policy is enforced.
type EnforcementConfig struct {
	Mode      string `config:"mode" help:"default: subjects that a policy selects; always: all; never: none"`
	AllowHost bool   `config:"allowHost" help:"the local node may reach its pods unless a rule denies it"`
}

// LimitsConfig configures the limits that tenants share.
type LimitsConfig struct {
	Policies  int             `config:"policies" help:"policies that are enforced as written; policies beyond a tenant's share isolate the pods that they select"`
	Manifests config.ByteSize `config:"manifests" help:"total size of their manifests"`
}

// DNSConfig configures what rules for DNS queries mean.
type DNSConfig struct {
	Proxy bool   `config:"proxy" help:"sluice-dns evaluates DNS rules, and learns addresses from answers"`
	Away  string `config:"away" help:"DNS queries for restricted names while sluice-dns is unavailable: drop or pass"`
	// Implicit is off by default, because it redirects queries to sluice-dns although no policy has a DNS rule for
	// them.
	Implicit bool `config:"implicit" help:"pods with toFQDNs and no DNS rule: sluice-dns learns from what rules allow at port 53"`
}

// HTTPConfig configures what rules for HTTP requests and TLS server names mean.
type HTTPConfig struct {
	Proxy bool `config:"proxy" help:"sluice-http evaluates egress rules for HTTP and TLS server names"`
}

// NamesConfig configures the addresses that were learned for DNS names.
type NamesConfig struct {
	Max       int           `config:"max" help:"DNS names that are remembered"`
	Addresses int           `config:"addresses" help:"addresses that are remembered for all names together"`
	Grace     time.Duration `config:"grace" help:"how long an address is kept after its TTL, and after the last report of a connection to it"`
}

// SubscribersConfig configures the handling of datapaths.
type SubscribersConfig struct {
	Linger time.Duration `config:"linger" help:"how long the tables of a disconnected subscriber are kept"`
}

func defaults(p instance.Paths) Config {
	return Config{
		StateDir:    p.ServiceStateDir("policy"),
		Sources:     SourcesConfig{Identity: p.Socket("identity")},
		Kubernetes:  KubernetesConfig{Settings: kube.Defaults()},
		Cluster:     ClusterConfig{Name: "default"},
		Enforcement: EnforcementConfig{Mode: "default", AllowHost: true},
		Limits:      LimitsConfig{Policies: 40_000, Manifests: 256 << 20},
		Shares:      tenants.Defaults(),
		DNS:         DNSConfig{Proxy: true, Away: awayDrop},
		Names:       NamesConfig{Max: 16_384, Addresses: 262_144, Grace: 10 * time.Minute},
		Subscribers: SubscribersConfig{Linger: 10 * time.Minute},
	}
}

// Values of dns.away.
const (
	awayDrop = "drop"
	awayPass = "pass"
)

var modes = map[string]engine.Enforcement{
	"default": engine.EnforceDefault, "always": engine.EnforceAlways, "never": engine.EnforceNever,
}

// managerName matches names of managers, as in the API.
var managerName = regexp.MustCompile(`^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$`)

// Validate reports invalid settings. Package config calls it.
func (c *Config) Validate() error {
	var p config.Problems
	if !filepath.IsAbs(c.Sources.Identity) {
		p.Addf("sources.identity", "%q is not an absolute path", c.Sources.Identity)
	}
	if d := c.Sources.Directory; d != "" && !filepath.IsAbs(d) {
		p.Addf("sources.directory", "%q is not an absolute path", d)
	}
	for i, m := range c.Sources.Managers {
		if key := fmt.Sprintf("sources.managers[%d]", i); !managerName.MatchString(m) || len(m) > 63 {
			p.Addf(key, "%q is not a name of 1 to 63 lower-case letters, digits, '-' and '.'", m)
		} else if slices.Index(c.Sources.Managers, m) < i {
			p.Addf(key, "%q appears twice", m)
		}
	}
	if c.Kubernetes.Status.Write {
		p.Addf("kubernetes.status.write", "sluice-controller writes the status of policies: apply the manifests of this version")
	}
	if c.Cluster.Name == "" || len(c.Cluster.Name) > 63 {
		p.Addf("cluster.name", "%q is not a name of 1 to 63 characters", c.Cluster.Name)
	}
	if _, ok := modes[c.Enforcement.Mode]; !ok {
		p.Addf("enforcement.mode", "%q is not default, always or never", c.Enforcement.Mode)
	}
	between := func(key string, v, least, most int) {
		if v < least || v > most {
			p.Addf(key, "%d is not between %d and %d", v, least, most)
		}
	}
	between("limits.policies", c.Limits.Policies, 1, 1_000_000)
	if c.Limits.Manifests < 1 {
		p.Addf("limits.manifests", "%d is not positive", c.Limits.Manifests)
	}
	if a := c.DNS.Away; a != awayDrop && a != awayPass {
		p.Addf("dns.away", "%q is not drop or pass", a)
	}
	between("names.max", c.Names.Max, 1, 1_000_000)
	between("names.addresses", c.Names.Addresses, 1, 1_000_000)
	if d := c.Names.Grace; d < 0 || d > 24*time.Hour {
		p.Addf("names.grace", "%s is not between 0 and 24h", d)
	}
	if d := c.Subscribers.Linger; d < 0 || d > 24*time.Hour {
		p.Addf("subscribers.linger", "%s is not between 0 and 24h", d)
	}
	return p.Err()
}

// Calls returns the system calls that this service needs in addition to those that every service needs.
func (c *Config) Calls() sandbox.Calls { return sandbox.Calls{Inet: c.Kubernetes.Enabled()} }

func (c *Config) owner(l *slog.Logger, t *tenants.Set) owner.Config {
	return owner.Config{
		Tenants: t,
		Engine: engine.Config{
			Cluster:     c.Cluster.Name,
			Enforcement: modes[c.Enforcement.Mode],
			AllowHost:   c.Enforcement.AllowHost,

			WithoutDNSProxy: !c.DNS.Proxy, PassWithoutDNSProxy: c.DNS.Away == awayPass, WithoutHTTPProxy: !c.HTTP.Proxy,
		},
		Rules: rule.Options{
			Cluster: c.Cluster.Name, LocalClusterOnly: c.Cluster.LocalOnly,
			CIDRSelectsNodes: c.Cluster.CIDRSelectsNodes, NodeLabels: c.Cluster.NodeLabels,
			WithoutDNSProxy: !c.DNS.Proxy, ImplicitDNS: c.DNS.Implicit, HTTPProxy: c.HTTP.Proxy,
		},
		MaxPolicies: c.Limits.Policies, MaxManifestBytes: int(c.Limits.Manifests),
		MaxNames: c.Names.Max, MaxAddresses: c.Names.Addresses, NameGrace: c.Names.Grace,
		Directory: c.Sources.Directory, Managers: c.Sources.Managers,
		Linger: c.Subscribers.Linger, Stream: stream.Defaults(), Log: l,
	}
}

// files returns the files that the service opens after startup: its state, and the manifests. The directory of the
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
