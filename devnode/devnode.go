// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package devnode runs a whole Sluice node on one machine: a network namespace joined to the caller's by a veth pair,
// an embedded etcd, and every service, under the directories of one instance. `sluice dev` is a thin command line
// around this package; the node tests, the demo and the benchmarks use it as a library.
//
// A node is identified by its instance name alone. Down ends every process of the instance and removes every object
// with its name, even if Up was killed half-way.
//
// A Cluster is several nodes that share an etcd. Each node is an instance: the nodes of cluster x are x-1, x-2 and so
// on.
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

// Services of a node, named after their sockets.
const (
	Etcd         = "etcd"
	Identity     = "identity"
	IPAM         = "ipam"
	Policy       = "policy"
	LoadBalancer = "loadbalancer"
	Datapath     = "datapath"
	DNS          = "dns"
	HTTP         = "http"   // only on request
	Hubble       = "hubble" // only on request
	Store        = "store"  // only if requested, instead of etcd
)

// Services returns the services of every node, in starting order.
func Services() []string { return []string{Etcd, Identity, IPAM, Policy, LoadBalancer, Datapath, DNS} }

// processNames are all names that a process of an instance can have.
var processNames = append(append(Services(), HTTP, Hubble, Store), etcdMembers(maxEtcdMembers)...)

// ErrRunning is returned by Up if the instance is already running.
var ErrRunning = errors.New("is running already")

// ErrNotRunning is returned by Open if the instance is not running.
var ErrNotRunning = errors.New("is not running")

// Options describe a node. Only BinDir is required.
type Options struct {
	// Instance names the node: 1 to 32 characters of a-z, 0-9 and "-".
	// Default: "dev".
	Instance string
	// BinDir holds the services' executables. Required.
	BinDir string
	// PodCIDRs are the prefixes of pod addresses, at most one per family. Default: 10.244.N.0/24 and fd00:244:N::/64,
	// with the lowest N for which the caller's namespace has no route.
	PodCIDRs []netip.Prefix
	// StartTimeout bounds the wait for the services. Default: 30 s.
	StartTimeout time.Duration
	// PolicyMode is the datapath's policy mode: "none", "required" or "init". Default: DefaultPolicyMode.
	PolicyMode string
	// PolicyDir is a directory of manifests that are enforced in addition to policies applied by calls. It is mounted
	// read-only below the run directory. sluice-policy's user must be able to read the directory itself, but needs no
	// access to its parents. Default: an empty directory below the run directory, to which the caller may add files.
	PolicyDir string
	// ServiceDir is a directory of manifests of Services and EndpointSlices for sluice-loadbalancer. The conditions
	// of PolicyDir apply.
	ServiceDir string
	// NoLoadBalancer leaves out sluice-loadbalancer. The datapath then does not translate Service addresses.
	NoLoadBalancer bool
	// HTTP also starts sluice-http, and tells sluice-policy so.
	HTTP bool
	// Hubble also starts sluice-hubble.
	Hubble bool
	// Store runs sluice-store in place of the development etcd. It is for single nodes.
	Store bool
	// Args are additional arguments by service.
	Args map[string][]string
	// Waits reports whether the policy service at a socket waits for policies that it has never read. If it does, Up
	// accepts that services of the node do not serve yet. With nil, Up waits until every service serves.
	Waits func(ctx context.Context, socket string) bool `json:"-"`
}

// DefaultPolicyMode is the policy mode of a node's datapath.
const DefaultPolicyMode = "required"

// Node is a running node.
type Node struct {
	paths instance.Paths
	state state
	// waits is Options.Waits.
	waits func(ctx context.Context, socket string) bool
}

// state is the information that Open needs and Down does not.
type state struct {
	BinDir    string              `json:"binDir"`
	PodCIDRs  []netip.Prefix      `json:"podCIDRs"`
	Args      map[string][]string `json:"args,omitempty"`
	Timeout   time.Duration       `json:"startTimeoutNanoseconds"`
	Policy    string              `json:"policyMode"`
	Policies  string              `json:"policyDir,omitempty"`
	Manifests string              `json:"serviceDir,omitempty"`
	// Services are the names of the services that run on the node. Without names, these are the services of every
	// node.
	Services []string `json:"services,omitempty"`
	// Member describes the node in its cluster; nil for a single node.
	Member *member `json:"member,omitempty"`
	// Ready is set once every service has served.
	Ready bool `json:"ready"`
}

