// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
)

// spreadPackets makes all CPUs receive a device's packets (RPS). Then packets by the tunnel device can be delivered later
// than others that arrived at the same time.
func spreadPackets(t *testing.T, ns netns.NsHandle, device string) {
	t.Helper()
	dir := t.TempDir()
	inNetns(t, ns, func() { // the thread ends with its mount namespace
		must(t, "leave the mount namespace", unix.Unshare(unix.CLONE_NEWNS))
		must(t, "make mounts private", unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
		must(t, "mount sysfs", unix.Mount("sysfs", dir, "sysfs", 0, ""))
		file := filepath.Join(dir, "class/net", device, "queues/rx-0/rps_cpus")
		must(t, "spread packets", os.WriteFile(file, []byte("3"), 0))
	})
}

// datagramFlow is a UDP connection between pods.
type datagramFlow struct {
	t           *testing.T
	here, there *net.UDPConn
	sent, heard uint32
}

// newDatagramFlow opens sockets in a's and b's pods.
func (f *fabric) newDatagramFlow(t *testing.T, local, remote netip.Addr) *datagramFlow {
	t.Helper()
	d := &datagramFlow{t: t}
	var err error
	inNetns(t, f.b.pod.ns, func() {
		d.there, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(remote, 0)))
	})
	must(t, "listen", err)
	t.Cleanup(func() { d.there.Close() })
	inNetns(t, f.a.pod.ns, func() {
		d.here, err = net.DialUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(local, 0)),
			d.there.LocalAddr().(*net.UDPAddr))
	})
	must(t, "dial", err)
	t.Cleanup(func() { d.here.Close() })
	must(t, "deadline", d.there.SetReadDeadline(time.Now().Add(servicetest.Patience)))
	return d
}

// datagramBytes is the length of each datagram, which begins with its number.
const datagramBytes = 1000

// send sends numbered datagrams in one packet.
func (d *datagramFlow) send(count int) {
	d.t.Helper()
	var packet []byte
	for range count {
		d.sent++
		packet = append(binary.BigEndian.AppendUint32(packet, d.sent), make([]byte, datagramBytes-4)...)
	}
	// the kernel cuts it into datagrams
	size := unix.CmsgSpace(2)
	oob := make([]byte, size)
	h := (*unix.Cmsghdr)(unsafe.Pointer(&oob[0]))
	h.Level, h.Type = unix.IPPROTO_UDP, unix.UDP_SEGMENT
	h.SetLen(unix.CmsgLen(2))
	binary.NativeEndian.PutUint16(oob[unix.CmsgLen(0):], datagramBytes)
	if _, _, err := d.here.WriteMsgUDP(packet, oob, nil); err != nil {
		d.t.Fatal(err)
	}
}

// receive checks that all datagrams sent arrive, in order.
func (d *datagramFlow) receive() {
	d.t.Helper()
	b := make([]byte, 2*datagramBytes)
	for d.heard < d.sent {
		n, err := d.there.Read(b)
		if err != nil || n != datagramBytes {
			d.t.Fatalf("after datagram %d of %d: %d bytes, %v", d.heard, d.sent, n, err)
		}
		d.heard++
		if got := binary.BigEndian.Uint32(b); got != d.heard {
			d.t.Fatalf("datagram %d arrived as number %d", got, d.heard)
		}
	}
}

// TestKernelDatagramsOfLargePacketsStayWithTheDevice shows which datagrams of a connection bypass the tunnel device:
// all but the first, until a large packet that contains several datagrams arrives.
func TestKernelDatagramsOfLargePacketsStayWithTheDevice(t *testing.T) {
	f := newDirectFabric(t, func(*Options) {})
	for i, remote := range f.b.pod.Addrs() {
		local := f.a.pod.Addrs()[i]
		d := f.newDatagramFlow(t, local, remote)
		send := func(count int) func() {
			return func() {
				d.send(count)
				d.receive()
			}
		}
		f.wantThroughDevice(t, "the first datagram", send(1), 0, 1)
		for range 5 {
			f.wantThroughDevice(t, "a datagram", send(1), 0, 0)
		}
		f.wantThroughDevice(t, "a large packet", send(10), 0, 1)
		for range 5 {
			f.wantThroughDevice(t, "a datagram after a large packet", send(1), 0, 1)
		}
		c, found, err := f.b.k.Connections.Lookup(conntrack.Tuple{
			Initiator: d.here.LocalAddr().(*net.UDPAddr).AddrPort(), Responder: d.there.LocalAddr().(*net.UDPAddr).AddrPort(),
			Protocol: unix.IPPROTO_UDP,
		})
		if err != nil || !found || c.Flags&conntrack.ByDevice == 0 {
			t.Errorf("connection %+v, %t, %v, want one with the flag", c, found, err)
		}
		f.wantThroughDevice(t, "another connection", func() {
			other := f.newDatagramFlow(t, local, remote)
			for range 5 {
				other.send(1)
				other.receive()
			}
		}, 0, 1)
	}
}

