// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package wire

import (
	"cmp"
	"context"
	"log/slog"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	statusv1 "github.com/sluice-net/sluice/proto/gen/sluice/status/v1"
)

// Process implements ProcessService for any service. The zero value has no settings and no log.
type Process struct {
	statusv1.UnimplementedProcessServiceServer
	config *statusv1.GetConfigResponse
	level  LogLevel
	log    *slog.Logger
}

// LogLevel is a log level that can be changed. Its values are debug, info, warn and error.
type LogLevel interface {
	// String returns the present level.
	String() string
	// Set changes the level; empty text means the configured level. With dryRun it changes nothing.
	Set(text string, dryRun bool) (before, after string, err error)
}

// NewProcess returns a Process with these settings. each yields every setting in order: its key,
// its value without secrets, and "default", "file", "environment" or "flag". level is the level of log.
func NewProcess(instance, file string, ignored []string, each func(yield func(key, value, source string)),
	level LogLevel, log *slog.Logger,
) Process {
	c := &statusv1.GetConfigResponse{Instance: instance, File: file, IgnoredVariables: ignored}
	each(func(key, value, source string) {
		c.Settings = append(c.Settings, &statusv1.Setting{
			Key: key, Value: strings.ToValidUTF8(value, "\ufffd"),
			Source: statusv1.SettingSource(statusv1.SettingSource_value["SETTING_SOURCE_"+strings.ToUpper(source)]),
		})
	})
	return Process{config: c, level: level, log: log}
}

// Started returns p with the version and the start of a process that has no GetStatus.
func (p Process) Started(version string, at time.Time) Process {
	p.config = proto.CloneOf(p.config)
	p.config.Version, p.config.StartTime = version, timestamppb.New(at)
	return p
}

// GetConfig implements the service.
func (p Process) GetConfig(context.Context, *statusv1.GetConfigRequest) (*statusv1.GetConfigResponse, error) {
	if p.config == nil {
		return &statusv1.GetConfigResponse{}, nil
	}
	c := proto.CloneOf(p.config)
	c.LogLevel = levelOf(p.level.String())
	return c, nil
}

// SetLogLevel implements the service.
func (p Process) SetLogLevel(ctx context.Context, r *statusv1.SetLogLevelRequest) (
	*statusv1.SetLogLevelResponse, error,
) {
	if p.level == nil {
		return p.UnimplementedProcessServiceServer.SetLogLevel(ctx, r)
	}
	text := ""
	if r.GetLevel() != statusv1.LogLevel_LOG_LEVEL_UNSPECIFIED {
		text = strings.ToLower(strings.TrimPrefix(r.GetLevel().String(), levelPrefix))
	}
	// Before the change, because the new level may hide the line. At level error, only the new level may show it.
	line := func() { p.log.WarnContext(ctx, "log level is set", "to", cmp.Or(text, "setting log.level")) }
	if !r.GetValidateOnly() {
		line()
	}
	before, after, err := p.level.Set(text, r.GetValidateOnly())
	if err != nil {
		return nil, status.Errorf(codes.InvalidArgument, "level: %v", err)
	}
	if before == "error" && !r.GetValidateOnly() {
		line()
	}
	return &statusv1.SetLogLevelResponse{Previous: levelOf(before), Level: levelOf(after)}, nil
}

const levelPrefix = "LOG_LEVEL_"

func levelOf(text string) statusv1.LogLevel {
	return statusv1.LogLevel(statusv1.LogLevel_value[levelPrefix+strings.ToUpper(text)])
}
