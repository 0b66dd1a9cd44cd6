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

// Timing of Refusals.
const (
	reportTimeout = 5 * time.Second
	reportEvery   = 10 * time.Second
	// reportAgain is the interval at which an unchanged report is sent again. Etcd deletes the report when the node's
	// lease ends, and may have a corrupt report; an empty report removes it.
	reportAgain = 10 * time.Minute
)

// Limits of a report, so that it uses at most 64 KiB in etcd.
const (
	maxReported    = 1024
	maxReportBytes = 48 << 10
	maxReason      = 256
)

// Refused is a policy that a node does not enforce as written.
type Refused struct {
	Key    policy.Key
	Reason string
	Code   string // of the reason, for counts
}

// Refusals reports the policies that this node does not enforce as written.
type Refusals struct {
	client identityv1.ClusterServiceClient
	log    *slog.Logger
}

// NewRefusals returns Refusals that use a connection to the identity service's socket.
func NewRefusals(cc grpc.ClientConnInterface, l *slog.Logger) *Refusals {
	return &Refusals{client: identityv1.NewClusterServiceClient(cc), log: l}
}

// Report calls list every 10 to 15 s, and sends the result if it differs from the last report. It returns nil when
// ctx ends.
func (r *Refusals) Report(ctx context.Context, list func(context.Context) ([]Refused, error)) error {
	var last []Refused
	var sent time.Time // when the last report was sent; zero: not in this run
	for {
		now, err := list(ctx)
		if err == nil && (sent.IsZero() || !slices.Equal(now, last) || time.Since(sent) > reportAgain) {
			if err = r.send(ctx, now); err == nil {
				last, sent = now, time.Now()
			}
		}
		if err != nil && ctx.Err() == nil {
			r.log.Debug("cannot report the policies that are not enforced as written", log.Err(err))
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
		// Count the overhead of JSON, and a margin for escaped characters.
		bytes += 64 + len(x.Key.Kind) + len(x.Key.Namespace) + len(x.Key.Name) + 2*len(reason)
		if i == maxReported || bytes > maxReportBytes {
			req.Omitted = uint32(len(list) - i) //nolint:gosec // far less
			req.OmittedReasons = make(map[string]uint32)
			for _, x := range list[i:] {
				req.OmittedReasons[x.Code]++
			}
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
