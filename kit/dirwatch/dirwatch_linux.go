// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package dirwatch

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"
)

// Watched events: everything that changes a file, or what a name refers to.
const (
	inside = unix.IN_CREATE | unix.IN_MODIFY | unix.IN_CLOSE_WRITE | unix.IN_MOVED_FROM | unix.IN_MOVED_TO |
		unix.IN_DELETE | unix.IN_ATTRIB | unix.IN_DELETE_SELF | unix.IN_MOVE_SELF
	// around: events of the parent, because the directory may be a replaced link, or may not exist
	// yet.
	around = unix.IN_CREATE | unix.IN_MOVED_TO | unix.IN_MOVED_FROM | unix.IN_DELETE
)

// inotify is an inotify instance that watches a directory and its parent.
type inotify struct {
	events chan Event
	stop   chan struct{}
	wg     sync.WaitGroup

	mu          sync.Mutex
	file        *os.File // guarded by mu; nil if no inotify instance was available
	fd          int      // guarded by mu; file's descriptor, kept because file.Fd would make reads blocking
	dir, parent int      // guarded by mu; watch descriptors, -1 for none
	base        string   // guarded by mu; the last element of the path
}

// Watch returns a watcher; the caller passes the directory, which need not exist yet, to Renew. Events may be merged or
// dropped, so an event only means that a scan is due. Dropped events are reported as Lost.
func Watch() Watcher {
	i := &inotify{events: make(chan Event), stop: make(chan struct{}), dir: -1, parent: -1}
	return Watcher{Events: i.events, Renew: i.renew, Close: i.close}
}

// open creates the inotify instance. Called with mu held.
func (i *inotify) open() error {
	if i.file != nil {
		return nil
	}
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return fmt.Errorf("inotify: fs.inotify.max_user_instances or the limit of open files is reached: %w", err)
	}
	i.file, i.fd = os.NewFile(uintptr(fd), "inotify"), fd
	i.wg.Go(func() { i.read(i.file) })
	return nil
}

func (i *inotify) renew(path string) (other bool, err error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if err := i.open(); err != nil {
		return false, err
	}
	fd := i.fd
	set := func(old *int, path string, mask uint32) error {
		wd, err := unix.InotifyAddWatch(fd, path, mask|unix.IN_ONLYDIR)
		if err != nil {
			wd = -1
		}
		if *old != wd && *old >= 0 {
			unix.InotifyRmWatch(fd, uint32(*old)) //nolint:errcheck // fails if the directory was removed
		}
		*old = wd
		switch {
		case err == nil, errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.EACCES):
			return nil // the code that scans the directory reports these errors
		case errors.Is(err, unix.ENOSPC):
			return fmt.Errorf("inotify: %s: fs.inotify.max_user_watches is reached: %w", path, err)
		}
		return fmt.Errorf("inotify: %s: %w", path, err)
	}
	before := i.dir
	clean := filepath.Clean(path)
	i.base = filepath.Base(clean)
	err = errors.Join(set(&i.parent, filepath.Dir(clean), around), set(&i.dir, path, inside))
	return i.dir != before, err
}

func (i *inotify) close() {
	close(i.stop)
	i.mu.Lock()
	file := i.file
	i.mu.Unlock()
	if file != nil {
		file.Close()
	}
	i.wg.Wait()
}

// read forwards events until the file is closed.
func (i *inotify) read(file *os.File) {
	buf := make([]byte, 64<<10)
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
			i.mu.Lock()
			// An event with an unknown watch descriptor reports a queue overflow.
			around, base := wd >= 0 && wd == i.parent, i.base
			i.mu.Unlock()
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
			case i.events <- e:
			case <-i.stop:
				return
			}
		}
	}
}
