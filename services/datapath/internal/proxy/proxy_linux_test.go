// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package proxy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/rpc"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/proxymap"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// device is a fake device, whose queue is a pipe.
type device struct {
	mu      sync.Mutex
	index   uint32
	queue   int
	adopted uint32
	unknown error // of Adopt
	err     error // of Ensure
	diffs   []endpoint.Difference
}

func (*device) Name() string { return "tap" }
func (*device) MTU() uint32  { return 1500 }

func (d *device) Usable() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.err
}

func (d *device) Adopt() (uint32, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.adopted, d.unknown
}

func (d *device) Ensure() (uint32, int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.index, d.queue, d.err
}

func (d *device) Check() ([]endpoint.Difference, error) { return d.diffs, nil }

func (d *device) set(index uint32, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.index, d.err = index, err
}

// maps is the state that programs would see.
type maps struct {
	mu    sync.Mutex
	state proxymap.Proxy
	beat  time.Duration
}

func (m *maps) Get(policytable.Proxy) (proxymap.Proxy, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.state, nil
}

func (m *maps) Set(_ policytable.Proxy, s proxymap.Proxy) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.state = s
	return nil
}

// put changes what the programs see, and the last heartbeat.
func (m *maps) put(s proxymap.Proxy, beat time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.state, m.beat = s, beat
}

func (m *maps) LastHeartbeat(policytable.Proxy) (time.Duration, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.beat, nil
}

// world is a Proxy with fakes around it.
type world struct {
	*Proxy
	t      *testing.T
	device *device
	maps   *maps
	socket string
	pipe   [2]int // a frame written to 1 is in the queue
}

// newWorld returns a world with device 7, that is not running.
func newWorld(t *testing.T) *world {
	t.Helper()
	dir, err := os.MkdirTemp("", "proxy")
	if err == nil {
		err = os.Chmod(dir, 0o755) // other users connect
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	w := &world{t: t, maps: &maps{}, socket: filepath.Join(dir, "proxy.sock")}
	if err := unix.Pipe2(w.pipe[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(w.pipe[0]); unix.Close(w.pipe[1]) })
	memory, err := unix.MemfdCreate("heartbeats", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(memory) })
	w.device = &device{index: 7, queue: w.pipe[0]}
	w.Proxy = Open(Options{
		Kind: policytable.ProxyDNS, Device: w.device, Maps: w.maps, Heartbeats: memory,
		Listen: func() (net.Listener, error) {
			return rpc.Listen(w.socket, rpc.ListenOptions{Packets: true, Mode: 0o666})
		},
		Encode: func(a Attachment) ([]byte, error) { return fmt.Appendf(nil, "%+v", a), nil },
		Users:  []uint32{0, 65710}, Return: time.Hour, Log: log.Discard(),
	})
	return w
}

// start runs the Proxy until the returned function is called.
func (w *world) start() (stop func()) {
	w.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- w.Run(ctx) }()
	servicetest.EventuallyNil(w.t, "the socket is there", func() error { _, err := os.Stat(w.socket); return err })
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			w.t.Errorf("ended with %v", err)
		}
	})
	w.t.Cleanup(stop)
	return stop
}

func (w *world) dial() *net.UnixConn {
	w.t.Helper()
	c, err := net.Dial("unixpacket", w.socket)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { c.Close() })
	return c.(*net.UnixConn)
}

// receive reads the message for a proxy with its descriptors.
func (w *world) receive(c *net.UnixConn) (message string, files []int) {
	w.t.Helper()
	data, control := make([]byte, 1024), make([]byte, 256)
	n, m, _, _, err := c.ReadMsgUnix(data, control)
	if err != nil {
		w.t.Fatal(err)
	}
	messages, err := unix.ParseSocketControlMessage(control[:m])
	if err == nil && len(messages) == 1 {
		files, err = unix.ParseUnixRights(&messages[0])
	}
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() {
		for _, fd := range files {
			unix.Close(fd)
		}
	})
	return string(data[:n]), files
}

