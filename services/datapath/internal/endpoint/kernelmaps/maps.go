// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package kernelmaps is the only adapter between package lifecycle and the state that publishes an
// endpoint to the programs: the eBPF maps, and policysync, which selects the tables that evaluate
// the endpoint. It implements endpoint.Maps and endpoint.Policies and keeps no state.
package kernelmaps

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipcache"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policymap"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policysync"
	"github.com/sluice-net/sluice/services/datapath/internal/service/servicemap"
	"github.com/sluice-net/sluice/services/datapath/internal/service/sockets"
)

// Maps implements endpoint.Maps.
type Maps struct {
	Endpoints *endpointmap.Maps
	Tables    *policymap.Maps
	IPCache   *ipcache.Cache
	// Services are audited together with the other maps.
	Services *servicemap.Maps
	// Namespaces records whose sockets reach services; nil: no sockets do.
	Namespaces *sockets.Namespaces
	// Policy selects the tables of an endpoint; nil: everything is allowed.
	Policy *policysync.Applier
}

// Publish implements endpoint.Maps. It registers the sockets last; until then they belong to an
// unknown namespace.
func (m Maps) Publish(ctx context.Context, e endpoint.Entry) (uint16, error) {
	slot, err := m.publish(ctx, e)
	if err != nil || m.Namespaces == nil || e.Cookie == 0 {
		return slot, err
	}
	if err := m.Namespaces.Claim(sockets.Namespace{Cookie: e.Cookie, Slot: slot, Leave: e.LeaveSockets}); err != nil {
		return 0, errors.Join(translate(err), m.Unpublish(slot))
	}
	return slot, nil
}

func (m Maps) publish(ctx context.Context, e endpoint.Entry) (uint16, error) {
	ke := endpointmap.Endpoint{
		Ifindex: e.Ifindex, Identity: identity.Numeric(e.Identity), MAC: e.MAC, HostMAC: e.HostMAC, MTU: e.MTU,
		Deliver: endpointmap.DeliverPeer,
		Policy:  endpointmap.Policy{Egress: nodetable.Allow, Ingress: nodetable.Allow},
	}
	for _, a := range e.Addrs {
		if a.Is4() {
			ke.IPv4 = a
		} else {
			ke.IPv6 = a
		}
	}
	if m.Policy == nil {
		s, err := m.Endpoints.Publish(ctx, ke)
		return s, translate(err)
	}
	publish := func(egress, ingress nodetable.ID) (uint16, uint32, error) {
		ke.Policy = endpointmap.Policy{Egress: egress, Ingress: ingress}
		s, err := m.Endpoints.Publish(ctx, ke)
		if err != nil {
			return 0, 0, err
		}
		published, err := m.Endpoints.Lookup(s)
		if err != nil {
			return 0, 0, errors.Join(err, m.Endpoints.Unpublish(s))
		}
		return s, published.Policy.Epoch, nil
	}
	var slot uint16
	var err error
	if e.New {
		slot, err = m.Policy.Begin(ctx, e.Identity, e.Addrs, publish)
	} else {
		slot, err = m.Policy.Publish(e.Identity, e.Addrs, publish)
	}
	return slot, translate(err)
}

// Cut implements endpoint.Maps.
func (m Maps) Cut(slot uint16) error { return m.drop(slot, m.Endpoints.Cut) }

// Unpublish implements endpoint.Maps.
func (m Maps) Unpublish(slot uint16) error {
	if m.Namespaces != nil {
		if err := m.Namespaces.Release(slot); err != nil {
			return translate(err)
		}
	}
	return m.drop(slot, m.Endpoints.Unpublish)
}

// drop ends the endpoint in policysync, too: otherwise the next change of tables would allow its
// traffic again.
func (m Maps) drop(slot uint16, end func(uint16) error) error {
	if m.Policy == nil {
		return translate(end(slot))
	}
	gone := false
	err := m.Policy.Drop(slot, func() error {
		err := end(slot)
		gone = errors.Is(err, endpointmap.ErrNotFound)
		if gone {
			return nil
		}
		return err
	})
	if gone {
		return endpoint.ErrNotFound
	}
	return translate(err)
}

// SetIdentity implements endpoint.Maps.
func (m Maps) SetIdentity(ctx context.Context, slot uint16, id uint32) error {
	// wait for an earlier change whose caller did not wait
	if err := m.Endpoints.WaitIdentity(ctx, slot); err != nil {
		return translate(err)
	}
	set := func(egress, ingress nodetable.ID) (uint32, error) {
		return m.Endpoints.SetIdentity(ctx, slot, identity.Numeric(id), egress, ingress)
	}
	var err error
	if m.Policy == nil {
		_, err = set(nodetable.Allow, nodetable.Allow)
	} else {
		err = m.Policy.SetIdentity(ctx, slot, id, set)
	}
	return translate(errors.Join(err, m.Endpoints.WaitIdentity(ctx, slot)))
}

// SetIdentityOrIsolate implements endpoint.Maps.
func (m Maps) SetIdentityOrIsolate(ctx context.Context, slot uint16, id uint32) (reason string, err error) {
	if m.Policy == nil {
		return "", m.SetIdentity(ctx, slot, id)
	}
	// wait for an earlier change whose caller did not wait
	if err := m.Endpoints.WaitIdentity(ctx, slot); err != nil {
		return "", translate(err)
	}
	reason, err = m.Policy.SetIdentityOrIsolate(ctx, slot, id, func(egress, ingress nodetable.ID) (uint32, error) {
		return m.Endpoints.SetIdentity(ctx, slot, identity.Numeric(id), egress, ingress)
	})
	return reason, translate(errors.Join(err, m.Endpoints.WaitIdentity(ctx, slot)))
}

// Entries implements endpoint.Maps.
func (m Maps) Entries() ([]endpoint.Entry, error) {
	list, err := m.Endpoints.List()
	if err != nil {
		return nil, translate(err)
	}
	entries := make([]endpoint.Entry, 0, len(list))
	for _, ke := range list {
		e := endpoint.Entry{
			Slot: ke.Slot, Ifindex: ke.Ifindex, Identity: uint32(ke.Identity), MAC: ke.MAC, HostMAC: ke.HostMAC,
			MTU: ke.MTU, Damaged: ke.Incomplete, Epoch: ke.Policy.Epoch,
			Forwards: ke.Policy.Egress != nodetable.Deny || ke.Policy.Ingress != nodetable.Deny,
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

// translate maps errors of the kernel maps and of policysync to errors of the core.
func translate(err error) error {
	switch {
	case errors.Is(err, pin.ErrExists):
		return fmt.Errorf("%w: %w", endpoint.ErrAddressHeld, err)
	case errors.Is(err, endpointmap.ErrNotFound), errors.Is(err, policysync.ErrNoEndpoint):
		return fmt.Errorf("%w: %w", endpoint.ErrNotFound, err)
	case errors.Is(err, nodetable.ErrNoCapacity), errors.Is(err, pin.ErrFull):
		return fmt.Errorf("%w: %w", endpoint.ErrFull, err)
	case errors.Is(err, policysync.ErrHeld):
		return fmt.Errorf("%w: %w: %w", endpoint.ErrUnavailable, endpoint.ErrPoliciesHeld, err)
	case errors.Is(err, policysync.ErrUnavailable):
		return fmt.Errorf("%w: %w", endpoint.ErrUnavailable, err)
	}
	return err
}
