// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package message

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/servicetest"
)

// seen is a request as a program understands it.
type seen struct{ method, target, host, body, fields string }

// record is what the servers of the tests answer in the field X-Seen.
func (s seen) record() string {
	return base64.StdEncoding.EncodeToString([]byte(strings.Join([]string{
		s.method, s.target, s.host, hex.EncodeToString([]byte(s.body)), s.fields,
	}, "\x01")))
}

// parseSeen reads what record and testdata/server.py write.
func parseSeen(text string) (s seen, err error) {
	b, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		return s, err
	}
	parts := strings.SplitN(string(b), "\x01", 5)
	if len(parts) < 4 {
		return s, fmt.Errorf("%q has %d parts", b, len(parts))
	}
	body, err := hex.DecodeString(parts[3])
	s = seen{parts[0], parts[1], parts[2], string(body), ""}
	if len(parts) == 5 {
		s.fields = ordered(strings.Split(parts[4], "\x01"))
	}
	return s, err
}

// ordered joins fields "name=value" that rules may compare. Fields of one name keep their order.
func ordered(fields []string) string {
	name := func(f string) string { n, _, _ := strings.Cut(f, "="); return strings.ToLower(n) }
	fields = slices.DeleteFunc(slices.Clone(fields), func(f string) bool { return f == "" || IsFraming(name(f)) })
	for i, f := range fields {
		fields[i] = name(f) + f[len(name(f)):]
	}
	slices.SortStableFunc(fields, func(a, b string) int { return strings.Compare(name(a), name(b)) })
	return strings.Join(fields, "\x01")
}

// last is sent behind the requests of a text. It must be the last request that the server gets.
const last = "GET /last HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"

// passed reads the requests of a text, up to the first one that is refused or closes the connection. It returns what
// was
// evaluated, and what a server gets.
func passed(text string) (evaluated []seen, sent string) {
	in := reading(text)
	var all bytes.Buffer
	for {
		q, err := ReadRequest(in)
		if err != nil {
			return evaluated, all.String()
		}
		rest, _ := io.ReadAll(in)
		in = reading(string(rest))
		var head, coded, plain bytes.Buffer
		for into, to := range map[*bytes.Buffer]Body{&coded: q.Body, &plain: {}} {
			if in = reading(string(rest)); copyTo(into, in, q.Body, to) != nil {
				return evaluated, all.String()
			}
		}
		w := bufio.NewWriter(&head)
		q.Write(w)
		_ = w.Flush()
		all.Write(head.Bytes())
		all.Write(coded.Bytes())
		fields := make([]string, len(q.Header))
		for i, f := range q.Header {
			fields[i] = f.Name + "=" + f.Value
		}
		evaluated = append(evaluated, seen{q.Method, q.Target, q.Host, plain.String(), ordered(fields)})
		if q.Close {
			return evaluated, all.String()
		}
	}
}

func copyTo(into io.Writer, in *bufio.Reader, from, to Body) error {
	w := bufio.NewWriter(into)
	if err := CopyBody(w, in, from, to); err != nil {
		return err
	}
	return w.Flush()
}

// refused is in place of a request that a server has refused.
var refused = seen{method: "refused"}

// answers returns the requests that a server understands in a text.
func answers(at, text string, methods []string) (got []seen, err error) {
	c, err := net.Dial("unix", at)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(servicetest.Patience)); err != nil {
		return nil, err
	}
	if _, err := io.WriteString(c, text); err != nil && !errors.Is(err, syscall.EPIPE) {
		return nil, err
	}
	in := bufio.NewReader(c)
	for {
		q := &http.Request{Method: http.MethodGet}
		if len(got) < len(methods) {
			q.Method = methods[len(got)]
		}
		r, err := http.ReadResponse(in, q)
		switch {
		case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET):
			return got, nil
		case err != nil:
			return got, err
		case r.StatusCode < 200:
			continue
		case r.Header.Get("X-Seen") == "":
			got = append(got, refused)
			_, _ = io.Copy(io.Discard, r.Body)
			continue
		}
		_, _ = io.Copy(io.Discard, r.Body)
		s, err := parseSeen(r.Header.Get("X-Seen"))
		if err != nil {
			return got, err
		}
		got = append(got, s)
	}
}

