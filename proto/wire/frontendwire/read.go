// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package frontendwire

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/sluice-net/sluice/model/frontend"
	loadbalancerv1 "github.com/sluice-net/sluice/proto/gen/sluice/loadbalancer/v1"
	"github.com/sluice-net/sluice/proto/wire"
)

// ErrMalformed is returned for a message that cannot be read. The text names the field.
var ErrMalformed = errors.New("malformed")

// Bounds of a barrier.
const (
	maxIncarnation = 16
	maxStateName   = 16
)

// StepsOf reads the steps of a message. A frontend with a valid key that cannot be read
// becomes a Refuse.
func StepsOf(all []*loadbalancerv1.FrontendStep) ([]frontend.Step, error) {
	out := make([]frontend.Step, len(all))
	for i, st := range all {
		var err error
		if out[i], err = stepOf(st); err != nil {
			return nil, fmt.Errorf("steps[%d]: %w", i, err)
		}
	}
	return out, nil
}

func stepOf(st *loadbalancerv1.FrontendStep) (out frontend.Step, err error) {
	switch st := st.GetStep().(type) {
	case *loadbalancerv1.FrontendStep_Upsert:
		k, err := KeyOf(st.Upsert.GetKey())
		if err != nil {
			return out, fmt.Errorf("upsert: %w", err)
		}
		f, err := frontendOf(k, st.Upsert)
		if err != nil {
			out.Refuse = &frontend.Refusal{Key: k, Err: err}
			return out, nil
		}
		out.Upsert = f
	case *loadbalancerv1.FrontendStep_Remove:
		k, err := KeyOf(st.Remove)
		if err != nil {
			return out, fmt.Errorf("remove: %w", err)
		}
		out.Remove = &k
	case *loadbalancerv1.FrontendStep_Barrier:
		b := st.Barrier
		if n := len(b.GetIncarnation()); n == 0 || n > maxIncarnation {
			return out, fmt.Errorf("barrier: %w: incarnation of %d bytes", ErrMalformed, n)
		}
		if n := len(b.GetState()); n == 0 || n > maxStateName {
			return out, fmt.Errorf("barrier: %w: state of %d bytes", ErrMalformed, n)
		}
		out.Barrier = &frontend.Barrier{
			Incarnation: string(b.GetIncarnation()), Seq: b.GetSeq(), Revision: b.GetRevision(),
			SnapshotComplete: b.GetSnapshotComplete(), State: string(b.GetState()), SourcesComplete: b.GetSourcesComplete(),
		}
	default:
		return out, fmt.Errorf("%w: a step that this version does not know", ErrMalformed)
	}
	return out, nil
}

// KeyOf reads a key.
func KeyOf(p *loadbalancerv1.FrontendKey) (k frontend.Key, err error) {
	if p.GetPort() == 0 || p.GetPort() > 65535 {
		return k, fmt.Errorf("%w: port %d", ErrMalformed, p.GetPort())
	}
	if p.GetProtocol() < 0 || p.GetProtocol() > 255 {
		return k, fmt.Errorf("%w: protocol %d", ErrMalformed, p.GetProtocol())
	}
	k.Port, k.Protocol = uint16(p.GetPort()), frontend.Protocol(p.GetProtocol())
	switch {
	case p.GetAddress() != "":
		if k.Addr, err = wire.AddressOf(p.GetAddress()); err != nil {
			return k, fmt.Errorf("%w: address: %w", ErrMalformed, err)
		}
	case p.GetFamily() == loadbalancerv1.IPFamily_IP_FAMILY_IPV4:
		k.Node, k.Addr = true, netip.IPv4Unspecified()
	case p.GetFamily() == loadbalancerv1.IPFamily_IP_FAMILY_IPV6:
		k.Node, k.Addr = true, netip.IPv6Unspecified()
	default:
		return k, fmt.Errorf("%w: neither an address nor a family", ErrMalformed)
	}
	if err := k.Validate(); err != nil {
		return k, err
	}
	return k, nil
}

func kindOf(p loadbalancerv1.FrontendKind) (frontend.Kind, error) {
	for k, m := range kinds {
		if m == p {
			return k, nil
		}
	}
	return 0, fmt.Errorf("%w: kind %v", ErrMalformed, p)
}

func frontendOf(k frontend.Key, p *loadbalancerv1.Frontend) (*frontend.Frontend, error) {
	kind, err := kindOf(p.GetKind())
	if err != nil {
		return nil, err
	}
	f := &frontend.Frontend{
		Key: k, Kind: kind, Service: frontend.ServicePort(p.GetNamespace(), p.GetName(), p.GetPortName()),
		Affinity: time.Duration(p.GetAffinitySeconds()) * time.Second, ExceedsShare: p.GetExceedsShare(),
	}
	if t := p.GetTenant(); t != nil {
		f.Tenant, _ = wire.ReadTenant(t)
	}
	if f.Inside, err = listOf(p.GetInside()); err != nil {
		return nil, fmt.Errorf("inside: %w", err)
	}
	if f.Outside, err = listOf(p.GetOutside()); err != nil {
		return nil, fmt.Errorf("outside: %w", err)
	}
	for _, text := range p.GetSourceRanges() {
		r, err := netip.ParsePrefix(text)
		if err != nil {
			return nil, fmt.Errorf("%w: source range %q", ErrMalformed, text)
		}
		f.SourceRanges = append(f.SourceRanges, r.Masked())
	}
	return f, f.Validate()
}

func listOf(p *loadbalancerv1.BackendList) (*frontend.List, error) {
	if p == nil {
		return nil, nil
	}
	l := &frontend.List{Drop: p.GetWhenEmpty() == loadbalancerv1.EmptyAction_EMPTY_ACTION_DROP}
	switch p.GetAlgorithm() {
	case loadbalancerv1.Algorithm_ALGORITHM_UNSPECIFIED:
	case loadbalancerv1.Algorithm_ALGORITHM_TABLE:
		l.Table = true
	default:
		return nil, fmt.Errorf("%w: algorithm %v", ErrMalformed, p.GetAlgorithm())
	}
	var err error
	if l.Backends, err = backendsOf("backends", p.GetBackends()); err != nil {
		return nil, err
	}
	l.Draining, err = backendsOf("draining", p.GetDraining())
	return l, err
}

func backendsOf(field string, all []*loadbalancerv1.Backend) ([]frontend.Backend, error) {
	if len(all) == 0 {
		return nil, nil
	}
	out := make([]frontend.Backend, len(all))
	for i, b := range all {
		a, err := wire.AddressOf(b.GetAddress())
		if err != nil || b.GetPort() == 0 || b.GetPort() > 65535 {
			return nil, fmt.Errorf("%s[%d]: %w: backend %q port %d",
				field, i, ErrMalformed, b.GetAddress(), b.GetPort())
		}
		out[i] = frontend.Backend{
			AddrPort:    netip.AddrPortFrom(a, uint16(b.GetPort())), //nolint:gosec // checked
			Terminating: b.GetTerminating(),
		}
	}
	return out, nil
}

// CapacityOf reads a capacity; nil is an unknown one.
func CapacityOf(p *loadbalancerv1.Capacity) frontend.Capacity {
	return frontend.Capacity{
		Frontends: int(p.GetFrontends()), Backends: int(p.GetBackends()), Members: int(p.GetMembers()),
		BackendsPerList: int(p.GetBackendsPerList()),
	}
}

// RefusalOf reads the refused frontend and the reason.
func RefusalOf(p *loadbalancerv1.Refused) (k frontend.Key, reason string, err error) {
	k, err = KeyOf(p.GetKey())
	return k, p.GetReason(), err
}