// tcpCounters returns the counters of a namespace's TCP by name.
func tcpCounters(t *testing.T, ns netns.NsHandle) map[string]int {
	t.Helper()
	counts := map[string]int{}
	inNetns(t, ns, func() {
		for _, file := range []string{"/proc/thread-self/net/netstat", "/proc/thread-self/net/snmp"} {
			b, err := os.ReadFile(file)
			must(t, "read counters", err)
			lines := strings.Split(string(b), "\n")
			for i := 0; i+1 < len(lines); i += 2 {
				names, values := strings.Fields(lines[i]), strings.Fields(lines[i+1])
				for j := 1; j < len(names); j++ {
					counts[names[0]+names[j]], _ = strconv.Atoi(values[j]) // some are larger, and not used here
				}
			}
		}
	})
	return counts
}

// TestKernelAFlowStaysInOrder shows that packets of a flow do not overtake each other, when large and small packets
// alternate and several CPUs receive the packets of the node's uplink.
func TestKernelAFlowStaysInOrder(t *testing.T) {
	f := newDirectFabric(t, func(*Options) {})
	for _, n := range []*fabricNode{f.a, f.b} {
		spreadPackets(t, n.ns, "up0")
	}
	for i, remote := range f.b.pod.Addrs() {
		const message, count, attempts = 100001, 500, 5
		for attempt := 1; ; attempt++ {
			before, sent := tcpCounters(t, f.b.pod.ns), tcpCounters(t, f.a.pod.ns)
			f.messages(t, remote, message, count)
			after, lost := tcpCounters(t, f.b.pod.ns), tcpCounters(t, f.a.pod.ns)
			n := after["TcpExt:TCPOFOQueue"] - before["TcpExt:TCPOFOQueue"]
			if n == 0 {
				break
			}
			// Segments also wait for one that was lost, because a queue was full on a busy machine.
			again := lost["Tcp:RetransSegs"] - sent["Tcp:RetransSegs"]
			t.Logf("%v, attempt %d: %d segments of TCP were out of order, %d were sent again", remote, attempt, n, again)
			if again == 0 || attempt == attempts {
				t.Errorf("%v: segments of TCP were out of order", remote)
				break
			}
		}
		d := f.newDatagramFlow(t, f.a.pod.Addrs()[i], remote)
		d.send(1)
		d.receive()
		for range 200 {
			// not more than the receiver's buffer has capacity for
			for _, n := range []int{10, 1, 1, 10, 1, 20, 1} {
				d.send(n)
			}
			d.receive()
		}
	}
}

// messages sends messages over a TCP connection, each after the answer to the one before.
func (f *fabric) messages(t *testing.T, remote netip.Addr, size, count int) {
	t.Helper()
	var l net.Listener
	var conn net.Conn
	var err error
	inNetns(t, f.b.pod.ns, func() { l, err = net.Listen("tcp", netip.AddrPortFrom(remote, 0).String()) })
	must(t, "listen", err)
	defer l.Close()
	go func() {
		peer, err := l.Accept()
		if err != nil {
			return
		}
		defer peer.Close()
		b := make([]byte, size)
		for {
			if _, err := io.ReadFull(peer, b); err != nil {
				return
			}
			if _, err := peer.Write(b[:1]); err != nil {
				return
			}
		}
	}()
	inNetns(t, f.a.pod.ns, func() { conn, err = net.DialTimeout("tcp", l.Addr().String(), servicetest.Patience) })
	must(t, "connect", err)
	defer conn.Close()
	must(t, "deadline", conn.SetDeadline(time.Now().Add(servicetest.Patience)))
	b := make([]byte, size)
	for i := range count {
		if _, err := conn.Write(b); err != nil {
			t.Fatalf("message %d: %v", i, err)
		}
		if _, err := io.ReadFull(conn, b[:1]); err != nil {
			t.Fatalf("answer %d: %v", i, err)
		}
	}
}