// becomes waits until the programs see a state.
func (w *world) becomes(want proxymap.Proxy) {
	w.t.Helper()
	servicetest.EventuallyNil(w.t, "the state of the programs", func() error {
		if have, _ := w.maps.Get(policytable.ProxyDNS); have != want {
			return fmt.Errorf("%+v, want %+v", have, want)
		}
		return nil
	})
}

func (w *world) closed(c net.Conn) {
	w.t.Helper()
	if _, err := c.Read(make([]byte, 16)); !errors.Is(err, io.EOF) {
		w.t.Errorf("the connection has %v, want that it is closed", err)
	}
}

func TestAProxyGetsItsQueueAndItsConnectionIsItsLease(t *testing.T) {
	w := newWorld(t)
	w.start()
	c := w.dial()
	message, files := w.receive(c)
	want := fmt.Sprintf("%+v", Attachment{
		Kind: policytable.ProxyDNS, Device: "tap", MTU: 1500,
		HeartbeatOffset: proxymap.HeartbeatOffset(policytable.ProxyDNS),
	})
	if message != want || len(files) != 2 {
		t.Fatalf("message %s with %d descriptors, want %s with 2", message, len(files), want)
	}
	w.becomes(proxymap.Proxy{Device: 7, Attached: true})
	if _, err := unix.Write(w.pipe[1], []byte("frame")); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 16)
	if n, err := unix.Read(files[0], got); err != nil || string(got[:n]) != "frame" {
		t.Errorf("the queue has %q (%v)", got[:n], err)
	}
	if err := unix.Ftruncate(files[1], 8); err != nil {
		t.Errorf("the second descriptor is not the memory of heartbeats: %v", err)
	}
	if _, err := c.Write([]byte("a proxy need not write")); err != nil {
		t.Fatal(err)
	}
	s, err := w.Status()
	if err != nil || !s.Attached || s.PID != int32(os.Getpid()) || s.HeartbeatAge != -1 || s.Problem != "" {
		t.Errorf("status %+v, %v, want it attached without a heartbeat", s, err)
	}
	for beat, want := range map[time.Duration]bool{1: false, time.Hour + time.Duration(1<<60): true} {
		w.maps.put(proxymap.Proxy{Device: 7, Attached: true}, beat)
		if s, err := w.Status(); err != nil || (s.HeartbeatAge >= 0) != want {
			t.Errorf("heartbeat at %s, written since the attachment: %t; its age is %s, %v", beat, want, s.HeartbeatAge, err)
		}
	}
	c.Close()
	w.becomes(proxymap.Proxy{Device: 7})
	if s, err := w.Status(); err != nil || s.Attached || s.Attachments != 1 {
		t.Errorf("status %+v, %v, want it absent", s, err)
	}
}

// TestASecondConnectionReplacesTheFirst: the end of the first one, later, changes nothing.
func TestASecondConnectionReplacesTheFirst(t *testing.T) {
	w := newWorld(t)
	w.start()
	first := w.dial()
	w.receive(first)
	second := w.dial()
	w.receive(second)
	w.closed(first)
	first.Close()
	third := w.dial()
	w.receive(third)
	w.closed(second)
	if have, _ := w.maps.Get(policytable.ProxyDNS); !have.Attached {
		t.Error("absent, want the last connection attached")
	}
	if s, err := w.Status(); err != nil || s.Replaced != 2 || s.Attachments != 3 {
		t.Errorf("status %+v, %v, want two replacements", s, err)
	}
}

