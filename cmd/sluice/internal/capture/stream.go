// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package capture

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// largestBlock bounds one that is read: a whole packet with its header and options.
const largestBlock = whole + 4<<10

// errNoCapture is returned for what a capture cannot have printed.
var errNoCapture = errors.New("what came is no capture")

// Stream writes what a capture on another machine prints. It writes whole blocks alone, so that the output can be read
// wherever the stream was cut off, and no more than --max-size.
type Stream struct {
	w     *writer
	limit int64 // 0: none
	part  []byte
	any   bool // there was a block
	ended bool // the last block is the one that a capture ends with
	err   error
}

// OpenStream opens the file, or takes stdout if there is none.
func (o *Flags) OpenStream(stdout io.Writer) (*Stream, error) {
	w, err := o.open(stdout)
	if err != nil {
		return nil, err
	}
	return &Stream{w: w, limit: int64(o.maxSize)}, nil
}

// Packets is how many were written.
func (s *Stream) Packets() uint64 { return s.w.packets }

// Complete says that the capture has ended by itself.
func (s *Stream) Complete() bool { return s.ended && len(s.part) == 0 }

// Err is why the output took no more; nil if it took all.
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
			return fmt.Errorf("%w: a block of type %#x and %d bytes", errNoCapture, kind, size)
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
