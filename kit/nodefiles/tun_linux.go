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

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/instance"
)

// tunFile returns the device node by which the datapath makes the TAP devices of proxies. It belongs to the machine.
func tunFile(p instance.Paths) string {
	return filepath.Join(strings.TrimSuffix(p.RunDir, "/run/"+filepath.Base(p.RunDir)), "/dev/net/tun")
}

// prepareTUN opens the device node once, so that the kernel loads its module. If the service has no access to the node,
// it makes the service its owner: without udev, the node has mode 0600. Access to the node alone is harmless, because
// creating a device also requires CAP_NET_ADMIN. A missing node is not an error: the datapath reports it.
func (s Service) prepareTUN(p instance.Paths) (changes []string, err error) {
	path := tunFile(p)
	if f, err := os.OpenFile(path, os.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0); err == nil {
		f.Close()
	}
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if info.Mode().Type() != fs.ModeDevice|fs.ModeCharDevice || s.mayOpen(info) {
		return nil, nil
	}
	if err := os.Lchown(path, int(s.UID), -1); errors.Is(err, unix.EROFS) {
		return nil, nil // the datapath reports that it has no access
	} else if err != nil {
		return nil, err
	}
	return []string{fmt.Sprintf("gave %s to %d", path, s.UID)}, nil
}

// mayOpen reports whether the service may open a file for reading and writing.
func (s Service) mayOpen(info fs.FileInfo) bool {
	st, mode := info.Sys().(*syscall.Stat_t), info.Mode().Perm()
	shift := 0
	switch {
	case st.Uid == s.UID:
		shift = 6
	case st.Gid == s.GID:
		shift = 3
	}
	return mode>>shift&0o6 == 0o6
}
