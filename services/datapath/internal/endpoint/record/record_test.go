// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package record

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/disktest"
	"github.com/sluice-net/sluice/kit/durable"
	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/deletion"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

func TestMain(m *testing.M) {
	disktest.InMemory()
	leaktest.Main(m)
}

func sample() endpoint.Record {
	addrs := []netip.Addr{netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("fd00::2")}
	return endpoint.Record{
		Phase: endpoint.PhaseReady, BootID: "boot",
		Spec: endpoint.Spec{
			Owner: workload.Owner{ContainerID: "c1", Interface: "eth0"}, Netns: "/run/netns/c1", Addrs: addrs,
			Labels: []label.Label{{Source: "cni", Key: "app", Value: "web"}},
			Ports:  []workload.NamedPort{{Name: "http", Port: 80, Protocol: 6}},
		},
		Namespace: endpoint.NamespaceID{Dev: 4, Inode: 4026532000},
		Device: endpoint.Device{
			HostName: "sl0123456789a", HostIndex: 7, HostMAC: endpoint.MAC{2, 0, 0, 0, 0, 1},
			Name: "eth0", Index: 2, MAC: endpoint.MAC{2, 0, 0, 0, 0, 2}, MTU: 1500, Addrs: addrs,
		},
		Identity: endpoint.Identity{Number: 256, Labels: []label.Label{{Source: "cni", Key: "app", Value: "web"}}},
		Slot:     3, Created: time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC),
	}
}

