// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package message

import "time"

// Full names of the methods that the plugin calls.
const (
	Allocate         = "/sluice.ipam.v1.IPAMService/Allocate"
	Release          = "/sluice.ipam.v1.IPAMService/Release"
	CreateEndpoint   = "/sluice.datapath.v1.DatapathService/CreateEndpoint"
	DeleteEndpoint   = "/sluice.datapath.v1.DatapathService/DeleteEndpoint"
	CheckEndpoint    = "/sluice.datapath.v1.DatapathService/CheckEndpoint"
	GetEndpoint      = "/sluice.datapath.v1.DatapathService/GetEndpoint"
	ReclaimEndpoints = "/sluice.datapath.v1.DatapathService/ReclaimEndpoints"
	GetStatus        = "/sluice.datapath.v1.DatapathService/GetStatus"
	HealthCheck      = "/grpc.health.v1.Health/Check"
)

// IPAMService is the name by which ipam's health is asked for.
const IPAMService = "sluice.ipam.v1.IPAMService"

// Timestamp is google.protobuf.Timestamp.
type Timestamp struct {
	Seconds int64
	Nanos   int32
}

func (m *Timestamp) fields(f *Fields) {
	varint(f, 1, &m.Seconds)
	varint(f, 2, &m.Nanos)
}

// Time is the time that m says; 1970-01-01 for nil.
func (m *Timestamp) Time() time.Time {
	if m == nil {
		m = &Timestamp{}
	}
	return time.Unix(m.Seconds, int64(m.Nanos))
}

// Owner is sluice.workload.v1.Owner.
type Owner struct {
	ContainerID   string
	InterfaceName string
}

func (m *Owner) fields(f *Fields) {
	text(f, 1, &m.ContainerID)
	text(f, 2, &m.InterfaceName)
}

// PodReference is sluice.workload.v1.PodReference.
type PodReference struct{ Namespace, Name, UID string }

func (m *PodReference) fields(f *Fields) {
	text(f, 1, &m.Namespace)
	text(f, 2, &m.Name)
	text(f, 3, &m.UID)
}

// Label is sluice.workload.v1.Label.
type Label struct{ Source, Key, Value string }

func (m *Label) fields(f *Fields) {
	text(f, 1, &m.Source)
	text(f, 2, &m.Key)
	text(f, 3, &m.Value)
}

// NamedPort is sluice.workload.v1.NamedPort.
type NamedPort struct {
	Name     string
	Port     uint32
	Protocol int32
}

func (m *NamedPort) fields(f *Fields) {
	text(f, 1, &m.Name)
	varint(f, 2, &m.Port)
	varint(f, 3, &m.Protocol)
}

// AllocationState is sluice.ipam.v1.AllocationState.
type AllocationState int32

// AllocationConfirmed says that an endpoint has the addresses.
const AllocationConfirmed AllocationState = 2

// Address is sluice.ipam.v1.Address.
type Address struct {
	Address          string
	PoolPrefixLength uint32
}

func (m *Address) fields(f *Fields) {
	text(f, 1, &m.Address)
	varint(f, 2, &m.PoolPrefixLength)
}

// Allocation is sluice.ipam.v1.Allocation.
type Allocation struct {
	Addresses       []*Address
	State           AllocationState
	LeaseExpireTime *Timestamp // nil for an allocation that does not end
}

func (m *Allocation) fields(f *Fields) {
	many(f, 2, &m.Addresses)
	varint(f, 3, &m.State)
	one(f, 4, &m.LeaseExpireTime)
}

// AllocateRequest is sluice.ipam.v1.AllocateRequest.
type AllocateRequest struct {
	Owner              *Owner
	Families           []int32
	RequestedAddresses []string
	ValidateOnly       bool
	Manager            string
}

func (m *AllocateRequest) fields(f *Fields) {
	one(f, 1, &m.Owner)
	varints(f, 2, &m.Families)
	texts(f, 3, &m.RequestedAddresses)
	boolean(f, 4, &m.ValidateOnly)
	text(f, 5, &m.Manager)
}

// AllocateResponse is sluice.ipam.v1.AllocateResponse.
type AllocateResponse struct{ Allocation *Allocation }

