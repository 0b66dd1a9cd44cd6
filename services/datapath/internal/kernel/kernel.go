// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package kernel owns the eBPF maps and programs of one Sluice instance.
//
// It loads the programs of the repository's bpf/ folder against maps that are
// pinned in the instance's bpffs directory, publishes endpoints and addresses
// into those maps, and reads counters and events back. What it puts into the
// kernel stays there when the process ends: the tc filters hold the programs,
// the pins hold the maps, and the next process adopts both.
//
// It does not touch devices, routes, filters or namespaces, and it does not
// decide anything: who may be an endpoint and which policy table judges it is
// the caller's business.
//
// How the maps are written is part of their meaning. The value of a hash map
// is written once and deleted; everything that changes lives in one aligned
// 64-bit word of an array; values of longest-prefix maps are at most eight
// bytes and may be replaced. A reader therefore never misses a published
// endpoint and never reads another endpoint's record.
package kernel

import (
	"context"
	"log/slog"
	"net/netip"
	"time"
)

// Options say where the maps are pinned and fix the values that the programs
// know as constants.
type Options struct {
	// Dir is the bpffs directory of this instance, for example
	// /sys/fs/bpf/sluice. It is created with mode 0700 if it does not exist; a
	// bpffs must be mounted at it or above it.
	Dir string

	// PodCIDRs are the node's own pod ranges, at least one, at most one per
	// family. An address inside them that no endpoint has is answered with the
	// reason no-route and never leaves the node.
	PodCIDRs []netip.Prefix

	// TunnelPorts are UDP ports that a pod may not reach on any node address,
	// because a packet to them could forge another pod's identity. At most
	// MaxTunnelPorts, 1 to 65535. Empty means the VXLAN port 4789.
	TunnelPorts []uint16

	// EventsPerSecond limits drop events per CPU and reason; what exceeds it is
	// counted in the next event's Lost. Zero means 64.
	EventsPerSecond uint32

	// ValidateOnly loads and verifies everything against private maps and
	// writes nothing below Dir. The returned Kernel refuses changes with
	// ErrValidateOnly; its Endpoints and IPCache list what the pinned maps
	// hold, if there are any.
	ValidateOnly bool

	// Log receives what Open adopted, created and put right. Nil discards it.
	Log *slog.Logger
}

// MaxTunnelPorts is the number of ports that fit into Options.TunnelPorts.
const MaxTunnelPorts = 4

// Kernel is a handle on the maps and programs of one instance. Its methods may
// be called concurrently; changes are applied one after the other.
type Kernel struct {
	*state
}

// Open adopts the pinned maps of o.Dir whose layout is the one this build
// knows, creates those that are missing, and loads the programs against them.
//
// A pinned map is never recreated while it exists: the layout is part of the
// pin's name (sl_ep_v1_<hash>), so another layout is another map beside it.
// Open changes no endpoint. It completes what a killed process left
// half-deleted: addresses that point to a slot without a device.
func Open(ctx context.Context, o Options) (*Kernel, error) { return open(ctx, o) }

// Close releases this process's handles. It detaches and unpins nothing:
// packets flow on, and the next Open adopts what is there.
func (k *Kernel) Close() error { return k.close() }

// FromPod is the program for the ingress hook of an endpoint's host end:
// everything that the pod sends. Attach it with the name sluice_from_pod.
func (k *Kernel) FromPod() Program { return k.fromPod }

// ToPod is the program for the egress hook of an endpoint's host end: what the
// host's stack sends to the pod. Attach it with the name sluice_to_pod.
func (k *Kernel) ToPod() Program { return k.toPod }

// Audit compares the program with the given id, as found in a filter, with
// want (FromPod or ToPod). A program that is gone is ErrNoProgram.
func (k *Kernel) Audit(id ProgramID, want Program) (Audit, error) { return k.audit(id, want) }

// Publish makes e visible to the programs and returns its slot. All fields of
// the slot are written before the first key that leads to it; e.Policy's gen
// is replaced by a new one. e.Slot is ignored.
//
// ErrExists says that the device or one of the addresses already belongs to
// another slot; ErrFull that all MaxEndpoints slots are taken. On any error
// nothing of e remains visible.
func (k *Kernel) Publish(ctx context.Context, e Endpoint) (Slot, error) { return k.publish(ctx, e) }

// SetPolicy replaces both tables of the endpoint and its gen by one 64-bit
// store, so that a packet sees wholly the old word or wholly the new one.
func (k *Kernel) SetPolicy(s Slot, egress, ingress Table) (gen uint32, err error) {
	return k.setPolicy(s, egress, ingress)
}