// TestSecondProcessIsKeptOut: two owners of the same endpoints would undo each other's work.
func TestSecondProcessIsKeptOut(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "endpoints")
	first, err := Open(dir, "boot", log.Discard())
	if err != nil {
		t.Fatal(err)
	}
	if second, err := open(dir, "boot", log.Discard(), 0); !errors.Is(err, durable.ErrLocked) {
		t.Errorf("second open: got %v, %v, want ErrLocked", second, err)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	third, err := Open(dir, "boot", log.Discard())
	if err != nil {
		t.Fatalf("Open after Close: %v", err)
	}
	if err := third.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestWhatIsSavedIsLoaded(t *testing.T) {
	s, err := Open(filepath.Join(t.TempDir(), "endpoints"), "boot", log.Discard())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	want := sample()
	for range 2 { // saving again replaces
		if err := s.Save(want); err != nil {
			t.Fatal(err)
		}
	}
	got, bad, err := s.Load()
	if err != nil || len(bad) != 0 || len(got) != 1 || !reflect.DeepEqual(got[0], want) {
		t.Errorf("loaded %+v, %v, %v\nwant %+v", got, bad, err, want)
	}
	for range 2 { // removing again is no error
		if err := s.Remove(want.Spec.Owner); err != nil {
			t.Fatal(err)
		}
	}
	if got, bad, err := s.Load(); len(got)+len(bad) != 0 || err != nil {
		t.Errorf("after the removal: %v, %v, %v", got, bad, err)
	}
}

// version1 is sample as it was written before records had managers.
const version1 = `{"schema":"sluice.datapath.endpoint","version":1,"crc32c":"b1d8eb59","data":{"phase":"ready","bootId":"boot",` +
	`"spec":{"owner":{"containerId":"c1","interfaceName":"eth0"},"netns":"/run/netns/c1","addrs":["10.0.0.2","fd00::2"],` +
	`"labels":[{"source":"cni","key":"app","value":"web"}],"ports":[{"name":"http","port":80,"protocol":6}]},` +
	`"namespace":{"dev":4,"inode":4026532000},"device":{"hostName":"sl0123456789a","hostIndex":7,"hostMac":"02:00:00:00:00:01",` +
	`"name":"eth0","index":2,"mac":"02:00:00:00:00:02","mtu":1500,"addrs":["10.0.0.2","fd00::2"]},` +
	`"identity":{"number":256,"labels":[{"source":"cni","key":"app","value":"web"}]},"slot":3,"created":"2026-01-02T03:04:05.000000006Z"}}`

func TestRecordOfTheVersionBeforeIsRead(t *testing.T) {
	s, err := Open(t.TempDir(), "boot", log.Discard())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	want := sample()
	if err := os.WriteFile(s.path(want.Spec.Owner, want.Phase), []byte(version1), 0o600); err != nil {
		t.Fatal(err)
	}
	got, bad, err := s.Load()
	if err != nil || len(bad) != 0 || len(got) != 1 || !reflect.DeepEqual(got[0], want) {
		t.Errorf("loaded %+v, %v, %v\nwant %+v", got, bad, err, want)
	}
}

// TestRecordOfVersion3IsRead: a record of version 3 is loaded like a record of version 4 whose new fields are empty.
func TestRecordOfVersion3IsRead(t *testing.T) {
	s, err := Open(t.TempDir(), "boot", log.Discard())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	want := sample()
	b, err := durable.Encode(durable.Schema{Name: schema.Name, Version: 3}, want)
	if err != nil || strings.Contains(string(b), "portMappings") || strings.Contains(string(b), "leaveSockets") {
		t.Fatalf("a record without port mappings is %s, %v", b, err)
	}
	if err := os.WriteFile(s.path(want.Spec.Owner, want.Phase), b, 0o600); err != nil {
		t.Fatal(err)
	}
	got, bad, err := s.Load()
	if err != nil || len(bad) != 0 || len(got) != 1 || !reflect.DeepEqual(got[0], want) {
		t.Errorf("loaded %+v, %v, %v\nwant %+v", got, bad, err, want)
	}
}

func TestHostPortsAndSocketsAreRemembered(t *testing.T) {
	s, err := Open(t.TempDir(), "boot", log.Discard())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	want := sample()
	want.Spec.LeaveSockets = true
	want.Spec.PortMappings = []endpoint.PortMapping{
		{HostPort: 8080, ContainerPort: 80, Protocol: workload.TCP},
		{HostPort: 53, ContainerPort: 5353, Protocol: workload.UDP, HostIP: netip.MustParseAddr("192.0.2.1")},
	}
	if err := s.Save(want); err != nil {
		t.Fatal(err)
	}
	got, bad, err := s.Load()
	if err != nil || len(bad) != 0 || len(got) != 1 || !reflect.DeepEqual(got[0], want) {
		t.Errorf("loaded %+v, %v, %v\nwant %+v", got, bad, err, want)
	}
	// An invalid mapping is rejected.
	want.Spec.PortMappings[0].HostPort = 0
	if err := want.Validate(); err == nil || !strings.Contains(err.Error(), "spec.portMappings") {
		t.Errorf("a record with host port 0: %v", err)
	}
}

// TestRecordOfAReservedIdentityIsRefused: a record that gives a container the identity of the host is rejected.
func TestRecordOfAReservedIdentityIsRefused(t *testing.T) {
	for number, ok := range map[uint32]bool{
		0: false, 1: false, 4: false, 5: true, 6: false, 255: false,
		256: true, 0xFEFFFF: true, 0xFF0000: false, 1 << 24: false,
	} {
		r := sample()
		r.Identity.Number = number
		err := r.Validate()
		if ok != (err == nil) || !ok && !strings.Contains(err.Error(), "identity.number") {
			t.Errorf("identity %d: %v", number, err)
		}
	}
}

func TestLaterPhaseCountsWhateverAKillLeft(t *testing.T) {
	for i, want := range phases {
		s, err := Open(t.TempDir(), "boot", log.Discard())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = s.Close() })
		// the files of this phase and of all earlier ones, as if the process was killed before it
		// removed any
		for _, p := range phases[:i+1] {
			r := sample()
			r.Phase = p
			b, err := durable.Encode(schema, r)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(s.path(r.Spec.Owner, p), b, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		got, bad, err := s.Load()
		if err != nil || len(bad) != 0 || len(got) != 1 || got[0].Phase != want {
			t.Errorf("up to %s: %v, %v, %v", want, got, bad, err)
		}
		// the next save leaves only its own file
		next := sample()
		for _, p := range []endpoint.Phase{endpoint.PhaseCreating, endpoint.PhaseReady} {
			next.Phase = p
			if err := s.Save(next); err != nil {
				t.Fatal(err)
			}
			if files, err := os.ReadDir(s.dir); err != nil || len(files) != 1 {
				t.Errorf("after saving %s there are %v, %v", p, files, err)
			}
		}
	}
}

// TestLatestPhaseIsRemovedLast: a kill between two removals must not leave only an earlier phase: the record of a
// deleted endpoint would count again. The test ends the removal with a file that cannot be removed, in place of a kill.
func TestLatestPhaseIsRemovedLast(t *testing.T) {
	for i, stuck := range phases[:len(phases)-1] {
		s, err := Open(t.TempDir(), "boot", log.Discard())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = s.Close() })
		r := sample()
		o := r.Spec.Owner
		for _, p := range phases {
			r.Phase = p
			b, err := durable.Encode(schema, r)
			if err != nil {
				t.Fatal(err)
			}
			if p == stuck { // a directory that is not empty
				err = os.MkdirAll(filepath.Join(s.path(o, p), "x"), 0o700)
			} else {
				err = os.WriteFile(s.path(o, p), b, 0o600)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		if err := s.Remove(o); err == nil {
			t.Fatalf("%s could not be removed, but Remove succeeded", stuck)
		}
		for _, later := range phases[i+1:] {
			if _, err := os.Lstat(s.path(o, later)); err != nil {
				t.Errorf("the removal ended at %s, but %s was removed before it: %v", stuck, later, err)
			}
		}
		for _, earlier := range phases[:i] {
			if _, err := os.Lstat(s.path(o, earlier)); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the removal ended at %s, but %s still exists: %v", stuck, earlier, err)
			}
		}
	}
}

