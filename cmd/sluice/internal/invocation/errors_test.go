// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package invocation

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/rpc/client"
	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
)

func TestNodesThatWereMeantAreNamed(t *testing.T) {
	run := t.TempDir()
	for _, name := range []string{"sluice-dev/dev.json", "sluice-lab/cluster.json", "sluice-lab-1/dev.json", "sluice/x"} {
		path := filepath.Join(run, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, nil, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	for instance, want := range map[string]string{
		"":       "There are development nodes: --instance dev, --instance lab-1.\n",
		"nosuch": "There are development nodes: --instance dev, --instance lab-1.\n",
		"lab":    "There are development nodes: --instance lab-1.\n",
		"dev":    "",
	} {
		if got := otherNodes(run, instance); got != want {
			t.Errorf("for %q: %q, want %q", instance, got, want)
		}
	}
}

func TestASocketThatMayNotBeOpenedIsExplained(t *testing.T) {
	c := &Invocation{RunDir: "/run/x"}
	got := c.explain(&client.AbsentError{Socket: "/run/x/ipam/ipam.sock", Err: &net.OpError{
		Op: "dial", Net: "unix", Addr: &net.UnixAddr{Name: "/run/x/ipam/ipam.sock", Net: "unix"},
		Err: os.NewSyscallError("connect", syscall.EACCES),
	}})
	want := "dial unix /run/x/ipam/ipam.sock: connect: permission denied\nBe root, or a member of group 65700."
	if got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// TestCallForRootIsExplainedAsOne: a caller that the socket accepted is already in the group, so the hint must say that
// the call requires root.
func TestCallForRootIsExplainedAsOne(t *testing.T) {
	c := &Invocation{RunDir: "/run/x"}
	got := c.explain(status.Error(codes.PermissionDenied,
		"uid 65534 may not call /sluice.policy.v1.PolicyService/UpsertPolicies"))
	if !strings.Contains(got, "uid 65534 may not call") || !strings.HasSuffix(got, "\n"+rootOnly) ||
		strings.Contains(got, WhoMay) {
		t.Errorf("got %q", got)
	}
}

// TestReasonOfAServiceIsShown: an error from a service is not reported as a service that does not answer.
func TestReasonOfAServiceIsShown(t *testing.T) {
	err := fmt.Errorf("apply: %w", rpcerr.New(codes.Unavailable,
		rpcerr.Reason{Domain: "policy.sluice.io", Name: "STORAGE_FAILED"},
		fmt.Errorf("storage: %w", syscall.ENOSPC)))
	var out bytes.Buffer
	c := &Invocation{RunDir: "/run/x", ErrOut: &out}
	c.complain(err)
	if got := out.String(); !strings.Contains(got, "no space left on device\n") ||
		!strings.Contains(got, "policy.sluice.io/STORAGE_FAILED") || strings.Contains(got, "Does it run") {
		t.Errorf("text is %q, want the service's, and its reason", got)
	}
	out.Reset()
	c.Format = "json"
	c.complain(err)
	var got object
	if err := json.Unmarshal(out.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	want := object{
		Error: got.Error, Code: "UNAVAILABLE", Reason: "STORAGE_FAILED", Domain: "policy.sluice.io",
		Metadata: map[string]string{"errno": "ENOSPC"},
	}
	if !reflect.DeepEqual(got, want) || !strings.Contains(got.Error, "no space left on device") {
		t.Errorf("object is %+v, want %+v", got, want)
	}
}
