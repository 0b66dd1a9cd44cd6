// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package endpoint defines the endpoints of the datapath: the request for an endpoint, its record,
// its map entries, the differences an audit can find, and the interfaces through which the endpoint
// lifecycle uses devices, maps, files and other services. Implementations of these interfaces
// import this package and not the lifecycle.
package endpoint

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/model/workload"
)

// ValidateOwner rejects owners that the API rejects, and names that no container interface can
// have. The error is a *FieldError.
func ValidateOwner(o workload.Owner) error {
	if err := (*workload.OwnerError)(nil); errors.As(o.Check(), &err) {
		return invalid("owner."+err.Field, "%s", err.Reason)
	}
	if n := o.Interface; n == "." || n == ".." || n == "lo" {
		return invalid("owner.interface_name", "%q is not a usable interface name", n)
	}
	return nil
}

// MAC is an Ethernet address.
type MAC [6]byte

// String formats the address as 02:00:00:00:00:01.
func (m MAC) String() string {
	return fmt.Sprintf("%02x:%02x:%02x:%02x:%02x:%02x", m[0], m[1], m[2], m[3], m[4], m[5])
}

// MarshalText encodes the address as String does, and the zero address as an empty text.
func (m MAC) MarshalText() ([]byte, error) {
	if m == (MAC{}) {
		return nil, nil
	}
	return []byte(m.String()), nil
}

// UnmarshalText is the inverse of MarshalText.
func (m *MAC) UnmarshalText(text []byte) error {
	*m = MAC{}
	if len(text) == 0 {
		return nil
	}
	raw, err := hex.DecodeString(string(bytes.ReplaceAll(text, []byte(":"), nil)))
	if err != nil || len(raw) != len(m) || len(text) != 17 {
		return fmt.Errorf("%q is not an Ethernet address", clip(string(text)))
	}
	copy(m[:], raw)
	return nil
}

func (m MAC) unicast() bool { return m != MAC{} && m[0]&1 == 0 }

// Scope is one network of one manager. A manager knows when its own endpoints are no longer needed,
// and nothing about the endpoints of other managers.
type Scope struct {
	Manager string
	Network string // empty for a manager without networks
}

// Spec is a request for an endpoint.
type Spec struct {
	Owner workload.Owner `json:"owner"`
	// Manager created the endpoint, such as "cni" for the plugin. Empty if unknown, as in records
	// of version 1.
	Manager string `json:"manager,omitempty"`
	// Network is a network of Manager.
	Network string `json:"network,omitempty"`
	// Pod is zero without Kubernetes.
	Pod workload.PodReference `json:"pod,omitzero"`
	// Netns is the path of the container's network namespace.
	Netns string `json:"netns"`
	// Addrs are the leased addresses, at most one per family, IPv4 first.
	Addrs []netip.Addr `json:"addrs"`
	// Labels as the container runtime gave them.
	Labels []label.Label        `json:"labels,omitempty"`
	Ports  []workload.NamedPort `json:"ports,omitempty"`
	// MAC is the requested address of the container's interface. If zero, it is derived from the
	// owner.
	MAC MAC `json:"mac,omitzero"`
	// MTU in bytes; 0 uses the node's MTU.
	MTU uint16 `json:"mtu,omitempty"`
	// PortMappings forward ports of the node to the container.
	PortMappings []PortMapping `json:"portMappings,omitempty"`
	// LeaveSockets turns off service translation for the container's sockets.
	LeaveSockets bool `json:"leaveSockets,omitempty"`
	// LeaseExpiry is the time at which the address lease ends; zero if unknown. It is not part of the content: each
	// request renews the lease.
	LeaseExpiry time.Time `json:"-"`
}

