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

// Entry is an endpoint in the maps of the programs.
type Entry struct {
	Slot     uint16
	Ifindex  uint32
	Identity uint32
	Addrs    []netip.Addr
	MAC      MAC
	HostMAC  MAC
	MTU      uint16
	Forwards bool // its tables let packets pass: it is not cut
	New      bool // it has not lived before, and begins only with its tables
	Damaged  bool // some keys that should lead to it are missing
	Epoch    uint32
	// Cookie is the number of the container's network namespace, by which its sockets
	// are known; 0: nothing asks for it. Entries does not say it.
	Cookie uint64
	// LeaveSockets leaves the calls of its sockets as they are. Entries does not say it.
	LeaveSockets bool
}

// String has everything that the record determines.
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

// same compares what String has.
func (e Entry) same(o Entry) bool {
	return e.Ifindex == o.Ifindex && e.Identity == o.Identity && slices.Equal(e.Addrs, o.Addrs) && e.MAC == o.MAC &&
		e.HostMAC == o.HostMAC && e.MTU == o.MTU && e.Forwards == o.Forwards && e.Damaged == o.Damaged
}

// Maps publishes endpoints to the programs.
type Maps interface {
	// Publish makes e visible and returns its slot. ErrAddressHeld if a key
	// belongs to another slot, ErrFull if there is no room. On an error nothing
	// of it remains.
	Publish(ctx context.Context, e Entry) (slot uint16, err error)
	// Cut stops all traffic of the slot. ErrNotFound if it is nobody's.
	Cut(slot uint16) error
	// Unpublish removes all keys. ErrNotFound if it is nobody's.
	Unpublish(slot uint16) error
	// SetIdentity changes the identity of a published slot together with its
	// tables, by one store: a packet is evaluated as the old one or as the new one.
	// It waits for the tables; on ErrUnavailable and ErrFull nothing has changed. It
	// may be repeated. ErrNotFound if the slot is nobody's.
	SetIdentity(ctx context.Context, slot uint16, identity uint32) error
	// SetIdentityOrIsolate is SetIdentity for a change that the endpoint may not be
	// spared. Where SetIdentity returns ErrFull or ErrPoliciesHeld, the endpoint gets the
	// identity and is isolated, in the directions that lack a table, until that is there;
	// reason says why. ErrUnavailable: nothing has changed.
	SetIdentityOrIsolate(ctx context.Context, slot uint16, identity uint32) (reason string, err error)
	// Entries lists what the maps hold, by slot.
	Entries() ([]Entry, error)
}

// HostPorts leads ports of the node to endpoints, as their requests have it.
type HostPorts interface {
	// Check says whether Claim would succeed: ErrHostPort if another endpoint or a
	// service has a port, a *FieldError if the node cannot give one away, ErrFull if the
	// tenant of the pod may have no further one.
	Check(s Spec) error
	// SetTenant sets the tenant of a namespace, for which the ports of its pods count. A
	// namespace of which it was not called is a tenant of its own.
	SetTenant(namespace string, t shares.Tenant)
	// Claim keeps the ports for the owner, until Release. Errors as of Check; then
	// none is kept.
	Claim(s Spec) error
	// Restore claims the ports of endpoints that an earlier process made. Of those that
	// two have it keeps that of one which is ready.
	Restore(rs []Record)
	// Lead has all ports of the owner lead to its endpoint. ErrFull if the maps have no
	// room; the other ports lead there.
	Lead(ctx context.Context, o workload.Owner) error
	// LeadAll does so for every owner. What has no room is tried again later.
	LeadAll(ctx context.Context)
	// Release has the ports of the owner lead nowhere and gives them up. An owner that
	// has none is no error, and it may be repeated.
	Release(o workload.Owner) error
}

// NoHostPorts is HostPorts of a node that translates no services: traffic to a port
// would go elsewhere.
type NoHostPorts struct{}

