// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package record

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/services/datapath/internal/policy/policystream"
)

func TestEnforcedRevisionOutlivesItsProcess(t *testing.T) {
	path := filepath.Join(t.TempDir(), "policy.json")
	p := OpenPolicy(path)
	if e, err := p.Load(); err != nil || e.State != "" {
		t.Errorf("before anything was saved: %+v, %v", e, err)
	}
	for _, want := range []policystream.Enforced{
		{State: "\x00\xff3456789abcdef", Revision: 12, Sources: []string{"file", "grpc/argo"}},
		{State: "\x00\xff3456789abcdef", Revision: 13, Sources: []string{"grpc"}},
		{State: "another state678", Revision: 1},
	} {
		if err := p.Save(want); err != nil {
			t.Fatal(err)
		}
		if got, err := OpenPolicy(path).Load(); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("loaded %+v, %v; want %+v", got, err, want)
		}
	}
	if err := p.Forget(); err != nil {
		t.Fatal(err)
	}
	if err := p.Forget(); err != nil {
		t.Errorf("a second time: %v", err)
	}
	if e, err := p.Load(); err != nil || e.State != "" {
		t.Errorf("after Forget: %+v, %v", e, err)
	}
}

// TestUnreadableEnforcedRevisionIsAnError: an unreadable file must not count as none.
func TestUnreadableEnforcedRevisionIsAnError(t *testing.T) {
	path := filepath.Join(t.TempDir(), "policy.json")
	p := OpenPolicy(path)
	if err := p.Save(policystream.Enforced{State: "0123456789abcdef", Revision: 12, Sources: []string{"grpc"}}); err != nil {
		t.Fatal(err)
	}
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for n := range len(whole) {
		if n == len(whole)-1 && whole[n] == '\n' {
			continue // the final newline carries no data
		}
		if err := os.WriteFile(path, whole[:n], 0o600); err != nil {
			t.Fatal(err)
		}
		if e, err := p.Load(); err == nil || !strings.Contains(err.Error(), path) {
			t.Fatalf("the first %d of %d bytes: %+v, %v; want an error that names the file", n, len(whole), e, err)
		}
	}
	if err := os.WriteFile(path, []byte(strings.Replace(string(whole), `"version":1`, `"version":2`, 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	if e, err := p.Load(); err == nil {
		t.Errorf("of a newer version: %+v", e)
	}
}