// behind moves the addresses of a pod to a namespace behind it, to which the pod's kernel forwards. It returns this
// namespace as a pod. The namespace sends small packets, which the pod's kernel merges into large ones, as lists of
// fragments.
func (p *pod) behind(t *testing.T) *pod {
	t.Helper()
	inner := &pod{Endpoint: p.Endpoint, ns: newNetns(t)}
	outside, err := netlink.NewHandleAt(p.ns, unix.NETLINK_ROUTE)
	must(t, "netlink in the pod", err)
	t.Cleanup(outside.Close)
	inside, err := netlink.NewHandleAt(inner.ns, unix.NETLINK_ROUTE)
	must(t, "netlink behind the pod", err)
	t.Cleanup(inside.Close)
	must(t, "add a veth", outside.LinkAdd(&netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: "behind", MTU: int(p.MTU)}, PeerName: "eth0",
		PeerNamespace: netlink.NsFd(inner.ns), PeerMTU: uint32(p.MTU),
	}))
	for _, end := range []struct {
		h      *netlink.Handle
		device string
	}{{outside, "behind"}, {inside, "eth0"}, {inside, "lo"}} {
		l, err := end.h.LinkByName(end.device)
		must(t, "find "+end.device, err)
		must(t, "set "+end.device+" up", end.h.LinkSetUp(l))
	}
	eth0, err := outside.LinkByName("eth0")
	must(t, "find eth0", err)
	behind, err := outside.LinkByName("behind")
	must(t, "find the pod's own device", err)
	there, err := inside.LinkByName("eth0")
	must(t, "find eth0 behind the pod", err)
	inNetns(t, p.ns, func() {
		for _, name := range []string{"ipv4/ip_forward", "ipv4/conf/behind/proxy_arp", "ipv6/conf/all/forwarding"} {
			must(t, "sysctl "+name, os.WriteFile("/proc/sys/net/"+name, []byte("1"), 0))
		}
	})
	gateway := netip.MustParseAddr("198.51.100.1")
	must(t, "address of the pod's own device", outside.AddrAdd(behind, &netlink.Addr{IPNet: ipNet(gateway)}))
	// without an address, the kernel would delete the routes of the device
	own := netip.MustParseAddr("198.51.100.2")
	must(t, "address of the pod", outside.AddrAdd(eth0, &netlink.Addr{IPNet: ipNet(own)}))
	// the programs answer ARP requests from the pod's address only
	must(t, "neighbour of the pod", outside.NeighSet(&netlink.Neigh{
		LinkIndex: eth0.Attrs().Index, Family: netlink.FAMILY_V4, State: netlink.NUD_PERMANENT, IP: gateway4.AsSlice(),
		HardwareAddr: p.HostMAC[:],
	}))
	must(t, "move the address away", outside.AddrDel(eth0, &netlink.Addr{IPNet: ipNet(p.IPv4)}))
	must(t, "move the address", inside.AddrAdd(there, &netlink.Addr{IPNet: ipNet(p.IPv4)}))
	must(t, "route behind the pod", outside.RouteReplace(&netlink.Route{
		LinkIndex: behind.Attrs().Index, Dst: ipNet(p.IPv4), Scope: netlink.SCOPE_LINK,
	}))
	must(t, "route to the pod", inside.RouteAdd(&netlink.Route{
		LinkIndex: there.Attrs().Index, Dst: ipNet(gateway), Scope: netlink.SCOPE_LINK,
	}))
	must(t, "default route", inside.RouteAdd(&netlink.Route{
		LinkIndex: there.Attrs().Index, Gw: gateway.AsSlice(), Dst: &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)},
	}))
	inNetns(t, inner.ns, func() { addNoChecksums(t, "eth0") })
	setTSO(t, inner.ns, "eth0", 0)
	return inner
}

