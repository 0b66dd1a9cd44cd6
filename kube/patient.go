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

// A server may stop answering requests while its connections stay open: its store hangs, or a load balancer in front
// of it has lost the server. client-go waits for such an answer without limit.
const (
	// answerWithin limits the time until a response starts, and between two parts of a list. An API server ends
	// requests other than watches after 60 s by itself.
	answerWithin = 70 * time.Second
	// streamWithin limits the time between two parts of a watch with initial events. A server that sends initial
	// events also sends a bookmark every minute.
	streamWithin = 3 * time.Minute
	// watchOverdue is how long after its scheduled end any other watch is abandoned. Its server may send no
	// bookmarks, and ends the watch after timeoutSeconds.
	watchOverdue = time.Minute
	// maxRetryAfter limits the delays that a response requests with Retry-After. client-go makes up to ten such
	// delays within one call before it reports the failure.
	maxRetryAfter = 5 * time.Second
)

// silentError reports that a server did not answer in time, or stopped in the middle of a response.
type silentError struct {
	what string // as in "sends no answer"
	time.Duration
}

// Error implements error.
func (e *silentError) Error() string {
	return fmt.Sprintf("the server keeps the connection and %s within %s", e.what, e.Duration)
}

// patient sends requests and cancels the ones that a server does not answer in time.
type patient struct {
	next http.RoundTripper

	mu      sync.Mutex
	streams map[string]struct{} // guarded by mu; paths that the server streams with initial events
}

// roundTrip sends one request to one server. It returns a silentError if no response starts in time. If the response
// stops half-way, it calls silent, and reading the body returns a silentError.
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

// within returns the longest allowed time between two parts of a response; 0 means no limit.
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

// boundRetryAfter shortens the delay that a response requests. A server that was overloaded, or a proxy in front of
// it, may request hours.
func boundRetryAfter(resp *http.Response) {
	const name, most = "Retry-After", int(maxRetryAfter / time.Second)
	if seconds, err := strconv.Atoi(resp.Header.Get(name)); err == nil && seconds > most {
		resp.Header.Set(name, strconv.Itoa(most))
	}
}

// body is the body of a response. The time limit runs only during a Read, so a slow reader does not end a response.
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
