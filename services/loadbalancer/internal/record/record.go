// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package record defines the format of the load balancer's state file: Services and EndpointSlices
// with their revision.
//
// It encodes and decodes objects and does not interpret them.
package record

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"unique"

	"github.com/sluice-net/sluice/kit/desired/journal"
	"github.com/sluice-net/sluice/kit/store"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// File is the name of the state file.
const File = "services.db"

const (
	bucketObjects = "objects"
	bucketState   = "state"
)

// Keys of bucketState.
const (
	keyName = "name"
	keyZone = "zone"
	// keyComplete is the prefix of keys of sources that were listed completely in this state.
	keyComplete = "complete\x00"
)

// Record is a stored object.
type Record struct {
	Key      service.ObjectKey
	Source   string
	Origin   string
	Manager  string
	Revision uint64
	Updated  int64 // nanoseconds since 1970
	Created  int64 // nanoseconds since 1970
	Notes    []string
	Dropped  []string
	Service  *service.Service // of a Service
	Slice    *service.Slice   // of an EndpointSlice
}

// Journal stores the records.
type Journal = journal.Journal[Record]

// Change is a change of the journal: objects that are stored and objects that are deleted.
type Change = journal.Change[Record]

// State contains the state that Open found in addition to the objects.
type State struct {
	// Name is the name of the state, which is generated when the state is created.
	Name     [16]byte
	Revision uint64
	Complete []string // sources that were listed completely
	Zone     string   // of the node, as a source last reported it
}

// StateRecords returns the records of sources that were listed completely, and of the zone of the
// node; nil: unchanged.
func StateRecords(complete []string, zone *string) map[string][]byte {
	out := make(map[string][]byte)
	if zone != nil {
		out[keyZone] = []byte(*zone)
	}
	for _, source := range complete {
		out[keyComplete+source] = []byte{1}
	}
	return out
}

// take decodes one record of the state.
func (st *State) take(key string, value []byte) error {
	switch source, complete := strings.CutPrefix(key, keyComplete); {
	case complete:
		st.Complete = append(st.Complete, source)
	case key == keyZone:
		st.Zone = string(value)
	case key == keyName && len(value) != len(st.Name):
		return fmt.Errorf("%d bytes, want %d", len(value), len(st.Name))
	case key == keyName:
		copy(st.Name[:], value)
	}
	return nil // ignore records of a later version
}

// reserve is the address space for the file: 10,000 services with 10 endpoints each take 20 MB.
const reserve = 128 << 20

// options describe the file.
var options = journal.Options[Record]{
	Codec: journal.Codec[Record]{
		Key:    func(r *Record) string { return Key(r.Key) },
		Encode: func(r *Record) []byte { return encode(*r) },
		Decode: func(_ string, record, _ []byte) (Record, error) { return decode(record) },
	},
	File: store.Options{
		Name:   File,
		Layout: store.Layout{Format: "sluice-loadbalancer", Version: 1, Buckets: []string{bucketObjects, bucketState}},
		Init: func(t *store.Tx) error {
			name := make([]byte, 16)
			rand.Read(name) //nolint:errcheck // rand.Read never fails
			t.Put(bucketState, []byte(keyName), name)
			return nil
		},
		Reserve: reserve,
		Loss:    "all services will be applied again",
		Doc:     `docs/loadbalancer.md, "What it remembers"`,
	},
	Objects: bucketObjects, State: bucketState,
}

// Open locks the directory for this process and passes every stored object to replay. The error for a corrupt file ends
// with the steps to recover.
func Open(dir string, replay func(Record) error) (*Journal, State, error) {
	d, err := store.OpenDir(dir, journal.DirMode)
	if err != nil {
		return nil, State{}, err
	}
	j, err := journal.Open(d, options)
	if err != nil {
		return nil, State{}, err
	}
	var st State
	st.Revision, err = j.Replay(journal.Contents[Record]{State: st.take, Object: replay})
	if err == nil && st.Name == [16]byte{} {
		err = j.Refuse(errors.New("the state has no name"))
	}
	if err != nil {
		return nil, State{}, errors.Join(err, j.Close())
	}
	return j, st, nil
}

// Key returns the key of an object in the file. Its parts are separated by zero bytes, which Kubernetes names do not
// contain.
func Key(k service.ObjectKey) string {
	return k.Kind.String() + "\x00" + k.Namespace + "\x00" + k.Name.Name
}

