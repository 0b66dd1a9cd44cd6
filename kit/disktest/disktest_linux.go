// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package disktest intercepts the disk operations of code under test.
//
// A Disk sees every write, sync, truncation and name change that a function makes below one
// directory, in order. It uses a seccomp user-notification filter on the thread of that function,
// so the code under test needs no injected interface: the Disk sees the system calls of bbolt as
// well as of package os. It can inject errors, as from a full, read-only or broken disk, and it can
// reproduce the state after a loss of power at any moment: everything that was synced, and any part
// of what was not.
package disktest

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Kind is the kind of an operation.
type Kind int

// Kinds of operations.
const (
	Write    Kind = iota // of data to a file
	Truncate             // or extension
	Sync                 // of a file
	SyncDir              // of the names in a directory
	Create               // of a name; seen with the first write
	Rename
	Remove
	mark
)

var kinds = [...]string{"write", "truncate", "sync", "sync directory", "create", "rename", "remove", "mark"}

func (k Kind) String() string { return kinds[k] }

// Op is one operation.
type Op struct {
	Kind Kind
	Path string // of the file or directory
	To   string // of a rename
	Len  int    // bytes of a write

	file   uint64
	offset int64
	data   []byte
	mark   int
}

// memoryDir is a directory in a memory file system; minMemory is the free space in bytes that is
// needed to use it.
const (
	memoryDir = "/dev/shm"
	minMemory = 1 << 30
)

// InMemory makes t.TempDir return directories in memory, if the machine has enough. It is for
// TestMain of packages whose tests write state files. Such tests issue thousands of syncs, which
// take minutes on a busy disk and make no difference to the result: a Disk sees the sync call
// itself.
func InMemory() {
	var st unix.Statfs_t
	if unix.Statfs(memoryDir, &st) != nil || st.Type != unix.TMPFS_MAGIC ||
		st.Bavail*uint64(st.Bsize) < minMemory || unix.Access(memoryDir, unix.W_OK) != nil {
		return
	}
	if err := os.Setenv("TMPDIR", memoryDir); err != nil {
		panic(err) // cannot fail with a constant name and value
	}
}

// Disk watches one directory.
type Disk struct {
	root   string
	memory *os.File // /proc/self/mem while Run runs

	mu    sync.Mutex
	base  map[string]uint64 // files at the start, by path
	files map[uint64][]byte // their content
	live  map[uint64]uint64 // files with a name, by inode; needed because the kernel reuses inode numbers
	last  uint64            // highest file number
	ops   []Op
	fail  func(Op) error
}

// New watches a directory. Its current content counts as durable.
func New(t testing.TB, root string) *Disk {
	t.Helper()
	d := &Disk{root: root, base: map[string]uint64{}, files: map[uint64][]byte{}, live: map[uint64]uint64{}}
	if err := filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		content, err := os.ReadFile(path) //nolint:gosec // the test's own directory
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Stat(path, &st); err != nil {
			return err
		}
		file := d.number(st.Ino)
		d.base[path], d.files[file] = file, content
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return d
}

// number assigns a number to a file with a new inode.
func (d *Disk) number(ino uint64) uint64 {
	d.last++
	d.live[ino] = d.last
	return d.last
}

// Fail calls f before each operation. If f returns an error, which must be an errno, the operation
// fails with it and is not executed. Nil stops the injection.
func (d *Disk) Fail(f func(Op) error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.fail = f
}

// Mark records a number between two operations: what the code under test has confirmed so far.
func (d *Disk) Mark(n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.ops = append(d.ops, Op{Kind: mark, mark: n})
}

// Ops returns the operations so far.
func (d *Disk) Ops() []Op {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(d.ops), func(o Op) bool { return o.Kind == mark })
}

// Count returns the number of operations of a kind so far.
func (d *Disk) Count(k Kind) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := 0
	for _, o := range d.ops {
		if o.Kind == k {
			n++
		}
	}
	return n
}

