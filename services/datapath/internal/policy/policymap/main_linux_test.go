// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policymap

import (
	"errors"
	"log/slog"
	"net/netip"
	"testing"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipcache"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
)

func TestMain(m *testing.M) { kerneltest.Main(m) }

// instance is Maps with the packages that it depends on.
type instance struct {
	*Maps
	pins      *pin.Maps
	addresses *ipmap.Maps
	endpoints *endpointmap.Maps
}

// open opens a new or existing instance as a process does. The test may close it earlier.
func open(t testing.TB, dir string) *instance {
	t.Helper()
	fail := func(err error) {
		if err != nil {
			t.Fatalf("open: %v", err)
		}
	}
	spec, err := bpf.LoadMaps()
	fail(err)
	log := slog.New(slog.DiscardHandler)
	i := &instance{}
	i.pins, err = pin.Open(pin.Options{Dir: dir, Log: log}, spec)
	fail(err)
	i.addresses = ipmap.Open(i.pins)
	i.endpoints = endpointmap.Open(i.pins, ipcache.New(i.addresses, log), endpointmap.Options{Log: log})
	i.Maps, err = Open(i.pins, i.endpoints, log)
	t.Cleanup(func() { i.close(t) })
	fail(err)
	fail(i.endpoints.Initialise())
	fail(pin.GracePeriod(t.Context()))
	fail(i.RemoveLeftovers())
	return i
}

// close ends the process and leaves the maps.
func (i *instance) close(t testing.TB) {
	t.Helper()
	if i.Maps != nil {
		i.Close()
	}
	i.endpoints.Close()
	i.addresses.Close()
	if err := i.pins.Close(); err != nil {
		t.Errorf("close: %v", err)
	}
}

// publish publishes an endpoint with tables that allow everything.
func (i *instance) publish(t testing.TB, n byte, p endpointmap.Policy) endpointmap.Endpoint {
	t.Helper()
	s, err := i.endpoints.Publish(t.Context(), endpointmap.Endpoint{
		Ifindex: 1000 + uint32(n), Identity: 256 + identity.Numeric(n), MTU: 1500, Deliver: endpointmap.DeliverPeer,
		MAC: [6]byte{2, 0, 0, 0, 1, n}, HostMAC: [6]byte{2, 0, 0, 0, 2, n},
		IPv4: netip.AddrFrom4([4]byte{10, 244, 0, n}), Policy: p,
	})
	e, lerr := i.endpoints.Lookup(s)
	if err := errors.Join(err, lerr); err != nil {
		t.Fatalf("publish endpoint %d: %v", n, err)
	}
	return e
}

var allowed = endpointmap.Policy{Egress: nodetable.Allow, Ingress: nodetable.Allow}
