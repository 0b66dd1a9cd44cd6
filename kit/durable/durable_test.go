// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package durable

import (
	"bytes"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"syscall"
	"testing"
)

type pet struct {
	Name string `json:"name"`
	Legs int    `json:"legs"`
}

var pets = Schema{Name: "test.pet", Version: 2, Oldest: 1}

func TestSavedRecordLoadsUnchanged(t *testing.T) {
	for _, s := range []Sync{SyncNone, SyncFile, SyncAll} {
		path := filepath.Join(t.TempDir(), "cat.json")
		want := pet{"Ada <&>  ", 4}
		if err := Save(path, pets, want, s); err != nil {
			t.Fatal(err)
		}
		var got pet
		if err := Load(path, 1<<10, pets, &got); err != nil || got != want {
			t.Fatalf("sync %d: Load = %+v, %v; want %+v", s, got, err, want)
		}
		fi, err := os.Stat(path)
		if err != nil || fi.Mode().Perm() != 0o600 {
			t.Errorf("mode is %v, %v; want 0600", fi.Mode(), err)
		}
	}
}

func TestEveryFlippedBitIsSeen(t *testing.T) {
	want := pet{"Bo", 3}
	whole, err := Encode(pets, want)
	if err != nil {
		t.Fatal(err)
	}
	for i := range whole[:len(whole)-1] {
		for bit := range 8 {
			b := bytes.Clone(whole)
			b[i] ^= 1 << bit
			var got pet
			// JSON field names match case-insensitively, so a flipped case bit is harmless.
			if err := Decode(b, pets, &got); err == nil && got != want {
				t.Fatalf("byte %d bit %d: decoded as %+v without an error: %s", i, bit, got, b)
			}
		}
	}
	for n := range len(whole) - 1 {
		if err := Decode(whole[:n], pets, new(pet)); !errors.Is(err, ErrCorrupt) {
			t.Fatalf("the first %d bytes: %v, want ErrCorrupt", n, err)
		}
	}
}

func TestErrorsNameFileAndField(t *testing.T) {
	dir := t.TempDir()
	mk := func(s Schema, v any) []byte {
		b, err := Encode(s, v)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	good := mk(pets, pet{"Cy", 4})
	for _, c := range []struct {
		name  string
		data  []byte
		want  error
		field string
	}{
		{"empty", nil, ErrCorrupt, ""},
		{"not json", []byte("\x00\x01"), ErrCorrupt, ""},
		{"trailing", append(bytes.Clone(good), "{}"...), ErrCorrupt, ""},
		{"checksum", bytes.Replace(good, []byte("Cy"), []byte("Cz"), 1), ErrCorrupt, "crc32c"},
		{"head", bytes.Replace(good, []byte(`"version":2`), []byte(`"version":1`), 1), ErrCorrupt, "crc32c"},
		{"no data", []byte(`{"schema":"test.pet","version":1,"crc32c":"0"}`), ErrCorrupt, "data"},
		{"foreign", mk(Schema{Name: "test.car", Version: 2}, pet{}), ErrForeign, "schema"},
		{"future", mk(Schema{Name: "test.pet", Version: 3}, pet{}), ErrVersion, "version"},
		{"type", mk(pets, map[string]any{"name": "x", "legs": "four"}), ErrCorrupt, "data.legs"},
		{"unknown field", mk(pets, map[string]any{"wings": 2}), ErrCorrupt, "data"},
		{"huge", bytes.Repeat([]byte(" "), 2000), ErrTooLarge, ""},
	} {
		path := filepath.Join(dir, c.name)
		if err := os.WriteFile(path, c.data, 0o600); err != nil {
			t.Fatal(err)
		}
		err := Load(path, 1000, pets, new(pet))
		var re *RecordError
		if !errors.Is(err, c.want) || !errors.As(err, &re) || re.File != path || re.Field != c.field {
			t.Errorf("%s: %v; want %v in %s at field %q", c.name, err, c.want, path, c.field)
		}
		if after, _ := os.ReadFile(path); !bytes.Equal(after, c.data) {
			t.Errorf("%s: reading changed the file", c.name)
		}
	}
	if err := Load(filepath.Join(dir, "absent"), 1000, pets, new(pet)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("absent file: %v, want fs.ErrNotExist", err)
	}
	if err := Decode(mk(Schema{Name: "test.pet", Version: 1}, pet{"old", 1}), pets, new(pet)); err != nil {
		t.Errorf("a version that is still read: %v", err)
	}
}

func TestReadFileRefusesWhatIsNotAPlainFile(t *testing.T) {
	dir := t.TempDir()
	fifo, link := filepath.Join(dir, "fifo"), filepath.Join(dir, "link")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/etc/hostname", link); err != nil {
		t.Fatal(err)
	}
	for _, p := range []string{fifo, link, dir} {
		if b, err := ReadFile(p, 100); err == nil {
			t.Errorf("ReadFile(%s) = %q, want an error", p, b)
		}
	}
}

