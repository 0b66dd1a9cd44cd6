// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Sluice-ipam allocates the pod addresses of one node.
package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/sluice-net/sluice/kit/config"
	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/process"
	"github.com/sluice-net/sluice/kit/rpc"
	identity "github.com/sluice-net/sluice/kit/rpc/client"
	"github.com/sluice-net/sluice/kit/sandbox"
	"github.com/sluice-net/sluice/kit/version"
	"github.com/sluice-net/sluice/kube"
	"github.com/sluice-net/sluice/proto/wire"
	edge "github.com/sluice-net/sluice/services/ipam/internal/client"
	"github.com/sluice-net/sluice/services/ipam/internal/cluster"
	"github.com/sluice-net/sluice/services/ipam/internal/ipam"
	"github.com/sluice-net/sluice/services/ipam/internal/nodeobject"
	"github.com/sluice-net/sluice/services/ipam/internal/pool"
	"github.com/sluice-net/sluice/services/ipam/internal/poolevents"
	"github.com/sluice-net/sluice/services/ipam/internal/server"
	"github.com/sluice-net/sluice/services/ipam/internal/store"
)

const service = "ipam"

// settings is the configuration of the service.
type settings struct {
	Mode       string        `config:"mode" enum:"static,kubernetes,pool" help:"where ranges come from, the same on all nodes of a cluster: static: pools; kubernetes: spec.podCIDRs of this machine's Node object; pool: blocks of clusterPool"`
	Pools      []string      `config:"pools" help:"in mode static, ranges that pod addresses are taken from, in order of use"`
	Exclude    []string      `config:"exclude" help:"addresses and ranges inside the pools that are never allocated"`
	Lease      time.Duration `config:"lease" help:"how long an address is kept for an ADD that has not finished, 1s to 1h"`
	Quarantine time.Duration `config:"quarantine" was:"rest" help:"how long a released address is not allocated, 0 to 24h"`
	StateDir   string        `config:"stateDir" help:"directory of the state file, mode 0700"`

	Identity         string `config:"identity" help:"unix socket of the identity service, which registers the ranges with the cluster; empty for a node on its own"`
	MaxBlocksPerNode int    `config:"maxBlocksPerNode" help:"in mode pool, blocks of a family that one node may have, 1 to 32, and in mode static with staticRanges.prefixes ranges; what etcd has counts for all nodes"`

	ClusterPool  poolSettings      `config:"clusterPool"`
	StaticRanges staticSettings    `config:"staticRanges"`
	Kubernetes   kube.NodeSettings `config:"kubernetes"`

	ranges, exclusions []netip.Prefix // set by Validate
	agreed             cluster.Settings
}

// poolSettings configures the pool that the whole cluster shares.
type poolSettings struct {
	Prefixes  []string `config:"prefixes" help:"in mode pool, prefixes that all nodes of the cluster take blocks from; the same on all nodes, as are the following settings"`
	IPv4Block int      `config:"ipv4Block" help:"prefix length of IPv4 blocks"`
	IPv6Block int      `config:"ipv6Block" help:"prefix length of IPv6 blocks"`
	MaxBlocks int      `config:"maxBlocks" help:"former name of maxBlocksPerNode; 0: not set"`
}

// staticSettings limits the ranges that nodes may have in mode static.
type staticSettings struct {
	Prefixes  []string `config:"prefixes" help:"in mode static, prefixes in which the ranges of all nodes lie; other nodes ignore other ranges; the same on all nodes, as are the following settings; empty: not limited"`
	IPv4Block int      `config:"ipv4Block" help:"minimum prefix length of an IPv4 range in these prefixes"`
	IPv6Block int      `config:"ipv6Block" help:"minimum prefix length of an IPv6 range in these prefixes"`
}

// checkPrefixes parses the prefixes in a group of settings.
func checkPrefixes(p *config.Problems, group string, texts []string, ipv4Block, ipv6Block int,
) (prefixes []netip.Prefix, err error) {
	field := group + ".prefixes"
	if prefixes, err = pool.ParseRanges(field, texts); err != nil {
		return nil, err
	}
	for i, x := range prefixes {
		bits := ipv4Block
		if x.Addr().Is6() {
			bits = ipv6Block
		}
		if bits < x.Bits() || bits > min(x.Bits()+32, x.Addr().BitLen()-2) {
			p.Addf(fmt.Sprintf("%s[%d]", field, i),
				"%s has no blocks of /%d: a block is at most 32 bits longer, and at least of 4 addresses", x, bits)
		}
	}
	return prefixes, nil
}

