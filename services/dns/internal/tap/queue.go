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
)

// maxDrained limits the frames that are read from a queue that is replaced. The device queues 1,000.
const maxDrained = 4096

// Queue is a queue of the TAP device that readers serve.
type Queue struct {
	files   []*os.File // one for each reader, which then do not wait for each other, and one for all other writers
	shared  sync.Mutex
	other   *writer // guarded by shared
	readers sync.WaitGroup
	ended   chan struct{} // all readers have ended
	err     error         // why; valid after ended
	errOnce sync.Once
}

// newQueue makes a queue of its descriptor, which it closes.
func newQueue(fd, readers int) (*Queue, error) {
	q := &Queue{ended: make(chan struct{})}
	defer unix.Close(fd)
	if err := unix.SetNonblock(fd, true); err != nil {
		return nil, fmt.Errorf("make the queue of the TAP device non-blocking: %w", err)
	}
	for range readers + 1 {
		d, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("duplicate the queue of the TAP device: %w", err), q.close())
		}
		q.files = append(q.files, os.NewFile(uintptr(d), "TAP device"))
	}
	var err error
	if q.other, err = newWriter(q.files[readers]); err != nil {
		return nil, errors.Join(err, q.close())
	}
	return q, nil
}

func (q *Queue) close() error {
	var err error
	for _, f := range q.files {
		err = errors.Join(err, f.Close())
	}
	return err
}

// Ended is closed when the queue cannot be read any more, for example because its device was removed.
func (q *Queue) Ended() <-chan struct{} { return q.ended }

// Err returns why the queue has ended.
func (q *Queue) Err() error { return q.err }

// fail notes why a reader ends. The other readers of the queue end, too.
func (q *Queue) fail(err error) {
	q.errOnce.Do(func() { q.err = err })
	q.interrupt()
}

func (q *Queue) interrupt() {
	for _, f := range q.files {
		_ = f.SetReadDeadline(time.Unix(1, 0)) // it fails only for a closed file
	}
}

// drain makes the readers handle the frames that are in the queue, and closes the queue.
func (q *Queue) drain() error {
	q.interrupt()
	q.readers.Wait()
	return q.close()
}

// write sends a frame for work outside the readers.
func (q *Queue) write(b []byte) error {
	q.shared.Lock()
	defer q.shared.Unlock()
	return q.other.write(b)
}

// writer sends frames without waiting, and without allocating memory.
type writer struct {
	conn syscall.RawConn
	try  func(fd uintptr) bool
	b    []byte
	err  error
}

func newWriter(f *os.File) (*writer, error) {
	conn, err := f.SyscallConn()
	if err != nil {
		return nil, err
	}
	w := &writer{conn: conn}
	w.try = func(fd uintptr) bool {
		for {
			if _, w.err = unix.Write(int(fd), w.b); w.err != unix.EINTR { //nolint:errorlint // x/sys returns it itself
				return true // a full device drops the frame: a reader must not wait
			}
		}
	}
	return w, nil
}

func (w *writer) write(b []byte) error {
	w.b = b
	if err := w.conn.Write(w.try); err != nil {
		return err
	}
	return w.err
}

// input reads frames from one descriptor.
type input struct {
	conn syscall.RawConn
	try  func(fd uintptr) bool
	buf  []byte
	n    int
	err  error
}

func newInput(f *os.File, size int) (*input, error) {
	conn, err := f.SyscallConn()
	if err != nil {
		return nil, err
	}
	in := &input{conn: conn, buf: make([]byte, size)}
	in.try = func(fd uintptr) bool {
		for {
			if in.n, in.err = unix.Read(int(fd), in.buf); in.err != unix.EINTR { //nolint:errorlint // x/sys returns it itself
				return in.err != unix.EAGAIN //nolint:errorlint // x/sys returns it itself
			}
		}
	}
	return in, nil
}

// read waits for a frame. The frame is valid until the next call.
func (in *input) read() ([]byte, error) {
	if err := in.conn.Read(in.try); err != nil {
		return nil, err
	}
	return in.result()
}

// poll returns a frame without waiting, or EAGAIN if the queue is empty.
func (in *input) poll() ([]byte, error) {
	if err := in.conn.Control(func(fd uintptr) { in.try(fd) }); err != nil {
		return nil, err
	}
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

// passing reports whether an error may be over at the next read.
func passing(err error) bool {
	return errors.Is(err, unix.ENOMEM) || errors.Is(err, unix.ENOBUFS) || errors.Is(err, unix.EFAULT)
}
