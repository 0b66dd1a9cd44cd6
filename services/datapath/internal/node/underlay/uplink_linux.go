// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package underlay

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/netdev"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/rtnl"
)

// Uplinks implements routing.Links. With a VLAN or bond, the device that has the addresses and routes is the uplink,
// not the devices below it. A member of a bond is never an uplink, even if it is configured: its packets arrive at the
// bond, whose programs would process them again, and an inactive member receives copies.
func (u *Underlay) Uplinks(addrs []netip.Addr, used []uint32) ([]endpoint.HostDevice, error) {
	all, err := u.devices()
	if err != nil {
		return nil, err
	}
	indices := map[uint32]bool{}
	if len(u.o.Devices) == 0 {
		for _, i := range used {
			indices[i] = true
		}
		if err := errors.Join(u.addressed(addrs, indices), u.defaults(indices)); err != nil {
			return nil, err
		}
	}
	var uplinks []endpoint.HostDevice
	for _, l := range all {
		if l.flags&(unix.IFF_LOOPBACK|unix.IFF_SLAVE) != 0 || u.own(l) {
			continue
		}
		if indices[l.index] || slices.ContainsFunc(u.o.Devices, func(pattern string) bool {
			ok, err := path.Match(pattern, l.name)
			return ok && err == nil
		}) {
			uplinks = append(uplinks, endpoint.HostDevice{Name: l.name, Index: l.index})
		}
	}
	return uplinks, nil
}

// own reports whether a device belongs to this instance: an endpoint's device, the tunnel, or a proxy's.
func (u *Underlay) own(l device) bool {
	return l.group&^1 == netdev.Group(u.o.Instance) || l.group == netdev.TunnelGroup(u.o.Instance) ||
		l.group == netdev.ProxyGroup(u.o.Instance)
}

// addressed adds the devices that have one of the addresses.
func (u *Underlay) addressed(addrs []netip.Addr, indices map[uint32]bool) error {
	err := whole(func() error {
		var b rtnl.Batch
		b.Add(unix.RTM_GETADDR, 0, make([]byte, unix.SizeofIfAddrmsg))
		return u.conn.Dump(&b, func(m []byte) {
			if len(m) < unix.SizeofIfAddrmsg {
				return
			}
			var local, addr netip.Addr
			rtnl.Attrs(m, unix.SizeofIfAddrmsg, func(kind uint16, v []byte) {
				switch kind {
				case unix.IFA_LOCAL:
					local = addrOf(v)
				case unix.IFA_ADDRESS:
					addr = addrOf(v)
				}
			})
			if !local.IsValid() {
				local = addr
			}
			if slices.Contains(addrs, local) {
				indices[binary.NativeEndian.Uint32(m[4:])] = true
			}
		})
	})
	if err != nil {
		return fmt.Errorf("list addresses: %w", err)
	}
	return nil
}

