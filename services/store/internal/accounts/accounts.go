// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package accounts asks the Kubernetes API which node the bearer of a token is on.
package accounts

import (
	"context"
	"errors"
	"fmt"
	"slices"

	authenticationv1 "k8s.io/api/authentication/v1"
	"k8s.io/client-go/rest"

	"github.com/sluice-net/sluice/kube"
	"github.com/sluice-net/sluice/store"
)

// ErrRefused is returned for a token that does not belong to a pod of Sluice's nodes.
var ErrRefused = errors.New("the token of the Kubernetes account is refused")

// nodeClaim is the key of the node's name in the review of a token that is bound to a pod.
const nodeClaim = "authentication.kubernetes.io/node-name"

// Reviewer asks the API server about tokens.
type Reviewer struct {
	client  rest.Interface
	account string
}

// New returns a Reviewer that accepts the account of the nodes in a namespace.
func New(c *kube.Client, namespace string) (*Reviewer, error) {
	client, err := c.REST(authenticationv1.SchemeGroupVersion, authenticationv1.AddToScheme)
	if err != nil {
		return nil, err
	}
	return &Reviewer{client, "system:serviceaccount:" + namespace + ":" + store.NodeAccount}, nil
}

// Node returns the node of a token. Its error wraps ErrRefused, unless the API server does not answer.
func (r *Reviewer) Node(ctx context.Context, token string) (string, error) {
	review := &authenticationv1.TokenReview{
		Spec: authenticationv1.TokenReviewSpec{Token: token, Audiences: []string{store.Audience}},
	}
	answer := &authenticationv1.TokenReview{}
	if err := r.client.Post().Resource("tokenreviews").Body(review).Do(ctx).Into(answer); err != nil {
		return "", fmt.Errorf("ask the Kubernetes API about a token: %w", err)
	}
	st := answer.Status
	switch {
	case !st.Authenticated:
		return "", fmt.Errorf("%w: %s", ErrRefused, st.Error)
	case !slices.Contains(st.Audiences, store.Audience):
		return "", fmt.Errorf("%w: it is not for the audience %s", ErrRefused, store.Audience)
	case st.User.Username != r.account:
		return "", fmt.Errorf("%w: it belongs to %s, not to %s", ErrRefused, st.User.Username, r.account)
	}
	node := st.User.Extra[nodeClaim]
	if len(node) != 1 || node[0] == "" {
		return "", fmt.Errorf("%w: it names no node; a token must be bound to a pod, of Kubernetes 1.30 or newer", ErrRefused)
	}
	return node[0], nil
}
