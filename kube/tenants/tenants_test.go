// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package tenants

import (
	"context"
	"encoding/json"
	"encoding/pem"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/kit/config"
	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kube"
	"github.com/sluice-net/sluice/model/shares"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

type meta struct {
	Name            string            `json:"name,omitempty"`
	Labels          map[string]string `json:"labels,omitempty"`
	ResourceVersion string            `json:"resourceVersion"`
}

type object struct {
	Kind       string   `json:"kind"`
	APIVersion string   `json:"apiVersion"`
	Metadata   meta     `json:"metadata"`
	Items      []object `json:"items,omitempty"`
}

func namespace(name, tenant string) object {
	o := object{
		Kind: "PartialObjectMetadata", APIVersion: "meta.k8s.io/v1",
		Metadata: meta{Name: name, ResourceVersion: "7"},
	}
	if tenant != "" {
		o.Metadata.Labels = map[string]string{"sluice.io/tenant": tenant}
	}
	return o
}

// event is an event of a watch.
type event struct {
	Type   string `json:"type"`
	Object object `json:"object"`
}

// api starts a server that lists Namespaces once let is closed, and then streams events.
func api(t *testing.T, let <-chan struct{}, events <-chan event, list ...object) *kube.Client {
	t.Helper()
	s := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/api/v1/namespaces" || !strings.Contains(r.Header.Get("Accept"), "as=PartialObjectMetadata") {
			t.Errorf("the client requests %s with %q, want the metadata of Namespaces", r.URL, r.Header.Get("Accept"))
		}
		w.Header().Set("Content-Type", "application/json")
		encode := json.NewEncoder(w)
		if r.URL.Query().Get("watch") == "" {
			select {
			case <-let:
			case <-r.Context().Done():
				return
			}
			_ = encode.Encode(object{
				Kind: "PartialObjectMetadataList", APIVersion: "meta.k8s.io/v1", Metadata: meta{ResourceVersion: "7"}, Items: list,
			})
			return
		}
		if r.URL.Query().Get("sendInitialEvents") != "" {
			w.WriteHeader(http.StatusUnprocessableEntity)
			_, _ = w.Write([]byte(`{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Invalid","code":422}`))
			return
		}
		for {
			select {
			case e := <-events:
				_ = encode.Encode(e)
				w.(http.Flusher).Flush()
			case <-r.Context().Done():
				return
			}
		}
	}))
	t.Cleanup(s.Close)
	dir := t.TempDir()
	settings := kube.Settings{API: []string{s.URL}, Token: filepath.Join(dir, "token"), CA: filepath.Join(dir, "ca.crt")}
	certificate := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})
	for file, content := range map[string][]byte{settings.Token: []byte("secret\n"), settings.CA: certificate} {
		if err := os.WriteFile(file, content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	c, err := kube.New(settings, kube.Options{
		Name: "sluice-test", StateFile: filepath.Join(dir, "state"), Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestTenantsFollowTheLabelsOfNamespaces(t *testing.T) {
	let, events, changed := make(chan struct{}), make(chan event), make(chan struct{}, 10)
	c := api(t, let, events, namespace("a", "red"), namespace("b", "red"), namespace("c", ""))
	s := New(shares.Settings{SystemNamespaces: []string{"sluice-system"}}, func() { changed <- struct{}{} })
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- s.Follow(ctx, c, slog.New(slog.DiscardHandler)) }()
	defer func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()
	is := func(namespace string, want shares.Tenant) {
		t.Helper()
		if got := s.Of(namespace); got != want {
			t.Errorf("%q belongs to %s, want %s", namespace, got, want)
		}
	}
	if s.Complete() {
		t.Error("the set is complete before the Namespaces are listed")
	}
	is("", shares.System)
	is("kube-system", shares.System)
	is("sluice-system", shares.System)
	close(let)
	<-changed
	if !s.Complete() || len(changed) > 0 {
		t.Errorf("complete: %t, and %d more changes; want one change for the whole list", s.Complete(), len(changed))
	}
	is("a", shares.Labelled("red"))
	is("b", shares.Labelled("red"))
	is("c", shares.Namespace("c"))

	events <- event{"MODIFIED", namespace("c", "blue")}
	<-changed
	is("c", shares.Labelled("blue"))
	events <- event{"MODIFIED", namespace("c", "blue")} // no change of its tenant
	events <- event{"DELETED", namespace("a", "red")}
	<-changed
	is("a", shares.Namespace("a"))
	events <- event{"ADDED", namespace("d", "red")}
	<-changed
	is("d", shares.Labelled("red"))
	if len(changed) > 0 {
		t.Errorf("%d more changes, want one for each change of a tenant", len(changed))
	}
}

func TestTenantsWithoutKubernetesAreNamespaces(t *testing.T) {
	s := WithoutKubernetes(shares.Settings{})
	if got := s.Of("a"); !s.Complete() || got != shares.Namespace("a") {
		t.Errorf("complete: %t, a belongs to %s", s.Complete(), got)
	}
	s = WithoutKubernetes(shares.Settings{Together: true})
	if s.Of("a") != s.Of("b") {
		t.Errorf("%s and %s are two tenants", s.Of("a"), s.Of("b"))
	}
}

func TestBadSettingsAreRefusedByField(t *testing.T) {
	with := func(f func(c *Config)) Config {
		c := Defaults()
		f(&c)
		return c
	}
	for want, c := range map[string]Config{
		"":          with(func(c *Config) { c.Guarantees = map[string]string{"a": "50%", "b": "30"} }),
		`a: "half"`: with(func(c *Config) { c.Guarantees = map[string]string{"a": "half"} }),
		"81 %":      with(func(c *Config) { c.Guarantees = map[string]string{"a": "51", "b": "30"} }),
	} {
		var texts []string
		for _, err := range config.All(c.Validate()) {
			texts = append(texts, err.Error())
		}
		got := strings.Join(texts, "; ")
		if (want == "") != (got == "") || !strings.Contains(got, want) {
			t.Errorf("%+v: %q, want %q", c, got, want)
		}
	}
	c := with(func(c *Config) { c.Guarantees = map[string]string{"a": "50%"} })
	if got := c.Settings(); got.Guarantees["a"] != 50 || got.Together {
		t.Errorf("the settings are %+v", got)
	}
}
