// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package filter selects flows by the filters of Hubble's API.
//
// A flow passes if two conditions hold: the allow list is empty or one of its filters matches, and no filter of the
// deny list matches. A filter matches if all its fields match. A field matches if one of its values matches.
package filter

import (
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"regexp/syntax"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/sluice-net/sluice/services/hubble/internal/api/flow"
)

// ErrUnsupported is returned for a filter that this version does not implement.
var ErrUnsupported = errors.New("not supported")

// Limits of a request. They are needed because each value may be compared with each flow of the history.
const (
	maxFilters = 64
	maxValues  = 256      // values of one field
	maxPattern = 1024     // bytes of one value
	maxTotal   = 1024     // values of all filters
	maxBytes   = 16 << 10 // bytes of all values together
)

// Error is the error about one value of a filter.
type Error struct {
	Field  string // as in the request, such as "whitelist[0].source_ip"
	Reason error
}

func (e *Error) Error() string { return e.Field + ": " + e.Reason.Error() }

// Unwrap returns the reason.
func (e *Error) Unwrap() error { return e.Reason }

// match reports whether a flow matches.
type match func(*flow.Flow) bool

// Filter selects flows.
type Filter struct {
	allow, deny []compiled
}

// compiled is one filter of a list.
type compiled struct {
	filter  *flow.FlowFilter
	matches []match
}

func (c compiled) match(f *flow.Flow) bool {
	for _, m := range c.matches {
		if !m(f) {
			return false
		}
	}
	return true
}

// New compiles the lists of a request. The error is an *Error.
func New(allow, deny []*flow.FlowFilter) (*Filter, error) {
	f := &Filter{}
	if err := (&total{}).add(allow, deny); err != nil {
		return nil, err
	}
	for _, list := range []struct {
		name    string
		filters []*flow.FlowFilter
		to      *[]compiled
	}{{"whitelist", allow, &f.allow}, {"blacklist", deny, &f.deny}} {
		if len(list.filters) > maxFilters {
			return nil, &Error{list.name, fmt.Errorf("has %d filters, at most %d are allowed", len(list.filters), maxFilters)}
		}
		for i, x := range list.filters {
			matches, err := compile(x)
			if err != nil {
				err.Field = fmt.Sprintf("%s[%d].%s", list.name, i, err.Field)
				return nil, err
			}
			*list.to = append(*list.to, compiled{filter: x, matches: matches})
		}
	}
	return f, nil
}

// Match reports whether a flow passes.
func (f *Filter) Match(x *flow.Flow) bool {
	if len(f.allow) > 0 && !slices.ContainsFunc(f.allow, func(c compiled) bool { return c.match(x) }) {
		return false
	}
	return !slices.ContainsFunc(f.deny, func(c compiled) bool { return c.match(x) })
}

// Empty reports whether every flow passes.
func (f *Filter) Empty() bool { return len(f.allow) == 0 && len(f.deny) == 0 }

// compile returns the conditions of one filter.
func compile(x *flow.FlowFilter) ([]match, *Error) {
	if err := bounded(x); err != nil {
		return nil, err
	}
	b := &builder{}
	b.names(x)
	b.addresses(x)
	b.workloads(x)
	b.packet(x)
	b.patterns(x)
	if len(x.GetExperimental().GetCelExpression()) > 0 {
		b.fail("experimental.cel_expression", fmt.Errorf("%w: expressions of CEL; use the other fields", ErrUnsupported))
	}
	return b.matches, b.err
}

// total counts the values of a request and their bytes.
type total struct{ values, bytes int }

// add counts the values of both lists.
func (t *total) add(allow, deny []*flow.FlowFilter) error {
	for _, list := range []struct {
		name    string
		filters []*flow.FlowFilter
	}{{"whitelist", allow}, {"blacklist", deny}} {
		for _, f := range list.filters {
			t.count(f.ProtoReflect())
			if t.values > maxTotal || t.bytes > maxBytes {
				return &Error{list.name, fmt.Errorf("the filters have more than %d values or %d bytes", maxTotal, maxBytes)}
			}
		}
	}
	return nil
}

