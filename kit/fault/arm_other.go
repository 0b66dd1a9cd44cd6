// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

//go:build !linux

package fault

// Arm does nothing: services only run on Linux; other systems run unit tests.
func Arm() error { return nil }
