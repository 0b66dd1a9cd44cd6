// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/nodefiles"
	"github.com/sluice-net/sluice/kit/servicetest"
)

// asEarlierVersionsLeftIt changes a node without a running datapath to the state that an earlier version left: pins
// in the machine's bpffs, and state files owned by root.
func (n *testNode) asEarlierVersionsLeftIt(t *testing.T) (former string) {
	t.Helper()
	former = nodefiles.FormerBPFDir(n.Paths())
	machine := filepath.Dir(former)
	var st unix.Statfs_t
	if err := unix.Statfs(machine, &st); err != nil {
		t.Fatal(err)
	}
	if uint32(st.Type) != unix.BPF_FS_MAGIC {
		if err := unix.Mount("bpf", machine, "bpf", 0, "mode=0700"); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Unmount(machine, unix.MNT_DETACH) })
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(former); err != nil {
			t.Error(err)
		}
	})
	if err := os.Mkdir(former, 0o700); err != nil {
		t.Fatal(err)
	}
	own := n.Paths().BPFDir
	pins, err := filepath.Glob(filepath.Join(own, "sl*"))
	if err != nil || len(pins) == 0 {
		t.Fatalf("pins of the node: %v, %v", pins, err)
	}
	for _, pin := range pins {
		if err := nodefiles.CopyPin(pin, filepath.Join(former, filepath.Base(pin))); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(unix.Unmount(own, 0), os.Remove(own)); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{
		former, n.Paths().ServiceStateDir(devnode.Datapath),
		n.Paths().ServiceRunDir(devnode.Datapath),
	} {
		err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
			return errors.Join(err, os.Lchown(path, 0, 65700))
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return former
}

// mapIDs returns the pinned maps by name.
func mapIDs(t *testing.T, dir string) map[string]ebpf.MapID {
	t.Helper()
	pins, err := filepath.Glob(filepath.Join(dir, "sl_*"))
	if err != nil || len(pins) == 0 {
		t.Fatalf("pinned maps: %v, %v", pins, err)
	}
	ids := map[string]ebpf.MapID{}
	for _, pin := range pins {
		m, err := ebpf.LoadPinnedMap(pin, nil)
		if err != nil {
			t.Fatal(err)
		}
		info, err := m.Info()
		if err != nil {
			t.Fatal(err)
		}
		ids[filepath.Base(pin)], _ = info.ID()
		_ = m.Close()
	}
	return ids
}

// TestKernelConnectionsSurviveTheMoveOfPinsAndUser: an earlier version ran the node as root and with pins in the
// machine's bpffs. The new version takes over the same maps with their connections.
func TestKernelConnectionsSurviveTheMoveOfPinsAndUser(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	policies := n.policies(t)
	pods := n.addPods(t, "web", "client")
	web, client := pods[0], pods[1]
	enforce(t, policies, silentWeb)
	// Only its entry in the connection table lets this connection pass: the web may open none.
	pushed := connect(t, client, web, web.IPv4, 8080)
	push(t, pushed.server, pushed.client, "before")
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	conversations, wait := converse(ctx, t, client, web, 8080, 2)
	progress := func(when string) {
		t.Helper()
		start := []uint64{conversations[0].exchanged.Load(), conversations[1].exchanged.Load()}
		servicetest.EventuallyNil(t, "every connection exchanges data "+when, func() error {
			for i, c := range conversations {
				if c.exchanged.Load() < start[i]+3 {
					return fmt.Errorf("connection %d stands at %d exchanges", i, start[i])
				}
			}
			return nil
		})
	}
	progress("before")
	maps, created := mapIDs(t, n.Paths().BPFDir), n.connections(t).GetCreated()
	if err := n.Stop(t.Context(), devnode.Datapath); err != nil {
		t.Fatal(err)
	}
	former := n.asEarlierVersionsLeftIt(t)
	progress("with the pins of an earlier version")
	if err := n.Start(t.Context(), devnode.Datapath); err != nil {
		t.Fatal(err)
	}
	progress("after the move")
	push(t, pushed.server, pushed.client, "after")
	stop()
	if err := wait(); err != nil {
		t.Error(err)
	}
	if now := mapIDs(t, n.Paths().BPFDir); fmt.Sprint(now) != fmt.Sprint(maps) {
		t.Errorf("maps are %v, were %v", now, maps)
	}
	if now := n.connections(t); now.GetCreated() != created || now.GetPickedUp() != 0 {
		t.Errorf("%d connections were created and %d picked up, want none", now.GetCreated()-created, now.GetPickedUp())
	}
	pid, err := n.PID(devnode.Datapath)
	if err != nil {
		t.Fatal(err)
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil || !strings.Contains(string(status), "\nUid:\t65706\t65706\t65706\t65706\n") {
		t.Errorf("the datapath runs as another user than 65706 (%v):\n%s", err, status)
	}
	if _, err := os.Lstat(former); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the former pins: %v, want them removed", err)
	}
	for _, p := range pods {
		n.del(t, p)
	}
	n.wantNothingHeld(t)
}
