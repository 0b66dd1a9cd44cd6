// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package socketlist lists the connected UDP sockets that a service has led to a
// backend, by an iterator that the kernel runs a program for. It changes nothing.
package socketlist

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns"
)

// ID is how the kernel tells sockets apart: struct inet_diag_sockid of
// linux/inet_diag.h, which has ends, device and cookie.
type ID [48]byte

// Socket is a connected UDP socket, or one that was.
type Socket struct {
	ID ID
	// Family is unix.AF_INET or unix.AF_INET6, as the socket was opened.
	Family uint8
	// Remote is its other end, in the form of its family; port 0: it is not connected
	// any more.
	Remote netip.AddrPort
	// Front and Backend are numbers in the maps of services, Backend in that of the
	// family IPv6 or else IPv4, Generation that of the backend at the time.
	Front, Backend uint32
	IPv6           bool
	Generation     uint8
}

// List lists sockets. Its methods may be called concurrently.
type List struct {
	coll *ebpf.Collection
	it   *link.Iter
}

// Open loads the program that lists the sockets whose storage is in a map: sl_sk.
func Open(storage *ebpf.Map) (*List, error) {
	spec, err := bpf.LoadListSockets()
	if err != nil {
		return nil, fmt.Errorf("read the compiled program that lists sockets: %w", err)
	}
	for name := range spec.Maps {
		if name != bpf.MapsMapSlSk {
			delete(spec.Maps, name) // declared for all, used by others
		}
	}
	coll, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{
		MapReplacements: map[string]*ebpf.Map{bpf.MapsMapSlSk: storage},
	})
	if err != nil {
		return nil, fmt.Errorf("load the program that lists sockets: %w", err)
	}
	it, err := link.AttachIter(link.IterOptions{Program: coll.Programs["sluice_list_sockets"]})
	if err != nil {
		coll.Close()
		return nil, fmt.Errorf("attach the program that lists sockets: %w", err)
	}
	return &List{coll: coll, it: it}, nil
}

// Close unloads the program.
func (l *List) Close() error {
	defer l.coll.Close()
	return l.it.Close()
}

// socketSize is that of struct sl_socket.
const socketSize = int(unsafe.Sizeof(bpf.MapsSlSocket{}))

// batch is how many sockets one read can give.
const batch = 512

// In lists those of a network namespace. One that is opened or closed meanwhile may
// be among them or not.
func (l *List) In(ns *netns.Namespace) ([]Socket, error) {
	var r io.ReadCloser
	if err := ns.Do(func() (err error) { r, err = l.it.Open(); return err }); err != nil {
		return nil, fmt.Errorf("list sockets: %w", err)
	}
	all, err := read(r)
	if err := errors.Join(err, r.Close()); err != nil {
		return nil, fmt.Errorf("list sockets: %w", err)
	}
	return all, nil
}

func read(r io.Reader) (all []Socket, err error) {
	buf := make([]byte, batch*socketSize)
	for have := 0; ; {
		n, err := r.Read(buf[have:])
		have += n
		whole := have - have%socketSize
		for at := 0; at < whole; at += socketSize {
			s, err := decode(buf[at:])
			if err != nil {
				return nil, err
			}
			all = append(all, s)
		}
		have = copy(buf, buf[whole:have])
		switch {
		case errors.Is(err, io.EOF) && have > 0:
			return nil, io.ErrUnexpectedEOF
		case errors.Is(err, io.EOF):
			return all, nil
		case err != nil:
			return nil, err
		}
	}
}

func decode(b []byte) (Socket, error) {
	var raw bpf.MapsSlSocket
	if _, err := binary.Decode(b, binary.NativeEndian, &raw); err != nil {
		return Socket{}, err
	}
	s := Socket{
		Family: uint8(raw.Family), Front: raw.Front, Backend: raw.Backend, IPv6: raw.BackendFamily == 6, Generation: raw.Gen,
	}
	copy(s.ID[:], b)
	const portAt, addrAt = 2, 20
	addr := netip.AddrFrom4([4]byte(b[addrAt:]))
	if s.Family == unix.AF_INET6 {
		addr = netip.AddrFrom16([16]byte(b[addrAt:]))
	}
	s.Remote = netip.AddrPortFrom(addr, binary.BigEndian.Uint16(b[portAt:]))
	return s, nil
}
