// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
)

// perMinute is the number of short connections that a client makes per minute to one backend on another node. The test
// makes them faster, and only a part of them, with budgets reduced accordingly, unless allEnv is set: all of them would
// keep two CPUs busy for minutes.
const (
	perMinute = 64_000
	part      = 8
	allEnv    = "SLUICE_SHORT_CONNECTIONS"
)

// TestKernelShortConnectionsToOneBackendAreAllMade: as many short connections as a client makes in a minute (perMinute)
// all succeed: from a pod to a cluster IP, translated per packet, and from an outside client to a node port, with the
// backend on another node. The collector runs, or stops after its first pass.
func TestKernelShortConnectionsToOneBackendAreAllMade(t *testing.T) {
	each := perMinute
	if os.Getenv(allEnv) == "" {
		each /= part
	}
	for _, collects := range []bool{true, false} {
		t.Run(map[bool]string{true: "with a collector", false: "without a collector"}[collects], func(t *testing.T) {
			f := newFabric(t, RoutingOverlay, false)
			n := &serviceNode{T: t, runner: f.a.runner}
			for _, node := range []*fabricNode{f.a, f.b} {
				col, err := node.k.Connections.NewCollector(conntrack.CollectorOptions{})
				must(t, "make a collector", err)
				collect(t, col)
				if each < perMinute {
					shrinkBudgets(t, node.k)
				}
				if collects {
					go func() { _ = col.Run(t.Context()) }()
				}
			}
			type client struct {
				what string
				from netns.NsHandle
				to   netip.AddrPort
			}
			var clients []client
			for i, own := range []netip.Addr{f.a.addr4, f.a.addr6} {
				backend := netip.AddrPortFrom(f.b.pod.Addrs()[i], 8080)
				closeAfterClients(t, f.b.pod.ns, backend)
				vip, nodePort := serviceAddr(own, 1), netip.AddrPortFrom(own, 30080)
				n.lead(vip, feAddress, backend)
				n.lead(nodePort, feNode, backend)
				family := fmt.Sprintf("IPv%d, ", 4+2*i)
				clients = append(clients, client{family + "a pod", f.a.pod.ns, vip},
					client{family + "a sender outside", f.outsider, nodePort})
			}
			a, b := f.a.counters(t), f.b.counters(t)
			var all sync.WaitGroup
			for _, c := range clients {
				all.Go(func() {
					began := time.Now()
					made, err := connectFromEachPort(c.from, c.to, each)
					t.Logf("%s: %d connections in %v", c.what, made, time.Since(began))
					if err != nil {
						t.Errorf("%s: connection %d of %d: %v", c.what, made, each, err)
					}
				})
			}
			all.Wait()
			wantNoDrops(t, "node of the clients", f.a.gained(t, a))
			wantNoDrops(t, "node of the backend", f.b.gained(t, b))
		})
	}
}

// shrinkBudgets divides all budgets of a node, until the next pass of its collector.
func shrinkBudgets(t *testing.T, k *Kernel) {
	t.Helper()
	m := k.Pins.Map(bpf.MapsMapSlBudget)
	for i := range m.MaxEntries() {
		var b bpf.MapsSlBudget
		must(t, "read a budget", m.Lookup(i, &b))
		if b.Limit == 0 {
			continue
		}
		b.Limit /= part
		must(t, "write a budget", m.Put(i, b))
	}
}

// closeAfterClients accepts connections in a namespace and closes each one after its client has.
func closeAfterClients(t *testing.T, ns netns.NsHandle, at netip.AddrPort) {
	t.Helper()
	fd := -1
	inNetns(t, ns, func() {
		var err error
		fd, err = unix.Socket(familyOf(at), unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		must(t, "open a socket", err)
		must(t, "bind", unix.Bind(fd, sockaddr(familyOf(at), at)))
		must(t, "listen", unix.Listen(fd, 128))
	})
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			c, _, err := unix.Accept(fd)
			if err != nil {
				return
			}
			_, _ = unix.Read(c, make([]byte, 1))
			_ = unix.Close(c)
		}
	}()
	t.Cleanup(func() {
		_ = unix.Shutdown(fd, unix.SHUT_RDWR)
		<-ended
		_ = unix.Close(fd)
	})
}

// connectFromEachPort connects from each of n ports, closes the connection and waits until the server has
// closed it, too. It returns how many connections were made.
func connectFromEachPort(from netns.NsHandle, to netip.AddrPort, n int) (made int, err error) {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		runtime.LockOSThread() // never unlocked: the thread ends here
		if err = netns.Set(from); err != nil {
			return
		}
		if err = os.WriteFile("/proc/sys/net/ipv4/ip_local_port_range", []byte("1024 65535"), 0); err != nil {
			return
		}
		for ; made < n && err == nil; made++ {
			if err = connectFromPort(uint16(1024+made), to); err != nil {
				return
			}
		}
	}()
	<-ended
	return made, err
}

func connectFromPort(port uint16, to netip.AddrPort) error {
	fd, err := unix.Socket(familyOf(to), unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	everywhere := netip.IPv4Unspecified()
	if to.Addr().Is6() {
		everywhere = netip.IPv6Unspecified()
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1); err != nil {
			return err
		}
	}
	if err := unix.Bind(fd, sockaddr(familyOf(to), netip.AddrPortFrom(everywhere, port))); err != nil {
		return fmt.Errorf("bind port %d: %w", port, err)
	}
	// a few retransmissions of the SYN instead of two minutes of them
	if err := unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_SYNCNT, 3); err != nil {
		return err
	}
	if err := unix.Connect(fd, sockaddr(familyOf(to), to)); err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	if err := unix.Shutdown(fd, unix.SHUT_WR); err != nil {
		return fmt.Errorf("close: %w", err)
	}
	if _, err := unix.Read(fd, make([]byte, 1)); err != nil {
		return fmt.Errorf("wait for the end: %w", err)
	}
	return nil
}

func familyOf(at netip.AddrPort) int {
	if at.Addr().Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}
