// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/sluice-net/sluice/kit/boottime"
	"github.com/sluice-net/sluice/kit/config"
	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/sandbox"
	"github.com/sluice-net/sluice/kit/version"
	"github.com/sluice-net/sluice/kube"
	"github.com/sluice-net/sluice/kube/tenants"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/etcd/session"
	"github.com/sluice-net/sluice/services/identity/internal/labels"
	"github.com/sluice-net/sluice/services/identity/internal/registry"
)

// Config contains the service's own settings.
type Config struct {
	Node     string       `config:"node" help:"name of this node in the cluster; never two nodes with one name"`
	StateDir string       `config:"stateDir" help:"directory of the files that survive a restart"`
	Quota    int          `config:"quota" help:"identities of the cluster that this node may hold"`
	Etcd     EtcdConfig   `config:"etcd"`
	Labels   LabelsConfig `config:"labels"`
	// NodeLabels selects labels of Nodes.
	NodeLabels LabelsConfig `config:"nodeLabels"`
	GC         GCConfig     `config:"gc"`

	Cluster    ClusterConfig  `config:"cluster"`
	Kubernetes kube.Settings  `config:"kubernetes"`
	Shares     tenants.Config `config:"shares"`
}

// ClusterConfig contains settings that all nodes of the cluster share.
type ClusterConfig struct {
	Name          string        `config:"name" help:"name of this cluster, which policies may name; the same as the name in sluice-policy's settings"`
	StaleMappings time.Duration `config:"staleMappings" help:"with native routing, how long after its removal from etcd a node without etcd may trust the mapping of an address; a minute longer the address is not allocated again; the same on all nodes"`
}

// EtcdConfig configures the connection to etcd, the store that all nodes share.
type EtcdConfig struct {
	Endpoints  []string      `config:"endpoints" help:"where etcd is: all http://host:port, all https://host:port or all unix:///path; empty: sluice-store with storeDir, else http://127.0.0.1:2379"`
	CA         string        `config:"ca" help:"file with the certificates that etcd's is checked against; for https"`
	Cert       string        `config:"cert" help:"file with this client's certificate, if etcd asks for one"`
	Key        string        `config:"key" help:"file with the private key of this client's certificate"`
	ServerName string        `config:"serverName" help:"name in etcd's certificate, if it is not the host of the endpoint"`
	StoreDir   string        `config:"storeDir" help:"directory with credentials of sluice-store; replaces the above, but endpoints replace it with storeToken"`
	StoreToken string        `config:"storeToken" help:"file with a token for sluice-store in Kubernetes; with storeDir"`
	Namespace  string        `config:"storeNamespace" help:"namespace of the ConfigMap that says where sluice-store is"`
	Prefix     string        `config:"prefix" help:"beginning of all keys; the same on all nodes of a cluster"`
	LeaseTTL   time.Duration `config:"leaseTTL" help:"how long the references of this node outlive its last sign of life; the same on all nodes"`
	AliveTTL   time.Duration `config:"aliveTTL" help:"how long other nodes regard this node as alive, and its name as taken, after its last sign of life"`
	Timeout    time.Duration `config:"timeout" help:"how long one request may take; a caller's own deadline may be shorter"`
	Heartbeat  time.Duration `config:"heartbeat" help:"interval of checks that etcd responds and the name is still owned"`
}

func (c EtcdConfig) client() session.Client {
	endpoints := c.Endpoints
	if len(endpoints) == 0 && c.StoreDir == "" {
		endpoints = []string{"http://127.0.0.1:2379"}
	}
	return session.Client{Endpoints: endpoints, CA: c.CA, Cert: c.Cert, Key: c.Key, ServerName: c.ServerName}
}

// store reports whether the node uses sluice-store. In Kubernetes, whose manifests always set storeDir, endpoints name
// another etcd, so that a cluster with one keeps it.
func (c EtcdConfig) store() bool {
	return c.StoreDir != "" && (c.StoreToken == "" || len(c.Endpoints) == 0)
}

// LabelsConfig selects the labels that are part of identities.
type LabelsConfig struct {
	Include []string `config:"include" help:"label keys ([source:]prefix or *.domain) that are part of identities although a shorter rule excludes them"`
	Exclude []string `config:"exclude" help:"label keys ([source:]prefix or *.domain) that are left out of identities"`
}

