// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package seqpacket

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

func TestDescriptorsOfAllControlMessages(t *testing.T) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer CloseAll(fds[:])
	if err := unix.Sendmsg(fds[0], []byte{1}, unix.UnixRights(fds[0], fds[1]), nil, 0); err != nil {
		t.Fatal(err)
	}
	b, oob := make([]byte, 1), make([]byte, unix.CmsgSpace(8))
	_, n, _, _, err := unix.Recvmsg(fds[1], b, oob, 0)
	if err != nil {
		t.Fatal(err)
	}
	got := Descriptors(oob[:n])
	if len(got) != 2 {
		t.Fatalf("descriptors %v, want 2", got)
	}
	CloseAll(got)
	for _, fd := range got {
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); !errors.Is(err, unix.EBADF) {
			t.Errorf("descriptor %d is open: %v", fd, err)
		}
	}
	if got := Descriptors(oob[:n-1]); got != nil {
		t.Errorf("descriptors of half a message: %v", got)
	}
}

// flaky fails at every second call.
type flaky struct {
	net.Listener
	calls int
}

var errFlaky = errors.New("flaky")

func (f *flaky) Accept() (net.Conn, error) {
	if f.calls++; f.calls%2 == 1 {
		return nil, errFlaky
	}
	return f.Listener.Accept()
}

func TestAcceptTriesAgainUntilItsContextEnds(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unixpacket", path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer context.AfterFunc(ctx, func() { l.Close() })()
	c, err := net.Dial("unixpacket", path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	failed, accepted := 0, 0
	err = Accept(ctx, &flaky{Listener: l}, func(err error) {
		if failed++; !errors.Is(err, errFlaky) {
			t.Errorf("failed with %v", err)
		}
	}, func(c net.Conn) {
		accepted++
		c.Close()
		cancel()
	})
	if !errors.Is(err, context.Canceled) || failed != 1 || accepted != 1 {
		t.Errorf("%v after %d errors and %d connections, want the error of the context after one of each", err, failed, accepted)
	}
}
