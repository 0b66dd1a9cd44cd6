// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package underlay

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/netdev"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/devconf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/rtnl"
	"github.com/sluice-net/sluice/services/datapath/internal/node/routing"
)

// TunnelName returns the name of an instance's tunnel device. It cannot collide with the names of endpoint devices,
// which continue with a hexadecimal digit.
func TunnelName(instance string) string {
	sum := sha256.Sum256([]byte("tunnel\x00" + instance))
	return "slt" + hex.EncodeToString(sum[:])[:10]
}

// tunnelSettings are the sysctls of the tunnel device. A program has already checked the source of packets from the
// device. The host stack's own source check is loose and includes the packet's mark: without the mark, the rule against
// unmarked packets from the node's ranges would match.
var tunnelSettings = []devconf.Setting{
	devconf.V4("forwarding", 0, 1),
	devconf.V4("proxy_arp", 2, 0),
	devconf.V4("accept_redirects", 3, 0),
	devconf.V4("send_redirects", 5, 0),
	devconf.V4("rp_filter", 7, 2),
	devconf.V4("accept_local", 22, 0),
	devconf.V4("src_valid_mark", 23, 1),
	devconf.V6("forwarding", 0, 1),
	devconf.V6("accept_ra", 3, 0),
	devconf.V6("accept_redirects", 4, 0),
	devconf.V6("disable_ipv6", 26, 0),
}

// tunnelFlags are the flags of the device. No addresses are resolved on it.
const tunnelFlags = unix.IFF_UP | unix.IFF_NOARP

// ErrTaken is returned if the name or the port of the tunnel belongs to a foreign device.
var ErrTaken = errors.New("taken by a device that Sluice did not create")

// EnsureTunnel implements routing.Links.
func (u *Underlay) EnsureTunnel(t routing.Tunnel) (endpoint.HostDevice, error) {
	l, err := u.tunnel()
	if errors.Is(err, ErrTaken) {
		return endpoint.HostDevice{}, routing.NoTunnelError{Err: err}
	}
	if err == nil && replaced(l, t) {
		err = u.removeTunnel(l)
		l = device{}
	}
	if err != nil {
		return endpoint.HostDevice{}, err
	}
	if l.index == 0 {
		if l, err = u.makeTunnel(t); err != nil {
			return endpoint.HostDevice{}, routing.NoTunnelError{Err: err}
		}
	}
	u.mu.Lock()
	u.tunnelIndex = l.index
	u.mu.Unlock()
	d := endpoint.HostDevice{Name: l.name, Index: l.index}
	// The programs are attached before the device carries packets.
	if err = u.attachTunnel(d); err == nil {
		err = u.repairTunnel(l, t)
	}
	if err != nil && l.flags&unix.IFF_UP == 0 {
		return endpoint.HostDevice{}, routing.NoTunnelError{Err: err}
	}
	return d, errors.Join(err, u.o.Home.Do(func() error { return u.applySettings(l, tunnelSettings) }))
}

// replaced reports whether an existing device has to be replaced, because it cannot be changed as needed.
func replaced(l device, t routing.Tunnel) bool {
	return l.index != 0 && (l.kind != "vxlan" || !l.vxlan.external || l.vxlan.port != t.Port)
}

// tunnel returns the tunnel device; the zero device if it does not exist.
func (u *Underlay) tunnel() (device, error) {
	l, err := u.device(0, u.name)
	switch {
	case errors.Is(err, unix.ENODEV):
		return device{}, nil
	case err != nil:
		return device{}, fmt.Errorf("find the tunnel device %s: %w", u.name, err)
	case l.group != netdev.TunnelGroup(u.o.Instance):
		return device{}, fmt.Errorf("tunnel device %s: the name is %w (%s, group %d); rename or delete that device",
			u.name, ErrTaken, l.kind, l.group)
	}
	return l, nil
}

func (u *Underlay) makeTunnel(t routing.Tunnel) (device, error) {
	all, err := u.devices()
	if err != nil {
		return device{}, err
	}
	for _, other := range all {
		if other.kind == "vxlan" && other.vxlan.port == t.Port {
			return device{}, fmt.Errorf("tunnel device %s: UDP port %d is %w: %s; delete that device, or set routing.tunnelPort",
				u.name, t.Port, ErrTaken, other.name)
		}
	}
	var b rtnl.Batch
	b.Add(unix.RTM_NEWLINK, unix.NLM_F_CREATE|unix.NLM_F_EXCL, infomsg(0, unix.IFF_NOARP, unix.IFF_NOARP))
	b.For("make the tunnel device %s", u.name)
	b.String(unix.IFLA_IFNAME, u.name)
	b.Uint32(unix.IFLA_MTU, uint32(t.MTU))
	b.Uint32(unix.IFLA_GROUP, netdev.TunnelGroup(u.o.Instance))
	b.Nest(unix.IFLA_LINKINFO, nil, func() {
		b.String(unix.IFLA_INFO_KIND, "vxlan")
		b.Nest(unix.IFLA_INFO_DATA, nil, func() {
			b.Attr(vxlanExternal, []byte{1})
			b.Attr(vxlanLearning, []byte{0})
			b.Attr(vxlanPort, binary.BigEndian.AppendUint16(nil, t.Port))
		})
	})
	if err := u.conn.Do(&b); err != nil {
		return device{}, err
	}
	l, err := u.tunnel()
	if err == nil && l.index == 0 {
		err = fmt.Errorf("find the tunnel device %s: %w", u.name, unix.ENODEV)
	}
	return l, err
}

