// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package hostport

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/service/frontendtx"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// kernel is a fake that stores frontends and refuses the ones in full for lack of capacity.
type kernel struct {
	mu     sync.Mutex
	have   map[frontend.Key]*frontend.Frontend // guarded by mu
	full   map[frontend.Key]bool               // guarded by mu
	whole  int                                 // guarded by mu; transactions that were not partial
	graces int                                 // guarded by mu
}

func (k *kernel) Apply(_ context.Context, tx *frontendtx.Transaction) (res frontendtx.Result, _ error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if !tx.Partial {
		k.whole++
	}
	for _, c := range tx.Changes() {
		switch {
		case c.Frontend == nil && k.have[c.Key] != nil:
			delete(k.have, c.Key)
			res.Changed++
		case c.Frontend != nil && k.full[c.Key]:
			res.Refused = append(res.Refused, frontend.Refusal{Key: c.Key, Err: &frontendtx.NoRoomError{Map: "sl_fe4", Need: 1}})
		case c.Frontend != nil:
			if err := c.Frontend.Validate(); err != nil {
				res.Refused = append(res.Refused, frontend.Refusal{Key: c.Key, Err: err})
				continue
			}
			k.have[c.Key] = c.Frontend
			res.Changed++
		}
	}
	return res, nil
}

func (k *kernel) Barrier(context.Context) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.graces++
	return nil
}

func (k *kernel) Keys() ([]frontend.Key, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Collect(maps.Keys(k.have)), nil
}

func (k *kernel) NameOf(key frontend.Key) (string, bool, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	f := k.have[key]
	if f == nil {
		return "", false, nil
	}
	return f.Service, true, nil
}

// ender signals each call.
type ender chan struct{}

