// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// leftovers lists what still exists of a node outside its namespace: objects with its name. Objects of other copies
// on the machine may change meanwhile.
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
	routes, err := whole(allRoutes)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range routes {
		for _, prefix := range n.PodCIDRs() {
			// A route via this node: another node may have the same range by now.
			by, _ := netip.AddrFromSlice(r.Gw)
			if r.Dst != nil && r.Dst.String() == prefix.String() && slices.Contains(n.Addresses(), by.Unmap()) {
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

// mostDumps limits the repetitions of a dump.
const mostDumps = 100

// whole repeats a dump of the kernel that was interrupted by a change: the kernel sends a list in parts and marks a
// list whose parts may be inconsistent. Other tests and the pods of this one change every list continuously.
func whole[T any](dump func() ([]T, error)) (all []T, err error) {
	for range mostDumps {
		if all, err = dump(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			return all, err
		}
	}
	return nil, err
}

func allRoutes() ([]netlink.Route, error) { return netlink.RouteList(nil, netlink.FAMILY_ALL) }

// nodeDevices returns the endpoint devices in the node's namespace, without the device of the proxy namespace.
func nodeDevices(netns string) (names []string, err error) {
	err = pod.In(netns, func() error {
		links, err := whole(netlink.LinkList)
		for _, l := range links {
			name := l.Attrs().Name
			if l.Type() == "veth" && strings.HasPrefix(name, "sl") && !strings.HasPrefix(name, "slp") {
				names = append(names, name)
			}
		}
		return err
	})
	return names, err
}

// nodeRoutes returns the host routes to pods in the node's namespace.
func nodeRoutes(netns string) (out []string, err error) {
	err = pod.In(netns, func() error {
		routes, err := whole(allRoutes)
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
	return out, err
}

func TestInterruptedDumpIsReadAgain(t *testing.T) {
	calls := 0
	got, err := whole(func() ([]int, error) {
		if calls++; calls < 3 {
			return []int{1}, fmt.Errorf("dump: %w", netlink.ErrDumpInterrupted)
		}
		return []int{1, 2}, nil
	})
	if err != nil || len(got) != 2 {
		t.Errorf("after %d calls: %v, %v, want the third answer", calls, got, err)
	}
	if got, err := whole(func() ([]int, error) { return []int{1}, netlink.ErrDumpInterrupted }); !errors.Is(err,
		netlink.ErrDumpInterrupted) || got != nil {
		t.Errorf("a list that changes all the time: %v, %v", got, err)
	}
	wrong := errors.New("wrong")
	if _, err := whole(func() ([]int, error) { return nil, wrong }); !errors.Is(err, wrong) {
		t.Errorf("another error: %v", err)
	}
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
