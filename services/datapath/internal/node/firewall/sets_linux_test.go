// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package firewall

import (
	"fmt"
	"strings"
	"testing"
)

func textOf(all []span) string {
	var texts []string
	for _, s := range all {
		texts = append(texts, fmt.Sprintf("%v to %v", s.first, s.end))
	}
	return strings.Join(texts, ", ")
}

func TestSpansCoverWhatPrefixesCover(t *testing.T) {
	for _, c := range []struct {
		prefixes []string
		want     string
	}{
		{nil, ""},
		{[]string{"fd00::/64"}, ""},
		{[]string{"10.0.0.0/24"}, "10.0.0.0 to 10.0.1.0"},
		{[]string{"10.0.2.0/24", "10.0.0.0/24"}, "10.0.0.0 to 10.0.1.0, 10.0.2.0 to 10.0.3.0"},
		{[]string{"10.0.1.0/24", "10.0.0.0/24"}, "10.0.0.0 to 10.0.1.0, 10.0.1.0 to 10.0.2.0"},
		{[]string{"10.0.0.0/8", "10.1.0.0/16", "10.1.0.0/16"}, "10.0.0.0 to 11.0.0.0"},
		{[]string{"0.0.0.0/0", "10.0.0.0/8"}, "0.0.0.0 to invalid IP"},
		{[]string{"255.255.255.255/32", "255.255.255.254/32"}, "255.255.255.254 to 255.255.255.255, 255.255.255.255 to invalid IP"},
		{[]string{"10.0.0.5/24", "10.0.0.0/25", "10.0.0.9/32"}, "10.0.0.0 to 10.0.1.0"},
		{[]string{"10.0.0.7/32"}, "10.0.0.7 to 10.0.0.8"},
	} {
		if got := textOf(spans(prefixes(c.prefixes...), 32)); got != c.want {
			t.Errorf("%v: %s, want %s", c.prefixes, got, c.want)
		}
	}
	if got := textOf(spans(prefixes("fd00:1::/64", "::/0"), 128)); got != ":: to invalid IP" {
		t.Errorf("all of IPv6: %s", got)
	}
}
