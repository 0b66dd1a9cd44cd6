// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

// Reason says why a packet was forwarded or dropped. String gives its stable
// name, for metrics and events.
type Reason uint32

// Direction says for which side of an endpoint a packet was counted.
type Direction uint32

const (
	// Egress is what an endpoint sends.
	Egress Direction = 1
	// Ingress is what an endpoint receives.
	Ingress Direction = 2
)

// Counter is one cell of the metrics.
type Counter struct {
	Reason    Reason
	Direction Direction
	Packets   uint64
	// Bytes with Ethernet headers; a GSO packet counts with its full length.
	Bytes uint64
}