// goServer answers with what net/http understands.
func goServer(t *testing.T, at string) {
	t.Helper()
	l, err := net.Listen("unix", at)
	if err != nil {
		t.Fatal(err)
	}
	s := &http.Server{ReadHeaderTimeout: time.Minute, DisableGeneralOptionsHandler: true, Handler: http.HandlerFunc(
		func(w http.ResponseWriter, q *http.Request) {
			b, err := io.ReadAll(q.Body)
			if err != nil {
				panic(http.ErrAbortHandler) // not a request
			}
			var fields []string
			uri := ""
			for name, values := range q.Header {
				for _, value := range values {
					if name == "X-Nginx-Uri" {
						uri = value
						continue
					}
					fields = append(fields, name+"="+value)
				}
			}
			target := q.RequestURI
			if path, _, _ := strings.Cut(target, "?"); uri != "" && strings.HasPrefix(target, "/") {
				// nginx chooses a location by this path: it must be the one that was evaluated, decoded once.
				if decoded, err := url.PathUnescape(path); err != nil || decoded != uri {
					target = fmt.Sprintf("%s, but for the locations of nginx %q", target, uri)
				}
			}
			w.Header().Set("X-Seen", seen{q.Method, target, q.Host, string(b), ordered(fields)}.record())
		})}
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	t.Cleanup(func() { s.Close(); <-done })
}

// run starts a server, and waits until it listens.
func run(t *testing.T, at, name string, args ...string) {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		path = filepath.Join("/usr/sbin", name)
	}
	var out bytes.Buffer
	c := exec.CommandContext(context.Background(), path, args...) //nolint:gosec // a program of the test
	c.Stdout, c.Stderr = &out, &out
	if err := c.Start(); err != nil {
		t.Fatalf("%s: %v; scripts/deps test installs it", name, err)
	}
	t.Cleanup(func() {
		_ = c.Process.Kill()
		_ = c.Wait()
		if t.Failed() {
			t.Logf("%s: %s", name, out.Bytes()[max(0, out.Len()-4096):])
		}
	})
	servicetest.EventuallyNil(t, name+" listens", func() error {
		c, err := net.Dial("unix", at)
		if err == nil {
			c.Close()
		}
		return err
	})
}

func pythonServer(t *testing.T, at string) {
	t.Helper()
	run(t, at, "python3", filepath.Join("testdata", "server.py"), at)
}

// nginxServer is nginx before a server of net/http. It passes on what it understands.
func nginxServer(t *testing.T, at string) {
	t.Helper()
	dir := filepath.Dir(at)
	goServer(t, filepath.Join(dir, "behind"))
	config := filepath.Join(dir, "nginx.conf")
	if err := os.WriteFile(config, []byte(strings.ReplaceAll(`
daemon off;
master_process off;
pid DIR/pid;
error_log stderr crit;
events { worker_connections 256; }
http {
	access_log off;
	client_body_temp_path DIR/body;
	proxy_temp_path DIR/proxy;
	fastcgi_temp_path DIR/fastcgi;
	uwsgi_temp_path DIR/uwsgi;
	scgi_temp_path DIR/scgi;
	client_max_body_size 0;
	large_client_header_buffers 8 64k;
	underscores_in_headers on;
	ignore_invalid_headers off;
	keepalive_requests 10000;
	server {
		listen unix:AT;
		location / {
			proxy_pass http://unix:DIR/behind:;
			proxy_http_version 1.1;
			proxy_ignore_client_abort on;
			proxy_set_header Host $http_host;
			proxy_set_header Connection "";
			proxy_set_header X-Nginx-Uri $uri;
		}
	}
}
`, "DIR", dir)), 0o600); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(config)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(config, bytes.ReplaceAll(b, []byte("AT;"), []byte(at+";")), 0o600); err != nil {
		t.Fatal(err)
	}
	run(t, at, "nginx", "-c", config, "-e", "stderr", "-p", dir)
}

