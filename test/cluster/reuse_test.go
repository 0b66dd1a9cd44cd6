// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package cluster

import (
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/test/internal/cni"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// addAt connects a pod with addresses of its own choice.
func (n *node) addAt(t *testing.T, app string, addresses []netip.Addr) pod.Pod {
	t.Helper()
	p := newPod(t)
	var ips []string
	for _, a := range addresses {
		ips = append(ips, a.String())
	}
	config, err := cni.PluginConfig(n.CNIConflist(), "1.0.0", map[string]any{
		"runtimeConfig": map[string]any{"labels": []map[string]string{{"key": "app", "value": app}}, "ips": ips},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	result, err := cni.Run(ctx, cni.Call{
		Plugin: n.Plugin(), Command: "ADD", ContainerID: p.Name, Netns: p.Netns, IfName: "eth0",
		Args: "IgnoreUnknown=1;K8S_POD_NAMESPACE=test;K8S_POD_NAME=" + p.Name, Path: filepath.Dir(n.Plugin()), Config: config,
	})
	if err != nil {
		t.Fatal(err)
	}
	got, err := cni.Addresses(result)
	if err != nil {
		t.Fatal(err)
	}
	return p.WithAddresses(got)
}

// die ends every process of a node as kill -9 does, and takes it off the network.
func (n *node) die(t *testing.T) {
	t.Helper()
	for _, service := range n.Services() {
		n.kill(t, service)
	}
	err := pod.In(n.Netns(), func() error {
		link, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		return netlink.LinkSetDown(link)
	})
	if err != nil {
		t.Fatal(err)
	}
}

// segment is a TCP packet.
func segment(from, to netip.AddrPort, flags byte, payload []byte) []byte {
	b := binary.BigEndian.AppendUint16(nil, from.Port())
	b = binary.BigEndian.AppendUint16(b, to.Port())
	b = binary.BigEndian.AppendUint32(b, 1)
	b = binary.BigEndian.AppendUint32(b, 1)
	b = append(append(b, 5<<4, flags, 4, 0, 0, 0, 0, 0), payload...)
	pseudo := append(append([]byte{}, from.Addr().AsSlice()...), to.Addr().AsSlice()...)
	pseudo = append(pseudo, 0, unix.IPPROTO_TCP, byte(len(b)>>8), byte(len(b)))
	binary.BigEndian.PutUint16(b[16:], checksum(append(pseudo, b...), 0))
	return ip(from.Addr(), to.Addr(), unix.IPPROTO_TCP, part{}, b)
}

// TCP flags.
const (
	syn = 2
	ack = 16
)

// TestAddressesOfADeadNodeAreJudgedAsTheirNewPods kills a node whose pod is let into a
// pod of another one, and gives its addresses to a pod of a third node that is not
// let in: from the first packet on nothing passes by the old verdict, neither
// into the connections of before nor as new ones. A pod that is let in gets the addresses
// afterwards. Connections of others live through all of it.
func TestAddressesOfADeadNodeAreJudgedAsTheirNewPods(t *testing.T) {
	for _, mode := range modes {
		t.Run(mode, func(t *testing.T) {
			c := newCluster(t, devnode.ClusterOptions{Nodes: 3, Routing: mode, Options: devnode.Options{
				Args: map[string][]string{devnode.Identity: {"--etcd-alive-ttl=5s"}, devnode.IPAM: {"--quarantine=1s"}},
			}})
			here, heir, dead := c.nodes[0], c.nodes[1], c.nodes[2]
			web, client, living := here.add(t, "web"), dead.add(t, "client"), heir.add(t, "client")
			here.identityOf(t, client, dead)
			here.identityOf(t, living, heir)
			c.enforced(t, webAcrossNodes)
			servicetest.EventuallyNil(t, "the policy is in force", func() error {
				ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
				defer cancel()
				if err := exchange(ctx, heir.host(), web, web.IPv4); err == nil {
					return fmt.Errorf("host %s has reached the pod", heir.Name())
				}
				return nil
			})
			flows, old := openFlows(t, living, web, 100), openFlows(t, client, web, 20)
			live := func(when string, flows []flow) {
				t.Helper()
				for i, f := range flows {
					if err := f.speak(); err != nil {
						t.Fatalf("%s: connection %d: %v", when, i, err)
					}
				}
			}
			live("at first", append(flows, old...))

			dead.die(t)
			servicetest.Eventually(t, "the node is silent", func() bool { return here.stateOf(t, dead) == "NODE_STATE_SILENT" })
			live("the node is silent", flows)
			var pools []string
			for _, p := range append(heir.PodCIDRs(), dead.PodCIDRs()...) {
				pools = append(pools, p.String())
			}
			if err := heir.SetArgs(devnode.IPAM, "--quarantine=1s", "--pools="+strings.Join(pools, ",")); err != nil {
				t.Fatal(err)
			}
			if err := heir.Restart(t.Context(), devnode.IPAM); err != nil {
				t.Fatal(err)
			}
			ears := &ears{heard: map[string]int{}}
			ears.deviceOf(t, web)
			stranger := heir.addAt(t, "stranger", client.Addresses())
			intrude(t, here, heir, stranger, web, old)
			for who := range ears.take() {
				t.Errorf("heard by %s", who)
			}
			live("its addresses have moved to a stranger", flows)

			heir.del(t, stranger)
			here.forgets(t, stranger)
			servicetest.EventuallyNil(t, "the addresses are free again", func() (err error) {
				friend := newFriend(t, heir, client.Addresses())
				for _, a := range web.Addresses() {
					servicetest.EventuallyNil(t, "a pod that is let in", func() error {
						return exchange(t.Context(), friend, web, a)
					})
				}
				return nil
			})
			live("its addresses have moved to a friend", flows)
		})
	}
}

// newFriend waits for the end of the quarantine of the addresses.
func newFriend(t *testing.T, n *node, addresses []netip.Addr) pod.Pod {
	t.Helper()
	time.Sleep(1100 * time.Millisecond) // the quarantine; nothing tells of its end
	return n.addAt(t, "client", addresses)
}

// intrude sends packets of every kind from a pod into the connections that its addresses
// had and beside them, while the other node learns whose they are now and for a while
// after.
func intrude(t *testing.T, here, heir *node, stranger, web pod.Pod, old []flow) {
	t.Helper()
	w := newWire(t, stranger.Netns)
	mac := hostEnd(t, heir, stranger)
	sent, known := 0, time.Time{}
	for known.IsZero() || time.Since(known) < time.Second {
		for _, f := range old {
			from := f.client.LocalAddr().(*net.TCPAddr).AddrPort()
			to := f.client.RemoteAddr().(*net.TCPAddr).AddrPort()
			from = netip.AddrPortFrom(from.Addr().Unmap(), from.Port())
			to = netip.AddrPortFrom(to.Addr().Unmap(), to.Port())
			for what, build := range map[string]func([]byte) []byte{
				"segment": func(b []byte) []byte { return segment(from, to, ack, b) },
				"SYN":     func(b []byte) []byte { return segment(from, to, syn, b) },
				"UDP":     func(b []byte) []byte { return datagram(from, to, b) },
			} {
				if err := w.send(mac, build([]byte(marker+what+";"))); err != nil {
					t.Fatal(err)
				}
				sent++
			}
		}
		if !known.IsZero() {
			continue
		}
		all := true
		for _, a := range stranger.Addresses() {
			number, on, err := here.mapping(t.Context(), a)
			all = all && err == nil && number != 0 && on == heir.Name()
		}
		if all {
			known = time.Now()
		}
	}
	for _, a := range web.Addresses() {
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		if err := exchange(ctx, stranger, web, a); err == nil {
			t.Errorf("the stranger has reached %s", a)
		}
		cancel()
	}
	t.Logf("%d packets under the addresses of the pod that is gone", sent)
}
