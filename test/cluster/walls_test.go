// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package cluster

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// breach is a protection of a node that is removed while the datapath is stopped and cannot notice it.
type breach struct {
	what string
	do   func(t *testing.T, n *node)
	// closed is set if, after the breach, no packets from other nodes arrive, and no forged packets either.
	closed bool
	// hosts is set if the breach removes the only protection of the host itself, which has no policy.
	hosts bool
	// loopback is set if, after the breach, the kernel drops IPv6 packets with a loopback source before they are
	// counted.
	loopback bool
	// uncounted is set if, after the breach, no counter counts the dropped packets.
	uncounted bool
}

// inNode returns a breach that runs in a node's namespace.
func inNode(do func() error) func(t *testing.T, n *node) {
	return func(t *testing.T, n *node) {
		t.Helper()
		if err := pod.In(n.Netns(), do); err != nil {
			t.Fatal(err)
		}
	}
}

// flushed deletes all rules of a firewall chain.
func flushed(chain string) func(t *testing.T, n *node) {
	return func(t *testing.T, n *node) {
		t.Helper()
		n.firewall(t, func(c *nftables.Conn, table *nftables.Table) error {
			c.FlushChain(&nftables.Chain{Name: chain, Table: table})
			return c.Flush()
		})
	}
}

func withoutTable(t *testing.T, n *node) {
	t.Helper()
	n.firewall(t, func(c *nftables.Conn, table *nftables.Table) error {
		c.DelTable(table)
		return c.Flush()
	})
}

// breachesOf returns the breaches of a routing mode.
func breachesOf(mode string) []breach {
	all := []breach{
		{what: "the rules about what has no mark", do: flushed("unmarked"), hosts: true},
		{what: "the rules about foreign devices", do: flushed("foreign"), hosts: true},
		{what: "the rules about what is forwarded", do: flushed("forwarded")},
		{what: "the whole firewall", do: withoutTable, hosts: true},
	}
	if mode == "native" {
		return append(all, breach{
			what: "the programs of the uplink", do: inNode(func() error { return onUplink(deletePrograms) }), closed: true,
		})
	}
	tunnel := inNode(func() error { return onTunnel(deletePrograms) })
	uplink := inNode(func() error { return onUplink(deletePrograms) })
	remove := inNode(func() error { return onTunnel(netlink.LinkDel) })
	// without the tunnel, sluice_from_underlay still takes packets out of it, and without sluice_from_underlay, the tunnel
	return append(all,
		breach{what: "the programs of the uplink", do: uplink},
		breach{what: "the programs of the tunnel", do: tunnel, loopback: true},
		breach{what: "the programs of the tunnel and the uplink", do: both(tunnel, uplink), closed: true},
		breach{what: "the tunnel", do: remove, uncounted: true},
		breach{what: "the tunnel and the programs of the uplink", do: both(remove, uplink), closed: true, uncounted: true},
		breach{what: "the programs of the pod", do: withoutPodPrograms})
}

// both returns a breach of two protections.
func both(one, other func(t *testing.T, n *node)) func(t *testing.T, n *node) {
	return func(t *testing.T, n *node) {
		t.Helper()
		one(t, n)
		other(t, n)
	}
}

// withoutPodPrograms detaches the programs of all pods of the node.
func withoutPodPrograms(t *testing.T, n *node) {
	t.Helper()
	inNode(func() error {
		links, err := netlink.LinkList()
		for _, l := range links {
			name := l.Attrs().Name
			if strings.HasPrefix(name, "sl") && !strings.HasPrefix(name, "slp") && l.Type() == "veth" {
				err = errors.Join(err, deletePrograms(l))
			}
		}
		return err
	})(t, n)
}

// aimed returns the attacks on a node's pod, and on the node itself unless its only protection is removed: tunnelled
// packets from a registered node, and unencapsulated packets from the link.
func (a *arena) aimed(mode string, b breach) (shots []shot) {
	if mode == "overlay" {
		at := a.attacked.Addresses()[0]
		shots = a.inTunnels("as node 2", a.nodes[2].Addresses()[0], at, 2)
	}
	targets := a.pods[0].Addresses()
	if !b.hosts {
		targets = slices.Concat(targets, a.attacked.Addresses(), a.attacked.overlay())
	}
	for _, c := range a.claims() {
		if c.of < 0 || slices.Contains(a.nodes[c.of].Addresses(), c.address) {
			continue // nodes and the outside may send unencapsulated packets
		}
		for _, to := range targets {
			if to.Is4() == c.address.Is4() {
				s := a.crafted(fmt.Sprintf("plain: %s %s to %s", c.what, c.address, to), func(payload []byte) []byte {
					return datagram(from7(c.address), to7(to), payload)
				})
				s.heard = mode == "native" && c.of != 0
				s.stack = b.hosts && c.of == 0 // routing rules drop these
				shots = append(shots, s)
			}
		}
	}
	if b.loopback {
		for i := range shots {
			shots[i].stack = shots[i].stack || strings.Contains(shots[i].what, "world ::1 ")
		}
	}
	if b.closed {
		for i := range shots {
			// The kernel drops IPv6 packets with a loopback source before any firewall.
			shots[i].heard, shots[i].stack = false, strings.Contains(shots[i].what, "world ::1 ")
		}
	}
	return shots
}