// defaults adds the devices of the default routes in the main table.
func (u *Underlay) defaults(indices map[uint32]bool) error {
	err := whole(func() error {
		for _, family := range []byte{unix.AF_INET, unix.AF_INET6} {
			m := make([]byte, unix.SizeofRtMsg)
			m[0], m[4] = family, unix.RT_TABLE_MAIN
			var b rtnl.Batch
			b.Add(unix.RTM_GETROUTE, 0, m)
			err := u.lists.Dump(&b, func(m []byte) {
				if r := readRoute(m); r.dst.Bits() == 0 && r.table == unix.RT_TABLE_MAIN && r.kind == unix.RTN_UNICAST {
					for _, h := range r.hops {
						indices[h.Ifindex] = true
					}
				}
			})
			if err != nil && !hasNone(err) {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("list routes: %w", err)
	}
	return nil
}

// loaded returns the most recently loaded programs.
func loaded(programs func() []*program.Program) []*program.Program {
	if programs == nil {
		return nil
	}
	return programs()
}

// uplinkSpecs returns the programs that this or a previous process may have attached to uplinks.
func uplinkSpecs() []program.Spec {
	return slices.DeleteFunc(program.Table(), func(s program.Spec) bool { return s.Devices != program.Uplinks })
}

// unloaded returns the programs of uplinks that are not among the given ones.
func unloaded(programs []*program.Program) []program.Spec {
	return slices.DeleteFunc(uplinkSpecs(), func(s program.Spec) bool {
		return slices.ContainsFunc(programs, func(p *program.Program) bool { return p.Name == s.Name })
	})
}

// EnsureUplinks implements routing.Links.
func (u *Underlay) EnsureUplinks(devices []endpoint.HostDevice, programs bool) error {
	u.mu.Lock()
	defer u.mu.Unlock()
	errs := []error{u.sweep()}
	want := map[uint32]endpoint.HostDevice{}
	if uplinks := loaded(u.o.Uplinks); programs && len(uplinks) > 0 {
		for _, d := range devices {
			want[d.Index] = d
			errs = append(errs, u.attach(d, uplinks), u.readable(d))
			u.attached[d.Index] = d
		}
	}
	for i, d := range u.attached {
		if _, ok := want[i]; ok {
			continue
		}
		err := u.hooks.Detach(d, uplinkSpecs())
		delete(u.hooked, d)
		if err == nil {
			delete(u.attached, i)
		}
		errs = append(errs, err)
	}
	if u.o.SetGlobal {
		errs = append(errs, u.o.Home.Do(func() error { return u.unfilter(devices) }))
	}
	return errors.Join(errs...)
}

// readable returns an error for a device whose frames the programs cannot parse as IP. They pass such frames to the
// stack, and the node's firewall drops packets of pods.
func (u *Underlay) readable(d endpoint.HostDevice) error {
	l, err := u.device(d.Index, "")
	if err == nil && l.unordered {
		return fmt.Errorf("%[1]s: on a VLAN with reorder_hdr off, the programs cannot read packets of pods; "+
			"run: ip link set %[1]s type vlan reorder_hdr on", d.Name)
	}
	if errors.Is(err, unix.ENODEV) {
		return nil // removed meanwhile; the next reconciliation notices it
	}
	return err
}

// attach attaches missing programs to a device, and records the attached programs. The lock is held.
func (u *Underlay) attach(d endpoint.HostDevice, programs []*program.Program) error {
	diffs, err := u.hooks.CheckFirst(d, programs)
	differs := func(d endpoint.Difference) bool { return d.Subject == endpoint.SubjectFilter }
	if err == nil && slices.ContainsFunc(diffs, differs) {
		err = u.hooks.AttachFirst(d, programs)
	}
	if err != nil {
		return err
	}
	// programs of a previous process with other settings
	if err := u.hooks.Detach(d, unloaded(programs)); err != nil {
		return err
	}
	places, err := u.hooks.Attached(d)
	if err == nil {
		u.hooked[d] = places
	}
	return err
}

// Disturbed implements routing.Links.
func (u *Underlay) Disturbed() (bool, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for d, was := range u.hooked {
		is, err := u.hooks.Attached(d)
		if err != nil {
			return false, err
		}
		if !slices.Equal(is, was) {
			delete(u.hooked, d) // until the reconciliation that this triggers
			return true, nil
		}
	}
	return false, nil
}

// sweep collects once the devices on which a previous process may have left filters. The lock is held.
func (u *Underlay) sweep() error {
	if u.swept {
		return nil
	}
	all, err := u.devices()
	if err != nil {
		return err
	}
	for _, l := range all {
		if l.flags&unix.IFF_LOOPBACK == 0 && !u.own(l) {
			u.attached[l.index] = endpoint.HostDevice{Name: l.name, Index: l.index}
		}
	}
	u.swept = true
	return nil
}

// CheckUplinks implements routing.Links.
func (u *Underlay) CheckUplinks(devices []endpoint.HostDevice, programs bool) ([]endpoint.Difference, error) {
	var ds differences
	uplinks := loaded(u.o.Uplinks)
	for _, d := range devices {
		if !programs || len(uplinks) == 0 {
			break
		}
		diffs, err := u.hooks.CheckFirst(d, uplinks)
		if err != nil {
			return nil, err
		}
		ds = append(ds, diffs...)
	}
	err := u.o.Home.Do(func() error {
		return u.eachFiltered(devices, func(path, have string) error {
			ds.add("sysctl", "net/"+path, off, have)
			return nil
		})
	})
	return ds, err
}

// off is the desired value of send_redirects and rp_filter. With another value of rp_filter, the kernel would look up
// the reverse route of packets to pods, which the rules against unmarked packets prohibit. The kernel uses the maximum
// of the device's value and the value of "all".
const off = "0"

// unfilter disables these sysctls on uplinks.
func (u *Underlay) unfilter(devices []endpoint.HostDevice) error {
	return u.eachFiltered(devices, func(path, _ string) error { return u.writeSysctl(path, off) })
}

// eachFiltered calls fn with the sysctls that must be off but are not, and their values. The calling thread is in the
// node's namespace.
func (u *Underlay) eachFiltered(devices []endpoint.HostDevice, fn func(path, have string) error) error {
	if len(devices) == 0 {
		return nil
	}
	paths := []string{"ipv4/conf/all/rp_filter"}
	for _, d := range devices {
		paths = append(paths, "ipv4/conf/"+d.Name+"/rp_filter")
		if u.o.Services { // send_redirects of "all" is left to the node's administrator
			paths = append(paths, "ipv4/conf/"+d.Name+"/send_redirects")
		}
	}
	for _, path := range paths {
		have, err := readSysctl(path)
		switch {
		case errors.Is(err, fs.ErrNotExist): // the device was removed meanwhile
		case err != nil:
			return err
		case have != off:
			if err := fn(path, have); err != nil {
				return err
			}
		}
	}
	return nil
}

func readSysctl(path string) (string, error) {
	b, err := os.ReadFile(filepath.Join("/proc/sys/net", path))
	return strings.TrimSpace(string(b)), err
}
