// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package accounts

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kube"
)

// Nodes withdraws the credentials of nodes whose Node was deleted.
type Nodes struct {
	client rest.Interface
	every  time.Duration
	log    *slog.Logger
	absent map[string]bool // names without a Node in the last list
}

// NewNodes returns a Nodes that lists the Nodes of a cluster at an interval.
func NewNodes(c *kube.Client, every time.Duration, l *slog.Logger) (*Nodes, error) {
	client, err := kube.MetadataClient(c.Config)
	if err != nil {
		return nil, err
	}
	return &Nodes{client: client, every: every, log: l, absent: map[string]bool{}}, nil
}

// Run asks have for the nodes with credentials and calls revoke for those without a Node, until ctx ends.
func (n *Nodes) Run(
	ctx context.Context, have func(context.Context) ([]string, error), revoke func(context.Context, string) error,
) error {
	tick := time.NewTicker(n.every)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
		if err := n.look(ctx, have, revoke); err != nil && ctx.Err() == nil {
			n.log.Warn("cannot look for deleted nodes", log.Err(err))
		}
	}
}

// look revokes nodes that have had no Node in two lists one after the other: a node may enrol before its Node is in
// the list of an API server that is behind.
func (n *Nodes) look(
	ctx context.Context, have func(context.Context) ([]string, error), revoke func(context.Context, string) error,
) error {
	limited, cancel := context.WithTimeout(ctx, n.every)
	defer cancel()
	names, err := have(limited)
	if err != nil {
		return err
	}
	list := &metav1.PartialObjectMetadataList{}
	if err := n.client.Get().Resource("nodes").Do(limited).Into(list); err != nil {
		return fmt.Errorf("list Nodes: %w", err)
	}
	if len(list.Items) == 0 {
		return errors.New("the Kubernetes API has no Nodes, as after a restore without data")
	}
	exist := map[string]bool{}
	for _, o := range list.Items {
		exist[o.Name] = true
	}
	was := n.absent
	n.absent = map[string]bool{}
	for _, name := range names {
		switch {
		case exist[name]:
		case !was[name]:
			n.absent[name] = true
		default:
			if err := revoke(limited, name); err != nil {
				return err
			}
			n.log.Info("the Node was deleted, and its credentials are withdrawn", "node", name)
		}
	}
	return nil
}
