// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package netdev

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns/netnstest"
)

// testDevice returns the veth pair of the n-th endpoint.
func testDevice(n byte) endpoint.Device {
	return endpoint.Device{
		HostName: fmt.Sprint("host", n), HostMAC: endpoint.MAC{2, 0, 0, 0, 1, n}, Name: "eth0", MAC: endpoint.MAC{2, 0, 0, 0, 2, n}, MTU: 1500,
		Addrs: []netip.Addr{netip.AddrFrom4([4]byte{10, 99, 0, n}), netip.AddrFrom16([16]byte{0xfd, 15: n})},
	}
}

// addressed adds addresses to a node, from which it can send.
func (n *Netdev) addressed(t *testing.T) {
	t.Helper()
	lo, err := n.reads.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range []string{"10.99.0.250/32", "fd00::250/128"} {
		addr, err := netlink.ParseAddr(a)
		if err != nil {
			t.Fatal(err)
		}
		if err := n.changes.AddrAdd(lo, addr); err != nil {
			t.Fatal(err)
		}
	}
}

// configured creates and configures a device.
func (n *Netdev) configured(t *testing.T, d endpoint.Device) (*netns.Namespace, *container, endpoint.Device) {
	t.Helper()
	ns := netnstest.New(t)
	c := &container{ns: ns}
	t.Cleanup(func() {
		if c.nl != nil {
			c.nl.Close()
		}
		if c.conn != nil {
			c.conn.Close()
		}
	})
	d, err := n.Create(c, d)
	if err == nil {
		err = n.Configure(c, d)
	}
	if err != nil {
		t.Fatal(err)
	}
	return ns, c, d
}

// TestKernelFirstDatagramBehindActivateArrives uses datagrams, because a lost one is not sent
// again.
func TestKernelFirstDatagramBehindActivateArrives(t *testing.T) {
	n := newNode(t)
	n.addressed(t)
	for i := range byte(100) {
		ns, c, d := n.configured(t, testDevice(i+1))
		var inside *net.UDPConn
		if err := ns.Do(func() (err error) { inside, err = net.ListenUDP("udp", nil); return err }); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { inside.Close() })
		if _, err := n.Activate(c, d); err != nil {
			t.Fatal(err)
		}
		for _, a := range d.Addrs {
			to := net.UDPAddrFromAddrPort(netip.AddrPortFrom(a, inside.LocalAddr().(*net.UDPAddr).AddrPort().Port()))
			err := n.o.Home.Do(func() error {
				conn, err := net.DialUDP("udp", nil, to)
				if err != nil {
					return err
				}
				_, err = conn.Write([]byte(a.String()))
				return errors.Join(err, conn.Close())
			})
			if err != nil {
				t.Fatal(err)
			}
		}
		for range d.Addrs {
			if err := inside.SetReadDeadline(time.Now().Add(servicetest.Patience)); err != nil {
				t.Fatal(err)
			}
			if _, err := inside.Read(make([]byte, 100)); err != nil {
				t.Fatalf("endpoint %d: %v", i, err)
			}
		}
	}
}

func TestKernelActivationNamesWhatDoesNotCome(t *testing.T) {
	n := newNode(t)
	_, c, d := n.configured(t, testDevice(1))
	look := func() error { return n.awaitTraffic(c, d, 0) }
	if err := look(); !errors.Is(err, os.ErrDeadlineExceeded) || !strings.Contains(err.Error(), "host1") {
		t.Errorf("a device that is down: %v, want ErrDeadlineExceeded for host1", err)
	}
	if _, err := n.Activate(c, d); err != nil {
		t.Fatal(err)
	}
	if err := look(); err != nil {
		t.Errorf("an active device: %v", err)
	}
	other := d
	other.Addrs = append(other.Addrs[:1:1], netip.MustParseAddr("fd00::77"))
	err := n.awaitTraffic(c, other, 0)
	if !errors.Is(err, os.ErrDeadlineExceeded) || !strings.Contains(err.Error(), "fd00::77") {
		t.Errorf("a missing address: %v, want ErrDeadlineExceeded for fd00::77", err)
	}
}
