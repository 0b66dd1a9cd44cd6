// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package record

import (
	"encoding/json"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/sluice-net/sluice/services/loadbalancer/internal/jsonscan"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// A start reads tens of thousands of records, and a change may write as many. encoding/json would take a fifth of the
// time of a start or a change. The types in record.go define the format. For them, writer writes the same bytes as
// encoding/json. reader can only read texts that writer has written; all others are read with encoding/json.

// writer appends JSON to b.
type writer struct{ b []byte }

// open begins an object or list.
func (w *writer) open(bracket byte) { w.b = append(w.b, bracket) }

// comma adds a comma, unless the last byte begins an object or list.
func (w *writer) comma() {
	if c := w.b[len(w.b)-1]; c != '{' && c != '[' {
		w.b = append(w.b, ',')
	}
}

// key begins a field.
func (w *writer) key(key string) {
	w.comma()
	w.b = append(append(append(w.b, '"'), key...), '"', ':')
}

// value appends a string.
func (w *writer) value(s string) {
	for i := range len(s) {
		// encoding/json escapes or replaces all other characters.
		if c := s[i]; c < ' ' || c >= 0x7f || c == '"' || c == '\\' || c == '<' || c == '>' || c == '&' {
			b, err := json.Marshal(s)
			if err != nil {
				panic("record: a string without JSON: " + err.Error())
			}
			w.b = append(w.b, b...)
			return
		}
	}
	w.b = append(append(append(w.b, '"'), s...), '"')
}

func (w *writer) text(key, s string) {
	if s != "" {
		w.key(key)
		w.value(s)
	}
}

func (w *writer) int(key string, n int64) {
	if n != 0 {
		w.key(key)
		w.b = strconv.AppendInt(w.b, n, 10)
	}
}

func (w *writer) bool(key string, b bool) {
	if b {
		w.key(key)
		w.b = append(w.b, "true"...)
	}
}

// list appends a field with n elements, or nothing if n is 0.
func (w *writer) list(key string, n int, element func(i int)) {
	if n == 0 {
		return
	}
	w.key(key)
	w.open('[')
	for i := range n {
		w.comma()
		element(i)
	}
	w.b = append(w.b, ']')
}

func (w *writer) texts(key string, all []string) {
	w.list(key, len(all), func(i int) { w.value(all[i]) })
}

func (w *writer) addr(a netip.Addr) {
	if a.Zone() != "" {
		w.value(a.String())
		return
	}
	w.b = append(w.b, '"')
	if a.IsValid() {
		w.b = a.AppendTo(w.b)
	}
	w.b = append(w.b, '"')
}

func (w *writer) addrs(key string, all []netip.Addr) {
	w.list(key, len(all), func(i int) { w.addr(all[i]) })
}

// number appends a field that is always present.
func (w *writer) number(key string, n int64) {
	w.key(key)
	w.b = strconv.AppendInt(w.b, n, 10)
}

func (w *writer) record(r *Record) {
	w.open('{')
	w.key("source")
	w.value(r.Source)
	w.text("origin", r.Origin)
	w.text("manager", r.Manager)
	w.key("revision")
	w.b = strconv.AppendUint(w.b, r.Revision, 10)
	w.number("updated", r.Updated)
	w.number("created", r.Created)
	w.texts("notes", r.Notes)
	w.texts("dropped", r.Dropped)
	w.key("namespace")
	w.value(r.Key.Namespace)
	w.key("name")
	w.value(r.Key.Name.Name)
	if r.Service != nil {
		w.key("service")
		w.service(r.Service)
	}
	if r.Slice != nil {
		w.key("slice")
		w.slice(r.Slice)
	}
	w.b = append(w.b, '}')
}

func (w *writer) service(s *service.Service) {
	w.open('{')
	w.int("created", s.Created)
	w.key("type")
	w.value(s.Type.String())
	w.bool("headless", s.Headless)
	w.text("otherProxy", s.OtherProxy)
	w.addrs("clusterIPs", s.ClusterIPs)
	w.addrs("externalIPs", s.ExternalIPs)
	w.list("ingress", len(s.Ingress), func(i int) {
		w.open('{')
		w.key("addr")
		w.addr(s.Ingress[i].Addr)
		w.bool("proxy", s.Ingress[i].Proxy)
		w.b = append(w.b, '}')
	})
	w.list("sourceRanges", len(s.SourceRanges), func(i int) {
		text, err := s.SourceRanges[i].MarshalText()
		if err != nil {
			panic("record: a prefix without a text: " + err.Error())
		}
		w.value(string(text))
	})
	w.bool("ipv4", s.IPv4)
	w.bool("ipv6", s.IPv6)
	w.list("ports", len(s.Ports), func(i int) { w.port(portRecord(s.Ports[i])) })
	w.bool("internalLocal", s.InternalLocal)
	w.bool("externalLocal", s.ExternalLocal)
	w.int("affinity", int64(s.AffinitySeconds))
	w.int("healthCheck", int64(s.HealthCheckNodePort))
	w.bool("table", s.Table)
	w.bool("closed", s.Closed)
	w.bool("exceedsShare", s.ExceedsShare)
	w.b = append(w.b, '}')
}

func (w *writer) port(p portRecord) {
	w.open('{')
	w.text("name", p.Name)
	w.number("protocol", int64(p.Protocol))
	w.number("port", int64(p.Port))
	w.int("nodePort", int64(p.NodePort))
	w.b = append(w.b, '}')
}

func (w *writer) slice(s *service.Slice) {
	w.open('{')
	w.int("created", s.Created)
	w.text("service", s.Service)
	w.bool("ipv6", s.IPv6)
	w.list("ports", len(s.Ports), func(i int) {
		w.port(portRecord{Name: s.Ports[i].Name, Protocol: s.Ports[i].Protocol, Port: s.Ports[i].Port})
	})
	about, at := abouts(s.Endpoints)
	w.list("about", len(about), func(i int) {
		w.open('{')
		w.int("state", int64(about[i].State))
		w.text("node", about[i].Node)
		w.text("zone", about[i].Zone)
		w.text("forNodes", about[i].ForNodes)
		w.text("forZones", about[i].ForZones)
		w.b = append(w.b, '}')
	})
	w.list("endpoints", len(s.Endpoints), func(i int) {
		w.open('{')
		w.key("a")
		w.addr(s.Endpoints[i].Addr())
		w.int("i", int64(at[i]))
		w.b = append(w.b, '}')
	})
	w.b = append(w.b, '}')
}

// fewAbouts is the number of values up to which a linear search is cheaper than a map.
const fewAbouts = 8

// abouts returns the distinct values of Endpoint.About, in the order in which they first occur, and for each endpoint
// the index of its value.
func abouts(all []service.Endpoint) (about []service.About, at []int) {
	at = make([]int, len(all))
	var places map[service.About]int
	for i, e := range all {
		x := e.About()
		place := -1
		if places == nil {
			place = slices.Index(about, x)
		} else if p, ok := places[x]; ok {
			place = p
		}
		if place < 0 {
			place = len(about)
			about = append(about, x)
			if places != nil {
				places[x] = place
			} else if len(about) > fewAbouts {
				places = make(map[service.About]int, len(all))
				for j, y := range about {
					places[y] = j
				}
			}
		}
		at[i] = place
	}
	return about, at
}

// reader reads a record.
type reader struct {
	jsonscan.Scanner
	// service and slice are the parts of the last record. The next record reuses their memory.
	service serviceRecord
	slice   sliceRecord
}

// read reads a record that writer has written, and returns false for any other text. The record is valid until the next
// call with the same reader. Only the addresses and prefixes of a Service stay valid.
func (r *reader) read(b []byte, into *record) bool {
	r.Scanner = jsonscan.New(string(b))
	s, x := &r.service, &r.slice
	*s = serviceRecord{Ingress: s.Ingress[:0], Ports: s.Ports[:0]}
	*x = sliceRecord{Ports: x.Ports[:0], About: x.About[:0], Endpoints: x.Endpoints[:0]}
	r.record(into)
	return r.End()
}

// readers contains readers that are not in use, because Decode may be called concurrently.
var readers = sync.Pool{New: func() any { return new(reader) }}

// fields reads an object. read returns the position of a field in the order in which writer writes it, from 1, or 0 for
// an unknown field. Reading fails if a field is unknown, repeated, or out of order.
func (r *reader) fields(read func(key string) (at int)) {
	last := 0
	r.Object(func(key string) {
		at := read(key)
		if at <= last {
			r.Fail()
		}
		last = at
	})
}

// array reads an array that is not empty, because writer omits the field of an empty one.
func (r *reader) array(element func()) {
	n := 0
	r.Array(func() {
		element()
		n++
	})
	if n == 0 {
		r.Fail()
	}
}

// own reads a text and copies it, because it outlives the memory of the record.
func (r *reader) own() string { return strings.Clone(r.Text()) }

func (r *reader) ownTexts() (out []string) {
	r.array(func() { out = append(out, r.own()) })
	return out
}

func (r *reader) record(x *record) {
	r.fields(func(key string) int {
		switch key {
		case "source":
			x.Source = r.Text()
			return 1
		case "origin":
			x.Origin = r.Text()
			return 2
		case "manager":
			x.Manager = r.Text()
			return 3
		case "revision":
			x.Revision = r.Uint(64)
			return 4
		case "updated":
			x.Updated = r.Int(64)
			return 5
		case "created":
			x.Created = r.Int(64)
			return 6
		case "notes":
			x.Notes = r.ownTexts()
			return 7
		case "dropped":
			x.Dropped = r.ownTexts()
			return 8
		case "namespace":
			x.Namespace = r.Text()
			return 9
		case "name":
			x.Name = r.own()
			return 10
		case "service":
			x.Service = &r.service
			r.readService(x.Service)
			return 11
		case "slice":
			x.Slice = &r.slice
			r.readSlice(x.Slice)
			return 12
		}
		return 0
	})
}

func (r *reader) addr() netip.Addr {
	text := r.Text()
	if text == "" { // the same result as with encoding/json
		return netip.Addr{}
	}
	a, err := netip.ParseAddr(text)
	if err != nil {
		r.Fail()
	}
	return a
}

func (r *reader) addrs() (out []netip.Addr) {
	out = make([]netip.Addr, 0, 1)
	r.array(func() { out = append(out, r.addr()) })
	return out
}

func (r *reader) prefixes() (out []netip.Prefix) {
	r.array(func() {
		p, err := netip.ParsePrefix(r.Text())
		if err != nil {
			r.Fail()
		}
		out = append(out, p)
	})
	return out
}

func (r *reader) readService(x *serviceRecord) {
	r.fields(func(key string) int {
		switch key {
		case "created":
			x.Created = r.Int(64)
			return 1
		case "type":
			x.Type = r.Text()
			return 2
		case "headless":
			x.Headless = r.Bool()
			return 3
		case "otherProxy":
			x.OtherProxy = r.own()
			return 4
		case "clusterIPs":
			x.ClusterIPs = r.addrs()
			return 5
		case "externalIPs":
			x.ExternalIPs = r.addrs()
			return 6
		case "ingress":
			r.array(func() { x.Ingress = append(x.Ingress, r.ingress()) })
			return 7
		case "sourceRanges":
			x.SourceRanges = r.prefixes()
			return 8
		case "ipv4":
			x.IPv4 = r.Bool()
			return 9
		case "ipv6":
			x.IPv6 = r.Bool()
			return 10
		case "ports":
			r.ports(&x.Ports)
			return 11
		case "internalLocal":
			x.InternalLocal = r.Bool()
			return 12
		case "externalLocal":
			x.ExternalLocal = r.Bool()
			return 13
		case "affinity":
			x.Affinity = uint32(r.Uint(32))
			return 14
		case "healthCheck":
			x.HealthCheck = uint16(r.Uint(16))
			return 15
		case "table":
			x.Table = r.Bool()
			return 16
		case "closed":
			x.Closed = r.Bool()
			return 17
		case "exceedsShare":
			x.ExceedsShare = r.Bool()
			return 18
		}
		return 0
	})
}

func (r *reader) ingress() (x ingressRecord) {
	r.fields(func(key string) int {
		switch key {
		case "addr":
			x.Addr = r.addr()
			return 1
		case "proxy":
			x.Proxy = r.Bool()
			return 2
		}
		return 0
	})
	return x
}

func (r *reader) ports(into *[]portRecord) {
	r.array(func() { *into = append(*into, r.port()) })
}

func (r *reader) port() (x portRecord) {
	r.fields(func(key string) int {
		switch key {
		case "name":
			x.Name = r.Text()
			return 1
		case "protocol":
			x.Protocol = service.Protocol(r.Uint(8))
			return 2
		case "port":
			x.Port = uint16(r.Uint(16))
			return 3
		case "nodePort":
			x.NodePort = uint16(r.Uint(16))
			return 4
		}
		return 0
	})
	return x
}

func (r *reader) readSlice(x *sliceRecord) {
	r.fields(func(key string) int {
		switch key {
		case "created":
			x.Created = r.Int(64)
			return 1
		case "service":
			x.Service = r.own()
			return 2
		case "ipv6":
			x.IPv6 = r.Bool()
			return 3
		case "ports":
			r.ports(&x.Ports)
			return 4
		case "about":
			r.array(func() { x.About = append(x.About, r.about()) })
			return 5
		case "endpoints":
			r.array(func() { x.Endpoints = append(x.Endpoints, r.endpoint()) })
			return 6
		}
		return 0
	})
}

func (r *reader) about() (x aboutRecord) {
	r.fields(func(key string) int {
		switch key {
		case "state":
			x.State = service.State(r.Uint(8))
			return 1
		case "node":
			x.Node = r.Text()
			return 2
		case "zone":
			x.Zone = r.Text()
			return 3
		case "forNodes":
			x.ForNodes = r.Text()
			return 4
		case "forZones":
			x.ForZones = r.Text()
			return 5
		}
		return 0
	})
	return x
}

func (r *reader) endpoint() (x endpointRecord) {
	r.fields(func(key string) int {
		switch key {
		case "a":
			x.Addr = r.addr()
			return 1
		case "i":
			x.About = int(r.Int(64))
			return 2
		}
		return 0
	})
	return x
}