func (m *AllocateResponse) fields(f *Fields) { one(f, 1, &m.Allocation) }

// ReleaseRequest is sluice.ipam.v1.ReleaseRequest.
type ReleaseRequest struct {
	Owner        *Owner
	ValidateOnly bool
	Addresses    []string
}

func (m *ReleaseRequest) fields(f *Fields) {
	one(f, 1, &m.Owner)
	boolean(f, 2, &m.ValidateOnly)
	texts(f, 3, &m.Addresses)
}

// Empty is an answer of which nothing is read, or a request that says nothing:
// sluice.ipam.v1.ReleaseResponse and sluice.datapath.v1.GetStatusRequest.
type Empty struct{}

func (*Empty) fields(*Fields) {}

// Interface is sluice.datapath.v1.Interface.
type Interface struct {
	Name  string
	Index uint32
	MAC   string
}

func (m *Interface) fields(f *Fields) {
	text(f, 1, &m.Name)
	varint(f, 2, &m.Index)
	text(f, 3, &m.MAC)
}

// Endpoint is sluice.datapath.v1.Endpoint.
type Endpoint struct {
	Identity           uint32
	Addresses          []string
	HostInterface      Interface
	ContainerInterface Interface
	MTU                uint32
	Gateways           []string
	CreateTime         *Timestamp
	SourceRouted       []string
}

func (m *Endpoint) fields(f *Fields) {
	varint(f, 4, &m.Identity)
	texts(f, 6, &m.Addresses)
	part(f, 7, &m.HostInterface)
	part(f, 8, &m.ContainerInterface)
	varint(f, 10, &m.MTU)
	texts(f, 11, &m.Gateways)
	one(f, 13, &m.CreateTime)
	texts(f, 18, &m.SourceRouted)
}

// CreateEndpointRequest is sluice.datapath.v1.CreateEndpointRequest.
type CreateEndpointRequest struct {
	Owner            *Owner
	NetworkNamespace string
	Addresses        []string
	LeaseExpireTime  *Timestamp
	Labels           []*Label
	NamedPorts       []*NamedPort
	MAC              string
	MTU              uint32
	ValidateOnly     bool
	Manager          string
	Network          string
	Pod              *PodReference
	PortMappings     []*PortMapping
	LeaveSockets     bool
}

func (m *CreateEndpointRequest) fields(f *Fields) {
	one(f, 1, &m.Owner)
	text(f, 2, &m.NetworkNamespace)
	texts(f, 3, &m.Addresses)
	one(f, 4, &m.LeaseExpireTime)
	many(f, 5, &m.Labels)
	many(f, 6, &m.NamedPorts)
	text(f, 7, &m.MAC)
	varint(f, 8, &m.MTU)
	boolean(f, 9, &m.ValidateOnly)
	text(f, 10, &m.Manager)
	text(f, 11, &m.Network)
	one(f, 12, &m.Pod)
	many(f, 13, &m.PortMappings)
	boolean(f, 14, &m.LeaveSockets)
}

// PortMapping is sluice.datapath.v1.PortMapping.
type PortMapping struct {
	HostPort      uint32
	ContainerPort uint32
	Protocol      int32
	HostIP        string
}

func (m *PortMapping) fields(f *Fields) {
	varint(f, 1, &m.HostPort)
	varint(f, 2, &m.ContainerPort)
	varint(f, 3, &m.Protocol)
	text(f, 4, &m.HostIP)
}

// EndpointResponse is sluice.datapath.v1.CreateEndpointResponse, and
// GetEndpointResponse.
type EndpointResponse struct{ Endpoint *Endpoint }

func (m *EndpointResponse) fields(f *Fields) { one(f, 1, &m.Endpoint) }

// GetEndpointRequest is sluice.datapath.v1.GetEndpointRequest.
type GetEndpointRequest struct{ Owner *Owner }

func (m *GetEndpointRequest) fields(f *Fields) { one(f, 1, &m.Owner) }

// DeleteEndpointRequest is sluice.datapath.v1.DeleteEndpointRequest.
type DeleteEndpointRequest struct {
	Owner        *Owner
	ValidateOnly bool
	UnlessInUse  bool
}

