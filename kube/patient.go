// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kube

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"sync"
	"time"
)

// A server that stops answering requests may keep its connections alive: its store hangs,
// or a load balancer in front of it has lost it. client-go waits for such an answer without
// an end.
const (
	// answerWithin is the longest time until an answer begins, and between two parts of a
	// list. An API server ends requests other than watches itself after 60 s.
	answerWithin = 70 * time.Second
	// streamWithin is the longest time between two parts of a watch of a kind for which the
	// server sends initial events: it sends a bookmark every minute, too.
	streamWithin = 3 * time.Minute
	// watchOverdue is how long after its own end any other watch is given up: its server may
	// send no bookmarks, and ends the watch after timeoutSeconds.
	watchOverdue = time.Minute
	// maxRetryAfter bounds the pauses that an answer asks for by Retry-After. client-go makes
	// up to ten of them within one call, and reports the failure afterwards.
	maxRetryAfter = 5 * time.Second
)

// silentError says that a server did not answer in time, or stopped in the middle of an answer.
type silentError struct {
	what string // did not happen
	time.Duration
}

// Error implements error.
func (e *silentError) Error() string {
	return fmt.Sprintf("the server keeps the connection and %s within %s", e.what, e.Duration)
}

// patient sends requests, and ends those that a server does not answer.
type patient struct {
	next http.RoundTripper

	mu      sync.Mutex
	streams map[string]struct{} // guarded by mu; paths of kinds with initial events
}

// roundTrip sends one request to one server. It returns a silentError when no answer begins.
// The body of the answer ends with one when it stops in the middle; silent is called then.
func (p *patient) roundTrip(req *http.Request, silent func(error)) (*http.Response, error) {
	ctx, cancel := context.WithCancelCause(req.Context())
	late := &silentError{"sends no answer", answerWithin}
	timer := time.AfterFunc(answerWithin, func() { cancel(late) })
	resp, err := p.next.RoundTrip(req.WithContext(ctx))
	timer.Stop()
	if errors.Is(context.Cause(ctx), late) {
		if err == nil {
			resp.Body.Close() //nolint:errcheck // there is another error
		}
		return nil, late
	}
	if err != nil {
		cancel(nil)
		return nil, err
	}
	boundRetryAfter(resp)
	resp.Body = newBody(ctx, resp.Body, p.within(req, resp.StatusCode), cancel, silent)
	return resp, nil
}

// within returns the longest time between two parts of an answer; 0: no limit.
func (p *patient) within(req *http.Request, status int) time.Duration {
	q := req.URL.Query()
	if watch, _ := strconv.ParseBool(q.Get("watch")); !watch { //nolint:errcheck // it is written by client-go
		return answerWithin
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	switch initial := q.Get("sendInitialEvents") == "true"; {
	case initial && status == http.StatusOK:
		p.streams[req.URL.Path] = struct{}{}
	case initial:
		delete(p.streams, req.URL.Path)
	}
	if _, ok := p.streams[req.URL.Path]; ok && q.Get("allowWatchBookmarks") == "true" {
		return streamWithin
	}
	seconds, err := strconv.Atoi(q.Get("timeoutSeconds"))
	if err != nil || seconds <= 0 {
		return 0
	}
	return time.Duration(seconds)*time.Second + watchOverdue
}

// boundRetryAfter shortens the pause that an answer asks for: a server that was overloaded,
// or a proxy in front of it, may ask for hours.
func boundRetryAfter(resp *http.Response) {
	const name, most = "Retry-After", int(maxRetryAfter / time.Second)
	if seconds, err := strconv.Atoi(resp.Header.Get(name)); err == nil && seconds > most {
		resp.Header.Set(name, strconv.Itoa(most))
	}
}

// body is the body of an answer. The limit counts while it is read, so that a slow reader
// ends no answer.
type body struct {
	io.ReadCloser
	request context.Context //nolint:containedctx // its cause is why a read failed
	cancel  context.CancelCauseFunc
	silent  func(error)
	late    *silentError // nil: no limit
	timer   *time.Timer  // runs during a Read
}

func newBody(
	ctx context.Context, of io.ReadCloser, within time.Duration, cancel context.CancelCauseFunc, silent func(error),
) *body {
	b := &body{ReadCloser: of, request: ctx, cancel: cancel, silent: silent}
	if within > 0 {
		b.late = &silentError{"sends nothing more", within}
		b.timer = time.AfterFunc(within, func() { cancel(b.late) })
		b.timer.Stop()
	}
	return b
}

// Read implements io.Reader.
func (b *body) Read(p []byte) (int, error) {
	if b.late == nil {
		return b.ReadCloser.Read(p)
	}
	b.timer.Reset(b.late.Duration)
	n, err := b.ReadCloser.Read(p)
	b.timer.Stop()
	if err != nil && errors.Is(context.Cause(b.request), b.late) {
		b.silent(b.late)
		err = b.late
	}
	return n, err
}

// Close implements io.Closer.
func (b *body) Close() error {
	if b.timer != nil {
		b.timer.Stop()
	}
	err := b.ReadCloser.Close()
	b.cancel(nil)
	return err
}