func TestWhatCannotBeReadIsReportedWithItsFileAndStays(t *testing.T) {
	dir := t.TempDir()
	s, err := Open(dir, "boot", log.Discard())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	good := sample()
	if err := s.Save(good); err != nil {
		t.Fatal(err)
	}
	whole, err := os.ReadFile(s.path(good.Spec.Owner, good.Phase))
	if err != nil {
		t.Fatal(err)
	}
	flipped := append([]byte(nil), whole...)
	flipped[len(flipped)/2] ^= 1
	senseless := sample()
	senseless.Slot = 0
	encoded, err := durable.Encode(schema, senseless)
	if err != nil {
		t.Fatal(err)
	}
	files := map[string][]byte{
		"empty.json": nil, "half.json": whole[:len(whole)/2], "flipped.json": flipped,
		"foreign.json":   whole, // another owner's name
		"senseless.json": encoded,
	}
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	got, bad, err := s.Load()
	if err != nil || len(got) != 1 || len(bad) != len(files) {
		t.Fatalf("%d loaded, bad %v, %v", len(got), bad, err)
	}
	for _, u := range bad {
		if u.Key != "" || !strings.Contains(u.Err.Error(), u.File) || u.File == "" {
			t.Errorf("%+v: want its file in the error, and no key from a name without an owner", u)
		}
	}
	for name := range files {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestUnreadableFileCountsByItsPhase: an unreadable file is a leftover if it is older than a
// readable record, and hides the record if it is newer.
func TestUnreadableFileCountsByItsPhase(t *testing.T) {
	for i, good := range phases {
		for j, bad := range phases {
			if i == j {
				continue
			}
			s, err := Open(t.TempDir(), "boot", log.Discard())
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = s.Close() })
			r := sample()
			r.Phase = good
			if err := s.Save(r); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(s.path(r.Spec.Owner, bad), []byte("{"), 0o600); err != nil {
				t.Fatal(err)
			}
			records, unreadable, err := s.Load()
			hidden := j > i
			if err != nil || len(records) == 1 == hidden || len(unreadable) == 1 != hidden || hidden && unreadable[0].Key != r.Spec.Owner.Key() {
				t.Errorf("%s and an unreadable %s: %d records, unreadable %v, %v", good, bad, len(records), unreadable, err)
			}
			if err := s.Save(r); err != nil {
				t.Fatal(err)
			}
			if records, unreadable, err := s.Load(); len(records) != 1 || len(unreadable) != 0 || err != nil {
				t.Errorf("after a Save: %v, %v, %v", records, unreadable, err)
			}
		}
	}
}

// TestUnreadableFilesAreWorthOneBoot: after a reboot, no kernel state belongs to unreadable files, so they are removed.
// If the boot in which they were written is unknown, they stay.
func TestUnreadableFilesAreWorthOneBoot(t *testing.T) {
	for _, c := range []struct {
		name, before, now string
		stays             bool
	}{
		{"the first start of this version", "", "b1", true},
		{"the same boot", "b1", "b1", true},
		{"another boot", "b1", "b2", false},
		{"a corrupt memory of the boot", "corrupt", "b2", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "endpoints")
			start := func(boot string) (records []endpoint.Record, bad []endpoint.Unreadable) {
				s, err := Open(dir, boot, log.Discard())
				if err != nil {
					t.Fatal(err)
				}
				records, bad, err = s.Load()
				if err := errors.Join(err, s.Close()); err != nil {
					t.Fatal(err)
				}
				return records, bad
			}
			start(c.before)
			var err error
			switch c.before {
			case "":
				err = os.Remove(dir + bootSuffix)
			case "corrupt":
				err = os.WriteFile(dir+bootSuffix, []byte("{"), 0o600)
			}
			if err != nil {
				t.Fatal(err)
			}
			good := sample()
			file := filepath.Join(dir, "x.json")
			if err := errors.Join((&Store{dir: dir}).Save(good), os.WriteFile(file, nil, 0o600)); err != nil {
				t.Fatal(err)
			}
			for range 2 {
				if records, bad := start(c.now); len(records) != 1 || (len(bad) == 1) != c.stays {
					t.Errorf("%d records and %v, want the unreadable one to stay: %v", len(records), bad, c.stays)
				}
			}
		})
	}
}

