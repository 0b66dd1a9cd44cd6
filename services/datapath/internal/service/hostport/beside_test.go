// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package hostport

import (
	"context"
	"errors"
	"runtime"
	"testing"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/service/frontendtx"
)

// slow is a kernel whose Apply waits for the test.
type slow struct {
	Kernel
	began, let chan struct{}
}

func (s *slow) Apply(ctx context.Context, tx *frontendtx.Transaction) (frontendtx.Result, error) {
	close(s.began)
	<-s.let
	return s.Kernel.Apply(ctx, tx)
}

// TestClaimBesideATransactionOfServicesTakesNoPort: a claim waits for a running transaction that takes the port. A key
// never belongs to an endpoint and to a service.
func TestClaimBesideATransactionOfServicesTakesNoPort(t *testing.T) {
	_, k, e := newPorts()
	s := &slow{k, make(chan struct{}), make(chan struct{})}
	p := New(Options{Kernel: s, Ender: e, Log: log.Discard()})
	mine := spec("a", 2, "", 30080, workload.TCP)
	applied, claimed := make(chan frontendtx.Result, 1), make(chan error, 1)
	go func() {
		tx := &frontendtx.Transaction{}
		tx.Upsert(service(key("0.0.0.0", 30080, frontend.TCP)))
		res, err := p.Services().Apply(t.Context(), tx)
		if err != nil {
			t.Error(err)
		}
		applied <- res
	}()
	<-s.began
	go func() { claimed <- p.Claim(mine) }()
	for range 1000 { // time for a claim that does not wait
		runtime.Gosched()
	}
	close(s.let)
	res, err := <-applied, <-claimed
	if len(res.Refused) != 0 || !errors.Is(err, endpoint.ErrHostPort) {
		t.Errorf("the service has the port, %d refused, and the endpoint's claim: %v", len(res.Refused), err)
	}
}
