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
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipmap"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/service/servicemap"
)

// MaxBackends is how many backends of a service are evaluated; the others are
// counted.
const MaxBackends = 16

// Services are the frontends that the kernel has.
type Services interface {
	// Lookup reads a frontend from the maps of the kernel.
	Lookup(k frontend.Key) (servicemap.Frontend, bool, error)
	// IsOfServices says whether an address is of services alone.
	IsOfServices(addr netip.Addr) (bool, error)
	// MayAsk says whether a client may ask a front that has source ranges.
	MayAsk(front uint32, client netip.Addr) (bool, error)
}

// Outcome is what becomes of a connection to a service, before any policy is asked.
type Outcome uint8

// The outcomes.
const (
	// Translated: it goes to one of the backends.
	Translated Outcome = iota + 1
	// NoBackend: it is refused, because no node has a backend.
	NoBackend
	// NoLocalBackend: it is dropped, because other nodes have backends and this one
	// has none.
	NoLocalBackend
	// SourceRanges: it is dropped, because the frontend is for other clients.
	SourceRanges
	// NotTranslated: it passes as if there were no service.
	NotTranslated
	// InsideOnly: it is dropped, because the sender is outside and the frontend is a
	// cluster IP.
	InsideOnly
	// NoPort: no frontend has the port, and the address is of services alone. Of this
	// node it is refused, from outside dropped.
	NoPort
)

// Service is the service whose frontend a connection asks for.
type Service struct {
	servicemap.Frontend
	// Outside says that the sender is neither an endpoint nor the host of this node.
	Outside bool
	Outcome Outcome
	// Backends are the first MaxBackends of the list that counts for the sender.
	Backends []Backend
	// Count is how many backends that list has.
	Count int
}

// Path is how a connection gets to a backend.
type Path uint8

// The paths.
const (
	// Evaluated: past a program of an endpoint, which evaluates it.
	Evaluated Path = iota + 1
	// OwnNamespace: the backend is the sender. The connection stays inside its network
	// namespace, where no policy is asked.
	OwnNamespace
	// NotLocal: neither the sender nor the backend is an endpoint of this node, and no
	// policy of this node is asked.
	NotLocal
	// InTransit: from outside to a backend elsewhere, which sees an address of this node
	// as the sender. No policy of this node is asked.
	InTransit
	// HostSocket: from outside to a socket of the node itself. No policy is asked.
	HostSocket
)

// Backend is one that a connection to a service may be led to, and what becomes of
// the connection then.
type Backend struct {
	servicemap.Backend
	Path Path
	// Explanation has no verdicts of policies unless the path is Evaluated, and no reason
	// if it is OwnNamespace or NotLocal.
	Explanation Explanation
	// Source is the address of this node that the backend sees, if InTransit.
	Source netip.Addr
}

// translated says whether the kernel has a program that leads a connection to backends:
// of TCP and UDP for the sockets of the node's endpoints and of its host; of SCTP, too,
// for packets, which those of endpoints and of senders outside are.
func (e *Explainer) translated(k frontend.Key, sender endpointmap.ID) bool {
	switch sender {
	case endpointmap.HostID:
		return k.Protocol != frontend.SCTP
	case endpointmap.NoID:
		return !e.isTunnel(k.Protocol, k.Port)
	}
	return true
}

