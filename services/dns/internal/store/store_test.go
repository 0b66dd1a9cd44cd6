// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package store

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/store"
	"github.com/sluice-net/sluice/kit/store/storetest"
	"github.com/sluice-net/sluice/services/dns/internal/names"
)

func record(name string, n int) names.Name {
	web, other := names.Asker{Endpoint: 7, Tenant: "namespace shop"}, names.Asker{}
	out := names.Name{Name: name, Payer: web, Chain: []string{"edge.example.", "cdn.example."}}
	for i := range n {
		a := netip.AddrFrom4([4]byte{192, 0, 2, byte(i)})
		if i%2 == 1 {
			a = netip.MustParseAddr(fmt.Sprintf("2001:db8::%x", i))
		}
		out.Entries = append(out.Entries, names.Entry{
			Addr: a, Expires: time.Unix(1_800_000_000+int64(i), 0), Payer: []names.Asker{web, other}[i%2],
		})
	}
	return out
}

func TestRecordsAreReadAsTheyWereWritten(t *testing.T) {
	for _, n := range []int{1, 2, 1024} {
		want := record("a.example.", n)
		b := encode(want)
		got, err := decode(want.Name, b)
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Fatalf("%d addresses: %v\n%+v, want\n%+v", n, err, got, want)
		}
		for i := range b {
			if _, err := decode("a.", b[:i]); err == nil {
				t.Fatalf("%d of %d bytes were accepted", i, len(b))
			}
		}
		if _, err := decode("a.", append(b, 0)); err == nil {
			t.Error("one more byte was accepted")
		}
	}
}

func TestNamesSurviveARestart(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	s, list, aside, err := Open(dir)
	if err != nil || aside != nil || len(list) != 0 {
		t.Fatal(list, aside, err)
	}
	if err := s.Save([]names.Name{record("a.", 3), record("b.", 1)}, nil); err != nil {
		t.Fatal(err)
	}
	if err := s.Save([]names.Name{record("c.", 2)}, []string{"a.", "unknown."}); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s, list, aside, err = Open(dir)
	if err != nil || aside != nil || !reflect.DeepEqual(list, []names.Name{record("b.", 1), record("c.", 2)}) {
		t.Errorf("%v, %v, %+v", aside, err, list)
	}
	if _, _, _, err := Open(dir); !errors.Is(err, store.ErrLocked) {
		t.Errorf("opened twice: %v", err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

// TestCorruptFilesArePutAside: if the file is corrupt, the service starts without names, and keeps the file for
// examination.
func TestCorruptFilesArePutAside(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	s, _, _, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Save([]names.Name{record("a.", 3), record("b.", 1)}, nil); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(dir, "names.*.db"))
	if err != nil || len(files) != 1 {
		t.Fatal(files, err)
	}
	storetest.Sweep(t, storetest.State{
		Dir: dir,
		Open: func(dir string) (string, error) {
			s, list, aside, err := Open(dir)
			if err != nil {
				return "", err
			}
			return fmt.Sprintf("%+v", list), errors.Join(aside, s.Close())
		},
		Replaceable: []string{filepath.Base(files[0])},
		PutAside:    map[string]string{filepath.Base(files[0]): AsideName},
	})
}

func TestDirectoryOfOthersIsRefused(t *testing.T) {
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if _, _, _, err := Open(dir); !errors.Is(err, store.ErrPermission) {
		t.Error(err)
	}
}
