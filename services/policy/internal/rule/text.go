// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package rule

import (
	"cmp"
	"fmt"
	"strings"

	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/port"
)

// maxListed limits the number of peers and of ports in the text of a rule.
const maxListed = 8

// Text describes the rule in one line.
func (r *Rule) Text() string {
	var b strings.Builder
	b.WriteString(r.Action.String())
	if r.Action == policytable.Redirect {
		b.WriteString(" to " + r.Proxy.String())
	}
	if r.Direction == policytable.Egress {
		b.WriteString(" to ")
	} else {
		b.WriteString(" from ")
	}
	var peers []string
	if r.Peers.Any {
		who := "all peers"
		if r.Peers.ExceptOwn {
			who = "all peers except the local node"
		}
		peers = append(peers, who)
	}
	for _, s := range r.Peers.Selectors {
		peers = append(peers, "{"+cmp.Or(s.String(), "every identity")+"}")
	}
	for _, n := range r.Peers.Networks {
		text := n.Prefix.String()
		if len(n.Except) > 0 {
			text += fmt.Sprintf(" except %s", list(len(n.Except), func(i int) string { return n.Except[i].String() }))
		}
		peers = append(peers, text)
	}
	for _, g := range r.Peers.Groups {
		peers = append(peers, "address groups {"+g.Selector.String()+"}")
	}
	for _, n := range r.Peers.Names {
		peers = append(peers, "the addresses of "+n.Pattern.String())
	}
	if len(peers) == 0 {
		peers = []string{"no peer"}
	}
	b.WriteString(list(len(peers), func(i int) string { return peers[i] }))
	b.WriteString(" on ")
	switch {
	case r.AllPorts:
		b.WriteString("all ports")
	case len(r.Ports) == 0:
		b.WriteString("no port")
	default:
		b.WriteString(list(len(r.Ports), func(i int) string { return portText(r.Ports[i]) }))
	}
	return b.String()
}

func list(n int, item func(int) string) string {
	var b strings.Builder
	for i := range n {
		if i == maxListed {
			fmt.Fprintf(&b, " and %d more", n-i)
			break
		}
		if i > 0 {
			b.WriteString(", ")
		}
		b.WriteString(item(i))
	}
	return b.String()
}

// PortsText returns the text of a range, such as "TCP/443", or "all ports".
func PortsText(r port.Range) string {
	if r == port.Everything {
		return "all ports"
	}
	return portText(Port{Range: r})
}

func portText(p Port) string {
	if p.Name != "" {
		if p.Protocol == 0 {
			return fmt.Sprintf("port %q", p.Name)
		}
		return fmt.Sprintf("%s port %q", p.Protocol, p.Name)
	}
	lo, hi := p.Range.Lo, p.Range.Hi
	proto := port.Protocol(lo >> 16)
	if lo>>16 != hi>>16 {
		return fmt.Sprintf("%s/%d to %s/%d", proto, lo&0xffff, port.Protocol(hi>>16), hi&0xffff)
	}
	from, to := uint16(lo), uint16(hi)
	switch {
	case proto == port.ICMP || proto == port.ICMPv6:
		switch {
		case from == 0 && to == 0xffff:
			return proto.String()
		case from>>8 == to>>8 && from&0xff == 0 && to&0xff == 0xff:
			return fmt.Sprintf("%s type %d", proto, from>>8)
		case from == to:
			return fmt.Sprintf("%s type %d code %d", proto, from>>8, from&0xff)
		}
		return fmt.Sprintf("%s type %d code %d to type %d code %d", proto, from>>8, from&0xff, to>>8, to&0xff)
	case !proto.HasPorts(), from == 0 && to == 0xffff:
		return proto.String()
	case from == to:
		return fmt.Sprintf("%s/%d", proto, from)
	}
	return fmt.Sprintf("%s/%d-%d", proto, from, to)
}
