// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns/netnstest"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
	"github.com/sluice-net/sluice/services/datapath/internal/service/sockets"
)

// BenchmarkConnect measures connect on a loopback device, the fifth percentile: to a backend without programs,
// to it with programs, to one service, and to 10,000 services of 10 backends in turn. The four alternate within
// each round, so that other load on the machine affects all of them.
func BenchmarkConnect(b *testing.B) {
	const services, backends, batch = 10_000, 10, 500
	o := testOptions(kerneltest.NewBPFFS(b))
	o.Services = true
	outside := kerneltest.NewCgroup(b)
	inside := filepath.Join(outside, "inside")
	must(b, "make a cgroup", os.Mkdir(inside, 0o755))
	join := func(dir string) {
		b.Helper()
		must(b, "join a cgroup", os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte("0"), 0))
	}
	defer func() {
		join(outside)
		must(b, "remove the cgroup", os.Remove(inside))
	}()
	o.Sockets = &sockets.Options{Cgroup: inside, Subtree: true}
	k := openKernel(b, o)
	must(b, "attach", k.Sockets.Attach())
	defer func() { must(b, "detach", sockets.Detach(o.Dir)) }()
	ns := netnstest.New(b)
	must(b, "set the namespace", k.Namespaces.Set(sockets.Namespace{Cookie: cookieOf(b, ns), Slot: endpointmap.HostID}))

	direct := backend4(1)
	own(b, ns, direct.Addr())
	all := make([]netip.AddrPort, services)
	for i := range all {
		front := uint32(i + 1)
		var numbers []uint32
		for j := range backends {
			n := uint32(i*backends + j + 1)
			putBackend(b, k, n, direct, beActive, 0)
			numbers = append(numbers, n)
		}
		all[i] = netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)}), 80)
		putFront(b, k, front, bpf.MapsSlFront{List: putMembers(b, k, front*backends, numbers...)})
		putFrontend(b, k, all[i], protoTCP, feAddress, front)
		putFrontend(b, k, all[i], protoUDP, feAddress, front)
	}

	turn := 0
	cases := []struct {
		name   string
		cgroup string
		next   func() netip.AddrPort
	}{
		{"direct", outside, func() netip.AddrPort { return direct }},
		{"no-service", inside, func() netip.AddrPort { return direct }},
		{"one-service", inside, func() netip.AddrPort { return all[0] }},
		{"10000-services", inside, func() netip.AddrPort { turn++; return all[turn%services] }},
	}
	for _, w := range []way{tcp4, udp4} {
		b.Run(w.name, func(b *testing.B) {
			times := make([][]time.Duration, len(cases))
			must(b, "connect", ns.Do(func() error {
				listener, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
				if err != nil {
					return err
				}
				defer unix.Close(listener)
				if err := unix.Bind(listener, sockaddr(unix.AF_INET, direct)); err != nil {
					return err
				}
				if err := unix.Listen(listener, 16); err != nil {
					return err
				}
				for range b.N {
					for i, c := range cases {
						join(c.cgroup)
						for range batch {
							took, err := connectOnce(w, listener, c.next())
							if err != nil {
								return err
							}
							times[i] = append(times[i], took)
						}
					}
				}
				return nil
			}))
			for i, c := range cases {
				slices.Sort(times[i])
				b.ReportMetric(float64(times[i][len(times[i])/20].Nanoseconds()), c.name+"-p5-ns")
			}
			b.ReportMetric(0, "ns/op")
		})
	}
}

// connectOnce times one connect. The connection is reset, so that no port stays in TIME_WAIT.
func connectOnce(w way, listener int, at netip.AddrPort) (took time.Duration, err error) {
	fd, err := unix.Socket(w.domain, w.kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	to := sockaddr(w.domain, at)
	begin := time.Now()
	err = unix.Connect(fd, to)
	took = time.Since(begin)
	if err != nil || w.kind != unix.SOCK_STREAM {
		return took, err
	}
	if err := unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}); err != nil {
		return 0, err
	}
	accepted, _, err := unix.Accept(listener)
	if err != nil {
		return 0, err
	}
	return took, unix.Close(accepted)
}
