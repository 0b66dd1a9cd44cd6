// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package program

import (
	"maps"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
)

// Spec is a row of the program table: a program, and where it is attached.
type Spec struct {
	// Name is the name of the program in its object file, and of the tc filter.
	Name string
	// Devices are the devices that the program is attached to, at Hook.
	Devices Devices
	Hook    Hook
	// Optional: the program only reduces the cost of a packet. A kernel that allows only one of our programs at a hook
	// works without it.
	Optional bool
	// Lazy: Open does not load the program, unless it only validates; Programs.Load does.
	Lazy bool
	// Load reads the compiled program.
	Load func() (*ebpf.CollectionSpec, error)
}

// Devices is a set of devices of the node that run the same programs.
type Devices string

// Sets of devices.
const (
	// Endpoints are the host ends of endpoints' devices.
	Endpoints Devices = "endpoints"
	// Tunnel is the tunnel device of the overlay.
	Tunnel Devices = "tunnel"
	// Uplinks are devices towards other nodes.
	Uplinks Devices = "uplinks"
	// Taps are the devices by which packets of proxies arrive: TAP devices, and the node's ends of the devices of
	// proxy namespaces.
	Taps Devices = "taps"
	// ProxyNamespaces are the devices in proxy namespaces.
	ProxyNamespaces Devices = "proxy namespaces"
	// Sockets are not devices: their programs are attached to a cgroup, see package sockets.
	Sockets Devices = "sockets"
)

// Hook is the attach point of a program at a device or cgroup.
type Hook string

// A device runs the program at Ingress for received packets, and at Egress for packets to be sent.
const (
	Ingress Hook = "ingress"
	Egress  Hook = "egress"
)

// A cgroup runs the program when one of its sockets makes the call: for connect and sendmsg before the stack
// sees the address, for the others before the caller sees it.
const (
	Connect4     Hook = "connect4"
	Connect6     Hook = "connect6"
	SendMsg4     Hook = "sendmsg4"
	SendMsg6     Hook = "sendmsg6"
	RecvMsg4     Hook = "recvmsg4"
	RecvMsg6     Hook = "recvmsg6"
	GetPeerName4 Hook = "getpeername4"
	GetPeerName6 Hook = "getpeername6"
)

// Names of the programs.
const (
	// FromPod handles packets from a pod.
	FromPod = "sluice_from_pod"
	// ToPod handles packets from the host's stack to a pod.
	ToPod = "sluice_to_pod"
	// FromOverlay handles packets from other nodes in the tunnel.
	FromOverlay = "sluice_from_overlay"
	// ToOverlay handles packets into the tunnel.
	ToOverlay = "sluice_to_overlay"
	// FromUnderlay decapsulates tunnel packets of other nodes, so that they bypass the tunnel device.
	FromUnderlay = "sluice_from_underlay"
	// FromUplink handles packets from other nodes and from outside.
	FromUplink = "sluice_from_uplink"
	// ToUplink handles packets to other nodes and to the outside.
	ToUplink = "sluice_to_uplink"
	// FromTap handles packets from a proxy.
	FromTap = "sluice_from_tap"
	// IntoProxy handles TCP segments to a proxy, in the proxy namespace.
	IntoProxy = "sluice_into_proxy"
)

// SocketPrefix is the prefix of the names of socket programs; the hook follows.
const SocketPrefix = "sluice_"

// Table returns the program table of a Sluice instance. Programs of the same hook run in the order of the table.
func Table() []Spec {
	rows := []Spec{
		{Name: FromPod, Devices: Endpoints, Hook: Ingress, Load: bpf.LoadFromPod},
		{Name: ToPod, Devices: Endpoints, Hook: Egress, Load: bpf.LoadToPod},
		{Name: FromOverlay, Devices: Tunnel, Hook: Ingress, Load: bpf.LoadFromOverlay},
		{Name: ToOverlay, Devices: Tunnel, Hook: Egress, Load: bpf.LoadToOverlay},
		{Name: FromUnderlay, Devices: Uplinks, Hook: Ingress, Optional: true, Load: bpf.LoadFromUnderlay},
		{Name: FromUplink, Devices: Uplinks, Hook: Ingress, Load: bpf.LoadFromUplink},
		{Name: ToUplink, Devices: Uplinks, Hook: Egress, Load: bpf.LoadToUplink},
		{Name: FromTap, Devices: Taps, Hook: Ingress, Load: bpf.LoadFromTap},
		{Name: IntoProxy, Devices: ProxyNamespaces, Hook: Ingress, Load: bpf.LoadIntoProxy},
	}
	for _, h := range []Hook{Connect4, Connect6, SendMsg4, SendMsg6, RecvMsg4, RecvMsg6, GetPeerName4, GetPeerName6} {
		name := SocketPrefix + string(h)
		rows = append(rows, Spec{Name: name, Devices: Sockets, Hook: h, Load: only(bpf.LoadSocketLB, name)})
	}
	return rows
}

// only returns a loader for one program of an object with several, so that each is loaded, pinned and adopted
// separately.
func only(load func() (*ebpf.CollectionSpec, error), name string) func() (*ebpf.CollectionSpec, error) {
	return func() (*ebpf.CollectionSpec, error) {
		spec, err := load()
		if err == nil {
			maps.DeleteFunc(spec.Programs, func(n string, _ *ebpf.ProgramSpec) bool { return n != name })
		}
		return spec, err
	}
}
