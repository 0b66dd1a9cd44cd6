// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package endpoint says what an endpoint of the datapath is: the request for it,
// its record, its entry in the maps, what can differ from them, and the
// interfaces by which its lifecycle reaches devices, maps, files and the other
// services. What implements one of these interfaces imports this package and not
// the lifecycle.
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

// ValidateOwner refuses owners that the API refuses, and names that no device of
// a container can have; the error is a *FieldError.
func ValidateOwner(o workload.Owner) error {
	if err := (*workload.OwnerError)(nil); errors.As(o.Check(), &err) {
		return invalid("owner."+err.Field, "%s", err.Reason)
	}
	if n := o.Interface; n == "." || n == ".." || n == "lo" {
		return invalid("owner.interface_name", "%q is no usable interface name", n)
	}
	return nil
}

// MAC is an Ethernet address.
type MAC [6]byte

// String is the usual notation, 02:00:00:00:00:01.
func (m MAC) String() string {
	return fmt.Sprintf("%02x:%02x:%02x:%02x:%02x:%02x", m[0], m[1], m[2], m[3], m[4], m[5])
}

// MarshalText is String; empty for the zero address.
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
		return fmt.Errorf("%q is no Ethernet address", clip(string(text)))
	}
	copy(m[:], raw)
	return nil
}

func (m MAC) unicast() bool { return m != MAC{} && m[0]&1 == 0 }

// Scope is a network of a manager. Managers know when their endpoints are no
// longer needed, and each only its own.
type Scope struct {
	Manager string
	Network string // empty for a manager without networks
}

// Spec is what a caller asks for.
type Spec struct {
	Owner workload.Owner `json:"owner"`
	// Manager made the endpoint: "cni" for the plugin. Empty if not known, as in
	// records of version 1.
	Manager string `json:"manager,omitempty"`
	// Network of the manager.
	Network string `json:"network,omitempty"`
	// Pod is zero without Kubernetes.
	Pod workload.PodReference `json:"pod,omitzero"`
	// Netns is the path of the container's network namespace.
	Netns string `json:"netns"`
	// Addrs are the leased addresses, at most one per family, IPv4 first.
	Addrs []netip.Addr `json:"addrs"`
	// Labels as the runtime gave them.
	Labels []label.Label        `json:"labels,omitempty"`
	Ports  []workload.NamedPort `json:"ports,omitempty"`
	// MAC wanted inside the container; zero for one derived from the owner.
	MAC MAC `json:"mac,omitzero"`
	// MTU in bytes; 0 for the node's.
	MTU uint16 `json:"mtu,omitempty"`
	// PortMappings are ports of the node that lead to the container.
	PortMappings []PortMapping `json:"portMappings,omitempty"`
	// LeaveSockets leaves the calls of its sockets as they are.
	LeaveSockets bool `json:"leaveSockets,omitempty"`
	// LeaseExpiry is when the lease ends, zero if not known. It is no part of
	// the content: a caller that asks again has renewed it.
	LeaseExpiry time.Time `json:"-"`
}

// Normalise sorts what has no order, so that equal content is equal.
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

// SameContent says whether two normalised requests ask for the same. A manager
// or a pod that only one of them names is no difference.
func (s Spec) SameContent(t Spec) bool { return s.Owner == t.Owner && len(s.Differs(t)) == 0 }

// Differs names the fields of CreateEndpoint in which t is another request of the
// owner.
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

// Scope is the network of the manager that made the endpoint.
func (s Spec) Scope() Scope { return Scope{s.Manager, s.Network} }

// Learn is s with what only t says of manager and pod.
func (s Spec) Learn(t Spec) Spec {
	if s.Manager == "" {
		s.Manager, s.Network = t.Manager, t.Network
	}
	if s.Pod == (workload.PodReference{}) {
		s.Pod = t.Pod
	}
	return s
}

