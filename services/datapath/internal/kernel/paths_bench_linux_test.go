// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"testing"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/node/nodemap"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
)

const (
	// baseEnv is the path of a test binary of another version, which BenchmarkPaths compares with this
	// version.
	baseEnv = "SLUICE_BENCH_BASE"
	// turnsEnv makes BenchmarkPaths run as the child process of a comparison: it reads the indexes of the paths to run
	// from descriptor 3 and writes the times to descriptor 4.
	turnsEnv = "SLUICE_BENCH_TURNS"
	// turnRuns is the number of runs in one turn.
	turnRuns = 250
)

// path is one packet through one program.
type path struct {
	name  string
	prog  string
	in    []byte
	ctx   skbContext
	first bool // each run is another connection, from another source port
	// begins are the packets of the connection before the measured one
	begins []step
}

// step is one packet of a connection that a path requires.
type step struct {
	prog string
	in   []byte
	ctx  skbContext
}

// paths sets up a node with services, and returns the paths to measure on it.
func paths(b *testing.B) (*Kernel, []path) {
	o := testOptions(kerneltest.NewBPFFS(b))
	o.Services = true
	k := openKernel(b, o)
	pod := publish(b, k, a)
	mirror := testEndpoint(1002, 20)
	mirror.MAC, mirror.HostMAC = a.HostMAC, a.MAC
	publish(b, k, mirror)
	must(b, "SyncHostAddrs", k.Endpoints.SyncHostAddrs([]netip.Addr{host4, host6}))
	var local nodemap.Local
	for i, addr := range []netip.Addr{host4, host6} {
		place, err := k.Endpoints.OwnPlace(addr)
		must(b, "find the place of "+addr.String(), err)
		local.Sources[2+i] = place
	}
	must(b, "SetLocal", k.Nodes.SetLocal(local))

	const port, nodePort, awayPort = 80, 30080, 30081
	vip4, vip6 := netip.MustParseAddr("10.96.0.1"), netip.MustParseAddr("fd00:96::1")
	away4, away6 := netip.MustParseAddr("192.0.2.77"), netip.MustParseAddr("2001:db8:77::77")
	front := uint32(0)
	// a cluster IP forwards to the mirror, a node port to the pod, another one to an address on another
	// node
	for _, s := range []struct {
		at      netip.AddrPort
		kind    uint8
		backend netip.AddrPort
	}{
		{netip.AddrPortFrom(vip4, port), feAddress, netip.AddrPortFrom(mirror.IPv4, 8080)},
		{netip.AddrPortFrom(vip6, port), feAddress, netip.AddrPortFrom(mirror.IPv6, 8080)},
		{netip.AddrPortFrom(netip.IPv4Unspecified(), nodePort), feNode, netip.AddrPortFrom(pod.IPv4, 8080)},
		{netip.AddrPortFrom(netip.IPv6Unspecified(), nodePort), feNode, netip.AddrPortFrom(pod.IPv6, 8080)},
		{netip.AddrPortFrom(netip.IPv4Unspecified(), awayPort), feNode, netip.AddrPortFrom(away4, 8080)},
		{netip.AddrPortFrom(netip.IPv6Unspecified(), awayPort), feNode, netip.AddrPortFrom(away6, 8080)},
	} {
		front += 2
		putBackend(b, k, front, s.backend, beActive, 1)
		f := bpf.MapsSlFront{List: putMembers(b, k, front, front), Port: s.at.Port()}
		fe := bpf.MapsSlFe{Inside: front, Outside: front}
		if s.kind == feAddress {
			copy(f.Addr[:], s.at.Addr().AsSlice())
		} else {
			fe.Outside++
			putFront(b, k, front+1, f)
		}
		putFront(b, k, front, f)
		for _, proto := range []uint8{protoTCP, protoUDP} {
			putFronts(b, k, s.at, proto, s.kind, fe)
		}
	}

	// from outside, for the device of a test run, which has no Ethernet address
	packet := func(src, dst netip.Addr, proto byte, payload []byte) []byte {
		if src.Is6() {
			return frame([6]byte{}, a.MAC, etherIPv6, ip6(src, dst, proto, payload))
		}
		return frame([6]byte{}, a.MAC, etherIPv4, ip4Header{src: src, dst: dst, proto: proto}.with(payload))
	}
	fromPod := func(dst netip.Addr, proto byte, payload []byte) []byte {
		if dst.Is6() {
			return from6(dst, proto, payload)
		}
		return from4(dst, proto, payload)
	}
	data := make([]byte, 64)
	var all []path
	for _, v := range []struct {
		name                         string
		vip, peer, world, host, away netip.Addr
		pod                          netip.Addr
	}{
		{"IPv4", vip4, mirror.IPv4, world4, host4, away4, pod.IPv4},
		{"IPv6", vip6, mirror.IPv6, world6, host6, away6, pod.IPv6},
	} {
		remote := skbContext{Mark: 0x0300, IngressIfindex: 1}
		for _, l4 := range []struct {
			name  string
			proto byte
			make  func(sport, dport uint16, begins bool) []byte
		}{
			{"TCP", 6, func(sport, dport uint16, begins bool) []byte {
				if begins {
					return tcp(sport, dport, flagSYN, data...)
				}
				return tcp(sport, dport, flagACK, data...)
			}},
			{"UDP", 17, func(sport, dport uint16, _ bool) []byte { return udp(sport, dport, data...) }},
		} {
			ask := func(to netip.Addr, dport uint16, begins bool) []byte {
				return fromPod(to, l4.proto, l4.make(1, dport, begins))
			}
			outside := func(dport uint16, begins bool) []byte {
				return packet(v.world, v.host, l4.proto, l4.make(1, dport, begins))
			}
			in := v.name + " " + l4.name
			for _, to := range []struct {
				name  string
				addr  netip.Addr
				dport uint16
			}{{"pod to pod", v.peer, 79}, {"pod to the world", v.world, 79}, {"pod to a cluster IP", v.vip, port}} {
				all = append(all,
					path{
						name: "established " + to.name + ", " + in, prog: program.FromPod, in: ask(to.addr, to.dport, false),
						begins: []step{{program.FromPod, ask(to.addr, to.dport, true), skbContext{}}},
					},
					path{
						name: "first " + to.name + ", " + in, prog: program.FromPod, in: ask(to.addr, to.dport, true), first: true,
					})
			}
			hostTo := func(sport, dport uint16, begins bool) []byte {
				payload := l4.make(sport, dport, begins)
				if v.host.Is6() {
					return to6(v.host, l4.proto, payload)
				}
				return to4(v.host, l4.proto, payload)
			}
			toPod := func(begins bool) []byte { return hostTo(2, 78, begins) }
			askHost := []step{{program.FromPod, ask(v.host, 53, true), skbContext{}}}
			all = append(all,
				path{
					name: "established pod to host, " + in, prog: program.FromPod, in: ask(v.host, 53, false), begins: askHost,
				},
				path{name: "first pod to host, " + in, prog: program.FromPod, in: ask(v.host, 53, true), first: true},
				path{
					name: "established answer of the host, " + in, prog: program.ToPod, in: hostTo(53, 1, false),
					begins: askHost,
				},
				path{
					name: "established host to pod, " + in, prog: program.ToPod, in: toPod(false),
					begins: []step{{program.ToPod, toPod(true), skbContext{}}},
				},
				path{name: "first host to pod, " + in, prog: program.ToPod, in: toPod(true), first: true},
			)
			all = append(all,
				path{
					name: "established uplink to a node port, " + in, prog: program.FromUplink, in: outside(nodePort, false),
					begins: []step{{program.FromUplink, outside(nodePort, true), skbContext{}}},
				},
				path{
					name: "first uplink to a node port, " + in, prog: program.FromUplink, in: outside(nodePort, true), first: true,
				},
				path{
					name: "established uplink to a backend elsewhere, " + in, prog: program.FromUplink,
					in: outside(awayPort, false), begins: []step{{program.FromUplink, outside(awayPort, true), skbContext{}}},
				},
				path{
					name: "first uplink to a backend elsewhere, " + in, prog: program.FromUplink,
					in: outside(awayPort, true), first: true,
				},
				path{
					name: "established to_uplink to a backend elsewhere, " + in, prog: program.ToUplink,
					in: packet(v.world, v.away, l4.proto, l4.make(1, 8080, false)), ctx: remote,
					begins: []step{
						{program.FromUplink, outside(awayPort, true), skbContext{}},
						{program.ToUplink, packet(v.world, v.away, l4.proto, l4.make(1, 8080, true)), remote},
					},
				},
				path{
					name: "uplink, no service at a port for answers, " + in, prog: program.FromUplink, in: outside(25000, false),
				},
				path{
					name: "uplink, no service, " + in, prog: program.FromUplink, in: outside(22, false),
				},
				path{
					name: "to_uplink, of the host, " + in, prog: program.ToUplink,
					in: packet(v.host, v.world, l4.proto, l4.make(22, 1, false)),
				},
			)
		}
	}
	return k, all
}

