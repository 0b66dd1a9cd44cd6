// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

//go:build race

package engine

// slower is by how much the race detector slows the random tests, which have
// little for it to find: the engine has no goroutines.
const slower = 8
