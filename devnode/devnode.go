// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package devnode runs a whole Sluice node on one machine: a network namespace
// of its own joined to the caller's by a veth pair, an embedded etcd and every
// service under the directories of one instance. `sluice dev` is a thin
// command line around it; the node tests, the demo and the benchmarks use it
// as a library.
//
// A node is found by its instance name alone: Down ends every process that was
// started for the instance and removes every object that carries its name,
// also if Up was killed half-way.
//
// A Cluster is several nodes that share an etcd, each with an instance of its
// own: those of the cluster x are x-1, x-2 and so on.
package devnode

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/durable"
	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/nodefiles"
	"github.com/sluice-net/sluice/kit/tasks"
)

// Services of a node, by the names of their sockets.
const (
	Etcd         = "etcd"
	Identity     = "identity"
	IPAM         = "ipam"
	Policy       = "policy"
	LoadBalancer = "loadbalancer"
	Datapath     = "datapath"
)

// Services lists all of them in the order of starting.
func Services() []string { return []string{Etcd, Identity, IPAM, Policy, LoadBalancer, Datapath} }

// processNames are the names under which an instance may have processes.
var processNames = append(Services(), etcdMembers(maxEtcdMembers)...)

// ErrRunning is returned by Up for an instance that is up.
var ErrRunning = errors.New("is running already")

// ErrNotRunning is returned by Open for an instance that is not up.
var ErrNotRunning = errors.New("is not running")

// Options describe a node. The zero value is usable but for BinDir.
type Options struct {
	// Instance names the node: 1 to 32 characters of a-z, 0-9 and "-".
	// Default: "dev".
	Instance string
	// BinDir holds the services' executables. Required.
	BinDir string
	// PodCIDRs are the ranges of pod addresses, at most one per family.
	// Default: 10.244.N.0/24 and fd00:244:N::/64 with the first N to which no
	// route of the caller's namespace leads.
	PodCIDRs []netip.Prefix
	// StartTimeout bounds the wait for the services. Default: 30 s.
	StartTimeout time.Duration
	// PolicyMode is the datapath's: "none", "required" or "init". Default:
	// DefaultPolicyMode.
	PolicyMode string
	// PolicyDir holds manifests that are in force besides what is applied by
	// calls; it is seen below the run directory, read-only. sluice-policy's user
	// must be able to read it, but not what lies above it. Default: an empty
	// directory there, into which files may be put.
	PolicyDir string
	// ServiceDir holds manifests of Services and EndpointSlices, under the same
	// conditions, for sluice-loadbalancer.
	ServiceDir string
	// NoLoadBalancer leaves sluice-loadbalancer out. The datapath then translates no
	// service.
	NoLoadBalancer bool
	// Args are additional arguments by service.
	Args map[string][]string
	// Waits reports whether the policy service at a socket waits for policies that were
	// never read. A node of which services do not serve for that is up all the same; nil:
	// it is not.
	Waits func(ctx context.Context, socket string) bool `json:"-"`
}

// DefaultPolicyMode is how strict the datapath of a node is about policies.
const DefaultPolicyMode = "required"

// Node is a running node.
type Node struct {
	paths instance.Paths
	state state
	// waits is that of the Options.
	waits func(ctx context.Context, socket string) bool
}

// state is what Open needs to know and Down does not.
type state struct {
	BinDir    string              `json:"binDir"`
	PodCIDRs  []netip.Prefix      `json:"podCIDRs"`
	Args      map[string][]string `json:"args,omitempty"`
	Timeout   time.Duration       `json:"startTimeoutNanoseconds"`
	Policy    string              `json:"policyMode"`
	Policies  string              `json:"policyDir,omitempty"`
	Manifests string              `json:"serviceDir,omitempty"`
	// Services run on the node; all of them, unless it is one of a cluster.
	Services []string `json:"services,omitempty"`
	// Member is the node's place in its cluster; nil for a node of its own.
	Member *member `json:"member,omitempty"`
	// Ready is set once every service has served.
	Ready bool `json:"ready"`
}

