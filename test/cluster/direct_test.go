// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package cluster

import (
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// byDevice returns how many packets a node's tunnel device has sent and received.
func (n *node) byDevice(t *testing.T) (sent, received uint64) {
	t.Helper()
	if err := pod.In(n.Netns(), func() error {
		return onTunnel(func(l netlink.Link) error {
			sent, received = l.Attrs().Statistics.TxPackets, l.Attrs().Statistics.RxPackets
			return nil
		})
	}); err != nil {
		t.Fatal(err)
	}
	return sent, received
}

// travels waits until packets of a flow leave a node by the tunnel device, or bypass it, and arrive in the same or the
// other way.
func (n *node) travels(t *testing.T, f flow, sentByDevice, receivedByDevice bool) {
	t.Helper()
	const exchanges = 20 // more than the packets of the kernel itself meanwhile
	servicetest.Eventually(t, "the path of packets of "+n.Name(), func() bool {
		sent, received := n.byDevice(t)
		for range exchanges {
			if err := f.speak(); err != nil {
				t.Fatal(err)
			}
		}
		sentAfter, receivedAfter := n.byDevice(t)
		return (sentAfter-sent >= exchanges) == sentByDevice &&
			(receivedAfter-received >= exchanges) == receivedByDevice
	})
}

// TestDirectPathOutlivesTheDatapath kills the datapath while packets bypass the tunnel device. Connections continue;
// after a few seconds, their packets use the device. When the datapath runs again, packets bypass the device again.
func TestDirectPathOutlivesTheDatapath(t *testing.T) {
	t.Parallel()
	c := newCluster(t, devnode.ClusterOptions{Nodes: 2, Routing: "overlay"})
	a, b := c.nodes[0], c.nodes[1]
	from, to := a.add(t, "client"), b.add(t, "web")
	var flows []flow
	for _, address := range to.Addresses() {
		f, err := openFlow(t.Context(), from, to, address)
		defer f.close()
		if err != nil {
			t.Fatal(err)
		}
		flows = append(flows, f)
	}
	all := func(when string, sentByDevice, receivedByDevice bool) {
		t.Helper()
		t.Log(when)
		for _, f := range flows {
			a.travels(t, f, sentByDevice, receivedByDevice)
		}
	}
	all("at first", false, false)
	a.kill(t, devnode.Datapath)
	all("the datapath was killed", true, true)
	if err := a.Start(t.Context(), devnode.Datapath); err != nil {
		t.Fatal(err)
	}
	all("the datapath is back", false, false)
	b.kill(t, devnode.Datapath)
	for i, f := range flows {
		b.travels(t, f, true, true)
		if err := f.speak(); err != nil {
			t.Errorf("flow %d: %v", i, err)
		}
	}
	all("the other datapath was killed", false, false)
	if err := b.Start(t.Context(), devnode.Datapath); err != nil {
		t.Fatal(err)
	}
	if err := a.SetArgs(devnode.Datapath, "--routing-mode=overlay", "--routing-shortcut=off"); err != nil {
		t.Fatal(err)
	}
	if err := a.Restart(t.Context(), devnode.Datapath); err != nil {
		t.Fatal(err)
	}
	all("routing.shortcut is off", true, true)
}