// combinations returns texts of one to three requests, of parts that are valid, valid in part, or not valid. They are
// the
// same in each run.
func combinations(n int) (all []string) {
	random := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // not for secrets
	pick := func(common string, others ...string) string {
		if random.IntN(3) > 0 {
			return common
		}
		return others[random.IntN(len(others))]
	}
	for range n {
		var b strings.Builder
		for range 1 + random.IntN(3) {
			coded := pick("hello", "", "x\r\n\r\nGET /s HTTP/1.1\r\nHost: a\r\n\r\n", "0\r\n\r\n")
			framing := pick(fmt.Sprintf("Content-Length: %d\r\n", len(coded)), "", "Transfer-Encoding: chunked\r\n",
				"transfer-encoding:\tCHUNKED \r\n", fmt.Sprintf("content-length:%03d\r\n", len(coded)),
				"Content-Length: 5\r\n", "Content-Length: 0\r\n",
				"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
				"Content_Length: 3\r\n", "Transfer-Encoding: identity\r\n", "Content-Length: 5_0\r\n")
			if strings.HasPrefix(strings.ToLower(framing), "transfer") {
				half := len(coded) / 2
				sizes := []string{
					"%x\r\n", "%X\r\n", "%04x\r\n", "%x;a=b\r\n", "%x ; a=\"b\"\r\n", "%x\n",
					"0x%x\r\n", "%x;\r\n",
				}
				text := ""
				for _, part := range []string{coded[:half], coded[half:]} {
					if part != "" {
						text += fmt.Sprintf(pick(sizes[0], sizes...), len(part)) + part + pick("\r\n", "\r\n", "\n",
							"")
					}
				}
				coded = text + pick("0\r\n\r\n", "00\r\n\r\n", "0;x\r\nX-Last: 1\r\n\r\n", "0\r\nHost: b\r\n\r\n",
					"0\r\n")
			}
			b.WriteString(pick("POST", "GET", "HEAD", "PUT", "OPTIONS", "get", "M-SEARCH", "PRI") + " " +
				pick("/a", "/", "/a/../b", "//c", "/%7e/%2E/x", "/a?q=/../%2f#", "/a?q=/../%2f&\\", "/%e4;v=1", "*",
					"http://a/x?y",
					"/a%20b", "/%3f?%3f", "/a/%252e", "/"+strings.Repeat("l", 5000)) + " " +
				pick("HTTP/1.1", "HTTP/1.1", "HTTP/1.0", "HTTP/1.10") + "\r\n" +
				pick("Host: a\r\n", "hOST:a \r\n", "Host: b:80\r\n", "", "Host: a\r\nHost: a\r\n") +
				pick("", "X-Team: a\r\n", "x-team: a, b\r\nX-Team: \xe9\x85\r\n",
					"X-Team:\r\nConnection: x-team\r\n", "X_Team: c\r\n",
					"X-Team: a\tb\r\n", "X!$%&'*+.^`|~: 1\r\n", "X-Long: "+strings.Repeat("v", 5000)+"\r\n",
					"X-Team: a\r\n b\r\n") +
				framing +
				pick("", "Connection: keep-alive\r\n", "Connection: upgrade\r\nUpgrade: h2c, websocket\r\n",
					"Connection: close\r\n",
					"Expect: 100-continue\r\n", "Trailer: X-Last\r\nTE: trailers\r\n", "Keep-Alive: 5\r\n") +
				"\r\n" + coded)
		}
		all = append(all, b.String())
	}
	return all
}

// isPart reports whether a server got what was evaluated, without requests that it refused, and those after them.
func isPart(got, evaluated []seen) bool {
	if len(got) > len(evaluated) || !slices.Contains(got, refused) {
		return false
	}
	for i := range got {
		if got[i] != refused && got[i] != evaluated[i] {
			return false
		}
	}
	return true
}

// TestTheServerGetsWhatWasEvaluated: no text reaches a server as other requests than the package has read, and no
// request comes behind them. A server may refuse a request.
func TestTheServerGetsWhatWasEvaluated(t *testing.T) {
	texts := append(smuggling(), combinations(6000)...)
	type test struct {
		text, sent string
		evaluated  []seen
		methods    []string
	}
	var tests []test
	known := make(map[string]bool)
	for _, text := range texts {
		evaluated, sent := passed(text)
		if len(evaluated) == 0 {
			continue
		}
		if _, after := passed(sent + last); len(after) > len(sent) {
			evaluated, sent = passed(sent + last)
		}
		if known[sent] {
			continue
		}
		known[sent] = true
		x := test{text: text, sent: sent, evaluated: evaluated}
		for _, s := range evaluated {
			x.methods = append(x.methods, s.method)
		}
		tests = append(tests, x)
	}
	t.Logf("%d texts; %d different ones are sent to the servers", len(texts), len(tests))
	if len(tests) < 500 {
		t.Fatal("too few texts")
	}
	for name, start := range map[string]func(*testing.T, string){
		"Go": goServer, "CPython": pythonServer, "nginx": nginxServer,
	} {
		t.Run(name, func(t *testing.T) {
			at := filepath.Join(t.TempDir(), "socket")
			start(t, at)
			same, wrong := 0, 0
			for _, x := range tests {
				got, err := answers(at, x.sent, x.methods)
				if err == nil && slices.Equal(got, x.evaluated) {
					same++
					continue
				}
				if err == nil && isPart(got, x.evaluated) {
					continue
				}
				t.Errorf("%.999q was sent as %.999q:\nevaluated %.999q\nreceived  %.999q, %v",
					x.text, x.sent, x.evaluated, got, err)
				if wrong++; wrong == 3 { // the others would wait for answers, too
					return
				}
			}
			t.Logf("all requests of %d texts arrived; the server refused some of %d", same, len(tests)-same-wrong)
			if same*10 < len(tests)*7 {
				t.Error("the server refused more than three of ten")
			}
		})
	}
}
