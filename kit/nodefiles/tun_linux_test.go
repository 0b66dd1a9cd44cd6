// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package nodefiles

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestKernelDeviceNodeOfTAPDevicesIsOpenToTheDatapath: a node that only root may open is given to the datapath once;
// others stay.
func TestKernelDeviceNodeOfTAPDevicesIsOpenToTheDatapath(t *testing.T) {
	p, s := paths(t), datapath(t)
	if _, err := Prepare(p, s); err != nil {
		t.Fatalf("without a node: %v", err)
	}
	path := tunFile(p)
	if want := filepath.Join(filepath.Dir(filepath.Dir(p.RunDir)), "dev/net/tun"); path != want {
		t.Fatalf("path %s, want %s", path, want)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	write(t, path, 0, 0) // a file in its place
	if _, err := Prepare(p, s); err != nil {
		t.Fatal(err)
	}
	wantOwner(t, path, "0:0 -rw-------")
	for _, node := range []struct {
		mode       uint32
		group      int
		want, gave string
	}{
		{0o666, 0, "0:0 -rw-rw-rw-", ""},
		{0o660, 65700, "0:65700 -rw-rw----", ""},
		{0o660, 0, "65706:0 -rw-rw----", "gave " + path + " to 65706"},
		{0o600, 0, "65706:0 -rw-------", "gave " + path + " to 65706"},
	} {
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		err := unix.Mknod(path, unix.S_IFCHR|node.mode, int(unix.Mkdev(10, 200))) //nolint:gosec // two small numbers
		if err := errors.Join(err, os.Chown(path, 0, node.group), unix.Chmod(path, node.mode)); err != nil {
			t.Fatal(err)
		}
		changes, err := Prepare(p, s)
		if err != nil || strings.Join(changes, "; ") != node.gave {
			t.Errorf("mode %o: changes %q, %v, want %q", node.mode, changes, err, node.gave)
		}
		wantOwner(t, path, node.want)
		if changes, err := Prepare(p, s); err != nil || len(changes) > 0 {
			t.Errorf("mode %o: the second time %q, %v", node.mode, changes, err)
		}
	}
}
