// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package client

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"time"

	"google.golang.org/grpc"

	"github.com/sluice-net/sluice/kit/log"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
)

// Times of Refusals.
const (
	reportTimeout = 5 * time.Second
	reportEvery   = 10 * time.Second
	// reportAgain is when a report that did not change is sent again, because the lease of
	// the node may have ended meanwhile.
	reportAgain = 10 * time.Minute
)

// Bounds of a report, so that it has at most 64 KiB in etcd.
const (
	maxReported    = 1024
	maxReportBytes = 48 << 10
	maxReason      = 256
)

// Refused is a policy that a node does not enforce as written.
type Refused struct {
	Key    policy.Key
	Reason string
}

// Refusals reports the policies that this node does not enforce as written.
type Refusals struct {
	client identityv1.ClusterServiceClient
	log    *slog.Logger
}

// NewRefusals uses a connection to the identity service's socket.
func NewRefusals(cc grpc.ClientConnInterface, l *slog.Logger) *Refusals {
	return &Refusals{client: identityv1.NewClusterServiceClient(cc), log: l}
}

// Report sends what list returns, sorted, whenever it differs from the last report, until ctx
// ends; it then returns nil. It looks every 10 to 15 s.
func (r *Refusals) Report(ctx context.Context, list func(context.Context) ([]Refused, error)) error {
	var last []Refused
	var sent time.Time // of last; zero: nothing was sent in this run
	for {
		now, err := list(ctx)
		if err == nil && (sent.IsZero() || !slices.Equal(now, last) || len(now) > 0 && time.Since(sent) > reportAgain) {
			if err = r.send(ctx, now); err == nil {
				last, sent = now, time.Now()
			}
		}
		if err != nil && ctx.Err() == nil {
			r.log.Debug("the policies that are not enforced as written are not reported", log.Err(err))
		}
		select {
		case <-time.After(reportEvery + rand.N(reportEvery/2)):
		case <-ctx.Done():
			return nil
		}
	}
}

func (r *Refusals) send(ctx context.Context, list []Refused) error {
	ctx, cancel := context.WithTimeout(ctx, reportTimeout)
	defer cancel()
	req := &identityv1.ReportRefusalsRequest{}
	bytes := 0
	for i, x := range list {
		reason := x.Reason[:min(len(x.Reason), maxReason)]
		// What JSON adds, with room for characters that it escapes.
		bytes += 64 + len(x.Key.Kind) + len(x.Key.Namespace) + len(x.Key.Name) + 2*len(reason)
		if i == maxReported || bytes > maxReportBytes {
			req.Omitted = uint32(len(list) - i) //nolint:gosec // far less
			break
		}
		req.Refusals = append(req.Refusals, &identityv1.PolicyRefusal{
			Kind: x.Key.Kind, Namespace: x.Key.Namespace, Name: x.Key.Name, Reason: reason,
		})
	}
	if _, err := r.client.ReportRefusals(ctx, req); err != nil {
		return fmt.Errorf("report refused policies: %w", err)
	}
	return nil
}
