// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/sluice-net/sluice/cmd/sluice/devnode"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// leftovers lists what of a node still exists outside its namespace: objects
// that carry its name. Other copies on the machine come and go meanwhile.
func leftovers(t *testing.T, n *devnode.Node) []string {
	t.Helper()
	var left []string
	paths := n.Paths()
	for _, path := range []string{n.Netns(), paths.RunDir, paths.StateDir, paths.ConfigDir, paths.BPFDir} {
		if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
			left = append(left, fmt.Sprintf("%s (%v)", path, err))
		}
	}
	if _, err := netlink.LinkByName(n.Device()); !errors.As(err, new(netlink.LinkNotFoundError)) {
		left = append(left, fmt.Sprintf("device %s (%v)", n.Device(), err))
	}
	routes, err := netlink.RouteList(nil, netlink.FAMILY_ALL)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range routes {
		for _, prefix := range n.PodCIDRs() {
			if r.Dst != nil && r.Dst.String() == prefix.String() {
				left = append(left, "route "+r.String())
			}
		}
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, "sluice-"+n.Instance()) {
			left = append(left, "mount "+line)
		}
	}
	for _, service := range devnode.Services() {
		if pid, err := n.PID(service); !errors.Is(err, devnode.ErrNotRunning) {
			left = append(left, fmt.Sprintf("process %d of %s (%v)", pid, service, err))
		}
	}
	return left
}

// nodeDevices counts the endpoint devices inside the node's namespace.
func nodeDevices(t *testing.T, netns string) []string {
	t.Helper()
	var names []string
	err := pod.In(netns, func() error {
		links, err := netlink.LinkList()
		for _, l := range links {
			if l.Type() == "veth" && strings.HasPrefix(l.Attrs().Name, "sl") {
				names = append(names, l.Attrs().Name)
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}

// nodeRoutes lists host routes to pods inside the node's namespace.
func nodeRoutes(t *testing.T, netns string) []string {
	t.Helper()
	var out []string
	err := pod.In(netns, func() error {
		routes, err := netlink.RouteList(nil, netlink.FAMILY_ALL)
		for _, r := range routes {
			if r.Dst == nil {
				continue
			}
			if link, err := netlink.LinkByIndex(r.LinkIndex); err == nil && strings.HasPrefix(link.Attrs().Name, "sl") {
				out = append(out, r.Dst.String())
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// run executes a command and fails the test with its output if it fails.
func run(ctx context.Context, t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.CommandContext(ctx, name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}
