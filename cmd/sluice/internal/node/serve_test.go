// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health/grpc_health_v1"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/test/nodetest"
	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/servicetest"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
)

// written is a buffer that is safe for concurrent use.
type written struct {
	mu sync.Mutex
	b  bytes.Buffer // guarded by mu
}

func (o *written) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.Write(p)
}

func (o *written) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.String()
}

var addressRE = regexp.MustCompile(`"address":"([^"]+)"`)

// TestConfigurationFollowsTheServicesAndStays: the file is written once containers can be connected, and stays after
// the process has ended.
func TestConfigurationFollowsTheServicesAndStays(t *testing.T) {
	n := nodetest.New(t)
	n.Health["datapath"].SetServingStatus("", grpc_health_v1.HealthCheckResponse_NOT_SERVING)
	p, err := instance.New("")
	if err != nil {
		t.Fatal(err)
	}
	c := configuration{directory: t.TempDir(), name: "05-sluice.conflist", plugins: t.TempDir(), paths: p}
	log := &written{}
	inv := &invocation.Invocation{RunDir: n.RunDir, Timeout: 10 * time.Second, ErrOut: log}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- serve(ctx, inv, c, "127.0.0.1:0") }()
	probe := func() string {
		t.Helper()
		servicetest.Eventually(t, "an address in the log", func() bool { return addressRE.MatchString(log.String()) })
		tr := &http.Transport{DisableKeepAlives: true}
		r, err := (&http.Client{Transport: tr}).Get("http://" + addressRE.FindStringSubmatch(log.String())[1] + "/readyz")
		if err != nil {
			t.Fatal(err)
		}
		defer r.Body.Close()
		b, err := io.ReadAll(r.Body)
		if err != nil {
			t.Fatal(err)
		}
		return fmt.Sprintf("%d %s", r.StatusCode, b)
	}
	wantProbe := func(want string) {
		t.Helper()
		servicetest.EventuallyNil(t, "the probe", func() error {
			if got := probe(); !strings.Contains(got, want) {
				return fmt.Errorf("%s, want %s", got, want)
			}
			return nil
		})
	}
	wantProbe("503 sluice-datapath does not serve yet")
	if _, err := os.Stat(c.path()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("before the datapath serves: %v", err)
	}
	n.Health["datapath"].SetServingStatus("", grpc_health_v1.HealthCheckResponse_SERVING)
	wantProbe("200 ok")
	content, err := os.ReadFile(c.path())
	if err != nil || !bytes.Equal(content, c.content()) {
		t.Fatalf("%s, %v, want\n%s", content, err, c.content())
	}
	// The file stays when a service ends.
	n.Health["ipam"].SetServingStatus("", grpc_health_v1.HealthCheckResponse_NOT_SERVING)
	wantProbe("503 sluice-ipam does not serve yet")
	// A file that the runtime prefers.
	nodetest.Write(t, c.directory, "00-other.conf", "{}")
	n.Health["ipam"].SetServingStatus("", grpc_health_v1.HealthCheckResponse_SERVING)
	wantProbe("503 the runtime prefers 00-other.conf")
	stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if after, err := os.ReadFile(c.path()); err != nil || !bytes.Equal(after, content) {
		t.Errorf("after the end: %s, %v", after, err)
	}
	for _, want := range []string{"host ports do not work", "CNI configuration written", "rename or remove it"} {
		if strings.Count(log.String(), want) != 1 {
			t.Errorf("the log does not say %q once:\n%s", want, log)
		}
	}
}

func TestForeignConfigurationIsLeftAlone(t *testing.T) {
	p, err := instance.New("")
	if err != nil {
		t.Fatal(err)
	}
	for _, foreign := range []string{
		"", "{", "{}", `{"plugins":[]}`, `{"plugins":[{"type":"bridge"}]}`,
		`{"plugins":[{"type":"sluice-cni","runDir":"/run/sluice-b"}]}`,
		`{"plugins":[{"type":"bridge"},{"type":"sluice-cni","runDir":"/run/sluice"}]}`,
	} {
		c := configuration{directory: t.TempDir(), name: "05-sluice.conflist", paths: p}
		nodetest.Write(t, c.directory, c.name, foreign)
		if _, err := c.write(); !errors.Is(err, errForeign) {
			t.Errorf("%s: written over, %v", foreign, err)
		}
		if _, err := c.remove(); !errors.Is(err, errForeign) {
			t.Errorf("%s: removed, %v", foreign, err)
		}
		if got, err := os.ReadFile(c.path()); err != nil || string(got) != foreign {
			t.Errorf("%s became %s, %v", foreign, got, err)
		}
	}
}

