// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package fault

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Arm looks at descriptor 3 once, at the start of the process, before other
// files are opened. Anything but a controller there is left alone; a
// controller that is refused is an error.
func Arm() error {
	ok, err := greeted(FD)
	if err != nil {
		return fmt.Errorf("fault controller on descriptor %d: %w", FD, err)
	}
	if !ok {
		return nil
	}
	unix.CloseOnExec(FD) // children do not inherit it
	// Without this, its reader would keep a thread blocked in the kernel.
	if err := unix.SetNonblock(FD, true); err != nil {
		return fmt.Errorf("fault controller on descriptor %d: %w", FD, err)
	}
	return start(os.NewFile(FD, "fault"))
}

// greeted says whether a controller waits at fd. It takes the greeting off
// the socket only if it is one.
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

// mayArm says whether a controller of that user may interfere with a process:
// it has to have the process's rights already. Those of a set-uid program are
// not those of who started it.
func mayArm(controller uint32, uid, euid int) error {
	if uid != euid {
		return fmt.Errorf("the process runs set-uid, from %d as %d", uid, euid)
	}
	if controller != 0 && controller != uint32(euid) {
		return fmt.Errorf("it belongs to uid %d", controller)
	}
	return nil
}
