// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package servicetest

import (
	"context"
	"net"
	"runtime"

	"golang.org/x/sys/unix"
)

// DialerAs returns a gRPC dialer that connects to a unix socket as another user, as the kernel
// reports it to the server. It needs root.
func DialerAs(socket string, uid uintptr) func(context.Context, string) (net.Conn, error) {
	return func(context.Context, string) (net.Conn, error) { return DialAs("unix", socket, uid) }
}

// DialAs connects to a unix socket as another user: network "unix", or "unixpacket" for a socket of
// type SOCK_SEQPACKET. It needs root.
func DialAs(network, socket string, uid uintptr) (net.Conn, error) {
	type result struct {
		conn net.Conn
		err  error
	}
	done := make(chan result)
	go func() {
		// Never unlocked: the thread with the changed user ends with the goroutine.
		runtime.LockOSThread()
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, uid, uid, uid); errno != 0 {
			done <- result{err: errno}
			return
		}
		c, err := net.Dial(network, socket)
		done <- result{c, err}
	}()
	r := <-done
	return r.conn, r.err
}
