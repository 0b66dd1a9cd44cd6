// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package endpoint

import (
	"cmp"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/workload"
)

// Phase is the phase of an endpoint as its record states it.
type Phase string

// The phases of a record.
const (
	// PhaseCreating is written before anything is created: any of the owner's resources may be
	// incomplete.
	PhaseCreating Phase = "creating"
	// PhaseReady is written when the endpoint is completely set up.
	PhaseReady Phase = "ready"
	// PhaseDeleted is a tombstone: the endpoint is removed, but its addresses and identity are not
	// released yet.
	PhaseDeleted Phase = "deleted"
)

// Record is the durable state of an endpoint.
type Record struct {
	Phase Phase `json:"phase"`
	// BootID is the boot in which the record was written. Kernel state of another boot no longer
	// exists.
	BootID    string      `json:"bootId"`
	Spec      Spec        `json:"spec"`
	Namespace NamespaceID `json:"namespace"`
	Device    Device      `json:"device"`
	Identity  Identity    `json:"identity"`
	// Given are the labels and ports of the last update, nil if there was none. Spec keeps the
	// original request.
	Given   *Given    `json:"given,omitempty"`
	Slot    uint16    `json:"slot,omitempty"`
	Created time.Time `json:"created,omitzero"`
	// Evaluated reports that the tables came from a policy service. Then the table that allows
	// everything means that no policy selects the endpoint.
	Evaluated bool `json:"judged,omitempty"`
}

// Validate checks the record. The error names the field.
func (r Record) Validate() error {
	if err := ValidateOwner(r.Spec.Owner); err != nil {
		return err
	}
	switch r.Phase {
	case PhaseDeleted:
		return nil
	case PhaseCreating, PhaseReady:
	default:
		return invalid("phase", "%q is not a phase", clip(string(r.Phase)))
	}
	for _, a := range r.Spec.Addrs {
		if !a.IsValid() || a.Is4In6() || a.Zone() != "" {
			return invalid("spec.addrs", "%v is not a plain address", a)
		}
	}
	if n := len(r.Spec.Addrs); n == 0 || n > 2 || n == 2 && r.Spec.Addrs[0].Is4() == r.Spec.Addrs[1].Is4() {
		return invalid("spec.addrs", "want one address, or one of each family")
	}
	if r.Spec.Netns == "" || r.Spec.Netns[0] != '/' {
		return invalid("spec.netns", "%q is not an absolute path", clip(r.Spec.Netns))
	}
	if !workload.IsInterface(r.Device.HostName) || !workload.IsInterface(r.Device.Name) {
		return invalid("device", "no usable device names")
	}
	for _, a := range r.Device.SourceRouted {
		if !slices.Contains(r.Spec.Addrs, a) {
			return invalid("device.sourceRouted", "%v is not an address of the endpoint", a)
		}
	}
	if err := validateMappings("spec.portMappings", r.Spec.PortMappings, r.Spec.Addrs); err != nil {
		return err
	}
	if r.Phase == PhaseCreating {
		return nil
	}
	if r.Slot == 0 || r.Slot > 4095 {
		return invalid("slot", "%d is not the endpoint ID of a container", r.Slot)
	}
	if r.Device.HostIndex == 0 || !r.Device.MAC.unicast() || !r.Device.HostMAC.unicast() || r.Device.MTU == 0 {
		return invalid("device", "index, hardware addresses or MTU are missing")
	}
	if err := r.Identity.Validate(); err != nil {
		return err
	}
	if !slices.Equal(r.Device.Addrs, r.Spec.Addrs) {
		return invalid("device.addrs", "%v differ from the requested addresses %v", r.Device.Addrs, r.Spec.Addrs)
	}
	return nil
}

// Given are the labels and ports that determine the identity of an endpoint, unless its pod does.
type Given struct {
	Labels []label.Label        `json:"labels,omitempty"`
	Ports  []workload.NamedPort `json:"ports,omitempty"`
}

// Equal reports whether both give the same identity.
func (g Given) Equal(h Given) bool {
	return slices.Equal(g.Labels, h.Labels) && slices.Equal(g.Ports, h.Ports)
}

// In returns request s with these labels and ports.
func (g Given) In(s Spec) Spec {
	s.Labels, s.Ports = g.Labels, g.Ports
	return s.Normalise()
}