// TestKernelLargePacketsForwardedByAPod sends large TCP packets by direct paths to and from namespaces behind the pods,
// whose devices compute no checksums and segment nothing. The pods' kernels merge the packets that they forward, in the
// usual form and as lists of packets.
func TestKernelLargePacketsForwardedByAPod(t *testing.T) {
	for _, list := range []bool{false, true} {
		t.Run(fmt.Sprintf("lists of packets %t", list), func(t *testing.T) {
			f := newDirectFabric(t, func(*Options) {})
			a, b := f.a.pod.behind(t), f.b.pod.behind(t)
			for _, p := range []*pod{f.a.pod, f.b.pod} {
				merge(t, p.ns, "behind", list)
			}
			f.wantThroughDevice(t, "large TCP", func() { streamPods(t, a, b, b.IPv4, 8<<20) }, 0, 0)
			echo(t, a, a.IPv4, b, b.IPv4)
		})
	}
}

// merge makes a device merge received packets (GRO), as lists of packets if asked for.
func merge(t *testing.T, ns netns.NsHandle, device string, list bool) {
	t.Helper()
	const setGRO = 0x2c // ETHTOOL_SGRO
	inNetns(t, ns, func() { ethtoolValue(t, device, setGRO, 1) })
	if list {
		setFeature(t, ns, device, "rx-gro-list")
	}
}

// ethtoolValue sets a number of a device.
func ethtoolValue(t *testing.T, device string, command, data uint32) {
	t.Helper()
	value := struct{ command, data uint32 }{command, data}
	ethtool(t, device, unsafe.Pointer(&value))
}

func ethtool(t *testing.T, device string, value unsafe.Pointer) {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	must(t, "socket", err)
	defer unix.Close(fd)
	request := struct {
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		_    [16]byte
	}{data: value}
	copy(request.name[:], device)
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&request)))
	if errno != 0 {
		t.Errorf("ethtool of %s: %v", device, errno)
	}
}

// setFeature turns on a feature of a device, by the kernel's name for it.
func setFeature(t *testing.T, ns netns.NsHandle, device, feature string) {
	t.Helper()
	const (
		getStrings, setFeatures = 0x1b, 0x3b // ETHTOOL_GSTRINGS, ETHTOOL_SFEATURES
		features                = 4          // ETH_SS_FEATURES
	)
	inNetns(t, ns, func() {
		var names struct {
			command, set, count uint32
			names               [128][32]byte
		}
		names.command, names.set = getStrings, features
		ethtool(t, device, unsafe.Pointer(&names))
		for i, name := range names.names[:names.count] {
			if string(bytes.TrimRight(name[:], "\x00")) != feature {
				continue
			}
			var change struct {
				command, count uint32
				blocks         [4][2]uint32 // those that are valid, and their values
			}
			change.command, change.count = setFeatures, (names.count+31)/32
			change.blocks[i/32] = [2]uint32{1 << (i % 32), 1 << (i % 32)}
			ethtool(t, device, unsafe.Pointer(&change))
			return
		}
		t.Errorf("%s has no feature %s", device, feature)
	})
}

// TestKernelDirectPathKeepsChecksums shows that the pod's kernel verifies the inner checksum of decapsulated packets,
// both if the uplink's driver reports no checksums and if it supplies the sum over the packet.
func TestKernelDirectPathKeepsChecksums(t *testing.T) {
	for name, kind := range map[string]uplinkKind{"without a sum": cable, "with the sum of the device": summing} {
		t.Run(name, func(t *testing.T) {
			f := newDirectFabricOn(t, kind, func(*Options) {})
			for i, remote := range f.b.pod.Addrs() {
				local := f.a.pod.Addrs()[i]
				f.wantThroughDevice(t, "TCP", func() { streamPods(t, f.a.pod, f.b.pod, remote, 1<<20) }, 0, 0)
				d := f.newDatagramFlow(t, local, remote)
				d.send(1)
				d.receive() // b knows the connection
				from, to := d.here.LocalAddr().(*net.UDPAddr).AddrPort(), d.there.LocalAddr().(*net.UDPAddr).AddrPort()
				datagram := func(text string, wrong byte) outerPacket {
					p := udp(from.Port(), to.Port(), []byte(text)...)
					pseudo := append(append(local.AsSlice(), remote.AsSlice()...), 0, 17)
					pseudo = binary.BigEndian.AppendUint16(pseudo, uint16(len(p)))
					binary.BigEndian.PutUint16(p[6:], checksum(append(pseudo, p...)))
					p[7] ^= wrong
					return f.newOuterWith(f.a.pod.Identity, local, remote, 17, p)
				}
				f.wantThroughDevice(t, "datagrams with checksums", func() {
					inNetns(t, f.a.ns, func() { sendRaw(t, "up0", datagram("wrong", 1), datagram("right", 0)) })
					b := make([]byte, 100)
					if n, err := d.there.Read(b); err != nil || string(b[:n]) != "right" {
						t.Errorf("%v: the pod received %q, %v", remote, b[:n], err)
					}
				}, 0, 0)
			}
		})
	}
}

