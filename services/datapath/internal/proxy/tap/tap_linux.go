// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package tap makes the TAP device of a proxy: the programs send redirected packets to the device, the proxy reads them
// from the device's queue and writes them back.
//
// The device exists while a process has a queue of it. The datapath has a queue as long as it runs, and the proxy a
// copy. So a killed proxy loses no packet that it has not read, and the device of a running proxy outlives the
// datapath.
package tap

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/netdev"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/hook"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/rtnl"
)

// MTU is the MTU of the devices, the maximum that the kernel allows: 65,535 bytes with the Ethernet header. Packets of a
// pod with any MTU fit.
const MTU = 65535 - 14

// File is the device node by which TAP devices are made.
const File = "/dev/net/tun"

// ErrTaken is returned if the name of the device belongs to a device that Sluice did not make.
var ErrTaken = errors.New("taken by a device that Sluice did not create")

// Options are the options of a Device. All except Programs, ProcSysNet, File and Filters are required.
type Options struct {
	// Home is the node's network namespace. The caller keeps it open.
	Home     *netns.Namespace
	Instance string
	// Kind is the kind of proxy. It is part of the device's name.
	Kind policytable.Proxy
	// Queue is the length of the queue in packets.
	Queue int
	// Programs returns the most recently loaded programs of the device; nil: none.
	Programs func() []*program.Program
	// ProcSysNet is the directory of the sysctls; "": /proc/sys/net.
	ProcSysNet string
	// File is the path of the device node; "": /dev/net/tun.
	File string
	// Filters attaches the programs as clsact filters even if the kernel supports tcx.
	Filters bool
}

// Device is the TAP device of one kind of proxy. Its methods may be called concurrently.
type Device struct {
	o     Options
	name  string
	group uint32

	links *netlink.Handle
	conn  *rtnl.Conn
	hooks *hook.Hooks

	mu      sync.Mutex
	queue   int   // the open File, -1 if it is not open; it becomes a queue of the device; guarded by mu
	missing error // why it could not be opened; final after Open
	made    bool  // the queue was attached to the device; guarded by mu
}

// Name returns the name of an instance's device for a kind of proxy. It cannot collide with the names of endpoint
// devices, which continue with a hexadecimal digit.
func Name(instance string, kind policytable.Proxy) string {
	sum := sha256.Sum256([]byte("proxy\x00" + kind.String() + "\x00" + instance))
	return "slp" + hex.EncodeToString(sum[:])[:10]
}

// Open opens the device node and the netlink sockets in the node's namespace. It makes no device. A device node that
// cannot be opened is not an error: see Usable.
func Open(o Options) (_ *Device, err error) {
	o.ProcSysNet, o.File = cmp.Or(o.ProcSysNet, sysctls), cmp.Or(o.File, File)
	d := &Device{o: o, name: Name(o.Instance, o.Kind), group: netdev.ProxyGroup(o.Instance), queue: -1}
	err = o.Home.Do(func() error {
		// The kernel makes the device in the namespace of the thread that opens the file.
		d.openFile()
		var errs []error
		d.links, err = netlink.NewHandle(unix.NETLINK_ROUTE)
		errs = append(errs, err)
		d.conn, err = rtnl.Open()
		return errors.Join(append(errs, err)...)
	})
	if err != nil {
		d.Close()
		return nil, fmt.Errorf("open netlink in the node's namespace: %w", err)
	}
	d.hooks = &hook.Hooks{Home: o.Home, Changes: d.conn, Reads: d.conn, Filters: o.Filters}
	return d, nil
}

// openFile opens the device node. The sandbox of the process forbids opening it later. The descriptor is not an
// os.File, whose poller would wake this process for every packet.
func (d *Device) openFile() {
	queue, err := unix.Open(d.o.File, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err == nil {
		d.queue = queue
		return
	}
	next := "load the kernel module tun (modprobe tun), and restart sluice-datapath"
	switch {
	case errors.Is(err, fs.ErrPermission):
		next = "let `sluice prepare` give it to the datapath's user; in a container, allow the device 10:200, too; and " +
			"restart sluice-datapath"
	case errors.Is(err, fs.ErrNotExist):
		next = "load the kernel module tun (modprobe tun); in a container, mount the machine's /dev/net; and restart " +
			"sluice-datapath"
	}
	d.missing = fmt.Errorf("open %s, by which the device of a proxy is made: %w; %s", d.o.File, err, next)
}

// Usable returns why no device can be made, for the life of the process; nil if one can.
func (d *Device) Usable() error { return d.missing }

// Name returns the name of the device, also before it exists.
func (d *Device) Name() string { return d.name }

// MTU returns the maximum size of an IP packet of the device.
func (*Device) MTU() uint32 { return MTU }

// Close closes the queue and the sockets. The device ends with its last queue.
func (d *Device) Close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.queue >= 0 {
		unix.Close(d.queue)
		d.queue, d.made = -1, false
	}
	if d.links != nil {
		d.links.Close()
	}
	if d.conn != nil {
		d.conn.Close()
	}
}