// Format of a record. The meaning of a field must never change.
type (
	record struct {
		Source   string   `json:"source"`
		Origin   string   `json:"origin,omitempty"`
		Manager  string   `json:"manager,omitempty"`
		Revision uint64   `json:"revision"`
		Updated  int64    `json:"updated"`
		Created  int64    `json:"created"`
		Notes    []string `json:"notes,omitempty"`
		Dropped  []string `json:"dropped,omitempty"`

		Namespace string         `json:"namespace"`
		Name      string         `json:"name"`
		Service   *serviceRecord `json:"service,omitempty"`
		Slice     *sliceRecord   `json:"slice,omitempty"`
	}
	serviceRecord struct {
		Created       int64           `json:"created,omitempty"`
		Type          string          `json:"type"`
		Headless      bool            `json:"headless,omitempty"`
		OtherProxy    string          `json:"otherProxy,omitempty"`
		ClusterIPs    []netip.Addr    `json:"clusterIPs,omitempty"`
		ExternalIPs   []netip.Addr    `json:"externalIPs,omitempty"`
		Ingress       []ingressRecord `json:"ingress,omitempty"`
		SourceRanges  []netip.Prefix  `json:"sourceRanges,omitempty"`
		IPv4          bool            `json:"ipv4,omitempty"`
		IPv6          bool            `json:"ipv6,omitempty"`
		Ports         []portRecord    `json:"ports,omitempty"`
		InternalLocal bool            `json:"internalLocal,omitempty"`
		ExternalLocal bool            `json:"externalLocal,omitempty"`
		Affinity      uint32          `json:"affinity,omitempty"`
		HealthCheck   uint16          `json:"healthCheck,omitempty"`
		Table         bool            `json:"table,omitempty"`
		Closed        bool            `json:"closed,omitempty"`
		ExceedsShare  bool            `json:"exceedsShare,omitempty"`
	}
	ingressRecord struct {
		Addr  netip.Addr `json:"addr"`
		Proxy bool       `json:"proxy,omitempty"`
	}
	portRecord struct {
		Name     string           `json:"name,omitempty"`
		Protocol service.Protocol `json:"protocol"`
		Port     uint16           `json:"port"`
		NodePort uint16           `json:"nodePort,omitempty"`
	}
	sliceRecord struct {
		Created   int64            `json:"created,omitempty"`
		Service   string           `json:"service,omitempty"`
		IPv6      bool             `json:"ipv6,omitempty"`
		Ports     []portRecord     `json:"ports,omitempty"`
		About     []aboutRecord    `json:"about,omitempty"`
		Endpoints []endpointRecord `json:"endpoints,omitempty"`
	}
	aboutRecord struct {
		State    service.State `json:"state,omitempty"`
		Node     string        `json:"node,omitempty"`
		Zone     string        `json:"zone,omitempty"`
		ForNodes string        `json:"forNodes,omitempty"`
		ForZones string        `json:"forZones,omitempty"`
	}
	endpointRecord struct {
		Addr  netip.Addr `json:"a"`
		About int        `json:"i,omitempty"` // index in About of the slice
	}
)

func encode(r Record) []byte {
	size := 256 + 40*len(r.Notes)
	if r.Slice != nil {
		size += 64 * len(r.Slice.Endpoints)
	}
	w := writer{make([]byte, 0, size)}
	w.record(&r)
	return w.b
}

func decode(b []byte) (Record, error) {
	var in record
	r := readers.Get().(*reader)
	defer readers.Put(r)
	if !r.read(b, &in) {
		in = record{}
		if err := json.Unmarshal(b, &in); err != nil {
			return Record{}, err
		}
	}
	name := service.Name{Namespace: shared(in.Namespace), Name: in.Name}
	out := Record{
		Source: shared(in.Source), Origin: shared(in.Origin), Manager: shared(in.Manager), Revision: in.Revision,
		Updated: in.Updated,
		Created: in.Created, Notes: in.Notes, Dropped: in.Dropped,
	}
	switch {
	case in.Service != nil && in.Slice == nil:
		s, err := in.Service.service(name)
		if err != nil {
			return out, err
		}
		out.Key, out.Service = service.ObjectKey{Kind: service.KindService, Name: name}, s
	case in.Slice != nil && in.Service == nil:
		s, err := in.Slice.slice(name)
		if err != nil {
			return out, err
		}
		out.Key, out.Slice = service.ObjectKey{Kind: service.KindSlice, Name: name}, s
	default:
		return out, errors.New("it is neither a service nor a slice")
	}
	return out, nil
}

// shared returns a copy of a text that is shared by all records with the same text.
func shared(s string) string { return unique.Make(s).Value() }

func (x *serviceRecord) service(name service.Name) (*service.Service, error) {
	out := &service.Service{
		Name: name, Created: x.Created, Headless: x.Headless, OtherProxy: x.OtherProxy, ClusterIPs: x.ClusterIPs,
		ExternalIPs:  x.ExternalIPs,
		SourceRanges: x.SourceRanges, IPv4: x.IPv4, IPv6: x.IPv6, InternalLocal: x.InternalLocal,
		ExternalLocal:   x.ExternalLocal,
		AffinitySeconds: x.Affinity, HealthCheckNodePort: x.HealthCheck, Table: x.Table, Closed: x.Closed,
		ExceedsShare: x.ExceedsShare,
	}
	for out.Type.String() != x.Type {
		if out.Type++; out.Type > service.ExternalName {
			return nil, fmt.Errorf("the type %.40q is not known", x.Type)
		}
	}
	for _, in := range x.Ingress {
		out.Ingress = append(out.Ingress, service.Ingress(in))
	}
	out.Ports = slices.Grow(out.Ports, len(x.Ports))
	for _, p := range x.Ports {
		p.Name = shared(p.Name)
		out.Ports = append(out.Ports, service.Port(p))
	}
	return out, nil
}

func (x *sliceRecord) slice(name service.Name) (*service.Slice, error) {
	out := &service.Slice{Name: name, Created: x.Created, Service: x.Service, IPv6: x.IPv6}
	for _, p := range x.Ports {
		out.Ports = append(out.Ports, service.SlicePort{Name: shared(p.Name), Protocol: p.Protocol, Port: p.Port})
	}
	if len(x.Endpoints) > 0 {
		out.Endpoints = make([]service.Endpoint, len(x.Endpoints))
	}
	for i, e := range x.Endpoints {
		if e.About < 0 || e.About >= len(x.About) || !e.Addr.IsValid() {
			return nil, fmt.Errorf("the endpoint %s has entry %d of %d", e.Addr, e.About, len(x.About))
		}
		out.Endpoints[i] = service.NewEndpoint(e.Addr, service.About(x.About[e.About]))
	}
	return out, nil
}
