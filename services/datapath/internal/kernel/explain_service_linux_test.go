// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"

	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/explain"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
	"github.com/sluice-net/sluice/services/datapath/internal/service/frontendtx"
)

func leadsTo(backends ...netip.AddrPort) *frontend.List {
	l := &frontend.List{}
	slices.SortFunc(backends, netip.AddrPort.Compare)
	for _, b := range backends {
		l.Backends = append(l.Backends, frontend.Backend{AddrPort: b})
	}
	return l
}

// serviceStage returns the cast with services.
func serviceStage(t *testing.T, fs ...*frontend.Frontend) (runner, map[string]endpointmap.Endpoint) {
	t.Helper()
	o := testOptions(kerneltest.NewBPFFS(t))
	o.Services = true
	r, cast := newStageOf(t, o)
	tx := &frontendtx.Transaction{}
	for _, f := range fs {
		tx.Upsert(f)
	}
	res, err := r.k.Services.Apply(t.Context(), tx)
	must(t, "apply the services", err)
	for _, refused := range res.Refused {
		t.Fatalf("%v is refused: %v", refused.Key, refused.Err)
	}
	return r, cast
}

func clusterAt(at netip.AddrPort, p frontend.Protocol, inside *frontend.List) *frontend.Frontend {
	return &frontend.Frontend{
		Key:  frontend.Key{Addr: at.Addr(), Port: at.Port(), Protocol: p},
		Kind: frontend.ClusterIP, Service: "shop/web:http", Inside: inside,
	}
}

func (r runner) explainTo(t testing.TB, proto uint8, from netip.Addr, to netip.AddrPort) explain.Explanation {
	t.Helper()
	x, err := r.k.explainer().Explain(conntrack.Tuple{
		Initiator: netip.AddrPortFrom(from, 40000), Responder: to, Protocol: proto,
	})
	must(t, fmt.Sprintf("Explain %v to %v", from, to), err)
	return x
}

// TestKernelExplainEvaluatesTheBackendsOfAService: the explanation of each backend equals the explanation of a
// direct connection to it, and explaining does not change the services.
func TestKernelExplainEvaluatesTheBackendsOfAService(t *testing.T) {
	backends := map[netip.Addr][]netip.AddrPort{
		a.IPv4: {netip.AddrPortFrom(b.IPv4, 80), netip.AddrPortFrom(only4.IPv4, 81), netip.AddrPortFrom(world4, 80)},
		a.IPv6: {netip.AddrPortFrom(b.IPv6, 80), netip.AddrPortFrom(shaped.IPv6, 81), netip.AddrPortFrom(world6, 80)},
	}
	asked := map[netip.Addr]netip.AddrPort{a.IPv4: vip4, a.IPv6: vip6}
	r, cast := serviceStage(t, clusterAt(vip4, frontend.TCP, leadsTo(backends[a.IPv4]...)),
		clusterAt(vip6, frontend.TCP, leadsTo(backends[a.IPv6]...)))
	egress, ingress := explained(t, r.k)
	for _, name := range []string{"a", "b", "only4", "shaped"} {
		setPolicy(t, r.k, cast[name].Slot, endpointmap.Policy{Egress: egress, Ingress: ingress})
	}
	for from, list := range backends {
		x := r.explainTo(t, 6, from, asked[from])
		if differences, err := r.k.Services.Audit(false); err != nil || len(differences) > 0 {
			t.Errorf("Explain has changed the services: %q, %v", differences, err)
		}
		s := x.Service
		if s == nil || s.Outcome != explain.Translated || s.Outside || s.Count != 3 || len(s.Backends) != 3 ||
			s.Service != "shop/web:http" || s.Kind != frontend.ClusterIP || s.Key.Addr != asked[from].Addr() {
			t.Fatalf("the service: %+v", s)
		}
		if x.Source.Identity != a.Identity || x.Egress != nil || x.Ingress != nil || x.Reason != 0 {
			t.Errorf("of the service itself: %+v", x)
		}
		reasons := map[event.Reason]bool{}
		for i, got := range s.Backends {
			if got.AddrPort != list[i] || got.Path != explain.Evaluated {
				t.Errorf("backend %d: %v, path %d, want %v", i, got.AddrPort, got.Path, list[i])
			}
			reasons[got.Explanation.Reason] = true
			want, have := r.explainTo(t, 6, from, list[i]), got.Explanation
			if !sameExplanation(have, want) {
				t.Errorf("backend %v: %+v, want %+v", got.AddrPort, have, want)
			}
		}
		if !reasons[event.ForwardedToPod] || len(reasons) < 2 {
			t.Errorf("the policies do not tell the backends apart: %v", reasons)
		}
	}
}

