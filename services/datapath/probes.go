// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"log/slog"
	"time"

	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns"
	"github.com/sluice-net/sluice/services/datapath/internal/node/probe"
)

// newProber prepares the probes of other nodes from the node's network namespace;
// nil: there are none. It opens no port before it has peers.
func newProber(cfg Config, home *netns.Namespace, l *slog.Logger, silence func() (time.Duration, bool)) *probe.Prober {
	if !cfg.Routing.probes() || cfg.ValidateOnly {
		return nil
	}
	return probe.New(probe.Options{
		Port: cfg.Routing.ProbePort, Silence: silence, Log: l.With("source", "probe"),
		Listen: func(f probe.Family) (conn probe.Conn, err error) {
			err = home.Do(func() (err error) {
				conn, err = probe.Listen(f, cfg.Routing.ProbePort)
				return err
			})
			return conn, err
		},
	})
}
