// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"slices"
	"testing"

	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
	"github.com/sluice-net/sluice/services/datapath/internal/service/sockets"
)

// TestKernelFirstEndpointOfANamespaceHasItsSockets: a second endpoint in the same namespace does not change the
// owner of its sockets, nor does its removal; and a reused endpoint ID does not get the sockets of its previous
// namespace.
func TestKernelFirstEndpointOfANamespaceHasItsSockets(t *testing.T) {
	o := testOptions(kerneltest.NewBPFFS(t))
	o.Services = true
	k := openKernel(t, o)
	want := func(want ...sockets.Namespace) {
		t.Helper()
		if got, err := k.Namespaces.List(); err != nil || !slices.Equal(got, want) {
			t.Errorf("%+v, %v, want %+v", got, err, want)
		}
	}
	first, second := sockets.Namespace{Cookie: 5, Slot: 1}, sockets.Namespace{Cookie: 5, Slot: 2}
	other, later := sockets.Namespace{Cookie: 6, Slot: 3}, sockets.Namespace{Cookie: 7, Slot: 3}
	for _, n := range []sockets.Namespace{first, second, other, first} {
		must(t, "claim", k.Namespaces.Claim(n))
	}
	want(first, other)
	must(t, "claim a slot again", k.Namespaces.Claim(later))
	want(first, later)
	must(t, "release the second", k.Namespaces.Release(second.Slot))
	want(first, later)
	must(t, "release the first", k.Namespaces.Release(first.Slot))
	want(later)
	must(t, "release again", k.Namespaces.Release(first.Slot))
	must(t, "claim after the first", k.Namespaces.Claim(second))
	want(second, later)

	// A restarted process knows the endpoint of each namespace.
	must(t, "close", k.Close())
	k = openKernel(t, o)
	must(t, "claim of the second by a new process", k.Namespaces.Claim(sockets.Namespace{Cookie: 8, Slot: second.Slot}))
	want(later, sockets.Namespace{Cookie: 8, Slot: second.Slot})
	must(t, "release by a new process", k.Namespaces.Release(later.Slot))
	want(sockets.Namespace{Cookie: 8, Slot: second.Slot})
}
