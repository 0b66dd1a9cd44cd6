// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package compile computes the frontends that a service has on a node, and the backends of each, by
// the rules that kube-proxy follows.
//
// It has no state and does no I/O. The result depends only on the objects, and not on the order in which they arrived.
package compile

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// CompareKeys orders keys as frontends are listed and sent: node ports first, sorted by port, protocol and family; then
// all other keys, sorted by address, port and protocol.
func CompareKeys(a, b frontend.Key) int {
	switch {
	case a.Node && b.Node:
		return cmp.Or(cmp.Compare(a.Port, b.Port), cmp.Compare(a.Protocol, b.Protocol), a.Addr.Compare(b.Addr))
	case a.Node:
		return -1
	case b.Node:
		return 1
	}
	return a.Compare(b)
}

// compare defines the order of the frontends of one service in lists.
func compare(a, b *frontend.Frontend) int {
	return cmp.Or(cmp.Compare(a.Kind, b.Kind), CompareKeys(a.Key, b.Key))
}

// KeyText formats a key for messages: "10.96.0.1:53/UDP".
func KeyText(k frontend.Key) string {
	protocol := service.Protocol(k.Protocol)
	switch {
	case !k.Node:
		return fmt.Sprintf("%s/%s", netip.AddrPortFrom(k.Addr, k.Port), protocol)
	case k.Addr.Is4():
		return fmt.Sprintf("port %d/%s of the IPv4 node addresses", k.Port, protocol)
	}
	return fmt.Sprintf("port %d/%s of the IPv6 node addresses", k.Port, protocol)
}

// Node contains the properties of the node that determine its frontends.
type Node struct {
	Name, Zone string
	// ExternalIPs are the prefixes from which services may have external IPs. Without this limit, every user who may
	// write a Service could take over the traffic to any address.
	ExternalIPs []netip.Prefix
	// Reserved lists ports that backends may not have, such as tunnel ports: another node would treat a client's
	// packet that this node forwards to such a port as a packet of this node.
	Reserved []Reserved
	// CountElements is set if the datapath has reported the capacity of its maps. Shares are then counted in elements
	// of these maps, and not in frontends.
	CountElements bool
}

// Reserved is a port that backends may not have.
type Reserved struct {
	Prefix   netip.Prefix // of the addresses; invalid: all
	Protocol service.Protocol
	Port     uint16
}

// View is a service with its slices, which are sorted by name.
type View struct {
	Service *service.Service // nil if the Service is missing and only its slices exist
	Slices  []*service.Slice
}

// maxNotes limits the number of notes about one service.
const maxNotes = 1000

// notesAtMost limits the number of endpoints that notes list individually.
const notesAtMost = 10

// Notes are messages for the author of a service.
type Notes []string

func (n *Notes) addf(format string, args ...any) {
	if n != nil && len(*n) < maxNotes {
		*n = append(*n, fmt.Sprintf(format, args...))
	}
}

// Keys returns the keys of all frontends that the service asks for, sorted.
func (n *Node) Keys(s *service.Service) []frontend.Key { return n.KeysWithin(s, nil) }

// KeysWithin returns the sorted keys of the frontends that a service gets with a share, which is counted as in Needs.
// They include frontends that exceed the share and refuse connections. share is nil if the service has no limit.
func (n *Node) KeysWithin(s *service.Service, share *int) []frontend.Key {
	if share == nil {
		return n.allKeys(s)
	}
	var out []frontend.Key
	for _, f := range n.plain(s, share, nil) {
		out = append(out, f.Key)
	}
	slices.SortFunc(out, CompareKeys)
	return slices.Compact(out)
}

