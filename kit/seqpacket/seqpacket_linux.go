// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package seqpacket is for processes that pass file descriptors (SCM_RIGHTS, see unix(7)) over unix sockets of type
// SOCK_SEQPACKET.
package seqpacket

import (
	"context"
	"net"
	"time"

	"golang.org/x/sys/unix"
)

// Descriptors returns the file descriptors of control messages, which the caller has to close. It returns none for
// control messages that cannot be parsed.
func Descriptors(oob []byte) (fds []int) {
	list, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil
	}
	for i := range list {
		if more, err := unix.ParseUnixRights(&list[i]); err == nil {
			fds = append(fds, more...)
		}
	}
	return fds
}

// CloseAll closes descriptors that nothing was written to.
func CloseAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd) //nolint:errcheck // nothing was written
	}
}

// acceptPause precedes the next attempt after an error of accept.
const acceptPause = 100 * time.Millisecond

// Accept passes each connection of the listener to accept, one after the other, until ctx ends, and returns the error
// of ctx. The caller closes the listener when ctx ends. It calls failed with each error of the listener before that,
// and tries again.
func Accept(ctx context.Context, l net.Listener, failed func(error), accept func(net.Conn)) error {
	for {
		c, err := l.Accept()
		switch {
		case ctx.Err() != nil:
			if err == nil {
				c.Close()
			}
			return ctx.Err()
		case err != nil:
			failed(err)
			select {
			case <-time.After(acceptPause):
			case <-ctx.Done():
			}
		default:
			accept(c)
		}
	}
}
