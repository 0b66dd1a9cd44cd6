// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package proxyns

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"strconv"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
)

func anywhere(family int) *net.IPNet {
	if family == netlink.FAMILY_V4 {
		return &net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}
	}
	return &net.IPNet{IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)}
}

// socket makes a TCP socket that may have any address. The calling thread is in the namespace.
func socket(ipv6 bool, options ...[3]int) (int, error) {
	family, transparent := unix.AF_INET, [3]int{unix.SOL_IP, unix.IP_TRANSPARENT, 1}
	if ipv6 {
		family, transparent = unix.AF_INET6, [3]int{unix.SOL_IPV6, unix.IPV6_TRANSPARENT, 1}
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return -1, fmt.Errorf("open a socket in the proxy namespace: %w", err)
	}
	options = append(options, transparent, [3]int{unix.SOL_SOCKET, unix.SO_REUSEADDR, 1})
	if ipv6 {
		options = append(options, [3]int{unix.SOL_IPV6, unix.IPV6_V6ONLY, 1})
	}
	for _, o := range options {
		if err := unix.SetsockoptInt(fd, o[0], o[1], o[2]); err != nil {
			return -1, errors.Join(fmt.Errorf("option %d of a socket in the proxy namespace: %w", o[1], err), unix.Close(fd))
		}
	}
	return fd, nil
}

// listenerOf returns the address family of a listener of a namespace; 0: it is no such socket. Only the datapath opens
// sockets there.
func listenerOf(fd int, namespace uint64) int {
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if err != nil || cookie != namespace {
		return 0
	}
	if listens, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN); err != nil || listens != 1 {
		return 0
	}
	at, err := unix.Getsockname(fd)
	if err != nil {
		return 0
	}
	switch a := at.(type) {
	case *unix.SockaddrInet4:
		if a.Port == Port && a.Addr == loopback4 {
			return unix.AF_INET
		}
	case *unix.SockaddrInet6:
		if a.Port == Port && a.Addr == loopback6 {
			return unix.AF_INET6
		}
	}
	return 0
}

// Addresses of the listeners.
var (
	loopback4 = [4]byte{127, 0, 0, 1}
	loopback6 = [16]byte{15: 1}
)

// listen opens the listeners, unless they are open.
func (s *Space) listen() error {
	return s.ns.Do(func() (err error) {
		if s.listen4 < 0 {
			if s.listen4, err = listener(false); err != nil {
				return err
			}
		}
		if s.listen6 < 0 {
			s.listen6, err = listener(true)
			if errors.Is(err, unix.EAFNOSUPPORT) {
				err = nil
			}
		}
		return err
	})
}

func listener(ipv6 bool) (int, error) {
	fd, err := socket(ipv6,
		[3]int{unix.SOL_SOCKET, unix.SO_SNDBUF, toClientBuffer},
		[3]int{unix.SOL_SOCKET, unix.SO_RCVBUF, fromClientBuffer})
	if err != nil {
		return -1, err
	}
	var at unix.Sockaddr = &unix.SockaddrInet4{Port: Port, Addr: loopback4}
	if ipv6 {
		at = &unix.SockaddrInet6{Port: Port, Addr: loopback6}
	}
	if err = unix.Bind(fd, at); err == nil {
		err = unix.Listen(fd, Backlog)
	}
	if err != nil {
		return -1, errors.Join(fmt.Errorf("listen in the proxy namespace: %w", err), unix.Close(fd))
	}
	return fd, nil
}

// Sockets makes unbound sockets, at most MaxSockets. The caller closes them.
func (s *Space) Sockets(n int, ipv6 bool) (fds []int, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ns == nil {
		return nil, fmt.Errorf("proxy namespace: %w", fs.ErrNotExist)
	}
	err = s.ns.Do(func() error {
		for range min(n, MaxSockets) {
			fd, err := socket(ipv6,
				[3]int{unix.SOL_SOCKET, unix.SO_SNDBUF, fromClientBuffer},
				[3]int{unix.SOL_SOCKET, unix.SO_RCVBUF, toClientBuffer})
			if err != nil {
				return err
			}
			fds = append(fds, fd)
		}
		return nil
	})
	return fds, err
}

// Check compares the devices with what Ensure makes, if it was called.
func (s *Space) Check() (ds []endpoint.Difference, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ns == nil {
		return nil, nil
	}
	add := func(subject, key, want, have string) {
		ds = append(ds, endpoint.Difference{Subject: subject, Key: key, Want: want, Have: have})
	}
	l, err := s.link()
	switch {
	case errors.Is(err, ErrTaken):
		add("proxy device", s.name, "a veth device of Sluice", err.Error())
		return ds, nil
	case err != nil:
		return nil, err
	case l == nil:
		add("proxy device", s.name, "a veth device", "")
		return ds, nil
	}
	peer, err := s.inner.links.LinkByName(inside)
	if err != nil {
		return nil, fmt.Errorf("find the device %s in the proxy namespace: %w", inside, err)
	}
	for _, d := range []struct {
		end      *end
		link     netlink.Link
		programs []*program.Program
	}{{s.node, l, programs(s.o.Programs)}, {s.inner, peer, programs(s.o.Inside)}} {
		a := d.link.Attrs()
		if a.RawFlags&unix.IFF_UP == 0 {
			add("device state", a.Name, "up", "down")
		}
		if a.MTU != MTU {
			add("device mtu", a.Name, strconv.Itoa(MTU), strconv.Itoa(a.MTU))
		}
		if len(d.programs) == 0 {
			continue
		}
		more, err := d.end.hooks.CheckFirst(endpoint.HostDevice{Name: a.Name, Index: index32(d.link)}, d.programs)
		if err != nil {
			return nil, err
		}
		ds = append(ds, more...)
	}
	return ds, nil
}

// Remove deletes the device if it exists, and with it the other end. A foreign device with the name is not removed.
func (s *Space) Remove() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	l, err := s.link()
	if errors.Is(err, ErrTaken) || err == nil && l == nil {
		return nil
	}
	if err == nil {
		err = s.node.links.LinkDel(l)
	}
	if err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("delete the device %s of the proxy namespace: %w", s.name, err)
	}
	s.leave()
	return nil
}
