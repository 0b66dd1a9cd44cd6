// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package devconf

import (
	"encoding/binary"
	"testing"
)

func TestSettingsAreReadFromTheArrayOfTheirFamily(t *testing.T) {
	v4 := binary.NativeEndian.AppendUint32(binary.NativeEndian.AppendUint32(nil, 1), 2)
	v6 := binary.NativeEndian.AppendUint32(nil, 3)
	for _, c := range []struct {
		s    Setting
		path string
		want uint32
		ok   bool
	}{
		{V4("forwarding", 0, 1), "ipv4/conf/eth0/forwarding", 1, true},
		{V4("last", 1, 1), "ipv4/conf/eth0/last", 2, true},
		{V4("beyond", 2, 1), "ipv4/conf/eth0/beyond", 0, false},
		{V6("forwarding", 0, 1), "ipv6/conf/eth0/forwarding", 3, true},
		{V6("beyond", 1, 1), "ipv6/conf/eth0/beyond", 0, false},
	} {
		got, ok := c.s.In(v4, v6)
		if got != c.want || ok != c.ok || c.s.Path("eth0") != c.path {
			t.Errorf("%s: %d, %t", c.s.Path("eth0"), got, ok)
		}
	}
}
