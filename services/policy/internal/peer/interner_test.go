// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package peer

import (
	"fmt"
	"strings"
	"testing"
	"unsafe"

	"github.com/sluice-net/sluice/model/label"
)

func TestInternerMakesEqualTextsOne(t *testing.T) {
	var in Interner
	fresh := func() label.Label {
		return label.Kubernetes(strings.Clone("app"), strings.Clone("web"))
	}
	a, b := in.Label(fresh()), in.Label(fresh())
	if a != fresh() || unsafe.StringData(a.Key) != unsafe.StringData(b.Key) || unsafe.StringData(a.Value) != unsafe.StringData(b.Value) {
		t.Errorf("%v and %v do not share their texts", a, b)
	}
	// The memory of the interner is limited.
	for i := range 3 * maxInterned {
		if l := label.Kubernetes("app", fmt.Sprint(i)); in.Label(l) != l {
			t.Fatalf("%v became %v", l, in.Label(l))
		}
	}
	if len(in.texts) > maxInterned {
		t.Errorf("%d texts are remembered, the limit is %d", len(in.texts), maxInterned)
	}
}