// Adopt attaches the current programs to the device of a previous process, whose proxy still has a queue, and returns
// its index; 0 if there is no device. It takes no queue, because packets would wait in it until a proxy attaches.
func (d *Device) Adopt() (index uint32, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	l, err := d.link()
	if err != nil || l == nil {
		return 0, err
	}
	return uint32(l.Attrs().Index), d.attach(l) //nolint:gosec // an index is positive
}

// Ensure makes or repairs the device, and returns its index and the descriptor of its queue. The caller must not close
// the descriptor.
func (d *Device) Ensure() (index uint32, queue int, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.missing != nil {
		return 0, -1, d.missing
	}
	if d.queue < 0 {
		return 0, -1, fs.ErrClosed
	}
	l, err := d.link()
	if err != nil {
		return 0, -1, err
	}
	if l == nil || !d.made {
		if l, err = d.take(); err != nil {
			return 0, -1, err
		}
	}
	if err := d.repair(l); err != nil {
		return 0, -1, err
	}
	return uint32(l.Attrs().Index), d.queue, nil //nolint:gosec // an index is positive
}

// link returns the device; nil if it does not exist.
func (d *Device) link() (netlink.Link, error) {
	l, err := d.links.LinkByName(d.name)
	switch {
	case errors.As(err, new(netlink.LinkNotFoundError)):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("find the device %s of the %s proxy: %w", d.name, d.o.Kind, err)
	case l.Type() != "tuntap" || l.Attrs().Group != d.group:
		return nil, fmt.Errorf("device %s of the %s proxy: the name is %w (%s, group %d); rename or delete that device",
			d.name, d.o.Kind, ErrTaken, l.Type(), l.Attrs().Group)
	}
	return l, nil
}

// take makes the open file a queue of the device, which the kernel creates if it does not exist. After the device was
// deleted, the same file can be used again, also by a proxy that has a copy of it.
func (d *Device) take() (netlink.Link, error) {
	request, err := unix.NewIfreq(d.name)
	if err == nil {
		request.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_MULTI_QUEUE)
		err = unix.IoctlIfreq(d.queue, unix.TUNSETIFF, request)
	}
	if err != nil {
		return nil, fmt.Errorf("make the device %s of the %s proxy: %w", d.name, d.o.Kind, err)
	}
	d.made = true
	l, err := d.links.LinkByName(d.name)
	if err == nil && l.Attrs().Group != d.group {
		// Until then the device counts as foreign.
		if err = d.links.LinkSetGroup(l, int(d.group)); err == nil {
			l, err = d.links.LinkByName(d.name)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("set the group of the device %s: %w", d.name, err)
	}
	return l, nil
}

// noqueue is the root qdisc. The default one of a device with several queues takes 6 MB of the kernel's memory, and
// would be a second queue before the device's own.
const noqueue = "noqueue"

// repair changes what differs. The device carries packets only after its programs are attached.
func (d *Device) repair(l netlink.Link) error {
	a := l.Attrs()
	var errs []error
	do := func(what string, err error) {
		if err != nil {
			errs = append(errs, fmt.Errorf("%s of the device %s: %w", what, d.name, err))
		}
	}
	if a.MTU != MTU {
		do("MTU", d.links.LinkSetMTU(l, MTU))
	}
	if a.TxQLen != d.o.Queue {
		do("queue length", d.links.LinkSetTxQLen(l, d.o.Queue))
	}
	do("sysctls", d.o.Home.Do(func() error {
		return d.eachSysctl(func(path, want, _ string) error {
			return os.WriteFile(filepath.Join(d.o.ProcSysNet, path), []byte(want), 0)
		})
	}))
	if kind, err := d.qdisc(l); err != nil || kind != noqueue {
		q := &netlink.GenericQdisc{
			QdiscAttrs: netlink.QdiscAttrs{LinkIndex: a.Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT},
			QdiscType:  noqueue,
		}
		do("qdisc", errors.Join(err, d.links.QdiscReplace(q)))
	}
	do("programs", d.attach(l))
	// No addresses are resolved on it.
	if a.RawFlags&unix.IFF_NOARP == 0 {
		do("ARP", d.links.LinkSetARPOff(l))
	}
	if len(errs) == 0 && a.RawFlags&unix.IFF_UP == 0 {
		do("state", d.links.LinkSetUp(l))
	}
	return errors.Join(errs...)
}

