// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"net/netip"
	"testing"

	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
)

// TestKernelAPodOfOneFamilySendsNothingInTheOther: a pod with addresses of one family cannot send packets of the other
// family, whatever the source (INV-35).
func TestKernelAPodOfOneFamilySendsNothingInTheOther(t *testing.T) {
	for _, c := range []struct {
		name   string
		v4, v6 bool
	}{{"IPv4", true, false}, {"IPv6", false, true}} {
		t.Run(c.name, func(t *testing.T) {
			k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
			publish(t, k, withAddrs(a, c.v4, c.v6))
			publish(t, k, b)
			must(t, "SyncHostAddrs", k.Endpoints.SyncHostAddrs([]netip.Addr{host4, host6}))
			r := runner{k}
			dns := udp(4000, 53)
			for name, src := range map[string]netip.Addr{"no address": netip.IPv4Unspecified(), "the other's": a.IPv4} {
				in := frame(a.HostMAC, a.MAC, etherIPv4, ip4Header{src: src, dst: b.IPv4, proto: 17}.with(dns))
				want := event.SpoofedIP
				if c.v4 && src == a.IPv4 {
					want = event.ForwardedToPod
				}
				if o := r.run(t, program.FromPod, in, skbContext{}, 0); o.reason != want {
					t.Errorf("IPv4, %s: %v, want %v", name, o.reason, want)
				}
			}
			for name, src := range map[string]netip.Addr{"no address": netip.IPv6Unspecified(), "the other's": a.IPv6} {
				in := frame(a.HostMAC, a.MAC, etherIPv6, ip6(src, b.IPv6, 17, dns))
				want := event.SpoofedIP
				if c.v6 && src == a.IPv6 {
					want = event.ForwardedToPod
				}
				if o := r.run(t, program.FromPod, in, skbContext{}, 0); o.reason != want {
					t.Errorf("IPv6, %s: %v, want %v", name, o.reason, want)
				}
			}
		})
	}
}

// TestKernelFragmentsOfThePodAndOfTheStackAreApart: ports recorded for the first fragment of a pod do not apply to
// fragments from the stack with the same addresses and identification, and vice versa.
func TestKernelFragmentsOfThePodAndOfTheStackAreApart(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		t.Run(map[bool]string{false: "IPv4", true: "IPv6"}[v6], func(t *testing.T) {
			th := newTheatre(t, v6)
			long := func(*theatre) (byte, []byte) { return 17, udp(4000, 80, make([]byte, 40)...) }
			pieces := th.pieces("a", "b", long, 9, 8)
			fromPod := func(in []byte) event.Reason {
				return th.run(t, program.FromPod, in, skbContext{Ifindex: th.pods["a"].Ifindex}, 0).reason
			}
			fromStack := func(in []byte) event.Reason {
				in = append([]byte(nil), in...)
				to := th.pods["b"]
				copy(in, to.MAC[:])
				copy(in[6:], to.HostMAC[:])
				return th.run(t, program.ToPod, in, skbContext{Ifindex: to.Ifindex, IngressIfindex: th.pods["a"].Ifindex}, 0).reason
			}
			if got := fromPod(pieces[0]); got != event.ForwardedToPod {
				t.Errorf("the pod's first fragment: %v", got)
			}
			if got := fromStack(pieces[1]); got != event.FragmentUnknown {
				t.Errorf("a later fragment from the stack, after the pod's first one: %v, want %v", got, event.FragmentUnknown)
			}
			th.forget(t)
			if got := fromStack(pieces[0]); got != event.ForwardedFromStack {
				t.Errorf("a first fragment from the stack: %v", got)
			}
			if got := fromPod(pieces[1]); got != event.FragmentUnknown {
				t.Errorf("the pod's later fragment, after the stack's first one: %v, want %v", got, event.FragmentUnknown)
			}
		})
	}
}
