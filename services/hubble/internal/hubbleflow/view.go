// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package hubbleflow

import (
	"strings"

	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/hubble/internal/api/flow"
)

// View selects the flows of one tenant, or of all tenants. The zero value selects no flow.
type View struct {
	parts  Parts
	all    bool
	tenant shares.Tenant
}

// All returns the view of a client that may see the flows of all tenants.
func (p Parts) All() View { return View{parts: p, all: true} }

// Only returns the view of a client that may see only the flows of one tenant.
func (p Parts) Only(t shares.Tenant) View { return View{parts: p, tenant: t} }

// All reports whether the view shows everything.
func (v View) All() bool { return v.all }

// Parts returns the names of the parts of the history that contain only flows of the view's tenant. The tenant's
// other flows are in the parts of the tenants whose pods opened the connections.
func (v View) Parts() []string { return []string{v.tenant.String(), fromOutside + v.tenant.String()} }

// Flow returns the visible part of a stored flow; nil if the flow belongs only to other tenants. Of a pod of another
// tenant, only the address and port are visible, so that filters cannot select by its other properties.
func (v View) Flow(f *flow.Flow) *flow.Flow {
	if v.all {
		return f
	}
	from, to := v.owns(f.GetSource()), v.owns(f.GetDestination())
	switch {
	case from && to:
		return f
	case !from && !to:
		return nil
	}
	// Fields that are not listed here are not visible.
	out := &flow.Flow{
		Time: f.GetTime(), Uuid: f.GetUuid(), NodeName: f.GetNodeName(), Type: f.GetType(), Emitter: f.GetEmitter(),
		Verdict: f.GetVerdict(), DropReasonDesc: f.GetDropReasonDesc(), EventType: f.GetEventType(),
		IP: f.GetIP(), L4: f.GetL4(), TrafficDirection: f.GetTrafficDirection(), IsReply: f.GetIsReply(),
		TraceObservationPoint: f.GetTraceObservationPoint(),
		DropReason:            f.GetDropReason(), //nolint:staticcheck // earlier clients read it
		Reply:                 f.GetReply(),      //nolint:staticcheck // earlier clients read it
		Summary:               f.GetSummary(),    //nolint:staticcheck // the hubble CLI prints it
	}
	own, keys := f.GetSource(), []string{"reason", "connectionClosed"}
	if from {
		out.Source, out.Destination, out.Ethernet = f.GetSource(), outsider(f.GetDestination()), f.GetEthernet()
		out.EgressAllowedBy, out.EgressDeniedBy = f.GetEgressAllowedBy(), f.GetEgressDeniedBy()
		keys = append(keys, "egressRules", "sourceNode")
	} else {
		own = f.GetDestination()
		out.Source, out.Destination = outsider(f.GetSource()), f.GetDestination()
		out.IngressAllowedBy, out.IngressDeniedBy = f.GetIngressAllowedBy(), f.GetIngressDeniedBy()
		keys = append(keys, "ingressRules", "destinationNode")
	}
	// If the pod of the tenant opened the connection, the tenant knows the address that the pod connected to.
	began := from != f.GetIsReply().GetValue()
	if began { // otherwise, answers of another tenant's server would show its other clients
		out.L7 = f.GetL7()
	} else if f.GetL7() != nil {
		out.Summary = "DNS" //nolint:staticcheck // the hubble CLI prints it
	}
	asked := extension(f.GetExtensions(), "service")
	ours := own.GetNamespace() != "" && strings.HasPrefix(asked, own.GetNamespace()+"/")
	for _, s := range []struct {
		from *flow.Service
		to   **flow.Service
	}{{f.GetSourceService(), &out.SourceService}, {f.GetDestinationService(), &out.DestinationService}} {
		if s.from != nil && s.from.GetNamespace() == own.GetNamespace() {
			*s.to = s.from
		}
	}
	if ours {
		keys = append(keys, "service")
	}
	if began || ours {
		keys = append(keys, "originalDestination", "originalDestinationPort")
	}
	out.Extensions = keep(f.GetExtensions(), keys)
	return out
}

// Namespaces returns the namespaces of the view's tenant in a flow.
func (v View) Namespaces(f *flow.Flow) (names []string) {
	for _, e := range []*flow.Endpoint{f.GetSource(), f.GetDestination()} {
		if v.owns(e) {
			names = append(names, e.GetNamespace())
		}
	}
	return names
}

// owns reports whether an end is a pod of the view's tenant. This depends on labels of the pod's identity that the
// creator of the pod cannot choose. Without these labels, the tenant is unknown.
func (v View) owns(e *flow.Endpoint) bool {
	namespace, tenant := "", ""
	for _, text := range e.GetLabels() {
		text, ok := strings.CutPrefix(text, label.SourceKubernetes+":")
		if !ok {
			continue
		}
		switch key, value, _ := strings.Cut(text, "="); key {
		case namespaceKey:
			namespace = value
		case label.KeyNamespaceLabels + v.parts.Settings.Label():
			tenant = value
		}
	}
	if namespace == "" || e.GetNamespace() != namespace {
		return false
	}
	return v.parts.Settings.TenantOf(namespace, tenant) == v.tenant
}

// outsider returns the visible part of an end that is not a pod of the client's tenant: no properties of pods, and
// only the reserved labels of other ends.
func outsider(e *flow.Endpoint) *flow.Endpoint {
	out := &flow.Endpoint{}
	if e.GetID() != 0 || e.GetPodName() != "" || e.GetNamespace() != "" {
		return out
	}
	for _, text := range e.GetLabels() {
		switch source, _, _ := strings.Cut(text, ":"); source {
		case label.SourceReserved:
			out.Labels = append(out.Labels, text)
		case label.SourceCIDRGroup, label.SourceNode, "cidr", "fqdn":
		default: // a workload
			return &flow.Endpoint{}
		}
	}
	return out
}

// fieldsOf returns the content of extensions.
func fieldsOf(all *anypb.Any) map[string]*structpb.Value {
	have := &structpb.Struct{}
	if all == nil || all.UnmarshalTo(have) != nil {
		return nil
	}
	return have.GetFields()
}

// extension returns the text with a key in extensions.
func extension(all *anypb.Any, key string) string { return fieldsOf(all)[key].GetStringValue() }

// keep returns extensions with only the given keys.
func keep(all *anypb.Any, keys []string) *anypb.Any {
	have, fields := fieldsOf(all), make(map[string]*structpb.Value)
	for _, key := range keys {
		if value, ok := have[key]; ok {
			fields[key] = value
		}
	}
	if len(fields) == 0 {
		return nil
	}
	out, err := anypb.New(&structpb.Struct{Fields: fields})
	if err != nil { // cannot fail: the content was unmarshalled before
		return nil
	}
	return out
}
