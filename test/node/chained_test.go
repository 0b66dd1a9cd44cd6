// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/netip"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/servicetest"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	"github.com/sluice-net/sluice/test/internal/cni"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// debianPlugins is the directory of Debian's containernetworking-plugins.
const debianPlugins = "/usr/lib/cni"

// nothing fails the test if a socket has an unread datagram.
func nothing(t *testing.T, what string, c *net.UDPConn) {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	buffer := make([]byte, 64)
	readErr := raw.Read(func(fd uintptr) bool {
		var n int
		if n, _, err = unix.Recvfrom(int(fd), buffer, unix.MSG_DONTWAIT); err == nil { //nolint:gosec // a descriptor
			t.Errorf("%s: %q arrived", what, buffer[:n])
		}
		return true
	})
	// An ICMP error for a packet of the socket may be pending, but no datagram.
	if err := errors.Join(readErr, err); err != nil && !errors.Is(err, syscall.EAGAIN) &&
		!errors.Is(err, syscall.ECONNREFUSED) && !errors.Is(err, syscall.EHOSTUNREACH) {
		t.Errorf("%s: %v", what, err)
	}
}

// TestKernelNothingPassesOnceDELHasAnswered: after DEL, the interface is not removed yet, and the network namespace
// still exists. A process in it can still send, but no packet passes.
func TestKernelNothingPassesOnceDELHasAnswered(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	pods := n.addPods(t, "departed", "server", "other")
	departed, server, other := pods[0], pods[1], pods[2]
	const port = 7000
	ask := func(from, to pod.Pod, address netip.Addr) (sender, receiver *net.UDPConn) {
		t.Helper()
		receiver, err := to.ListenPacket(netip.AddrPortFrom(address, port))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { receiver.Close() })
		if sender, err = from.DialUDP(netip.AddrPortFrom(address, port)); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { sender.Close() })
		return sender, receiver
	}
	says := func(from, to *net.UDPConn, text string) {
		t.Helper()
		if _, err := from.Write([]byte(text)); err != nil {
			t.Fatal(err)
		}
		buffer := make([]byte, 64)
		if k, _, err := to.ReadFromUDP(buffer); err != nil || string(buffer[:k]) != text {
			t.Fatalf("received %q (%v), want %q", buffer[:k], err, text)
		}
	}
	type way struct{ sender, receiver, control *net.UDPConn }
	var ways []way
	for i, address := range server.Addresses() {
		out, at := ask(departed, server, address)
		control, err := other.DialUDP(netip.AddrPortFrom(address, port))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { control.Close() })
		in, inside := ask(server, departed, departed.Addresses()[i])
		says(out, at, "before")
		says(in, inside, "before")
		ways = append(ways, way{out, at, control}, way{sender: in, receiver: inside})
	}

	n.del(t, departed)
	for _, w := range ways {
		for range 20 {
			_, _ = w.sender.Write([]byte("after")) // it may fail
		}
	}
	for _, w := range ways {
		if w.control != nil {
			says(w.control, w.receiver, "of another pod") // a packet of the departed pod would arrive before this one
		}
	}
	for _, w := range ways {
		nothing(t, "after DEL", w.receiver)
	}
	servicetest.EventuallyNil(t, "the interface is removed", func() error {
		return pod.In(departed.Netns, func() error {
			if _, err := net.InterfaceByName("eth0"); err == nil {
				return errors.New("eth0 is still there")
			}
			return nil
		})
	})
	for _, p := range pods[1:] {
		n.del(t, p)
	}
	n.wantNothingHeld(t)
}

// TestKernelTuningBehindThePluginFailsCHECKWhereItChangesTheInterface: the plugin `tuning` changes the interface after
// ADD. A changed MTU fails CHECK. A changed MAC removes the pod's permanent neighbour entries and so breaks its
// network; CHECK and the audit report them.
func TestKernelTuningBehindThePluginFailsCHECKWhereItChangesTheInterface(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	peer := n.addPods(t, "peer")[0]
	for _, x := range []struct {
		name   string
		tuning map[string]any
		check  string // expected error of CHECK; empty: CHECK succeeds
		talks  bool
	}{
		{"sysctl", map[string]any{"sysctl": map[string]string{"net.ipv4.conf.eth0.arp_filter": "1"}}, "", true},
		{"mtu", map[string]any{"mtu": 1280}, "1280", true},
		{"mac", map[string]any{"mac": "02:00:00:00:00:07"}, "neighbour 169.254.1.1", false},
	} {
		config, err := cni.List(n.CNIConflist(), n.Instance(), "1.0.0")
		if err != nil {
			t.Fatal(err)
		}
		var parsed map[string]any
		if err := json.Unmarshal(config, &parsed); err != nil {
			t.Fatal(err)
		}
		x.tuning["type"], x.tuning["dataDir"] = "tuning", t.TempDir() // the default is a copy in /run/cni
		parsed["plugins"] = append(parsed["plugins"].([]any), x.tuning)
		if config, err = json.Marshal(parsed); err != nil {
			t.Fatal(err)
		}
		list, err := libcni.ConfListFromBytes(config)
		if err != nil {
			t.Fatal(err)
		}
		p := newPod(t, x.name)
		runtime := libcni.NewCNIConfigWithCacheDir([]string{filepath.Dir(n.Plugin()), debianPlugins}, t.TempDir(), nil)
		of := &libcni.RuntimeConf{ContainerID: p.Name, NetNS: p.Netns, IfName: "eth0"}
		result, err := runtime.AddNetworkList(ctx, list, of)
		if err != nil {
			t.Fatalf("ADD with tuning %s: %v", x.name, err)
		}
		encoded, err := json.Marshal(result)
		if err != nil {
			t.Fatal(err)
		}
		p = withAddresses(t, p, encoded)
		switch err := runtime.CheckNetworkList(ctx, list, of); {
		case x.check == "" && err != nil:
			t.Errorf("CHECK with tuning %s: %v", x.name, err)
		case x.check != "" && (err == nil || !strings.Contains(err.Error(), x.check)):
			t.Errorf("CHECK with tuning %s: %v, want an error with %q", x.name, err, x.check)
		}
		audit, err := n.datapath.AuditMaps(ctx, &datapathv1.AuditMapsRequest{})
		if err != nil {
			t.Fatal(err)
		}
		all, err := receiveAll(audit)
		if err != nil {
			t.Fatal(err)
		}
		var differences []string
		for _, d := range all {
			differences = append(differences, d.GetDifference().String())
		}
		if text := strings.Join(differences, "\n"); x.talks {
			exchange(t, p, peer)
		} else if !strings.Contains(text, "neighbour") {
			t.Errorf("with tuning %s the audit reports %q, want the missing neighbours", x.name, text)
		}
		if err := runtime.DelNetworkList(ctx, list, of); err != nil {
			t.Errorf("DEL with tuning %s: %v", x.name, err)
		}
	}
	n.del(t, peer)
	n.wantNothingHeld(t)
}