// sameExplanation compares two explanations by value.
func sameExplanation(x, y explain.Explanation) bool {
	side := func(s *explain.Side) explain.Side {
		if s == nil {
			return explain.Side{}
		}
		return *s
	}
	return x.Reason == y.Reason && x.Source == y.Source && x.Destination == y.Destination &&
		side(x.Egress) == side(y.Egress) && side(x.Ingress) == side(y.Ingress) && x.Tracked == y.Tracked
}

// TestKernelExplainFindsTheFrontendAsTheProgramsDo: which service answers depends on the client, the protocol
// and the address.
func TestKernelExplainFindsTheFrontendAsTheProgramsDo(t *testing.T) {
	const port = 30080
	atB := netip.AddrPortFrom(b.IPv4, 80)
	closed := clusterAt(netip.MustParseAddrPort("10.96.0.5:80"), frontend.TCP, leadsTo(atB))
	closed.SourceRanges = []netip.Prefix{netip.MustParsePrefix("203.0.113.0/24")}
	open := clusterAt(netip.MustParseAddrPort("10.96.0.7:80"), frontend.TCP, leadsTo(atB))
	open.SourceRanges = []netip.Prefix{netip.PrefixFrom(a.IPv4, 32)}
	dropping := leadsTo()
	dropping.Drop = true
	proxied := clusterAt(netip.MustParseAddrPort("10.96.0.4:80"), frontend.TCP, nil)
	proxied.Kind, proxied.Outside = frontend.LoadBalancer, leadsTo(atB)
	external := func(at string, protocol frontend.Protocol, list *frontend.List) *frontend.Frontend {
		f := clusterAt(netip.MustParseAddrPort(at), protocol, list)
		f.Kind = frontend.ExternalIP
		return f
	}
	closed.Kind, open.Kind = frontend.LoadBalancer, frontend.LoadBalancer
	r, _ := serviceStage(
		t,
		clusterAt(vip4, frontend.TCP, leadsTo(atB, netip.AddrPortFrom(a.IPv4, 80))),
		external("10.96.0.2:80", frontend.TCP, leadsTo()),
		external("10.96.0.3:80", frontend.TCP, dropping), proxied, closed, open,
		external("10.96.0.6:80", frontend.SCTP, leadsTo(atB)),
		external("10.96.0.6:81", frontend.SCTP, leadsTo(atB)),
		clusterAt(netip.MustParseAddrPort("10.96.0.8:4789"), frontend.UDP, leadsTo(atB)),
		&frontend.Frontend{
			Key:  frontend.Key{Addr: netip.IPv4Unspecified(), Port: port, Protocol: frontend.TCP, Node: true},
			Kind: frontend.NodePort, Service: "shop/web:http", Inside: leadsTo(atB),
			Outside: leadsTo(atB, netip.AddrPortFrom(only4.IPv4, 80)),
		},
		&frontend.Frontend{
			Key:  frontend.Key{Addr: netip.IPv6Unspecified(), Port: port, Protocol: frontend.TCP, Node: true},
			Kind: frontend.NodePort, Service: "shop/web:http", Inside: leadsTo(netip.AddrPortFrom(b.IPv6, 80)),
		},
	)
	for _, c := range []struct {
		name    string
		proto   uint8
		from    netip.Addr
		to      string
		outcome explain.Outcome // 0: no service
		count   int
		outside bool
	}{
		{"a pod", 6, a.IPv4, "10.96.0.1:80", explain.Translated, 2, false},
		{"the host", 6, host4, "10.96.0.1:80", explain.Translated, 2, false},
		{"from outside", 6, world4, "10.96.0.1:80", explain.InsideOnly, 2, true},
		{"from outside, no backend", 6, world4, "10.96.0.2:80", explain.NoBackend, 0, true},
		{"from outside, only other nodes have", 6, world4, "10.96.0.3:80", explain.NoLocalBackend, 0, true},
		{"from outside, not for this node's own", 6, world4, "10.96.0.4:80", explain.Translated, 1, true},
		{"from outside, of other source ranges", 6, world4, "10.96.0.5:80", explain.SourceRanges, 1, true},
		{"from outside, another protocol", 17, world4, "10.96.0.1:80", explain.NoPort, 0, true},
		{"from outside, another port of an external address", 6, world4, "10.96.0.2:81", 0, 0, false},
		{"from outside, the port of a tunnel", 17, world4, "10.96.0.8:4789", explain.NotTranslated, 1, true},
		{"a pod, the port of a tunnel", 17, a.IPv4, "10.96.0.8:4789", explain.Translated, 1, false},
		{"from outside, SCTP", 132, world4, "10.96.0.6:80", explain.Translated, 1, true},
		{"another protocol", 17, a.IPv4, "10.96.0.1:80", explain.NoPort, 0, false},
		{"an echo", 1, a.IPv4, "10.96.0.1:2048", explain.NoPort, 0, false},
		{"another port", 6, a.IPv4, "10.96.0.1:81", explain.NoPort, 0, false},
		{"another port, for the host", 6, host4, "10.96.0.1:81", explain.NoPort, 0, false},
		{"another protocol, for the host", 17, host4, "10.96.0.1:81", 0, 0, false},
		{"another port of a proxy's address", 6, a.IPv4, "10.96.0.4:81", 0, 0, false},
		{"no node has a backend", 6, a.IPv4, "10.96.0.2:80", explain.NoBackend, 0, false},
		{"only other nodes have", 6, a.IPv4, "10.96.0.3:80", explain.NoLocalBackend, 0, false},
		{"not for this node's own", 6, a.IPv4, "10.96.0.4:80", explain.NotTranslated, 0, false},
		{"of other source ranges", 6, a.IPv4, "10.96.0.5:80", explain.SourceRanges, 1, false},
		{"of its source ranges", 6, a.IPv4, "10.96.0.7:80", explain.Translated, 1, false},
		{"source ranges, the host", 6, host4, "10.96.0.7:80", explain.SourceRanges, 1, false},
		{"SCTP of a pod", 132, a.IPv4, "10.96.0.6:80", explain.Translated, 1, false},
		{"SCTP to another port", 132, a.IPv4, "10.96.0.6:81", explain.Translated, 1, false},
		{"SCTP of the host", 132, host4, "10.96.0.6:80", explain.NotTranslated, 1, false},
		{"a node port, a pod", 6, a.IPv4, "192.0.2.1:30080", explain.Translated, 1, false},
		{"a node port, the host", 6, host4, "192.0.2.1:30080", explain.Translated, 1, false},
		{"a node port, from outside", 6, world4, "192.0.2.1:30080", explain.Translated, 2, true},
		{"a node port by IPv6, from outside", 6, world6, "[2001:db8::1]:30080", explain.Translated, 1, true},
		{"a node port of another node, from outside", 6, world4, "192.0.2.2:30080", 0, 0, false},
		{"loopback, from outside", 6, world4, "127.0.0.1:30080", 0, 0, false},
		{"a node port by IPv6", 6, host6, "[2001:db8::1]:30080", explain.Translated, 1, false},
		{"a node port of another node", 6, a.IPv4, "192.0.2.2:30080", 0, 0, false},
		{"loopback, the host", 6, host4, "127.0.0.1:30080", explain.Translated, 1, false},
		{"loopback by IPv6, the host", 6, host6, "[::1]:30080", explain.Translated, 1, false},
		{"loopback, a pod", 6, a.IPv4, "127.0.0.1:30080", 0, 0, false},
	} {
		x, err := r.k.explainer().Explain(conntrack.Tuple{
			Initiator: netip.AddrPortFrom(c.from, 40000), Responder: netip.MustParseAddrPort(c.to), Protocol: c.proto,
		})
		if c.outcome == 0 {
			if x.Service != nil || err != nil && !errors.Is(err, explain.ErrNotLocal) {
				t.Errorf("%s: service %+v, %v", c.name, x.Service, err)
			}
			continue
		}
		if s := x.Service; err != nil || s == nil || s.Outcome != c.outcome || s.Count != c.count ||
			s.Outside != c.outside || (len(s.Backends) > 0) != (c.outcome == explain.Translated) {
			t.Errorf("%s: %+v, %v", c.name, s, err)
		}
	}
	// For an address that is not translated, the address itself is evaluated.
	x := r.explainTo(t, 6, a.IPv4, netip.MustParseAddrPort("10.96.0.4:80"))
	if x.Reason != event.ForwardedOutside || x.Egress == nil {
		t.Errorf("an address that is not translated: %+v", x)
	}
	// SCTP keeps its port, because the checksum would have to be recomputed.
	for _, from := range []netip.Addr{a.IPv4, world4} {
		x = r.explainTo(t, 132, from, netip.MustParseAddrPort("10.96.0.6:81"))
		if b := x.Service.Backends; len(b) != 1 || b[0].Explanation.Reason != event.ServiceSCTPPort {
			t.Errorf("SCTP of %v to another port: %+v", from, b)
		}
	}
}

