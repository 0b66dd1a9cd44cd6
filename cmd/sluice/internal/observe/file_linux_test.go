// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package observe

import (
	"bufio"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/test/nodetest"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
)

// newFile opens an output file and collects its notes.
func newFile(t *testing.T, path string, most int64, keep int) (*file, *[]string) {
	t.Helper()
	var notes []string
	w := &file{path: path, most: most, keep: keep, note: func(text string) { notes = append(notes, text) }}
	if err := w.open(); err != nil {
		t.Fatal(err)
	}
	return w, &notes
}

// repairOf returns an attachment repair event of an endpoint.
func repairOf(endpoint uint32) Event {
	return Event{ObserveResponse: &datapathv1.ObserveResponse{Event: &datapathv1.ObserveResponse_Repair{
		Repair: &datapathv1.AttachmentRepair{EndpointIndex: endpoint, Uuid: "u"},
	}}}
}

func flowOf(uuid string) Event {
	return Event{ObserveResponse: &datapathv1.ObserveResponse{Event: &datapathv1.ObserveResponse_Flow{
		Flow: &datapathv1.Flow{Uuid: uuid},
	}}}
}

// numbers returns the numbers of the events in a file. Every line must be an event.
func numbers(t *testing.T, path string) (all []uint32, lost uint64) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		var e Event
		if err := json.Unmarshal(s.Bytes(), &e); err != nil {
			t.Fatalf("%s: %q: %v", path, s.Text(), err)
		}
		if e.GetLost() != nil {
			lost += e.GetLost().GetCount()
			continue
		}
		all = append(all, e.GetRepair().GetEndpointIndex())
	}
	return all, lost
}

