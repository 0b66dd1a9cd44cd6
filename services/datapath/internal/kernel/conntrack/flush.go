// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package conntrack

import (
	"context"
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// A flush removes entries that are in use, and must open nothing by that. Without its
// entry a TCP segment is evaluated in its own direction: the responder's would pass
// as one of a connection that it began, where the policies deny the connection by
// then. So the direction of each TCP connection that may have more segments is
// remembered first, where the programs remember what policies have terminated
// (bpf/include/sluice/revoked.h): the next segment, of either end, is evaluated as
// the connection. What the policies have terminated stays as it is.

// Flushed is what a flush did.
type Flushed struct {
	// Removed connections.
	Removed int
	// Terminated ones stay: their entries are a part of the memory of that.
	Terminated int
	// Unremembered are those of TCP that stay because the memory of directions is
	// half full: the other half is for what policies terminate.
	Unremembered int
	// Busy ones stay because packets changed them all the time.
	Busy int
}

// flushTries is how often a connection is removed that a packet has just used.
const flushTries = 5

// Flush removes the connections that pass a filter, some at a time, until ctx ends; to
// validate removes none. After an error some are removed.
func (ct *Connections) Flush(ctx context.Context, f Filter, validateOnly bool) (Flushed, error) {
	if ct.gate.ValidateOnly {
		return Flushed{}, pin.ErrValidateOnly
	}
	// one at a time: they share the memory of directions
	select {
	case ct.flushing <- struct{}{}:
		defer func() { <-ct.flushing }()
	case <-ctx.Done():
		return Flushed{}, ctx.Err()
	}
	fl := &flush{ct: ct, validateOnly: validateOnly}
	if err := fl.measure(); err != nil {
		return Flushed{}, err
	}
	each := func(cs []Connection) error {
		for i := range cs {
			if !f.matches(&cs[i]) {
				continue
			}
			if err := fl.take(cs[i]); err != nil {
				return err
			}
		}
		return errors.Join(ctx.Err(), fl.remove())
	}
	err := ct.eachPrevious(f, each)
	if err == nil {
		err = ct.eachOf(f.Without, each)
	}
	if n := fl.counted; n > 0 {
		err = errors.Join(err, ct.countExpired(uint64(n)))
	}
	return fl.done, err
}

// flush is one that is under way.
type flush struct {
	ct           *Connections
	validateOnly bool
	done         Flushed
	counted      int          // removed by this call, as expired ones are counted
	room         [2]int       // for directions that are remembered, of each family
	batch        []Connection // to be removed, of one family and this version's layout
}

// measure counts the directions that may be remembered.
func (fl *flush) measure() error {
	for f, name := range []string{bpf.MapsMapSlRevoked4, bpf.MapsMapSlRevoked6} {
		used, err := fl.ct.countRevoked(name)
		if err != nil {
			return err
		}
		fl.room[f] = int(fl.ct.pins.Map(name).MaxEntries())/2 - used
	}
	return nil
}

// take takes a connection to be removed, at the latest by remove.
func (fl *flush) take(c Connection) error {
	if c.Flags.Revoked() {
		fl.done.Terminated++
		return nil
	}
	if c.goesOn() {
		if fl.room[c.family()] <= 0 {
			fl.done.Unremembered++
			return nil
		}
		fl.room[c.family()]--
		if !fl.validateOnly {
			switch ok, err := fl.ct.remember(&c); {
			case err != nil:
				return err
			case !ok: // the programs have used it up
				fl.room[c.family()] = 0
				fl.done.Unremembered++
				return nil
			}
		}
	}
	switch {
	case fl.validateOnly:
		fl.done.Removed++
		return nil
	case c.Earlier != nil:
		return fl.removePrevious(c)
	}
	if len(fl.batch) > 0 && fl.batch[0].family() != c.family() {
		if err := fl.remove(); err != nil {
			return err
		}
	}
	if fl.batch = append(fl.batch, c); len(fl.batch) < RemoveAtOnce {
		return nil
	}
	return fl.remove()
}

// remove removes what take has taken. What has changed since it was read is looked at
// again.
func (fl *flush) remove() error {
	if len(fl.batch) == 0 {
		return nil
	}
	deleted, err := fl.ct.Remove(fl.batch...)
	if err != nil {
		return err
	}
	for i := range fl.batch {
		if deleted&(1<<i) != 0 {
			fl.removed()
		} else if err := fl.again(fl.batch[i].Tuple); err != nil {
			return err
		}
	}
	fl.batch = fl.batch[:0]
	return nil
}

func (fl *flush) removed() {
	fl.done.Removed++
	fl.counted++
}

// again removes a connection that packets change.
func (fl *flush) again(t Tuple) error {
	for range flushTries {
		c, found, err := fl.ct.Lookup(t)
		switch {
		case err != nil:
			return err
		case !found: // it is over
			fl.done.Removed++
			return nil
		case c.Flags.Revoked():
			fl.done.Terminated++
			return nil
		}
		if c.goesOn() {
			ok, err := fl.ct.remember(&c)
			if err != nil {
				return err
			}
			if !ok {
				fl.done.Unremembered++
				return nil
			}
		}
		deleted, err := fl.ct.Remove(c)
		if err != nil {
			return err
		}
		if deleted != 0 {
			fl.removed()
			return nil
		}
	}
	fl.done.Busy++
	return nil
}

// removePrevious removes a connection from the map of the version before. What a packet
// has made of it is in the map of this version, which is looked at afterwards.
func (fl *flush) removePrevious(c Connection) error {
	name := bpf.MapsMapSlPrev4
	if c.family() == 1 {
		name = bpf.MapsMapSlPrev6
	}
	_, key := fl.ct.Map(c.Tuple)
	err := fl.ct.gate.Read(func() error {
		m := fl.ct.pins.Previous(name)
		if m == nil { // the overlap has ended
			return ebpf.ErrKeyNotExist
		}
		return m.Delete(key)
	})
	switch {
	case errors.Is(err, ebpf.ErrKeyNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("delete a connection of %s: %w", name, err)
	}
	fl.removed()
	return nil
}

// goesOn says whether a segment without an entry could be taken for one of the
// connection the other way round: of TCP, where both ends take part and have not
// finished. In transit no policy is asked.
func (c *Connection) goesOn() bool {
	return c.tcp() && !c.Transit && !c.Flags.Closing() && c.Flags&(Established|PickedUp|SeenReply) != 0
}

func (t Tuple) tcp() bool { return t.Protocol == unix.IPPROTO_TCP }

// rememberedFlags are SL_REVOKED_FLAGS, what a record keeps of the flags of an entry.
const rememberedFlags = OriginLow | Unoriented | ViaStack

// remember remembers the direction of a TCP connection, whose entry is there and counts
// until it is removed. It is false if there is no room. A record of an earlier
// connection with these ports is replaced.
func (ct *Connections) remember(c *Connection) (ok bool, err error) {
	if err := ct.gate.RLock(); err != nil {
		return false, err
	}
	defer ct.gate.RUnlock()
	name := bpf.MapsMapSlRevoked4
	if c.family() == 1 {
		name = bpf.MapsMapSlRevoked6
	}
	m := ct.pins.Map(name)
	_, key := ct.Map(c.Tuple)
	record := bpf.MapsSlRevoked{LastS: MonotonicSeconds(), Flags: c.Value.Flags & uint32(rememberedFlags)}
	for range flushTries {
		switch err = pin.InsertOnce(m, key, &record); {
		case err == nil:
			return true, nil
		case errors.Is(err, pin.ErrFull):
			return false, nil
		case !errors.Is(err, pin.ErrExists):
			return false, fmt.Errorf("remember connection %v: %w", c.Tuple, err)
		}
		var have bpf.MapsSlRevoked
		switch err := m.Lookup(key, &have); {
		case errors.Is(err, ebpf.ErrKeyNotExist):
			continue
		case err != nil:
			return false, fmt.Errorf("remember connection %v: %w", c.Tuple, err)
		case have == record:
			return true, nil
		}
		if err := pin.DeleteKey(m, key); err != nil {
			return false, fmt.Errorf("remember connection %v: %w", c.Tuple, err)
		}
	}
	return false, fmt.Errorf("remember connection %v: %w", c.Tuple, err)
}

// countRevoked counts the records of a map.
func (ct *Connections) countRevoked(name string) (n int, err error) {
	count := func(some int) error { n += some; return nil }
	if name == bpf.MapsMapSlRevoked4 {
		err = pin.EachEntry(ct.pins.Map(name), ct.gate.Read,
			func(keys []bpf.MapsSlCtKey4, _ []bpf.MapsSlRevoked) error { return count(len(keys)) })
	} else {
		err = pin.EachEntry(ct.pins.Map(name), ct.gate.Read,
			func(keys []bpf.MapsSlCtKey6, _ []bpf.MapsSlRevoked) error { return count(len(keys)) })
	}
	return n, err
}