// forgetTurn removes the connections and translations of a turn, and their counts, so that no bound refuses a
// packet of the next turn. It only empties maps that this version has.
func forgetTurn(b *testing.B, k *Kernel) {
	b.Helper()
	for _, name := range []string{
		"sl_ct4", "sl_ct6", "sl_xl4", "sl_xl6", "sl_answers4", "sl_answers6",
		"sl_pod_xl4", "sl_pod_xl6", "sl_pod_answers4", "sl_pod_answers6",
	} {
		m := k.Pins.Map(name)
		if m == nil {
			continue
		}
		var keys [][]byte
		key := make([]byte, m.KeySize())
		for err := m.NextKey(nil, &key); err == nil; err = m.NextKey(key, &key) {
			keys = append(keys, slices.Clone(key))
		}
		for _, key := range keys {
			must(b, "delete from "+name, m.Delete(key))
		}
	}
	// range of bytes that contain counts
	for name, counts := range map[string][2]int{"sl_budget": {0, 8}, "sl_held": {0, 40}, "sl_bound": {8, 16}} {
		m := k.Pins.Map(name)
		if m == nil {
			continue
		}
		value := make([]byte, m.ValueSize())
		for at := range m.MaxEntries() {
			if err := m.Lookup(at, &value); err != nil || !slices.ContainsFunc(value[counts[0]:counts[1]], isSet) {
				continue
			}
			clear(value[counts[0]:counts[1]])
			must(b, "clear a count of "+name, m.Put(at, value))
		}
	}
}

