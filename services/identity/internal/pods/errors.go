// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package pods says what the Kubernetes API says about the pods of this node.
package pods

import "errors"

var (
	// ErrNotFound: the API answers and has no such pod, or has not shown it yet.
	ErrNotFound = errors.New("pod is not known to the Kubernetes API")
	// ErrUnavailable: the pod is not known here and the API does not answer, or refuses.
	ErrUnavailable = errors.New("Kubernetes API is away")
)