// users are the services with their numeric users. etcd is one of development
// nodes alone. It has a group of its own, whose members may connect: it does
// not ask who writes, and members of the services' group may only read.
var users = func() map[string]nodefiles.Service {
	m := map[string]nodefiles.Service{}
	for _, s := range nodefiles.Services() {
		m[s.Name] = s
	}
	for _, name := range append(etcdMembers(maxEtcdMembers), Etcd) {
		m[name] = nodefiles.Service{Name: name, UID: instance.EtcdID, GID: instance.EtcdID, Former: 64705}
	}
	return m
}()

// newNode computes where everything of an instance is.
func newNode(name string) (*Node, error) {
	name = cmp.Or(name, "dev")
	paths, err := instance.New(name)
	if err != nil {
		return nil, err
	}
	return &Node{paths: paths}, nil
}

// Up starts a node and returns when every service serves. What it started is
// taken down again if something fails.
//
// The error wraps ErrRunning if the instance is up.
func Up(ctx context.Context, o Options) (*Node, error) {
	n, err := newNode(o.Instance)
	if err != nil {
		return nil, err
	}
	if cluster, ok := clusterOf(n.paths.Name); ok {
		return nil, fmt.Errorf("instance %s is a node of instance %s", n.paths.Name, cluster.Instance())
	}
	err = n.up(ctx, func() error {
		if n.state, err = o.withDefaults(); err != nil {
			return err
		}
		n.waits = o.Waits
		return n.build(ctx)
	})
	if err != nil {
		return nil, err
	}
	return n, nil
}

// up calls build when nothing of the instance runs or is left of an Up that was
// killed. What build made is removed if it fails.
func (n *Node) up(ctx context.Context, build func() error) (err error) {
	unlock, err := n.lock()
	if err != nil {
		return err
	}
	defer unlock()
	if running, err := n.runningServices(); err != nil {
		return err
	} else if len(running) > 0 {
		return fmt.Errorf("instance %s %w: %v", n.paths.Name, ErrRunning, running)
	}
	if err := n.remove(ctx); err != nil {
		return err
	}
	if err := build(); err != nil {
		return errors.Join(err, n.remove(context.WithoutCancel(ctx)))
	}
	return nil
}

// build makes the node that state describes and starts its services.
func (n *Node) build(ctx context.Context) error {
	if err := n.prepare(); err != nil {
		return err
	}
	return n.begin(ctx)
}

// prepare makes all of the node but its processes.
func (n *Node) prepare() error {
	if err := n.makePlace(); err != nil {
		return err
	}
	if err := n.writeState(); err != nil {
		return err
	}
	makeNetwork := n.makeNetwork
	if n.state.Member != nil {
		makeNetwork = n.joinNetwork
	}
	if err := makeNetwork(); err != nil {
		return err
	}
	return n.writeCNIConfig()
}

// begin starts the services of a node that was prepared.
func (n *Node) begin(ctx context.Context) error {
	if err := n.startAll(ctx); err != nil {
		return err
	}
	n.state.Ready = true
	return n.writeState()
}

// makePlace makes the directories of the instance and mounts what lies elsewhere.
func (n *Node) makePlace() error {
	if err := n.makeDirectories(); err != nil {
		return err
	}
	if err := bindReadOnly(n.state.BinDir, n.binDir()); err != nil {
		return err
	}
	for _, d := range []struct{ dir, at string }{
		{n.state.Policies, n.PolicyDir()},
		{n.state.Manifests, n.ServiceDir()},
	} {
		if d.dir == "" {
			continue
		}
		if err := bindReadOnly(d.dir, d.at); err != nil {
			return err
		}
	}
	return nil
}

// startAll starts every service of the instance, all at once.
func (n *Node) startAll(ctx context.Context) error {
	services := n.Services()
	need := threads + threadsEach*(len(services)-1)
	if err := tasks.Need(need, fmt.Sprintf("a node of %d services", len(services))); err != nil {
		return err
	}
	group, groupCtx := errgroup.WithContext(ctx)
	for _, service := range services {
		group.Go(func() error { return n.Start(groupCtx, service) })
	}
	return group.Wait()
}

