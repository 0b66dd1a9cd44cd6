// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package cluster

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// openFlows opens connections, alternating between the addresses.
func openFlows(t *testing.T, from, to pod.Pod, count int) (flows []flow) {
	t.Helper()
	for i := range count {
		f, err := openFlow(t.Context(), from, to, to.Addresses()[i%2])
		t.Cleanup(f.close)
		if err != nil {
			t.Fatalf("connection %d: %v", i, err)
		}
		flows = append(flows, f)
	}
	return flows
}

// TestPodsOfNodesSpeakWithoutEtcd stops etcd while 100 connections between pods of two nodes exchange data; with all
// faults, for a minute. Meanwhile, pods that know each other open new connections.
func TestPodsOfNodesSpeakWithoutEtcd(t *testing.T) {
	t.Parallel()
	away := 5 * time.Second
	if allFaults() {
		away = time.Minute
	}
	for _, mode := range modes {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t, devnode.ClusterOptions{Nodes: 2, Routing: mode})
			from, to := c.nodes[0].add(t, "client"), c.nodes[1].add(t, "web")
			c.nodes[0].identityOf(t, to, c.nodes[1])
			c.nodes[1].identityOf(t, from, c.nodes[0])
			flows := openFlows(t, from, to, 100)
			live := func(when string) {
				t.Helper()
				for i, f := range flows {
					if err := f.speak(); err != nil {
						t.Fatalf("%s: connection %d: %v", when, i, err)
					}
				}
			}
			live("at first")
			if err := c.Hub().Kill(t.Context(), devnode.Etcd); err != nil {
				t.Fatal(err)
			}
			rounds := 0
			for began := time.Now(); time.Since(began) < away; rounds++ {
				live("without etcd")
				for i := range 4 {
					ends := []pod.Pod{from, to}
					if err := exchange(t.Context(), ends[i%2], ends[1-i%2], ends[1-i%2].Addresses()[i/2]); err != nil {
						t.Fatalf("a new connection without etcd: %v", err)
					}
				}
			}
			if err := c.Hub().Start(t.Context(), devnode.Etcd); err != nil {
				t.Fatal(err)
			}
			live("etcd is back")
			third := c.nodes[0].add(t, "third")
			c.nodes[1].identityOf(t, third, c.nodes[0])
			live("a pod has come")
			t.Logf("%d rounds in %s without etcd", rounds, away)
		})
	}
}

// carry sends data over a connection and requires that all of it arrives.
func (f flow) carry(size int) error {
	data := make([]byte, size)
	rand.Read(data) //nolint:errcheck // never fails
	deadline := time.Now().Add(servicetest.Patience)
	for _, pair := range [][2]*net.TCPConn{{f.client, f.server}, {f.server, f.client}} {
		if err := errors.Join(pair[0].SetDeadline(deadline), pair[1].SetDeadline(deadline)); err != nil {
			return err
		}
		sent := make(chan error, 1)
		go func() {
			_, err := pair[0].Write(data)
			sent <- err
		}()
		got, err := io.CopyN(io.Discard, pair[1], int64(size))
		if err = errors.Join(err, <-sent); err != nil {
			return fmt.Errorf("%d of %d bytes: %w", got, size, err)
		}
	}
	return nil
}

// fabricMTU sets the MTU of the nodes' uplinks and of the bridge ports.
func (c *testCluster) fabricMTU(t *testing.T, mtu int) {
	t.Helper()
	set := func(names ...string) func() error {
		return func() (err error) {
			for _, name := range names {
				link, e := netlink.LinkByName(name)
				if e == nil {
					e = netlink.LinkSetMTU(link, mtu)
				}
				err = errors.Join(err, e)
			}
			return err
		}
	}
	var ports []string
	for i, n := range c.nodes {
		ports = append(ports, fmt.Sprint("node", i+1))
		if err := pod.In(n.Netns(), set("eth0")); err != nil {
			t.Fatal(err)
		}
	}
	if err := pod.In(c.Hub().Netns(), set(ports...)); err != nil {
		t.Fatal(err)
	}
}

// pathMTU returns the path MTU from a pod to an address, after the pod has sent a packet of its device's MTU.
func pathMTU(p pod.Pod, to netip.Addr) (mtu int, err error) {
	err = pod.In(p.Netns, func() error {
		family, level, option := unix.AF_INET, unix.IPPROTO_IP, unix.IP_MTU
		discover, do := unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DO
		var address unix.Sockaddr = &unix.SockaddrInet4{Port: 9, Addr: [4]byte(to.AsSlice()[:4])}
		headers := 28
		if to.Is6() {
			family, level, option = unix.AF_INET6, unix.IPPROTO_IPV6, unix.IPV6_MTU
			discover, do = unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_DO
			address, headers = &unix.SockaddrInet6{Port: 9, Addr: to.As16()}, 48
		}
		fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		if err := errors.Join(unix.SetsockoptInt(fd, level, discover, do), unix.Connect(fd, address)); err != nil {
			return err
		}
		if mtu, err = unix.GetsockoptInt(fd, level, option); err != nil {
			return err
		}
		// rejected if it exceeds the path MTU that the pod has learned meanwhile
		if _, err := unix.Write(fd, make([]byte, mtu-headers)); err != nil && !errors.Is(err, unix.EMSGSIZE) &&
			!errors.Is(err, unix.ECONNREFUSED) {
			return err
		}
		return nil
	})
	return mtu, err
}

// TestConnectionsOutliveASmallerFabric lowers the MTU between the nodes while connections carry data. The connections
// continue, and pods learn the lower MTU. The connections also continue after the MTU was restored.
func TestConnectionsOutliveASmallerFabric(t *testing.T) {
	t.Parallel()
	for _, mode := range modes {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t, devnode.ClusterOptions{Nodes: 2, Routing: mode})
			from, to := c.nodes[0].add(t, "client"), c.nodes[1].add(t, "web")
			c.nodes[0].identityOf(t, to, c.nodes[1])
			c.nodes[1].identityOf(t, from, c.nodes[0])
			flows := openFlows(t, from, to, 10)
			carry := func(when string) {
				t.Helper()
				for i, f := range flows {
					if err := f.carry(1 << 20); err != nil {
						t.Fatalf("%s: connection %d: %v", when, i, err)
					}
				}
			}
			carry("at first")
			before, err := pathMTU(from, to.IPv4)
			if err != nil {
				t.Fatal(err)
			}
			const less = 60 // in a tunnel, too, the remaining MTU must be at least 1280, the IPv6 minimum
			want, usual := before-less, before
			if mode == "overlay" {
				usual += 50
			}
			c.fabricMTU(t, usual-less)
			carry("in a smaller fabric")
			for i, ends := range [][2]pod.Pod{{from, to}, {to, from}} {
				for _, a := range ends[1].Addresses() {
					servicetest.EventuallyNil(t, fmt.Sprintf("pod %d learns the path MTU to %s", i, a), func() error {
						if got, err := pathMTU(ends[0], a); err != nil || got != want {
							return fmt.Errorf("%d bytes, want %d: %w", got, want, err)
						}
						return nil
					})
				}
			}
			for _, a := range to.Addresses() {
				if err := exchange(t.Context(), from, to, a); err != nil {
					t.Errorf("a new connection with a lower MTU: %v", err)
				}
			}
			c.fabricMTU(t, usual)
			carry("with the restored MTU")
			t.Logf("path MTU before: %d, lowered: %d", before, want)
		})
	}
}
