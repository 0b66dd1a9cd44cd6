// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package dirwatch

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"
)

// What is asked for: everything that changes a file or what a name means.
const (
	inside = unix.IN_CREATE | unix.IN_MODIFY | unix.IN_CLOSE_WRITE | unix.IN_MOVED_FROM | unix.IN_MOVED_TO |
		unix.IN_DELETE | unix.IN_ATTRIB | unix.IN_DELETE_SELF | unix.IN_MOVE_SELF
	// around: the directory itself may be a link that is swapped, or come later.
	around = unix.IN_CREATE | unix.IN_MOVED_TO | unix.IN_MOVED_FROM | unix.IN_DELETE
)

// Watch asks the kernel for what changes in the directory at path, which need not be
// there yet. With an error the watcher says nothing, as None. The queue of events is one: each says no more than
// that a scan is due, and what the kernel drops it says too.
func Watch(path string) (Watcher, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return None(), fmt.Errorf("inotify: %w", err)
	}
	file := os.NewFile(uintptr(fd), "inotify")
	events, stop := make(chan Event), make(chan struct{})
	var (
		mu          sync.Mutex
		dir, parent int = -1, -1 // watches; guarded by mu
	)
	renew := func(path string) bool {
		mu.Lock()
		defer mu.Unlock()
		set := func(old *int, path string, mask uint32) {
			wd, err := unix.InotifyAddWatch(fd, path, mask|unix.IN_ONLYDIR)
			if err != nil {
				wd = -1
			}
			if *old != wd && *old >= 0 {
				unix.InotifyRmWatch(fd, uint32(*old)) //nolint:errcheck // it is gone with its directory
			}
			*old = wd
		}
		before := dir
		set(&parent, filepath.Dir(filepath.Clean(path)), around)
		set(&dir, path, inside)
		return dir != before
	}
	renew(path)
	var wg sync.WaitGroup
	wg.Go(func() {
		buf := make([]byte, 64<<10)
		base := filepath.Base(filepath.Clean(path))
		for {
			n, err := file.Read(buf)
			if err != nil {
				return
			}
			for at := 0; at+unix.SizeofInotifyEvent <= n; {
				wd := int(int32(binary.NativeEndian.Uint32(buf[at:])))
				mask := binary.NativeEndian.Uint32(buf[at+4:])
				cookie := binary.NativeEndian.Uint32(buf[at+8:])
				size := int(binary.NativeEndian.Uint32(buf[at+12:]))
				name := string(bytes.TrimRight(buf[at+unix.SizeofInotifyEvent:at+unix.SizeofInotifyEvent+size], "\x00"))
				at += unix.SizeofInotifyEvent + size
				mu.Lock()
				// A message about none of them says that some were lost.
				around := wd >= 0 && wd == parent
				mu.Unlock()
				if around && name != base || mask&unix.IN_IGNORED != 0 {
					continue
				}
				if around {
					name = ""
				}
				e := Event{Name: name, Cookie: cookie}
				switch {
				case mask&unix.IN_Q_OVERFLOW != 0:
					e.What = Lost
				case mask&unix.IN_MODIFY != 0:
					e.What = Written
				case mask&unix.IN_CLOSE_WRITE != 0:
					e.What = Closed
				case mask&unix.IN_MOVED_TO != 0:
					e.What = Arrived
				case mask&(unix.IN_MOVED_FROM|unix.IN_DELETE) != 0:
					e.What = Departed
				}
				select {
				case events <- e:
				case <-stop:
					return
				}
			}
		}
	})
	return Watcher{Events: events, Renew: renew, Close: func() {
		close(stop)
		file.Close()
		wg.Wait()
	}}, nil
}
