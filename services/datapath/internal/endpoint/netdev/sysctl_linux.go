// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package netdev

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// sysctl is one file below /proc/sys/net of the calling thread's namespace.
type sysctl struct {
	path  string
	value string
}

// sysctlRoot is the directory from which sysctls are read. In a container it may be read-only; then they are written
// below Options.ProcSysNet.
const sysctlRoot = "/proc/sys/net/"

// CheckWritable checks that sysctls can be written below a directory, without writing one.
func CheckWritable(procSysNet string) error {
	f, err := os.OpenFile(filepath.Join(procSysNet, "ipv4/ip_forward"), os.O_WRONLY, 0)
	if err == nil {
		return f.Close()
	}
	return fmt.Errorf("the network sysctls are not writable: %w; in a container, mount the machine's "+
		"/proc/sys/net writable at a path outside of /proc, such as /host/proc/sys/net, and set procSysNet to it", err)
}

func (s sysctl) read() (string, error) {
	b, err := os.ReadFile(sysctlRoot + s.path)
	return strings.TrimSpace(string(b)), err
}

// applySysctls writes the values that differ below procSysNet. Most are the default already, and
// some writes take the kernel's global lock.
func applySysctls(procSysNet string, list []sysctl) error {
	for _, s := range list {
		have, err := s.read()
		if err == nil && have != s.value {
			err = os.WriteFile(filepath.Join(procSysNet, s.path), []byte(s.value), 0)
		}
		if err != nil {
			return fmt.Errorf("sysctl net/%s=%s: %w", s.path, s.value, err)
		}
	}
	return nil
}

func checkSysctls(list []sysctl) ([]endpoint.Difference, error) {
	var diffs []endpoint.Difference
	for _, s := range list {
		have, err := s.read()
		switch {
		case errors.Is(err, fs.ErrNotExist):
			diffs = append(diffs, endpoint.Difference{Subject: "sysctl", Key: "net/" + s.path, Want: s.value})
		case err != nil:
			return nil, err
		case have != s.value:
			diffs = append(diffs, endpoint.Difference{Subject: "sysctl", Key: "net/" + s.path, Want: s.value, Have: have})
		}
	}
	return diffs, nil
}
