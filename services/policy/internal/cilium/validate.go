// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package cilium

import (
	"net/netip"
	"regexp/syntax"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/sluice-net/sluice/model/dnsname"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/manifest"
	"github.com/sluice-net/sluice/services/policy/internal/networkpolicy"
	"github.com/sluice-net/sluice/services/policy/internal/port"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
)

const (
	maxPorts      = 40
	maxICMPFields = 40
	maxLogValue   = 32
	maxListener   = 100
)

// Validate checks a CiliumNetworkPolicy (namespaced) or a CiliumClusterwideNetworkPolicy.
func (p *NetworkPolicy) Validate(namespaced bool, o rule.Options) manifest.Problems {
	v := validator{options: o}
	p.Metadata.Validate(namespaced, &v.Problems)
	if p.Spec == nil && p.Specs == nil { // an empty list is a policy without rules
		v.Add("spec", "is required: the policy is empty")
	}
	if p.Spec != nil {
		v.rule("spec", p.Spec, namespaced)
	}
	for i := range p.Specs {
		v.rule("specs["+strconv.Itoa(i)+"]", &p.Specs[i], namespaced)
	}
	return v.Problems
}

type validator struct {
	manifest.Problems
	options rule.Options
}

func (v *validator) rule(path string, r *Rule, namespaced bool) {
	host := r.NodeSelector != nil
	switch {
	case r.EndpointSelector == nil && !host:
		v.Add(path, "needs an endpointSelector or a nodeSelector")
	case r.EndpointSelector != nil && host:
		v.Add(path, "has both an endpointSelector and a nodeSelector")
	case host && namespaced:
		v.Add(path+".nodeSelector", "is only allowed in a CiliumClusterwideNetworkPolicy")
	case host && !v.options.HostRules:
		v.Add(path+".nodeSelector", "not supported by Sluice: rules for nodes (the host firewall)")
	}
	if len(r.Ingress)+len(r.IngressDeny)+len(r.Egress)+len(r.EgressDeny) == 0 {
		v.Add(path, "has no rule in ingress, ingressDeny, egress or egressDeny")
	}
	r.EndpointSelector.Validate(path+".endpointSelector", true, &v.Problems)
	r.NodeSelector.Validate(path+".nodeSelector", true, &v.Problems)
	if utf8.RuneCountInString(r.Log.Value) > maxLogValue {
		v.AddSchema(path+".log.value", "is longer than %d characters", maxLogValue)
	}
	if strings.ContainsFunc(r.Log.Value, func(c rune) bool { return unicode.Is(unicode.C, c) }) {
		v.AddSchema(path+".log.value", "%q has a control character", r.Log.Value)
	}
	for i, l := range r.Labels {
		if l.Key == nil {
			v.AddSchema(path+".labels["+strconv.Itoa(i)+"].key", "is required")
		}
	}
	for i := range r.Ingress {
		in := &r.Ingress[i]
		p := path + ".ingress[" + strconv.Itoa(i) + "]"
		v.ingressPeers(p, &in.IngressPeers)
		v.portRules(p, in.ToPorts, in.ICMPs, policytable.Ingress, host)
		v.authentication(p, in.Authentication)
	}
	for i := range r.IngressDeny {
		in := &r.IngressDeny[i]
		p := path + ".ingressDeny[" + strconv.Itoa(i) + "]"
		v.ingressPeers(p, &in.IngressPeers)
		v.portRules(p, denyPorts(in.ToPorts), in.ICMPs, policytable.Ingress, host)
	}
	for i := range r.Egress {
		eg := &r.Egress[i]
		p := path + ".egress[" + strconv.Itoa(i) + "]"
		v.egressPeers(p, &eg.EgressPeers, eg.ToFQDNs)
		v.portRules(p, eg.ToPorts, eg.ICMPs, policytable.Egress, host)
		v.authentication(p, eg.Authentication)
	}
	for i := range r.EgressDeny {
		eg := &r.EgressDeny[i]
		p := path + ".egressDeny[" + strconv.Itoa(i) + "]"
		v.egressPeers(p, &eg.EgressPeers, nil)
		v.portRules(p, denyPorts(eg.ToPorts), eg.ICMPs, policytable.Egress, host)
	}
}

// denyPorts converts the ports of deny rules to the form of allow rules.
func denyPorts(in []PortDenyRule) []PortRule {
	if in == nil {
		return nil
	}
	out := make([]PortRule, len(in))
	for i, p := range in {
		out[i].Ports = p.Ports
	}
	return out
}

