// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package fault

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Arm checks descriptor 3 once, at process start, before other files are opened. If the descriptor is not a
// controller's socket, Arm leaves it alone; if the controller's user may not control this process, Arm returns an
// error.
func Arm() error {
	ok, err := greeted(FD)
	if err != nil {
		return fmt.Errorf("fault controller on descriptor %d: %w", FD, err)
	}
	if !ok {
		return nil
	}
	unix.CloseOnExec(FD) // so that children do not inherit it
	// A blocking descriptor would keep the reader's thread in the kernel.
	if err := unix.SetNonblock(FD, true); err != nil {
		return fmt.Errorf("fault controller on descriptor %d: %w", FD, err)
	}
	return start(os.NewFile(FD, "fault"))
}

// greeted reports whether a controller is connected at fd. It consumes the message only if it is
// the greeting.
func greeted(fd int) (bool, error) {
	if domain, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN); err != nil || domain != unix.AF_UNIX {
		return false, nil
	}
	if typ, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE); err != nil || typ != unix.SOCK_SEQPACKET {
		return false, nil
	}
	buf := make([]byte, len(Greeting)+1)
	n, _, err := unix.Recvfrom(fd, buf, unix.MSG_PEEK|unix.MSG_DONTWAIT)
	if err != nil || string(buf[:n]) != Greeting {
		return false, nil
	}
	cred, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return false, err
	}
	if err := mayArm(cred.Uid, os.Getuid(), os.Geteuid()); err != nil {
		return false, err
	}
	if _, _, err := unix.Recvfrom(fd, buf, unix.MSG_DONTWAIT); err != nil {
		return false, err
	}
	return true, nil
}

// mayArm returns an error unless a controller of the given user may arm points: the user must already have the
// process's privileges, which a user who starts a set-uid program does not have.
func mayArm(controller uint32, uid, euid int) error {
	if uid != euid {
		return fmt.Errorf("the process runs set-uid, from %d as %d", uid, euid)
	}
	if controller != 0 && controller != uint32(euid) {
		return fmt.Errorf("it belongs to uid %d", controller)
	}
	return nil
}
