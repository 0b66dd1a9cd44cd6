// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"bytes"
	"context"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/servicetest"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// exampleClient is a program of examples/, called as in docs/use-without-cni.md.
type exampleClient struct {
	n       *testNode
	command []string
	env     []string
}

// repository returns the root of the sources.
func repository(t *testing.T) string {
	t.Helper()
	root, err := filepath.Abs(filepath.Join("..", ".."))
	if err != nil {
		t.Fatal(err)
	}
	return root
}

// goClient builds examples/go as a separate module, as a reader does.
func goClient(t *testing.T, n *testNode) exampleClient {
	t.Helper()
	program := filepath.Join(publicDir(t), "client")
	build := exec.CommandContext(t.Context(), "go", "build", "-o", program, ".")
	build.Dir = filepath.Join(repository(t), "examples", "go")
	build.Env = append(os.Environ(), "GOWORK=off", "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build examples/go: %v: %s", err, out)
	}
	return exampleClient{n: n, command: []string{program}}
}

// pythonClient generates the modules that examples/python imports with Debian's protoc, as its header comment
// describes.
func pythonClient(t *testing.T, n *testNode) exampleClient {
	t.Helper()
	root, modules := repository(t), publicDir(t)
	args := []string{
		"--proto_path=proto", "--proto_path=third_party/protovalidate",
		"--python_out=" + modules, "--grpc_python_out=" + modules,
		"--plugin=protoc-gen-grpc_python=/usr/bin/grpc_python_plugin", "buf/validate/validate.proto",
	}
	err := fs.WalkDir(os.DirFS(filepath.Join(root, "proto")), "sluice", func(path string, _ fs.DirEntry, err error) error {
		if filepath.Ext(path) == ".proto" {
			args = append(args, path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	protoc := exec.CommandContext(t.Context(), "protoc", args...) //nolint:gosec // arguments of the test's own
	protoc.Dir = root
	if out, err := protoc.CombinedOutput(); err != nil {
		t.Fatalf("generate Python modules: %v: %s", err, out)
	}
	// Another user runs the program, who may be unable to enter a directory of the checkout.
	program := filepath.Join(modules, "client.py")
	copyProgram(t, filepath.Join(root, "examples", "python", "client.py"), program)
	return exampleClient{
		n: n, command: []string{"/usr/bin/python3", program},
		env: []string{"PYTHONPATH=" + modules, "PYTHONDONTWRITEBYTECODE=1"},
	}
}

// publicDir returns a directory that every user may enter, until the end of the test.
func publicDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/run", "sluice-guide-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	if err := os.Chmod(dir, 0o755); err != nil { //nolint:gosec // read by another user
		t.Fatal(err)
	}
	return dir
}

func (c exampleClient) cmd(ctx context.Context, args ...string) *exec.Cmd {
	all := slices.Concat(c.command, []string{"-run-dir", c.n.Paths().RunDir}, args)
	cmd := exec.CommandContext(ctx, all[0], all[1:]...) //nolint:gosec // a program of the test's own
	cmd.Env = append(os.Environ(), c.env...)
	return cmd
}

// run executes a command of the client, which must succeed, and returns the printed words.
func (c exampleClient) run(t *testing.T, args ...string) []string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	defer cancel()
	cmd := c.cmd(ctx, args...)
	var errors bytes.Buffer
	cmd.Stderr = &errors
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("client %q: %v: %s%s", args, err, out, &errors)
	}
	return strings.Fields(string(out))
}

// refused executes a command that must fail with the words.
func (c exampleClient) refused(t *testing.T, credential *syscall.Credential, words string, args ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	defer cancel()
	cmd := c.cmd(ctx, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: credential}
	out, err := cmd.CombinedOutput()
	text := strings.ToLower(strings.ReplaceAll(string(out), "_", ""))
	if err == nil || !strings.Contains(text, strings.ToLower(words)) {
		t.Errorf("client %q: %v: %s; want it to fail with %q", args, err, out, words)
	}
}

// connect connects a new pod.
func (c exampleClient) connect(t *testing.T, prefix string, labels ...string) pod.Pod {
	t.Helper()
	p := newPod(t, prefix)
	got := c.run(t, slices.Concat([]string{"connect", p.Netns, p.Name}, labels)...)
	if len(got) != 5 || got[0] != "connected" || got[1] != p.Name+"/eth0" {
		t.Fatalf("connect says %q, want owner, identity and two addresses", got)
	}
	return p.WithAddresses(parseAll(t, got[3:]))
}

// watch runs `client watch`, and returns a function that waits for a line.
func (c exampleClient) watch(t *testing.T) (await func(line string)) {
	t.Helper()
	var mu sync.Mutex
	var printed bytes.Buffer
	ctx, cancel := context.WithCancel(t.Context())
	cmd := c.cmd(ctx, "watch")
	cmd.Stdout = writerFunc(func(p []byte) (int, error) {
		mu.Lock()
		defer mu.Unlock()
		return printed.Write(p)
	})
	cmd.Stderr = cmd.Stdout
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cancel()
		_ = cmd.Wait() // the exit status does not matter
	})
	return func(line string) {
		t.Helper()
		servicetest.EventuallyNil(t, "watch prints "+line, func() error {
			mu.Lock()
			defer mu.Unlock()
			if !strings.Contains("\n"+printed.String(), "\n"+line) {
				return fmt.Errorf("it printed:\n%s", &printed)
			}
			return nil
		})
	}
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// TestKernelExampleClientsConnectWithoutCNI runs the steps of docs/use-without-cni.md with the Go and the Python
// client. Pods exchange data, a policy is enforced and follows label changes, and a watch survives a restart of the
// datapath. Neither failed commands nor the end of the steps leave anything behind.
func TestKernelExampleClientsConnectWithoutCNI(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	for name, client := range map[string]func(*testing.T, *testNode) exampleClient{
		"go": goClient, "python": pythonClient,
	} {
		t.Run(name, func(t *testing.T) { client(t, n).tour(t) })
		n.wantNothingHeld(t)
	}
}

