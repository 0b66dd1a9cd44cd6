// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package healthport

import (
	"context"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/owner"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// counting counts reported problems and listings.
type counting struct {
	*services
	listed, reported atomic.Int32
}

func (c *counting) Locals(ctx context.Context) ([]owner.Local, error) {
	c.listed.Add(1)
	return c.services.Locals(ctx)
}

func (c *counting) Report(ctx context.Context, what string, why error) error {
	if why != nil {
		c.reported.Add(1)
	}
	return c.services.Report(ctx, what, why)
}

// TestTakenPortIsTriedAgainWithoutAChange: a health check port is in use by another program. The process retries
// without a change of services, and reports the problem once.
func TestTakenPortIsTriedAgainWithoutAChange(t *testing.T) {
	other, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	s := &counting{services: &services{changed: make(chan struct{}), problems: make(map[string]error)}}
	p := New(s, Options{Address: "127.0.0.1", Log: log.Discard()})
	p.retry = 10 * time.Millisecond
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	taken := uint16(other.Addr().(*net.TCPAddr).Port)
	s.set(owner.Local{
		Name: service.Name{Namespace: "n", Name: "a"}, Port: taken, Ready: addresses(1), Enforced: owner.Enforced,
	})
	servicetest.Eventually(t, "several tries", func() bool { return s.listed.Load() > 5 })
	if n := s.reported.Load(); n != 1 {
		t.Errorf("the problem is reported %d times", n)
	}
	other.Close()
	servicetest.Eventually(t, "the port is open", func() bool { return s.problem() == "map[]" && p.Open() == 1 })
}