func isSet(b byte) bool { return b != 0 }

// runPath returns the times of the runs of one turn in nanoseconds.
func runPath(b *testing.B, k *Kernel, p *path, n *int) []int64 {
	prog := k.program(p.prog)
	forgetTurn(b, k)
	for _, s := range p.begins {
		_, err := k.program(s.prog).Run(&ebpf.RunOptions{Data: s.in, DataOut: make([]byte, len(s.in)+256), Context: s.ctx})
		must(b, "begin the connection", err)
	}
	in := slices.Clone(p.in)
	l4 := 34
	if in[12] == 0x86 {
		l4 = 54
	}
	times := make([]int64, 0, turnRuns)
	for range turnRuns {
		if p.first { // the checksums are not verified
			*n++
			in[l4], in[l4+1] = byte(*n>>8)|128, byte(*n)
		}
		times = append(times, timeRun(b, prog, in, p.ctx))
	}
	return times
}

// timeRun returns the time of one run in nanoseconds. ebpf.Program can only measure runs without a context.
func timeRun(b *testing.B, prog *ebpf.Program, in []byte, ctx skbContext) int64 {
	context, err := binary.Append(nil, binary.NativeEndian, ctx)
	must(b, "encode the context", err)
	attr := struct {
		fd, retval, sizeIn, sizeOut uint32
		in, out                     uint64
		repeat, duration            uint32
		ctxSizeIn, ctxSizeOut       uint32
		ctxIn, ctxOut               uint64
		flags, cpu, batch, pad      uint32
	}{
		fd: uint32(prog.FD()), sizeIn: uint32(len(in)), in: uint64(uintptr(unsafe.Pointer(&in[0]))), repeat: 1,
		ctxSizeIn: uint32(len(context)), ctxIn: uint64(uintptr(unsafe.Pointer(&context[0]))),
	}
	_, _, errno := unix.Syscall(unix.SYS_BPF, unix.BPF_PROG_TEST_RUN, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr))
	runtime.KeepAlive(in)
	runtime.KeepAlive(context)
	if errno != 0 {
		b.Fatalf("BPF_PROG_TEST_RUN: %v", errno)
	}
	return int64(attr.duration)
}

