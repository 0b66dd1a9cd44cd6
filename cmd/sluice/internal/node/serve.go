// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health/grpc_health_v1"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/kit/health"
	"github.com/sluice-net/sluice/kit/log"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
)

// needed lists the services without which no container with new labels can be connected. The policy service is not
// listed, because the datapath serves only while the policy service does, unless policies are off.
var needed = []string{"identity", "ipam", "datapath"}

// Intervals of the checks, before and after the file is written.
const (
	soon  = 200 * time.Millisecond
	later = 5 * time.Second
	// askAgain is the interval between GetStatus calls, which are expensive for the datapath. After a failed check,
	// the next check calls GetStatus again.
	askAgain = time.Minute
)

// writer keeps the CNI configuration in place.
type writer struct {
	configuration configuration
	services      map[string]grpc.ClientConnInterface
	timeout       time.Duration
	log           *slog.Logger

	written bool
	asked   time.Time             // last answer of the datapath; zero: ask at the next check
	opener  string                // implementation of host ports that was logged last; empty: none yet
	state   atomic.Pointer[error] // result of the last check
}

// serve writes the configuration once all needed services serve, and writes it again if it is removed or changed, until
// ctx ends. It does not remove the file at the end: without the file, the runtime could not delete containers, or would
// use another network.
func serve(ctx context.Context, inv *invocation.Invocation, c configuration, address string) error {
	logger := log.New(inv.ErrOut, log.Level(slog.LevelInfo)).With(log.KeyService, "cni")
	w := &writer{configuration: c, services: map[string]grpc.ClientConnInterface{}, timeout: inv.Timeout, log: logger}
	for _, service := range needed {
		conn, err := inv.Dial(service)
		if err != nil {
			return err
		}
		defer conn.Close()
		w.services[service] = conn
	}
	w.note(errors.New("starting"))
	if address != "off" {
		l, err := health.Listen(address)
		if err != nil {
			return invocation.Usagef("--health-address: %w", err)
		}
		defer health.Serve(l, func() error { return *w.state.Load() }, logger)()
	}
	for {
		w.note(w.check(ctx))
		wait := later
		if !w.written {
			wait = soon
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(wait):
		}
	}
}

// note stores the result of a check, and logs an error that is new.
func (w *writer) note(err error) {
	before := w.state.Swap(&err)
	switch {
	case err == nil || before == nil || *before != nil && (*before).Error() == err.Error():
	case w.written:
		w.log.Error("not ready", log.Err(err))
	default:
		w.log.Info("waiting", log.Err(err))
	}
}

func (w *writer) check(ctx context.Context) error {
	if err := w.serving(ctx); err != nil {
		w.asked = time.Time{}
		return err
	}
	if now := time.Now(); now.Sub(w.asked) >= askAgain {
		if err := w.askDatapath(ctx); err != nil {
			return err
		}
		w.asked = now
	}
	changed, err := w.configuration.write()
	if err != nil {
		return err
	}
	w.written = true
	opener := w.configuration.opener()
	if changed {
		w.log.Info("CNI configuration written", "file", w.configuration.path(), "hostPort", opener)
	}
	if opener == openerNone && w.opener != opener {
		w.log.Warn("host ports do not work: the datapath translates no services, and the plugin portmap is not installed",
			"directory", w.configuration.plugins)
	}
	w.opener = opener
	names, err := w.configuration.preferred()
	if err == nil && len(names) > 0 {
		err = fmt.Errorf("the runtime prefers %s in %s to %s; rename or remove it",
			strings.Join(names, ", "), w.configuration.directory, w.configuration.name)
	}
	return err
}

// serving returns an error if a needed service does not serve.
func (w *writer) serving(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, w.timeout)
	defer cancel()
	for _, service := range needed {
		r, err := grpc_health_v1.NewHealthClient(w.services[service]).Check(ctx, &grpc_health_v1.HealthCheckRequest{})
		if err != nil {
			return fmt.Errorf("sluice-%s does not answer: %w", service, err)
		}
		if r.GetStatus() != grpc_health_v1.HealthCheckResponse_SERVING {
			return fmt.Errorf("sluice-%s does not serve yet", service)
		}
	}
	return nil
}

// askDatapath asks whether the datapath translates host ports.
func (w *writer) askDatapath(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, w.timeout)
	defer cancel()
	st, err := datapathv1.NewDatapathServiceClient(w.services["datapath"]).GetStatus(ctx, &datapathv1.GetStatusRequest{})
	if err != nil {
		return fmt.Errorf("sluice-datapath does not report its status: %w", err)
	}
	w.configuration.translates = st.GetFrontendStream() != nil
	return nil
}
