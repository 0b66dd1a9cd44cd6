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

// Phase is what a record says about its endpoint.
type Phase string

// The phases of a record.
const (
	// PhaseCreating is written before anything is made: whatever the owner has
	// may be half done.
	PhaseCreating Phase = "creating"
	// PhaseReady is written when everything is in force.
	PhaseReady Phase = "ready"
	// PhaseDeleted is a tombstone: the endpoint is gone, its addresses and
	// identity still have to be released.
	PhaseDeleted Phase = "deleted"
)

// Record is what survives the process.
type Record struct {
	Phase Phase `json:"phase"`
	// BootID is the boot in which it was written; what another boot left in
	// the kernel is gone.
	BootID    string      `json:"bootId"`
	Spec      Spec        `json:"spec"`
	Namespace NamespaceID `json:"namespace"`
	Device    Device      `json:"device"`
	Identity  Identity    `json:"identity"`
	// Given is what Update has changed of the request's labels and ports, nil if
	// nothing. Spec stays as it was asked for.
	Given   *Given    `json:"given,omitempty"`
	Slot    uint16    `json:"slot,omitempty"`
	Created time.Time `json:"created,omitzero"`
	// Evaluated says that its tables came from a policy service, so that the table
	// that allows everything means that no policy selects it.
	Evaluated bool `json:"judged,omitempty"`
}

// Validate says whether the record makes sense; the error names the field.
func (r Record) Validate() error {
	if err := ValidateOwner(r.Spec.Owner); err != nil {
		return err
	}
	switch r.Phase {
	case PhaseDeleted:
		return nil
	case PhaseCreating, PhaseReady:
	default:
		return invalid("phase", "%q is no phase", clip(string(r.Phase)))
	}
	for _, a := range r.Spec.Addrs {
		if !a.IsValid() || a.Is4In6() || a.Zone() != "" {
			return invalid("spec.addrs", "%v is no plain address", a)
		}
	}
	if n := len(r.Spec.Addrs); n == 0 || n > 2 || n == 2 && r.Spec.Addrs[0].Is4() == r.Spec.Addrs[1].Is4() {
		return invalid("spec.addrs", "want one address, or one of each family")
	}
	if r.Spec.Netns == "" || r.Spec.Netns[0] != '/' {
		return invalid("spec.netns", "%q is no absolute path", clip(r.Spec.Netns))
	}
	if !workload.IsInterface(r.Device.HostName) || !workload.IsInterface(r.Device.Name) {
		return invalid("device", "no usable device names")
	}
	for _, a := range r.Device.SourceRouted {
		if !slices.Contains(r.Spec.Addrs, a) {
			return invalid("device.sourceRouted", "%v is no address of the endpoint", a)
		}
	}
	if err := validateMappings("spec.portMappings", r.Spec.PortMappings, r.Spec.Addrs); err != nil {
		return err
	}
	if r.Phase == PhaseCreating {
		return nil
	}
	if r.Slot == 0 || r.Slot > 4095 {
		return invalid("slot", "%d is no slot of a container", r.Slot)
	}
	if r.Device.HostIndex == 0 || !r.Device.MAC.unicast() || !r.Device.HostMAC.unicast() || r.Device.MTU == 0 {
		return invalid("device", "index, hardware addresses or MTU are missing")
	}
	if err := r.Identity.Validate(); err != nil {
		return err
	}
	if !slices.Equal(r.Device.Addrs, r.Spec.Addrs) {
		return invalid("device.addrs", "%v, and the request says %v", r.Device.Addrs, r.Spec.Addrs)
	}
	return nil
}

// Given is what the identity of an endpoint comes from, unless that is its pod.
type Given struct {
	Labels []label.Label        `json:"labels,omitempty"`
	Ports  []workload.NamedPort `json:"ports,omitempty"`
}

// Equal says whether both give the same identity.
func (g Given) Equal(h Given) bool {
	return slices.Equal(g.Labels, h.Labels) && slices.Equal(g.Ports, h.Ports)
}

// In is the request that would have been made with it.
func (g Given) In(s Spec) Spec {
	s.Labels, s.Ports = g.Labels, g.Ports
	return s.Normalise()
}

// LastGiven is what the identity of the endpoint comes from: what was asked for last.
func (r Record) LastGiven() Given {
	if r.Given != nil {
		return *r.Given
	}
	return Given{r.Spec.Labels, r.Spec.Ports}
}

// Workload is what the identity service is asked about for the endpoint.
func (r Record) Workload() Spec { return r.LastGiven().In(r.Spec) }

// Ports are the named ports that belong to the endpoint's identity.
func (r Record) Ports() []workload.NamedPort {
	if r.Identity.FromPod {
		return r.Identity.Ports
	}
	return r.LastGiven().Ports
}

// Shares says whether a record is of a live attachment to the namespace of s, when
// the node has these devices. The numbers of namespaces are used again: one whose
// device is gone was of another.
func (r Record) Shares(s Record, devices []HostDevice) bool {
	return r.Phase != PhaseDeleted && r.BootID == s.BootID && r.Namespace == s.Namespace &&
		(r.Phase == PhaseCreating || slices.Contains(devices, HostDevice{r.Device.HostName, r.Device.HostIndex}))
}

// Leads says whether the endpoint has the default route of an address's family.
func (r Record) Leads(like netip.Addr) bool {
	return slices.ContainsFunc(r.Spec.Addrs, func(a netip.Addr) bool {
		return a.Is4() == like.Is4() && !slices.Contains(r.Device.SourceRouted, a)
	})
}

// Entry is what the maps shall hold of a record.
func (r Record) Entry() Entry {
	return Entry{
		Slot: r.Slot, Ifindex: r.Device.HostIndex, Identity: r.Identity.Number, Addrs: r.Spec.Addrs,
		MAC: r.Device.MAC, HostMAC: r.Device.HostMAC, MTU: r.Device.MTU, Forwards: true,
		LeaveSockets: r.Spec.LeaveSockets,
	}
}

// Owns says whether an entry of the maps was made for the record.
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

// DiffersFrom says how the maps' entries, which are sorted by slot, differ from the
// record; false if they do not.
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

// DiffersInIdentity says whether the maps have the record's endpoint, but with
// another identity.
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

// Unreadable is a file among the records that is no record: corrupt, of a newer
// version, or under a name that is not its own.
//
// Its endpoint may be a running pod. Until the file is repaired or removed, or
// the endpoint is deleted, nothing that could be that pod's is given up: its
// device and slot stay, without traffic, and its addresses stay leased.
type Unreadable struct {
	File string
	// Key is Owner.Key of the endpoint by the file's name; empty if the name
	// says nothing.
	Key string
	Err error // names the file
}

// StandsInFor says whether the identity of r is that of s, too, as far as labels and
// ports can tell: what the labels of a pod are now, only the identity service knows.
func (r Record) StandsInFor(s Spec) bool {
	return r.Phase == PhaseReady && !r.Identity.FromPod && r.LastGiven().Equal(Given{Labels: s.Labels, Ports: s.Ports})
}

// HostDevice is the host end, by name and index.
func (r Record) HostDevice() HostDevice {
	return HostDevice{Name: r.Device.HostName, Index: r.Device.HostIndex}
}
