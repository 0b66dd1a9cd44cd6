// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package nodefiles

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/mountinfo"
)

// FormerBPFDir returns where earlier versions pinned the maps and programs of an instance: in the
// machine's bpffs, which only root can access.
func FormerBPFDir(p instance.Paths) string {
	name := filepath.Base(p.RunDir)
	return filepath.Join(strings.TrimSuffix(p.RunDir, "/run/"+name), "/sys/fs/bpf", name)
}

// prepareBPF mounts a bpffs for the service unless one is mounted, and moves the pins of earlier
// versions into it.
func (s Service) prepareBPF(p instance.Paths) (changes []string, err error) {
	if changes, err = mountBPF(p.BPFDir, s.Mounted); err != nil {
		return changes, err
	}
	moved, err := movePins(FormerBPFDir(p), p.BPFDir)
	changes = append(changes, moved...)
	if err != nil {
		return changes, err
	}
	// The mount options for the owner exist only from Linux 6.8 on, so the owner is set afterwards.
	given, err := s.givePins(p.BPFDir)
	return append(changes, given...), err
}

// RemoveBPFFS unmounts the bpffs of an instance, which removes its pins, and reports whether one
// was mounted.
func RemoveBPFFS(p instance.Paths) (removed bool, err error) {
	if is, err := onBPFFS(p.BPFDir); err != nil || !is {
		return false, err
	}
	if err := unix.Unmount(p.BPFDir, unix.UMOUNT_NOFOLLOW); err != nil {
		return false, fmt.Errorf("unmount %s: %w", p.BPFDir, err)
	}
	return true, os.Remove(p.BPFDir)
}

// StateDirs returns the directories that RemoveState removes; they need not exist.
func StateDirs(p instance.Paths) []string {
	return []string{p.RunDir, p.StateDir, filepath.Join(p.StateDir, "..", "..", "log", filepath.Base(p.StateDir))}
}

// RemoveState removes the directories for sockets, state and logs of an instance, whose bpffs must
// already be removed. It unmounts the namespaces that the CNI plugin mounted there. A directory
// that is a mount point is emptied but stays, with its parents. RemoveState returns what it
// changed.
func RemoveState(p instance.Paths) (changes []string, err error) {
	bound, err := filepath.Glob(filepath.Join(p.RunDir, "netns", "*"))
	if err != nil {
		return nil, err
	}
	for _, path := range bound {
		err := unix.Unmount(path, unix.UMOUNT_NOFOLLOW|unix.MNT_DETACH)
		if err != nil && !errors.Is(err, unix.EINVAL) { // not a mount point
			return nil, fmt.Errorf("unmount %s: %w", path, err)
		}
	}
	for _, dir := range StateDirs(p) {
		if _, err := os.Lstat(dir); errors.Is(err, fs.ErrNotExist) {
			continue
		}
		before, err := bare(dir)
		if err != nil {
			return changes, err
		}
		err = os.RemoveAll(dir)
		if errors.Is(err, unix.EBUSY) {
			var now bool
			if now, err = bare(dir); err == nil && now {
				if !before {
					changes = append(changes, "emptied "+dir+", which contains a mount point")
				}
				continue
			}
			if err == nil {
				err = fmt.Errorf("remove %s: %w", dir, unix.EBUSY)
			}
		}
		if err != nil {
			return changes, err
		}
		changes = append(changes, "removed "+dir)
	}
	return changes, nil
}

// bare reports whether a directory contains only empty mount points and their parent directories.
func bare(dir string) (bool, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return false, err
	}
	if len(entries) == 0 {
		m, err := mountinfo.Of(dir)
		return m.Point == dir, err
	}
	for _, entry := range entries {
		if !entry.IsDir() {
			return false, nil
		}
		if is, err := bare(filepath.Join(dir, entry.Name())); err != nil || !is {
			return false, err
		}
	}
	return true, nil
}

func mountBPF(dir string, mounted bool) (changes []string, err error) {
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	switch is, err := onBPFFS(dir); {
	case err != nil:
		return nil, err
	case is:
		return nil, nil
	case mounted:
		return nil, fmt.Errorf("no bpffs is mounted at %s; run `mount -t bpf -o nosuid,nodev,noexec,mode=0700 bpf %[1]s` "+
			"on the machine", dir)
	}
	if err := unix.Mount("bpf", dir, "bpf", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700"); err != nil {
		return nil, fmt.Errorf("mount a bpffs at %s: %w", dir, err)
	}
	return []string{"mounted a bpffs at " + dir}, nil
}

// onBPFFS reports whether a path exists and is on a bpffs.
func onBPFFS(path string) (bool, error) {
	var st unix.Statfs_t
	switch err := unix.Statfs(path, &st); {
	case errors.Is(err, unix.ENOENT):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("look at %s: %w", path, err)
	}
	return uint32(st.Type) == unix.BPF_FS_MAGIC, nil
}

