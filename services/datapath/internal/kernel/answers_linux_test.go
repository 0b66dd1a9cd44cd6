// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
)

// masquerade makes a node translate the source of its pods' packets to outside to its own addresses, keeping
// the ports, and so track connections.
func (n *fabricNode) masquerade(t *testing.T) {
	t.Helper()
	inNetns(t, n.ns, func() {
		cmd := exec.Command("nft", "-f", "-")
		cmd.Stdin = strings.NewReader(`
			table inet outwards {
				chain post {
					type nat hook postrouting priority srcnat
					oifname "up0" ip saddr 10.244.0.0/16 ip daddr 192.0.2.99 masquerade
					oifname "up0" ip6 saddr fd00:244::/32 ip6 daddr 2001:db8::99 masquerade
				}
			}`)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("nft: %v: %s", err, out)
		}
	})
}

// dialFrom connects from a local port in a namespace, with socket options.
func dialFrom(
	t *testing.T, ns netns.NsHandle, network string, port uint16, to netip.AddrPort, options ...int,
) net.Conn {
	t.Helper()
	d := net.Dialer{Timeout: servicetest.Patience, Control: control(options)}
	d.LocalAddr = &net.TCPAddr{Port: int(port)}
	if network[:3] == "udp" {
		d.LocalAddr = &net.UDPAddr{Port: int(port)}
	}
	var c net.Conn
	var err error
	inNetns(t, ns, func() { c, err = d.Dial(network, to.String()) })
	must(t, fmt.Sprintf("connect from port %d to %v by %s", port, to, network), err)
	t.Cleanup(func() { c.Close() })
	must(t, "deadline", c.SetDeadline(time.Now().Add(servicetest.Patience)))
	return c
}

// control sets socket options, always including SO_REUSEADDR.
func control(options []int) func(string, string, syscall.RawConn) error {
	return func(_, _ string, c syscall.RawConn) error {
		return c.Control(func(fd uintptr) {
			for _, o := range append(options, unix.SO_REUSEADDR) {
				_ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, o, 1)
			}
		})
	}
}

// wantAnswers exchanges a line with a server of tell over a connection.
func wantAnswers(t *testing.T, what string, c net.Conn, server netip.AddrPort) {
	t.Helper()
	must(t, "deadline", c.SetDeadline(time.Now().Add(2*time.Second)))
	if _, err := c.Write([]byte("anybody?\n")); err != nil {
		t.Errorf("%s: send to %v: %v", what, server, err)
		return
	}
	b := make([]byte, 200)
	n, err := c.Read(b)
	if err != nil || !strings.HasPrefix(string(b[:n]), server.String()+" to ") {
		t.Errorf("%s: %q answers, %v, want %v", what, b[:n], err, server)
	}
}

// TestKernelAnswersToTheNodeAskForNoService: connections of the host, or of a pod behind the host's masquerade,
// receive their answers. That holds even if the local port is also a node port, or the port of a service at the
// same address.
func TestKernelAnswersToTheNodeAskForNoService(t *testing.T) {
	eachFabric(t, func(t *testing.T, f *fabric, _ Routing) {
		n := &serviceNode{T: t, runner: f.a.runner}
		f.a.masquerade(t)
		second := f.a.newPod(t, 20)
		for i, own := range []netip.Addr{f.a.addr4, f.a.addr6} {
			network := fmt.Sprint(4 + 2*i)
			n.lead(netip.AddrPortFrom(own, 30080), feNode, netip.AddrPortFrom(f.a.pod.Addrs()[i], 8080))
			n.lead(netip.AddrPortFrom(own, 30081), feNode) // without a backend
			// an external address that is also an address of the node
			n.lead(netip.AddrPortFrom(own, 443), feAddress, netip.AddrPortFrom(f.b.pod.Addrs()[i], 8080))
			for _, server := range []struct {
				what string
				in   netns.NsHandle
				at   netip.Addr
			}{
				{"outside", f.outsider, f.outsideAddrs()[i]},
				{"the host of another node", f.b.ns, []netip.Addr{f.b.addr4, f.b.addr6}[i]},
				{"a pod of another node", f.b.pod.ns, f.b.pod.Addrs()[i]},
			} {
				for j, port := range []uint16{30080, 30081, 443} {
					at := netip.AddrPortFrom(server.at, 7000+uint16(10*i+j))
					tell(t, server.in, at)
					for _, proto := range []string{"tcp", "udp"} {
						what := fmt.Sprintf("%s%s from port %d to %s", proto, network, port, server.what)
						wantAnswers(t, "the host: "+what, dialFrom(t, f.a.ns, proto+network, port, at), at)
						if server.in == f.outsider {
							// the server uses another port each time, because the
							// host still knows the first connection
							other := netip.AddrPortFrom(server.at, 7100+uint16(10*i+j))
							if proto == "tcp" {
								tell(t, server.in, other)
							}
							wantAnswers(t, "a masqueraded pod: "+what, dialFrom(t, second.ns, proto+network, port, other), other)
						}
					}
				}
			}
		}
	})
}

