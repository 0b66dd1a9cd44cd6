// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"errors"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
)

// shot is a prepared packet for repeated runs.
type shot struct {
	prog *ebpf.Program
	o    ebpf.RunOptions
}

func (th *theatre) shot(a act) shot {
	name, ctx, in := th.frame(a)
	return shot{th.k.program(name), ebpf.RunOptions{Data: in, Context: ctx}}
}

// fire reports whether the packet passed.
func (s shot) fire() (bool, error) {
	s.o.DataOut = make([]byte, len(s.o.Data)+256)
	verdict, err := s.prog.Run(&s.o)
	if err != nil {
		return false, err
	}
	switch verdict {
	case verdictShot:
		return false, nil
	case verdictOK, verdictRedirect:
		return true, nil
	}
	return false, errors.New("the program answers neither pass nor drop")
}

// yield lets another thread of this CPU run.
func yield() { _, _, _ = unix.Syscall(unix.SYS_SCHED_YIELD, 0, 0, 0) }

// apart runs the functions concurrently, each on a CPU of its own if there are enough.
func apart(t *testing.T, fs ...func() error) {
	t.Helper()
	var all unix.CPUSet
	must(t, "sched_getaffinity", unix.SchedGetaffinity(0, &all))
	var cpus []int
	for cpu := range 1024 {
		if all.IsSet(cpu) {
			cpus = append(cpus, cpu)
		}
	}
	var ready atomic.Int32
	var wg sync.WaitGroup
	errs := make([]error, len(fs))
	for i, f := range fs {
		wg.Go(func() {
			// never unlocked: the thread ends with the goroutine
			runtime.LockOSThread()
			var one unix.CPUSet
			one.Set(cpus[i%len(cpus)])
			if errs[i] = unix.SchedSetaffinity(0, &one); errs[i] != nil {
				ready.Add(1)
				return
			}
			ready.Add(1)
			for ready.Load() < int32(len(fs)) {
				yield()
			}
			errs[i] = f()
		})
	}
	wg.Wait()
	must(t, "run side by side", errors.Join(errs...))
}

// TestKernelBothEndsBeginAtOnce: both ends begin the same connection concurrently. For TCP one end is the initiator,
// and the SYN of the other end is dropped; for UDP both packets pass. There is one entry, which records the end that
// was first.
func TestKernelBothEndsBeginAtOnce(t *testing.T) {
	const rounds, batch = 6000, 500
	th := newTheatre(t, false)
	for round := 0; round < rounds; round += batch {
		th.forget(t)
		var passed [2][2][batch]bool // end, TCP or UDP, port
		var turn [batch]atomic.Int32
		from := func(who int) func() error {
			names := [2]string{"a", "b"}
			return func() error {
				for i := range batch {
					port := uint16(10000 + i)
					pair := [2]shot{
						th.shot(say(names[who], names[1-who], segment(port, port, flagSYN), 0)),
						th.shot(say(names[who], names[1-who], datagram(port, port), 0)),
					}
					// the CPUs stay in step from packet to packet
					turn[i].Add(1)
					for spins := 0; turn[i].Load() < 2; spins++ {
						if spins%1000 == 999 {
							yield()
						}
					}
					for kind := range pair {
						ok, err := pair[kind].fire()
						if err != nil {
							return err
						}
						passed[who][kind][i] = ok
					}
				}
				return nil
			}
		}
		apart(t, from(0), from(1))
		all := th.k.tracked(t)
		for i := range batch {
			port := uint16(10000 + i)
			one, other := netip.AddrPortFrom(th.addr("a"), port), netip.AddrPortFrom(th.addr("b"), port)
			if !passed[0][1][i] || !passed[1][1][i] {
				t.Errorf("UDP %d: passed %t from a and %t from b, want both", i, passed[0][1][i], passed[1][1][i])
			}
			_, byA := all[conntrack.Tuple{Initiator: one, Responder: other, Protocol: 6}]
			_, byB := all[conntrack.Tuple{Initiator: other, Responder: one, Protocol: 6}]
			if passed[0][0][i] == passed[1][0][i] || byA != passed[0][0][i] || byB != passed[1][0][i] {
				t.Errorf("TCP %d: passed %t from a and %t from b, entries %t and %t", i, passed[0][0][i], passed[1][0][i], byA, byB)
			}
			if t.Failed() {
				return
			}
		}
	}
}

