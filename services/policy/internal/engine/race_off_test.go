// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

//go:build !race

package engine

// slower is the factor by which the race detector slows the random tests down.
const slower = 1
