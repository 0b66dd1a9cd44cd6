#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The Sluice Authors
#
# Source this file: afterwards every go command compiles packages as `make build` does, so that no
# package is compiled twice. Only the race detector needs cgo, and separate packages. -w leaves out
# debug information, which takes a third of the linking time.

CGO_ENABLED=0
GOFLAGS="$(go env GOFLAGS) -trimpath -tags=grpcnotrace -ldflags=-w"
export CGO_ENABLED GOFLAGS
