// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package tap

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns/netnstest"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

const queueLength = 512

// load loads a program that lets everything pass; programs of different versions differ.
func load(t *testing.T, version int32) []*program.Program {
	t.Helper()
	spec := program.Spec{Name: program.FromTap, Devices: program.Taps, Hook: program.Ingress}
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: spec.Name, Type: ebpf.SchedCLS, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R1, version), asm.Mov.Imm(asm.R0, -1), asm.Return()},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { prog.Close() })
	info, err := prog.Info()
	if err != nil {
		t.Fatal(err)
	}
	id, _ := info.ID()
	return []*program.Program{{Spec: spec, Prog: prog, ID: id, Tag: info.Tag}}
}

type node struct {
	t  *testing.T
	ns *netns.Namespace
}

func newNode(t *testing.T) node { return node{t, netnstest.New(t)} }

// open opens a device with the given programs.
func (n node) open(o Options) *Device {
	n.t.Helper()
	o.Home, o.Instance, o.Kind, o.Queue = n.ns, "test", policytable.ProxyDNS, queueLength
	d, err := Open(o)
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(d.Close)
	return d
}

func (n node) ensure(d *Device) (index uint32, queue int) {
	n.t.Helper()
	index, queue, err := d.Ensure()
	if err != nil {
		n.t.Fatal(err)
	}
	return index, queue
}

// clean fails unless the device has no differences.
func (n node) clean(d *Device) {
	n.t.Helper()
	if diffs, err := d.Check(); err != nil || len(diffs) > 0 {
		n.t.Errorf("differences after Ensure: %v, %v", diffs, err)
	}
}

func (n node) run(name string, args ...string) (text string, err error) {
	err = n.ns.Do(func() error {
		out, err := exec.Command(name, args...).CombinedOutput()
		text = string(out)
		return err
	})
	return text, err
}

func (n node) must(command string) string {
	n.t.Helper()
	words := strings.Fields(command)
	text, err := n.run(words[0], words[1:]...)
	if err != nil {
		n.t.Fatalf("%s: %v: %s", command, err, text)
	}
	return text
}

// exists reports whether the device exists.
func (n node) exists() bool {
	_, err := n.run("ip", "link", "show", "dev", Name("test", policytable.ProxyDNS))
	return err == nil
}

const experimental = 0x88b5 // IEEE 802, for local experiments

// frame returns an Ethernet frame with an experimental type, a number and a flow in it.
func frame(number uint32) []byte {
	b := append(bytes.Repeat([]byte{2}, 12), byte(experimental>>8), byte(experimental&0xff))
	b = binary.BigEndian.AppendUint32(b, number)
	return append(b, make([]byte, 64)...)
}

// wire is a packet socket on the device.
func (n node) wire(index uint32) int {
	n.t.Helper()
	fd := -1
	err := n.ns.Do(func() (err error) {
		const order = experimental>>8 | experimental&0xff<<8 // network order
		fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, order)
		if err == nil {
			err = unix.Bind(fd, &unix.SockaddrLinklayer{Ifindex: int(index), Protocol: order})
		}
		return err
	})
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { unix.Close(fd) })
	return fd
}

// send sends frames out of the device, into its queues.
func (n node) send(wire int, numbers ...uint32) {
	n.t.Helper()
	for _, number := range numbers {
		if _, err := unix.Write(wire, frame(number)); err != nil {
			n.t.Fatal(err)
		}
	}
}

// receive reads frames until they have the given numbers, in any order.
func (n node) receive(from []int, numbers ...uint32) {
	n.t.Helper()
	servicetest.EventuallyNil(n.t, "frames arrive", func() error {
		for _, fd := range from {
			b := make([]byte, 2048)
			size, err := unix.Read(fd, b)
			if errors.Is(err, unix.EAGAIN) {
				continue
			}
			if err != nil {
				n.t.Fatal(err)
			}
			if size < 18 || binary.BigEndian.Uint16(b[12:]) != experimental {
				n.t.Fatalf("a frame of the stack: %x", b[:size])
			}
			number := binary.BigEndian.Uint32(b[14:])
			if !slices.Contains(numbers, number) {
				n.t.Fatalf("frame %d, want one of %v", number, numbers)
			}
			numbers = slices.DeleteFunc(numbers, func(x uint32) bool { return x == number })
		}
		if len(numbers) > 0 {
			return unix.EAGAIN
		}
		return nil
	})
}

// list returns programs in the form that Options need.
func list(programs []*program.Program) func() []*program.Program {
	return func() []*program.Program { return programs }
}

func duplicate(t *testing.T, fd int) (other int, release func()) {
	t.Helper()
	other, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	release = func() { unix.Close(other) }
	return other, release
}

