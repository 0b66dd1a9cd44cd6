// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"testing"

	"github.com/sluice-net/sluice/kit/servicetest"
)

func TestCommentsSayWhoMayNotCall(t *testing.T) {
	servicetest.AccessIsDocumented(t, Methods(), "../../../../proto/sluice/datapath/v1")
}
