// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"errors"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
	"github.com/sluice-net/sluice/services/datapath/internal/service/sockets"
)

// verifierLines is the number of lines of a rejected program's log that are shown: the last lines contain the
// instruction and the registers before it.
const verifierLines = 60

// verifierLimit is a fifth of the kernel's limit.
const verifierLimit = 200_000

// The verifier of the running kernel explores every path of the programs. The number of instructions must stay
// far below its limit of a million, so that a change that doubles it is noticed.
func TestKernelVerifierAcceptsThePrograms(t *testing.T) {
	cgroup := kerneltest.NewCgroup(t)
	for _, routing := range []Routing{RoutingOverlay, RoutingNative} {
		o := testOptions(kerneltest.NewBPFFS(t))
		o.Routing, o.Services = routing, true
		o.Shortcut, o.TunnelPort = true, DefaultTunnelPort
		o.Sockets = &sockets.Options{Cgroup: cgroup, Subtree: true}
		k, err := Open(t.Context(), o)
		if rejected, ok := errors.AsType[*ebpf.VerifierError](err); ok {
			lines := rejected.Log
			t.Fatalf("%s: %v\n%s", pin.Release(), err, strings.Join(lines[max(0, len(lines)-verifierLines):], "\n"))
		}
		if err != nil {
			t.Fatal(err)
		}
		for _, devices := range []program.Devices{
			program.Endpoints, program.Tunnel, program.Uplinks, program.Sockets, program.Taps,
			program.ProxyNamespaces,
		} {
			loaded, err := k.Programs.Load(devices)
			must(t, "load the programs", err)
			wantBounded(t, loaded)
		}
		if err := k.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

func wantBounded(t *testing.T, programs []*program.Program) {
	t.Helper()
	const limit = verifierLimit
	for _, p := range programs {
		info, err := p.Prog.Info()
		if err != nil {
			t.Fatal(err)
		}
		size, err := info.TranslatedSize()
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("verified %s %s: %d instructions walked, %d loaded", pin.Release(), p.Name, p.VerifiedInstructions, size/8)
		if p.VerifiedInstructions > limit {
			t.Errorf("%s: the verifier processed %d instructions, more than %d", p.Name, p.VerifiedInstructions, limit)
		}
	}
}