// Normalise sorts the unordered fields, so that requests of equal content are equal.
func (s Spec) Normalise() Spec {
	s.Addrs = slices.Clone(s.Addrs)
	for i, a := range s.Addrs {
		s.Addrs[i] = a.Unmap()
	}
	slices.SortFunc(s.Addrs, netip.Addr.Compare)
	s.Labels = slices.Clone(s.Labels)
	slices.SortFunc(s.Labels, label.Label.Compare)
	s.Ports = slices.Clone(s.Ports)
	slices.SortFunc(s.Ports, workload.NamedPort.Compare)
	s.PortMappings = slices.Clone(s.PortMappings)
	for i, m := range s.PortMappings {
		s.PortMappings[i].HostIP = m.HostIP.Unmap()
	}
	slices.SortFunc(s.PortMappings, PortMapping.Compare)
	s.PortMappings = slices.Compact(s.PortMappings)
	return s
}

// SameContent reports whether two normalised requests are equal. A manager or pod that is missing in one of them is not
// a difference.
func (s Spec) SameContent(t Spec) bool { return s.Owner == t.Owner && len(s.Differs(t)) == 0 }

// Differs returns the CreateEndpoint fields in which two requests of one owner differ.
func (s Spec) Differs(t Spec) (fields []string) {
	note := func(same bool, field string) {
		if !same {
			fields = append(fields, field)
		}
	}
	note(s.Manager == "" || t.Manager == "" || s.Manager == t.Manager, "manager")
	note(s.Manager == "" || t.Manager == "" || s.Network == t.Network, "network")
	note(s.Pod == workload.PodReference{} || t.Pod == workload.PodReference{} || s.Pod == t.Pod, "pod")
	note(s.Netns == t.Netns, "network_namespace")
	note(s.MAC == t.MAC, "mac")
	note(s.MTU == t.MTU, "mtu")
	note(slices.Equal(s.Addrs, t.Addrs), "addresses")
	note(slices.Equal(s.Labels, t.Labels), "labels")
	note(slices.Equal(s.Ports, t.Ports), "named_ports")
	note(slices.Equal(s.PortMappings, t.PortMappings), "port_mappings")
	note(s.LeaveSockets == t.LeaveSockets, "leave_sockets")
	return fields
}

// Scope returns the manager and network of the endpoint.
func (s Spec) Scope() Scope { return Scope{s.Manager, s.Network} }

// Learn returns s. A manager or pod that s lacks is taken from t.
func (s Spec) Learn(t Spec) Spec {
	if s.Manager == "" {
		s.Manager, s.Network = t.Manager, t.Network
	}
	if s.Pod == (workload.PodReference{}) {
		s.Pod = t.Pod
	}
	return s
}

// Validate checks the request. The error is a *FieldError.
func (s Spec) Validate() error {
	if err := ValidateOwner(s.Owner); err != nil {
		return err
	}
	if len(s.Netns) == 0 || s.Netns[0] != '/' || len(s.Netns) > 4095 || bytes.IndexByte([]byte(s.Netns), 0) >= 0 {
		return invalid("network_namespace", "%q is not an absolute path", clip(s.Netns))
	}
	if len(s.Addrs) == 0 || len(s.Addrs) > 2 || len(s.Addrs) == 2 && s.Addrs[0].Is4() == s.Addrs[1].Is4() {
		return invalid("addresses", "want one address, or one of each family")
	}
	for _, a := range s.Addrs {
		if !a.IsValid() || a.Zone() != "" {
			return invalid("addresses", "%v is not a plain address", a)
		}
		if a.Is6() && s.MTU != 0 && s.MTU < 1280 {
			return invalid("mtu", "%d is below 1280, which IPv6 needs", s.MTU)
		}
	}
	if s.MAC != (MAC{}) && !s.MAC.unicast() {
		return invalid("mac", "%v is not a unicast address", s.MAC)
	}
	return validateMappings("port_mappings", s.PortMappings, s.Addrs)
}

// State is the lifecycle state of an endpoint.
type State uint8

// States, in the order of the lifecycle.
const (
	Restoring State = iota + 1
	WaitingForIdentity
	WaitingForPolicy
	Ready
	Disconnecting
	// Damaged is an endpoint whose device was deleted, by the container or by an operator, while
	// its network namespace remains. Only another ADD recreates the device.
	Damaged
)