// TestKernelNoStampVouchesForTwoVerdicts: packets run on two CPUs while the policy and the identity of an address
// change, in either order. Each change alone allows the flow, both together do not: whatever the CPUs store meanwhile,
// the first packet afterwards is denied.
func TestKernelNoStampVouchesForTwoVerdicts(t *testing.T) {
	const rounds = 1500
	th := newTheatre(t, false)
	th.putTables(t)
	pod := th.pods["a"]
	out := th.shot(say("a", "world", datagram(4000, 53), 0))
	back := th.shot(say("world", "a", datagram(53, 4000), 0))
	identity := func(id identity.Numeric) error {
		return errors.Join(th.k.Addresses.Set(ipmap.HostPrefix(th.addr("world")), ipmap.Info{Identity: id}), th.k.Addresses.Bump(th.addr("world")))
	}
	table := func(egress nodetable.ID) error {
		_, err := th.k.Endpoints.SetPolicy(pod.Slot, egress, nodetable.Deny)
		return err
	}
	defer func() { must(t, "DeleteIP", th.k.Addresses.Remove(ipmap.HostPrefix(th.addr("world")))) }()
	const volley = 40 // packets of each CPU in a round
	start := [2]chan struct{}{make(chan struct{}), make(chan struct{})}
	rested := make(chan error)
	shoot := func(s shot, start <-chan struct{}) func() error {
		return func() error {
			for range start {
				var err error
				for i := 0; i < volley && err == nil; i++ {
					_, err = s.fire()
				}
				rested <- err
			}
			return nil
		}
	}
	apart(t, shoot(out, start[0]), shoot(back, start[1]), func() error {
		defer close(start[0])
		defer close(start[1])
		for n := range rounds {
			if err := errors.Join(identity(friend), table(nodetable.Allow)); err != nil {
				return err
			}
			if ok, err := out.fire(); !ok || err != nil {
				t.Errorf("round %d: the flow is not allowed at first: %v", n, err)
				return err
			}
			start[0] <- struct{}{}
			start[1] <- struct{}{}
			var err error
			if n%2 == 0 {
				err = errors.Join(identity(stranger), table(friends))
			} else {
				err = errors.Join(table(friends), identity(stranger))
			}
			if err = errors.Join(err, <-rested, <-rested); err != nil {
				return err
			}
			for _, s := range []shot{out, back} {
				if ok, err := s.fire(); ok || err != nil {
					t.Errorf("round %d: a packet has passed that both changes together deny: %v", n, err)
					return err
				}
			}
		}
		return nil
	})
}

// TestKernelDeletedEntriesDropNothingThatIsAllowed: entries are deleted and epochs change while packets of allowed
// flows run: none is dropped.
func TestKernelDeletedEntriesDropNothingThatIsAllowed(t *testing.T) {
	const flips = 4000
	th := newTheatre(t, false)
	out, back := th.shot(say("a", "b", datagram(4000, 53), 0)), th.shot(say("b", "a", datagram(53, 4000), 0))
	key := (conntrack.Tuple{Initiator: netip.AddrPortFrom(th.addr("a"), 4000), Responder: netip.AddrPortFrom(th.addr("b"), 53), Protocol: 17}).Key4()
	var done atomic.Bool
	var sent, dropped atomic.Int64
	shoot := func(s shot) func() error {
		return func() error {
			for !done.Load() {
				ok, err := s.fire()
				if err != nil {
					return err
				}
				sent.Add(1)
				if !ok {
					dropped.Add(1)
				}
			}
			return nil
		}
	}
	apart(t, shoot(out), shoot(back), func() error {
		defer done.Store(true)
		for i := range flips {
			err := th.k.Pins.Map(bpf.MapsMapSlCt4).Delete(&key)
			if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
				return err
			}
			if err := th.k.Endpoints.BumpEpochs(th.pods[[]string{"a", "b"}[i%2]].Slot); err != nil {
				return err
			}
			if i%8 == 0 {
				yield()
			}
		}
		return nil
	})
	if dropped.Load() > 0 || sent.Load() < 100 {
		t.Errorf("%d of %d packets of allowed flows were dropped", dropped.Load(), sent.Load())
	}
}
