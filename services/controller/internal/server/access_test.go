// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"testing"

	"github.com/sluice-net/sluice/kit/rpc/rpctest"
)

func TestCommentsSayWhoMayNotCall(t *testing.T) {
	rpctest.AccessIsDocumented(t, Methods(), "../../../../proto")
}
