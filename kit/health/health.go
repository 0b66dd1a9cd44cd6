// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package health answers a supervisor's probes over HTTP on a loopback address:
// /livez says that the process runs, /readyz that it serves, or why not.
//
// It is for supervisors that cannot reach a unix socket, as the kubelet. It says
// nothing that a user of the machine may not know.
package health

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"time"

	"golang.org/x/net/netutil"
)

// maxConns are the connections at once. Every user of the machine can open
// them, and each ends with its answer or after headerTimeout.
const (
	maxConns      = 64
	headerTimeout = time.Second
)

// CheckAddress says whether an address is ip:port with an address of the loopback
// device: probes come from the machine itself.
func CheckAddress(address string) error {
	a, err := netip.ParseAddrPort(address)
	if err != nil || !a.Addr().IsLoopback() {
		return fmt.Errorf("%q is not ip:port with a loopback address", address)
	}
	return nil
}

// Listen opens an address.
func Listen(address string) (net.Listener, error) {
	if err := CheckAddress(address); err != nil {
		return nil, fmt.Errorf("serve health: %w", err)
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("serve health: %w", err)
	}
	return netutil.LimitListener(l, maxConns), nil
}

// Serve answers on l until stop is called. Ready returns nil if the process
// serves, else why it does not; it is called for each request, at once by
// several goroutines.
func Serve(l net.Listener, ready func() error, logger *slog.Logger) (stop func()) {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /livez", func(w http.ResponseWriter, _ *http.Request) { answer(w, nil) })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) { answer(w, ready()) })
	server := &http.Server{
		Handler: mux, ReadHeaderTimeout: headerTimeout, WriteTimeout: headerTimeout, MaxHeaderBytes: 4 << 10,
		ErrorLog: slog.NewLogLogger(logger.Handler(), slog.LevelWarn),
	}
	server.SetKeepAlivesEnabled(false)
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			logger.Error("serve health", "error", err.Error())
		}
	}()
	logger.Info("health", "address", l.Addr().String())
	return func() {
		server.Close() //nolint:errcheck // a probe is asked again
		<-done
	}
}

func answer(w http.ResponseWriter, failed error) {
	text := "ok\n"
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	if failed != nil {
		text = failed.Error() + "\n"
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	io.WriteString(w, text) //nolint:errcheck // whoever asked has gone
}
