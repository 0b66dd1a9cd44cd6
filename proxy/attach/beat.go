// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package attach

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// beatInterval is the interval of the heartbeat. The eBPF programs treat the proxy as absent after 100 ms without a
// heartbeat.
const beatInterval = 20 * time.Millisecond

// maxMapped is the maximum size of the heartbeat memory that is mapped.
const maxMapped = 64 << 10

// mapped is the memory of a heartbeat.
type mapped struct {
	all  []byte
	word *atomic.Uint64
}

// mapBeat maps the memory of a descriptor. offset is the position of the heartbeat, a multiple of 8.
func mapBeat(fd, offset int) (*mapped, error) {
	page := os.Getpagesize()
	all, err := unix.Mmap(fd, 0, (offset/page+1)*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map the memory of the heartbeat: %w", err)
	}
	word := (*atomic.Uint64)(unsafe.Pointer(&all[offset])) //nolint:gosec // the eBPF programs read this value
	return &mapped{all, word}, nil
}

func (m *mapped) unmap() error { return unix.Munmap(m.all) }

// beat writes the heartbeat into the mapped memory.
type beat struct {
	mu  sync.Mutex
	now *mapped // guarded by mu; nil before the first attachment
}

// use replaces the memory into which the heartbeat is written.
func (b *beat) use(m *mapped) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	was := b.now
	b.now = m
	if m != nil {
		b.write()
	}
	if was != nil {
		return was.unmap()
	}
	return nil
}

func (b *beat) write() {
	var now unix.Timespec
	if unix.ClockGettime(unix.CLOCK_MONOTONIC, &now) == nil {
		b.now.word.Store(uint64(now.Nano())) //nolint:gosec // not negative
	}
}

// run writes the heartbeat until ctx ends. It uses a thread of its own, so that goroutines that are busy with packets
// do not delay it.
func (b *beat) run(ctx context.Context) {
	runtime.LockOSThread() // the thread ends with the goroutine
	interval := unix.NsecToTimespec(int64(beatInterval))
	for ctx.Err() == nil {
		b.mu.Lock()
		if b.now != nil {
			b.write()
		}
		b.mu.Unlock()
		_ = unix.ClockNanosleep(unix.CLOCK_MONOTONIC, 0, &interval, nil) // if interrupted, the next one is earlier
	}
}

// problem is the reason for which something does not work.
type problem struct {
	mu  sync.Mutex
	err error // guarded by mu
}

func (p *problem) set(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.err = err
}

func (p *problem) get() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.err
}
