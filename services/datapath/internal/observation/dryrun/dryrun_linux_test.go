// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package dryrun

import (
	"errors"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
)

// loadReadOnly loads a program with the named maps read-only for programs.
func loadReadOnly(t *testing.T, p program.Spec, readOnly []string) error {
	t.Helper()
	spec, err := p.Load()
	if err != nil {
		t.Fatal(err)
	}
	privateMaps(spec, nil)
	for _, name := range readOnly {
		spec.Maps[name].Flags |= unix.BPF_F_RDONLY_PROG
	}
	coll, err := ebpf.NewCollection(spec)
	if err == nil {
		coll.Close()
	}
	return err
}

// TestKernelProgramsNeverWriteWhatReplicasShare uses the verifier to prove that no program writes a map that replicas
// share with the attached programs.
func TestKernelProgramsNeverWriteWhatReplicasShare(t *testing.T) {
	for _, p := range program.Table() {
		if p.Devices == program.Sockets {
			continue // socket programs see no packets, and have no replicas
		}
		if err := loadReadOnly(t, p, live); err != nil {
			t.Errorf("%s writes a map of %v: %v", p.Name, live, err)
		}
	}
	// The verifier would notice a write. Two maps are enough to prove that, because each takes a second.
	for _, m := range []string{bpf.MapsMapSlEp, bpf.MapsMapSlCt4} {
		err := loadReadOnly(t, program.Table()[0], []string{m})
		rejected, ok := errors.AsType[*ebpf.VerifierError](err)
		if !ok || !strings.Contains(strings.Join(rejected.Log, "\n"), "write into map forbidden") {
			t.Errorf("%s with %s read-only: %v", program.FromPod, m, err)
		}
	}
}

// TestKernelReplicasTakeLittleMemory limits the memory of the replicas' maps in addition to the instance's own.
func TestKernelReplicasTakeLittleMemory(t *testing.T) {
	spec, err := bpf.LoadFromPod()
	if err != nil {
		t.Fatal(err)
	}
	bound := map[string]*ebpf.Map{}
	for _, name := range live {
		bound[name] = new(ebpf.Map)
	}
	made, err := create(privateMaps(spec, bound))
	if err != nil {
		t.Fatal(err)
	}
	sum := uint64(0)
	for name, m := range made {
		info, err := m.Info()
		if err != nil {
			t.Fatal(err)
		}
		bytes, _ := info.Memlock()
		t.Logf("%-12s %6d bytes", name, bytes)
		sum += bytes
		m.Close()
	}
	// Before Linux 6.4, the kernel reports the size of a map in whole pages.
	const limit = 256 << 10
	if len(made) == 0 || sum == 0 || sum > limit {
		t.Errorf("%d maps take %d bytes, more than %d", len(made), sum, limit)
	}
	t.Logf("%d maps, %d bytes", len(made), sum)
}
