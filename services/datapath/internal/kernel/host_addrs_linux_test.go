// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
)

func TestKernelTooManyHostAddressesAreOneErrorAndLeaveRoomForEndpoints(t *testing.T) {
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	first := netip.MustParseAddr("198.51.100.1")
	six := netip.MustParseAddr("2001:db8::1")
	var all []netip.Addr
	for i := range uint32(13_000) {
		var a [4]byte
		binary.BigEndian.PutUint32(a[:], 10<<24|96<<16|i+1)
		all = append(all, netip.AddrFrom4(a))
	}
	// the first addresses have priority
	all = append([]netip.Addr{first, six}, all...)
	err := k.Endpoints.SyncHostAddrs(all)
	var full *endpointmap.HostAddrsError
	if !errors.As(err, &full) || *full != (endpointmap.HostAddrsError{Map: "sl_ip4", Have: 13_001, Limit: 12_289}) ||
		!errors.Is(err, pin.ErrFull) || strings.Contains(err.Error(), "\n") {
		t.Errorf("13,001 addresses: %v (%+v)", err, full)
	}
	have, err := k.Endpoints.HostAddrs()
	if err != nil || len(have) != 12_289+1 || !slices.Contains(have, first) || !slices.Contains(have, six) {
		t.Errorf("%d host addresses, %v; want 12,289 and one, the first among them", len(have), err)
	}
	publish(t, k, testEndpoint(10, 10))

	// Known addresses are kept when new ones precede them.
	if err := k.Endpoints.SyncHostAddrs(append(slices.Clone(all[5:]), first, six)); !errors.Is(err, pin.ErrFull) {
		t.Errorf("12,998 addresses: %v", err)
	}
	if have, err := k.Endpoints.HostAddrs(); err != nil || !slices.Contains(have, first) || len(have) != 12_289+1 {
		t.Errorf("%d host addresses, %v; want %v among them", len(have), err, first)
	}
	if err := k.Endpoints.SyncHostAddrs([]netip.Addr{first}); err != nil {
		t.Errorf("one address: %v", err)
	}
	if have, err := k.Endpoints.HostAddrs(); err != nil || !slices.Equal(have, []netip.Addr{first}) {
		t.Errorf("host addresses %v, %v", have, err)
	}
}

// TestKernelStartRemovesAddressesThatNothingAccountsFor: a killed process may leave an address in the ipcache
// whose key is gone. If that counted as the host's address, its packets would pass wherever the host's packets
// do.
func TestKernelStartRemovesAddressesThatNothingAccountsFor(t *testing.T) {
	dir := kerneltest.NewBPFFS(t)
	k := openKernel(t, testOptions(dir))
	e := publish(t, k, a)
	must(t, "SyncHostAddrs", k.Endpoints.SyncHostAddrs([]netip.Addr{host4}))
	want, err := k.Addresses.List()
	must(t, "List", err)
	for _, p := range []netip.Prefix{
		netip.MustParsePrefix("192.0.2.7/32"), netip.MustParsePrefix("203.0.113.0/24"),
		netip.MustParsePrefix("2001:db8::7/128"), netip.PrefixFrom(e.IPv4, 31).Masked(),
	} {
		must(t, "Set", k.Addresses.Set(p, ipmap.Info{Identity: identity.Host}))
	}
	must(t, "Close", k.Close())
	k = openKernel(t, testOptions(dir))
	if got, err := k.Addresses.List(); err != nil || !slices.Equal(got, want) {
		t.Errorf("after the start: %v, %v; want %v", got, err, want)
	}
}

// TestKernelHostAddressIsForgottenOnlyWhenTheIpcacheHasForgottenIt: the next call retries a failed removal.
func TestKernelHostAddressIsForgottenOnlyWhenTheIpcacheHasForgottenIt(t *testing.T) {
	dir := kerneltest.NewBPFFS(t)
	k := openKernel(t, testOptions(dir))
	must(t, "SyncHostAddrs", k.Endpoints.SyncHostAddrs([]netip.Addr{host4}))
	k.Addresses.Close() // from here on every removal fails
	if err := k.Endpoints.SyncHostAddrs(nil); !errors.Is(err, pin.ErrClosed) {
		t.Fatalf("SyncHostAddrs without an ipcache: %v", err)
	}
	if have, err := k.Endpoints.HostAddrs(); err != nil || !slices.Equal(have, []netip.Addr{host4}) {
		t.Errorf("host addresses %v, %v; want %v still", have, err, host4)
	}
}