type member struct {
	name string
	n    int
}

// exclusive reports a problem if a rule contains two kinds of peers.
func (v *validator) exclusive(path string, members []member) {
	first := ""
	for _, m := range members {
		if m.n == 0 {
			continue
		}
		if first != "" {
			v.Add(path, "combines %s and %s, which is not supported: use two rules", first, m.name)
			return
		}
		first = m.name
	}
}

func (v *validator) ingressPeers(path string, p *IngressPeers) {
	v.exclusive(path, []member{
		{"fromEndpoints", len(p.FromEndpoints)},
		{"fromCIDR", len(p.FromCIDR)},
		{"fromCIDRSet", len(p.FromCIDRSet)},
		{"fromEntities", len(p.FromEntities)},
		{"fromNodes", len(p.FromNodes)},
		{"fromGroups", len(p.FromGroups)},
	})
	v.requires(path+".fromRequires", p.FromRequires)
	v.selectors(path+".fromEndpoints", p.FromEndpoints)
	v.nodes(path+".fromNodes", p.FromNodes)
	v.cidrs(path+".fromCIDR", p.FromCIDR)
	v.cidrSet(path+".fromCIDRSet", p.FromCIDRSet)
	v.entities(path+".fromEntities", p.FromEntities)
}

func (v *validator) egressPeers(path string, p *EgressPeers, fqdns []FQDN) {
	v.exclusive(path, []member{
		{"toEndpoints", len(p.ToEndpoints)},
		{"toCIDR", len(p.ToCIDR)},
		{"toCIDRSet", len(p.ToCIDRSet)},
		{"toEntities", len(p.ToEntities)},
		{"toServices", len(p.ToServices)},
		{"toFQDNs", len(fqdns)},
		{"toGroups", len(p.ToGroups)},
		{"toNodes", len(p.ToNodes)},
	})
	v.requires(path+".toRequires", p.ToRequires)
	for i, s := range p.ToServices {
		if s.K8sServiceSelector == nil {
			continue
		}
		path := path + ".toServices[" + strconv.Itoa(i) + "].k8sServiceSelector.selector"
		if s.K8sServiceSelector.Selector == nil {
			v.AddSchema(path, "is required")
		}
		s.K8sServiceSelector.Selector.Validate(path, true, &v.Problems)
	}
	v.selectors(path+".toEndpoints", p.ToEndpoints)
	v.nodes(path+".toNodes", p.ToNodes)
	v.cidrs(path+".toCIDR", p.ToCIDR)
	v.cidrSet(path+".toCIDRSet", p.ToCIDRSet)
	v.entities(path+".toEntities", p.ToEntities)
	for i, f := range fqdns {
		v.fqdn(path+".toFQDNs["+strconv.Itoa(i)+"]", f)
	}
}

// requires reports fields that Cilium has removed as problems.
func (v *validator) requires(path string, list []any) {
	if len(list) > 0 {
		v.Add(path, "is no longer supported")
	}
}

func (v *validator) selectors(path string, list []networkpolicy.LabelSelector) {
	for i := range list {
		list[i].Validate(path+"["+strconv.Itoa(i)+"]", true, &v.Problems)
	}
}

func (v *validator) nodes(path string, list []networkpolicy.LabelSelector) {
	if len(list) > 0 && !v.options.NodeLabels {
		v.Add(path, "needs the setting cluster.nodeLabels")
	}
	v.selectors(path, list)
}

func (v *validator) cidrs(path string, list []string) {
	for i, s := range list {
		p := path + "[" + strconv.Itoa(i) + "]"
		if _, err := netip.ParsePrefix(s); err == nil {
			continue
		}
		if a, err := netip.ParseAddr(s); err == nil && a.Zone() == "" {
			v.AddSchema(p, "%q has no prefix length; it means %s/%d", s, a, a.BitLen())
			continue
		}
		v.Add(p, "%q is not a prefix such as 10.9.8.0/24 or 2001:db8::/64", s)
	}
}

