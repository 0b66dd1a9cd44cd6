// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package capture

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// errOtherInterface is returned if the namespace is no longer the endpoint's, or if its interface was replaced.
var errOtherInterface = errors.New("the interface in the namespace is not the one that the datapath created")

// device is the interface of a container, as the datapath knows it.
type device struct {
	namespace string // path
	name      string
	index     int
	mac       string
}

// The kernel writes packets into a TPACKET_V3 ring. It retires a block when it is full or after blockRetire. Only a
// ring has the timestamps of all packets: packets that eBPF programs redirect have none, and on a plain socket they
// would get the time at which they are read.
const (
	blockSize   = 1 << 20 // larger than the largest packet
	blockRetire = 50      // milliseconds
	frameSize   = 2048    // a packet may take several
)

// socket captures the packets of an interface.
type socket struct {
	fd     int
	ring   []byte
	blocks int
	block  int    // index of the current block
	left   uint32 // unread packets of the block
	at     uint32 // offset of the next packet in the block
	lost   uint64 // packets dropped because the ring was full
	seen   uint64 // packets that matched the filter, including lost ones
}

// openSocket opens a packet socket in the network namespace of a device. If the thread cannot return to its own
// namespace, it exits.
func openSocket(d device, program []bpf.RawInstruction, buffer int) (*socket, error) {
	ns, err := os.OpenFile(d.namespace, os.O_RDONLY|unix.O_NONBLOCK, 0) // O_NONBLOCK in case it is a pipe
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(ns.Fd()), &st); err != nil {
		return nil, fmt.Errorf("look at %s: %w", d.namespace, err)
	}
	if st.Type != unix.NSFS_MAGIC {
		return nil, fmt.Errorf("%s is no namespace", d.namespace)
	}
	type opened struct {
		s   *socket
		err error
	}
	done := make(chan opened, 1)
	go func() {
		runtime.LockOSThread()
		s, home, err := openIn(ns, d, program, buffer)
		if home {
			runtime.UnlockOSThread()
		}
		done <- opened{s, err}
	}()
	o := <-done
	return o.s, o.err
}

// openIn opens the socket in the namespace. home is true if the thread is back in its own namespace.
func openIn(ns *os.File, d device, program []bpf.RawInstruction, buffer int) (s *socket, home bool, err error) {
	const own = "/proc/thread-self/ns/net"
	back, err := unix.Open(own, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, true, &fs.PathError{Op: "open the thread's network namespace", Path: own, Err: err}
	}
	defer unix.Close(back)
	if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
		return nil, true, fmt.Errorf("enter %s: %w", d.namespace, err)
	}
	s, err = newSocket(d, program, buffer)
	return s, unix.Setns(back, unix.CLONE_NEWNET) == nil, err
}

func newSocket(d device, program []bpf.RawInstruction, buffer int) (*socket, error) {
	found, err := net.InterfaceByName(d.name)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errOtherInterface, err)
	}
	if found.Index != d.index || found.HardwareAddr.String() != d.mac {
		return nil, fmt.Errorf("%w: %s has index %d and address %s, want %d and %s", errOtherInterface, d.name, found.Index,
			found.HardwareAddr, d.index, d.mac)
	}
	// Without a protocol, the socket receives nothing before the filter is attached.
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("open a packet socket: %w", err)
	}
	s := &socket{fd: fd, blocks: max(2, buffer/blockSize)}
	if err := s.prepare(d, program); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

