// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package bugreport

import (
	"errors"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/test/nodetest"
)

// counting serves metrics on a socket and counts the connections.
type counting struct {
	net.Listener
	accepted atomic.Int64
}

func (c *counting) Accept() (net.Conn, error) {
	conn, err := c.Listener.Accept()
	if err == nil {
		c.accepted.Add(1)
	}
	return conn, err
}

// serve serves at an address until the end of the test. If to is not empty, it redirects there.
func serve(t *testing.T, network, address, to string) *counting {
	t.Helper()
	l, err := net.Listen(network, address)
	if err != nil {
		t.Fatal(err)
	}
	c := &counting{Listener: l}
	s := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter,
		r *http.Request,
	) {
		if to != "" {
			http.Redirect(w, r, to, http.StatusFound)
			return
		}
		_, _ = w.Write([]byte("sluice_up 1\n"))
	})}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.Serve(c) // ends with the test
	}()
	t.Cleanup(func() { _ = s.Close(); <-done })
	return c
}

// reportOfMetrics returns a report that collects only metrics.
func reportOfMetrics(n *nodetest.Node) *report {
	return &report{
		inv: &invocation.Invocation{RunDir: n.RunDir, Timeout: time.Minute, AnswerLimit: 1 << 20}, runDir: n.RunDir,
	}
}

// metricsOf returns the metrics of one process.
func (r *report) metricsOf(t *testing.T, process string) (string, error) {
	t.Helper()
	w := &content{limit: 1 << 20}
	err := r.metrics(t.Context(), w, process)
	out, _ := w.close()
	return string(out), err
}

// TestMetricsAreAskedOfTheProcessAlone: a process reports addresses of other programs as its own, in every form. The
// command connects to none of them.
func TestMetricsAreAskedOfTheProcessAlone(t *testing.T) {
	n := newNode(t)
	own := filepath.Join(n.RunDir, "identity", "metrics.sock")
	serve(t, "unix", own, "")
	other := filepath.Join(n.RunDir, "docker.sock")
	tcp := serve(t, "tcp", "127.0.0.1:0", "")
	others := []*counting{tcp, serve(t, "unix", other, "")}
	link, theirs := filepath.Join(n.RunDir, "identity", "link.sock"), filepath.Join(n.RunDir, "identity", "theirs.sock")
	others = append(others, serve(t, "unix", theirs, ""))
	if err := errors.Join(os.Symlink(other, link), os.Lchown(theirs, 65534, 65534),
		os.WriteFile(filepath.Join(n.RunDir, "identity", "file"), nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	r := reportOfMetrics(n)
	for address, want := range map[string]string{
		tcp.Addr().String(): "which is neither in " + filepath.Join(n.RunDir, "identity") +
			" nor in /etc/sluice/identity.yaml",
		other: "is not connected to",
		filepath.Join(n.RunDir, "identity", "..", "docker.sock"): "is not connected to",
		filepath.Join(n.RunDir, "identity") + "/../docker.sock":  "is not connected to",
		filepath.Join(n.RunDir, "policy", "policy.sock"):         "is not connected to",
		"169.254.169.254:80": "is not connected to",
		"localhost:1":        "is not connected to",
		"@abstract":          "is not connected to",
		link:                 "is not a socket of the owner of",
		theirs:               "is not a socket of the owner of",
		filepath.Join(n.RunDir, "identity", "file"):   "is not a socket of the owner of",
		filepath.Join(n.RunDir, "identity", "absent"): "no such file",
		"off": "metrics.address is off",
		own:   "",
		"":    "",
		filepath.Join(n.RunDir, "identity") + "/./" + "metrics.sock": "",
	} {
		n.MetricsAddress = address
		got, err := r.metricsOf(t, "identity")
		reason := ""
		if err != nil {
			reason = err.Error()
		}
		if !strings.Contains(reason, want) || (reason == "") != (want == "") {
			t.Errorf("%q: missing because of %q, want %q", address, reason, want)
		}
		if (got == "sluice_up 1\n") != (want == "") {
			t.Errorf("%q: metrics %q", address, got)
		}
	}
	for _, c := range others {
		if c.accepted.Load() > 0 {
			t.Errorf("%s got %d connections", c.Addr(), c.accepted.Load())
		}
	}
}

// TestMetricsFollowNoRedirect: a process redirects the request to another server.
func TestMetricsFollowNoRedirect(t *testing.T) {
	n := newNode(t)
	other := serve(t, "tcp", "127.0.0.1:0", "")
	own := serve(t, "unix", filepath.Join(n.RunDir, "identity", "metrics.sock"),
		"http://"+other.Addr().String()+"/metrics")
	_, m, _ := reportOf(t, n)
	if got := reason(m, "metrics/identity.txt"); !strings.Contains(got, "answers 302") {
		t.Errorf("missing because of %q", got)
	}
	if own.accepted.Load() != 1 || other.accepted.Load() != 0 {
		t.Errorf("%d connections to the process, %d to another", own.accepted.Load(), other.accepted.Load())
	}
}

// TestMetricsAreAskedAtAnAddressThatRootConfigured uses configuration files that only root can write, and files that
// other users can write.
func TestMetricsAreAskedAtAnAddressThatRootConfigured(t *testing.T) {
	n := newNode(t)
	tcp := serve(t, "tcp", "127.0.0.1:0", "")
	n.MetricsAddress = tcp.Addr().String()
	dir := t.TempDir()
	file := nodetest.Write(t, dir, "identity.yaml", "metrics:\n  address: "+n.MetricsAddress+"\n")
	r := reportOfMetrics(n)
	r.configDir = dir
	if out, err := r.metricsOf(t, "identity"); err != nil || out != "sluice_up 1\n" {
		t.Errorf("configured by root: %q, %v", out, err)
	}
	before := tcp.accepted.Load()
	for what, change := range map[string]func() error{
		"of another user":     func() error { return os.Chown(file, 65534, 0) },
		"that others write":   func() error { return errors.Join(os.Chown(file, 0, 0), os.Chmod(file, 0o666)) },
		"with another server": func() error { return os.WriteFile(file, []byte("metrics: {address: 127.0.0.1:1}"), 0o600) },
		"that is a link": func() error {
			return errors.Join(os.Rename(file, file+".real"), os.Symlink(file+".real", file))
		},
	} {
		if err := change(); err != nil {
			t.Fatal(err)
		}
		if out, err := r.metricsOf(t, "identity"); err == nil || !strings.Contains(err.Error(), "is not connected to") {
			t.Errorf("a file %s: %q, %v", what, out, err)
		}
		if err := errors.Join(os.RemoveAll(file), os.WriteFile(file, []byte("metrics:\n  address: "+n.MetricsAddress+"\n"),
			0o600)); err != nil {
			t.Fatal(err)
		}
	}
	if got := tcp.accepted.Load(); got != before {
		t.Errorf("%d connections more", got-before)
	}
}
