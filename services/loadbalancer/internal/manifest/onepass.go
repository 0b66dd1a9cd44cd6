// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package manifest

import (
	"bytes"
	"strings"

	"github.com/sluice-net/sluice/kit/yamlstream"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/jsonscan"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/manifest/wire"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// onePass is a fast decoder that reads the kind and the body of each object in one pass over a JSON document. It
// fails for a document with a mistake or an unknown field; then decoder reads the document again and finds the
// mistakes. A general decoder needs six passes over a list, because it must know the kind before the body.
type onePass struct {
	jsonscan.Scanner
	of decoder // collects the objects; if it has violations, the document has mistakes

	text    string
	halve   bool // read a long list in two halves
	halved  bool // the list was read in two halves
	service wire.Service
	slice   wire.Slice
	// The following fields hold the values to which pointers in service and slice point.
	texts   []string
	numbers []int32
	hints   []wire.EndpointHints
	labels  map[string]string
	notes   map[string]string // annotations
	names   []string          // keys of labels or annotations
}

// Fields of objects. Each may occur only once in an object.
const (
	fieldVersion uint32 = 1 << iota
	fieldKind
	fieldMetadata
	fieldSpec
	fieldStatus
	fieldAddressType
	fieldEndpoints
	fieldPorts
	fieldItems

	fieldsOfAny     = fieldVersion | fieldKind | fieldMetadata
	fieldsOfService = fieldsOfAny | fieldSpec | fieldStatus
	fieldsOfSlice   = fieldsOfAny | fieldAddressType | fieldEndpoints | fieldPorts
	fieldsOfList    = fieldsOfAny | fieldItems
)

// readOnce reads the objects of a document. It returns false if the document cannot be read in one pass.
func (d *decoder) readOnce(number int, text []byte) bool {
	if len(text) > maxBytes || len(text) == 0 || text[0] != '{' {
		return false
	}
	whole := string(text)
	for _, halve := range []bool{true, false} {
		p := d.onePass(number, whole)
		p.Scanner, p.halve = jsonscan.New(p.text), halve && len(text) >= largeList
		p.document()
		if p.End() && len(p.of.violations) == 0 {
			d.objects = append(d.objects, p.of.objects...)
			return true
		}
		if !p.halved {
			return false
		}
	}
	return false
}

func (d *decoder) onePass(number int, text string) *onePass {
	return &onePass{
		text: text, of: decoder{options: d.options, number: number},
		labels: make(map[string]string), notes: make(map[string]string),
	}
}

// largeList is the size in bytes above which two goroutines read a list.
const largeList = 256 << 10

// itemBegins are the first bytes of items in lists of an API server and of kubectl.
var itemBegins = []string{`,{"apiVersion":`, `,{"metadata":`, `,{"kind":`}

// middle returns the position of an item near the middle of a list whose items begin at begin; 0 if it finds none.
// The position may be wrong, for example the position of an owner reference. Reading one of the halves then fails.
func middle(text string, begin int) int {
	half := begin + (len(text)-begin)/2
	best := 0
	for _, first := range itemBegins {
		if at := strings.Index(text[half:], first); at >= 0 && (best == 0 || half+at+1 < best) {
			best = half + at + 1
		}
	}
	return best
}

// items reads the items of a list. Two goroutines read the halves of a long list.
func (p *onePass) items(head *wire.Head) {
	if p.halve {
		if first, ok := p.Halve(middle(p.text, p.At())); ok {
			p.halved = true
			q := p.of.onePass(p.of.number, p.text)
			q.Scanner = first
			done := make(chan struct{})
			go func() {
				defer close(done)
				q.Rest(func() { q.item(head) })
			}()
			p.RestOfArray(func() { p.item(head) })
			if <-done; q.Failed() || len(q.of.violations) > 0 {
				p.Fail()
			}
			p.of.objects = append(q.of.objects, p.of.objects...)
			return
		}
	}
	p.Array(func() { p.item(head) })
}

// readAllOnce is like readOnce, for a stream of JSON documents.
func (d *decoder) readAllOnce(data []byte) bool {
	number := 0
	for _, chunk := range yamlstream.Chunks(data) {
		chunk = trimMarker(chunk)
		if len(chunk) == 0 {
			continue
		}
		if !d.readOnce(number, chunk) {
			d.objects = nil
			return false
		}
		number++
	}
	return number > 0
}

// trimMarker returns the document of a chunk without its marker.
func trimMarker(chunk []byte) []byte {
	return bytes.TrimSpace(bytes.TrimPrefix(bytes.TrimSpace(chunk), []byte("---")))
}

// once reports whether a field occurs for the first time and has a value other than null.
func (p *onePass) once(seen *uint32, field uint32) bool {
	if *seen&field != 0 {
		p.Fail()
		return false
	}
	*seen |= field
	return !p.Null()
}

// bit returns the bit of the i-th field of an object.
func bit(i int) uint32 { return 1 << i }

// document reads an object or a list.
func (p *onePass) document() {
	var head wire.Head
	var seen uint32
	begin := p.At()
	p.Object(func(key string) {
		if key != "items" {
			p.field(key, &seen, &head)
			return
		}
		if !p.once(&seen, fieldItems) {
			return
		}
		p.items(&head)
	})
	if p.Failed() {
		return
	}
	if seen&fieldItems == 0 {
		p.add(head, seen, p.text[begin:p.At()])
		return
	}
	if seen&^fieldsOfList != 0 || !strings.HasSuffix(head.Kind, listSuffix) {
		p.Fail()
	}
}

// listSuffix is the end of the kinds of lists.
const listSuffix = "List"

// item reads an object of a list.
func (p *onePass) item(list *wire.Head) {
	p.reset()
	var head wire.Head
	var seen uint32
	begin := p.At()
	p.Object(func(key string) { p.field(key, &seen, &head) })
	if head == (wire.Head{}) { // items of a typed list may omit the kind
		of, isList := strings.CutSuffix(list.Kind, listSuffix)
		if !isList || of == "" {
			p.Fail()
		}
		head = wire.Head{APIVersion: list.APIVersion, Kind: of}
	}
	p.add(head, seen, p.text[begin:p.At()])
}

// reset prepares the state for the next object.
func (p *onePass) reset() {
	spec, slice := &p.service.Spec, &p.slice
	p.service = wire.Service{Spec: wire.ServiceSpec{Ports: spec.Ports[:0], ClusterIPs: spec.ClusterIPs[:0]}}
	p.slice = wire.Slice{Endpoints: slice.Endpoints[:0], Ports: slice.Ports[:0]}
	clear(p.labels)
	clear(p.notes)
	p.texts, p.numbers, p.hints = p.texts[:0], p.numbers[:0], p.hints[:0]
}

// add adds the object that was read.
func (p *onePass) add(head wire.Head, seen uint32, text string) {
	if p.Failed() || len(text) > maxMarks && yamlstream.Marks([]byte(text)) > maxMarks {
		p.Fail()
		return
	}
	p.of.notes = nil
	out := Object{Document: p.of.number}
	kind := kinds[head]
	switch {
	case kind == service.KindService && seen&^fieldsOfService == 0:
		out.Service = p.of.serviceOf(&p.service)
	case kind == service.KindSlice && seen&^fieldsOfSlice == 0:
		p.slice.Metadata = p.service.Metadata
		out.Slice = p.of.sliceOf(&p.slice)
	default:
		p.Fail()
	}
	if len(p.of.violations) > 0 {
		p.Fail()
	}
	if p.Failed() {
		return
	}
	out.Notes = p.of.notes
	out.name(kind)
	p.of.objects = append(p.of.objects, out)
}

// field reads a field of an object of any kind.
func (p *onePass) field(key string, seen *uint32, head *wire.Head) {
	switch key {
	case "apiVersion":
		if p.once(seen, fieldVersion) {
			head.APIVersion = p.Text()
		}
	case "kind":
		if p.once(seen, fieldKind) {
			head.Kind = p.Text()
		}
	case "metadata":
		if p.once(seen, fieldMetadata) {
			p.metadata(&p.service.Metadata)
		}
	case "spec":
		if p.once(seen, fieldSpec) {
			p.spec(&p.service.Spec)
		}
	case "status":
		if p.once(seen, fieldStatus) {
			p.status(&p.service.Status)
		}
	case "addressType":
		if p.once(seen, fieldAddressType) {
			p.slice.AddressType = p.Text()
		}
	case "endpoints":
		if p.once(seen, fieldEndpoints) {
			p.Array(p.endpoint)
		}
	case "ports":
		if p.once(seen, fieldPorts) {
			p.Array(p.slicePort)
		}
	default:
		p.Fail()
	}
}

func (p *onePass) metadata(m *wire.Metadata) {
	var seen uint32
	p.Object(func(key string) {
		switch key {
		case "name":
			if p.once(&seen, bit(0)) {
				m.Name = p.Text()
			}
		case "namespace":
			if p.once(&seen, bit(1)) {
				m.Namespace = p.Text()
			}
		case "creationTimestamp":
			if p.once(&seen, bit(2)) {
				m.CreationTimestamp = p.textRef()
			}
		case "labels":
			if p.once(&seen, bit(3)) {
				m.Labels = p.meaningful(p.labels, labelServiceName, labelOtherProxy)
			}
		case "annotations":
			if p.once(&seen, bit(4)) {
				m.Annotations = p.meaningful(p.notes, annotationAlgorithm, annotationRanges)
			}
		case "generateName":
			p.opaque(&seen, bit(5))
		case "selfLink":
			p.opaque(&seen, bit(6))
		case "uid":
			p.opaque(&seen, bit(7))
		case "resourceVersion":
			p.opaque(&seen, bit(8))
		case "generation":
			p.opaque(&seen, bit(9))
		case "deletionTimestamp":
			p.opaque(&seen, bit(10))
		case "deletionGracePeriodSeconds":
			p.opaque(&seen, bit(11))
		case "ownerReferences":
			p.opaque(&seen, bit(12))
		case "finalizers":
			p.opaque(&seen, bit(13))
		case "managedFields":
			p.opaque(&seen, bit(14))
		default:
			p.Fail()
		}
	})
}

// opaque reads a field that has no effect.
func (p *onePass) opaque(seen *uint32, field uint32) {
	if p.once(seen, field) {
		p.Skip()
	}
}

// textRef reads a text and returns a pointer to it.
func (p *onePass) textRef() *string {
	p.texts = append(p.texts, p.Text())
	return &p.texts[len(p.texts)-1]
}

// numberRef reads a number and returns a pointer to it.
func (p *onePass) numberRef() *int32 {
	p.numbers = append(p.numbers, int32(p.Int(32)))
	return &p.numbers[len(p.numbers)-1]
}

// truths contains the values to which pointers to bool point.
var truths = [2]bool{false, true}

// boolRef reads a bool and returns a pointer to it.
func (p *onePass) boolRef() *bool {
	if p.Bool() {
		return &truths[1]
	}
	return &truths[0]
}

// maxNames limits the number of labels of an object, because each key is compared with all earlier ones.
const maxNames = 64

// meaningful reads labels or annotations, and adds the ones that Sluice uses to into.
func (p *onePass) meaningful(into map[string]string, names ...string) map[string]string {
	p.names = p.names[:0]
	p.Object(func(key string) {
		for _, other := range p.names {
			if other == key {
				p.Fail()
				return
			}
		}
		if p.names = append(p.names, key); len(p.names) > maxNames {
			p.Fail()
			return
		}
		value := p.Text()
		for _, name := range names {
			if key == name {
				into[key] = value
			}
		}
	})
	return into
}

// list reads an array of strings.
func (p *onePass) list(into *[]string) { p.Array(func() { *into = append(*into, p.Text()) }) }

func (p *onePass) spec(s *wire.ServiceSpec) {
	var seen uint32
	text := func(i int, into *string) {
		if p.once(&seen, bit(i)) {
			*into = p.Text()
		}
	}
	ref := func(i int, into **string) {
		if p.once(&seen, bit(i)) {
			*into = p.textRef()
		}
	}
	list := func(i int, into *[]string) {
		if p.once(&seen, bit(i)) {
			p.list(into)
		}
	}
	p.Object(func(key string) {
		switch key {
		case "ports":
			if p.once(&seen, bit(0)) {
				p.Array(func() { s.Ports = append(s.Ports, p.port()) })
			}
		case "clusterIP":
			text(1, &s.ClusterIP)
		case "clusterIPs":
			list(2, &s.ClusterIPs)
		case "type":
			text(3, &s.Type)
		case "externalIPs":
			list(4, &s.ExternalIPs)
		case "sessionAffinity":
			text(5, &s.SessionAffinity)
		case "loadBalancerSourceRanges":
			list(6, &s.LoadBalancerSourceRanges)
		case "externalTrafficPolicy":
			text(7, &s.ExternalTrafficPolicy)
		case "healthCheckNodePort":
			if p.once(&seen, bit(8)) {
				s.HealthCheckNodePort = int32(p.Int(32))
			}
		case "sessionAffinityConfig":
			if p.once(&seen, bit(9)) {
				s.SessionAffinityConfig = p.affinity()
			}
		case "ipFamilies":
			list(10, &s.IPFamilies)
		case "ipFamilyPolicy":
			ref(11, &s.IPFamilyPolicy)
		case "allocateLoadBalancerNodePorts":
			if p.once(&seen, bit(12)) {
				s.AllocateLoadBalancerNodePorts = p.boolRef()
			}
		case "internalTrafficPolicy":
			ref(13, &s.InternalTrafficPolicy)
		case "selector":
			p.opaque(&seen, bit(14))
		case "loadBalancerIP":
			p.opaque(&seen, bit(15))
		case "externalName":
			p.opaque(&seen, bit(16))
		case "publishNotReadyAddresses":
			p.opaque(&seen, bit(17))
		case "loadBalancerClass":
			p.opaque(&seen, bit(18))
		case "trafficDistribution":
			p.opaque(&seen, bit(19))
		default:
			p.Fail()
		}
	})
}

func (p *onePass) port() (out wire.ServicePort) {
	var seen uint32
	number := func(i int, into *int32) {
		if p.once(&seen, bit(i)) {
			*into = int32(p.Int(32))
		}
	}
	p.Object(func(key string) {
		switch key {
		case "name":
			if p.once(&seen, bit(0)) {
				out.Name = p.Text()
			}
		case "protocol":
			if p.once(&seen, bit(1)) {
				out.Protocol = p.Text()
			}
		case "appProtocol":
			p.opaque(&seen, bit(2))
		case "port":
			number(3, &out.Port)
		case "targetPort":
			p.opaque(&seen, bit(4))
		case "nodePort":
			number(5, &out.NodePort)
		default:
			p.Fail()
		}
	})
	return out
}

func (p *onePass) affinity() *wire.AffinityConfig {
	out := &wire.AffinityConfig{}
	var seen uint32
	p.Object(func(key string) {
		if key != "clientIP" {
			p.Fail()
			return
		}
		if !p.once(&seen, bit(0)) {
			return
		}
		out.ClientIP = &wire.ClientIPConfig{}
		p.Object(func(key string) {
			if key != "timeoutSeconds" {
				p.Fail()
				return
			}
			if p.once(&seen, bit(1)) {
				out.ClientIP.TimeoutSeconds = p.numberRef()
			}
		})
	})
	return out
}

func (p *onePass) status(s *wire.ServiceStatus) {
	var seen uint32
	p.Object(func(key string) {
		switch key {
		case "loadBalancer":
			if !p.once(&seen, bit(0)) {
				return
			}
			p.Object(func(key string) {
				if key != "ingress" {
					p.Fail()
					return
				}
				if p.once(&seen, bit(1)) {
					p.Array(func() { s.LoadBalancer.Ingress = append(s.LoadBalancer.Ingress, p.ingress()) })
				}
			})
		case "conditions":
			p.opaque(&seen, bit(2))
		default:
			p.Fail()
		}
	})
}

func (p *onePass) ingress() (out wire.Ingress) {
	var seen uint32
	p.Object(func(key string) {
		switch key {
		case "ip":
			if p.once(&seen, bit(0)) {
				out.IP = p.Text()
			}
		case "ipMode":
			if p.once(&seen, bit(1)) {
				out.IPMode = p.textRef()
			}
		case "hostname":
			p.opaque(&seen, bit(2))
		case "ports":
			p.opaque(&seen, bit(3))
		default:
			p.Fail()
		}
	})
	return out
}

func (p *onePass) endpoint() {
	all := append(p.slice.Endpoints, wire.Endpoint{})
	p.slice.Endpoints = all
	e := &all[len(all)-1]
	var seen uint32
	p.Object(func(key string) {
		switch key {
		case "addresses":
			if p.once(&seen, bit(0)) {
				first := len(p.texts)
				p.list(&p.texts)
				e.Addresses = p.texts[first:len(p.texts):len(p.texts)]
			}
		case "conditions":
			if p.once(&seen, bit(1)) {
				p.conditions(&e.Conditions)
			}
		case "nodeName":
			if p.once(&seen, bit(2)) {
				e.NodeName = p.textRef()
			}
		case "zone":
			if p.once(&seen, bit(3)) {
				e.Zone = p.textRef()
			}
		case "hints":
			if p.once(&seen, bit(4)) {
				p.hints = append(p.hints, wire.EndpointHints{})
				e.Hints = &p.hints[len(p.hints)-1]
				p.hintsOf(e.Hints)
			}
		case "hostname":
			p.opaque(&seen, bit(5))
		case "targetRef":
			p.opaque(&seen, bit(6))
		case "deprecatedTopology":
			p.opaque(&seen, bit(7))
		default:
			p.Fail()
		}
	})
}

func (p *onePass) conditions(c *wire.EndpointConditions) {
	var seen uint32
	p.Object(func(key string) {
		switch key {
		case "ready":
			if p.once(&seen, bit(0)) {
				c.Ready = p.boolRef()
			}
		case "serving":
			if p.once(&seen, bit(1)) {
				c.Serving = p.boolRef()
			}
		case "terminating":
			if p.once(&seen, bit(2)) {
				c.Terminating = p.boolRef()
			}
		default:
			p.Fail()
		}
	})
}

func (p *onePass) hintsOf(h *wire.EndpointHints) {
	var seen uint32
	names := func(i int, into *[]wire.Hint) {
		if !p.once(&seen, bit(i)) {
			return
		}
		p.Array(func() {
			var hint wire.Hint
			var seen uint32
			p.Object(func(key string) {
				if key != "name" {
					p.Fail()
				} else if p.once(&seen, bit(0)) {
					hint.Name = p.Text()
				}
			})
			*into = append(*into, hint)
		})
	}
	p.Object(func(key string) {
		switch key {
		case "forZones":
			names(0, &h.ForZones)
		case "forNodes":
			names(1, &h.ForNodes)
		default:
			p.Fail()
		}
	})
}

func (p *onePass) slicePort() {
	var out wire.EndpointPort
	var seen uint32
	p.Object(func(key string) {
		switch key {
		case "name":
			if p.once(&seen, bit(0)) {
				out.Name = p.textRef()
			}
		case "protocol":
			if p.once(&seen, bit(1)) {
				out.Protocol = p.textRef()
			}
		case "port":
			if p.once(&seen, bit(2)) {
				out.Port = p.numberRef()
			}
		case "appProtocol":
			p.opaque(&seen, bit(3))
		default:
			p.Fail()
		}
	})
	p.slice.Ports = append(p.slice.Ports, out)
}
