// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package workload holds the words about what gets a network: its owner, its
// pod and the names of its ports.
package workload
