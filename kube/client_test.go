// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kube

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/sluice-net/sluice/kit/config"
	"github.com/sluice-net/sluice/kit/log"
)

func TestBadSettingsAreRefusedByField(t *testing.T) {
	of := func(s Settings) NodeSettings { return NodeSettings{Settings: s, Node: "n"} }
	for want, s := range map[string]NodeSettings{
		"":         {},
		"api: [1]": of(Settings{API: []string{"https://10.0.0.1:6443", "http://10.0.0.2"}, Token: "t", CA: "c"}),
		"api: [0]": of(Settings{API: []string{"https://10.0.0.1:6443/prefix"}, Token: "t", CA: "c"}),
		`"10.0.0.1:6443" is not https://host:port`: of(Settings{API: []string{"10.0.0.1:6443"}, Token: "t", CA: "c"}),

		"token: ":    of(Settings{API: []string{"https://10.0.0.1:6443"}, CA: "c"}),
		"ca: ":       of(Settings{API: []string{"https://10.0.0.1:6443"}, Token: "t"}),
		"node: ":     {Settings: Settings{Kubeconfig: "k"}},
		"kubeconfig": of(Settings{API: []string{"https://[fd00::1]:6443"}, Kubeconfig: "k", Token: "t", CA: "c"}),
	} {
		var texts []string
		for _, err := range append(config.All(s.Validate()), config.All(s.Settings.Validate())...) {
			texts = append(texts, err.Error())
		}
		got := strings.Join(texts, "; ")
		if (want == "") != (got == "") || !strings.Contains(got, want) {
			t.Errorf("%+v: %q, want %q", s, got, want)
		}
	}
}

