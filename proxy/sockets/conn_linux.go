// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package sockets

import (
	"errors"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// Conn is a TCP connection of the proxy namespace. It implements net.Conn. os.File is used because package net asks the
// kernel for the options of each new socket.
type Conn struct {
	*os.File
	Local, Remote net.Addr
}

// File returns a file for a non-blocking descriptor, which it takes over.
func File(fd int, name string) *os.File { return os.NewFile(uintptr(fd), name) }

// LocalAddr implements net.Conn.
func (c *Conn) LocalAddr() net.Addr { return c.Local }

// RemoteAddr implements net.Conn.
func (c *Conn) RemoteAddr() net.Addr { return c.Remote }

// CloseWrite sends FIN.
func (c *Conn) CloseWrite() error {
	var failed error
	Control(c.File, func(fd int) { failed = unix.Shutdown(fd, unix.SHUT_WR) })
	return failed
}

// Reset closes the connection with a reset.
func (c *Conn) Reset() {
	Control(c.File, Reset)
	_ = c.Close()
}

// Wait waits until bytes can be read, without memory for them. more is false if the other end has sent FIN. The error
// is the error of a read, such as a reset or os.ErrDeadlineExceeded.
func (c *Conn) Wait() (more bool, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return false, err
	}
	var b [1]byte
	var n int
	var failed error
	err = raw.Read(func(fd uintptr) bool {
		for {
			n, _, failed = unix.Recvfrom(int(fd), b[:], unix.MSG_PEEK)
			if !errors.Is(failed, unix.EINTR) {
				return !errors.Is(failed, unix.EAGAIN)
			}
		}
	})
	if err == nil {
		err = failed
	}
	return n > 0 && err == nil, err
}