// Run runs f on a locked thread, whose operations the disk sees, and returns when f does.
// Operations of goroutines that f starts are not seen.
func (d *Disk) Run(t testing.TB, f func()) {
	t.Helper()
	stop, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(stop)
	if d.memory, err = os.Open("/proc/self/mem"); err != nil {
		t.Fatal(err)
	}
	defer d.memory.Close()
	listening, done, watched := make(chan error, 1), make(chan struct{}), make(chan struct{})
	var listener int
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine, and the filter with it
		var err error
		listener, err = listen()
		listening <- err
		if err == nil {
			<-watched // wait for the listener before the first operation
			f()
		}
	}()
	if err := <-listening; err != nil {
		<-done
		t.Fatalf("seccomp listener: %v", err)
	}
	var supervisor sync.WaitGroup
	supervisor.Go(func() { close(watched); d.supervise(t, listener, stop) })
	<-done
	if _, err := unix.Write(stop, []byte{1, 0, 0, 0, 0, 0, 0, 0}); err != nil {
		t.Error(err)
	}
	supervisor.Wait()
	if err := unix.Close(listener); err != nil {
		t.Error(err)
	}
}

// calls are the system calls, apart from write, that the filter sends to the listener. A write of
// eight bytes passes the filter: with it, the Go runtime wakes its poller.
var calls = []uint32{unix.SYS_PWRITE64, unix.SYS_FSYNC, unix.SYS_FDATASYNC, unix.SYS_FTRUNCATE, unix.SYS_RENAMEAT, unix.SYS_RENAMEAT2, unix.SYS_UNLINKAT}

const (
	offsetOfNumber   = 0
	offsetOfThirdArg = 16 + 2*8
)

// listen installs the filter on this thread.
func listen() (int, error) {
	load := func(at uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: at}
	}
	ret := func(k uint32) unix.SockFilter { return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: k} }
	equal := func(k uint32, yes, no int) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: k, Jt: uint8(yes), Jf: uint8(no)}
	}
	program := []unix.SockFilter{load(offsetOfNumber)}
	for i, n := range calls {
		program = append(program, equal(n, len(calls)-i-1+3, 0))
	}
	program = append(program,
		equal(unix.SYS_WRITE, 0, 3),
		load(offsetOfThirdArg),
		equal(8, 1, 0),
		ret(unix.SECCOMP_RET_USER_NOTIF),
		ret(unix.SECCOMP_RET_ALLOW),
	)
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return 0, err
	}
	prog := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	// Without the second flag, a signal of the Go runtime interrupts a call that is being executed:
	// its answer is lost, and the thread repeats the call.
	const flags = unix.SECCOMP_FILTER_FLAG_NEW_LISTENER | unix.SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV
	fd, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, flags, uintptr(unsafe.Pointer(&prog)))
	runtime.KeepAlive(program)
	if errno != 0 {
		return 0, errno
	}
	unix.CloseOnExec(int(fd))
	// The thread waits while the supervisor executes its call; with this flag the supervisor runs
	// at once on the same CPU. Kernels before 6.6 do not support it and are slower.
	_, _, _ = unix.Syscall(unix.SYS_IOCTL, fd, unix.SECCOMP_IOCTL_NOTIF_SET_FLAGS, unix.SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP)
	return int(fd), nil
}

// notification is struct seccomp_notif, answer struct seccomp_notif_resp.
type notification struct {
	id    uint64
	pid   uint32
	flags uint32
	nr    int32
	arch  uint32
	ip    uint64
	args  [6]uint64
}

type answer struct {
	id    uint64
	val   int64
	err   int32
	flags uint32
}

