// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package record

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"testing"

	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// marshal encodes a record by encoding/json.
func marshal(t *testing.T, r Record) []byte {
	t.Helper()
	out := record{
		Source: r.Source, Origin: r.Origin, Manager: r.Manager, Revision: r.Revision, Updated: r.Updated, Created: r.Created,
		Notes: r.Notes, Dropped: r.Dropped, Namespace: r.Key.Namespace, Name: r.Key.Name.Name,
	}
	if s := r.Service; s != nil {
		x := &serviceRecord{
			Created: s.Created, Type: s.Type.String(), Headless: s.Headless, OtherProxy: s.OtherProxy, ClusterIPs: s.ClusterIPs,
			ExternalIPs: s.ExternalIPs, SourceRanges: s.SourceRanges, IPv4: s.IPv4, IPv6: s.IPv6,
			InternalLocal: s.InternalLocal, ExternalLocal: s.ExternalLocal, Affinity: s.AffinitySeconds,
			HealthCheck: s.HealthCheckNodePort, Table: s.Table, Closed: s.Closed, ExceedsShare: s.ExceedsShare,
		}
		for _, in := range s.Ingress {
			x.Ingress = append(x.Ingress, ingressRecord(in))
		}
		for _, p := range s.Ports {
			x.Ports = append(x.Ports, portRecord(p))
		}
		out.Service = x
	}
	if s := r.Slice; s != nil {
		x := &sliceRecord{Created: s.Created, Service: s.Service, IPv6: s.IPv6}
		for _, p := range s.Ports {
			x.Ports = append(x.Ports, portRecord{Name: p.Name, Protocol: p.Protocol, Port: p.Port})
		}
		places := make(map[service.About]int)
		for _, e := range s.Endpoints {
			about := e.About()
			at, ok := places[about]
			if !ok {
				at = len(x.About)
				places[about] = at
				x.About = append(x.About, aboutRecord(about))
			}
			x.Endpoints = append(x.Endpoints, endpointRecord{e.Addr(), at})
		}
		out.Slice = x
	}
	b, err := json.Marshal(out)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// someRecord returns a record with random fields.
func someRecord(r *rand.Rand) Record {
	text := func() string {
		return []string{"", "", "a", "web-1", "a<b>&c", "q\"\\\n\x00\x7f", "é\u2028", "\xff"}[r.IntN(8)]
	}
	texts := func() (out []string) {
		for range r.IntN(3) {
			out = append(out, text())
		}
		return out
	}
	address := func() netip.Addr {
		return []netip.Addr{
			addr("10.0.0.1"), addr("0.0.0.0"), addr("fd00::1"), addr("::"), addr("::ffff:10.0.0.1"), addr("fe80::1%a\"<"),
		}[r.IntN(6)]
	}
	addresses := func() (out []netip.Addr) {
		for range r.IntN(3) {
			out = append(out, address())
		}
		return out
	}
	yes := func() bool { return r.IntN(2) == 0 }
	number := func() int64 { return []int64{0, 1, -1, 1 << 62}[r.IntN(4)] }
	name := service.Name{Namespace: text(), Name: text()}
	out := Record{
		Key: service.ObjectKey{Kind: service.KindService, Name: name}, Source: text(), Origin: text(), Manager: text(),
		Revision: r.Uint64(), Updated: number(), Created: number(), Notes: texts(), Dropped: texts(),
	}
	if yes() {
		s := &service.Service{
			Name: name, Created: number(), Type: service.Type(r.IntN(4)), Headless: yes(), OtherProxy: text(),
			ClusterIPs: addresses(), ExternalIPs: addresses(), IPv4: yes(), IPv6: yes(), InternalLocal: yes(),
			ExternalLocal: yes(), AffinitySeconds: uint32(r.IntN(2)) * r.Uint32(),
			HealthCheckNodePort: uint16(r.IntN(2)) * uint16(r.Uint32()), Table: yes(), Closed: yes(), ExceedsShare: yes(),
		}
		for range r.IntN(3) {
			s.Ingress = append(s.Ingress, service.Ingress{Addr: address(), Proxy: yes()})
			s.SourceRanges = append(s.SourceRanges, netip.PrefixFrom(address().WithZone(""), r.IntN(32)))
			s.Ports = append(s.Ports, service.Port{
				Name: text(), Protocol: service.Protocol(r.Uint32()), Port: uint16(r.Uint32()), NodePort: uint16(r.IntN(2)),
			})
		}
		out.Service = s
		return out
	}
	s := &service.Slice{Name: name, Created: number(), Service: text(), IPv6: yes()}
	for range r.IntN(3) {
		s.Ports = append(s.Ports, service.SlicePort{Name: text(), Protocol: service.TCP, Port: uint16(r.Uint32())})
	}
	for range r.IntN(4 * fewAbouts) {
		a := address()
		if a.Is4In6() || a.Zone() != "" {
			continue // endpoints have no such address
		}
		s.Endpoints = append(s.Endpoints, service.NewEndpoint(a, service.About{
			State: service.State(r.IntN(8)), Node: text(), Zone: text(), ForNodes: text(), ForZones: text(),
		}))
	}
	out.Key.Kind, out.Slice = service.KindSlice, s
	return out
}

// TestRecordsAreWrittenAndReadAsByEncodingJSON compares bytes: another version of the service must be able to read
// the records.
func TestRecordsAreWrittenAndReadAsByEncodingJSON(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 5000 {
		in := someRecord(r)
		text := encode(in)
		if want := marshal(t, in); string(text) != string(want) {
			t.Fatalf("written\n%s, want\n%s", text, want)
		}
		var got, want record
		reader := &reader{}
		if !reader.read(text, &got) {
			t.Fatalf("%s is not read", text)
		}
		if err := json.Unmarshal(text, &want); err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(got, want) {
			t.Fatalf("%s\nis read as %+v, want %+v", text, got, want)
		}
	}
}

// TestOtherTextsAreReadByEncodingJSON corrupts records at each byte: read either fails, or returns the same as
// encoding/json.
func TestOtherTextsAreReadByEncodingJSON(t *testing.T) {
	for _, in := range records() {
		text := string(encode(in))
		for i := range text {
			for _, damage := range []string{"", "x", "0", "\"", ",", "}", "null", "[]", "\\"} {
				damaged := text[:i] + damage + text[i+1:]
				var got, want record
				reader := &reader{}
				if !reader.read([]byte(damaged), &got) {
					continue
				}
				if err := json.Unmarshal([]byte(damaged), &want); err != nil || !reflect.DeepEqual(got, want) {
					t.Errorf("%s\nis read as %+v, want %+v, %v", damaged, got, want, err)
				}
			}
		}
	}
}

// TestFieldsOfALaterVersionAreIgnored: unknown fields are ignored, even in a record of an unknown type.
func TestFieldsOfALaterVersionAreIgnored(t *testing.T) {
	for _, in := range records() {
		text := fmt.Sprintf(`{"later":1,%s`, encode(in)[1:])
		if got, err := decode([]byte(text)); err != nil || !reflect.DeepEqual(got, in) {
			t.Errorf("%s is read as %+v, %v", text, got, err)
		}
	}
}
