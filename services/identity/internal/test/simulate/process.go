// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// process is a child process.
type process struct {
	cmd   *exec.Cmd
	ended chan struct{} // closed when the process has ended
}

func startProcess(log string, name string, args ...string) (*process, error) {
	file, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	p := &process{cmd: exec.Command(name, args...), ended: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = file, file
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	p.reap()
	return p, nil
}

func (p *process) reap() {
	go func() {
		_ = p.cmd.Wait() // the process's log has the reason
		close(p.ended)
	}()
}

func (p *process) signal(s syscall.Signal) {
	_ = p.cmd.Process.Signal(s) // the process may have ended already
	<-p.ended
}

// cpu returns the processor time of the process so far, in seconds.
func (p *process) cpu() float64 {
	content, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.cmd.Process.Pid))
	if err != nil {
		return 0
	}
	// After the process's name, which may contain spaces, state is the first field and utime the 12th.
	_, rest, _ := strings.Cut(string(content), ") ")
	fields := strings.Fields(rest)
	if len(fields) < 13 {
		return 0
	}
	user, _ := strconv.Atoi(fields[11])
	system, _ := strconv.Atoi(fields[12])
	return float64(user+system) / 100 // clock ticks, 100 a second wherever Linux runs
}

// resident returns the resident memory of the process in MiB, and its maximum so far.
func (p *process) resident() (now, peak float64) { return resident(p.cmd.Process.Pid) }

func resident(pid int) (now, peak float64) {
	content, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, 0
	}
	for line := range strings.Lines(string(content)) {
		fields := strings.Fields(line)
		if len(fields) < 2 {
			continue
		}
		switch kib, _ := strconv.Atoi(fields[1]); fields[0] {
		case "VmRSS:":
			now = float64(kib) / 1024
		case "VmHWM:":
			peak = float64(kib) / 1024
		}
	}
	return now, peak
}

// etcd is the only member of the cluster.
type etcd struct {
	*process
	endpoint string
}

func startEtcd(ctx context.Context, bin, dir string) (*etcd, error) {
	socket := "unix://" + filepath.Join(dir, "etcd.sock")
	ready, write, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer ready.Close()
	log, err := os.Create(filepath.Join(dir, "etcd.log"))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	e := &etcd{endpoint: socket, process: &process{ended: make(chan struct{})}}
	e.cmd = exec.Command(filepath.Join(bin, "sluice-devetcd"), "--data-dir", filepath.Join(dir, "etcd"),
		"--listen", socket, "--ready-fd", "3")
	e.cmd.Stderr, e.cmd.ExtraFiles = log, []*os.File{write}
	e.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	err = e.cmd.Start()
	write.Close()
	if err != nil {
		return nil, fmt.Errorf("etcd: %w", err)
	}
	e.reap()
	if err := ready.SetReadDeadline(time.Now().Add(patience)); err != nil {
		return e, err
	}
	if _, err := bufio.NewReader(ready).ReadString('\n'); err != nil {
		return e, fmt.Errorf("etcd: %w", err)
	}
	return e, ctx.Err()
}

func (e *etcd) stop() {
	if e != nil {
		e.signal(syscall.SIGTERM)
	}
}
