// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package accounts

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kube"
	"github.com/sluice-net/sluice/store"
)

// Controllers finds the nodes on which sluice-controller runs: by its pods, whose account only administrators may use.
type Controllers struct {
	client    rest.Interface
	namespace string
	every     time.Duration
	log       *slog.Logger
}

// NewControllers returns a Controllers that lists pods in a namespace at an interval.
func NewControllers(c *kube.Client, namespace string, every time.Duration, l *slog.Logger) (*Controllers, error) {
	client, err := c.REST(corev1.SchemeGroupVersion, corev1.AddToScheme)
	if err != nil {
		return nil, err
	}
	return &Controllers{client, namespace, every, l}, nil
}

// Run calls found with the nodes at each interval, until ctx ends. While the API server does not answer, it calls
// nothing.
func (c *Controllers) Run(ctx context.Context, found func(context.Context, []string) error) error {
	tick := time.NewTicker(c.every)
	defer tick.Stop()
	problem := ""
	for {
		text := ""
		if err := c.look(ctx, found); err != nil && ctx.Err() == nil {
			if text = err.Error(); text != problem {
				c.log.Warn("cannot give the nodes of sluice-controller the right to publish podCIDRs; trying again", log.Err(err))
			}
		}
		problem = text
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}

func (c *Controllers) look(ctx context.Context, found func(context.Context, []string) error) error {
	limited, cancel := context.WithTimeout(ctx, c.every)
	defer cancel()
	list := &corev1.PodList{}
	err := c.client.Get().Namespace(c.namespace).Resource("pods").
		Param("fieldSelector", "spec.serviceAccountName="+store.ControllerAccount).Do(limited).Into(list)
	if err != nil {
		return fmt.Errorf("list the pods of the account %s: %w", store.ControllerAccount, err)
	}
	var nodes []string
	for i := range list.Items {
		ended := list.Items[i].Status.Phase == corev1.PodSucceeded || list.Items[i].Status.Phase == corev1.PodFailed
		if node := list.Items[i].Spec.NodeName; node != "" && !ended {
			nodes = append(nodes, node)
		}
	}
	return found(limited, nodes)
}
