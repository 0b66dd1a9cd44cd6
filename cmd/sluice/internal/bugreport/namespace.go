// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package bugreport

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

func dialSocket(ctx context.Context, path string) (*net.UnixConn, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", path)
	if err != nil {
		return nil, err
	}
	return conn.(*net.UnixConn), nil
}

// namespace is the network namespace of a node.
type namespace struct {
	file  *os.File // nil: the namespace of this process
	text  string   // how it was found
	doubt error    // why it may be the wrong namespace
}

// namespace returns the network namespace of the node: the named namespace of a development node, or else the
// namespace of the datapath's process. It is opened once and never closed, because the process exits soon.
func (r *report) namespace(ctx context.Context) (namespace, error) {
	r.space.Do(func() { r.found, r.notFound = r.findNamespace(ctx) })
	return r.found, r.notFound
}

func (r *report) findNamespace(ctx context.Context) (namespace, error) {
	var path string
	if named := filepath.Join("/run/netns", "sluice-"+r.inv.Instance); r.inv.Instance != "" && exists(named) {
		path = named
	} else if pid, err := listener(ctx, filepath.Join(r.runDir, "datapath", "datapath.sock")); err == nil {
		path = fmt.Sprintf("/proc/%d/ns/net", pid)
	} else {
		return namespace{
			text:  "the namespace of this command",
			doubt: fmt.Errorf("the namespace of the datapath is unknown: %w", err),
		}, nil
	}
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if errors.Is(err, os.ErrPermission) {
		return namespace{
			text: "the namespace of this command", doubt: fmt.Errorf("the namespace of the datapath is unknown: %w", err),
		}, nil
	}
	if err != nil {
		return namespace{}, err
	}
	node, err := f.Stat()
	if err == nil {
		var own os.FileInfo
		if own, err = os.Stat("/proc/self/ns/net"); err == nil && os.SameFile(node, own) {
			f.Close()
			return namespace{text: path + ", the namespace of this command"}, nil
		}
	}
	if err != nil {
		f.Close()
		return namespace{}, err
	}
	return namespace{file: f, text: path}, nil
}

// inNamespace calls f on a thread in the network namespace of the node. The thread exits afterwards.
func (r *report) inNamespace(ctx context.Context, f func() error) error {
	space, err := r.namespace(ctx)
	if err != nil {
		return err
	}
	if space.file == nil {
		return f()
	}
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if err := unix.Setns(int(space.file.Fd()), unix.CLONE_NEWNET); err != nil {
			done <- fmt.Errorf("enter %s: %w", space.text, err)
			return
		}
		done <- f()
	}()
	return <-done
}
