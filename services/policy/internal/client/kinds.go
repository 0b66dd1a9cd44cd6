// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package client

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/log"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
)

// Timing of Kinds.
const (
	watchRetry    = time.Second
	watchRetryMax = 30 * time.Second
)

// Kinds delivers the kinds of policy that sluice-controller has found, through the identity services of the cluster.
type Kinds struct {
	client identityv1.ClusterServiceClient
	log    *slog.Logger
}

// NewKinds returns Kinds that use a connection to the identity service's socket.
func NewKinds(cc grpc.ClientConnInterface, l *slog.Logger) *Kinds {
	return &Kinds{client: identityv1.NewClusterServiceClient(cc), log: l}
}

// Watch calls told with the published kinds, and again after every change, until ctx ends. published is false while
// no process has published kinds, and while the identity service does not answer.
func (k *Kinds) Watch(ctx context.Context, told func(kinds []string, published bool)) {
	for pause := watchRetry; ; {
		err := k.watch(ctx, func(kinds []string, published bool) {
			pause = watchRetry
			told(kinds, published)
		})
		if ctx.Err() != nil {
			return
		}
		told(nil, false)
		if status.Code(err) == codes.Unimplemented { // the identity service has an earlier version
			pause = watchRetryMax
		} else {
			k.log.Debug("cannot watch the published kinds of policy, trying again", log.Err(err))
		}
		select {
		case <-time.After(pause + rand.N(pause)):
		case <-ctx.Done():
			return
		}
		pause = min(2*pause, watchRetryMax)
	}
}

func (k *Kinds) watch(ctx context.Context, told func([]string, bool)) error {
	stream, err := k.client.WatchKinds(ctx, &identityv1.WatchKindsRequest{})
	if err != nil {
		return err
	}
	for {
		m, err := stream.Recv()
		if err != nil {
			return err
		}
		told(m.GetKinds(), m.GetPublished())
	}
}