func (e ender) End(ctx context.Context) error {
	select {
	case e <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

var (
	own4 = netip.MustParseAddr("192.0.2.1")
	own6 = netip.MustParseAddr("2001:db8::1")
)

func newPorts() (*Ports, *kernel, ender) {
	k := &kernel{have: map[frontend.Key]*frontend.Frontend{}, full: map[frontend.Key]bool{}}
	e := make(ender)
	return New(Options{
		Kernel: k, Ender: e, Own: func(a netip.Addr) (bool, error) { return a == own4 || a == own6, nil },
		Closed: []uint16{4789}, Log: log.Discard(),
	}), k, e
}

// key returns the key of a port on an address; with the unspecified address, on every address of the node.
func key(addr string, port uint16, p frontend.Protocol) frontend.Key {
	a := netip.MustParseAddr(addr)
	return frontend.Key{Addr: a, Port: port, Protocol: p, Node: a.IsUnspecified()}
}

// spec returns an endpoint with an address of each family and one port mapping.
func spec(name string, last byte, hostIP string, port uint16, p workload.Protocol) endpoint.Spec {
	m := endpoint.PortMapping{HostPort: port, ContainerPort: 8080, Protocol: p}
	if hostIP != "" {
		m.HostIP = netip.MustParseAddr(hostIP)
	}
	return endpoint.Spec{
		Owner:        workload.Owner{ContainerID: name, Interface: "eth0"},
		Pod:          workload.PodReference{Namespace: "shop", Name: name},
		Addrs:        []netip.Addr{netip.AddrFrom4([4]byte{10, 0, 0, last}), netip.AddrFrom16([16]byte{0: 0xfd, 15: last})},
		PortMappings: []endpoint.PortMapping{m},
	}
}

// create does what the creation of an endpoint does.
func create(t *testing.T, p *Ports, s endpoint.Spec) {
	t.Helper()
	if err := errors.Join(p.Claim(s), p.Lead(t.Context(), s.Owner)); err != nil {
		t.Fatal(err)
	}
}

func service(k frontend.Key) *frontend.Frontend {
	return &frontend.Frontend{Key: k, Kind: frontend.NodePort, Service: "shop/web:http", Inside: &frontend.List{}}
}

// keys returns the kernel's keys as text.
func (k *kernel) keys() []string {
	all, _ := k.Keys()
	var texts []string
	for _, key := range all {
		texts = append(texts, key.String())
	}
	slices.Sort(texts)
	return texts
}

func TestPortsLeadToTheEndpointInEachOfItsFamilies(t *testing.T) {
	p, k, _ := newPorts()
	s := spec("a", 2, "", 80, workload.TCP)
	s.PortMappings = append(s.PortMappings, endpoint.PortMapping{
		HostPort: 53, ContainerPort: 5353, Protocol: workload.UDP, HostIP: own6,
	})
	create(t, p, s)
	want := []string{"0.0.0.0:80/tcp", "[2001:db8::1]:53/udp", "[::]:80/tcp"}
	if got := k.keys(); !slices.Equal(got, want) {
		t.Fatalf("frontends %v, want %v", got, want)
	}
	f := k.have[key("2001:db8::1", 53, frontend.UDP)]
	for _, l := range []*frontend.List{f.Inside, f.Outside} {
		if len(l.Backends) != 1 || l.Backends[0].String() != "[fd00::2]:5353" {
			t.Errorf("%v has backends %v", f.Key, l.Backends)
		}
	}
	if f.Kind != frontend.HostPort || f.Service != "shop/a" {
		t.Errorf("frontend %+v", f)
	}
	if k.whole != 0 {
		t.Error("a transaction was not partial")
	}
	for range 2 {
		if err := p.Release(s.Owner); err != nil {
			t.Fatal(err)
		}
	}
	if got := k.keys(); len(got) > 0 {
		t.Errorf("after the deletion: %v", got)
	}
}

func TestPortsThatCannotBeGivenAwayAreRefused(t *testing.T) {
	const byA, byWeb = ": host port is in use by endpoint a/eth0", ": host port is in use by service shop/web:http"
	for name, c := range map[string]struct {
		s       endpoint.Spec
		want    string // in the error; empty: none
		invalid bool
	}{
		"another port":                     {spec("b", 3, "", 81, workload.TCP), "", false},
		"another protocol":                 {spec("b", 3, "", 80, workload.UDP), "", false},
		"one address, with all in use":     {spec("b", 3, "192.0.2.1", 80, workload.TCP), "", false},
		"all, with one address in use":     {spec("b", 3, "", 90, workload.TCP), "", false},
		"one address, with another in use": {spec("b", 3, "2001:db8::1", 90, workload.TCP), "", false},
		"its own":                          {spec("a", 2, "", 80, workload.TCP), "", false},
		"another's":                        {spec("b", 3, "", 80, workload.TCP), "0.0.0.0:80/tcp" + byA, false},
		"another's, by its family":         {spec("b", 3, "::", 80, workload.TCP), "[::]:80/tcp" + byA, false},
		"another's of an address":          {spec("b", 3, "192.0.2.1", 90, workload.TCP), "in use by endpoint c/eth0", false},
		"a service's":                      {spec("b", 3, "", 30080, workload.TCP), "port 0.0.0.0:30080/tcp" + byWeb, false},
		"a service's external IP":          {spec("b", 3, "192.0.2.1", 443, workload.TCP), "by service shop/web:http", false},
		"a service's, not named yet":       {spec("b", 3, "", 30081, workload.TCP), "has not sent", false},
		"the tunnel's":                     {spec("b", 3, "", 4789, workload.UDP), "packets between nodes", true},
		"the tunnel's number, by TCP":      {spec("b", 3, "", 4789, workload.TCP), "", false},
		"no address of the node":           {spec("b", 3, "198.51.100.1", 80, workload.TCP), "not an address of this node", true},
	} {
		t.Run(name, func(t *testing.T) {
			p, k, _ := newPorts()
			create(t, p, spec("a", 2, "", 80, workload.TCP))
			create(t, p, spec("c", 4, "192.0.2.1", 90, workload.TCP))
			unnamed := service(key("0.0.0.0", 30081, frontend.TCP))
			unnamed.Service = ""
			for _, f := range []*frontend.Frontend{
				service(key("0.0.0.0", 30080, frontend.TCP)), service(key("192.0.2.1", 443, frontend.TCP)), unnamed,
			} {
				k.have[f.Key] = f
			}
			checked, err := p.Check(c.s), p.Claim(c.s)
			if (checked == nil) != (err == nil) {
				t.Errorf("Check returns %v, Claim %v", checked, err)
			}
			if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
				t.Fatalf("claim: %v, want %q", err, c.want)
			}
			if err == nil {
				return
			}
			if errors.Is(err, endpoint.ErrInvalid) != c.invalid || errors.Is(err, endpoint.ErrHostPort) == c.invalid {
				t.Errorf("claim: %v is another kind of error", err)
			}
		})
	}
}

// TestClaimThatIsRefusedKeepsNothing: a refused claim reserves no port, not even its other ports.
func TestClaimThatIsRefusedKeepsNothing(t *testing.T) {
	p, _, _ := newPorts()
	create(t, p, spec("a", 2, "", 80, workload.TCP))
	b := spec("b", 3, "", 81, workload.TCP)
	b.PortMappings = append(b.PortMappings, spec("b", 3, "", 80, workload.TCP).PortMappings...)
	if err := p.Claim(b); !errors.Is(err, endpoint.ErrHostPort) {
		t.Fatalf("claim: %v", err)
	}
	if err := p.Claim(spec("c", 4, "", 81, workload.TCP)); err != nil {
		t.Errorf("a port of a refused claim: %v", err)
	}
}

// TestServicesNeitherTakeNorRemoveHostPorts: a complete listing of sluice-loadbalancer only covers the frontends of
// services.
func TestServicesNeitherTakeNorRemoveHostPorts(t *testing.T) {
	p, k, _ := newPorts()
	s := spec("a", 2, "0.0.0.0", 30080, workload.TCP)
	create(t, p, s)
	mine, other := key("0.0.0.0", 30080, frontend.TCP), key("0.0.0.0", 30081, frontend.TCP)
	services := p.Services()
	tx := &frontendtx.Transaction{}
	tx.Upsert(service(mine))
	tx.Upsert(service(other))
	res, err := services.Apply(t.Context(), tx)
	if err != nil || len(res.Refused) != 1 || res.Refused[0].Key != mine ||
		!strings.Contains(res.Refused[0].Err.Error(), "host port of endpoint a/eth0, pod shop/a") {
		t.Fatalf("refused %+v, %v", res.Refused, err)
	}
	if keys, err := services.Keys(); err != nil || !slices.Equal(keys, []frontend.Key{other}) {
		t.Errorf("frontends of services are %v, %v, want the service's", keys, err)
	}
	if k.have[mine].Kind != frontend.HostPort || k.have[other] == nil || k.whole != 1 {
		t.Errorf("the kernel has %v", k.have)
	}
	tx = &frontendtx.Transaction{}
	tx.Remove(mine)
	if _, err := services.Apply(t.Context(), tx); err != nil || k.have[mine] == nil {
		t.Errorf("a service has removed a host port: %v, %v", k.have, err)
	}
	select {
	case <-p.Freed():
		t.Error("Freed fired for a port that an endpoint has")
	default:
	}
	// The service no longer wants the port.
	if err := p.Release(s.Owner); err != nil {
		t.Fatal(err)
	}
	select {
	case <-p.Freed():
		t.Error("Freed fired for a port that no service wants")
	default:
	}
}

func TestServiceHearsOfAPortThatIsFreed(t *testing.T) {
	p, k, _ := newPorts()
	s := spec("a", 2, "", 30080, workload.TCP)
	create(t, p, s)
	tx := &frontendtx.Transaction{}
	tx.Upsert(service(key("0.0.0.0", 30080, frontend.TCP)))
	if res, err := p.Services().Apply(t.Context(), tx); err != nil || len(res.Refused) != 1 {
		t.Fatal(res, err)
	}
	if err := p.Release(s.Owner); err != nil {
		t.Fatal(err)
	}
	select {
	case <-p.Freed():
	default:
		t.Error("Freed did not fire for the released port")
	}
	if res, err := p.Services().Apply(t.Context(), tx); err != nil || len(res.Refused) > 0 || len(k.have) != 1 {
		t.Errorf("the service gets %+v, %v", res, err)
	}
}

// TestRestoredPortsAreThoseOfBefore: a restart restores the host ports, although the kernel already has them, without a
// name.
func TestRestoredPortsAreThoseOfBefore(t *testing.T) {
	p, k, _ := newPorts()
	k.have[key("0.0.0.0", 80, frontend.TCP)] = &frontend.Frontend{Key: key("0.0.0.0", 80, frontend.TCP)}
	first, second := spec("a", 2, "", 80, workload.TCP), spec("b", 3, "", 80, workload.TCP)
	gone := spec("c", 4, "198.51.100.1", 80, workload.TCP) // the node used to have the address
	p.Restore([]endpoint.Record{
		{Spec: second, Phase: endpoint.PhaseCreating},
		{Spec: first, Phase: endpoint.PhaseReady},
		{Spec: gone, Phase: endpoint.PhaseReady},
	})
	p.LeadAll(t.Context())
	f := k.have[key("0.0.0.0", 80, frontend.TCP)]
	if f.Service != "shop/a" || f.Inside.Backends[0].String() != "10.0.0.2:8080" || len(k.have) != 3 {
		t.Errorf("the kernel has %+v, %v", f, k.keys())
	}
	if w := p.Warnings(); len(w) != 2 || !strings.HasPrefix(w[0], "endpoint b/eth0: port 0.0.0.0:80/tcp") {
		t.Errorf("warnings %q, want one for each family", w)
	}
	if err := p.Release(second.Owner); err != nil || len(k.have) != 3 || len(p.Warnings()) > 0 {
		t.Errorf("after the deletion of the second: %v, %v, %q", err, k.keys(), p.Warnings())
	}
}

func TestPortsWithoutRoomAreTriedAgain(t *testing.T) {
	p, k, _ := newPorts()
	k.full[key("::", 80, frontend.TCP)] = true
	s := spec("a", 2, "", 80, workload.TCP)
	p.Restore([]endpoint.Record{{Spec: s, Phase: endpoint.PhaseReady}})
	err := p.Lead(t.Context(), s.Owner)
	if !errors.Is(err, endpoint.ErrFull) || !strings.Contains(err.Error(), "[::]:80/tcp") {
		t.Fatalf("lead: %v", err)
	}
	if w := p.Warnings(); len(w) != 1 || !strings.Contains(w[0], "sl_fe4") {
		t.Errorf("warnings %q", w)
	}
	delete(k.full, key("::", 80, frontend.TCP))
	p.leadAgain(t.Context())
	if w := p.Warnings(); len(w) > 0 || len(k.have) != 2 {
		t.Errorf("with capacity: %q, %v", w, k.keys())
	}
}

// TestSocketsOfARemovedPortAreEnded: a connected UDP socket would send to an address that another container may soon
// have.
func TestSocketsOfARemovedPortAreEnded(t *testing.T) {
	p, k, e := newPorts()
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { _ = p.Run(ctx) })
	defer running.Wait()
	defer cancel()
	ended := func(what string) {
		t.Helper()
		select {
		case <-e:
		case <-time.After(10 * time.Second):
			t.Fatalf("sockets were not ended %s", what)
		}
	}
	ended("at the start")
	s := spec("a", 2, "", 53, workload.UDP)
	create(t, p, s)
	if err := p.Release(s.Owner); err != nil {
		t.Fatal(err)
	}
	ended("after the removal")
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.graces != 2 {
		t.Errorf("%d grace periods, want 2", k.graces)
	}
}

