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

// Namespace maps a network namespace to the endpoint of its sockets.
type Namespace struct {
	// Cookie identifies the namespace: netns.Namespace.Cookie.
	Cookie uint64
	// Slot is the endpoint ID, endpointmap.HostID for the node's own namespace.
	Slot endpointmap.ID
	// Leave disables the translation of its sockets.
	Leave bool
}

func (n Namespace) value() bpf.MapsSlNs {
	v := bpf.MapsSlNs{Slot: n.Slot}
	if n.Leave {
		v.Flags = leave
	}
	return v
}

// Namespaces are the network namespaces whose sockets the programs recognise. Its methods may be called concurrently.
// No other process should write to the map: entries that it adds are only visible to List.
type Namespaces struct {
	gate pin.Gate
	ns   *ebpf.Map
	// slots are the cookies by endpoint ID, nearly always one each. nil until the first change, which lists the map.
	// guarded by gate
	slots map[endpointmap.ID][]uint64
}

// OpenNamespaces opens the map of namespaces.
func OpenNamespaces(pm *pin.Maps) *Namespaces {
	return &Namespaces{gate: pin.Gate{ValidateOnly: pm.ValidateOnly}, ns: pm.Map(bpf.MapsMapSlNs)}
}

// lock locks the map for a change, and loads slots.
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

// Set assigns the sockets of a namespace to an endpoint. An unchanged entry is not written. A changed entry is deleted
// and inserted again, because the values of the map are written once: a call in between is handled as in an unknown
// namespace. If the map is full, it returns pin.ErrFull.
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

// lookup returns the entry of a namespace. The caller holds the gate.
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

// set implements Set for a valid namespace. The caller holds the gate.
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

// remove deletes the entry of a namespace. The caller holds the gate.
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

// Remove deletes the entry of a namespace, if it belongs to the given endpoint. A missing entry is not an error.
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

// Claim assigns the sockets of a namespace to an endpoint, unless they belong to another one: of several endpoints in a
// namespace, the first has its sockets. It removes other entries with the same endpoint ID, which a deleted endpoint
// left.
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

// Release removes the namespaces of an endpoint.
func (ns *Namespaces) Release(slot endpointmap.ID) error {
	if err := ns.lock(); err != nil {
		return err
	}
	defer ns.gate.Unlock()
	return ns.release(slot, 0)
}

// release removes the namespaces of an endpoint, except for one. The caller holds the gate.
func (ns *Namespaces) release(slot endpointmap.ID, but uint64) error {
	var errs []error
	for _, cookie := range slices.Clone(ns.slots[slot]) {
		if cookie != but {
			errs = append(errs, ns.remove(cookie, slot))
		}
	}
	return errors.Join(errs...)
}

// List returns all namespaces, sorted by cookie.
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

// Close makes every later call fail.
func (ns *Namespaces) Close() { ns.gate.Close() }
