// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package log creates the logger that all processes use: slog JSON on one writer, with the request
// identifier of the context added to each record.
//
// Messages are constant and lower case; facts are attributes under the keys below. The code that
// handles an error logs it, once.
package log

import (
	"context"
	"fmt"
	"io"
	"log/slog"

	"github.com/sluice-net/sluice/kit/requestid"
)

// Keys that have the same meaning in every process. Services add their own.
const (
	KeyError     = "error"
	KeyRequestID = "request_id"
	KeyService   = "service"
	KeyInstance  = "instance"
	KeyMethod    = "method"
	KeyCode      = "code"
	KeyDuration  = "duration"
	KeyPhase     = "phase"
	KeySocket    = "socket"
	KeyPath      = "path"
	KeyUID       = "uid"
	KeyVersion   = "version"
	KeyStack     = "stack"
)

// Err returns the attribute for an error.
func Err(err error) slog.Attr {
	if err == nil {
		return slog.Attr{}
	}
	return slog.String(KeyError, err.Error())
}

// New returns a logger that writes JSON lines to w. If level is a *slog.LevelVar, it can be changed
// at run time.
func New(w io.Writer, level slog.Leveler) *slog.Logger {
	return slog.New(WithRequestID(slog.NewJSONHandler(w, &slog.HandlerOptions{Level: level})))
}

// Discard returns a logger that drops everything, for tests and defaults.
func Discard() *slog.Logger { return slog.New(slog.DiscardHandler) }

// Level is a log level in a configuration.
type Level slog.Level

// Level implements slog.Leveler.
func (l Level) Level() slog.Level { return slog.Level(l) }

// UnmarshalText accepts debug, info, warn and error.
func (l *Level) UnmarshalText(text []byte) error {
	switch string(text) {
	case "debug":
		*l = Level(slog.LevelDebug)
	case "info":
		*l = Level(slog.LevelInfo)
	case "warn":
		*l = Level(slog.LevelWarn)
	case "error":
		*l = Level(slog.LevelError)
	default:
		return fmt.Errorf("%q is not one of debug, info, warn, error", text)
	}
	return nil
}

// MarshalText is the inverse of UnmarshalText.
func (l Level) MarshalText() ([]byte, error) { return []byte(l.String()), nil }

// String returns debug, info, warn or error.
func (l Level) String() string {
	switch {
	case l.Level() < slog.LevelInfo:
		return "debug"
	case l.Level() < slog.LevelWarn:
		return "info"
	case l.Level() < slog.LevelError:
		return "warn"
	default:
		return "error"
	}
}

// Switch is a log level that can be changed while the process runs.
type Switch struct {
	configured Level
	now        slog.LevelVar
}

// NewSwitch returns a Switch that begins with the configured level.
func NewSwitch(configured Level) *Switch {
	s := &Switch{configured: configured}
	s.now.Set(configured.Level())
	return s
}

// Level implements slog.Leveler.
func (s *Switch) Level() slog.Level { return s.now.Level() }

// String returns the present level: debug, info, warn or error.
func (s *Switch) String() string { return Level(s.now.Level()).String() }

// Set changes the level to debug, info, warn or error, or to the configured level if text is empty. It returns the
// level before and after. With dryRun it changes nothing.
func (s *Switch) Set(text string, dryRun bool) (before, after string, err error) {
	level := s.configured
	if text != "" {
		if err := level.UnmarshalText([]byte(text)); err != nil {
			return "", "", err
		}
	}
	before = s.String()
	if !dryRun {
		s.now.Set(level.Level())
	}
	return before, level.String(), nil
}

// WithRequestID adds the request identifier of the context to each record.
func WithRequestID(h slog.Handler) slog.Handler { return handler{h} }

type handler struct{ slog.Handler }

func (h handler) Handle(ctx context.Context, r slog.Record) error {
	if id := requestid.From(ctx); id != "" {
		r = r.Clone()
		r.AddAttrs(slog.String(KeyRequestID, id))
	}
	return h.Handler.Handle(ctx, r)
}

func (h handler) WithAttrs(a []slog.Attr) slog.Handler { return handler{h.Handler.WithAttrs(a)} }
func (h handler) WithGroup(g string) slog.Handler      { return handler{h.Handler.WithGroup(g)} }
