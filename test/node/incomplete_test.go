// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/rpc/client"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	"github.com/sluice-net/sluice/test/internal/cni"
)

// TestKernelAnswersNameTheFileOfPoliciesThatIsNotRead starts a node for the first time with an unreadable policy file.
// ADD fails with code 11, and after a minute STATUS fails with code 50; both messages contain the file. Both calls
// succeed once the file is readable.
func TestKernelAnswersNameTheFileOfPoliciesThatIsNotRead(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := filepath.Join(dir, "broken.yaml")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil { //nolint:gosec // readable by the user of the service
			t.Fatal(err)
		}
	}
	write("kind: [\n")
	n := newNode(t, func(o *devnode.Options) {
		o.PolicyDir = dir
		o.Waits = func(ctx context.Context, socket string) bool { // the node serves no ADD before
			conn, err := client.Dial(socket, client.Options{Timeout: patience})
			if err != nil {
				return false
			}
			defer conn.Close()
			st, err := policyv1.NewPolicyServiceClient(conn).GetStatus(ctx, &policyv1.GetStatusRequest{})
			return err == nil && len(st.GetWaitingFor()) > 0
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	defer cancel()

	n.datapathStatus(t) // it answers now
	pod := newPod(t, "pod")
	_, err := n.call(ctx, "ADD", pod, n.config(t, "1.1.0", map[string]any{"timeout": "5s"}))
	var refused *cni.Error
	if !errors.As(err, &refused) || refused.Code != 11 {
		t.Fatalf("ADD: %v, want code 11", err)
	}
	wantAll(t, "ADD", refused.Message+" "+refused.Details, "broken.yaml")

	status := func() *cni.Error {
		t.Helper()
		_, err := n.call(ctx, "STATUS", pod, n.config(t, "1.1.0", nil))
		var answer *cni.Error
		if err != nil && !errors.As(err, &answer) {
			t.Fatalf("STATUS: %v", err)
		}
		return answer
	}
	if answer := status(); answer != nil {
		t.Errorf("STATUS at once: %v, want none: an ADD may work soon", answer)
	}
	since := filepath.Join(n.Paths().RunDir, "cni-unable")
	ago := time.Now().Add(-61 * time.Second)
	if err := os.Chtimes(since, ago, ago); err != nil {
		t.Fatal(err)
	}
	answer := status()
	if answer == nil || answer.Code != 50 {
		t.Fatalf("STATUS after a minute: %v, want code 50", answer)
	}
	wantAll(t, "STATUS", answer.Message+" "+answer.Details, "broken.yaml")
	wantAll(t, "sluice status", command(t, "sluice", "--instance", n.Instance(), "status"), "broken.yaml")

	write("apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: p, namespace: shop}\n" +
		"spec: {podSelector: {}}\n")
	added := n.add(t, pod, n.config(t, "1.1.0", nil))
	if answer := status(); answer != nil {
		t.Errorf("STATUS with a file that can be read: %v", answer)
	}
	n.del(t, added)
}
