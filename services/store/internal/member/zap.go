// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package member

import (
	"context"
	"log/slog"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// zapTo returns a logger for etcd that writes its warnings and errors to the log of this process. Below that, etcd logs
// every step of its start and every slow request.
func zapTo(l *slog.Logger) *zap.Logger { return zap.New(&core{log: l.With("from", "etcd")}) }

// core implements zapcore.Core.
type core struct{ log *slog.Logger }

// Enabled implements zapcore.Core.
func (c *core) Enabled(l zapcore.Level) bool { return l >= zapcore.WarnLevel }

// With implements zapcore.Core.
func (c *core) With(fields []zapcore.Field) zapcore.Core {
	return &core{log: slog.New(c.log.Handler().WithAttrs(attrs(fields)))}
}

// Check implements zapcore.Core.
func (c *core) Check(e zapcore.Entry, ce *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if c.Enabled(e.Level) {
		return ce.AddCore(e, c)
	}
	return ce
}

// Write implements zapcore.Core. etcd ends the process after an entry above the level error.
func (c *core) Write(e zapcore.Entry, fields []zapcore.Field) error {
	level := slog.LevelWarn
	if e.Level > zapcore.WarnLevel {
		level = slog.LevelError
	}
	a := attrs(fields)
	if e.Level > zapcore.ErrorLevel {
		a = append(a, slog.String("next", "the process ends; see docs/store.md, \"When something fails\""))
	}
	c.log.LogAttrs(context.Background(), level, e.Message, a...) //nolint:sloglint // the message of etcd
	return nil
}

// Sync implements zapcore.Core.
func (c *core) Sync() error { return nil }

func attrs(fields []zapcore.Field) (out []slog.Attr) {
	m := zapcore.NewMapObjectEncoder()
	for _, f := range fields {
		f.AddTo(m)
	}
	for k, v := range m.Fields {
		out = append(out, slog.Any(k, v))
	}
	return out
}