func (d *Disk) supervise(t testing.TB, listener, stop int) {
	for {
		ready := []unix.PollFd{{Fd: int32(listener), Events: unix.POLLIN}, {Fd: int32(stop), Events: unix.POLLIN}}
		if _, err := unix.Poll(ready, -1); err != nil && !errors.Is(err, unix.EINTR) {
			t.Errorf("poll the seccomp listener: %v", err)
			return
		}
		if ready[0].Revents&unix.POLLIN == 0 {
			if ready[1].Revents != 0 {
				return
			}
			continue
		}
		var n notification
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(listener), unix.SECCOMP_IOCTL_NOTIF_RECV, uintptr(unsafe.Pointer(&n))); errno != 0 {
			continue // the call was interrupted; the thread repeats it
		}
		a := answer{id: n.id}
		var errno unix.Errno
		switch val, err := d.carryOut(n); {
		case err == nil:
			a.val = int64(val)
		case errors.As(err, &errno):
			a.err = -int32(errno)
		default:
			t.Errorf("disktest: %v", err)
			a.err = -int32(unix.EIO)
		}
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(listener), unix.SECCOMP_IOCTL_NOTIF_SEND, uintptr(unsafe.Pointer(&a))); errno != 0 {
			t.Errorf("disktest: answer a %d: %v", n.nr, errno)
		}
	}
}

// carryOut executes the call for the intercepted thread, with the thread's descriptors and memory.
func (d *Disk) carryOut(n notification) (int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch uint32(n.nr) {
	case unix.SYS_RENAMEAT, unix.SYS_RENAMEAT2:
		from, err := d.path(n.args[1])
		if err != nil {
			return 0, err
		}
		to, err := d.path(n.args[3])
		if err != nil {
			return 0, err
		}
		flags := uint(0)
		if uint32(n.nr) == unix.SYS_RENAMEAT2 {
			flags = uint(n.args[4])
		}
		return 0, d.changeName(Op{Kind: Rename, Path: from, To: to}, to, func() error {
			return unix.Renameat2(unix.AT_FDCWD, from, unix.AT_FDCWD, to, flags)
		})
	case unix.SYS_UNLINKAT:
		path, err := d.path(n.args[1])
		if err != nil {
			return 0, err
		}
		return 0, d.changeName(Op{Kind: Remove, Path: path}, path, func() error {
			return unix.Unlinkat(unix.AT_FDCWD, path, int(n.args[2]))
		})
	}
	fd := int(n.args[0])
	path, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
	if err != nil {
		return 0, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return 0, err
	}
	o := Op{Path: path, file: d.live[st.Ino]}
	regular := st.Mode&unix.S_IFMT == unix.S_IFREG
	seen := d.inside(path) && (regular || st.Mode&unix.S_IFMT == unix.S_IFDIR)
	var do func() (int, error)
	switch uint32(n.nr) {
	case unix.SYS_WRITE, unix.SYS_PWRITE64:
		data := make([]byte, n.args[2])
		if _, err := d.memory.ReadAt(data, int64(n.args[1])); err != nil {
			return 0, err
		}
		o.Kind, o.Len, o.data, o.offset = Write, len(data), data, int64(n.args[3])
		do = func() (int, error) { return unix.Pwrite(fd, data, o.offset) }
		if uint32(n.nr) == unix.SYS_WRITE {
			do = func() (int, error) { return unix.Write(fd, data) }
			if seen {
				if o.offset, err = unix.Seek(fd, 0, 1); err != nil {
					return 0, err
				}
			}
		}
	case unix.SYS_FTRUNCATE:
		o.Kind, o.offset = Truncate, int64(n.args[1])
		do = func() (int, error) { return 0, unix.Ftruncate(fd, o.offset) }
	default:
		o.Kind = Sync
		if !regular {
			o.Kind = SyncDir
		}
		do = func() (int, error) { return 0, unix.Fsync(fd) }
	}
	if !seen {
		return do()
	}
	if err := d.refused(o); err != nil {
		return 0, err
	}
	if regular && o.file == 0 {
		o.file = d.number(st.Ino)
		d.ops = append(d.ops, Op{Kind: Create, Path: path, file: o.file})
	}
	val, err := do()
	if err == nil {
		d.ops = append(d.ops, o)
	}
	return val, err
}

