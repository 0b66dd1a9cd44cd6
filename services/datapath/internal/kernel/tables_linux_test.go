// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strconv"
	"sync/atomic"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
	"github.com/sluice-net/sluice/services/datapath/internal/service/sockets"
)

// TestKernelMapsFitIntoTheirMemory adds up the memory that the kernel accounts for all maps of an instance with
// default sizes. Before Linux 6.4 it accounts for maps without preallocation as if they were full.
func TestKernelMapsFitIntoTheirMemory(t *testing.T) {
	requireKernel(t, 6, 4, "what maps really take")
	for services, most := range map[bool]uint64{false: 454 << 20 / 10, true: 81 << 20} {
		t.Run(fmt.Sprintf("services %t", services), func(t *testing.T) {
			o := testOptions(kerneltest.NewBPFFS(t))
			o.Services = services
			k := openKernel(t, o)
			us, err := k.MapUsage()
			if err != nil {
				t.Fatal(err)
			}
			var sum uint64
			for _, u := range us {
				sum += u.Bytes
				t.Logf("%-12s %7d entries %9d bytes", u.Name, u.MaxEntries, u.Bytes)
			}
			t.Logf("%d maps, %.1f MiB", len(us), float64(sum)/(1<<20))
			if sum > most || len(us) >= 75 {
				t.Errorf("%d maps take %d bytes, at most 74 and %d", len(us), sum, most)
			}
		})
	}
}

// TestKernelMapsAreAsDocumented compares the number of maps in docs/reference/maps.md, and their memory on two
// processors, with the maps of a node: without services, and with tunnel, services and socket load balancer.
func TestKernelMapsAreAsDocumented(t *testing.T) {
	requireKernel(t, 6, 4, "what maps really take")
	text, err := os.ReadFile("../../../../docs/reference/maps.md")
	if errors.Is(err, fs.ErrNotExist) {
		t.Log("no documents here") // scripts/test-kernels runs the test without the tree
		return
	}
	must(t, "read docs/reference/maps.md", err)
	found := regexp.MustCompile(`The (\d+) maps of an instance without endpoints take (\d+\.\d) MiB, ` +
		`with overlay and services (\d+\.\d) MiB \(2 CPUs\)`).FindStringSubmatch(string(text))
	if found == nil {
		t.Fatal("docs/reference/maps.md does not state the number of maps")
	}
	for i, o := range []Options{testOptions(kerneltest.NewBPFFS(t)), testOptions(kerneltest.NewBPFFS(t))} {
		if i == 1 {
			o.Routing, o.Services = RoutingOverlay, true
			o.Sockets = &sockets.Options{Cgroup: kerneltest.NewCgroup(t), Subtree: true}
		}
		us, err := openKernel(t, o).MapUsage()
		must(t, "MapUsage", err)
		var sum uint64
		for _, u := range us {
			sum += u.Bytes
		}
		maps, err := strconv.Atoi(found[1])
		must(t, "number of maps", err)
		mib, err := strconv.ParseFloat(found[2+i], 64)
		must(t, "memory of maps", err)
		have := float64(sum) / (1 << 20)
		if len(us) != maps || ebpf.MustPossibleCPU() == 2 && math.Abs(have-mib) > 0.2 {
			t.Errorf("docs/reference/maps.md states %d maps and %.1f MiB, the kernel has %d and %.1f", maps, mib, len(us), have)
		}
	}
}

// TestKernelFlipsShowOldOrNewTable sends packets of a pod while its tables are replaced continuously, the old
// ones are freed and their numbers and indices reused. Each packet is evaluated by the old or the new table.
func TestKernelFlipsShowOldOrNewTable(t *testing.T) {
	const flips = 2000
	allBut80 := policytable.Ranges{
		{First: 0, Last: 6<<16 | 79, Rest: 2},
		{First: 6<<16 | 80, Last: 6<<16 | 80, Rest: 1},
		{First: 6<<16 | 81, Last: policytable.LastPoint, Rest: 2},
	}
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	pod := publish(t, k, a)
	done := make(chan error, 1)
	var running atomic.Bool
	running.Store(true)
	go func() {
		defer running.Store(false)
		done <- func() error {
			var old nodetable.ID
			for i := range flips {
				// port 80 is alternately denied and allowed, by tables of all sizes
				c := nodetable.NewContent(policytable.Table{
					Rules:   []policytable.Rule{{Action: policytable.Deny, Tier: 1}, {Action: policytable.Allow, Tier: 1}},
					Classes: slices.Repeat([]policytable.Ranges{allBut80}, 1+i%5),
				}, 0)
				binary.BigEndian.PutUint64(c.Hash[:], uint64(i)+1)
				if i%2 == 0 {
					c.Rules[0].Action = policytable.Allow
				}
				for n := range uint32(i % 7) { // one node each
					c.Classes = append(c.Classes, policytable.Ranges{{First: n, Last: n, Rest: 1}})
				}
				c.HasAddresses = i%3 == 0
				if c.HasAddresses {
					c.Prefixes = map[netip.Prefix]policytable.PrefixClasses{netip.MustParsePrefix("203.0.113.0/24"): {}}
				}
				id, err := k.Tables.DefineTable(c)
				if err == nil {
					_, err = k.Endpoints.SetPolicy(pod.Slot, id, id)
				}
				if err == nil && old != 0 {
					err = k.Tables.RetireTables(old)
				}
				if err == nil && i%20 == 0 {
					err = k.Tables.Barrier(t.Context())
				}
				if err != nil {
					return fmt.Errorf("flip %d: %w", i, err)
				}
				old = id
			}
			return nil
		}()
	}()
	var packets uint64
	for n := uint16(0); running.Load(); n++ {
		in := from4(netip.MustParseAddr("203.0.113.9"), 6, tcp(1000+n%100, 80, flagSYN))
		if _, err := k.program(program.FromPod).Run(&ebpf.RunOptions{Data: in}); err != nil {
			t.Fatal(err)
		}
		packets++
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	cs, err := k.Events.Metrics()
	if err != nil {
		t.Fatal(err)
	}
	seen := map[event.Reason]uint64{}
	for _, c := range cs {
		seen[c.Reason] += c.Packets
	}
	t.Logf("%d flips, %d packets: %v", flips, packets, seen)
	// the peer's identity is unknown, so denials have that reason
	allowed, denied := seen[event.ForwardedOutside], seen[event.IdentityUnknown]
	if allowed == 0 || denied == 0 || allowed+denied < packets || len(seen) != 2 {
		t.Errorf("%d packets counted as %v, want them all as %v or %v",
			packets, seen, event.ForwardedOutside, event.IdentityUnknown)
	}
	if ds, err := k.Tables.Audit(false); err != nil || len(ds) > 0 {
		t.Errorf("the maps differ from the written tables: %q, %v", ds, err)
	}
}
