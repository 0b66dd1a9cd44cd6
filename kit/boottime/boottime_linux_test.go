// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package boottime

import (
	"os"
	"strconv"
	"strings"
	"testing"
	"time"
)

// TestNowIsTheUptimeOfTheKernel compares Now with /proc/uptime, which includes time in suspend.
func TestNowIsTheUptimeOfTheKernel(t *testing.T) {
	before := Now()
	b, err := os.ReadFile("/proc/uptime")
	if err != nil {
		t.Fatal(err)
	}
	seconds, err := strconv.ParseFloat(strings.Fields(string(b))[0], 64)
	if err != nil {
		t.Fatal(err)
	}
	uptime := time.Duration(seconds * float64(time.Second))
	const tick = 10 * time.Millisecond // /proc/uptime has a resolution of 10 ms
	if after := Now(); uptime < before-tick || uptime > after+tick {
		t.Errorf("/proc/uptime says %s, between %s and %s", uptime, before, after)
	}
}
