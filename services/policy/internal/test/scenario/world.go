// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package scenario

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"

	"github.com/sluice-net/sluice/model/dnsname"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/layer7"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/port"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
	"github.com/sluice-net/sluice/services/policy/internal/selector"
)

// World contains the namespaces, apps, prefixes and ports from which random states are generated.
type World struct {
	*rand.Rand
	IDs   []peer.Identity
	Addrs map[identity.Numeric][]netip.Addr
	All   []netip.Addr
}

// Cluster is the name of the cluster of most identities.
const Cluster = "here"

// The pool is a range of identities whose labels and named ports are generated anew for each state.
const (
	firstOfPool = identity.MinCluster + 100
	pool        = 6
)

// Nobody is an identity number that no state contains.
const Nobody = identity.Numeric(60000)

// NewWorld returns a World that uses a source of randomness.
func NewWorld(r *rand.Rand) *World {
	w := &World{Rand: r, Addrs: make(map[identity.Numeric][]netip.Addr)}
	add := func(n identity.Numeric, addr4, addr6 string, labels ...label.Label) {
		id, err := peer.New(n, label.NewSet(labels...))
		if err != nil {
			panic(err)
		}
		w.IDs = append(w.IDs, id)
		for _, a := range []string{addr4, addr6} {
			if a != "" {
				w.Addrs[n] = append(w.Addrs[n], netip.MustParseAddr(a))
				w.All = append(w.All, netip.MustParseAddr(a))
			}
		}
	}
	k := label.Kubernetes
	n := identity.MinCluster
	for i, ns := range []string{"a", "b", "c"} {
		for j, app := range []string{"web", "api", "db", ""} {
			ls := []label.Label{
				k(label.KeyNamespace, ns), k(label.KeyCluster, Cluster),
				k(label.KeyNamespaceLabels+"team", []string{"red", "blue", "red"}[i]),
			}
			if app != "" {
				ls = append(ls, k("app", app))
			}
			if (i+j)%2 == 0 {
				ls = append(ls, k("tier", []string{"front", "back"}[j%2]))
			}
			switch (i + 2*j) % 4 {
			case 0:
				ls = append(ls, namedPorts("http.TCP.80"))
			case 1:
				ls = append(ls, namedPorts("dns.UDP.53_http.TCP.8080"))
			case 2:
				ls = append(ls, namedPorts("http.TCP.80_http.TCP.81"))
			}
			add(n, fmt.Sprintf("10.0.%d.%d", i, 10+j), fmt.Sprintf("fd00:%d::%d", i, 10+j), ls...)
			n++
		}
	}
	add(n, "10.8.0.1", "fd08::1", k(label.KeyNamespace, "a"), k(label.KeyCluster, "there"), k("app", "web"))
	add(identity.Host, "192.168.0.1", "fd01::1", label.Reserved(identity.NameHost), label.Label{Source: label.SourceNode, Key: "zone", Value: "z"})
	add(identity.RemoteNode, "192.168.0.2", "fd01::2", label.Reserved(identity.NameRemoteNode))
	add(identity.MinNodeLocal, "192.168.0.3", "fd01::3", label.Reserved(identity.NameRemoteNode), label.Reserved(identity.NameKubeAPIServer))
	add(identity.Health, "10.0.9.1", "", label.Reserved(identity.NameHealth))
	add(identity.Init, "10.0.9.2", "fd00:9::2", label.Reserved(identity.NameInit))
	add(identity.WorldIPv4, "203.0.113.10", "", label.Reserved(identity.NameWorldIPv4))
	add(identity.WorldIPv6, "", "2001:db8::1", label.Reserved(identity.NameWorldIPv6))
	add(identity.MinNodeLocal+1, "203.0.113.99", "", label.Reserved(identity.NameWorldIPv4), label.Reserved(identity.NameKubeAPIServer))
	add(identity.UnknownInCluster, "10.0.9.3", "fd00:9::3", label.Reserved("unknown-in-cluster"))
	for i := range pool {
		n := firstOfPool + identity.Numeric(i)
		add(n, fmt.Sprintf("10.1.0.%d", 10+i), fmt.Sprintf("fd00:4::%d", 10+i), w.podLabels()...)
	}
	w.All = append(w.All, netip.MustParseAddr("203.0.113.200"), netip.MustParseAddr("198.51.100.7"), netip.MustParseAddr("2001:db8:1::1"))
	return w
}

