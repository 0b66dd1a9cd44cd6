// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kubernetes

import (
	"bytes"
	"context"
	"encoding/json"
	"encoding/pem"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/kube"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
)

// api is an API server that has kinds but no objects.
type api struct {
	*httptest.Server
	mu    sync.Mutex
	kinds []string // guarded by mu; group/version/resource
	looks int      // guarded by mu
}

func (a *api) set(kinds ...string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.kinds = append(kinds, "networking.k8s.io/v1/networkpolicies")
}

func (a *api) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	kinds := slices.Clone(a.kinds)
	if r.URL.Path == "/apis" {
		a.looks++
	}
	a.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	answer := func(v any) {
		if err := json.NewEncoder(w).Encode(v); err != nil {
			panic(http.ErrAbortHandler)
		}
	}
	type object = map[string]any
	path := strings.TrimPrefix(r.URL.Path, "/apis/")
	switch {
	case r.URL.Path == "/apis":
		versions := make(map[string][]object) // by group
		for _, k := range kinds {
			parts := strings.Split(k, "/")
			version := parts[0] + "/" + parts[1]
			if !slices.ContainsFunc(versions[parts[0]], func(v object) bool { return v["groupVersion"] == version }) {
				versions[parts[0]] = append(versions[parts[0]], object{"groupVersion": version})
			}
		}
		var groups []object
		for _, name := range slices.Sorted(maps.Keys(versions)) {
			groups = append(groups, object{"name": name, "versions": versions[name]})
		}
		answer(object{"groups": groups})
	case strings.Count(path, "/") == 1:
		var all []object
		for _, k := range kinds {
			if rest, ok := strings.CutPrefix(k, path+"/"); ok {
				all = append(all, object{"name": rest})
			}
		}
		answer(object{"resources": all})
	case r.URL.Query().Get("sendInitialEvents") != "":
		w.WriteHeader(http.StatusUnprocessableEntity)
		answer(object{"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Invalid", "code": 422})
	case r.URL.Query().Get("watch") != "":
		w.WriteHeader(http.StatusOK)
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	default:
		if slices.Contains(kinds, path) {
			answer(object{"metadata": object{"resourceVersion": "1"}, "items": []object{}})
			return
		}
		w.WriteHeader(http.StatusNotFound)
		answer(object{"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404})
	}
}

// board is a Kinds that several sources of one cluster share.
type board struct {
	mu        sync.Mutex
	kinds     []string                     // guarded by mu
	published bool                         // guarded by mu
	readers   map[int]func([]string, bool) // guarded by mu
	next      int                          // guarded by mu
}

func (b *board) Watch(ctx context.Context, told func([]string, bool)) {
	b.mu.Lock()
	id := b.next
	b.next++
	b.readers[id] = told
	told(b.kinds, b.published)
	b.mu.Unlock()
	<-ctx.Done()
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.readers, id)
}

// set stores published kinds. Called with mu held.
func (b *board) set(kinds []string, published bool) {
	b.kinds, b.published = kinds, published
	for _, told := range b.readers {
		told(kinds, published)
	}
}

// nothing implements Sink without policies.
type nothing struct{}

func (nothing) Apply(context.Context, watch.Changes[policy.Key, policy.Written]) error { return nil }

func (nothing) Complete(context.Context, map[policy.Key]struct{}) error { return nil }

func (nothing) Failed(context.Context, error) error { return nil }

func (nothing) Held(context.Context) ([]policy.Key, error) { return nil, nil }

// logged keeps the lines of a log.
type logged struct {
	mu    sync.Mutex
	lines bytes.Buffer // guarded by mu
}

func (l *logged) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.lines.Write(b)
}

func (l *logged) logger() *slog.Logger { return slog.New(slog.NewTextHandler(l, nil)) }

// has reports whether a line contains all words.
func (l *logged) has(words ...string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for line := range strings.Lines(l.lines.String()) {
		if !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(line, w) }) {
			return true
		}
	}
	return false
}

