// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package rtnl

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"

	"golang.org/x/sys/unix"
)

// Conn is an rtnetlink socket in the network namespace in which it was opened. Its methods may be called
// concurrently; calls are serialised.
type Conn struct {
	mu  sync.Mutex
	fd  int    // guarded by mu; -1 once closed
	seq uint32 // guarded by mu; of the last request
}

// Sizes in bytes.
const (
	// receiveBuffer limits the replies to a batch that the kernel queues. If they do not fit, they are lost
	// and the batch fails.
	receiveBuffer = 1 << 20
	// maxMessage is the maximum size of a part of a listing.
	maxMessage = 64 << 10
)

// buffers are receive buffers. They are pooled, because connections into containers are short-lived.
var buffers = sync.Pool{New: func() any { return new([maxMessage]byte) }}

// timeout limits the wait for a reply. The kernel normally queues the reply before the request returns.
var timeout = unix.Timeval{Sec: 60}

// ErrInterrupted: the listed objects changed during the listing, so that its parts may be inconsistent.
var ErrInterrupted = errors.New("changed during the listing")

// ErrClosed: the connection was closed.
var ErrClosed = errors.New("rtnetlink connection closed")

// Open opens a socket in the namespace of the calling thread.
func Open() (*Conn, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open rtnetlink: %w", err)
	}
	err = errors.Join(
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout),
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, receiveBuffer),
		// Errors contain the kernel's explanation and do not repeat the request.
		unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_EXT_ACK, 1),
		unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1),
	)
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("open rtnetlink: %w", err)
	}
	return &Conn{fd: fd}, nil
}

// Strict makes the kernel evaluate all fields of a listing request: it only lists matching objects, and rejects
// unknown attributes.
func (c *Conn) Strict() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return unix.SetsockoptInt(c.fd, unix.SOL_NETLINK, unix.NETLINK_GET_STRICT_CHK, 1)
}

// Cookie returns the number of the network namespace in which the socket was opened. It is not reused until
// reboot.
func (c *Conn) Cookie() (uint64, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fd < 0 {
		return 0, ErrClosed
	}
	cookie, err := unix.GetsockoptUint64(c.fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if err != nil {
		return 0, fmt.Errorf("read the cookie of a network namespace: %w", err)
	}
	return cookie, nil
}

// Close closes the socket. It may be called again.
func (c *Conn) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fd < 0 {
		return nil
	}
	fd := c.fd
	c.fd = -1
	return unix.Close(fd)
}

// Reply is the kernel's reply to one request.
type Reply struct {
	// Data is the message after its header; nil if it is empty.
	Data []byte
	// Err wraps a unix.Errno if the request failed.
	Err error
}

