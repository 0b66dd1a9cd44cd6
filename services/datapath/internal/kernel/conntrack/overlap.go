// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package conntrack

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// The layout of connections changes between versions. The maps are too busy to be copied, because packets
// arrive during a copy. Therefore the maps of two versions overlap. While the previous maps are pinned, the
// programs look a connection up in the current map, then in the previous one, and move what they find
// (bpf/include/sluice/previous.h). After one idle timeout no live connection is left in the previous maps, and
// their pins are removed.

// overlap is the progress of draining the maps of the previous version.
type overlap struct {
	replaced atomic.Bool // every filter has a program of this build

	mu    sync.Mutex // held for a whole pass; locked before the gate
	since uint32     // first pass after replaced was set, in the collector's seconds; 0: none
	over  bool       // the old pins have been removed
}

// PreviousPass describes a pass over the maps of the previous version.
type PreviousPass struct {
	// Left is the number of connections that no packet has moved yet.
	Left int
	// Removed is the number of connections that were idle for too long, or that are in the current map,
	// too.
	Removed int
	// Over reports that the overlap has ended: old pins are removed.
	Over bool
}

// DrainPrevious removes idle connections from the maps of the previous version, and connections that a program
// of that version has created again after they were moved. One idle timeout after the last filter was replaced,
// it removes the pins of these maps, and the pins of all maps that this build does not use.
func (ct *Connections) DrainPrevious(ctx context.Context, now uint32, timeouts Timeouts) (PreviousPass, error) {
	ct.overlap.mu.Lock()
	defer ct.overlap.mu.Unlock()
	o := &ct.overlap
	if o.over {
		return PreviousPass{Over: true}, nil
	}
	var p PreviousPass
	err := errors.Join(
		drainFamily[bpf.MapsSlCtKey4](ctx, ct, bpf.MapsMapSlCt4, bpf.MapsMapSlPrev4, now, timeouts, &p),
		drainFamily[bpf.MapsSlCtKey6](ctx, ct, bpf.MapsMapSlCt6, bpf.MapsMapSlPrev6, now, timeouts, &p),
	)
	if err != nil || !o.replaced.Load() {
		return p, err
	}
	o.since = cmp.Or(o.since, max(now, 1))
	if int32(now-o.since) < int32(timeouts.longest()/time.Second) {
		return p, nil
	}
	if err := ct.pins.DropOld(); err != nil {
		ct.log.Warn("cannot remove pins of earlier versions, trying again", "error", err)
		return p, nil
	}
	o.over, p.Over = true, true
	return p, nil
}

func drainFamily[K bpf.MapsSlCtKey4 | bpf.MapsSlCtKey6](ctx context.Context, ct *Connections, current, previous string, now uint32,
	timeouts Timeouts, p *PreviousPass,
) error {
	from, to := ct.pins.Previous(previous), ct.pins.Map(current)
	if from == nil {
		return nil
	}
	was, is := ct.states[previous], ct.states[current]
	return pin.EachEntry(from, ct.gate.Read, func(keys []K, values []connectionValue) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		for i := range keys {
			last, flags := was.of(&values[i])
			proto := protocolOf(&keys[i])
			over := int32(now-last) >= int32(timeouts.Of(proto, previousFlags(proto, flags))/time.Second)
			if !over && ct.overlap.replaced.Load() {
				var err error
				if over, err = isNewer(to, is, &keys[i], last); err != nil {
					return fmt.Errorf("compare a connection of %s: %w", previous, err)
				}
			}
			if !over {
				p.Left++
				continue
			}
			// As in Remove, a change by a packet is kept: the entry is only deleted if it has not changed since it was
			// read.
			var v connectionValue
			switch err := from.Lookup(&keys[i], &v); {
			case errors.Is(err, ebpf.ErrKeyNotExist): // a packet has moved it
				continue
			case err != nil:
				return fmt.Errorf("read a connection of %s: %w", previous, err)
			case v != values[i]:
				p.Left++
				continue
			}
			if err := pin.DeleteKey(from, &keys[i]); err != nil {
				return fmt.Errorf("delete a connection of %s: %w", previous, err)
			}
			p.Removed++
		}
		return nil
	})
}

