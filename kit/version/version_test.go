// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package version

import "testing"

func TestVersionSaysSomething(t *testing.T) {
	if Get().Version == "" {
		t.Error("no version")
	}
	v := Build{Version: "v1", Revision: "0123456789abcdef", Modified: true}
	if got := v.String(); got != "v1 (0123456789ab, modified)" {
		t.Errorf("got %q", got)
	}
}
