// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package nodefiles

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/leaktest"
)

// TestMain makes the tests mount below their own directory, not below the one in which other
// packages look for leaked mounts.
func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("/run", "nodefiles-test-")
	if err == nil {
		err = os.Setenv("TMPDIR", dir)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := leaktest.Run(m, leaktest.Mounts(dir))
	if err := os.RemoveAll(dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// paths returns the paths of an instance below a temporary directory.
func paths(t *testing.T) instance.Paths {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("this test gives files to users and needs root")
	}
	p, err := instance.New("")
	if err != nil {
		t.Fatal(err)
	}
	p = p.Under(t.TempDir())
	for _, dir := range []string{filepath.Dir(p.RunDir), filepath.Dir(p.StateDir)} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		if err := unix.Unmount(p.BPFDir, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
			t.Error(err)
		}
	})
	return p
}

// write creates a file and its directories with one owner.
func write(t *testing.T, path string, uid, gid int) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte("content of "+filepath.Base(path)), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Chown(filepath.Dir(path), uid, gid), os.Chown(path, uid, gid)); err != nil {
		t.Fatal(err)
	}
}

// owner returns "uid:gid mode" of a path, without following links.
func owner(t *testing.T, path string) string {
	t.Helper()
	info, err := os.Lstat(path)
	if err != nil {
		t.Fatal(err)
	}
	st := info.Sys().(*syscall.Stat_t)
	return fmt.Sprintf("%d:%d %v", st.Uid, st.Gid, info.Mode().Perm())
}

func wantOwner(t *testing.T, path, want string) {
	t.Helper()
	if got := owner(t, path); got != want {
		t.Errorf("%s is %s, want %s", path, got, want)
	}
}

func TestKernelNewDirectoriesHaveTheirOwners(t *testing.T) {
	p := paths(t)
	if _, err := Prepare(p, Services()...); err != nil {
		t.Fatal(err)
	}
	for _, s := range Services() {
		wantOwner(t, p.ServiceRunDir(s.Name), fmt.Sprintf("%d:65700 -rwxr-x---", s.UID))
		wantOwner(t, p.ServiceStateDir(s.Name), fmt.Sprintf("%d:65700 -rwx------", s.UID))
	}
	wantOwner(t, p.RunDir, "0:0 -rwxr-xr-x")
	wantOwner(t, p.StateDir, "0:0 -rwxr-xr-x")
	if changes, err := Prepare(p, Services()...); err != nil || len(changes) > 0 {
		t.Errorf("once more: %q, %v; want no change", changes, err)
	}
}

