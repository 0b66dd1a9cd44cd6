// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"context"
	"encoding/json"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/sluice-net/sluice/test/internal/cni"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// cnitool runs libcni's own command line for one network and namespace.
type cnitool struct {
	t       *testing.T
	confDir string
	plugins string
	// cache is private, so that a test neither reads nor leaves other results.
	cache string
}

func (c cnitool) run(ctx context.Context, verb, netns string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, filepath.Join(binDir(), "tools", "cnitool"), verb, "sluice", netns)
	cmd.Env = append(os.Environ(),
		"NETCONFPATH="+c.confDir, "CNI_PATH="+c.plugins, "CNI_IFNAME=eth0",
		`CAP_ARGS={"labels":[{"key":"app","value":"cnitool"}]}`,
		"XDG_CACHE_HOME="+c.cache)
	return cmd.CombinedOutput()
}

// hostAddress is the node's address on the pods' side: the first usable one of
// the pod's IPv4 range.
func hostAddress(p pod.Pod) netip.Addr {
	return netip.PrefixFrom(p.IPv4, 24).Masked().Addr().Next()
}

// TestKernelLibcniSpeaksEveryVersionAndVerb drives the shim through libcni, in
// each version of the specification and with each verb that the version has.
func TestKernelLibcniSpeaksEveryVersionAndVerb(t *testing.T) {
	n := newNode(t)
	for _, version := range []string{"0.3.1", "0.4.0", "1.0.0", "1.1.0"} {
		t.Run(version, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			tool := cnitool{t: t, confDir: t.TempDir(), plugins: filepath.Dir(n.Plugin()), cache: t.TempDir()}
			list, err := cni.List(n.CNIConflist(), version)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(tool.confDir, "10-sluice.conflist"), list, 0o600); err != nil {
				t.Fatal(err)
			}
			p := newPod(t, "cnitool")
			other := newPod(t, "cnitool")
			must := func(verb string, p pod.Pod) []byte {
				t.Helper()
				out, err := tool.run(ctx, verb, p.Netns)
				if err != nil {
					t.Fatalf("cnitool %s: %v\n%s", verb, err, out)
				}
				return out
			}
			result := must("add", p)
			var parsed struct {
				Version string `json:"cniVersion"`
			}
			if err := json.Unmarshal(result, &parsed); err != nil || parsed.Version != version {
				t.Errorf("result has version %q (%v), want %q:\n%s", parsed.Version, err, version, result)
			}
			a := withAddresses(t, p, result)
			b := withAddresses(t, other, must("add", other))
			exchange(t, a, b)
			if version != "0.3.1" {
				must("check", p)
			}
			if version == "1.1.0" {
				must("status", p)
			}
			must("del", p)
			must("del", p)
			if version != "0.3.1" {
				if out, err := tool.run(ctx, "check", p.Netns); err == nil {
					t.Errorf("cnitool check after del succeeded: %s", out)
				}
			}
			if version == "1.1.0" {
				// GC with the attachments that libcni's cache still has: the
				// other pod stays.
				must("gc", other)
				if _, _, err := b.Ping(ctx, hostAddress(b)); err != nil {
					t.Errorf("after GC the pod that was listed as valid lost its network: %v", err)
				}
			}
			must("del", other)
		})
	}
	n.wantNothingHeld(t)
}
