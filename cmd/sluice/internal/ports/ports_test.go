// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package ports

import (
	"strings"
	"testing"
)

func TestPortsReadWell(t *testing.T) {
	for _, c := range []struct {
		set  Intervals
		want string
	}{
		{Intervals{{0, LastPoint}}, "everything"},
		{Intervals{{Point(6, 80), Point(6, 80)}}, "tcp 80"},
		{Intervals{{Point(6, 80), Point(6, 90)}, {Point(17, 0), Point(17, 65535)}}, "tcp 80-90, udp"},
		{Intervals{{Point(1, 8<<8), Point(1, 8<<8|255)}}, "icmp type 8"},
		{Intervals{{Point(1, 3<<8|4), Point(1, 3<<8|4)}}, "icmp type 3 code 4"},
		{Intervals{{Point(6, 1), Point(7, 65535)}}, "tcp 1-65535, protocol 7"},
		{Intervals{{Point(0, 0), Point(5, 65535)}}, "protocols 0 to 5"},
		{Intervals{{0, Point(6, 442)}, {Point(6, 444), LastPoint}}, "everything but tcp 443"},
		{Intervals{{Point(6, 81), Point(6, 90)}, {Point(6, 80), Point(6, 80)}}, "tcp 80-90"},
	} {
		if got := strings.Join(c.set.Texts(), ", "); got != c.want {
			t.Errorf("%v reads %q, want %q", c.set, got, c.want)
		}
	}
}
