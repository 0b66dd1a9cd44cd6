// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package capture

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// largestBlock is the largest accepted block: a whole packet with header and options.
const largestBlock = whole + 4<<10

// errNoCapture is returned for input that is not the output of a capture.
var errNoCapture = errors.New("the received data is not a packet capture")

// Stream writes the output of a capture on another machine. It writes only whole blocks, so that the file is valid if
// the stream breaks, and at most --max-size bytes.
type Stream struct {
	w     *writer
	limit int64 // bytes; 0: no limit
	part  []byte
	any   bool // a block was received
	ended bool // the last block is a statistics block
	err   error
}

// OpenStream opens the output file; without one it uses stdout.
func (o *Flags) OpenStream(stdout io.Writer) (*Stream, error) {
	w, err := o.open(stdout)
	if err != nil {
		return nil, err
	}
	return &Stream{w: w, limit: int64(o.maxSize)}, nil
}

// Packets returns the number of packets written.
func (s *Stream) Packets() uint64 { return s.w.packets }

// Complete reports whether the capture was received completely, with its last block.
func (s *Stream) Complete() bool { return s.ended && len(s.part) == 0 }

// Err returns the error of a failed write, or nil.
func (s *Stream) Err() error { return s.err }

// Write implements io.Writer.
func (s *Stream) Write(p []byte) (int, error) {
	if s.err = s.write(p); s.err != nil {
		return 0, s.err
	}
	return len(p), nil
}

func (s *Stream) write(p []byte) error {
	s.part = append(s.part, p...)
	at := 0
	for len(s.part)-at >= 8 {
		kind, size := binary.LittleEndian.Uint32(s.part[at:]), int(binary.LittleEndian.Uint32(s.part[at+4:]))
		if s.any == (kind == blockSection) || size < 12 || size > largestBlock || size%4 != 0 {
			return fmt.Errorf("%w: block of type %#x with %d bytes", errNoCapture, kind, size)
		}
		if len(s.part)-at < size {
			break
		}
		if s.limit > 0 && s.w.size+int64(len(s.w.waiting)+size) > s.limit {
			return fmt.Errorf("%w: it is larger than %d bytes", errNoCapture, s.limit)
		}
		s.w.add(s.part[at : at+size])
		s.any, s.ended = true, kind == blockStatistics
		if kind == blockPacket {
			s.w.packets++
		}
		at += size
	}
	s.part = s.part[:copy(s.part, s.part[at:])]
	return s.w.flush()
}

// Close closes the file.
func (s *Stream) Close() error { return s.w.close() }
