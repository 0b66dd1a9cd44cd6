// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package rpc

import (
	"context"
	"fmt"
	"log/slog"
	"sync"

	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/logging"
	"golang.org/x/time/rate"

	"github.com/sluice-net/sluice/kit/log"
)

// Limits on log lines about similar failed calls: same user, method and code.
const (
	failureBurst = 20  // number that is logged without a rate limit
	failureRate  = 0.1 // per second afterwards
	// maxFailures is the maximum number of combinations with a rate limit of their own. All further combinations
	// share one limit.
	maxFailures = 1024
)

// finishes logs the end of calls. Every user who can connect can cause failed calls, so their log
// lines are rate-limited.
type finishes struct {
	log *slog.Logger

	mu    sync.Mutex
	kinds map[string]*failures // guarded by mu; by user, method and code
}

// failures is the rate limit for one combination of user, method and code.
type failures struct {
	limit   *rate.Limiter
	omitted int // lines suppressed since the last one that was written
}

func newFinishes(l *slog.Logger) *finishes {
	return &finishes{log: l, kinds: make(map[string]*failures)}
}

// Log implements logging.Logger.
func (f *finishes) Log(ctx context.Context, l logging.Level, msg string, fields ...any) {
	if l == logging.LevelInfo || l == logging.LevelWarn {
		omitted, ok := f.allow(kindOf(fields))
		if !ok {
			return
		}
		if omitted > 0 {
			fields = append(fields, "alike_and_not_logged", omitted)
		}
	}
	f.log.Log(ctx, slog.Level(l), msg, fields...) //nolint:sloglint // the middleware passes constant messages
}

// kindOf returns the combination of user, method and code of a call.
func kindOf(fields []any) string {
	var uid, service, method, code any
	for i := 0; i+1 < len(fields); i += 2 {
		switch fields[i] {
		case log.KeyUID:
			uid = fields[i+1]
		case logging.ServiceFieldKey:
			service = fields[i+1]
		case logging.MethodFieldKey:
			method = fields[i+1]
		case "grpc.code":
			code = fields[i+1]
		}
	}
	return fmt.Sprint(uid, " ", service, "/", method, " ", code)
}

// allow reports whether to write a line about a failure, and how many similar lines were suppressed
// since the last one.
func (f *finishes) allow(kind string) (omitted int, ok bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.kinds[kind] == nil && len(f.kinds) >= maxFailures {
		kind = ""
	}
	k := f.kinds[kind]
	if k == nil {
		k = &failures{limit: rate.NewLimiter(failureRate, failureBurst)}
		f.kinds[kind] = k
	}
	if !k.limit.Allow() {
		k.omitted++
		return 0, false
	}
	omitted, k.omitted = k.omitted, 0
	return omitted, true
}
