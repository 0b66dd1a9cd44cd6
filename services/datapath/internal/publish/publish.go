// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package publish puts the core's endpoints into the maps of package kernel:
// it translates between the two and decides which policy table a new endpoint
// gets.
package publish

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel"
)

// Maps implements endpoint.Maps.
type Maps struct {
	Kernel *kernel.Kernel
}

// Publish implements endpoint.Maps. Without a policy service every endpoint
// gets the table that allows everything.
func (m Maps) Publish(ctx context.Context, e endpoint.Entry) (uint16, error) {
	ke := kernel.Endpoint{
		Ifindex: e.Ifindex, Identity: kernel.Identity(e.Identity), MAC: e.MAC, HostMAC: e.HostMAC, MTU: e.MTU,
		Deliver: kernel.DeliverPeer,
		Policy:  kernel.Policy{Egress: kernel.TableAllow, Ingress: kernel.TableAllow},
	}
	for _, a := range e.Addrs {
		if a.Is4() {
			ke.IPv4 = a
		} else {
			ke.IPv6 = a
		}
	}
	s, err := m.Kernel.Publish(ctx, ke)
	if err != nil {
		return 0, translate(err)
	}
	return uint16(s), nil
}

// Cut implements endpoint.Maps.
func (m Maps) Cut(slot uint16) error { return translate(m.Kernel.Cut(kernel.Slot(slot))) }

// Unpublish implements endpoint.Maps.
func (m Maps) Unpublish(slot uint16) error { return translate(m.Kernel.Unpublish(kernel.Slot(slot))) }

// SetIdentity implements endpoint.Maps.
func (m Maps) SetIdentity(slot uint16, identity uint32) error {
	return translate(m.Kernel.SetIdentity(kernel.Slot(slot), kernel.Identity(identity)))
}

// Entries implements endpoint.Maps.
func (m Maps) Entries() ([]endpoint.Entry, error) {
	list, err := m.Kernel.Endpoints()
	if err != nil {
		return nil, translate(err)
	}
	entries := make([]endpoint.Entry, 0, len(list))
	for _, ke := range list {
		e := endpoint.Entry{
			Slot: uint16(ke.Slot), Ifindex: ke.Ifindex, Identity: uint32(ke.Identity), MAC: ke.MAC, HostMAC: ke.HostMAC,
			MTU: ke.MTU, Damaged: ke.Incomplete, Generation: ke.Policy.Gen,
			Forwards: ke.Policy.Egress == kernel.TableAllow && ke.Policy.Ingress == kernel.TableAllow,
		}
		for _, a := range []netip.Addr{ke.IPv4, ke.IPv6} {
			if a.IsValid() {
				e.Addrs = append(e.Addrs, a)
			}
		}
		entries = append(entries, e)
	}
	return entries, nil
}

func translate(err error) error {
	for from, to := range map[error]error{
		kernel.ErrExists:   endpoint.ErrAddressHeld,
		kernel.ErrFull:     endpoint.ErrFull,
		kernel.ErrNotFound: endpoint.ErrNotFound,
	} {
		if errors.Is(err, from) {
			return fmt.Errorf("%w: %w", to, err)
		}
	}
	return err
}