// api starts a server that counts its requests, and returns settings for it.
func api(t *testing.T, answer http.HandlerFunc) (s *httptest.Server, settings Settings, asked *atomic.Int32) {
	t.Helper()
	asked = new(atomic.Int32)
	s = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		if got := r.Header.Get("Authorization"); got != "Bearer secret" {
			t.Errorf("the server got the credentials %q", got)
		}
		answer(w, r)
	}))
	s.EnableHTTP2 = true // as API servers
	s.StartTLS()
	t.Cleanup(s.Close)
	dir := t.TempDir()
	settings = Settings{API: []string{s.URL}, Token: filepath.Join(dir, "token"), CA: filepath.Join(dir, "ca.crt")}
	certificate := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})
	for file, content := range map[string][]byte{settings.Token: []byte("secret\n"), settings.CA: certificate} {
		if err := os.WriteFile(file, content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return s, settings, asked
}

func newClient(t *testing.T, s Settings, logged *bytes.Buffer) *Client {
	t.Helper()
	if logged == nil {
		logged = new(bytes.Buffer)
	}
	c, err := New(s, Options{
		Name: "sluice-test", StateFile: filepath.Join(filepath.Dir(s.Token), "state"),
		Log: slog.New(slog.NewTextHandler(logged, nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// get reads a pod.
func get(t *testing.T, c *Client) error {
	t.Helper()
	r, err := c.REST(corev1.SchemeGroupVersion, corev1.AddToScheme)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Client.CloseIdleConnections)
	return r.Get().Namespace("n").Resource("pods").Name("p").MaxRetries(0).Do(context.Background()).Error()
}

func ok(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	fmt.Fprint(w, `{"kind":"Pod","apiVersion":"v1"}`)
}

func TestServersAreAskedInTurn(t *testing.T) {
	a, settings, askedA := api(t, ok)
	var sick atomic.Bool
	b, _, askedB := api(t, func(w http.ResponseWriter, r *http.Request) {
		if sick.Load() {
			http.Error(w, "etcd is unavailable", http.StatusInternalServerError)
			return
		}
		ok(w, r)
	})
	settings.API = []string{a.URL, b.URL} // both have the certificate of httptest
	c := newClient(t, settings, nil)
	c.addresses.current = a.URL
	for range 3 {
		if err := get(t, c); err != nil {
			t.Fatal(err)
		}
	}
	if askedA.Load() != 3 || askedB.Load() != 0 {
		t.Errorf("the servers got %d and %d requests, want 3 and 0", askedA.Load(), askedB.Load())
	}
	a.CloseClientConnections()
	a.Close()
	for range 3 {
		if err := get(t, c); err != nil {
			t.Errorf("while the first server is down: %v", err)
		}
	}
	if askedB.Load() != 3 {
		t.Errorf("the second server got %d requests, want 3", askedB.Load())
	}
	sick.Store(true)
	if err := get(t, c); err == nil {
		t.Error("the last server rejects the request, but the call succeeds")
	}
	if current, _ := c.addresses.now(); current != a.URL {
		t.Errorf("after a server error the next request goes to %s, want the next server", current)
	}
	b.CloseClientConnections()
	b.Close()
	if err := get(t, c); err == nil || !strings.Contains(err.Error(), a.Listener.Addr().String()) ||
		!strings.Contains(err.Error(), b.Listener.Addr().String()) {
		t.Errorf("with all servers down: %v, want both addresses", err)
	}
}

// TestLateFailureLeavesTheCurrentServer: a request fails after other requests have already moved on to another
// server. The current server stays.
func TestLateFailureLeavesTheCurrentServer(t *testing.T) {
	all := []string{"https://a:1", "https://b:1", "https://c:1"}
	a := newAddresses(all, filepath.Join(t.TempDir(), "file"), log.Discard())
	a.current = "https://a:1"
	for _, step := range []struct{ failed, current string }{
		{"https://a:1", "https://b:1"},
		{"https://a:1", "https://b:1"},
		{"https://b:1", "https://c:1"},
		{"https://a:1", "https://c:1"},
		{"https://c:1", "https://a:1"},
	} {
		a.failed(step.failed)
		if current, n := a.now(); current != step.current || n != 3 {
			t.Errorf("after a failure of %s the server is %s of %d, want %s", step.failed, current, n, step.current)
		}
	}
}

// TestWriteWithoutAnAnswerIsSentToNoOtherServer: the connection is lost before the answer to a write arrives. The
// server may still have executed it, so only the caller may repeat it.
func TestWriteWithoutAnAnswerIsSentToNoOtherServer(t *testing.T) {
	a, settings, askedA := api(t, func(w http.ResponseWriter, r *http.Request) {
		if _, err := io.Copy(io.Discard, r.Body); err != nil {
			t.Error(err)
		}
		panic(http.ErrAbortHandler) // closes the connection
	})
	b, _, askedB := api(t, ok)
	settings.API = []string{a.URL, b.URL}
	c := newClient(t, settings, nil)
	c.addresses.current = a.URL
	r, err := c.REST(corev1.SchemeGroupVersion, corev1.AddToScheme)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Client.CloseIdleConnections)
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: "p"}}
	err = r.Post().Namespace("n").Resource("pods").Body(pod).MaxRetries(0).Do(t.Context()).Error()
	if err == nil || askedA.Load() != 1 || askedB.Load() != 0 {
		t.Errorf("the servers got %d and %d requests, want 1 and 0: %v", askedA.Load(), askedB.Load(), err)
	}
	if err := get(t, c); err != nil || askedB.Load() != 1 {
		t.Errorf("the next request: %v; the second server got %d requests", err, askedB.Load())
	}
}

// frozen starts a proxy to a server. After freeze is called, the proxy forwards nothing and accepts no connections,
// but keeps the existing ones open.
func frozen(t *testing.T, to net.Addr) (address string, freeze func()) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var stopped atomic.Bool
	var wait sync.WaitGroup
	var mu sync.Mutex
	var conns []net.Conn
	pass := func(from, to net.Conn) {
		buffer := make([]byte, 1<<16)
		for {
			n, err := from.Read(buffer)
			if err != nil {
				return
			}
			if stopped.Load() {
				continue
			}
			if _, err := to.Write(buffer[:n]); err != nil {
				return
			}
		}
	}
	wait.Go(func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			server, err := net.Dial("tcp", to.String())
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			conns = append(conns, client, server)
			mu.Unlock()
			wait.Go(func() { pass(client, server) })
			wait.Go(func() { pass(server, client) })
		}
	})
	freeze = func() {
		stopped.Store(true)
		_ = l.Close()
	}
	t.Cleanup(func() {
		freeze()
		mu.Lock()
		for _, c := range conns {
			_ = c.Close()
		}
		mu.Unlock()
		wait.Wait()
	})
	return "https://" + l.Addr().String(), freeze
}

