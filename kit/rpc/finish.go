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

// Bounds of the lines about calls that failed alike: by one user, in one method, with one code.
const (
	failureBurst = 20  // that are logged at once
	failureRate  = 0.1 // a second, from then on
	// maxFailures is how many kinds of failures have a rate of their own. All others share one.
	maxFailures = 1024
)

// finishes logs the end of calls. Whoever may connect to the socket may make calls that are
// refused, so these lines have a rate.
type finishes struct {
	log *slog.Logger

	mu    sync.Mutex
	kinds map[string]*failures // guarded by mu
}

// failures are those of one kind.
type failures struct {
	limit   *rate.Limiter
	omitted int // since the last line
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
	f.log.Log(ctx, slog.Level(l), msg, fields...) //nolint:sloglint // the middleware chooses among constants
}

// kindOf names the user, the method and the code of a call.
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

// allow reports whether a line about a failure is written, and how many alike were not since
// the last one.
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
