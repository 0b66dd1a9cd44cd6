// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package storetest

import (
	"testing"

	"github.com/sluice-net/sluice/kit/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

func TestFakeIsAStore(t *testing.T) {
	Run(t, func(*testing.T) Cluster { return NewFake() })
}
