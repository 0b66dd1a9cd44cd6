// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package record

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"

	"github.com/sluice-net/sluice/kit/disktest"
	"github.com/sluice-net/sluice/kit/durable"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// damaged returns corrupted variants of a record's file, none of which may load.
func damaged(t *testing.T, s durable.Schema, good []byte) map[string][]byte {
	t.Helper()
	random := rand.New(rand.NewPCG(1, uint64(len(good)))) //nolint:gosec // the same corruption in each run
	noise := make([]byte, len(good))
	for i := range noise {
		noise[i] = byte(random.Uint32())
	}
	all := map[string][]byte{"text": []byte("hello\n"), "zeros": make([]byte, len(good)), "random bytes": noise, "twice": append(bytes.Clone(good), good...)}
	for n := range len(good) - 1 { // the last byte is the newline and carries no data
		all[fmt.Sprintf("the first %d bytes", n)] = good[:n]
	}
	for range 50 {
		at, bit := random.IntN(len(good)-1), random.IntN(8)
		flipped := bytes.Clone(good)
		flipped[at] ^= 1 << bit
		all[fmt.Sprintf("bit %d of byte %d flipped", bit, at)] = flipped
	}
	_, data, err := durable.Open(good, s)
	if err != nil {
		t.Fatal(err)
	}
	for name, other := range map[string]durable.Schema{
		"a newer version": {Name: s.Name, Version: s.Version + 1}, "another schema": {Name: "sluice.other", Version: s.Version},
	} {
		if all[name], err = durable.Encode(other, json.RawMessage(data)); err != nil {
			t.Fatal(err)
		}
	}
	return all
}

// TestDamagedEndpointIsReported corrupts the record of each phase in every way, next to a good
// record. The file never loads, is always reported, and stays.
func TestDamagedEndpointIsReported(t *testing.T) {
	for _, phase := range phases {
		t.Run(string(phase), func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "endpoints")
			s, err := Open(dir, "boot", log.Discard())
			if err != nil {
				t.Fatal(err)
			}
			victim, other := sample(), sample()
			victim.Phase = phase
			other.Spec.Owner.ContainerID = "c2"
			if err := errors.Join(s.Save(victim), s.Save(other), s.Close()); err != nil {
				t.Fatal(err)
			}
			path := s.path(victim.Spec.Owner, phase)
			good, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			for what, content := range damaged(t, schema, good) {
				if err := os.WriteFile(path, content, 0o600); err != nil {
					t.Fatal(err)
				}
				s, err := Open(dir, "boot", log.Discard())
				if err != nil {
					t.Fatal(err)
				}
				records, bad, err := s.Load()
				if err := errors.Join(err, s.Close()); err != nil {
					t.Fatalf("%s: %v", what, err)
				}
				switch {
				case len(records) == 2 && len(bad) == 0 && strings.Contains(what, "flipped"): // the case of a letter in a field's name
					for _, r := range records {
						if r.Spec.Owner == victim.Spec.Owner && !reflect.DeepEqual(r, victim) {
							t.Errorf("%s: loaded %+v", what, r)
						}
					}
				case len(records) != 1 || !reflect.DeepEqual(records[0], other) || len(bad) != 1:
					t.Errorf("%s: %d records, unreadable %v", what, len(records), bad)
				case bad[0].Key != victim.Spec.Owner.Key() || bad[0].File != path || !strings.Contains(bad[0].Err.Error(), path):
					t.Errorf("%s: %+v, want the key of the owner and %s", what, bad[0], path)
				}
				if now, err := os.ReadFile(path); err != nil || !bytes.Equal(now, content) {
					t.Errorf("%s: the file was changed: %v", what, err)
				}
			}
		})
	}
}