func (t *total) count(m protoreflect.Message) {
	m.Range(func(fd protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case fd.IsList():
			for i := range v.List().Len() {
				t.value(fd, v.List().Get(i))
			}
		default:
			t.value(fd, v)
		}
		return true
	})
}

func (t *total) value(fd protoreflect.FieldDescriptor, v protoreflect.Value) {
	t.values++
	switch fd.Kind() {
	case protoreflect.MessageKind:
		t.count(v.Message())
	case protoreflect.StringKind:
		t.bytes += len(v.String())
	}
}

// bounded returns an error if a field has too many values, or a value is too long.
func bounded(x *flow.FlowFilter) (err *Error) {
	x.ProtoReflect().Range(func(fd protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		if !fd.IsList() {
			return true
		}
		list := v.List()
		if list.Len() > maxValues {
			err = &Error{string(fd.Name()), fmt.Errorf("has %d values, at most %d are allowed", list.Len(), maxValues)}
			return false
		}
		for i := range list.Len() {
			if fd.Kind() == protoreflect.StringKind && len(list.Get(i).String()) > maxPattern {
				err = &Error{string(fd.Name()), fmt.Errorf("a value is longer than %d bytes", maxPattern)}
				return false
			}
		}
		return true
	})
	return err
}

// builder collects the conditions of a filter and the first error.
type builder struct {
	matches []match
	err     *Error
}

func (b *builder) fail(field string, err error) {
	if b.err == nil {
		b.err = &Error{Field: field, Reason: err}
	}
}

func (b *builder) add(m match) { b.matches = append(b.matches, m) }

// oneOf adds the condition that get returns one of the values.
func oneOf[T comparable](b *builder, values []T, get func(*flow.Flow) T) {
	if len(values) > 0 {
		b.add(func(f *flow.Flow) bool { return slices.Contains(values, get(f)) })
	}
}

// none adds a condition that no flow meets. It is for fields that flows of Sluice never have.
func (b *builder) none() { b.add(func(*flow.Flow) bool { return false }) }

// names adds the conditions for pods, services, identities, clusters and nodes.
func (b *builder) names(x *flow.FlowFilter) {
	oneOf(b, x.GetUuid(), (*flow.Flow).GetUuid)
	for _, c := range []struct {
		field  string
		values []string
		get    func(*flow.Flow) (namespace, name string)
	}{
		{"source_pod", x.GetSourcePod(), func(f *flow.Flow) (string, string) { return pod(f.GetSource()) }},
		{"destination_pod", x.GetDestinationPod(), func(f *flow.Flow) (string, string) { return pod(f.GetDestination()) }},
		{"source_service", x.GetSourceService(), func(f *flow.Flow) (string, string) { return svc(f.GetSourceService()) }},
		{"destination_service", x.GetDestinationService(), func(f *flow.Flow) (string, string) {
			return svc(f.GetDestinationService())
		}},
	} {
		b.namespaced(c.field, c.values, c.get)
	}
	oneOf(b, x.GetSourceIdentity(), func(f *flow.Flow) uint32 { return f.GetSource().GetIdentity() })
	oneOf(b, x.GetDestinationIdentity(), func(f *flow.Flow) uint32 { return f.GetDestination().GetIdentity() })
	oneOf(b, x.GetSourceClusterName(), func(f *flow.Flow) string { return f.GetSource().GetClusterName() })
	oneOf(b, x.GetDestinationClusterName(), func(f *flow.Flow) string { return f.GetDestination().GetClusterName() })
	for _, c := range []struct {
		field string
		names []string
	}{{"source_cluster_name", x.GetSourceClusterName()}, {"destination_cluster_name", x.GetDestinationClusterName()}} {
		if slices.Contains(c.names, "") {
			b.fail(c.field, errors.New("a name is empty"))
		}
	}
	if len(x.GetNodeName()) > 0 {
		pattern, err := nodePattern(x.GetNodeName())
		if err != nil {
			b.fail("node_name", err)
			return
		}
		b.add(func(f *flow.Flow) bool {
			name := f.GetNodeName()
			if name != "" && !strings.Contains(name, "/") {
				name = defaultCluster + "/" + name
			}
			return pattern.MatchString(name)
		})
	}
}