func (v *validator) cidrSet(path string, list []CIDRRule) {
	for i := range list {
		c := &list[i]
		p := path + "[" + strconv.Itoa(i) + "]"
		set := 0
		for _, has := range []bool{c.CIDR != "", c.CIDRGroupRef != "", c.CIDRGroupSelector != nil} {
			if has {
				set++
			}
		}
		if set != 1 {
			v.Add(p, "needs exactly one of cidr, cidrGroupRef and cidrGroupSelector")
			continue
		}
		if c.CIDRGroupRef != "" && !networkpolicy.IsSubdomain(c.CIDRGroupRef) {
			v.AddSchema(p+".cidrGroupRef", "%q is not the name of an object", c.CIDRGroupRef)
		}
		c.CIDRGroupSelector.Validate(p+".cidrGroupSelector", true, &v.Problems)
		block, good := netip.Prefix{}, false
		if c.CIDR != "" {
			var err error
			if block, err = netip.ParsePrefix(c.CIDR); err != nil {
				v.Add(p+".cidr", "%q is not a prefix such as 10.9.8.0/24 or 2001:db8::/64", c.CIDR)
			}
			good = err == nil
		}
		for j, e := range c.Except {
			p := p + ".except[" + strconv.Itoa(j) + "]"
			except, err := netip.ParsePrefix(e)
			switch {
			case err != nil:
				v.Add(p, "%q is not a prefix such as 10.9.8.0/24 or 2001:db8::/64", e)
			case good && (!block.Contains(except.Addr()) || except.Bits() < block.Bits()):
				v.Add(p, "%q is not inside %s", e, block)
			}
		}
	}
}

func (v *validator) entities(path string, list []string) {
	for i, e := range list {
		p := path + "[" + strconv.Itoa(i) + "]"
		switch {
		case !knownEntity(e):
			v.Add(p, "%q is not an entity%s", e, entityHint(e))
		case e == EntityWorldIPv4 || e == EntityWorldIPv6:
			v.AddSchema(p, "%q is not an entity that policies may name", e)
		}
	}
}

func (v *validator) fqdn(path string, f FQDN) {
	if (f.MatchName == nil) == (f.MatchPattern == nil) {
		v.AddSchema(path, "needs a matchName or a matchPattern, and not both")
	}
	if f.MatchName != nil {
		v.dnsText(path+".matchName", *f.MatchName)
		if _, err := dnsname.Name(*f.MatchName); err != nil {
			v.Add(path+".matchName", "%v", err)
		}
	}
	if f.MatchPattern != nil {
		v.dnsText(path+".matchPattern", *f.MatchPattern)
		if _, err := dnsname.Parse(*f.MatchPattern); err != nil {
			v.Add(path+".matchPattern", "%v", err)
		}
	}
}

// dnsText checks the form of names and patterns: non-empty labels, separated by single dots, with an optional final
// dot.
func (v *validator) dnsText(path, s string) {
	switch {
	case s == "":
		v.AddSchema(path, "is empty")
	case len(s) > 255:
		v.AddSchema(path, "is longer than 255 characters")
	case s[0] == '.' || strings.Contains(s, ".."):
		v.AddSchema(path, "%q has an empty label", s)
	}
}

func (v *validator) tls(path string, t *TLS) {
	switch {
	case t == nil:
	case t.Secret == nil:
		v.AddSchema(path+".secret", "is required")
	case t.Secret.Name == "":
		v.AddSchema(path+".secret.name", "is required")
	}
}

func (v *validator) authentication(path string, a *Authentication) {
	if a != nil && a.Mode != "disabled" && a.Mode != "required" && a.Mode != "test-always-fail" {
		v.AddSchema(path+".authentication.mode", "%q is not disabled, required or test-always-fail", a.Mode)
	}
}

func (v *validator) portRules(path string, rules []PortRule, icmps []ICMPRule, d policytable.Direction, host bool) {
	if len(rules) > 0 && len(icmps) > 0 {
		v.Add(path, "combines toPorts and icmps, which is not supported: use two rules")
	}
	for i := range rules {
		v.portRule(path+".toPorts["+strconv.Itoa(i)+"]", &rules[i], d, host)
	}
	for i, r := range icmps {
		v.icmp(path+".icmps["+strconv.Itoa(i)+"].fields", r.Fields)
	}
}

