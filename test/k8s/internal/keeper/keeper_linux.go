// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package keeper implements the process that owns a cluster: it prepares the run directory, starts the machine, and
// removes everything at the end. If it is killed, the machine ends with it, and Remove removes the leftovers.
package keeper

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"time"

	"github.com/sluice-net/sluice/test/k8s/internal/leftovers"
	"github.com/sluice-net/sluice/test/k8s/internal/machine"
	"github.com/sluice-net/sluice/test/k8s/internal/pki"
	"github.com/sluice-net/sluice/test/k8s/internal/wait"
	"golang.org/x/sys/unix"
)

// Keep runs the cluster of a run directory with a written configuration, until ctx ends or, unless stdin is nil,
// until stdin ends.
func Keep(ctx context.Context, dir string, stdin io.Reader, log *slog.Logger) (err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	unlock, err := lock(dir)
	if err != nil {
		return err
	}
	defer unlock()
	defer func() { err = errors.Join(err, remove(dir)) }()
	if stdin != nil {
		go func() {
			_, _ = io.Copy(io.Discard, stdin)
			cancel()
		}()
	}
	c, err := machine.Read(dir)
	if err != nil {
		return err
	}
	if err := prepare(c); err != nil {
		return err
	}
	return run(ctx, c, log)
}

// run starts the machine and ends it when ctx ends.
func run(ctx context.Context, c machine.Config, log *slog.Logger) error {
	input, held, err := os.Pipe()
	if err != nil {
		return err
	}
	defer input.Close()
	defer held.Close()
	logFile, err := os.Create(filepath.Join(c.Logs(), "machine.log"))
	if err != nil {
		return err
	}
	defer logFile.Close()
	// The machine ends with the thread that started it.
	runtime.LockOSThread()
	m, err := machine.Start(c, input, logFile)
	if err != nil {
		return fmt.Errorf("start the machine: %w", err)
	}
	log.Info("machine started", "pid", m.Process.Pid)
	if err := os.WriteFile(filepath.Join(c.Dir, "machine.pid"), []byte(strconv.Itoa(m.Process.Pid)), 0o600); err != nil {
		return errors.Join(err, m.Process.Kill(), m.Wait())
	}
	stop := context.AfterFunc(ctx, func() { _ = m.Process.Kill() })
	defer stop()
	err = m.Wait()
	if ctx.Err() != nil {
		return nil
	}
	// The directory is removed, so report the end of the log now.
	content, _ := os.ReadFile(logFile.Name())
	return fmt.Errorf("the machine ended (%w):\n%s", err, content)
}

// prepare writes certificates and kubeconfig files.
func prepare(c machine.Config) error {
	authority, err := pki.New(c.PKI())
	if err != nil {
		return err
	}
	plane := c.Plane()
	if err := plane.Prepare(authority); err != nil {
		return err
	}
	if err := authority.Kubeconfig("kube-proxy", plane.Server(), "system:kube-proxy"); err != nil {
		return err
	}
	for i := range c.Nodes {
		name := machine.NodeName(i)
		if err := authority.Kubeconfig(name, plane.Server(), "system:node:"+name, "system:nodes"); err != nil {
			return err
		}
		for from, to := range map[string]string{
			"ca.crt": "ca.crt", name + ".kubeconfig": "kubelet.kubeconfig", "kube-proxy.kubeconfig": "kube-proxy.kubeconfig",
		} {
			content, err := os.ReadFile(filepath.Join(c.PKI(), from))
			if err != nil {
				return err
			}
			if err := os.WriteFile(filepath.Join(c.Node(i), "kubernetes", to), content, 0o600); err != nil {
				return err
			}
		}
	}
	return nil
}

// lock locks the run directory and writes this process's ID. The lock is held until the keeper ends.
func lock(dir string) (unlock func(), err error) {
	f, err := os.OpenFile(filepath.Join(dir, "keeper.pid"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", dir, err), f.Close())
	}
	if err := errors.Join(f.Truncate(0), f.Sync()); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	if _, err := fmt.Fprint(f, os.Getpid()); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return func() { _ = f.Close() }, nil
}

// Remove ends the cluster of the run directory if it runs, and removes its leftovers. It returns nil if nothing
// exists.
func Remove(dir string) error {
	return wait.Until(time.Minute, func() error {
		unlock, err := lock(dir)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil
		case err == nil:
			defer unlock()
			return remove(dir)
		}
		// The lock's holder wrote it, and is running.
		content, _ := os.ReadFile(filepath.Join(dir, "keeper.pid"))
		if pid, convErr := strconv.Atoi(string(content)); convErr == nil {
			err = errors.Join(err, unix.Kill(pid, unix.SIGTERM))
		}
		return err
	})
}

// RemoveDead removes the leftovers of killed clusters in the base directory.
func RemoveDead(base string) error {
	entries, err := os.ReadDir(base)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		dir := filepath.Join(base, e.Name())
		// A keeper that has not locked the directory yet has not written anything.
		if info, err := os.Stat(filepath.Join(dir, "keeper.pid")); err != nil || info.Size() == 0 {
			continue
		}
		if unlock, err := lock(dir); err == nil {
			errs = append(errs, remove(dir))
			unlock()
		}
	}
	return errors.Join(errs...)
}

func remove(dir string) error {
	// Mounts and namespaces have ended with their processes; a cgroup can be removed only after the last process in
	// it.
	return errors.Join(leftovers.RemoveCgroup(machine.Cgroup(dir)), os.RemoveAll(dir))
}
