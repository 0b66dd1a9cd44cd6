// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package overview

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/kubernetes/kubectl"
)

// TestCiliumObjectsWithoutEffectAreWarnings: policies and kinds that Cilium itself writes are left out. If the
// API server does not answer, a warning says that the objects are not known.
func TestCiliumObjectsWithoutEffectAreWarnings(t *testing.T) {
	const kinds = "ciliumegressgatewaypolicies  cegp  cilium.io/v2  false  CiliumEgressGatewayPolicy\n" +
		"ciliumnetworkpolicies  cnp,ciliumnp  cilium.io/v2  true  CiliumNetworkPolicy\n" +
		"ciliumnodes  cn  cilium.io/v2  false  CiliumNode\n" +
		"ciliumlocalredirectpolicies  clrp  cilium.io/v2  true  CiliumLocalRedirectPolicy\n" +
		"ciliumenvoyconfigs  cilium.io/v2  true  CiliumEnvoyConfig\n"
	for _, c := range []struct {
		what, script string
		want         []string
	}{
		{"no kinds of Cilium", "exit 0", nil},
		{"an API server that does not answer", "echo 'refused' >&2; exit 1", []string{
			"not known whether objects of cilium.io exist, which have no effect: refused (exit code 1)",
		}},
		{"kinds", `case "$*" in
"api-resources --api-group=cilium.io --no-headers") printf '` + strings.ReplaceAll(kinds, "\n", `\n`) + `' ;;
*/v2/ciliumegressgatewaypolicies?limit=1) echo '{"metadata":{"remainingItemCount":2},"items":[{"spec":{}}]}' ;;
*/v2/ciliumlocalredirectpolicies?limit=1) echo '{"metadata":{},"items":[]}' ;;
*/v2/ciliumenvoyconfigs?limit=1) echo 'forbidden' >&2; exit 1 ;;
*) echo "unexpected $*" >&2; exit 2 ;;
esac`, []string{
			"3 objects of kind CiliumEgressGatewayPolicy, which Sluice does not implement: no effect",
			"not known whether objects of kind CiliumEnvoyConfig exist, which have no effect: forbidden (exit code 1)",
		}},
	} {
		client := &kubectl.Client{}
		client.Flags(pflag.NewFlagSet("", pflag.ContinueOnError), &invocation.Invocation{Timeout: time.Minute})
		client.Program = filepath.Join(t.TempDir(), "kubectl")
		script := "#!/bin/sh\n" + c.script + "\n"
		if err := os.WriteFile(client.Program, []byte(script), 0o700); err != nil { //nolint:gosec // executable
			t.Fatal(err)
		}
		if got := ineffective(t.Context(), client); !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", c.what, got, c.want)
		}
	}
	s := clusterStatus{Warnings: []string{"3 objects of kind X: no effect"}}
	s.assess(kubectl.Cluster{})
	if lines := s.lines(); !s.Ready || !slices.Equal(lines, []string{"Warning: 3 objects of kind X: no effect"}) {
		t.Errorf("ready %t, %q", s.Ready, lines)
	}
}