// signal sends a signal to a service of the node.
func (n *node) signal(t *testing.T, service string, s unix.Signal) {
	t.Helper()
	pid, err := n.PID(service)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(pid, s); err != nil {
		t.Fatal(err)
	}
}

// stop stops a service until it gets a SIGCONT.
func (n *node) stop(t *testing.T, service string) {
	t.Helper()
	n.signal(t, service, unix.SIGSTOP)
	servicetest.EventuallyNil(t, service+" stands still", func() error {
		pid, err := n.PID(service)
		if err != nil {
			return err
		}
		tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
		for _, task := range tasks {
			stat, err := os.ReadFile(task)
			if _, state, _ := strings.Cut(string(stat), ") "); err == nil && !strings.HasPrefix(state, "T") {
				return fmt.Errorf("a thread is in state %.1s", state)
			}
		}
		return err
	})
}

// TestWallsStayClosedWhenOneIsGone stops the datapath of a node and removes, one after the other, the programs of its
// tunnel or uplink, each chain of its firewall, and the tunnel. Meanwhile no forged packet is delivered. The datapath
// restores everything as soon as it continues.
func TestWallsStayClosedWhenOneIsGone(t *testing.T) {
	for _, mode := range modes {
		t.Run(mode, func(t *testing.T) {
			a := newArena(t, mode)
			n := a.attacked
			for _, b := range breachesOf(mode) {
				t.Run(b.what, func(t *testing.T) {
					before := n.drops(t)
					n.stop(t, devnode.Datapath)
					t.Cleanup(func() { n.signal(t, devnode.Datapath, unix.SIGCONT) })
					b.do(t, n)
					shots := a.aimed(mode, b)
					a.storm(t, b, before, shots)
					n.signal(t, devnode.Datapath, unix.SIGCONT)
					servicetest.EventuallyNil(t, b.what+": all is repaired", func() error {
						if out, err := n.run(t.Context(), "check"); err != nil {
							return errors.Join(err, fmt.Errorf("%s", out))
						}
						_, err := a.ask(a.pods[1], a.pods[0].IPv4)
						return err
					})
					b.closed, b.hosts = false, false
					a.fire(t, "after "+b.what, a.wire, a.macs[0], a.aimed(mode, b))
				})
			}
		})
	}
}

// storm sends the attacks to a node with a breach while its datapath is stopped.
func (a *arena) storm(t *testing.T, b breach, before map[string]uint64, shots []shot) {
	t.Helper()
	a.ears.take()
	firewall := a.attacked.firewallDrops(t)
	denied, heard := 0, map[string]bool{}
	for _, s := range shots {
		if err := a.wire.send(a.macs[0], s.packet); err != nil {
			t.Fatal(err)
		}
		if heard[s.what] = s.heard; !s.heard && !s.stack {
			denied++
		}
	}
	// The very last packet must pass whatever is removed.
	servicetest.EventuallyNil(t, "the outsider reaches the node", func() error {
		_, err := a.ask(a.outside, a.attacked.Addresses()[0])
		return err
	})
	var walls uint64
	for chain, count := range a.attacked.firewallDrops(t) {
		walls += count - min(count, firewall[chain])
	}
	a.attacked.signal(t, devnode.Datapath, unix.SIGCONT)
	var by uint64
	count := func() error {
		by = 0
		for reason, count := range a.attacked.drops(t) {
			if !strings.HasPrefix(reason, "firewall") {
				by += count - before[reason]
			}
		}
		if by+walls < uint64(denied) && !b.uncounted {
			return fmt.Errorf("%d drops of programs and %d of the firewall, want %d", by, walls, denied)
		}
		return nil
	}
	servicetest.EventuallyNil(t, b.what+": all is counted", count)
	wrong := 0
	for who := range a.ears.take() {
		if _, what, _ := strings.Cut(who, ": "); !heard[what] {
			if wrong++; wrong <= 20 {
				t.Errorf("without %s: heard by %s", b.what, who)
			}
		}
	}
	t.Logf("without %s: %d packets, %d denied, %d heard wrongly; %d dropped by programs, %d by the firewall",
		b.what, len(shots), denied, wrong, by, walls)
}