// TestKernelStateOfTheFormerUserIsGivenOnce: files of a service's former user belong to the service
// again, with unchanged content.
func TestKernelStateOfTheFormerUserIsGivenOnce(t *testing.T) {
	p := paths(t)
	outside := filepath.Join(t.TempDir(), "outside")
	write(t, outside, 64702, 64700)
	for _, s := range []struct {
		name string
		uid  int
	}{{"identity", 64701}, {"ipam", 64702}, {"policy", 64703}} {
		write(t, filepath.Join(p.ServiceStateDir(s.name), "deep", "state"), s.uid, 64700)
		write(t, filepath.Join(p.ServiceStateDir(s.name), "db"), s.uid, 64700)
		write(t, p.Socket(s.name)+".lock", s.uid, 64700)
		write(t, filepath.Join(p.ServiceStateDir(s.name), "roots"), 0, 0)
		if err := os.Chown(p.ServiceStateDir(s.name), s.uid, 64700); err != nil {
			t.Fatal(err)
		}
		link := filepath.Join(p.ServiceStateDir(s.name), "link")
		if err := errors.Join(os.Symlink(outside, link), os.Lchown(link, s.uid, 64700)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := Prepare(p, Services()...); err != nil {
		t.Fatal(err)
	}
	for name, uid := range map[string]uint32{"identity": 65701, "ipam": 65702, "policy": 65703} {
		dir := p.ServiceStateDir(name)
		for _, path := range []string{filepath.Join(dir, "deep", "state"), filepath.Join(dir, "db"), p.Socket(name) + ".lock"} {
			wantOwner(t, path, fmt.Sprintf("%d:65700 -rw-------", uid))
		}
		wantOwner(t, dir, fmt.Sprintf("%d:65700 -rwx------", uid))
		wantOwner(t, filepath.Join(dir, "deep"), fmt.Sprintf("%d:65700 -rwx------", uid))
		wantOwner(t, filepath.Join(dir, "link"), fmt.Sprintf("%d:65700 -rwxrwxrwx", uid))
		wantOwner(t, filepath.Join(dir, "roots"), "0:0 -rw-------")
		if b, err := os.ReadFile(filepath.Join(dir, "db")); err != nil || string(b) != "content of db" {
			t.Errorf("%s: content %q, %v", name, b, err)
		}
	}
	wantOwner(t, outside, "64702:64700 -rw-------")

	// A file that appears later with the former user's number is not given to the service.
	late := filepath.Join(p.ServiceStateDir("ipam"), "late")
	write(t, late, 64702, 64702)
	if err := os.Chown(p.ServiceStateDir("ipam"), 65702, 65700); err != nil {
		t.Fatal(err)
	}
	if changes, err := Prepare(p, Services()...); err != nil || len(changes) > 0 {
		t.Errorf("once more: %q, %v; want no change", changes, err)
	}
	wantOwner(t, late, "64702:64702 -rw-------")
}

// TestKernelStateOfTheRootDatapathIsGiven: in earlier versions the datapath ran as root, and so did
// the CNI plugin, which leaves deletions for it.
func TestKernelStateOfTheRootDatapathIsGiven(t *testing.T) {
	p := paths(t)
	files := []string{
		filepath.Join(p.ServiceStateDir("datapath"), "endpoints", "record"),
		filepath.Join(p.ServiceStateDir("cni"), "deletes", "entry"),
		p.Socket("datapath") + ".lock",
	}
	for _, path := range files {
		write(t, path, 0, 0)
	}
	if _, err := Prepare(p, Services()...); err != nil {
		t.Fatal(err)
	}
	for _, path := range files {
		wantOwner(t, path, "65706:65700 -rw-------")
	}
	wantOwner(t, p.ServiceStateDir("cni"), "0:0 -rwxr-xr-x")
	wantOwner(t, filepath.Join(p.ServiceStateDir("cni"), "deletes"), "65706:65700 -rwx------")
	wantOwner(t, filepath.Join(p.RunDir, "netns"), "0:0 -rwxr-xr-x")
	// A file that root creates later stays root's, also if its name was chosen by another user.
	late := filepath.Join(p.ServiceStateDir("datapath"), "late")
	if err := os.WriteFile(late, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if changes, err := Prepare(p, Services()...); err != nil || len(changes) > 0 {
		t.Errorf("once more: %q, %v; want no change", changes, err)
	}
	wantOwner(t, late, "0:0 -rw-------")
}

// TestKernelInterruptedGiftIsFinished: the directory itself changes owner last.
func TestKernelInterruptedGiftIsFinished(t *testing.T) {
	p := paths(t)
	dir := p.ServiceStateDir("ipam")
	write(t, filepath.Join(dir, "a"), 65702, 65700)
	write(t, filepath.Join(dir, "b"), 64702, 64700)
	if _, err := Prepare(p, Services()...); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"a", "b"} {
		wantOwner(t, filepath.Join(dir, name), "65702:65700 -rw-------")
	}
	wantOwner(t, dir, "65702:65700 -rwx------")
}

// TestKernelFileWithTwoNamesIsNotGivenAway: the former user may have hard-linked a file from
// elsewhere, which would change its owner, too.
func TestKernelFileWithTwoNamesIsNotGivenAway(t *testing.T) {
	p := paths(t)
	dir := p.ServiceStateDir("ipam")
	write(t, filepath.Join(dir, "a"), 64702, 64700)
	other := filepath.Join(filepath.Dir(p.StateDir), "other")
	if err := os.Link(filepath.Join(dir, "a"), other); err != nil {
		t.Fatal(err)
	}
	if _, err := Prepare(p, Services()...); err == nil || !strings.Contains(err.Error(), "a has 2 names") {
		t.Errorf("got %v, want an error about the file with two names", err)
	}
	wantOwner(t, other, "64702:64700 -rw-------")
	wantOwner(t, dir, "64702:64700 -rwx------")
}

func TestKernelLinkInPlaceOfADirectoryIsRefused(t *testing.T) {
	p := paths(t)
	elsewhere := t.TempDir()
	if err := errors.Join(os.MkdirAll(p.StateDir, 0o755), os.Symlink(elsewhere, p.ServiceStateDir("ipam"))); err != nil {
		t.Fatal(err)
	}
	if _, err := Prepare(p, Services()...); err == nil || !strings.Contains(err.Error(), "is not a directory") {
		t.Errorf("got %v, want an error about the link", err)
	}
	if info, err := os.Stat(elsewhere); err != nil || info.Mode().Perm() != fs.FileMode(0o755) {
		t.Errorf("the target of the link: %v, %v", info, err)
	}
}

// TestDeployedDirectoriesAreThese: the tmpfiles.d file creates at boot what Prepare creates.
func TestDeployedDirectoriesAreThese(t *testing.T) {
	p, err := instance.New("")
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]bool{}
	for _, s := range append(Services(), Store()) {
		for _, d := range s.directories(p) {
			want[fmt.Sprintf("d %s %04o %d %d", d.path, d.mode, d.uid, d.gid)] = true
		}
	}
	content, err := os.ReadFile(filepath.Join("..", "..", "deploy", "tmpfiles.d", "sluice.conf"))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(content)) {
		line = strings.Join(strings.Fields(line), " ")
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		if !want[line] {
			t.Errorf("the file has %q, which Prepare does not make so", line)
		}
		delete(want, line)
	}
	if len(want) > 0 {
		t.Errorf("the file lacks %v", want)
	}
}

