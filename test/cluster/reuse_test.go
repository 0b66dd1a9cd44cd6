// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package cluster

import (
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// die kills every process of a node with SIGKILL, and disconnects it from the network.
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

// segment returns a TCP packet.
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

// TestAddressesOfADeadNodeAreJudgedAsTheirNewPods kills a node with a pod that may connect to a pod on another node,
// and assigns its addresses to a pod on a third node that may not. From the first packet on, the old verdict is not
// used, neither for existing nor for new connections. Then an allowed pod gets the addresses. Connections between other
// pods survive all changes.
func TestAddressesOfADeadNodeAreJudgedAsTheirNewPods(t *testing.T) {
	for _, mode := range modes {
		t.Run(mode, func(t *testing.T) {
			c := newCluster(t, devnode.ClusterOptions{Nodes: 3, Routing: mode, Options: devnode.Options{
				Args: map[string][]string{
					// With native routing, an address is in quarantine for twice the second duration.
					devnode.Identity: {"--etcd-alive-ttl=5s", "--cluster-stale-mappings=1s"}, devnode.IPAM: {"--quarantine=1s"},
				},
			}})
			here, heir, dead := c.nodes[0], c.nodes[1], c.nodes[2]
			web, client, living := here.add(t, "web"), dead.add(t, "client"), heir.add(t, "client")
			here.identityOf(t, client, dead)
			here.identityOf(t, living, heir)
			c.enforced(t, webAcrossNodes)
			servicetest.EventuallyNil(t, "the policy is enforced", func() error {
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
			var friend pod.Pod
			servicetest.EventuallyNil(t, "the addresses are allocated again", func() (err error) {
				friend, err = heir.tryAdd(t.Context(), newPod(t).WithAddresses(client.Addresses()), "client")
				return err
			})
			for _, a := range web.Addresses() {
				servicetest.EventuallyNil(t, "a pod that is let in", func() error {
					return exchange(t.Context(), friend, web, a)
				})
			}
			// The same packets from an allowed pod arrive.
			w, mac, shots := newWire(t, friend.Netns), hostEnd(t, heir, friend), intruding(old)
			for _, s := range shots {
				if err := w.send(mac, s.packet); err != nil {
					t.Fatal(err)
				}
			}
			heard := map[string]bool{}
			servicetest.EventuallyNil(t, "the same packets of a friend", func() error {
				for who := range ears.take() {
					heard[strings.TrimPrefix(who, web.Name+": ")] = true
				}
				if len(heard) != len(shots) {
					return fmt.Errorf("%d of %d were heard", len(heard), len(shots))
				}
				return nil
			})
			live("its addresses have moved to a friend", flows)
		})
	}
}

// intruding returns packets of every kind for the connections that an address had.
func intruding(old []flow) (shots []shot) {
	for i, f := range old {
		from, to := endOf(f.client.LocalAddr()), endOf(f.client.RemoteAddr())
		for what, build := range map[string]func([]byte) []byte{
			"segment": func(b []byte) []byte { return segment(from, to, ack, b) },
			"SYN":     func(b []byte) []byte { return segment(from, to, syn, b) },
			"UDP":     func(b []byte) []byte { return datagram(from, to, b) },
		} {
			what = fmt.Sprintf("%s%d %s", marker, i, what)
			shots = append(shots, shot{what: what, packet: build([]byte(what + ";"))})
		}
	}
	return shots
}

// endOf returns the address and port of an end of a connection.
func endOf(a net.Addr) netip.AddrPort {
	end := a.(*net.TCPAddr).AddrPort()
	return netip.AddrPortFrom(end.Addr().Unmap(), end.Port())
}

// intrude sends packets of every kind from a pod that has the addresses of a former pod: packets of the former
// connections and of other connections. It sends while the other node learns the new identity of the addresses, and
// for a while afterwards.
func intrude(t *testing.T, here, heir *node, stranger, web pod.Pod, old []flow) {
	t.Helper()
	w := newWire(t, stranger.Netns)
	mac, shots := hostEnd(t, heir, stranger), intruding(old)
	sent, known := 0, time.Time{}
	for known.IsZero() || time.Since(known) < time.Second {
		for _, s := range shots {
			if err := w.send(mac, s.packet); err != nil {
				t.Fatal(err)
			}
			sent++
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
	t.Logf("%d packets with the addresses of the removed pod", sent)
}

// TestAddressOfAFormerPodIsNotGivenOutTooEarly: with native routing, a node identifies a pod on another node by its
// address. While etcd or the other node's identity service is unavailable, no new pod gets the address of a former
// pod. Otherwise the new pod would get the permissions of the former pod. Afterwards the address is in quarantine.
// Other pods can always be created.
func TestAddressOfAFormerPodIsNotGivenOutTooEarly(t *testing.T) {
	for _, away := range []string{"etcd", devnode.Identity} {
		t.Run(away, func(t *testing.T) {
			c := newCluster(t, devnode.ClusterOptions{Nodes: 2, Routing: "native", Options: devnode.Options{
				Args: map[string][]string{devnode.IPAM: {"--quarantine=1s"}},
			}})
			here, other := c.nodes[0], c.nodes[1]
			web, client, stranger := here.add(t, "web"), other.add(t, "client"), other.add(t, "stranger")
			here.identityOf(t, client, other)
			here.identityOf(t, stranger, other)
			c.enforced(t, webAcrossNodes)
			servicetest.EventuallyNil(t, "the former pod is let in", func() error {
				return exchange(t.Context(), client, web, web.IPv4)
			})
			if away == "etcd" {
				for _, member := range c.Hub().Services() {
					if err := c.Hub().Stop(t.Context(), member); err != nil {
						t.Fatal(err)
					}
				}
			} else if err := here.Stop(t.Context(), away); err != nil {
				t.Fatal(err)
			}
			other.del(t, client)
			refused := func(when string) {
				t.Helper()
				servicetest.EventuallyNil(t, when, func() error {
					p, err := other.tryAdd(t.Context(), newPod(t).WithAddresses(client.Addresses()), "stranger")
					if err == nil {
						t.Fatalf("%s pod %s has the addresses of %s", when, p.Name, client.Name)
					}
					if !strings.Contains(err.Error(), "may not be allocated again yet") {
						return err // the address is still in quarantine
					}
					return nil
				})
			}
			refused("while " + away + " is unavailable,")
			for range 2 {
				p := other.add(t, "stranger")
				ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
				if exchange(ctx, p, web, web.IPv4) == nil {
					t.Errorf("%s, which has addresses of its own, has reached the pod", p.Name)
				}
				cancel()
			}
			if away == "etcd" {
				for _, member := range c.Hub().Services() {
					if err := c.Hub().Start(t.Context(), member); err != nil {
						t.Fatal(err)
					}
				}
			} else if err := here.Start(t.Context(), away); err != nil {
				t.Fatal(err)
			}
			here.forgets(t, client)
			refused("when " + away + " is back,")
		})
	}
}
