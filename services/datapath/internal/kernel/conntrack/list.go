// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package conntrack

import (
	"context"
	"errors"
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// List passes the connections that match a filter to visit, until visit returns an error or ctx ends.
// Connections in the maps of the previous version come first, so that one that a packet moves meanwhile is
// found in the current map. No lock is held while visit runs.
func (ct *Connections) List(ctx context.Context, f Filter, visit func(*Connection) error) error {
	each := func(cs []Connection) error {
		for i := range cs {
			if f.matches(&cs[i]) {
				if err := visit(&cs[i]); err != nil {
					return err
				}
			}
		}
		return ctx.Err()
	}
	if err := ct.eachPrevious(f, func(cs []Connection) error {
		kept := cs[:0]
		for _, c := range cs {
			_, moved, err := ct.Lookup(c.Tuple)
			if err != nil {
				return err
			}
			if !moved {
				kept = append(kept, c)
			}
		}
		return each(kept)
	}); err != nil {
		return err
	}
	return ct.eachOf(f.Without, each)
}

// eachPrevious is like Each, but for the maps of the previous version. Connections are converted as the programs do it;
// flags that only packets can determine are missing.
func (ct *Connections) eachPrevious(f Filter, visit func([]Connection) error) error {
	if m := ct.pins.Previous(bpf.MapsMapSlPrev4); m != nil && !f.Without[0] {
		if err := eachOlder(ct, m, Tuple4, visit); err != nil {
			return err
		}
	}
	if m := ct.pins.Previous(bpf.MapsMapSlPrev6); m != nil && !f.Without[1] {
		return eachOlder(ct, m, Tuple6, visit)
	}
	return nil
}

// eachOlder reads a map of the previous version in batches. No lock is held while visit runs.
func eachOlder[K any](
	ct *Connections, m *ebpf.Map, tuple func(*K, uint32) Tuple, visit func([]Connection) error,
) error {
	keys, values := make([]K, pin.BatchSize), make([]bpf.MapsSlCtPrev, pin.BatchSize)
	cs := make([]Connection, 0, pin.BatchSize)
	var cursor ebpf.MapBatchCursor
	for end := false; !end; {
		n := 0
		if err := ct.gate.Read(func() (err error) {
			n, err = m.BatchLookup(&cursor, keys, values, nil)
			if end = errors.Is(err, ebpf.ErrKeyNotExist); err != nil && !end {
				return fmt.Errorf("list connections of the previous version: %w", err)
			}
			return nil
		}); err != nil {
			return err
		}
		cs = cs[:0]
		for i := range n {
			cs = append(cs, ofPrevious(tuple(&keys[i], values[i].Flags), &values[i]))
		}
		if err := visit(cs); err != nil {
			return err
		}
	}
	return nil
}

// ofPrevious converts an entry of the previous version, as bpf/include/sluice/previous.h does.
func ofPrevious(t Tuple, v *bpf.MapsSlCtPrev) Connection {
	flags := previousFlags(t.Protocol, v.Flags)
	if t.tcp() && flags&CloseReported != 0 && flags&Reset == 0 && !flags.Closing() {
		flags |= Terminated
	}
	c := Of(t, &bpf.MapsSlCt{
		Epochs: v.Epochs, Where: v.Where, IdInit: v.IdInit, IdResp: v.IdResp, RuleEg: v.RuleEg, RuleIn: v.RuleIn,
		LastS: v.LastS, Flags: uint32(flags),
	})
	c.Earlier = v
	return c
}
