// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/sluice-net/sluice/devnode"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	lbv1 "github.com/sluice-net/sluice/proto/gen/sluice/loadbalancer/v1"
)

// serviceManager is the manager name of the benchmark's services.
const serviceManager = "bench"

// crowdedServices is a separate node with many services.
type crowdedServices struct {
	bench    *bench
	node     *devnode.Node
	lb       lbv1.LoadBalancerServiceClient
	datapath datapathv1.DatapathServiceClient
}

// services measures node ports from outside compared with Linux, the time from a call to enforcement, restarts,
// memory, and the cost of connecting through a service.
func (b *bench) services(ctx context.Context) (err error) {
	if err := b.nodePorts(ctx); err != nil {
		return err
	}
	var made undo
	defer func() { err = errors.Join(err, made.all()) }()
	up := func(suffix string, without bool) (*crowdedServices, error) {
		node, err := devnode.Up(ctx, devnode.Options{
			Instance: b.prefix + suffix, BinDir: b.binDir, NoLoadBalancer: without,
		})
		if err != nil {
			return nil, err
		}
		made.add(func() error { return node.Down(context.WithoutCancel(ctx)) })
		return b.servicesOf(node, without)
	}
	off, err := up("v", true)
	if err != nil {
		return err
	}
	memory, filling := &serviceMemory{}, &fillingTimes{}
	if err := memory.look(ctx, "loadBalancing.mode off", off); err != nil {
		return err
	}
	var s *crowdedServices
	for i, backends := range []int{2, 10} {
		if s, err = up([]string{"w", "x"}[i], false); err != nil {
			return err
		}
		if i == 0 {
			if err := memory.look(ctx, "on, without services", s); err != nil {
				return err
			}
		}
		if err := s.enforcements(ctx, backends, filling); err != nil {
			return err
		}
		what := fmt.Sprintf("%d services of %d backends", b.sizes.services, backends)
		if err := memory.look(ctx, what, s); err != nil {
			return err
		}
		if err := memory.later(ctx, s); err != nil {
			return err
		}
	}
	large, err := up("y", false)
	if err != nil {
		return err
	}
	if err := large.manyBackends(ctx, filling, memory); err != nil {
		return err
	}
	filling.print(b)
	if err := s.restarts(ctx); err != nil {
		return err
	}
	memory.print(b)
	return s.connections(ctx)
}

// servicesOf connects to the services of a node.
func (b *bench) servicesOf(node *devnode.Node, without bool) (*crowdedServices, error) {
	s := &crowdedServices{bench: b, node: node}
	conn, err := b.dialTo(node, devnode.Datapath)
	if err != nil {
		return nil, err
	}
	s.datapath = datapathv1.NewDatapathServiceClient(conn)
	if without {
		return s, nil
	}
	if conn, err = b.dialTo(node, devnode.LoadBalancer); err != nil {
		return nil, err
	}
	s.lb = lbv1.NewLoadBalancerServiceClient(conn)
	return s, nil
}

// clusterIP returns the address of the i-th service.
func clusterIP(i int) netip.Addr {
	return netip.AddrFrom4([4]byte{10, 100 + byte(i>>14), byte(i>>7) & 127, 1 + byte(i&127)})
}

// clusterPort is the port of every service.
const clusterPort = 80

// backendsOf returns the backends of a service. Each version has a different last backend.
type backendsOf func(service, version int) []netip.AddrPort

// ownBackends gives each service n separate backends without listeners.
func ownBackends(n int) backendsOf {
	return func(service, version int) []netip.AddrPort {
		all := make([]netip.AddrPort, n)
		for i := range all {
			number := service*n + i
			port := uint16(8080)
			if i == n-1 {
				port += uint16(version)
			}
			address := netip.AddrFrom4([4]byte{10, 200 + byte(number>>16), byte(number >> 8), byte(number)})
			all[i] = netip.AddrPortFrom(address, port)
		}
		return all
	}
}

// serviceText returns the i-th Service as JSON.
func serviceText(i int) string {
	return fmt.Sprintf(`{"apiVersion":"v1","kind":"Service","metadata":{"name":"s%d","namespace":"bench"},"spec":{`+
		`"clusterIP":%q,"ports":[{"name":"p","protocol":"TCP","port":%d}]}}`, i, clusterIP(i), clusterPort)
}

