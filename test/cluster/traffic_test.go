// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package cluster

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// modes are the routing modes with traffic between nodes.
var modes = []string{"overlay", "native"}

// host returns the node itself as an end of connections.
func (n *node) host() pod.Pod { return pod.Pod{Name: n.Name(), Netns: n.Netns()} }

// overlay returns the node's addresses inside its pod ranges.
func (n *node) overlay() (all []netip.Addr) {
	for _, p := range n.PodCIDRs() {
		all = append(all, p.Addr().Next())
	}
	return all
}

// counted returns the node's count of a reason, in both directions.
func (n *node) counted(t *testing.T, reason string) (sum uint64) {
	t.Helper()
	out, err := n.run(t.Context(), "map", "dump", "sl_metrics")
	if err != nil {
		t.Fatal(err)
	}
	for line := range bytes.Lines(out) {
		var e struct{ Key, Value string }
		if err := json.Unmarshal(line, &e); err != nil {
			t.Fatal(err)
		}
		if strings.HasPrefix(e.Key, reason+" ") {
			count, err := strconv.ParseUint(strings.Fields(e.Value)[1], 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			sum += count
		}
	}
	return sum
}

// exchange sends a datagram and a stream to an address, and requires both back.
func exchange(ctx context.Context, from, to pod.Pod, address netip.Addr) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	if err := pod.ExchangeUDP(ctx, from, to, address, []byte("datagram")); err != nil {
		return err
	}
	return pod.ExchangeTCP(ctx, from, to, address, bytes.Repeat([]byte("stream"), 10_000))
}

// TestPodsReachEveryPodAndHost sends datagrams and streams between the pods and hosts of three nodes, in both
// families, and checks that the datapath's programs handled them.
func TestPodsReachEveryPodAndHost(t *testing.T) {
	t.Parallel()
	for _, mode := range modes {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t, devnode.ClusterOptions{Nodes: 3, Routing: mode})
			// A node's record is written again when its datapath has addresses: until then others drop what it sends.
			for _, n := range c.nodes {
				n.kernelHasHosts(t, c.nodes)
			}
			var pods []pod.Pod
			for i, n := range c.nodes {
				pods = append(pods, n.add(t, fmt.Sprint("app-", i)))
			}
			for i, p := range pods {
				for _, n := range c.nodes {
					if n != c.nodes[i] {
						n.identityOf(t, p, c.nodes[i])
					}
				}
			}
			for i, from := range pods {
				for k, to := range pods {
					if i == k {
						continue
					}
					for _, a := range to.Addresses() {
						// The first packets may arrive before the nodes have learned each other's addresses.
						servicetest.EventuallyNil(t, fmt.Sprintf("%s to %s", from.Name, a), func() error {
							return exchange(t.Context(), from, to, a)
						})
						if err := exchange(t.Context(), c.nodes[i].host(), to, a); err != nil {
							t.Errorf("host %s to pod %s: %v", c.nodes[i].Name(), a, err)
						}
					}
					for _, a := range append(c.nodes[k].Addresses(), c.nodes[k].overlay()...) {
						if err := exchange(t.Context(), from, c.nodes[k].host(), a); err != nil {
							t.Errorf("pod %s to host %s: %v", from.IPv4, a, err)
						}
					}
				}
			}
			for _, n := range c.nodes {
				if n.counted(t, "forwarded-"+mode) == 0 {
					t.Errorf("the programs of %s have sent no packets", n.Name())
				}
				for _, reason := range []string{"no-node", "unknown-node", "spoofed-node", "spoofed-identity", "tunnel-key"} {
					if got := n.counted(t, reason); got != 0 {
						t.Errorf("%s has dropped %d packets as %s", n.Name(), got, reason)
					}
				}
			}
		})
	}
}

const webAcrossNodes = `
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: web, namespace: test}
spec:
  podSelector: {matchLabels: {app: web}}
  ingress:
  - from: [{podSelector: {matchLabels: {app: client}}}]
`

// enforced writes a manifest for all nodes and waits until each kernel denies what the manifest denies.
func (c *testCluster) enforced(t *testing.T, manifest string) {
	t.Helper()
	path := filepath.Join(c.Hub().PolicyDir(), "policy.yaml")
	if err := os.WriteFile(path, []byte(manifest), 0o644); err != nil { //nolint:gosec // sluice-policy reads the file
		t.Fatal(err)
	}
}

