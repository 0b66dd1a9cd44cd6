// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package service is the subject of Services and host ports in the datapath: it follows
// sluice-loadbalancer, keeps the kernel's frontends as that and the endpoints say, attaches
// the socket load balancer, and gives back what Services no longer use.
package service

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"time"

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

// Endpoints are those of the node.
type Endpoints interface {
	List() []endpoint.Endpoint
	Get(o workload.Owner) (endpoint.Endpoint, error)
}

// Links open the network namespaces of endpoints.
type Links interface {
	OpenNamespace(path string) (endpoint.Namespace, error)
}

// Options are what Services need.
type Options struct {
	// Name of this subscriber, for the status of sluice-loadbalancer.
	Name string

	Maps         *servicemap.Maps
	Slots        *endpointmap.Maps
	Connections  *conntrack.Connections
	Translations *translation.Maps
	Namespaces   *sockets.Namespaces
	Sockets      *sockets.Sockets
	SocketList   *socketlist.List
	// Frontends apply transactions; they write Maps.
	Frontends hostport.Kernel
	// Timeouts of connections.
	Timeouts conntrack.Timeouts

	Service frontendstream.Service
	Memory  frontendstream.Memory // nil: nothing keeps the name of the state

	// Home is the node's network namespace.
	Home      *netns.Namespace
	Endpoints Endpoints
	Links     Links
	// Closed are UDP ports of the node that no endpoint may have.
	Closed []uint16
	Log    *slog.Logger
}

// Services are the frontends of one node.
type Services struct {
	Frontends *frontendstream.Follower
	HostPorts *hostport.Ports

	o        Options
	ender    *socketend.Ender
	attached chan struct{} // closed when the programs of sockets are attached
}

// Open prepares them. The kernel's frontends stay as they are until the tasks run.
func Open(o Options) *Services {
	s := &Services{o: o, attached: make(chan struct{})}
	s.ender = socketend.New(socketend.Options{Sockets: o.SocketList, Each: s.eachNamespace, Keeps: o.Maps.Keeps})
	var capacity frontend.Capacity
	hostPorts := 0 // frontends for host ports, which services do not get
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

// Tasks are the background work.
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

// Awaits are the frontends and, for connections of pods, the programs of sockets.
func (s *Services) Awaits() []work.Await {
	return []work.Await{
		{What: "the services of sluice-loadbalancer", Done: s.Frontends.Synced()},
		{What: "the programs of sockets", Done: s.attached},
	}
}

// Warnings name host ports that lead nowhere.
func (s *Services) Warnings() []string { return s.HostPorts.Warnings() }

// Attached is closed when the sockets of the node and its containers reach Services.
func (s *Services) Attached() <-chan struct{} { return s.attached }

// Connections counts the tracked connections of each backend.
func (s *Services) Connections(ctx context.Context) ([]conntrack.Count, error) {
	counts, err := s.o.Connections.CountByResponder(ctx, s.o.Timeouts, func(r conntrack.Responder) bool {
		switch frontend.Protocol(r.Protocol) {
		case frontend.TCP, frontend.UDP, frontend.SCTP:
			return s.o.Maps.HasBackend(r.AddrPort)
		}
		return false // the identifier of an echo is no port
	})
	if err != nil {
		return nil, fmt.Errorf("count the connections of backends: %w", err)
	}
	return counts, nil
}

// Ended is how many connected sockets have been ended because their backend left.
func (s *Services) Ended() uint64 { return s.ender.Ended() }

// isOwn says whether an address is the node's, so that host ports may answer there.
func (s *Services) isOwn(a netip.Addr) (bool, error) {
	own, err := s.o.Slots.HostAddrs()
	return slices.Contains(own, a), err
}

// flows end what still sends UDP to a removed backend: connected sockets, and flows by packets,
// which choose another backend of their Service.
type flows struct{ s *Services }

// End implements frontendstream.Ender and hostport.Ender.
func (f flows) End(ctx context.Context) error {
	_, err := f.s.o.Translations.Release(ctx, f.s.o.Maps.Keeps)
	return errors.Join(err, f.s.ender.End(ctx))
}

// interval is how often numbers of removed frontends and backends are freed, and portInterval
// how often the ports of the node are looked at.
const (
	interval     = 30 * time.Second
	portInterval = 5 * time.Second
)

// collect removes translations whose connections are gone, and frees the
// numbers of removed frontends and backends, at intervals, and early where ports of the
// node or those numbers run out.
func (s *Services) collect(ctx context.Context) error {
	var due time.Time
	return work.Every(ctx, portInterval, s.o.Log, "free numbers of services", func() error {
		if time.Now().Before(due) && !s.o.Translations.Pressed() && !s.o.Maps.Short() {
			return nil
		}
		due = time.Now().Add(interval)
		now := conntrack.MonotonicSeconds()
		if _, err := s.o.Translations.Collect(now, s.o.Connections, s.o.Timeouts); err != nil {
			return err
		}
		return s.FreeNumbers(ctx)
	})
}

// FreeNumbers frees the numbers of removed frontends and backends that nothing names.
func (s *Services) FreeNumbers(ctx context.Context) error {
	_, err := s.o.Maps.Collect(ctx, s)
	return err
}

// Named implements servicemap.Users: all who name numbers of frontends and backends are
// connected UDP sockets, translations of packets, and connections, whose answers come from
// the frontend.
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