func TestListKeepsGoodRecordsBesideBadOnes(t *testing.T) {
	dir := t.TempDir()
	for _, n := range []string{"a", "b", "c"} {
		if err := Save(filepath.Join(dir, n+".json"), pets, pet{n, 1}, SyncNone); err != nil {
			t.Fatal(err)
		}
	}
	broken := filepath.Join(dir, "b.json")
	for path, content := range map[string]string{
		broken:                                "{",
		filepath.Join(dir, "notes.txt"):       "not ours",
		filepath.Join(dir, ".d.json.tmp-123"): "half",
	} {
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	got, bad, err := List[pet](dir, ".json", 1000, pets)
	want := []Record[pet]{{"a", pet{"a", 1}}, {"c", pet{"c", 1}}}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("List = %+v, %v; want %+v", got, err, want)
	}
	if len(bad) != 1 || !strings.HasPrefix(bad[0].Error(), broken+": ") {
		t.Errorf("bad = %v; want one error that begins with %s", bad, broken)
	}
	if b, err := os.ReadFile(broken); err != nil || string(b) != "{" {
		t.Errorf("the broken record is now %q, %v; it must stay", b, err)
	}
	names, err := RemoveTemp(dir)
	if err != nil || !reflect.DeepEqual(names, []string{".d.json.tmp-123"}) {
		t.Errorf("RemoveTemp = %q, %v", names, err)
	}
	if recs, bad, err := List[pet](filepath.Join(dir, "absent"), ".json", 1000, pets); recs != nil || bad != nil || err != nil {
		t.Errorf("List of an absent directory = %v, %v, %v", recs, bad, err)
	}
}

func TestReadersSeeOldOrNewContentWhileAWriterReplacesIt(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "x.json")
	if err := Save(path, pets, pet{strings.Repeat("x", 1), 1}, SyncNone); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		defer close(done)
		for i := range 300 {
			if err := Save(path, pets, pet{strings.Repeat("x", i*37%5000), i * 37 % 5000}, SyncNone); err != nil {
				t.Error(err)
				return
			}
		}
	})
	for reading := true; reading; {
		select {
		case <-done:
			reading = false
		default:
		}
		var p pet
		if err := Load(path, 1<<20, pets, &p); err != nil || len(p.Name) != p.Legs {
			t.Fatalf("read a mixture: %d x with legs %d, %v", len(p.Name), p.Legs, err)
		}
	}
	wg.Wait()
	if entries, _ := os.ReadDir(dir); len(entries) != 1 {
		t.Errorf("%d files are left, want 1", len(entries))
	}
}

func TestWriteThatFailsLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	target := filepath.Join(dir, "target")
	if err := os.MkdirAll(filepath.Join(target, "full"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := WriteFile(target, []byte("x"), 0o600, SyncNone); err == nil {
		t.Fatal("a file replaced a directory")
	}
	if entries, _ := os.ReadDir(dir); len(entries) != 1 {
		t.Errorf("%d entries are left, want the directory only", len(entries))
	}
	for range 2 {
		if there, err := Remove(filepath.Join(dir, "absent"), SyncAll); there || err != nil {
			t.Errorf("Remove of nothing = %v, %v", there, err)
		}
	}
}

func FuzzDecodeNeverAcceptsWhatWasNotEncoded(f *testing.F) {
	b, err := Encode(pets, pet{"seed", 4})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add([]byte(`{"schema":"test.pet","version":1,"crc32c":"00000000","data":{}}`))
	f.Add([]byte(`[[[[[[`))
	f.Fuzz(func(t *testing.T, b []byte) {
		version, data, err := Open(b, pets)
		if err != nil {
			var re *RecordError
			if !errors.As(err, &re) {
				t.Fatalf("error without a type: %v", err)
			}
			return
		}
		if version < 1 || version > 2 || !json.Valid(data) {
			t.Fatalf("accepted version %d with data %q", version, data)
		}
		again, err := Encode(Schema{Name: pets.Name, Version: version}, json.RawMessage(data))
		if err != nil {
			t.Fatal(err)
		}
		_, data2, err := Open(again, pets)
		if err != nil {
			t.Fatalf("an accepted record is refused after encoding: %v\n%s", err, again)
		}
		_ = data2
	})
}
