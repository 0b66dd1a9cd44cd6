// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package capture

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/test/nodetest"
)

// parsed is the content of a file.
type parsed struct {
	name, description string
	packets           []packet
	received, lost    uint64
}

// parse parses a file with one interface, which must end with a statistics block.
func parse(t *testing.T, b []byte) (p parsed) {
	t.Helper()
	le := binary.LittleEndian
	var last uint32
	options := func(b []byte) map[uint16][]byte {
		m := map[uint16][]byte{}
		for len(b) >= 4 && le.Uint16(b) != 0 {
			n := int(le.Uint16(b[2:]))
			m[le.Uint16(b)] = b[4 : 4+n]
			b = b[4+(n+3)&^3:]
		}
		return m
	}
	for len(b) > 0 {
		if len(b) < 12 {
			t.Fatalf("%d bytes after the last block", len(b))
		}
		size := le.Uint32(b[4:])
		if size%4 != 0 || int(size) > len(b) || le.Uint32(b[size-4:]) != size {
			t.Fatalf("a block of %d bytes", size)
		}
		body := b[8 : size-4]
		switch last = le.Uint32(b); last {
		case blockInterface:
			o := options(body[8:])
			p.name, p.description = string(o[optionInterfaceName]), string(o[optionInterfaceDescription])
		case blockPacket:
			n := le.Uint32(body[12:])
			at := time.Unix(0, int64(uint64(le.Uint32(body[4:]))<<32|uint64(le.Uint32(body[8:]))))
			p.packets = append(p.packets, packet{
				time: at, data: body[20 : 20+n], length: int(le.Uint32(body[16:])),
				outgoing: le.Uint32(options(body[20+(n+3)&^3:])[optionPacketFlags]) == 2,
			})
		case blockStatistics:
			o := options(body[12:])
			p.received, p.lost = le.Uint64(o[optionStatisticsReceived]), le.Uint64(o[optionStatisticsDropped])
		}
		b = b[size:]
	}
	if last != blockStatistics {
		t.Errorf("the last block is %#x", last)
	}
	return p
}

// namespace creates a network namespace with a loopback device that is up.
func namespace(t *testing.T) (d device, send func(port, size int)) {
	t.Helper()
	ready, stop := make(chan error, 1), make(chan struct{})
	var conn *net.UDPConn
	go func() {
		runtime.LockOSThread() // never unlocked: the thread exits with its namespace
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			ready <- err
			return
		}
		d = device{namespace: fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid()), name: "lo", index: 1}
		var err error
		if err = up("lo"); err == nil {
			conn, err = net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 9999})
		}
		ready <- err
		<-stop
	}()
	if err := <-ready; err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		conn.Close()
		close(stop)
	})
	return d, func(port, size int) {
		t.Helper()
		if _, err := conn.WriteTo(make([]byte, size), &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1), Port: port}); err != nil {
			t.Fatal(err)
		}
	}
}

// up sets an interface of the thread's namespace up.
func up(name string) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	r, err := unix.NewIfreq(name)
	if err != nil {
		return err
	}
	r.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, r)
}

// captured runs a capture while the test sends packets.
func captured(t *testing.T, o Flags, f filter, d device, do func()) (parsed, string) {
	t.Helper()
	program, err := f.compile(o.snaplen)
	if err != nil {
		t.Fatal(err)
	}
	s, err := openSocket(d, program, int(o.buffer))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	var out bytes.Buffer
	w := &writer{out: &out}
	w.add(fileHeader(nil, "test", d.name, "a test", o.snaplen))
	ctx, cancel := context.WithCancel(t.Context())
	do()
	if o.count == 0 && o.maxSize == 0 {
		cancel() // after all packets were sent
	}
	end, err := o.copy(ctx, s, w)
	cancel()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.count(); err != nil {
		t.Fatal(err)
	}
	w.add(statisticsBlock(nil, time.Now(), s.seen, s.lost))
	if err := w.close(); err != nil {
		t.Fatal(err)
	}
	return parse(t, out.Bytes()), end
}

// udp ignores the errors of a closed port.
var udp = filter{protocols: []uint8{17}}

func TestKernelCaptureHasBothDirections(t *testing.T) {
	d, send := namespace(t)
	before := time.Now()
	got, _ := captured(t, Flags{snaplen: 60, buffer: 2 * blockSize}, filter{ports: []uint16{53}}, d, func() {
		send(53, 1000)
		send(54, 1000)
		send(53, 10)
	})
	// Packets on the loopback device are seen twice.
	if len(got.packets) != 4 || got.received != 4 || got.lost != 0 || got.name != "lo" || got.description != "a test" {
		t.Fatalf("%d packets, %+v", len(got.packets), got)
	}
	for i, p := range got.packets {
		want := []int{1042, 1042, 52, 52}[i]
		if p.length != want || len(p.data) != min(want, 60) || p.outgoing != (i%2 == 0) || p.time.Before(before) ||
			binary.BigEndian.Uint16(p.data[36:]) != 53 {
			t.Errorf("packet %d: %+v", i, p)
		}
	}
}

func TestKernelCaptureCountsWhatItLoses(t *testing.T) {
	d, send := namespace(t)
	got, _ := captured(t, Flags{snaplen: whole, buffer: 2 * blockSize}, udp, d, func() {
		for range 10000 {
			send(53, 1000)
		}
	})
	if got.lost == 0 || got.received != 20000 || uint64(len(got.packets))+got.lost != got.received {
		t.Errorf("%d packets, %d lost of %d, want 20000 in all", len(got.packets), got.lost, got.received)
	}
}