// allKeys is KeysWithin for a service without a limit. It computes only the keys, because computing whole frontends
// would take most of the time of a change.
func (n *Node) allKeys(s *service.Service) []frontend.Key {
	if s == nil || !s.HasFrontends() || len(s.Ports) == 0 {
		return nil
	}
	external := n.external(s)
	each := len(s.ClusterIPs) + len(external)
	if hasNodePorts(s) {
		each += 2
	}
	if s.Type == service.LoadBalancer {
		each += len(s.Ingress)
	}
	out := make([]frontend.Key, 0, each*len(s.Ports))
	for _, p := range s.Ports {
		add := func(a netip.Addr) {
			out = append(out, frontend.Key{Addr: a, Port: p.Port, Protocol: frontend.Protocol(p.Protocol)})
		}
		for _, a := range s.ClusterIPs {
			add(a)
		}
		for _, a := range external {
			add(a)
		}
		if s.Type == service.LoadBalancer {
			for _, in := range s.Ingress {
				add(in.Addr)
			}
		}
		if hasNodePorts(s) && p.NodePort != 0 {
			for _, a := range []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()} {
				if a.Is6() && s.IPv6 || a.Is4() && s.IPv4 {
					out = append(out, frontend.Key{
						Addr: a, Port: p.NodePort, Protocol: frontend.Protocol(p.Protocol), Node: true,
					})
				}
			}
		}
	}
	if len(out) == 0 {
		return nil
	}
	slices.SortFunc(out, CompareKeys)
	return slices.Compact(out)
}

// Notes adds the same notes as Within, without computing frontends.
func (n *Node) Notes(v View, share *int, notes *Notes) {
	if !n.faultless(v) {
		n.Within(v, share, notes)
	}
}

// faultless reports whether Within certainly adds no notes about a service. If it returns false, Within may still add
// none.
func (n *Node) faultless(v View) bool {
	if v.Service == nil {
		return true
	}
	if len(v.Service.ExternalIPs)+len(v.Service.SourceRanges) > 0 {
		return false
	}
	for _, s := range v.Slices {
		for _, p := range s.Ports {
			for _, e := range s.Endpoints {
				if n.Usable(netip.AddrPortFrom(e.Addr(), p.Port), p.Protocol, s.IPv6) != nil {
					return false
				}
			}
		}
	}
	return true
}

// Of returns the frontends of a service on the node, sorted and without duplicate keys. If notes is not nil, it adds
// messages for the author.
func (n *Node) Of(v View, notes *Notes) []*frontend.Frontend { return n.Within(v, nil, notes) }

// Within is Of with a share, which is counted as in Needs. Frontends that exceed the share refuse connections or are
// omitted. share is nil if the service has no limit.
func (n *Node) Within(v View, share *int, notes *Notes) []*frontend.Frontend {
	if v.Service == nil {
		return nil
	}
	out := n.plain(v.Service, share, notes)
	ends := v.index()
	type pool struct {
		port int
		ipv6 bool
	}
	lists := make(map[pool]*lists)
	named, name := -1, "" // index of a port of the service, and its ServicePort
	for _, f := range out {
		if f.port != named {
			named, name = f.port, v.servicePort(f.port)
		}
		f.Service = name
		f.refuse(v.Service.ExceedsShare)
		if f.ExceedsShare {
			f.Inside = &frontend.List{}
			continue
		}
		at := pool{f.port, f.Key.Addr.Is6()}
		l := lists[at]
		if l == nil {
			var all []candidate
			if !v.Service.Closed {
				all = n.merge(ends, v.Service.Ports[f.port], f.Key.Addr.Is6(), notes)
			}
			l = newLists(n, v.Service, v.Service.Ports[f.port].Protocol, all)
			lists[at] = l
		}
		l.give(f)
	}
	slices.SortStableFunc(out, func(a, b *planned) int { return compare(&a.Frontend, &b.Frontend) })
	frontends := make([]*frontend.Frontend, 0, len(out))
	seen := make(map[frontend.Key]*frontend.Frontend, len(out))
	for _, f := range out {
		// If the service has one address as two kinds, such as load balancer and external IP, the first frontend
		// serves the clients of both kinds.
		if first := seen[f.Key]; first != nil {
			if len(first.SourceRanges) == 0 {
				first.SourceRanges = f.SourceRanges
			}
			continue
		}
		seen[f.Key] = &f.Frontend
		frontends = append(frontends, &f.Frontend)
	}
	return frontends
}

func (v View) servicePort(i int) string {
	return frontend.ServicePort(v.Service.Name.Namespace, v.Service.Name.Name, v.Service.Ports[i].Name)
}