// TestAProxyWithoutHeartbeatsIsReported: it may be stopped while its connection is open.
func TestAProxyWithoutHeartbeatsIsReported(t *testing.T) {
	w := newWorld(t)
	w.start()
	w.receive(w.dial())
	now, err := monotonic()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		ago, beat time.Duration
		reported  bool
	}{
		{-time.Hour, 0, false},              // just attached
		{time.Hour, 0, true},                // no heartbeat yet
		{time.Hour, 2, true},                // an old one
		{-time.Hour, 2, false},              // attached a moment ago
		{time.Hour, now + time.Hour, false}, // a recent one
	} {
		w.mu.Lock()
		w.current.since, w.current.began = time.Now().Add(-c.ago), 1
		w.mu.Unlock()
		w.maps.put(proxymap.Proxy{Device: 7, Attached: true}, c.beat)
		lines := w.Warnings()
		if (len(lines) == 1 && strings.Contains(lines[0], "heartbeat")) != c.reported || len(lines) > 1 {
			t.Errorf("attached %s ago, heartbeat at %s: warnings %q, want one: %t", c.ago, c.beat, lines, c.reported)
		}
	}
}

// TestAPeerThatIsGoneReplacesNoProxy: a connection that ended before it was accepted does not replace the attached
// proxy.
func TestAPeerThatIsGoneReplacesNoProxy(t *testing.T) {
	w := newWorld(t)
	l, err := w.o.Listen()
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	gone, err := net.Dial("unixpacket", w.socket)
	if err != nil {
		t.Fatal(err)
	}
	gone.Close()
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	w.accept(c.(conn))
	if have, _ := w.maps.Get(policytable.ProxyDNS); have.Attached {
		t.Error("attached although nothing was sent")
	}
	living := w.dial()
	if c, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	w.accept(c.(conn))
	w.receive(living)
	if gone, err = net.Dial("unixpacket", w.socket); err != nil {
		t.Fatal(err)
	}
	gone.Close()
	if c, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	w.accept(c.(conn))
	if s, err := w.Status(); err != nil || !s.Attached || s.Attachments != 1 || s.Failed != 2 || s.Replaced != 0 {
		t.Errorf("status %+v, %v, want the living proxy attached", s, err)
	}
	if have, _ := w.maps.Get(policytable.ProxyDNS); !have.Attached {
		t.Error("absent although a proxy is attached")
	}
	living.Close()
	w.becomes(proxymap.Proxy{Device: 7})
	w.leases.Wait()
}

// TestKernelOtherUsersAreRefused: they get nothing, and do not disturb the attached proxy.
func TestKernelOtherUsersAreRefused(t *testing.T) {
	if os.Getuid() != 0 {
		t.Fatal("needs root: it connects as several users")
	}
	w := newWorld(t)
	w.start()
	attached := w.dial()
	w.receive(attached)
	for _, uid := range []uintptr{65701, 65706, 64999} {
		c, err := servicetest.DialAs("unixpacket", w.socket, uid)
		if err != nil {
			t.Fatal(err)
		}
		w.closed(c)
		c.Close()
	}
	s, err := w.Status()
	if err != nil || s.Refused != 3 || !s.Attached || s.Attachments != 1 {
		t.Errorf("status %+v, %v, want three refused connections", s, err)
	}
	c, err := servicetest.DialAs("unixpacket", w.socket, 65710)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, files := w.receive(c.(*net.UnixConn)); len(files) != 2 {
		t.Errorf("the user of sluice-dns got %d descriptors", len(files))
	}
}

// TestADeviceThatCannotBeMade: the connection is closed, status and warnings give the reason, and a later proxy is
// attached.
func TestADeviceThatCannotBeMade(t *testing.T) {
	w := newWorld(t)
	w.device.set(0, errors.New("open /dev/net/tun: no such file"))
	if s, err := w.Status(); err != nil || !strings.Contains(s.Problem, "/dev/net/tun") {
		t.Errorf("status %+v, %v, want the reason before a proxy has connected", s, err)
	}
	if lines := w.Warnings(); len(lines) > 0 {
		t.Errorf("warnings %q without a proxy", lines)
	}
	w.start()
	w.closed(w.dial())
	servicetest.EventuallyNil(t, "the failure is reported", func() error {
		lines := w.Warnings()
		if len(lines) != 1 || !strings.Contains(lines[0], "/dev/net/tun") {
			return fmt.Errorf("warnings %q, want one with the reason", lines)
		}
		return nil
	})
	w.becomes(proxymap.Proxy{})
	w.device.set(7, nil)
	w.receive(w.dial())
	w.becomes(proxymap.Proxy{Device: 7, Attached: true})
	servicetest.EventuallyNil(t, "the warning ends", func() error {
		if lines := w.Warnings(); len(lines) > 0 {
			return fmt.Errorf("warnings %q", lines)
		}
		return nil
	})
	if s, err := w.Status(); err != nil || s.Problem != "" || s.Failed != 1 {
		t.Errorf("status %+v, %v", s, err)
	}
}

