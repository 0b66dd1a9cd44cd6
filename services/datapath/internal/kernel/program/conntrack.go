// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package program

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"

	"github.com/cilium/ebpf/btf"
	"golang.org/x/sys/unix"
)

// conntrackLookup is the kernel function by which programs find connections of nf_conntrack.
const conntrackLookup = "bpf_skb_ct_lookup"

// conntrackModule describes the types of nf_conntrack where it is a module, while it is loaded.
const conntrackModule = "/sys/kernel/btf/nf_conntrack"

// HasConntrack reports whether programs that are loaded now can look up connections of
// nf_conntrack: it is part of the kernel, or a module that is loaded. Types of modules are
// for CAP_SYS_ADMIN; without it a module counts as not loaded.
func HasConntrack() (bool, error) {
	if found, err := builtIn(); found || err != nil {
		return found, err
	}
	switch _, err := os.Stat(conntrackModule); {
	case errors.Is(err, fs.ErrNotExist):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("look for module nf_conntrack: %w", err)
	}
	if open, err := canOpenModules(); !open || err != nil {
		return false, err
	}
	module, err := btf.LoadKernelModuleSpec("nf_conntrack")
	if err != nil {
		return false, fmt.Errorf("read the types of module nf_conntrack: %w", err)
	}
	return hasFunction(module, conntrackLookup)
}

// builtIn reports whether nf_conntrack is part of the kernel.
var builtIn = sync.OnceValues(func() (bool, error) {
	kernel, err := btf.LoadKernelSpec()
	if err != nil {
		return false, fmt.Errorf("read the types of the kernel: %w", err)
	}
	return hasFunction(kernel, conntrackLookup)
})

// canOpenModules reports whether this process may open the types of modules, as loading a
// program that calls a module needs it.
func canOpenModules() (bool, error) {
	it := new(btf.HandleIterator)
	defer it.Handle.Close()
	if it.Next() {
		return true, nil
	}
	if err := it.Err(); err != nil && !errors.Is(err, unix.EPERM) {
		return false, fmt.Errorf("open the types of modules: %w", err)
	}
	return false, nil
}

func hasFunction(types *btf.Spec, name string) (bool, error) {
	var fn *btf.Func
	switch err := types.TypeByName(name, &fn); {
	case err == nil:
		return true, nil
	case errors.Is(err, btf.ErrNotFound):
		return false, nil
	default:
		return false, fmt.Errorf("find function %s: %w", name, err)
	}
}
