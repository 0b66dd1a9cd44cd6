// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package service is the part of the datapath about Services and host ports: it follows sluice-loadbalancer, keeps the
// kernel's frontends equal to its frontends and the endpoints' host ports, attaches the socket load balancer, and frees
// IDs that Services no longer use.
package service

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/work"
	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns"
	"github.com/sluice-net/sluice/services/datapath/internal/service/frontendstream"
	"github.com/sluice-net/sluice/services/datapath/internal/service/hostport"
	"github.com/sluice-net/sluice/services/datapath/internal/service/servicemap"
	"github.com/sluice-net/sluice/services/datapath/internal/service/socketend"
	"github.com/sluice-net/sluice/services/datapath/internal/service/socketlist"
	"github.com/sluice-net/sluice/services/datapath/internal/service/sockets"
	"github.com/sluice-net/sluice/services/datapath/internal/service/translation"
)

// Endpoints are the endpoints of the node.
type Endpoints interface {
	List() []endpoint.Endpoint
	Get(o workload.Owner) (endpoint.Endpoint, error)
}

// Links open the network namespaces of endpoints.
type Links interface {
	OpenNamespace(path string) (endpoint.Namespace, error)
}

// Options are the options and dependencies of Services.
type Options struct {
	// Name is the name of this subscriber in the status of sluice-loadbalancer.
	Name string

	Maps         *servicemap.Maps
	Slots        *endpointmap.Maps
	Connections  *conntrack.Connections
	Translations *translation.Maps
	Namespaces   *sockets.Namespaces
	Sockets      *sockets.Sockets
	SocketList   *socketlist.List
	// Frontends applies transactions to Maps.
	Frontends hostport.Kernel
	// Timeouts of tracked connections.
	Timeouts conntrack.Timeouts

	Service frontendstream.Service
	Memory  frontendstream.Memory // nil: the name of the state is not kept

	// Home is the node's network namespace.
	Home      *netns.Namespace
	Endpoints Endpoints
	Links     Links
	// Closed are UDP ports of the node that endpoints may not use.
	Closed []uint16
	Log    *slog.Logger
}

// Services manages the frontends of one node.
type Services struct {
	Frontends *frontendstream.Follower
	HostPorts *hostport.Ports

	o        Options
	ender    *socketend.Ender
	attached chan struct{} // closed when the socket programs are attached
}

// Open returns the Services. The kernel's frontends do not change before the tasks run.
func Open(o Options) *Services {
	s := &Services{o: o, attached: make(chan struct{})}
	s.ender = socketend.New(socketend.Options{Sockets: o.SocketList, Each: s.eachNamespace, Keeps: o.Maps.Keeps})
	var capacity frontend.Capacity
	hostPorts := 0 // frontends reserved for host ports
	if c, ok := o.Maps.Capacity(); ok {
		capacity, hostPorts = hostport.Divide(c)
	}
	s.HostPorts = hostport.New(hostport.Options{
		Kernel: o.Frontends, Ender: flows{s}, Own: s.isOwn, Closed: o.Closed, Room: hostPorts, Log: o.Log,
	})
	s.Frontends = frontendstream.New(frontendstream.Options{
		Name: o.Name, Service: o.Service, Kernel: s.HostPorts.Services(), Ender: flows{s}, Memory: o.Memory,
		Freed: s.HostPorts.Freed(), Room: o.Maps.Freed(), Capacity: capacity, Log: o.Log,
	})
	return s
}

// Tasks returns the background work.
func (s *Services) Tasks() []work.Task {
	tasks := []work.Task{
		{Name: "frontends", Run: s.Frontends.Run},
		{Name: "service numbers", Run: s.collect},
		{Name: "host ports", Run: s.HostPorts.Run},
	}
	if s.o.Sockets != nil {
		tasks = append(tasks, work.Task{Name: "sockets", Run: s.attachSockets})
	}
	return tasks
}

// Awaits returns what must happen before readiness: the frontends and the socket programs, which pods' connections
// need.
func (s *Services) Awaits() []work.Await {
	return []work.Await{
		{What: "the services of sluice-loadbalancer", Done: s.Frontends.Synced()},
		{What: "the socket programs", Done: s.attached},
	}
}