// Pick returns a random element of the list.
func Pick[T any](w *World, list ...T) T { return list[w.IntN(len(list))] }

// Chance returns true with the given probability in percent.
func (w *World) Chance(percent int) bool { return w.IntN(100) < percent }

func (w *World) selector() selector.Selector {
	var reqs []selector.Requirement
	for range 1 + w.IntN(2) {
		q := selector.Requirement{Op: selector.Op(1 + w.IntN(4)), Source: Pick(w, "", label.SourceKubernetes)}
		var values []string
		switch w.IntN(7) {
		case 0, 1:
			q.Key, values = "app", []string{"web", "api", "db"}
		case 2:
			q.Key, values = "tier", []string{"front", "back"}
		case 3:
			q.Key, values = label.KeyNamespace, []string{"a", "b", "c"}
		case 4:
			q.Key, values = label.KeyNamespaceLabels+"team", []string{"red", "blue"}
		case 5:
			q.Key, values = label.KeyCluster, []string{Cluster, "there"}
		case 6:
			q.Source, q.Op = label.SourceReserved, selector.Exists
			q.Key = Pick(w, identity.NameHost, identity.NameRemoteNode, identity.NameWorldIPv4, identity.NameKubeAPIServer, identity.NameHealth, identity.NameInit)
		}
		if q.Op == selector.In || q.Op == selector.NotIn {
			q.Values = []string{Pick(w, values...)}
			if w.Chance(30) {
				q.Values = append(q.Values, Pick(w, values...))
			}
		}
		reqs = append(reqs, q)
	}
	return selector.New(reqs...)
}

func (w *World) prefix() netip.Prefix {
	return netip.MustParsePrefix(Pick(w, "0.0.0.0/0", "::/0", "10.0.0.0/8", "10.0.1.0/24", "10.0.1.11/32", "192.168.0.0/16", "192.168.0.2/32",
		"203.0.113.0/24", "203.0.113.0/28", "203.0.113.10/32", "198.51.100.0/24", "fd00::/8", "fd00:1::/32", "2001:db8::/32", "2001:db8:1::/48"))
}

func (w *World) excepts(outer netip.Prefix) (out []netip.Prefix) {
	for range w.IntN(3) {
		if p := w.prefix(); outer.Overlaps(p) && p.Bits() >= outer.Bits() && p.Addr().Is4() == outer.Addr().Is4() {
			out = append(out, p)
		}
	}
	return out
}

func (w *World) peers() rule.Peers {
	var p rule.Peers
	for range 1 + w.IntN(2) {
		switch w.IntN(9) {
		case 0:
			p.Any = true
		case 1, 2, 3, 4:
			p.Selectors = append(p.Selectors, w.selector())
		case 5, 6:
			n := rule.Network{Prefix: w.prefix(), Reach: Pick(w, rule.ReachEveryone, rule.ReachOutside, rule.ReachOutside|rule.ReachNode)}
			n.Except = w.excepts(n.Prefix)
			p.Networks = append(p.Networks, n)
		case 7:
			q := selector.Requirement{Source: label.SourceCIDRGroup, Key: Pick(w, "zone", "site"), Op: selector.Op(1 + w.IntN(4))}
			if q.Op == selector.In || q.Op == selector.NotIn {
				q.Values = []string{Pick(w, "x", "y")}
			}
			g := rule.GroupPeer{Selector: selector.New(q), NodesToo: w.Chance(30)}
			if w.Chance(40) {
				g.Except = []netip.Prefix{w.prefix()}
			}
			p.Groups = append(p.Groups, g)
		case 8:
			pattern, _ := dnsname.Parse(Pick(w, "a.example", "*.example", "**.example", "*"))
			p.Names = append(p.Names, rule.NamePeer{Pattern: pattern, Reach: Pick(w, rule.ReachOutside, rule.ReachOutside|rule.ReachNode)})
		}
	}
	return p
}