// turn is the result of one side in one turn: the mean of the middle half, which is finer than the clock's step
// of 10 ns, and the minimum.
type turn struct {
	Middle float64
	Least  int64
}

func turnOf(times []int64) turn {
	slices.Sort(times)
	half := times[len(times)/8 : len(times)/8*5]
	var sum int64
	for _, t := range half {
		sum += t
	}
	return turn{float64(sum) / float64(len(half)), times[0]}
}

// BenchmarkPaths measures one run for packets on the usual paths. Without baseEnv it prints the times of this
// version. With it, the two versions alternate in turns of some milliseconds on one CPU, b.N turns on each
// path. The benchmark then prints the medians of each side's turns and the median difference of neighbouring
// turns.
func BenchmarkPaths(b *testing.B) {
	k, all := paths(b)
	n := 0
	if os.Getenv(turnsEnv) != "" {
		answerTurns(b, k, all, &n)
		return
	}
	measure := func(i int) turn { return turnOf(runPath(b, k, &all[i], &n)) }
	other := measure
	base := os.Getenv(baseEnv)
	if base != "" {
		other = askTurns(b, base)
	}
	for i, p := range all {
		b.Run(p.name, func(b *testing.B) {
			var now, was, differ, least []float64
			for round := range b.N {
				var t [2]turn
				for side := range t {
					if (round+side)%2 == 0 {
						t[0] = measure(i)
					} else {
						t[1] = other(i)
					}
				}
				now, was = append(now, t[0].Middle), append(was, t[1].Middle)
				differ = append(differ, t[0].Middle-t[1].Middle)
				least = append(least, float64(t[0].Least-t[1].Least))
			}
			b.ReportMetric(0, "ns/op")
			b.ReportMetric(median(now), "ns")
			if base == "" {
				return
			}
			b.ReportMetric(median(was), "ns-base")
			b.ReportMetric(median(differ), "ns-more")
			b.ReportMetric(median(least), "ns-more-least")
		})
	}
}

func median(of []float64) float64 {
	slices.Sort(of)
	return of[len(of)/2]
}

// answerTurns runs the paths that the parent process requests.
func answerTurns(b *testing.B, k *Kernel, all []path, n *int) {
	asked, answers := os.NewFile(3, "asked"), json.NewEncoder(os.NewFile(4, "answers"))
	for in := bufio.NewScanner(asked); in.Scan(); {
		i, err := strconv.Atoi(in.Text())
		must(b, "read the number of a path", err)
		must(b, "answer", answers.Encode(turnOf(runPath(b, k, &all[i], n))))
	}
}

// askTurns starts the child process, and returns a function that measures a path there.
func askTurns(b *testing.B, base string) func(i int) turn {
	askedRead, asked, err := os.Pipe()
	must(b, "make a pipe", err)
	answersRead, answers, err := os.Pipe()
	must(b, "make a pipe", err)
	cmd := exec.Command(base, "-test.run=^$", "-test.bench=^BenchmarkPaths$", "-test.benchtime=1x", "-test.timeout=0")
	cmd.Env = append(os.Environ(), turnsEnv+"=1")
	cmd.ExtraFiles = []*os.File{askedRead, answers}
	cmd.Stderr = os.Stderr
	must(b, "start "+base, cmd.Start())
	askedRead.Close()
	answers.Close()
	b.Cleanup(func() {
		asked.Close()
		if err := cmd.Wait(); err != nil {
			b.Errorf("%s: %v", base, err)
		}
		answersRead.Close()
	})
	in := json.NewDecoder(answersRead)
	return func(i int) (t turn) {
		_, err := fmt.Fprintln(asked, i)
		must(b, "ask for a turn", err)
		must(b, "read the answer", in.Decode(&t))
		return t
	}
}
