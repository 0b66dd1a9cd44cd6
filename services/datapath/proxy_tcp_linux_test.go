// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"errors"
	"net"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/model/policytable"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	"github.com/sluice-net/sluice/services/datapath/internal/proxy/proxyns"
)

// ask sends a request with descriptors, and returns the reply with its descriptors.
func (a *attached) ask(t testing.TB, m *datapathv1.ProxyRequest, files ...int) (*datapathv1.ProxyReply, []int) {
	t.Helper()
	b, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	var rights []byte
	if len(files) > 0 {
		rights = unix.UnixRights(files...)
	}
	if _, _, err := a.WriteMsgUnix(b, rights, nil); err != nil {
		t.Fatal(err)
	}
	if err := a.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	message, control := make([]byte, 4096), make([]byte, 1024)
	n, c, _, _, err := a.ReadMsgUnix(message, control)
	if err != nil {
		t.Fatalf("the reply to %v: %v", m, err)
	}
	reply := &datapathv1.ProxyReply{}
	if err := proto.Unmarshal(message[:n], reply); err != nil {
		t.Fatal(err)
	}
	messages, err := unix.ParseSocketControlMessage(control[:c])
	if err != nil {
		t.Fatal(err)
	}
	var got []int
	for i := range messages {
		more, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, more...)
	}
	t.Cleanup(func() {
		for _, fd := range got {
			unix.Close(fd)
		}
	})
	return reply, got
}

// namespace asks for the proxy namespace.
func (a *attached) namespace(t testing.TB, former ...int) []int {
	t.Helper()
	reply, files := a.ask(t, &datapathv1.ProxyRequest{Request: &datapathv1.ProxyRequest_Namespace{
		Namespace: &datapathv1.ProxyNamespaceRequest{},
	}}, former...)
	if reply.GetNamespace() == nil || len(files) != 3 || !reply.GetNamespace().GetIpv6() {
		t.Fatalf("received %v with %d descriptors", reply, len(files))
	}
	return files
}

// sockets asks for sockets.
func (a *attached) sockets(t testing.TB, count uint32, ipv6 bool) []int {
	t.Helper()
	reply, files := a.ask(t, &datapathv1.ProxyRequest{Request: &datapathv1.ProxyRequest_Sockets{
		Sockets: &datapathv1.ProxySocketsRequest{Count: count, Ipv6: ipv6},
	}})
	if int(reply.GetSockets().GetCount()) != len(files) || reply.GetSockets().GetIpv6() != ipv6 {
		t.Fatalf("received %v with %d descriptors", reply, len(files))
	}
	return files
}

func inode(t testing.TB, fd int) uint64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		t.Fatal(err)
	}
	return st.Ino
}

// spaceDevice returns the index of the device that leads to the proxy namespace; 0: no device.
func (n *testNode) spaceDevice() (index int) {
	n.t.Helper()
	err := in(n.home, func() error {
		d, err := net.InterfaceByName(proxyns.Name("datapath-test", policytable.ProxyDNS))
		if err == nil {
			index = d.Index
		}
		return nil
	})
	if err != nil {
		n.t.Fatal(err)
	}
	return index
}

