// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package flowwire converts events of the programs, and filters of events, from their messages.
package flowwire

import (
	"fmt"
	"net/netip"

	"google.golang.org/protobuf/proto"

	"github.com/sluice-net/sluice/model/flow"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/proto/wire"
)

// criteria are the fields that a request and its exclusions have in common.
type criteria interface {
	GetOwners() []*workloadv1.Owner
	GetPods() []*datapathv1.PodName
	GetIdentities() []uint32
	GetPrefixes() []string
	GetReasons() []datapathv1.Reason
	GetDirection() netv1.Direction
	GetProtocols() []netv1.Protocol
	GetPorts() []uint32
	GetVerdicts() []datapathv1.Verdict
	GetTypes() []datapathv1.FlowType
	GetSelectors() []*datapathv1.LabelSelector
	GetServices() []*datapathv1.ServiceName
	GetSource() *datapathv1.FlowEndCriteria
	GetDestination() *datapathv1.FlowEndCriteria
}

// FieldError is a mistake in a field of a request.
type FieldError struct{ Field, Reason string }

// Error implements error.
func (e *FieldError) Error() string { return e.Field + ": " + e.Reason }

// FilterOf returns the filter of a request. An error is a FieldError. The criteria of services have no Backend.
func FilterOf(r *datapathv1.ObserveRequest) (f flow.Filter, err error) {
	if f.Criteria, err = criteriaOf("", r); err != nil {
		return f, err
	}
	for i, x := range r.GetExcluded() {
		field := fmt.Sprintf("excluded[%d]", i)
		c, err := criteriaOf(field+".", x)
		if err != nil {
			return f, err
		}
		if c.Empty() {
			return f, &FieldError{Field: field, Reason: "has no criterion, and would leave everything out"}
		}
		f.Excluded = append(f.Excluded, c)
	}
	if r.GetUntil() != nil {
		f.Until = r.GetUntil().AsTime()
	}
	return f, nil
}

// criteriaOf converts criteria; at is the prefix of their field names.
func criteriaOf(at string, r criteria) (c flow.Criteria, err error) {
	if c.Prefixes, err = prefixesOf(at, r.GetPrefixes()); err != nil {
		return c, err
	}
	if c.Source, err = endCriteriaOf(at+"source.", r.GetSource()); err != nil {
		return c, err
	}
	if c.Destination, err = endCriteriaOf(at+"destination.", r.GetDestination()); err != nil {
		return c, err
	}
	c.Owners, c.Pods = setOf(r.GetOwners(), wire.OwnerOf), setOf(r.GetPods(), podOf)
	c.Identities = setOf(r.GetIdentities(), func(id uint32) uint32 { return id })
	c.Reasons = setOf(r.GetReasons(), func(reason datapathv1.Reason) uint32 { return uint32(reason) })
	c.Protocols = setOf(r.GetProtocols(), func(p netv1.Protocol) uint8 { return uint8(p) })
	c.Ports = setOf(r.GetPorts(), portOf)
	c.Verdicts = setOf(r.GetVerdicts(), func(v datapathv1.Verdict) flow.Verdict { return verdicts[v] })
	c.Types = setOf(r.GetTypes(), func(t datapathv1.FlowType) flow.Type { return types[t] })
	c.Services = setOf(r.GetServices(),
		func(key *datapathv1.ServiceName) string { return key.GetNamespace() + "/" + key.GetName() })
	c.Selectors = selectorsOf(r.GetSelectors())
	if d := r.GetDirection(); d != netv1.Direction_DIRECTION_UNSPECIFIED {
		egress := d == netv1.Direction_DIRECTION_EGRESS
		c.Egress = &egress
	}
	return c, nil
}

// endCriteriaOf returns nil if there are no criteria for the end.
func endCriteriaOf(at string, r *datapathv1.FlowEndCriteria) (*flow.EndCriteria, error) {
	if proto.Size(r) == 0 {
		return nil, nil
	}
	prefixes, err := prefixesOf(at, r.GetPrefixes())
	if err != nil {
		return nil, err
	}
	return &flow.EndCriteria{
		Owners: setOf(r.GetOwners(), wire.OwnerOf), Pods: setOf(r.GetPods(), podOf), Prefixes: prefixes,
		Identities: setOf(r.GetIdentities(), func(id uint32) uint32 { return id }),
		Selectors:  selectorsOf(r.GetSelectors()), Ports: setOf(r.GetPorts(), portOf),
	}, nil
}

// setOf converts a list to a set; nil if it is empty.
func setOf[F any, T comparable](from []F, of func(F) T) map[T]bool {
	if len(from) == 0 {
		return nil
	}
	set := make(map[T]bool, len(from))
	for _, f := range from {
		set[of(f)] = true
	}
	return set
}

func podOf(p *datapathv1.PodName) flow.Pod {
	return flow.Pod{Namespace: p.GetNamespace(), Name: p.GetName()}
}

func portOf(p uint32) uint16 { return uint16(p) }

func prefixesOf(at string, texts []string) (prefixes []netip.Prefix, err error) {
	for i, text := range texts {
		p, err := netip.ParsePrefix(text)
		if err != nil {
			return nil, &FieldError{Field: fmt.Sprintf("%sprefixes[%d]", at, i), Reason: "is not a prefix: " + text}
		}
		prefixes = append(prefixes, p)
	}
	return prefixes, nil
}

func selectorsOf(from []*datapathv1.LabelSelector) (selectors []flow.Selector) {
	for _, sel := range from {
		selectors = append(selectors, selectorOf(sel))
	}
	return selectors
}

func selectorOf(sel *datapathv1.LabelSelector) flow.Selector {
	var out flow.Selector
	for _, r := range sel.GetRequirements() {
		one := flow.Requirement{Source: r.GetSource(), Key: r.GetKey()}
		switch r.GetOperator() {
		case datapathv1.LabelOperator_LABEL_OPERATOR_NOT_EXISTS, datapathv1.LabelOperator_LABEL_OPERATOR_NOT_IN:
			one.Not = true
		}
		one.Values = setOf(r.GetValues(), func(v string) string { return v })
		out = append(out, one)
	}
	return out
}
