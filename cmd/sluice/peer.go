// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

// peerForms is how a person may name one end of a connection.
const peerForms = "a pod (start of its container's id), an address, an identity number, or labels such as k8s:app=web,k8s:tier=front"

// Identities with a number that never changes.
const (
	identityHost             = 1
	identityUnknownInCluster = 255
)

// peer is one end of a connection.
type peer struct {
	text      string // as the person named it
	identity  uint32 // 0: not known
	labels    []*workloadv1.Label
	addresses []netip.Addr
	owner     *owner // of an endpoint of this node
}

// resolvePeer finds out what a person means.
func (c *command) resolvePeer(ctx context.Context, text string) (peer, error) {
	p := peer{text: text}
	if text == "" {
		return p, usagef("an empty name: want %s", peerForms)
	}
	if a, err := netip.ParseAddr(text); err == nil {
		p.addresses = []netip.Addr{a.Unmap()}
		return c.resolveAddress(ctx, p)
	}
	// Digits alone are an identity. The start of an id that has only digits has
	// to be given up to its first letter, or with the interface.
	if n, err := strconv.ParseUint(text, 10, 64); err == nil && len(text) <= 8 && text[0] != '0' {
		if n > 0xFFFFFF {
			return p, usagef("%q is not an identity: want 1 to %d", text, 0xFFFFFF)
		}
		p.identity = uint32(n)
		return p, nil
	}
	switch {
	case strings.HasPrefix(text, "reserved:") && !strings.ContainsAny(text, "=,"):
		return c.resolveReserved(ctx, p)
	case strings.ContainsAny(text, "=:,"):
		labels, err := parseLabels(text)
		p.labels = labels
		return p, err
	}
	e, err := c.findEndpoint(ctx, text)
	if err != nil {
		return p, err
	}
	return p.at(e), nil
}

// at is the peer that an endpoint is.
func (p peer) at(e *datapathv1.Endpoint) peer {
	o := ownerOf(e.GetOwner())
	p.owner, p.identity, p.addresses = &o, e.GetIdentity(), nil
	for _, b := range e.GetAddresses() {
		if a, ok := netip.AddrFromSlice(b); ok {
			p.addresses = append(p.addresses, a)
		}
	}
	return p
}

// resolveAddress says whose address it is: a pod's of this node, the node's, or
// that of something outside.
func (c *command) resolveAddress(ctx context.Context, p peer) (peer, error) {
	a := p.addresses[0]
	endpoints, err := c.endpoints(ctx)
	if err != nil {
		return p, err
	}
	for _, e := range endpoints {
		if slices.ContainsFunc(e.GetAddresses(), func(b []byte) bool { return slices.Equal(b, a.AsSlice()) }) {
			p = p.at(e)
			p.addresses = []netip.Addr{a}
			return p, nil
		}
	}
	conn, err := c.dial("datapath")
	if err != nil {
		return p, err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	node, err := datapathv1.NewDatapathServiceClient(conn).GetStatus(ctx, &datapathv1.GetStatusRequest{})
	if err != nil {
		return p, err
	}
	if slices.ContainsFunc(node.GetNodeAddresses(), func(b []byte) bool { return slices.Equal(b, a.AsSlice()) }) {
		p.identity = identityHost
		return p, nil
	}
	for _, text := range node.GetPodCidrs() {
		if cidr, err := netip.ParsePrefix(text); err == nil && cidr.Contains(a) {
			p.identity = identityUnknownInCluster
		}
	}
	return p, nil
}

func (c *command) resolveReserved(ctx context.Context, p peer) (peer, error) {
	conn, err := c.dial("identity")
	if err != nil {
		return p, err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	stream, err := identityv1.NewIdentityServiceClient(conn).ListIdentities(ctx, &identityv1.ListIdentitiesRequest{Scopes: []identityv1.Scope{identityv1.Scope_SCOPE_RESERVED}})
	if err != nil {
		return p, err
	}
	var names []string
	for {
		m, err := stream.Recv()
		if err != nil {
			if len(names) > 0 {
				return p, usagef("%q is not one of %s", p.text, strings.Join(names, ", "))
			}
			return p, err
		}
		texts := labelTexts(m.GetIdentity().GetLabels())
		if len(texts) == 1 {
			names = append(names, texts[0])
		}
		if len(texts) == 1 && texts[0] == p.text {
			p.identity = m.GetIdentity().GetNumber()
			return p, nil
		}
	}
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
			return nil, usagef("%q is not a label: want [SOURCE:]KEY[=VALUE]", one)
		}
		if slices.ContainsFunc(labels, func(l *workloadv1.Label) bool { return l.GetSource() == source && l.GetKey() == key }) {
			return nil, usagef("%q: the label %s:%s is there twice", text, source, key)
		}
		labels = append(labels, &workloadv1.Label{Source: source, Key: key, Value: value})
	}
	return labels, nil
}