func (w *World) ports() (list []rule.Port, all bool) {
	if w.Chance(30) {
		return nil, true
	}
	for range 1 + w.IntN(3) {
		switch w.IntN(6) {
		case 0, 1:
			n := Pick[uint16](w, 80, 81, 53, 8080)
			list = append(list, rule.Port{Range: port.Ports(Pick(w, port.TCP, port.UDP), n, n)})
		case 2:
			lo := uint16(1 + w.IntN(100))
			list = append(list, rule.Port{Range: port.Ports(port.TCP, lo, lo+uint16(w.IntN(9000)))})
		case 3:
			list = append(list, rule.Port{Range: port.Whole(Pick(w, port.TCP, port.UDP, port.SCTP, port.ICMP))})
		case 4:
			list = append(list, rule.Port{Range: port.ICMPType(port.ICMP, Pick[uint8](w, 0, 8))})
		case 5:
			list = append(list, rule.Port{Name: Pick(w, "http", "HTTP", "web", "dns", "none"), Protocol: Pick(w, 0, port.TCP, port.UDP), FoldCase: w.Chance(50)})
		}
	}
	return list, false
}

// layer7 generates what a redirect rule allows.
func (w *World) layer7(proxy policytable.Proxy) *layer7.Rules {
	out := &layer7.Rules{}
	for range w.IntN(3) {
		if proxy == policytable.ProxyDNS {
			p, _ := dnsname.Parse(Pick(w, "a.example", "*.example", "b.example", "*"))
			out.DNS = append(out.DNS, p)
		} else {
			h := layer7.HTTP{Method: Pick(w, "GET", "POST", ""), Path: Pick(w, "/a", "/b/.*", "")}
			out.HTTP = append(out.HTTP, h)
		}
	}
	return out
}

// Policy generates a policy: in the Admin or Baseline tier, or in the Normal tier with or without isolation.
func (w *World) Policy(name string) policy.Object {
	kind := Pick(w, "Admin", "Normal", "Normal", "Normal", "Baseline")
	o := policy.Object{Key: policy.Key{Kind: kind, Name: name}}
	for s := range 1 + w.IntN(2) {
		spec := rule.Spec{}
		switch w.IntN(5) {
		case 0:
			spec.Subject = w.selector()
		case 1:
			spec.Subject = selector.New()
		default:
			spec.Namespace = Pick(w, "a", "b", "c")
			spec.Subject = selector.New(selector.Requirement{
				Source: label.SourceKubernetes, Key: label.KeyNamespace, Op: selector.In, Values: []string{spec.Namespace},
			})
			if w.Chance(50) {
				spec.Subject = selector.New(append(w.selector().Requirements(), spec.Subject.Requirements()...)...)
			}
		}
		if w.Chance(5) {
			spec.Host, spec.Namespace = true, ""
		}
		for i := range w.IntN(5) {
			r := &rule.Rule{
				Source:    policytable.Source{Kind: kind, Name: name, Path: fmt.Sprintf("specs[%d].rules[%d]", s, i)},
				Direction: Pick(w, policytable.Ingress, policytable.Egress), Peers: w.peers(),
			}
			r.Ports, r.AllPorts = w.ports()
			switch kind {
			case "Admin", "Baseline":
				r.Tier = policytable.Admin
				if kind == "Baseline" {
					r.Tier = policytable.Baseline
				}
				r.Priority, r.Index = int32(w.IntN(3)), int32(i)
				r.Action = Pick(w, policytable.Deny, policytable.Allow, policytable.Pass)
			default:
				r.Tier = policytable.Normal
				r.Action = Pick(w, policytable.Deny, policytable.Allow, policytable.Allow, policytable.Redirect)
				if r.Action == policytable.Redirect {
					r.Proxy = Pick(w, policytable.ProxyDNS, policytable.ProxyHTTP)
					r.Layer7 = w.layer7(r.Proxy)
				}
			}
			spec.Selects[r.Direction] = true
			spec.DefaultDeny[r.Direction] = kind == "Normal" && w.Chance(80)
			spec.Rules = append(spec.Rules, r.Seal())
		}
		if kind == "Normal" && w.Chance(25) {
			d := Pick(w, policytable.Ingress, policytable.Egress)
			spec.Selects[d], spec.DefaultDeny[d] = true, true
			r := &rule.Rule{
				Source:    policytable.Source{Kind: kind, Name: name, Path: fmt.Sprintf("specs[%d].isolation", s)},
				Direction: d, Tier: policytable.Isolation, Action: policytable.Deny, AllPorts: true, Peers: rule.Peers{Any: true, ExceptOwn: d == policytable.Ingress},
			}
			spec.Rules = append(spec.Rules, r.Seal())
		}
		o.Specs = append(o.Specs, spec)
	}
	return o
}