// changeName executes an operation that removes or replaces a name.
func (d *Disk) changeName(o Op, lost string, do func() error) error {
	if !d.inside(o.Path) {
		return do()
	}
	if err := d.refused(o); err != nil {
		return err
	}
	var st unix.Stat_t
	found := unix.Lstat(lost, &st) == nil
	if err := do(); err != nil {
		return err
	}
	if found {
		delete(d.live, st.Ino)
	}
	d.ops = append(d.ops, o)
	return nil
}

func (d *Disk) refused(o Op) error {
	if d.fail == nil {
		return nil
	}
	return d.fail(o)
}

func (d *Disk) inside(path string) bool {
	return path == d.root || strings.HasPrefix(path, d.root+string(filepath.Separator))
}

// path reads the path argument of a call. It must be absolute, like all paths of state directories.
func (d *Disk) path(at uint64) (string, error) {
	var name []byte
	for b := make([]byte, 1); ; at++ {
		if _, err := d.memory.ReadAt(b, int64(at)); err != nil {
			return "", err
		}
		if b[0] == 0 {
			break
		}
		name = append(name, b[0])
	}
	if !filepath.IsAbs(string(name)) {
		return "", fmt.Errorf("%s is not an absolute path", name)
	}
	return string(name), nil
}

// page is the unit that storage writes atomically, in any order.
const page = 4096

// Cut writes into an empty directory the state after a loss of power that follows the first n
// operations: everything that was synced, and a random part of the unsynced writes (by page) and of
// the unsynced name changes. It returns the last mark before the cut.
func (d *Disk) Cut(t testing.TB, n int, random *rand.Rand, dir string) (marked int) {
	t.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	files, names := map[uint64][]byte{}, maps.Clone(d.base)
	for ino, content := range d.files {
		files[ino] = slices.Clone(content)
	}
	writes := map[uint64][]Op{} // unsynced, by file
	var changes []Op            // unsynced name changes
	seen := 0
	for _, o := range d.ops {
		if o.Kind == mark {
			marked = o.mark
			continue
		}
		if seen == n {
			break
		}
		seen++
		switch o.Kind {
		case Write, Truncate:
			writes[o.file] = append(writes[o.file], o)
		case Create, Rename, Remove:
			changes = append(changes, o)
		case Sync:
			for _, w := range writes[o.file] {
				files[o.file] = apply(files[o.file], w, nil)
			}
			writes[o.file] = nil
		case SyncDir:
			for _, c := range changes {
				if filepath.Dir(c.Path) == o.Path {
					rename(names, c)
				}
			}
			changes = slices.DeleteFunc(changes, func(c Op) bool { return filepath.Dir(c.Path) == o.Path })
		}
	}
	for ino, pending := range writes {
		for _, w := range pending {
			files[ino] = apply(files[ino], w, random)
		}
	}
	for _, c := range changes {
		if random.IntN(2) == 0 {
			rename(names, c)
		}
	}
	for path, ino := range names {
		to := filepath.Join(dir, strings.TrimPrefix(path, d.root))
		if err := os.MkdirAll(filepath.Dir(to), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(to, files[ino], 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return marked
}

func rename(names map[string]uint64, o Op) {
	switch o.Kind {
	case Create:
		names[o.Path] = o.file
	case Rename:
		if ino, ok := names[o.Path]; ok {
			names[o.To] = ino
			delete(names, o.Path)
		}
	case Remove:
		delete(names, o.Path)
	}
}

// apply applies a write: completely, or partly if random is set.
func apply(content []byte, o Op, random *rand.Rand) []byte {
	kept := func() bool { return random == nil || random.IntN(2) == 0 }
	grow := func(size int64) {
		if missing := size - int64(len(content)); missing > 0 {
			content = append(content, make([]byte, missing)...)
		}
	}
	if o.Kind == Truncate {
		if !kept() {
			return content
		}
		grow(o.offset)
		return content[:o.offset]
	}
	for from := int64(0); from < int64(len(o.data)); {
		to := min(int64(len(o.data)), (o.offset+from)/page*page+page-o.offset)
		if kept() {
			grow(o.offset + to)
			copy(content[o.offset+from:], o.data[from:to])
		}
		from = to
	}
	return content
}
