// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package engine

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/services/policy/internal/dnsname"
	"github.com/sluice-net/sluice/services/policy/internal/identity"
	"github.com/sluice-net/sluice/services/policy/internal/label"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/port"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
	"github.com/sluice-net/sluice/services/policy/internal/selector"
)

// state is everything an engine is told, as a value that can be compared,
// changed and handed to a fresh engine.
type state struct {
	objects    map[policy.Key]policy.Object
	identities map[identity.Numeric]identity.Identity
	subjects   map[identity.Numeric]bool
	names      map[string][]netip.Addr
	located    map[netip.Addr]identity.Numeric
}

func newState() *state {
	return &state{
		objects: make(map[policy.Key]policy.Object), identities: make(map[identity.Numeric]identity.Identity),
		subjects: make(map[identity.Numeric]bool), names: make(map[string][]netip.Addr), located: make(map[netip.Addr]identity.Numeric),
	}
}

func (s *state) clone() *state {
	c := &state{
		objects: maps.Clone(s.objects), identities: maps.Clone(s.identities), subjects: maps.Clone(s.subjects),
		names: make(map[string][]netip.Addr), located: maps.Clone(s.located),
	}
	for n, a := range s.names {
		c.names[n] = slices.Clone(a)
	}
	return c
}

func sortedKeys[K interface{ ~uint32 | ~string }, V any](m map[K]V) []K {
	return slices.Sorted(maps.Keys(m))
}

func sortedObjects(m map[policy.Key]policy.Object) []policy.Key {
	return slices.SortedFunc(maps.Keys(m), func(a, b policy.Key) int { return strings.Compare(a.String(), b.String()) })
}

// diff is the change that leads from one state to another.
func diff(have, want *state) Change {
	var c Change
	for _, k := range sortedObjects(have.objects) {
		if _, ok := want.objects[k]; !ok {
			c.DeletePolicies = append(c.DeletePolicies, k)
		}
	}
	for _, k := range sortedObjects(want.objects) {
		if old, ok := have.objects[k]; !ok || fmt.Sprint(old) != fmt.Sprint(want.objects[k]) {
			c.UpsertPolicies = append(c.UpsertPolicies, want.objects[k])
		}
	}
	for _, n := range sortedKeys(have.identities) {
		if _, ok := want.identities[n]; !ok {
			c.RemoveIdentities = append(c.RemoveIdentities, n)
		}
	}
	for _, n := range sortedKeys(want.identities) {
		id := want.identities[n]
		if old, ok := have.identities[n]; !ok || old.Labels.String() != id.Labels.String() {
			c.AddIdentities = append(c.AddIdentities, id)
		}
	}
	for _, n := range sortedKeys(have.subjects) {
		if !want.subjects[n] {
			c.RemoveSubjects = append(c.RemoveSubjects, n)
		}
	}
	for _, n := range sortedKeys(want.subjects) {
		if !have.subjects[n] {
			c.AddSubjects = append(c.AddSubjects, n)
		}
	}
	for _, n := range sortedKeys(have.names) {
		if !slices.Equal(have.names[n], want.names[n]) {
			c.Forget = append(c.Forget, Name{n, have.names[n]})
		}
	}
	for _, n := range sortedKeys(want.names) {
		if !slices.Equal(have.names[n], want.names[n]) {
			c.Learn = append(c.Learn, Name{n, want.names[n]})
		}
	}
	for a := range have.located {
		if _, ok := want.located[a]; !ok {
			c.Vacate = append(c.Vacate, a)
		}
	}
	for a, n := range want.located {
		if m, ok := have.located[a]; !ok || m != n {
			c.Locate = append(c.Locate, Location{a, n})
		}
	}
	return c
}

// fresh compiles a state at once.
func fresh(t testing.TB, config Config, s *state) *Engine {
	t.Helper()
	e := New(config)
	if err := e.Apply(diff(newState(), s)); err != nil {
		t.Fatalf("apply from scratch: %v", err)
	}
	return e
}

// world is the stock that random states are drawn from.
type world struct {
	*rand.Rand
	ids   []identity.Identity
	addrs map[identity.Numeric][]netip.Addr
	all   []netip.Addr
}

// seeded makes the world of a test. POLICY_SEED, a number, makes every test draw
// other states; a failure prints it.
func seeded(t *testing.T, stream uint64) *world {
	t.Helper()
	var seed uint64
	if text := os.Getenv("POLICY_SEED"); text != "" {
		n, err := strconv.ParseUint(text, 10, 64)
		if err != nil {
			t.Fatalf("POLICY_SEED: %v", err)
		}
		seed = n
		t.Logf("POLICY_SEED=%d", seed)
	}
	return newWorld(rand.New(rand.NewPCG(seed, stream)))
}

const testCluster = "here"