func TestSilentServerIsLeftForTheNext(t *testing.T) {
	for name := range silence {
		t.Setenv(name, "") // restores it
		if err := os.Unsetenv(name); err != nil {
			t.Fatal(err)
		}
	}
	a, settings, askedA := api(t, ok)
	newClient(t, settings, nil)
	for name, seconds := range silence {
		if got := os.Getenv(name); got != seconds {
			t.Errorf("%s is %q in a service, want %q", name, got, seconds)
		}
		t.Setenv(name, "1") // New keeps a value that is set
	}
	b, _, askedB := api(t, ok)
	way, freeze := frozen(t, a.Listener.Addr())
	settings.API = []string{way, b.URL}
	c := newClient(t, settings, nil)
	c.addresses.current = way
	if err := get(t, c); err != nil || askedA.Load() != 1 {
		t.Fatalf("the first server got %d requests: %v", askedA.Load(), err)
	}
	freeze()
	if err := get(t, c); err != nil || askedA.Load() != 1 || askedB.Load() != 1 {
		t.Errorf("with a silent first server, the servers got %d and %d requests: %v", askedA.Load(), askedB.Load(), err)
	}
}

func TestUntrustedServerGetsNoToken(t *testing.T) {
	_, settings, asked := api(t, ok)
	public, private, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), IsCA: true, BasicConstraintsValid: true}
	other, err := x509.CreateCertificate(nil, template, template, public, private)
	if err != nil {
		t.Fatal(err)
	}
	content := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: other})
	if err := os.WriteFile(settings.CA, content, 0o600); err != nil {
		t.Fatal(err)
	}
	err = get(t, newClient(t, settings, nil))
	if unknown := new(x509.UnknownAuthorityError); !errors.As(err, unknown) || asked.Load() != 0 {
		t.Errorf("error %v, and the server got %d requests", err, asked.Load())
	}
}

func TestLastAddressesSurviveARestart(t *testing.T) {
	file := filepath.Join(t.TempDir(), "kubernetes-api.json")
	configured := []string{"https://api.example:6443/"}
	silent := slog.New(slog.DiscardHandler)
	a := newAddresses(configured, file, silent)
	s := &servers{addresses: a}
	s.Upsert(types.NamespacedName{Name: "a"}, []string{"https://10.0.0.2:6443"})
	s.Upsert(types.NamespacedName{Name: "b"}, []string{"https://[fd00::1]:6443"})
	if _, err := os.Stat(file); err == nil {
		t.Error("addresses were saved before the list was complete")
	}
	s.Complete()
	want := []string{"https://api.example:6443", "https://10.0.0.2:6443", "https://[fd00::1]:6443"}
	if again := newAddresses(configured, file, silent); !slices.Equal(again.all, want) || again.current != want[0] {
		t.Errorf("after a restart: %q, starting with %s; want %q", again.all, again.current, want)
	}
	a.current = "https://[fd00::1]:6443"
	s.Delete(types.NamespacedName{Name: "b"})
	if again := newAddresses(configured, file, silent); !slices.Equal(again.all, want[:2]) || a.current != want[0] {
		t.Errorf("after a server was removed: %q, current %s; want %q", again.all, a.current, want[:2])
	}
	s.Delete(types.NamespacedName{Name: "a"})
	if again := newAddresses(configured, file, silent); !slices.Equal(again.all, want[:2]) {
		t.Errorf("an empty list of the API changed the addresses to %q", again.all)
	}
}

func TestServersAreTheAddressesOfTheAPI(t *testing.T) {
	file := filepath.Join(t.TempDir(), "kubernetes-api.json")
	configured := []string{"https://api.example:6443", "https://10.0.0.9:6443", "https://[::ffff:10.0.0.9]:7443"}
	silent := slog.New(slog.DiscardHandler)
	c := &Client{addresses: newAddresses(configured, file, silent)}
	first, changed := c.Servers()
	if fmt.Sprint(first) != "[10.0.0.9]" {
		t.Errorf("configured addresses: %v, want only the IP address", first)
	}
	s := &servers{addresses: c.addresses}
	s.Upsert(types.NamespacedName{Name: "a"},
		[]string{"https://[fd00::1]:6443", "https://10.0.0.2:6443", "https://10.0.0.2:8443"})
	s.Complete()
	select {
	case <-changed:
	default:
		t.Error("the channel was not closed on a change")
	}
	const want = "[10.0.0.2 10.0.0.9 fd00::1]"
	all, changed := c.Servers()
	again, _ := (&Client{addresses: newAddresses(configured, file, silent)}).Servers()
	if fmt.Sprint(all) != want || fmt.Sprint(again) != want {
		t.Errorf("addresses %v, after a restart %v; want %s", all, again, want)
	}
	s.Complete()
	select {
	case <-changed:
		t.Error("the channel was closed although the addresses are the same")
	default:
	}
}

