// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package conntrack_test

import (
	"testing"

	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
)

func TestMain(m *testing.M) {
	conntrack.NewBPFFS = func(t testing.TB) string { return kerneltest.NewBPFFS(t) }
	kerneltest.Main(m)
}