// planned is a frontend whose lists and service name are not set yet.
type planned struct {
	frontend.Frontend
	port  int  // index of the port in the service
	proxy bool // clients inside do not use the frontend
}

// plain returns the planned frontends of a service, in the order of its ports and then of its addresses. If the
// service exceeds its share, it returns the first frontends that fit, followed by frontends that refuse connections.
func (n *Node) plain(s *service.Service, share *int, notes *Notes) []*planned {
	if s == nil || !s.HasFrontends() || len(s.Ports) == 0 {
		return nil
	}
	if notes != nil {
		n.explain(s, notes)
	}
	externals := n.external(s)
	var out []*planned
	add := func(i int, kind frontend.Kind, addr netip.Addr, port uint16) *planned {
		f := &planned{port: i, Frontend: frontend.Frontend{
			Key: frontend.Key{
				Addr: addr, Port: port, Protocol: frontend.Protocol(s.Ports[i].Protocol), Node: kind == frontend.NodePort,
			},
			Kind: kind, Affinity: time.Duration(s.AffinitySeconds) * time.Second,
		}}
		out = append(out, f)
		return f
	}
	budget := n.budget(s, share)
	for i, p := range s.Ports {
		if i > 0 && budget.full && !hasNodePorts(s) {
			break
		}
		for _, a := range s.ClusterIPs {
			if take, refuse := budget.next(alone, a.Is6(), i == 0); take || refuse {
				add(i, frontend.ClusterIP, a, p.Port).refuse(refuse)
			} else if budget.full && i > 0 {
				break
			}
		}
		if hasNodePorts(s) && p.NodePort != 0 {
			for _, a := range []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()} {
				if a.Is6() && s.IPv6 || a.Is4() && s.IPv4 {
					_, refuse := budget.next(ofNode, a.Is6(), i == 0)
					add(i, frontend.NodePort, a, p.NodePort).refuse(refuse)
				}
			}
		}
		if budget.full && i > 0 {
			continue
		}
		for _, a := range externals {
			if take, _ := budget.next(ofOthers, a.Is6(), i == 0); take {
				add(i, frontend.ExternalIP, a, p.Port)
			}
		}
		if s.Type != service.LoadBalancer {
			continue
		}
		for _, in := range s.Ingress {
			kind := alone2
			if in.Proxy {
				kind = ofProxy
			}
			if take, refuse := budget.next(kind, in.Addr.Is6(), i == 0); take || refuse {
				f := add(i, frontend.LoadBalancer, in.Addr, p.Port)
				f.proxy, f.SourceRanges = in.Proxy, sourceRanges(s.SourceRanges, in.Addr.Is6())
				f.refuse(refuse)
			} else if budget.full && i > 0 {
				break
			}
		}
	}
	return out
}

// refuse sets whether a frontend refuses connections.
func (f *planned) refuse(yes bool) {
	if yes {
		f.ExceedsShare, f.SourceRanges, f.Affinity = true, nil, 0
	}
}

// explain adds notes about settings of the service that have no effect.
func (n *Node) explain(s *service.Service, notes *Notes) {
	for _, a := range s.ExternalIPs {
		if !n.allows(a) {
			notes.addf("spec.externalIPs: %s is not in externalIPs.allow of the configuration, and has no frontend", a)
		}
	}
	if len(s.SourceRanges) == 0 || s.Type != service.LoadBalancer {
		return
	}
	for _, in := range s.Ingress {
		if !slices.ContainsFunc(s.SourceRanges, func(p netip.Prefix) bool { return p.Addr().Is6() == in.Addr.Is6() }) {
			notes.addf("spec.loadBalancerSourceRanges: no range has the family of %s, which no client may use", in.Addr)
		}
	}
}

func (n *Node) allows(external netip.Addr) bool {
	return slices.ContainsFunc(n.ExternalIPs, func(p netip.Prefix) bool { return p.Contains(external) })
}

