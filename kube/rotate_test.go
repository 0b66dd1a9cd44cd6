// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kube

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/sluice-net/sluice/kit/log"
)

// TestRefusedCredentialsSayWhatToDo: the message depends on whether client-go rereads the credentials. It rereads
// files, but not the kubeconfig.
func TestRefusedCredentialsSayWhatToDo(t *testing.T) {
	dir := t.TempDir()
	token, kubeconfig := filepath.Join(dir, "token"), filepath.Join(dir, "kubeconfig")
	write(t, token, "secret")
	for user, want := range map[string]string{
		"token: secret":            "kubernetes.kubeconfig: " + kubeconfig + ": is read when this service starts; restart it",
		"tokenFile: " + token:      "kubernetes.kubeconfig: " + token + ": is read again within a minute",
		"username: u, password: p": "kubernetes.kubeconfig: " + kubeconfig + ": is read when this service starts; restart it",
	} {
		write(t, kubeconfig, "apiVersion: v1\nkind: Config\ncurrent-context: c\n"+
			"clusters: [{name: c, cluster: {server: \"https://192.0.2.1:6443\"}}]\n"+
			"users: [{name: u, user: {"+user+"}}]\ncontexts: [{name: c, context: {cluster: c, user: u}}]\n")
		c, err := New(Settings{Kubeconfig: kubeconfig}, Options{
			Name: "test", StateFile: filepath.Join(dir, "addresses"), Log: log.Discard(),
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := c.refused(apierrors.NewUnauthorized("no")); !apierrors.IsUnauthorized(err) ||
			!strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: %v, want %q", user, err, want)
		}
		if err := c.refused(os.ErrNotExist); err != os.ErrNotExist { //nolint:errorlint // the same error value
			t.Errorf("%s: %v", user, err)
		}
	}
}

// present is a handler that records which objects exist.
type present struct {
	failures
	names map[types.NamespacedName]bool // guarded by mu
}

func (p *present) Upsert(n types.NamespacedName, _ int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.names[n] = true
}

func (p *present) Delete(n types.NamespacedName) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.names, n)
}

// last returns the last failure that the handler got, and the number of objects.
func (p *present) last() (failure string, names int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.all) > 0 {
		failure = p.all[len(p.all)-1]
	}
	return failure, len(p.names)
}

// guarded is a server with one pod. It accepts one token, and ends the watches of all others.
type guarded struct {
	mu      sync.Mutex
	token   string                 // guarded by mu
	watches map[*io.PipeWriter]int // guarded by mu
	sent    map[string]int         // guarded by mu; requests by token
}

func (g *guarded) rotate(token string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.token = token
	for w := range g.watches {
		w.Close()
	}
	clear(g.watches)
}

func (g *guarded) answer(r *http.Request, w *io.PipeWriter) (int, http.Header) {
	g.mu.Lock()
	defer g.mu.Unlock()
	token := strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer ")
	g.sent[token]++
	switch {
	case token != g.token:
		w.Close()
		return http.StatusUnauthorized, nil
	case r.URL.Query().Get("sendInitialEvents") != "":
		w.Close()
		return http.StatusUnprocessableEntity, nil
	case r.URL.Query().Get("watch") == "":
		go func() {
			fmt.Fprint(w, `{"kind":"PodList","apiVersion":"v1","metadata":{"resourceVersion":"7"},"items":[`+
				`{"metadata":{"name":"a","namespace":"n","resourceVersion":"5"}}]}`)
			w.Close()
		}()
	default:
		g.watches[w]++
	}
	return http.StatusOK, nil
}

// TestRotatedTokensAreRead: the present token expires before the file contains the next one; meanwhile the file is
// empty, missing or a directory. Objects stay, the failure is reported, no request is sent without a token, and the
// kind is followed again soon after the new token appears.
func TestRotatedTokensAreRead(t *testing.T) {
	for what, between := range map[string]func(t *testing.T, file string){
		"late":  func(*testing.T, string) {},
		"empty": func(t *testing.T, file string) { write(t, file, "") },
		"blank": func(t *testing.T, file string) { write(t, file, " \n") },
		"gone": func(t *testing.T, file string) {
			if err := os.Remove(file); err != nil {
				t.Fatal(err)
			}
		},
		"another kind": func(t *testing.T, file string) {
			if err := os.Remove(file); err != nil {
				t.Fatal(err)
			}
			if err := os.Mkdir(file, 0o700); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				file := filepath.Join(t.TempDir(), "token")
				write(t, file, "first")
				g := &guarded{token: "first", watches: map[*io.PipeWriter]int{}, sent: map[string]int{}}
				c := clientOf(t, g.answer, "https://a:1")
				c.Config.BearerTokenFile, c.credentials = file, "kubernetes.token: "+file
				client, err := c.REST(corev1.SchemeGroupVersion, corev1.AddToScheme)
				if err != nil {
					t.Fatal(err)
				}
				h := &present{names: map[types.NamespacedName]bool{}}
				ended := make(chan struct{})
				go func() {
					defer close(ended)
					Follow(ctx, c, Kind[int]{ //nolint:errcheck // it returns nil
						Client: client, Resource: "pods", Type: &corev1.Pod{}, Trim: func(runtime.Object) int { return 0 },
					}, h, log.Discard())
				}()
				time.Sleep(time.Minute)
				if failure, n := h.last(); failure != "" || n != 1 {
					t.Fatalf("with the first token: %q, %d objects", failure, n)
				}
				g.rotate("second")
				between(t, file)
				time.Sleep(5 * time.Minute)
				failure, n := h.last()
				if !strings.Contains(failure, "the credentials are refused (kubernetes.token: "+file) || n != 1 {
					t.Errorf("without a valid token: %q, %d objects", failure, n)
				}
				if err := os.RemoveAll(file); err != nil {
					t.Fatal(err)
				}
				write(t, file, "second\n")
				began := time.Now()
				for failure != "" && time.Since(began) < 10*time.Minute {
					time.Sleep(time.Second)
					failure, n = h.last()
				}
				if took := time.Since(began); failure != "" || n != 1 || took > 90*time.Second {
					t.Errorf("%v after the new token came: %q, %d objects", took, failure, n)
				}
				g.mu.Lock()
				if g.sent[""] > 0 {
					t.Errorf("%d requests had no token", g.sent[""])
				}
				g.mu.Unlock()
				cancel()
				<-ended
			})
		})
	}
}

func write(t *testing.T, file, text string) {
	t.Helper()
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}