// TestKernelMappedSocketsAreAnswered: an IPv6 socket of the host that connects to an IPv4 address gets answers.
func TestKernelMappedSocketsAreAnswered(t *testing.T) {
	f := newFabric(t, RoutingOverlay, false)
	n := &serviceNode{T: t, runner: f.a.runner}
	n.lead(netip.AddrPortFrom(f.a.addr4, 30080), feNode, netip.AddrPortFrom(f.a.pod.IPv4, 8080))
	at := netip.AddrPortFrom(f.outside, 7000)
	tell(t, f.outsider, at)
	for _, kind := range []int{unix.SOCK_STREAM, unix.SOCK_DGRAM} {
		inNetns(t, f.a.ns, func() {
			fd, err := unix.Socket(unix.AF_INET6, kind|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				t.Errorf("open a socket: %v", err)
				return
			}
			defer unix.Close(fd)
			_ = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 2})
			_ = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &unix.Timeval{Sec: 2})
			to := &unix.SockaddrInet6{Port: int(at.Port()), Addr: netip.AddrFrom16(at.Addr().As16()).As16()}
			if err := unix.Bind(fd, &unix.SockaddrInet6{Port: 30080}); err != nil {
				t.Errorf("bind: %v", err)
			}
			if err := unix.Connect(fd, to); err != nil {
				t.Errorf("connect by a socket of kind %d: %v", kind, err)
			}
			if _, err := unix.Write(fd, []byte("anybody?\n")); err != nil {
				t.Errorf("send by a socket of kind %d: %v", kind, err)
			}
			if _, err := unix.Read(fd, make([]byte, 200)); err != nil {
				t.Errorf("an IPv6 socket of kind %d with an IPv4 peer: %v", kind, err)
			}
		})
	}
}

// TestKernelServiceKeepsItsPortFromProcesses: a process of the node that listens at a node port, shares it, or
// had a flow on it before the service existed, receives none of the service's packets.
func TestKernelServiceKeepsItsPortFromProcesses(t *testing.T) {
	eachFabric(t, func(t *testing.T, f *fabric, _ Routing) {
		n := &serviceNode{T: t, runner: f.a.runner}
		f.a.masquerade(t) // masquerading makes the kernel track connections
		for i, own := range []netip.Addr{f.a.addr4, f.a.addr6} {
			at := netip.AddrPortFrom(f.a.pod.Addrs()[i], 8080)
			tell(t, f.a.pod.ns, at)
			asked := netip.AddrPortFrom(own, 30080)
			for range 2 {
				inNetns(t, f.a.ns, func() {
					lc := net.ListenConfig{Control: control([]int{unix.SO_REUSEPORT})}
					l, err := lc.Listen(context.Background(), "tcp", asked.String())
					must(t, "listen", err)
					t.Cleanup(func() { l.Close() })
					go func() {
						for {
							c, err := l.Accept()
							if err != nil {
								return
							}
							_, _ = io.WriteString(c, "a process\n")
							c.Close()
						}
					}()
					u, err := lc.ListenPacket(context.Background(), "udp", asked.String())
					must(t, "listen", err)
					t.Cleanup(func() { u.Close() })
					go func() {
						b := make([]byte, 100)
						for {
							_, from, err := u.ReadFrom(b)
							if err != nil {
								return
							}
							_, _ = u.WriteTo([]byte("a process\n"), from)
						}
					}()
				})
			}
			// a flow from before the service, which nf_conntrack knows
			old := dialFrom(t, f.outsider, "udp", 4000, asked)
			if _, err := old.Write([]byte("hello\n")); err != nil {
				t.Fatal(err)
			}
			b := make([]byte, 100)
			if k, err := old.Read(b); err != nil || string(b[:k]) != "a process\n" {
				t.Fatalf("before the service: %q, %v", b[:k], err)
			}
			n.lead(asked, feNode, at)
			wantAnswers(t, "a flow older than the service", old, at)
			wantServed(t, "tcp", askTCP(t, f.outsider, asked, 64), at, f.outsideAddrs()[i])
			wantServed(t, "udp", askUDP(t, f.outsider, asked, 64), at, f.outsideAddrs()[i])
		}
	})
}