// Validate says whether the request makes sense; the error is a *FieldError.
func (s Spec) Validate() error {
	if err := ValidateOwner(s.Owner); err != nil {
		return err
	}
	if len(s.Netns) == 0 || s.Netns[0] != '/' || len(s.Netns) > 4095 || bytes.IndexByte([]byte(s.Netns), 0) >= 0 {
		return invalid("network_namespace", "%q is no absolute path", clip(s.Netns))
	}
	if len(s.Addrs) == 0 || len(s.Addrs) > 2 || len(s.Addrs) == 2 && s.Addrs[0].Is4() == s.Addrs[1].Is4() {
		return invalid("addresses", "want one address, or one of each family")
	}
	for _, a := range s.Addrs {
		if !a.IsValid() || a.Zone() != "" {
			return invalid("addresses", "%v is no plain address", a)
		}
		if a.Is6() && s.MTU != 0 && s.MTU < 1280 {
			return invalid("mtu", "%d is below 1280, which IPv6 needs", s.MTU)
		}
	}
	if s.MAC != (MAC{}) && !s.MAC.unicast() {
		return invalid("mac", "%v is no unicast address", s.MAC)
	}
	return validateMappings("port_mappings", s.PortMappings, s.Addrs)
}

// State is where an endpoint is in its life.
type State uint8

// States, in the order of a life.
const (
	Restoring State = iota + 1
	WaitingForIdentity
	WaitingForPolicy
	Ready
	Disconnecting
	// Damaged is an endpoint whose device is gone while its namespace is not: the
	// container or an operator deleted it. Only another ADD makes it anew.
	Damaged
)

// String is the name as people see it.
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

// NamespaceID tells network namespaces apart while they live.
type NamespaceID struct {
	Dev   uint64 `json:"dev"`
	Inode uint64 `json:"inode"`
}

// Device is the pair of devices of an endpoint. Names and hardware addresses
// follow from the owner and are known before it exists; the indexes are not.
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
	// SourceRouted are those of Addrs that leave by a routing table of the
	// device's own, because the container has default routes of their family by
	// another interface.
	SourceRouted []netip.Addr `json:"sourceRouted,omitempty"`
}

// Identity is the number of a label set.
type Identity struct {
	Number uint32        `json:"number"`
	Labels []label.Label `json:"labels,omitempty"`
	// FromPod says that the labels are those of a Kubernetes pod, whatever the
	// request says, and Ports are the pod's then.
	FromPod bool                 `json:"fromPod,omitempty"`
	Ports   []workload.NamedPort `json:"ports,omitempty"`
	// Tenant of the pod's namespace. The zero value: the identity service does not know it.
	// Records do not keep it.
	Tenant shares.Tenant `json:"-"`
}

// Equal says whether number, labels and ports are the same.
func (i Identity) Equal(j Identity) bool {
	return i.Number == j.Number && i.FromPod == j.FromPod && slices.Equal(i.Labels, j.Labels) &&
		slices.Equal(i.Ports, j.Ports)
}

// Validate says whether an endpoint may have the identity. Below are the reserved
// ones: 1 is the host, which every policy lets in. Above are those that never
// leave a node. Between are those of this cluster and of others. The one reserved
// identity of endpoints is init, which every policy isolates: an endpoint has it
// while the labels of its pod have no number.
func (i Identity) Validate() error {
	switch n := identity.Numeric(i.Number); {
	case n == 0 || n > identity.Max:
		return invalid("identity.number", "%d is no identity", n)
	case n == identity.Init:
		return nil
	case n < identity.MinCluster || n >= identity.MinNodeLocal:
		return invalid("identity.number", "%d is reserved or local to the node; an endpoint has %d to %d",
			n, identity.MinCluster, identity.MinNodeLocal-1)
	}
	return nil
}

// Endpoint is one container's network as others see it.
type Endpoint struct {
	Spec     Spec
	State    State
	Slot     uint16 // 0 until it is published
	Identity Identity
	Given    Given                // labels and ports as they were asked for last
	Ports    []workload.NamedPort // that belong to the identity
	Device   Device
	Created  time.Time // zero until it is ready
	Policy   Policy    // zero while nothing evaluates it
}