func (s *socket) prepare(d device, program []bpf.RawInstruction) error {
	raw := make([]unix.SockFilter, len(program))
	for i, in := range program {
		raw[i] = unix.SockFilter{Code: in.Op, Jt: in.Jt, Jf: in.Jf, K: in.K}
	}
	if err := unix.SetsockoptSockFprog(s.fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER,
		&unix.SockFprog{Len: uint16(len(raw)), Filter: &raw[0]}); err != nil {
		return fmt.Errorf("attach the filter: %w", err)
	}
	if err := unix.SetsockoptInt(s.fd, unix.SOL_PACKET, unix.PACKET_VERSION, unix.TPACKET_V3); err != nil {
		return fmt.Errorf("prepare the packet socket: %w", err)
	}
	if err := unix.SetsockoptTpacketReq3(s.fd, unix.SOL_PACKET, unix.PACKET_RX_RING, &unix.TpacketReq3{
		Block_size: blockSize, Block_nr: uint32(s.blocks), Frame_size: frameSize,
		Frame_nr: uint32(s.blocks * (blockSize / frameSize)), Retire_blk_tov: blockRetire,
	}); err != nil {
		return fmt.Errorf("make a ring of %d MiB: %w", s.blocks*blockSize>>20, err)
	}
	var err error
	s.ring, err = unix.Mmap(s.fd, 0, s.blocks*blockSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("map the ring: %w", err)
	}
	all := binary.NativeEndian.Uint16([]byte{unix.ETH_P_ALL >> 8, unix.ETH_P_ALL & 0xff})
	if err := unix.Bind(s.fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: d.index}); err != nil {
		return fmt.Errorf("listen at %s: %w", d.name, err)
	}
	return nil
}

// wait waits for packets. It returns an error if the interface is down or was removed.
func (s *socket) wait(d time.Duration) error {
	fds := []unix.PollFd{{Fd: int32(s.fd), Events: unix.POLLIN}}
	if _, err := unix.Poll(fds, int(d.Milliseconds())); err != nil && !errors.Is(err, unix.EINTR) {
		return err
	}
	if fds[0].Revents&unix.POLLERR == 0 {
		return nil
	}
	n, err := unix.GetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_ERROR)
	if err == nil && n != 0 {
		err = unix.Errno(n)
	}
	return err
}

// status returns the status of the current block, which the kernel also writes.
func (s *socket) status() *uint32 {
	return (*uint32)(unsafe.Pointer(&s.ring[s.block*blockSize+int(unsafe.Offsetof(unix.TpacketBlockDesc{}.Hdr))]))
}

// receive returns the next packet, which is valid until the next call. ok is false if no packet is waiting.
func (s *socket) receive() (p packet, ok bool) {
	if s.left == 0 && s.at != 0 {
		atomic.StoreUint32(s.status(), unix.TP_STATUS_KERNEL)
		s.block, s.at = (s.block+1)%s.blocks, 0
	}
	block := s.ring[s.block*blockSize : (s.block+1)*blockSize]
	if s.at == 0 {
		if atomic.LoadUint32(s.status())&unix.TP_STATUS_USER == 0 {
			return p, false
		}
		h := (*unix.TpacketHdrV1)(unsafe.Pointer(&block[unsafe.Offsetof(unix.TpacketBlockDesc{}.Hdr)]))
		s.left, s.at = h.Num_pkts, h.Offset_to_first_pkt
		if s.left == 0 {
			return s.receive() // the block was retired without packets
		}
	}
	h := (*unix.Tpacket3Hdr)(unsafe.Pointer(&block[s.at]))
	data := s.at + uint32(h.Mac)
	// The sockaddr_ll follows the header, aligned.
	kind := block[int(s.at)+(int(unsafe.Sizeof(*h))+15)&^15+int(unsafe.Offsetof(unix.RawSockaddrLinklayer{}.Pkttype))]
	p = packet{
		time: time.Unix(int64(h.Sec), int64(h.Nsec)), data: block[data : data+h.Snaplen], length: int(h.Len),
		outgoing: kind == unix.PACKET_OUTGOING,
	}
	s.left--
	s.at += h.Next_offset
	return p, true
}

// count adds the kernel's numbers of received and lost packets, which reading resets, to the totals.
func (s *socket) count() error {
	st, err := unix.GetsockoptTpacketStatsV3(s.fd, unix.SOL_PACKET, unix.PACKET_STATISTICS)
	if err != nil {
		return fmt.Errorf("read the statistics of the packet socket: %w", err)
	}
	s.seen, s.lost = s.seen+uint64(st.Packets), s.lost+uint64(st.Drops)
	return nil
}

func (s *socket) Close() error {
	var err error
	if s.ring != nil {
		err = unix.Munmap(s.ring)
	}
	return errors.Join(err, unix.Close(s.fd))
}