func pod(e *flow.Endpoint) (namespace, name string) { return e.GetNamespace(), e.GetPodName() }

func svc(s *flow.Service) (namespace, name string) { return s.GetNamespace(), s.GetName() }

// split divides "shop/web", "shop/", "/web" and "web". Without a slash, the namespace is "default". With nothing
// before the slash, any namespace matches.
func split(text string) (namespace, prefix string) {
	namespace, prefix, ok := strings.Cut(text, "/")
	if !ok {
		return "default", text
	}
	return namespace, prefix
}

// namespaced adds the condition that a name begins with a prefix in a namespace.
func (b *builder) namespaced(field string, values []string, get func(*flow.Flow) (namespace, name string)) {
	if len(values) == 0 {
		return
	}
	if slices.Contains(values, "") {
		b.fail(field, errors.New("a name is empty"))
		return
	}
	b.add(func(f *flow.Flow) bool {
		namespace, name := get(f)
		if namespace == "" && name == "" {
			return false
		}
		return slices.ContainsFunc(values, func(v string) bool {
			ns, prefix := split(v)
			return strings.HasPrefix(name, prefix) && (ns == "" || ns == namespace)
		})
	})
}

// addresses adds the conditions for addresses and ports.
func (b *builder) addresses(x *flow.FlowFilter) {
	for _, c := range []struct {
		field  string
		values []string
		get    func(*flow.Flow) string
	}{
		{"source_ip", x.GetSourceIp(), func(f *flow.Flow) string { return f.GetIP().GetSource() }},
		{"destination_ip", x.GetDestinationIp(), func(f *flow.Flow) string { return f.GetIP().GetDestination() }},
		{"source_ip_xlated", x.GetSourceIpXlated(), func(f *flow.Flow) string { return f.GetIP().GetSourceXlated() }},
	} {
		if len(c.values) == 0 {
			continue
		}
		prefixes, err := parsePrefixes(c.values)
		if err != nil {
			b.fail(c.field, err)
			return
		}
		b.add(func(f *flow.Flow) bool {
			a, err := netip.ParseAddr(c.get(f))
			return err == nil && slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(a) })
		})
	}
	for _, c := range []struct {
		field  string
		values []string
		of     func(source, destination uint32) uint32
	}{
		{"source_port", x.GetSourcePort(), func(s, _ uint32) uint32 { return s }},
		{"destination_port", x.GetDestinationPort(), func(_, d uint32) uint32 { return d }},
	} {
		if len(c.values) == 0 {
			continue
		}
		var wanted []uint32
		for _, text := range c.values {
			n, err := strconv.ParseUint(text, 10, 16)
			if err != nil {
				b.fail(c.field, fmt.Errorf("%q is not a port", text))
				return
			}
			wanted = append(wanted, uint32(n))
		}
		b.add(func(f *flow.Flow) bool {
			source, destination, ok := Ports(f)
			return ok && slices.Contains(wanted, c.of(source, destination))
		})
	}
}

// Ports returns the ports of a flow; ok is false for protocols without ports.
func Ports(f *flow.Flow) (source, destination uint32, ok bool) {
	l4 := f.GetL4()
	if x := l4.GetTCP(); x != nil {
		return x.GetSourcePort(), x.GetDestinationPort(), true
	}
	if x := l4.GetUDP(); x != nil {
		return x.GetSourcePort(), x.GetDestinationPort(), true
	}
	if x := l4.GetSCTP(); x != nil {
		return x.GetSourcePort(), x.GetDestinationPort(), true
	}
	return 0, 0, false
}

// parsePrefixes parses addresses and prefixes.
func parsePrefixes(values []string) (prefixes []netip.Prefix, _ error) {
	for _, text := range values {
		if strings.Contains(text, "/") {
			p, err := netip.ParsePrefix(text)
			if err != nil {
				return nil, fmt.Errorf("%q is not a prefix", text)
			}
			prefixes = append(prefixes, p.Masked())
			continue
		}
		a, err := netip.ParseAddr(text)
		if err != nil {
			return nil, fmt.Errorf("%q is not an address", text)
		}
		prefixes = append(prefixes, netip.PrefixFrom(a, a.BitLen()))
	}
	return prefixes, nil
}