func TestKernelQueueCarriesFramesBothWays(t *testing.T) {
	n := newNode(t)
	d := n.open(Options{Programs: func() []*program.Program { return nil }})
	index, queue := n.ensure(d)
	n.clean(d)
	wire := n.wire(index)
	n.send(wire, 1, 2)
	n.receive([]int{queue}, 1, 2) // and nothing that the stack sends
	if _, err := unix.Write(queue, frame(3)); err != nil {
		t.Fatal(err)
	}
	n.receive([]int{wire}, 3)
	if again, same := n.ensure(d); again != index || same != queue {
		t.Errorf("the second time device %d with queue %d, want %d with %d", again, same, index, queue)
	}
}

// TestKernelQueueHasItsLength: further frames are dropped, and block nothing.
func TestKernelQueueHasItsLength(t *testing.T) {
	n := newNode(t)
	d := n.open(Options{})
	index, queue := n.ensure(d)
	wire, b := n.wire(index), make([]byte, 2048)
	for round := range 2 { // the second time after the queue was full
		for i := range uint32(2 * queueLength) {
			if _, err := unix.Write(wire, frame(i)); err != nil && !errors.Is(err, unix.ENOBUFS) {
				t.Fatal(err)
			}
		}
		held := 0
		for ; ; held++ {
			if _, err := unix.Read(queue, b); errors.Is(err, unix.EAGAIN) {
				break
			} else if err != nil {
				t.Fatal(err)
			}
		}
		if held != queueLength {
			t.Errorf("round %d: the queue held %d frames, want %d", round, held, queueLength)
		}
	}
}

// TestKernelQueueHoldsFramesForTheNextReader: the frames that a killed proxy has not read reach the next one.
func TestKernelQueueHoldsFramesForTheNextReader(t *testing.T) {
	n := newNode(t)
	d := n.open(Options{})
	index, queue := n.ensure(d)
	first, kill := duplicate(t, queue)
	wire := n.wire(index)
	n.send(wire, 1, 2, 3)
	n.receive([]int{first}, 1)
	kill()
	second, release := duplicate(t, queue)
	defer release()
	n.receive([]int{second}, 2, 3)
}

// TestKernelRestartWithALivingReader: the device outlives the datapath while a proxy has a queue. The next process
// attaches its programs at once, takes a queue of its own, and is alone when the proxy has closed the old one.
func TestKernelRestartWithALivingReader(t *testing.T) {
	n := newNode(t)
	first := n.open(Options{Programs: list(load(t, 1))})
	index, queue := n.ensure(first)
	old, kill := duplicate(t, queue)
	first.Close()
	if !n.exists() {
		t.Fatal("the device has ended under its reader")
	}
	programs := load(t, 2)
	second := n.open(Options{Programs: list(programs)})
	adopted, err := second.Adopt()
	if err != nil || adopted != index {
		t.Fatalf("adopted device %d (%v), want %d", adopted, err, index)
	}
	d, err := second.link()
	if err != nil {
		t.Fatal(err)
	}
	if diffs, err := second.hooks.CheckFirst(hostDevice(d), programs); err != nil || len(diffs) > 0 {
		t.Errorf("the adopted device has the programs of the former process: %v, %v", diffs, err)
	}
	wire := n.wire(index)
	n.send(wire, 1, 2) // the adopted device has one queue, its reader's
	n.receive([]int{old}, 1, 2)
	again, queue := n.ensure(second)
	if again != index {
		t.Errorf("device %d, want %d", again, index)
	}
	n.clean(second)
	n.send(wire, 3, 4, 5, 6)
	n.receive([]int{old, queue}, 3, 4, 5, 6)
	kill()
	n.send(wire, 7, 8)
	n.receive([]int{queue}, 7, 8)
}

func TestKernelNothingIsLeftAfterTheLastQueue(t *testing.T) {
	n := newNode(t)
	d := n.open(Options{Programs: list(load(t, 1))})
	n.ensure(d)
	d.Close()
	if n.exists() {
		t.Error("the device outlives its queues")
	}
	if _, _, err := d.Ensure(); err == nil {
		t.Error("a closed device was made again")
	}
}

// TestKernelDeletedDeviceIsMadeAgain: the readers of the queue receive the frames of the new device, too.
func TestKernelDeletedDeviceIsMadeAgain(t *testing.T) {
	n := newNode(t)
	d := n.open(Options{Programs: list(load(t, 1))})
	_, queue := n.ensure(d)
	reader, release := duplicate(t, queue)
	defer release()
	n.must("ip link del dev " + d.Name())
	diffs, err := d.Check()
	if err != nil || len(diffs) != 1 || diffs[0].Subject != "proxy device" || diffs[0].Have != "" {
		t.Errorf("differences %v, %v, want that there is no device", diffs, err)
	}
	index, _ := n.ensure(d)
	n.clean(d)
	n.send(n.wire(index), 1)
	n.receive([]int{reader}, 1)
}