// SetIdentity changes the identity of a published endpoint: first the slot,
// then the gen, then the ipcache entries of its addresses.
func (k *Kernel) SetIdentity(s Slot, id Identity) error { return k.setIdentity(s, id) }

// Cut denies the endpoint everything in both directions by one store. It is
// the first step of a deletion, and may be repeated.
func (k *Kernel) Cut(s Slot) error { return k.cut(s) }

// Unpublish cuts the endpoint and deletes every key that leads to its slot.
// It may be repeated. The slot number is not given out again before a grace
// period has passed (see Barrier).
func (k *Kernel) Unpublish(s Slot) error { return k.unpublish(s) }

// Barrier waits until every program run that started before the call has
// ended (8 to 16 ms), then frees the slots that were unpublished before it.
// One call covers any number of endpoints. Nobody has to call it: Publish does
// when it runs out of slots.
func (k *Kernel) Barrier(ctx context.Context) error { return k.barrier(ctx) }

// Endpoints lists what the kernel's maps hold, by slot, without the host. It
// is read from the maps at each call, never from memory.
func (k *Kernel) Endpoints() ([]Endpoint, error) { return k.endpoints() }

// Lookup returns the endpoint of one slot as the maps hold it. ErrNotFound
// says that no device leads to the slot.
func (k *Kernel) Lookup(s Slot) (Endpoint, error) { return k.lookup(s) }

// SyncHostAddrs makes addrs the complete set of the host's own addresses: each
// leads to slot 0 and has identity host in the ipcache. Only differences are
// written. An address that an endpoint holds is ErrExists, and the rest is
// still applied.
func (k *Kernel) SyncHostAddrs(addrs []netip.Addr) error { return k.syncHostAddrs(addrs) }

// HostAddrs lists the host's own addresses as the maps hold them, sorted.
func (k *Kernel) HostAddrs() ([]netip.Addr, error) { return k.hostAddrs() }

// UpsertIP sets what is known about a prefix: the longest matching prefix
// counts. The entries of endpoints, of host addresses and of the node's pod
// ranges are kept by Publish, SyncHostAddrs and Open.
func (k *Kernel) UpsertIP(p netip.Prefix, i IPInfo) error { return k.upsertIP(p, i) }

// DeleteIP removes a prefix from the ipcache. A prefix that is not there is
// not an error.
func (k *Kernel) DeleteIP(p netip.Prefix) error { return k.deleteIP(p) }

// IPCache lists the ipcache, sorted by prefix.
func (k *Kernel) IPCache() ([]IPEntry, error) { return k.ipcache() }

// Metrics returns the counters of every reason and direction that has counted
// anything, summed over the CPUs. They only grow while the maps live.
func (k *Kernel) Metrics() ([]Counter, error) { return k.metrics() }

// Events opens a reader on the drop events. The ring buffer has one reader:
// two would share the events between them.
func (k *Kernel) Events() (*EventReader, error) { return k.events() }

// Maps describes the pinned maps, for status output.
func (k *Kernel) Maps() ([]MapInfo, error) { return k.maps() }

// MapInfo is one pinned map.
type MapInfo struct {
	Name       string // "sl_ep"
	Pin        string // file name below Options.Dir
	ID         uint32 // the kernel's id
	MaxEntries uint32
	Bytes      uint64 // memory as the kernel accounts it, 0 if unknown
}

// Event is one dropped packet.
type Event struct {
	// Time is when the program saw the packet.
	Time time.Time
	// Lost is how many events of this reason this CPU left out since the last
	// one it sent, by rate limit or because the buffer was full.
	Lost      uint32
	Reason    Reason
	Direction Direction
	// Ifindex is the device whose hook dropped the packet.
	Ifindex uint32
	// Length of the packet in bytes with its Ethernet header, or of all
	// segments of a GSO packet.
	Length uint32
	// EtherType is the protocol that the frame names, in host byte order.
	EtherType uint16
	// SourceMAC is the Ethernet source address.
	SourceMAC [6]byte
	// Source and Destination are invalid if the packet was dropped before they
	// were read. Ports are 0 for protocols without ports and for fragments.
	Source, Destination netip.AddrPort
	// Protocol is the IP protocol number after extension headers.
	Protocol uint8
	TCPFlags uint8
	// SourceIdentity and DestinationIdentity are 0 if not determined.
	SourceIdentity, DestinationIdentity Identity
	// SourceSlot and DestinationSlot are NoSlot if not local or not determined.
	SourceSlot, DestinationSlot Slot
	// Rule is the number of the deciding policy rule, 0 if no rule decided.
	Rule uint32
}
