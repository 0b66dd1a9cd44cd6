// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"math"
	"os"
	"testing"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
)

// reopenWithout closes k, removes the pin of a map and opens the directory again.
func reopenWithout(t *testing.T, k *Kernel, name string) *Kernel {
	t.Helper()
	must(t, "Close", k.Close())
	must(t, "remove a pin", os.Remove(k.Pins.Pin(name)))
	return openKernel(t, testOptions(k.opened.Dir))
}

func TestKernelEpochsAreNotUsedAgainWhenTheirCounterIsLost(t *testing.T) {
	k, err := Open(t.Context(), testOptions(kerneltest.NewBPFFS(t)))
	must(t, "Open", err)
	from, to := publish(t, k, a), publish(t, k, b)
	in := frame(from.HostMAC, from.MAC, etherIPv4, ip4Header{src: from.IPv4, dst: to.IPv4, proto: 17}.with(udp(4000, 53)))
	if o := (runner{k}).run(t, program.FromPod, in, skbContext{Ifindex: from.Ifindex}, 0); o.reason.Dropped() {
		t.Fatalf("the first packet: %v", o.reason)
	}
	k = reopenWithout(t, k, bpf.MapsMapSlGen)

	var epoch uint32
	for epoch < to.Policy.Epoch {
		epoch, err = k.Endpoints.SetPolicy(to.Slot, nodetable.Deny, nodetable.Deny)
		must(t, "SetPolicy", err)
	}
	if o := (runner{k}).run(t, program.FromPod, in, skbContext{Ifindex: from.Ifindex}, 0); !o.reason.Dropped() {
		t.Errorf("evaluated under epoch %d, passes a policy that denies everything with epoch %d: %v", to.Policy.Epoch, epoch, o.reason)
	}
}

// TestKernelTheCounterOfEpochsGoesOnBehindThoseOfConnections: a connection may have been evaluated under an epoch that
// no endpoint has any more. The marker for an entry that a program is changing is not an epoch.
func TestKernelTheCounterOfEpochsGoesOnBehindThoseOfConnections(t *testing.T) {
	k, err := Open(t.Context(), testOptions(kerneltest.NewBPFFS(t)))
	must(t, "Open", err)
	for i, e := range []struct {
		tu       conntrack.Tuple
		from, to uint32
	}{
		{tuple(6, "10.244.0.10:40000", "10.244.0.20:80"), 70, 0},
		{tuple(6, "[fd00:244::a]:40000", "[fd00:244::14]:80"), 0, 90},
		{tuple(6, "10.244.0.10:40001", "10.244.0.20:80"), math.MaxUint32, math.MaxUint32 - 1},
	} {
		k.put(t, conntrack.Connection{
			Tuple: e.tu, From: conntrack.End{Slot: endpointmap.ID(i + 1), Epoch: e.from},
			To: conntrack.End{Slot: endpointmap.ID(i + 2), Epoch: e.to},
		})
	}
	k = reopenWithout(t, k, bpf.MapsMapSlGen)
	if e := publish(t, k, a); e.Policy.Epoch <= 90 || e.Policy.Epoch > 100 {
		t.Errorf("the next epoch is %d, want 91", e.Policy.Epoch)
	}
}
