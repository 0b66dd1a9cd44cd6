// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
	"github.com/sluice-net/sluice/kit/servicetest"
	ipamv1 "github.com/sluice-net/sluice/proto/gen/sluice/ipam/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/test/internal/cni"
)

// smallDisk puts the state of a service on a separate file system, which fill fills completely.
func (n *testNode) smallDisk(t *testing.T, service string) (fill func()) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	defer cancel()
	if err := n.Stop(ctx, service); err != nil {
		t.Fatal(err)
	}
	dir := n.Paths().ServiceStateDir(service)
	var owner unix.Stat_t
	if err := unix.Stat(dir, &owner); err != nil {
		t.Fatal(err)
	}
	aside := t.TempDir()
	if out, err := exec.CommandContext(ctx, "cp", "-a", dir+"/.", aside).CombinedOutput(); err != nil {
		t.Fatalf("copy %s: %v: %s", dir, err, out)
	}
	options := fmt.Sprintf("size=8m,mode=0700,uid=%d,gid=%d", owner.Uid, owner.Gid)
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, options); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	if out, err := exec.CommandContext(ctx, "cp", "-a", aside+"/.", dir).CombinedOutput(); err != nil {
		t.Fatalf("copy %s back: %v: %s", dir, err, out)
	}
	if err := n.Start(ctx, service); err != nil {
		t.Fatal(err)
	}
	return func() {
		t.Helper()
		filler, err := os.Create(filepath.Join(dir, "filler"))
		if err != nil {
			t.Fatal(err)
		}
		defer filler.Close()
		for size := 1 << 20; size > 0; size /= 2 {
			for err = nil; err == nil; {
				_, err = filler.Write(make([]byte, size))
			}
			if !errors.Is(err, unix.ENOSPC) {
				t.Fatal(err)
			}
		}
	}
}

// command runs a program of the build, which must fail, and returns its output.
func command(t *testing.T, name string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	out, err := exec.CommandContext(ctx, filepath.Join(binDir(), name), args...).CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		t.Fatalf("%s %q: %v, want it to fail: %s", name, args, err, out)
	}
	return string(out)
}

// grpcurl calls a method with a message that makes the call fail.
func (n *testNode) grpcurl(t *testing.T, service, method string, message any) string {
	t.Helper()
	data, err := json.Marshal(message)
	if err != nil {
		t.Fatal(err)
	}
	return command(t, "tools/grpcurl", "-plaintext", "-unix", "-authority", "localhost", "-d", string(data),
		n.Socket(service), method)
}

func wantAll(t *testing.T, where, text string, want ...string) {
	t.Helper()
	for _, w := range want {
		if !strings.Contains(text, w) {
			t.Errorf("%s does not say %q:\n%s", where, w, text)
		}
	}
}

// confirmed allocates addresses to an owner and confirms the lease.
func (n *testNode) confirmed(ctx context.Context, owner *workloadv1.Owner) error {
	lease, err := n.ipam.Allocate(ctx, &ipamv1.AllocateRequest{Owner: owner})
	if err != nil {
		return err
	}
	var addresses []string
	for _, a := range lease.GetAllocation().GetAddresses() {
		addresses = append(addresses, a.GetAddress())
	}
	_, err = n.ipam.ConfirmAllocation(ctx, &ipamv1.ConfirmAllocationRequest{Owner: owner, Addresses: addresses})
	return err
}

