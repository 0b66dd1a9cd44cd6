// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/rpc"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/model/policytable"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/proxymap"
	"github.com/sluice-net/sluice/services/datapath/internal/proxy/tap"
)

// attached is a proxy that has received its queue.
type attached struct {
	*net.UnixConn
	*datapathv1.ProxyAttachment
	queue, heartbeats int
}

// attachTo connects to the socket for proxies.
func attachTo(t testing.TB, socket string) *attached {
	t.Helper()
	conn, err := net.Dial("unixpacket", socket)
	if err != nil {
		t.Fatal(err)
	}
	a := &attached{UnixConn: conn.(*net.UnixConn), ProxyAttachment: &datapathv1.ProxyAttachment{}}
	t.Cleanup(func() { a.Close() })
	if err := a.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	message, control := make([]byte, 1024), make([]byte, 256)
	n, m, _, _, err := a.ReadMsgUnix(message, control)
	if err != nil {
		t.Fatal(err)
	}
	if err := proto.Unmarshal(message[:n], a.ProxyAttachment); err != nil {
		t.Fatal(err)
	}
	messages, err := unix.ParseSocketControlMessage(control[:m])
	if err != nil || len(messages) != 1 {
		t.Fatalf("%d control messages, %v", len(messages), err)
	}
	files, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(files) != 2 && (len(files) != 1 || a.GetTapDevice() != "") {
		t.Fatalf("descriptors %v, %v", files, err)
	}
	a.queue = -1
	if a.heartbeats = files[len(files)-1]; len(files) == 2 {
		a.queue = files[0]
	}
	t.Cleanup(a.closeFiles)
	return a
}

// closeFiles closes the queue and the memory of heartbeats.
func (a *attached) closeFiles() {
	for _, fd := range []*int{&a.queue, &a.heartbeats} {
		if *fd >= 0 {
			unix.Close(*fd)
			*fd = -1
		}
	}
}

// kill ends everything that a killed process has open.
func (a *attached) kill() {
	a.Close()
	a.closeFiles()
}

// ended waits until the datapath has closed the connection.
func (a *attached) ended(t testing.TB) {
	t.Helper()
	if _, err := a.Read(make([]byte, 16)); !errors.Is(err, io.EOF) {
		t.Errorf("the connection has %v, want that it is closed", err)
	}
}

// beat writes a heartbeat.
func (a *attached) beat(t testing.TB) {
	t.Helper()
	memory, err := unix.Mmap(a.heartbeats, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatalf("map the heartbeats: %v", err)
	}
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		t.Fatal(err)
	}
	word := (*uint64)(unsafe.Pointer(&memory[a.GetHeartbeatOffset()]))
	atomic.StoreUint64(word, uint64(now.Nano()))
	if err := unix.Munmap(memory); err != nil {
		t.Fatal(err)
	}
}

const experimental = 0x88b5 // IEEE 802, for local experiments

// sendOut sends numbered frames out of a device of the calling thread's namespace.
func sendOut(device string, numbers ...uint32) error {
	const order = experimental>>8 | experimental&0xff<<8 // network order
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	d, err := net.InterfaceByName(device)
	if err != nil {
		return err
	}
	for _, number := range numbers {
		frame := make([]byte, 64)
		binary.BigEndian.PutUint16(frame[12:], experimental)
		binary.BigEndian.PutUint32(frame[14:], number)
		to := &unix.SockaddrLinklayer{Ifindex: d.Index, Protocol: order, Halen: 6}
		if err := unix.Sendto(fd, frame, 0, to); err != nil {
			return err
		}
	}
	return nil
}

// reads reads the next frames, which have these numbers in this order.
func (a *attached) reads(t testing.TB, numbers ...uint32) {
	t.Helper()
	for _, number := range numbers {
		frame := make([]byte, 2048)
		servicetest.EventuallyNil(t, fmt.Sprintf("frame %d", number), func() error {
			_, err := unix.Read(a.queue, frame)
			return err
		})
		if got := binary.BigEndian.Uint32(frame[14:]); binary.BigEndian.Uint16(frame[12:]) != experimental || got != number {
			t.Fatalf("frame %x, want number %d", frame[:18], number)
		}
	}
}

