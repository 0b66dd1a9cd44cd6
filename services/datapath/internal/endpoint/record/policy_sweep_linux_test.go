// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package record

import (
	"bytes"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/kit/disktest"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policystream"
)

// TestDamagedPolicyRevisionIsReported: if a corrupt file counted as none, a service that lost its
// policies could lift them on the node.
func TestDamagedPolicyRevisionIsReported(t *testing.T) {
	want := policystream.Enforced{State: "0123456789abcdef", Revision: 12, Sources: []string{"grpc"}}
	path := filepath.Join(t.TempDir(), "policy.json")
	p := OpenPolicy(path)
	if err := p.Save(want); err != nil {
		t.Fatal(err)
	}
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for what, content := range damaged(t, policySchema, good) {
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		if e, err := OpenPolicy(path).Load(); (err == nil || !strings.Contains(err.Error(), path)) && !reflect.DeepEqual(e, want) {
			t.Errorf("%s: %+v, %v, want an error that names %s", what, e, err, path)
		}
		if now, err := os.ReadFile(path); err != nil || !bytes.Equal(now, content) {
			t.Errorf("%s: the file was changed: %v", what, err)
		}
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	for range 2 { // also the second time
		if e, err := OpenPolicy(path).Load(); err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("removed: %+v, %v, want an error that names %s", e, err, path)
		}
	}
	if err := OpenPolicy(path).Save(want); err != nil { // once the policies are confirmed
		t.Fatal(err)
	}
	p = OpenPolicy(path)
	if e, err := p.Load(); err != nil || !reflect.DeepEqual(e, want) {
		t.Errorf("saved again: %+v, %v", e, err)
	}
	if err := p.Forget(); err != nil {
		t.Fatal(err)
	}
	if e, err := OpenPolicy(path).Load(); err != nil || e.State != "" {
		t.Errorf("after Forget: %+v, %v, want nothing", e, err)
	}
	if left, err := os.ReadDir(filepath.Dir(path)); err != nil || len(left) != 0 {
		t.Errorf("after Forget %v is left, %v", left, err)
	}
}

// TestPowerCutKeepsThePolicyRevision cuts the power at 100 moments: a revision whose Save returned
// is present, a lost file is reported, and after Forget no file remains.
func TestPowerCutKeepsThePolicyRevision(t *testing.T) {
	root := t.TempDir()
	disk := disktest.New(t, root)
	const saves = 12
	disk.Run(t, func() {
		p := OpenPolicy(filepath.Join(root, "policy.json"))
		for n := 1; n <= saves; n++ {
			if err := p.Save(policystream.Enforced{State: "0123456789abcdef", Revision: uint64(n), Sources: []string{"grpc"}}); err != nil { //nolint:gosec // small
				t.Error(err)
			}
			disk.Mark(n)
		}
		if err := p.Forget(); err != nil {
			t.Error(err)
		}
		disk.Mark(saves + 1)
	})
	random := rand.New(rand.NewPCG(3, 9)) //nolint:gosec // the same cuts in each run
	ops := len(disk.Ops())
	for cut := range 100 {
		n := cut
		if n > ops {
			n = random.IntN(ops + 1)
		}
		after := t.TempDir()
		marked := disk.Cut(t, n, random, after)
		e, err := OpenPolicy(filepath.Join(after, "policy.json")).Load()
		switch {
		case marked == saves+1 && (err != nil || e.State != ""):
			t.Errorf("power lost after %d of %d operations: %+v, %v, after Forget", n, ops, e, err)
		case marked < saves && (err != nil || e.Revision < uint64(marked) || e.Revision > uint64(marked)+1): //nolint:gosec // small
			t.Errorf("power lost after %d of %d operations: %+v, %v, last completed Save: %d", n, ops, e, err, marked)
		}
	}
}