// Exchange sends all requests and returns the reply to each. The kernel executes them all, even after one has
// failed. If Exchange itself returns an error, the result is unknown.
func (c *Conn) Exchange(b *Batch) ([]Reply, error) {
	if b.Len() == 0 {
		return nil, nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	// Requests are executed in order, and failures are always reported. So the acknowledgement of the last request
	// confirms all requests without a failure.
	b.end()
	last := b.starts[len(b.starts)-1]
	flags := binary.NativeEndian.Uint16(b.b[last+offsetFlags:])
	binary.NativeEndian.PutUint16(b.b[last+offsetFlags:], flags|unix.NLM_F_ACK)
	first := c.seq + 1
	for _, s := range b.starts {
		c.seq++
		binary.NativeEndian.PutUint32(b.b[s+offsetSeq:], c.seq)
	}
	replies := make([]Reply, b.Len())
	err := c.talk(b.b, func(m message) (done bool, err error) {
		i := m.seq - first // wraps around like the sequence numbers
		if i >= uint32(len(replies)) {
			return false, nil // a reply to an earlier exchange that was abandoned
		}
		if m.kind != unix.NLMSG_ERROR {
			replies[i].Data = slices.Clone(m.data)
			return false, nil
		}
		replies[i].Err = m.err()
		return int(i) == len(replies)-1, nil
	})
	return replies, err
}

// Do is like Exchange, but for requests without replies. It returns the error of the first failed request with the
// request's description, except for errors in but.
func (c *Conn) Do(b *Batch, but ...error) error {
	replies, err := c.Exchange(b)
	if err != nil {
		return err
	}
	for i, r := range replies {
		if r.Err == nil || slices.ContainsFunc(but, func(e error) bool { return errors.Is(r.Err, e) }) {
			continue
		}
		return fmt.Errorf("%s: %w", fmt.Sprintf(b.goals[i].format, b.goals[i].args...), r.Err)
	}
	return nil
}

// Dump executes the batch's only request, a listing: it calls fn with the data of every message, which is valid
// until fn returns. It returns ErrInterrupted after the complete listing.
func (c *Conn) Dump(b *Batch, fn func(data []byte)) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	b.end()
	c.seq++
	seq := c.seq
	flags := binary.NativeEndian.Uint16(b.b[offsetFlags:])
	binary.NativeEndian.PutUint16(b.b[offsetFlags:], flags|unix.NLM_F_DUMP)
	binary.NativeEndian.PutUint32(b.b[offsetSeq:], seq)
	interrupted := false
	err := c.talk(b.b, func(m message) (bool, error) {
		if m.seq != seq {
			return false, nil
		}
		interrupted = interrupted || m.flags&unix.NLM_F_DUMP_INTR != 0
		switch m.kind {
		case unix.NLMSG_DONE, unix.NLMSG_ERROR:
			return true, m.err()
		}
		fn(m.data)
		return false, nil
	})
	if err == nil && interrupted {
		return ErrInterrupted
	}
	return err
}

type message struct {
	kind, flags uint16
	seq         uint32
	data        []byte
}

// err returns the error in a message of type NLMSG_ERROR or NLMSG_DONE.
func (m message) err() error {
	if len(m.data) < 4 {
		return nil
	}
	code := int32(binary.NativeEndian.Uint32(m.data)) //nolint:gosec // it is a signed number
	if code >= 0 {
		return nil
	}
	err := error(unix.Errno(-code))
	if m.flags&unix.NLM_F_ACK_TLVS == 0 {
		return err
	}
	skip := 4
	if m.kind == unix.NLMSG_ERROR {
		skip += sizeofHead
	}
	Attrs(m.data, skip, func(kind uint16, value []byte) {
		if kind == unix.NLMSGERR_ATTR_MSG {
			err = fmt.Errorf("%w: %s", err, unix.ByteSliceToString(value))
		}
	})
	return err
}

// talk sends a request and passes each received message to take until that is done. The caller holds the lock.
func (c *Conn) talk(request []byte, take func(message) (done bool, err error)) error {
	if c.fd < 0 {
		return ErrClosed
	}
	if err := unix.Sendto(c.fd, request, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return fmt.Errorf("send to rtnetlink: %w", err)
	}
	buf := buffers.Get().(*[maxMessage]byte)
	defer buffers.Put(buf) // in place: it is no map
	for {
		n, _, err := unix.Recvfrom(c.fd, buf[:], 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return fmt.Errorf("receive from rtnetlink: %w", err)
		}
		for b := buf[:n]; len(b) >= sizeofHead; {
			size := int(binary.NativeEndian.Uint32(b))
			if size < sizeofHead || size > len(b) {
				return fmt.Errorf("receive from rtnetlink: a message of %d bytes in %d", size, len(b))
			}
			done, err := take(message{
				kind: binary.NativeEndian.Uint16(b[offsetType:]), flags: binary.NativeEndian.Uint16(b[offsetFlags:]),
				seq: binary.NativeEndian.Uint32(b[offsetSeq:]), data: b[sizeofHead:size],
			})
			if done || err != nil {
				return err
			}
			b = b[min((size+3)&^3, len(b)):]
		}
	}
}