// sourceRanges returns the ranges of one family. If the service has ranges, but none of this family, no client of the
// family may use the address. The result is then the unspecified address, which no client has. Sockets of the node
// match only the ranges 0.0.0.0/0 and ::/0.
func sourceRanges(all []netip.Prefix, ipv6 bool) []netip.Prefix {
	var out []netip.Prefix
	for _, p := range all {
		if p.Addr().Is6() == ipv6 {
			out = append(out, p)
		}
	}
	if len(all) > 0 && len(out) == 0 {
		none := netip.IPv4Unspecified()
		if ipv6 {
			none = netip.IPv6Unspecified()
		}
		return []netip.Prefix{netip.PrefixFrom(none, none.BitLen())}
	}
	return out
}

// candidate is an endpoint that may become a backend of a service port.
type candidate struct {
	at netip.AddrPort
	service.Endpoint
}

// portID matches the ports of services with the ports of slices.
type portID struct {
	name     string
	protocol service.Protocol
	ipv6     bool
}

// source is a port of a slice that provides endpoints for a service port.
type source struct {
	slice *service.Slice
	port  uint16
}

// index finds the ports of slices by their portID.
type index struct {
	slices []*service.Slice    // searched one by one if all is nil
	all    map[portID][]source // nil if there are few searches
}

// fewSearches is the maximum number of comparisons for which searching is cheaper than building a map.
const fewSearches = 32

// index returns the index of the ports of the slices.
func (v View) index() index {
	ports := 0
	for _, s := range v.Slices {
		ports += len(s.Ports)
	}
	if len(v.Service.Ports) == 1 || len(v.Service.Ports)*ports <= fewSearches {
		return index{slices: v.Slices}
	}
	out := make(map[portID][]source, ports)
	for _, s := range v.Slices {
		for _, p := range s.Ports {
			id := portID{p.Name, p.Protocol, s.IPv6}
			out[id] = append(out[id], source{s, p.Port})
		}
	}
	return index{all: out}
}

// each calls f for each slice that has a port, with the number of the port.
func (x index) each(id portID, f func(source)) {
	for _, found := range x.all[id] {
		f(found)
	}
	for _, s := range x.slices {
		if s.IPv6 != id.ipv6 {
			continue
		}
		for _, p := range s.Ports {
			if p.Name == id.name && p.Protocol == id.protocol {
				f(source{s, p.Port})
			}
		}
	}
}

// merge returns the endpoints of a service port in one family, sorted, without duplicates. If several slices contain
// the same endpoint, a ready entry takes precedence over a draining one, and a draining entry over any other. Among
// equal entries, the entry in the first slice counts.
func (n *Node) merge(ends index, p service.Port, ipv6 bool, notes *Notes) []candidate {
	var out []candidate
	refused := 0
	ends.each(portID{p.Name, p.Protocol, ipv6}, func(x source) {
		out = slices.Grow(out, len(x.slice.Endpoints))
		for _, e := range x.slice.Endpoints {
			at := netip.AddrPortFrom(e.Addr(), x.port)
			if err := n.Usable(at, p.Protocol, ipv6); err != nil {
				if refused++; refused <= notesAtMost {
					notes.addf("EndpointSlice %s: the endpoint %s is left out: %v", x.slice.Name, at, err)
				}
				continue
			}
			out = append(out, candidate{at, e})
		}
	})
	if refused > notesAtMost {
		notes.addf("%d more endpoints are left out", refused-notesAtMost)
	}
	slices.SortStableFunc(out, func(a, b candidate) int {
		return cmp.Or(a.at.Compare(b.at), cmp.Compare(rank(a.State()), rank(b.State())))
	})
	return slices.CompactFunc(out, func(a, b candidate) bool { return a.at == b.at })
}

// rank orders the states that one endpoint may have in several slices.
func rank(s service.State) int {
	switch {
	case s.Ready():
		return 0
	case s.Draining():
		return 1
	}
	return 2
}

// Usable returns an error if an address and port cannot be a backend.
func (n *Node) Usable(at netip.AddrPort, protocol service.Protocol, ipv6 bool) error {
	if err := CheckAddr(at.Addr()); err != nil {
		return err
	}
	switch {
	case at.Addr().Is6() != ipv6:
		return fmt.Errorf("the address has another family than the slice")
	case at.Port() == 0:
		return fmt.Errorf("the port is 0")
	}
	for _, r := range n.Reserved {
		if r.Port == at.Port() && r.Protocol == protocol && (!r.Prefix.IsValid() || r.Prefix.Contains(at.Addr())) {
			return fmt.Errorf("the port %d/%s is reserved (backends.reserved)", r.Port, r.Protocol)
		}
	}
	return nil
}