// checkStatic reports pools that other nodes would refuse as problems.
func (s *settings) checkStatic(p *config.Problems) {
	for i, x := range s.ranges {
		bits := s.agreed.IPv4Block
		if x.Addr().Is6() {
			bits = s.agreed.IPv6Block
		}
		if x.Bits() < bits || !slices.ContainsFunc(s.agreed.Prefixes, func(q netip.Prefix) bool {
			return q.Bits() <= x.Bits() && q.Contains(x.Addr())
		}) {
			p.Addf(fmt.Sprintf("pools[%d]", i), "%s is not within staticRanges.prefixes, or is larger than a /%d", x, bits)
		}
	}
}

// maxBlocks returns the maximum number of blocks of one family on a node. If the setting is given under its former
// name, that value is used.
func (s *settings) maxBlocks(p *config.Problems) int {
	name, n := "maxBlocksPerNode", s.MaxBlocksPerNode
	if s.ClusterPool.MaxBlocks != 0 {
		name, n = "clusterPool.maxBlocks", s.ClusterPool.MaxBlocks
	}
	if n < 1 || n > 32 { // as in IPAMSettings: 32 of each family are as many ranges as a node may have
		p.Addf(name, "%d is not between 1 and 32", n)
	}
	return n
}

func defaults(p instance.Paths) settings {
	return settings{
		Mode: modeStatic,
		// These pools are only used on a single node. In a cluster, the cluster assigns the node's ranges.
		Pools:            []string{"10.244.0.0/24", "fd00:244::/64"},
		Lease:            ipam.DefaultLease,
		Quarantine:       ipam.DefaultQuarantine,
		MaxBlocksPerNode: 16,
		ClusterPool: poolSettings{
			Prefixes: []string{"10.244.0.0/16", "fd00:244::/48"}, IPv4Block: 24, IPv6Block: 64,
		},
		StaticRanges: staticSettings{IPv4Block: 24, IPv6Block: 64},
		StateDir:     p.ServiceStateDir(service),
		Kubernetes:   kube.NodeDefaults(),
	}
}

// The modes.
const (
	modeStatic     = "static"
	modeKubernetes = "kubernetes"
	modePool       = "pool"
)

// learns reports whether the ranges come from the Node object.
func (s *settings) learns() bool { return s.Mode == modeKubernetes }

// Calls implements process.Caller.
func (s *settings) Calls() sandbox.Calls { return sandbox.Calls{Inet: s.learns()} }

// Validate implements the check of package config.
func (s *settings) Validate() error {
	var p config.Problems
	if s.Lease < time.Second || s.Lease > time.Hour {
		p.Addf("lease", "%s is not between 1s and 1h", s.Lease)
	}
	if s.Quarantine < 0 || s.Quarantine > 24*time.Hour {
		p.Addf("quarantine", "%s is not between 0 and 24h", s.Quarantine)
	}
	if !filepath.IsAbs(s.StateDir) {
		p.Addf("stateDir", "%q is not an absolute path", s.StateDir)
	}
	if s.learns() && !s.Kubernetes.Enabled() {
		p.Addf("kubernetes.api", "needed in mode kubernetes; or kubernetes.kubeconfig")
	}
	if s.Identity != "" && !filepath.IsAbs(s.Identity) {
		p.Addf("identity", "%q is not an absolute path", s.Identity)
	}
	s.agreed = cluster.Settings{Mode: cluster.Mode(s.Mode)}
	var err, xerr, perr error
	s.ranges, err = pool.ParseRanges("pools", s.Pools)
	switch {
	case s.Mode == modePool:
		if s.Identity == "" {
			p.Addf("identity", "needed in mode pool")
		}
		c := &s.ClusterPool
		s.agreed.IPv4Block, s.agreed.IPv6Block, s.agreed.MaxBlocks = c.IPv4Block, c.IPv6Block, s.maxBlocks(&p)
		s.agreed.Prefixes, perr = checkPrefixes(&p, "clusterPool", c.Prefixes, c.IPv4Block, c.IPv6Block)
	case s.Mode == modeStatic && len(s.StaticRanges.Prefixes) > 0:
		c := &s.StaticRanges
		s.agreed.IPv4Block, s.agreed.IPv6Block, s.agreed.MaxBlocks = c.IPv4Block, c.IPv6Block, s.maxBlocks(&p)
		s.agreed.Prefixes, perr = checkPrefixes(&p, "staticRanges", c.Prefixes, c.IPv4Block, c.IPv6Block)
		if err == nil && perr == nil {
			s.checkStatic(&p)
		}
	}
	s.exclusions, xerr = pool.ParseExclusions("exclude", s.Exclude)
	if err == nil && xerr == nil { // excluded addresses may leave no address free
		_, err = pool.New("pools", s.ranges, s.exclusions)
	}
	return errors.Join(p.Err(), err, xerr, perr)
}

func main() { os.Exit(process.Run(service, defaults, run)) }