// TestKernelConnectionOfTheHostOutlivesANewNodePort: a connection of the host continues when its local port
// becomes a node port, even if translations of an earlier client with the same ports exist.
func TestKernelConnectionOfTheHostOutlivesANewNodePort(t *testing.T) {
	eachFabric(t, func(t *testing.T, f *fabric, _ Routing) {
		n := &serviceNode{T: t, runner: f.a.runner}
		for i, own := range []netip.Addr{f.a.addr4, f.a.addr6} {
			at := netip.AddrPortFrom(f.outsideAddrs()[i], 7000)
			tell(t, f.outsider, at)
			c := dialFrom(t, f.a.ns, "tcp", 30090, at)
			u := dialFrom(t, f.a.ns, "udp", 30090, at)
			wantAnswers(t, "udp before", u, at)
			pod := netip.AddrPortFrom(f.a.pod.Addrs()[i], 8080)
			tell(t, f.a.pod.ns, pod)
			n.lead(netip.AddrPortFrom(own, 30090), feNode, pod)
			wantAnswers(t, "tcp after", c, at)
			wantAnswers(t, "udp after", u, at)
		}
	})
}

// TestKernelConnectionOfTheHostFollowsOneOfAService: the host connects from a node port to a port from which a
// client has used the node port before.
func TestKernelConnectionOfTheHostFollowsOneOfAService(t *testing.T) {
	f := newFabric(t, RoutingOverlay, false)
	n := &serviceNode{T: t, runner: f.a.runner}
	pod := netip.AddrPortFrom(f.a.pod.IPv4, 8080)
	tell(t, f.a.pod.ns, pod)
	asked := netip.AddrPortFrom(f.a.addr4, 30080)
	n.lead(asked, feNode, pod)
	at := netip.AddrPortFrom(f.outside, 7000)
	for _, network := range []string{"udp", "tcp"} {
		c := dialFrom(t, f.outsider, network, at.Port(), asked)
		wantAnswers(t, network+" of the client", c, pod)
		if tcp, ok := c.(*net.TCPConn); ok {
			must(t, "linger", tcp.SetLinger(0))
		}
		must(t, "close", c.Close())
	}
	// as if the client had been silent for some time
	ageTranslations(t, n.k)
	tell(t, f.outsider, at)
	for _, network := range []string{"udp", "tcp"} {
		wantAnswers(t, network+" of the host", dialFrom(t, f.a.ns, network, asked.Port(), at), at)
	}
}

// ageTranslations resets the time of last use of all IPv4 translations.
func ageTranslations(t *testing.T, k *Kernel) {
	t.Helper()
	for _, name := range []string{bpf.MapsMapSlXl4, bpf.MapsMapSlPodXl4} {
		m := k.Pins.Map(name)
		var key bpf.MapsSlXlKey4
		var v bpf.MapsSlXl
		for it := m.Iterate(); it.Next(&key, &v); {
			v.LastS = 1
			must(t, "age a translation", m.Put(&key, &v))
		}
	}
}