// client returns a client of an API server. If server is nil, the client can reach no server.
func client(t *testing.T, server *httptest.Server) *kube.Client {
	t.Helper()
	dir, url, ca := t.TempDir(), "https://192.0.2.1:6443", []byte(nil)
	if server != nil {
		url = server.URL
		ca = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	}
	config := clientcmdapi.NewConfig()
	config.Clusters["c"] = &clientcmdapi.Cluster{Server: url, CertificateAuthorityData: ca}
	config.AuthInfos["u"] = &clientcmdapi.AuthInfo{Token: "t"}
	config.Contexts["x"] = &clientcmdapi.Context{Cluster: "c", AuthInfo: "u"}
	config.CurrentContext = "x"
	file := filepath.Join(dir, "kubeconfig")
	if err := clientcmd.WriteToFile(*config, file); err != nil {
		t.Fatal(err)
	}
	c, err := kube.New(kube.Settings{Kubeconfig: file}, kube.Options{
		Name: "test", StateFile: filepath.Join(dir, "addresses"), Log: log.Discard(),
	})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// TestKindsThatOneProcessFindsAreWatchedByTheOthers: one process queries the API server once, and other processes watch
// a kind that it publishes later.
func TestKindsThatOneProcessFindsAreWatchedByTheOthers(t *testing.T) {
	const groups, networks = "cilium.io/v2/ciliumcidrgroups", "networking.k8s.io/v1/networkpolicies"
	a := &api{}
	a.set()
	a.Server = httptest.NewTLSServer(a)
	defer a.Close()
	b := &board{readers: map[int]func([]string, bool){}, kinds: []string{networks}, published: true}
	ctx, cancel := context.WithCancel(t.Context())
	var parts sync.WaitGroup
	defer parts.Wait()
	defer cancel()
	node := &logged{}
	s := New(client(t, a.Server), nothing{}, node.logger())
	s.Kinds = b
	parts.Go(func() {
		if err := s.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	servicetest.Eventually(t, "the node watches what there is", func() bool {
		return node.has("watched", "networkpolicies")
	})
	a.set(groups)
	b.mu.Lock()
	b.set([]string{groups, networks}, true)
	b.mu.Unlock()
	servicetest.Eventually(t, "the node watches the new kind", func() bool { return node.has("watched", "ciliumcidrgroups") })
	if !node.has("published", "ciliumcidrgroups") {
		t.Error("the node has found the kind with its own query")
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.looks != 1 {
		t.Errorf("the node has made %d queries", a.looks)
	}
}

// TestDiscoveryNamesTheKindsOfPolicy: Look returns only kinds of policy. all is true only if no kind is missing.
func TestDiscoveryNamesTheKindsOfPolicy(t *testing.T) {
	a := &api{}
	a.set("apps/v1/deployments", "cilium.io/v2/ciliumcidrgroups", "cilium.io/v2/ciliumnodes")
	a.Server = httptest.NewTLSServer(a)
	defer a.Close()
	d, err := NewDiscovery(client(t, a.Server))
	if err != nil {
		t.Fatal(err)
	}
	kinds, all, err := d.Look(t.Context())
	want := []string{"cilium.io/v2/ciliumcidrgroups", "networking.k8s.io/v1/networkpolicies"}
	if err != nil || all || !slices.Equal(kinds, want) {
		t.Errorf("%q, all %t, %v; want %q", kinds, all, err, want)
	}
	var every []string
	for _, kind := range policy.Kinds() {
		every = append(every, policy.Versions(kind)[0]+"/"+Resource(kind))
	}
	a.set(every...)
	if kinds, all, err = d.Look(t.Context()); err != nil || !all || len(kinds) < len(every) {
		t.Errorf("%q, all %t, %v; want every kind", kinds, all, err)
	}
	a.mu.Lock()
	a.kinds = nil // as while an API server starts
	a.mu.Unlock()
	if kinds, _, err = d.Look(t.Context()); err == nil {
		t.Errorf("an API server without networkpolicies has %q", kinds)
	}
}

func TestPauseBetweenLooksFitsTheCluster(t *testing.T) {
	s := New(client(t, nil), nothing{}, log.Discard())
	missing := &watched{kind: "CiliumCIDRGroup"}
	f := &finder{source: s, kinds: []*watched{missing}, events: make(chan struct{}, 1)}
	want := func(what string, failed bool, want time.Duration) {
		t.Helper()
		if got := f.pause(failed); got != want {
			t.Errorf("%s: %s, want %s", what, got, want)
		}
	}
	// If the number of Nodes is unknown, assume 5,000.
	want("no process looks for all", false, 500*time.Second)
	want("a look failed", true, again)
	f.told([]string{"g/v1/k"}, true)
	want("one looks for all", false, published)
	missing.version = policy.Versions("CiliumCIDRGroup")[0]
	want("every kind is watched", false, 0)
}
