// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/sluice-net/sluice/test/internal/pod"
)

// leftovers is everything outside the services that a node could leave on the
// machine: two of them, before and after, must be equal.
type leftovers map[string][]string

// machineState lists what exists outside any node: bound network namespaces,
// devices of the test's own namespace, mounts, cgroups, routing rules.
func machineState(t *testing.T) leftovers {
	t.Helper()
	state := leftovers{}
	entries, err := os.ReadDir("/run/netns")
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	for _, e := range entries {
		state["netns"] = append(state["netns"], e.Name())
	}
	links, err := netlink.LinkList()
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range links {
		state["device"] = append(state["device"], l.Attrs().Name)
	}
	rules, err := netlink.RuleList(netlink.FAMILY_ALL)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range rules {
		state["rule"] = append(state["rule"], r.String())
	}
	routes, err := netlink.RouteList(nil, netlink.FAMILY_ALL)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range routes {
		state["route"] = append(state["route"], r.String())
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(mounts)) {
		state["mount"] = append(state["mount"], strings.Fields(line)[4])
	}
	cgroups, err := filepath.Glob("/sys/fs/cgroup/*/sluice*")
	if err != nil {
		t.Fatal(err)
	}
	state["cgroup"] = cgroups
	for _, values := range state {
		sort.Strings(values)
	}
	return state
}

// diff describes what b has and a has not, and the reverse.
func (a leftovers) diff(b leftovers) []string {
	var out []string
	for kind, values := range b {
		for _, v := range values {
			if !slices.Contains(a[kind], v) {
				out = append(out, fmt.Sprintf("new %s %s", kind, v))
			}
		}
	}
	for kind, values := range a {
		for _, v := range values {
			if !slices.Contains(b[kind], v) {
				out = append(out, fmt.Sprintf("lost %s %s", kind, v))
			}
		}
	}
	sort.Strings(out)
	return out
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