// TestHostPortsOfOneNamespaceLeaveRoomForOthers: a namespace claims ports until it is refused. Pods of another
// namespace, pods of the system and containers without a namespace still get ports.
func TestHostPortsOfOneNamespaceLeaveRoomForOthers(t *testing.T) {
	p, _, _ := newPorts()
	p.o.Room = 160
	port := uint16(1000)
	claim := func(namespace string) (endpoint.Spec, error) {
		port++
		s := spec("pod", 10, "", port, workload.TCP) // one frontend per family
		s.Owner.ContainerID += fmt.Sprint(port)
		s.Pod.Namespace, s.Pod.Name = namespace, "pod"
		if namespace == "" {
			s.Pod.Name = ""
		}
		return s, p.Claim(s)
	}
	fill := func(namespace string) (list []endpoint.Spec) {
		for {
			s, err := claim(namespace)
			if err == nil {
				list = append(list, s)
				continue
			}
			if !errors.Is(err, endpoint.ErrFull) || !strings.Contains(err.Error(), fmt.Sprintf("%d on this node", 2*len(list))) {
				t.Fatalf("claim %d of namespace %q: %v", len(list)+1, namespace, err)
			}
			return list
		}
	}
	flood := fill("flood")
	if n := 2 * len(flood); n < 160/16 || n > 160/2 {
		t.Errorf("flood has %d of 160", n)
	}
	if n := 2 * len(fill("shop")); n < 160/16 {
		t.Errorf("shop has %d of 160", n)
	}
	if n := 2 * len(fill("kube-system")); n < 160/10 {
		t.Errorf("kube-system has %d of 160", n)
	}
	for _, s := range flood {
		if err := p.Release(s.Owner); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := claim(""); err != nil {
		t.Errorf("a container after flood has left: %v", err)
	}
	if again := fill("flood"); len(again) == 0 {
		t.Error("flood gets no port after it has released all")
	}
}

// TestHostPortsOfNamespacesLeaveALabelledTenantItsPart: 500 namespaces of one user without the tenant label, and two
// namespaces of one tenant, claim ports until each is refused. Another tenant still gets as many ports as it would get
// alone on the node.
func TestHostPortsOfNamespacesLeaveALabelledTenantItsPart(t *testing.T) {
	const room = 320
	fill := func(p *Ports, namespace string) (n int) {
		for ; ; n++ {
			s := spec("pod", 10, "", uint16(1000+len(p.claims)), workload.TCP) //nolint:gosec // small
			s.Owner.ContainerID += fmt.Sprint(len(p.claims))
			s.Pod.Namespace, s.Pod.Name = namespace, "pod"
			s.Addrs = s.Addrs[:1]
			if err := p.Claim(s); err != nil {
				if !errors.Is(err, endpoint.ErrFull) {
					t.Fatal(err)
				}
				return n
			}
		}
	}
	alone, _, _ := newPorts()
	alone.o.Room = room
	alone.SetTenant("shop", shares.Labelled("b"))
	want := fill(alone, "shop")
	p, _, _ := newPorts()
	p.o.Room = room
	p.SetTenant("shop", shares.Labelled("b"))
	p.SetTenant("one", shares.Labelled("a"))
	p.SetTenant("two", shares.Labelled("a"))
	many := 0
	for i := range 500 {
		many += fill(p, fmt.Sprint("n", i))
	}
	if many > room/2 {
		t.Errorf("500 namespaces without the label have %d of %d host ports", many, room)
	}
	if got := fill(p, "shop"); got != want || got < room/4 {
		t.Errorf("next to 500 namespaces, a labelled tenant has %d host ports, want %d as alone", got, want)
	}
	if one, two := fill(p, "one"), fill(p, "two"); one < room/32 || two > 0 {
		t.Errorf("two namespaces of one tenant have %d and %d of %d", one, two, room)
	}
	for i := range 300 { // the cache of tenants of removed namespaces is limited
		p.SetTenant(fmt.Sprint("gone", i), shares.Labelled("a"))
	}
	if n := len(p.tenants); n > len(p.counts)+keptTenants+1 {
		t.Errorf("%d tenants are kept for %d namespaces", n, len(p.counts))
	}
}

// TestServicesAndHostPortsFitTogether: the capacity for services and the needs of all host ports together do not exceed
// the kernel's capacity, so that host ports never use the shares of Services.
func TestServicesAndHostPortsFitTogether(t *testing.T) {
	fronts := 0
	for _, f := range frontendsOf(spec("a", 2, "", 80, workload.TCP)) {
		for _, l := range []*frontend.List{f.Inside, f.Outside} { // each needs a front
			if l != nil {
				fronts++
			}
		}
	}
	each := fronts / len(frontendsOf(spec("a", 2, "", 80, workload.TCP)))
	for _, n := range []int{0, 1, 31, 32, 33, 1000, 58981} {
		c := frontend.Capacity{Frontends: n, Backends: 2 * n, Members: 4 * n, BackendsPerList: n}
		services, ports := Divide(c)
		if services.Frontends+each*ports > n || services.Backends+ports > 2*n || services.Members+ports > 4*n {
			t.Errorf("%+v: services have %+v and there are %d host ports of %d fronts", c, services, ports, each)
		}
		if n >= 32 && ports == 0 || services.BackendsPerList != n {
			t.Errorf("%+v: services have %+v and there are %d host ports", c, services, ports)
		}
	}
}

// TestPortsChangeHandsInEitherOrder: a pod claims a port of another pod, is refused, and claims it again when the other
// pod releases it. A release only affects the claim of its own pod, even if it is late or repeated. UDP sockets and
// flows to the former pod are ended before the next pod has the port.
func TestPortsChangeHandsInEitherOrder(t *testing.T) {
	p, k, e := newPorts()
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { _ = p.Run(ctx) })
	defer running.Wait()
	defer cancel()
	ended := func(what string) {
		t.Helper()
		select {
		case <-e:
		case <-time.After(10 * time.Second):
			t.Fatalf("sockets were not ended %s", what)
		}
	}
	ended("at the start")
	leads := func(what, want string) {
		t.Helper()
		k.mu.Lock()
		defer k.mu.Unlock()
		f := k.have[key("0.0.0.0", 53, frontend.UDP)]
		switch {
		case f == nil && want != "":
			t.Errorf("%s: the port has no frontend, want %s", what, want)
		case f != nil && (want == "" || f.Inside.Backends[0].Addr().String() != want):
			t.Errorf("%s: the port has backends %v, want %q", what, f.Inside.Backends, want)
		}
	}
	release := func(s endpoint.Spec) {
		t.Helper()
		if err := p.Release(s.Owner); err != nil {
			t.Fatal(err)
		}
	}
	first, second := spec("a", 2, "", 53, workload.UDP), spec("b", 3, "", 53, workload.UDP)
	addr := func(s endpoint.Spec) string { return s.Addrs[0].String() }
	create(t, p, first)
	if err := p.Claim(second); !errors.Is(err, endpoint.ErrHostPort) {
		t.Fatalf("a second claim: %v", err)
	}
	leads("after the claim that was refused", addr(first))
	release(second) // DEL of the refused pod
	leads("after the release of the pod that was refused", addr(first))
	release(first)
	ended("after the first pod")
	create(t, p, second)
	leads("of the second pod", addr(second))
	release(first) // DEL is repeated
	leads("after a second release of the first pod", addr(second))
	create(t, p, second) // ADD is repeated
	leads("after a second ADD", addr(second))
	release(second)
	ended("after the second pod")
	leads("after both", "")
	create(t, p, first)
	leads("of the first pod again", addr(first))
}