// device returns the index of the TAP device in a node; 0: no device.
func (n *testNode) device() (index int) {
	n.t.Helper()
	name := tap.Name("datapath-test", policytable.ProxyDNS)
	err := in(n.home, func() error {
		all, err := net.Interfaces()
		for _, d := range all {
			if d.Name == name {
				index = d.Index
			}
		}
		return err
	})
	if err != nil {
		n.t.Fatal(err)
	}
	return index
}

func (n *testNode) proxySocket() string { return filepath.Join(n.dir, "run", instance.ProxySocketName) }

func (n *testNode) proxy() *datapathv1.ProxyStatus {
	n.t.Helper()
	s, err := n.datapath.GetStatus(n.t.Context(), &datapathv1.GetStatusRequest{})
	if err != nil || len(s.GetProxies()) != 1 {
		n.t.Fatalf("proxies %v, %v", s.GetProxies(), err)
	}
	return s.GetProxies()[0]
}

// usableTUN gives the device node of TAP devices to the datapath for the test, as `sluice prepare` does.
func usableTUN(t *testing.T) {
	t.Helper()
	info, err := os.Stat(tap.File)
	if err != nil {
		t.Fatal(err)
	}
	owner := int(info.Sys().(*syscall.Stat_t).Uid)
	t.Cleanup(func() {
		if err := os.Chown(tap.File, owner, -1); err != nil {
			t.Error(err)
		}
	})
	if err := os.Chown(tap.File, int(instance.DatapathID), -1); err != nil {
		t.Fatal(err)
	}
}

// TestKernelProxyAttachesToTheProcess: the process can do it with its user, capabilities and sandbox. The queue
// outlives proxies, and the proxy's queue outlives the process.
func TestKernelProxyAttachesToTheProcess(t *testing.T) {
	usableTUN(t)
	n := newNode(t)
	n.start()
	name := tap.Name("datapath-test", policytable.ProxyDNS)
	p := n.proxy()
	if p.GetAttached() || p.GetDevice() != name || p.GetProblem() != "" || p.GetProxy() != netv1.Proxy_PROXY_DNS {
		t.Errorf("before the first proxy: %v", p)
	}
	if n.device() != 0 {
		t.Error("a device exists before the first proxy")
	}
	first := attachTo(t, n.proxySocket())
	if first.GetProxy() != netv1.Proxy_PROXY_DNS || first.GetTapDevice() != name || first.GetTapMtu() != tap.MTU {
		t.Errorf("received %v", first.ProxyAttachment)
	}
	index := n.device()
	if index == 0 {
		t.Fatal("the device does not exist")
	}
	p = n.proxy()
	if !p.GetAttached() || p.GetPid() != uint32(os.Getpid()) || p.GetHeartbeatAge() != nil || p.GetAttachedSince() == nil {
		t.Errorf("attached, without a heartbeat: %v", p)
	}
	first.beat(t)
	if p := n.proxy(); p.GetHeartbeatAge() == nil || p.GetHeartbeatAge().AsDuration() > patience {
		t.Errorf("after a heartbeat: %v", p)
	}
	n.noDifferences()

	// Frames that a killed proxy has not read reach the next one.
	if err := in(n.home, func() error { return sendOut(name, 1, 2, 3) }); err != nil {
		t.Fatal(err)
	}
	first.reads(t, 1)
	first.kill()
	servicetest.EventuallyNil(t, "the proxy is absent", func() error {
		if n.proxy().GetAttached() {
			return errors.New("attached")
		}
		return nil
	})
	second := attachTo(t, n.proxySocket())
	second.reads(t, 2, 3)

	// A restart: the proxy has its queue meanwhile, and gets another one of the same device.
	n.stop()
	second.ended(t)
	if n.device() != index {
		t.Error("the device is gone although a proxy has its queue")
	}
	if err := in(n.home, func() error { return sendOut(name, 4) }); err != nil {
		t.Fatal(err)
	}
	second.reads(t, 4)
	n.start()
	third := attachTo(t, n.proxySocket())
	second.closeFiles()
	if n.device() != index {
		t.Error("the device was made again")
	}
	n.noDifferences()
	if err := in(n.home, func() error { return sendOut(name, 5, 6) }); err != nil {
		t.Fatal(err)
	}
	third.reads(t, 5, 6)

	// The device ends with its last queue.
	third.kill()
	n.stop()
	if n.device() != 0 {
		t.Error("the device is left")
	}
	if _, err := os.Stat(n.proxySocket()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the socket is left: %v", err)
	}
}

