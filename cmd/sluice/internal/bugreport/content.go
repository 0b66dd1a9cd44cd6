// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package bugreport

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"syscall"

	archive "github.com/sluice-net/sluice/cmd/sluice/internal/report"
)

// errFull is returned by writes beyond the limit of a file.
var errFull = errors.New("the file is full")

// content keeps the beginning of the written data, up to a limit. It is safe for concurrent use, because an abandoned
// part may still write.
type content struct {
	limit int

	mu     sync.Mutex
	bytes  []byte // guarded by mu
	cut    bool   // guarded by mu
	closed bool   // guarded by mu
}

// Write implements io.Writer.
func (c *content) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return 0, os.ErrClosed
	}
	if room := c.limit - len(c.bytes); len(p) > room {
		c.bytes, c.cut = append(c.bytes, p[:room]...), true
		return room, errFull
	}
	c.bytes = append(c.bytes, p...)
	return len(p), nil
}

// close returns the written data. Later writes fail.
func (c *content) close() (written []byte, cut bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	return c.bytes, c.cut
}

// smallLimit limits the bytes that are read from a file of the kernel.
const smallLimit = 1 << 20

// section writes the content of a file after a line with its name. It skips files that do not exist.
func section(w io.Writer, path string) error {
	text, err := readSmall(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(w, "==> %s <==\n%s\n", path, text)
	return err
}

// readSmall reads a regular file or a file of the kernel. It refuses links, pipes and devices, which could block.
func readSmall(path string) ([]byte, error) {
	f, _, err := openRegular(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, smallLimit))
}

func openRegular(path string) (*os.File, int64, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, 0, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a regular file", path)
	}
	if err != nil {
		f.Close()
		return nil, 0, err
	}
	return f, info.Size(), nil
}

const (
	// mostLines is the maximum of --log-lines.
	mostLines = 1_000_000
	// logLimit limits the bytes that are read from the end of a log.
	logLimit = archive.FileLimit / 2
)

// tail writes the last lines of a file.
func tail(w io.Writer, path string, lines int) error {
	f, size, err := openRegular(path)
	if err != nil {
		return err
	}
	defer f.Close()
	from := max(0, size-logLimit)
	text, err := io.ReadAll(io.NewSectionReader(f, from, logLimit))
	if err != nil {
		return err
	}
	_, err = w.Write(lastLines(text, lines, from > 0))
	return err
}

// lastLines returns the last lines of a text. If part is true, the first line of the text may be incomplete.
func lastLines(text []byte, lines int, part bool) []byte {
	at := len(text)
	if at > 0 && text[at-1] == '\n' {
		at--
	}
	for i := at - 1; i >= 0; i-- {
		if text[i] == '\n' {
			if lines--; lines == 0 {
				return text[i+1:]
			}
			at = i + 1
		}
	}
	if part {
		return text[min(at, len(text)):] // start of the first whole line
	}
	return text
}
