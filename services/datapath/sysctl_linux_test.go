// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

const uplinkFilter = "/proc/sys/net/ipv4/conf/up0/rp_filter"

// addUplink adds a device with the default route and a strict reverse path filter, as some distributions configure it.
func (w *world) addUplink() {
	w.t.Helper()
	err := w.home.Do(func() error {
		attributes := netlink.NewLinkAttrs()
		attributes.Name = "up0"
		if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attributes, PeerName: "up1"}); err != nil {
			return err
		}
		link, err := netlink.LinkByName("up0")
		if err != nil {
			return err
		}
		address, err := netlink.ParseAddr("192.0.2.2/30")
		if err != nil {
			return err
		}
		gateway, err := netlink.ParseAddr("192.0.2.1/30")
		if err != nil {
			return err
		}
		return errors.Join(
			netlink.AddrAdd(link, address),
			netlink.LinkSetUp(link),
			netlink.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Gw: gateway.IP}),
			os.WriteFile(uplinkFilter, []byte("1"), 0),
		)
	})
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) uplinkFilter() string {
	w.t.Helper()
	var value []byte
	err := w.home.Do(func() (err error) {
		value, err = os.ReadFile(uplinkFilter)
		return err
	})
	if err != nil {
		w.t.Fatal(err)
	}
	return strings.TrimSpace(string(value))
}

// audited lists the sysctls for which an audit finds a difference.
func (w *world) audited(repair bool) []string {
	w.t.Helper()
	var keys []string
	err := w.node.Endpoints.Reconciler.Audit(w.t.Context(), repair, func(f endpoint.Finding) error {
		if f.Subject == "sysctl" {
			keys = append(keys, f.Key)
		}
		return nil
	})
	if err != nil {
		w.t.Fatal(err)
	}
	return keys
}

// TestKernelFilterOfTheUplinkIsSwitchedOff tests the reverse path filter of the uplink, which would drop packets to
// pods on arrival.
func TestKernelFilterOfTheUplinkIsSwitchedOff(t *testing.T) {
	w := newWorld(t)
	w.start(false)
	if found := w.audited(false); len(found) != 0 {
		t.Fatalf("an audit before finds %v", found)
	}
	w.addUplink()
	const key = "net/ipv4/conf/up0/rp_filter"
	if found := w.audited(false); len(found) != 1 || found[0] != key {
		t.Errorf("an audit finds %v, want %s", found, key)
	}
	if value := w.uplinkFilter(); value != "1" {
		t.Errorf("an audit that repairs nothing has set rp_filter to %s", value)
	}
	w.audited(true)
	if value := w.uplinkFilter(); value != "0" {
		t.Errorf("after the repair rp_filter is %s, want 0", value)
	}
	if found := w.audited(false); len(found) != 0 {
		t.Errorf("after the repair an audit finds %v", found)
	}
}