// users gives the uid and gid of each service. Only development nodes run etcd. etcd does not authenticate its clients,
// so everyone who can connect can write. It therefore has a group of its own, and not the group of the services, whose
// members may only read.
var users = func() map[string]nodefiles.Service {
	m := map[string]nodefiles.Service{}
	for _, s := range nodefiles.Services() {
		m[s.Name] = s
	}
	m[Store] = nodefiles.Store()
	for _, name := range append(etcdMembers(maxEtcdMembers), Etcd) {
		m[name] = nodefiles.Service{Name: name, UID: instance.EtcdID, GID: instance.EtcdID, Former: 64705}
	}
	return m
}()

// newNode returns a node with all paths of an instance.
func newNode(name string) (*Node, error) {
	name = cmp.Or(name, "dev")
	paths, err := instance.New(name)
	if err != nil {
		return nil, err
	}
	return &Node{paths: paths}, nil
}

// Up starts a node and returns when every service serves. If a step fails, Up removes what it started.
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

// up calls build if no process of the instance runs, after it has removed what a killed Up left. If build fails, up
// removes what it made.
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

// build makes the node that n.state describes and starts its services.
func (n *Node) build(ctx context.Context) error {
	if err := n.prepare(); err != nil {
		return err
	}
	return n.begin(ctx)
}

// prepare makes everything of the node except its processes.
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

// begin starts the services of a prepared node.
func (n *Node) begin(ctx context.Context) error {
	if err := n.startAll(ctx); err != nil {
		return err
	}
	n.state.Ready = true
	return n.writeState()
}

// makePlace makes the directories of the instance and mounts the directories from elsewhere.
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

// startAll starts every service of the instance in parallel, but sluice-hubble after the others: until the datapath
// serves, it would report the node as unavailable.
func (n *Node) startAll(ctx context.Context) error {
	services := n.Services()
	need := threads + threadsEach*(len(services)-1)
	if err := tasks.Need(need, fmt.Sprintf("a node of %d services", len(services))); err != nil {
		return err
	}
	group, groupCtx := errgroup.WithContext(ctx)
	for _, service := range services {
		if service != Hubble {
			group.Go(func() error { return n.Start(groupCtx, service) })
		}
	}
	if err := group.Wait(); err != nil || !slices.Contains(services, Hubble) {
		return err
	}
	return n.Start(ctx, Hubble)
}

// Open returns the node of an instance that another process started.
//
// The error wraps ErrNotRunning if the node is not running.
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

// Down ends every process of an instance and removes everything that Up made. It succeeds if there is nothing to
// remove, and needs no state file. Down of a cluster removes all of its nodes; Down of one of its nodes removes that
// node as if its machine had been switched off.
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

// Restart stops a service with SIGTERM, if it runs, and starts it again.
func (n *Node) Restart(ctx context.Context, service string) error {
	unlock, err := n.lock()
	if err != nil {
		return err
	}
	defer unlock()
	// Check that the service can be started again before ending it.
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

// Name returns the node's name in its cluster.
func (n *Node) Name() string { return n.name() }

// Paths are the directories of the node.
func (n *Node) Paths() instance.Paths { return n.paths }

// Services returns the services that run on the node, in starting order. On a node of a cluster, they do not include
// etcd.
func (n *Node) Services() []string {
	return n.state.services()
}

func (s state) services() []string {
	if s.Services != nil {
		return slices.Clone(s.Services)
	}
	return Services()
}

// Socket returns the path of a service's gRPC socket.
func (n *Node) Socket(service string) string { return n.paths.Socket(service) }

// Netns is the path of the node's network namespace, as iproute2 knows it.
func (n *Node) Netns() string { return filepath.Join(netnsDir, n.name()) }

// netnsMount returns the path at which the network namespace is mounted. Netns is a symbolic link to it and not a
// mount: the first `ip netns add` on a machine bind-mounts /run/netns over itself, and earlier mounts in that
// directory can then be neither seen nor removed.
func (n *Node) netnsMount() string { return filepath.Join(n.paths.RunDir, "node.netns") }

// Device returns the caller's end of the link to the node.
func (n *Node) Device() string { return n.link() }

// Addresses returns the addresses of the node's uplink, one per family.
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

// SetArgs replaces the additional arguments of a service, effective from its next start.
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

// PluginConfig returns a file with the network configuration that a runtime writes to the plugin's standard input,
// for calling the plugin by hand.
func (n *Node) PluginConfig() string {
	return filepath.Join(n.paths.RunDir, "cni", "sluice.json")
}

// encode returns the JSON of maps of strings and booleans, which cannot fail.
func encode(v any) []byte {
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		panic(err)
	}
	return append(b, '\n')
}

