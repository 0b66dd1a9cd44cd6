// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package routing

import (
	"strings"
	"time"

	"github.com/sluice-net/sluice/services/datapath/internal/node/nodemap"
)

// shortcutValid is how long direct paths are used after this process has last compared them with the kernel's routes.
// After that, for example because the process is down, packets pass the tunnel device, whose packets the kernel routes.
const shortcutValid = 5 * time.Second

// findShortcut forbids direct paths immediately while they would bypass IPsec policies or routing rules of the node's
// administrator, or while that is unknown. The lock is held.
func (f *Router) findShortcut() {
	if !f.shortcut {
		if f.local == nil { // a previous process may have used direct paths
			f.try("stop using direct paths", f.o.Maps.SetShortcut(nodemap.Shortcut{}))
		}
		return
	}
	closed := f.shortcutClosed()
	if closed != f.closed {
		f.o.Log.Info("path of tunnel packets", "bypass_device", closed == "", "why", closed)
	}
	f.closed = closed
	if closed != "" {
		f.try("stop using direct paths", f.o.Maps.SetShortcut(nodemap.Shortcut{}))
	}
}

// shortcutClosed returns why no direct path may be used; "" if they may. The lock is held.
func (f *Router) shortcutClosed() string {
	if f.o.Policies != nil {
		p, err := f.o.Policies.Policies()
		if !f.try("read IPsec policies", err) {
			return "the IPsec policies cannot be read: " + err.Error()
		}
		if why := p.OfNode(); why != "" {
			return why
		}
	}
	rules, err := f.o.Links.Rules()
	if !f.try("list routing rules", err) {
		return "the routing rules cannot be read: " + err.Error()
	}
	if len(rules) > 0 {
		return "routing rules: " + strings.Join(rules, ", ")
	}
	lowest, highest, err := f.o.Links.SourcePorts()
	if !f.try("read the range of source ports", err) {
		return "the range of source ports cannot be read: " + err.Error()
	}
	f.ports = [2]uint16{lowest, highest}
	return ""
}

// openShortcut allows direct paths for a while, after they were compared with the kernel's routes. The lock is held.
func (f *Router) openShortcut() bool {
	if !f.shortcut || f.closed != "" || f.local == nil {
		return false
	}
	now, err := f.o.Monotonic()
	if err == nil {
		until := uint64(now + shortcutValid) //nolint:gosec // not negative
		err = f.o.Maps.SetShortcut(nodemap.Shortcut{Until: until, Lowest: f.ports[0], Highest: f.ports[1]})
	}
	return f.try("use direct paths", err)
}
