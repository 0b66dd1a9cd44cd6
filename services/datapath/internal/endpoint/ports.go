// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package endpoint

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/model/workload"
)

// Entry is an endpoint in the eBPF maps.
type Entry struct {
	Slot     uint16
	Ifindex  uint32
	Identity uint32
	Addrs    []netip.Addr
	MAC      MAC
	HostMAC  MAC
	MTU      uint16
	Forwards bool // its policy tables are not both Deny; Cut clears it
	New      bool // a new endpoint, which waits for its policy tables
	Damaged  bool // some keys of its device or addresses are missing
	Epoch    uint32
	// Cookie identifies the container's network namespace, and so its sockets; 0: no socket hook
	// uses it. Entries does not set it.
	Cookie uint64
	// LeaveSockets turns off service translation for the container's sockets. Entries does not set it.
	LeaveSockets bool
}

// String contains every field that the record determines.
func (e Entry) String() string {
	s := fmt.Sprintf("device %d identity %d addresses %v mac %v host mac %v mtu %d", e.Ifindex, e.Identity, e.Addrs, e.MAC, e.HostMAC, e.MTU)
	if !e.Forwards {
		s += " cut"
	}
	if e.Damaged {
		s += " damaged"
	}
	return s
}

// same compares the fields in String.
func (e Entry) same(o Entry) bool {
	return e.Ifindex == o.Ifindex && e.Identity == o.Identity && slices.Equal(e.Addrs, o.Addrs) && e.MAC == o.MAC &&
		e.HostMAC == o.HostMAC && e.MTU == o.MTU && e.Forwards == o.Forwards && e.Damaged == o.Damaged
}

// Maps publishes endpoints to the eBPF programs.
type Maps interface {
	// Publish makes e visible and returns its endpoint ID. It returns ErrAddressHeld if a key belongs
	// to another endpoint and ErrFull if the maps have no capacity. After an error, no entry of e
	// remains.
	Publish(ctx context.Context, e Entry) (slot uint16, err error)
	// Cut stops all traffic of the endpoint. ErrNotFound if it does not exist.
	Cut(slot uint16) error
	// Unpublish removes all keys. ErrNotFound if the endpoint does not exist.
	Unpublish(slot uint16) error
	// SetIdentity changes the identity and the policy tables of a published endpoint by one store:
	// each packet is evaluated as the old identity or as the new one. It waits for the tables.
	// After ErrUnavailable and ErrFull nothing has changed. It may be repeated. ErrNotFound if the
	// endpoint does not exist.
	SetIdentity(ctx context.Context, slot uint16, identity uint32) error
	// SetIdentityOrIsolate is SetIdentity for a change that must not be delayed. Where SetIdentity
	// returns ErrFull or ErrPoliciesHeld, the endpoint gets the identity and is isolated in each
	// direction that has no table yet, until the table exists; reason says why. After
	// ErrUnavailable nothing has changed.
	SetIdentityOrIsolate(ctx context.Context, slot uint16, identity uint32) (reason string, err error)
	// Entries lists the endpoints in the maps, sorted by ID.
	Entries() ([]Entry, error)
}

// HostPorts forwards ports of the node to endpoints, as their requests specify.
type HostPorts interface {
	// Check reports whether Claim would succeed: ErrHostPort if another endpoint or a service uses
	// a port, a *FieldError if the node cannot forward a port, ErrFull if the tenant of the pod may
	// have no further port.
	Check(s Spec) error
	// SetTenant sets the tenant of a namespace; ports of the namespace's pods count towards the
	// tenant. Until the first call, a namespace is its own tenant.
	SetTenant(namespace string, t shares.Tenant)
	// Claim reserves the ports for the owner until Release. It returns the errors that Check returns, and then
	// reserves no port.
	Claim(s Spec) error
	// Restore claims the ports of endpoints that an earlier process created. If two endpoints have
	// the same port, a ready endpoint keeps it.
	Restore(rs []Record)
	// Lead forwards all ports of the owner to its endpoint. ErrFull if the maps have no capacity
	// for some; the other ports are forwarded.
	Lead(ctx context.Context, o workload.Owner) error
	// LeadAll calls Lead for every owner. Ports without capacity are retried later.
	LeadAll(ctx context.Context)
	// Release stops forwarding the owner's ports and frees them. It may be repeated, also for an
	// owner without ports.
	Release(o workload.Owner) error
}

