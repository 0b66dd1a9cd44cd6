// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package sockets

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// leave is SL_NS_LEAVE.
const leave = 1

// Namespace says whose sockets are in a network namespace.
type Namespace struct {
	// Cookie of the namespace: netns.Namespace.Cookie.
	Cookie uint64
	// Slot of the endpoint, endpointmap.HostID for the node's own namespace.
	Slot endpointmap.ID
	// Leave says that its sockets are not translated.
	Leave bool
}

func (n Namespace) value() bpf.MapsSlNs {
	v := bpf.MapsSlNs{Slot: n.Slot}
	if n.Leave {
		v.Flags = leave
	}
	return v
}

// Namespaces are the network namespaces whose sockets the programs know. All
// methods may be called concurrently. Another writer of the map is not expected: what
// it adds is found by List alone.
type Namespaces struct {
	gate pin.Gate
	ns   *ebpf.Map
	// slots are the cookies that each slot has, nearly always one. nil until the first
	// change, which lists the map. guarded by gate
	slots map[endpointmap.ID][]uint64
}

// OpenNamespaces gives access to the map of namespaces.
func OpenNamespaces(pm *pin.Maps) *Namespaces {
	return &Namespaces{gate: pin.Gate{ValidateOnly: pm.ValidateOnly}, ns: pm.Map(bpf.MapsMapSlNs)}
}

// lock begins a change, for which slots has to be known.
func (ns *Namespaces) lock() error {
	if err := ns.gate.Lock(); err != nil {
		return err
	}
	if ns.slots != nil {
		return nil
	}
	slots := map[endpointmap.ID][]uint64{}
	err := pin.EachElement(ns.ns, func(cookie uint64, v bpf.MapsSlNs) {
		slots[v.Slot] = append(slots[v.Slot], cookie)
	})
	if err != nil {
		ns.gate.Unlock()
		return fmt.Errorf("list the namespaces: %w", err)
	}
	ns.slots = slots
	return nil
}

// Set makes the sockets of a namespace those of an endpoint. What is there already
// is not written again. A namespace that changes its slot or its flags is deleted
// and added, because the values of a hash are written once: a call in between is
// made as in an unknown namespace. A full map is pin.ErrFull.
func (ns *Namespaces) Set(n Namespace) error {
	if err := n.validate(); err != nil {
		return err
	}
	if err := ns.lock(); err != nil {
		return err
	}
	defer ns.gate.Unlock()
	return ns.set(n)
}

func (n Namespace) validate() error {
	if n.Cookie == 0 {
		return fmt.Errorf("%w: Cookie is 0", pin.ErrInvalid)
	}
	if n.Slot == endpointmap.NoID || n.Slot > endpointmap.MaxEndpoints {
		return fmt.Errorf("%w: Slot %d", pin.ErrInvalid, n.Slot)
	}
	return nil
}

// lookup returns what the map has of a namespace. The caller holds the gate.
func (ns *Namespaces) lookup(cookie uint64) (v bpf.MapsSlNs, found bool, err error) {
	err = ns.ns.Lookup(cookie, &v)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return v, false, nil
	}
	if err != nil {
		return v, false, fmt.Errorf("namespace %d: %w", cookie, err)
	}
	return v, true, nil
}

// set is Set of a valid namespace. The caller holds the gate.
func (ns *Namespaces) set(n Namespace) error {
	have, found, err := ns.lookup(n.Cookie)
	if err != nil || found && have == n.value() {
		return err
	}
	if found {
		if err := ns.remove(n.Cookie, have.Slot); err != nil {
			return err
		}
	}
	if err := pin.InsertOnce(ns.ns, n.Cookie, n.value()); err != nil {
		return fmt.Errorf("namespace %d: %w", n.Cookie, err)
	}
	ns.slots[n.Slot] = append(ns.slots[n.Slot], n.Cookie)
	return nil
}

// remove deletes a namespace that has a slot. The caller holds the gate.
func (ns *Namespaces) remove(cookie uint64, slot endpointmap.ID) error {
	if err := pin.DeleteKey(ns.ns, cookie); err != nil {
		return fmt.Errorf("namespace %d: %w", cookie, err)
	}
	left := slices.DeleteFunc(ns.slots[slot], func(c uint64) bool { return c == cookie })
	if ns.slots[slot] = left; len(left) == 0 {
		delete(ns.slots, slot)
	}
	return nil
}

// Remove makes a namespace unknown, if its sockets are those of the endpoint that is
// named. One that is not there is no error.
func (ns *Namespaces) Remove(cookie uint64, of endpointmap.ID) error {
	if err := ns.lock(); err != nil {
		return err
	}
	defer ns.gate.Unlock()
	have, found, err := ns.lookup(cookie)
	if err != nil || !found || have.Slot != of {
		return err
	}
	return ns.remove(cookie, of)
}

// Claim makes the sockets of a namespace those of an endpoint, unless they are those
// of another one: of several endpoints in a namespace the first has its sockets. What
// an earlier endpoint of the slot has left goes.
func (ns *Namespaces) Claim(n Namespace) error {
	if err := n.validate(); err != nil {
		return err
	}
	if err := ns.lock(); err != nil {
		return err
	}
	defer ns.gate.Unlock()
	if err := ns.release(n.Slot, n.Cookie); err != nil {
		return err
	}
	have, found, err := ns.lookup(n.Cookie)
	if err != nil || found && have.Slot != n.Slot {
		return err
	}
	return ns.set(n)
}

// Release makes the namespaces unknown whose sockets were an endpoint's.
func (ns *Namespaces) Release(slot endpointmap.ID) error {
	if err := ns.lock(); err != nil {
		return err
	}
	defer ns.gate.Unlock()
	return ns.release(slot, 0)
}

// release removes the namespaces of a slot, but for one. The caller holds the gate.
func (ns *Namespaces) release(slot endpointmap.ID, but uint64) error {
	var errs []error
	for _, cookie := range slices.Clone(ns.slots[slot]) {
		if cookie != but {
			errs = append(errs, ns.remove(cookie, slot))
		}
	}
	return errors.Join(errs...)
}

// List is all namespaces by their cookies.
func (ns *Namespaces) List() ([]Namespace, error) {
	if err := ns.gate.RLock(); err != nil {
		return nil, err
	}
	defer ns.gate.RUnlock()
	var all []Namespace
	err := pin.EachElement(ns.ns, func(cookie uint64, v bpf.MapsSlNs) {
		all = append(all, Namespace{Cookie: cookie, Slot: v.Slot, Leave: v.Flags&leave != 0})
	})
	if err != nil {
		return nil, fmt.Errorf("list the namespaces: %w", err)
	}
	slices.SortFunc(all, func(a, b Namespace) int { return cmp.Compare(a.Cookie, b.Cookie) })
	return all, nil
}

// Close refuses every later call.
func (ns *Namespaces) Close() { ns.gate.Close() }
