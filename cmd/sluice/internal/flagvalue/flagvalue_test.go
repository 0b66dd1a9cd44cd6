// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package flagvalue

import (
	"errors"
	"testing"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
)

// TestValuesAreReadOrNamed: an invalid value is a usage error that contains the flag.
func TestValuesAreReadOrNamed(t *testing.T) {
	for text, want := range map[string]string{
		"10.244.0.2": "10.244.0.2/32", "10.244.0.9/24": "10.244.0.0/24", "fd00::1": "fd00::1/128", "fd00::1/64": "fd00::/64",
	} {
		if p, err := Prefix("--address", text); err != nil || p.String() != want {
			t.Errorf("%s: %s, %v, want %s", text, p, err, want)
		}
	}
	for text, want := range map[string]uint8{"tcp": 6, "UDP": 17, "47": 47, "0": 0, "255": 255} {
		if n, err := Protocol("--protocol", text); err != nil || n != want {
			t.Errorf("%s: %d, %v, want %d", text, n, err, want)
		}
	}
	for text, want := range map[string]uint16{"0": 0, "80": 80, "65535": 65535} {
		if n, err := Port("--port", text); err != nil || n != want {
			t.Errorf("%s: %d, %v, want %d", text, n, err, want)
		}
	}
	mistakes := map[string]error{}
	for _, text := range []string{"", "x", "10.244.0.256", "10.244.0.0/33", "fe80::1%eth0"} {
		_, mistakes["address "+text] = Prefix("--address", text)
	}
	for _, text := range []string{"", "x", "256", "-1", "tcp "} {
		_, mistakes["protocol "+text] = Protocol("--protocol", text)
	}
	for _, text := range []string{"", "http", "65536", "-1"} {
		_, mistakes["port "+text] = Port("--port", text)
	}
	for what, err := range mistakes {
		var usage *invocation.UsageError
		if !errors.As(err, &usage) {
			t.Errorf("%s: %v, want a mistake of the command line", what, err)
		}
	}
}