// sliceText returns an EndpointSlice as JSON. All endpoints of a slice have the port of the first backend, so a
// backend with another port needs a separate slice. In the benchmark, only the last backend may have another port.
func sliceText(i, part int, backends []netip.AddrPort) string {
	var endpoints []string
	for _, b := range backends {
		endpoints = append(endpoints, fmt.Sprintf(`{"addresses":[%q],"conditions":{"ready":true}}`, b.Addr()))
	}
	return fmt.Sprintf(`{"apiVersion":"discovery.k8s.io/v1","kind":"EndpointSlice","metadata":{"name":"s%d-%d",`+
		`"namespace":"bench","labels":{"kubernetes.io/service-name":"s%d"}},"addressType":"IPv4",`+
		`"ports":[{"name":"p","protocol":"TCP","port":%d}],"endpoints":[%s]}`, i, part, i, backends[0].Port(),
		strings.Join(endpoints, ","))
}

// texts returns the objects of a service: two slices, because the last backend may have another port.
func texts(i, version int, of backendsOf) []string {
	backends := of(i, version)
	last := len(backends) - 1
	return []string{serviceText(i), sliceText(i, 0, backends[:last]), sliceText(i, 1, backends[last:])}
}

// upsert applies objects in as few calls as possible, and returns the last revision.
func (s *crowdedServices) upsert(ctx context.Context, objects []string) (revision uint64, err error) {
	const most = 3 << 20
	const begin, end = `{"apiVersion":"v1","kind":"List","items":[`, "]}"
	for len(objects) > 0 {
		n, size := 0, len(begin)+len(end)
		for n < len(objects) && size+len(objects[n])+1 < most {
			size += len(objects[n]) + 1
			n++
		}
		r, err := s.lb.UpsertServices(ctx, &lbv1.UpsertServicesRequest{
			Manifests: []byte(begin + strings.Join(objects[:n], ",") + end), Manager: serviceManager,
		})
		if err != nil {
			return 0, err
		}
		revision, objects = r.GetRevision(), objects[n:]
	}
	return revision, nil
}

// fill makes a number of services.
func (s *crowdedServices) fill(ctx context.Context, services int, of backendsOf) (revision uint64, err error) {
	var objects []string
	for i := range services {
		objects = append(objects, texts(i, 0, of)...)
	}
	return s.upsert(ctx, objects)
}

// empty removes all services and waits until the kernel has removed them.
func (s *crowdedServices) empty(ctx context.Context, services int) error {
	var keys []*lbv1.ObjectKey
	for i := range services {
		keys = append(keys, &lbv1.ObjectKey{Kind: "Service", Namespace: "bench", Name: fmt.Sprintf("s%d", i)})
		for part := range 2 {
			name := fmt.Sprintf("s%d-%d", i, part)
			keys = append(keys, &lbv1.ObjectKey{Kind: "EndpointSlice", Namespace: "bench", Name: name})
		}
	}
	for len(keys) > 0 {
		n := min(len(keys), 16384)
		r, err := s.lb.DeleteServices(ctx, &lbv1.DeleteServicesRequest{Keys: keys[:n], Manager: serviceManager})
		if err != nil {
			return err
		}
		if keys = keys[n:]; len(keys) == 0 {
			return s.wait(ctx, r.GetRevision(), true)
		}
	}
	return nil
}

// wait waits until a connected datapath enforces a revision, or until it has ended the sockets of removed backends.
func (s *crowdedServices) wait(ctx context.Context, revision uint64, ended bool) error {
	for {
		r, err := s.lb.WaitForRevision(ctx, &lbv1.WaitForRevisionRequest{Revision: revision, Ended: ended})
		if err != nil || len(r.GetEnforcing()) > 0 {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(time.Millisecond): // the datapath is not connected
		}
	}
}

// fillingTimes are table rows with the times from a call to enforcement.
type fillingTimes struct{ fills, changes []string }

// enforcements measures the time from a call to its enforcement, for several numbers of services, and for one change
// among many services. The number of a removed front is in quarantine for a while, which limits how often one node
// can be filled in a short time.
func (s *crowdedServices) enforcements(ctx context.Context, backends int, to *fillingTimes) error {
	b, of, many := s.bench, ownBackends(backends), s.bench.sizes.services
	for _, services := range []int{1, many / 10, many} {
		times := min(b.sizes.rounds, 10)
		if services == many {
			times = min(times, 3)
		}
		var stored, enforced samples
		for range times {
			if err := s.fillTimed(ctx, services, of, &stored, &enforced); err != nil {
				return err
			}
			if err := s.empty(ctx, services); err != nil {
				return err
			}
		}
		to.filled(services, backends, stored, enforced)
		if backends > 2 || services == 1 {
			continue
		}
		limit := 300 * time.Millisecond
		if services < many {
			limit = 35 * time.Millisecond
		}
		b.wantTime(fmt.Sprintf("%d services of 2 backends enforced, p50", services), limit, enforced.quantile(0.5))
	}
	revision, err := s.fill(ctx, many, of)
	if err == nil {
		err = s.wait(ctx, revision, true)
	}
	if err != nil {
		return err
	}
	row, p50, err := s.oneChange(ctx, of)
	to.changes = append(to.changes, fmt.Sprintf("| %d | %d | %s", many, backends, row))
	b.wantTime(fmt.Sprintf("one change among %d services of %d backends enforced, p50", many, backends),
		1500*time.Microsecond, p50)
	return err
}

