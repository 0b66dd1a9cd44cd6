// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package health answers HTTP probes of a supervisor on a loopback address: /livez reports that the
// process runs, /readyz whether it serves, and if not why.
//
// It is for supervisors that cannot reach a unix socket, such as the kubelet. Its answers contain
// nothing that must be hidden from other users of the machine.
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

// maxConns limits concurrent connections. Every user of the machine can connect; each connection is closed after its
// answer or after headerTimeout.
const (
	maxConns      = 64
	headerTimeout = time.Second
)

// CheckAddress returns an error unless the address is ip:port with a loopback address, since probes
// come from the local machine.
func CheckAddress(address string) error {
	a, err := netip.ParseAddrPort(address)
	if err != nil || !a.Addr().IsLoopback() {
		return fmt.Errorf("%q is not ip:port with a loopback address", address)
	}
	return nil
}

// Listen checks the address and listens on it.
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

// Serve answers probes on l until stop is called. ready returns nil if the process serves, and
// otherwise the reason. Serve calls it for each request, from several goroutines.
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
		server.Close() //nolint:errcheck // the supervisor repeats a probe
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
	io.WriteString(w, text) //nolint:errcheck // the client may have disconnected
}
