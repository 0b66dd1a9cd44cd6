// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// TestFloodOfObjectsKeepsNoServiceOfOthersOut: one namespace has more services and slices than the limits. Objects of
// other namespaces are still stored. When the first namespace has fewer objects, its further objects are stored, too.
func TestFloodOfObjectsKeepsNoServiceOfOthersOut(t *testing.T) {
	o := startShared(t, Limits{Services: 20, Slices: 20, Frontends: 1000, Backends: 1000, BackendsPerService: 500})
	for i := range 30 {
		o.give(serviceText("evil", fmt.Sprintf("s%02d", i), fmt.Sprint("10.96.1.", i+1), 1),
			sliceText("evil", fmt.Sprintf("s%02d", i), 1, fmt.Sprint("10.244.9.", i+1)))
	}
	const led = "10.96.0.1:80/tcp of shop/web:p0 inside 10.244.0.5:8080"
	o.give(serviceText("shop", "web", "10.96.0.1", 1), sliceText("shop", "web", 1, "10.244.0.5"))
	if got := o.servedAt("10.96.0.1"); got != led {
		t.Errorf("before the first levels: %q", got)
	}
	kept := func() (services, slices, waiting int) {
		t.Helper()
		st, err := o.Reader().Status(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return st.Services, st.Slices, st.Refused
	}
	listed := make(map[service.ObjectKey]struct{})
	for i := range 30 {
		listed[keyOf(service.KindService, "evil", fmt.Sprintf("s%02d", i))] = struct{}{}
		listed[keyOf(service.KindSlice, "evil", fmt.Sprintf("s%02d-x", i))] = struct{}{}
	}
	listed[keyOf(service.KindService, "shop", "web")] = struct{}{}
	listed[keyOf(service.KindSlice, "shop", "web-x")] = struct{}{}
	if err := o.Objects.Complete(t.Context(), listed); err != nil {
		t.Fatal(err)
	}
	o.level()
	if services, slices, waiting := kept(); services != 18 || slices != 18 || waiting != 26 {
		t.Errorf("%d services and %d slices are kept, %d are refused, want 18, 18 and 26", services, slices, waiting)
	}
	if got := o.servedAt("10.96.1.17"); got == "" {
		t.Error("the seventeenth of the flood is not stored, although it fits")
	}
	o.give(serviceText("shop", "more", "10.96.0.2", 1), serviceText("kube-system", "kube-dns", "10.96.0.10", 1))
	o.level()
	if got := o.servedAt("10.96.0.2") + o.servedAt("10.96.0.10"); !strings.Contains(got, "shop/more") ||
		!strings.Contains(got, "kube-system/kube-dns") {
		t.Errorf("the new services of others: %q", got)
	}
	const refuses = "10.96.1.17:80/tcp of evil/s16:p0 exceeds the share inside reject"
	if got := o.servedAt("10.96.1.17"); got != refuses {
		t.Errorf("the newest of the flood: %q, want %q", got, refuses)
	}
	for i := range 12 {
		o.remove(keyOf(service.KindService, "evil", fmt.Sprintf("s%02d", i)), keyOf(service.KindSlice, "evil",
			fmt.Sprintf("s%02d-x", i)))
	}
	o.level()
	// The namespace with too many objects keeps 18 services and 18 slices. There are also two services and a slice of
	// shop, and one service of system.
	if services, slices, waiting := kept(); services != 19 || slices != 18 || waiting != 3 {
		t.Errorf("%d services and %d slices are kept, %d are refused, want 19, 18 and 3", services, slices, waiting)
	}
	if got := o.servedAt("10.96.1.17"); got == "" {
		t.Error("an object that was withdrawn does not come back")
	}
}

// TestObjectsOfASourceThatIsGoneMayExceedTheirShare: an API server is no longer configured, and its objects stay.
// When the limits are lowered, objects of other sources take the capacity of these objects.
func TestObjectsOfASourceThatIsGoneMayExceedTheirShare(t *testing.T) {
	c := &clock{now: time.Unix(1e9, 0)}
	config, dir := testConfig(c), t.TempDir()
	config.Limits = Limits{Services: 20, Slices: 20, Frontends: 100, Backends: 100, BackendsPerService: 50}
	o := &apiSource{running: start(t, config, dir, managed.SourceKubernetes), clock: c}
	o.Objects = o.running.Objects(managed.SourceKubernetes)
	for i := range 5 {
		o.give(serviceText("shop", fmt.Sprint("s", i), fmt.Sprint("10.96.1.", i+1), 1))
	}
	o.complete()
	o.stop()
	config.Limits.Services = 3
	o.running = start(t, config, dir)
	o.level()
	refusing := 0
	for _, text := range o.allFrontends() {
		if strings.Contains(text, "exceeds the share") {
			refusing++
		}
	}
	if refusing != 2 {
		t.Errorf("%d services refuse connections, want 2", refusing)
	}
}