// TestDamagedBootIsKeptAndReported: without the boot file, the records may be of running pods, so
// all of them stay.
func TestDamagedBootIsKeptAndReported(t *testing.T) {
	good, err := durable.Encode(bootSchema, boot{"b1"})
	if err != nil {
		t.Fatal(err)
	}
	for what, content := range damaged(t, bootSchema, good) {
		if strings.Contains(what, "flipped") && durable.Decode(content, bootSchema, &boot{}) == nil {
			continue // the case of a letter in a field's name
		}
		for _, there := range []bool{true, false} {
			dir := filepath.Join(t.TempDir(), "endpoints")
			path := dir + bootSuffix
			if err := os.WriteFile(path, content, 0o600); err != nil {
				t.Fatal(err)
			}
			junk := filepath.Join(dir, "x.json")
			if there {
				if err := errors.Join(os.Mkdir(dir, 0o700), os.WriteFile(junk, nil, 0o600)); err != nil {
					t.Fatal(err)
				}
			}
			var out bytes.Buffer
			s, err := Open(dir, "b2", log.New(&out, nil))
			if !there {
				if !errors.Is(err, ErrGone) || !strings.Contains(err.Error(), path) {
					t.Errorf("%s, without the directory: %v, want ErrGone that names %s", what, err, path)
				}
				if now, err := os.ReadFile(path); err != nil || !bytes.Equal(now, content) {
					t.Errorf("%s: the refused file was changed: %v", what, err)
				}
				continue
			}
			if err != nil {
				t.Fatal(err)
			}
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			if !strings.Contains(out.String(), path) {
				t.Errorf("%s: the log does not name %s: %s", what, path, out.String())
			}
			if _, err := os.Stat(junk); err != nil {
				t.Errorf("%s: an unreadable record was removed: %v", what, err)
			}
			if kept, err := os.ReadFile(path + damagedSuffix); err != nil || !bytes.Equal(kept, content) {
				t.Errorf("%s: the corrupt file is not kept: %v", what, err)
			}
		}
	}
}

// TestRecordsOnADiskThatTakesNoWrites fails each operation of a save and of a removal in turn.
// Afterwards, either the old or the new state loads.
func TestRecordsOnADiskThatTakesNoWrites(t *testing.T) {
	for _, errno := range []syscall.Errno{syscall.ENOSPC, syscall.EDQUOT, syscall.EROFS, syscall.EIO} {
		for _, what := range []string{"save", "remove"} {
			for bad := 0; ; bad++ {
				dir := filepath.Join(t.TempDir(), "endpoints")
				s, err := Open(dir, "boot", log.Discard())
				if err != nil {
					t.Fatal(err)
				}
				creating, ready := sample(), sample()
				creating.Phase = endpoint.PhaseCreating
				if err := s.Save(creating); err != nil {
					t.Fatal(err)
				}
				disk := disktest.New(t, dir)
				n := 0
				disk.Fail(func(disktest.Op) error {
					if n++; n > bad {
						return errno
					}
					return nil
				})
				disk.Run(t, func() {
					if what == "save" {
						err = s.Save(ready)
					} else {
						err = s.Remove(ready.Spec.Owner)
					}
				})
				if err != nil && (!errors.Is(err, endpoint.ErrStorage) || !errors.Is(err, errno) || !strings.Contains(err.Error(), dir)) {
					t.Errorf("%s, %v after %d operations: %v, want ErrStorage with the file", what, errno, bad, err)
				}
				records, unreadable, lerr := s.Load()
				switch {
				case lerr != nil || len(unreadable) != 0:
					t.Errorf("%s, %v after %d operations: unreadable %v, %v", what, errno, bad, unreadable, lerr)
				case err != nil && what == "remove" && len(records) == 0: // completed, except for a name that did not exist
				case err != nil && (len(records) != 1 || !reflect.DeepEqual(records[0], creating) && (what == "remove" || !reflect.DeepEqual(records[0], ready))):
					t.Errorf("%s, %v after %d operations: %+v", what, errno, bad, records)
				}
				if err := errors.Join(s.Save(ready), s.Err(), s.Close()); err != nil {
					t.Errorf("with space again: %v", err)
				}
				if err == nil {
					break // fewer operations than that
				}
			}
		}
	}
}