// findService finds the frontend that the destination is, in the order of the
// programs: that of the address, else a node port at an address of the node. nil:
// there is none.
func (e *Explainer) findService(known []ipmap.Entry, t conntrack.Tuple) (*Service, error) {
	to := t.Responder
	k := frontend.Key{Addr: to.Addr(), Port: to.Port(), Protocol: frontend.Protocol(t.Protocol)}
	sender, err := e.Endpoints.SlotOf(t.Initiator.Addr())
	if err != nil {
		return nil, fmt.Errorf("endpoint of %v: %w", t.Initiator.Addr(), err)
	}
	switch k.Protocol {
	case frontend.TCP, frontend.UDP, frontend.SCTP:
	default: // no service has it
		k.Port = 0
		return e.findNoPort(known, k, sender)
	}
	if k.Validate() != nil {
		return nil, nil // no service has such an address
	}
	if k.Addr.IsLoopback() && sender != endpointmap.HostID {
		return nil, nil // each container has that for itself
	}
	f, ok, err := e.Services.Lookup(k)
	if !ok && err == nil {
		f, ok, err = e.findNodePort(k, sender)
	}
	if err == nil && !ok {
		return e.findNoPort(known, k, sender)
	}
	if err != nil {
		return nil, err
	}
	s := &Service{Frontend: f, Outside: sender == endpointmap.NoID}
	list := f.Inside
	if s.Outside {
		list = f.Outside
	}
	closed := false
	if list != nil {
		s.Count = len(list.Backends)
		if closed, err = e.isClosed(list, t.Initiator.Addr(), sender); err != nil {
			return nil, err
		}
	}
	switch {
	case list == nil || !e.translated(k, sender):
		s.Outcome = NotTranslated
	// of a cluster IP alone
	case s.Outside && f.Inside != nil && f.Inside.Number == f.Outside.Number:
		s.Outcome = InsideOnly
	case closed:
		s.Outcome = SourceRanges
	case s.Count == 0 && list.Drop:
		s.Outcome = NoLocalBackend
	case s.Count == 0:
		s.Outcome = NoBackend
	default:
		s.Outcome = Translated
		for _, b := range list.Backends[:min(s.Count, MaxBackends)] {
			s.Backends = append(s.Backends, Backend{Backend: b})
		}
	}
	return s, nil
}

// findNoPort finds out whether a destination that no frontend has goes nowhere. A UDP
// socket of the host is no concern of the programs.
func (e *Explainer) findNoPort(known []ipmap.Entry, k frontend.Key, sender endpointmap.ID) (*Service, error) {
	at, err := e.peer(known, k.Addr)
	if err != nil || at.Slot != endpointmap.NoID || at.Node != 0 ||
		sender == endpointmap.HostID && k.Protocol != frontend.TCP || !e.translated(k, sender) {
		return nil, err
	}
	if alone, err := e.Services.IsOfServices(k.Addr); err != nil || !alone {
		return nil, err
	}
	return &Service{Frontend: servicemap.Frontend{Key: k}, Outside: sender == endpointmap.NoID, Outcome: NoPort}, nil
}

// isClosed says whether a list is for other sources. The sockets of the node itself have
// no address there.
func (e *Explainer) isClosed(list *servicemap.Front, client netip.Addr, sender endpointmap.ID) (bool, error) {
	if !list.Sources {
		return false, nil
	}
	if sender == endpointmap.HostID {
		client = frontend.Unspecified(client)
	}
	ok, err := e.Services.MayAsk(list.Number, client)
	return !ok, err
}

// findNodePort finds the node port that answers at an address of the node, or at a
// loopback address for the host.
func (e *Explainer) findNodePort(k frontend.Key, sender endpointmap.ID) (servicemap.Frontend, bool, error) {
	at := sender == endpointmap.HostID
	if !k.Addr.IsLoopback() {
		slot, err := e.Endpoints.SlotOf(k.Addr)
		if err != nil {
			return servicemap.Frontend{}, false, fmt.Errorf("endpoint of %v: %w", k.Addr, err)
		}
		at = slot == endpointmap.HostID
	}
	if !at {
		return servicemap.Frontend{}, false, nil
	}
	return e.Services.Lookup(k.NodePort())
}

// explainService explains the connection to each backend. Source is as the first of
// them has it evaluated.
func (e *Explainer) explainService(known []ipmap.Entry, t conntrack.Tuple, s *Service) (x Explanation, err error) {
	x.Service = s
	if x.Source, err = e.peer(known, t.Initiator.Addr()); err != nil {
		return x, err
	}
	if x.Destination, err = e.peer(known, t.Responder.Addr()); err != nil {
		return x, err
	}
	for i := range s.Backends {
		b := &s.Backends[i]
		to := t
		to.Responder = b.AddrPort
		switch {
		case t.Protocol == unix.IPPROTO_SCTP && b.Port() != t.Responder.Port():
			// a checksum of SCTP could not follow the port
			b.Path, b.Explanation = Evaluated, Explanation{Reason: event.ServiceSCTPPort, Source: x.Source}
			b.Explanation.Destination, err = e.peer(known, b.Addr())
		case s.Outside:
			err = e.explainOutside(known, to, b)
		default:
			err = e.explainInside(known, to, b)
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

// explainInside explains a connection of an endpoint, or of the host, to a backend.
func (e *Explainer) explainInside(known []ipmap.Entry, t conntrack.Tuple, b *Backend) (err error) {
	b.Explanation, err = e.explainDirect(known, t)
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
