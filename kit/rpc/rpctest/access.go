// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package rpctest contains checks that the tests of all servers share.
package rpctest

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/kit/rpc"
	"github.com/sluice-net/sluice/kit/servicetest"
)

// AccessIsDocumented checks the comments of RPCs in the .proto files below root: they must mention PERMISSION_DENIED if
// the group may not call the RPC, and only then.
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
