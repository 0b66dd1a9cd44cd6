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

// errOtherInterface: the namespace is not that of the endpoint any more, or somebody has replaced its interface.
var errOtherInterface = errors.New("the interface in the namespace is not the one that the datapath made")

// device is the interface of a container, as the datapath knows it.
type device struct {
	namespace string // path
	name      string
	index     int
	mac       string
}

// The ring that the kernel writes packets into, TPACKET_V3: blocks that are handed over when they are full, or after a
// while. Only the ring has the time at which a packet came: to a plain socket, packets that eBPF programs redirect come
// without one, and seem to come when they are read.
const (
	blockSize   = 1 << 20 // has room for the largest packet
	blockRetire = 50      // milliseconds
	frameSize   = 2048    // a packet may take several
)

// socket takes the packets of an interface.
type socket struct {
	fd     int
	ring   []byte
	blocks int
	block  int    // the one that is read now, or next
	left   uint32 // packets of that block that were not read
	at     uint32 // where the next of them is
	lost   uint64 // by the kernel, because the ring was full
	seen   uint64 // that passed the filter, with those that were lost
}

// openSocket opens a packet socket in the namespace of a device. The thread that goes there ends with it if it cannot
// come back.
func openSocket(d device, program []bpf.RawInstruction, buffer int) (*socket, error) {
	ns, err := os.OpenFile(d.namespace, os.O_RDONLY|unix.O_NONBLOCK, 0) // the datapath says where; a pipe would block
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

// openIn enters the namespace on the thread, and returns whether the thread is back.
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
	// Without a protocol it takes nothing until it has its filter.
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

// wait waits for packets, and fails if there will be none.
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

// status is that of the block that is read now; the kernel writes it too.
func (s *socket) status() *uint32 {
	return (*uint32)(unsafe.Pointer(&s.ring[s.block*blockSize+int(unsafe.Offsetof(unix.TpacketBlockDesc{}.Hdr))]))
}

// receive returns a packet, which is good until the next call. ok is false if there is none.
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
			return s.receive() // a block that was retired without packets
		}
	}
	h := (*unix.Tpacket3Hdr)(unsafe.Pointer(&block[s.at]))
	data := s.at + uint32(h.Mac)
	// The address that recvfrom would give follows the header, aligned.
	kind := block[int(s.at)+(int(unsafe.Sizeof(*h))+15)&^15+int(unsafe.Offsetof(unix.RawSockaddrLinklayer{}.Pkttype))]
	p = packet{
		time: time.Unix(int64(h.Sec), int64(h.Nsec)), data: block[data : data+h.Snaplen], length: int(h.Len),
		outgoing: kind == unix.PACKET_OUTGOING,
	}
	s.left--
	s.at += h.Next_offset
	return p, true
}

// count reads how many packets came and how many were lost.
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