// Sentinels that callers branch on.
var (
	// ErrInvalid: the request is wrong; a *FieldError says where.
	ErrInvalid = errors.New("invalid argument")
	// ErrForeign: another manager made the endpoint.
	ErrForeign = errors.New("the endpoint is another manager's")
	// ErrPoliciesHeld: the tables are not there because the policies of the policy service
	// are not taken over. It is always an ErrUnavailable too.
	ErrPoliciesHeld = errors.New("policies are held")
	// ErrLabelsOfPod: the labels of the endpoint are those of a Kubernetes pod.
	ErrLabelsOfPod = errors.New("its labels come from Kubernetes")
	// ErrPodUnknown: the identity service answers and does not know the pod whose
	// labels it needs. It comes with ErrUnavailable.
	ErrPodUnknown = errors.New("the pod is not known")
	// ErrExists: the owner has an endpoint with other content.
	ErrExists = errors.New("already exists with other content")
	// ErrInUse: the container of the endpoint is still there.
	ErrInUse = errors.New("it is in use")
	// ErrNotFound: the owner has no endpoint.
	ErrNotFound = errors.New("no such endpoint")
	// ErrLease: ipam says that the owner's lease is gone, or is another one.
	ErrLease = errors.New("lease is gone")
	// ErrSecond: the namespace has an attachment, and another is not wanted.
	ErrSecond = errors.New("the network namespace has an attachment already")
	// ErrNameTaken: the namespace has an interface of the wanted name.
	ErrNameTaken = errors.New("interface name is taken")
	// ErrHostPort: another endpoint or a service has a host port.
	ErrHostPort = errors.New("host port is in use")
	// ErrLoadBalancingOff: host ports are asked for, and services are not translated.
	ErrLoadBalancingOff = errors.New("loadBalancing.mode is off")
	// ErrAddressHeld: a live endpoint has the address.
	ErrAddressHeld = errors.New("address belongs to a live endpoint")
	// ErrFull: slots or map space are used up.
	ErrFull = errors.New("no room")
	// ErrStorage: the disk is full, or cannot be written to.
	ErrStorage = errors.New("not written")
	// ErrUnavailable: a service that is needed does not answer.
	ErrUnavailable = errors.New("unavailable")
	// ErrExhausted: a service that is needed has nothing left to give.
	ErrExhausted = errors.New("exhausted")
	// ErrDeleted ended a creation because somebody deleted the endpoint.
	ErrDeleted = errors.New("deleted meanwhile")
	// ErrUnreadable: the record of the owner cannot be read.
	ErrUnreadable = errors.New("record cannot be read")
	// ErrNamespace: the path is no network namespace that may be used.
	ErrNamespace = errors.New("not a usable network namespace")
	// ErrNamespaceGone: there is nothing at the path of the namespace.
	ErrNamespaceGone = errors.New("network namespace is gone")
)

// FieldError is ErrInvalid with the name of the field.
type FieldError struct {
	Field  string
	Reason string
}

func (e *FieldError) Error() string { return e.Field + ": " + e.Reason }

// Unwrap makes it ErrInvalid.
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

// ExistsError is an ErrExists with the fields in which the request differs.
type ExistsError struct {
	Owner  workload.Owner
	Fields []string
}

func (e *ExistsError) Error() string {
	return fmt.Sprintf("endpoint of %s: %v: %s", e.Owner, ErrExists, strings.Join(e.Fields, ", "))
}

// Unwrap returns ErrExists.
func (e *ExistsError) Unwrap() error { return ErrExists }

// Exists is the error of a request t of an owner that has an endpoint made from s.
// Without a difference there is another namespace at the same path.
func (s Spec) Exists(t Spec) error {
	e := &ExistsError{Owner: s.Owner, Fields: s.Differs(t)}
	if len(e.Fields) == 0 {
		e.Fields = []string{"network_namespace"}
	}
	return e
}

// HeldError is an ErrAddressHeld with the endpoint that has the address.
type HeldError struct {
	Addr   netip.Addr
	Holder workload.Owner
}

func (e *HeldError) Error() string {
	return fmt.Sprintf("address %v: %v: %s", e.Addr, ErrAddressHeld, e.Holder)
}

// Unwrap returns ErrAddressHeld.
func (e *HeldError) Unwrap() error { return ErrAddressHeld }
