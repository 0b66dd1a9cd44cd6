// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"errors"
	"fmt"
	"io"
	"net/netip"
	"runtime"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/test/internal/pod"
)

// The traffic measurements use blocking sockets on locked threads instead of package net, because wake-ups of Go's
// poller would hide the differences between the networks.

// congestionControl is set on every socket: the default in new network namespaces may need a qdisc that they do not
// have.
const congestionControl = "cubic"

// path is a path between two pods.
type path struct {
	name     string
	from, to pod.Pod
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
}

// socketIn opens a stream socket inside a pod.
func socketIn(p pod.Pod) (fd int, err error) {
	err = pod.In(p.Netns, func() error {
		fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		if err := unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, congestionControl); err != nil {
			return fmt.Errorf("set congestion control: %w", err)
		}
		return unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
	})
	return fd, err
}

// listenIn opens a listening socket in a pod, at a given port or at any free one, and returns its port.
func listenIn(p pod.Pod, at uint16) (fd int, port uint16, err error) {
	if fd, err = socketIn(p); err != nil {
		return -1, 0, err
	}
	// The last connection to the port may still be closing.
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
		return -1, 0, err
	}
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: p.IPv4.As4(), Port: int(at)}); err != nil {
		return -1, 0, err
	}
	if err := unix.Listen(fd, 512); err != nil {
		return -1, 0, err
	}
	name, err := unix.Getsockname(fd)
	if err != nil {
		return -1, 0, err
	}
	return fd, uint16(name.(*unix.SockaddrInet4).Port), nil
}

// requestResponse exchanges n one-byte messages over one connection and returns the duration of each exchange.
func requestResponse(p path, n int) (samples, error) {
	listener, port, err := listenIn(p.to, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(listener)
	return exchanges(p, listener, netip.AddrPortFrom(p.to.IPv4, port), n)
}

// exchanges is requestResponse with an existing listener at one end of the path, which the other end reaches at an
// address.
func exchanges(p path, listener int, at netip.AddrPort, n int) (samples, error) {
	served := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		conn, _, err := unix.Accept4(listener, unix.SOCK_CLOEXEC)
		if err != nil {
			served <- err
			return
		}
		defer unix.Close(conn)
		_ = unix.SetsockoptInt(conn, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
		buf := make([]byte, 1)
		for {
			if got, err := unix.Read(conn, buf); err != nil || got == 0 {
				served <- err
				return
			}
			if _, err := unix.Write(conn, buf); err != nil {
				served <- err
				return
			}
		}
	}()
	client, err := socketIn(p.from)
	if err != nil {
		return nil, err
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := unix.Connect(client, sockaddr(at)); err != nil {
		return nil, fmt.Errorf("%s: connect: %w", p.name, err)
	}
	buf := []byte{1}
	times := make(samples, 0, n)
	for range n {
		start := time.Now()
		if _, err := unix.Write(client, buf); err != nil {
			return nil, err
		}
		if _, err := unix.Read(client, buf); err != nil {
			return nil, err
		}
		times = append(times, time.Since(start))
	}
	if err := unix.Close(client); err != nil {
		return nil, err
	}
	return times, <-served
}

// connects opens and aborts n connections one after the other and returns the number of connections per second.
func connects(p path, n int) (float64, error) {
	listener, port, err := listenIn(p.to, 0)
	if err != nil {
		return 0, err
	}
	served := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		for range n {
			conn, _, err := unix.Accept4(listener, unix.SOCK_CLOEXEC)
			if err != nil {
				served <- err
				return
			}
			_ = unix.Close(conn)
		}
		served <- nil
	}()
	defer unix.Close(listener)
	to := sockaddr(netip.AddrPortFrom(p.to.IPv4, port))
	var elapsed time.Duration
	err = pod.In(p.from.Netns, func() error {
		start := time.Now()
		for range n {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			// Abort instead of closing: this avoids TIME_WAIT, so ports do not run out.
			if err := unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}); err != nil {
				return err
			}
			if err := unix.Connect(fd, to); err != nil {
				return fmt.Errorf("%s: connect: %w", p.name, err)
			}
			if err := unix.Close(fd); err != nil {
				return err
			}
		}
		elapsed = time.Since(start)
		return nil
	})
	if err != nil {
		return 0, err
	}
	return float64(n) / elapsed.Seconds(), <-served
}