// name returns the prefix of the names of the node's kernel objects.
func (n *Node) name() string { return "sluice-" + n.paths.Name }

// binDir returns the directory from which the services are executed.
func (n *Node) binDir() string { return filepath.Join(n.paths.RunDir, "bin") }

// PolicyDir returns the directory of manifests that sluice-policy watches.
func (n *Node) PolicyDir() string { return filepath.Join(n.paths.RunDir, "policies") }

// ServiceDir returns the directory of manifests that sluice-loadbalancer watches.
func (n *Node) ServiceDir() string { return filepath.Join(n.paths.RunDir, "services") }

// PolicyMode returns the datapath's policy mode: "none", "required" or "init".
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

// lock keeps two commands from changing one instance at the same time. The lock is an abstract socket: the kernel
// frees it when the process ends, and it leaves no file.
//
// A child that this process starts meanwhile has a copy of the socket from its fork until its exec has closed it, which
// may be after unlock. So unlock also shuts the socket down: such a copy refuses connections, and a lock accepts them.
func (n *Node) lock() (unlock func(), err error) {
	name := "@" + n.name() + "-dev"
	for range 1000 {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: name, Net: "unix"})
		if err == nil {
			return func() { _ = errors.Join(shutDown(l), l.Close()) }, nil
		}
		if !errors.Is(err, unix.EADDRINUSE) {
			return nil, fmt.Errorf("lock instance %s: %w", n.paths.Name, err)
		}
		conn, err := net.Dial("unix", name)
		if !errors.Is(err, unix.ECONNREFUSED) {
			if err == nil {
				_ = conn.Close()
			}
			break
		}
		time.Sleep(time.Millisecond) // the child is in exec, which nothing reports
	}
	return nil, fmt.Errorf("another command is working on instance %s", n.paths.Name)
}

func shutDown(l *net.UnixListener) error {
	raw, err := l.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Control(func(fd uintptr) { failed = unix.Shutdown(int(fd), unix.SHUT_RDWR) })
	return errors.Join(err, failed)
}

// makeDirectories makes the directories of the node, and the services' directories with the owners that the services
// expect.
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

// bindReadOnly bind-mounts a directory below the run directory. The build directory may be closed to the services'
// users, as a checkout below /root is. The mount is read-only, so that changes below the mount cannot reach the
// original.
func bindReadOnly(dir, at string) error {
	if err := unix.Mount(dir, at, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mount %s at %s: %w", dir, at, err)
	}
	if err := unix.Mount("", at, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		return fmt.Errorf("make %s read-only: %w", at, err)
	}
	return nil
}

// unmount removes every mount at a path. There is more than one if Up was repeated after it had been killed.
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

// remove removes everything that exists of the instance, in the reverse order of Up, and continues after errors. It
// removes the nodes of a cluster first.
func (n *Node) remove(ctx context.Context) error {
	if err := n.removeMembers(ctx); err != nil {
		return err // keep the file that names the nodes for the next attempt
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
			// Removing the directory would delete the contents of what is still mounted there.
			return errors.Join(append(errs, err)...)
		}
	}
	errs = append(errs, os.RemoveAll(n.paths.RunDir), os.RemoveAll(n.paths.StateDir))
	return errors.Join(errs...)
}

// readableBy reports whether a user in the services' group may list a directory and open its files.
func readableBy(info fs.FileInfo, uid uint32) bool {
	shift := 0 // permission bits of others
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

// manifestDir returns the absolute path of a directory that the service's user can read, or an empty path for an
// empty one.
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
	if o.Store {
		s.Services = append([]string{Store}, slices.DeleteFunc(s.services(), isEtcd)...)
	}
	if o.HTTP {
		s.Services = append(s.services(), HTTP)
	}
	if o.Hubble {
		s.Services = append(s.services(), Hubble)
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
