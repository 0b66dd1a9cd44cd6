// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package servicetest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// ProbeFlags make a service answer probes for WantProbes, on a port that the kernel chooses and the
// service logs.
var ProbeFlags = []string{"--health-address", "127.0.0.1:0", "--log-level", "info"}

// WantProbes waits until /readyz of the process answers with this code and text. It fails the test
// unless /livez reports success.
func (p *Process) WantProbes(code int, text string) {
	p.t.Helper()
	EventuallyNil(p.t, fmt.Sprintf("/readyz answers %d %q", code, text), func() error {
		haveCode, have, err := p.probe("/readyz")
		if err == nil && (haveCode != code || !strings.Contains(have, text)) {
			err = fmt.Errorf("%d %q", haveCode, have)
		}
		return err
	})
	if code, text, err := p.probe("/livez"); err != nil || code != http.StatusOK {
		p.t.Errorf("/livez says %d %q, %v", code, text, err)
	}
}

func (p *Process) probe(path string) (code int, text string, err error) {
	address, err := p.healthAddress()
	if err != nil {
		return 0, "", err
	}
	conn, err := p.dial(address)
	if err != nil {
		return 0, "", err
	}
	connected := func(context.Context, string, string) (net.Conn, error) { return conn, nil }
	transport := &http.Transport{DisableKeepAlives: true, DialContext: connected}
	r, err := (&http.Client{Transport: transport, Timeout: Patience}).Get("http://" + address + path)
	if err != nil {
		conn.Close()
		return 0, "", err
	}
	defer r.Body.Close()
	body, err := io.ReadAll(r.Body)
	return r.StatusCode, string(body), err
}

// healthAddress returns the address of the health server from the process's log.
func (p *Process) healthAddress() (string, error) {
	for line := range strings.Lines(p.Log()) {
		var l struct{ Msg, Address string }
		if err := json.Unmarshal([]byte(line), &l); err == nil && l.Msg == "health" {
			return l.Address, nil
		}
	}
	return "", errors.New("the log has no address of the health server")
}

// dial connects within the network namespace of the process.
func (p *Process) dial(address string) (conn net.Conn, err error) {
	path := fmt.Sprintf("/proc/%d/ns/net", p.Cmd.Process.Pid)
	own, err := os.Readlink("/proc/thread-self/ns/net")
	if err != nil {
		return nil, err
	}
	if theirs, err := os.Readlink(path); err != nil || theirs == own {
		return net.Dial("tcp", address)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked: the thread stays in that namespace and ends with the goroutine
		var fd int
		if fd, err = unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
			return
		}
		defer unix.Close(fd)
		if err = unix.Setns(fd, unix.CLONE_NEWNET); err == nil {
			conn, err = net.Dial("tcp", address)
		}
	}()
	<-done
	return conn, err
}