// manyBackends fills a node with as many backends as one tenant can have: 250,000, without the reserve.
func (s *crowdedServices) manyBackends(ctx context.Context, to *fillingTimes, memory *serviceMemory) error {
	const backends = 50
	b, of, services := s.bench, ownBackends(backends), s.bench.sizes.services/2
	var stored, enforced samples
	if err := s.fillTimed(ctx, services, of, &stored, &enforced); err != nil {
		return err
	}
	to.filled(services, backends, stored, enforced)
	b.wantTime(fmt.Sprintf("%d services of %d backends enforced", services, backends), 3*time.Second, enforced.worst())
	row, p50, err := s.oneChange(ctx, of)
	if err != nil {
		return err
	}
	to.changes = append(to.changes, fmt.Sprintf("| %d | %d | %s", services, backends, row))
	b.wantTime(fmt.Sprintf("one change among %d services of %d backends enforced, p50", services, backends),
		5*time.Millisecond, p50)
	what := fmt.Sprintf("%d services of %d backends", services, backends)
	before := *memory // the targets are those of the node with fewer backends
	err = memory.look(ctx, what, s)
	if err == nil {
		err = memory.later(ctx, s)
	}
	memory.resident, memory.maps = before.resident, before.maps
	return err
}

func (f *fillingTimes) filled(services, backends int, stored, enforced samples) {
	f.fills = append(f.fills, fmt.Sprintf("| %d | %d | %d | %s | %s | %s |", services, backends, len(enforced),
		milliseconds(stored.quantile(0.5)), milliseconds(enforced.quantile(0.5)), milliseconds(enforced.worst())))
}

func (f *fillingTimes) print(b *bench) {
	fmt.Fprint(b.out, "From the call of UpsertServices until all is stored, and until the kernel enforces it, with "+
		"backends of each service's own:\n\n| services | backends each | times | stored p50 | enforced p50 | worst |\n"+
		"|---|---|---|---|---|---|\n", strings.Join(f.fills, "\n"), "\n\n")
	fmt.Fprint(b.out, "The port of one backend of one service changes; *ended*: no socket sends to the old port:\n\n"+
		"| services | backends each | times | stored p50 | enforced p50 | p99 | worst | ended p50 |\n"+
		"|---|---|---|---|---|---|---|---|\n", strings.Join(f.changes, "\n"), "\n\n")
}

func (s *crowdedServices) fillTimed(ctx context.Context, n int, of backendsOf, stored, enforced *samples) error {
	begin := time.Now()
	revision, err := s.fill(ctx, n, of)
	if err != nil {
		return err
	}
	*stored = append(*stored, time.Since(begin))
	if err := s.wait(ctx, revision, false); err != nil {
		return err
	}
	*enforced = append(*enforced, time.Since(begin))
	return nil
}

// oneChange changes one of many services at a time. It returns a table row, and the median time until enforcement.
func (s *crowdedServices) oneChange(ctx context.Context, of backendsOf) (row string, p50 time.Duration, err error) {
	b := s.bench
	var stored, enforced, ended samples
	for i := range b.sizes.changes {
		backends := of(i, 1)
		begin := time.Now()
		revision, err := s.upsert(ctx, []string{sliceText(i, 1, backends[len(backends)-1:])})
		if err != nil {
			return "", 0, err
		}
		stored = append(stored, time.Since(begin))
		if err := s.wait(ctx, revision, false); err != nil {
			return "", 0, err
		}
		enforced = append(enforced, time.Since(begin))
		if err := s.wait(ctx, revision, true); err != nil {
			return "", 0, err
		}
		ended = append(ended, time.Since(begin))
	}
	return fmt.Sprintf("%d | %s | %s | %s | %s | %s |", len(enforced), milliseconds(stored.quantile(0.5)),
		milliseconds(enforced.quantile(0.5)), milliseconds(enforced.quantile(0.99)), milliseconds(enforced.worst()),
		milliseconds(ended.quantile(0.5))), enforced.quantile(0.5), nil
}

