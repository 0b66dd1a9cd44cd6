// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

//go:build !race

package engine

// thoroughness divides the number of random runs. The race detector makes them
// ten times slower and has little to find in code without goroutines.
const thoroughness = 1