func TestKernelCaptureEndsAtItsBounds(t *testing.T) {
	d, send := namespace(t)
	some := func() {
		for range 10 {
			send(53, 1000)
		}
	}
	o := Flags{snaplen: whole, buffer: 2 * blockSize, count: 3}
	if got, _ := captured(t, o, udp, d, some); len(got.packets) != 3 {
		t.Errorf("%d packets, want 3", len(got.packets))
	}
	o = Flags{snaplen: whole, buffer: 2 * blockSize, maxSize: 5000}
	if got, end := captured(t, o, udp, d, some); len(got.packets) != 4 || !strings.Contains(end, "size") {
		t.Errorf("%d packets and %q, want 4", len(got.packets), end)
	}
}

func TestKernelCaptureRefusesOtherInterfaces(t *testing.T) {
	d, _ := namespace(t)
	program, err := filter{}.compile(whole)
	if err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*device){
		"another index":   func(d *device) { d.index = 2 },
		"another address": func(d *device) { d.mac = "02:00:00:00:00:01" },
		"another name":    func(d *device) { d.name = "eth0" },
	} {
		other := d
		change(&other)
		if s, err := openSocket(other, program, 2*blockSize); !errors.Is(err, errOtherInterface) {
			t.Errorf("%s: %v, %v", name, s, err)
		}
	}
	d.namespace = filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(d.namespace, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := openSocket(d, program, 2*blockSize); err == nil || !strings.Contains(err.Error(), "is no namespace") {
		t.Errorf("a file: %v", err)
	}
}

func TestCaptureOfNothingChangesNoFile(t *testing.T) {
	n := nodetest.New(t, Command)
	path := nodetest.Write(t, t.TempDir(), "web.pcapng", "what was there")
	// The fake's containers have no namespaces.
	_, errOut := n.Want(t, invocation.ExitFailed, "capture", "0123", "-w", path)
	if content, err := os.ReadFile(path); err != nil || string(content) != "what was there" ||
		!strings.Contains(errOut, "/run/netns/x: no such file") {
		t.Errorf("file %q, %v, standard error %s", content, err, errOut)
	}
	_, errOut = n.Want(t, invocation.ExitFailed, "capture", "nope")
	if !strings.Contains(errOut, "no container or pod nope") {
		t.Errorf("standard error %s", errOut)
	}
	for _, bad := range [][]string{
		{},
		{"a", "b"},
		{"0123", "--port", "70000"},
		{"0123", "--address", "x"},
		{"0123", "--protocol", "300"},
		{"0123", "--snaplen", "300000"},
		{"0123", "--buffer", "1K"},
		{"0123", "--duration", "-1s"},
		{"0123", "--max-size", "x"},
	} {
		n.Want(t, invocation.ExitUsage, append([]string{"capture"}, bad...)...)
	}
}

func TestCaptureFileIsOnesOwnAndEndsWithAWholeBlock(t *testing.T) {
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	path := filepath.Join(dir, "f")
	old := fileHeader(nil, "test", "eth0", "an earlier test", whole)
	if err := os.WriteFile(path, old, 0o644); err != nil { //nolint:gosec // meant
		t.Fatal(err)
	}
	w, err := (&Flags{file: path}).open(nil)
	if err != nil {
		t.Fatal(err)
	}
	w.add(fileHeader(nil, "test", "eth0", "a test", whole))
	w.add(statisticsBlock(nil, time.Now(), 1, 0))
	for err = w.flush(); err == nil; err = w.flush() {
		w.add(packetBlock(nil, packet{data: make([]byte, 9000), length: 9000}))
		w.add(statisticsBlock(nil, time.Now(), 1, 0))
	}
	if !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("ended with %v", err)
	}
	if err := w.close(); err != nil {
		t.Error(err)
	}
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got := parse(t, content); len(got.packets) == 0 {
		t.Error("nothing was written")
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	link := filepath.Join(dir, "link")
	if err := os.Symlink(path, link); err != nil {
		t.Fatal(err)
	}
	foreign, twice := filepath.Join(dir, "foreign"), filepath.Join(dir, "twice")
	err = errors.Join(os.WriteFile(foreign, nil, 0o600), os.Chown(foreign, 65534, 0), os.Link(path, twice))
	if err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{link, dir, "/dev/null", foreign, twice} {
		if _, err := (&Flags{file: bad}).open(nil); err == nil {
			t.Errorf("%s was opened", bad)
		}
	}
}

// TestACaptureReplacesOnlyCaptures: a file of another kind keeps its content and mode without --force.
func TestACaptureReplacesOnlyCaptures(t *testing.T) {
	path := filepath.Join(t.TempDir(), "precious.conf")
	for _, text := range []string{"key = value\n", "\n", "\x0a\x0d\x0d"} {
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil { //nolint:gosec // meant
			t.Fatal(err)
		}
		_, err := (&Flags{file: path}).open(nil)
		if err == nil || !strings.Contains(err.Error(), path+": it exists and is not a pcapng capture") {
			t.Errorf("%q: %v", text, err)
		}
		content, rerr := os.ReadFile(path)
		info, serr := os.Stat(path)
		if err := errors.Join(rerr, serr); err != nil || string(content) != text || info.Mode().Perm() != 0o644 {
			t.Errorf("after the refusal: %q, %v, %v", content, info.Mode(), err)
		}
	}
	w, err := (&Flags{file: path, force: true}).open(nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := w.close(); err != nil {
		t.Error(err)
	}
	if info, err := os.Stat(path); err != nil || info.Size() != 0 || info.Mode().Perm() != 0o600 {
		t.Errorf("with --force: %v, %v", info, err)
	}
}