// restarts measures restarts of both processes with the present services, alternating with restarts on a node without
// services.
func (s *crowdedServices) restarts(ctx context.Context) error {
	b := s.bench
	none, err := b.servicesOf(b.node, false)
	if err != nil {
		return err
	}
	fmt.Fprintf(b.out, "Restarts, %d each, alternating with restarts on a node without services: from the start of the "+
		"process until it serves, and until the datapath has acknowledged the services again as enforced and ended; "+
		"processor time until then:\n\n", b.sizes.restarts)
	fmt.Fprintln(b.out, "| process | services | serving p50 | worst | acknowledged p50 | worst | processor time p50 |")
	fmt.Fprintln(b.out, "|---|---|---|---|---|---|---|")
	for _, process := range []string{devnode.LoadBalancer, devnode.Datapath} {
		nodes := []*crowdedServices{none, s}
		var serving, acknowledged, cpu [2]samples
		for range b.sizes.restarts {
			for i, node := range nodes {
				if err := node.restart(ctx, process, &serving[i], &acknowledged[i], &cpu[i]); err != nil {
					return err
				}
			}
		}
		for i, services := range []int{0, b.sizes.services} {
			fmt.Fprintf(b.out, "| sluice-%s | %d | %s | %s | %s | %s | %s |\n", process, services,
				milliseconds(serving[i].quantile(0.5)), milliseconds(serving[i].worst()),
				milliseconds(acknowledged[i].quantile(0.5)), milliseconds(acknowledged[i].worst()),
				milliseconds(cpu[i].quantile(0.5)))
		}
		if process == devnode.LoadBalancer {
			b.wantTime(fmt.Sprintf("restart of sluice-loadbalancer with %d services of 10 backends, p50", b.sizes.services),
				600*time.Millisecond, acknowledged[1].quantile(0.5))
		}
	}
	fmt.Fprintln(b.out)
	return nil
}

// restart stops and starts a process.
func (s *crowdedServices) restart(ctx context.Context, process string, serving, acknowledged, cpu *samples) error {
	status, err := s.lb.GetStatus(ctx, &lbv1.GetStatusRequest{})
	if err != nil {
		return err
	}
	if err := s.node.Stop(ctx, process); err != nil {
		return err
	}
	begin := time.Now()
	if err := s.node.Start(ctx, process); err != nil {
		return err
	}
	*serving = append(*serving, time.Since(begin))
	if err := s.wait(ctx, status.GetRevision(), true); err != nil {
		return err
	}
	*acknowledged = append(*acknowledged, time.Since(begin))
	used, err := serviceCPU(s.node, process)
	*cpu = append(*cpu, used)
	return err
}

// serviceMemory is the memory of nodes with and without services.
type serviceMemory struct {
	rows     []string
	resident float64 // the latest value, of sluice-loadbalancer
	maps     struct {
		count int
		bytes uint64
	}
}

// givenBack is the time after which an idle process has freed the memory of earlier work: see process.GiveBackMemory.
const givenBack = 25 * time.Second

// later measures again after the processes have been idle for a while.
func (m *serviceMemory) later(ctx context.Context, s *crowdedServices) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(givenBack):
	}
	return m.look(ctx, fmt.Sprintf("the same, %v later", givenBack), s)
}

// look measures the memory of a node now.
func (m *serviceMemory) look(ctx context.Context, what string, s *crowdedServices) error {
	lb := "–"
	if s.lb != nil {
		u, err := memoryOf(s.node, devnode.LoadBalancer)
		if err != nil {
			return err
		}
		lb, m.resident = fmt.Sprintf("%.1f / %.1f", u.resident, u.anonymous), u.resident
	}
	datapath, err := memoryOf(s.node, devnode.Datapath)
	if err != nil {
		return err
	}
	status, err := s.datapath.GetStatus(ctx, &datapathv1.GetStatusRequest{})
	if err != nil {
		return err
	}
	m.maps.count, m.maps.bytes = len(status.GetMaps()), 0
	for _, kernelMap := range status.GetMaps() {
		m.maps.bytes += kernelMap.GetBytes()
	}
	m.rows = append(m.rows, fmt.Sprintf("| %s | %s | %.1f / %.1f | %d | %.1f |", what, lb, datapath.resident,
		datapath.anonymous, m.maps.count, float64(m.maps.bytes)/(1<<20)))
	return nil
}

func (m *serviceMemory) print(b *bench) {
	fmt.Fprint(b.out, "Memory in MiB, resident / anonymous, and all maps as the kernel accounts them; with services at "+
		"once after the changes above:\n\n| node | sluice-loadbalancer | sluice-datapath | maps | MiB |\n"+
		"|---|---|---|---|---|\n",
		strings.Join(m.rows, "\n"), "\n\n")
	b.wantMemory(fmt.Sprintf("kernel memory of all maps with %d services of 10 backends", b.sizes.services), 72,
		float64(m.maps.bytes)/(1<<20))
	b.wantCount("maps of a node with services", 60, m.maps.count)
	b.wantMemory(fmt.Sprintf("resident, sluice-loadbalancer with %d services of 10 backends", b.sizes.services), 40,
		m.resident)
}
