// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/nodefiles"
)

// try prints the changes that plan returns, one per line.
func try(inv *invocation.Invocation, plan func(instance.Paths) ([]string, error)) error {
	p, err := pathsOfRoot(inv)
	if err != nil {
		return err
	}
	changes, err := plan(p)
	if err != nil {
		return err
	}
	return inv.ShowPlan(changes)
}

// planInstall returns what install would change.
func planInstall(p instance.Paths, o options) (changes []string, err error) {
	services, err := o.services(p)
	if err != nil {
		return nil, err
	}
	for _, f := range nodefiles.Check(p, services...) {
		if f.Problem != nil && f.Kind == "bpffs" && o.mountBPFFS == "never" {
			return nil, fmt.Errorf("%s: %w, and --mount-bpffs is never", f.Path, f.Problem)
		}
	}
	changes = nodefiles.Plan(p, services...)
	target, content, err := o.newPlugin()
	if err != nil {
		return nil, err
	}
	if content != nil {
		changes = append(changes, "write "+target)
	}
	return changes, nil
}

// planUninstall returns what uninstall would remove.
func planUninstall(p instance.Paths, o options) (changes []string, err error) {
	remove := func(path string) {
		if _, err := os.Lstat(path); err == nil {
			changes = append(changes, "remove "+path)
		}
	}
	c := o.configuration(p)
	have, err := c.read()
	switch {
	case have != nil:
		remove(c.path())
	case err != nil && !errors.Is(err, errForeign):
		return nil, err
	}
	if _, err := programPath("sluice-datapath"); err != nil {
		return nil, err
	}
	// Only sluice-datapath knows which of its objects the kernel has.
	changes = append(changes,
		"remove devices, rules, routes and firewall table of "+filepath.Base(p.RunDir)+", if there are any")
	for _, f := range nodefiles.Check(p, nodefiles.Services()...) {
		if f.Kind == "bpffs" && f.Problem == nil {
			changes = append(changes, "remove "+f.Path+" and its pins")
		}
	}
	remove(filepath.Join(o.plugins, plugin))
	if o.state {
		for _, dir := range nodefiles.StateDirs(p) {
			remove(dir)
		}
	}
	return changes, nil
}
