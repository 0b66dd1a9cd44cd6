// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package compile

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

const (
	ready    = service.Ready | service.Serving
	draining = service.Serving | service.Terminating
	down     = service.State(0)
	ending   = service.Terminating // and no longer answers
)

// ep is an endpoint "address node zone[; forNodes[; forZones]]".
func ep(t *testing.T, text string, state service.State) service.Endpoint {
	t.Helper()
	parts := strings.Split(text, ";")
	words := strings.Fields(parts[0])
	w := service.About{State: state}
	if len(words) > 1 {
		w.Node = words[1]
	}
	if len(words) > 2 {
		w.Zone = words[2]
	}
	if len(parts) > 1 {
		w.ForNodes = service.JoinHints(strings.Fields(parts[1]))
	}
	if len(parts) > 2 {
		w.ForZones = service.JoinHints(strings.Fields(parts[2]))
	}
	return service.NewEndpoint(netip.MustParseAddr(words[0]), w)
}

var here = Node{Name: "here", Zone: "east", ExternalIPs: []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")}}

// balanced is a service with every kind of frontend.
func balanced(change func(*service.Service)) *service.Service {
	s := &service.Service{
		Name: service.Name{Namespace: "shop", Name: "web"}, Type: service.LoadBalancer, IPv4: true,
		ClusterIPs:  []netip.Addr{netip.MustParseAddr("10.96.0.1")},
		ExternalIPs: []netip.Addr{netip.MustParseAddr("198.51.100.7")},
		Ingress:     []service.Ingress{{Addr: netip.MustParseAddr("203.0.113.1")}},
		Ports:       []service.Port{{Protocol: service.TCP, Port: 80, NodePort: 30080}},
	}
	if change != nil {
		change(s)
	}
	return s
}

func slice(name string, endpoints ...service.Endpoint) *service.Slice {
	return &service.Slice{
		Name: service.Name{Namespace: "shop", Name: name}, Service: "web",
		Ports: []service.SlicePort{{Protocol: service.TCP, Port: 8080}}, Endpoints: endpoints,
	}
}

// short formats the backends of a list by the last byte of each address.
func short(l *frontend.List) string {
	if l == nil {
		return "-"
	}
	var out []string
	for _, b := range l.Backends {
		text := b.Addr().String()
		text = text[strings.LastIndexAny(text, ".:")+1:]
		if b.Terminating {
			text += "t"
		}
		out = append(out, text)
	}
	if len(out) == 0 {
		return map[bool]string{false: "reject", true: "drop"}[l.Drop]
	}
	return strings.Join(out, " ")
}

// TestEndpointsAreChosenByCategory checks the categories of endpoints that kube-proxy distinguishes: the lists of
// cluster IPs, and the lists of other frontends for clients inside and outside.
func TestEndpointsAreChosenByCategory(t *testing.T) {
	local := func(s *service.Service) { s.InternalLocal, s.ExternalLocal = true, true }
	external := func(s *service.Service) { s.ExternalLocal = true }
	internal := func(s *service.Service) { s.InternalLocal = true }
	type e struct {
		text  string
		state service.State
	}
	for _, c := range []struct {
		name      string
		change    func(*service.Service)
		endpoints []e
		cluster   string // of cluster IPs
		inside    string // of the other frontends
		outside   string // of the other frontends; "-": as inside
	}{
		{"none", nil, nil, "reject", "reject", "-"},
		{"none, local", local, nil, "reject", "reject", "reject"},
		{"all ready", nil, []e{{"10.0.0.1 here", ready}, {"10.0.0.2 there", ready}}, "1 2", "1 2", "-"},
		{"all ready, local", local, []e{{"10.0.0.1 here", ready}, {"10.0.0.2 there", ready}}, "1", "1 2", "1"},
		{"all ready, external local", external, []e{{"10.0.0.1 here", ready}, {"10.0.0.2 there", ready}}, "1 2", "1 2", "1"},
		{"all ready, internal local", internal, []e{{"10.0.0.1 here", ready}, {"10.0.0.2 there", ready}}, "1", "1 2", "-"},
		{"ready elsewhere only, local", local, []e{{"10.0.0.2 there", ready}}, "drop", "2", "drop"},
		{"not-ready endpoints are left out", nil, []e{{"10.0.0.1 here", down}, {"10.0.0.2 there", ready}}, "2", "2", "-"},
		{"none ready", nil, []e{{"10.0.0.1 here", down}, {"10.0.0.2 there", down}}, "reject", "reject", "-"},
		{"none ready, local", local, []e{{"10.0.0.1 here", down}}, "reject", "reject", "reject"},
		{"draining beside ready", nil, []e{{"10.0.0.1 here", draining}, {"10.0.0.2 there", ready}}, "2", "2", "-"},
		{"draining only", nil, []e{{"10.0.0.1 here", draining}, {"10.0.0.2 there", draining}}, "1t 2t", "1t 2t", "-"},
		{"draining only, local", local, []e{{"10.0.0.1 here", draining}, {"10.0.0.2 there", draining}}, "1t", "1t 2t", "1t"},
		{
			"draining here, ready there, local", local,
			[]e{{"10.0.0.1 here", draining}, {"10.0.0.2 there", ready}},
			"1t",
			"2", "1t",
		},
		{"draining there only, local", local, []e{{"10.0.0.2 there", draining}}, "drop", "2t", "drop"},
		{"ended", nil, []e{{"10.0.0.1 here", ending}}, "reject", "reject", "-"},
		{"ended beside draining", nil, []e{{"10.0.0.1 here", ending}, {"10.0.0.2 there", draining}}, "2t", "2t", "-"},
		// A pod that is being removed and that publishes not-ready addresses.
		{
			"ready and terminating", nil,
			[]e{{"10.0.0.1 here", ready | service.Terminating}, {"10.0.0.2 there", draining}},
			"1", "1", "-",
		},
		{"serving, neither ready nor terminating", nil, []e{{"10.0.0.1 here", service.Serving}}, "reject", "reject", "-"},

		{"hints of the zone", nil, []e{{"10.0.0.1 here; ;east", ready}, {"10.0.0.2 there; ;west", ready}}, "1", "1", "-"},
		{"hints of two zones", nil, []e{{"10.0.0.1 a; ;east west", ready}, {"10.0.0.2 b; ;west", ready}}, "1", "1", "-"},
		{"one hint is missing", nil, []e{{"10.0.0.1 here; ;east", ready}, {"10.0.0.2 there", ready}}, "1 2", "1 2", "-"},
		{
			"no hint is for this zone", nil,
			[]e{{"10.0.0.1 here; ;west", ready}, {"10.0.0.2 there; ;west", ready}},
			"1 2",
			"1 2", "-",
		},
		{
			"an endpoint that is not ready has no hint", nil,
			[]e{{"10.0.0.1 here; ;east", ready}, {"10.0.0.2 there", down}, {"10.0.0.3 there; ;west", ready}},
			"1", "1", "-",
		},
		{"hints do not bind the policy Local", local, []e{
			{"10.0.0.1 here; ;west", ready},
			{"10.0.0.2 there; ;east", ready},
		}, "1", "2", "1"},
		{"hints do not apply to draining endpoints", nil, []e{
			{"10.0.0.1 here; ;east", draining},
			{"10.0.0.2 there; ;west", draining},
		}, "1t 2t", "1t 2t", "-"},
		{"hints of the node", nil, []e{{"10.0.0.1 a;here;east", ready}, {"10.0.0.2 b;there;east", ready}}, "1", "1", "-"},
		{
			"no hint is for this node, so zone hints apply", nil,
			[]e{{"10.0.0.1 a;there;east", ready}, {"10.0.0.2 b;there;west", ready}},
			"1", "1", "-",
		},
		{
			"one node hint is missing, so zone hints apply", nil,
			[]e{{"10.0.0.1 a;here;west", ready}, {"10.0.0.2 b; ;east", ready}},
			"2", "2", "-",
		},
	} {
		var all []service.Endpoint
		for _, x := range c.endpoints {
			all = append(all, ep(t, x.text, x.state))
		}
		got := here.Of(View{balanced(c.change), []*service.Slice{slice("a", all...)}}, nil)
		if len(got) != 4 {
			t.Fatalf("%s: %d frontends, want 4", c.name, len(got))
		}
		for _, f := range got {
			inside, outside := c.inside, c.outside
			if f.Kind == frontend.ClusterIP {
				inside, outside = c.cluster, "-"
			}
			if short(f.Inside) != inside || short(f.Outside) != outside {
				t.Errorf("%s: %s has backends %s, outside %s; want %s, %s", c.name, f.Key, short(f.Inside), short(f.Outside),
					inside, outside)
			}
		}
	}
}

// TestEndpointsThatServeOrTerminateDrain: an endpoint that gets no new connections but serves or terminates is
// draining. Each endpoint is an active or a draining backend, or neither serves nor terminates.
func TestEndpointsThatServeOrTerminateDrain(t *testing.T) {
	v := View{balanced(func(s *service.Service) { s.ExternalLocal = true }), []*service.Slice{slice("a",
		ep(t, "10.0.0.1 here", ready), ep(t, "10.0.0.2 there", ready), ep(t, "10.0.0.3 here", draining),
		ep(t, "10.0.0.4 here", ending), ep(t, "10.0.0.5 here", down), ep(t, "10.0.0.6 there", service.Serving),
	)}}
	drains := func(l *frontend.List) string {
		return short(&frontend.List{Backends: l.Draining})
	}
	for _, f := range here.Of(v, nil) {
		if got, want := short(f.Inside)+", drains "+drains(f.Inside), "1 2, drains 3t 4t 6"; got != want {
			t.Errorf("%v inside: %s, want %s", f.Key, got, want)
		}
		if f.Kind == frontend.ClusterIP {
			continue
		}
		if got, want := short(f.Outside)+", drains "+drains(f.Outside), "1, drains 2 3t 4t 6"; got != want {
			t.Errorf("%v outside: %s, want %s", f.Key, got, want)
		}
	}
	var ports []string
	for _, b := range here.Backends(v) {
		ports = append(ports, b.Addr().String())
	}
	if got, want := strings.Join(ports, " "), "10.0.0.1 10.0.0.2 10.0.0.3 10.0.0.4 10.0.0.6"; got != want {
		t.Errorf("the backends are %s, want %s", got, want)
	}
	last := View{balanced(nil), []*service.Slice{slice("a", ep(t, "10.0.0.3 here", draining))}}
	alone := here.Of(last, nil)[0]
	if got := short(alone.Inside) + ", drains " + drains(alone.Inside); got != "3t, drains reject" {
		t.Errorf("the last one: %s", got)
	}
	gone := here.Of(View{balanced(nil), nil}, nil)[0]
	sits := here.Of(View{balanced(nil), []*service.Slice{slice("a", ep(t, "10.0.0.4 here", ending))}}, nil)[0]
	if sits.Equal(gone) {
		t.Error("a frontend that drains an endpoint is the same as one that does not")
	}
}

// TestUDPLeavesEndpointsThatDoNotServe: an endpoint that terminates and does not serve keeps its TCP connections. It
// keeps its UDP flows only if no endpoint gets new connections.
func TestUDPLeavesEndpointsThatDoNotServe(t *testing.T) {
	two, same := []string{"10.0.0.1 here", "10.0.0.2 there"}, []string{"10.0.0.1 here", "10.0.0.2 here"}
	for _, c := range []struct {
		name      string
		protocol  service.Protocol
		local     bool
		endpoints []string // "10.0.0.N node"
		states    []service.State
		drains    string // for outside clients
	}{
		{"TCP", service.TCP, false, two, []service.State{ending, ready}, "1t"},
		{"UDP", service.UDP, false, two, []service.State{ending, ready}, ""},
		{"UDP, serving", service.UDP, false, two, []service.State{draining, ready}, "1t"},
		{"UDP, alone", service.UDP, false, []string{"10.0.0.1 here"}, []service.State{ending}, "1t"},
		{"UDP, with a draining one", service.UDP, false, two, []service.State{ending, draining}, ""},
		{"UDP, local, ready here", service.UDP, true, same, []service.State{ending, ready}, ""},
		{"UDP, local, ready there", service.UDP, true, two, []service.State{ending, ready}, "1t 2"},
	} {
		v := View{
			Service: balanced(func(s *service.Service) { s.ExternalLocal, s.Ports[0].Protocol = c.local, c.protocol }),
		}
		var es []service.Endpoint
		for i, at := range c.endpoints {
			es = append(es, ep(t, at, c.states[i]))
		}
		x := slice("a", es...)
		x.Ports[0].Protocol = c.protocol
		v.Slices = []*service.Slice{x}
		for _, f := range here.Of(v, nil) {
			l := f.Outside
			if l == nil {
				l = f.Inside
			}
			if f.Kind == frontend.ClusterIP && c.local {
				continue
			}
			got := ""
			if len(l.Draining) > 0 {
				got = short(&frontend.List{Backends: l.Draining})
			}
			if got != c.drains {
				t.Errorf("%s: %v drains %q, want %q", c.name, f.Key, got, c.drains)
			}
		}
	}
}

func TestNodeWithoutNameOrZoneHasNoLocalEndpoint(t *testing.T) {
	nowhere := Node{}
	got := nowhere.Of(View{
		balanced(func(s *service.Service) { s.InternalLocal = true }),
		[]*service.Slice{slice("a", ep(t, "10.0.0.1", ready))},
	}, nil)
	if short(got[0].Inside) != "drop" {
		t.Errorf("an endpoint without a node is local to a node without a name: %s", got[0])
	}
	got = nowhere.Of(View{balanced(nil), []*service.Slice{slice("a", ep(t, "10.0.0.1 a; ;east", ready),
		ep(t, "10.0.0.2 a; ;west", ready))}}, nil)
	if short(got[0].Inside) != "1 2" {
		t.Errorf("a node without a zone gets %s", got[0])
	}
}

// lines formats frontends.
func lines(all []*frontend.Frontend) string {
	var out []string
	for _, f := range all {
		out = append(out, f.String())
	}
	return strings.Join(out, "\n")
}

func TestServiceHasTheFrontendsOfItsKind(t *testing.T) {
	slices := []*service.Slice{slice("a", ep(t, "10.0.0.1 here", ready))}
	for _, c := range []struct {
		name   string
		change func(*service.Service)
		want   []string
	}{
		{
			"a cluster IP", func(s *service.Service) { s.Type, s.Ingress, s.ExternalIPs = service.ClusterIP, nil, nil },
			[]string{"10.96.0.1:80/TCP"},
		},
		{
			"a node port", func(s *service.Service) { s.Type, s.ExternalIPs = service.NodePort, nil },
			[]string{"10.96.0.1:80/TCP", "port 30080/TCP of the IPv4 node addresses"},
		},
		{"everything", nil, []string{
			"10.96.0.1:80/TCP", "port 30080/TCP of the IPv4 node addresses",
			"198.51.100.7:80/TCP", "203.0.113.1:80/TCP",
		}},
		{
			"no node port", func(s *service.Service) { s.Ports[0].NodePort = 0; s.ExternalIPs = nil },
			[]string{"10.96.0.1:80/TCP", "203.0.113.1:80/TCP"},
		},
		{"an external IP that is not allowed", func(s *service.Service) {
			s.Type, s.ExternalIPs = service.ClusterIP, []netip.Addr{netip.MustParseAddr("192.0.2.1")}
		}, []string{"10.96.0.1:80/TCP"}},
		{
			"external IPs of a frontend.ClusterIP service", func(s *service.Service) { s.Type = service.ClusterIP },
			[]string{"10.96.0.1:80/TCP", "198.51.100.7:80/TCP"},
		},
		{"headless", func(s *service.Service) { s.Headless, s.ClusterIPs = true, nil }, nil},
		{"a name", func(s *service.Service) { s.Type = service.ExternalName }, nil},
		{"another proxy", func(s *service.Service) { s.OtherProxy = "envoy" }, nil},
		{"dual stack", func(s *service.Service) {
			s.Type, s.IPv6, s.ExternalIPs = service.NodePort, true, nil
			s.ClusterIPs = append(s.ClusterIPs, netip.MustParseAddr("fd00::1"))
		}, []string{"10.96.0.1:80/TCP", "[fd00::1]:80/TCP", "port 30080/TCP of the IPv4 node addresses", "port 30080/TCP " +
			"of the IPv6 node addresses"}},
	} {
		s := balanced(c.change)
		var got []string
		for _, f := range here.Of(View{s, slices}, nil) {
			got = append(got, KeyText(f.Key))
			if f.Key.Addr.Is6() && short(f.Inside) != "reject" {
				t.Errorf("%s: an IPv6 frontend has IPv4 backends: %s", c.name, f)
			}
		}
		if strings.Join(got, ", ") != strings.Join(c.want, ", ") {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
		keys := here.Keys(s)
		if len(keys) != len(got) {
			t.Errorf("%s: %d keys of %d frontends", c.name, len(keys), len(got))
		}
	}
}

func TestLoadBalancerAddresses(t *testing.T) {
	all := []*service.Slice{slice("a", ep(t, "10.0.0.1 here", ready), ep(t, "10.0.0.2 there", ready))}
	prefix := func(text string) []netip.Prefix { return []netip.Prefix{netip.MustParsePrefix(text)} }
	of := func(change func(*service.Service)) (*frontend.Frontend, Notes) {
		var notes Notes
		got := here.Of(View{balanced(change), all}, &notes)
		for _, f := range got[:len(got)-1] {
			if len(f.SourceRanges) > 0 {
				t.Errorf("%s has source ranges %v", f, f.SourceRanges)
			}
		}
		return got[len(got)-1], notes
	}
	f, _ := of(func(s *service.Service) { s.SourceRanges = prefix("192.0.2.0/24") })
	if !slices.Equal(f.SourceRanges, prefix("192.0.2.0/24")) {
		t.Errorf("source ranges %v", f.SourceRanges)
	}
	// Only ranges of the other family: no client may use the address.
	f, notes := of(func(s *service.Service) { s.SourceRanges = prefix("fd00::/8") })
	if !slices.Equal(f.SourceRanges, prefix("0.0.0.0/32")) || len(notes) != 1 ||
		!strings.Contains(notes[0], "203.0.113.1") {
		t.Errorf("source ranges %v, notes %q", f.SourceRanges, notes)
	}
	f, _ = of(func(s *service.Service) { s.Ingress[0].Proxy = true })
	if f.Inside != nil || short(f.Outside) != "1 2" {
		t.Errorf("ipMode Proxy: %s", f)
	}
	f, _ = of(func(s *service.Service) { s.Ingress[0].Proxy, s.ExternalLocal = true, true })
	if f.Inside != nil || short(f.Outside) != "1" {
		t.Errorf("ipMode Proxy, external policy Local: %s", f)
	}
	// An address that is also an external IP keeps its source ranges.
	got := here.Of(View{balanced(func(s *service.Service) {
		s.Ingress[0].Addr, s.SourceRanges = s.ExternalIPs[0], prefix("192.0.2.0/24")
	}), all}, nil)
	if f := got[len(got)-1]; len(got) != 3 || f.Kind != frontend.ExternalIP || len(f.SourceRanges) != 1 {
		t.Errorf("an external IP that a load balancer has: %s with %v, of %d frontends", f, f.SourceRanges, len(got))
	}
}

func TestSlicesAreMergedByAddressAndPort(t *testing.T) {
	s := balanced(func(s *service.Service) {
		s.Type, s.Ingress, s.ExternalIPs = service.ClusterIP, nil, nil
		s.Ports = []service.Port{
			{Name: "http", Protocol: service.TCP, Port: 80},
			{Name: "dns", Protocol: service.UDP, Port: 53},
		}
	})
	named := func(name string, port uint16, endpoints ...service.Endpoint) *service.Slice {
		x := slice(name, endpoints...)
		x.Ports = []service.SlicePort{
			{Name: "http", Protocol: service.TCP, Port: port},
			{Name: "dns", Protocol: service.TCP, Port: 53},
		}
		return x
	}
	six := slice("six", ep(t, "fd00::1 here", ready))
	six.IPv6, six.Ports = true, []service.SlicePort{{Name: "http", Protocol: service.TCP, Port: 8080}}
	all := []*service.Slice{
		named("a", 8080, ep(t, "10.0.0.1 here", down), ep(t, "10.0.0.2 here", ready)),
		named("b", 8080, ep(t, "10.0.0.1 here", ready), ep(t, "10.0.0.2 here", draining)),
		named("c", 9090, ep(t, "10.0.0.2 here", ready)), // another target port
		six,
	}
	got := here.Of(View{s, all}, nil)
	want := "10.96.0.1:53/udp of shop/web:dns inside reject\n" +
		"10.96.0.1:80/tcp of shop/web:http inside 10.0.0.1:8080 10.0.0.2:8080 10.0.0.2:9090"
	if lines(got) != want {
		t.Errorf("got\n%s\nwant\n%s", lines(got), want)
	}
	if n := len(here.Backends(View{s, all})); n != 4 {
		t.Errorf("%d backends, want 4: three IPv4 and one IPv6", n)
	}
}

func TestAddressesThatCannotBeBackends(t *testing.T) {
	n := here
	n.Reserved = []Reserved{
		{Protocol: service.UDP, Port: 4789},
		{Prefix: netip.MustParsePrefix("192.0.2.0/24"), Protocol: service.TCP, Port: 6443},
	}
	for _, c := range []struct {
		at       string
		protocol service.Protocol
		want     string
	}{
		{"10.0.0.1:80", service.TCP, ""},
		{"[fd00::1]:80", service.TCP, ""},
		{"127.0.0.1:80", service.TCP, "loopback"},
		{"127.255.255.254:80", service.TCP, "loopback"},
		{"[::1]:80", service.TCP, "loopback"},
		{"169.254.169.254:80", service.TCP, "link-local"},
		{"[fe80::1]:80", service.TCP, "link-local"},
		{"224.0.0.1:80", service.TCP, "multicast"},
		{"239.1.2.3:80", service.UDP, "multicast"},
		{"[ff02::1]:80", service.TCP, "multicast"},
		{"0.0.0.0:80", service.TCP, "unspecified"},
		{"[::]:80", service.TCP, "unspecified"},
		{"255.255.255.255:80", service.UDP, "broadcast"},
		{"[::ffff:10.0.0.1]:80", service.TCP, "IPv6 form"},
		{"10.0.0.1:0", service.TCP, "port is 0"},
		{"10.0.0.1:4789", service.UDP, "reserved"},
		{"[fd00::1]:4789", service.UDP, "reserved"},
		{"10.0.0.1:4789", service.TCP, ""},
		{"192.0.2.9:6443", service.TCP, "reserved"},
		{"10.0.0.1:6443", service.TCP, ""},
	} {
		at := netip.MustParseAddrPort(c.at)
		err := n.Usable(at, c.protocol, at.Addr().Is6())
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s/%s: %v, want %q", c.at, c.protocol, err, c.want)
		}
	}
	if err := n.Usable(netip.MustParseAddrPort("10.0.0.1:80"), service.TCP, true); err == nil {
		t.Error("an IPv4 address in an IPv6 slice is usable")
	}
	// Unusable endpoints are in no list, and do not count as endpoints.
	var notes Notes
	s := balanced(func(s *service.Service) { s.Ports[0].Protocol = service.UDP })
	x := slice("a", ep(t, "10.0.0.1 here", ready), ep(t, "127.0.0.1 here", ready))
	x.Ports[0] = service.SlicePort{Protocol: service.UDP, Port: 4789}
	for _, f := range n.Of(View{s, []*service.Slice{x}}, &notes) {
		if short(f.Inside) != "reject" {
			t.Errorf("%s has a refused backend", f)
		}
	}
	if len(notes) != 2 || !strings.Contains(notes[0]+notes[1], "loopback") ||
		!strings.Contains(notes[0]+notes[1], "reserved") {
		t.Errorf("notes %q", notes)
	}
}

func TestAffinityAndNamesAreThoseOfTheService(t *testing.T) {
	s := balanced(func(s *service.Service) { s.AffinitySeconds, s.Ports[0].Name = 60, "http" })
	for _, f := range here.Of(View{Service: s}, nil) {
		if f.Affinity != time.Minute || f.Service != s.Name.String()+":http" {
			t.Errorf("%+v", f)
		}
	}
	if got := here.Of(View{Slices: []*service.Slice{slice("a", ep(t, "10.0.0.1 here", ready))}}, nil); got != nil {
		t.Errorf("slices without a service have %s", lines(got))
	}
}

// TestEveryListOfAServiceAsksForItsTable: the lists for inside and for outside both request the rendezvous table. A
// frontend with tables differs from a frontend without.
func TestEveryListOfAServiceAsksForItsTable(t *testing.T) {
	of := func(table bool) []*frontend.Frontend {
		s := balanced(func(s *service.Service) { s.Table, s.ExternalLocal, s.InternalLocal = table, true, true })
		return here.Of(View{s, []*service.Slice{slice("a", ep(t, "10.0.0.1 here", ready), ep(t, "10.0.0.2 x", ready))}}, nil)
	}
	plain, tables := of(false), of(true)
	if len(tables) == 0 || len(tables) != len(plain) {
		t.Fatalf("%d frontends with tables, %d without", len(tables), len(plain))
	}
	for i, f := range tables {
		for _, l := range []*frontend.List{f.Inside, f.Outside} {
			if l != nil && !l.Table {
				t.Errorf("%v does not have a table in each of its lists", f)
			}
		}
		if f.Equal(plain[i]) {
			t.Errorf("%v is as without a table", f)
		}
	}
}

// TestOrderDoesNotMatter: frontends do not depend on the order in which slices and endpoints
// arrive.
func TestOrderDoesNotMatter(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	states := []service.State{ready, draining, down, ending, ready | service.Terminating}
	for range 300 {
		var all []*service.Slice
		for i := range 3 {
			x := slice(fmt.Sprint("s", i))
			for range r.IntN(6) {
				text := fmt.Sprintf("10.0.0.%d %s;%s;%s", r.IntN(5), []string{"here", "there"}[r.IntN(2)],
					[]string{"", "here", "there"}[r.IntN(3)], []string{"", "east", "west"}[r.IntN(3)])
				x.Endpoints = append(x.Endpoints, ep(t, text, states[r.IntN(len(states))]))
			}
			// Within one slice, an address occurs once.
			slices.SortFunc(x.Endpoints, func(a, b service.Endpoint) int { return a.Addr().Compare(b.Addr()) })
			x.Endpoints = slices.CompactFunc(x.Endpoints, func(a, b service.Endpoint) bool { return a.Addr() == b.Addr() })
			all = append(all, x)
		}
		s := balanced(func(s *service.Service) { s.ExternalLocal, s.InternalLocal = r.IntN(2) == 0, r.IntN(2) == 0 })
		want := lines(here.Of(View{s, all}, nil))
		for _, x := range all {
			r.Shuffle(len(x.Endpoints), func(i, j int) { x.Endpoints[i], x.Endpoints[j] = x.Endpoints[j], x.Endpoints[i] })
		}
		if got := lines(here.Of(View{s, all}, nil)); got != want {
			t.Fatalf("got\n%s\nwant\n%s", got, want)
		}
	}
}

// TestKeysAreOrderedWithNodePortsFirst: a datapath whose maps are nearly full applies frontends in this order.
func TestKeysAreOrderedWithNodePortsFirst(t *testing.T) {
	key := func(addr string, port uint16, p frontend.Protocol) frontend.Key {
		a := netip.MustParseAddr(addr)
		return frontend.Key{Addr: a, Port: port, Protocol: p, Node: a.IsUnspecified()}
	}
	want := []frontend.Key{
		key("0.0.0.0", 30080, frontend.TCP), key("::", 30080, frontend.TCP), key("0.0.0.0", 30080, frontend.UDP),
		key("0.0.0.0", 30081, frontend.TCP), key("10.96.0.1", 53, frontend.UDP), key("10.96.0.1", 80, frontend.TCP),
		key("10.96.0.2", 53, frontend.UDP), key("fd00::1", 53, frontend.UDP),
	}
	got := slices.Clone(want)
	slices.Reverse(got)
	if slices.SortFunc(got, CompareKeys); !slices.Equal(got, want) {
		t.Errorf("the order is %v, want %v", got, want)
	}
}