// TestTranslatingDatapathOpensPorts: a datapath that translates services opens host ports even if the portmap plugin
// is installed.
func TestTranslatingDatapathOpensPorts(t *testing.T) {
	n := nodetest.New(t)
	n.Balances = true
	p, err := instance.New("")
	if err != nil {
		t.Fatal(err)
	}
	c := configuration{directory: t.TempDir(), name: "05-sluice.conflist", plugins: t.TempDir(), paths: p}
	nodetest.Write(t, c.plugins, "portmap", "")
	log := &written{}
	inv := &invocation.Invocation{RunDir: n.RunDir, Timeout: 10 * time.Second, ErrOut: log}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- serve(ctx, inv, c, "off") }()
	want := c
	want.translates = true
	servicetest.EventuallyNil(t, "the file", func() error {
		if content, err := os.ReadFile(c.path()); err != nil || !bytes.Equal(content, want.content()) {
			return fmt.Errorf("%s, %w, want\n%s", content, err, want.content())
		}
		return nil
	})
	stop()
	if err := <-done; err != nil || strings.Contains(log.String(), "does nothing") ||
		!strings.Contains(log.String(), `"hostPort":"sluice"`) {
		t.Errorf("%v\n%s", err, log)
	}
}

// statuses counts the GetStatus calls of a datapath.
type statuses struct {
	grpc.ClientConnInterface
	asked int
}

func (s *statuses) Invoke(ctx context.Context, method string, in, out any, o ...grpc.CallOption) error {
	if method == datapathv1.DatapathService_GetStatus_FullMethodName {
		s.asked++
	}
	return s.ClientConnInterface.Invoke(ctx, method, in, out, o...)
}

// TestDatapathIsAskedAgainAfterItWasAway, but not in every check, because GetStatus reads all maps.
func TestDatapathIsAskedAgainAfterItWasAway(t *testing.T) {
	n := nodetest.New(t)
	p, err := instance.New("")
	if err != nil {
		t.Fatal(err)
	}
	inv := &invocation.Invocation{RunDir: n.RunDir, Timeout: 10 * time.Second}
	w := &writer{
		configuration: configuration{
			directory: t.TempDir(), name: "05-sluice.conflist", plugins: t.TempDir(), paths: p,
		},
		services: map[string]grpc.ClientConnInterface{}, timeout: inv.Timeout, log: log.Discard(),
	}
	for _, service := range needed {
		conn, err := inv.Dial(service)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		w.services[service] = conn
	}
	datapath := &statuses{ClientConnInterface: w.services["datapath"]}
	w.services["datapath"] = datapath
	look := func(good bool, asked int) {
		t.Helper()
		if err := w.check(t.Context()); (err == nil) != good || datapath.asked != asked {
			t.Errorf("a look: %v, after %d questions, want %d", err, datapath.asked, asked)
		}
	}
	for range 3 {
		look(true, 1)
	}
	n.Health["datapath"].SetServingStatus("", grpc_health_v1.HealthCheckResponse_NOT_SERVING)
	look(false, 1)
	n.Health["datapath"].SetServingStatus("", grpc_health_v1.HealthCheckResponse_SERVING)
	for range 3 {
		look(true, 2)
	}
	w.asked = time.Now().Add(-askAgain)
	look(true, 3)
}

// TestConfigurationIsTheDeployedOne: the node writes the CNI configuration of deploy/cni if the datapath translates
// services; otherwise the portmap plugin, if installed, opens host ports.
func TestConfigurationIsTheDeployedOne(t *testing.T) {
	p, err := instance.New("")
	if err != nil {
		t.Fatal(err)
	}
	c := configuration{directory: t.TempDir(), name: "05-sluice.conflist", plugins: t.TempDir(), paths: p}
	deployed, err := os.ReadFile(filepath.Join("..", "..", "..", "..", "deploy", "cni", "10-sluice.conflist"))
	if err != nil {
		t.Fatal(err)
	}
	var have, want map[string]any
	c.translates = true
	if err := errors.Join(json.Unmarshal(c.content(), &have), json.Unmarshal(deployed, &want)); err != nil {
		t.Fatal(err)
	}
	if fmt.Sprint(have) != fmt.Sprint(want) {
		t.Errorf("the configuration is\n%v\nwant\n%v", have, want)
	}
	c.translates, have = false, nil
	if err := json.Unmarshal(c.content(), &have); err != nil {
		t.Fatal(err)
	}
	capabilities := want["plugins"].([]any)[0].(map[string]any)["capabilities"].(map[string]any)
	if capabilities["portMappings"] != true {
		t.Errorf("the deployed configuration has the capabilities %v", capabilities)
	}
	delete(capabilities, "portMappings")
	if fmt.Sprint(have) != fmt.Sprint(want) {
		t.Errorf("the configuration is\n%v\nwant\n%v", have, want)
	}
	nodetest.Write(t, c.plugins, "portmap", "")
	if changed, err := c.write(); err != nil || !changed {
		t.Fatal(changed, err)
	}
	var n network
	if content, err := c.read(); err != nil || json.Unmarshal(content, &n) != nil || len(n.Plugins) != 2 ||
		!strings.Contains(string(n.Plugins[1]), `"portMappings"`) {
		t.Errorf("with portmap: %s, %v", content, err)
	}
	if changed, err := c.write(); err != nil || changed {
		t.Errorf("once more: %v, %v", changed, err)
	}
}