// LastGiven returns the labels and ports of the last update, else of the request.
func (r Record) LastGiven() Given {
	if r.Given != nil {
		return *r.Given
	}
	return Given{r.Spec.Labels, r.Spec.Ports}
}

// Workload returns the request that the identity service resolves for the endpoint.
func (r Record) Workload() Spec { return r.LastGiven().In(r.Spec) }

// Ports returns the named ports that belong to the endpoint's identity.
func (r Record) Ports() []workload.NamedPort {
	if r.Identity.FromPod {
		return r.Identity.Ports
	}
	return r.LastGiven().Ports
}

// Shares reports whether r is a live attachment to the network namespace of s, given the node's
// devices. Namespace inodes are reused: if the device of r is gone, r belonged to an earlier
// namespace of the same inode.
func (r Record) Shares(s Record, devices []HostDevice) bool {
	return r.Phase != PhaseDeleted && r.BootID == s.BootID && r.Namespace == s.Namespace &&
		(r.Phase == PhaseCreating || slices.Contains(devices, HostDevice{r.Device.HostName, r.Device.HostIndex}))
}

// Leads reports whether the endpoint has the default route for the address family of like.
func (r Record) Leads(like netip.Addr) bool {
	return slices.ContainsFunc(r.Spec.Addrs, func(a netip.Addr) bool {
		return a.Is4() == like.Is4() && !slices.Contains(r.Device.SourceRouted, a)
	})
}

// Entry returns the expected map entry of the record.
func (r Record) Entry() Entry {
	return Entry{
		Slot: r.Slot, Ifindex: r.Device.HostIndex, Identity: r.Identity.Number, Addrs: r.Spec.Addrs,
		MAC: r.Device.MAC, HostMAC: r.Device.HostMAC, MTU: r.Device.MTU, Forwards: true,
		LeaveSockets: r.Spec.LeaveSockets,
	}
}

// Owns reports whether a map entry was made for the record.
func (r Record) Owns(e Entry) bool {
	if e.MAC != r.Device.MAC || e.HostMAC != r.Device.HostMAC {
		return false
	}
	for _, a := range e.Addrs {
		for _, b := range r.Spec.Addrs {
			if a == b {
				return true
			}
		}
	}
	return false
}

// DiffersFrom compares the record with its map entry. entries are sorted by slot. It returns false
// if they are equal.
func (r Record) DiffersFrom(entries []Entry) (Difference, bool) {
	want := r.Entry()
	have, found := entryOf(entries, r.Slot)
	if found && have.same(want) {
		return Difference{}, false
	}
	d := Difference{Subject: "sl_ep", Key: strconv.Itoa(int(r.Slot)), Want: want.String()}
	if found {
		d.Have = have.String()
	}
	return d, true
}

// DiffersInIdentity reports whether the maps have the record's endpoint with another identity and
// no other difference.
func (r Record) DiffersInIdentity(entries []Entry) bool {
	e, found := entryOf(entries, r.Slot)
	e.Identity = r.Identity.Number
	return found && e.same(r.Entry())
}

func entryOf(entries []Entry, slot uint16) (Entry, bool) {
	i, found := slices.BinarySearchFunc(entries, slot, func(e Entry, s uint16) int { return cmp.Compare(e.Slot, s) })
	if !found {
		return Entry{}, false
	}
	return entries[i], true
}

// Unreadable is a file among the records that is not a valid record: corrupt, of a newer version,
// or under another owner's name.
//
// Its endpoint may be a running pod. Until the file is repaired or removed, or the endpoint is
// deleted, nothing that this pod could use is freed: its device and slot stay, without traffic, and
// its addresses stay leased.
type Unreadable struct {
	File string
	// Key is the Owner.Key in the file's name; empty if the name has none.
	Key string
	Err error // names the file
}

// StandsInFor reports whether s, by its labels and ports, would get the identity of r. It is false if the identity
// comes from a pod, because only the identity service knows the pod's current labels.
func (r Record) StandsInFor(s Spec) bool {
	return r.Phase == PhaseReady && !r.Identity.FromPod && r.LastGiven().Equal(Given{Labels: s.Labels, Ports: s.Ports})
}

// HostDevice returns name and index of the host end.
func (r Record) HostDevice() HostDevice {
	return HostDevice{Name: r.Device.HostName, Index: r.Device.HostIndex}
}