// TestKernelOneErrorIsTheSameEverywhere causes an ENOSPC in ipam and checks the error wherever an operator or a runtime
// sees it: from ipam itself and from the datapath. It does the same for an ENOSPC in policy and the command line. Code,
// reason, details and text must be the same everywhere.
func TestKernelOneErrorIsTheSameEverywhere(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	fillIPAM, fillPolicy := n.smallDisk(t, devnode.IPAM), n.smallDisk(t, devnode.Policy)
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	defer cancel()

	// One pod already has its lease, so its ADD fails one step later.
	leased, pod := newPod(t, "leased"), newPod(t, "pod")
	owner := &workloadv1.Owner{ContainerId: leased.Name, InterfaceName: "eth0"}
	lease, err := n.ipam.Allocate(ctx, &ipamv1.AllocateRequest{Owner: owner})
	if err != nil {
		t.Fatal(err)
	}
	fillIPAM()
	var full error
	for i := 0; full == nil && i < 200; i++ {
		// A lease is only in memory; its confirmation must be on disk.
		full = n.confirmed(ctx, &workloadv1.Owner{ContainerId: fmt.Sprintf("%0100d", i), InterfaceName: "eth0"})
	}
	reason := ipamv1.ErrorReason_ERROR_REASON_STORAGE_FAILED
	if status.Code(full) != codes.Unavailable || !rpcerr.Is(full, reason) || rpcerr.Facts(full)["errno"] != "ENOSPC" {
		t.Fatalf("ipam on a full disk: %v with %v, want UNAVAILABLE, %s and ENOSPC", full, status.Convert(full).Details(),
			rpcerr.Of(reason))
	}
	delay, ok := rpcerr.RetryDelay(full)
	if !ok || delay <= 0 {
		t.Errorf("ipam's error has no retry delay: %v", status.Convert(full).Details())
	}
	db := filepath.Join(n.Paths().ServiceStateDir(devnode.IPAM), "state.db")
	const words = "no space left on device"
	wantAll(t, "ipam's text", status.Convert(full).Message(), db, words)

	details := []string{
		"Code: Unavailable", words, `"@type": "type.googleapis.com/google.rpc.ErrorInfo"`, `"reason": "STORAGE_FAILED"`,
		`"domain": "ipam.sluice.io"`, `"errno": "ENOSPC"`, fmt.Sprintf(`"retryDelay": "%.3fs"`, delay.Seconds()),
	}
	wantAll(t, "grpcurl of ipam", n.grpcurl(t, devnode.IPAM, "sluice.ipam.v1.IPAMService/Allocate", map[string]any{
		"owner": map[string]string{"container_id": pod.Name, "interface_name": "eth0"},
	}), details...)

	var addresses []string
	for _, a := range lease.GetAllocation().GetAddresses() {
		addresses = append(addresses, a.GetAddress())
	}
	wantAll(t, "grpcurl of the datapath", n.grpcurl(t, devnode.Datapath,
		"sluice.datapath.v1.DatapathService/CreateEndpoint", map[string]any{
			"owner":             map[string]string{"container_id": leased.Name, "interface_name": "eth0"},
			"network_namespace": leased.Netns, "addresses": addresses,
		}), append(details, "confirm the lease: ipam: unavailable: ")...)

	_, err = n.call(ctx, "ADD", pod, n.config(t, "1.0.0", map[string]any{"timeout": "2s"}))
	var refused *cni.Error
	if !errors.As(err, &refused) || refused.Code != 11 {
		t.Fatalf("ADD: %v, want code 11", err)
	}
	wantAll(t, "the plugin's msg", refused.Message, "allocate addresses: Unavailable: ", words)
	wantAll(t, "the plugin's details", refused.Details, "reason ipam.sluice.io/STORAGE_FAILED errno=ENOSPC",
		"sluice status")
	wantAll(t, "sluice status", command(t, "sluice", "--instance", n.Instance(), "status"), "sluice-ipam", words)

	fillPolicy()
	manifests := filepath.Join(t.TempDir(), "policies.yaml")
	var text bytes.Buffer
	for i := range 500 {
		fmt.Fprintf(&text, "---\napiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: p%d, namespace: shop, annotations: {a: %s}}\nspec: {podSelector: {}}\n",
			i, strings.Repeat("x", 1000))
	}
	if err := os.WriteFile(manifests, text.Bytes(), fs.FileMode(0o600)); err != nil {
		t.Fatal(err)
	}
	apply := []string{"--instance", n.Instance(), "policy", "apply", "-f", manifests}
	wantAll(t, "sluice policy apply", command(t, "sluice", apply...), words, "policy.sluice.io/STORAGE_FAILED")
	out := command(t, "sluice", append(apply, "-o", "json")...)
	var object struct {
		Error, Code, Reason, Domain string
		Metadata                    map[string]string
	}
	if err := json.Unmarshal([]byte(out), &object); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if want := rpcerr.Of(policyv1.ErrorReason_ERROR_REASON_STORAGE_FAILED); object.Code != "UNAVAILABLE" ||
		object.Reason != want.Name ||
		object.Domain != want.Domain || object.Metadata["errno"] != "ENOSPC" || !strings.Contains(object.Error, words) {
		t.Errorf("sluice policy apply -o json says %+v, want UNAVAILABLE, %s and ENOSPC", object, want)
	}

	if err := os.Remove(filepath.Join(n.Paths().ServiceStateDir(devnode.IPAM), "filler")); err != nil {
		t.Fatal(err)
	}
	servicetest.EventuallyNil(t, "ipam writes again", func() error {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := n.ipam.Release(ctx, &ipamv1.ReleaseRequest{Owner: owner})
		return err
	})
}
