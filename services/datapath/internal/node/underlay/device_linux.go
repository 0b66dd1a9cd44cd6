// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package underlay

import (
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/kernel/devconf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/rtnl"
)

// device is a network device as the kernel describes it.
type device struct {
	index, flags uint32
	mtu, group   uint32
	name, kind   string
	hardware     uint16 // ARPHRD of linux/if_arp.h
	genMode      uint8  // how the device gets a link-local address; genModeUnknown without IPv6
	vxlan        vxlan
	unordered    bool // a VLAN device with reorder_hdr off: its frames have the tag in place of the type
	// The device's sysctls of each family; nil without the family.
	conf4, conf6 []byte
}

// vxlan holds the attributes of VXLAN devices.
type vxlan struct {
	port               uint16
	external, learning bool
}

// Attributes of linux/if_link.h that package unix lacks.
const (
	inetConf       = 1 // IFLA_INET_CONF
	inet6Conf      = 2 // IFLA_INET6_CONF
	inet6GenMode   = 8 // IFLA_INET6_ADDR_GEN_MODE
	vxlanLearning  = 7
	vxlanPort      = 15
	vxlanExternal  = 25 // IFLA_VXLAN_COLLECT_METADATA
	vlanFlags      = 2  // IFLA_VLAN_FLAGS: struct ifla_vlan_flags
	vlanReorder    = 1  // VLAN_FLAG_REORDER_HDR of linux/if_vlan.h
	skipStats      = 8  // RTEXT_FILTER_SKIP_STATS of linux/rtnetlink.h
	genModeNone    = 1  // IN6_ADDR_GEN_MODE_NONE
	genModeUnknown = 0xff
	conf6MTU       = 2 // DEVCONF_MTU6 of linux/ipv6.h
)

// infomsg returns a struct ifinfomsg.
func infomsg(index, flags, change uint32) []byte {
	m := make([]byte, unix.SizeofIfInfomsg)
	binary.NativeEndian.PutUint32(m[4:], index)
	binary.NativeEndian.PutUint32(m[8:], flags)
	binary.NativeEndian.PutUint32(m[12:], change)
	return m
}

// getLink requests the device with an index, or with a name if the index is 0.
func getLink(b *rtnl.Batch, index uint32, name string) {
	b.Add(unix.RTM_GETLINK, 0, infomsg(index, 0, 0))
	b.Uint32(unix.IFLA_EXT_MASK, skipStats)
	if index == 0 {
		b.String(unix.IFLA_IFNAME, name)
	}
}

// deviceOf parses the answer to getLink.
func deviceOf(m []byte) device {
	l := device{genMode: genModeUnknown}
	if len(m) < unix.SizeofIfInfomsg {
		return l
	}
	l.hardware = binary.NativeEndian.Uint16(m[2:])
	l.index, l.flags = binary.NativeEndian.Uint32(m[4:]), binary.NativeEndian.Uint32(m[8:])
	rtnl.Attrs(m, unix.SizeofIfInfomsg, func(kind uint16, v []byte) {
		switch kind {
		case unix.IFLA_IFNAME:
			l.name = unix.ByteSliceToString(v)
		case unix.IFLA_MTU:
			l.mtu = rtnl.Number(v)
		case unix.IFLA_GROUP:
			l.group = rtnl.Number(v)
		case unix.IFLA_LINKINFO:
			l.readInfo(v)
		case unix.IFLA_AF_SPEC:
			rtnl.Attrs(v, 0, l.readFamily)
		}
	})
	return l
}

func (l *device) readInfo(v []byte) {
	rtnl.Attrs(v, 0, func(kind uint16, v []byte) {
		switch kind {
		case unix.IFLA_INFO_KIND:
			l.kind = unix.ByteSliceToString(v)
		case unix.IFLA_INFO_DATA:
			l.unordered = l.kind == "vlan" // without flags, the kernel omits the attribute
			rtnl.Attrs(v, 0, func(kind uint16, v []byte) {
				switch {
				case len(v) == 0:
				case l.kind == "vlan":
					if kind == vlanFlags {
						l.unordered = rtnl.Number(v)&vlanReorder == 0
					}
				case l.kind != "vxlan":
				case kind == vxlanLearning:
					l.vxlan.learning = v[0] != 0
				case kind == vxlanExternal:
					l.vxlan.external = v[0] != 0
				case kind == vxlanPort && len(v) >= 2:
					l.vxlan.port = binary.BigEndian.Uint16(v)
				}
			})
		}
	})
}

func (l *device) readFamily(family uint16, v []byte) {
	rtnl.Attrs(v, 0, func(kind uint16, v []byte) {
		switch {
		case family == unix.AF_INET && kind == inetConf:
			l.conf4 = append([]byte(nil), v...)
		case family == unix.AF_INET6 && kind == inet6Conf:
			l.conf6 = append([]byte(nil), v...)
		case family == unix.AF_INET6 && kind == inet6GenMode && len(v) > 0:
			l.genMode = v[0]
		}
	})
}

// device returns the device with an index, or with a name if the index is 0.
func (u *Underlay) device(index uint32, name string) (device, error) {
	var b rtnl.Batch
	getLink(&b, index, name)
	replies, err := u.conn.Exchange(&b)
	if err == nil {
		err = replies[0].Err
	}
	if err != nil {
		return device{}, err
	}
	return deviceOf(replies[0].Data), nil
}

func (u *Underlay) devices() (list []device, err error) {
	err = whole(func() error {
		list = nil
		var b rtnl.Batch
		b.Add(unix.RTM_GETLINK, 0, infomsg(0, 0, 0))
		b.Uint32(unix.IFLA_EXT_MASK, skipStats)
		return u.conn.Dump(&b, func(m []byte) { list = append(list, deviceOf(m)) })
	})
	if err != nil {
		return nil, fmt.Errorf("list devices: %w", err)
	}
	return list, nil
}

func checkSettings(ds *differences, l device, list []devconf.Setting) {
	for _, s := range list {
		if have, ok := s.In(l.conf4, l.conf6); ok && have != s.Want {
			value := strconv.Itoa(int(int32(have))) //nolint:gosec // the kernel's values are signed
			ds.add("sysctl", "net/"+s.Path(l.name), strconv.Itoa(int(s.Want)), value)
		}
	}
}

// applySettings writes the settings that differ. The calling thread is in the node's namespace.
func (u *Underlay) applySettings(l device, list []devconf.Setting) error {
	for _, s := range list {
		if have, ok := s.In(l.conf4, l.conf6); !ok || have == s.Want {
			continue
		}
		if err := u.writeSysctl(s.Path(l.name), strconv.Itoa(int(s.Want))); err != nil {
			return err
		}
	}
	return nil
}

func (u *Underlay) writeSysctl(path, value string) error {
	if err := os.WriteFile(filepath.Join(u.o.ProcSysNet, path), []byte(value), 0); err != nil {
		return fmt.Errorf("sysctl net/%s=%s: %w", path, value, err)
	}
	return nil
}