// TestTheProxyOfAPreviousProcessStaysAttachedWhileItReturns: packets continue to go to its queue. If it does not
// connect, it is absent.
func TestTheProxyOfAPreviousProcessStaysAttachedWhileItReturns(t *testing.T) {
	for name, returns := range map[string]bool{"returns": true, "does not return": false} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.maps.state, w.device.adopted = proxymap.Proxy{Device: 7, Attached: true}, 7
			if !returns {
				w.o.Return = time.Nanosecond
				w.start()
				w.becomes(proxymap.Proxy{Device: 7})
				return
			}
			w.start()
			if have, _ := w.maps.Get(policytable.ProxyDNS); !have.Attached {
				t.Error("absent before it had time to connect")
			}
			c := w.dial()
			w.receive(c)
			w.giveUp() // its time has passed
			w.becomes(proxymap.Proxy{Device: 7, Attached: true})
			c.Close()
			w.becomes(proxymap.Proxy{Device: 7})
		})
	}
}

// TestAProxyThatRunsIsNotAbsent: while its heartbeats continue, packets go to its queue, however long it takes to
// connect.
func TestAProxyThatRunsIsNotAbsent(t *testing.T) {
	attached := proxymap.Proxy{Device: 7, Attached: true}
	w := newWorld(t)
	w.device.adopted = 7
	w.maps.put(attached, now(t))
	w.start()
	for range 3 {
		w.giveUp() // its time has passed
		w.becomes(attached)
		w.maps.put(attached, now(t))
	}
	c := w.dial()
	w.receive(c)
	w.becomes(attached)
	c.Close()
	w.becomes(proxymap.Proxy{Device: 7})

	w = newWorld(t)
	w.device.adopted = 7
	w.maps.put(attached, now(t)-silence)
	w.start()
	w.becomes(attached)
	w.giveUp()
	w.becomes(proxymap.Proxy{Device: 7})
}

// TestADeviceThatIsNotKnownKeepsItsProxy: an error at the start does not say that the device is gone. The next attempt
// decides, and without one a proxy without heartbeats is absent.
func TestADeviceThatIsNotKnownKeepsItsProxy(t *testing.T) {
	attached, absent := proxymap.Proxy{Device: 7, Attached: true}, proxymap.Proxy{Device: 7}
	for name, c := range map[string]struct {
		then    uint32 // device of the next attempt
		unknown bool   // the next attempt fails, too
		runs    bool
		want    proxymap.Proxy
	}{
		"found later, runs":         {then: 7, runs: true, want: attached},
		"found later, does not run": {then: 7, want: absent},
		"gone":                      {runs: true, want: absent},
		"another device":            {then: 8, runs: true, want: absent},
		"never known, runs":         {unknown: true, runs: true, want: attached},
		"never known, does not run": {unknown: true, want: absent},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.device.unknown = errors.New("netlink: no buffer space available")
			w.maps.put(attached, now(t)-silence)
			if c.runs {
				w.maps.put(attached, now(t))
			}
			w.start()
			w.becomes(attached)
			w.device.mu.Lock()
			w.device.adopted = c.then
			if !c.unknown {
				w.device.unknown = nil
			}
			w.device.mu.Unlock()
			w.giveUp()
			w.becomes(c.want)
		})
	}
}

