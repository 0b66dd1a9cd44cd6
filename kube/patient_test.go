// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kube

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/sluice-net/sluice/kit/log"
)

// answering behaves like the transport of net/http: cancelling a request ends it, and the body of its response, too.
type answering func(r *http.Request, w *io.PipeWriter) (status int, h http.Header)

// none is the status of a request that gets no answer.
const none = 0

// RoundTrip implements http.RoundTripper.
func (f answering) RoundTrip(r *http.Request) (*http.Response, error) {
	body, w := io.Pipe()
	status, h := f(r, w)
	if status == none {
		<-r.Context().Done()
		return nil, r.Context().Err()
	}
	stop := context.AfterFunc(r.Context(), func() { w.CloseWithError(r.Context().Err()) })
	if h == nil {
		h = http.Header{"Content-Type": {"application/json"}}
	}
	return &http.Response{StatusCode: status, Header: h, Body: pipe{body, stop}, Request: r}, nil
}

type pipe struct {
	*io.PipeReader
	stop func() bool
}

func (p pipe) Close() error {
	p.stop()
	return p.PipeReader.Close()
}

// clientOf returns a client for several servers behind one transport.
func clientOf(t *testing.T, f answering, servers ...string) *Client {
	t.Helper()
	a := newAddresses(servers, filepath.Join(t.TempDir(), "file"), log.Discard())
	a.current = servers[0]
	return &Client{
		Config: &rest.Config{Host: servers[0], Transport: newFailover(f, a), QPS: 100, Burst: 100}, addresses: a,
		monitor: newMonitor(nil, log.Discard()), log: log.Discard(),
	}
}

func TestServerThatAnswersNothingOverALivingConnectionIsLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var asked []string
		c := clientOf(t, func(r *http.Request, w *io.PipeWriter) (int, http.Header) {
			asked = append(asked, r.URL.Host)
			if r.URL.Host == "a:1" {
				return none, nil
			}
			go func() {
				fmt.Fprint(w, `{"kind":"Pod","apiVersion":"v1"}`)
				w.Close()
			}()
			return http.StatusOK, nil
		}, "https://a:1", "https://b:1")
		for range 2 {
			if err := get(t, c); err != nil {
				t.Error(err)
			}
		}
		if got := strings.Join(asked, " "); got != "a:1 b:1 b:1" {
			t.Errorf("the requests went to %s, want a:1 b:1 b:1", got)
		}
	})
}

func TestAnswerThatStopsInTheMiddleEnds(t *testing.T) {
	const (
		initial = "watch=true&sendInitialEvents=true&allowWatchBookmarks=true&timeoutSeconds=400"
		further = "watch=true&allowWatchBookmarks=true&timeoutSeconds=400"
	)
	for what, test := range map[string]struct {
		before, query string
		statusBefore  int
		within        time.Duration // 0: no end
	}{
		"a list":                           {query: "limit=500", within: answerWithin},
		"the initial events":               {query: initial, within: streamWithin},
		"a watch after initial events":     {before: initial, statusBefore: 200, query: further, within: streamWithin},
		"a watch of a server without them": {query: further, within: 400*time.Second + watchOverdue},
		"a watch after a refusal of them": {
			before: initial, statusBefore: 422, query: further, within: 400*time.Second + watchOverdue,
		},
		"a watch without bookmarks": {
			before: initial, statusBefore: 200, query: "watch=true&timeoutSeconds=60", within: time.Minute + watchOverdue,
		},
		"a watch without timeoutSeconds": {query: "watch=true"},
	} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				c := clientOf(t, func(r *http.Request, w *io.PipeWriter) (int, http.Header) {
					if test.before != "" && r.URL.RawQuery == test.before {
						w.Close()
						return test.statusBefore, nil
					}
					go fmt.Fprint(w, "half an ")
					return http.StatusOK, nil
				}, "https://a:1", "https://b:1")
				ask := func(query string) io.ReadCloser {
					r, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://any/api/v1/pods?"+query, http.NoBody)
					if err != nil {
						t.Fatal(err)
					}
					resp, err := c.Config.Transport.RoundTrip(r)
					if err != nil {
						t.Fatal(err)
					}
					return resp.Body
				}
				if test.before != "" {
					ask(test.before).Close()
				}
				body := ask(test.query)
				defer body.Close()
				part := make([]byte, 8)
				if _, err := io.ReadFull(body, part); err != nil {
					t.Fatal(err)
				}
				time.Sleep(24 * time.Hour) // the reader is busy
				began := time.Now()
				if test.within == 0 {
					time.AfterFunc(24*time.Hour, cancel)
				}
				_, err := body.Read(part)
				var silent *silentError
				current, _ := c.addresses.now()
				switch took := time.Since(began); {
				case test.within == 0:
					if took != 24*time.Hour || errors.As(err, &silent) || current != "https://a:1" {
						t.Errorf("the response ended after %s with %v, the next server is %s", took, err, current)
					}
				case took != test.within || !errors.As(err, &silent) || current != "https://b:1":
					t.Errorf("the response ended after %s with %v, the next server is %s; want %s and the other server",
						took, err, current, test.within)
				}
			})
		})
	}
}

