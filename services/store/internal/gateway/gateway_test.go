// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package gateway

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"testing"
	"time"

	"go.etcd.io/etcd/server/v3/auth"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/store/internal/access"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// TestSweepClosesConnectionsOfRefusedCertificatesOnly: a member that cannot read the record of a node does not know
// that the node was revoked.
func TestSweepClosesConnectionsOfRefusedCertificatesOnly(t *testing.T) {
	now := time.Now()
	for what, c := range map[string]struct {
		check  error
		until  time.Time
		closed bool
	}{
		"accepted":               {nil, now.Add(time.Hour), false},
		"users changed":          {fmt.Errorf("read the node n1: %w", auth.ErrAuthOldRevision), now.Add(time.Hour), false},
		"etcd stops":             {errors.New("etcdserver: server stopped"), now.Add(time.Hour), false},
		"revoked":                {fmt.Errorf("%w: the node n1 was revoked", access.ErrRefused), now.Add(time.Hour), true},
		"an expired certificate": {nil, now.Add(-time.Second), true},
	} {
		ours, theirs := net.Pipe()
		g := &Gateway{conns: map[*conn]bool{}, o: Options{
			Check: func(context.Context, string, string) error { return c.check },
			Now:   func() time.Time { return now }, Log: log.Discard(),
		}}
		g.conns[&conn{Conn: ours, g: g, node: "n1", cert: &x509.Certificate{NotAfter: c.until}}] = true
		g.sweep(t.Context())
		if closed := len(g.conns) == 0; closed != c.closed {
			t.Errorf("%s: the connection is closed: %t, want %t", what, closed, c.closed)
		}
		ours.Close()   //nolint:errcheck // may be closed
		theirs.Close() //nolint:errcheck // may be closed
	}
}

// TestConnectionsOfOneNodeKeepNoOtherFromConnecting: a compromised node opens as many connections as it may.
func TestConnectionsOfOneNodeKeepNoOtherFromConnecting(t *testing.T) {
	g := &Gateway{conns: map[*conn]bool{}}
	for range maxConnections {
		if g.full("n1") != nil {
			break
		}
		g.conns[&conn{node: "n1"}] = true
	}
	if len(g.conns) != maxOfNode {
		t.Errorf("n1 has %d connections, want %d", len(g.conns), maxOfNode)
	}
	if err := g.full("n2"); err != nil {
		t.Errorf("n2 is refused: %v", err)
	}
}
