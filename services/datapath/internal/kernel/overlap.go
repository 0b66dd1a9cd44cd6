// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
)

// The layout of the connections changes between versions, and their maps are
// too much in use to be copied: packets come while a copy is made. So the maps
// of two versions overlap. While the previous ones are pinned, the programs
// look a connection up in the map of this version, then in the previous one,
// and move what they find (bpf/include/sluice/previous.h). After one idle time
// nothing that lives is left there, and the pins are removed.

// previousMaps are the maps with another layout in the version before: under
// which name the programs know them, and their bit in the constant that says
// which are there.
var previousMaps = []struct {
	current, previous string
	bit               uint32
}{
	{bpf.MapsMapSlCt4, bpf.MapsMapSlPrev4, 1},
	{bpf.MapsMapSlCt6, bpf.MapsMapSlPrev6, 2},
}

// previousConstant is set to the bits of the previous maps that are there.
const previousConstant = "cfg_previous"

func isPrevious(name string) bool {
	for _, p := range previousMaps {
		if p.previous == name {
			return true
		}
	}
	return false
}

// openPrevious opens the maps of the version before that are still pinned.
func (pm *pinnedMaps) openPrevious(dir string, specs map[string]*ebpf.MapSpec) error {
	for _, p := range previousMaps {
		for _, name := range []string{p.current, p.previous} {
			at, err := stateOf(specs[name])
			if err != nil {
				return err
			}
			pm.states[name] = at
		}
		ms := specs[p.previous].Copy()
		ms.Name = p.current // as that version called it
		pins := []string{pinName(ms)}
		if l, ok := legacyPins[p.current]; ok && l.layout == layoutHash(ms) {
			pins = append(pins, l.pin)
		}
		for _, pin := range pins {
			m, err := adoptMap(filepath.Join(dir, pin), ms)
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err != nil {
				return fmt.Errorf("open the previous map of %s: %w", p.current, err)
			}
			pm.previous[p.previous] = m
			pm.adopted = true
			break
		}
	}
	return nil
}

// bind prepares a program for the maps of this instance and returns them. A
// program whose version before left no map is loaded without the code that
// asks it, but not without a reference to it: the kernel resolves maps before
// it removes what a constant switches off. It is given the current map there.
func (pm *pinnedMaps) bind(spec *ebpf.CollectionSpec) (map[string]*ebpf.Map, error) {
	bound := make(map[string]*ebpf.Map, len(pm.byName)+len(previousMaps))
	for name, m := range pm.byName {
		bound[name] = m
	}
	bits := uint32(0)
	for _, p := range previousMaps {
		if m := pm.previous[p.previous]; m != nil {
			bits |= p.bit
			bound[p.previous] = m
			continue
		}
		spec.Maps[p.previous] = spec.Maps[p.current].Copy()
		bound[p.previous] = pm.byName[p.current]
	}
	if v := spec.Variables[previousConstant]; v != nil {
		if err := v.Set(bits); err != nil {
			return nil, fmt.Errorf("constant %s: %w", previousConstant, err)
		}
	}
	return bound, nil
}

// overlap is how far the maps of the version before are drained.
type overlap struct {
	replaced atomic.Bool // every filter has a program of this build

	mu    sync.Mutex // held for a whole pass, before that of the Kernel
	since uint32     // first pass after that, in the collector's seconds; 0: none
	over  bool       // the old pins are removed
}

// PreviousPass is what a pass over the maps of the version before found.
type PreviousPass struct {
	// Left are the connections that no packet has moved yet.
	Left int
	// Removed were idle for too long, or are in the map of this version too.
	Removed int
	// Over says that the overlap is over: old pins are removed.
	Over bool
}

// drainPrevious removes from the maps of the version before what is idle, and
// what a program of that version has created again after it was moved. One
// idle time after the last filter was replaced it removes their pins, and those
// of all maps that are not this build's.
func (k *Kernel) drainPrevious(ctx context.Context, now uint32, timeouts ConnectionTimeouts) (PreviousPass, error) {
	k.overlap.mu.Lock()
	defer k.overlap.mu.Unlock()
	o := &k.overlap
	if o.over {
		return PreviousPass{Over: true}, nil
	}
	var p PreviousPass
	err := errors.Join(
		drainFamily[bpf.MapsSlCtKey4](ctx, k, bpf.MapsMapSlCt4, bpf.MapsMapSlPrev4, now, timeouts, &p),
		drainFamily[bpf.MapsSlCtKey6](ctx, k, bpf.MapsMapSlCt6, bpf.MapsMapSlPrev6, now, timeouts, &p),
	)
	if err != nil || !o.replaced.Load() {
		return p, err
	}
	if o.since == 0 {
		o.since = max(now, 1)
	}
	if int32(now-o.since) < int32(timeouts.longest()/time.Second) {
		return p, nil
	}
	if err := k.dropOldPins(); err != nil {
		k.log.Warn("pins of earlier versions stay, trying again", "error", err)
		return p, nil
	}
	o.over, p.Over = true, true
	return p, nil
}

// reading runs f as a look.
func (k *Kernel) reading(f func() error) error {
	if err := k.rlock(); err != nil {
		return err
	}
	defer k.mu.RUnlock()
	return f()
}