func TestOutputFilesAreBoundedAndInOrder(t *testing.T) {
	path := filepath.Join(t.TempDir(), "flows.json")
	w, _ := newFile(t, path, 2000, 3)
	for n := range uint32(1000) {
		if err := w.Write(repairOf(n + 1)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	found, err := filepath.Glob(path + "*")
	if err != nil || len(found) != 3 {
		t.Fatalf("files %q, %v", found, err)
	}
	next := uint32(0)
	for _, name := range []string{path + ".2", path + ".1", path} {
		info, err := os.Stat(name)
		if err != nil {
			t.Fatal(err)
		}
		if info.Size() > 2000 || info.Mode().Perm() != 0o600 {
			t.Errorf("%s has %d bytes and mode %v", name, info.Size(), info.Mode())
		}
		slots, _ := numbers(t, name)
		for _, n := range slots {
			if next != 0 && n != next {
				t.Fatalf("%s: event %d, want %d", name, n, next)
			}
			next = n + 1
		}
	}
	if next != 1001 {
		t.Errorf("the last event is %d, want 1000", next-1)
	}
}

func TestOneOutputFileBeginsAnew(t *testing.T) {
	path := filepath.Join(t.TempDir(), "flows.json")
	w, _ := newFile(t, path, 300, 1)
	for n := range uint32(100) {
		if err := w.Write(repairOf(n + 1)); err != nil {
			t.Fatal(err)
		}
	}
	if found, _ := filepath.Glob(path + "*"); len(found) != 1 {
		t.Errorf("files %q", found)
	}
	if slots, _ := numbers(t, path); len(slots) == 0 || slots[len(slots)-1] != 100 {
		t.Errorf("events %v, want 100 at the end", slots)
	}
}

// TestEventsOfAFullDiskAreCounted writes to a disk of 64 KiB, which becomes full and is freed again.
func TestEventsOfAFullDiskAreCounted(t *testing.T) {
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	ballast := filepath.Join(dir, "ballast")
	if err := os.WriteFile(ballast, make([]byte, 32<<10), 0o600); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "flows.json")
	w, notes := newFile(t, path, 1<<20, 2)
	for n := range uint32(10000) {
		if err := w.Write(repairOf(n + 1)); err != nil {
			t.Fatal(err)
		}
	}
	if w.lost == 0 || len(*notes) != 1 || !strings.Contains((*notes)[0], "no space left on device") {
		t.Fatalf("%d lost, notes %q", w.lost, *notes)
	}
	lost := w.lost
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	for n := range uint32(10) {
		if err := w.Write(repairOf(20000 + n)); err != nil {
			t.Fatal(err)
		}
	}
	if len(*notes) != 2 || !strings.Contains((*notes)[1], "works again") {
		t.Errorf("notes %q", *notes)
	}
	if err := w.Close(); err == nil || !strings.Contains(err.Error(), "events were not written to") {
		t.Errorf("closed with %v", err)
	}
	slots, said := numbers(t, path)
	if said != lost || uint64(len(slots)) != 10010-lost || slots[len(slots)-1] != 20009 {
		t.Errorf("%d events and %d lost in the file, want %d and %d", len(slots), said, 10010-lost, lost)
	}
}

func TestOutputFileIsOnesOwn(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "flows.json")
	if err := os.WriteFile(path, []byte(`{"uuid":"1"}`+"\n"+`{"end`), 0o644); err != nil { //nolint:gosec // meant
		t.Fatal(err)
	}
	w, _ := newFile(t, path, 1<<20, 2)
	if err := w.Write(repairOf(2)); err != nil {
		t.Fatal(err)
	}
	content, err := os.ReadFile(path)
	if begun := "{\"uuid\":\"1\"}\n{\"end\n{\"identity\":0,"; err != nil || !strings.HasPrefix(string(content), begun) ||
		!strings.Contains(string(content), `"endpointId":2,"type":"repair"}`) {
		t.Errorf("after half a line: %q, %v", content, err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	second := &file{path: path, most: 1 << 20, keep: 2}
	if err := second.open(); err == nil || !strings.Contains(err.Error(), "another process writes") {
		t.Errorf("a second writer: %v", err)
	}
	empty := filepath.Join(dir, "empty")
	if err := os.WriteFile(empty, nil, 0o644); err != nil { //nolint:gosec // meant
		t.Fatal(err)
	}
	unwritten, _ := newFile(t, empty, 1<<20, 2)
	if info, err := os.Stat(empty); err != nil || info.Mode().Perm() != 0o644 {
		t.Errorf("an empty file of another program has the mode %v, %v", info.Mode(), err)
	}
	if err := unwritten.Write(repairOf(3)); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(empty); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("with an event, a file that others could read has the mode %v, %v", info.Mode(), err)
	}
	link, fifo := filepath.Join(dir, "link"), filepath.Join(dir, "fifo")
	if err := os.Symlink(path, link); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	foreign := filepath.Join(dir, "foreign")
	if err := errors.Join(os.WriteFile(foreign, nil, 0o600), os.Chown(foreign, 65534, 0)); err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{link, fifo, dir, foreign, "/dev/null", filepath.Join(dir, "no", "such")} {
		if err := (&file{path: bad, most: 1 << 20, keep: 2}).open(); err == nil {
			t.Errorf("%s was opened", bad)
		}
	}
}

// TestOutputFilesOfOtherProgramsAreRefused: a file that does not begin with an event keeps its content, mode and
// name, as the output file and as a rotated file.
func TestOutputFilesOfOtherProgramsAreRefused(t *testing.T) {
	n := nodetest.New(t, Command)
	dir := t.TempDir()
	path := filepath.Join(dir, "precious.conf")
	for _, name := range []string{"precious.conf", "precious.conf.1", "precious.conf.3"} {
		for _, text := range []string{
			"key = value\n", "\n", "{}\n", "[1]\n", `{"level":"info"`, `{"time":"2026-11-28T13:00:00Z","level":"INFO",` +
				`"msg":"x"}` + "\n",
		} {
			other := filepath.Join(dir, name)
			if err := os.WriteFile(other, []byte(text), 0o644); err != nil { //nolint:gosec // meant
				t.Fatal(err)
			}
			_, errOut := n.Want(t, invocation.ExitFailed, "observe", "--output-file", path, "--max-files=4")
			if !strings.Contains(errOut, other+": it exists and does not begin with an event") {
				t.Errorf("%s with %q: %s", name, text, errOut)
			}
			content, rerr := os.ReadFile(other)
			info, serr := os.Stat(other)
			if err := errors.Join(rerr, serr); err != nil || string(content) != text || info.Mode().Perm() != 0o644 {
				t.Errorf("%s: %q, %v, %v", name, content, info.Mode(), err)
			}
			if err := os.Remove(other); err != nil {
				t.Fatal(err)
			}
		}
	}
	// Its own files are accepted, including files of other releases and files with an incomplete first event.
	for _, text := range []string{
		`{"time":"2026-11-28T13:00:00Z","uuid":"0a","nodeName":"a","later":1}` + "\n", `{"lost":3,"lostBy":"file"}` + "\n",
		`{"time":"2026-11-28T13:00:00Z","note":"restarted"}` + "\n", `{"time":"2026-11-`, `{"ti`, "",
	} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		n.Want(t, 0, "observe", "--output-file", path)
		<-n.Observed
	}
	// A rotation does not replace a file that another program created meanwhile.
	w, _ := newFile(t, path, 200, 2)
	for range 2 {
		if err := w.Write(flowOf(strings.Repeat("a", 150))); err != nil {
			t.Fatal(err)
		}
	}
	late := path + ".1"
	if err := os.WriteFile(late, []byte("precious"), 0o644); err != nil { //nolint:gosec // meant
		t.Fatal(err)
	}
	if err := w.Write(flowOf(strings.Repeat("b", 150))); err != nil {
		t.Fatal(err)
	}
	if content, err := os.ReadFile(late); err != nil || string(content) != "precious" {
		t.Errorf("the file that came meanwhile has %q, %v", content, err)
	}
	if err := w.Close(); err == nil || !strings.Contains(err.Error(), "1 event was not written") {
		t.Errorf("closed with %v", err)
	}
}

func TestObserveWritesToAFile(t *testing.T) {
	n := nodetest.New(t, Command)
	path := filepath.Join(t.TempDir(), "flows.json")
	out, _ := n.Want(t, 0, "observe", "--output-file", path)
	<-n.Observed
	content, err := os.ReadFile(path)
	if err != nil || out != "" || strings.Count(string(content), "\n") != 2 ||
		!strings.Contains(string(content), `"reason":"spoofed-ip"`) {
		t.Errorf("standard output %q, file %q, %v", out, content, err)
	}
	for line := range strings.Lines(string(content)) {
		var e Event
		if err := json.Unmarshal([]byte(line), &e); err != nil || !e.At().IsZero() && e.At().Before(time.Unix(1, 0)) {
			t.Errorf("%q: %v", line, err)
		}
	}
}
