// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package process

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Limits on the connections to the two sockets of a service, and the number of descriptors that are
// kept free for its own work: connections to other services, and files and network namespaces that
// calls open.
const (
	mostConnections  = 1024
	leastConnections = 16
	mostMetricsConns = 64
	mostForWork      = 256
)

// descriptorLimit returns RLIMIT_NOFILE of the process. The Go runtime raised the soft limit to the
// hard limit before main began; children get the old limit.
func descriptorLimit() (uint64, error) {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return 0, fmt.Errorf("read RLIMIT_NOFILE: %w", err)
	}
	return limit.Cur, nil
}

// openDescriptors returns the number of open descriptors.
func openDescriptors() (int, error) {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return 0, fmt.Errorf("count open descriptors: %w", err)
	}
	return len(entries) - 1, nil // minus the descriptor of the listing itself
}

// metricsConnections returns the maximum number of connections to the metrics socket: a sixteenth
// of all descriptors, within a small range, because there are few scrapers.
func metricsConnections(limit uint64) int {
	return int(min(mostMetricsConns, max(2, limit/16)))
}

// socketConnections returns the maximum number of connections to the service's socket, given the number of descriptors
// that are already open. Half of the free descriptors, at most mostForWork, are kept for the service's own work. conns
// is at least leastConnections; scarce reports whether too few descriptors are then left for the service's own work.
func socketConnections(limit uint64, open, metrics int) (conns int, scarce bool) {
	used := uint64(open + metrics) //nolint:gosec // neither is negative
	if limit <= used {
		return leastConnections, true
	}
	free := limit - used
	free -= min(mostForWork, free/2)
	if free < leastConnections {
		return leastConnections, true
	}
	return int(min(mostConnections, free)), false
}
