// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package netdev

import (
	"net/netip"
	"testing"
)

func TestHostAnswersToTheAddressThatAPrefixShares(t *testing.T) {
	for of, want := range map[string]string{
		"198.51.100.2/24": "198.51.100.255",
		"10.1.2.3/20":     "10.1.15.255",
		"10.1.2.3/30":     "10.1.2.3",
		"10.1.2.3/31":     "",
		"10.1.2.3/32":     "",
		"fd00:77::2/64":   "fd00:77::",
		"fd00:77::6/126":  "fd00:77::4",
		"fd00:77::2/127":  "",
		"fd00:77::2/128":  "",
	} {
		got, ok := sharedAddr(netip.MustParsePrefix(of))
		if ok != (want != "") || (ok && got != netip.MustParseAddr(want)) {
			t.Errorf("%s: %v %t, want %q", of, got, ok, want)
		}
	}
}
