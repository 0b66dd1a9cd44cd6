// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"github.com/sluice-net/sluice/kit/work"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpoints"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel"
	nodes "github.com/sluice-net/sluice/services/datapath/internal/node"
	"github.com/sluice-net/sluice/services/datapath/internal/observation"
	"github.com/sluice-net/sluice/services/datapath/internal/policy"
	"github.com/sluice-net/sluice/services/datapath/internal/proxy"
	"github.com/sluice-net/sluice/services/datapath/internal/server"
	services "github.com/sluice-net/sluice/services/datapath/internal/service"
)

// subject is one subject of the process.
type subject interface {
	server.Subject
	// Tasks returns the background work.
	Tasks() []work.Task
	// Awaits returns the events that must happen before the process is ready.
	Awaits() []work.Await
}

// The compiler checks what each subject contributes to status, metrics and calls.
var (
	_ interface {
		server.Endpoints
	} = (*endpoints.Endpoints)(nil)
	_ interface {
		server.Policy
	} = (*policy.Policy)(nil)
	_ interface {
		server.Frontends
		server.Backends
	} = (*services.Services)(nil)
	_ interface {
		server.Proxy
	} = (*proxy.Proxy)(nil)
	_ interface {
		server.Cluster
	} = (*nodes.Node)(nil)
	_ interface {
		server.Packets
		server.Events
		server.Ends
		server.Tracked
		server.Explainer
	} = (*observation.Observation)(nil)
	_ interface {
		server.Maps
		server.MapUsages
		server.Bounds
		server.Budgets
		server.ConnectionCounts
		server.Services
	} = kernel.Subject{}
)
