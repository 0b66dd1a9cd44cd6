// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"testing"

	"github.com/sluice-net/sluice/test/internal/machine"
)

func TestMain(m *testing.M) { machine.Main(m) }
