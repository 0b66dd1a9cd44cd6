// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package peer finds out which workload, address or identity a person means by the end of a connection.
package peer

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-net/sluice/cmd/sluice/internal/endpoint"
	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/workload"
	"github.com/sluice-net/sluice/model/identity"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/proto/wire"
)

// Forms is how a person may name one end of a connection.
const Forms = "a pod (start of its container's id), an address, an identity number, or labels such as " +
	"k8s:app=web,k8s:tier=front"

// Peer is one end of a connection.
type Peer struct {
	Text      string // as the person named it
	Identity  uint32 // 0: not known
	Labels    []*workloadv1.Label
	Addresses []netip.Addr
	Owner     *workload.Owner // of an endpoint of this node
}

// Resolve finds out what a person means.
func Resolve(ctx context.Context, inv *invocation.Invocation, text string) (Peer, error) {
	p := Peer{Text: text}
	if text == "" {
		return p, invocation.Usagef("an empty name: want %s", Forms)
	}
	if a, err := netip.ParseAddr(text); err == nil {
		p.Addresses = []netip.Addr{a.Unmap()}
		return resolveAddress(ctx, inv, p)
	}
	// Digits alone are an identity. The start of an id that has only digits has
	// to be given up to its first letter, or with the interface.
	if n, err := strconv.ParseUint(text, 10, 64); err == nil && len(text) <= 8 && text[0] != '0' {
		if n > uint64(identity.Max) {
			return p, invocation.Usagef("%q is not an identity: want 1 to %d", text, identity.Max)
		}
		p.Identity = uint32(n)
		return p, nil
	}
	switch {
	case strings.HasPrefix(text, "reserved:") && !strings.ContainsAny(text, "=,"):
		return resolveReserved(ctx, inv, p)
	case strings.ContainsAny(text, "=:,"):
		labels, err := parseLabels(text)
		p.Labels = labels
		return p, err
	}
	e, err := endpoint.Find(ctx, inv, text)
	if err != nil && strings.Contains(text, ".") && !errors.As(err, new(*invocation.UsageError)) {
		err = fmt.Errorf("%w; names of DNS are not taken, give an address", err)
	}
	if err != nil {
		return p, err
	}
	return p.At(e), nil
}

// At is the peer that an endpoint is.
func (p Peer) At(e *datapathv1.Endpoint) Peer {
	o := workload.OwnerOf(e.GetOwner())
	p.Owner, p.Identity, p.Addresses = &o, e.GetIdentity(), nil
	for _, text := range e.GetAddresses() {
		if a, err := wire.AddressOf(text); err == nil {
			p.Addresses = append(p.Addresses, a)
		}
	}
	return p
}

// resolveAddress says whose address it is: a pod's of this node, the node's, or
// that of something outside.
func resolveAddress(ctx context.Context, inv *invocation.Invocation, p Peer) (Peer, error) {
	a := p.Addresses[0]
	endpoints, err := endpoint.List(ctx, inv)
	if err != nil {
		return p, err
	}
	for _, e := range endpoints {
		if slices.Contains(e.GetAddresses(), a.String()) {
			p = p.At(e)
			p.Addresses = []netip.Addr{a}
			return p, nil
		}
	}
	node, err := invocation.Ask(ctx, inv, invocation.Datapath, datapathv1.DatapathServiceClient.GetStatus,
		&datapathv1.GetStatusRequest{})
	if err != nil {
		return p, err
	}
	if slices.Contains(node.GetNodeAddresses(), a.String()) {
		p.Identity = uint32(identity.Host)
		return p, nil
	}
	for _, text := range node.GetPodPrefixes() {
		if cidr, err := netip.ParsePrefix(text); err == nil && cidr.Contains(a) {
			p.Identity = uint32(identity.UnknownInCluster)
		}
	}
	return p, nil
}

func resolveReserved(ctx context.Context, inv *invocation.Invocation, p Peer) (Peer, error) {
	var names []string
	request := &identityv1.ListIdentitiesRequest{Scopes: []identityv1.Scope{identityv1.Scope_SCOPE_RESERVED}}
	err := invocation.Each(ctx, inv, invocation.Identity, identityv1.IdentityServiceClient.ListIdentities, request,
		func(m *identityv1.ListIdentitiesResponse) {
			if texts := workload.LabelTexts(m.GetIdentity().GetLabels()); len(texts) == 1 {
				names = append(names, texts[0])
				if texts[0] == p.Text {
					p.Identity = m.GetIdentity().GetNumber()
				}
			}
		})
	if err == nil && p.Identity == 0 {
		err = invocation.Usagef("%q is not one of %s", p.Text, strings.Join(names, ", "))
	}
	return p, err
}

// parseLabels reads "k8s:app=web,tier". A label without a source is of
// Kubernetes.
func parseLabels(text string) ([]*workloadv1.Label, error) {
	var labels []*workloadv1.Label
	for one := range strings.SplitSeq(text, ",") {
		one = strings.TrimSpace(one)
		name, value, _ := strings.Cut(one, "=")
		source, key, found := strings.Cut(name, ":")
		if !found {
			source, key = "k8s", name
		}
		if source == "" || key == "" {
			return nil, invocation.Usagef("%q is not a label: want [SOURCE:]KEY[=VALUE]", one)
		}
		if slices.ContainsFunc(labels,
			func(l *workloadv1.Label) bool { return l.GetSource() == source && l.GetKey() == key }) {
			return nil, invocation.Usagef("%q: the label %s:%s is there twice", text, source, key)
		}
		labels = append(labels, &workloadv1.Label{Source: source, Key: key, Value: value})
	}
	return labels, nil
}

// Proto is the peer for the policy service, with an address of the family.
func (p Peer) Proto(v6 bool) *policyv1.Peer {
	out := &policyv1.Peer{Identity: p.Identity, Labels: p.Labels}
	if a, ok := p.Address(v6); ok {
		out.Address = a.String()
	}
	return out
}

// Address is the first address of a family, if the peer has one.
func (p Peer) Address(v6 bool) (netip.Addr, bool) {
	for _, a := range p.Addresses {
		if a.Is6() == v6 {
			return a, true
		}
	}
	return netip.Addr{}, false
}

// Name is the peer with the address that is asked about.
func (p Peer) Name(v6 bool) string {
	text := p.Text
	if p.Owner != nil {
		text = p.Owner.String()
	}
	if a, ok := p.Address(v6); ok && a.String() != text {
		text += " " + a.String()
	}
	return text
}
