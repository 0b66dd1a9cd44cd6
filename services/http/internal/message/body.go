// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package message

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
)

// Limits of the chunked transfer coding.
const (
	maxChunkLine = 256 // size and extensions of a chunk
	// maxExtensions limits the bytes of all extensions of a body, because many small chunks could have large
	// extensions.
	maxExtensions = 16 << 10
	maxTrailer    = 8 << 10
)

// CopyBody copies a body from a message to another one, whose framing may differ in that it ends with the connection.
// It
// flushes the writer whenever the reader has no more bytes, so that bytes do not wait for later ones. The error is an
// *Error if the body is not valid; io.ErrUnexpectedEOF if it is not complete.
func CopyBody(w *bufio.Writer, in *bufio.Reader, from, to Body) error {
	switch from.Framing {
	case NoBody:
		return nil
	case Length:
		return copyBytes(w, in, from.Length)
	case UntilClose:
		err := copyBytes(w, in, -1)
		if errors.Is(err, io.EOF) {
			return nil
		}
		return err
	}
	return copyChunks(w, in, to.Framing == Chunked)
}

// DiscardBody reads a body of at most limit bytes. It returns false if the body is longer, or the client has not sent
// all of it.
func DiscardBody(in *bufio.Reader, from Body, limit int64) bool {
	w := bufio.NewWriter(&limited{limit})
	return (from.Framing != Length || from.Length <= limit) && CopyBody(w, in, from, Body{}) == nil && w.Flush() == nil
}

// limited is a writer that fails after some bytes.
type limited struct{ left int64 }

func (l *limited) Write(b []byte) (int, error) {
	if l.left -= int64(len(b)); l.left < 0 {
		return 0, errors.New("too long")
	}
	return len(b), nil
}

// copyBytes copies n bytes; n < 0: until the reader ends with io.EOF.
func copyBytes(w *bufio.Writer, in *bufio.Reader, n int64) error {
	for n != 0 {
		if in.Buffered() == 0 {
			if err := w.Flush(); err != nil {
				return err
			}
			if _, err := in.Peek(1); err != nil {
				if n > 0 && errors.Is(err, io.EOF) {
					err = io.ErrUnexpectedEOF
				}
				return err
			}
		}
		b, _ := in.Peek(in.Buffered())
		if n > 0 && int64(len(b)) > n {
			b = b[:n]
		}
		if _, err := w.Write(b); err != nil {
			return err
		}
		_, _ = in.Discard(len(b))
		if n > 0 {
			n -= int64(len(b))
		}
	}
	return nil
}

// copyChunks copies a body of chunks, with its trailer, as chunks or as the bytes alone.
func copyChunks(w *bufio.Writer, in *bufio.Reader, chunked bool) error {
	extensions := maxExtensions
	for {
		if err := flushUnless(w, hasLine(in)); err != nil {
			return err
		}
		size, extra, err := chunkSize(in)
		if err != nil {
			return unexpected(err)
		}
		if extensions -= extra; extensions < 0 {
			return bad("extensions of chunks are larger than 16 KiB")
		}
		if size == 0 {
			break
		}
		if chunked {
			_, _ = fmt.Fprintf(w, "%x\r\n", size)
		}
		if err := copyBytes(w, in, size); err != nil {
			return err
		}
		if err := flushUnless(w, in.Buffered() >= 2); err != nil {
			return err
		}
		var end [2]byte
		if _, err := io.ReadFull(in, end[:]); err != nil {
			return unexpected(err)
		}
		if end != [2]byte{'\r', '\n'} {
			return bad("a chunk is longer than its size")
		}
		if chunked {
			_, _ = w.WriteString("\r\n")
		}
	}
	if b, _ := in.Peek(in.Buffered()); !bytes.HasPrefix(b, []byte("\r\n")) && !bytes.Contains(b, []byte("\r\n\r\n")) {
		if err := w.Flush(); err != nil {
			return err
		}
	}
	r := &reader{r: in, left: maxTrailer}
	trailer, err := r.fields()
	if err != nil {
		return unexpected(err)
	}
	for _, f := range trailer {
		if IsFraming(f.Name) {
			return bad("a field about the framing in a trailer")
		}
	}
	if chunked {
		_, _ = w.WriteString("0\r\n")
		writeFields(w, trailer)
		_, _ = w.WriteString("\r\n")
	}
	return nil
}

// flushUnless flushes the writer before a read that may block.
func flushUnless(w *bufio.Writer, ready bool) error {
	if ready {
		return nil
	}
	return w.Flush()
}

// hasLine reports whether the reader has a whole line.
func hasLine(in *bufio.Reader) bool {
	b, _ := in.Peek(in.Buffered())
	return bytes.IndexByte(b, '\n') >= 0
}

// chunkSize reads the line before a chunk. extra is the number of bytes of its extensions, which are not passed on.
func chunkSize(in *bufio.Reader) (size int64, extra int, err error) {
	r := &reader{r: in, left: maxChunkLine}
	line, err := r.line()
	if err != nil {
		return 0, 0, err
	}
	digits, extension, has := bytes.Cut(line, []byte{';'})
	if has {
		digits = bytes.TrimRight(digits, " \t")
	}
	if len(digits) == 0 || len(digits) > 15 {
		return 0, 0, bad("the size of a chunk does not have 1 to 15 digits")
	}
	for _, c := range digits {
		digit := unhex(c)
		if digit < 0 {
			return 0, 0, bad("the size of a chunk is not hexadecimal")
		}
		size = size<<4 | int64(digit)
	}
	if !isValue(extension) {
		return 0, 0, bad("a control character in the extension of a chunk")
	}
	return size, len(extension), nil
}

func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
