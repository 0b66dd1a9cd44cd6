// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package explain

import (
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipmap"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/service/servicemap"
)

// MaxBackends is the maximum number of backends of a service that are evaluated; the others are only counted.
const MaxBackends = 16

// Services are the frontends in the kernel.
type Services interface {
	// Lookup reads a frontend from the maps of the kernel.
	Lookup(k frontend.Key) (servicemap.Frontend, bool, error)
	// IsOfServices reports whether an address is a virtual IP, which only services use.
	IsOfServices(addr netip.Addr) (bool, error)
	// MayAsk reports whether a front with source ranges allows a client.
	MayAsk(front uint32, client netip.Addr) (bool, error)
}

// Outcome is the result of looking up a service, before any policy is evaluated.
type Outcome uint8

const (
	// Translated: the connection goes to one of the backends.
	Translated Outcome = iota + 1
	// NoBackend: the connection is refused, because no node has a backend.
	NoBackend
	// NoLocalBackend: the connection is dropped, because only other nodes have backends.
	NoLocalBackend
	// SourceRanges: the connection is dropped, because the source ranges do not contain the client.
	SourceRanges
	// NotTranslated: the connection is handled as if there were no service.
	NotTranslated
	// InsideOnly: the connection is dropped, because the client is external and the frontend is a cluster IP.
	InsideOnly
	// NoPort: the address is a virtual IP, and no frontend has the port. Connections from this node are refused, external
	// ones dropped.
	NoPort
)

// Service is the service whose frontend is the destination of a connection.
type Service struct {
	servicemap.Frontend
	// Outside: the sender is neither an endpoint nor the host of this node.
	Outside bool
	Outcome Outcome
	// Backends are the first MaxBackends of the list that applies to the sender.
	Backends []Backend
	// Count is the number of backends in that list.
	Count int
}

// Path is the kind of path between a client and a backend.
type Path uint8

const (
	// Evaluated: through a program of an endpoint, which evaluates it.
	Evaluated Path = iota + 1
	// OwnNamespace: the backend is the sender. The connection stays inside its network namespace, where no policy is
	// evaluated.
	OwnNamespace
	// NotLocal: neither the sender nor the backend is an endpoint of this node, and no policy of this node is evaluated.
	NotLocal
	// InTransit: from an external client to a backend on another node, which sees an address of this node as the source.
	// No policy of this node is evaluated.
	InTransit
	// HostSocket: from an external client to a socket of the node itself. No policy is evaluated.
	HostSocket
)

// Backend is a possible backend of a connection to a service, with the explanation of that connection.
type Backend struct {
	servicemap.Backend
	Path Path
	// Explanation has policy verdicts only if Path is Evaluated, and no reason if Path is OwnNamespace or NotLocal.
	Explanation Explanation
	// Source is the address of this node that the backend sees, if Path is InTransit.
	Source netip.Addr
}

// services finds the frontend of a destination.
type services struct {
	peers
	tunnel    tunnel
	frontends Services
}

// translated reports whether the programs translate a connection: TCP and UDP for sockets of the node's endpoints and
// its host; packets of endpoints and external clients, including SCTP.
func (s services) translated(k frontend.Key, sender endpointmap.ID) bool {
	switch sender {
	case endpointmap.HostID:
		return k.Protocol != frontend.SCTP
	case endpointmap.NoID:
		return !s.tunnel.uses(k.Protocol, k.Port)
	}
	return true
}

// find finds the frontend of the destination in the order of the programs: the frontend of the address,
// otherwise a NodePort on an address of the node. nil: none.
func (s services) find(q *query) (*Service, error) {
	to := q.Responder
	k := frontend.Key{Addr: to.Addr(), Port: to.Port(), Protocol: frontend.Protocol(q.Protocol)}
	sender, err := s.endpoints.SlotOf(q.Initiator.Addr())
	if err != nil {
		return nil, fmt.Errorf("endpoint of %v: %w", q.Initiator.Addr(), err)
	}
	switch k.Protocol {
	case frontend.TCP, frontend.UDP, frontend.SCTP:
	default: // services only use TCP, UDP and SCTP
		k.Port = 0
		return s.findNoPort(q.known, k, sender)
	}
	if k.Validate() != nil {
		return nil, nil // no service has such an address
	}
	if k.Addr.IsLoopback() && sender != endpointmap.HostID {
		return nil, nil // each container has its own loopback addresses
	}
	f, ok, err := s.frontends.Lookup(k)
	if !ok && err == nil {
		f, ok, err = s.findNodePort(k, sender)
	}
	if err == nil && !ok {
		return s.findNoPort(q.known, k, sender)
	}
	if err != nil {
		return nil, err
	}
	found := &Service{Frontend: f, Outside: sender == endpointmap.NoID}
	list := f.Inside
	if found.Outside {
		list = f.Outside
	}
	closed := false
	if list != nil {
		found.Count = len(list.Backends)
		if closed, err = s.isClosed(list, q.Initiator.Addr(), sender); err != nil {
			return nil, err
		}
	}
	switch {
	case list == nil || !s.translated(k, sender):
		found.Outcome = NotTranslated
	// only a cluster IP
	case found.Outside && f.Inside != nil && f.Inside.Number == f.Outside.Number:
		found.Outcome = InsideOnly
	case closed:
		found.Outcome = SourceRanges
	case found.Count == 0 && list.Drop:
		found.Outcome = NoLocalBackend
	case found.Count == 0:
		found.Outcome = NoBackend
	default:
		found.Outcome = Translated
		for _, b := range list.Backends[:min(found.Count, MaxBackends)] {
			found.Backends = append(found.Backends, Backend{Backend: b})
		}
	}
	return found, nil
}

