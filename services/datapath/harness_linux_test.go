// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/lifecycle"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/record"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns/netnstest"
	"github.com/sluice-net/sluice/services/datapath/internal/node/cluster"
	"github.com/sluice-net/sluice/services/datapath/internal/node/podrange"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policystream"
	"github.com/sluice-net/sluice/services/datapath/internal/service/frontendstream"
)

// patience limits every wait for an event that must happen.
const patience = servicetest.Patience

func pathOf(ns *netns.Namespace) string { return fmt.Sprintf("/proc/self/fd/%d", ns.Fd()) }

// leases is a fake of sluice-ipam that keeps state.
type leases struct {
	mu   sync.Mutex
	held map[workload.Owner][]netip.Addr
	down error
}

func (l *leases) Confirm(_ context.Context, o workload.Owner, addrs []netip.Addr) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.down != nil {
		return l.down
	}
	l.held[o] = addrs
	return nil
}

func (l *leases) Release(_ context.Context, o workload.Owner) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.down != nil {
		return l.down
	}
	delete(l.held, o)
	return nil
}

func (l *leases) Claim(ctx context.Context, o workload.Owner, addrs []netip.Addr) error {
	return l.Confirm(ctx, o, addrs)
}

func (l *leases) Confirmed(context.Context) (os, _ []workload.Owner, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for o := range l.held {
		os = append(os, o)
	}
	return os, nil, l.down
}

type identities struct {
	mu   sync.Mutex
	held map[workload.Owner]uint32
}

func (i *identities) Resolve(_ context.Context, s endpoint.Spec) (endpoint.Identity, error) {
	o, labels := s.Owner, s.Labels
	i.mu.Lock()
	defer i.mu.Unlock()
	i.held[o] = 256 + uint32(len(labels))
	return endpoint.Identity{Number: i.held[o], Labels: labels}, nil
}

func (i *identities) Preview(_ context.Context, s endpoint.Spec) (endpoint.Identity, error) {
	return endpoint.Identity{Number: 256 + uint32(len(s.Labels)), Labels: s.Labels}, nil
}

func (i *identities) Confirm(context.Context, workload.Owner, uint32) error { return nil }

func (i *identities) Release(_ context.Context, o workload.Owner) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	delete(i.held, o)
	return nil
}

// world is a node in its own network namespace, whose datapath can be started and stopped.
type world struct {
	t          testing.TB
	home       *netns.Namespace
	dir        string
	leases     *leases
	identities *identities
	node       *datapath
	written    *record.Store // of node
	stop       func()
	next       uint16
	pods4      netip.Prefix                         // prefix of the containers' addresses
	policies   policystream.Service                 // nil: no policies
	required   bool                                 // creations wait for their tables
	wait       time.Duration                        // for how long; 0: the default
	events     uint32                               // events per second, CPU and reason; 0: the default
	records    func(*record.Store) endpoint.Records // what start uses instead of the store, if set
	ranges     podrange.Source                      // nil: the ranges are configured
	cluster    cluster.Source                       // nil: other nodes are unknown
	registry   cluster.Registry                     // nil: the node is not registered
	underlay   UnderlayConfig
	masquerade MasqueradeConfig
	routing    RoutingConfig
	frontends  frontendstream.Service // nil: services are not translated
	state      frontendstream.Memory  // state of the frontends
	cgroup     string                 // cgroup whose sockets can use services; "": none
	pods6      netip.Prefix
	mtu        uint16
	proxies    func(policytable.Proxy) (net.Listener, error) // nil: none can attach
	tun        string                                        // device node of TAP devices; "": the machine's
}

var (
	cidr4 = netip.MustParsePrefix("10.99.0.0/24")
	cidr6 = netip.MustParsePrefix("fd00:99::/64")
)