// TestDeployedUnitsRunAsTheUsersOfTheServices: the units run as the users of the services, and may only write to their
// own directories. Only the datapath may open a device.
func TestDeployedUnitsRunAsTheUsersOfTheServices(t *testing.T) {
	for _, s := range append(Services(), Store()) {
		content, err := os.ReadFile(filepath.Join("..", "..", "deploy", "systemd", "sluice-"+s.Name+".service"))
		if err != nil {
			t.Fatal(err)
		}
		devices, other := "PrivateDevices=yes", "DeviceAllow="
		if s.BPF {
			devices, other = "DevicePolicy=closed\nDeviceAllow=/dev/net/tun rw", "PrivateDevices="
		}
		if !strings.Contains(string(content), "\n"+devices+"\n") || strings.Contains(string(content), "\n"+other) {
			t.Errorf("the unit of %s lacks %q, or has %s", s.Name, devices, other)
		}
		capabilities, writable := "", fmt.Sprintf("/run/sluice/%s /var/lib/sluice/%[1]s", s.Name)
		if s.BPF {
			capabilities = "CAP_BPF CAP_PERFMON CAP_NET_ADMIN CAP_SYS_ADMIN"
			writable = "/run/sluice/datapath /run/sluice/bpf /var/lib/sluice/datapath /var/lib/sluice/cni/deletes"
		}
		for key, value := range map[string]string{
			"User": fmt.Sprint(s.UID), "Group": fmt.Sprint(s.GID), "AmbientCapabilities": capabilities, "CapabilityBoundingSet": capabilities,
			"NoNewPrivileges": "yes", "ProtectSystem": "strict", "ReadWritePaths": writable, "Requires": "sluice-prepare.service",
		} {
			if line := "\n" + key + "=" + value + "\n"; !strings.Contains(string(content), line) {
				t.Errorf("the unit of %s lacks %s", s.Name, strings.TrimSpace(line))
			}
		}
	}
}