// proto is the peer for the policy service, with an address of the family.
func (p peer) proto(v6 bool) *policyv1.Peer {
	out := &policyv1.Peer{Identity: p.identity, Labels: p.labels}
	if a, ok := p.address(v6); ok {
		out.Address = a.AsSlice()
	}
	return out
}

func (p peer) address(v6 bool) (netip.Addr, bool) {
	for _, a := range p.addresses {
		if a.Is6() == v6 {
			return a, true
		}
	}
	return netip.Addr{}, false
}

// connection is what `explain` asks about.
type connection struct {
	from, to   peer
	v6         bool
	protocol   uint32
	sourcePort uint32
	port       uint32 // type << 8 | code for ICMP
}

// connectionFlags are a connection as given.
type connectionFlags struct {
	from, to, port, icmp, protocol string
	sourcePort                     uint
	v6                             bool
}

func (o *connectionFlags) add(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&o.from, "from", "", "who begins the connection: "+peerForms)
	f.StringVar(&o.to, "to", "", "who is called, likewise")
	f.StringVar(&o.port, "port", "", "destination port, as 80, 80/tcp, 53/udp or 5000/sctp")
	f.StringVar(&o.icmp, "icmp", "", "ICMP type or TYPE/CODE instead of a port, or \"echo\"; of ICMPv6 for IPv6")
	f.StringVar(&o.protocol, "protocol", "", "another protocol by its number instead of a port")
	f.BoolVarP(&o.v6, "ipv6", "6", false, "take the IPv6 addresses of pods that have both")
}

// resolve finds the ends and checks that they can talk to each other.
func (c *command) resolveConnection(ctx context.Context, o connectionFlags, resolve func(context.Context, *command, string) (peer, error)) (connection, error) {
	var conn connection
	for _, end := range []struct {
		flag, text string
		into       *peer
	}{{"--from", o.from, &conn.from}, {"--to", o.to, &conn.to}} {
		if end.text == "" {
			return conn, usagef("%s is missing: want %s", end.flag, peerForms)
		}
		p, err := resolve(ctx, c, end.text)
		var usage *usageError
		if errors.As(err, &usage) {
			return conn, usagef("%s: %w", end.flag, err)
		}
		if err != nil {
			return conn, err
		}
		*end.into = p
	}
	var err error
	if conn.v6, err = family(conn.from, conn.to, o.v6); err != nil {
		return conn, err
	}
	if conn.protocol, conn.port, err = o.service(conn.v6); err != nil {
		return conn, err
	}
	if o.sourcePort > 65535 {
		return conn, usagef("--source-port: %d is not a port", o.sourcePort)
	}
	conn.sourcePort = uint32(o.sourcePort)
	return conn, nil
}

// family chooses IPv4 or IPv6. Peers without an address have both.
func family(from, to peer, wantV6 bool) (v6 bool, err error) {
	can := func(p peer, v6 bool) bool {
		_, ok := p.address(v6)
		return ok || len(p.addresses) == 0
	}
	for _, v6 := range []bool{wantV6, !wantV6} {
		if can(from, v6) && can(to, v6) {
			if v6 != wantV6 && wantV6 {
				return false, usagef("--ipv6: %s and %s have no IPv6 address both", from.text, to.text)
			}
			return v6, nil
		}
	}
	return false, usagef("%s and %s have no address of the same family", from.text, to.text)
}