// Open gives the node of an instance that another process brought up.
//
// The error wraps ErrNotRunning if there is none.
func Open(name string) (*Node, error) {
	n, err := newNode(name)
	if err != nil {
		return nil, err
	}
	content, err := os.ReadFile(n.statePath())
	if errors.Is(err, fs.ErrNotExist) {
		if c, err := OpenCluster(n.paths.Name); err == nil {
			return nil, fmt.Errorf("instance %s has several nodes, %s to %s: name one", n.paths.Name,
				c.nodeName(c.state.Nodes[0]), c.nodeName(c.state.Nodes[len(c.state.Nodes)-1]))
		}
		return nil, fmt.Errorf("instance %s %w", n.paths.Name, ErrNotRunning)
	}
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(content, &n.state); err != nil {
		return nil, fmt.Errorf("read %s: %w", n.statePath(), err)
	}
	return n, nil
}

// Down ends every process of an instance and removes all that Up made, and
// succeeds if there is nothing. It needs no state file. Down of a cluster takes
// all of its nodes down; Down of one of its nodes removes that one, as if its
// machine had been switched off.
func Down(ctx context.Context, name string) error {
	n, err := newNode(name)
	if err != nil {
		return err
	}
	unlock, err := n.lock()
	if err != nil {
		return err
	}
	defer unlock()
	return n.remove(ctx)
}

// Restart ends a service in an orderly way, if it runs, and starts it again.
func (n *Node) Restart(ctx context.Context, service string) error {
	unlock, err := n.lock()
	if err != nil {
		return err
	}
	defer unlock()
	// What cannot be started again is not ended.
	if err := tasks.Need(threads, "the start of a service"); err != nil {
		return fmt.Errorf("restart %s: %w", service, err)
	}
	if err := n.Stop(ctx, service); err != nil {
		return err
	}
	return n.Start(ctx, service)
}

// Down ends the node, as the function Down does.
func (n *Node) Down(ctx context.Context) error { return Down(ctx, n.paths.Name) }

// Instance is the node's name.
func (n *Node) Instance() string { return n.paths.Name }

// Name is what the node is called in its cluster.
func (n *Node) Name() string { return n.name() }

// Paths are the directories of the node.
func (n *Node) Paths() instance.Paths { return n.paths }

// Services are those that run on the node, in the order of starting. etcd is
// not among them on a node of a cluster.
func (n *Node) Services() []string {
	return n.state.services()
}

func (s state) services() []string {
	if s.Services != nil {
		return slices.Clone(s.Services)
	}
	return Services()
}

// Socket is the path of a service's gRPC socket.
func (n *Node) Socket(service string) string { return n.paths.Socket(service) }

// Netns is the path of the node's network namespace, as iproute2 knows it.
func (n *Node) Netns() string { return filepath.Join(netnsDir, n.name()) }

// netnsMount is where it is mounted. Netns leads there by a link and is no
// mount itself: the first `ip netns add` of a machine binds /run/netns over
// itself, after which a mount made there before can be neither seen nor
// removed.
func (n *Node) netnsMount() string { return filepath.Join(n.paths.RunDir, "node.netns") }

// Device is the caller's end of the link to the node.
func (n *Node) Device() string { return n.link() }

// Addresses are those of the node's uplink, one per family.
func (n *Node) Addresses() []netip.Addr {
	if m := n.state.Member; m != nil {
		var addresses []netip.Addr
		for _, p := range m.Addresses {
			addresses = append(addresses, p.Addr())
		}
		return addresses
	}
	ipv4, ipv6 := n.linkAddresses()
	return []netip.Addr{ipv4[1], ipv6[1]}
}

// PodCIDRs are the ranges of pod addresses.
func (n *Node) PodCIDRs() []netip.Prefix { return slices.Clone(n.state.PodCIDRs) }

// SetArgs replaces the additional arguments of a service, from its next start on.
func (n *Node) SetArgs(service string, args ...string) error {
	n.state.Args = maps.Clone(n.state.Args)
	if n.state.Args == nil {
		n.state.Args = map[string][]string{}
	}
	n.state.Args[service] = args
	return n.writeState()
}

// Plugin is the path of the CNI plugin.
func (n *Node) Plugin() string { return filepath.Join(n.state.BinDir, "sluice-cni") }