func (m *DeleteEndpointRequest) fields(f *Fields) {
	one(f, 1, &m.Owner)
	boolean(f, 2, &m.ValidateOnly)
	boolean(f, 3, &m.UnlessInUse)
}

// DeleteEndpointResponse is sluice.datapath.v1.DeleteEndpointResponse.
type DeleteEndpointResponse struct{ Existed bool }

func (m *DeleteEndpointResponse) fields(f *Fields) { boolean(f, 1, &m.Existed) }

// CheckEndpointRequest is sluice.datapath.v1.CheckEndpointRequest.
type CheckEndpointRequest struct {
	Owner            *Owner
	NetworkNamespace string
	Addresses        []string
}

func (m *CheckEndpointRequest) fields(f *Fields) {
	one(f, 1, &m.Owner)
	text(f, 2, &m.NetworkNamespace)
	texts(f, 3, &m.Addresses)
}

// Difference is sluice.datapath.v1.Difference.
type Difference struct{ Subject, Key, Want, Have string }

func (m *Difference) fields(f *Fields) {
	text(f, 1, &m.Subject)
	text(f, 2, &m.Key)
	text(f, 3, &m.Want)
	text(f, 4, &m.Have)
}

// CheckEndpointResponse is sluice.datapath.v1.CheckEndpointResponse.
type CheckEndpointResponse struct{ Differences []*Difference }

func (m *CheckEndpointResponse) fields(f *Fields) { many(f, 1, &m.Differences) }

// ReclaimEndpointsRequest is sluice.datapath.v1.ReclaimEndpointsRequest.
type ReclaimEndpointsRequest struct {
	ValidOwners  []*Owner
	Manager      string
	Network      string
	NoneValid    bool
	ValidateOnly bool
}

func (m *ReclaimEndpointsRequest) fields(f *Fields) {
	many(f, 1, &m.ValidOwners)
	text(f, 2, &m.Manager)
	text(f, 3, &m.Network)
	boolean(f, 4, &m.NoneValid)
	boolean(f, 5, &m.ValidateOnly)
}

// ReclaimEndpointsResponse is sluice.datapath.v1.ReclaimEndpointsResponse.
type ReclaimEndpointsResponse struct{ Reclaimed []*Owner }

func (m *ReclaimEndpointsResponse) fields(f *Fields) { many(f, 1, &m.Reclaimed) }

// EndpointState is sluice.datapath.v1.EndpointState.
type EndpointState int32

// States of endpoints that have no or little traffic.
const (
	WaitingForIdentity EndpointState = 2
	WaitingForPolicy   EndpointState = 3
)

// EndpointStateCount is sluice.datapath.v1.EndpointStateCount.
type EndpointStateCount struct {
	State EndpointState
	Count uint32
}

func (m *EndpointStateCount) fields(f *Fields) {
	varint(f, 1, &m.State)
	varint(f, 2, &m.Count)
}

// Problem is sluice.status.v1.Problem.
type Problem struct{ Text string }

func (m *Problem) fields(f *Fields) { text(f, 2, &m.Text) }

// ServiceStatus is sluice.status.v1.ServiceStatus.
type ServiceStatus struct{ Problems []*Problem }

func (m *ServiceStatus) fields(f *Fields) { many(f, 3, &m.Problems) }

// GetStatusResponse is sluice.datapath.v1.GetStatusResponse.
type GetStatusResponse struct {
	Endpoints     []*EndpointStateCount
	KnownAddReady bool
	Service       ServiceStatus
}

func (m *GetStatusResponse) fields(f *Fields) {
	many(f, 6, &m.Endpoints)
	boolean(f, 22, &m.KnownAddReady)
	part(f, 23, &m.Service)
}

// HealthCheckRequest is grpc.health.v1.HealthCheckRequest.
type HealthCheckRequest struct{ Service string }

func (m *HealthCheckRequest) fields(f *Fields) { text(f, 1, &m.Service) }

// Serving is the status of a service that is ready.
const Serving = 1

// HealthCheckResponse is grpc.health.v1.HealthCheckResponse.
type HealthCheckResponse struct{ Status int32 }

func (m *HealthCheckResponse) fields(f *Fields) { varint(f, 1, &m.Status) }
