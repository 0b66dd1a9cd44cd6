// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package rule

import (
	"slices"
	"strings"

	"github.com/sluice-net/sluice/model/dnsname"
	"github.com/sluice-net/sluice/model/layer7"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/port"
)

const (
	dnsPort = 53
	// dnsPortName is the name of the UDP port of the cluster's DNS, and dnsPortNameTCP the name of its TCP port.
	dnsPortName, dnsPortNameTCP = "dns", "dns-tcp"
)

// WithQueries sets Queries of the egress rules that allow DNS queries, if the options enable it. It reports whether
// it found such a rule.
func WithQueries(rules []*Rule, o Options) (found bool) {
	if !o.ImplicitDNS || o.WithoutDNSProxy {
		return false
	}
	for _, r := range rules {
		if r.Direction == policytable.Egress && r.Action == policytable.Allow {
			r.Queries = r.queries()
			found = found || r.Queries != nil
		}
	}
	return found
}

// queries returns the rule that redirects the DNS queries that r allows; nil if it allows none. The two rules have
// the same position in the order of evaluation, where redirect rules precede allow rules. So the returned rule only
// changes connections that r would allow.
func (r *Rule) queries() *Rule {
	var ports []Port
	for _, proto := range []port.Protocol{port.UDP, port.TCP} {
		point := port.At(proto, dnsPort)
		if r.AllPorts || slices.ContainsFunc(r.Ports, func(p Port) bool { return p.Name == "" && p.Range.Contains(point) }) {
			ports = append(ports, Port{Range: port.Range{Lo: point, Hi: point}})
		}
		for _, p := range r.Ports {
			if p.isDNS() && (p.Protocol == 0 || p.Protocol == proto) {
				p.Protocol = proto
				ports = append(ports, p)
			}
		}
	}
	if len(ports) == 0 {
		return nil
	}
	out := &Rule{
		Source: r.Source, Direction: r.Direction, Tier: r.Tier, Priority: r.Priority, Index: r.Index,
		Action: policytable.Redirect, Proxy: policytable.ProxyDNS,
		Layer7: &layer7.Rules{DNS: []dnsname.Pattern{everyName}}, Peers: r.Peers, Ports: ports,
	}
	return out.Seal()
}

// everyName matches every DNS name.
var everyName, _ = dnsname.Parse("*")

func (p Port) isDNS() bool {
	name := p.Name
	if p.FoldCase {
		name = strings.ToLower(name)
	}
	return name == dnsPortName || name == dnsPortNameTCP
}

// Implied adds the Queries of the rules if a rule has DNS names and no rule redirects to the DNS proxy. rules are the
// egress rules of one subject. Implied may change the slice.
func Implied(rules []*Rule) []*Rule {
	names := false
	for _, r := range rules {
		if r.Action == policytable.Redirect && r.Proxy == policytable.ProxyDNS {
			return rules
		}
		names = names || len(r.Peers.Names) > 0
	}
	if !names {
		return rules
	}
	for _, r := range rules {
		if r.Queries != nil {
			rules = append(rules, r.Queries)
		}
	}
	return rules
}
