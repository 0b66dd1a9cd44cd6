// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package nodetest

import (
	"cmp"
	"context"

	"google.golang.org/protobuf/types/known/timestamppb"

	statusv1 "github.com/sluice-net/sluice/proto/gen/sluice/status/v1"
)

// serviceStatus returns the status of a service of this node.
func serviceStatus(problems ...string) *statusv1.ServiceStatus {
	s := &statusv1.ServiceStatus{Version: "v1", StartTime: timestamppb.Now()}
	for _, text := range problems {
		s.Problems = append(s.Problems, &statusv1.Problem{Reason: statusv1.ProblemReason_PROBLEM_REASON_STORAGE, Text: text})
	}
	return s
}

// process is the ProcessService of any component.
type process struct {
	statusv1.UnimplementedProcessServiceServer
	node *Node
}

// logLevel returns the level that SetLogLevel has set; at first it is info.
func (n *Node) logLevel() statusv1.LogLevel {
	return statusv1.LogLevel(cmp.Or(n.level.Load(), int32(statusv1.LogLevel_LOG_LEVEL_INFO)))
}

func (p process) SetLogLevel(_ context.Context, r *statusv1.SetLogLevelRequest) (*statusv1.SetLogLevelResponse, error) {
	before := p.node.logLevel()
	if r.GetValidateOnly() {
		after := cmp.Or(r.GetLevel(), statusv1.LogLevel_LOG_LEVEL_INFO)
		return &statusv1.SetLogLevelResponse{Previous: before, Level: after}, nil
	}
	p.node.level.Store(int32(r.GetLevel()))
	return &statusv1.SetLogLevelResponse{Previous: before, Level: p.node.logLevel()}, nil
}

func (p process) GetConfig(context.Context, *statusv1.GetConfigRequest) (*statusv1.GetConfigResponse, error) {
	r := &statusv1.GetConfigResponse{
		LogLevel: p.node.logLevel(), Version: "v1", StartTime: timestamppb.Now(),
		Instance: "x", File: "/etc/sluice/x.yaml", IgnoredVariables: []string{"SLUICE_X_PORT"},
		Settings: []*statusv1.Setting{
			{Key: "log.level", Value: "info", Source: statusv1.SettingSource_SETTING_SOURCE_DEFAULT},
			{Key: "etcd.password", Value: "(secret)", Source: statusv1.SettingSource_SETTING_SOURCE_FILE},
			{Key: "node", Value: "a\x1b[2J", Source: statusv1.SettingSource_SETTING_SOURCE_FLAG},
		},
	}
	for key, value := range p.node.Settings {
		r.Settings = append(r.Settings, &statusv1.Setting{Key: key, Value: value})
	}
	if p.node.MetricsAddress != "" {
		r.Settings = append(r.Settings, &statusv1.Setting{Key: "metrics.address", Value: p.node.MetricsAddress})
	}
	return r, nil
}