func run(ctx context.Context, p *process.Process, cfg settings) error {
	if cfg.ClusterPool.MaxBlocks != 0 {
		fmt.Fprintln(os.Stderr, "clusterPool.maxBlocks was renamed to maxBlocksPerNode; the former name works until 0.2.0")
	}
	started := time.Now()
	state, err := process.Phase(p, "open-state", func() (*store.Store, error) { return store.Open(cfg.StateDir) })
	if err != nil {
		return err
	}
	p.OnExit(state.Close)
	files := sandbox.Files{Write: []string{cfg.StateDir}}
	var client *kube.Client
	if cfg.learns() {
		client, err = kube.New(cfg.Kubernetes.Settings, kube.Options{
			Name: "sluice-ipam", StateFile: filepath.Join(cfg.StateDir, "kubernetes-api.json"), Log: p.Log,
		})
		if err != nil {
			return err
		}
		files.Read = client.Files()
	}
	if err := p.Confine(files); err != nil {
		return err
	}

	metrics := server.NewMetrics()
	observe := metrics.Observer()
	observe.Reloaded = func(cause error) { p.Log.Error("commit failed; state loaded again", log.Err(cause)) }
	field := "pools"
	switch cfg.Mode {
	case modeKubernetes:
		field = nodeobject.Field
	case modePool:
		field = "clusterPool"
	}
	addresses, err := process.Phase(p, "load-index", func() (*ipam.Allocator, error) {
		a, err := ipam.New(state, ipam.Options{
			Field: field, Ranges: cfg.ranges, Stored: cfg.Mode != modeStatic,
			Families: cfg.agreed.Families(), Exclude: cfg.exclusions,
			Lease: cfg.Lease, Quarantine: cfg.Quarantine, Observe: observe, AsksReuse: cfg.Identity != "",
		})
		if errors.Is(err, ipam.ErrInconsistent) {
			err = fmt.Errorf("state file %s was left unchanged: %w (docs/ipam.md, \"A refused state file\")", state.Path(), err)
		}
		return a, err
	})
	if err != nil {
		return err
	}
	for _, a := range addresses.Outside() {
		p.Log.Warn("addresses held outside the pools are kept until released",
			"owner", a.Owner.String(), "addresses", a.List())
	}
	short := poolevents.New(addresses.Summary)
	if err := metrics.Register(p.Metrics, addresses, short.Exhausted); err != nil {
		return err
	}
	service := server.New(addresses, metrics, version.Get().String(), started)
	service.Process = wire.NewProcess(p.Effective.Paths.Name, p.Effective.File, p.Effective.Ignored, p.Effective.Each,
		p.LogLevel, p.Log)
	service.Shortage = short
	srv, err := p.NewServer(rpc.Options{Register: service.Register, Methods: server.Methods()})
	if err != nil {
		return err
	}
	p.Go("allocator", addresses.Run)
	p.Go("shortage", short.Run)
	ready := &readiness{process: p, server: srv, why: map[string]error{}}
	var labels edge.Labels
	if cfg.learns() {
		node, err := nodeobject.New(client, nodeobject.Options{
			Name: cfg.Kubernetes.Node, Ranges: addresses, Addresses: short, Log: p.Log, Report: ready.part("Node object"),
		})
		if err != nil {
			return err
		}
		service.NoRange, service.Restored, labels = node.Problem, node.Restored, node.Labels
		p.Go("addresses of the Kubernetes API", client.Run)
		p.Go("node object", node.Run)
	}
	if cfg.Identity != "" {
		conn, err := identity.Dial(cfg.Identity, identity.Options{})
		if err != nil {
			return err
		}
		p.OnExit(conn.Close)
		service.Settings = cfg.agreed
		service.Cluster = cluster.New(cluster.Options{
			Settings: cfg.agreed, Registry: edge.New(conn, cfg.agreed, labels), Ranges: addresses,
			Report: ready.part("cluster"), Log: p.Log,
		})
		p.Go("cluster", service.Cluster.Run)
	}
	ready.tell()
	return p.Serve(ctx, srv)
}

// readiness reports the service as ready once no part waits for a range any more.
type readiness struct {
	process *process.Process
	server  *rpc.Server

	once sync.Once
	mu   sync.Mutex
	why  map[string]error // guarded by mu; by part; nil: the part has a range
}

// part returns the function with which a part reports the reason for which it waits. Until the first call, the part
// counts as waiting.
func (r *readiness) part(name string) func(error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.why[name] = errors.New("not checked yet")
	return func(why error) {
		r.mu.Lock()
		r.why[name] = why
		r.mu.Unlock()
		r.tell()
	}
}

func (r *readiness) tell() {
	r.mu.Lock()
	defer r.mu.Unlock()
	var why error
	for _, part := range slices.Sorted(maps.Keys(r.why)) {
		if why == nil {
			why = r.why[part]
		}
	}
	switch {
	case why != nil:
		r.process.Waiting("waiting for a range: " + why.Error())
	default:
		r.once.Do(r.process.Ready)
	}
	r.server.SetAllServing(why == nil)
}
