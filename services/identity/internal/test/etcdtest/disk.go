// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package etcdtest

import (
	"context"
	"os"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
)

// Disk is a directory on a filesystem in which each sync of a file takes a set time, like on a disk that is too slow
// for etcd. Writes are as fast as usual.
type Disk struct {
	path string
	take atomic.Int64 // duration of one sync
	done atomic.Int64 // syncs
}

// newDisk mounts a Disk over a directory. It needs root, and is unmounted after
// the test.
func newDisk(t testing.TB, under, at string) *Disk {
	t.Helper()
	for _, dir := range []string{under, at} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	d := &Disk{path: at}
	var st syscall.Stat_t
	if err := syscall.Stat(under, &st); err != nil {
		t.Fatal(err)
	}
	root := &fs.LoopbackRoot{Path: under, Dev: st.Dev}
	root.RootNode = &slowNode{LoopbackNode: &fs.LoopbackNode{RootData: root}, disk: d}
	server, err := fs.Mount(at, root.RootNode, &fs.Options{MountOptions: fuse.MountOptions{
		DirectMountStrict: true, // mount directly, because the helper fusermount may be missing
		FsName:            "sluice-slow-disk", Name: "sluice",
	}})
	if err != nil {
		t.Fatalf("mount a slow disk (needs root and FUSE): %v", err)
	}
	t.Cleanup(func() {
		if err := server.Unmount(); err != nil {
			t.Error(err)
		}
	})
	return d
}

// SyncsTake sets how long each sync takes from now on.
func (d *Disk) SyncsTake(each time.Duration) { d.take.Store(int64(each)) }

// Syncs returns the number of syncs that have ended.
func (d *Disk) Syncs() int64 { return d.done.Load() }

// slowNode is a file or directory on a Disk.
type slowNode struct {
	*fs.LoopbackNode
	disk *Disk
}

// WrapChild implements fs.NodeWrapChilder: files and directories below are as slow.
func (n *slowNode) WrapChild(_ context.Context, child fs.InodeEmbedder) fs.InodeEmbedder {
	if file, ok := child.(*fs.LoopbackNode); ok {
		return &slowNode{LoopbackNode: file, disk: n.disk}
	}
	return child
}

// Fsync implements fs.NodeFsyncer.
func (n *slowNode) Fsync(ctx context.Context, f fs.FileHandle, flags uint32) syscall.Errno {
	defer n.disk.done.Add(1)
	select {
	case <-time.After(time.Duration(n.disk.take.Load())):
	case <-ctx.Done(): // the process was killed
		return syscall.EINTR
	}
	if file, ok := f.(fs.FileFsyncer); ok {
		return file.Fsync(ctx, flags)
	}
	return 0
}