// CNIConfDir holds the CNI configuration list of the node.
func (n *Node) CNIConfDir() string { return filepath.Join(n.paths.RunDir, "cni", "net.d") }

// Log is the path of a service's log file.
func (n *Node) Log(service string) string {
	return filepath.Join(n.paths.RunDir, "log", service+".log")
}

// CNIConflist is the CNI configuration list of the node.
func (n *Node) CNIConflist() []byte {
	return encode(map[string]any{
		"cniVersion": "1.0.0",
		"name":       "sluice",
		"plugins":    []any{n.plugin()},
	})
}

// plugin is the plugin's entry in the configuration list.
func (n *Node) plugin() map[string]any {
	return map[string]any{
		"type":    "sluice-cni",
		"runDir":  n.paths.RunDir,
		"logFile": filepath.Join(n.paths.RunDir, "log", "cni.log"),
		"capabilities": map[string]bool{
			"labels": true, "ips": true, "mac": true, "portMappings": true, "io.kubernetes.cri.pod-annotations": true,
		},
	}
}

// PluginConfig is a file that holds what a runtime would write to the plugin's
// standard input, for calling it by hand.
func (n *Node) PluginConfig() string {
	return filepath.Join(n.paths.RunDir, "cni", "sluice.json")
}

// encode makes JSON of maps of strings and booleans, which always succeeds.
func encode(v any) []byte {
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		panic(err)
	}
	return append(b, '\n')
}

// name is the node's part of the names of kernel objects.
func (n *Node) name() string { return "sluice-" + n.paths.Name }

// binDir is where the services are executed.
func (n *Node) binDir() string { return filepath.Join(n.paths.RunDir, "bin") }

// PolicyDir holds the manifests that sluice-policy watches.
func (n *Node) PolicyDir() string { return filepath.Join(n.paths.RunDir, "policies") }

// ServiceDir holds the manifests that sluice-loadbalancer watches.
func (n *Node) ServiceDir() string { return filepath.Join(n.paths.RunDir, "services") }

// PolicyMode is the datapath's: "none", "required" or "init".
func (n *Node) PolicyMode() string { return n.state.Policy }

func (n *Node) statePath() string { return filepath.Join(n.paths.RunDir, "dev.json") }

func (n *Node) writeState() error {
	content, err := json.MarshalIndent(n.state, "", "  ")
	if err != nil {
		return err
	}
	return durable.WriteFile(n.statePath(), content, 0o600, durable.SyncNone)
}

func (n *Node) writeCNIConfig() error {
	if err := os.MkdirAll(n.CNIConfDir(), 0o755); err != nil {
		return err
	}
	one := n.plugin()
	one["cniVersion"], one["name"] = "1.0.0", "sluice"
	return errors.Join(
		os.WriteFile(filepath.Join(n.CNIConfDir(), "10-sluice.conflist"), n.CNIConflist(), 0o600),
		os.WriteFile(n.PluginConfig(), encode(one), 0o600),
	)
}

// lock keeps two commands from changing one instance at the same time. The lock
// is the name of an abstract socket, which the kernel frees with the process
// and which leaves no file.
func (n *Node) lock() (unlock func(), err error) {
	name := "@" + n.name() + "-dev"
	l, err := net.Listen("unix", name)
	if errors.Is(err, unix.EADDRINUSE) {
		return nil, fmt.Errorf("another command is working on instance %s", n.paths.Name)
	}
	if err != nil {
		return nil, fmt.Errorf("lock instance %s: %w", n.paths.Name, err)
	}
	return func() { _ = l.Close() }, nil
}

// makeDirectories makes the directories of the node itself, those of the services
// with the owners that the services expect.
func (n *Node) makeDirectories() error {
	for _, service := range n.Services() {
		if _, err := nodefiles.Prepare(n.paths, users[service]); err != nil {
			return err
		}
	}
	for _, d := range []struct {
		path string
		mode fs.FileMode
	}{
		{filepath.Join(n.paths.RunDir, "log"), 0o755},
		{n.binDir(), 0o755},
		{n.PolicyDir(), 0o755},
		{n.ServiceDir(), 0o755},
	} {
		if err := os.Mkdir(d.path, d.mode); err != nil {
			return err
		}
		if err := os.Chmod(d.path, d.mode); err != nil {
			return err
		}
	}
	return nil
}

