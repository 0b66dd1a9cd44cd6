#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The Sluice Authors
#
# Sourced: from here on every go command compiles packages as `make build` does,
# so that none is compiled twice, of ours or of others. Only the race detector
# needs cgo, and packages of its own. -w leaves out what debuggers read, which is
# a third of the time that linking takes.

CGO_ENABLED=0
GOFLAGS="$(go env GOFLAGS) -trimpath -tags=grpcnotrace -ldflags=-w"
export CGO_ENABLED GOFLAGS
