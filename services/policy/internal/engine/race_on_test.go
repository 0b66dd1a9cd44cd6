// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

//go:build race

package engine

// slower is the factor by which the race detector slows the random tests down. They contain few possible races,
// because the engine has no goroutines.
const slower = 8