// String returns the state's name in output, such as "waiting-for-policy".
func (s State) String() string {
	switch s {
	case Restoring:
		return "restoring"
	case WaitingForIdentity:
		return "waiting-for-identity"
	case WaitingForPolicy:
		return "waiting-for-policy"
	case Ready:
		return "ready"
	case Disconnecting:
		return "disconnecting"
	case Damaged:
		return "damaged"
	}
	return fmt.Sprintf("state-%d", uint8(s))
}

// NamespaceID identifies a network namespace while it exists.
type NamespaceID struct {
	Dev   uint64 `json:"dev"`
	Inode uint64 `json:"inode"`
}

// Device is the veth pair of an endpoint. Names and MAC addresses are derived from the owner and
// known before the pair exists; interface indexes are not.
type Device struct {
	HostName  string `json:"hostName"`
	HostIndex uint32 `json:"hostIndex,omitempty"`
	HostMAC   MAC    `json:"hostMac"`
	Name      string `json:"name"` // inside the container
	Index     uint32 `json:"index,omitempty"`
	MAC       MAC    `json:"mac"`
	MTU       uint16 `json:"mtu"`
	// Addrs of the container, IPv4 first.
	Addrs []netip.Addr `json:"addrs"`
	// SourceRouted are the addresses in Addrs that use a separate routing table for this device,
	// because another interface of the container has the default routes of their family.
	SourceRouted []netip.Addr `json:"sourceRouted,omitempty"`
}

// Identity is the identity of a label set, with the labels and named ports behind it.
type Identity struct {
	Number uint32        `json:"number"`
	Labels []label.Label `json:"labels,omitempty"`
	// FromPod reports that Labels and Ports come from the Kubernetes pod; those in the request are
	// ignored.
	FromPod bool                 `json:"fromPod,omitempty"`
	Ports   []workload.NamedPort `json:"ports,omitempty"`
	// Tenant of the pod's namespace. Zero if the identity service does not know it. Records do not
	// keep it.
	Tenant shares.Tenant `json:"-"`
}

// Equal reports whether number, labels and ports are equal.
func (i Identity) Equal(j Identity) bool {
	return i.Number == j.Number && i.FromPod == j.FromPod && slices.Equal(i.Labels, j.Labels) &&
		slices.Equal(i.Ports, j.Ports)
}

// Validate reports whether an endpoint may have the identity. Numbers below MinCluster are reserved: 1 is the host,
// which every policy allows. Numbers from MinNodeLocal up are local to a node. The numbers in between belong to this
// cluster and to other clusters. The only reserved identity that an endpoint may have is Init: every policy isolates
// it, and an endpoint has it until its pod's labels have an identity.
func (i Identity) Validate() error {
	switch n := identity.Numeric(i.Number); {
	case n == 0 || n > identity.Max:
		return invalid("identity.number", "%d is not an identity", n)
	case n == identity.Init:
		return nil
	case n < identity.MinCluster || n >= identity.MinNodeLocal:
		return invalid("identity.number", "%d is reserved or local to the node; an endpoint has %d to %d",
			n, identity.MinCluster, identity.MinNodeLocal-1)
	}
	return nil
}

// Endpoint is the public view of one container's attachment.
type Endpoint struct {
	Spec     Spec
	State    State
	Slot     uint16 // 0 until it is published
	Identity Identity
	Given    Given                // labels and ports of the last request or update
	Ports    []workload.NamedPort // named ports that belong to the identity
	Device   Device
	Created  time.Time // zero until it is ready
	Policy   Policy    // zero while no policy table evaluates it
}

