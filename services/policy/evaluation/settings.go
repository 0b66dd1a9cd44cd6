// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package evaluation

import (
	"log/slog"

	"github.com/sluice-net/sluice/kit/config"
	"github.com/sluice-net/sluice/kube/tenants"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/owner"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
	"github.com/sluice-net/sluice/services/policy/internal/stream"
)

// Settings are the settings of sluice-policy that determine outcomes, with the same keys and defaults. The nodes of the
// cluster must have the same values.
type Settings struct {
	Cluster ClusterSettings `config:"cluster"`
	Limits  LimitSettings   `config:"limits"`
	Shares  tenants.Config  `config:"shares"`
	DNS     DNSSettings     `config:"dns"`
	HTTP    HTTPSettings    `config:"http"`
}

// ClusterSettings contains properties of the cluster that manifests do not state.
type ClusterSettings struct {
	Name             string `config:"name" help:"name of this cluster, which peers of a policy may refer to"`
	LocalOnly        bool   `config:"localOnly" help:"peers that name no cluster mean this cluster only"`
	CIDRSelectsNodes bool   `config:"cidrSelectsNodes" help:"Cilium's address rules apply to nodes too"`
	NodeLabels       bool   `config:"nodeLabels" help:"identities of nodes carry the labels of the nodes"`
}

// LimitSettings configures the limits that tenants share on each node.
type LimitSettings struct {
	Policies  int             `config:"policies" help:"policies that are enforced as written; policies beyond a tenant's share isolate the pods that they select"`
	Manifests config.ByteSize `config:"manifests" help:"total size of their manifests"`
}

// HTTPSettings configures what rules for HTTP requests and TLS server names mean.
type HTTPSettings struct {
	Proxy bool `config:"proxy" help:"sluice-http evaluates egress rules for HTTP and TLS server names"`
}

// DNSSettings configures what rules for DNS queries mean.
type DNSSettings struct {
	Proxy    bool `config:"proxy" help:"sluice-dns evaluates DNS rules, and learns addresses from answers"`
	Implicit bool `config:"implicit" help:"pods with toFQDNs and no DNS rule: sluice-dns learns from what rules allow at port 53"`
}

// DefaultSettings returns the defaults of sluice-policy.
func DefaultSettings() Settings {
	return Settings{
		Cluster: ClusterSettings{Name: "default"},
		Limits:  LimitSettings{Policies: 40_000, Manifests: 256 << 20},
		Shares:  tenants.Defaults(),
		DNS:     DNSSettings{Proxy: true},
	}
}

// Validate reports invalid settings. Package config calls it.
func (s *Settings) Validate() error {
	var p config.Problems
	if s.Cluster.Name == "" || len(s.Cluster.Name) > 63 {
		p.Addf("cluster.name", "%q is not a name of 1 to 63 characters", s.Cluster.Name)
	}
	if n := s.Limits.Policies; n < 1 || n > 1_000_000 {
		p.Addf("limits.policies", "%d is not between 1 and 1000000", n)
	}
	if s.Limits.Manifests < 1 {
		p.Addf("limits.manifests", "%d is not positive", s.Limits.Manifests)
	}
	return p.Err()
}

// owner returns the configuration of an owner that has no endpoints.
func (s *Settings) owner(t *tenants.Set, l *slog.Logger) owner.Config {
	return owner.Config{
		Tenants: t,
		Engine:  engine.Config{Cluster: s.Cluster.Name, Enforcement: engine.EnforceDefault, AllowHost: true},
		Rules: rule.Options{
			Cluster: s.Cluster.Name, LocalClusterOnly: s.Cluster.LocalOnly,
			CIDRSelectsNodes: s.Cluster.CIDRSelectsNodes, NodeLabels: s.Cluster.NodeLabels,
			WithoutDNSProxy: !s.DNS.Proxy, ImplicitDNS: s.DNS.Implicit, HTTPProxy: s.HTTP.Proxy,
		},
		MaxPolicies: s.Limits.Policies, MaxManifestBytes: int(s.Limits.Manifests),
		MaxNames: 1, MaxAddresses: 1, // no names are learned in this process
		Stream: stream.Defaults(), Log: l,
	}
}