// TestKernelProgramsAskConntrackOnceItIsThere: nf_conntrack may be a module that is loaded after the datapath
// has started. Until then answers reach sockets of the host, and the programs load and translate without it.
func TestKernelProgramsAskConntrackOnceItIsThere(t *testing.T) {
	there := false
	f := newFabricWith(t, func(o *Options) { o.build.conntrack = func() (bool, error) { return there, nil } })
	n := &serviceNode{T: t, runner: f.a.runner}
	f.a.masquerade(t)
	pod := netip.AddrPortFrom(f.b.pod.IPv4, 8080)
	tell(t, f.b.pod.ns, pod)
	asked := netip.AddrPortFrom(f.a.addr4, 30080)
	n.lead(asked, feNode, pod)
	ask := func(port uint16) (host, behind error) {
		at := netip.AddrPortFrom(f.outside, port)
		tell(t, f.outsider, at)
		for _, c := range []struct {
			from netns.NsHandle
			err  *error
		}{{f.a.ns, &host}, {f.a.pod.ns, &behind}} {
			u := dialFrom(t, c.from, "udp", asked.Port(), at)
			must(t, "deadline", u.SetDeadline(time.Now().Add(300*time.Millisecond)))
			_, err := u.Write([]byte("anybody?"))
			must(t, "send", err)
			_, *c.err = u.Read(make([]byte, 100))
			must(t, "close", u.Close())
			must(t, "forget the host's connection", inNetnsErr(t, f.a.ns, func() error {
				return netlink.ConntrackTableFlush(netlink.ConntrackTable)
			}))
		}
		return host, behind
	}
	if changed, err := n.k.Reload(); err != nil || changed {
		t.Fatalf("Reload without the module: changed %t, %v", changed, err)
	}
	if host, behind := ask(7000); host != nil || behind == nil {
		t.Errorf("without nf_conntrack the host is answered: %v; a masqueraded pod: %v, want no answer", host, behind)
	}
	wantServed(t, "udp", askUDP(t, f.outsider, asked, 64), pod, f.a.over4)
	there = true
	if changed, err := n.k.Reload(); err != nil || !changed {
		t.Fatalf("Reload with the module: changed %t, %v", changed, err)
	}
	attach(t, f.a.h, f.a.uplink, netlink.HANDLE_MIN_INGRESS, n.k.find(program.FromUplink))
	must(t, "drop old programs", n.k.DropOldPrograms())
	if changed, err := n.k.Reload(); err != nil || changed {
		t.Errorf("Reload again: changed %t, %v", changed, err)
	}
	if host, behind := ask(7001); host != nil || behind != nil {
		t.Errorf("with nf_conntrack the host is answered: %v; a masqueraded pod: %v", host, behind)
	}
	wantServed(t, "udp", askUDP(t, f.outsider, asked, 64), pod, f.a.over4)
}

// inNetnsErr runs fn in a namespace and returns its result.
func inNetnsErr(t *testing.T, ns netns.NsHandle, fn func() error) (err error) {
	t.Helper()
	inNetns(t, ns, func() { err = fn() })
	return err
}

// TestKernelSenderIsTheBackend: a client outside that is its own backend reaches itself through a node port, as
// it would reach any other backend, and never a process of the node.
func TestKernelSenderIsTheBackend(t *testing.T) {
	eachFabric(t, func(t *testing.T, f *fabric, _ Routing) {
		n := &serviceNode{T: t, runner: f.a.runner}
		for i, own := range []netip.Addr{f.a.addr4, f.a.addr6} {
			for j, sender := range []struct {
				what string
				in   netns.NsHandle
				at   netip.Addr
			}{
				{"the host of another node", f.b.ns, []netip.Addr{f.b.addr4, f.b.addr6}[i]},
				{"the outsider", f.outsider, f.outsideAddrs()[i]},
				{"a pod of another node", f.b.pod.ns, f.b.pod.Addrs()[i]},
			} {
				port := 30111 + uint16(3*i+j)
				at, asked := netip.AddrPortFrom(sender.at, 7001), netip.AddrPortFrom(own, port)
				tell(t, sender.in, at)
				tell(t, f.a.ns, asked) // a process of the node listens at the node port
				n.lead(asked, feNode, at)
				for _, network := range []string{"tcp", "udp"} {
					c, err := dialIn(t, sender.in, network, asked)
					must(t, network+" from "+sender.what, err)
					wantAnswers(t, network+" from "+sender.what, c, at)
				}
			}
		}
	})
}
