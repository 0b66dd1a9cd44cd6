// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package allocator

import (
	"fmt"
	"testing"

	"github.com/sluice-net/sluice/model/identity"
)

func TestNodeLocalNumberIsAssignedAgainAfterAllOthers(t *testing.T) {
	l := newLocalNumbers(identity.MaxNodeLocal)
	want := func(text string, want identity.Numeric) {
		t.Helper()
		if n, ok := l.number(text); n != want || !ok {
			t.Fatalf("%s has %d, %t; want %d", text, n, ok, want)
		}
	}
	want("a", identity.MaxNodeLocal)
	want("b", identity.MinNodeLocal) // after the last number, the first one follows
	want("a", identity.MaxNodeLocal)
	l.release("a", identity.MaxNodeLocal)
	for i := 1; i < identity.NodeLocalSize-1; i++ {
		want(fmt.Sprint(i), identity.MinNodeLocal+identity.Numeric(i))
	}
	want("c", identity.MaxNodeLocal)
	if n, ok := l.number("d"); ok {
		t.Errorf("with all numbers taken d has %d", n)
	}
	l.release("7", identity.MinNodeLocal+7)
	want("d", identity.MinNodeLocal+7)
}

func TestNodeLocalNumbersGoOnWhereTheLastProcessStopped(t *testing.T) {
	l := newLocalNumbers(identity.MinNodeLocal + 5)
	l.restore("a", identity.MinNodeLocal+5)
	if n, _ := l.number("b"); n != identity.MinNodeLocal+6 {
		t.Errorf("b has %d, want %d", n, identity.MinNodeLocal+6)
	}
	if n, _ := l.number("a"); n != identity.MinNodeLocal+5 {
		t.Errorf("a has %d, want the number that it had", n)
	}
	if l := newLocalNumbers(identity.MinCluster); l.next != identity.MinNodeLocal {
		t.Errorf("the search begins at %d, which is not node-local", l.next)
	}
}
