// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

//go:build !race

package engine

// slower is by how much the race detector slows the random tests.
const slower = 1
