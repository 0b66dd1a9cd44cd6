// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"bytes"
	"errors"
	"io"
	"math/bits"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// storm is a service whose backends change while many sockets use it.
type storm struct {
	*served
	backends []pod.Pod // by number, at most 31
	ledger   *ledger
	changes  int // made so far
}

// TestFaultServiceUnderLoad: 1,000 TCP connections and 250 UDP sockets use a service while its backends change
// repeatedly, and each process is killed, both during changes and between them. No TCP connection ends. No connected
// UDP socket to a remaining backend is ended, and no datagram and no new connection reaches a backend whose removal
// is acknowledged as ended (INV-96, INV-99). A restart leaves the maps of services bit for bit unchanged (INV-97).
func TestFaultServiceUnderLoad(t *testing.T) {
	changes := 200
	if allFaults() {
		changes = 500
	}
	n := newNode(t)
	pods := n.addPods(t, "client", "other", "b0", "b1", "b2", "b3", "b4", "b5")
	s := &storm{served: newServed(t, n), backends: pods[2:], ledger: newLedger(0b000111)}
	l := newLoad(t, s.ledger, s.backends, pods[0], pods[1], pod.Pod{Name: "host", Netns: n.Netns()})
	s.lead(t, s.backends[:3]...)
	// Long connections to every backend. Half of the backends are removed later.
	l.converse(t, 500)
	s.exchange(t, 0b111000)
	l.converse(t, 500)
	l.ask(t, 200, 50, 4)

	processes := []string{devnode.LoadBalancer, devnode.Datapath, devnode.Policy, devnode.Identity, devnode.IPAM}
	for i, service := range processes {
		restarted := make(chan error, 1)
		go func() {
			restarted <- errors.Join(n.Kill(t.Context(), service), n.Start(t.Context(), service))
		}()
		s.exchangeUntil(t, changes*(i+1)/len(processes))
		if err := <-restarted; err != nil {
			t.Fatal(err)
		}
		l.wantProgress(t, service+" is back")
		s.wantMapsKept(t, l, service)
		if t.Failed() {
			break
		}
	}
	l.stop()
	t.Logf("%d changes; %s", s.changes, l)
	if l.ended.Load() == 0 {
		t.Error("no socket was ended: the test shows nothing about removed backends")
	}
}

// exchangeUntil replaces one of three backends at a time by another one, until this number of changes was made.
func (s *storm) exchangeUntil(t *testing.T, changes int) {
	t.Helper()
	for s.changes < changes && !t.Failed() {
		current := s.ledger.current()
		goes, comes := pick(current), pick((1<<len(s.backends)-1)&^current)
		s.exchange(t, current&^goes|comes)
	}
}

// pick returns one member of a set.
func pick(from members) members {
	for range rand.IntN(bits.OnesCount32(uint32(from))) {
		from &= from - 1
	}
	return from & -from
}

// exchange changes the backends, and returns when the removals are acknowledged as ended.
func (s *storm) exchange(t *testing.T, next members) {
	t.Helper()
	var backends []pod.Pod
	for i, b := range s.backends {
		if next.has(i) {
			backends = append(backends, b)
		}
	}
	s.ledger.begin(next)
	s.lead(t, backends...)
	s.ledger.end(next)
	s.changes++
}

// wantMapsKept kills and restarts a process while nothing else changes, and compares the maps of services before and
// after.
func (s *storm) wantMapsKept(t *testing.T, l *load, service string) {
	t.Helper()
	// With every backend in use, no number is in quarantine, whose end would change the maps.
	current := s.ledger.current()
	s.exchange(t, 1<<len(s.backends)-1)
	before := s.serviceMaps(t)
	if err := s.Kill(t.Context(), service); err != nil {
		t.Fatal(err)
	}
	l.wantProgress(t, service+" is down, and nothing changes")
	if err := s.Start(t.Context(), service); err != nil {
		t.Fatal(err)
	}
	s.awaitEnded(t)
	after := s.serviceMaps(t)
	for name, want := range before {
		if got := after[name]; !bytes.Equal(got, want) {
			at := 0
			for at < min(len(got), len(want)) && got[at] == want[at] {
				at++
			}
			t.Errorf("a restart of %s changed map %s, of %d bytes, from byte %d on (now of %d bytes)", service, name,
				len(want), at, len(got))
		}
	}
	s.exchange(t, current)
}

// serviceMaps returns the raw contents of the service maps: elements of arrays in their order, and elements of
// hashes, each key before its value, sorted.
func (n *testNode) serviceMaps(t *testing.T) map[string][]byte {
	t.Helper()
	all := make(map[string][]byte)
	for _, name := range []string{"sl_fe4", "sl_fe6", "sl_front", "sl_member", "sl_be4", "sl_be6"} {
		pins, err := filepath.Glob(filepath.Join(n.Paths().BPFDir, name+"_*"))
		if err != nil || len(pins) != 1 {
			t.Fatalf("pins of %s: %v, %v, want one", name, pins, err)
		}
		m, err := ebpf.LoadPinnedMap(pins[0], nil)
		if err != nil {
			t.Fatal(err)
		}
		content, err := mapBytes(m)
		if err != nil {
			t.Fatalf("map %s: %v", name, err)
		}
		_ = m.Close()
		// Without contents, equal maps would prove nothing.
		if len(bytes.Trim(content, "\x00")) == 0 {
			t.Fatalf("map %s is empty", name)
		}
		all[name] = content
	}
	return all
}

// mapBytes returns the raw contents of a map.
func mapBytes(m *ebpf.Map) ([]byte, error) {
	if m.Type() == ebpf.Array {
		memory, err := m.Memory()
		if err != nil {
			return nil, err
		}
		return io.ReadAll(io.NewSectionReader(memory, 0, int64(memory.Size())))
	}
	var elements [][]byte
	var key, value []byte
	each := m.Iterate()
	for each.Next(&key, &value) {
		elements = append(elements, slices.Concat(key, value))
	}
	slices.SortFunc(elements, bytes.Compare)
	return slices.Concat(elements...), each.Err()
}