// noDifferences fails if an audit finds differences.
func (n *testNode) noDifferences() {
	n.t.Helper()
	audit, err := n.datapath.AuditMaps(n.t.Context(), &datapathv1.AuditMapsRequest{})
	for err == nil {
		var m *datapathv1.AuditMapsResponse
		if m, err = audit.Recv(); err == nil {
			n.t.Errorf("the audit finds %v", m.GetDifference())
		}
	}
	if !errors.Is(err, io.EOF) {
		n.t.Error(err)
	}
}

// TestKernelUninstallRemovesTheDeviceOfALivingProxy: the proxy is not part of what is uninstalled.
func TestKernelUninstallRemovesTheDeviceOfALivingProxy(t *testing.T) {
	usableTUN(t)
	n := newNode(t)
	n.start()
	attachTo(t, n.proxySocket())
	n.stop()
	if n.device() == 0 {
		t.Fatal("the device is gone although a proxy has its queue")
	}
	if err := in(n.home, n.command("--uninstall").Run); err != nil {
		t.Fatal(err)
	}
	if n.device() != 0 {
		t.Error("the device is left")
	}
}

// withProxies makes the datapath of a world accept proxies.
func withProxies(w *world, tun string) (socket string) {
	w.t.Helper()
	socket = filepath.Join(w.dir, "proxy.sock")
	w.proxies = func(kind policytable.Proxy) (net.Listener, error) {
		path := socket
		if kind == policytable.ProxyHTTP {
			path = filepath.Join(w.dir, "proxy-http.sock")
		}
		return rpc.Listen(path, rpc.ListenOptions{Packets: true})
	}
	w.tun = tun
	return socket
}

// awaitSocket waits until the socket is open.
func awaitSocket(t testing.TB, socket string) {
	t.Helper()
	servicetest.EventuallyNil(t, "the socket for proxies is open", func() error { _, err := os.Stat(socket); return err })
}

// TestKernelAuditRepairsTheDeviceOfAProxy: a deleted device is made again, and the programs and the proxy use it.
func TestKernelAuditRepairsTheDeviceOfAProxy(t *testing.T) {
	w := newWorld(t)
	socket := withProxies(w, "")
	w.start(false)
	awaitSocket(t, socket)
	a := attachTo(t, socket)
	before, err := w.node.Kernel.Proxies.Get(policytable.ProxyDNS)
	if err != nil || !before.Attached {
		t.Fatalf("the programs know %+v, %v", before, err)
	}
	remove := func() error {
		return netlink.LinkDel(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: a.GetTapDevice()}})
	}
	if err := w.home.Do(remove); err != nil {
		t.Fatal(err)
	}
	diffs, err := w.node.Node.Host.Check()
	if err != nil || len(diffs) != 1 || diffs[0].Subject != "proxy device" || diffs[0].Key != a.GetTapDevice() {
		t.Errorf("differences %v, %v, want the deleted device", diffs, err)
	}
	if err := w.node.Node.Host.Repair(); err != nil {
		t.Fatal(err)
	}
	if diffs, err := w.node.Node.Host.Check(); err != nil || len(diffs) > 0 {
		t.Errorf("differences after the repair: %v, %v", diffs, err)
	}
	after, err := w.node.Kernel.Proxies.Get(policytable.ProxyDNS)
	if err != nil || !after.Attached || after.Device == before.Device {
		t.Errorf("the programs know %+v, %v, want another device than %d", after, err, before.Device)
	}
	if err := w.home.Do(func() error { return sendOut(a.GetTapDevice(), 1) }); err != nil {
		t.Fatal(err)
	}
	a.reads(t, 1)
	a.Close()
	servicetest.EventuallyNil(t, "the programs know that the proxy is absent", func() error {
		s, err := w.node.Kernel.Proxies.Get(policytable.ProxyDNS)
		if want := (proxymap.Proxy{Device: after.Device}); err != nil || s != want {
			return fmt.Errorf("%+v, %w", s, err)
		}
		return nil
	})
}