// TestKernelCongestionMarkReachesThePod sends datagrams of a known connection with each pair of congestion bits outside
// and inside: a router's mark on the outer packet reaches the pod, and a mark inside stays.
func TestKernelCongestionMarkReachesThePod(t *testing.T) {
	const capable, congested = 2, 3
	f := newDirectFabric(t, func(*Options) {})
	local, remote := f.a.pod.IPv4, f.b.pod.IPv4
	d := f.newDatagramFlow(t, local, remote)
	d.send(1)
	d.receive()
	raw, err := d.there.SyscallConn()
	must(t, "socket", err)
	must(t, "socket", raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_RECVTOS, 1)
	}))
	must(t, "IP_RECVTOS", err)
	from, to := d.here.LocalAddr().(*net.UDPAddr).AddrPort(), d.there.LocalAddr().(*net.UDPAddr).AddrPort()
	for _, c := range []struct {
		outside, inside, want byte
		device                uint64
	}{
		{0, 0, 0, 0},
		{capable, capable, capable, 0},
		{congested, capable, congested, 1},
		{capable, congested, congested, 0},
		{congested, congested, congested, 1},
	} {
		what := fmt.Sprintf("%d outside and %d inside", c.outside, c.inside)
		p := f.newOuterWith(f.a.pod.Identity, local, remote, 17, udp(from.Port(), to.Port(), []byte("mark")...))
		p[outerIP+1], p[innerIP+1] = c.outside, c.inside
		sum4(p[innerIP:])
		f.wantThroughDevice(t, what, func() {
			inNetns(t, f.a.ns, func() { sendRaw(t, "up0", p.summed()) })
			b, oob := make([]byte, 100), make([]byte, 100)
			_, n, _, _, err := d.there.ReadMsgUDP(b, oob)
			must(t, "receive", err)
			messages, err := unix.ParseSocketControlMessage(oob[:n])
			must(t, "control messages", err)
			if len(messages) != 1 || messages[0].Data[0] != c.want {
				t.Errorf("%s: the pod received %v, want %d", what, messages, c.want)
			}
		}, 0, c.device)
	}
}

// TestKernelOtherUplinksLeaveToTheDevice sends tunnel packets to a node's second uplink: the direct path leads to their
// sender by the first one, so the device gets them.
func TestKernelOtherUplinksLeaveToTheDevice(t *testing.T) {
	f := newDirectFabric(t, func(*Options) {})
	bridge, err := netlink.LinkByName("slfabric")
	must(t, "find the bridge", err)
	addPort(t, bridge, "slport102", f.b.ns, "up1")
	second, err := f.b.h.LinkByName("up1")
	must(t, "find up1", err)
	must(t, "set up1 up", f.b.h.LinkSetUp(second))
	servicetest.Eventually(t, "carrier of up1", func() bool {
		l, err := f.b.h.LinkByName("up1")
		return err == nil && l.Attrs().OperState == netlink.OperUp
	})
	inNetns(t, f.b.ns, func() {
		l, err := link.AttachTCX(link.TCXOptions{
			Interface: second.Attrs().Index, Program: f.b.k.program(program.FromUnderlay), Attach: ebpf.AttachTCXIngress,
		})
		must(t, "attach "+program.FromUnderlay, err)
		t.Cleanup(func() { l.Close() })
	})
	const times = 20
	for i, mac := range [][6]byte{macOf(f.b), [6]byte(second.Attrs().HardwareAddr)} {
		var frames []outerPacket
		for port := range uint16(times) {
			p := f.newOuter(f.a.pod.Identity, f.a.pod.IPv4, f.b.pod.IPv4, 20000+100*uint16(i)+port)
			copy(p, mac[:])
			frames = append(frames, p)
		}
		_, before := f.b.throughDevice(t)
		wantAll(t, "forwarded", f.received(t, f.a.ns, frames...), event.ForwardedToPod, times)
		_, after := f.b.throughDevice(t)
		if passed := after - before - 1; (passed > 0) != (i > 0) {
			t.Errorf("uplink %d: the device got %d packets of %d", i, passed, times)
		}
	}
}