func (c exampleClient) tour(t *testing.T) {
	n := c.n
	await := c.watch(t)
	web := c.connect(t, "web", "app=web")
	client := c.connect(t, "client", "app=client")
	await("endpoint " + client.Name + "/eth0 ")
	exchange(t, web, client)

	// Repeating a call with the same content returns the same answer. With other content it is refused, and nothing
	// changes.
	again := c.run(t, "connect", web.Netns, web.Name, "app=web")
	if got := web.WithAddresses(parseAll(t, again[3:])); got.IPv4 != web.IPv4 || got.IPv6 != web.IPv6 {
		t.Errorf("connected again it has %v, had %v", got.Addresses(), web.Addresses())
	}
	c.refused(t, nil, "already exists", "connect", web.Netns, web.Name, "app=other")
	exchange(t, web, client)

	// A failed connect leaves nothing, in particular no address.
	c.refused(t, nil, "network namespace is gone", "connect", "/run/netns/"+name(t, "none"), "none", "app=none")
	if held, err := n.holdings(t.Context()); err != nil || strings.Contains(strings.Join(held, " "), " of none") {
		t.Errorf("after a connect that failed: %v, %v", held, err)
	}
	// Members of the group may read, but not change anything.
	c.refused(t, &syscall.Credential{Uid: 65534, Gid: 65700}, "permissiondenied", "disconnect", web.Name)

	manifest := filepath.Join(repository(t), "examples", "web-policy.yaml")
	serve(t, web, 8080)
	wantAllowed(t, client, web, 8080)
	c.run(t, "policies", manifest)
	flows := n.observe(t, &datapathv1.ObserveRequest{Reasons: []datapathv1.Reason{policyDenied}})
	n.wantDenied(t, flows, client, web, 8080)
	c.run(t, "label", client.Name, "app=client", "friend=yes")
	wantAllowed(t, client, web, 8080)
	// An empty list must be confirmed with -none.
	c.refused(t, nil, "say -none", "policies")
	n.wantDenied(t, flows, c.connect(t, "stranger", "app=client"), web, 8080)

	// If a pod's namespace disappears while the datapath is down, the datapath removes the pod.
	lost := c.connect(t, "lost", "app=lost")
	await("endpoint " + lost.Name + "/eth0 ")
	if err := n.Kill(t.Context(), devnode.Datapath); err != nil {
		t.Fatal(err)
	}
	if err := pod.DeleteNetns(lost.Netns); err != nil {
		t.Fatal(err)
	}
	if err := pod.NewNetns(lost.Netns); err != nil { // so that the test's cleanup finds it
		t.Fatal(err)
	}
	if err := n.Start(t.Context(), devnode.Datapath); err != nil {
		t.Fatal(err)
	}
	await("removed " + lost.Name + "/eth0")
	c.run(t, "disconnect", client.Name)
	await("removed " + client.Name + "/eth0")
	c.run(t, "disconnect", client.Name)

	if got := c.run(t, "reclaim", web.Name); !slices.Equal(got, []string{"reclaimed", "1"}) {
		t.Errorf("reclaim says %q, want the stranger reclaimed", got)
	}
	if e := n.endpoint(t, web); e.GetManager() != "example" {
		t.Errorf("the endpoint that stays has the manager %q", e.GetManager())
	}
	c.run(t, "-none", "policies")
	c.run(t, "-none", "reclaim")
	await("removed " + web.Name + "/eth0")
}

// TestClientsSayWhatTheyWaitFor: a client that waits for a socket prints what it waits for. Otherwise the only sign
// of a wrong run directory would be a delay of 30 seconds.
func TestClientsSayWhatTheyWaitFor(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		client func(*testing.T, *testNode) exampleClient
		after  string // the time after which the client gives up
	}{"Go": {goClient, "2s"}, "Python": {pythonClient, "2"}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c, dir := tt.client(t, nil), publicDir(t)
			all := slices.Concat(c.command, []string{"-run-dir", dir, "-timeout", tt.after, "disconnect", "c"})
			cmd := exec.CommandContext(t.Context(), all[0], all[1:]...) //nolint:gosec // a program of the test's own
			cmd.Env = append(os.Environ(), c.env...)
			out, err := cmd.CombinedOutput()
			first, _, _ := strings.Cut(string(out), "\n")
			if err == nil || !strings.Contains(first, "waiting for") || !strings.Contains(first, dir) {
				t.Errorf("%v: %s; want the first line to say what it waits for below %s", err, out, dir)
			}
		})
	}
}