// CheckAddr returns an error if an endpoint cannot have the address, whatever its port is.
func CheckAddr(a netip.Addr) error {
	switch {
	case !a.IsValid():
		return fmt.Errorf("the address is missing")
	case a.Zone() != "":
		return fmt.Errorf("the address has a zone")
	case a.Is4In6():
		return fmt.Errorf("the address is an IPv4 address in IPv6 form")
	case a.IsUnspecified():
		return fmt.Errorf("the address is unspecified")
	case a.IsLoopback():
		return fmt.Errorf("the address is loopback")
	case a.IsLinkLocalUnicast():
		return fmt.Errorf("the address is link-local")
	case a.IsMulticast():
		return fmt.Errorf("the address is multicast")
	case a == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return fmt.Errorf("the address is the broadcast address")
	}
	return nil
}

// lists contains the backend lists of one service port in one family.
type lists struct {
	internal *frontend.List // for cluster IPs
	cluster  *frontend.List // for inside clients of other frontends
	external *frontend.List // for outside clients of other frontends; nil: the same as cluster
}

func newLists(n *Node, s *service.Service, protocol service.Protocol, all []candidate) *lists {
	c := n.Categorize(all)
	cluster, local := c.list(protocol, c.Cluster, all), (*frontend.List)(nil)
	if s.InternalLocal || s.ExternalLocal {
		local = c.list(protocol, c.Local, all)
	}
	for _, l := range []*frontend.List{cluster, local} {
		if l != nil {
			l.Table = s.Table
		}
	}
	out := &lists{internal: cluster, cluster: cluster}
	if s.InternalLocal {
		out.internal = local
	}
	if s.ExternalLocal {
		out.external = local
	}
	return out
}

func (l *lists) give(f *planned) {
	switch {
	case f.Kind == frontend.ClusterIP:
		f.Inside = l.internal
	case f.proxy && l.external != nil:
		f.Outside = l.external
	case f.proxy:
		f.Outside = l.cluster
	default:
		f.Inside, f.Outside = l.cluster, l.external
	}
}

// Categories contains the endpoints of a service port that may get new connections.
type Categories struct {
	// Cluster contains the endpoints for traffic policy Cluster, and Local the endpoints for traffic policy Local.
	Cluster, Local []candidate
	// Any reports whether any node has an endpoint for new connections.
	Any bool
}

// Categorize selects the endpoints of a service port for both traffic policies: the ready endpoints or, if none is
// ready, the draining ones.
func (n *Node) Categorize(all []candidate) Categories {
	var out Categories
	allows := n.topology(all)
	pick := func(ok func(candidate) bool) (out []candidate) {
		first := slices.IndexFunc(all, func(c candidate) bool { return !ok(c) })
		if first < 0 {
			return all // no copy is needed in the usual case
		}
		out = append(out, all[:first]...)
		for _, c := range all[first:] {
			if ok(c) {
				out = append(out, c)
			}
		}
		return out
	}
	out.Cluster = pick(func(c candidate) bool { return c.State().Ready() && allows(c) })
	if len(out.Cluster) == 0 {
		out.Cluster = pick(func(c candidate) bool { return c.State().Draining() })
	}
	out.Local = pick(func(c candidate) bool { return c.State().Ready() && n.local(c) })
	if len(out.Local) == 0 {
		out.Local = pick(func(c candidate) bool { return c.State().Draining() && n.local(c) })
	}
	// If an endpoint is ready, the topology hints leave at least one endpoint.
	out.Any = len(out.Cluster) > 0
	return out
}

func (n *Node) local(c candidate) bool { return n.Name != "" && c.About().Node == n.Name }

