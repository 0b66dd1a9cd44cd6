// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/sluice-net/sluice/proto/wire/reportwire"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
)

// TestFullDiskIsInTheReportOfTheNode: one disk is full, a write fails on another, and later writes succeed again. The
// report has the first reason and its time, and does not change while the failure lasts.
func TestFullDiskIsInTheReportOfTheNode(t *testing.T) {
	failure, fullDir, now := "", "", time.Unix(1e9, 0)
	s := &storage{
		dirs: stateDirs("/var/lib/sluice/policy"), now: func() time.Time { return now },
		failure: func(context.Context) (string, error) { return failure, nil },
		full: func(dir string) (bool, error) {
			if filepath.Base(dir) == "loadbalancer" {
				return true, os.ErrNotExist // the service is not installed
			}
			return dir == fullDir, nil
		},
	}
	want := func(when, want string) {
		t.Helper()
		got, err := s.report(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		switch {
		case want == "" && len(got) == 0:
		case len(got) == 1 && got[0] == reportwire.Refused{
			Kind: policy.NodeStorage.Kind, Name: policy.NodeStorage.Name, Reason: want,
		}:
		default:
			t.Errorf("%s: %+v, want %q", when, got, want)
		}
		now = now.Add(time.Minute)
	}
	want("with capacity", "")
	fullDir = "/var/lib/sluice/policy"
	full := "since 2001-09-09T01:47:40Z: the disk of /var/lib/sluice/policy is full"
	want("full", full)
	failure = "write policies.db: no space left on device"
	want("a write failed, too", full)
	failure, fullDir = "", ""
	want("with capacity again", "")
	failure = "write policies.db: read-only file system"
	want("read-only", "since 2001-09-09T01:50:40Z: write policies.db: read-only file system")
	failure = ""
	for i, service := range []string{"identity", "ipam", "datapath", "cni"} {
		fullDir = ""
		want("with capacity", "")
		fullDir = "/var/lib/sluice/" + service
		want("full for "+service, fmt.Sprintf("since 2001-09-09T01:%d:40Z: the disk of %s is full", 52+2*i, fullDir))
	}
}
