// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"maps"
	"strings"
	"testing"

	"google.golang.org/protobuf/reflect/protoreflect"
)

// TestAPIThatDiffersIsRefused: generation fails if the plugin reads a field that the API does not have; the error
// names it.
func TestAPIThatDiffersIsRefused(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(u *use)
		want   string
	}{
		{"a field that the API lacks", func(u *use) {
			u.reads["sluice.datapath.v1.Interface"] = []string{"name", "color"}
		}, "sluice.datapath.v1.Interface has no field color"},
		{"a message that no answer has", func(u *use) {
			u.reads["sluice.datapath.v1.WatchRequest"] = nil
		}, "no answer has a sluice.datapath.v1.WatchRequest"},
		{"an answer that is not listed", func(u *use) {
			delete(u.reads, "sluice.status.v1.Problem")
		}, "sluice.status.v1.Problem is in an answer, and what is read of it is not listed"},
		{"a method that the API lacks", func(u *use) {
			u.calls = []methods{{u.calls[0].service, []protoreflect.Name{"Reserve"}}}
		}, "sluice.ipam.v1.IPAMService has no method Reserve"},
	} {
		changed := spec
		changed.reads = maps.Clone(spec.reads)
		c.change(&changed)
		if _, err := changed.source(); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.name, err, c.want)
		}
	}
}
