// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package invocation

import "testing"

func TestSizesHaveUnits(t *testing.T) {
	for text, want := range map[string]Size{
		"0": 0, "512": 512, "1B": 1, "64K": 64 << 10, "64KiB": 64 << 10, "10M": 10 << 20, "10MiB": 10 << 20, "2G": 2 << 30,
		"2GiB": 2 << 30,
	} {
		var got Size
		if err := got.Set(text); err != nil || got != want {
			t.Errorf("%s: %d, %v, want %d", text, got, err, want)
		}
		var again Size
		if err := again.Set(got.String()); err != nil || again != got {
			t.Errorf("%s is written as %s: %v", text, got, err)
		}
	}
	for _, text := range []string{"", "M", "-1", "1.5M", "1T", "9223372036854775807K", "1 M", "1MB", "1MiBB"} {
		var got Size
		if err := got.Set(text); err == nil {
			t.Errorf("%q is %d", text, got)
		}
	}
}
