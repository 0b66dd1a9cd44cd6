// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package program

import (
	"fmt"
	"sync"

	"github.com/cilium/ebpf/btf"
)

// HasCast reports whether programs can read the kernel's sk_buff directly, by a function that exists since
// Linux 6.2. Otherwise they copy the fields, which takes longer.
var HasCast = sync.OnceValues(func() (bool, error) {
	kernel, err := btf.LoadKernelSpec()
	if err != nil {
		return false, fmt.Errorf("read the types of the kernel: %w", err)
	}
	return hasFunction(kernel, "bpf_cast_to_kern_ctx")
})
