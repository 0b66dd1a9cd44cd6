// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package process

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"path/filepath"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/rpc"
)

// serveMetrics starts the HTTP server and returns a function that stops it.
func (p *Process) serveMetrics() (stop func(), _ error) {
	address := p.Config.Metrics.Address
	if address == "off" {
		return func() {}, nil
	}
	var (
		l   net.Listener
		err error
	)
	if filepath.IsAbs(address) {
		l, err = rpc.Listen(address, p.Config.Socket.listenOptions(metricsConnections(p.descriptors)))
	} else {
		l, err = net.Listen("tcp", address)
	}
	if err != nil {
		return nil, fmt.Errorf("serve metrics: %w", err)
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(p.Metrics, promhttp.HandlerOpts{MaxRequestsInFlight: 4}))
	if p.Config.Metrics.Pprof {
		mux.HandleFunc("GET /debug/pprof/", pprof.Index)
		mux.HandleFunc("GET /debug/pprof/cmdline", pprof.Cmdline)
		mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
		mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
		mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	}
	server := &http.Server{
		Handler: mux, ReadHeaderTimeout: 5 * time.Second, IdleTimeout: time.Minute, MaxHeaderBytes: 16 << 10,
		ErrorLog: slog.NewLogLogger(p.Log.Handler(), slog.LevelWarn),
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			p.Log.Error("serve metrics", log.Err(err))
		}
	}()
	p.Log.Info("metrics", "address", l.Addr().String(), "pprof", p.Config.Metrics.Pprof)
	return func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		if server.Shutdown(ctx) != nil {
			server.Close() // closes connections that hang
		}
		<-done
	}, nil
}