func newWorld(t testing.TB) *world {
	w := &world{
		t: t, home: netnstest.New(t), dir: t.TempDir(), next: 2, pods4: cidr4, pods6: cidr6,
		leases:     &leases{held: map[workload.Owner][]netip.Addr{}},
		identities: &identities{held: map[workload.Owner]uint32{}},
	}
	bpf := filepath.Join(w.dir, "bpf")
	if err := os.Mkdir(bpf, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("bpf", bpf, "bpf", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(bpf, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return w
}

func (w *world) config() Config {
	cfg := Config{
		BPFDir: filepath.Join(w.dir, "bpf", "sluice"), PodCIDRs: []netip.Prefix{w.pods4, w.pods6}, MTU: w.mtu,
		Policy:         PolicyConfig{Mode: policyNone},
		ServiceDevices: []string{"kube-ipvs0", "vip*"}, NodeSysctls: "set", Events: EventsConfig{PerSecond: w.events},
		Connections: defaultConnections(),
	}
	cfg.Underlay, cfg.Masquerade, cfg.Routing = w.underlay, w.masquerade, w.routing
	cfg.Audit.Repair = true
	if w.frontends != nil {
		cfg.LoadBalancing.Mode, cfg.LoadBalancing.Cgroup = balancingOn, w.cgroup
	}
	if w.ranges != nil {
		cfg.PodCIDRs = nil
	}
	switch {
	case w.required:
		cfg.Policy.Mode = policyRequired
	case w.policies != nil:
		cfg.Policy.Mode = policyInit
	}
	return cfg
}

func (w *world) store() *record.Store {
	s, err := record.Open(filepath.Join(w.dir, "endpoints"), "boot-1", log.Discard())
	if err != nil {
		w.t.Fatal(err)
	}
	return s
}

// opened is a datapath whose background work is not started.
type opened struct {
	node    *datapath
	records *record.Store
}

// open opens the datapath, which adopts the state of its predecessor.
func (w *world) open() opened {
	w.t.Helper()
	records := w.store()
	a := around{
		instance: "test", bootID: "boot-1", home: w.home, log: log.Discard(), leases: w.leases, identities: w.identities,
		records: records, ranges: w.ranges, cluster: w.cluster, registry: w.registry,
		numbers:  filepath.Join(w.dir, "nodes.json"),
		policies: w.policies, patience: w.wait, frontends: w.frontends, frontendState: w.state,
		proxies: w.proxies, tun: w.tun,
	}
	if w.records != nil {
		a.records = w.records(records)
	}
	n, err := open(w.t.Context(), w.config(), a)
	if err != nil {
		_ = records.Close()
		w.t.Fatal(err)
	}
	return opened{n, records}
}

// start runs the datapath, and also the watch of kernel changes if repair is set.
func (w *world) start(repair bool) {
	w.t.Helper()
	r := w.open()
	if err := errors.Join(r.node.restore(w.t.Context()), r.node.Endpoints.Compare(w.t.Context())); err != nil {
		_, _ = r.node.Close(), r.records.Close()
		w.t.Fatal(err)
	}
	w.run(r, repair)
}

// run starts the background work of a restored datapath.
func (w *world) run(r opened, repair bool) {
	w.t.Helper()
	n, records := r.node, r.records
	ctx, cancel := context.WithCancel(context.Background())
	t := w.t
	var wg sync.WaitGroup
	for _, task := range n.tasks() {
		switch task.Name {
		case "kernel changes": // everything was compared
			if !repair {
				continue
			}
			task.Run = func(ctx context.Context) error { return n.Endpoints.Auditor.Watch(ctx, true) }
		case "audit", "policy", "conntrack of the host", "connections", "identities", "beliefs", "probes":
			continue // tests of these tasks run them themselves
		case "sockets":
			if w.cgroup == "" {
				continue
			}
		}
		wg.Go(func() {
			if err := errors.Join(task.Run(ctx), ctx.Err()); !errors.Is(err, context.Canceled) {
				t.Errorf("background work %q ended with %v", task.Name, err)
			}
		})
	}
	w.node, w.written = n, records
	w.stop = func() {
		if w.node == nil {
			return
		}
		w.node = nil
		cancel()
		wg.Wait()
		if err := errors.Join(n.Close(), records.Close()); err != nil {
			w.t.Error(err)
		}
	}
	w.t.Cleanup(w.stop)
}

// hostPortWarnings returns the warnings about host ports that are not in effect.
func (w *world) hostPortWarnings() []string {
	lines := w.node.Endpoints.Warnings()
	if w.node.Services != nil {
		lines = append(lines, w.node.Services.HostPorts.Warnings()...)
	}
	return lines
}

type pod struct {
	t     testing.TB
	ns    *netns.Namespace
	owner workload.Owner
	spec  endpoint.Spec
	ep    endpoint.Endpoint
}

func (w *world) spec(name string, ns *netns.Namespace) endpoint.Spec {
	a4, a6 := w.pods4.Addr().As4(), w.pods6.Addr().As16()
	binary.BigEndian.PutUint16(a4[2:], w.next)
	binary.BigEndian.PutUint16(a6[14:], w.next)
	w.next++
	return endpoint.Spec{
		Owner: workload.Owner{ContainerID: name, Interface: "eth0"}, Netns: pathOf(ns),
		Addrs: []netip.Addr{netip.AddrFrom4(a4), netip.AddrFrom16(a6)},
	}
}

func (w *world) pod(name string) *pod { return w.podWith(name, func(*endpoint.Spec) {}) }

// podWith creates a pod from a request that change may modify.
func (w *world) podWith(name string, change func(*endpoint.Spec)) *pod {
	w.t.Helper()
	ns := netnstest.New(w.t)
	p := &pod{t: w.t, ns: ns, spec: w.spec(name, ns)}
	change(&p.spec)
	p.owner = p.spec.Owner
	var err error
	if p.ep, err = w.node.Endpoints.Lifecycle.Create(w.t.Context(), p.spec, false); err != nil {
		w.t.Fatal(err)
	}
	return p
}

// delete deletes an endpoint as its manager does.
func (w *world) delete(o workload.Owner) (existed bool, err error) {
	_, existed, err = w.node.Endpoints.Lifecycle.Remove(w.t.Context(), o, lifecycle.Removal{})
	return existed, err
}

// counted returns how many packets the programs counted for a reason.
func (w *world) counted(r event.Reason) uint64 {
	w.t.Helper()
	counters, err := w.node.Kernel.Events.Metrics()
	if err != nil {
		w.t.Fatal(err)
	}
	var n uint64
	for _, c := range counters {
		if c.Reason == r {
			n += c.Packets
		}
	}
	return n
}

func (p *pod) listen(network, addr string) (c any) {
	p.t.Helper()
	err := p.ns.Do(func() (err error) {
		if network == "tcp" {
			c, err = net.Listen(network, addr)
		} else {
			c, err = net.ListenPacket(network, addr)
		}
		return err
	})
	if err != nil {
		p.t.Fatalf("listen in %s: %v", p.owner, err)
	}
	return c
}

func dialIn(ns *netns.Namespace, network string, to netip.AddrPort, timeout time.Duration) (c net.Conn, err error) {
	err = ns.Do(func() error {
		c, err = net.DialTimeout(network, to.String(), timeout)
		return err
	})
	if err != nil {
		return nil, err
	}
	return c, abortOnClose(c)
}

// abortOnClose makes close reset the connection. Otherwise a socket whose last segments the peer can no longer
// acknowledge, because its endpoint was deleted, outlives its process by minutes and keeps its namespace alive.
func abortOnClose(c net.Conn) error {
	if tcp, ok := c.(*net.TCPConn); ok {
		return tcp.SetLinger(0)
	}
	return nil
}

// echo listens on a TCP port of the pod and sends back what it receives.
func (p *pod) echo(a netip.Addr) netip.AddrPort { return p.echoAt(netip.AddrPortFrom(a, 0)) }

// echoAt is like echo, but at the given port; 0: any free port.
func (p *pod) echoAt(at netip.AddrPort) netip.AddrPort {
	p.t.Helper()
	a, l := at.Addr(), p.listen("tcp", at.String()).(net.Listener)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			if err := abortOnClose(c); err != nil {
				p.t.Error(err)
			}
			stop := context.AfterFunc(ctx, func() { c.Close() })
			wg.Go(func() {
				defer stop()
				defer c.Close()
				buf := make([]byte, 4096)
				for {
					n, err := c.Read(buf)
					if err != nil {
						return
					}
					if _, err := c.Write(buf[:n]); err != nil {
						return
					}
				}
			})
		}
	})
	p.t.Cleanup(func() { l.Close(); cancel(); wg.Wait() })
	return netip.AddrPortFrom(a, uint16(l.Addr().(*net.TCPAddr).Port))
}

func exchange(c net.Conn, text string, timeout time.Duration) error {
	if err := c.SetDeadline(time.Now().Add(timeout)); err != nil {
		return err
	}
	if _, err := c.Write([]byte(text)); err != nil {
		return err
	}
	buf := make([]byte, len(text))
	for n := 0; n < len(buf); {
		m, err := c.Read(buf[n:])
		if err != nil {
			return err
		}
		n += m
	}
	if string(buf) != text {
		return fmt.Errorf("got %q, want %q", buf, text)
	}
	return nil
}

// talk opens a TCP connection and exchanges a few bytes.
func talk(from *netns.Namespace, to netip.AddrPort, timeout time.Duration) error {
	c, err := dialIn(from, "tcp", to, timeout)
	if err != nil {
		return err
	}
	defer c.Close()
	return exchange(c, "hello", timeout)
}

func subjects(ds []endpoint.Difference) []string {
	var s []string
	for _, d := range ds {
		s = append(s, d.Subject)
	}
	slices.Sort(s)
	return slices.Compact(s)
}