// Group generates a group of prefixes.
func (w *World) Group(name string) policy.Object {
	ls := []label.Label{{Source: label.SourceCIDRGroup, Key: label.KeyCIDRGroupName + name}}
	for _, k := range []string{"zone", "site"} {
		if w.Chance(60) {
			ls = append(ls, label.Label{Source: label.SourceCIDRGroup, Key: k, Value: Pick(w, "x", "y")})
		}
	}
	g := &policy.Group{Name: name, Labels: label.NewSet(ls...)}
	for range w.IntN(4) {
		g.Prefixes = append(g.Prefixes, w.prefix())
	}
	return policy.Object{Key: policy.Key{Kind: "Group", Name: name}, Group: g}
}

// podLabels generates the labels of a pod.
func (w *World) podLabels() []label.Label {
	k := label.Kubernetes
	ls := []label.Label{
		k(label.KeyNamespace, Pick(w, "a", "b", "c")), k(label.KeyCluster, Cluster),
		k(label.KeyNamespaceLabels+"team", Pick(w, "red", "blue")),
	}
	if w.Chance(80) {
		ls = append(ls, k("app", Pick(w, "web", "api", "db")))
	}
	if w.Chance(50) {
		ls = append(ls, k("tier", Pick(w, "front", "back")))
	}
	var ports []string
	for range w.IntN(3) {
		ports = append(ports, Pick(w, "http", "web", "dns")+"."+Pick(w, "TCP", "UDP")+"."+Pick(w, "53", "80", "81", "8080"))
	}
	if len(ports) > 0 {
		ls = append(ls, namedPorts(strings.Join(ports, "_")))
	}
	return ls
}

// relabeled returns an identity with new labels if it belongs to the pool.
func (w *World) relabeled(id peer.Identity) peer.Identity {
	if id.Number < firstOfPool || id.Number >= firstOfPool+pool {
		return id
	}
	id, err := peer.New(id.Number, label.NewSet(w.podLabels()...))
	if err != nil {
		panic(err) // the labels were made above
	}
	return id
}

// SetIdentity adds an identity and its addresses.
func (w *World) SetIdentity(s *State, id peer.Identity) {
	s.Identities[id.Number] = id
	for _, a := range w.Addrs[id.Number] {
		s.Located[a] = id.Number
	}
}

// DropIdentity removes an identity and its addresses.
func (w *World) DropIdentity(s *State, n identity.Numeric) {
	delete(s.Identities, n)
	delete(s.Subjects, n)
	for _, a := range w.Addrs[n] {
		delete(s.Located, a)
	}
}

// Subjectable reports whether an identity can belong to an endpoint of the node.
func Subjectable(id peer.Identity) bool {
	return id.Kind == identity.KindInCluster || id.Kind == identity.KindHost || id.Number == identity.Init
}

// Draw generates a random state.
func (w *World) Draw() *State {
	s := NewState()
	for _, id := range w.IDs {
		if w.Chance(80) {
			w.SetIdentity(s, w.relabeled(id))
			if Subjectable(id) && w.Chance(40) {
				s.Subjects[id.Number] = true
			}
		}
	}
	for i := range w.IntN(6) {
		o := w.Policy(fmt.Sprint("p", i))
		s.Objects[o.Key] = o
	}
	for i := range w.IntN(3) {
		o := w.Group(fmt.Sprint("g", i))
		s.Objects[o.Key] = o
	}
	for _, n := range []string{"a.example.", "b.a.example.", "example."} {
		if w.Chance(50) {
			s.Names[n] = []netip.Addr{Pick(w, w.All...)}
			if a := Pick(w, w.All...); w.Chance(30) && a != s.Names[n][0] {
				s.Names[n] = append(s.Names[n], a)
			}
		}
	}
	return s
}

