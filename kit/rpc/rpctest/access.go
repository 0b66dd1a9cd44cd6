// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package rpctest has checks that are common to the tests of all servers.
package rpctest

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/kit/rpc"
	"github.com/sluice-net/sluice/kit/servicetest"
)

// AccessIsDocumented fails the test unless the comments of calls in the .proto files below root
// mention PERMISSION_DENIED exactly for the calls that the group may not make.
func AccessIsDocumented(t testing.TB, methods rpc.Methods, root string) {
	t.Helper()
	comments := map[string]map[string]string{} // by package and call
	for full, m := range methods {
		service, call, _ := strings.Cut(strings.TrimPrefix(full, "/"), "/")
		at := strings.LastIndexByte(service, '.')
		dir := filepath.Join(root, filepath.FromSlash(strings.ReplaceAll(service[:at], ".", "/")))
		if comments[dir] == nil {
			comments[dir] = servicetest.Comments(t, dir)
		}
		name := service[at+1:] + "/" + call
		comment, ok := comments[dir][name]
		if !ok {
			t.Errorf("no comment of %s in %s", name, dir)
			continue
		}
		if says := strings.Contains(comment, "PERMISSION_DENIED"); says == m.Access.Group {
			t.Errorf("the group may call %s: %t; its comment says PERMISSION_DENIED: %t", name, m.Access.Group, says)
		}
	}
}
