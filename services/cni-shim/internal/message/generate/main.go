// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Command generate writes the Go messages of the plugin from the descriptors of the API. It writes the file named by
// its argument: the methods that the plugin calls, all fields of their requests, and those fields of their answers that
// the plugin reads.
package main

import (
	"fmt"
	"os"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	statuspb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/reflect/protoreflect"

	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	ipamv1 "github.com/sluice-net/sluice/proto/gen/sluice/ipam/v1"
)

// spec lists the parts of the API that the plugin uses.
var spec = use{
	calls: []methods{
		{ipamv1.File_sluice_ipam_v1_ipam_proto.Services().ByName("IPAMService"), []protoreflect.Name{
			"Allocate", "Release",
		}},
		{datapathv1.File_sluice_datapath_v1_datapath_proto.Services().ByName("DatapathService"), []protoreflect.Name{
			"CreateEndpoint", "DeleteEndpoint", "CheckEndpoint", "GetEndpoint", "ReclaimEndpoints", "GetStatus",
		}},
		{grpc_health_v1.File_grpc_health_v1_health_proto.Services().ByName("Health"), []protoreflect.Name{"Check"}},
	},
	errors: []protoreflect.MessageDescriptor{
		(&statuspb.Status{}).ProtoReflect().Descriptor(),
		(&errdetails.ErrorInfo{}).ProtoReflect().Descriptor(),
		(&errdetails.RetryInfo{}).ProtoReflect().Descriptor(),
		(&errdetails.BadRequest{}).ProtoReflect().Descriptor(),
		(&errdetails.QuotaFailure{}).ProtoReflect().Descriptor(),
	},
	reads: map[protoreflect.FullName][]string{
		"sluice.ipam.v1.AllocateResponse": {"allocation?"},
		"sluice.ipam.v1.Allocation":       {"addresses", "state", "lease_expire_time?"},
		"sluice.ipam.v1.Address":          {"address", "pool_prefix_length"},
		"sluice.ipam.v1.ReleaseResponse":  {},

		"sluice.datapath.v1.CreateEndpointResponse": {"endpoint?"},
		"sluice.datapath.v1.GetEndpointResponse":    {"endpoint?"},
		"sluice.datapath.v1.Endpoint": {
			"identity", "addresses", "host_interface", "container_interface", "mtu", "gateways", "create_time",
			"source_routed",
		},
		"sluice.datapath.v1.Interface":                {"name", "index", "mac"},
		"sluice.datapath.v1.DeleteEndpointResponse":   {"existed"},
		"sluice.datapath.v1.CheckEndpointResponse":    {"differences"},
		"sluice.datapath.v1.Difference":               {"subject", "key", "want", "have"},
		"sluice.datapath.v1.ReclaimEndpointsResponse": {"reclaimed"},
		"sluice.datapath.v1.GetStatusResponse":        {"endpoints", "known_add_ready", "service"},
		"sluice.datapath.v1.EndpointStateCount":       {"state", "count"},
		"sluice.status.v1.ServiceStatus":              {"problems"},
		"sluice.status.v1.Problem":                    {"text"},

		"grpc.health.v1.HealthCheckResponse": {"status"},

		"google.rpc.Status":                    {"code", "message", "details"},
		"google.protobuf.Any":                  {"type_url", "value"},
		"google.rpc.ErrorInfo":                 {"reason", "domain", "metadata"},
		"google.rpc.RetryInfo":                 {"retry_delay"},
		"google.protobuf.Duration":             {"seconds", "nanos"},
		"google.rpc.BadRequest":                {"field_violations"},
		"google.rpc.BadRequest.FieldViolation": {"field", "description"},
		"google.rpc.QuotaFailure":              {"violations"},
		"google.rpc.QuotaFailure.Violation":    {"subject", "description"},
	},
}

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: generate FILE")
		os.Exit(2)
	}
	source, err := spec.source()
	if err == nil {
		err = os.WriteFile(os.Args[1], source, 0o644) //nolint:gosec // a source file
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "generate:", err)
		os.Exit(1)
	}
}