func now(t *testing.T) time.Duration {
	t.Helper()
	now, err := monotonic()
	if err != nil {
		t.Fatal(err)
	}
	return now
}

// TestAStateWithoutItsDeviceIsAbsent: the proxy of the previous process ended with it.
func TestAStateWithoutItsDeviceIsAbsent(t *testing.T) {
	for _, adopted := range []uint32{0, 8} {
		w := newWorld(t)
		w.maps.state, w.device.adopted = proxymap.Proxy{Device: 7, Attached: true}, adopted
		w.start()
		w.becomes(proxymap.Proxy{Device: 7})
	}
}

// TestTheStateStaysWhenTheProcessEnds: the proxy keeps its queue and is used without the datapath.
func TestTheStateStaysWhenTheProcessEnds(t *testing.T) {
	w := newWorld(t)
	stop := w.start()
	c := w.dial()
	w.receive(c)
	w.becomes(proxymap.Proxy{Device: 7, Attached: true})
	stop()
	w.closed(c)
	if have, _ := w.maps.Get(policytable.ProxyDNS); !have.Attached {
		t.Error("absent although the proxy has its queue")
	}
	if _, err := os.Stat(w.socket); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is there after the end: %v", err)
	}
}

func TestAuditFindsAndRepairsTheState(t *testing.T) {
	w := newWorld(t)
	w.start()
	if diffs, err := w.Check(); err != nil || len(diffs) > 0 {
		t.Errorf("differences before the first proxy: %v, %v", diffs, err)
	}
	c := w.dial()
	w.receive(c)
	w.becomes(proxymap.Proxy{Device: 7, Attached: true})
	for _, wrong := range []proxymap.Proxy{{}, {Device: 7}, {Device: 8, Attached: true}} {
		w.maps.put(wrong, 0)
		diffs, err := w.Check()
		if err != nil || len(diffs) != 1 || diffs[0].Subject != "sl_proxy" {
			t.Errorf("differences %v, %v with %+v", diffs, err, wrong)
		}
		if err := w.Repair(); err != nil {
			t.Fatal(err)
		}
		w.becomes(proxymap.Proxy{Device: 7, Attached: true})
	}
	w.device.set(9, nil) // deleted, and made again by the repair
	if err := w.Repair(); err != nil {
		t.Fatal(err)
	}
	w.becomes(proxymap.Proxy{Device: 9, Attached: true})
	c.Close()
	w.becomes(proxymap.Proxy{Device: 9})
}

// TestManyConnectionsAtOnce: of connections that never read, only the newest uses a descriptor of the datapath, and
// status answers meanwhile.
func TestManyConnectionsAtOnce(t *testing.T) {
	const callers, each = 20, 500
	w := newWorld(t)
	w.start()
	before := descriptors(t)
	open := make(chan net.Conn, callers*each)
	var wg sync.WaitGroup
	for range callers {
		wg.Go(func() {
			for range each {
				c, err := net.Dial("unixpacket", w.socket)
				for errors.Is(err, unix.EAGAIN) { // the backlog is full
					runtime.Gosched()
					c, err = net.Dial("unixpacket", w.socket)
				}
				if err != nil {
					t.Errorf("connect: %v", err)
					return
				}
				open <- c
				if _, err := w.Status(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	servicetest.EventuallyNil(t, "every connection is attached once", func() error {
		if s, err := w.Status(); err != nil || s.Attachments != callers*each {
			return fmt.Errorf("status %+v, %w", s, err)
		}
		return nil
	})
	if used := descriptors(t) - before - callers*each; used > 2 {
		t.Errorf("%d more descriptors are in use than the callers have", used)
	}
	last := w.dial()
	if _, files := w.receive(last); len(files) != 2 {
		t.Errorf("the last connection got %d descriptors", len(files))
	}
	close(open)
	for c := range open {
		c.Close()
	}
	w.becomes(proxymap.Proxy{Device: 7, Attached: true})
}

// descriptors counts the open descriptors of this process.
func descriptors(t *testing.T) int {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}
