// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package session

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"time"

	"google.golang.org/grpc/connectivity"

	"github.com/sluice-net/sluice/services/identity/internal/cluster"
)

// Times after a connection was closed.
const (
	// severedGrace is the time that the client has to reconnect before etcd counts as unavailable. A member that
	// restarts, or moves its clients to other members, is available again sooner.
	severedGrace = 500 * time.Millisecond
	// probeTime bounds the connection attempt that finds out why there is no connection.
	probeTime = 200 * time.Millisecond
)

// Severed returns once the client has had no connection to any member of etcd for severedGrace. Its error wraps
// cluster.ErrUnavailable and contains the kernel's error; if ctx is done, it is the context's error. It does not detect
// a member that is connected but does not answer: requests have deadlines.
func (s *Session) Severed(ctx context.Context) error {
	conn := s.client.ActiveConnection()
	for {
		state := conn.GetState()
		if state == connectivity.Ready {
			if !conn.WaitForStateChange(ctx, state) {
				return ctx.Err()
			}
			continue
		}
		grace, cancel := context.WithTimeout(ctx, severedGrace)
		for state != connectivity.Ready && grace.Err() == nil {
			conn.WaitForStateChange(grace, state)
			state = conn.GetState()
		}
		cancel()
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case state != connectivity.Ready:
			// nil: the connection was established again
			if why := s.why(ctx); why != nil {
				return fmt.Errorf("%w: %w", cluster.ErrUnavailable, why)
			}
		}
	}
}

// why returns why there is no connection to etcd: the kernel's error for the first endpoint that refuses; nil if the
// client is connected.
func (s *Session) why(ctx context.Context) error {
	if s.client.ActiveConnection().GetState() == connectivity.Ready {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), probeTime)
	defer cancel()
	for _, endpoint := range s.Endpoints() {
		u, err := url.Parse(endpoint)
		if err != nil {
			continue
		}
		network, address := "tcp", u.Host
		if u.Scheme == "unix" {
			network, address = "unix", u.Path
		}
		var d net.Dialer
		conn, err := d.DialContext(ctx, network, address)
		if err != nil {
			return err
		}
		conn.Close()
	}
	return errors.New("the connection was closed")
}