// stream sends n bytes one way over one connection and returns the rate of arrival in bytes per second.
func stream(p path, n int) (float64, error) {
	listener, port, err := listenIn(p.to, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(listener)
	const chunk = 128 << 10
	received := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		conn, _, err := unix.Accept4(listener, unix.SOCK_CLOEXEC)
		if err != nil {
			received <- err
			return
		}
		defer unix.Close(conn)
		buf := make([]byte, chunk)
		for left := n; left > 0; {
			got, err := unix.Read(conn, buf)
			if err == nil && got == 0 {
				err = io.ErrUnexpectedEOF
			}
			if err != nil {
				received <- fmt.Errorf("%s: %d bytes before the end of a stream: %w", p.name, left, err)
				return
			}
			left -= got
		}
		received <- nil
	}()
	client, err := socketIn(p.from)
	if err != nil {
		return 0, err
	}
	defer unix.Close(client)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := unix.Connect(client, sockaddr(netip.AddrPortFrom(p.to.IPv4, port))); err != nil {
		return 0, fmt.Errorf("%s: connect: %w", p.name, err)
	}
	message := make([]byte, chunk)
	start := time.Now()
	for left := n; left > 0; {
		sent, err := unix.Write(client, message[:min(left, chunk)])
		if err != nil {
			return 0, fmt.Errorf("%s: send: %w", p.name, err)
		}
		left -= sent
	}
	if err := <-received; err != nil {
		return 0, err
	}
	return float64(n) / time.Since(start).Seconds(), nil
}

// window is the maximum number of datagrams in flight. It is below the capacity of a socket buffer, so that none is
// lost and the receiver's rate is the network's.
const window = 64

// packetRate sends n datagrams of 64 bytes one way and returns the number of arrivals per second.
func packetRate(p path, n int) (float64, error) {
	receiver, err := datagramSocketIn(p.to, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(receiver)
	sender, err := datagramSocketIn(p.from, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(sender)
	name, err := unix.Getsockname(receiver)
	if err != nil {
		return 0, err
	}
	to := netip.AddrPortFrom(p.to.IPv4, uint16(name.(*unix.SockaddrInet4).Port))
	if err := unix.Connect(sender, sockaddr(to)); err != nil {
		return 0, err
	}
	var arrived atomic.Int64
	received := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		buf := make([]byte, 128)
		for range n {
			if err := readDatagram(receiver, buf); err != nil {
				received <- fmt.Errorf("%s: datagram %d of %d: %w", p.name, arrived.Load()+1, n, err)
				return
			}
			arrived.Add(1)
		}
		received <- nil
	}()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	message := make([]byte, 64)
	start := time.Now()
	for i := range n {
		for int64(i)-arrived.Load() >= window {
			select {
			case err := <-received: // it gave up
				return 0, err
			default:
				runtime.Gosched()
			}
		}
		if _, err := unix.Write(sender, message); err != nil {
			return 0, fmt.Errorf("%s: send: %w", p.name, err)
		}
	}
	if err := <-received; err != nil {
		return 0, err
	}
	return float64(n) / time.Since(start).Seconds(), nil
}

// readDatagram reads one datagram from a socket of datagramSocketIn.
func readDatagram(fd int, buf []byte) error {
	_, err := unix.Read(fd, buf)
	for errors.Is(err, unix.EINTR) { // a read with a timeout is not restarted
		_, err = unix.Read(fd, buf)
	}
	return err
}

// datagramSocketIn opens a datagram socket on a pod's address, at a given port or at any free one.
func datagramSocketIn(p pod.Pod, port uint16) (fd int, err error) {
	err = pod.In(p.Netns, func() error {
		if fd, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		// A lost datagram must not hang the measurement.
		if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 10}); err != nil {
			return err
		}
		return unix.Bind(fd, &unix.SockaddrInet4{Addr: p.IPv4.As4(), Port: int(port)})
	})
	if err != nil {
		return -1, fmt.Errorf("datagram socket in %s: %w", p.Name, err)
	}
	return fd, nil
}