func (v *validator) portRule(path string, r *PortRule, d policytable.Direction, host bool) {
	if len(r.Ports) > maxPorts {
		v.Add(path+".ports", "has %d entries, more than %d", len(r.Ports), maxPorts)
	}
	hasDNS, hasHTTP := r.Rules != nil && len(r.Rules.DNS) > 0, r.Rules != nil && len(r.Rules.HTTP) > 0
	l7 := hasDNS || hasHTTP
	zero := false
	for i, pp := range r.Ports {
		p := path + ".ports[" + strconv.Itoa(i) + "]"
		protos, ok := v.protocol(p, pp)
		number, named, good := v.portNumber(p, pp, protos)
		if good && !named && number == 0 && pp.Port != "" {
			zero = true
		}
		if pp.EndPort < 0 || pp.EndPort > 65535 {
			v.AddSchema(p+".endPort", "%d is not from 0 to 65535", pp.EndPort)
		}
		if hasDNS && good && !named && pp.EndPort > int64(number) {
			v.Add(p+".endPort", "DNS rules do not support port ranges")
		}
		if hasHTTP && ok && (len(protos) != 1 || protos[0] != port.TCP) {
			v.Add(p+".protocol", "HTTP rules need TCP")
		}
	}
	if r.Rules != nil {
		v.layer7(path+".rules", r, d, host, zero)
	}
	v.serverNames(path+".serverNames", r.ServerNames)
	v.tls(path+".terminatingTLS", r.TerminatingTLS)
	v.tls(path+".originatingTLS", r.OriginatingTLS)
	if len(r.ServerNames) > 0 && l7 && r.TerminatingTLS == nil {
		v.Add(path+".serverNames", "cannot be combined with layer 7 rules without TLS termination")
	}
	if r.Listener != nil {
		v.listener(path+".listener", r.Listener, d, l7)
	}
}

// layer7 checks the rules for an application protocol. zero reports whether one of the ports is 0.
func (v *validator) layer7(p string, r *PortRule, d policytable.Direction, host, zero bool) {
	hasDNS, hasHTTP := len(r.Rules.DNS) > 0, len(r.Rules.HTTP) > 0
	switch {
	case r.Rules.HTTP != nil && r.Rules.DNS != nil:
		v.Add(p, "has rules for more than one protocol")
	case r.Rules.HTTP == nil && r.Rules.DNS == nil:
		v.AddSchema(p, "needs http or dns rules")
	}
	if hasDNS && d == policytable.Ingress {
		v.Add(p+".dns", "DNS rules are not supported on ingress")
	}
	if hasDNS && len(r.Ports) == 0 {
		v.Add(p+".dns", "DNS rules need a port")
	}
	if (hasDNS || hasHTTP) && zero {
		v.Add(p, "layer 7 rules cannot be used with port 0")
	}
	if host && (hasHTTP || hasDNS && d == policytable.Ingress) {
		v.Add(p, "layer 7 rules are not supported for nodes")
	}
	for i, f := range r.Rules.DNS {
		v.fqdn(p+".dns["+strconv.Itoa(i)+"]", f)
	}
	for i, h := range r.Rules.HTTP {
		p := p + ".http[" + strconv.Itoa(i) + "]"
		v.regexp(p+".path", h.Path)
		v.regexp(p+".method", h.Method)
		for j, m := range h.HeaderMatches {
			p := p + ".headerMatches[" + strconv.Itoa(j) + "]"
			if m.Name == "" {
				v.AddSchema(p+".name", "is required")
			}
			if !slices.Contains([]string{"", "LOG", "ADD", "DELETE", "REPLACE"}, m.Mismatch) {
				v.AddSchema(p+".mismatch", "%q is not LOG, ADD, DELETE or REPLACE", m.Mismatch)
			}
			if m.Secret != nil && m.Secret.Name == "" {
				v.AddSchema(p+".secret.name", "is required")
			}
		}
	}
}

func (v *validator) serverNames(path string, names []string) {
	if names != nil && len(names) == 0 {
		v.AddSchema(path, "is empty")
	}
	for i, n := range names {
		p := path + "[" + strconv.Itoa(i) + "]"
		if n == "" {
			v.Add(p, "is empty")
			continue
		}
		v.dnsText(p, n)
		if _, err := dnsname.Parse(n); err != nil {
			v.AddSchema(p, "%v", err)
		}
	}
}

func (v *validator) listener(p string, l *Listener, d policytable.Direction, l7 bool) {
	if l.Name == "" {
		v.AddSchema(p+".name", "is required")
	}
	if n := l.Priority; n != nil && (*n < 1 || *n > maxListener) {
		v.AddSchema(p+".priority", "%d is not from 1 to %d", *n, maxListener)
	}
	if k := l.EnvoyConfig.Kind; k != "" && k != "CiliumEnvoyConfig" && k != "CiliumClusterwideEnvoyConfig" {
		v.AddSchema(p+".envoyConfig.kind", "%q is not CiliumEnvoyConfig or CiliumClusterwideEnvoyConfig", k)
	}
	if l.EnvoyConfig.Name == "" {
		v.AddSchema(p+".envoyConfig.name", "is required")
	}
	if d == policytable.Ingress {
		v.Add(p, "is not supported on ingress")
	}
	if l7 {
		v.Add(p, "cannot be combined with layer 7 rules")
	}
}

