// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package reportwire sends the reports of a node's services to sluice-identity: the objects that the node does not
// enforce as written. sluice-controller reads them and informs the authors of the objects.
package reportwire

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
)

// Timing of reports.
const (
	reportTimeout = 5 * time.Second
	reportEvery   = 10 * time.Second
	// slowest is the longest interval to which a Reporter backs off while each comparison finds a change, in
	// multiples of the usual interval. Otherwise, if a tenant changed its objects all the time, every node would
	// write its report all the time.
	slowest = 12
	// reportAgain is the interval at which an unchanged report is sent again. Etcd deletes the report when the node's
	// lease ends, and may have a corrupt report; an empty report removes it.
	reportAgain = 10 * time.Minute
)

// Limits of a report, so that it uses at most 64 KiB in etcd.
const (
	maxReported = 1024
	maxBytes    = 48 << 10
	maxReason   = 256
)

// Refused is an object that a node does not enforce as written.
type Refused struct {
	Kind, Namespace, Name string

	Reason string
	Code   string // of the reason, for counts
}

// Options describe the reports on a subject.
type Options struct {
	Subject identityv1.RefusalSubject
	// MaxObjects and MaxBytes limit a report, in addition to the common limits; 0: only the common limits.
	MaxObjects, MaxBytes int
	// Nodes returns the number of nodes of the cluster; nil: unknown. Every node may report the same objects at the
	// same time, so nodes of large clusters report less often: all nodes together about 50 times a second.
	Nodes func() int
	Log   *slog.Logger
}

// Reporter sends the reports of this node on a subject.
type Reporter struct {
	client  identityv1.ClusterServiceClient
	options Options
}

// New returns a Reporter that calls the identity service of the node.
func New(c identityv1.ClusterServiceClient, o Options) *Reporter {
	return &Reporter{client: c, options: o}
}

// Report calls list every 10 to 15 s, and sends the result if it differs from the last report. It calls list less often
// in clusters of more than 500 nodes, and while each result differs. list returns the most important objects first.
// Report returns nil when ctx ends.
func (r *Reporter) Report(ctx context.Context, list func(context.Context) ([]Refused, error)) error {
	var last []Refused
	var sent time.Time // when the last report was sent; zero: not in this run
	for slow, first := 1, true; ; first = false {
		now, err := list(ctx)
		differs := !slices.Equal(now, last)
		if err == nil && differs && !sent.IsZero() {
			slow = min(2*slow, slowest)
		} else {
			slow = 1
		}
		if err == nil && (sent.IsZero() || differs || time.Since(sent) > reportAgain) {
			if err = r.send(ctx, now); err == nil {
				last, sent = now, time.Now()
			}
		}
		if err != nil && ctx.Err() == nil {
			r.options.Log.Debug("cannot report what is not enforced as written", "error", err)
		}
		every := time.Duration(slow) * r.interval()
		if first {
			every = reportEvery // the objects, and the number of nodes, may not be known yet
		}
		select {
		case <-time.After(every + rand.N(every/2)):
		case <-ctx.Done():
			return nil
		}
	}
}

// interval returns the shortest interval between two reports.
func (r *Reporter) interval() time.Duration {
	if r.options.Nodes == nil {
		return reportEvery
	}
	return max(reportEvery, time.Duration(r.options.Nodes())*time.Second/50)
}

func (r *Reporter) send(ctx context.Context, list []Refused) error {
	ctx, cancel := context.WithTimeout(ctx, reportTimeout)
	defer cancel()
	req := &identityv1.ReportRefusalsRequest{Subject: r.options.Subject}
	most, limit := cmp.Or(r.options.MaxObjects, maxReported), cmp.Or(r.options.MaxBytes, maxBytes)
	bytes := 0
	for i, x := range list {
		// A cut character would be invalid in protobuf.
		reason := strings.ToValidUTF8(x.Reason[:min(len(x.Reason), maxReason)], "")
		// Count the overhead of JSON, and a margin for escaped characters.
		bytes += 64 + len(x.Kind) + len(x.Namespace) + len(x.Name) + 2*len(reason)
		if i == most || bytes > limit {
			req.Omitted = uint32(len(list) - i) //nolint:gosec // far less
			req.OmittedReasons = make(map[string]uint32)
			for _, x := range list[i:] {
				req.OmittedReasons[x.Code]++
			}
			break
		}
		req.Refusals = append(req.Refusals, &identityv1.PolicyRefusal{
			Kind: x.Kind, Namespace: x.Namespace, Name: x.Name, Reason: reason,
		})
	}
	if _, err := r.client.ReportRefusals(ctx, req); err != nil {
		return fmt.Errorf("report what is not enforced as written: %w", err)
	}
	return nil
}