// TestKernelChangesAreFoundAndRepaired changes each property of the device.
func TestKernelChangesAreFoundAndRepaired(t *testing.T) {
	for name, filters := range map[string]bool{"tcx": false, "filters": true} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			programs := load(t, 1)
			d := n.open(Options{Programs: list(programs), Filters: filters})
			if diffs, err := d.Check(); err != nil || len(diffs) > 0 {
				t.Errorf("differences before the device is made: %v, %v", diffs, err)
			}
			n.ensure(d)
			n.clean(d)
			for change, subject := range map[string]string{
				"ip link set NAME down":                              "device state",
				"ip link set NAME arp on":                            "device flags",
				"ip link set NAME mtu 1500":                          "device mtu",
				"ip link set NAME txqueuelen 7":                      "device queue",
				"tc qdisc replace dev NAME root pfifo":               "device qdisc",
				"sysctl -q -w net.ipv6.conf.NAME.disable_ipv6=0":     "sysctl",
				"sysctl -q -w net.ipv6.conf.NAME.addr_gen_mode=0":    "sysctl",
				"ip link set NAME group 7":                           "proxy device",
				"ip link set NAME arp on mtu 1500 txqueuelen 9 down": "device mtu",
			} {
				n.must(strings.ReplaceAll(change, "NAME", d.Name()))
				diffs, err := d.Check()
				if err != nil || !slices.ContainsFunc(diffs, func(x endpoint.Difference) bool { return x.Subject == subject }) {
					t.Errorf("%s: differences %v, %v, want one of %q", change, diffs, err, subject)
				}
				if subject == "proxy device" {
					if _, _, err := d.Ensure(); !errors.Is(err, ErrTaken) {
						t.Errorf("%s: made the device with %v, want %v", change, err, ErrTaken)
					}
					n.must(fmt.Sprintf("ip link set %s group %d", d.Name(), d.group))
				}
				n.ensure(d)
				n.clean(d)
			}
		})
	}
}

func TestKernelMissingProgramIsAttachedAgain(t *testing.T) {
	n := newNode(t)
	programs := load(t, 1)
	d := n.open(Options{Programs: func() []*program.Program { return programs }})
	n.ensure(d)
	programs = load(t, 2) // as after a reload
	if diffs, err := d.Check(); err != nil || len(diffs) != 1 || diffs[0].Subject != "filter" {
		t.Errorf("differences %v, %v, want one of the program", diffs, err)
	}
	n.ensure(d)
	n.clean(d)
}

func TestKernelForeignDeviceStays(t *testing.T) {
	n := newNode(t)
	d := n.open(Options{})
	n.must("ip link add " + d.Name() + " type veth peer name far")
	if _, _, err := d.Ensure(); !errors.Is(err, ErrTaken) || !strings.Contains(err.Error(), d.Name()) {
		t.Errorf("made the device with %v, want %v", err, ErrTaken)
	}
	if _, err := d.Adopt(); !errors.Is(err, ErrTaken) {
		t.Errorf("adopted the device with %v, want %v", err, ErrTaken)
	}
	if err := d.Remove(); err != nil || !n.exists() {
		t.Errorf("removed a foreign device (%v)", err)
	}
}

func TestKernelRemoveDeletesTheDeviceOfALivingReader(t *testing.T) {
	n := newNode(t)
	d := n.open(Options{})
	n.ensure(d)
	other := n.open(Options{})
	if err := errors.Join(other.Remove(), other.Remove()); err != nil || n.exists() {
		t.Errorf("the device is there after Remove (%v)", err)
	}
}

// TestKernelUnusableFileIsNamed: without the device node no device is made, and the error names the node and the next
// step.
func TestKernelUnusableFileIsNamed(t *testing.T) {
	n := newNode(t)
	missing := filepath.Join(t.TempDir(), "tun")
	d := n.open(Options{File: missing})
	_, _, err := d.Ensure()
	if err == nil || !errors.Is(err, d.Usable()) || !strings.Contains(err.Error(), missing) ||
		!strings.Contains(err.Error(), "modprobe tun") {
		t.Errorf("made the device with %v, want the path and the module", err)
	}
	if n.exists() {
		t.Error("there is a device")
	}
	// a file that is no TUN device
	if err := os.WriteFile(missing, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := n.open(Options{File: missing}).Ensure(); !errors.Is(err, unix.ENOTTY) {
		t.Errorf("made the device with %v, want %v", err, unix.ENOTTY)
	}
}

func TestNameIsOfInstanceAndKind(t *testing.T) {
	names := map[string]bool{}
	for _, instance := range []string{"", "a", "b"} {
		for _, kind := range []policytable.Proxy{policytable.ProxyDNS, policytable.ProxyHTTP} {
			name := Name(instance, kind)
			if len(name) > 15 || names[name] {
				t.Errorf("name %q of instance %q and %s", name, instance, kind)
			}
			names[name] = true
		}
	}
}
