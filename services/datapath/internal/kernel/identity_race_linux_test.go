// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"encoding/binary"
	"errors"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
)

// flood sends the packets from two CPUs while change runs, and counts how many passed.
func flood(t *testing.T, shots [2]shot, change func() error) (sent, passed int64) {
	t.Helper()
	var done atomic.Bool
	var all, let atomic.Int64
	shoot := func(s shot) func() error {
		return func() error {
			for !done.Load() {
				ok, err := s.fire()
				if err != nil {
					return err
				}
				all.Add(1)
				if ok {
					let.Add(1)
				}
			}
			return nil
		}
	}
	apart(t, shoot(shots[0]), shoot(shots[1]), func() error {
		defer done.Store(true)
		return change()
	})
	return all.Load(), let.Load()
}

// TestKernelNoPacketMixesTwoIdentities switches an endpoint back and forth between two identities. The peer denies
// ingress from one, and the egress table of the other denies the flow. Neither identity allows the flow, so no packet
// passes (INV-70). The test writes the map entry itself, because SetIdentity would wait much longer between two writes
// than the evaluation of a packet takes.
func TestKernelNoPacketMixesTwoIdentities(t *testing.T) {
	const changes = 20_000
	th := newTheatre(t, false)
	th.putTables(t)
	_, err := th.k.Endpoints.SetPolicy(th.pods["b"].Slot, nodetable.Allow, friends)
	must(t, "SetPolicy", err)
	slot := th.pods["a"].Slot
	_, err = th.k.Endpoints.SetIdentity(t.Context(), slot, stranger, nodetable.Allow, nodetable.Allow)
	must(t, "SetIdentity", err)
	const size = int(unsafe.Sizeof(bpf.MapsSlEndpoint{}))
	mem := th.k.Pins.Memory(bpf.MapsMapSlEp)[int(slot)*size:][:size]
	word := pin.Word(mem, int(unsafe.Offsetof(bpf.MapsSlEndpoint{}.Pol)))
	asStranger := atomic.LoadUint64(word) // policy word with the second identity; friend is the first one
	asFriend := asStranger>>16<<16 | uint64(nodetable.Deny)
	binary.NativeEndian.PutUint32(mem[unsafe.Offsetof(bpf.MapsSlEndpoint{}.Identity):], uint32(friend))

	out := [2]shot{th.shot(say("a", "b", datagram(4000, 53), 0)), th.shot(say("a", "b", datagram(4001, 53), 0))}
	sent, passed := flood(t, out, func() error {
		for i := range changes {
			atomic.StoreUint64(word, [2]uint64{asFriend, asStranger}[i%2])
			if i%100 == 0 {
				yield()
			}
		}
		return nil
	})
	t.Logf("%d packets", sent)
	if passed > 0 || sent < 100 {
		t.Errorf("%d of %d packets passed that neither identity allows", passed, sent)
	}
}

// TestKernelAChangeOfIdentityDropsNothingThatBothAllow changes an endpoint between two identities that both may
// communicate, by tables of their own: no packet is dropped during the change (INV-70).
func TestKernelAChangeOfIdentityDropsNothingThatBothAllow(t *testing.T) {
	const other = identity.Numeric(3002)
	th := newTheatre(t, false)
	th.putTables(t)
	update(t, th.k, bpf.MapsMapSlId, uint32(other), knownWord(7, 0, 2)) // as friend
	_, err := th.k.Endpoints.SetPolicy(th.pods["b"].Slot, nodetable.Allow, friends)
	must(t, "SetPolicy", err)
	slot := th.pods["a"].Slot
	must(t, "set identity", setIdentity(t, th.k, slot, friend))
	shots := [2]shot{
		th.shot(say("a", "b", segment(4000, 80, flagSYN), 0)), th.shot(say("a", "b", datagram(4001, 80), 0)),
	}
	sent, passed := flood(t, shots, func() error {
		for i := range 100 {
			id, egress := friend, nodetable.Allow
			if i%2 == 0 {
				id, egress = other, only80
			}
			_, err := th.k.Endpoints.SetIdentity(t.Context(), slot, id, egress, nodetable.Allow)
			if err := errors.Join(err, th.k.Endpoints.WaitIdentity(t.Context(), slot)); err != nil {
				return err
			}
		}
		return nil
	})
	if passed != sent || sent < 100 {
		t.Errorf("%d of %d packets were dropped that both identities allow", sent-passed, sent)
	}
}

// TestKernelAKilledChangeOfIdentityIsCompletedAtTheStart: if a process is killed between the store and the next
// step, the next process finds a consistent endpoint (INV-71).
func TestKernelAKilledChangeOfIdentityIsCompletedAtTheStart(t *testing.T) {
	o := testOptions(kerneltest.NewBPFFS(t))
	k := openKernel(t, o)
	e := publish(t, k, a)
	_, err := k.Endpoints.SetIdentity(t.Context(), e.Slot, 4711, nodetable.Allow, nodetable.Deny)
	must(t, "SetIdentity", err) // without Settled
	must(t, "old ipcache", k.Addresses.Set(ipmap.HostPrefix(e.IPv4), ipmap.Info{Identity: e.Identity}))
	must(t, "close", k.Close())

	again := openKernel(t, o)
	got, err := again.Endpoints.Lookup(e.Slot)
	must(t, "Lookup", err)
	want := endpointmap.Policy{Egress: nodetable.Allow, Ingress: nodetable.Deny, Epoch: got.Policy.Epoch}
	if got.Identity != 4711 || got.Incomplete || got.Policy != want {
		t.Errorf("after the restart: %+v", got)
	}
	must(t, "change it again", setIdentity(t, again, e.Slot, 4712))
	if got, err = again.Endpoints.Lookup(e.Slot); err != nil || got.Identity != 4712 || got.Incomplete {
		t.Errorf("after another change: %+v, %v", got, err)
	}
}
