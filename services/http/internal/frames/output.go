// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package frames

import (
	"encoding/binary"
	"errors"
	"net"
	"sync"

	"golang.org/x/net/http2"
)

// batch collects the bytes of one write: parts of an input's buffer, and bytes that the relay has made.
type batch struct {
	parts, scratch net.Buffers
	made           []byte
}

// pass adds bytes of an input's buffer.
func (b *batch) pass(p []byte) {
	if n := len(b.parts); n > 0 {
		last := b.parts[n-1]
		if len(last) < cap(last) && &last[:len(last)+1][len(last)] == &p[0] {
			b.parts[n-1] = last[:len(last)+len(p)]
			return
		}
	}
	b.parts = append(b.parts, p)
}

// add adds bytes that the relay has made. Later changes of p do not matter.
func (b *batch) add(p []byte) {
	if len(p) == 0 {
		return
	}
	start := len(b.made)
	b.made = append(b.made, p...)
	b.parts = append(b.parts, b.made[start:len(b.made):len(b.made)])
}

func (b *batch) empty() bool { return len(b.parts) == 0 }

func (b *batch) writeTo(conn net.Conn) error {
	var err error
	switch len(b.parts) {
	case 0:
	case 1:
		_, err = conn.Write(b.parts[0])
	default:
		b.scratch = b.parts
		_, err = b.scratch.WriteTo(conn)
	}
	clear(b.parts)
	b.parts, b.made = b.parts[:0], b.made[:0]
	if cap(b.made) > maxKept {
		b.made = nil
	}
	return err
}

// writer writes to the client: what the server sends, and frames of the relay between frames of the server. The latter
// wait in a queue while the server's frames are being written, so that a client that does not read stops only the
// server's direction.
type writer struct {
	conn net.Conn

	write  sync.Mutex // held while bytes are written
	ready  bool       // the server's SETTINGS have been written
	middle bool       // the last frame was in the middle of a header block
	out    []byte

	mu     sync.Mutex
	queue  []byte
	credit uint32 // for the window of the connection
}

var errQueue = errors.New("the client does not read")

// add puts frames of the relay into the queue.
func (w *writer) add(frames []byte) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.queue)+len(frames) > maxQueue {
		return errQueue
	}
	w.queue = append(w.queue, frames...)
	return nil
}

// addCredit gives the client n bytes of the window of the connection.
func (w *writer) addCredit(n int) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.credit += uint32(n); w.credit > 1<<31-1 { //nolint:gosec // the length of a frame
		return errQueue
	}
	return nil
}

// takeQueue moves the queue to out. It runs with write held.
func (w *writer) takeQueue() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.out, w.queue = w.queue, w.out[:0]
	if w.credit > 0 {
		w.out = appendHeader(w.out, 4, http2.FrameWindowUpdate, 0, 0)
		w.out = binary.BigEndian.AppendUint32(w.out, w.credit)
		w.credit = 0
	}
}

func (w *writer) waiting() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.queue) > 0 || w.credit > 0
}

// flush writes the queue, unless the server's direction is writing: then that direction writes it.
func (w *writer) flush() error {
	for w.waiting() && w.write.TryLock() {
		if !w.ready || w.middle {
			w.write.Unlock()
			return nil
		}
		w.takeQueue()
		_, err := w.conn.Write(w.out)
		w.write.Unlock()
		if err != nil {
			return err
		}
	}
	return nil
}

// forward writes frames of the server. middle is set if they end in the middle of a header block.
func (w *writer) forward(b *batch, middle bool) error {
	w.write.Lock()
	err := b.writeTo(w.conn)
	w.ready, w.middle = true, middle
	w.write.Unlock()
	if err != nil {
		return err
	}
	return w.flush()
}

// goAway tells the client why the connection ends, if that is possible without waiting. Before SETTINGS of the server,
// the relay sends its own, because a client accepts no other frame first.
func (w *writer) goAway(code http2.ErrCode) {
	if !w.write.TryLock() {
		return
	}
	defer w.write.Unlock()
	if w.middle {
		return
	}
	w.takeQueue()
	if !w.ready {
		w.out = appendHeader(w.out[:0], 0, http2.FrameSettings, 0, 0)
	}
	w.out = appendHeader(w.out, 8, http2.FrameGoAway, 0, 0)
	w.out = binary.BigEndian.AppendUint32(w.out, 1<<31-1)
	w.out = binary.BigEndian.AppendUint32(w.out, uint32(code))
	w.ready, w.middle = true, true // nothing follows
	_, _ = w.conn.Write(w.out)
}

// addFrame adds a frame that the relay has made.
func (b *batch) addFrame(kind http2.FrameType, flags http2.Flags, stream uint32, payload []byte) {
	start := len(b.made)
	b.made = appendHeader(b.made, len(payload), kind, flags, stream)
	b.made = append(b.made, payload...)
	b.parts = append(b.parts, b.made[start:len(b.made):len(b.made)])
}
