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

// A flush removes entries that are in use. It must not allow any traffic that was denied before. Without its entry a
// TCP segment is evaluated in its own direction: a segment of the responder would pass as one of a connection that the
// responder began, even if the policies now deny the connection. Therefore the direction of each TCP connection that
// may still have segments is recorded first, in the maps of terminated connections (bpf/include/sluice/revoked.h). The
// next segment, of either end, is then evaluated as part of the connection. Connections that policies terminated are
// not flushed.

// Flushed describes the results of a flush.
type Flushed struct {
	// Removed is the number of removed connections.
	Removed int
	// Terminated is the number of connections that stay because a policy has terminated them: their entries
	// record that.
	Terminated int
	// Unremembered is the number of TCP connections that stay because the map of records is half full: the
	// other half is reserved for connections that policies terminate.
	Unremembered int
	// Busy is the number of connections that stay because packets kept changing them.
	Busy int
}

// flushTries is the maximum number of attempts of a flush to remove a connection that packets keep changing.
const flushTries = 5

// Flush removes the connections that match a filter, in batches, until ctx ends; with validateOnly it only counts them.
// After an error, some connections may have been removed.
func (ct *Connections) Flush(ctx context.Context, f Filter, validateOnly bool) (Flushed, error) {
	if ct.gate.ValidateOnly {
		return Flushed{}, pin.ErrValidateOnly
	}
	// one flush at a time, because flushes share the map of records
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

type flush struct {
	ct           *Connections
	validateOnly bool
	done         Flushed
	counted      int          // removed by this flush, to be counted as expired
	room         [2]int       // capacity for records, by family
	batch        []Connection // connections to be removed, of one family and the current layout
}

// measure determines how many directions this flush may record.
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

// take records the direction of a connection, if needed, and queues the connection for removal. Full batches are
// removed at once, the last batch by remove.
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
			case !ok: // meanwhile the programs have filled the map
				fl.room[c.family()] = 0
				fl.done.Unremembered++
				return nil
			}
		}
	}
	if !fl.validateOnly {
		if err := fl.ct.keepAnswersOf(&c); err != nil {
			return err
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

// remove removes the collected connections. A connection that changed after it was read is looked up again.
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

// again removes a connection that packets keep changing.
func (fl *flush) again(t Tuple) error {
	for range flushTries {
		c, found, err := fl.ct.Lookup(t)
		switch {
		case err != nil:
			return err
		case !found: // it has ended
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

// removePrevious removes a connection from the map of the previous version. If a packet has moved it, it is in
// the current map, which is flushed afterwards.
func (fl *flush) removePrevious(c Connection) error {
	name := bpf.MapsMapSlPrev4
	if c.family() == 1 {
		name = bpf.MapsMapSlPrev6
	}
	_, key := fl.ct.Map(c.Tuple)
	err := fl.ct.gate.Read(func() error {
		m := fl.ct.pins.Previous(name)
		if m == nil { // the maps have been drained
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

// keepAnswersOf stores the translation of a connection's answers again: the programs store it at the first answer, and
// later connections may have evicted it.
func (ct *Connections) keepAnswersOf(c *Connection) error {
	if ct.keepAnswers == nil || c.Value.Front == 0 || c.Flags&SeenReply == 0 || c.Flags.Closing() {
		return nil
	}
	if err := ct.keepAnswers(c); err != nil {
		return fmt.Errorf("store the reply translation of connection %v again: %w", c.Tuple, err)
	}
	return nil
}

// goesOn reports whether a segment without an entry could look like a connection in the reverse direction: the
// protocol is TCP, both ends take part, and they have not finished. No policy applies to connections in
// transit.
func (c *Connection) goesOn() bool {
	return c.tcp() && !c.Transit && !c.Flags.Closing() && c.Flags&(Established|PickedUp|SeenReply) != 0
}

func (t Tuple) tcp() bool { return t.Protocol == unix.IPPROTO_TCP }

// rememberedFlags are SL_REVOKED_FLAGS: the flags of an entry that a record keeps.
const rememberedFlags = OriginLow | Unoriented | ViaStack

// remember records the direction of a TCP connection, whose entry still exists and takes precedence until it is
// removed. It returns false if the map is full. It replaces a record of an earlier connection with these ports.
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
			return false, fmt.Errorf("record the direction of connection %v: %w", c.Tuple, err)
		}
		var have bpf.MapsSlRevoked
		switch err := m.Lookup(key, &have); {
		case errors.Is(err, ebpf.ErrKeyNotExist):
			continue
		case err != nil:
			return false, fmt.Errorf("record the direction of connection %v: %w", c.Tuple, err)
		case have == record:
			return true, nil
		}
		if err := pin.DeleteKey(m, key); err != nil {
			return false, fmt.Errorf("record the direction of connection %v: %w", c.Tuple, err)
		}
	}
	return false, fmt.Errorf("record the direction of connection %v: %w", c.Tuple, err)
}

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
