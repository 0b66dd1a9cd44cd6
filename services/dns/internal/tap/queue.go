// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package tap

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/dns/internal/frame"
)

// maxDrained limits the number of frames that are read from a queue that is being replaced. The device queues at most
// 1,000.
const maxDrained = 4096

// Queue is a queue of the TAP device, which readers serve.
type Queue struct {
	file    *os.File // waits for frames
	conn    syscall.RawConn
	readers sync.WaitGroup
	more    chan struct{} // wakes the second reader; closed when the first one ends
	ended   chan struct{} // all readers have ended
	err     error         // why the queue has ended; valid once ended is closed

	// Reads and writes hold mu for reading. They wait neither for the device nor for each other.
	mu     sync.RWMutex
	fd     int  // of file
	closed bool // guarded by mu
}

// newQueue creates a Queue for a descriptor, which it takes over.
func newQueue(fd int) (*Queue, error) {
	if err := unix.SetNonblock(fd, true); err != nil {
		return nil, errors.Join(fmt.Errorf("make the queue of the TAP device non-blocking: %w", err), unix.Close(fd))
	}
	q := &Queue{
		file: os.NewFile(uintptr(fd), "TAP device"), fd: fd, more: make(chan struct{}, 1), ended: make(chan struct{}),
	}
	var err error
	if q.conn, err = q.file.SyscallConn(); err != nil {
		return nil, errors.Join(err, q.file.Close())
	}
	return q, nil
}

func (q *Queue) close() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	return q.file.Close()
}

// Ended is closed when the queue can no longer be read, for example because its device was removed.
func (q *Queue) Ended() <-chan struct{} { return q.ended }

// Err returns why the queue has ended.
func (q *Queue) Err() error { return q.err }

// drain makes the readers handle the frames in the queue, and waits until they have ended.
func (q *Queue) drain() {
	_ = q.file.SetReadDeadline(time.Unix(1, 0)) // fails only for a closed file
	q.readers.Wait()
}

// write sends a frame without waiting. A device with a full queue drops the frame.
func (q *Queue) write(b []byte) error {
	q.mu.RLock()
	defer q.mu.RUnlock()
	if q.closed {
		return os.ErrClosed
	}
	for {
		if _, err := unix.Write(q.fd, b); err != unix.EINTR { //nolint:errorlint // x/sys returns it unwrapped
			return err
		}
	}
}

// input reads frames from a queue into a buffer.
type input struct {
	queue *Queue
	buf   []byte
	n     int
	err   error
	tries int // number of tries in the last call of read
	try   func(fd uintptr) bool
}

func newInput(q *Queue) *input {
	in := &input{queue: q, buf: make([]byte, frame.MaxSize+1)}
	in.try = func(fd uintptr) bool { // created once: otherwise it would be allocated for each frame
		in.tries++
		for {
			if in.n, in.err = unix.Read(int(fd), in.buf); in.err != unix.EINTR { //nolint:errorlint // x/sys returns it unwrapped
				return in.err != unix.EAGAIN //nolint:errorlint // x/sys returns it unwrapped
			}
		}
	}
	return in
}

// read waits for a frame, which is valid until the next call. Only one goroutine may call read at a time. waited
// reports whether the queue was empty.
func (in *input) read() (b []byte, waited bool, err error) {
	in.tries = 0
	if err := in.queue.conn.Read(in.try); err != nil {
		return nil, true, err
	}
	b, err = in.result()
	return b, in.tries > 1, err
}

// poll returns a frame without waiting, or EAGAIN if the queue is empty.
func (in *input) poll() ([]byte, error) {
	in.queue.mu.RLock()
	defer in.queue.mu.RUnlock()
	if in.queue.closed {
		return nil, os.ErrClosed
	}
	in.try(uintptr(in.queue.fd))
	return in.result()
}

func (in *input) result() ([]byte, error) {
	if in.err != nil {
		return nil, in.err
	}
	if in.n == 0 {
		return nil, io.EOF
	}
	return in.buf[:in.n], nil
}

// passing reports whether an error is temporary, so that the next read may succeed.
func passing(err error) bool {
	return errors.Is(err, unix.ENOMEM) || errors.Is(err, unix.ENOBUFS) || errors.Is(err, unix.EFAULT)
}
