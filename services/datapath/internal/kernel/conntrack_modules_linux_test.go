// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

//go:build modules

package kernel

import (
	"bufio"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
)

// TestKernelConntrackIsAModule: the programs load without nf_conntrack, and are reloaded when it is available.
// scripts/test-kernels has the modules of its kernels in /modules.
func TestKernelConntrackIsAModule(t *testing.T) {
	removed := removeUsersOf(t, "nf_conntrack")
	t.Cleanup(func() { insert(t, removed) })
	wantConntrack(t, "without the module", false)
	o := testOptions(kerneltest.NewBPFFS(t))
	o.Services, o.Routing = true, RoutingOverlay
	k := openKernel(t, o)
	absent := k.find(program.FromUplink).ID
	if changed, err := k.Reload(); err != nil || changed {
		t.Fatalf("Reload without the module: changed %t, %v", changed, err)
	}
	insert(t, removed)
	removed = nil
	wantConntrack(t, "with the module", true)
	if changed, err := k.Reload(); err != nil || !changed {
		t.Fatalf("Reload with the module: changed %t, %v", changed, err)
	}
	if k.find(program.FromUplink).ID == absent {
		t.Error("the program is the one without nf_conntrack")
	}
	second := openKernel(t, o)
	if changed, err := second.Reload(); err != nil || changed {
		t.Errorf("Reload of one that was opened with the module: changed %t, %v", changed, err)
	}
}

func wantConntrack(t *testing.T, when string, want bool) {
	t.Helper()
	if got, err := program.HasConntrack(); err != nil || got != want {
		t.Fatalf("%s: HasConntrack: %t, %v", when, got, err)
	}
}

// removeUsersOf removes a module and all modules that use it, and returns them in the order of removal. A
// module may use several others, so they can only be inserted again in reverse order.
func removeUsersOf(t *testing.T, name string) (removed []string) {
	t.Helper()
	for _, user := range usersOf(t, name) {
		removed = append(removed, removeUsersOf(t, user)...)
	}
	// Namespaces of former tests keep the module in use until the kernel has removed them.
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(100 * time.Millisecond) {
		switch err := unix.DeleteModule(name, unix.O_NONBLOCK); {
		case errors.Is(err, unix.ENOENT):
			return removed // another module's removal has already removed it
		case err == nil:
			return append(removed, name)
		case !errors.Is(err, unix.EAGAIN) || time.Now().After(deadline):
			insert(t, removed) // later tests need them
			t.Fatalf("remove module %s: %v", name, err)
		}
	}
}

// usersOf returns the modules that use a module.
func usersOf(t *testing.T, name string) []string {
	t.Helper()
	f, err := os.Open("/proc/modules")
	must(t, "open", err)
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		fields := strings.Fields(lines.Text())
		if fields[0] == name {
			return slices.DeleteFunc(strings.Split(fields[3], ","), func(s string) bool { return s == "" || s == "-" })
		}
	}
	return nil
}

// insert inserts modules that removeUsersOf has removed.
func insert(t *testing.T, removed []string) {
	t.Helper()
	for _, name := range slices.Backward(removed) {
		f, err := os.Open(filepath.Join("/modules", name+".ko"))
		must(t, "open", err)
		err = unix.FinitModule(int(f.Fd()), "", 0)
		f.Close()
		if err != nil && !errors.Is(err, unix.EEXIST) {
			t.Errorf("insert module %s: %v", name, err)
		}
	}
}