func drainFamily[K bpf.MapsSlCtKey4 | bpf.MapsSlCtKey6](ctx context.Context, k *Kernel, current, previous string, now uint32,
	timeouts ConnectionTimeouts, p *PreviousPass,
) error {
	from, to := k.maps.previous[previous], k.maps.byName[current]
	if from == nil {
		return nil
	}
	was, is := k.maps.states[previous], k.maps.states[current]
	return eachEntry(from, k.reading, func(keys []K, values []connectionValue) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		for i := range keys {
			last, flags := was.of(&values[i])
			proto := protocolOf(&keys[i])
			over := int32(now-last) >= int32(timeouts.of(proto, previousFlags(proto, flags))/time.Second)
			if !over && k.overlap.replaced.Load() {
				var err error
				if over, err = isNewer(to, is, &keys[i], last); err != nil {
					return fmt.Errorf("compare a connection of %s: %w", previous, err)
				}
			}
			if !over {
				p.Left++
				continue
			}
			// as in deleteConnection: what a packet has changed since stays
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
			if err := deleteKey(from, &keys[i]); err != nil {
				return fmt.Errorf("delete a connection of %s: %w", previous, err)
			}
			p.Removed++
		}
		return nil
	})
}

// isNewer says whether the map has an entry under the key that was seen at that
// time or later. One that was seen earlier is from before a rollback, during
// which programs of the version before used their own: it is deleted, so that
// that one is moved here instead.
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
	return false, deleteKey(m, key)
}

// dropStale deletes from the maps of this version what the previous ones know
// better. Open does so before a packet can find it.
func (k *Kernel) dropStale() error {
	return errors.Join(
		dropStaleFamily[bpf.MapsSlCtKey4](k, bpf.MapsMapSlCt4, bpf.MapsMapSlPrev4),
		dropStaleFamily[bpf.MapsSlCtKey6](k, bpf.MapsMapSlCt6, bpf.MapsMapSlPrev6),
	)
}

func dropStaleFamily[K any](k *Kernel, current, previous string) error {
	from := k.maps.previous[previous]
	if from == nil || k.maps.created[current] {
		return nil
	}
	return eachEntry(from, unguarded, func(keys []K, values []connectionValue) error {
		for i := range keys {
			last, _ := k.maps.states[previous].of(&values[i])
			if _, err := isNewer(k.maps.byName[current], k.maps.states[current], &keys[i], last); err != nil {
				return err
			}
		}
		return nil
	})
}

// connectionValue is an entry of any layout.
type connectionValue [48]byte

// stateAt is where a layout has the time of the last packet and the flags.
type stateAt struct{ last, flags int }

func (at stateAt) of(v *connectionValue) (last, flags uint32) {
	return binary.NativeEndian.Uint32(v[at.last:]), binary.NativeEndian.Uint32(v[at.flags:])
}

func stateOf(ms *ebpf.MapSpec) (stateAt, error) {
	at := stateAt{-1, -1}
	value, ok := btf.UnderlyingType(ms.Value).(*btf.Struct)
	if !ok || int(ms.ValueSize) != len(connectionValue{}) {
		return at, fmt.Errorf("map %s holds no connections", ms.Name)
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
		return at, fmt.Errorf("the connections of map %s lack a field", ms.Name)
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

// previousFlags are the flags that a connection will have when it is moved.
func previousFlags(protocol uint8, flags uint32) ConnectionFlags {
	f := ConnectionFlags(flags)
	if (protocol == unix.IPPROTO_TCP || protocol == unix.IPPROTO_SCTP) && f&SeenReply != 0 {
		f |= Established
	}
	return f
}

// longest is how long any connection is remembered.
func (t ConnectionTimeouts) longest() time.Duration {
	return slices.Max([]time.Duration{
		t.TCPOpening, t.TCPEstablished, t.TCPClosing, t.UDPUnanswered, t.UDPAnswered, t.ICMP, t.Other,
	})
}

// mapPin is what pinName gives.
var mapPin = regexp.MustCompile(`^sl_\w+_v\d+_[0-9a-f]{8}$`)

// dropOldPins removes the pins of maps that are not this build's. The programs
// hold the previous maps, empty now, until the next start loads programs that do
// not ask them.
func (k *Kernel) dropOldPins() error {
	if err := k.lock(); err != nil {
		return err
	}
	defer k.mu.Unlock()
	entries, err := os.ReadDir(k.dir)
	if err != nil {
		return fmt.Errorf("list pins: %w", err)
	}
	ours := map[string]bool{}
	for _, pin := range k.maps.pins {
		ours[pin] = true
	}
	var errs []error
	removed := []string{}
	for _, entry := range entries {
		name := entry.Name()
		if ours[name] || !mapPin.MatchString(name) {
			continue
		}
		if err := os.Remove(filepath.Join(k.dir, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fmt.Errorf("remove the pin of an old map: %w", err))
			continue
		}
		removed = append(removed, name)
	}
	if len(removed) > 0 {
		k.log.Info("pins of earlier versions removed", "pins", removed)
	}
	for name, m := range k.maps.previous {
		errs = append(errs, m.Close())
		delete(k.maps.previous, name)
	}
	return errors.Join(errs...)
}
