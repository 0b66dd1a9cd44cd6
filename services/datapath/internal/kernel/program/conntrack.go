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

// conntrackLookup is the kernel function for looking up connections in nf_conntrack.
const conntrackLookup = "bpf_skb_ct_lookup"

// conntrackModule is the type information of the module nf_conntrack, while it is loaded.
const conntrackModule = "/sys/kernel/btf/nf_conntrack"

// HasConntrack reports whether programs that are loaded now can look up connections in nf_conntrack: it is
// built into the kernel, or a loaded module. Reading the types of modules requires CAP_SYS_ADMIN; without it a
// module counts as not loaded.
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

// builtIn reports whether nf_conntrack is built into the kernel.
var builtIn = sync.OnceValues(func() (bool, error) {
	kernel, err := btf.LoadKernelSpec()
	if err != nil {
		return false, fmt.Errorf("read the types of the kernel: %w", err)
	}
	return hasFunction(kernel, conntrackLookup)
})

// canOpenModules reports whether this process may open the types of modules, which loading a program that calls
// a module's function requires.
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
