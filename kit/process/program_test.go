// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package process

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

func TestProgramMappingsAreThoseThatTheFileCanFillAgain(t *testing.T) {
	entry := func(head string, anonymous int) string {
		return fmt.Sprintf("%s\nSize: 4 kB\nRss: 4 kB\nAnonymous: %d kB\nVmFlags: rd mr mw me\n", head, anonymous)
	}
	smaps := entry("00400000-00500000 r-xp 00000000 fe:00 7  /bin/sluice x", 0) +
		entry("00500000-00600000 r--p 00100000 fe:00 7  /bin/sluice x", 0) +
		entry("00600000-00700000 r--p 00200000 fe:00 7  /bin/sluice x", 8) + // relocated
		entry("00700000-00800000 rw-p 00300000 fe:00 7  /bin/sluice x", 0) +
		entry("00800000-00900000 r--p 00000000 fe:00 8  /bin/other", 0) +
		entry("7f0000000000-7f0000001000 r--p 00000000 00:00 0", 0) +
		entry("7f0000001000-7f0000002000 r-xp 00000000 00:00 0  [vdso]", 0)
	got, err := programMappings(strings.NewReader(smaps), "/bin/sluice x")
	if want := []mapping{{0x400000, 0x500000}, {0x500000, 0x600000}}; err != nil || !slices.Equal(got, want) {
		t.Errorf("got %x, %v; want %x", got, err, want)
	}
	if _, err := programMappings(strings.NewReader("zz-yy r-xp 0 0 0 /bin/x"), "/bin/x"); err == nil {
		t.Error("an invalid address range was accepted")
	}
}

// resident returns the resident size of file pages of the process, in kB.
func resident(t *testing.T) int {
	t.Helper()
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`RssFile:\s+(\d+) kB`).FindSubmatch(status)
	if m == nil {
		t.Fatalf("no RssFile in %s", status)
	}
	kb, err := strconv.Atoi(string(m[1]))
	if err != nil {
		t.Fatal(err)
	}
	return kb
}

func TestUnmappedProgramRunsOn(t *testing.T) {
	before := resident(t)
	if err := unmapProgram(); err != nil {
		t.Fatal(err)
	}
	if after := resident(t); after >= before {
		t.Errorf("%d kB of files were resident, and %d kB afterwards", before, after)
	}
}