// Warnings lists host ports that are not in effect.
func (s *Services) Warnings() []string { return s.HostPorts.Warnings() }

// Attached is closed when the socket programs translate for the node and its containers.
func (s *Services) Attached() <-chan struct{} { return s.attached }

// Connections counts the tracked connections of each backend.
func (s *Services) Connections(ctx context.Context) ([]conntrack.Count, error) {
	counts, err := s.o.Connections.CountByResponder(ctx, s.o.Timeouts, func(r conntrack.Responder) bool {
		switch frontend.Protocol(r.Protocol) {
		case frontend.TCP, frontend.UDP, frontend.SCTP:
			return s.o.Maps.HasBackend(r.AddrPort)
		}
		return false // the ID of an ICMP echo is not a port
	})
	if err != nil {
		return nil, fmt.Errorf("count the connections of backends: %w", err)
	}
	return counts, nil
}

// FrontendStatus describes the stream of sluice-loadbalancer.
func (s *Services) FrontendStatus() frontendstream.Status { return s.Frontends.Status() }

// Ended returns how many connected sockets were ended because their backend was removed.
func (s *Services) Ended() uint64 { return s.ender.Ended() }

// isOwn reports whether an address belongs to the node, so that host ports can use it.
func (s *Services) isOwn(a netip.Addr) (bool, error) {
	own, err := s.o.Slots.HostAddrs()
	return slices.Contains(own, a), err
}

// flows ends UDP traffic to removed backends: it ends connected sockets, and removes per-packet translations, so that
// the next packet selects another backend of the Service.
type flows struct{ s *Services }

// End implements frontendstream.Ender and hostport.Ender.
func (f flows) End(ctx context.Context) error {
	_, err := f.s.o.Translations.Release(ctx, f.s.o.Maps.Keeps)
	return errors.Join(err, f.s.ender.End(ctx))
}

// interval is the time between two collections of IDs of removed frontends and backends. soonest is the minimum time
// before a collection that translations or IDs need early.
const (
	interval = 30 * time.Second
	soonest  = 5 * time.Second
)

// collect removes translations whose connections have ended, and frees IDs of removed frontends and backends: at
// intervals, and early if ports of the node, translations or IDs run out. A process that starts does not wait either if
// translations run out.
func (s *Services) collect(ctx context.Context) error {
	var last time.Time
	translations := func() error {
		last = time.Now()
		_, err := s.o.Translations.Collect(conntrack.MonotonicSeconds(), s.o.Connections, s.o.Timeouts)
		return err
	}
	if s.o.Translations.Pressed() {
		if err := translations(); err != nil && ctx.Err() == nil {
			s.o.Log.Error("garbage collection of translations failed; retrying", log.Err(err))
		}
	}
	return work.Every(ctx, time.Second, s.o.Log, "free numbers of services", func() error {
		since := time.Since(last)
		if since < soonest || since < interval && !s.o.Translations.Pressed() && !s.o.Maps.Short() {
			return nil
		}
		if err := translations(); err != nil {
			return err
		}
		return s.FreeNumbers(ctx)
	})
}

// FreeNumbers frees the IDs of removed frontends and backends that are no longer referenced.
func (s *Services) FreeNumbers(ctx context.Context) error {
	_, err := s.o.Maps.Collect(ctx, s)
	return err
}

// Named implements servicemap.Users. References to IDs of frontends and backends are held by connected UDP sockets, by
// per-packet translations, and by connections, whose replies need the address of the frontend.
func (s *Services) Named(ctx context.Context) (servicemap.Numbers, error) {
	named, err := s.ender.Named(ctx)
	if err != nil {
		return named, err
	}
	err = s.o.Translations.Each(func(t translation.Translation) error {
		named.Name(t.Front, t.Backend.Addr().Is6(), t.Number)
		return ctx.Err()
	})
	return named, errors.Join(err, s.o.Connections.Each(func(cs []conntrack.Connection) error {
		for i := range cs {
			named.Fronts[cs[i].Value.Front] = struct{}{}
		}
		return ctx.Err()
	}))
}