// attach attaches missing programs.
func (d *Device) attach(l netlink.Link) error {
	programs := d.programs()
	if len(programs) == 0 {
		return nil
	}
	host := hostDevice(l)
	diffs, err := d.hooks.CheckFirst(host, programs)
	if err != nil || len(diffs) == 0 {
		return err
	}
	return d.hooks.AttachFirst(host, programs)
}

func (d *Device) programs() []*program.Program {
	if d.o.Programs == nil {
		return nil
	}
	return d.o.Programs()
}

func hostDevice(l netlink.Link) endpoint.HostDevice {
	return endpoint.HostDevice{Name: l.Attrs().Name, Index: uint32(l.Attrs().Index)} //nolint:gosec // an index is positive
}

// qdisc returns the kind of the root qdisc; "" if the device has none, as before it is up.
func (d *Device) qdisc(l netlink.Link) (string, error) {
	all, err := d.links.QdiscList(l)
	if err != nil {
		return "", err
	}
	for _, q := range all {
		if q.Attrs().Parent == netlink.HANDLE_ROOT {
			return q.Type(), nil
		}
	}
	return "", nil
}

const sysctls = "/proc/sys/net"

// settings are sysctls of the device. The stack must send no packet of its own to the proxy.
var settings = map[string]string{"addr_gen_mode": "1", "disable_ipv6": "1"}

// eachSysctl calls fn with the sysctls that differ. The calling thread is in the node's namespace.
func (d *Device) eachSysctl(fn func(path, want, have string) error) error {
	for name, want := range settings {
		path := filepath.Join("ipv6/conf", d.name, name)
		have, err := os.ReadFile(filepath.Join(sysctls, path))
		if errors.Is(err, fs.ErrNotExist) {
			continue // a kernel without IPv6
		}
		if value := strings.TrimSpace(string(have)); err == nil && value != want {
			err = fn(path, want, value)
		}
		if err != nil {
			return fmt.Errorf("sysctl net/%s=%s: %w", path, want, err)
		}
	}
	return nil
}

type differences []endpoint.Difference

func (ds *differences) add(subject, key, want, have string) {
	*ds = append(*ds, endpoint.Difference{Subject: subject, Key: key, Want: want, Have: have})
}

// Check compares the device with what Ensure makes. Without Ensure, no device is expected, and the device of a
// previous process is not compared.
func (d *Device) Check() ([]endpoint.Difference, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.made {
		return nil, nil
	}
	var ds differences
	l, err := d.link()
	switch {
	case errors.Is(err, ErrTaken):
		ds.add("proxy device", d.name, "a TAP device of Sluice", err.Error())
		return ds, nil
	case err != nil:
		return nil, err
	case l == nil:
		ds.add("proxy device", d.name, "a TAP device", "")
		return ds, nil
	}
	a := l.Attrs()
	if a.RawFlags&unix.IFF_UP == 0 {
		ds.add("device state", d.name, "up", "down")
	}
	if a.RawFlags&unix.IFF_NOARP == 0 {
		ds.add("device flags", d.name, "noarp", "")
	}
	if a.MTU != MTU {
		ds.add("device mtu", d.name, strconv.Itoa(MTU), strconv.Itoa(a.MTU))
	}
	if a.TxQLen != d.o.Queue {
		ds.add("device queue", d.name, strconv.Itoa(d.o.Queue), strconv.Itoa(a.TxQLen))
	}
	kind, err := d.qdisc(l)
	if err != nil {
		return nil, fmt.Errorf("list the qdiscs of %s: %w", d.name, err)
	}
	if kind != noqueue {
		ds.add("device qdisc", d.name, noqueue, kind)
	}
	err = d.o.Home.Do(func() error {
		return d.eachSysctl(func(path, want, have string) error { ds.add("sysctl", "net/"+path, want, have); return nil })
	})
	if err != nil {
		return nil, err
	}
	if programs := d.programs(); len(programs) > 0 {
		diffs, err := d.hooks.CheckFirst(hostDevice(l), programs)
		if err != nil {
			return nil, err
		}
		ds = append(ds, diffs...)
	}
	return ds, nil
}

// Remove deletes the device if it exists. A foreign device with the name is not removed.
func (d *Device) Remove() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	l, err := d.link()
	if errors.Is(err, ErrTaken) || err == nil && l == nil {
		return nil
	}
	if err == nil {
		err = d.links.LinkDel(l)
	}
	if err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("delete the device %s of the %s proxy: %w", d.name, d.o.Kind, err)
	}
	d.made = false
	return nil
}