// Sentinel errors that callers branch on.
var (
	// ErrInvalid: the request is invalid; a *FieldError names the field.
	ErrInvalid = errors.New("invalid argument")
	// ErrForeign: another manager created the endpoint.
	ErrForeign = errors.New("the endpoint belongs to another manager")
	// ErrPoliciesHeld: the policy tables are missing, because the policy service has not adopted its policies yet. It
	// always comes with ErrUnavailable.
	ErrPoliciesHeld = errors.New("policies are held")
	// ErrLabelsOfPod: the endpoint's labels come from its Kubernetes pod.
	ErrLabelsOfPod = errors.New("its labels come from Kubernetes")
	// ErrPodUnknown: the identity service answers but does not know the pod that the labels come
	// from. It comes with ErrUnavailable.
	ErrPodUnknown = errors.New("the pod is not known")
	// ErrExists: the owner already has an endpoint with other content.
	ErrExists = errors.New("already exists with other content")
	// ErrInUse: the container of the endpoint still exists.
	ErrInUse = errors.New("it is in use")
	// ErrNotFound: the owner has no endpoint.
	ErrNotFound = errors.New("no such endpoint")
	// ErrLease: sluice-ipam reports that the owner has no lease, or a lease of other addresses.
	ErrLease = errors.New("lease is gone")
	// ErrSecond: the namespace already has an attachment, and the node does not allow a second one.
	ErrSecond = errors.New("the network namespace already has an attachment")
	// ErrNameTaken: the namespace already has an interface of the requested name.
	ErrNameTaken = errors.New("interface name is taken")
	// ErrHostPort: another endpoint or a service uses a requested host port.
	ErrHostPort = errors.New("host port is in use")
	// ErrLoadBalancingOff: the request has host ports, and service translation is off.
	ErrLoadBalancingOff = errors.New("loadBalancing.mode is off")
	// ErrAddressHeld: a live endpoint has the address.
	ErrAddressHeld = errors.New("address belongs to a live endpoint")
	// ErrFull: endpoint IDs or map space are used up.
	ErrFull = errors.New("no capacity")
	// ErrStorage: the disk is full or not writable.
	ErrStorage = errors.New("not written")
	// ErrUnavailable: a required service does not answer.
	ErrUnavailable = errors.New("unavailable")
	// ErrExhausted: a required service has no capacity left.
	ErrExhausted = errors.New("exhausted")
	// ErrDeleted ends a creation because the endpoint was deleted meanwhile.
	ErrDeleted = errors.New("deleted meanwhile")
	// ErrUnreadable: the owner's record cannot be read.
	ErrUnreadable = errors.New("record cannot be read")
	// ErrNamespace: the path is not a usable network namespace.
	ErrNamespace = errors.New("not a usable network namespace")
	// ErrNamespaceGone: the path of the network namespace does not exist.
	ErrNamespaceGone = errors.New("network namespace is gone")
)

// FieldError is an ErrInvalid that names the field.
type FieldError struct {
	Field  string
	Reason string
}

func (e *FieldError) Error() string { return e.Field + ": " + e.Reason }

// Unwrap returns ErrInvalid.
func (e *FieldError) Unwrap() error { return ErrInvalid }

func invalid(field, format string, args ...any) error {
	return &FieldError{Field: field, Reason: fmt.Sprintf(format, args...)}
}

func clip(s string) string {
	if len(s) > 64 {
		return s[:64] + "…"
	}
	return s
}

// ExistsError is an ErrExists that names the fields in which the request differs.
type ExistsError struct {
	Owner  workload.Owner
	Fields []string
}

func (e *ExistsError) Error() string {
	return fmt.Sprintf("endpoint of %s: %v: %s", e.Owner, ErrExists, strings.Join(e.Fields, ", "))
}

// Unwrap returns ErrExists.
func (e *ExistsError) Unwrap() error { return ErrExists }

// Exists returns the error for request t when the owner already has an endpoint, which was created from s. If s and t
// differ in no field, the error names the network namespace: the path now holds another one.
func (s Spec) Exists(t Spec) error {
	e := &ExistsError{Owner: s.Owner, Fields: s.Differs(t)}
	if len(e.Fields) == 0 {
		e.Fields = []string{"network_namespace"}
	}
	return e
}

// HeldError is an ErrAddressHeld that names the endpoint with the address.
type HeldError struct {
	Addr   netip.Addr
	Holder workload.Owner
}

func (e *HeldError) Error() string {
	return fmt.Sprintf("address %v: %v: %s", e.Addr, ErrAddressHeld, e.Holder)
}

// Unwrap returns ErrAddressHeld.
func (e *HeldError) Unwrap() error { return ErrAddressHeld }