// findNoPort checks whether a destination without a frontend is rejected because its address is a virtual IP. The
// programs do not check UDP sockets of the host.
func (s services) findNoPort(known []ipmap.Entry, k frontend.Key, sender endpointmap.ID) (*Service, error) {
	at, err := s.lookUp(known, k.Addr)
	if err != nil || at.Slot != endpointmap.NoID || at.Node != 0 ||
		sender == endpointmap.HostID && k.Protocol != frontend.TCP || !s.translated(k, sender) {
		return nil, err
	}
	if vip, err := s.frontends.IsOfServices(k.Addr); err != nil || !vip {
		return nil, err
	}
	return &Service{Frontend: servicemap.Frontend{Key: k}, Outside: sender == endpointmap.NoID, Outcome: NoPort}, nil
}

// isClosed reports whether the source ranges of a list exclude the client. The node's own sockets count as a client
// with the unspecified address.
func (s services) isClosed(list *servicemap.Front, client netip.Addr, sender endpointmap.ID) (bool, error) {
	if !list.Sources {
		return false, nil
	}
	if sender == endpointmap.HostID {
		client = frontend.Unspecified(client)
	}
	ok, err := s.frontends.MayAsk(list.Number, client)
	return !ok, err
}

// findNodePort finds the NodePort of an address of the node or, for the host, of a loopback address.
func (s services) findNodePort(k frontend.Key, sender endpointmap.ID) (servicemap.Frontend, bool, error) {
	at := sender == endpointmap.HostID
	if !k.Addr.IsLoopback() {
		slot, err := s.endpoints.SlotOf(k.Addr)
		if err != nil {
			return servicemap.Frontend{}, false, fmt.Errorf("endpoint of %v: %w", k.Addr, err)
		}
		at = slot == endpointmap.HostID
	}
	if !at {
		return servicemap.Frontend{}, false, nil
	}
	return s.frontends.Lookup(k.NodePort())
}

// explainService explains the connection to each backend. Source is the source of the first one that is evaluated.
func (e *Explainer) explainService(q query, s *Service) (x Explanation, err error) {
	x.Service = s
	if err = e.services.explain(&q, &x); err != nil {
		return x, err
	}
	for i := range s.Backends {
		b := &s.Backends[i]
		to := q
		to.Responder = b.AddrPort
		switch {
		case q.Protocol == unix.IPPROTO_SCTP && b.Port() != q.Responder.Port():
			// the SCTP checksum is not updated for a changed port
			b.Path, b.Explanation = Evaluated, Explanation{Reason: event.ServiceSCTPPort, Source: x.Source}
			b.Explanation.Destination, err = e.services.lookUp(q.known, b.Addr())
		case s.Outside:
			err = e.explainOutside(to, b)
		default:
			err = e.explainInside(to, b)
		}
		if err != nil {
			return x, fmt.Errorf("backend %v: %w", b.AddrPort, err)
		}
		if x.Source.Identity == 0 {
			x.Source = b.Explanation.Source
		}
	}
	return x, nil
}

// explainInside explains a connection from an endpoint or the host to a backend.
func (e *Explainer) explainInside(q query, b *Backend) (err error) {
	b.Explanation, err = run(e.direct, q)
	from, at := b.Explanation.Source, b.Explanation.Destination
	switch {
	case errors.Is(err, ErrNotLocal):
		b.Path = NotLocal
		return nil
	case err != nil:
		return err
	case from.endpoint() && from.Slot == at.Slot:
		b.Path = OwnNamespace
		b.Explanation = Explanation{Source: from, Destination: at}
	default:
		b.Path = Evaluated
	}
	return nil
}
