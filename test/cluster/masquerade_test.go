// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package cluster

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// seen sends a datagram until it arrives, and returns the source address that the receiver sees.
func seen(t *testing.T, from, to pod.Pod, at netip.Addr) (source netip.Addr) {
	t.Helper()
	server, err := to.ListenPacket(netip.AddrPortFrom(at, 0))
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	client, err := from.ListenPacket(netip.AddrPortFrom(netip.IPv6Unspecified(), 0))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	port := server.LocalAddr().(*net.UDPAddr).AddrPort().Port()
	servicetest.EventuallyNil(t, fmt.Sprintf("a datagram of %s to %s", from.Name, at), func() error {
		if _, err := client.WriteToUDPAddrPort([]byte("x"), netip.AddrPortFrom(at, port)); err != nil {
			return err
		}
		_ = server.SetReadDeadline(time.Now().Add(time.Second))
		_, sender, err := server.ReadFromUDPAddrPort(make([]byte, 10))
		source = sender.Addr().Unmap()
		return err
	})
	return source
}

// TestAddressesThatOthersSee sends from pods and hosts to pods and hosts of another node and to the outside, in every
// mode, with and without masquerade. Pods on other nodes see the pod's address. The outside sees the node's address
// with masquerade, and the pod's address without.
func TestAddressesThatOthersSee(t *testing.T) {
	t.Parallel()
	for _, mode := range modes {
		for _, masquerade := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, masquerade %t", mode, masquerade), func(t *testing.T) {
				t.Parallel()
				c := newCluster(t, devnode.ClusterOptions{Nodes: 2, Routing: mode, Options: devnode.Options{
					Args: map[string][]string{devnode.Datapath: {fmt.Sprintf("--masquerade-enabled=%t", masquerade)}},
				}})
				here, there := c.nodes[0], c.nodes[1]
				from, to := here.add(t, "client"), there.add(t, "web")
				here.identityOf(t, to, there)
				there.identityOf(t, from, here)
				outside := c.plug(t)
				for family, own := range from.Addresses() {
					want := func(what string, got netip.Addr, want ...netip.Addr) {
						t.Helper()
						if !slices.Contains(want, got) {
							t.Errorf("%s: the source is %s, want one of %s", what, got, want)
						}
					}
					node := here.Addresses()[family]
					want("pod to pod", seen(t, from, to, to.Addresses()[family]), own)
					want("host to pod", seen(t, here.host(), to, to.Addresses()[family]), node, here.overlay()[family])
					if masquerade {
						want("pod to the outside", seen(t, from, outside, outside.Addresses()[family]), node)
					} else {
						want("pod to the outside", seen(t, from, outside, outside.Addresses()[family]), own)
					}
					got := seen(t, from, there.host(), there.Addresses()[family])
					want("pod to node", got, own, node)
					t.Logf("pod %s to node %s: from %s", own, there.Addresses()[family], got)
					for _, a := range []netip.Addr{there.Addresses()[family], there.overlay()[family]} {
						if err := exchange(t.Context(), from, there.host(), a); err != nil {
							t.Errorf("pod to host %s: %v", a, err)
						}
						if err := exchange(t.Context(), here.host(), there.host(), a); err != nil {
							t.Errorf("host to host %s: %v", a, err)
						}
					}
					if err := exchange(t.Context(), here.host(), to, to.Addresses()[family]); err != nil {
						t.Errorf("host to pod: %v", err)
					}
					if err := exchange(t.Context(), outside, here.host(), node); err != nil {
						t.Errorf("outside to host: %v", err)
					}
					if masquerade {
						if err := exchange(t.Context(), from, outside, outside.Addresses()[family]); err != nil {
							t.Errorf("pod to outside: %v", err)
						}
					}
				}
			})
		}
	}
}

// TestPodsSpeakForNoNodeByAnAddressThatItHasNotRegistered sends from a pod to the tunnel port of another node, at an
// address that this node has not registered. The masqueraded packet must have the address of a registered node.
func TestPodsSpeakForNoNodeByAnAddressThatItHasNotRegistered(t *testing.T) {
	t.Parallel()
	a := newArena(t, "overlay", "--masquerade-enabled")
	hidden := []netip.Addr{netip.MustParseAddr("192.0.2.50"), netip.MustParseAddr("2001:db8:50::50")}
	for family, h := range hidden {
		p := &net.IPNet{IP: h.AsSlice(), Mask: net.CIDRMask(h.BitLen(), h.BitLen())}
		err := pod.In(a.attacked.Netns(), func() error {
			lo, err := netlink.LinkByName("lo")
			if err != nil {
				return err
			}
			return netlink.AddrAdd(lo, &netlink.Addr{IPNet: p})
		})
		err = errors.Join(err, pod.In(a.nodes[1].Netns(), func() error {
			return netlink.RouteAdd(&netlink.Route{Dst: p, Gw: a.attacked.Addresses()[family].AsSlice()})
		}))
		if err != nil {
			t.Fatal(err)
		}
	}
	w, gateway := newWire(t, a.pods[1].Netns), hostEnd(t, a.nodes[1], a.pods[1])
	var shots []shot
	for family, h := range hidden {
		for k := range 20 {
			for _, vni := range append(a.ids, 6, 9) {
				source := a.nodes[1].overlay()[family]
				if vni >= 256 {
					b := source.AsSlice()
					b[len(b)-1] = 77
					source, _ = netip.AddrFromSlice(b)
				}
				what := fmt.Sprintf("of a pod by %s as %s, VNI %d", h, source, vni)
				shots = append(shots, a.crafted(what, func(payload []byte) []byte {
					inner := datagram(from7(source), to7(a.pods[0].Addresses()[family]), payload)
					return datagram(netip.AddrPortFrom(a.pods[1].Addresses()[family], uint16(40000+k)),
						netip.AddrPortFrom(h, tunnelPort), a.tunnelled(vni, inner))
				}))
			}
		}
	}
	a.fireCounted(t, "a pod by hidden addresses", w, gateway, shots, false)
}
