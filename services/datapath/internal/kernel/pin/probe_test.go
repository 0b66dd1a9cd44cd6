// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package pin

import (
	"fmt"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// TestWhatIsForbiddenIsNotTakenForAnOldKernel: if the hint was to use another kernel, an operator would not
// check the seccomp profile.
func TestWhatIsForbiddenIsNotTakenForAnOldKernel(t *testing.T) {
	for _, c := range []struct {
		missing    error
		want, deny string
	}{
		{fmt.Errorf("create map: %w", unix.EPERM), "seccomp", "6.1"},
		{fmt.Errorf("create map: %w", unix.EACCES), "lockdown", "6.1"},
		{fmt.Errorf("create map: %w", ebpf.ErrNotSupported), "6.1", "seccomp"},
	} {
		r := Report{Kernel: "k"}
		r.add("maps", hintKernel, c.missing)
		r.add("programs", hintKernel, nil)
		text := r.Err().Error()
		if !strings.Contains(text, c.want) || strings.Contains(text, c.deny) ||
			!strings.Contains(text, "1 of 2 requirements") {
			t.Errorf("%v: the text is %q, want %q in it and not %q", c.missing, text, c.want, c.deny)
		}
	}
}
