// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package probe is both ends of a connection that the connectivity test makes between pods: their image has no other
// program than Sluice's own. It asks no service.
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

// Attempt is what `probe connect` and `probe resolve` print as JSON.
type Attempt struct {
	Target    string   `json:"target"`
	Outcome   string   `json:"outcome"`
	Error     string   `json:"error,omitempty"`
	Server    string   `json:"server,omitempty"` // the name of the server that answered
	Client    string   `json:"client,omitempty"` // the address that the server saw
	Addresses []string `json:"addresses,omitempty"`
}

// Answer is what a server answers.
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
	serving.Flags().StringVar(&address, "address", ":8080", "where to listen")
	bare := false
	connecting := &cobra.Command{
		Use:   "connect HOST:PORT",
		Short: "Connect, ask for the server's name, and say what came of it",
		Long: `Connect to a server, ask it for its name, and say what came of it, within
--timeout. The exit code is 1 if no connection came about.`,
		Args: invocation.Args(1, "HOST:PORT"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return show(inv, connect(cmd.Context(), inv.Timeout, args[0], bare))
		},
	}
	connecting.Flags().BoolVar(&bare, "tcp", false, "end when there is a connection, and ask for no name")
	resolving := &cobra.Command{
		Use:   "resolve NAME",
		Short: "Ask the DNS server for the addresses of a name",
		Args:  invocation.Args(1, "a name"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return show(inv, resolve(cmd.Context(), inv.Timeout, args[0]))
		},
	}
	var idle time.Duration
	holding := &cobra.Command{
		Use:   "hold",
		Short: "Stay as the first process of a container while commands are executed in it",
		Long: `Stay as long as other processes run in the container, and end when there has been
none for --idle: a pod that was made for a command ends then, also if whoever made
it is gone.`,
		Args: invocation.Args(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error { return hold(cmd.Context(), "/proc", idle, time.Second) },
	}
	holding.Flags().DurationVar(&idle, "idle", 30*time.Second, "how long no other process may run")
	cmd := invocation.Group("probe", "Be a process of a pod that a command about a cluster makes", serving, connecting,
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

// handler answers with the name of the server, whatever it is asked.
func handler(name string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(Answer{Server: name, Client: r.RemoteAddr})
	})
}

// answerLimit bounds what is read of an answer.
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
		// There is a connection, and no more: a packet that is too large for the way is lost then.
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

// hold returns when no process but this one has been there for a time, or ctx ends.
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

// outcome puts an error into a word.
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
