// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package invocation

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

func TestProgressRemovesItsLine(t *testing.T) {
	var out bytes.Buffer
	var called atomic.Int64
	twice := make(chan struct{})
	done := progress(&out, func() string {
		if called.Add(1) == 2 {
			close(twice)
		}
		return fmt.Sprintf("%d of 2\x1b nodes", called.Load())
	}, time.Nanosecond, time.Nanosecond)
	<-twice
	done()
	got := out.String()
	if !strings.HasPrefix(got, "\r\x1b[K1 of 2\\x1b nodes, 0s\r\x1b[K2 of 2\\x1b nodes, 0s") || !strings.HasSuffix(got,
		"\r\x1b[K") {
		t.Errorf("wrote %q", got)
	}
}

func TestProgressOfAQuickCommandSaysNothing(t *testing.T) {
	var out bytes.Buffer
	progress(&out, func() string { return "x" }, time.Hour, time.Hour)()
	if out.Len() > 0 {
		t.Errorf("wrote %q", out.String())
	}
}

func TestProgressIsForTerminals(t *testing.T) {
	file, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	terminal, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer terminal.Close()
	if IsTerminal(&bytes.Buffer{}) || IsTerminal(file) || !IsTerminal(terminal) {
		t.Error("a file passes for a terminal, or a terminal for none")
	}
}