// Mutate changes one part of a state.
func (w *World) Mutate(s *State) {
	switch w.IntN(12) {
	case 10: // an address moves, but its identity does not change
		a := Pick(w, w.All...)
		if w.Chance(50) {
			delete(s.Located, a)
		} else {
			s.Located[a] = Pick(w, w.IDs...).Number
		}
	case 11: // an identity is added or removed, but its addresses stay
		id := Pick(w, w.IDs...)
		if _, ok := s.Identities[id.Number]; ok {
			delete(s.Identities, id.Number)
			delete(s.Subjects, id.Number)
		} else {
			s.Identities[id.Number] = id
		}
	case 0, 1:
		w.SetIdentity(s, w.relabeled(Pick(w, w.IDs...)))
	case 2:
		w.DropIdentity(s, Pick(w, w.IDs...).Number)
	case 3:
		if id := Pick(w, w.IDs...); Subjectable(id) {
			if _, ok := s.Identities[id.Number]; ok {
				s.Subjects[id.Number] = true
			}
		}
	case 4:
		delete(s.Subjects, Pick(w, w.IDs...).Number)
	case 5, 6:
		o := w.Policy(fmt.Sprint("p", w.IntN(8)))
		s.Objects[o.Key] = o
	case 7:
		if keys := SortedObjects(s.Objects); len(keys) > 0 {
			delete(s.Objects, Pick(w, keys...))
		}
	case 8:
		n := Pick(w, "a.example.", "b.a.example.", "example.")
		if w.Chance(30) {
			delete(s.Names, n)
		} else {
			s.Names[n] = []netip.Addr{Pick(w, w.All...)}
		}
	case 9:
		o := w.Group(fmt.Sprint("g", w.IntN(3)))
		s.Objects[o.Key] = o
		// The host is the only identity whose label set can change while its number stays.
		if id, ok := s.Identities[identity.Host]; ok && w.Chance(50) {
			ls := []label.Label{label.Reserved(identity.NameHost)}
			if w.Chance(50) {
				ls = append(ls, label.Reserved(identity.NameKubeAPIServer))
			}
			id.Labels = label.NewSet(ls...)
			s.Identities[identity.Host] = id
		}
	}
}

// Point generates a protocol and a port. The port is often close to the end of a range in rules.
func (w *World) Point() port.Point {
	switch w.IntN(8) {
	case 0:
		return port.AtICMP(port.ICMP, Pick[uint8](w, 0, 8, 11), uint8(w.IntN(3)))
	case 1:
		return port.At(port.UDP, Pick[uint16](w, 53, 80, 0, 65535))
	case 2:
		switch w.IntN(4) {
		case 0:
			return port.AtICMP(port.ICMPv6, Pick[uint8](w, 0, 8, 128, 135), uint8(w.IntN(2)))
		case 1: // most of these points are in no rule
			return port.At(Pick(w, port.GRE, port.ESP, port.IGMP, 0, 255), uint16(w.IntN(2)))
		}
		return port.At(port.SCTP, Pick[uint16](w, 0, 1, 80, 8080))
	case 3:
		return port.At(port.TCP, uint16(w.IntN(65536)))
	}
	return port.At(port.TCP, Pick[uint16](w, 0, 1, 53, 79, 80, 81, 82, 8080, 8081, 65535))
}

// Question is a query about one side of a connection.
type Question struct {
	Subject   identity.Numeric
	Direction policytable.Direction
	Peer      identity.Numeric // may be unknown
	Addr      netip.Addr       // address of the peer; may belong to another identity
	Point     port.Point
}

// edge generates an address at the edge of a prefix or next to it.
func (w *World) edge() netip.Addr {
	p := w.prefix()
	first := p.Addr()
	bytes := first.AsSlice()
	for i := p.Bits(); i < first.BitLen(); i++ {
		bytes[i/8] |= 0x80 >> (i % 8)
	}
	last, _ := netip.AddrFromSlice(bytes)
	for _, a := range []netip.Addr{first, last, first.Prev(), last.Next()} {
		if w.Chance(40) && a.IsValid() {
			return a
		}
	}
	return first
}

// Question generates a query about a subject of a state; false if the state has no subjects.
func (w *World) Question(s *State) (Question, bool) {
	if len(s.Subjects) == 0 {
		return Question{}, false
	}
	q := Question{
		Subject: Pick(w, SortedKeys(s.Subjects)...), Direction: Pick(w, policytable.Ingress, policytable.Egress),
		Peer: Nobody, Addr: Pick(w, w.All...), Point: w.Point(),
	}
	if w.Chance(90) {
		id := Pick(w, w.IDs...)
		q.Peer = id.Number
		if w.Chance(85) {
			q.Addr = Pick(w, w.Addrs[id.Number]...)
		}
	}
	if w.Chance(10) {
		q.Addr = w.edge()
	}
	return q, true
}

// namedPorts returns the hidden label of named ports.
func namedPorts(value string) label.Label {
	return label.Label{Source: label.SourceGenerated, Key: workload.KeyNamedPorts, Value: value}
}