// workloads adds the conditions for labels and workloads.
func (b *builder) workloads(x *flow.FlowFilter) {
	for _, c := range []struct {
		field     string
		selectors []string
		labels    func(*flow.Flow) []string
	}{
		{"source_label", x.GetSourceLabel(), func(f *flow.Flow) []string { return f.GetSource().GetLabels() }},
		{"destination_label", x.GetDestinationLabel(), func(f *flow.Flow) []string {
			return f.GetDestination().GetLabels()
		}},
		{"node_labels", x.GetNodeLabels(), (*flow.Flow).GetNodeLabels},
	} {
		if len(c.selectors) == 0 {
			continue
		}
		var selectors []selector
		for _, text := range c.selectors {
			s, err := parseSelector(text)
			if err != nil {
				b.fail(c.field, err)
				return
			}
			selectors = append(selectors, s)
		}
		b.add(func(f *flow.Flow) bool {
			labels := parseLabels(c.labels(f))
			return slices.ContainsFunc(selectors, func(s selector) bool { return s.matches(labels) })
		})
	}
	for _, c := range []struct {
		wanted []*flow.Workload
		end    func(*flow.Flow) *flow.Endpoint
	}{{x.GetSourceWorkload(), (*flow.Flow).GetSource}, {x.GetDestinationWorkload(), (*flow.Flow).GetDestination}} {
		if len(c.wanted) == 0 {
			continue
		}
		b.add(func(f *flow.Flow) bool {
			return slices.ContainsFunc(c.end(f).GetWorkloads(), func(w *flow.Workload) bool {
				return slices.ContainsFunc(c.wanted, func(q *flow.Workload) bool {
					return (q.GetName() == "" || q.GetName() == w.GetName()) && (q.GetKind() == "" || q.GetKind() == w.GetKind())
				})
			})
		})
	}
}

// packet adds the conditions for the packet and its verdict.
func (b *builder) packet(x *flow.FlowFilter) {
	oneOf(b, x.GetTrafficDirection(), (*flow.Flow).GetTrafficDirection)
	oneOf(b, x.GetVerdict(), (*flow.Flow).GetVerdict)
	oneOf(b, x.GetIpVersion(), func(f *flow.Flow) flow.IPVersion { return f.GetIP().GetIpVersion() })
	oneOf(b, x.GetEncrypted(), func(f *flow.Flow) bool { return f.GetIP().GetEncrypted() })
	if reasons := x.GetDropReasonDesc(); len(reasons) > 0 {
		b.add(func(f *flow.Flow) bool {
			return f.GetVerdict() == flow.Verdict_DROPPED && slices.Contains(reasons, f.GetDropReasonDesc())
		})
	}
	if wanted := x.GetInterface(); len(wanted) > 0 {
		b.add(func(f *flow.Flow) bool {
			have := f.GetInterface()
			return have != nil && slices.ContainsFunc(wanted, func(w *flow.NetworkInterface) bool {
				return (w.GetIndex() == 0 || w.GetIndex() == have.GetIndex()) &&
					(w.GetName() == "" || w.GetName() == have.GetName())
			})
		})
	}
	if wanted := x.GetEventType(); len(wanted) > 0 {
		b.add(func(f *flow.Flow) bool {
			have := f.GetEventType()
			return have != nil && slices.ContainsFunc(wanted, func(w *flow.EventTypeFilter) bool {
				return (w.GetType() == 0 || w.GetType() == have.GetType()) &&
					(!w.GetMatchSubType() || w.GetSubType() == have.GetSubType())
			})
		})
	}
	if wanted := x.GetReply(); len(wanted) > 0 {
		b.add(func(f *flow.Flow) bool {
			// Clients expect that a dropped flow of unknown direction counts as "not a reply".
			if f.GetIsReply() == nil && f.GetVerdict() != flow.Verdict_DROPPED {
				return false
			}
			return slices.Contains(wanted, f.GetIsReply().GetValue())
		})
	}
	if wanted := x.GetTcpFlags(); len(wanted) > 0 {
		b.add(func(f *flow.Flow) bool {
			have := f.GetL4().GetTCP().GetFlags()
			return have != nil && slices.ContainsFunc(wanted, func(w *flow.TCPFlags) bool { return hasFlags(have, w) })
		})
	}
	b.protocols(x.GetProtocol())
}

