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
	// Name of the program in its object file, and of the tc filter.
	Name string
	// Devices have the program at their Hook.
	Devices Devices
	Hook    Hook
	// Load reads the compiled program.
	Load func() (*ebpf.CollectionSpec, error)
}

// Devices is a set of devices of the node.
type Devices string

// Sets of devices.
const (
	// Endpoints are the host ends of endpoints' devices.
	Endpoints Devices = "endpoints"
	// Tunnel is the device of the overlay.
	Tunnel Devices = "tunnel"
	// Uplinks lead to other nodes.
	Uplinks Devices = "uplinks"
	// Sockets are no devices: their programs run at a cgroup, see package sockets.
	Sockets Devices = "sockets"
)

// Hook is where a device runs a program.
type Hook string

// A device runs the program at Ingress on what it receives, at Egress on what
// is sent out of it.
const (
	Ingress Hook = "ingress"
	Egress  Hook = "egress"
)

// A cgroup runs the program when one of its sockets makes the call: connect and
// send before the stack sees the address, the others before the caller does.
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
	// FromPod sees everything that a pod sends.
	FromPod = "sluice_from_pod"
	// ToPod sees what the host's stack sends to a pod.
	ToPod = "sluice_to_pod"
	// FromOverlay sees what other nodes send in the tunnel.
	FromOverlay = "sluice_from_overlay"
	// ToOverlay sees everything that leaves by the tunnel.
	ToOverlay = "sluice_to_overlay"
	// FromUplink sees what comes from the network between the nodes.
	FromUplink = "sluice_from_uplink"
	// ToUplink sees what goes there.
	ToUplink = "sluice_to_uplink"
)

// SocketPrefix begins the names of the sockets' programs; the hook follows.
const SocketPrefix = "sluice_"

// Table lists the programs of a Sluice instance, one row each.
func Table() []Spec {
	rows := []Spec{
		{Name: FromPod, Devices: Endpoints, Hook: Ingress, Load: bpf.LoadFromPod},
		{Name: ToPod, Devices: Endpoints, Hook: Egress, Load: bpf.LoadToPod},
		{Name: FromOverlay, Devices: Tunnel, Hook: Ingress, Load: bpf.LoadFromOverlay},
		{Name: ToOverlay, Devices: Tunnel, Hook: Egress, Load: bpf.LoadToOverlay},
		{Name: FromUplink, Devices: Uplinks, Hook: Ingress, Load: bpf.LoadFromUplink},
		{Name: ToUplink, Devices: Uplinks, Hook: Egress, Load: bpf.LoadToUplink},
	}
	for _, h := range []Hook{Connect4, Connect6, SendMsg4, SendMsg6, RecvMsg4, RecvMsg6, GetPeerName4, GetPeerName6} {
		name := SocketPrefix + string(h)
		rows = append(rows, Spec{Name: name, Devices: Sockets, Hook: h, Load: only(bpf.LoadSocketLB, name)})
	}
	return rows
}

// only loads one program of an object that has several: each is loaded, pinned and
// adopted by itself.
func only(load func() (*ebpf.CollectionSpec, error), name string) func() (*ebpf.CollectionSpec, error) {
	return func() (*ebpf.CollectionSpec, error) {
		spec, err := load()
		if err == nil {
			maps.DeleteFunc(spec.Programs, func(n string, _ *ebpf.ProgramSpec) bool { return n != name })
		}
		return spec, err
	}
}
