// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package tap

import (
	"bytes"
	"errors"
	"fmt"
	"runtime"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"
)

// tapDevice creates a TAP device in its own network namespace. It returns the queue of the device and a packet
// socket.
func tapDevice() (queue, packets int, up func(bool) error, err error) {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return 0, 0, nil, fmt.Errorf("new network namespace: %w", err)
	}
	if queue, err = unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0); err != nil {
		return 0, 0, nil, fmt.Errorf("open /dev/net/tun: %w", err)
	}
	request, err := unix.NewIfreq("tap0")
	if err != nil {
		return 0, 0, nil, err
	}
	request.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_MULTI_QUEUE)
	if err := unix.IoctlIfreq(queue, unix.TUNSETIFF, request); err != nil {
		return 0, 0, nil, fmt.Errorf("TUNSETIFF: %w", err)
	}
	const all = unix.ETH_P_ALL>>8 | unix.ETH_P_ALL&0xff<<8 // network order
	if packets, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, all); err != nil {
		return 0, 0, nil, err
	}
	up = func(yes bool) error {
		request.SetUint16(unix.IFF_NOARP)
		if yes {
			request.SetUint16(unix.IFF_NOARP | unix.IFF_UP)
		}
		return unix.IoctlIfreq(packets, unix.SIOCSIFFLAGS, request)
	}
	if err := up(true); err != nil {
		return 0, 0, nil, fmt.Errorf("set the device up: %w", err)
	}
	if err := unix.IoctlIfreq(packets, unix.SIOCGIFINDEX, request); err != nil {
		return 0, 0, nil, err
	}
	to := &unix.SockaddrLinklayer{Ifindex: int(request.Uint32()), Protocol: all}
	if err := unix.Bind(packets, to); err != nil {
		return 0, 0, nil, err
	}
	return queue, packets, up, unix.SetsockoptTimeval(packets, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 60})
}

// next returns the next frame that the device has received. It skips frames that the test has sent.
func next(t *testing.T, packets int) []byte {
	t.Helper()
	b := make([]byte, 2048)
	for {
		n, from, err := unix.Recvfrom(packets, b, 0)
		if err != nil {
			t.Fatal(err)
		}
		if l, ok := from.(*unix.SockaddrLinklayer); ok && l.Pkttype != unix.PACKET_OUTGOING && b[0] == 2 && b[1] == 1 {
			return b[:n]
		}
	}
}

// TestKernelQueueOfATAPDeviceIsServed: a real TAP device behaves like the sockets in the other tests.
func TestKernelQueueOfATAPDeviceIsServed(t *testing.T) {
	type device struct {
		queue, packets int
		up             func(bool) error
		err            error
	}
	made, done := make(chan device), make(chan struct{})
	go func() { // the thread and its namespace end with the goroutine
		runtime.LockOSThread()
		var d device
		d.queue, d.packets, d.up, d.err = tapDevice()
		made <- d
		<-done
	}()
	dev := <-made
	defer close(done)
	if dev.err != nil {
		t.Fatal(dev.err)
	}
	defer unix.Close(dev.packets)
	d := newDevice(t, time.Minute)
	kept, err := unix.FcntlInt(uintptr(dev.queue), unix.F_DUPFD_CLOEXEC, 0) // as sluice-datapath does
	if err != nil {
		t.Fatal(err)
	}
	former := d.fd
	q, err := d.Use(dev.queue)
	if err != nil {
		t.Fatal(err)
	}
	d.fd = dev.packets
	unix.Close(former)
	for i := range uint16(200) {
		ask := query(i, "www.example.com.", dnsmessage.TypeA)
		for _, b := range [][]byte{ask.Bytes(), answer(ask, "www.example.com. 192.0.2.1").Bytes()} {
			d.send(b)
			if got := next(t, dev.packets); !bytes.Equal(got, b) {
				t.Fatalf("query %d: % x, want % x", i, got, b)
			}
		}
	}
	if err := dev.up(false); err != nil {
		t.Fatal(err)
	}
	if err := q.write(query(1, "www.example.com.", dnsmessage.TypeA).Bytes()); !errors.Is(err, unix.EIO) {
		t.Errorf("a device that is down: %v", err)
	}
	if err := dev.up(true); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.GetsockoptInt(dev.packets, unix.SOL_SOCKET, unix.SO_ERROR); err != nil { // clears the error
		t.Fatal(err)
	}
	// The queue of the device can be served again by the next attachment.
	if _, err := d.Use(kept); err != nil {
		t.Fatal(err)
	}
	last := query(7, "www.example.com.", dnsmessage.TypeA).Bytes()
	d.send(last)
	if got := next(t, dev.packets); !bytes.Equal(got, last) {
		t.Errorf("after the attachment: % x", got)
	}
	d.fd = -1
}
