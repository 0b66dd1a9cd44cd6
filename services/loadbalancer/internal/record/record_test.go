// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package record

import (
	"errors"
	"net/netip"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/kit/desired/journal"
	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/store"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

func addr(text string) netip.Addr { return netip.MustParseAddr(text) }

// records has one record of each kind, with every field set.
func records() []Record {
	name := service.Name{Namespace: "shop", Name: "web"}
	slice := service.Name{Namespace: "shop", Name: "web-1"}
	about := service.About{
		State: service.Ready | service.Serving, Node: "a", Zone: "east", ForNodes: "a,b",
		ForZones: "east",
	}
	return []Record{
		{
			Key:    service.ObjectKey{Kind: service.KindSlice, Name: slice},
			Source: "file", Origin: "web.yaml", Revision: 7, Updated: 1, Created: 2,
			Slice: &service.Slice{
				Name: slice, Created: 5, Service: "web", IPv6: true, Ports: []service.SlicePort{{
					Name: "http", Protocol: service.TCP,
					Port: 8080,
				}},
				Endpoints: []service.Endpoint{
					service.NewEndpoint(addr("fd00::1"), about), service.NewEndpoint(addr("fd00::2"),
						service.About{}), service.NewEndpoint(addr("fd00::3"), about),
				},
			},
		},
		{
			Key:    service.ObjectKey{Kind: service.KindService, Name: name},
			Source: "grpc", Manager: "m", Revision: 8, Updated: 3, Created: 4,
			Notes: []string{"a note"}, Dropped: []string{"spec.x"},
			Service: &service.Service{
				Name: name, Created: 4, Type: service.LoadBalancer, Headless: true, OtherProxy: "p",
				ClusterIPs:  []netip.Addr{addr("10.96.0.1"), addr("fd00::9")},
				ExternalIPs: []netip.Addr{addr("198.51.100.1")}, Ingress: []service.Ingress{{
					Addr:  addr("203.0.113.1"),
					Proxy: true,
				}},
				SourceRanges: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}, IPv4: true, IPv6: true,
				Ports:         []service.Port{{Name: "http", Protocol: service.SCTP, Port: 80, NodePort: 30080}},
				InternalLocal: true, ExternalLocal: true, AffinitySeconds: 60, HealthCheckNodePort: 30001,
				Table: true, Closed: true, ExceedsShare: true,
			},
		},
	}
}

func open(t *testing.T, dir string) (*Journal, State, []Record) {
	t.Helper()
	var got []Record
	j, st, err := Open(dir, func(r Record) error { got = append(got, r); return nil })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { j.Close() }) //nolint:errcheck // it may be closed already
	return j, st, got
}

func TestWhatIsCommittedIsReadAgain(t *testing.T) {
	for _, r := range records() {
		for _, v := range []any{r.Service, r.Slice} {
			if x := reflect.ValueOf(v); !x.IsNil() {
				for i := range x.Elem().NumField() {
					if x.Elem().Field(i).IsZero() {
						t.Errorf("%s has no %s, so the test would not notice its loss", r.Key, x.Elem().Type().Field(i).Name)
					}
				}
			}
		}
	}
	dir := t.TempDir()
	j, first, got := open(t, dir)
	if len(got) != 0 || first.Revision != 0 || first.Name == [16]byte{} {
		t.Fatalf("a new state has %+v, %d records", first, len(got))
	}
	put := Change{Revision: 8, Puts: records(), State: StateRecords([]string{"file"}, nil)}
	if err := j.Commit(t.Context(), put); err != nil {
		t.Fatal(err)
	}
	j.Close()
	j, st, got := open(t, dir)
	if st.Name != first.Name || st.Revision != 8 || !slices.Equal(st.Complete, []string{"file"}) ||
		!reflect.DeepEqual(got, records()) {
		t.Errorf("got %+v\n%+v\nwant\n%+v", st, got, records())
	}
	if err := j.Commit(t.Context(), Change{Revision: 9, Deletes: []string{Key(records()[1].Key)}}); err != nil {
		t.Fatal(err)
	}
	j.Close()
	_, st, got = open(t, dir)
	if st.Revision != 9 || len(got) != 1 || got[0].Key != records()[0].Key {
		t.Errorf("got %+v, %+v", st, got)
	}
}

// TestRecordsThatCannotBeReadAreRefused: the service does not start with an unreadable record. The error contains the
// file and the next step.
func TestRecordsThatCannotBeReadAreRefused(t *testing.T) {
	for _, record := range []string{
		"{", "{}", `{"service":{"type":"Other"}}`, `{"service":{"type":"ClusterIP"},"slice":{}}`,
		`{"slice":{"endpoints":[{"a":"10.0.0.1"}]}}`, `{"slice":{"about":[{}],"endpoints":[{"a":"10.0.0.1","i":-1}]}}`,
		`{"slice":{"about":[{}],"endpoints":[{"a":""}]}}`,
	} {
		dir := t.TempDir()
		j, _, _ := open(t, dir)
		j.Close()
		d, err := store.OpenDir(dir, journal.DirMode)
		if err != nil {
			t.Fatal(err)
		}
		file, err := d.Open(options.File)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(file.Update(func(tx *store.Tx) error {
			tx.Put(bucketObjects, []byte("Service\x00a\x00b"), []byte(record))
			return nil
		}), file.Close(), d.Close()); err != nil {
			t.Fatal(err)
		}
		_, _, err = Open(dir, func(Record) error { return nil })
		if !errors.Is(err, store.ErrCorrupt) || !strings.Contains(err.Error(), filepath.Join(dir, File)) ||
			!strings.Contains(err.Error(), "begin without it") {
			t.Errorf("%s: %v", record, err)
		}
	}
}
