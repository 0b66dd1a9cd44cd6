// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package peer resolves the ends of a connection on the command line to workloads, addresses and identities.
package peer

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/cmd/sluice/internal/endpoint"
	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/ports"
	"github.com/sluice-net/sluice/cmd/sluice/internal/workload"
	"github.com/sluice-net/sluice/model/identity"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/proto/wire"
)

// Forms describes the accepted names of one end of a connection.
const Forms = "a pod NAMESPACE/NAME or container of this node, an address, an identity number, or labels such as " +
	"k8s:app=web,k8s:tier=front"

// Peer is one resolved end of a connection.
type Peer struct {
	Text      string // as given on the command line
	Identity  uint32 // if 0, Labels decide, or the address is outside of the cluster
	Labels    []*workloadv1.Label
	Addresses []netip.Addr
	Owner     *workload.Owner // of the endpoint; nil if the peer is not an endpoint of this node
	// Node is the name of the node that has the address, if that is not the local node; otherwise empty.
	Node string
	// Note describes how the identity was chosen, if that is not obvious; may be empty.
	Note string
}

// Resolver resolves one end of a connection. If namespace is not empty, its labels are added to the given labels.
type Resolver func(ctx context.Context, inv *invocation.Invocation, text, namespace string) (Peer, error)

// Resolve resolves a peer and its identity. It asks the datapath about this node and sluice-identity about the
// cluster, and fails if the responsible service does not respond.
func Resolve(ctx context.Context, inv *invocation.Invocation, text, namespace string) (Peer, error) {
	p := Peer{Text: text}
	if text == "" {
		return p, invocation.Usagef("an empty name: want %s", Forms)
	}
	if IsAddress(text) {
		a, err := ParseAddress(text)
		if err != nil {
			return p, err
		}
		p.Addresses = []netip.Addr{a}
		return resolveAddress(ctx, inv, p)
	}
	// A number is an identity. To name a container whose ID begins with digits, give the ID up to its first letter, or
	// with the interface.
	if n, err := strconv.ParseUint(text, 10, 64); err == nil && len(text) <= 8 && text[0] != '0' {
		if n > uint64(identity.Max) {
			return p, invocation.Usagef("%q is not an identity: want 1 to %d", text, identity.Max)
		}
		p.Identity = uint32(n)
		return p, nil
	}
	switch {
	case isReserved(text):
		return resolveReserved(ctx, inv, p)
	case IsLabels(text):
		labels, err := ParseLabels(text, namespace)
		if err != nil {
			return p, err
		}
		p.Labels = labels
		return resolveLabels(ctx, inv, p)
	}
	e, err := endpoint.Find(ctx, inv, text)
	if err != nil && strings.Contains(text, ".") && !errors.As(err, new(*invocation.UsageError)) {
		err = fmt.Errorf("%w; DNS names are not accepted; give an address", err)
	}
	if err != nil {
		return p, err
	}
	return p.At(e), nil
}

// At returns the peer with the owner, identity and addresses of an endpoint.
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

// IsAddress reports whether the text is an address, with or without a zone.
func IsAddress(text string) bool {
	_, err := netip.ParseAddr(text)
	return err == nil
}

// ParseAddress parses the address of a peer. It refuses loopback addresses and addresses that no packet can have.
func ParseAddress(text string) (netip.Addr, error) {
	a, err := netip.ParseAddr(text)
	switch a = a.Unmap(); {
	case err != nil:
		return a, invocation.Usagef("%q is not an address", text)
	case a.Zone() != "":
		return a, invocation.Usagef("%q: an address of a peer has no zone", text)
	case a.IsLoopback(), a.IsMulticast(), a.IsUnspecified():
		return a, invocation.Usagef("%s is a loopback, multicast or unspecified address; the datapath drops its packets "+
			"(martian-address, multicast) before it evaluates policies", text)
	}
	return a, nil
}

// resolveAddress finds the identity that the kernel uses for an address. The datapath knows the addresses of this node,
// and sluice-identity knows the addresses of the other nodes.
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
			p.Note = fmt.Sprintf("no pod has %s, which lies in %s of this node", a, cidr)
			return p, nil
		}
	}
	r, err := invocation.Ask(ctx, inv, invocation.Cluster, identityv1.ClusterServiceClient.GetIPMapping,
		&identityv1.GetIPMappingRequest{Address: a.String()})
	switch {
	case status.Code(err) == codes.NotFound:
		host, err := isHost(ctx, inv, endpoints, a)
		if host {
			p.Identity = uint32(identity.Host)
		}
		return p, err
	case err != nil:
		return p, fmt.Errorf("cannot find the identity of %s: %w", a, err)
	case r.GetMapping() != nil:
		if p.Identity = r.GetMapping().GetIdentity(); p.Identity != uint32(identity.Host) {
			p.Node = r.GetMapping().GetNode()
		}
	case r.GetRangeNode() != "":
		p.Identity, p.Node = uint32(identity.UnknownInCluster), r.GetRangeNode()
		p.Note = fmt.Sprintf("no pod has %s, which lies in %s of node %s", a, r.GetRange(), r.GetRangeNode())
	}
	return p, nil
}

// isHost reports whether the kernel treats the address as one of the local node. The kernel knows the addresses of all
// interfaces, the cluster only the addresses under which other nodes reach the node. isHost asks the datapath about a
// packet to the address from a pod with an address of the same family. If there is no such pod, it returns false.
func isHost(
	ctx context.Context, inv *invocation.Invocation, endpoints []*datapathv1.Endpoint, a netip.Addr,
) (bool, error) {
	for _, e := range endpoints {
		p := Peer{}.At(e)
		source, ok := p.Address(a.Is6())
		if !ok {
			continue
		}
		echo := &datapathv1.ExplainRequest{
			SourceAddress: source.String(), DestinationAddress: a.String(), Protocol: netv1.Protocol(ports.Protocols["icmp"]),
			DestinationPort: 8 << 8,
		}
		if a.Is6() {
			echo.Protocol, echo.DestinationPort = netv1.Protocol(ports.Protocols["icmpv6"]), 128<<8
		}
		r, err := invocation.Ask(ctx, inv, invocation.Observer, datapathv1.ObserverServiceClient.Explain, echo)
		if err != nil {
			return false, fmt.Errorf("cannot find out whether %s is an address of this node: %w", a, err)
		}
		return r.GetDestination().GetIdentity() == uint32(identity.Host), nil
	}
	return false, nil
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
		err = invocation.NotOneOf("", p.Text, names)
	}
	return p, err
}

// Proto returns the peer for the policy service, with an address of the family.
func (p Peer) Proto(v6 bool) *policyv1.Peer {
	out := &policyv1.Peer{Identity: p.Identity, Labels: p.Labels}
	if a, ok := p.Address(v6); ok {
		out.Address = a.String()
	}
	return out
}

// Address returns the first address of the family.
func (p Peer) Address(v6 bool) (netip.Addr, bool) {
	for _, a := range p.Addresses {
		if a.Is6() == v6 {
			return a, true
		}
	}
	return netip.Addr{}, false
}

// OtherNode returns the other node that enforces the policies of the peer; empty if this node does, or if the peer is
// not a pod.
func (p Peer) OtherNode() string {
	if id := identity.Numeric(p.Identity); id.OfNode() || id == identity.UnknownInCluster {
		return ""
	}
	return p.Node
}

// Name returns the name of the peer with its address of the family.
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