// topology returns a function that reports whether the hints allow this node to use a ready endpoint. If every ready
// endpoint has node hints, these decide. Otherwise, if every ready endpoint has zone hints, these decide. Otherwise the
// node may use all.
func (n *Node) topology(all []candidate) func(candidate) bool {
	hints := []struct {
		of   func(service.About) string
		name string
	}{
		{func(a service.About) string { return a.ForNodes }, n.Name},
		{func(a service.About) string { return a.ForZones }, n.Zone},
	}
	for _, h := range hints {
		every, here := true, false
		for _, c := range all {
			if !c.State().Ready() {
				continue
			}
			every = every && h.of(c.About()) != ""
			here = here || service.Hinted(h.of(c.About()), h.name)
		}
		if every && here {
			return func(c candidate) bool { return service.Hinted(h.of(c.About()), h.name) }
		}
	}
	return func(candidate) bool { return true }
}

// list returns the list of the selected endpoints. All other endpoints that serve or terminate are draining in the
// list. UDP is an exception: if any endpoint is selected, the list omits an endpoint that terminates and no longer
// serves. Such an endpoint cannot finish a UDP flow, and would refuse it although other endpoints serve.
func (c *Categories) list(protocol service.Protocol, of, all []candidate) *frontend.List {
	out := &frontend.List{Drop: c.Any}
	if len(of) > 0 {
		out.Backends = make([]frontend.Backend, len(of))
	}
	for i, x := range of {
		out.Backends[i] = frontend.Backend{AddrPort: x.at, Terminating: !x.State().Ready()}
	}
	rest := of
	for _, x := range all {
		switch {
		case len(rest) > 0 && rest[0].at == x.at:
			rest = rest[1:]
		case protocol == service.UDP && len(of) > 0 && x.State()&service.Serving == 0:
		case x.State().Keeps():
			out.Draining = append(out.Draining, frontend.Backend{
				AddrPort: x.at, Terminating: x.State()&service.Terminating != 0,
			})
		}
	}
	return out
}

// Backends returns the distinct addresses and ports that may be backends of the service on any node, including draining
// ones, sorted.
func (n *Node) Backends(v View) []netip.AddrPort {
	if v.Service == nil || !v.Service.HasFrontends() || v.Service.Closed {
		return nil
	}
	var out []netip.AddrPort
	ends := v.index()
	for _, p := range v.Service.Ports {
		for _, ipv6 := range []bool{false, true} {
			all := n.merge(ends, p, ipv6, nil)
			out = slices.Grow(out, len(all))
			for _, c := range all {
				if c.State().Ready() || c.State().Keeps() {
					out = append(out, c.at)
				}
			}
		}
	}
	slices.SortFunc(out, netip.AddrPort.Compare)
	return slices.Compact(out)
}

// Named returns upper bounds for the number of frontends of the service and for the number of its backends. It counts
// what the objects list, including duplicates, without computing frontends.
func (v View) Named() (frontends, backends int) {
	s := v.Service
	if s == nil || !s.HasFrontends() {
		return 0, 0
	}
	ports := PortsOf(s)
	for _, x := range v.Slices {
		for _, p := range x.Ports {
			if ports.has(p) {
				backends += len(x.Endpoints)
			}
		}
	}
	const nodePorts = 2 // node ports of one service port, one for each family
	return len(s.Ports) * (len(s.ClusterIPs) + nodePorts + len(s.ExternalIPs) + len(s.Ingress)), backends
}

// LocalReady returns the ready addresses of the service on this node, sorted.
func (n *Node) LocalReady(v View) []netip.Addr {
	var addrs []netip.Addr
	for _, s := range v.Slices {
		for _, e := range s.Endpoints {
			if a := e.About(); a.State.Ready() && n.Name != "" && a.Node == n.Name && CheckAddr(e.Addr()) == nil {
				addrs = append(addrs, e.Addr())
			}
		}
	}
	slices.SortFunc(addrs, netip.Addr.Compare)
	return slices.Compact(addrs)
}

// Count returns the number of addresses in the slices of a service, and how many of them are ready.
func Count(slices []*service.Slice) (all, ready int) {
	addrs := make(map[netip.Addr]bool)
	for _, s := range slices {
		for _, e := range s.Endpoints {
			addrs[e.Addr()] = addrs[e.Addr()] || e.State().Ready()
		}
	}
	for _, r := range addrs {
		if r {
			ready++
		}
	}
	return len(addrs), ready
}
