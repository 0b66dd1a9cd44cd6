// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package devconf reads the sysctls of a network device from the message in which the kernel describes the device.
package devconf

import "encoding/binary"

// Setting is a sysctl of a device, and the value that it should have.
type Setting struct {
	Name string
	V6   bool
	// At is the index in the array of the family: IPV4_DEVCONF of linux/ip.h minus 1, DEVCONF of linux/ipv6.h.
	At   int
	Want uint32
}

// V4 returns a setting of the IPv4 family.
func V4(name string, at int, want uint32) Setting {
	return Setting{Name: name, At: at, Want: want}
}

// V6 returns a setting of the IPv6 family.
func V6(name string, at int, want uint32) Setting {
	return Setting{Name: name, V6: true, At: at, Want: want}
}

// Path returns the path of a device's setting below /proc/sys/net.
func (s Setting) Path(device string) string {
	if s.V6 {
		return "ipv6/conf/" + device + "/" + s.Name
	}
	return "ipv4/conf/" + device + "/" + s.Name
}

// In returns the value of the setting in the arrays of a device; false if the device has none of the family.
func (s Setting) In(v4, v6 []byte) (uint32, bool) {
	values := v4
	if s.V6 {
		values = v6
	}
	if len(values) < 4*(s.At+1) {
		return 0, false
	}
	return binary.NativeEndian.Uint32(values[4*s.At:]), true
}
