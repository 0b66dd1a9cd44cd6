// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package invocation

import (
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
)

const (
	progressAfter = time.Second // commands that take less time show no progress
	progressEach  = time.Second
)

// IsTerminal reports whether w is a terminal.
func IsTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

// Progress shows the text and the elapsed time in one line on standard error, but only on a terminal. The returned
// function removes the line. Call Progress before anything else is printed.
func (c *Invocation) Progress(text func() string) (done func()) {
	if c.Format == "json" || !IsTerminal(c.ErrOut) {
		return func() {}
	}
	return progress(c.ErrOut, text, progressAfter, progressEach)
}

func progress(w io.Writer, text func() string, after, each time.Duration) (done func()) {
	began := time.Now()
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		timer := time.NewTimer(after)
		defer timer.Stop()
		for shown := false; ; shown = true {
			select {
			case <-stop:
				if shown {
					fmt.Fprint(w, "\r\x1b[K")
				}
				return
			case <-timer.C:
				timer.Reset(each)
			}
			fmt.Fprintf(w, "\r\x1b[K%s, %s", output.Printable(text()), time.Since(began).Round(time.Second))
		}
	}()
	return func() {
		close(stop)
		<-stopped
	}
}
