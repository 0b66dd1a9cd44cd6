// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package service

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/work"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/netdev"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns"
	"github.com/sluice-net/sluice/services/datapath/internal/service/sockets"
)

// attachPause is the pause before attaching programs is retried.
const attachPause = time.Second

// attachSockets attaches the socket programs for the node and its containers, and repairs them when others change them.
func (s *Services) attachSockets(ctx context.Context) error {
	compare := true
	name := func() error {
		err := s.NameSockets(compare)
		compare = compare && err != nil
		return err
	}
	if err := name(); err != nil {
		s.o.Log.ErrorContext(ctx, "cannot update the map of network namespaces; retrying", log.Err(err))
	}
	// Attached earlier, the programs would find no services and translate nothing.
	select {
	case <-s.Frontends.Synced():
	case <-s.HostPorts.Held(): // host ports do not need sluice-loadbalancer
	case <-ctx.Done():
		return ctx.Err()
	}
	for {
		err := s.o.Sockets.Attach()
		if err == nil {
			break
		}
		// Meanwhile the process is not ready, but endpoints have traffic.
		s.o.Log.ErrorContext(ctx, "cannot attach the socket programs; retrying", log.Err(err))
		select {
		case <-time.After(attachPause):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	close(s.attached)
	return work.Every(ctx, interval, s.o.Log, "sockets of services", func() error {
		found, err := s.o.Sockets.Audit()
		if len(found) > 0 {
			s.o.Log.WarnContext(ctx, "socket programs attached again", "differences", found)
			err = errors.Join(err, s.o.Sockets.Attach())
		}
		return errors.Join(err, name())
	})
}

// NameSockets reconciles the map of namespaces with the endpoints. The namespaces of new endpoints are already in the
// map. Two kinds may be missing: namespaces from the time when services were not translated, and namespaces whose
// first endpoint was deleted while another one remains. If cookies is set, it compares the cookies of all namespaces,
// for a map that was not updated for some time: endpoint IDs in it may belong to other endpoints now.
func (s *Services) NameSockets(cookies bool) error {
	cookie, err := s.o.Home.Cookie()
	if err != nil {
		return err
	}
	if err := s.o.Namespaces.Set(sockets.Namespace{Cookie: cookie, Slot: endpointmap.HostID}); err != nil {
		return err
	}
	// The order matters: an entry is added after its endpoint ID was published, and removed before the ID is freed.
	known, err := s.o.Namespaces.List()
	if err != nil {
		return err
	}
	published, err := s.o.Slots.List()
	if err != nil {
		return err
	}
	live, named, leave := map[uint16]bool{endpointmap.HostID: true}, map[uint16]bool{}, map[uint16]bool{}
	for _, e := range published {
		live[e.Slot] = true
	}
	var errs []error
	own := map[uint16]uint64{endpointmap.HostID: cookie}
	ready := slices.DeleteFunc(s.o.Endpoints.List(), func(e endpoint.Endpoint) bool { return e.State != endpoint.Ready })
	if cookies {
		errs = append(errs, s.readCookies(ready, own))
	}
	for _, e := range ready {
		leave[e.Slot] = e.Spec.LeaveSockets
	}
	for _, k := range known {
		if is, ok := own[k.Slot]; live[k.Slot] && (!ok || is == k.Cookie) {
			named[k.Slot] = k.Leave == leave[k.Slot] // otherwise the entry is written again
			continue
		}
		errs = append(errs, s.o.Namespaces.Remove(k.Cookie, k.Slot))
	}
	for _, e := range ready {
		if !named[e.Slot] {
			errs = append(errs, s.ClaimSockets(e))
		}
	}
	return errors.Join(errs...)
}

// readCookies adds the cookie of each endpoint's namespace, by endpoint ID.
func (s *Services) readCookies(es []endpoint.Endpoint, cookies map[uint16]uint64) error {
	var errs []error
	for _, e := range es {
		errs = append(errs, s.inNamespaceOf(e, func(ns endpoint.Namespace) (err error) {
			cookie, err := ns.Cookie()
			if err == nil {
				cookies[e.Slot] = cookie
			}
			return err
		}))
	}
	return errors.Join(errs...)
}

// ClaimSockets adds the namespace of an endpoint, unless another endpoint has it.
func (s *Services) ClaimSockets(e endpoint.Endpoint) error {
	return s.inNamespaceOf(e, func(ns endpoint.Namespace) error {
		cookie, err := ns.Cookie()
		if err == nil {
			err = s.o.Namespaces.Claim(sockets.Namespace{Cookie: cookie, Slot: e.Slot, Leave: e.Spec.LeaveSockets})
		}
		if err != nil {
			return err
		}
		// The endpoint may have been deleted meanwhile, and another one may have the namespace.
		if now, err := s.o.Endpoints.Get(e.Spec.Owner); err != nil || now.Slot != e.Slot {
			return s.o.Namespaces.Remove(cookie, e.Slot)
		}
		return nil
	})
}

// eachNamespace calls fn with the network namespaces of the node and of its endpoints, including endpoints that are not
// ready: after a restart, the processes of an endpoint that waits for its policy keep running. It continues after
// errors of fn, and returns all.
func (s *Services) eachNamespace(ctx context.Context, fn func(*netns.Namespace) error) error {
	errs := []error{fn(s.o.Home)}
	for _, e := range s.o.Endpoints.List() {
		if ctx.Err() == nil {
			errs = append(errs, s.inNamespaceOf(e, func(ns endpoint.Namespace) error { return fn(netdev.Netns(ns)) }))
		}
	}
	return errors.Join(append(errs, ctx.Err())...)
}

// inNamespaceOf calls fn with the open network namespace of an endpoint. It does nothing if the namespace was deleted:
// its sockets are gone, and the endpoint is deleted soon.
func (s *Services) inNamespaceOf(e endpoint.Endpoint, fn func(endpoint.Namespace) error) error {
	ns, err := s.o.Links.OpenNamespace(e.Spec.Netns)
	if errors.Is(err, endpoint.ErrNamespaceGone) || errors.Is(err, endpoint.ErrNamespace) {
		return nil
	}
	if err == nil {
		err = errors.Join(fn(ns), ns.Close())
	}
	if err != nil {
		return fmt.Errorf("sockets of %s: %w", e.Spec.Owner, err)
	}
	return nil
}