// TestKernelProxyGetsTheProxyNamespace: the process makes it with its user, capabilities and sandbox. The namespace and
// its listeners outlive each of the two processes, but not both.
func TestKernelProxyGetsTheProxyNamespace(t *testing.T) {
	usableTUN(t)
	n := newNode(t)
	n.start()
	first := attachTo(t, n.proxySocket())
	if n.spaceDevice() != 0 {
		t.Error("the device exists before a proxy asks for it")
	}
	files := first.namespace(t)
	device, namespace, listener := n.spaceDevice(), inode(t, files[0]), inode(t, files[1])
	if device == 0 {
		t.Fatal("the device does not exist")
	}
	for i, want := range []int{unix.AF_INET, unix.AF_INET6} {
		domain, err := unix.GetsockoptInt(files[1+i], unix.SOL_SOCKET, unix.SO_DOMAIN)
		listens, lerr := unix.GetsockoptInt(files[1+i], unix.SOL_SOCKET, unix.SO_ACCEPTCONN)
		if err != nil || lerr != nil || domain != want || listens != 1 {
			t.Errorf("listener %d: family %d, listens %d, %v, %v", i, domain, listens, err, lerr)
		}
	}
	if p := n.proxy(); !p.GetTcpAttached() || p.GetTcpWaiting() || p.GetTcpDevice() == "" || p.GetTcpProblem() != "" {
		t.Errorf("attached: %v", p)
	}
	if got := first.sockets(t, 3, true); len(got) != 3 {
		t.Errorf("%d sockets, want 3", len(got))
	}
	if got := first.sockets(t, 1000, false); len(got) != proxyns.MaxSockets {
		t.Errorf("%d sockets, want %d", len(got), proxyns.MaxSockets)
	}
	n.noDifferences()

	// The listeners wait for the next proxy.
	first.kill()
	servicetest.EventuallyNil(t, "connections wait", func() error {
		if p := n.proxy(); p.GetTcpAttached() || !p.GetTcpWaiting() {
			return errors.New(p.String())
		}
		return nil
	})
	second := attachTo(t, n.proxySocket())
	files = second.namespace(t)
	if inode(t, files[0]) != namespace || inode(t, files[1]) != listener || n.spaceDevice() != device {
		t.Error("the next proxy gets another namespace")
	}

	// A restart: the proxy returns the namespace.
	n.stop()
	second.ended(t)
	n.start()
	third := attachTo(t, n.proxySocket())
	files = third.namespace(t, files...)
	if inode(t, files[0]) != namespace || inode(t, files[1]) != listener || n.spaceDevice() != device {
		t.Error("after a restart, the proxy gets another namespace")
	}
	n.noDifferences()

	// Another namespace is not used.
	n.stop()
	n.start()
	own, err := unix.Open("/proc/self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(own)
	fourth := attachTo(t, n.proxySocket())
	files = fourth.namespace(t, own, files[1], files[2])
	if got := inode(t, files[0]); got == namespace || got == inode(t, own) || n.spaceDevice() == device {
		t.Error("the datapath uses a namespace that its device does not lead to")
	}
	n.noDifferences()
}

// TestKernelHTTPProxyGetsANamespaceOfItsOwn: it attaches to a socket of its own, receives no queue, and its namespace
// and heartbeat differ from the ones of the DNS proxy.
func TestKernelHTTPProxyGetsANamespaceOfItsOwn(t *testing.T) {
	usableTUN(t)
	n := newNode(t)
	n.start()
	dns := attachTo(t, n.proxySocket())
	http := attachTo(t, filepath.Join(n.dir, "run", instance.HTTPProxySocketName))
	if http.GetProxy() != netv1.Proxy_PROXY_HTTP || http.GetTapDevice() != "" || http.queue >= 0 {
		t.Errorf("the HTTP proxy received %v", http.ProxyAttachment)
	}
	spaces := [][]int{dns.namespace(t), http.namespace(t)}
	if inode(t, spaces[0][0]) == inode(t, spaces[1][0]) {
		t.Error("both kinds of proxies have the same namespace")
	}
	if got := http.sockets(t, 3, true); len(got) != 3 {
		t.Errorf("%d sockets, want 3", len(got))
	}
	http.beat(t)
	s, err := n.datapath.GetStatus(t.Context(), &datapathv1.GetStatusRequest{})
	if err != nil || len(s.GetProxies()) != 2 {
		t.Fatalf("proxies %v, %v", s.GetProxies(), err)
	}
	for i, p := range s.GetProxies() {
		if !p.GetAttached() || !p.GetTcpAttached() || (p.GetHeartbeatAge() != nil) != (i == 1) {
			t.Errorf("status %v", p)
		}
	}
	n.noDifferences()

	// A restart: both return their namespaces.
	n.stop()
	n.start()
	http = attachTo(t, filepath.Join(n.dir, "run", instance.HTTPProxySocketName))
	if files := http.namespace(t, spaces[1]...); inode(t, files[0]) != inode(t, spaces[1][0]) {
		t.Error("after a restart, the proxy gets another namespace")
	}
	if files := attachTo(t, n.proxySocket()).namespace(t, spaces[0]...); inode(t, files[0]) != inode(t, spaces[0][0]) {
		t.Error("after a restart, the DNS proxy gets another namespace")
	}
	n.noDifferences()
}