// TestPolicyHoldsAcrossNodes allows only pods with one label to connect to a pod on another node. The VNI contains the
// identity.
func TestPolicyHoldsAcrossNodes(t *testing.T) {
	t.Parallel()
	for _, mode := range modes {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t, devnode.ClusterOptions{Nodes: 3, Routing: mode})
			web, client, visitor := c.nodes[0].add(t, "web"), c.nodes[1].add(t, "client"), c.nodes[2].add(t, "visitor")
			number := c.nodes[0].identityOf(t, client, c.nodes[1])
			c.nodes[0].identityOf(t, visitor, c.nodes[2])
			c.enforced(t, webAcrossNodes)
			for _, a := range web.Addresses() {
				servicetest.EventuallyNil(t, "the visitor is denied", func() error {
					ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
					defer cancel()
					if err := exchange(ctx, visitor, web, a); err == nil {
						return fmt.Errorf("the visitor has reached %s", a)
					}
					return nil
				})
				servicetest.EventuallyNil(t, "the client is let in", func() error {
					return exchange(t.Context(), client, web, a)
				})
			}
			if mode == "overlay" {
				vni := c.sniff(t, func() { _ = exchange(t.Context(), client, web, web.IPv4) })
				if !vni[number] {
					t.Errorf("the fabric has seen VNIs %v, want %d of the client", vni, number)
				}
			}
		})
	}
}

// sniff returns the VNIs that pass the bridge between the nodes while fn runs.
func (c *testCluster) sniff(t *testing.T, fn func()) map[uint32]bool {
	t.Helper()
	fd := -1
	err := pod.In(c.Hub().Netns(), func() (err error) {
		const every = 0x0300 // ETH_P_ALL in network order
		fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, every)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	fn()
	seen := map[uint32]bool{}
	b := make([]byte, 1<<16)
	for {
		n, _, err := unix.Recvfrom(fd, b, 0)
		if err != nil {
			return seen
		}
		// Ethernet, IPv4 without options, UDP, VXLAN
		const udp = 14 + 20
		if n > udp+16 && binary.BigEndian.Uint16(b[12:]) == unix.ETH_P_IP && b[23] == unix.IPPROTO_UDP &&
			binary.BigEndian.Uint16(b[udp+2:]) == 4789 {
			seen[binary.BigEndian.Uint32(b[udp+12:])>>8] = true
		}
	}
}

// flow is a connection between nodes that both ends keep using.
type flow struct {
	client, server *net.TCPConn
}

func openFlow(ctx context.Context, from, to pod.Pod, address netip.Addr) (f flow, err error) {
	l, err := to.Listen(netip.AddrPortFrom(address, 0))
	if err != nil {
		return f, err
	}
	defer l.Close()
	if f.client, err = from.Dial(ctx, netip.AddrPortFrom(address, l.Addr().(*net.TCPAddr).AddrPort().Port())); err != nil {
		return f, err
	}
	f.server, err = l.AcceptTCP()
	return f, err
}

// speak sends a byte in each direction, which must arrive within the tests' patience.
func (f flow) speak() error {
	deadline := time.Now().Add(servicetest.Patience)
	b := []byte{1}
	for _, pair := range [][2]*net.TCPConn{{f.client, f.server}, {f.server, f.client}} {
		_ = pair[0].SetDeadline(deadline)
		_ = pair[1].SetDeadline(deadline)
		if _, err := pair[0].Write(b); err != nil {
			return err
		}
		if _, err := pair[1].Read(b); err != nil {
			return err
		}
	}
	return nil
}

func (f flow) close() {
	for _, c := range []*net.TCPConn{f.client, f.server} {
		if c != nil {
			_ = c.Close()
		}
	}
}

// TestConnectionsAcrossNodesOutliveFaults keeps 100 connections between pods of two nodes open, while it kills each
// service on both nodes, and deletes devices, routes, programs and neighbours of the datapath. No connection is
// reset.
func TestConnectionsAcrossNodesOutliveFaults(t *testing.T) {
	t.Parallel()
	for _, mode := range modes {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t, devnode.ClusterOptions{Nodes: 2, Routing: mode})
			a, b := c.nodes[0], c.nodes[1]
			from, to := a.add(t, "client"), b.add(t, "web")
			a.identityOf(t, to, b)
			b.identityOf(t, from, a)
			var flows []flow
			for i := range 100 {
				f, err := openFlow(t.Context(), from, to, to.Addresses()[i%2])
				defer f.close()
				if err != nil {
					t.Fatal(err)
				}
				flows = append(flows, f)
			}
			live := func(when string) {
				t.Helper()
				for i, f := range flows {
					if err := f.speak(); err != nil {
						t.Fatalf("%s: connection %d: %v", when, i, err)
					}
				}
			}
			live("at first")
			for _, n := range c.nodes {
				for _, service := range n.Services() {
					n.kill(t, service)
					live(service + " of " + n.Name() + " was killed")
					if err := n.Start(t.Context(), service); err != nil {
						t.Fatal(err)
					}
					live(service + " of " + n.Name() + " is back")
				}
			}
			for _, fault := range faultsOf(mode) {
				if err := pod.In(a.Netns(), fault.do); err != nil {
					t.Fatalf("%s: %v", fault.what, err)
				}
				live(fault.what)
			}
		})
	}
}