func newWorld(r *rand.Rand) *world {
	w := &world{Rand: r, addrs: make(map[identity.Numeric][]netip.Addr)}
	add := func(n identity.Numeric, addr4, addr6 string, labels ...label.Label) {
		id, err := identity.New(n, label.NewSet(labels...))
		if err != nil {
			panic(err)
		}
		w.ids = append(w.ids, id)
		for _, a := range []string{addr4, addr6} {
			if a != "" {
				w.addrs[n] = append(w.addrs[n], netip.MustParseAddr(a))
				w.all = append(w.all, netip.MustParseAddr(a))
			}
		}
	}
	k := label.Kubernetes
	n := identity.MinCluster
	for i, ns := range []string{"a", "b", "c"} {
		for j, app := range []string{"web", "api", "db", ""} {
			ls := []label.Label{
				k(label.KeyNamespace, ns), k(label.KeyCluster, testCluster),
				k(label.KeyNamespaceLabels+"team", []string{"red", "blue", "red"}[i]),
			}
			if app != "" {
				ls = append(ls, k("app", app))
			}
			if (i+j)%2 == 0 {
				ls = append(ls, k("tier", []string{"front", "back"}[j%2]))
			}
			var ports []identity.NamedPort
			switch (i + 2*j) % 4 {
			case 0:
				ports = []identity.NamedPort{{Name: "http", Protocol: port.TCP, Port: 80}}
			case 1:
				ports = []identity.NamedPort{{Name: "http", Protocol: port.TCP, Port: 8080}, {Name: "dns", Protocol: port.UDP, Port: 53}}
			case 2:
				ports = []identity.NamedPort{{Name: "http", Protocol: port.TCP, Port: 80}, {Name: "http", Protocol: port.TCP, Port: 81}}
			}
			if l, ok := identity.NamedPortsLabel(ports); ok {
				ls = append(ls, l)
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
	w.all = append(w.all, netip.MustParseAddr("203.0.113.200"), netip.MustParseAddr("198.51.100.7"), netip.MustParseAddr("2001:db8:1::1"))
	return w
}

func pickOne[T any](w *world, list ...T) T { return list[w.IntN(len(list))] }

func (w *world) chance(percent int) bool { return w.IntN(100) < percent }

func (w *world) selector() selector.Selector {
	var reqs []selector.Requirement
	for range 1 + w.IntN(2) {
		q := selector.Requirement{Op: selector.Op(1 + w.IntN(4)), Source: pickOne(w, "", label.SourceKubernetes)}
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
			q.Key, values = label.KeyCluster, []string{testCluster, "there"}
		case 6:
			q.Source, q.Op = label.SourceReserved, selector.Exists
			q.Key = pickOne(w, identity.NameHost, identity.NameRemoteNode, identity.NameWorldIPv4, identity.NameKubeAPIServer, identity.NameHealth, identity.NameInit)
		}
		if q.Op == selector.In || q.Op == selector.NotIn {
			q.Values = []string{pickOne(w, values...)}
			if w.chance(30) {
				q.Values = append(q.Values, pickOne(w, values...))
			}
		}
		reqs = append(reqs, q)
	}
	return selector.New(reqs...)
}

func (w *world) prefix() netip.Prefix {
	return netip.MustParsePrefix(pickOne(w, "0.0.0.0/0", "::/0", "10.0.0.0/8", "10.0.1.0/24", "10.0.1.11/32", "192.168.0.0/16", "192.168.0.2/32",
		"203.0.113.0/24", "203.0.113.0/28", "203.0.113.10/32", "198.51.100.0/24", "fd00::/8", "fd00:1::/32", "2001:db8::/32", "2001:db8:1::/48"))
}

func (w *world) excepts(outer netip.Prefix) (out []netip.Prefix) {
	for range w.IntN(3) {
		if p := w.prefix(); outer.Overlaps(p) && p.Bits() >= outer.Bits() && p.Addr().Is4() == outer.Addr().Is4() {
			out = append(out, p)
		}
	}
	return out
}

func (w *world) peers() rule.Peers {
	var p rule.Peers
	for range 1 + w.IntN(2) {
		switch w.IntN(9) {
		case 0:
			p.Any = true
		case 1, 2, 3, 4:
			p.Selectors = append(p.Selectors, w.selector())
		case 5, 6:
			n := rule.Network{Prefix: w.prefix(), Reach: pickOne(w, rule.ReachEveryone, rule.ReachOutside, rule.ReachOutside|rule.ReachNode)}
			n.Except = w.excepts(n.Prefix)
			p.Networks = append(p.Networks, n)
		case 7:
			q := selector.Requirement{Source: label.SourceCIDRGroup, Key: pickOne(w, "zone", "site"), Op: selector.Op(1 + w.IntN(4))}
			if q.Op == selector.In || q.Op == selector.NotIn {
				q.Values = []string{pickOne(w, "x", "y")}
			}
			g := rule.GroupPeer{Selector: selector.New(q), NodesToo: w.chance(30)}
			if w.chance(40) {
				g.Except = []netip.Prefix{w.prefix()}
			}
			p.Groups = append(p.Groups, g)
		case 8:
			pattern, _ := dnsname.Parse(pickOne(w, "a.example", "*.example", "**.example", "*"))
			p.Names = append(p.Names, rule.NamePeer{Pattern: pattern, Reach: pickOne(w, rule.ReachOutside, rule.ReachOutside|rule.ReachNode)})
		}
	}
	return p
}

func (w *world) ports() (list []rule.Port, all bool) {
	if w.chance(30) {
		return nil, true
	}
	for range 1 + w.IntN(3) {
		switch w.IntN(6) {
		case 0, 1:
			n := pickOne[uint16](w, 80, 81, 53, 8080)
			list = append(list, rule.Port{Range: port.Ports(pickOne(w, port.TCP, port.UDP), n, n)})
		case 2:
			lo := uint16(1 + w.IntN(100))
			list = append(list, rule.Port{Range: port.Ports(port.TCP, lo, lo+uint16(w.IntN(9000)))})
		case 3:
			list = append(list, rule.Port{Range: port.Whole(pickOne(w, port.TCP, port.UDP, port.SCTP, port.ICMP))})
		case 4:
			list = append(list, rule.Port{Range: port.ICMPType(port.ICMP, pickOne[uint8](w, 0, 8))})
		case 5:
			list = append(list, rule.Port{Name: pickOne(w, "http", "HTTP", "dns", "none"), Protocol: pickOne(w, 0, port.TCP, port.UDP), FoldCase: w.chance(50)})
		}
	}
	return list, false
}

func (w *world) policy(name string) policy.Object {
	kind := pickOne(w, "Admin", "Normal", "Normal", "Normal", "Baseline")
	o := policy.Object{Key: policy.Key{Kind: kind, Name: name}}
	for s := range 1 + w.IntN(2) {
		spec := rule.Spec{}
		switch w.IntN(5) {
		case 0:
			spec.Subject = w.selector()
		case 1:
			spec.Subject = selector.New()
		default:
			spec.Namespace = pickOne(w, "a", "b", "c")
			spec.Subject = selector.New(selector.Requirement{
				Source: label.SourceKubernetes, Key: label.KeyNamespace, Op: selector.In, Values: []string{spec.Namespace},
			})
			if w.chance(50) {
				spec.Subject = selector.New(append(w.selector().Requirements(), spec.Subject.Requirements()...)...)
			}
		}
		if w.chance(5) {
			spec.Host, spec.Namespace = true, ""
		}
		for i := range w.IntN(5) {
			r := &rule.Rule{
				Source:    rule.Source{Kind: kind, Name: name, Path: fmt.Sprintf("specs[%d].rules[%d]", s, i)},
				Direction: pickOne(w, rule.Ingress, rule.Egress), Peers: w.peers(),
			}
			r.Ports, r.AllPorts = w.ports()
			switch kind {
			case "Admin", "Baseline":
				r.Tier = rule.Admin
				if kind == "Baseline" {
					r.Tier = rule.Baseline
				}
				r.Priority, r.Index = int32(w.IntN(3)), int32(i)
				r.Action = pickOne(w, rule.Deny, rule.Allow, rule.Pass)
			default:
				r.Tier = rule.Normal
				r.Action = pickOne(w, rule.Deny, rule.Allow, rule.Allow, rule.Redirect)
				if r.Action == rule.Redirect {
					r.Proxy = pickOne(w, rule.ProxyDNS, rule.ProxyHTTP)
				}
			}
			spec.Selects[r.Direction] = true
			spec.DefaultDeny[r.Direction] = kind == "Normal" && w.chance(80)
			spec.Rules = append(spec.Rules, r.Seal())
		}
		if kind == "Normal" && w.chance(25) {
			d := pickOne(w, rule.Ingress, rule.Egress)
			spec.Selects[d], spec.DefaultDeny[d] = true, true
			r := &rule.Rule{
				Source:    rule.Source{Kind: kind, Name: name, Path: fmt.Sprintf("specs[%d].isolation", s)},
				Direction: d, Tier: rule.Isolation, Action: rule.Deny, AllPorts: true, Peers: rule.Peers{Any: true, ExceptOwn: d == rule.Ingress},
			}
			spec.Rules = append(spec.Rules, r.Seal())
		}
		o.Specs = append(o.Specs, spec)
	}
	return o
}

func (w *world) group(name string) policy.Object {
	ls := []label.Label{{Source: label.SourceCIDRGroup, Key: label.KeyCIDRGroupName + name}}
	for _, k := range []string{"zone", "site"} {
		if w.chance(60) {
			ls = append(ls, label.Label{Source: label.SourceCIDRGroup, Key: k, Value: pickOne(w, "x", "y")})
		}
	}
	g := &policy.Group{Name: name, Labels: label.NewSet(ls...)}
	for range w.IntN(4) {
		g.Prefixes = append(g.Prefixes, w.prefix())
	}
	return policy.Object{Key: policy.Key{Kind: "Group", Name: name}, Group: g}
}

func (w *world) setIdentity(s *state, id identity.Identity) {
	s.identities[id.Number] = id
	for _, a := range w.addrs[id.Number] {
		s.located[a] = id.Number
	}
}

func (w *world) dropIdentity(s *state, n identity.Numeric) {
	delete(s.identities, n)
	delete(s.subjects, n)
	for _, a := range w.addrs[n] {
		delete(s.located, a)
	}
}

// subjectable says which identities can be endpoints of the node.
func subjectable(id identity.Identity) bool {
	return id.Kind == identity.KindInCluster || id.Kind == identity.KindHost || id.Number == identity.Init
}

// draw makes a random state.
func (w *world) draw() *state {
	s := newState()
	for _, id := range w.ids {
		if w.chance(80) {
			w.setIdentity(s, id)
			if subjectable(id) && w.chance(40) {
				s.subjects[id.Number] = true
			}
		}
	}
	for i := range w.IntN(6) {
		o := w.policy(fmt.Sprint("p", i))
		s.objects[o.Key] = o
	}
	for i := range w.IntN(3) {
		o := w.group(fmt.Sprint("g", i))
		s.objects[o.Key] = o
	}
	for _, n := range []string{"a.example.", "b.a.example.", "example."} {
		if w.chance(50) {
			s.names[n] = []netip.Addr{pickOne(w, w.all...)}
			if a := pickOne(w, w.all...); w.chance(30) && a != s.names[n][0] {
				s.names[n] = append(s.names[n], a)
			}
		}
	}
	return s
}

// mutate changes one thing.
func (w *world) mutate(s *state) {
	switch w.IntN(12) {
	case 10: // an address moves, without its identity
		a := pickOne(w, w.all...)
		if w.chance(50) {
			delete(s.located, a)
		} else {
			s.located[a] = pickOne(w, w.ids...).Number
		}
	case 11: // an identity comes or goes, without its addresses
		id := pickOne(w, w.ids...)
		if _, ok := s.identities[id.Number]; ok {
			delete(s.identities, id.Number)
			delete(s.subjects, id.Number)
		} else {
			s.identities[id.Number] = id
		}
	case 0, 1:
		w.setIdentity(s, pickOne(w, w.ids...))
	case 2:
		w.dropIdentity(s, pickOne(w, w.ids...).Number)
	case 3:
		if id := pickOne(w, w.ids...); subjectable(id) {
			if _, ok := s.identities[id.Number]; ok {
				s.subjects[id.Number] = true
			}
		}
	case 4:
		delete(s.subjects, pickOne(w, w.ids...).Number)
	case 5, 6:
		o := w.policy(fmt.Sprint("p", w.IntN(8)))
		s.objects[o.Key] = o
	case 7:
		if keys := sortedObjects(s.objects); len(keys) > 0 {
			delete(s.objects, pickOne(w, keys...))
		}
	case 8:
		n := pickOne(w, "a.example.", "b.a.example.", "example.")
		if w.chance(30) {
			delete(s.names, n)
		} else {
			s.names[n] = []netip.Addr{pickOne(w, w.all...)}
		}
	case 9:
		o := w.group(fmt.Sprint("g", w.IntN(3)))
		s.objects[o.Key] = o
		if id, ok := s.identities[identity.Host]; ok && w.chance(50) { // the one set that changes under its number
			ls := []label.Label{label.Reserved(identity.NameHost)}
			if w.chance(50) {
				ls = append(ls, label.Reserved(identity.NameKubeAPIServer))
			}
			id.Labels = label.NewSet(ls...)
			s.identities[identity.Host] = id
		}
	}
}

// point draws a protocol and port near the edges that rules have.
func (w *world) point() port.Point {
	switch w.IntN(8) {
	case 0:
		return port.AtICMP(port.ICMP, pickOne[uint8](w, 0, 8, 11), uint8(w.IntN(3)))
	case 1:
		return port.At(port.UDP, pickOne[uint16](w, 53, 80, 0, 65535))
	case 2:
		return port.At(pickOne(w, port.SCTP, port.ICMPv6, port.GRE), uint16(w.IntN(2)))
	case 3:
		return port.At(port.TCP, uint16(w.IntN(65536)))
	}
	return port.At(port.TCP, pickOne[uint16](w, 0, 1, 53, 79, 80, 81, 82, 8080, 8081, 65535))
}