// TestMissingDirectoryOfThisBootIsRefused: a missing directory must not count as a new one, because the pods of its
// records are still running.
func TestMissingDirectoryOfThisBootIsRefused(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "endpoints")
	for _, c := range []struct {
		boot    string
		refused bool
	}{{"b1", false}, {"b1", true}, {"b1", true}, {"b2", false}} {
		s, err := Open(dir, c.boot, log.Discard())
		if c.refused {
			if !errors.Is(err, ErrGone) || !strings.Contains(err.Error(), dir+bootSuffix) {
				t.Errorf("boot %s: %v, want ErrGone and what to do", c.boot, err)
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(s.Close(), os.RemoveAll(dir)); err != nil {
			t.Fatal(err)
		}
	}
}

// FuzzRecord: an accepted record can be used and written again, so it cannot break the core later.
func FuzzRecord(f *testing.F) {
	for _, r := range []endpoint.Record{sample(), {Phase: endpoint.PhaseDeleted, BootID: "b", Spec: endpoint.Spec{Owner: sample().Spec.Owner}}} {
		b, err := durable.Encode(schema, r)
		if err != nil {
			f.Fatal(err)
		}
		_, data, err := durable.Open(b, schema)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Add([]byte(`{"phase":"ready"}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		// mutate the content of the envelope, not its checksum
		b, err := durable.Encode(schema, rawJSON(data))
		if err != nil {
			return
		}
		var r endpoint.Record
		if durable.Decode(b, schema, &r) != nil || r.Validate() != nil {
			return
		}
		again, err := durable.Encode(schema, r)
		if err != nil {
			t.Fatalf("an accepted record cannot be written: %v", err)
		}
		var back endpoint.Record
		if err := durable.Decode(again, schema, &back); err != nil || back.Validate() != nil {
			t.Fatalf("the written record cannot be read: %v, %v", err, back.Validate())
		}
		if len(r.Spec.Owner.Key()) != 64 {
			t.Fatalf("key %q", r.Spec.Owner.Key())
		}
	})
}

type rawJSON []byte

func (r rawJSON) MarshalJSON() ([]byte, error) { return r, nil }

const entry = `{"version":1,"containerId":"c1","interfaceName":"eth0","time":"2026-01-02T03:04:05Z"}`

func TestSpoolListsEntriesAndReportsTheRest(t *testing.T) {
	dir := t.TempDir()
	s := OpenSpool(dir, log.Discard())
	owner, untimed := workload.Owner{ContainerID: "c1", Interface: "eth0"}, workload.Owner{ContainerID: "c2", Interface: "eth0"}
	for name, content := range map[string]string{
		owner.Key(): entry, ".new-1": "half", ".lock": "", "nonsense": "nonsense", "wrongname": entry, "old.bad": "x",
		"version":     `{"version":2,"containerId":"c1","interfaceName":"eth0"}`,
		untimed.Key(): `{"version":1,"containerId":"c2","interfaceName":"eth0"}`,
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want := deletion.Entry{Owner: owner, Time: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)}
	deletions, bad, err := s.List()
	if err != nil || len(deletions) != 1 || deletions[0] != want || len(bad) != 4 {
		t.Fatalf("%v, %v, %v", deletions, bad, err)
	}
	for _, err := range bad {
		var se *SpoolError
		if !errors.As(err, &se) {
			t.Fatalf("%v names no file", err)
		}
		if err := s.SetAside(se); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Done(owner); err != nil {
		t.Fatal(err)
	}
	if owners, bad, err := s.List(); len(owners)+len(bad) != 0 || err != nil {
		t.Errorf("afterwards %v, %v, %v", owners, bad, err)
	}
	if owners, bad, err := OpenSpool(filepath.Join(dir, "missing"), log.Discard()).List(); len(owners)+len(bad) != 0 || err != nil {
		t.Errorf("without a directory: %v, %v, %v", owners, bad, err)
	}
}