func (v *validator) regexp(path, text string) {
	// Parsing is enough to validate the expression; compiling would expand repetitions.
	if _, err := syntax.Parse(text, syntax.Perl); err != nil {
		v.Add(path, "%v; write a regular expression in the syntax RE2, with \\ before each character that is meant literally",
			err)
	}
}

var spelled = []string{"TCP", "UDP", "SCTP", "VRRP", "IGMP", "GRE", "IPIP", "IPV6", "ESP", "AH", "ANY"}

// protocol returns the protocols of a port entry. A missing protocol means ANY.
func (v *validator) protocol(path string, pp PortProtocol) ([]port.Protocol, bool) {
	if pp.Protocol == nil {
		return protocols(""), true
	}
	name := *pp.Protocol
	upper := strings.ToUpper(name)
	switch {
	case name == "":
		v.AddSchema(path+".protocol", "is empty; leave it out for ANY")
		return protocols(""), true
	case !slices.Contains(spelled, upper):
		v.Add(path+".protocol", "%q is not one of %s", name, strings.Join(spelled, ", "))
		return nil, false
	case name != upper:
		v.AddSchema(path+".protocol", "%q must be written %q", name, upper)
	}
	return protocols(upper), true
}

// protocols returns the protocols of a protocol name.
func protocols(name string) []port.Protocol {
	name = strings.ToUpper(name)
	if name == "" || name == "ANY" {
		return port.WithPorts[:]
	}
	p, _ := port.ParseProtocol(name)
	return []port.Protocol{p}
}

// portNumber reads a port: a name, or a number in Go's syntax (a leading 0 means octal). Protocols without ports may
// omit it.
func (v *validator) portNumber(path string, pp PortProtocol, protos []port.Protocol) (number uint16, named, ok bool) {
	if pp.Port == "" {
		if len(protos) == 1 && !protos[0].HasPorts() {
			return 0, false, true
		}
		v.Add(path+".port", "is required")
		return 0, false, false
	}
	number, named, ok = parsePort(pp.Port)
	if ok && !named && pp.Port != "0" && len(protos) == 1 && !protos[0].HasPorts() {
		v.Add(path+".port", "%s has no ports; leave it out, or write \"0\"", protos[0])
		return 0, false, false
	}
	if !ok {
		v.Add(path+".port", "%q is neither a number from 0 to 65535 nor a port name", pp.Port)
	}
	return number, named, ok
}

func parsePort(s string) (number uint16, named, ok bool) {
	if networkpolicy.IsPortName(s) {
		return 0, true, true
	}
	n, err := strconv.ParseUint(s, 0, 16)
	return uint16(n), false, err == nil
}

func (v *validator) icmp(path string, fields []ICMPField) {
	if len(fields) > maxICMPFields {
		v.Add(path, "has %d entries, more than %d", len(fields), maxICMPFields)
	}
	for i, f := range fields {
		p := path + "[" + strconv.Itoa(i) + "]"
		if f.Family != nil && *f.Family != "IPv4" && *f.Family != "IPv6" {
			v.Add(p+".family", "%q is neither IPv4 nor IPv6", *f.Family)
			continue
		}
		if f.Type == nil {
			v.Add(p+".type", "is required")
			continue
		}
		// A type that no packet can have is accepted, and matches nothing.
		if _, ok := icmpType(f); f.Type.IsString && !ok {
			v.Add(p+".type", "%q is not an ICMP type of %s", f.Type.String, icmpFamily(f))
		}
	}
}

// Validate checks a CiliumCIDRGroup.
func (g *CIDRGroup) Validate() manifest.Problems {
	var ps manifest.Problems
	g.Metadata.Validate(false, &ps)
	if g.Spec.ExternalCIDRs == nil {
		ps.AddSchema("spec.externalCIDRs", "is required; [] is a group of no addresses")
	}
	for i, s := range g.Spec.ExternalCIDRs {
		if _, err := netip.ParsePrefix(s); err != nil {
			ps.Add("spec.externalCIDRs["+strconv.Itoa(i)+"]", "%q is not a prefix such as 10.9.8.0/24 or 2001:db8::/64", s)
		}
	}
	return ps
}
