// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package client

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	"github.com/sluice-net/sluice/proto/wire"
)

// Delays between two attempts to follow the pending label changes.
const (
	waitingRetry = time.Second
	// waitingAbsent is the delay if the identity service does not implement the call, because its version is
	// earlier.
	waitingAbsent = time.Minute
)

// Narrows reports whether the policies would allow less to an identity with these labels than to the same identity
// with its current labels.
type Narrows func(ctx context.Context, n identity.Numeric, labels label.Set) (bool, error)

// AdmitNarrowing follows the label changes that are delayed by a rate limit, and admits those after which the policies
// allow less to a pod. It returns nil when ctx ends.
func AdmitNarrowing(ctx context.Context, cc grpc.ClientConnInterface, narrows Narrows, l *slog.Logger) error {
	client := identityv1.NewIdentityServiceClient(cc)
	for {
		err := followWaiting(ctx, client, narrows)
		if ctx.Err() != nil {
			return nil
		}
		pause := waitingRetry
		if status.Code(err) == codes.Unimplemented {
			pause = waitingAbsent
		} else {
			l.Debug("cannot follow the pending label changes", log.Err(err))
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return nil
		}
	}
}

func followWaiting(ctx context.Context, client identityv1.IdentityServiceClient, narrows Narrows) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := client.WatchWaitingLabels(ctx, &identityv1.WatchWaitingLabelsRequest{})
	if err != nil {
		return err
	}
	for {
		m, err := stream.Recv()
		if err != nil {
			return err
		}
		if m.GetChange() == 0 {
			continue
		}
		ok, err := narrows(ctx, identity.Numeric(m.GetIdentity()), label.NewSet(wire.LabelsOf(m.GetLabels())...))
		if err != nil {
			return fmt.Errorf("compare the rules of identity %d: %w", m.GetIdentity(), err)
		}
		if !ok {
			continue
		}
		if _, err := client.AdmitLabels(ctx, &identityv1.AdmitLabelsRequest{Change: m.GetChange()}); err != nil {
			return err
		}
	}
}