// Check implements HostPorts.
func (NoHostPorts) Check(s Spec) error {
	if len(s.PortMappings) == 0 {
		return nil
	}
	return fmt.Errorf("host port %v: %w, so that its traffic would go elsewhere", s.PortMappings[0], ErrLoadBalancingOff)
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

// Policies is what evaluates endpoints. Maps gives an endpoint its tables.
type Policies interface {
	// Await returns when an endpoint of the identity may begin: its tables are
	// in the kernel. ErrUnavailable if they do not come, ErrFull if they do not
	// fit.
	Await(ctx context.Context, identity uint32) error
	// Prepare returns when the tables of the identity are in the kernel, whether
	// new endpoints wait for theirs or not. Errors as of Await.
	Prepare(ctx context.Context, identity uint32) error
	// Of says what evaluates a slot.
	Of(slot uint16) (Policy, bool)
}

// Policy is what evaluates an endpoint.
type Policy struct {
	Revision                  uint64 // of policies; 0: not known
	EgressTable, IngressTable uint16
	Epoch                     uint32
	Refusal                   string // why a newer revision is not in force
	Audit                     bool   // what it would deny is let through and reported
	Pending                   bool   // no policy is known yet
}

// Namespace is an open network namespace.
type Namespace interface {
	ID() NamespaceID
	// Cookie is the number by which programs know its sockets. It is not given again
	// while the machine runs.
	Cookie() (uint64, error)
	Close() error
}

// HostDevice is a device that carries the mark of this instance.
type HostDevice struct {
	Name  string
	Index uint32
}

// Links makes devices and looks at them.
type Links interface {
	// OpenNamespace opens and verifies the path: ErrNamespaceGone if nothing is
	// there, ErrNamespace if it is not a network namespace, or the own one.
	OpenNamespace(path string) (Namespace, error)
	// Create makes the pair, both ends down, and returns d with its indexes.
	// ErrNameTaken if the namespace has an interface of that name.
	Create(ns Namespace, d Device) (Device, error)
	// Configure sets what can be set while the devices are down.
	Configure(ns Namespace, d Device) error
	// Attach puts the programs on the host end.
	Attach(d Device) error
	// Activate sets both ends up and adds routes and neighbours. It returns d with
	// those addresses added to SourceRouted that cannot have the default routes
	// because another interface has them.
	Activate(ns Namespace, d Device) (Device, error)
	// Deactivate removes what Activate made inside and does not go with the
	// device.
	Deactivate(ns Namespace, d Device) error
	// Remove deletes the devices, all in one go. What is gone is no error.
	Remove(devices []HostDevice) error
	// Devices lists the devices of this instance in the node's namespace.
	Devices() ([]HostDevice, error)

	// CheckHost compares the host end with what Attach, Configure and Activate
	// make; CheckContainer the other end, which RepairContainer puts right.
	// CheckHosts is CheckHost for many at once, in their order.
	CheckHost(d Device) ([]Difference, error)
	CheckHosts(ds []Device) ([][]Difference, error)
	CheckContainer(ns Namespace, d Device) ([]Difference, error)
	RepairContainer(ns Namespace, d Device) error
	// RepairHost puts right what CheckHost finds, but for SubjectTCX and SubjectRootQdisc. It replaces
	// and never removes.
	RepairHost(d Device) error
	// CheckFilters compares the programs of a host end of which nothing else is
	// known, and AttachTo puts them there.
	CheckFilters(d HostDevice) ([]Difference, error)
	AttachTo(d HostDevice) error
}

// Leases is the service of addresses.
type Leases interface {
	// Confirm makes the owner's lease permanent. ErrLease if it is gone or is
	// of other addresses, ErrUnavailable if the service does not answer.
	Confirm(ctx context.Context, o workload.Owner, addrs []netip.Addr) error
	// Release gives up what the owner holds, if anything.
	Release(ctx context.Context, o workload.Owner) error
	// Claim leases exactly these addresses to the owner and confirms them, although
	// the service may know nothing of it. ErrLease if it has given one of them to
	// another owner, ErrUnavailable if it does not answer.
	Claim(ctx context.Context, o workload.Owner, addrs []netip.Addr) error
	// Confirmed lists the owners of confirmed allocations: ours, and those that
	// another manager answers for.
	Confirmed(ctx context.Context) (ours, others []workload.Owner, err error)
}

// Identities is the service of numbers.
type Identities interface {
	// Resolve gives the number of a workload and holds it for the owner.
	// ErrUnavailable if the service does not answer, with ErrPodUnknown if it does
	// and has not seen the workload's pod.
	Resolve(ctx context.Context, s Spec) (Identity, error)
	// Preview gives what Resolve would and holds nothing; number 0 if it is not
	// known yet.
	Preview(ctx context.Context, s Spec) (Identity, error)
	// Confirm says that the owner's endpoint is enforced as the number.
	Confirm(ctx context.Context, o workload.Owner, number uint32) error
	// Release gives up what the owner holds, if anything.
	Release(ctx context.Context, o workload.Owner) error
}

// Service is how a service that the core calls fares.
type Service interface {
	// Err is the error of the last call if the service did not answer, else nil.
	Err() error
}

// Connection is a service whose connection is watched.
type Connection interface {
	Service
	// Reconnected sends whenever a connection that was lost is there again, until
	// ctx ends, when it closes the channel.
	Reconnected(ctx context.Context) <-chan struct{}
}

// Records is the durable memory.
type Records interface {
	// Save writes or replaces the owner's record. ErrStorage if the disk is
	// full or cannot be written to.
	Save(r Record) error
	// Err says why Save would fail now, or nil.
	Err() error
	// Remove removes it, if it is there.
	Remove(o workload.Owner) error
	// Load reads all of them. Those that cannot be read are in bad, and stay; a
	// record that one of them comes after is not among the records.
	Load() (records []Record, bad []Unreadable, err error)
}

// Spooled is a deletion that lies on disk. A caller that makes an endpoint of the
// same owner afterwards carries it out and takes it back first, so it means every
// endpoint that is there while it is.
type Spooled struct {
	Waits func() (bool, error) // whether it still lies there
	Done  func() error         // takes it back
}

// Host is the part of the kernel that belongs to no endpoint: rules, routes,
// the firewall, sysctls, the host's own addresses.
type Host interface {
	Check() ([]Difference, error)
	// Repair puts right what Check finds, and says per difference why not.
	Repair() error
}

// Pool is a range of ipam with the node's own address in it.
type Pool struct {
	CIDR    netip.Prefix
	Gateway netip.Addr
}
