// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package probe contains the client and the server of the connectivity test, because the test pods use Sluice's image,
// which contains no other programs for that. It needs no services.
package probe

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
)

// Outcomes of an attempt.
const (
	Connected   = "connected"
	Resolved    = "resolved"
	Refused     = "refused"
	TimedOut    = "timeout"
	Unreachable = "unreachable"
	Failed      = "failed"
)

// Attempt is the output of `probe connect -o json` and `probe resolve -o json`.
type Attempt struct {
	Target    string   `json:"target"`
	Outcome   string   `json:"outcome"`
	Error     string   `json:"error,omitempty"`
	Server    string   `json:"server,omitempty"` // the name of the server that answered
	Client    string   `json:"client,omitempty"` // the address that the server saw
	Addresses []string `json:"addresses,omitempty"`
}

// Answer is the answer of a server.
type Answer struct {
	Server string `json:"server"`
	Client string `json:"client"`
}

// Command is `probe`.
func Command(inv *invocation.Invocation) *cobra.Command {
	var address string
	serving := &cobra.Command{
		Use:   "serve",
		Short: "Answer every client with the name of this machine and the client's address",
		Args:  invocation.Args(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			name, err := os.Hostname()
			if err != nil {
				return err
			}
			l, err := new(net.ListenConfig).Listen(cmd.Context(), "tcp", address)
			if err != nil {
				return err
			}
			return serve(cmd.Context(), l, handler(name))
		},
	}
	serving.Flags().StringVar(&address, "address", ":8080", "address to listen on")
	bare := false
	connecting := &cobra.Command{
		Use:   "connect HOST:PORT",
		Short: "Connect to a server, request its name, and print the result",
		Long: `Connect to a server, request its name, and print the result, within --timeout. The exit
code is 1 if the connection fails.`,
		Args: invocation.Args(1, "HOST:PORT"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return show(inv, connect(cmd.Context(), inv.Timeout, args[0], bare))
		},
	}
	connecting.Flags().BoolVar(&bare, "tcp", false, "close the connection at once, without a request")
	resolving := &cobra.Command{
		Use:   "resolve NAME",
		Short: "Resolve the addresses of a DNS name",
		Args:  invocation.Args(1, "a name"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return show(inv, resolve(cmd.Context(), inv.Timeout, args[0]))
		},
	}
	var idle time.Duration
	holding := &cobra.Command{
		Use:   "hold",
		Short: "Keep a container running while commands are executed in it",
		Long: `Run while other processes run in the container, and exit when there has been none for
--idle, so that a temporary pod ends even if its creator was killed.`,
		Args: invocation.Args(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error { return hold(cmd.Context(), "/proc", idle, time.Second) },
	}
	holding.Flags().DurationVar(&idle, "idle", 30*time.Second, "exit after this time without other processes")
	cmd := invocation.Group("probe", "Run in pods of cluster commands", serving, connecting,
		resolving, holding)
	cmd.Hidden = true
	return cmd
}

func show(inv *invocation.Invocation, a Attempt) error {
	if err := inv.Show(a, func(w io.Writer) {
		fmt.Fprintf(w, "%s: %s %s%s%v\n", a.Target, a.Outcome, a.Error, a.Server, a.Addresses)
	}); err != nil {
		return err
	}
	if a.Outcome != Connected && a.Outcome != Resolved {
		return invocation.ErrReported
	}
	return nil
}

// serve answers clients until ctx ends.
func serve(ctx context.Context, l net.Listener, h http.Handler) error {
	server := &http.Server{Handler: h, ReadHeaderTimeout: 5 * time.Second, IdleTimeout: 5 * time.Second}
	stop := context.AfterFunc(ctx, func() { _ = server.Close() })
	defer stop()
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// handler answers every request with the name of the server.
func handler(name string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(Answer{Server: name, Client: r.RemoteAddr})
	})
}

// answerLimit limits the size of an answer in bytes.
const answerLimit = 64 << 10

func connect(ctx context.Context, timeout time.Duration, target string, bare bool) Attempt {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	a := Attempt{Target: target}
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "tcp", target)
	if err != nil {
		a.Outcome, a.Error = outcome(err), err.Error()
		return a
	}
	defer conn.Close()
	a.Outcome = Connected
	if bare {
		return a
	}
	answer, err := ask(ctx, conn, target)
	if err != nil {
		// Packets can be lost after the connection is established, for example because they exceed the path
		// MTU.
		a.Outcome, a.Error = Failed, "connected, but no answer: "+err.Error()
		return a
	}
	a.Server, a.Client = answer.Server, answer.Client
	return a
}

func ask(ctx context.Context, conn net.Conn, target string) (Answer, error) {
	var answer Answer
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext:       func(context.Context, string, string) (net.Conn, error) { return conn, nil },
	}}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+target+"/", nil)
	if err != nil {
		return answer, err
	}
	response, err := client.Do(request)
	if err != nil {
		return answer, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return answer, fmt.Errorf("status %s", strconv.Itoa(response.StatusCode))
	}
	return answer, json.NewDecoder(io.LimitReader(response.Body, answerLimit)).Decode(&answer)
}

func resolve(ctx context.Context, timeout time.Duration, name string) Attempt {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	resolver := net.Resolver{PreferGo: true}
	addresses, err := resolver.LookupHost(ctx, name)
	if err != nil {
		return Attempt{Target: name, Outcome: outcome(err), Error: err.Error()}
	}
	slices.Sort(addresses)
	return Attempt{Target: name, Outcome: Resolved, Addresses: addresses}
}

// hold returns when no other process has existed in the container for the time idle, or when ctx ends.
func hold(ctx context.Context, proc string, idle, every time.Duration) error {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for last := time.Now(); time.Since(last) < idle; {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		entries, err := os.ReadDir(proc)
		if err != nil {
			return err
		}
		if slices.ContainsFunc(entries, func(e os.DirEntry) bool {
			pid, err := strconv.Atoi(e.Name())
			return err == nil && pid != os.Getpid()
		}) {
			last = time.Now()
		}
	}
	return nil
}

// outcome returns the outcome of an attempt that failed with the error.
func outcome(err error) string {
	var dns *net.DNSError
	var timeout net.Error
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return Refused
	case errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH):
		return Unreachable
	case errors.As(err, &dns) && !dns.IsTimeout:
		return Failed
	case errors.As(err, &timeout) && timeout.Timeout():
		return TimedOut
	}
	return Failed
}