// attachTunnel replaces only programs that are not current.
func (u *Underlay) attachTunnel(d endpoint.HostDevice) error {
	programs := loaded(u.o.Tunnel)
	if len(programs) == 0 {
		return nil
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.attach(d, programs)
}

// repairTunnel changes attributes of the existing device.
func (u *Underlay) repairTunnel(l device, t routing.Tunnel) error {
	var b rtnl.Batch
	if l.genMode != genModeNone && l.genMode != genModeUnknown {
		b.Add(unix.RTM_SETLINK, 0, infomsg(l.index, 0, 0))
		b.For("%s without a link-local address", l.name)
		b.Nest(unix.IFLA_AF_SPEC, nil, func() {
			b.Nest(unix.AF_INET6, nil, func() { b.Attr(inet6GenMode, []byte{genModeNone}) })
		})
	}
	if l.vxlan.learning {
		b.Add(unix.RTM_NEWLINK, 0, infomsg(l.index, 0, 0))
		b.For("%s without learning", l.name)
		b.Nest(unix.IFLA_LINKINFO, nil, func() {
			b.String(unix.IFLA_INFO_KIND, "vxlan")
			b.Nest(unix.IFLA_INFO_DATA, nil, func() { b.Attr(vxlanLearning, []byte{0}) })
		})
	}
	if l.mtu != uint32(t.MTU) {
		b.Add(unix.RTM_SETLINK, 0, infomsg(l.index, 0, 0))
		b.For("mtu of %s", l.name)
		b.Uint32(unix.IFLA_MTU, uint32(t.MTU))
	}
	if l.flags&tunnelFlags == tunnelFlags {
		return u.conn.Do(&b)
	}
	b.Add(unix.RTM_SETLINK, 0, infomsg(l.index, tunnelFlags, tunnelFlags))
	b.For("set %s up, with UDP port %d", l.name, t.Port)
	return u.conn.Do(&b)
}

// CheckTunnel implements routing.Links.
func (u *Underlay) CheckTunnel(t routing.Tunnel) (endpoint.HostDevice, []endpoint.Difference, error) {
	var ds differences
	l, err := u.tunnel()
	switch want := fmt.Sprintf("vxlan, external, port %d", t.Port); {
	case errors.Is(err, ErrTaken):
		ds.add("tunnel device", u.name, want, err.Error())
		return endpoint.HostDevice{}, ds, nil
	case err != nil:
		return endpoint.HostDevice{}, nil, err
	case l.index == 0:
		ds.add("tunnel device", u.name, want, "")
		return endpoint.HostDevice{}, ds, nil
	case replaced(l, t):
		ds.add("tunnel device", u.name, want,
			fmt.Sprintf("%s, external %t, port %d", l.kind, l.vxlan.external, l.vxlan.port))
		return endpoint.HostDevice{}, ds, nil
	}
	d := endpoint.HostDevice{Name: l.name, Index: l.index}
	if l.flags&unix.IFF_UP == 0 {
		ds.add("device state", u.name, "up", "down")
	}
	if l.flags&unix.IFF_NOARP == 0 {
		ds.add("device flags", u.name, "noarp", "")
	}
	if l.mtu != uint32(t.MTU) {
		ds.add("device mtu", u.name, strconv.Itoa(int(t.MTU)), strconv.Itoa(int(l.mtu)))
	}
	if l.vxlan.learning {
		ds.add("device learning", u.name, "off", "on")
	}
	if l.genMode != genModeNone && l.genMode != genModeUnknown {
		ds.add("device addrgenmode", u.name, "none", strconv.Itoa(int(l.genMode)))
	}
	checkSettings(&ds, l, tunnelSettings)
	if programs := loaded(u.o.Tunnel); len(programs) > 0 {
		diffs, err := u.hooks.CheckFirst(d, programs)
		if err != nil {
			return endpoint.HostDevice{}, nil, err
		}
		ds = append(ds, diffs...)
	}
	return d, ds, nil
}

// RemoveTunnel implements routing.Links. A foreign device with the name is not removed.
func (u *Underlay) RemoveTunnel() error {
	l, err := u.tunnel()
	if errors.Is(err, ErrTaken) {
		return nil
	}
	if err == nil && l.index != 0 {
		err = u.removeTunnel(l)
	}
	return err
}

func (u *Underlay) removeTunnel(l device) error {
	var b rtnl.Batch
	b.Add(unix.RTM_DELLINK, 0, infomsg(l.index, 0, 0))
	b.For("delete the tunnel device %s", l.name)
	return u.conn.Do(&b, unix.ENODEV)
}
