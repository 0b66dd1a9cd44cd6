// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package pod

import (
	"fmt"
	"net/netip"
)

// ParseAddresses parses addresses in the form in which runtimes report them.
func ParseAddresses(texts []string) ([]netip.Addr, error) {
	var all []netip.Addr
	for _, text := range texts {
		a, err := netip.ParseAddr(text)
		if err != nil {
			return nil, fmt.Errorf("address of a pod: %w", err)
		}
		all = append(all, a)
	}
	return all, nil
}
