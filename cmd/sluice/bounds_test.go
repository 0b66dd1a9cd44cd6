// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"slices"
	"strings"
	"testing"

	"buf.build/gen/go/bufbuild/protovalidate/protocolbuffers/go/buf/validate"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
)

// TestEveryChangeCanBeTried: every call that changes state has validate_only, and then returns the result without the
// change.
func TestEveryChangeCanBeTried(t *testing.T) {
	reads := []string{"Get", "List", "Watch", "Check", "Observe", "Explain", "Diff", "Wait", "Dump"}
	others := map[protoreflect.FullName]string{
		"sluice.datapath.v1.DatapathService.AuditMaps":          "changes something with repair alone",
		"sluice.identity.v1.IdentityService.ConfirmEndpoint":    "acknowledges an event",
		"sluice.policy.v1.PolicyService.HoldAddresses":          "reports what the kernel has",
		"sluice.identity.v1.ClusterService.PublishKinds":        "passes on what an API server has",
		"sluice.identity.v1.ClusterService.PublishPodCIDRs":     "passes on what an API server has",
		"sluice.identity.v1.ClusterService.ReportRefusals":      "reports what a node enforces",
		"sluice.identity.v1.ClusterService.ConfirmMappings":     "reports what the datapath has applied",
		"sluice.identity.v1.IdentityService.AdmitLabels":        "answers what WatchWaitingLabels asks",
		"sluice.datapath.v1.DNSReportService.ReportDNSMessages": "reports what sluice-dns has seen",
		"sluice.store.v1.StoreService.CreateJoinToken":          "makes another token, and changes nothing else",
		"sluice.store.v1.StoreService.SaveSnapshot":             "reads",
		"sluice.store.v1.EnrolService.Enrol":                    "a machine joins, with a token of its own",
		"sluice.store.v1.EnrolService.EnrolMember":              "a machine joins, with a token of its own",
	}
	tried := 0
	protoregistry.GlobalFiles.RangeFiles(func(f protoreflect.FileDescriptor) bool {
		for i := range f.Services().Len() {
			for j := range f.Services().Get(i).Methods().Len() {
				m := f.Services().Get(i).Methods().Get(j)
				read := func(verb string) bool { return strings.HasPrefix(string(m.Name()), verb) }
				ours := strings.HasPrefix(string(m.FullName()), "sluice.")
				if !ours || slices.ContainsFunc(reads, read) || others[m.FullName()] != "" {
					continue
				}
				if f := m.Input().Fields().ByName("validate_only"); f == nil || f.Kind() != protoreflect.BoolKind {
					t.Errorf("%s has no validate_only", m.FullName())
				}
				tried++
			}
		}
		return true
	})
	if tried < 14 {
		t.Errorf("only %d calls were looked at", tried)
	}
}

// bounded reports whether a string field has a rule that limits its length.
func bounded(s *validate.StringRules) bool {
	return s.GetMaxLen()+s.GetMaxBytes()+s.GetLen() > 0 || s.GetIp() || s.GetIpPrefix() || s.GetPattern() != "" ||
		len(s.GetIn()) > 0
}

// TestEveryFieldOfARequestIsBounded: every field of a request has a maximum length, number of items or set of values,
// so that servers refuse too large requests before the handler runs.
func TestEveryFieldOfARequestIsBounded(t *testing.T) {
	seen := map[protoreflect.FullName]bool{}
	var walk func(m protoreflect.MessageDescriptor)
	walk = func(m protoreflect.MessageDescriptor) {
		if seen[m.FullName()] || !strings.HasPrefix(string(m.FullName()), "sluice.") {
			return
		}
		seen[m.FullName()] = true
		for i := range m.Fields().Len() {
			f := m.Fields().Get(i)
			rules, _ := proto.GetExtension(f.Options(), validate.E_Field).(*validate.FieldRules)
			if f.IsList() {
				if rules.GetRepeated().GetMaxItems() == 0 {
					t.Errorf("%s: no max_items", f.FullName())
				}
				rules = rules.GetRepeated().GetItems()
			}
			if f.IsMap() { // its keys are strings, its values strings or numbers
				m := rules.GetMap()
				values := f.MapValue().Kind() != protoreflect.StringKind || bounded(m.GetValues().GetString())
				if m.GetMaxPairs() == 0 || !bounded(m.GetKeys().GetString()) || !values {
					t.Errorf("%s: no bound of its pairs, its keys or its values", f.FullName())
				}
				continue
			}
			switch f.Kind() {
			case protoreflect.StringKind:
				if !bounded(rules.GetString()) {
					t.Errorf("%s: no bound of its length", f.FullName())
				}
			case protoreflect.BytesKind:
				if b := rules.GetBytes(); b.GetMaxLen() == 0 && b.GetLen() == 0 {
					t.Errorf("%s: no bound of its length", f.FullName())
				}
			case protoreflect.EnumKind:
				switch f.Enum().FullName() {
				case "sluice.net.v1.Protocol", // any IP protocol number is valid
					"sluice.policy.v1.TableFormat": // a newer subscriber may name unknown formats
					continue
				}
				if !rules.GetEnum().GetDefinedOnly() {
					t.Errorf("%s: values that are not defined are taken", f.FullName())
				}
			case protoreflect.MessageKind:
				walk(f.Message())
			}
		}
	}
	protoregistry.GlobalFiles.RangeFiles(func(f protoreflect.FileDescriptor) bool {
		for i := range f.Services().Len() {
			for j := range f.Services().Get(i).Methods().Len() {
				walk(f.Services().Get(i).Methods().Get(j).Input())
			}
		}
		return true
	})
	if len(seen) < 20 {
		t.Errorf("only %d messages were looked at", len(seen))
	}
}
