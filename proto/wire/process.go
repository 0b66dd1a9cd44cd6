// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package wire

import (
	"context"
	"strings"

	statusv1 "github.com/sluice-net/sluice/proto/gen/sluice/status/v1"
)

// Process implements ProcessService for any service. The zero value has no settings.
type Process struct {
	statusv1.UnimplementedProcessServiceServer
	config *statusv1.GetConfigResponse
}

// NewProcess returns a Process with these settings. each yields every setting in order: its key,
// its value without secrets, and "default", "file", "environment" or "flag".
func NewProcess(instance, file string, ignored []string, each func(yield func(key, value, source string))) Process {
	c := &statusv1.GetConfigResponse{Instance: instance, File: file, IgnoredVariables: ignored}
	each(func(key, value, source string) {
		c.Settings = append(c.Settings, &statusv1.Setting{
			Key: key, Value: strings.ToValidUTF8(value, "\ufffd"),
			Source: statusv1.SettingSource(statusv1.SettingSource_value["SETTING_SOURCE_"+strings.ToUpper(source)]),
		})
	})
	return Process{config: c}
}

// GetConfig implements the service.
func (p Process) GetConfig(context.Context, *statusv1.GetConfigRequest) (*statusv1.GetConfigResponse, error) {
	if p.config == nil {
		return &statusv1.GetConfigResponse{}, nil
	}
	return p.config, nil
}
