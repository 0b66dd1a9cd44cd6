// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/lifecycle"
)

// attachTCX attaches a program that returns TCX_PASS, before Sluice's program, and returns its ID.
func (w *world) attachTCX(ifindex uint32, hook ebpf.AttachType) ebpf.ProgramID {
	w.t.Helper()
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "passes", Type: ebpf.SchedCLS, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()},
	})
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = prog.Close() })
	err = w.home.Do(func() error {
		l, err := link.AttachTCX(link.TCXOptions{Interface: int(ifindex), Program: prog, Attach: hook})
		if err == nil {
			w.t.Cleanup(func() { _ = l.Close() })
		}
		return err
	})
	if err != nil {
		w.t.Fatal(err)
	}
	info, err := prog.Info()
	if err != nil {
		w.t.Fatal(err)
	}
	id, _ := info.ID()
	return id
}

// TestKernelForeignTCXProgramIsReported attaches a foreign tcx program. It runs before the filters of clsact, and if it
// returns a verdict, Sluice's program does not run.
func TestKernelForeignTCXProgramIsReported(t *testing.T) {
	w := newWorld(t)
	w.start(true)
	host, other := &pod{t: t, ns: w.home}, w.pod("other")
	for _, c := range []struct {
		name string
		hook ebpf.AttachType
	}{{"ingress", ebpf.AttachTCXIngress}, {"egress", ebpf.AttachTCXEgress}} {
		t.Run(c.name, func(t *testing.T) {
			p := w.pod(c.name)
			if found := w.findings(true, endpoint.SubjectTCX); len(found) != 0 {
				t.Fatalf("before: %+v", found)
			}
			id := w.attachTCX(p.ep.Device.HostIndex, c.hook)
			if c.hook == ebpf.AttachTCXIngress {
				cutOff(t, w, p, map[string]netip.AddrPort{"its host": host.echo(w.node.Ranges.NodeAddrs()[0]), "a pod": other.echo(other.spec.Addrs[0])})
			}
			diffs, err := w.node.Endpoints.Reconciler.Check(t.Context(), p.owner, lifecycle.Expected{})
			if err != nil {
				t.Fatal(err)
			}
			want := fmt.Sprintf("passes, program %d", id)
			named := func(d endpoint.Difference) bool {
				return d.Subject == endpoint.SubjectTCX && d.Key == p.ep.Device.HostName+" "+c.name && strings.Contains(d.Have, want)
			}
			if !slices.ContainsFunc(diffs, named) {
				t.Errorf("check returns %+v, want a difference with %q", diffs, want)
			}
			// Every audit reports it, because no audit removes foreign programs.
			for range 2 {
				found := w.findings(true, endpoint.SubjectTCX)
				if len(found) != 1 || !named(found[0].Difference) || found[0].Repaired || found[0].Err == nil {
					t.Errorf("audit returns %+v, want one finding with %q that is not repaired", found, want)
				}
			}
			left := w.node.Endpoints.Report.Counts().Unrepaired
			if !slices.ContainsFunc(left, func(s string) bool { return strings.Contains(s, want) }) {
				t.Errorf("status returns %q, want %q", left, want)
			}
			if _, err := w.delete(p.owner); err != nil {
				t.Fatal(err)
			}
		})
	}
	if left := w.node.Endpoints.Report.Counts().Unrepaired; len(left) != 0 {
		t.Errorf("after the deletions status returns %q", left)
	}
}
