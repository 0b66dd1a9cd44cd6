// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"errors"
	"testing"
	"time"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel"
)

func TestKernelPodsTalkThroughTheProgramsAlone(t *testing.T) {
	w := newWorld(t)
	w.start(true)
	a, b := w.pod("a"), w.pod("b")
	for _, addr := range b.spec.Addrs {
		before := w.counted(kernel.ForwardPeer)
		if err := talk(a.ns, b.echo(addr), patience); err != nil {
			t.Fatalf("tcp a to %v: %v", addr, err)
		}
		// three of the handshake, data and acknowledgement both ways
		if n := w.counted(kernel.ForwardPeer) - before; n < 6 {
			t.Errorf("tcp a to %v: the programs moved %d packets, want at least 6", addr, n)
		}
	}
	if n := w.counted(kernel.ForwardFromStack); n != 0 {
		t.Errorf("%d packets between pods went through the host's stack", n)
	}
	diffs, err := w.node.Core.Check(t.Context(), a.owner, endpoint.Beliefs{})
	if err != nil || len(diffs) > 0 {
		t.Errorf("check of a fresh endpoint: %+v, %v", diffs, err)
	}
}

func TestKernelHostAndPodTalk(t *testing.T) {
	w := newWorld(t)
	w.start(true)
	p := w.pod("a")
	for _, addr := range p.spec.Addrs {
		if err := talk(w.home, p.echo(addr), patience); err != nil {
			t.Errorf("host to %v: %v", addr, err)
		}
	}
	host := &pod{t: t, ns: w.home}
	for _, addr := range w.node.NodeAddrs {
		before := w.counted(kernel.ForwardHost)
		if err := talk(p.ns, host.echo(addr), patience); err != nil {
			t.Errorf("pod to its host %v: %v", addr, err)
		}
		if w.counted(kernel.ForwardHost) == before {
			t.Errorf("pod to its host %v: no packet counted", addr)
		}
	}
}

func TestKernelDeletionCutsAtOnceAndReleasesLater(t *testing.T) {
	w := newWorld(t)
	w.start(true)
	a, b := w.pod("a"), w.pod("b")
	addr := b.echo(b.spec.Addrs[0])
	c, err := dialIn(a.ns, "tcp", addr, patience)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := exchange(c, "before", patience); err != nil {
		t.Fatal(err)
	}
	if existed, err := w.node.Core.Delete(t.Context(), b.owner); err != nil || !existed {
		t.Fatalf("delete: %v, %v", existed, err)
	}
	dropped := w.counted(kernel.DropNoRoute) + w.counted(kernel.DropNoEndpoint)
	if err := exchange(c, "after", 300*time.Millisecond); err == nil {
		t.Error("a connection of a deleted endpoint still exchanges data")
	}
	if w.counted(kernel.DropNoRoute)+w.counted(kernel.DropNoEndpoint) == dropped {
		t.Error("no drop was counted")
	}
	eventually(t, "release", func() error {
		w.leases.mu.Lock()
		defer w.leases.mu.Unlock()
		if _, held := w.leases.held[b.owner]; held || w.node.Core.Counts().PendingReleases > 0 {
			return errors.New("the addresses are still held")
		}
		return nil
	})
	// the namespace outlives the endpoint: the device must go all the same
	eventually(t, "reap", func() error {
		devices, err := w.node.dev.Devices()
		if err != nil {
			return err
		}
		if len(devices) != 1 {
			return errors.New("the device is still there")
		}
		return nil
	})
}