// GCConfig configures the collection of unreferenced identities.
type GCConfig struct {
	Grace      time.Duration `config:"grace" help:"how long an identity has no references before it is collected"`
	Quarantine time.Duration `config:"quarantine" was:"rest" help:"how long a collected number stays reserved for its former label set"`
	Interval   time.Duration `config:"interval" help:"between two checks for unreferenced identities"`
}

func defaults(p instance.Paths) Config {
	node, err := os.Hostname()
	if err != nil {
		node = "" // Validate reports the missing name
	}
	return Config{
		Node:     node,
		StateDir: p.ServiceStateDir("identity"),
		Quota:    4096,
		Etcd: EtcdConfig{
			Namespace: "sluice-system",
			Prefix:    "/sluice/v1/identity",
			LeaseTTL:  15 * time.Minute,
			AliveTTL:  time.Minute,
			Timeout:   3 * time.Second,
			Heartbeat: 5 * time.Second,
		},
		GC:         GCConfig{Grace: 15 * time.Minute, Quarantine: time.Hour, Interval: time.Minute},
		Cluster:    ClusterConfig{Name: "default", StaleMappings: 15 * time.Minute},
		Kubernetes: kube.Defaults(),
		Shares:     tenants.Defaults(),
	}
}

// Validate implements the check of kit/config.
func (c *Config) Validate() error {
	var p config.Problems
	if c.Node == "" || len(c.Node) > 253 || strings.ContainsAny(c.Node, "/ \t\n\x00") {
		p.Addf("node", "%q is not a name of 1 to 253 characters without '/' and white space", c.Node)
	}
	if c.Quota < 1 || c.Quota > identity.ClusterSize {
		p.Addf("quota", "%d is not between 1 and %d", c.Quota, identity.ClusterSize)
	}
	switch e := c.Etcd; {
	case !e.store():
		if err := e.client().Check(); err != nil {
			p.Addf("etcd", "%w", err)
		}
	case !filepath.IsAbs(e.StoreDir):
		p.Addf("etcd.storeDir", "%q is not an absolute path", e.StoreDir)
	case e.CA+e.Cert+e.Key+e.ServerName != "":
		p.Addf("etcd.storeDir", "ca, cert, key and serverName are for another etcd: remove them, or storeDir")
	}
	if e := c.Etcd; e.StoreToken != "" && len(e.Endpoints) == 0 {
		switch {
		case !filepath.IsAbs(e.StoreToken):
			p.Addf("etcd.storeToken", "%q is not an absolute path", e.StoreToken)
		case e.StoreDir == "" || !c.Kubernetes.Enabled():
			p.Addf("etcd.storeToken", "needs etcd.storeDir and kubernetes.api")
		case e.Namespace == "":
			p.Addf("etcd.storeNamespace", "is required with storeToken")
		}
	}
	if !strings.HasPrefix(c.Etcd.Prefix, "/") || strings.HasSuffix(c.Etcd.Prefix, "/") {
		p.Addf("etcd.prefix", "%q does not begin with '/', or ends in it", c.Etcd.Prefix)
	}
	between := func(key string, d, least, most time.Duration) {
		if d < least || d > most {
			p.Addf(key, "%s is not between %s and %s", d, least, most)
		}
	}
	between("cluster.staleMappings", c.Cluster.StaleMappings, time.Second, 24*time.Hour)
	between("etcd.timeout", c.Etcd.Timeout, 10*time.Millisecond, time.Minute)
	between("etcd.heartbeat", c.Etcd.Heartbeat, 10*time.Millisecond, time.Hour)
	between("etcd.leaseTTL", c.Etcd.LeaseTTL, time.Second, 24*time.Hour)
	between("etcd.aliveTTL", c.Etcd.AliveTTL, time.Second, time.Hour)
	between("gc.grace", c.GC.Grace, 0, 24*time.Hour)
	between("gc.quarantine", c.GC.Quarantine, time.Second, 7*24*time.Hour)
	between("gc.interval", c.GC.Interval, 10*time.Millisecond, time.Hour)
	if c.Etcd.Heartbeat*2 > c.Etcd.LeaseTTL {
		p.Addf("etcd.heartbeat", "%s is more than half of etcd.leaseTTL, %s: one lost sign of life would end the lease",
			c.Etcd.Heartbeat, c.Etcd.LeaseTTL)
	}
	if c.Cluster.Name == "" || len(c.Cluster.Name) > 63 {
		p.Addf("cluster.name", "%q is not a name of 1 to 63 characters", c.Cluster.Name)
	}
	if _, err := labels.NewNodeFilter(c.NodeLabels.Include, c.NodeLabels.Exclude); err != nil {
		p.Addf("nodeLabels", "%w", err)
	}
	if _, err := labels.NewFilter(c.Labels.Include, c.Labels.Exclude); err != nil {
		p.Addf("labels", "%w", err)
	}
	return p.Err()
}

