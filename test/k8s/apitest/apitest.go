// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package apitest runs a Kubernetes API without a cluster: etcd and kube-apiserver, on loopback, as any user.
package apitest

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"time"

	"github.com/sluice-net/sluice/test/k8s/internal/controlplane"
	"github.com/sluice-net/sluice/test/k8s/internal/pki"
	"golang.org/x/sys/unix"
)

// Ready is the line of JSON that Serve writes when the API is ready.
type Ready struct {
	// Kubeconfig is a file with the rights of an administrator.
	Kubeconfig string `json:"kubeconfig"`
	// Server is the API's URL.
	Server string `json:"server"`
}

// Lines of stdin that Serve understands.
const (
	// Kill kills kube-apiserver with SIGKILL.
	Kill = "kill"
	// Start starts kube-apiserver. Serve writes another line of Ready afterwards.
	Start = "start"
	// Save copies etcd's data. Serve writes another line of Ready afterwards.
	Save = "save"
	// Restore kills kube-apiserver and etcd, and starts both with the copied data. Serve writes another line of Ready
	// afterwards.
	Restore = "restore"
	// Empty is Restore without data.
	Empty = "empty"
)

// Serve runs an API until ctx or stdin ends, with all files below dir, an existing, empty directory. It writes one
// line to stdout when the API is ready. The programs are in the directory SLUICE_BIN, with kube-apiserver in the
// version SLUICE_KUBERNETES, if that is set.
func Serve(ctx context.Context, dir string, stdin io.Reader, stdout io.Writer) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	asked := make(chan string)
	go func() {
		defer cancel()
		for lines := bufio.NewScanner(stdin); lines.Scan(); {
			select {
			case asked <- lines.Text():
			case <-ctx.Done():
				return
			}
		}
	}()
	dir, err := filepath.Abs(dir)
	if err != nil {
		return err
	}
	bin := os.Getenv("SLUICE_BIN")
	if bin == "" {
		return errors.New("SLUICE_BIN is not set: it is the directory bin of the tree")
	}
	port, err := freePort()
	if err != nil {
		return err
	}
	socket := "unix://" + filepath.Join(dir, "etcd.sock")
	plane := controlplane.Plane{
		Binaries: filepath.Join(bin, "k8s"), Version: os.Getenv("SLUICE_KUBERNETES"),
		Dir: dir, Address: "127.0.0.1", Port: port, Etcd: socket,
	}
	authority, err := pki.New(dir)
	if err != nil {
		return err
	}
	if err := plane.Prepare(authority); err != nil {
		return err
	}
	// The child processes end with the thread that starts them.
	runtime.LockOSThread()
	data, copied := filepath.Join(dir, "etcd"), filepath.Join(dir, "etcd-copy")
	store := func() (*child, error) {
		return start(ctx, dir, "etcd", filepath.Join(bin, "sluice-devetcd"), "--data-dir="+data, "--listen="+socket)
	}
	etcd, err := store()
	if err != nil {
		return err
	}
	defer func() { etcd.end() }()
	args := plane.APIServer()
	serve := func() (*child, error) {
		return start(ctx, dir, "kube-apiserver", args[0], append(args[1:], "--cert-dir="+dir)...)
	}
	api, err := serve()
	if err != nil {
		return err
	}
	defer func() { api.end() }()
	ready := make(chan error)
	wait := func() {
		err := plane.WaitReady(filepath.Join(dir, "ca.crt"), 5*time.Minute)
		select {
		case ready <- err:
		case <-ctx.Done():
		}
	}
	go wait()
	answer := func() error {
		line := Ready{Kubeconfig: filepath.Join(dir, "admin.kubeconfig"), Server: plane.Server()}
		return json.NewEncoder(stdout).Encode(line)
	}
	ended := api.ended
	for {
		select {
		case err := <-ready:
			if err != nil {
				return err
			}
			if err := answer(); err != nil {
				return err
			}
		case what := <-asked:
			switch what {
			case Kill:
				ended = nil
				api.end()
			case Start:
				api.end()
				if api, err = serve(); err != nil {
					return err
				}
				ended = api.ended
				go wait()
			case Save:
				if err := etcd.save(data, copied); err != nil {
					return err
				}
				if err := answer(); err != nil {
					return err
				}
			case Restore, Empty:
				api.end()
				etcd.end()
				if err := os.RemoveAll(data); err != nil {
					return err
				}
				if what == Restore {
					if err := os.CopyFS(data, os.DirFS(copied)); err != nil {
						return err
					}
				}
				if etcd, err = store(); err != nil {
					return err
				}
				if api, err = serve(); err != nil {
					return err
				}
				ended = api.ended
				go wait()
			default:
				return fmt.Errorf("%q is not a command of Serve", what)
			}
		case <-etcd.ended:
			return etcd.failure(ctx)
		case <-ended:
			return api.failure(ctx)
		}
	}
}

type child struct {
	command *exec.Cmd
	log     string
	ended   chan struct{}
}

// start starts a program that ends with ctx.
func start(ctx context.Context, dir, name, program string, args ...string) (*child, error) {
	c := &child{
		command: exec.CommandContext(ctx, program, args...), log: filepath.Join(dir, name+".log"), ended: make(chan struct{}),
	}
	file, err := os.Create(c.log)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	c.command.Stdout, c.command.Stderr = file, file
	c.command.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL}
	if err := c.command.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	go func() {
		_ = c.command.Wait()
		close(c.ended)
	}()
	return c, nil
}

// end kills the program, whose data are no longer needed, and waits for its end.
func (c *child) end() {
	_ = c.command.Process.Kill()
	<-c.ended
}

// save copies the data of the program while it is stopped.
func (c *child) save(data, to string) error {
	if err := c.command.Process.Signal(syscall.SIGSTOP); err != nil {
		return err
	}
	return errors.Join(os.RemoveAll(to), os.CopyFS(to, os.DirFS(data)), c.command.Process.Signal(syscall.SIGCONT))
}

func (c *child) failure(ctx context.Context) error {
	if ctx.Err() != nil {
		return nil
	}
	content, err := os.ReadFile(c.log)
	const most = 2000
	return errors.Join(fmt.Errorf("%s ended: %s", c.command.Path, content[max(0, len(content)-most):]), err)
}

// freePort returns a port that is free at the moment, because kube-apiserver accepts no listener.
func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	return l.Addr().(*net.TCPAddr).Port, l.Close()
}
