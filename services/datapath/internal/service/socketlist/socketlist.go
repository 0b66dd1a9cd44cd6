// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package socketlist lists the connected UDP sockets for which a service selected a backend, with a BPF iterator. It
// changes nothing.
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

// ID identifies a socket: struct inet_diag_sockid of linux/inet_diag.h, with addresses, device and cookie.
type ID [48]byte

// Socket is a UDP socket that is or was connected.
type Socket struct {
	ID ID
	// Family is unix.AF_INET or unix.AF_INET6, as the socket was opened.
	Family uint8
	// Remote is the peer's address, in the form of the socket's family; port 0: no longer connected.
	Remote netip.AddrPort
	// Front and Backend are IDs in the maps of services, and Generation is the backend's at that time. IPv6 selects the
	// map of Backend.
	Front, Backend uint32
	IPv6           bool
	Generation     uint8
}

// List lists sockets. Its methods may be called concurrently.
type List struct {
	coll *ebpf.Collection
	it   *link.Iter
}

// Open loads the iterator program. storage is the map sl_sk.
func Open(storage *ebpf.Map) (*List, error) {
	spec, err := bpf.LoadListSockets()
	if err != nil {
		return nil, fmt.Errorf("read the compiled program that lists sockets: %w", err)
	}
	for name := range spec.Maps {
		if name != bpf.MapsMapSlSk {
			delete(spec.Maps, name) // declared for all programs, unused here
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

// socketSize is the size of struct sl_socket.
const socketSize = int(unsafe.Sizeof(bpf.MapsSlSocket{}))

// batch is the maximum number of sockets per read.
const batch = 512

// In lists the sockets of a network namespace. A socket that is opened or closed meanwhile may be missing or listed.
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
