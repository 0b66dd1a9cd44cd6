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
	path     string
	value    string
	optional bool // need not exist
}

// sysctlRoot is where they are read. In a container it may be read-only, so that
// they are written elsewhere: Options.ProcSysNet.
const sysctlRoot = "/proc/sys/net/"

// CheckWritable says whether sysctls can be written below a directory, without
// writing one.
func CheckWritable(procSysNet string) error {
	f, err := os.OpenFile(filepath.Join(procSysNet, "ipv4/ip_forward"), os.O_WRONLY, 0)
	if err == nil {
		return f.Close()
	}
	return fmt.Errorf("the network's settings cannot be written: %w; in a container, mount the machine's "+
		"/proc/sys/net writable at a path outside of /proc, such as /host/proc/sys/net, and set procSysNet to it", err)
}

// hostSysctls are those of an endpoint's host end.
func hostSysctls(d endpoint.Device) []sysctl {
	v4, v6 := "ipv4/conf/"+d.HostName+"/", "ipv6/conf/"+d.HostName+"/"
	has6 := len(d.Addrs) > 0 && d.Addrs[len(d.Addrs)-1].Is6()
	return []sysctl{
		{path: v4 + "forwarding", value: "1"},
		// a packet whose source is not routed to this device is dropped: the
		// stack's own anti-spoofing, in case the program is gone
		{path: v4 + "rp_filter", value: "1"},
		// That check looks for the way back. Without the packet's mark it would
		// meet the rule that prohibits unmarked packets from the pod range, and
		// what the programs hand over for an ICMP error would vanish.
		{path: v4 + "src_valid_mark", value: "1"},
		{path: v4 + "accept_local", value: "0"},
		{path: v4 + "proxy_arp", value: "0"},
		{path: v4 + "send_redirects", value: "0"},
		{path: v6 + "disable_ipv6", value: "0", optional: !has6},
		{path: v6 + "forwarding", value: "1", optional: !has6},
		{path: v6 + "accept_ra", value: "0", optional: !has6},
		{path: v6 + "accept_redirects", value: "0", optional: !has6},
	}
}

// containerSysctls are those inside.
func containerSysctls(d endpoint.Device) []sysctl {
	v6 := "ipv6/conf/" + d.Name + "/"
	has6 := len(d.Addrs) > 0 && d.Addrs[len(d.Addrs)-1].Is6()
	s := []sysctl{{path: v6 + "accept_ra", value: "0", optional: !has6}}
	if has6 {
		s = append(s, sysctl{path: v6 + "disable_ipv6", value: "0"})
	}
	return s
}

func (s sysctl) read() (string, error) {
	b, err := os.ReadFile(sysctlRoot + s.path)
	return strings.TrimSpace(string(b)), err
}

// applySysctls writes below procSysNet what differs; most of it is the default already, and
// some writes take the kernel's global lock.
func applySysctls(procSysNet string, list []sysctl) error {
	for _, s := range list {
		have, err := s.read()
		if err == nil && have != s.value {
			err = os.WriteFile(filepath.Join(procSysNet, s.path), []byte(s.value), 0)
		}
		if err != nil && !(s.optional && errors.Is(err, fs.ErrNotExist)) {
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
		case errors.Is(err, fs.ErrNotExist) && s.optional:
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