// TestKernelWithoutTUNTheStatusNamesIt: the connection of a proxy ends, and everything else works.
func TestKernelWithoutTUNTheStatusNamesIt(t *testing.T) {
	w := newWorld(t)
	missing := filepath.Join(w.dir, "no-tun")
	socket := withProxies(w, missing)
	w.start(false)
	awaitSocket(t, socket)
	s, err := w.node.Proxies.Status()
	if err != nil || len(s) != 1 || !strings.Contains(s[0].Problem, missing) {
		t.Errorf("status %+v, %v, want the path", s, err)
	}
	c, err := net.Dial("unixpacket", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Read(make([]byte, 16)); !errors.Is(err, io.EOF) {
		t.Errorf("the connection has %v, want that it is closed", err)
	}
	servicetest.EventuallyNil(t, "a warning names the path", func() error {
		if lines := w.node.Proxies.Warnings(); len(lines) != 1 || !strings.Contains(lines[0], missing) {
			return fmt.Errorf("warnings %q", lines)
		}
		return nil
	})
	if s, err := w.node.Kernel.Proxies.Get(policytable.ProxyDNS); err != nil || s != (proxymap.Proxy{}) {
		t.Errorf("the programs know %+v, %v", s, err)
	}
	if diffs, err := w.node.Node.Host.Check(); err != nil || len(diffs) > 0 {
		t.Errorf("differences: %v, %v", diffs, err)
	}
}

// TestKernelRestartLeavesTheProxyAttached: the programs send packets to the proxy's queue also between two processes,
// and until the proxy has connected to the next one. A proxy that does not connect is absent.
func TestKernelRestartLeavesTheProxyAttached(t *testing.T) {
	w := newWorld(t)
	socket := withProxies(w, "")
	w.start(false)
	awaitSocket(t, socket)
	first := attachTo(t, socket)
	state := func() proxymap.Proxy {
		s, err := w.node.Kernel.Proxies.Get(policytable.ProxyDNS)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	index := state().Device
	w.stop()
	first.ended(t)
	w.start(false)
	awaitSocket(t, socket)
	second := attachTo(t, socket)
	if want := (proxymap.Proxy{Device: index, Attached: true}); state() != want {
		t.Errorf("the programs know %+v, want %+v", state(), want)
	}
	first.closeFiles()
	w.stop()
	r := w.open()
	if s, err := r.node.Kernel.Proxies.Get(policytable.ProxyDNS); err != nil || !s.Attached || s.Device != index {
		t.Errorf("between two processes, the programs know %+v, %v", s, err)
	}
	if err := errors.Join(r.node.restore(t.Context()), r.node.Endpoints.Compare(t.Context())); err != nil {
		t.Fatal(err)
	}
	w.run(r, false)
	servicetest.EventuallyNil(t, "a proxy that does not connect is absent", func() error {
		if s := state(); s.Attached || s.Device != index {
			return fmt.Errorf("the programs know %+v", s)
		}
		return nil
	})
	third := attachTo(t, socket)
	if want := (proxymap.Proxy{Device: index, Attached: true}); state() != want {
		t.Errorf("the programs know %+v, want %+v", state(), want)
	}
	second.kill()
	third.kill()
}