// service is the protocol and port that are asked about.
func (o connectionFlags) service(v6 bool) (protocol, port uint32, err error) {
	given := 0
	for _, s := range []string{o.port, o.icmp, o.protocol} {
		if s != "" {
			given++
		}
	}
	if given != 1 {
		return 0, 0, usagef("want one of --port, --icmp and --protocol, for example --port 80/tcp")
	}
	switch {
	case o.port != "":
		number, name, found := strings.Cut(strings.ToLower(o.port), "/")
		if !found {
			name = "tcp"
		}
		protocol, ok := protocolNumbers[name]
		if !ok || !hasPorts(protocol) {
			return 0, 0, usagef("--port: %q: the protocol is none of tcp, udp, sctp", o.port)
		}
		n, err := strconv.ParseUint(number, 10, 16)
		if err != nil || n == 0 {
			return 0, 0, usagef("--port: %q: want 1 to 65535", o.port)
		}
		return protocol, uint32(n), nil
	case o.icmp != "":
		number, code, found := strings.Cut(o.icmp, "/")
		if number == "echo" {
			number = "8"
			if v6 {
				number = "128"
			}
		}
		t, err := strconv.ParseUint(number, 10, 8)
		if err != nil {
			return 0, 0, usagef("--icmp: %q: want a type, 0 to 255, TYPE/CODE or echo", o.icmp)
		}
		var cd uint64
		if found {
			if cd, err = strconv.ParseUint(code, 10, 8); err != nil {
				return 0, 0, usagef("--icmp: %q: want a code, 0 to 255", o.icmp)
			}
		}
		protocol = protocolNumbers["icmp"]
		if v6 {
			protocol = protocolNumbers["icmpv6"]
		}
		return protocol, uint32(t<<8 | cd), nil
	default:
		n, err := strconv.ParseUint(o.protocol, 10, 8)
		if err != nil {
			return 0, 0, usagef("--protocol: %q: want 0 to 255", o.protocol)
		}
		if hasPorts(uint32(n)) || isICMP(uint32(n)) {
			return 0, 0, usagef("--protocol: %s is %s; ask with --port or --icmp", o.protocol, protocolText(uint32(n)))
		}
		return uint32(n), 0, nil
	}
}

func hasPorts(protocol uint32) bool { return protocol == 6 || protocol == 17 || protocol == 132 }
func isICMP(protocol uint32) bool   { return protocol == 1 || protocol == 58 }

// serviceText is "tcp port 80", "icmp type 8 code 0" or "protocol 47".
func serviceText(protocol, port uint32) string {
	switch {
	case hasPorts(protocol):
		return fmt.Sprintf("%s port %d", protocolText(protocol), port)
	case isICMP(protocol):
		return fmt.Sprintf("%s type %d code %d", protocolText(protocol), port>>8, port&0xFF)
	default:
		return fmt.Sprintf("protocol %d", protocol)
	}
}

// The labels that say the namespace of a pod of Kubernetes: the pod's own, and
// the one of the namespace that holds its name.
const (
	namespaceLabel     = "k8s:io.kubernetes.pod.namespace="
	namespaceNameLabel = "k8s:io.cilium.k8s.namespace.labels.kubernetes.io/metadata.name="
)

// workloadText shortens labels for people: "shop/app=web,tier=front" are labels
// of Kubernetes in the namespace shop. Those of other sources are written out.
func workloadText(labels []string) string {
	namespace := ""
	for _, l := range labels {
		if value, ok := strings.CutPrefix(l, namespaceLabel); ok {
			namespace = value
		}
	}
	short := make([]string, 0, len(labels))
	for _, l := range labels {
		if namespace != "" && (l == namespaceLabel+namespace || l == namespaceNameLabel+namespace) {
			continue
		}
		short = append(short, strings.TrimPrefix(strings.TrimSuffix(l, "="), "k8s:"))
	}
	text := strings.Join(short, ",")
	if namespace != "" {
		text = namespace + "/" + text
	}
	return text
}

// whoText is an identity with its labels, for people.
func whoText(identity uint32, labels []string) string {
	text := workloadText(labels)
	switch {
	case text == "" && identity == 0:
		return "unknown"
	case text == "":
		return fmt.Sprintf("identity %d", identity)
	case identity == 0:
		return text
	default:
		return fmt.Sprintf("%s (%d)", text, identity)
	}
}
