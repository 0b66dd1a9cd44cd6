// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

func TestOlderServiceKeepsAFrontend(t *testing.T) {
	o := start(t, testConfig(&clock{now: time.Unix(1e9, 0)}), t.TempDir())
	o.apply(web)
	out := o.apply(api) // the name sorts before web
	if n := out.Changes[0].Notes; len(n) != 1 || !strings.Contains(n[0],
		"belongs to service default/web, which is older") {
		t.Errorf("notes %q", n)
	}
	x := o.subscribe("a", [16]byte{}, 0)
	x.until(2)
	if got := show(x.has); got != "10.96.0.1:80/tcp of default/web inside reject" {
		t.Errorf("the subscriber has %s", got)
	}
	// The service gets an older creation time and therefore the frontend. Then it loses the frontend again.
	o.apply(strings.Replace(api, "name: api", "name: api, creationTimestamp: 1999-01-01T00:00:00Z", 1))
	x.until(3)
	if got := show(x.has); got != "10.96.0.1:80/tcp of default/api inside reject" {
		t.Errorf("the subscriber has %s", got)
	}
	if _, err := o.Delete(t.Context(), managed.Caller{}, []service.ObjectKey{serviceKey("api")}); err != nil {
		t.Fatal(err)
	}
	x.until(4)
	if got := show(x.has); got != "10.96.0.1:80/tcp of default/web inside reject" {
		t.Errorf("the subscriber has %s", got)
	}
}
