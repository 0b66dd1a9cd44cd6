// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
)

// emptied deletes all IPv4 connections and translations.
func emptied(b *testing.B, k *Kernel) {
	b.Helper()
	for _, name := range []string{bpf.MapsMapSlCt4, bpf.MapsMapSlXl4, bpf.MapsMapSlPodXl4} {
		m := k.Pins.Map(name)
		var keys [][]byte
		key := make([]byte, m.KeySize())
		for err := m.NextKey(nil, &key); err == nil; err = m.NextKey(key, &key) {
			keys = append(keys, slices.Clone(key))
		}
		for _, key := range keys {
			must(b, "delete from "+name, m.Delete(key))
		}
	}
}

// BenchmarkService measures one run for a pod's packets, alternately without and with services: the median and
// the minimum of each, including the overhead of BPF_PROG_TEST_RUN, and the ratio of the medians; the first
// figure is the overhead alone. Packets to a cluster IP are compared with packets to the backend itself.
func BenchmarkService(b *testing.B) {
	var off, on *Kernel
	mirror := testEndpoint(1002, 20)
	mirror.MAC, mirror.HostMAC = a.HostMAC, a.MAC
	for i, k := range []**Kernel{&off, &on} {
		o := testOptions(kerneltest.NewBPFFS(b))
		o.Services = i == 1
		*k = openKernel(b, o)
		publish(b, *k, a)
		publish(b, *k, mirror)
		must(b, "SyncHostAddrs", (*k).Endpoints.SyncHostAddrs([]netip.Addr{host4, host6}))
	}
	lists := []int{1, 4, 16, 100}
	vip := func(n int) netip.Addr { return netip.AddrFrom4([4]byte{10, 96, 0, byte(n)}) }
	member := uint32(1)
	for front, n := range lists {
		var numbers []uint32
		for i := range n {
			numbers = append(numbers, member+uint32(i))
			putBackend(b, on, numbers[i], netip.AddrPortFrom(mirror.IPv4, uint16(8000+i)), beActive, 1)
		}
		f := bpf.MapsSlFront{List: putMembers(b, on, member, numbers...), Port: 80}
		copy(f.Addr[:], vip(n).AsSlice())
		putFront(b, on, uint32(front+1), f)
		putFronts(b, on, netip.AddrPortFrom(vip(n), 80), protoTCP, feAddress,
			bpf.MapsSlFe{Inside: uint32(front + 1), Outside: uint32(front + 1)})
		member += uint32(n)
	}
	type path struct {
		k  *Kernel // nil: the harness
		to netip.Addr
		in bool // from the host into the pod
	}
	pairs := []struct {
		name string
		was  path
		now  path
	}{
		{"harness", path{}, path{}},
		{"pod to pod", path{k: off, to: mirror.IPv4}, path{k: on, to: mirror.IPv4}},
		{"pod to the world", path{k: off, to: world4}, path{k: on, to: world4}},
		{"host to pod", path{k: off, in: true}, path{k: on, in: true}},
	}
	for _, n := range lists {
		pairs = append(pairs, struct {
			name string
			was  path
			now  path
		}{fmt.Sprintf("cluster IP of %d", n), path{k: off, to: mirror.IPv4}, path{k: on, to: vip(n)}})
	}
	for _, pair := range pairs {
		for _, first := range []bool{false, true} {
			name := map[bool]string{false: "established/", true: "first/"}[first] + pair.name
			b.Run(name, func(b *testing.B) {
				var times [2][]time.Duration
				runs := [2]func(i int) time.Duration{}
				for side, p := range []path{pair.was, pair.now} {
					prog, in := passOnly(b), from4(mirror.IPv4, 6, tcp(1, 80, flagACK))
					switch {
					case p.k == nil:
					case p.in:
						prog, in = p.k.program(program.ToPod), to4(host4, 6, tcp(1, 80, flagACK))
					default:
						prog, in = p.k.program(program.FromPod), from4(p.to, 6, tcp(1, 80, flagACK))
					}
					begin := func() {
						in[34+13] = flagSYN
						_, err := prog.Run(&ebpf.RunOptions{Data: in, DataOut: make([]byte, len(in)+256)})
						must(b, "begin the connection", err)
						in[34+13] = flagACK
					}
					if !first {
						begin()
					} else {
						in[34+13] = flagSYN
					}
					runs[side] = func(i int) time.Duration {
						if first { // the checksum is not verified
							in[34], in[35] = byte(i>>8)|128, byte(i)
							if i%1000 == 999 && p.k != nil {
								emptied(b, p.k)
							}
						}
						_, took, err := prog.Benchmark(in, 1, nil)
						must(b, "run", err)
						return took
					}
				}
				for i := range b.N {
					for side := range runs {
						side = (side + i) % 2
						times[side] = append(times[side], runs[side](i))
					}
				}
				for side, who := range []string{"off", "on"} {
					slices.Sort(times[side])
					b.ReportMetric(float64(times[side][b.N/2].Nanoseconds()), "ns-p50-"+who)
					b.ReportMetric(float64(times[side][0].Nanoseconds()), "ns-min-"+who)
				}
				b.ReportMetric(float64(times[1][b.N/2])/float64(times[0][b.N/2]), "p50-on/off")
				b.ReportMetric(0, "ns/op")
				for _, k := range []*Kernel{off, on} {
					emptied(b, k)
				}
			})
		}
	}
}