// NoHostPorts implements HostPorts on a node that translates no services. It rejects every port
// mapping.
type NoHostPorts struct{}

// Check implements HostPorts.
func (NoHostPorts) Check(s Spec) error {
	if len(s.PortMappings) == 0 {
		return nil
	}
	return fmt.Errorf("host port %v: %w, so its traffic would not reach the container", s.PortMappings[0],
		ErrLoadBalancingOff)
}

// SetTenant implements HostPorts.
func (NoHostPorts) SetTenant(string, shares.Tenant) {}

// Claim implements HostPorts.
func (n NoHostPorts) Claim(s Spec) error { return n.Check(s) }

// Restore implements HostPorts.
func (NoHostPorts) Restore([]Record) {}

// Lead implements HostPorts.
func (NoHostPorts) Lead(context.Context, workload.Owner) error { return nil }

// LeadAll implements HostPorts.
func (NoHostPorts) LeadAll(context.Context) {}

// Release implements HostPorts.
func (NoHostPorts) Release(workload.Owner) error { return nil }

// Policies selects the tables that evaluate endpoints. Maps gives an endpoint its tables.
type Policies interface {
	// Await returns when the kernel has the tables of the identity, so that a new endpoint may
	// start. ErrUnavailable if the tables do not arrive, ErrFull if the maps have no capacity.
	Await(ctx context.Context, identity uint32) error
	// Prepare is like Await, but it also waits if Await would return at once because new endpoints may start without
	// their tables.
	Prepare(ctx context.Context, identity uint32) error
	// Of returns the tables that evaluate an endpoint.
	Of(slot uint16) (Policy, bool)
}

// Policy describes the tables that evaluate an endpoint.
type Policy struct {
	Revision                  uint64 // of policies; 0: not known
	EgressTable, IngressTable uint16
	Epoch                     uint32
	Refusal                   string // why a newer revision is not enforced
	Audit                     bool   // audit mode: packets that the policy denies pass and are reported
	Pending                   bool   // no policy is known yet
}

// Namespace is an open network namespace.
type Namespace interface {
	ID() NamespaceID
	// Cookie is the kernel's number for the namespace, by which programs recognise its sockets. The
	// kernel does not reuse it until the machine restarts.
	Cookie() (uint64, error)
	Close() error
}

// HostDevice is a device that carries the mark of this instance.
type HostDevice struct {
	Name  string
	Index uint32
}

// Links creates, checks and removes devices.
type Links interface {
	// OpenNamespace opens and verifies the path. ErrNamespaceGone if the path does not exist,
	// ErrNamespace if it is not a network namespace or is the node's own.
	OpenNamespace(path string) (Namespace, error)
	// Create makes the veth pair, both ends down, and returns d with its interface indexes.
	// ErrNameTaken if the namespace has an interface of that name.
	Create(ns Namespace, d Device) (Device, error)
	// Configure sets everything that can be set while the devices are down.
	Configure(ns Namespace, d Device) error
	// Attach attaches the programs to the host end.
	Attach(d Device) error
	// Activate sets both ends up and adds routes and neighbours. It returns d with SourceRouted
	// extended by the addresses that cannot use the default routes, because another interface has
	// these.
	Activate(ns Namespace, d Device) (Device, error)
	// Deactivate removes the changes of Activate in the namespace that deleting the device would
	// leave behind.
	Deactivate(ns Namespace, d Device) error
	// Remove deletes the devices in one batch. A missing device is not an error.
	Remove(devices []HostDevice) error
	// Devices lists the devices of this instance in the node's network namespace.
	Devices() ([]HostDevice, error)

	// CheckHost compares the host end with the results of Attach, Configure and Activate.
	// CheckHosts does it for many devices, in their order. CheckContainer compares the container
	// end, and RepairContainer repairs it.
	CheckHost(d Device) ([]Difference, error)
	CheckHosts(ds []Device) ([][]Difference, error)
	CheckContainer(ns Namespace, d Device) ([]Difference, error)
	RepairContainer(ns Namespace, d Device) error
	// RepairHost repairs the differences that CheckHost finds, except SubjectTCX and
	// SubjectRootQdisc. It replaces and never removes.
	RepairHost(d Device) error
	// CheckFilters compares only the programs of a host end whose endpoint is unknown. AttachTo
	// attaches them.
	CheckFilters(d HostDevice) ([]Difference, error)
	AttachTo(d HostDevice) error
}