// kill ends a service with SIGKILL.
func (n *node) kill(t *testing.T, service string) {
	t.Helper()
	pid, err := n.PID(service)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	servicetest.Eventually(t, service+" has ended", func() bool { _, err := n.PID(service); return err != nil })
}

// fault is a change of the datapath's objects on a node.
type fault struct {
	what string
	do   func() error
}

// faultsOf returns the faults of a routing mode, executed in the namespace of a node.
func faultsOf(mode string) []fault {
	faults := []fault{{"the routes to the other node were deleted", deleteRoutes}}
	if mode == "overlay" {
		return append(faults,
			fault{"the programs of the tunnel were taken off", func() error { return onTunnel(deletePrograms) }},
			fault{"the tunnel was set down", func() error { return onTunnel(netlink.LinkSetDown) }},
			fault{"the tunnel was narrowed", func() error {
				return onTunnel(func(l netlink.Link) error { return netlink.LinkSetMTU(l, 1300) })
			}},
			fault{"the tunnel was deleted", func() error { return onTunnel(netlink.LinkDel) }})
	}
	return append(faults,
		fault{"the programs of the uplink were taken off", func() error { return onUplink(deletePrograms) }},
		fault{"the neighbours were deleted", func() error { return onUplink(deleteNeighbours) }})
}

func onTunnel(do func(netlink.Link) error) error {
	links, err := netlink.LinkList()
	if err != nil {
		return err
	}
	for _, l := range links {
		if l.Type() == "vxlan" {
			return do(l)
		}
	}
	return errors.New("there is no tunnel")
}

// onUplink calls do with the device of the default route.
func onUplink(do func(netlink.Link) error) error {
	routes, err := netlink.RouteList(nil, netlink.FAMILY_V4)
	if err != nil {
		return err
	}
	for _, r := range routes {
		if ones, _ := r.Dst.Mask.Size(); ones == 0 {
			l, err := netlink.LinkByIndex(r.LinkIndex)
			return errors.Join(err, do(l))
		}
	}
	return errors.New("there is no default route")
}

// deletePrograms detaches every program from a device. It removes tcx links or, on kernels without tcx, the clsact
// qdisc with its filters.
func deletePrograms(l netlink.Link) error {
	detached := 0
	for _, attach := range []ebpf.AttachType{ebpf.AttachTCXIngress, ebpf.AttachTCXEgress} {
		at := link.QueryOptions{Target: l.Attrs().Index, Attach: attach}
		r, err := link.QueryPrograms(at)
		if errors.Is(err, unix.EINVAL) || errors.Is(err, ebpf.ErrNotSupported) {
			break
		}
		if err != nil {
			return err
		}
		for _, p := range r.Programs {
			prog, err := ebpf.NewProgramFromID(p.ID)
			if err != nil {
				return err
			}
			err = link.RawDetachProgram(link.RawDetachProgramOptions{Target: at.Target, Program: prog, Attach: attach})
			if err := errors.Join(err, prog.Close()); err != nil {
				return err
			}
			detached++
		}
	}
	if detached > 0 {
		return nil
	}
	return netlink.QdiscDel(&netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: l.Attrs().Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
	}})
}

func deleteNeighbours(l netlink.Link) error {
	neighbours, err := netlink.NeighList(l.Attrs().Index, netlink.FAMILY_ALL)
	for _, n := range neighbours {
		if n.State&netlink.NUD_NOARP == 0 {
			err = errors.Join(err, netlink.NeighDel(&n))
		}
	}
	return err
}

// deleteRoutes deletes the routes to the ranges of other nodes: routes to more than one address and less than
// everything, except the routes to local pods.
func deleteRoutes() error {
	deleted := 0
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		routes, err := netlink.RouteList(nil, family)
		if err != nil {
			return err
		}
		for _, r := range routes {
			ones, bits := r.Dst.Mask.Size()
			if ones == 0 || ones == bits || r.Protocol == unix.RTPROT_KERNEL || r.Type != unix.RTN_UNICAST {
				continue
			}
			if err := netlink.RouteDel(&r); err != nil {
				return err
			}
			deleted++
		}
	}
	if deleted == 0 {
		return errors.New("there are none")
	}
	return nil
}
