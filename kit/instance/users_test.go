// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package instance

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestUsersLieInNoRangeThatOthersHandOut: on most machines Sluice's users have no passwd entry, so
// nothing else reserves the numbers.
func TestUsersLieInNoRangeThatOthersHandOut(t *testing.T) {
	foreign := map[string][2]uint32{
		"Debian's reserved users":                     {60000, 64999},
		"systemd's DynamicUser and containers":        {60001, 65533},
		"the overflow user and the 16-bit form of -1": {65534, 65535},
		"the subordinate ids that useradd gives":      {100000, 600100000},
		"systemd's nspawn":                            {524288, 1879048191},
	}
	seen := map[uint32]string{}
	for name, id := range map[string]uint32{
		"sluice": GroupID, "identity": IdentityID, "ipam": IPAMID, "policy": PolicyID, "loadbalancer": LoadBalancerID,
		"etcd": EtcdID, "datapath": DatapathID, "controller": ControllerID, "hubble": HubbleID, "store": StoreID,
		"http": HTTPID, "dns": DNSID,
		"the last": LastServiceID,
	} {
		for whose, r := range foreign {
			if id >= r[0] && id <= r[1] {
				t.Errorf("%s is %d, which is one of %s (%d to %d)", name, id, whose, r[0], r[1])
			}
		}
		if seen[id] != "" {
			t.Errorf("%s and %s are both %d", name, seen[id], id)
		}
		seen[id] = name
		if id != GroupID && (id < FirstServiceID || id > LastServiceID) {
			t.Errorf("%s is %d, want it between %d and %d", name, id, FirstServiceID, LastServiceID)
		}
	}
}

// TestDeployedUsersAreThese compares the numbers with the sysusers.d file.
func TestDeployedUsersAreThese(t *testing.T) {
	content, err := os.ReadFile(filepath.Join("..", "..", "deploy", "sysusers.d", "sluice.conf"))
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{
		"g sluice":              fmt.Sprint(GroupID),
		"u sluice-identity":     fmt.Sprintf("%d:%d", IdentityID, GroupID),
		"u sluice-ipam":         fmt.Sprintf("%d:%d", IPAMID, GroupID),
		"u sluice-policy":       fmt.Sprintf("%d:%d", PolicyID, GroupID),
		"u sluice-loadbalancer": fmt.Sprintf("%d:%d", LoadBalancerID, GroupID),
		"g sluice-devetcd":      fmt.Sprint(EtcdID),
		"u sluice-devetcd":      fmt.Sprintf("%d:%d", EtcdID, EtcdID),
		"u sluice-datapath":     fmt.Sprintf("%d:%d", DatapathID, GroupID),
		"u sluice-status":       fmt.Sprintf("%d:%d", ControllerID, GroupID),
		"u sluice-http":         fmt.Sprintf("%d:%d", HTTPID, GroupID),
		"u sluice-hubble":       fmt.Sprintf("%d:%d", HubbleID, GroupID),
		"u sluice-dns":          fmt.Sprintf("%d:%d", DNSID, GroupID),
		"u sluice-store":        fmt.Sprintf("%d:%d", StoreID, GroupID),
	}
	for line := range strings.Lines(string(content)) {
		fields := strings.Fields(line)
		if len(fields) < 3 || fields[0] == "#" {
			continue
		}
		entry := fields[0] + " " + fields[1]
		if want[entry] != fields[2] {
			t.Errorf("%s has %s, want %q", entry, fields[2], want[entry])
		}
		delete(want, entry)
	}
	if len(want) > 0 {
		t.Errorf("the file lacks %v", want)
	}
}