// isNewer reports whether the map has an entry for the key that was seen at the time last, or later. An entry with an
// earlier time was left by this version before a rollback, while programs of the previous version used their own map.
// isNewer deletes such an entry, so that the entry of the previous map can be moved.
func isNewer[K any](m *ebpf.Map, at stateAt, key *K, last uint32) (bool, error) {
	var v connectionValue
	switch err := m.Lookup(key, &v); {
	case errors.Is(err, ebpf.ErrKeyNotExist):
		return false, nil
	case err != nil:
		return false, err
	}
	if seen, _ := at.of(&v); int32(seen-last) >= 0 {
		return true, nil
	}
	return false, pin.DeleteKey(m, key)
}

// dropStale deletes entries from the current maps if the previous maps have newer ones. Open calls it before
// packets can use the entries.
func (ct *Connections) dropStale() error {
	return errors.Join(
		dropStaleFamily[bpf.MapsSlCtKey4](ct, bpf.MapsMapSlCt4, bpf.MapsMapSlPrev4),
		dropStaleFamily[bpf.MapsSlCtKey6](ct, bpf.MapsMapSlCt6, bpf.MapsMapSlPrev6),
	)
}

func dropStaleFamily[K any](ct *Connections, current, previous string) error {
	from := ct.pins.Previous(previous)
	if from == nil || ct.pins.Created(current) {
		return nil
	}
	return pin.EachEntry(from, pin.Unguarded, func(keys []K, values []connectionValue) error {
		for i := range keys {
			last, _ := ct.states[previous].of(&values[i])
			if _, err := isNewer(ct.pins.Map(current), ct.states[current], &keys[i], last); err != nil {
				return err
			}
		}
		return nil
	})
}

// connectionValue is an entry of any layout.
type connectionValue [48]byte

// stateAt are the offsets of last_s and flags in a layout.
type stateAt struct{ last, flags int }

func (at stateAt) of(v *connectionValue) (last, flags uint32) {
	return binary.NativeEndian.Uint32(v[at.last:]), binary.NativeEndian.Uint32(v[at.flags:])
}

// findStates determines the offsets of the fields that every layout has.
func (ct *Connections) findStates() error {
	ct.states = map[string]stateAt{}
	for _, p := range pin.PreviousMaps {
		for _, name := range []string{p.Current, p.Previous} {
			at, err := stateOf(ct.pins.Spec(name))
			if err != nil {
				return err
			}
			ct.states[name] = at
		}
	}
	return nil
}

func stateOf(ms *ebpf.MapSpec) (stateAt, error) {
	at := stateAt{-1, -1}
	value, ok := btf.UnderlyingType(ms.Value).(*btf.Struct)
	if !ok || int(ms.ValueSize) != len(connectionValue{}) {
		return at, fmt.Errorf("the values of map %s are not connections", ms.Name)
	}
	for _, m := range value.Members {
		switch m.Name {
		case "last_s":
			at.last = int(m.Offset.Bytes())
		case "flags":
			at.flags = int(m.Offset.Bytes())
		}
	}
	if at.last < 0 || at.flags < 0 {
		return at, fmt.Errorf("the values of map %s lack the field last_s or flags", ms.Name)
	}
	return at, nil
}

func protocolOf[K bpf.MapsSlCtKey4 | bpf.MapsSlCtKey6](key *K) uint8 {
	switch key := any(key).(type) {
	case *bpf.MapsSlCtKey4:
		return key.Proto
	case *bpf.MapsSlCtKey6:
		return key.Proto
	}
	return 0
}

// previousFlags returns the flags that a connection will have when it is moved.
func previousFlags(protocol uint8, flags uint32) Flags {
	f := Flags(flags)
	if (protocol == unix.IPPROTO_TCP || protocol == unix.IPPROTO_SCTP) && f&SeenReply != 0 {
		f |= Established
	}
	return f
}

func (t Timeouts) longest() time.Duration {
	return slices.Max([]time.Duration{
		t.TCPOpening, t.TCPEstablished, t.TCPClosing, t.UDPUnanswered, t.UDPAnswered, t.ICMP, t.Other,
	})
}