// bindReadOnly makes a directory visible below the run directory: the one that
// the programs were built in may be closed to the services' users, as a
// checkout below /root is. Read-only, so that nothing done to the mount reaches
// the original.
func bindReadOnly(dir, at string) error {
	if err := unix.Mount(dir, at, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mount %s at %s: %w", dir, at, err)
	}
	if err := unix.Mount("", at, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		return fmt.Errorf("make %s read-only: %w", at, err)
	}
	return nil
}

// unmount takes away every mount at a path: there is more than one if a killed
// Up was repeated over it.
func unmount(path string) error {
	for {
		err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("unmount %s: %w", path, err)
		}
	}
}

// remove takes down whatever exists of the instance, in the reverse order of
// Up, and goes on after errors. The nodes of a cluster go before it.
func (n *Node) remove(ctx context.Context) error {
	if err := n.removeMembers(ctx); err != nil {
		return err // the file that names them stays, for the next attempt
	}
	var errs []error
	services := slices.Clone(processNames)
	slices.Reverse(services)
	for _, service := range services {
		errs = append(errs, n.Stop(ctx, service))
	}
	errs = append(errs, n.removePodMounts(), n.removeNetwork())
	for _, dir := range []string{n.paths.BPFDir, n.binDir(), n.PolicyDir(), n.ServiceDir()} {
		if err := unmount(dir); err != nil {
			// Removing the directory would empty what is still mounted there.
			return errors.Join(append(errs, err)...)
		}
	}
	errs = append(errs, os.RemoveAll(n.paths.RunDir), os.RemoveAll(n.paths.StateDir))
	return errors.Join(errs...)
}

// readableBy says whether a user with the services' group may list a directory
// and open what is in it.
func readableBy(info fs.FileInfo, uid uint32) bool {
	shift := 0 // the bits of others
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		switch {
		case st.Uid == uid:
			shift = 6
		case st.Gid == instance.GroupID:
			shift = 3
		}
	}
	return info.Mode().Perm()>>shift&0o5 == 0o5
}

// manifestDir is the absolute path of a directory that the user of a service can
// read; empty for the empty path.
func manifestDir(what, dir, service string) (string, error) {
	if dir == "" {
		return "", nil
	}
	info, err := os.Stat(dir)
	switch user := users[service].UID; {
	case err != nil:
	case !info.IsDir():
		err = fmt.Errorf("%s is not a directory", dir)
	case !readableBy(info, user):
		err = fmt.Errorf("%s has mode %v and cannot be read by uid %d, as which sluice-%s runs; try chmod o+rx",
			dir, info.Mode(), user, service)
	}
	if err != nil {
		return "", fmt.Errorf("%s: %w", what, err)
	}
	return filepath.Abs(dir)
}

func (o Options) withDefaults() (state, error) {
	s := state{BinDir: o.BinDir, PodCIDRs: o.PodCIDRs, Args: o.Args, Timeout: o.StartTimeout, Policy: o.PolicyMode}
	if s.BinDir == "" {
		return s, errors.New("no directory of executables given")
	}
	var err error
	if s.BinDir, err = filepath.Abs(s.BinDir); err != nil {
		return s, err
	}
	if o.NoLoadBalancer {
		s.Services = slices.DeleteFunc(Services(), func(service string) bool { return service == LoadBalancer })
	}
	for _, service := range s.services() {
		if _, err := os.Stat(executable(s.BinDir, service)); err != nil {
			return s, fmt.Errorf("executable of %s: %w; run `make build`", service, err)
		}
	}
	s.Policy = cmp.Or(s.Policy, DefaultPolicyMode)
	if s.Policies, err = manifestDir("policies", o.PolicyDir, Policy); err != nil {
		return s, err
	}
	if s.Manifests, err = manifestDir("services", o.ServiceDir, LoadBalancer); err != nil {
		return s, err
	}
	s.Timeout = cmp.Or(s.Timeout, 30*time.Second)
	return s, nil
}
