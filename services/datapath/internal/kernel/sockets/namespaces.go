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
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/slotmap"
)

// leave is SL_NS_LEAVE.
const leave = 1

// Namespace says whose sockets are in a network namespace.
type Namespace struct {
	// Cookie of the namespace: netns.Namespace.Cookie.
	Cookie uint64
	// Slot of the endpoint, slotmap.HostSlot for the node's own namespace.
	Slot slotmap.Slot
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
// methods may be called concurrently.
type Namespaces struct {
	gate pin.Gate
	ns   *ebpf.Map
}

// OpenNamespaces gives access to the map of namespaces.
func OpenNamespaces(pm *pin.Maps) *Namespaces {
	return &Namespaces{gate: pin.Gate{ValidateOnly: pm.ValidateOnly}, ns: pm.Map(bpf.MapsMapSlNs)}
}

// Set makes the sockets of a namespace those of an endpoint. What is there already
// is not written again. A namespace that changes its slot or its flags is deleted
// and added, because the values of a hash are written once: a call in between is
// made as in an unknown namespace. A full map is pin.ErrFull.
func (ns *Namespaces) Set(n Namespace) error {
	if n.Cookie == 0 {
		return fmt.Errorf("%w: Cookie is 0", pin.ErrInvalid)
	}
	if n.Slot == slotmap.NoSlot || n.Slot > slotmap.MaxEndpoints {
		return fmt.Errorf("%w: Slot %d", pin.ErrInvalid, n.Slot)
	}
	if err := ns.gate.Lock(); err != nil {
		return err
	}
	defer ns.gate.Unlock()
	var have bpf.MapsSlNs
	switch err := ns.ns.Lookup(n.Cookie, &have); {
	case err == nil && have == n.value():
		return nil
	case err == nil:
		if err := pin.DeleteKey(ns.ns, n.Cookie); err != nil {
			return fmt.Errorf("namespace %d: %w", n.Cookie, err)
		}
	case !errors.Is(err, ebpf.ErrKeyNotExist):
		return fmt.Errorf("namespace %d: %w", n.Cookie, err)
	}
	if err := pin.InsertOnce(ns.ns, n.Cookie, n.value()); err != nil {
		return fmt.Errorf("namespace %d: %w", n.Cookie, err)
	}
	return nil
}

// Remove makes a namespace unknown. One that is not there is no error.
func (ns *Namespaces) Remove(cookie uint64) error {
	if err := ns.gate.Lock(); err != nil {
		return err
	}
	defer ns.gate.Unlock()
	if err := pin.DeleteKey(ns.ns, cookie); err != nil {
		return fmt.Errorf("namespace %d: %w", cookie, err)
	}
	return nil
}

// Claim makes the sockets of a namespace those of an endpoint, unless they are those
// of another one: of several endpoints in a namespace the first has its sockets. What
// an earlier endpoint of the slot has left goes.
func (ns *Namespaces) Claim(n Namespace) error {
	all, err := ns.List()
	if err != nil {
		return err
	}
	for _, have := range all {
		if have.Cookie == n.Cookie {
			if have.Slot != n.Slot {
				return nil
			}
		} else if have.Slot == n.Slot {
			if err := ns.Remove(have.Cookie); err != nil {
				return err
			}
		}
	}
	return ns.Set(n)
}

// Release makes the namespaces unknown whose sockets were an endpoint's.
func (ns *Namespaces) Release(slot slotmap.Slot) error {
	all, err := ns.List()
	if err != nil {
		return err
	}
	for _, have := range all {
		if have.Slot == slot {
			err = errors.Join(err, ns.Remove(have.Cookie))
		}
	}
	return err
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