func TestCorruptAddressesAreReportedAndIgnored(t *testing.T) {
	file := filepath.Join(t.TempDir(), "state")
	a := newAddresses([]string{"https://a:1"}, file, slog.New(slog.DiscardHandler))
	a.learn([]string{"https://b:1"})
	good, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for what, content := range map[string][]byte{
		"empty":   {},
		"cut":     good[:len(good)/2],
		"changed": bytes.Replace(good, []byte("https://b:1"), []byte("https://c:1"), 1),
		"large":   bytes.Repeat([]byte("x"), 1<<17),
		"binary":  {0, 255, 3},
	} {
		if err := os.WriteFile(file, content, 0o600); err != nil {
			t.Fatal(err)
		}
		var logged bytes.Buffer
		again := newAddresses([]string{"https://a:1"}, file, slog.New(slog.NewTextHandler(&logged, nil)))
		if !slices.Equal(again.all, []string{"https://a:1"}) || !strings.Contains(logged.String(), file) {
			t.Errorf("%s: addresses %q, logged %q", what, again.all, logged.String())
		}
		again.learn([]string{"https://b:1"})
		if fixed, err := os.ReadFile(file); err != nil || !bytes.Equal(fixed, good) {
			t.Errorf("%s: afterwards the file is %q, %v", what, fixed, err)
		}
	}
	if err := errors.Join(os.Remove(file), os.Symlink("/dev/zero", file)); err != nil {
		t.Fatal(err)
	}
	if again := newAddresses([]string{"https://a:1"}, file, slog.New(slog.DiscardHandler)); len(again.all) != 1 {
		t.Errorf("a link gave %q", again.all)
	}
}

func TestMissingCredentialsNameTheSetting(t *testing.T) {
	_, settings, _ := api(t, ok)
	for key, change := range map[string]func(*Settings){
		"kubernetes.token: ":      func(s *Settings) { s.Token += "-not" },
		"kubernetes.ca: ":         func(s *Settings) { s.CA += "-not" },
		"kubernetes.kubeconfig: ": func(s *Settings) { *s = Settings{Kubeconfig: settings.CA} },
		"kubernetes.api: ":        func(s *Settings) { s.API = nil },
	} {
		s := settings
		change(&s)
		if _, err := New(s, Options{Log: slog.New(slog.DiscardHandler)}); err == nil || !strings.HasPrefix(err.Error(), key) {
			t.Errorf("%v, want %s…", err, key)
		}
	}
}

func TestKubeconfigThatExecutesIsRefused(t *testing.T) {
	file := filepath.Join(t.TempDir(), "kubeconfig")
	for want, user := range map[string]string{
		"":                   "token: t",
		"exec and auth-prov": "exec: {apiVersion: client.authentication.k8s.io/v1, command: aws, interactiveMode: Never}",
	} {
		content := `{kind: Config, current-context: c, contexts: [{name: c, context: {cluster: k, user: u}}],
clusters: [{name: k, cluster: {server: "https://127.0.0.1:1"}}], users: [{name: u, user: {` + user + `}}]}`
		if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		c, err := New(Settings{Kubeconfig: file}, Options{StateFile: file + ".state", Log: slog.New(slog.DiscardHandler)})
		if want == "" && (err != nil || len(c.Files()) != 0) ||
			want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v", user, err)
		}
	}
}

func TestSliceGivesTheServersThatAreReady(t *testing.T) {
	name, other, port, yes, no := "https", "metrics", int32(6443), true, false
	got := slice(&discoveryv1.EndpointSlice{
		Ports: []discoveryv1.EndpointPort{{Name: &other, Port: &port}, {Name: &name}, {Name: &name, Port: &port}},
		Endpoints: []discoveryv1.Endpoint{
			{Addresses: []string{"10.0.0.1"}},
			{Addresses: []string{"10.0.0.2"}, Conditions: discoveryv1.EndpointConditions{Ready: &no}},
			{Addresses: []string{"fd00::1", "not an address"}, Conditions: discoveryv1.EndpointConditions{Ready: &yes}},
		},
	})
	if want := []string{"https://10.0.0.1:6443", "https://[fd00::1]:6443"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}