// Leases is the address service.
type Leases interface {
	// Confirm makes the owner's lease permanent. ErrLease if the lease is gone or is of other
	// addresses, ErrUnavailable if the service does not answer.
	Confirm(ctx context.Context, o workload.Owner, addrs []netip.Addr) error
	// Release releases everything that the owner holds, if anything.
	Release(ctx context.Context, o workload.Owner) error
	// Claim leases exactly these addresses to the owner and confirms them, even if the service has
	// no lease of the owner. ErrLease if another owner has one of the addresses, ErrUnavailable if
	// the service does not answer.
	Claim(ctx context.Context, o workload.Owner, addrs []netip.Addr) error
	// Confirmed lists the owners of confirmed allocations: owners that this datapath manages, and
	// owners of other managers.
	Confirmed(ctx context.Context) (ours, others []workload.Owner, err error)
}

// Identities is the identity service.
type Identities interface {
	// Resolve returns the identity of a workload and takes a reference for the owner.
	// ErrUnavailable if the service does not answer; also ErrPodUnknown if it answers but has not
	// seen the workload's pod.
	Resolve(ctx context.Context, s Spec) (Identity, error)
	// Preview returns the identity that Resolve would, and takes no reference. The number is 0 if
	// it is not known yet.
	Preview(ctx context.Context, s Spec) (Identity, error)
	// Confirm reports that the owner's endpoint is enforced with this identity.
	Confirm(ctx context.Context, o workload.Owner, number uint32) error
	// Release drops the owner's reference, if any.
	Release(ctx context.Context, o workload.Owner) error
}

// Service reports the health of a service that the core calls.
type Service interface {
	// Err is the error of the last call if the service did not answer, else nil.
	Err() error
}

// Connection is a service whose connection is monitored.
type Connection interface {
	Service
	// Reconnected sends each time a lost connection is back. It closes the channel when ctx ends.
	Reconnected(ctx context.Context) <-chan struct{}
}

// Records is the durable store of records.
type Records interface {
	// Save writes or replaces the owner's record. ErrStorage if the disk is full or not writable.
	Save(r Record) error
	// Err returns the error that Save would return now, or nil.
	Err() error
	// Remove removes the owner's record, if it exists.
	Remove(o workload.Owner) error
	// Load reads all records. Unreadable files are returned in bad and stay. An owner's readable
	// record is left out if an unreadable file of a later phase exists.
	Load() (records []Record, bad []Unreadable, err error)
}

// Spooled is a deletion in the spool. Before a caller creates an endpoint of the same owner, it executes the deletion
// and removes it from the spool. Therefore the deletion applies to any endpoint that the owner has while it is in the
// spool.
type Spooled struct {
	Waits func() (bool, error) // reports whether it still lies on disk
	Done  func() error         // removes it from disk
}

// Host is the kernel state that belongs to no endpoint: rules, routes, the firewall, sysctls, the
// host's own addresses.
type Host interface {
	Check() ([]Difference, error)
	// Repair repairs what Check finds. Its error has one reason for each difference that remains.
	Repair() error
}

// Pool is a prefix of sluice-ipam and the node's own address in it.
type Pool struct {
	CIDR    netip.Prefix
	Gateway netip.Addr
}
