// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package process

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Bounds of the connections on the two sockets of a service, and of what is
// kept free for its own work: the clients of other services, the files and
// network namespaces that calls open.
const (
	mostConnections  = 1024
	leastConnections = 16
	mostMetricsConns = 64
	mostForWork      = 256
)

// descriptorLimit is RLIMIT_NOFILE of the process. The Go runtime has raised the
// soft limit to the hard one before main began, and gives children the old one.
func descriptorLimit() (uint64, error) {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return 0, fmt.Errorf("read RLIMIT_NOFILE: %w", err)
	}
	return limit.Cur, nil
}

// openDescriptors is how many descriptors the process has open now.
func openDescriptors() (int, error) {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return 0, fmt.Errorf("count open descriptors: %w", err)
	}
	return len(entries) - 1, nil // one is that of the listing
}

// metricsConnections is how many connections the metrics socket takes: a
// sixteenth of all descriptors, and few, because scrapers are few.
func metricsConnections(limit uint64) int {
	return int(min(mostMetricsConns, max(2, limit/16)))
}

// socketConnections is how many connections the service's socket takes when
// some descriptors are open already. Half of what is free, at most mostForWork,
// stays for the work. Below leastConnections it does not go, though then the
// work may find none: scarce says so.
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