// givePins changes the owner of the bpffs and all its pins to the service.
func (s Service) givePins(dir string) (changes []string, err error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	given := 0
	err = fs.WalkDir(root.FS(), ".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		if st := info.Sys().(*syscall.Stat_t); st.Uid == s.UID && st.Gid == s.GID {
			return nil
		}
		given++
		return root.Lchown(path, int(s.UID), int(s.GID))
	})
	if err != nil {
		return nil, fmt.Errorf("change the owner of %s to uid %d: %w", dir, s.UID, err)
	}
	if given > 0 {
		changes = append(changes, fmt.Sprintf("gave %d entries of %s to %d:%d", given, dir, s.UID, s.GID))
	}
	return changes, nil
}

// movePins pins every object below from under the same name below to. It removes the old pins only after every object
// has its new pin: the kernel frees a map that has no pin once no process has it open. The programs in the kernel, and
// so the connections, are not affected.
func movePins(from, to string) (changes []string, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("move the pins of %s to %s: %w", from, to, err)
		}
	}()
	if is, err := onBPFFS(from); err != nil || !is {
		return nil, err
	}
	var pins, dirs []string
	err = filepath.WalkDir(from, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		switch {
		case entry.IsDir():
			dirs = append(dirs, name)
		case entry.Type().IsRegular():
			pins = append(pins, name)
		default:
			return fmt.Errorf("%s is not a pin, but %s", path, entry.Type())
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	for _, name := range dirs {
		if err := os.Mkdir(filepath.Join(to, name), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return nil, err
		}
	}
	for _, name := range pins {
		if err := CopyPin(filepath.Join(from, name), filepath.Join(to, name)); err != nil {
			return nil, err
		}
	}
	for _, name := range pins {
		if err := os.Remove(filepath.Join(from, name)); err != nil {
			return nil, err
		}
	}
	slices.Reverse(dirs) // parents last
	for _, name := range dirs {
		if err := os.Remove(filepath.Join(from, name)); err != nil {
			return nil, err
		}
	}
	return []string{fmt.Sprintf("moved %d pins from %s to %s", len(pins), from, to)}, nil
}

// CopyPin pins the object at from additionally at to. It is not an error if to already is the same
// object.
func CopyPin(from, to string) error {
	object, err := openPin(from)
	if err != nil {
		return err
	}
	defer unix.Close(object)
	attr := pinAttr{path: cstring(to), fd: uint32(object)}
	_, err = bpf(bpfObjPin, unsafe.Pointer(&attr), unsafe.Sizeof(attr))
	runtime.KeepAlive(attr.path)
	if err == nil {
		return nil
	}
	if !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("pin %s: %w", to, err)
	}
	there, err := openPin(to)
	if err != nil {
		return err
	}
	defer unix.Close(there)
	same, err := sameObject(object, there)
	if err == nil && !same {
		err = fmt.Errorf("%s and %s are different objects; remove the one that no program uses", from, to)
	}
	return err
}

// The bpf system calls that move a pin, for any kind of object. All other eBPF code is in
// services/datapath.
const (
	bpfObjPin         = 6
	bpfObjGet         = 7
	bpfObjGetInfoByFD = 15
)

type pinAttr struct {
	path  *byte // 64 bits wide: the struct layout assumes a 64-bit machine
	fd    uint32
	flags uint32
}

type infoAttr struct {
	fd     uint32
	length uint32
	info   *objectInfo
}

// objectInfo is the common beginning of the kernel's info structs of all kinds of objects.
type objectInfo [2]uint32 // kind and ID

func bpf(command uintptr, attr unsafe.Pointer, size uintptr) (int, error) {
	for {
		r, _, errno := unix.Syscall(unix.SYS_BPF, command, uintptr(attr), size)
		if errno == 0 {
			return int(r), nil
		}
		if !errors.Is(errno, unix.EAGAIN) && !errors.Is(errno, unix.EINTR) {
			return -1, errno
		}
	}
}

func cstring(s string) *byte { return unsafe.SliceData(append([]byte(s), 0)) }

func openPin(path string) (int, error) {
	attr := pinAttr{path: cstring(path)}
	fd, err := bpf(bpfObjGet, unsafe.Pointer(&attr), unsafe.Sizeof(attr))
	runtime.KeepAlive(attr.path)
	if err != nil {
		return -1, fmt.Errorf("open pin %s: %w", path, err)
	}
	return fd, nil
}

// sameObject reports whether two descriptors refer to the same object. A map and a program may have
// the same ID, so it compares the kinds, too.
func sameObject(a, b int) (bool, error) {
	var kinds [2]string
	var infos [2]objectInfo
	for i, fd := range []int{a, b} {
		var err error
		if kinds[i], err = os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd)); err != nil {
			return false, err
		}
		attr := infoAttr{fd: uint32(fd), length: uint32(unsafe.Sizeof(infos[i])), info: &infos[i]}
		if _, err := bpf(bpfObjGetInfoByFD, unsafe.Pointer(&attr), unsafe.Sizeof(attr)); err != nil {
			return false, fmt.Errorf("identify a pinned object: %w", err)
		}
		runtime.KeepAlive(attr.info)
	}
	return kinds[0] == kinds[1] && infos[0] == infos[1], nil
}