func (c *Config) allocator(l *slog.Logger) allocator.Config {
	return allocator.Config{
		Quota:        c.Quota,
		StoreTimeout: c.Etcd.Timeout,
		Heartbeat:    c.Etcd.Heartbeat,
		Reconcile:    c.GC.Interval,
		Grace:        c.GC.Grace,
		Quarantine:   c.GC.Quarantine,
		KnownDelay:   10 * time.Second,
		RetryMin:     100 * time.Millisecond,
		RetryMax:     2 * time.Second,
		Log:          l,
	}
}

func (c *Config) registry(incarnation string, l *slog.Logger) registry.Config {
	return registry.Config{
		Node: c.Node, Incarnation: incarnation, Version: version.Get().String(),
		Timeout:  c.Etcd.Timeout,
		Pause:    20 * time.Millisecond,
		Gather:   10 * time.Millisecond,
		RetryMin: 100 * time.Millisecond, RetryMax: 2 * time.Second,
		RetryRanges: time.Minute, HoldLosses: time.Minute, NodeLabels: c.Kubernetes.Enabled(),
		StaleMappings: c.Cluster.StaleMappings, BootTime: boottime.Now, Log: l,
	}
}

// listen returns the interval at which the service asks etcd whether it has missed changes. It is short enough that an
// answer from memory is never refused only because the last check is too old.
func (c *Config) listen() time.Duration {
	const least = 100 * time.Millisecond
	return min(heardEvery, max(c.GC.Quarantine/4, least), max(c.Cluster.StaleMappings/4, least))
}

// heardEvery is the maximum interval between these checks. It is much shorter than a minute, after which a node that
// has not heard from etcd counts as cut off.
const heardEvery = 15 * time.Second

// Calls implements process.Caller.
func (c *Config) Calls() sandbox.Calls {
	overTCP := func(endpoint string) bool { return !strings.HasPrefix(endpoint, "unix:") }
	etcd := c.Etcd.store() || slices.ContainsFunc(c.Etcd.client().Endpoints, overTCP)
	return sandbox.Calls{Inet: c.Kubernetes.Enabled() || etcd}
}

// files lists the files that the service opens after its start: its state, the files of the resolver, and certificates
// with their directories, in which new files may appear.
func (c *Config) files(kubernetes *kube.Client) sandbox.Files {
	f := sandbox.Files{Write: []string{c.StateDir}}
	if c.Etcd.store() && c.Etcd.StoreDir != c.StateDir {
		f.Write = append(f.Write, c.Etcd.StoreDir)
	}
	if !c.Calls().Inet {
		return f
	}
	f.Read = []string{"/etc/hosts", "/etc/resolv.conf", "/etc/nsswitch.conf", "/etc/services", "/etc/ssl", "/etc/pki", "/usr/share/ca-certificates"}
	// Do not open the whole directory only because a file is missing.
	f.Read = slices.DeleteFunc(f.Read, func(path string) bool { _, err := os.Stat(path); return err != nil })
	if kubernetes != nil {
		f.Read = append(f.Read, kubernetes.Files()...)
	}
	for _, file := range []string{c.Etcd.CA, c.Etcd.Cert, c.Etcd.Key, c.Etcd.StoreToken} {
		if file != "" {
			f.Read = append(f.Read, filepath.Dir(file))
		}
	}
	return f
}