// TestKernelExplainSaysWhereNoPolicyIsAsked: no policy applies to a hairpin, nor to the host's connection to a
// backend that is not a local pod.
func TestKernelExplainSaysWhereNoPolicyIsAsked(t *testing.T) {
	var many []netip.AddrPort
	for i := range explain.MaxBackends + 5 {
		many = append(many, netip.AddrPortFrom(world4, uint16(i+1)))
	}
	big := netip.MustParseAddrPort("10.96.0.2:80")
	r, cast := serviceStage(t, clusterAt(big, frontend.TCP, leadsTo(many...)),
		clusterAt(vip4, frontend.TCP, leadsTo(netip.AddrPortFrom(a.IPv4, 80), netip.AddrPortFrom(b.IPv4, 80),
			netip.AddrPortFrom(remote4, 80))))
	setPolicy(t, r.k, cast["a"].Slot, endpointmap.Policy{Egress: nodetable.Deny, Ingress: nodetable.Deny})
	setPolicy(t, r.k, cast["b"].Slot, endpointmap.Policy{Egress: nodetable.Allow, Ingress: nodetable.Allow})
	for _, c := range []struct {
		name string
		from netip.Addr
		want map[netip.Addr]explain.Path
	}{
		{"a pod", a.IPv4, map[netip.Addr]explain.Path{
			a.IPv4: explain.OwnNamespace, b.IPv4: explain.Evaluated, remote4: explain.Evaluated,
		}},
		{"the host", host4, map[netip.Addr]explain.Path{
			a.IPv4: explain.Evaluated, b.IPv4: explain.Evaluated, remote4: explain.NotLocal,
		}},
	} {
		x := r.explainTo(t, 6, c.from, vip4)
		got := map[netip.Addr]explain.Path{}
		for _, b := range x.Service.Backends {
			got[b.Addr()] = b.Path
			asked := b.Explanation.Egress != nil || b.Explanation.Ingress != nil
			if asked != (b.Path == explain.Evaluated) {
				t.Errorf("%s to %v: a policy is evaluated: %t", c.name, b.AddrPort, asked)
			}
			if b.Explanation.Destination.Addr != b.Addr() {
				t.Errorf("%s to %v: the backend is %+v", c.name, b.AddrPort, b.Explanation.Destination)
			}
		}
		if !maps.Equal(got, c.want) {
			t.Errorf("%s: paths %v, want %v", c.name, got, c.want)
		}
	}
	x := r.explainTo(t, 6, b.IPv4, big)
	if s := x.Service; s.Count != len(many) || len(s.Backends) != explain.MaxBackends {
		t.Errorf("of %d backends %d are evaluated, %d counted", len(many), len(s.Backends), s.Count)
	}
}