// failures is a handler that records failures.
type failures struct {
	mu       sync.Mutex
	all      []string  // guarded by mu
	complete time.Time // guarded by mu
}

func (*failures) Upsert(types.NamespacedName, int) {}
func (*failures) Delete(types.NamespacedName)      {}

func (f *failures) Complete() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.complete = time.Now()
}

func (f *failures) Failed(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.all = append(f.all, text(err))
}

// TestServerThatAnswersLateIsReportedAndFollowedWhenItIsBack: the handler learns why the first listing is late, and
// the listing completes soon after the server recovers.
func TestServerThatAnswersLateIsReportedAndFollowedWhenItIsBack(t *testing.T) {
	for what, fault := range map[string]answering{
		"an overload for a day": func(_ *http.Request, w *io.PipeWriter) (int, http.Header) {
			w.Close()
			return http.StatusTooManyRequests, http.Header{"Retry-After": {"86400"}}
		},
		"maintenance for a day": func(_ *http.Request, w *io.PipeWriter) (int, http.Header) {
			w.Close()
			return http.StatusServiceUnavailable, http.Header{"Retry-After": {"86400"}}
		},
		"no answer": func(*http.Request, *io.PipeWriter) (int, http.Header) { return none, nil },
		"half an answer": func(_ *http.Request, w *io.PipeWriter) (int, http.Header) {
			go fmt.Fprint(w, `{"kind":"PodList","apiVersion":"v1","items":[`)
			return http.StatusOK, nil
		},
	} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				back := time.Now().Add(10 * time.Minute)
				c := clientOf(t, func(r *http.Request, w *io.PipeWriter) (int, http.Header) {
					if time.Now().Before(back) {
						return fault(r, w)
					}
					if r.URL.Query().Get("sendInitialEvents") != "" {
						w.Close()
						return http.StatusUnprocessableEntity, nil
					}
					if r.URL.Query().Get("watch") == "" {
						go func() {
							fmt.Fprint(w, `{"kind":"PodList","apiVersion":"v1","metadata":{"resourceVersion":"7"},"items":[]}`)
							w.Close()
						}()
					}
					return http.StatusOK, nil
				}, "https://a:1")
				client, err := c.REST(corev1.SchemeGroupVersion, corev1.AddToScheme)
				if err != nil {
					t.Fatal(err)
				}
				h := &failures{}
				ended := make(chan struct{})
				go func() {
					defer close(ended)
					Follow(ctx, c, Kind[int]{ //nolint:errcheck // it returns nil
						Client: client, Resource: "pods", Type: &corev1.Pod{}, Trim: func(runtime.Object) int { return 0 },
					}, h, log.Discard())
				}()
				time.Sleep(5 * time.Minute)
				h.mu.Lock()
				if len(h.all) == 0 || h.all[len(h.all)-1] == "" {
					t.Errorf("after 5 minutes the failures are %q", h.all)
				}
				h.mu.Unlock()
				time.Sleep(10 * time.Minute)
				h.mu.Lock()
				if h.complete.IsZero() || len(h.all) == 0 || h.all[len(h.all)-1] != "" {
					t.Errorf("5 minutes after the server is back: complete %v, failures %q", h.complete, h.all)
				}
				h.mu.Unlock()
				cancel()
				<-ended
			})
		})
	}
}
