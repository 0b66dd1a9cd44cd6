// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/sluice-net/sluice/kit/config"
	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/rpc"
	"github.com/sluice-net/sluice/kit/sandbox"
	"github.com/sluice-net/sluice/kube"
	"github.com/sluice-net/sluice/services/store/internal/access"
)

// Config is the configuration of this service.
type Config struct {
	Node       string          `config:"node" help:"name of this machine's node and member"`
	StateDir   string          `config:"stateDir" help:"directory of the database and of the CA keys"`
	EtcdSocket string          `config:"etcdSocket" help:"unix socket of etcd for root and sluice-identity"`
	Address    string          `config:"address" help:"IP address with the ports; empty: the one of its join, or none"`
	ClientPort int             `config:"clientPort" help:"TCP port of etcd for nodes; the same on all members"`
	MemberPort int             `config:"memberPort" help:"TCP port for other members; the same on all members"`
	EnrolPort  int             `config:"enrolPort" help:"TCP port for joining and renewals; the same on all members"`
	Quota      config.ByteSize `config:"quota" help:"database size from which the store refuses writes"`
	Prefix     string          `config:"prefix" help:"beginning of the keys of nodes, as etcd.prefix of sluice-identity"`

	Kubernetes KubernetesConfig `config:"kubernetes"`
}

// KubernetesConfig configures a store in Kubernetes.
type KubernetesConfig struct {
	kube.Settings `config:",inline"`
	Namespace     string        `config:"namespace" help:"namespace of the Lease, the ConfigMap and the accounts"`
	Takeover      time.Duration `config:"takeover" help:"how long a Lease is unchanged before a store takes its place"`
}

func defaults(p instance.Paths) Config {
	node, err := os.Hostname()
	if err != nil {
		node = "" // Validate reports the missing name
	}
	return Config{
		Node: node, StateDir: p.ServiceStateDir("store"), EtcdSocket: filepath.Join(p.ServiceRunDir("store"), "etcd.sock"),
		ClientPort: 23790, MemberPort: 23800, EnrolPort: 23810, Quota: 1 << 30, Prefix: "/sluice/v1/identity",
		Kubernetes: KubernetesConfig{
			Settings: kube.Defaults(), Namespace: "sluice-system", Takeover: 30 * time.Second,
		},
	}
}

// minTakeover leaves time for several renewals of the Lease, and for etcd, which counts lease times in seconds.
const minTakeover = 6 * time.Second

// minQuota is the space that the store itself and a small cluster need.
const minQuota = 16 << 20

// Validate reports invalid settings. Package config calls it.
func (c *Config) Validate() error {
	var p config.Problems
	if err := access.CheckMemberName(c.Node); err != nil {
		p.Addf("node", "%w", err)
	}
	for key, path := range map[string]string{"stateDir": c.StateDir, "etcdSocket": c.EtcdSocket} {
		if !filepath.IsAbs(path) {
			p.Addf(key, "%q is not an absolute path", path)
		}
	}
	if len(c.EtcdSocket) > rpc.MaxPath {
		p.Addf("etcdSocket", "%d bytes long; at most %d fit into a unix socket address", len(c.EtcdSocket), rpc.MaxPath)
	}
	if c.Address != "" {
		if a, err := netip.ParseAddr(c.Address); err != nil || a.IsUnspecified() || a.IsMulticast() || a.Zone() != "" {
			p.Addf("address", "%q is not an IP address of this machine", c.Address)
		}
	}
	ports := map[int]string{}
	for _, x := range []struct {
		key  string
		port int
	}{{"clientPort", c.ClientPort}, {"memberPort", c.MemberPort}, {"enrolPort", c.EnrolPort}} {
		if x.port < 1 || x.port > 65535 {
			p.Addf(x.key, "%d is not a port", x.port)
		} else if other := ports[x.port]; other != "" {
			p.Addf(x.key, "%d is the same as %s", x.port, other)
		}
		ports[x.port] = x.key
	}
	if k := &c.Kubernetes; k.Enabled() {
		if c.Address == "" {
			p.Addf("address", "is required in Kubernetes: the address of this machine")
		}
		if k.Namespace == "" || len(k.Namespace) > 63 {
			p.Addf("kubernetes.namespace", "%q is not the name of a namespace", k.Namespace)
		}
		if k.Takeover < minTakeover || k.Takeover > time.Hour {
			p.Addf("kubernetes.takeover", "%s is not between %s and 1h", k.Takeover, minTakeover)
		}
	}
	if c.Quota < minQuota {
		p.Addf("quota", "%d is less than %d", c.Quota, minQuota)
	}
	if !strings.HasPrefix(c.Prefix, "/") || strings.HasSuffix(c.Prefix, "/") || c.Prefix == "/sluice/v1/store" {
		p.Addf("prefix", "%q does not begin with '/', ends in it, or is the store's own", c.Prefix)
	}
	return p.Err()
}

// Calls returns the system calls that this service needs in addition to the calls that every service needs.
func (*Config) Calls() sandbox.Calls { return sandbox.Calls{Inet: true} }

// files returns the files that the service opens after startup.
func (c *Config) files(kubernetes *kube.Client) sandbox.Files {
	f := sandbox.Files{Write: []string{c.StateDir}}
	if kubernetes != nil {
		f.Read = kubernetes.Files()
	}
	return f
}
