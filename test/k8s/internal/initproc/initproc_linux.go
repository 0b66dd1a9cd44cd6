// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package initproc implements the first process of a PID namespace: it restarts programs when they end, and reaps
// orphans. When it returns, the kernel ends all processes of the namespace.
package initproc

import (
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// pause is the time between the end of a program and its restart.
const pause = 500 * time.Millisecond

// Held is a file name suffix in the log directory: while the file NAME.held exists, the program NAME is not
// restarted.
const Held = ".held"

// Program is a program that runs until its PID namespace ends.
type Program struct {
	// Name is the name of its log file, without the suffix.
	Name string
	// Command with its arguments.
	Command []string
}

// Init is the first process. Its methods are safe for concurrent use.
type Init struct {
	logs string
	log  *slog.Logger

	mu sync.Mutex
	// waiting has a channel for each child, which receives the child's status. Guarded by mu.
	waiting map[int]chan unix.WaitStatus
}

// New starts to reap children. The programs write their logs to the directory logs.
func New(logs string, log *slog.Logger) *Init {
	i := &Init{logs: logs, log: log, waiting: map[int]chan unix.WaitStatus{}}
	go i.reap()
	return i
}

// reap runs until the process ends.
func (i *Init) reap() {
	for ; ; time.Sleep(20 * time.Millisecond) {
		var info unix.Siginfo
		// The child stays a zombie until mu is held, because Start must have registered it first.
		for unix.Waitid(unix.P_ALL, 0, &info, unix.WEXITED|unix.WNOWAIT, nil) == nil {
			i.reapOne()
		}
		// There is no child at the moment, or the call was interrupted.
	}
}

func (i *Init) reapOne() {
	i.mu.Lock()
	defer i.mu.Unlock()
	var status unix.WaitStatus
	pid, err := unix.Wait4(-1, &status, unix.WNOHANG, nil)
	if err != nil || pid <= 0 {
		return
	}
	if c, ok := i.waiting[pid]; ok {
		c <- status
		delete(i.waiting, pid)
	}
}

// Start starts a child, and returns its process and a channel with its status.
func (i *Init) Start(c *exec.Cmd) (*os.Process, <-chan unix.WaitStatus, error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if err := c.Start(); err != nil {
		return nil, nil, fmt.Errorf("start %s: %w", c.Path, err)
	}
	ended := make(chan unix.WaitStatus, 1)
	i.waiting[c.Process.Pid] = ended
	return c.Process, ended, nil
}

// Run runs a command to its end. Its output goes to the log NAME.
func (i *Init) Run(name string, command ...string) error {
	c, err := i.command(name, command)
	if err != nil {
		return err
	}
	_, ended, err := i.Start(c.Cmd)
	c.close()
	if err != nil {
		return err
	}
	if status := <-ended; status != 0 {
		return fmt.Errorf("%v: status %#x, see %s.log", command, int(status), name)
	}
	return nil
}

// Keep starts a program and restarts it whenever it ends.
func (i *Init) Keep(p Program) error {
	c, err := i.command(p.Name, p.Command)
	if err != nil {
		return err
	}
	process, ended, err := i.Start(c.Cmd)
	c.close()
	if err != nil {
		return err
	}
	i.log.Info("program started", "program", p.Name, "pid", process.Pid)
	go func() {
		status := <-ended
		i.log.Warn("program ended", "program", p.Name, "status", int(status))
		_ = process.Release()
		for time.Sleep(pause); i.held(p.Name) || i.Keep(p) != nil; time.Sleep(pause) {
		}
	}()
	return nil
}

func (i *Init) held(name string) bool {
	_, err := os.Stat(filepath.Join(i.logs, name+Held))
	return err == nil
}

type logged struct {
	*exec.Cmd
	file *os.File
}

func (l logged) close() { _ = l.file.Close() }

func (i *Init) command(name string, command []string) (logged, error) {
	file, err := os.OpenFile(filepath.Join(i.logs, name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return logged{}, err
	}
	c := exec.Command(command[0], command[1:]...)
	c.Stdout, c.Stderr = file, file
	return logged{Cmd: c, file: file}, nil
}