// hasFlags reports whether all wanted flags are set.
func hasFlags(have, wanted *flow.TCPFlags) bool {
	missing := false
	wanted.ProtoReflect().Range(func(fd protoreflect.FieldDescriptor, _ protoreflect.Value) bool {
		missing = !have.ProtoReflect().Get(fd).Bool()
		return !missing
	})
	return !missing
}

// protocols adds the condition for the protocol.
func (b *builder) protocols(names []string) {
	if len(names) == 0 {
		return
	}
	var wanted []match
	for _, name := range names {
		switch strings.ToLower(name) {
		case "tcp":
			wanted = append(wanted, func(f *flow.Flow) bool { return f.GetL4().GetTCP() != nil })
		case "udp":
			wanted = append(wanted, func(f *flow.Flow) bool { return f.GetL4().GetUDP() != nil })
		case "sctp":
			wanted = append(wanted, func(f *flow.Flow) bool { return f.GetL4().GetSCTP() != nil })
		case "icmp":
			wanted = append(wanted, func(f *flow.Flow) bool {
				return f.GetL4().GetICMPv4() != nil || f.GetL4().GetICMPv6() != nil
			})
		case "icmpv4":
			wanted = append(wanted, func(f *flow.Flow) bool { return f.GetL4().GetICMPv4() != nil })
		case "icmpv6":
			wanted = append(wanted, func(f *flow.Flow) bool { return f.GetL4().GetICMPv6() != nil })
		case "dns":
			wanted = append(wanted, func(f *flow.Flow) bool { return f.GetL7().GetDns() != nil })
		case "vrrp", "igmp", "http": // no flow of Sluice has these protocols
		default:
			b.fail("protocol", fmt.Errorf("%q is not a protocol that Hubble knows", name))
			return
		}
	}
	b.add(func(f *flow.Flow) bool { return slices.ContainsFunc(wanted, func(m match) bool { return m(f) }) })
}

// patterns adds the conditions for names of DNS, for HTTP and for traces. Flows of Sluice contain neither HTTP nor
// traces. So a valid value matches no flow, and an invalid value is refused, as in Hubble.
func (b *builder) patterns(x *flow.FlowFilter) {
	for _, c := range []struct {
		field    string
		patterns []string
		names    func(*flow.Flow) []string
	}{
		{"source_fqdn", x.GetSourceFqdn(), (*flow.Flow).GetSourceNames},
		{"destination_fqdn", x.GetDestinationFqdn(), (*flow.Flow).GetDestinationNames},
	} {
		if len(c.patterns) == 0 {
			continue
		}
		pattern, err := namePattern(c.patterns)
		if err != nil {
			b.fail(c.field, err)
			return
		}
		b.add(func(f *flow.Flow) bool { return slices.ContainsFunc(c.names(f), pattern.MatchString) })
	}
	for _, c := range []struct {
		field    string
		patterns []string
	}{{"http_path", x.GetHttpPath()}, {"http_url", x.GetHttpUrl()}} {
		if len(c.patterns) == 0 {
			continue
		}
		for _, text := range c.patterns {
			// Only parse the expression: compiling a short expression can take many megabytes.
			if _, err := syntax.Parse(text, syntax.Perl); err != nil {
				b.fail(c.field, err)
				return
			}
		}
		b.none()
	}
	if err := b.queries(x.GetDnsQuery()); err != nil {
		b.fail("dns_query", err)
		return
	}
	for _, code := range x.GetHttpStatusCode() {
		if !statusCode.MatchString(code) {
			b.fail("http_status_code", fmt.Errorf("%q is neither a status code nor a prefix such as 5+", code))
		}
	}
	if len(x.GetHttpStatusCode()) > 0 || len(x.GetHttpMethod()) > 0 || len(x.GetHttpHeader()) > 0 ||
		len(x.GetTraceId()) > 0 || len(x.GetIpTraceId()) > 0 {
		b.none()
	}
}

var statusCode = regexp.MustCompile(`^([1-5][0-9]{2}|[1-5][0-9]?\+)$`)
